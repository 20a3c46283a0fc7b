"""Runs of a stack with an order of the samples each: every one goes the way it goes alone with that order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from runs import assert_same, both, make_conv, make_data, make_images, make_mlp, seeded
from sounding.data import Augmentation
from sounding.errors import InterruptedRun, UsageError
from sounding.train import Recipe, make_grid, train_, train_together_

ORDERS = [5, 6, 5]  # the first and the last run share one


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("route", ["products", "vmap"])
@pytest.mark.parametrize("group_size", [2, 3])
def test_perceptrons_with_orders_of_their_own(route, optimizer, loss, group_size) -> None:
    recipe = Recipe(optimizer=optimizer, loss=loss, batch_size=16, epochs=2, clipping=0.05, train_metrics="seen")
    networks = [make_mlp(seed, norm="batch", bias=False) for seed in range(3)]
    rates = [0.01, 0.02, 0.05]
    assert_same(*both(networks, make_data(), rates, recipe, orders=ORDERS, route=route, group_size=group_size))


@pytest.mark.parametrize("augment", [None, Augmentation(padding=1)])
def test_images_with_orders_and_crops_of_their_own(augment) -> None:
    recipe = Recipe(batch_size=12, epochs=2, augment=augment)
    networks = [make_conv(seed, eps=0.1 * (seed + 1)) for seed in range(3)]
    assert_same(*both(networks, make_images(), [0.1, 0.05, 0.1], recipe, orders=ORDERS, group_size=3))


def test_images_of_a_perceptron_with_orders_of_their_own() -> None:
    """Inputs of four axes with that of the runs: what is flattened are the samples."""
    images, labels = make_images()
    networks = [nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.ReLU(), nn.Linear(4, 3)).double() for _ in range(2)]
    recipe = Recipe(batch_size=12, epochs=1)
    assert_same(*both(networks, (images, labels), [0.1, 0.1], recipe, orders=[1, 2], route="products"))


def test_real_targets_with_orders_of_their_own() -> None:
    inputs, *_ = make_data()
    targets = inputs @ torch.randn(6, 3, generator=seeded(3), dtype=torch.float64)
    recipe = Recipe(loss="mse", batch_size=16, epochs=2)
    networks = [make_mlp(seed) for seed in range(3)]
    assert_same(*both(networks, (inputs, targets), [0.05] * 3, recipe, orders=ORDERS, group_size=2))


def test_orders_make_runs_of_the_same_weights_differ() -> None:
    networks = [make_mlp(0) for _ in range(3)]
    orders = [seeded(1), seeded(2), seeded(1)]
    recipe = Recipe(batch_size=16, epochs=1)
    history = train_together_(networks, make_data(), learning_rates=[0.1] * 3, recipe=recipe, generator=orders)
    losses = [history.final(run).train_loss for run in range(3)]
    assert losses[0] == losses[2] != losses[1]
    assert history.record["seed"] == [1, 2, 1]


def test_a_resumed_run_with_orders_of_its_own_ends_in_the_same_bits(tmp_path) -> None:
    recipe = Recipe(optimizer="momentum", batch_size=16, epochs=3)

    def run(**options):
        networks = [make_mlp(seed, norm="batch") for seed in range(3)]
        orders = [seeded(seed) for seed in options.pop("orders", (1, 2, 3))]
        given = {"learning_rates": [0.05] * 3, "recipe": recipe, "generator": orders, "group_size": 2}
        return networks, train_together_(networks, make_data(), **given, **options)

    def stop(progress) -> None:
        if progress.step >= 6:
            raise KeyboardInterrupt

    whole, expected = run()
    with pytest.raises(InterruptedRun):
        run(checkpoint=tmp_path / "run", progress=stop)
    with pytest.raises(UsageError, match="another run"):
        run(checkpoint=tmp_path / "run", orders=(1, 2, 4))
    resumed, history = run(checkpoint=tmp_path / "run")
    assert history == expected
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_an_interval_over_seeds_needs_their_orders() -> None:
    """Runs of one order move together: the mean over them scatters more than their own scatter says."""
    recipe = Recipe(batch_size=8, steps=30, evaluate="end")
    data, runs, repeats = make_data(samples=400), 6, 12
    ratios = {}
    for own in (False, True):
        means, variances = [], []
        for repeat in range(repeats):
            networks = [make_mlp(100 * repeat + run, depth=1, width=64) for run in range(runs)]
            orders = [seeded(1000 * repeat + run) for run in range(runs)] if own else seeded(1000 * repeat)
            history = train_together_(networks, data, learning_rates=[0.3] * runs, recipe=recipe, generator=orders)
            losses = [history.final(run).test_loss for run in range(runs)]
            means.append(np.mean(losses))
            variances.append(np.var(losses, ddof=1) / runs)
        ratios[own] = np.var(means, ddof=1) / np.mean(variances)
    # F with 11 and 60 degrees of freedom: 1 is expected of independent runs, above 3 one in a thousand
    assert ratios[True] < 3 < ratios[False]


def test_a_grid_has_an_order_for_each_seed() -> None:
    grid = make_grid("mlp", learning_rates=[0.1, 1.0], seeds=[3, -8], vary={"shift": [0.0, 2.0]}, norm="batch", depth=2)
    orders = grid.orders(7)
    assert [orders.index(order) for order in orders] == [0, 0, 2, 2, 0, 0, 2, 2]
    states = {seed: make_grid("mlp", learning_rates=[0.1], depth=2).orders(seed)[0].initial_seed() for seed in (0, 1)}
    assert states[0] != states[1]


@pytest.mark.parametrize(
    ("generator", "says"),
    [([seeded()], "each of 2 networks, got 1"), ([0, 1], "got list"), (7, "got int"), ([seeded(), None], "got list")],
)
def test_generators_that_do_not_fit_are_refused(generator, says) -> None:
    networks = [make_mlp(seed) for seed in range(2)]
    recipe = Recipe(batch_size=16, steps=1)
    with pytest.raises(UsageError, match=says):
        train_together_(networks, make_data(), learning_rates=[0.1] * 2, recipe=recipe, generator=generator)
    with pytest.raises(UsageError, match=r"a torch\.Generator"):
        train_(networks[0], make_data(), learning_rate=0.1, recipe=recipe, generator=generator)
