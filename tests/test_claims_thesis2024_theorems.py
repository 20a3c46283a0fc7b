"""Theorems of thesis2024 whose wrong forms must fail: 3.2, 5.8, 6.1, Corollaries 4.4 and 5.10."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from sounding.claims import Claim
from sounding.claims.claim import Context, Setting, judge
from sounding.claims.registry import find_claim
from sounding.claims.thesis2024 import centred, isometry
from sounding.claims.thesis2024.centred import centred_maps, drift, keeps_minus_one, pull
from sounding.claims.thesis2024.convergence import map_of, random_maps
from sounding.claims.thesis2024.isometry import needed_constant
from sounding.claims.thesis2024.mean_field import EARLY, distances, slowest_rate, start_gram, transient
from sounding.claims.thesis2024.networks import draw_inputs, gaps_over_depth
from sounding.reproduction import reproduce
from tolerance import TOLERANCE

CONTEXT = Context()


def shrunk(claim_id: str, **changes: object) -> Claim:
    row = find_claim(claim_id)
    return dataclasses.replace(row, settings={"quick": Setting({**row.settings["quick"].values, **changes})})


THEOREM_5_8: dict[str, object] = {"random": 24, "runs": 100, "depth": 5}


def test_theorem_5_8_holds_for_centred_activations() -> None:
    assert reproduce(shrunk("thesis2024-thm5.8", **THEOREM_5_8)).verdict == "holds"


@pytest.mark.parametrize("activation", ["sigmoid", "gelu"])
def test_theorem_5_8_needs_centring(activation: str) -> None:
    """1 attracts under sigmoid, and GELU has a fixed point inside (0, 1)."""
    found = reproduce(shrunk("thesis2024-thm5.8", activations=((activation, "none"),), **THEOREM_5_8))
    assert found.verdict == "does not hold"
    name = "smallest_drift_at_one" if activation == "sigmoid" else "smallest_pull_inside"
    assert found.numbers[name].high < 0


def test_a_fixed_point_at_minus_one_that_attracts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd map with slope 1/3 at ±1; the theorem says that no activation has it."""
    bent = dataclasses.replace(map_of("tanh"), kappa=np.cbrt, slope_zero=0.0)
    assert drift(bent, -1.0) == pytest.approx(-2 / 3, abs=TOLERANCE.three_digits)
    real = map_of
    monkeypatch.setattr(centred, "map_of", lambda name, norm: bent if name == "erf" else real(name, norm))
    found = reproduce(shrunk("thesis2024-thm5.8", **THEOREM_5_8))
    assert found.verdict == "does not hold"
    assert found.numbers["smallest_drift_at_minus_one"].high < 0


def test_the_drift_is_that_of_the_slope_and_no_draw_is_left_out() -> None:
    maps = centred_maps(200, CONTEXT)
    assert [one.name for one in maps] == [f"random {index}" for index in range(200)]
    assert all(one.case == 1 for one in maps)
    for one in maps[:20]:
        assert drift(one, 1.0) == pytest.approx(
            (one.slope_one - 1) / (1 - one.slope_zero), rel=3 * TOLERANCE.three_digits
        )
    assert sum(keeps_minus_one(one) for one in maps) == 100
    assert min(pull(one) for one in maps) > 1 - 1e-6
    assert min(drift(one, 1.0) for one in random_maps(2, 20, CONTEXT)) < 0


def test_corollary_5_10_fails_for_negative_starts_alone() -> None:
    row = shrunk("thesis2024-cor5.10", random=16)
    found = reproduce(row)
    assert found.verdict == "holds with correction"
    positive = dataclasses.replace(row, expectations=row.expectations[:1], correction=None)
    negative = dataclasses.replace(row, expectations=row.expectations[1:2], correction=None)
    assert reproduce(positive).verdict == "holds"
    assert reproduce(negative).verdict == "does not hold"
    assert 0 < found.numbers["excess_over_printed_from_minus_half"].low < 1.5 + 1e-9


