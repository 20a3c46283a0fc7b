"""The theorems of thesis2024 against what they speak about; the false printed ones refuted by example."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq

from sounding.theory.bounds import evaluate, kernel_maps, thesis2024
from sounding.theory.bounds.bound import Bound
from sounding.theory.bounds.spectrum import isometry, normalize_features
from tolerance import TOLERANCE, assert_within_standard_errors

Array = NDArray[np.float64]


def haar(d: int, rng: np.random.Generator) -> Array:
    q, r = np.linalg.qr(rng.standard_normal((d, d)))
    return np.asarray(q * np.sign(np.diag(r)))


def test_theorem_3_2_says_nothing_where_the_fixed_point_is_singular() -> None:
    n = 6
    linear = n / (n - 1) * (np.eye(n) - 1 / n)
    bound = thesis2024.theorem_3_2(linear, width=1000, depth=5, mixing=0.3)
    assert bound.value == math.inf
    assert bound.holds_for_input is False


def test_theorem_3_2_has_the_depth_and_width_of_its_statement() -> None:
    gram = np.eye(4) + 0.1
    floor = [
        evaluate("thesis2024-theorem3.2", fixed_gram=gram, width=d, depth=1000, mixing=0.3, version=v).value
        for v in ("corrected", "printed")
        for d in (10**6, 10**8)
    ]
    assert 6 < floor[0] / floor[1] < 10
    assert 6 < floor[2] / floor[3] < 10
    assert thesis2024.theorem_3_2(gram, width=20, depth=5, mixing=0.3).value == math.inf


@given(st.integers(2, 8), st.integers(0, 6), st.integers(0, 10**6))
def test_normalizing_samples_or_features_never_lowers_the_isometry(size: int, extra: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((size, size + extra)) * np.exp(rng.standard_normal((size, 1)))
    for bound in (
        thesis2024.theorem_4_3(features),
        thesis2024.corollary_4_4(features),
        thesis2024.corollary_4_5(features.T),
    ):
        assert bound.respected


def test_theorem_4_3_is_an_equality_only_for_equal_norms() -> None:
    rng = np.random.default_rng(2)
    features = rng.standard_normal((4, 9))
    assert thesis2024.theorem_4_3(features).actual != pytest.approx(
        thesis2024.theorem_4_3(features).value, rel=TOLERANCE.six_digits
    )
    equal = features / np.linalg.norm(features, axis=1, keepdims=True)
    bound = thesis2024.theorem_4_3(equal)
    assert bound.actual == pytest.approx(bound.value, rel=TOLERANCE.closed_form)


def test_the_printed_isometry_corollaries_are_false() -> None:
    centred = thesis2024.corollary_4_4(np.eye(4), version="printed")
    assert centred.value == pytest.approx(1, rel=TOLERANCE.exact)
    assert centred.actual == 0
    assert centred.respected is False
    tall = thesis2024.corollary_4_5(np.vstack([np.eye(3), np.eye(3)]), version="printed")
    assert tall.respected is False
    assert thesis2024.corollary_4_5(np.vstack([np.eye(3), np.eye(3)])).respected
    rotated = thesis2024.corollary_6_4(normalize_features(np.array([[1.0, 1.0], [0.2, 1.0]])), version="printed")
    assert rotated.respected is False


def test_one_haar_layer_respects_theorem_6_3_and_corollary_6_4() -> None:
    rng = np.random.default_rng(4)
    d = 6
    features = normalize_features(rng.standard_normal((d, d)))
    draws = [normalize_features(features @ haar(d, rng).T) for _ in range(3000)]
    values = np.array([isometry(x.T @ x) for x in draws])
    slack = TOLERANCE.standard_errors * values.std() / math.sqrt(len(values))
    bound = thesis2024.theorem_6_3(features)
    assert values.mean() >= bound.value - slack
    assert bound.values["isometry_before"] < bound.value
    gaps = -np.log(values)
    slack = TOLERANCE.standard_errors * gaps.std() / math.sqrt(len(gaps))
    assert gaps.mean() <= thesis2024.corollary_6_4(features).value + slack


def test_the_haar_chain_respects_theorem_6_1_and_decays_by_d_over_d_plus_2() -> None:
    rng = np.random.default_rng(6)
    d, layers, runs = 4, 40, 300
    start = normalize_features(rng.standard_normal((d, d)))
    curves = np.empty((runs, layers + 1))
    for run in range(runs):
        features = start
        for layer in range(layers + 1):
            curves[run, layer] = -math.log(isometry(features.T @ features))
            features = normalize_features(features @ haar(d, rng).T)
    mean = curves.mean(axis=0)
    for version in ("corrected", "printed"):
        bound = thesis2024.theorem_6_1(d, input_gap=float(mean[0]), depth=layers - 1, version=version)
        assert bound.profile is not None
        assert np.all(mean[1:] <= bound.profile.series("isometry_gap").value)
    rate = (mean[20] / mean[5]) ** (1 / 15)
    stderr = float(np.std(curves[:, 20]) / mean[20] / math.sqrt(runs)) / 15
    assert_within_standard_errors(rate, d / (d + 2), stderr, allowance=0.02)


def test_gradients_of_a_haar_network_stay_below_theorem_6_5_at_any_depth() -> None:
    torch = pytest.importorskip("torch")
    d, logs = 4, []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        start = normalize_features(rng.standard_normal((d, d)))
        weights = [torch.tensor(haar(d, rng)).requires_grad_() for _ in range(60)]
        features = torch.tensor(start)
        for weight in weights:
            features = features @ weight.T
            features = features / features.norm(dim=0, keepdim=True)
        direction = rng.standard_normal((d, d))
        (features * torch.tensor(direction)).sum().backward()
        gap = -math.log(isometry(start.T @ start))
        bound = thesis2024.theorem_6_5(d, input_gap=gap, loss_slope=float(np.linalg.norm(direction)))
        logs.append((math.log(float(weights[0].grad.norm())), bound.value))
    assert np.mean([log for log, _ in logs]) <= np.mean([value for _, value in logs])


def test_theorem_6_5_is_vacuous_for_a_degenerate_batch_and_quadratic_near_isometry() -> None:
    assert thesis2024.theorem_6_5(8, input_gap=math.inf).value == math.inf
    assert thesis2024.theorem_6_5(8, input_gap=math.inf).holds_for_input is False
    assert thesis2024.theorem_6_5(8, input_gap=0.0).value == pytest.approx(
        80 + 0.5 * math.log(8), rel=TOLERANCE.closed_form
    )


@given(st.integers(2, 40), st.integers(0, 10**6), st.floats(0.01, 1))
def test_a_small_isometry_gap_keeps_the_eigenvalues_near_one(d: int, seed: int, size: float) -> None:
    """The step of the proof (C.56) on which the corrected Theorems 6.1 and 6.5 stand."""
    raw = np.exp(size * np.random.default_rng(seed).standard_normal(d))
    eigenvalues = raw / raw.mean()
    gap = -float(np.mean(np.log(eigenvalues)))
    if gap <= 1 / (16 * d):
        assert np.max(np.abs(eigenvalues - 1)) <= 0.5
        assert gap <= np.mean((eigenvalues - 1) ** 2)
    else:
        assert np.mean((eigenvalues - 1) ** 2) > 1 / (16 * d)


class Power:
    """A kernel map with chosen coefficients c_k², normalized to κ(1) = 1."""

    def __init__(self, *weights: float) -> None:
        self.weights = np.array(weights) / sum(weights)
        self.polynomial = np.polynomial.Polynomial(self.weights)
        self.slope = self.polynomial.deriv()

    def numbers(self) -> dict[str, float]:
        zero, one = float(self.weights[0]), float(self.slope(1))
        if zero == 0:
            target = 0.0
        elif one <= 1:
            target = 1.0
        else:
            target = brentq(lambda r: self.polynomial(r) - r, 0.0, 1 - 1e-9)
        return {
            "kappa_zero": zero,
            "slope_zero": float(self.slope(0)),
            "slope_one": one,
            "fixed_point": target,
            "slope_fixed_point": float(self.slope(target)),
        }

    def check(self, start: float, depth: int, version: str = "corrected") -> Bound:
        return kernel_maps.theorem_5_11(
            **self.numbers(), start=start, depth=depth, kappa=self.polynomial, version=version
        )  # type: ignore[arg-type]


coefficients = st.lists(st.floats(0, 1), min_size=4, max_size=8).filter(lambda w: sum(w[2:]) > 0.05)


@given(coefficients, st.floats(-0.999, 0.999), st.integers(1, 30))
def test_the_corrected_contraction_holds_for_any_kernel_map(weights: list[float], start: float, depth: int) -> None:
    for centred in (True, False):
        shape = Power(*([0.0, *weights[1:]] if centred else [weights[0] + 0.02, *weights[1:]]))
        bound = shape.check(start, depth)
        assert bound.respected or (bound.actual is not None and bound.actual < TOLERANCE.exact)


def test_each_case_is_recognized() -> None:
    assert Power(0, 1, 1).check(0.5, 3).values["case"] == 1
    assert Power(1, 0.5, 0.1).check(0.5, 3).values["case"] == 2
    assert Power(1, 2, 1).check(0.5, 3).values["case"] == 3
    assert Power(1, 0, 1, 1).check(0.5, 3).values["case"] == 4


def test_the_printed_contraction_rates_are_false() -> None:
    """(5.7) for a centred cubic map, (5.10) for κ = 0.9 + 0.1ρ³⁰ close to 1; the corrected ones hold there."""
    cubic = Power(0, 0.9, 0, 0.1)
    assert cubic.check(0.1, 40, "printed").respected is False
    assert cubic.check(0.1, 40).respected
    steep = Power(*[0.9] + [0.0] * 29 + [0.1])
    start = 1 - 0.01 * 3.0**-8
    assert steep.check(start, 8, "printed").respected is False
    assert steep.check(start, 8).respected


def test_the_printed_rate_with_normalization_is_false_for_tanh() -> None:
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    weights = weights / weights.sum()
    second, slope0 = float(weights @ np.tanh(nodes) ** 2), float(weights @ (nodes * np.tanh(nodes))) ** 2
    slope1 = float(weights @ np.cosh(nodes) ** -4.0)
    grid = np.meshgrid(nodes, nodes)

    def kappa(rho: float) -> float:
        other = rho * grid[0] + math.sqrt(1 - rho**2) * grid[1]
        return float(weights @ (np.tanh(grid[0]) * np.tanh(other)) @ weights) / second

    numbers = {"second_moment": second, "squared_mean": 0.0, "slope_zero": slope0, "slope_one": slope1}
    for norm in ("pre-rms", "post-rms", "pre-ln", "post-ln"):
        common = {**numbers, "norm": norm, "start": 0.3, "depth": 30, "kappa": kappa}
        assert evaluate("thesis2024-theorem5.15", **common, version="printed").respected is False
        corrected = evaluate("thesis2024-theorem5.15", **common)
        assert corrected.respected
        assert corrected.holds_for_input
    unscaled = evaluate("thesis2024-theorem5.15", **numbers, norm="none", start=0.3, depth=30)
    assert unscaled.holds_for_input is False


@given(st.floats(-0.99, 0.99), st.integers(0, 20))
def test_theorem_5_8_and_its_corollary(start: float, depth: int) -> None:
    shape = Power(0, 0.7, 0.2, 0.1)
    assert kernel_maps.theorem_5_8(0.7, start=start, depth=depth, kappa=shape.polynomial).respected
    assert kernel_maps.corollary_5_10(0.7, start=start, depth=depth, kappa=shape.polynomial).respected
