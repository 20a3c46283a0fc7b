"""Tuned batch norm: what theory predicts is what a wide network does; and models theory does not describe."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.models import Mlp
from sounding.repair import tune_batchnorm_
from sounding.theory.batchnorm import batchnorm
from tolerance import TOLERANCE


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def log_growth(width: int, batch_size: int, seed: int, **settings: float) -> float:
    """ln of the growth per layer of the squared gradient norm in the bulk of a 40-layer ReLU network."""
    depth = 40
    model = Mlp(width, 10, depth=depth, width=width, norm="batch", generator=draw(seed))
    inputs = torch.randn(batch_size, width, generator=draw(seed + 100))
    tune_batchnorm_(model, inputs, **settings)
    outputs: list[Tensor] = []
    for layer in list(model.children())[:-1]:
        layer.register_forward_hook(lambda _, __, output: outputs.append(output))
    readout = model(inputs)
    cotangent = torch.randn(readout.shape, generator=draw(seed + 200))
    logs = [2 * math.log(float(g.double().norm())) for g in torch.autograd.grad((readout * cotangent).sum(), outputs)]
    first, last = depth // 4, depth - 5
    return (logs[first] - logs[last]) / (last - first)


def assert_grows_as_predicted(width: int, batch_size: int, seeds: int, **settings: float) -> None:
    predicted = batchnorm("relu", batch_size=batch_size, **settings).gradient_growth
    logs = torch.tensor([log_growth(width, batch_size, seed, **settings) for seed in range(seeds)])
    error = float(logs.std() / math.sqrt(seeds))
    assert TOLERANCE.standard_errors * error < 0.01, "the measurement is too noisy to show anything"
    assert abs(math.exp(float(logs.mean())) / predicted - 1) < 0.01


def test_tuned_relu_grows_as_predicted_within_one_percent() -> None:
    assert_grows_as_predicted(384, 32, 3, eps=0.68, shift=0.5)


@pytest.mark.slow
def test_wider_and_larger_batches_grow_as_predicted_too() -> None:
    assert_grows_as_predicted(768, 64, 10, eps=0.5, shift=2.0)
    assert_grows_as_predicted(768, 32, 10, shift=1.0)


def test_theory_chooses_settings_that_reach_the_depth_and_they_are_reported() -> None:
    model = Mlp(16, 3, depth=50, width=16, norm="batch", generator=draw(0))
    inputs = torch.randn(128, 16, generator=draw(1))
    changes = tune_batchnorm_(model, inputs)
    settings = {key: value for key, value in changes.settings.items() if key != "batch_size" and value is not None}
    assert batchnorm("relu", batch_size=128, **settings).trainable_depth >= 4 * 50
    twin = Mlp(16, 3, depth=50, width=16, norm="batch", generator=draw(0))
    tune_batchnorm_(twin, inputs, **changes.settings)
    assert torch.equal(model(inputs), twin(inputs))


def test_with_eps_the_weights_before_the_norms_get_variance_one_over_fan_in() -> None:
    """Theory's eps is against a pre-activation variance that He weights double."""
    model = Mlp(64, 3, depth=3, width=64, norm="batch", generator=draw(0))
    readout = model.get_submodule("readout").weight.detach().clone()  # type: ignore[operator, union-attr]
    tune_batchnorm_(model, torch.randn(32, 64), eps=0.5)
    for name in "123":
        weight = model.get_submodule(f"{name}.linear").weight  # type: ignore[union-attr]
        assert float(weight.detach().square().mean() * 64) == pytest.approx(1, rel=TOLERANCE.float32_forward)  # type: ignore[operator, union-attr]
    assert torch.equal(model.get_submodule("readout").weight, readout)  # type: ignore[arg-type]


def test_without_eps_weights_stay() -> None:
    model = Mlp(16, 3, depth=3, width=16, norm="batch", generator=draw(0))
    changes = tune_batchnorm_(model, torch.randn(32, 16), shift=1.0)
    assert {change.what for change in changes.changed} == {"bias"}
    assert model.get_submodule("2.norm").eps == 1e-5


def test_convolutions_count_positions_as_samples() -> None:
    """Batch norm of an image channel averages over samples and positions: 8 images of 4 × 4 are 128 values."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    changes = tune_batchnorm_(model, torch.randn(8, 3, 4, 4), shift=1.0)
    predicted = batchnorm("relu", batch_size=128, shift=1.0).gradient_growth
    assert f"×{predicted:.5g}" in changes.notes[-2]
    assert "positions" in changes.notes[-1]


def test_a_norm_without_scale_and_shift_is_named_and_keeps_its_eps_tuned() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.ReLU(), nn.Linear(8, 2))
    changes = tune_batchnorm_(model, torch.randn(16, 8), eps=0.5, shift=1.0)
    assert [(left.name, "affine=False" in left.reason) for left in changes.untouched] == [("1", True)]
    assert model[1].eps == 0.5


def test_several_activations_are_refused_until_a_filter_takes_one() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)
    )
    with pytest.raises(UsageError, match="relu after 1, tanh after 4"):
        tune_batchnorm_(model, torch.randn(16, 8), shift=1.0)
    tune_batchnorm_(model, torch.randn(16, 8), shift=1.0, include="1")
    assert float(model[1].bias.detach()[0]) == 1.0
    assert not model[4].bias.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"eps": -1.0}, "eps"), ({"scale": 0.0}, "scale"), ({"shift": math.nan}, "shift"), ({"margin": 0.0}, "margin")],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, float], message: str) -> None:
    model = Mlp(8, 2, depth=2, width=8, norm="batch")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=message):
        tune_batchnorm_(model, torch.randn(16, 8), **settings)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_unreachable_depth_says_what_else_to_try() -> None:
    model = Mlp(8, 2, depth=2, width=8, norm="batch")
    with pytest.raises(UsageError, match="trainable to"):
        tune_batchnorm_(model, torch.randn(16, 8), margin=1e9)


def test_a_model_without_batch_norm_is_refused() -> None:
    with pytest.raises(UsageError, match="BatchNorm"):
        tune_batchnorm_(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(16, 8))


def test_an_activation_that_is_a_function_is_read_and_not_taken_for_the_identity() -> None:
    """ReLU as a module and as a function have one prediction; the identity would be trainable to 1000 layers."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = torch.relu(norm(layer(x)))
            return x

    plain = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())))
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    assert tune_batchnorm_(Functional(), inputs).notes == tune_batchnorm_(plain, inputs).notes
