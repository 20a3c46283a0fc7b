"""Averages against closed forms, invariants, and a million layers."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from generators import seeded
from sounding import simulate
from sounding.chain import simulate_many
from sounding.chain.law import make_law
from sounding.chain.step import Chains
from tolerance import TOLERANCE, assert_within_standard_errors


@pytest.mark.parametrize("samples", [2, 4, 8])
def test_eigenvalue_deviations_contract_by_n_over_n_plus_2(samples):
    """Batch norm without centring: a deviation δ of two eigenvalues (one up, one down) becomes δ·n/(n + 2) on average.

    Features are independent given the Gram matrix, so one layer's average does not depend on the width. Odd in δ: the
    first correction is of order δ³.
    """
    delta, width, runs = 0.1, 2000, 1000
    scales = torch.ones(samples)
    scales[0], scales[1] = 1 + delta, 1 - delta
    start = math.sqrt(width) * torch.eye(samples, width) * scales.sqrt()[:, None]
    law = make_law(width=width, batch_size=samples, centring=False)
    found = []
    for seed in range(4):
        chains = Chains(
            [law] * (runs // 4), start.expand(runs // 4, -1, -1).clone(), route="gram", generator=seeded(seed)
        )
        chains.step()
        gram = chains.gram() / width
        found.append((gram[:, 0, 0] - gram[:, 1, 1]) / (2 * delta))
    ratios = torch.cat(found)
    stderr = float(ratios.std()) / math.sqrt(runs)
    assert_within_standard_errors(float(ratios.mean()), samples / (samples + 2), stderr, allowance=delta**2)


@pytest.mark.parametrize("width", [8, 16])
def test_haar_weights_shrink_the_isometry_gap_by_d_over_d_plus_2(width):
    """thesis2024 chapter 6, near isometry; Theorem 6.1's rate is far slower."""
    result = simulate(
        width=width, batch_size=width, depth=9, runs=400, weights="orthogonal", input="near-orthogonal:1e-3",
        centring=False, dtype="float64", profile=True, measures=["isometry_gap"], generator=seeded(0),
    )  # fmt: skip
    series = result.profile.series("isometry_gap")
    per_layer = (series.value[9] / series.value[1]) ** (1 / 8)
    relative = math.hypot(series.stderr[9] / series.value[9], series.stderr[1] / series.value[1])
    assert_within_standard_errors(per_layer, width / (width + 2), per_layer * relative / 8)


def test_the_stationary_gap_falls_with_the_root_of_the_width():
    """orth2021 figure 2b; in the mean field the squared gap settles where noise of order 1/d balances contraction."""
    gaps = {}
    for width in (64, 256):
        result = simulate(
            width=width, batch_size=4, depth=300, burn_in=40, runs=64, centring=False, generator=seeded(1),
            measures=["orthogonality_gap_squared"],
        )  # fmt: skip
        gaps[width] = result.averages["orthogonality_gap_squared"].value
    assert abs(gaps[64] / gaps[256] - 4) < 0.4


def test_centring_leaves_one_direction_less():
    result = simulate(
        width=64, batch_size=6, depth=60, burn_in=20, runs=8, generator=seeded(2),
        measures=["numerical_rank", "mean_cosine", "distinct_share", "isometry"],
    )  # fmt: skip
    assert result.averages["numerical_rank"].value == 5
    assert result.averages["isometry"].value == 0
    assert abs(result.averages["mean_cosine"].value + 1 / 5) < 0.01
    assert result.averages["distinct_share"].value == pytest.approx(1, abs=TOLERANCE.float32_forward)


def test_features_after_batch_norm_have_unit_mean_square():
    """So tr M = d and ‖H‖_F² = n·d, whatever the layer: log_norm is ½ ln(nd)."""
    for options in ({}, {"centring": False}, {"residual": 0.2}, {"norm": "layer"}, {"norm": "rms"}):
        result = simulate(
            width=20, batch_size=5, depth=10, runs=4, measures=["log_norm"], generator=seeded(3), **options
        )
        assert result.averages["log_norm"].value == pytest.approx(0.5 * math.log(100), rel=TOLERANCE.float32_forward)


def test_a_vanilla_linear_chain_has_the_lyapunov_exponent_of_gaussian_products():
    """E ln‖Wx‖ = ½(ψ(d/2) + ln 2 − ln d) per layer for entries of variance 1/d: the top exponent, exactly."""
    from scipy.special import digamma

    width, depth = 8, 400
    result = simulate(
        width=width, batch_size=1, depth=depth, every=depth, runs=300, norm="none", measures=["log_norm"],
        profile=True, generator=seeded(4),
    )  # fmt: skip
    first, last = result.profile.value("log_norm", layer=0), result.profile.value("log_norm", layer=depth)
    expected = 0.5 * (digamma(width / 2) + math.log(2) - math.log(width)) * depth
    assert_within_standard_errors(last.value - first.value, expected, math.hypot(first.stderr, last.stderr))


