"""The rows of meanfield2019: well formed, able to fail, and what they rest on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from sounding.claims.claim import Claim, Context, Correction, Expectation, judge
from sounding.claims.meanfield2019 import CLAIMS
from sounding.claims.meanfield2019.explosion import explosion_rate, relu_rate, series_coefficient
from sounding.claims.meanfield2019.figure5 import _gain
from sounding.claims.meanfield2019.fixed_point import relu_correlation, spherical_integrals
from sounding.claims.meanfield2019.linear import project_spectrum
from sounding.claims.meanfield2019.subbatches import SubBatchNorm
from sounding.claims.meanfield2019.trainable import judge_cells
from sounding.predict import batchnorm

ROWS = {claim.id: claim for claim in CLAIMS}


def verdict_of(claim: Claim) -> str:
    return judge(claim, claim.measure(claim.settings["quick"].values, Context()).numbers)


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
    assert verdict_of(claim) == "holds"
    assert verdict_of(dataclasses.replace(claim, expectations=(rate,))) == "does not hold"


def test_a_wrong_figure_does_not_hold() -> None:
    claim = ROWS["meanfield2019-fig1d"]
    values = {**claim.settings["quick"].values, "width": 400, "runs": 4, "layers": 40}
    numbers = claim.measure(values, Context()).numbers
    symmetric = Expectation("log_ratio_of_variances_broken", "no symmetry breaking at degree 1.8", high=0.5)
    assert judge(dataclasses.replace(claim, expectations=(symmetric,)), numbers) == "does not hold"


def test_a_wrong_observation_does_not_hold() -> None:
    claim = ROWS["meanfield2019-scope-bsb1"]
    values = {**claim.settings["quick"].values, "width": 60, "depth": 6, "runs": 2, "large": 24, "field_layers": 3}
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


def test_sub_batches_are_normalized_by_themselves() -> None:
    batch = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)) * 4 + 1
    split = SubBatchNorm(4, eps=1e-3)(batch)
    alone = torch.nn.BatchNorm1d(3, eps=1e-3, affine=False)
    assert torch.allclose(split, torch.cat([alone(part) for part in batch.split(4)]), atol=1e-5)
    assert torch.allclose(SubBatchNorm(5, eps=1e-3)(batch), alone(batch), atol=1e-5)


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
