"""A run in a stack goes the way it would go alone: every optimizer, loss and route, every number that may differ."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from runs import assert_same, both, largest_difference, make_conv, make_data, make_images, make_mlp, numbers_of, seeded
from sounding.errors import UsageError
from sounding.models import Transformer
from sounding.repair import shape_activations_, swap_normalization_
from sounding.train import Recipe, Residual, train_, train_together_, vmapped
from sounding.train.vmapped import Vmapped, multiply_patches_
from tolerance import TOLERANCE

OPTIMIZERS = {"sgd": 0.1, "momentum": 0.05, "adam": 0.01, "rmsprop": 0.01}


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("clipping", [None, 0.02])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("route", ["products", "vmap"])
def test_a_stacked_perceptron_goes_the_way_it_goes_alone(route, optimizer, clipping, loss) -> None:
    """Batch norm without biases before it: their gradient is rounding only, which Adam would blow up to full steps."""
    rate = OPTIMIZERS[optimizer]
    recipe = Recipe(
        optimizer=optimizer,
        loss=loss,
        clipping=clipping,
        batch_size=16,
        epochs=2,
        weight_decay=0.01,
        statistics="running",
    )
    networks = [make_mlp(seed, norm="batch", bias=False) for seed in range(3)]
    assert_same(*both(networks, make_data(), [rate, rate / 3, 2 * rate], recipe, route=route, group_size=2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("loss", "clipping"), [("cross_entropy", None), ("mse", 0.05)])
def test_a_stacked_convolution_goes_the_way_it_goes_alone(optimizer, loss, clipping) -> None:
    rate = OPTIMIZERS[optimizer]
    recipe = Recipe(optimizer=optimizer, loss=loss, clipping=clipping, batch_size=12, epochs=2)
    networks = [make_conv(seed) for seed in range(3)]
    assert_same(*both(networks, make_images(), [rate, rate / 3, 2 * rate], recipe, group_size=3))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": (3, 2), "stride": (2, 1), "bias": False},
        {"kernel_size": (1, 3), "dilation": (1, 2), "padding": (0, 2)},
        {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2},
    ],
    ids=str,
)
def test_a_convolution_of_patches_is_a_convolution(options, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients of a stack, as of a wide one on a GPU, beside those of each network alone."""
    monkeypatch.setattr(vmapped, "WIDE", 5)
    networks = [nn.Sequential(seeded_convolution(seed, options)) for seed in range(3)]
    stack = Vmapped(networks, torch.device("cpu"))
    multiply_patches_(stack._skeleton[0])
    inputs = torch.randn(3, 4, 2, 7, 8, dtype=torch.float64, generator=seeded(9))
    outputs, _ = stack.run(inputs, "batch", own=True)
    gradients = torch.autograd.grad(outputs.square().sum(), stack.parameters)
    for run, network in enumerate(networks):
        wanted = network(inputs[run])
        alone = torch.autograd.grad(wanted.square().sum(), list(network.parameters()))
        torch.testing.assert_close(outputs[run], wanted, rtol=TOLERANCE.two_routes, atol=TOLERANCE.two_routes)
        for mine, theirs in zip(gradients, alone, strict=True):
            torch.testing.assert_close(mine[run], theirs, rtol=TOLERANCE.two_routes, atol=TOLERANCE.two_routes)
    with torch.no_grad():
        torch.testing.assert_close(stack.run(inputs, "batch", own=True)[0], outputs)


def seeded_convolution(seed: int, options: dict) -> nn.Conv2d:
    torch.manual_seed(seed)
    return nn.Conv2d(2, 5, **options).double()


@pytest.mark.parametrize("statistics", ["running", "batch"])
@pytest.mark.parametrize(
    "options",
    [
        {"norm": "none"},
        {"norm": "layer", "placement": "after"},
        {"norm": "rms", "activation": "tanh"},
        {"norm": "layer", "affine": False},
        {"norm": "batch", "centring": False, "momentum": 0.3},
        {"norm": "batch", "affine": False, "running": False},
        {"norm": "batch", "placement": "after", "activation": "gelu"},
        {"norm": "batch", "residual": 0.3, "gain_exponent": 0.5, "bias": False},
        {"norm": "batch", "activation": "leaky_relu:0.1", "momentum": 1.0},
    ],
    ids=str,
)
def test_every_kind_of_perceptron_stacks(options, statistics) -> None:
    recipe = Recipe(batch_size=16, epochs=2, statistics=statistics)
    networks = [make_mlp(seed, **options) for seed in range(2)]
    for route in ("products", "vmap"):
        assert_same(*both(networks, make_data(), [0.1, 0.02], recipe, route=route))