@pytest.mark.parametrize(("activation", "gain"), [("relu", 1.0), ("identity", 3.0), ("tanh", 0.5), ("softplus", 2.5)])
def test_vanilla_chains_neither_overflow_nor_vanish(activation, gain):
    """Twenty thousand layers that shrink or grow by a constant factor each: the logarithm is linear in depth."""
    result = simulate(
        width=40, batch_size=3, depth=20_000, every=10_000, norm="none", activation=activation, gain=gain, profile=True,
        measures=["log_norm", "orthogonality_gap"], generator=seeded(5),
    )  # fmt: skip
    logs = result.profile.series("log_norm").value
    assert np.all(np.isfinite(logs))
    assert logs[2] - logs[0] == pytest.approx(2 * (logs[1] - logs[0]), rel=TOLERANCE.rough)
    assert abs(logs[2]) > 1000


def test_a_network_that_died_is_dead():
    """Eight ReLU units all switch off once in 2⁸ layers: the norm is 0 from there on, not a rounding artefact."""
    result = simulate(
        width=8, batch_size=2, depth=5000, norm="none", activation="relu", measures=["log_norm"], generator=seeded(10)
    )
    assert result.averages["log_norm"].value == -math.inf
    assert result.averages["log_norm"].stderr is None


def test_a_signal_that_vanished_is_replaced_by_the_activations_own_value():
    """Softplus of almost nothing is ln 2: a chain cannot stay small, whichever way its scale is kept."""
    result = simulate(
        width=6, batch_size=2, depth=3000, norm="none", activation="softplus", gain=30.0, runs=3,
        measures=["log_norm"], profile=True, generator=seeded(11),
    )  # fmt: skip
    logs = result.profile.series("log_norm").value[1:]
    assert np.min(logs[np.isfinite(logs)]) > -40 * 30


@pytest.mark.slow
def test_a_million_layers():
    result = simulate(
        width=32, batch_size=2, depth=1_000_000, every=1000, norm="none", activation="relu",
        measures=["log_norm", "numerical_rank", "orthogonality_gap"], generator=seeded(6),
    )  # fmt: skip
    assert math.isfinite(result.averages["log_norm"].value)
    assert result.averages["numerical_rank"].value == pytest.approx(1, abs=TOLERANCE.percent)


@pytest.mark.slow
def test_memory_does_not_grow_with_depth():
    """Peak memory of fresh processes at 300 and at 6000 layers."""
    peaks = []
    for depth in (300, 6000):
        script = (
            "import resource, torch; from sounding import simulate; "
            f"simulate(width=64, batch_size=8, depth={depth}, runs=8, generator=torch.Generator().manual_seed(0), "
            "measures=['orthogonality_gap']); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        peaks.append(int(finished.stdout))
    assert peaks[1] < 1.05 * peaks[0]


def test_one_sided_weights_break_batch_norm():
    """rank2020, "Breaking batch normalization": weights from U[0, 2a] collapse the rank that symmetric ones keep."""
    ranks = {}
    for law in ("uniform", "one-sided"):
        result = simulate(
            width=24, batch_size=24, depth=60, burn_in=40, runs=6, weights=law, centring=False, generator=seeded(8),
            measures=["participation_ratio"],
        )  # fmt: skip
        ranks[law] = result.averages["participation_ratio"].value
    assert ranks["one-sided"] < 1.2
    assert ranks["uniform"] > 3


def test_widths_and_strengths_in_one_call():
    found = simulate_many(
        widths=[8, 16], residuals=[0.1, math.inf], depth=400, burn_in=100, runs=16, centring=False, generator=seeded(9),
        measures=["soft_rank", "regularity"],
    )  # fmt: skip
    assert [(s.settings["width"], s.settings["residual"]) for s in found] == [
        (8, 0.1),
        (8, "inf"),
        (16, 0.1),
        (16, "inf"),
    ]
    for simulation in found:
        rank = simulation.averages["soft_rank"].value
        assert math.sqrt(simulation.settings["width"]) * 0.8 < rank < simulation.settings["width"]
        # rank2020 Definition 3: between 0 and 1 at stationarity (Lemma 10, figure 8)
        assert 0 < simulation.averages["regularity"].value < 1
