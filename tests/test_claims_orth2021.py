"""Rows of orth2021: what they share between depths and variants, and how a gap is split."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from sounding.claims.claim import Context, judge
from sounding.claims.number import Number, extreme_of, mean_of
from sounding.claims.orth2021 import chains, convolutional, theorems, training
from sounding.claims.registry import claims_of
from sounding.errors import UsageError
from sounding.measures import orthogonality_gap
from sounding.theory.bounds import orth2021 as bounds
from tolerance import TOLERANCE

MLP = {
    "data": "digits", "width": 12, "batch_size": 50, "rates": [0.01], "seeds": 2, "init_samples": 200, "epochs": 1,
    "precision": "highest",
}  # fmt: skip
CONV = {
    "data": "digits", "depths": [3, 5], "width": 4, "batch_size": 30, "rate": 0.02, "steps": 10, "seeds": 2,
    "init_samples": 32, "plain": True,
}  # fmt: skip


ROWS = {claim.id: claim for claim in claims_of("orth2021")}


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
            torch.testing.assert_close(cut[name], weight, rtol=TOLERANCE.float32_layer, atol=TOLERANCE.two_routes)


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
        assert sizes == pytest.approx([1.0] * len(sizes), rel=TOLERANCE.four_digits)


def test_seeds_in_parts_train_as_they_do_together() -> None:
    """Figure 7 with fewer of the deep networks and two seeds at a time: what both runs have is the same."""
    values = CONV | {"seeds": 3}
    whole = convolutional.measure_figure7(values, Context())
    parts = convolutional.measure_figure7(values | {"deep_seeds": 2, "at_once": 2, "looks": 2}, Context())
    name = "shallow_xavier_minus_iterative"
    assert parts.numbers[name].value == pytest.approx(whole.numbers[name].value, rel=TOLERANCE.four_digits)
    assert parts.numbers[name].low < whole.numbers[name].low
    assert parts.numbers["deep_xavier_minus_iterative"].samples == 2


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
    orders = [torch.randperm(50, generator=generator).tolist() for generator in context.generators(training.ORDERS, 3)]
    assert len({tuple(order) for order in orders}) == 3
    batches = training.draw_batches(MLP, context)
    assert len(batches) == MLP["seeds"]
    assert not torch.equal(batches[0], batches[1])


def test_xavier_networks_of_figure_7_have_gain_root_two() -> None:
    network = convolutional.draw_network(CONV | {"width": 32}, 4, 0, Context())
    weight = [m.weight.detach() for m in network.modules() if isinstance(m, torch.nn.Conv2d)][2]
    fan = 32 * 9
    assert float(weight.std()) == pytest.approx(math.sqrt(2 * 2 / (2 * fan)), rel=TOLERANCE.drawn)


def test_the_gap_splits_into_angles_and_norms() -> None:
    rows = torch.randn(8, 20, generator=torch.Generator().manual_seed(0)).double() * torch.arange(1.0, 9.0)[:, None]
    gap, angles = (float(value) for value in convolutional._parts(rows))
    assert gap == pytest.approx(float(orthogonality_gap(rows)), rel=TOLERANCE.two_routes)
    assert angles < gap
    orthogonal = torch.eye(8, 20, dtype=torch.float64) * torch.arange(1.0, 9.0)[:, None]
    gap, angles = (float(value) for value in convolutional._parts(orthogonal))
    assert angles == 0.0
    assert gap > 0.1


def test_figure_5_measures_in_front_of_the_relu() -> None:
    network = convolutional.conv_stack(1, 6, 3, batch_norm=True, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    found = convolutional._through_layers(network, inputs)
    assert found.shape == (2, 4)
    with torch.no_grad():
        normed = network[:2](inputs)
    assert float(found[0, 1]) == pytest.approx(float(orthogonality_gap(normed.flatten(1))), rel=TOLERANCE.float32_layer)


def test_a_wrong_statement_of_figure_5_does_not_hold() -> None:
    claim = ROWS["orth2021-fig5"]
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


def draw_gaps(logs: np.ndarray) -> dict[str, Number]:
    """What figure 2a judges of ln V, (narrow and wide, layers), with a little noise."""
    noise = 1 + 0.01 * np.random.default_rng(0).standard_normal((2, 20, logs.shape[1]))
    return chains.describe_gaps(np.exp(logs)[:, None] * noise, samples=4, width=512, spread=1e-6)


def test_figure_2a_tells_a_line_from_saturation() -> None:
    """R² of a line is above 0.95 for both; only the line falls over layers 1–5 and 15–20 as over all twenty."""
    claim, layers = ROWS["orth2021-fig2a"], np.arange(51)
    ends = np.log([[0.2], [0.05]])
    line = np.maximum(ends / 20 * layers, ends)
    assert judge(claim, draw_gaps(line)) == "holds"
    saturated = draw_gaps(ends * np.clip((layers - 2.5) / 13, 0, 1))
    assert saturated["straightness_first_20_wide"].low > 0.95
    assert judge(dataclasses.replace(claim, correction=None), saturated) == "does not hold"
    assert claim.expectations[5].judge(saturated["late_rate_wide"]) == "violated"


def test_figure_2a_from_chains_needs_its_correction() -> None:
    claim = ROWS["orth2021-fig2a"]
    values = {**claim.settings["quick"].values, "runs": 200, "groups": 10}
    numbers = claim.measure(values, Context(random_seed=1)).numbers
    assert claim.correction is not None
    assert judge(claim, numbers) == "holds with correction"
    straight = [e for e in claim.expectations if "rate" in e.quantity]
    assert "violated" in [e.judge(numbers[e.quantity]) for e in straight]
    wrong = dataclasses.replace(claim.expectations[0], quantity="slope_6_to_12", high=math.log(4 / 6))
    assert wrong.judge(numbers["slope_6_to_12"]) == "violated", "the rate of the infinitely wide network"


def test_a_jackknife_of_a_mean_is_that_mean() -> None:
    samples = np.random.default_rng(1).standard_normal((1, 12, 3))
    found, straight = chains.over_groups(samples, lambda mean: float(mean[0, 1])), mean_of(samples[0, :, 1])
    assert (found.value, found.low, found.high) == pytest.approx((straight.value, straight.low, straight.high))


def test_the_floor_of_the_gap_is_a_fixed_point_of_the_expected_spectrum() -> None:
    """E‖G − I/n‖² = (1 − 1/d)·‖p(σ) − 1/n‖² + (1 − 1/n)/d after a layer, to first order in V at the floor."""
    n, width = 4, 10**6
    k = (n - 1) * (n + 2) / 2
    mean_to_root = math.sqrt(2 / k) * math.gamma((k + 1) / 2) / math.gamma(k / 2)
    gap = chains.predict_floor(n, width) / mean_to_root
    spectrum = 1 / n + gap * np.array([1.0, -1.0, 1.0, -1.0]) / 2
    after = bounds.expected_spectrum(np.sqrt(spectrum)) - 1 / n
    assert (1 - 1 / width) * float(after @ after) + (1 - 1 / n) / width == pytest.approx(
        gap**2, rel=TOLERANCE.four_digits
    )


def test_figure_6_compares_the_activations_it_names() -> None:
    values = {"widths": [8, 16], "wide": 8, "batch_size": 3, "burn_in": 5, "layers": 10, "runs": 8, "gap": False}
    named = values | {"activations": ["identity", "tanh"]}
    alone = chains.measure_conjecture(named, Context()).numbers
    beside = chains.measure_conjecture(named | {"beside": ["gelu"]}, Context()).numbers
    joined = chains.measure_conjecture(values | {"activations": ["identity", "tanh", "gelu"]}, Context()).numbers
    assert beside["largest_over_smallest_curve"] == alone["largest_over_smallest_curve"]
    assert joined["largest_over_smallest_curve"].value > alone["largest_over_smallest_curve"].value
    assert "slope_gelu" in beside


def test_clipping_that_never_clips_alleviates_nothing() -> None:
    """At so large a λ every run is the one without clipping, and that is no alleviation."""
    claim = ROWS["orth2021-figA1-clipping"]
    depths = [3, 5]
    values = MLP | {"depths": depths, "variants": ["xavier", "clipping:0.001", "clipping:1000000"]}
    found = training.train_variants(values, Context())
    renamed = {
        "xavier": found["xavier"],
        "clipping:0.1": found["clipping:0.001"],
        "clipping:1": found["clipping:1000000"],
    }
    numbers = training.compare_rises(renamed, depths)
    assert numbers["changed_by_clipping_1_deep"].value == 0.0
    assert numbers["changed_by_clipping_01_deep"].value == 1.0
    assert claim.expectations[3].judge(numbers["rise_xavier_minus_clipping_1"]) == "violated"
    assert judge(claim, numbers) == "does not hold"


def test_clipping_that_stops_the_rise_alleviates_it() -> None:
    claim = ROWS["orth2021-figA1-clipping"]
    noise = 0.05 * np.random.default_rng(0).standard_normal((6, 24))
    names = ("xavier", "clipping:0.1", "clipping:1")
    found = {
        name: {5: 0.5 + noise[i], 32: rise + 0.5 + noise[3 + i]}
        for i, (name, rise) in enumerate(zip(names, (1.2, 0.5, 0.7), strict=True))
    }
    assert judge(claim, training.compare_rises(found, [5, 32])) == "holds"
    wrong = {**found, "clipping:1": {5: found["xavier"][5], 32: found["xavier"][32] + 0.5}}
    assert judge(claim, training.compare_rises(wrong, [5, 32])) == "does not hold"
    slower = {**found, "clipping:1": {5: found["xavier"][5] + 1.0, 32: found["xavier"][32] + 0.1}}
    numbers = training.compare_rises(slower, [5, 32])
    assert numbers["rise_xavier_minus_clipping_1"].low > 0.5
    assert judge(claim, numbers) == "does not hold", "the slowdown is less as the shallow network is slowed"


def test_corollary_3_fails_with_the_printed_alpha_over_many_layers() -> None:
    """At few samples the bound is far away; in wide networks of many samples W₂² falls more slowly than it."""
    row = ROWS["orth2021-cor3"]
    few = {**row.settings["quick"].values, "widths": [16, 64, 256], "runs": 16, "infinite": [[4, 40]]}
    numbers = row.measure(few, Context(random_seed=1)).numbers
    assert numbers["largest_share_of_printed_bound"].high < 1
    path, sigma = theorems.follow_wide(256, 800)
    start, end = (float(np.sum((np.sqrt(e) - 1 / 16) ** 2)) for e in (path[0], path[-1]))
    rate = (end / start) ** (1 / 800)
    assert rate == pytest.approx((256 / 258) ** 2, rel=TOLERANCE.three_digits)
    assert rate > 1 - 2 * sigma / 3, "slower than printed"
    assert rate < (1 - 2 * 256 / 258 * sigma**2) ** 2, "faster than corrected"