@pytest.mark.parametrize("route", ["products", "vmap"])
@pytest.mark.parametrize(
    "options",
    [
        ({"eps": 1e-5}, {"eps": 0.5}),
        ({"eps": 1e-5, "momentum": 0.1}, {"eps": 0.1, "momentum": 0.7}),
        ({"scale": 1.0, "shift": 0.0}, {"scale": 0.3, "shift": 2.0}),
        ({"residual": 0.1}, {"residual": 2.0}),
        ({"init": "he"}, {"init": "haar"}),
        ({"gain_exponent": 0.5}, {"gain_exponent": 1.5}),
        ({"centring": False, "eps": 1e-3}, {"centring": False, "eps": 1.0}),
    ],
    ids=str,
)
def test_runs_may_differ_in_numbers(route, options) -> None:
    """eps, momentum, β, γ of the norm, γ of the skip connection, the weights, the gains."""
    networks = [make_mlp(0, norm="batch", **each) for each in options]
    assert_same(*both(networks, make_data(), [0.1, 0.1], Recipe(batch_size=16, epochs=2), route=route))


def test_images_with_norms_of_different_eps_stack() -> None:
    networks = [make_conv(0, eps=eps, momentum=momentum) for eps, momentum in ((1e-5, 0.1), (0.5, 0.4))]
    assert_same(*both(networks, make_images(), [0.1, 0.1], Recipe(batch_size=12, epochs=2)))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_layer_and_rms_norms_of_different_eps_stack_by_vmap(kind) -> None:
    networks = [make_mlp(0, norm=kind, eps=eps) for eps in (1e-5, 0.5)]
    assert_same(*both(networks, make_data(), [0.1, 0.1], Recipe(batch_size=16, epochs=1), route="vmap"))


def test_a_transformer_stacks() -> None:
    networks = [Transformer((4, 5), 3, depth=2, width=8, heads=2, generator=seeded(seed)).double() for seed in range(2)]
    inputs = torch.randn(48, 4, 5, generator=seeded(), dtype=torch.float64)
    labels = torch.randint(3, (48,), generator=seeded(1))
    assert_same(*both(networks, (inputs, labels), [0.1, 0.03], Recipe(batch_size=12, epochs=2)))


