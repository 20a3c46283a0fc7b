"""The rows of meanfield2019: well formed, able to fail, and what they rest on."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from sounding.claims.claim import Claim, Context, Correction, Expectation, judge
from sounding.claims.meanfield2019 import CLAIMS
from sounding.claims.meanfield2019.explosion import explosion_rate, relu_rate, series_coefficient
from sounding.claims.meanfield2019.field import map_relu, spread_paths
from sounding.claims.meanfield2019.figure5 import _gain
from sounding.claims.meanfield2019.fixed_point import relu_correlation, spherical_integrals
from sounding.claims.meanfield2019.linear import project_spectrum
from sounding.claims.meanfield2019.parted import Parted
from sounding.claims.meanfield2019.sampled import draw_covariance
from sounding.claims.meanfield2019.trainable import draw_networks, judge_cells
from sounding.claims.meanfield2019.transforms import _ANALYTIC, fourier_map, linear_trace
from sounding.data import load_dataset, normalize
from sounding.predict import batchnorm, covariance_map

ROWS = {claim.id: claim for claim in CLAIMS}


def verdict_of(claim: Claim, **smaller: Any) -> str:
    return judge(claim, claim.measure({**claim.settings["quick"].values, **smaller}, Context()).numbers)


def test_every_place_of_the_issue_has_a_row() -> None:
    wanted = [f"fig1{p}" for p in "abcd"] + [f"fig2{p}" for p in "abcd"] + [f"fig3{p}" for p in "abc"]
    wanted += [f"fig4{p}" for p in "abcd"] + ["fig5", "fig6", *(f"thm{k}" for k in range(2, 10)), "thmB.11", "corB.12"]
    wanted += ["scope-bsb1", "crossbatch-limit", "crossbatch-rate", "weight-gradients"]
    assert sorted(ROWS) == sorted(f"meanfield2019-{name}" for name in wanted)
    assert len(ROWS) == len(CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_rows_are_well_formed(claim: Claim) -> None:
    assert claim.seed == "meanfield2019"
    assert all((claim.statement, claim.paper, claim.expectations))
    assert "quick" in claim.settings
    expectations = (*claim.expectations, *(claim.correction.expectations if claim.correction else ()))
    for expectation in expectations:
        assert math.isfinite(expectation.low) or math.isfinite(expectation.high)
        assert expectation.why


def test_a_wrong_theorem_does_not_hold() -> None:
    claim = ROWS["meanfield2019-thm6"]
    assert verdict_of(claim) == "holds with correction"
    wrong = Expectation("largest_eigenvalue", "a fixed point that repels", low=1.0)
    assert verdict_of(dataclasses.replace(claim, expectations=(wrong,), correction=None)) == "does not hold"
    corrected = dataclasses.replace(claim, correction=Correction("wrong too", (wrong,)))
    assert verdict_of(corrected) == "does not hold"


def test_a_wrong_rate_does_not_hold() -> None:
    claim = ROWS["meanfield2019-corB.12"]
    rate = Expectation("rate_over_claim_C3", "C/(C+1) per layer", low=0.50, high=0.60)
    assert verdict_of(dataclasses.replace(claim, expectations=(rate,)), starts=2) == "does not hold"


def test_a_wrong_figure_does_not_hold() -> None:
    claim = ROWS["meanfield2019-fig1d"]
    values = {**claim.settings["quick"].values, "width": 400, "runs": 4, "layers": 40}
    numbers = claim.measure(values, Context()).numbers
    symmetric = Expectation("log_ratio_of_variances_broken", "no symmetry breaking at degree 1.8", high=0.5)
    assert judge(dataclasses.replace(claim, expectations=(symmetric,)), numbers) == "does not hold"


def test_a_wrong_observation_does_not_hold() -> None:
    claim = ROWS["meanfield2019-scope-bsb1"]
    values = {**claim.settings["quick"].values, "width": 60, "depth": 6, "runs": 2, "large": 24, "field_layers": 3,
              "field_starts": 4}  # fmt: skip
    numbers = claim.measure(values, Context()).numbers
    always = Expectation("gelu_repels_from_batch_size", "GELU's fixed point attracts up to a batch of 100", low=100)
    assert judge(dataclasses.replace(claim, expectations=(always,), correction=None), numbers) == "does not hold"


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "gelu"])
@pytest.mark.parametrize("size", [5, 8, 20])
def test_the_integrals_of_the_seed_are_the_predictions(activation: str, size: int) -> None:
    found = batchnorm(activation, batch_size=size)
    q, qc = spherical_integrals(activation, size)
    assert q == pytest.approx(found.fixed_point.variance, rel=1e-7)
    assert qc / q == pytest.approx(found.fixed_point.correlation, rel=1e-6)
    assert explosion_rate(activation, size) == pytest.approx(found.gradient_growth, rel=1e-6)


@pytest.mark.parametrize("size", [5, 8, 32, 300])
def test_closed_forms_of_relu(size: int) -> None:
    found = batchnorm("relu", batch_size=size)
    assert relu_rate(size) == pytest.approx(found.gradient_growth, rel=1e-9)
    assert relu_correlation(size) == pytest.approx(found.fixed_point.correlation, rel=1e-9)


def test_coefficients_of_the_series_are_those_of_the_polynomials() -> None:
    from scipy.special import eval_gegenbauer

    for size in (5, 8, 33):
        for degree in (1, 2, 7, 20):
            index = 0.5 * (size - 3)
            ratio = eval_gegenbauer(degree, index, -1 / (size - 1)) / eval_gegenbauer(degree, index, 1.0)
            assert series_coefficient(degree, size) == pytest.approx(1 - ratio, abs=1e-10)


def test_projection_of_a_spectrum() -> None:
    assert project_spectrum(np.ones(5)) == pytest.approx(np.full(5, 0.2), abs=1e-9)
    # E[a z₁²/(a z₁² + z₂²)] = √a/(1 + √a)
    assert project_spectrum(np.array([9.0, 1.0])) == pytest.approx([0.75, 0.25], abs=1e-6)


def test_the_trace_without_activation_is_that_of_the_whole_map() -> None:
    sigma = draw_covariance(6, torch.Generator().manual_seed(0))
    for inverted in (True, False):
        whole = fourier_map(_ANALYTIC["identity"], sigma, inverted=inverted)
        assert linear_trace(sigma, inverted=inverted, steps=2001) == pytest.approx(np.trace(whole), rel=1e-9)
    assert linear_trace(sigma) == pytest.approx(6.0, rel=1e-4)


@pytest.mark.parametrize("size", [5, 20, 60])
def test_the_map_of_many_covariances_is_that_of_each(size: int) -> None:
    starts = [draw_covariance(size, torch.Generator().manual_seed(seed)) for seed in range(3)]
    mapped = map_relu(torch.from_numpy(np.array(starts))).numpy()
    for start, found in zip(starts, mapped, strict=True):
        exact = covariance_map("relu", start).covariance
        assert np.abs(found - exact).max() < 1e-6 * np.abs(exact).max()


def test_spread_near_the_fixed_point_falls_by_its_eigenvalue() -> None:
    path = spread_paths(24, sigma=0.01, starts=2, layers=12, context=Context(), offset=0)
    assert path[:, 12] / path[:, 11] == pytest.approx(batchnorm("relu", batch_size=24).forward_eigenvalues.L, abs=2e-3)


def test_sub_batches_are_normalized_by_themselves() -> None:
    data = load_dataset("digits")
    network = draw_networks([{"eps": 1e-3}], {"width": 8, "activation": "relu"}, data, Context(), depth=2, offsets=[0])
    batch = normalize(data, data.train_inputs[:12]).flatten(1)
    stack = Parted(network, torch.device("cpu"), statistics_over=4)
    parts = torch.cat([network[0](part) for part in batch.split(4)])
    assert torch.allclose(stack.run(batch, "batch")[0][0], parts, atol=1e-5)
    assert torch.allclose(stack.run(batch[None], "batch", own=True)[0][0], parts, atol=1e-5)
    assert torch.allclose(stack.run(batch[:10], "batch")[0][0], network[0](batch[:10]), atol=1e-5)


def test_cells_whose_seeds_disagree_have_a_wider_share() -> None:
    depths, allowed = [10, 80], [30.0] * 6
    half = np.array([[[0.9, 0.9, 0.9, 0.9 if d <= 30 else 0.1] for _ in allowed] for d in depths])
    found = judge_cells(half, depths, allowed, chance=0.1)["share_on_right_side"]
    assert found.value == pytest.approx(0.625)
    assert found.low < 0.625 - 0.25
    assert found.high == 1.0


def test_cells_on_both_sides_of_the_boundary() -> None:
    depths, allowed = [10, 20, 40, 80], [30.0, 15.0]
    perfect = np.array([[[0.9 if d <= a else 0.1] * 3 for a in allowed] for d in depths])
    found = judge_cells(perfect, depths, allowed, chance=0.1)
    assert found["share_on_right_side"].value == 1.0
    assert found["gap_across_boundary"].value == pytest.approx(1.0)
    assert found["score_beyond"].value == pytest.approx(0.0)
    blind = np.full((4, 2, 3), 0.9)
    assert judge_cells(blind, depths, allowed, chance=0.1)["gap_across_boundary"].value == pytest.approx(0.0)


def test_choosing_among_noise_is_no_gain() -> None:
    rng = np.random.default_rng(0)
    gains = [_gain(rng.standard_normal((20, 8)), rng.standard_normal((1, 8))).mean() for _ in range(400)]
    assert abs(np.mean(gains)) < 4 * np.std(gains) / 20
    better = _gain(rng.standard_normal((3, 8)) * 0.01 + 1.0, rng.standard_normal((1, 8)) * 0.01)
    assert better == pytest.approx(np.ones(8), abs=0.1)