def test_as_many_samples_as_features_have_no_isometry_after_layer_norm() -> None:
    found = reproduce(shrunk("thesis2024-cor4.4", trials=200, largest=4)).numbers
    assert found["layer_norm_smallest_ratio"].high == 0
    assert 0.05 < found["layer_norm_smallest_positive_ratio"].value < 1
    assert 0.1 < found["layer_norm_share_made_degenerate"].value < 0.4


def test_the_needed_constant_of_a_known_decay() -> None:
    """ψ_ℓ = ψ_0 e^(−ℓ/k): the bound at ℓ is for layer ℓ + 1, so the least constant is that of many layers."""
    layers = np.arange(60)
    gaps = np.exp(-layers / 50.0)[None].repeat(3, axis=0) * 0.1
    value, high = needed_constant(gaps, 5)
    assert value == pytest.approx(50 * 58 / 59 / (25 * 1.5))
    assert high == pytest.approx(value)
    noisy = gaps * np.array([0.1, 1.0, 10.0])[:, None]
    noisy[:, 0] = 0.1
    assert needed_constant(noisy, 5)[1] == math.inf


def test_inputs_of_theorem_6_1_are_independent_and_normalized() -> None:
    for kind in ("gaussian", "correlated", "isometric"):
        batch = draw_inputs(kind, 4, 3, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(batch.norm(dim=1), torch.ones(3, 4, dtype=batch.dtype))
        assert not torch.equal(batch[0], batch[1])


def test_theorem_6_1_fails_where_the_gap_falls_too_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    row = shrunk("thesis2024-thm6.1", widths=(2, 3), runs=20)
    found = reproduce(row)
    assert found.verdict == "holds"
    # near isometry the gap falls by d/(d + 2) per layer, which needs 1/(d² ln(1 + 2/d))
    assert 0.2 < found.numbers["needed_constant"].value < 0.6
    assert found.numbers["needed_constant_3"].value < found.numbers["needed_constant_2"].value
    real = gaps_over_depth

    def slowly(*arguments: Any, **options: Any) -> Any:
        gaps = real(*arguments, **options)
        return gaps[:, :1] * (gaps / gaps[:, :1]) ** 1e-3

    monkeypatch.setattr(isometry, "gaps_over_depth", slowly)
    assert reproduce(row).verdict == "does not hold"


SMALL_3_2: dict[str, object] = {
    "widths": (200, 400, 800),
    "batch_sizes": (5, 10),
    "wide": 6400,
    "wide_runs": 8,
    "depth": 80,
    "burn_in": 30,
    "runs": 8,
}


def test_the_constant_of_theorem_3_2_grows_with_the_batch_for_tanh_alone() -> None:
    row = shrunk("thesis2024-thm3.2", **SMALL_3_2)
    found = reproduce(row)
    assert found.numbers["tanh_batch_exponent"].low > 0.5
    assert found.numbers["relu_batch_exponent"].high < 0.5
    assert found.numbers["tanh_corrected_batch_exponent"].high < 0.5
    # from one sample apart GELU needs more than C = 1
    assert found.numbers["needed_constant"].value > 1
    without = tuple(one for one in row.expectations if one.quantity != "tanh_batch_exponent")
    assert judge(row, found.numbers) != "holds"
    assert judge(dataclasses.replace(row, expectations=without[:2]), found.numbers) == "holds"


def test_a_faster_rate_needs_a_constant_that_grows_with_depth() -> None:
    """With 1 − α = λ⁴ for λ² the later layers need more."""
    rate = slowest_rate("tanh", 5)
    options: dict[str, Any] = {"width": 6400, "depth": 12, "runs": 6, "context": CONTEXT, "offset": 0}
    found = distances("tanh", start_gram(5, "two halves"), **options)
    right, wrong = (transient(found, chosen, 0.01).mean(0) for chosen in (rate, rate**2))
    assert len(right) > EARLY
    assert right[EARLY:].max() < right[:EARLY].max()
    assert wrong[EARLY:].max() > 2 * wrong[:EARLY].max()