def test_residual_blocks_and_cured_networks_stack_as_products() -> None:
    """Hooks that shape an activation, and norms that a cure put behind a linear map."""

    def block(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        branch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        return nn.Sequential(nn.Linear(6, 8), Residual(branch), nn.Tanh(), nn.Linear(8, 3)).double()

    inputs = make_data()[0]
    networks = [block(seed) for seed in range(2)]
    for network, exponent in zip(networks, (0.3, 0.9), strict=True):
        shape_activations_(network, inputs, exponent=exponent, include="2")
    assert_same(*both(networks, make_data(), [0.1, 0.03], Recipe(batch_size=16, epochs=1), route="products"))
    normed = [make_mlp(seed, norm="batch") for seed in range(2)]
    for network in normed:
        swap_normalization_(network, kind="rms")
    assert_same(*both(normed, make_data(), [0.1, 0.03], Recipe(batch_size=16, epochs=1), route="products"))


@pytest.mark.parametrize("sampling", ["shuffle", "replacement", "fixed"])
@pytest.mark.parametrize("metrics", ["evaluated", "seen"])
def test_both_ways_see_the_same_batches(sampling, metrics) -> None:
    recipe = Recipe(batch_size=20, steps=11, evaluate=(0, 3, 11), sampling=sampling, train_metrics=metrics)
    stacked, together, alone, apart = both([make_mlp(0), make_mlp(1)], make_data(), [0.1, 0.05], recipe)
    for run in range(2):
        assert [point.step for point in together.curve(run)] == [0, 3, 11]
        for mine, theirs in zip(together.curve(run), apart[run].curve(0), strict=True):
            assert numbers_of(mine) == pytest.approx(numbers_of(theirs), rel=TOLERANCE.two_routes, nan_ok=True)
        assert largest_difference(stacked[run], alone[run]) < TOLERANCE.two_routes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("route", ["products", "vmap"])
def test_a_diverged_run_is_masked_and_disturbs_no_other(route, optimizer) -> None:
    """Run 1 starts with weights that overflow at once; its neighbours end bit for bit as without it."""
    recipe = Recipe(optimizer=optimizer, batch_size=16, epochs=2, clipping=0.1, weight_decay=0.01)
    healthy = [make_mlp(seed, norm="batch", bias=False) for seed in (0, 2)]
    broken = make_mlp(1, norm="batch", bias=False)
    with torch.no_grad():
        broken.readout.weight.fill_(math.inf)
    before = copy.deepcopy(broken)
    three = [copy.deepcopy(healthy[0]), broken, copy.deepcopy(healthy[1])]
    history = train_together_(
        three, make_data(), learning_rates=[0.05] * 3, recipe=recipe, generator=seeded(), route=route, group_size=3
    )
    assert history.diverged == (None, 1, None)
    for parameter, kept in zip(broken.parameters(), before.parameters(), strict=True):
        assert torch.equal(parameter, kept)
    assert all(math.isnan(point.train_loss) and math.isnan(point.test_accuracy) for point in history.curve(1))
    alone = [copy.deepcopy(network) for network in healthy]
    for network in alone:
        train_(network, make_data(), learning_rate=0.05, recipe=recipe, generator=seeded())
    for mine, theirs in zip((three[0], three[2]), alone, strict=True):
        assert largest_difference(mine, theirs) < TOLERANCE.two_routes
        assert all(bool(torch.isfinite(parameter).all()) for parameter in mine.parameters())


def test_a_run_that_diverges_in_the_middle_is_frozen_where_its_loss_was_lost() -> None:
    """Alone and stacked name the same step and keep the same weights; a huge rate overflows within a few steps."""
    recipe = Recipe(batch_size=16, epochs=3, loss="mse")
    networks = [make_mlp(seed) for seed in range(3)]
    stacked, together, alone, apart = both(networks, make_data(), [0.1, 1e40, 0.05], recipe, group_size=3)
    assert together.diverged[1] is not None
    assert together.diverged[1] > 1
    assert together.diverged == tuple(history.diverged[0] for history in apart)
    for run in (0, 2):
        assert largest_difference(stacked[run], alone[run]) < TOLERANCE.two_routes


def test_a_learning_rate_of_zero_changes_nothing_but_running_statistics() -> None:
    network = make_mlp(0, norm="batch")
    before = copy.deepcopy(network)
    train_together_([network], make_data(), learning_rates=[0.0], recipe=Recipe(batch_size=16, epochs=1))
    for mine, kept in zip(network.parameters(), before.parameters(), strict=True):
        assert torch.equal(mine, kept)
    assert not torch.equal(network[0].norm.running_mean, before[0].norm.running_mean)


def test_frozen_parameters_stay() -> None:
    networks = [make_mlp(seed, norm="batch") for seed in range(2)]
    for network in networks:
        network[0].linear.weight.requires_grad_(False)
    kept = networks[0][0].linear.weight.clone()
    stacked, together, alone, apart = both(networks, make_data(), [0.1, 0.1], Recipe(batch_size=16, epochs=1))
    assert torch.equal(stacked[0][0].linear.weight, kept)
    assert_same(stacked, together, alone, apart)


def test_group_size_changes_rounding_only() -> None:
    recipe = Recipe(batch_size=16, epochs=2, optimizer="momentum")
    ends = []
    for size in (1, 2, 5):
        networks = [make_mlp(seed, norm="batch") for seed in range(5)]
        train_together_(
            networks, make_data(), learning_rates=[0.05] * 5, recipe=recipe, generator=seeded(), group_size=size
        )
        ends.append(networks)
    for others in ends[1:]:
        assert max(largest_difference(a, b) for a, b in zip(ends[0], others, strict=True)) < TOLERANCE.two_routes


def test_the_same_seed_gives_the_same_bits() -> None:
    histories = []
    for _ in range(2):
        networks = [make_mlp(seed, norm="batch") for seed in range(3)]
        histories.append(
            train_together_(
                networks,
                make_data(),
                learning_rates=[0.1] * 3,
                recipe=Recipe(batch_size=16, epochs=2),
                generator=seeded(),
            )
        )
    assert histories[0] == histories[1]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), "dropout"),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, momentum=None)), "momentum=None"),
        (lambda: Functional(), "cannot be trained as a stack"),
    ],
)
def test_what_does_not_stack_is_refused(make, says) -> None:
    with pytest.raises(UsageError, match=says):
        train_together_(
            [make().double(), make().double()],
            make_data(),
            learning_rates=[0.1, 0.1],
            recipe=Recipe(batch_size=16, steps=2),
        )


class Functional(nn.Module):
    """Dropout that no module shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x), training=self.training)


@pytest.mark.parametrize(
    ("networks", "rates", "says"),
    [
        (list, [], "at least one network"),
        (lambda: [make_mlp(0)], [0.1, 0.2], "learning rates"),
        (lambda: [make_mlp(0)], [math.nan], "finite"),
        (lambda: [make_mlp(0)], [-0.1], "not negative"),
        (lambda: [make_mlp(0), make_mlp(0, width=9)], [0.1, 0.1], "one architecture"),
        (lambda: [make_mlp(0), make_mlp(0, activation="tanh")], [0.1, 0.1], "same modules"),
        (lambda: [make_mlp(0), make_mlp(0).float()], [0.1, 0.1], "float32"),
        (lambda: [make_mlp(0)] * 2, [0.1, 0.1], "share weights"),
        (lambda: ["mlp"], [0.1], "torch.nn.Module"),
    ],
)
def test_runs_that_do_not_fit_together_are_refused(networks, rates, says) -> None:
    with pytest.raises(UsageError, match=says):
        train_together_(networks(), make_data(), learning_rates=rates, recipe=Recipe(batch_size=16, steps=2))
