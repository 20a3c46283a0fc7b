"""Rows of orth2021: what they share between depths and variants, and how a gap is split."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from sounding.claims.claim import Context, judge
from sounding.claims.number import extreme_of
from sounding.claims.orth2021 import CLAIMS, convolutional, propagation, training
from sounding.errors import UsageError
from sounding.measures import orthogonality_gap

MLP = {
    "data": "digits", "width": 12, "batch_size": 50, "rates": [0.01], "seeds": 2, "init_samples": 200, "epochs": 1,
    "precision": "highest",
}  # fmt: skip
CONV = {
    "data": "digits", "depths": [3, 5], "width": 4, "batch_size": 30, "rate": 0.02, "steps": 10, "seeds": 2,
    "init_samples": 32, "plain": True,
}  # fmt: skip


def test_rows_are_complete() -> None:
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.statement
        assert claim.paper
        assert "quick" in claim.settings


@pytest.mark.parametrize("variant", ["iterative", "orthonormal", "released", "orthogonal"])
def test_a_shallow_network_is_the_beginning_of_a_deep_one(variant: str) -> None:
    context = Context(random_seed=3)
    deep, shallow = training.draw_networks(MLP, 5, context), training.draw_networks(MLP, 3, context)
    straight = copy.deepcopy(shallow)
    training.change_weights_(deep, MLP, variant, context)
    training.change_weights_(straight, MLP, variant, context)
    for one, two, three in zip(deep, shallow, straight, strict=True):
        cut = dict(training.shorten(one, two).named_parameters())
        for name, weight in three.named_parameters():
            torch.testing.assert_close(cut[name], weight, rtol=1e-5, atol=1e-8)


def test_convolutions_have_the_printed_scale_at_every_depth() -> None:
    context = Context(random_seed=1)
    found = convolutional.draw_variants(CONV, context)
    inputs = training.draw_inputs(CONV, CONV["init_samples"], context.generator(2000), context)
    for depth in (3, 5):
        network = found[depth, "iterative"][0]
        sizes: list[float] = []

        def note(module: torch.nn.Module, arguments: object, output: torch.Tensor, sizes: list[float] = sizes) -> None:
            sizes.append(float(output.norm()))

        for module in network.modules():
            if isinstance(module, torch.nn.Conv2d) and module.in_channels == module.out_channels:
                module.register_forward_hook(note)
        with torch.no_grad():
            network(inputs)
        assert len(sizes) == depth - 1
        assert sizes == pytest.approx([1.0] * len(sizes), rel=1e-4)


def test_the_interval_of_a_correlation_is_over_seeds() -> None:
    """Of 400 draws with a common part of each seed, the interval misses the correlation in about one of a hundred."""
    rng = np.random.default_rng(0)
    depth = np.arange(3.0)[:, None]
    found = []
    for _ in range(400):
        common = rng.standard_normal((1, 10))
        x, y = (depth + 0.5 * common + 0.7 * rng.standard_normal((3, 10)) for _ in range(2))
        found.append(training.jackknife_correlation(x, y))
    centre = np.tanh(np.mean([np.arctanh(number.value) for number in found]))
    assert sum(not number.low <= centre <= number.high for number in found) <= 16
    assert all(number.samples == 10 for number in found)


def test_seeds_have_orders_and_samples_of_their_own() -> None:
    context = Context(random_seed=2)
    orders = [torch.randperm(50, generator=generator).tolist() for generator in training.draw_orders(3, context)]
    assert len({tuple(order) for order in orders}) == 3
    batches = training.draw_batches(MLP, context)
    assert len(batches) == MLP["seeds"]
    assert not torch.equal(batches[0], batches[1])


def test_xavier_networks_of_figure_7_have_gain_root_two() -> None:
    network = convolutional.draw_network(CONV | {"width": 32}, 4, 0, Context())
    weight = [m.weight.detach() for m in network.modules() if isinstance(m, torch.nn.Conv2d)][2]
    fan = 32 * 9
    assert float(weight.std()) == pytest.approx(math.sqrt(2 * 2 / (2 * fan)), rel=0.05)


def test_the_gap_splits_into_angles_and_norms() -> None:
    rows = torch.randn(8, 20, generator=torch.Generator().manual_seed(0)).double() * torch.arange(1.0, 9.0)[:, None]
    gap, angles = (float(value) for value in propagation._parts(rows))
    assert gap == pytest.approx(float(orthogonality_gap(rows)), rel=1e-9)
    assert angles < gap
    orthogonal = torch.eye(8, 20, dtype=torch.float64) * torch.arange(1.0, 9.0)[:, None]
    gap, angles = (float(value) for value in propagation._parts(orthogonal))
    assert angles == 0.0
    assert gap > 0.1


def test_figure_5_measures_in_front_of_the_relu() -> None:
    network = propagation.conv_stack(1, 6, 3, batch_norm=True, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    found = propagation._through_layers(network, inputs)
    assert found.shape == (2, 4)
    with torch.no_grad():
        normed = network[:2](inputs)
    assert float(found[0, 1]) == pytest.approx(float(orthogonality_gap(normed.flatten(1))), rel=1e-5)


def test_a_wrong_statement_of_figure_5_does_not_hold() -> None:
    claim = next(claim for claim in CLAIMS if claim.id == "orth2021-fig5")
    values = {**claim.settings["quick"].values, "networks": 8, "batches": 1}
    numbers = claim.measure(values, Context()).numbers
    wrong = dataclasses.replace(
        claim,
        expectations=(dataclasses.replace(claim.expectations[0], low=-math.inf, high=0.0),),
        correction=None,
    )
    assert judge(wrong, numbers) == "does not hold"


def test_the_interval_of_an_extreme_holds_that_of_other_draws() -> None:
    generator = np.random.default_rng(0)
    missed = 0
    for _ in range(400):
        number = extreme_of(generator.exponential(size=(8, 50)).max(axis=1))
        median = -math.log(1 - 0.5 ** (1 / 50))
        missed += not number.low <= median <= number.high
    assert missed <= 12  # 0.8% of 400 is 3
    with pytest.raises(UsageError, match="at least 8 groups"):
        extreme_of([1.0, 2.0])
