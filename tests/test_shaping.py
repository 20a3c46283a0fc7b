"""Shaped activations: exact wrappers and folds, an exponent from a measured law, and gradients that stay bounded."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.models import Mlp
from sounding.repair import haar_, shape_activations, shape_activations_
from sounding.repair.shaping import ExplosionLaw, PreGain, explosion_law, gains, is_homogeneous
from sounding.repair.snapshot import take_snapshot
from tolerance import TOLERANCE, assert_within_standard_errors


class Sine(nn.Module):
    """An activation of the user's own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Centre(nn.Module):
    """No activation: it mixes samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(activation: Callable[[], nn.Module] = nn.Tanh, depth: int = 4) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(8, 8), nn.BatchNorm1d(8), activation()]
    return nn.Sequential(*layers, nn.Linear(8, 3))


def mean_and_error(values: list[float]) -> tuple[float, float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    return float(tensor.mean()), float(tensor.std() / math.sqrt(len(values)))


def gradient_slope(model: Mlp, inputs: Tensor, cotangent: Tensor) -> float:
    """Least-squares slope over the whole depth of ln‖gradient at a layer's output‖, positive towards the input."""
    outputs: list[Tensor] = []
    hidden = list(model.children())[:-1]
    handles = [layer.register_forward_hook(lambda _, __, output: outputs.append(output)) for layer in hidden]
    loss = (model(inputs) * cotangent).sum()
    for handle in handles:
        handle.remove()
    logs = torch.stack([g.double().norm().log() for g in torch.autograd.grad(loss, outputs)])
    layers = torch.arange(len(logs), dtype=torch.float64)
    layers -= layers.mean()
    return -float((layers * logs).sum() / (layers * layers).sum())


def slope_of(activation: str, seed: int, *, exponent: float | None) -> float:
    model = Mlp(100, 10, depth=200, width=100, activation=activation, norm="batch", generator=draw(seed))
    inputs = torch.randn(100, 100, generator=draw(seed + 100))
    haar_(model, generator=draw(seed + 200))
    if exponent is not None:
        shape_activations_(model, inputs, exponent=exponent)
    return gradient_slope(model, inputs, torch.randn(100, 10, generator=draw(seed + 300)))


def test_depth_200_keeps_its_gradients_when_linear_or_shaped_and_not_otherwise() -> None:
    """thesis2024, Theorem 6.5 and figure 6.5: batch norm, Haar weights, 200 layers."""
    exponent = explosion_law("tanh", generator=draw(7)).exponent()
    for activation, shaping in (("identity", None), ("tanh", exponent)):
        slope, error = mean_and_error([slope_of(activation, seed, exponent=shaping) for seed in range(3)])
        assert abs(slope) + TOLERANCE.standard_errors * error < 0.005
    slope, error = mean_and_error([slope_of("tanh", seed, exponent=None) for seed in range(3)])
    assert slope - TOLERANCE.standard_errors * error > 0.05


def test_the_measured_exponent_of_tanh_is_near_the_published_one() -> None:
    """thesis2024 figure 6.5 takes 0.4; margins from 1 to 1.2 on the measured law bracket it."""
    laws = [explosion_law("tanh", generator=draw(seed)) for seed in range(4)]
    power, error = mean_and_error([law.c2 for law in laws])
    assert_within_standard_errors(1.1 / power, 0.4, error * 1.1 / power**2, allowance=0.05)
    assert all(law.window[0] < 0.5 < law.window[1] for law in laws)
    assert all(law.floor.value < law.rates[0][1].value / 5 for law in laws)


def test_a_law_of_given_gains_states_its_window_and_bends_between_windows() -> None:
    """The erratum: c₂ depends on the window. tanh departs from the line as x³, so that small gains fall faster."""
    high = explosion_law("tanh", gains=(1.0, 0.7), width=64, batch_size=64, depth=80, generator=draw(1))
    low = explosion_law("tanh", gains=(0.5, 0.35), width=64, batch_size=64, depth=80, generator=draw(1))
    assert (high.window, low.window) == ((0.7, 1.0), (0.35, 0.5))
    assert low.c2 - high.c2 > math.hypot(low.stderr, high.stderr)
    assert f"{high.window[0]:.3g} to" in str(high)


def test_a_plateau_counts_so_that_gelu_gets_a_steeper_gain_than_tanh() -> None:
    gelu = explosion_law("gelu", generator=draw(2))
    assert gelu.window[0] < 0.2
    assert gelu.exponent() > explosion_law("tanh", generator=draw(2)).exponent()


@pytest.mark.parametrize("activation", ["relu", "leaky_relu:0.2", "identity", nn.ReLU(), torch.abs])
def test_no_gain_holds_a_homogeneous_activation(activation: str | Callable[[Tensor], Tensor]) -> None:
    assert is_homogeneous(activation)
    with pytest.raises(UsageError, match="homogeneous"):
        explosion_law(activation)


