"""Adding, swapping and breaking normalization on models of many shapes; old weights still load."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.measures import participation_ratio
from sounding.models import Mlp
from sounding.repair import add_batchnorm, add_batchnorm_, break_batchnorm_, swap_normalization, swap_normalization_
from tolerance import TOLERANCE


class Functional(nn.Module):
    """Activations as functions, one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.shared(torch.relu(self.shared(x))))
        result: Tensor = self.last(x)
        return result


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (32, 6), ["0"], "BatchNorm1d"),
    "tokens": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)),
        (8, 5, 6),
        ["0"],
        "FeatureBatchNorm",
    ),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        (8, 3, 9, 9),
        ["0"],
        "BatchNorm2d",
    ),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3)),
        (8, 3, 9),
        ["0"],
        "BatchNorm1d",
    ),
    "functional": (Functional, (32, 6), ["first", "shared"], "BatchNorm1d"),
}


@pytest.mark.parametrize("name", MODELS)
def test_added_batch_norm_normalizes_what_follows_each_linear_map_but_the_last(name: str) -> None:
    make, shape, changed, kind = MODELS[name]
    model = make()
    inputs = torch.randn(shape, generator=draw(0))
    old = model.state_dict()
    normed = add_batchnorm(model, inputs)
    assert type(normed) is type(model)
    found = {module: type(normed.get_submodule(f"{module}.norm")).__name__ for module in changed}
    assert set(found.values()) == {kind}
    first = normed.get_submodule(changed[0])
    output = first(inputs).detach()
    axes = [axis for axis in range(output.dim()) if axis != (1 if "conv" in name else output.dim() - 1)]
    torch.testing.assert_close(output.mean(axes), torch.zeros(8), rtol=0, atol=TOLERANCE.float32_layer)
    torch.testing.assert_close(output.var(axes, correction=0), torch.ones(8), rtol=TOLERANCE.three_digits, atol=0)
    result = normed.load_state_dict(old, strict=False)
    assert not result.unexpected_keys
    assert {key.rsplit(".", 2)[-2] for key in result.missing_keys} == {"norm"}
    assert torch.equal(pickle.loads(pickle.dumps(normed))(inputs), normed(inputs))


def test_layers_that_have_a_norm_are_left_and_a_second_time_adds_nothing() -> None:
    model = Mlp(6, 3, depth=3, width=8, norm="batch")
    changes = add_batchnorm_(model, torch.randn(16, 6))
    assert not changes.changed
    assert [left.reason for left in changes.untouched[:3]] == ["a norm follows it already"] * 3
    plain = Mlp(6, 3, depth=3, width=8)
    assert len(add_batchnorm_(plain, torch.randn(16, 6)).changed) == 3
    assert not add_batchnorm_(plain, torch.randn(16, 6)).changed


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_other_kinds_can_be_added(kind: str) -> None:
    model = Mlp(6, 3, depth=2, width=8)
    add_batchnorm_(model, torch.randn(16, 6), kind=kind)  # type: ignore[arg-type]
    output = model.get_submodule("1.linear")(torch.randn(16, 6)).detach()
    torch.testing.assert_close(output.square().mean(1), torch.ones(16), rtol=TOLERANCE.percent, atol=0)
    with pytest.raises(UsageError, match="'none'"):
        add_batchnorm_(model, torch.randn(16, 6), kind="none")


KINDS = ("batch", "layer", "rms")


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(KINDS, 2)))
@pytest.mark.parametrize("name", ["mlp", "tokens", "conv", "conv1d"])
def test_every_swap_and_back_runs_and_keeps_the_scale(name: str, first: str, second: str) -> None:
    make, shape, _, _ = MODELS[name]
    inputs = torch.randn(shape, generator=draw(0))
    model = add_batchnorm(make(), inputs, kind=first)  # type: ignore[arg-type]
    norm = model.get_submodule("0.norm")
    nn.init.uniform_(norm.weight, 0.5, 1.5, generator=draw(1))  # type: ignore[arg-type]
    there = swap_normalization(model, kind=second)  # type: ignore[arg-type]
    back = swap_normalization(there, kind=first)  # type: ignore[arg-type]
    assert torch.isfinite(there(inputs)).all()
    torch.testing.assert_close(
        back(inputs), model(inputs), rtol=TOLERANCE.float32_forward, atol=TOLERANCE.float32_layer
    )


def test_swapping_to_none_removes_every_norm() -> None:
    model = Mlp(6, 3, depth=2, width=8, norm="batch")
    changes = swap_normalization_(model, kind="none")
    assert len(changes.changed) == 2
    assert not any(isinstance(module, nn.BatchNorm1d) for module in model.modules())
    with pytest.raises(UsageError, match="with none"):
        swap_normalization_(model, kind="batch")


def test_filters_and_unknown_kinds() -> None:
    model = Mlp(6, 3, depth=2, width=8, norm="batch")
    changes = swap_normalization_(model, kind="layer", include="1.*")
    assert [change.name for change in changes.changed] == ["1.norm"]
    assert [left.name for left in changes.untouched] == ["2.norm"]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match="unknown normalization"):
        swap_normalization_(model, kind="group")  # type: ignore[arg-type]
    assert before.keys() == model.state_dict().keys()


def test_one_sided_weights_collapse_the_rank_in_spite_of_batch_norm() -> None:
    """rank2020, section 4: the control, against the default initialization, over seeds."""
    ratios = []
    for seed in range(4):
        model = Mlp(64, 10, depth=30, width=64, norm="batch", init="torch", generator=draw(seed))
        trunk = nn.Sequential(*list(model.children())[:-1])
        inputs = torch.randn(64, 64, generator=draw(seed + 10))
        with torch.no_grad():
            before = participation_ratio(trunk(inputs))
            break_batchnorm_(model, generator=draw(seed + 20))
            ratios.append(float(participation_ratio(trunk(inputs)) / before))
    values = torch.tensor(ratios)
    assert float(values.mean() + 2 * values.std() / 2) < 0.5
    assert float(model.get_submodule("1.linear").weight.detach().min()) >= 0  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    "cure",
    [
        lambda model, x: add_batchnorm_(model, x, kind="rms"),
        lambda model, _: swap_normalization_(model, kind="rms"),
        lambda model, _: swap_normalization_(model, kind="none"),
    ],
)
def test_an_encoder_of_torch_runs_its_new_norms_in_evaluation_too(cure: Callable[[nn.Module, Tensor], object]) -> None:
    """Its fused path would read the weights of the layers and pass by what stands in their place."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2), torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(0))
    cure(model, x)
    trained = model.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval()(x), trained, rtol=TOLERANCE.float32_forward, atol=TOLERANCE.float32_forward
        )