@pytest.mark.parametrize("gain_list", [(1.0,), (1.0, 0.0), (1.0, math.nan), (0.5, 0.5)])
def test_gains_that_cannot_be_fitted_are_refused(gain_list: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="positive gains"):
        explosion_law("tanh", gains=gain_list)


def test_a_given_law_sets_the_exponent() -> None:
    law = explosion_law("tanh", width=32, batch_size=32, generator=draw(0))
    model = network()
    changes = shape_activations_(model, torch.randn(16, 8), law=law, margin=1.5)
    assert changes.settings["exponent"] == 1.5 / law.c2
    with pytest.raises(UsageError, match="margin above 1"):
        law.exponent(1.0)


def test_the_chosen_exponent_is_a_setting_that_makes_the_same_network_again() -> None:
    model, inputs = network(), torch.randn(16, 8)
    twin = copy.deepcopy(model)
    changes = shape_activations_(model, inputs, generator=draw(3))
    shape_activations_(twin, inputs, **changes.settings)
    assert torch.equal(model(inputs), twin(inputs))
    assert "tanh" in changes.notes[0]


@pytest.mark.parametrize("how", ["wrap", "fold"])
def test_gains_multiply_what_each_activation_receives_and_names_stay(how: str) -> None:
    model, inputs = network(), torch.randn(16, 8)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.weight, generator=draw(1))
            nn.init.normal_(module.bias, generator=draw(2))
    shaped = shape_activations(model, inputs, exponent=0.7, how=how)  # type: ignore[arg-type]
    expected = inputs
    for index, module in enumerate(model):
        layer = index // 3 + 1
        expected = torch.tanh(layer**-0.7 * expected) if isinstance(module, nn.Tanh) else module(expected)
    torch.testing.assert_close(shaped(inputs), expected, rtol=TOLERANCE.float32_forward, atol=TOLERANCE.float32)
    assert shaped.state_dict().keys() == model.state_dict().keys()


def test_shaped_models_can_be_copied_pickled_and_reloaded() -> None:
    model, inputs = network(), torch.randn(16, 8)
    shape_activations_(model, inputs, exponent=0.4)
    expected = model(inputs)
    assert torch.equal(copy.deepcopy(model)(inputs), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(inputs), expected)
    fresh = shape_activations(network(), inputs, exponent=0.4)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(inputs), expected)


def test_restoring_a_snapshot_takes_the_gains_off() -> None:
    model, inputs = network(), torch.randn(16, 8)
    before = model(inputs)
    snapshot = take_snapshot(model)
    shape_activations_(model, inputs, exponent=0.4)
    assert not torch.equal(model(inputs), before)
    snapshot.restore()
    assert torch.equal(model(inputs), before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_activations_of_the_users_own_are_shaped_and_other_modules_are_not() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), Sine(), Centre(), nn.Dropout(0.1), nn.Softmax(-1), nn.Linear(8, 8), nn.GELU()
    )
    changes = shape_activations_(model, torch.randn(16, 8), exponent=0.5)
    assert [change.name for change in changes.changed] == ["1", "6"]
    assert list(model[6]._forward_pre_hooks.values()) == [PreGain(gains(2, 0.5)[1])]


def test_a_shared_activation_can_be_folded_but_not_wrapped() -> None:
    shared = nn.Tanh()
    model, inputs = network(lambda: shared), torch.randn(16, 8)
    with pytest.raises(UsageError, match="serves 4 layers"):
        shape_activations_(model, inputs, exponent=0.5)
    changes = shape_activations_(model, inputs, exponent=0.5, how="fold")
    assert [change.name for change in changes.changed] == ["1", "4", "7", "10"]
    assert [float(model[index].weight.detach()[0]) for index in (1, 4, 7, 10)] == pytest.approx(gains(4, 0.5))


def test_what_is_left_alone_is_named_with_its_reason() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    changes = shape_activations_(model, torch.randn(4, 8), exponent=1.0, exclude="5")
    assert [(change.name, change.after) for change in changes.changed] == [("3", "0.5")]
    assert {left.name: left.reason.split(":")[0] for left in changes.untouched} == {
        "1": "it is positively homogeneous",
        "5": "left out by the name filter",
    }


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Sequential(nn.Linear(8, 8)), {}, "functional"),
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU()), {}, "homogeneous"),
        (nn.Sequential(nn.Linear(8, 8), nn.Tanh()), {"exponent": -1.0}, "not negative"),
        (nn.Sequential(nn.Linear(8, 8), nn.Tanh()), {"exponent": 0.4, "how": "glue"}, "'wrap' or 'fold'"),
        (nn.Sequential(nn.Linear(8, 8), nn.Tanh()), {"exponent": 0.4, "how": "fold"}, "cannot be folded"),
    ],
)
def test_what_cannot_be_shaped_is_refused(model: nn.Module, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shape_activations_(model, torch.randn(4, 8), **options)  # type: ignore[arg-type]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_records_are_frozen() -> None:
    law = explosion_law("tanh", width=32, batch_size=32, generator=draw(0))
    assert isinstance(law, ExplosionLaw)
    with pytest.raises(AttributeError):
        law.c2 = 1.0  # type: ignore[misc]
