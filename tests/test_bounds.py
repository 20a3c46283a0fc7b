"""Each theorem against what it speaks about: bounds respected, corrections true, false printed statements refuted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq

from sounding.errors import NumericalError, UsageError
from sounding.theory.bounds import THEOREMS, evaluate, kernel_maps, orth2021, parameters, rank2020, thesis2024
from sounding.theory.bounds.bound import Bound
from sounding.theory.bounds.spectrum import isometry, normalize_features, orthogonality_gap, second_moment
from tolerance import TOLERANCE, assert_within_standard_errors

Array = NDArray[np.float64]
singular = st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=12)


def unit_features(samples: int, width: int, rng: np.random.Generator) -> Array:
    """A batch whose features have mean square 1."""
    return normalize_features(rng.standard_normal((samples, width))) * math.sqrt(samples)


def haar(d: int, rng: np.random.Generator) -> Array:
    q, r = np.linalg.qr(rng.standard_normal((d, d)))
    return np.asarray(q * np.sign(np.diag(r)))


# rank2020


@given(st.integers(2, 12), st.integers(2, 12), st.floats(0, 1), st.integers(0, 10**6))
def test_the_soft_rank_is_at_least_its_bound_on_every_batch(
    samples: int, width: int, threshold: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rank = rng.integers(1, min(samples, width) + 1)
    features = rng.standard_normal((samples, rank)) @ rng.standard_normal((rank, width))
    bound = rank2020.lemma_1(normalize_features(features) * math.sqrt(samples), threshold=threshold)
    assert bound.holds_for_input
    assert bound.respected
    assert bound.values["participation_ratio"] <= bound.values["rank"] * (1 + TOLERANCE.closed_form)


def test_the_soft_rank_bound_says_that_it_needs_unit_features() -> None:
    bound = rank2020.lemma_1(0.1 * np.eye(3), threshold=0.5)
    assert bound.holds_for_input is False
    assert bound.actual == 0
    assert bound.value == pytest.approx(0.75, rel=TOLERANCE.exact)
    assert bound.respected is False


def test_lemma_7_predicts_the_change_of_the_frobenius_norm() -> None:
    """Antithetic weights ±W cancel the odd orders of γ, so the remainder is of order γ⁴."""
    rng = np.random.default_rng(3)
    d, gamma = 5, 2e-3
    features = unit_features(d, d, rng)
    before = float(np.sum(second_moment(features) ** 2))
    changes = []
    for _ in range(4000):
        weight = rng.uniform(-math.sqrt(3), math.sqrt(3), (d, d))
        pair = []
        for sign in (1, -1):
            after = normalize_features(features + sign * gamma * features @ weight.T) * math.sqrt(d)
            pair.append(float(np.sum(second_moment(after) ** 2)) - before)
        changes.append(sum(pair) / 2)
    bound = rank2020.lemma_7(features, step=gamma)
    stderr = float(np.std(changes)) / math.sqrt(len(changes))
    assert_within_standard_errors(float(np.mean(changes)), bound.value, stderr)
    assert abs(bound.value) > 20 * stderr


def test_the_invariant_law_respects_lemma_13_and_theorem_2() -> None:
    """A residual chain at γ = 0.1, its first 400 layers left out; the printed bounds are true too, and looser."""
    rng = np.random.default_rng(0)
    d, gamma, moments, soft = 8, 0.1, [], []
    features = unit_features(d, d, rng)
    for layer in range(4400):
        weight = rng.uniform(-math.sqrt(3), math.sqrt(3), (d, d))
        features = normalize_features(features + gamma * features @ weight.T) * math.sqrt(d)
        if layer >= 400:
            moment = second_moment(features)
            moments.append(moment)
            soft.append(float(np.sum(np.linalg.eigvalsh(moment) >= 0.5)))
    alpha = rank2020.regularity_constant(np.array(moments))
    assert 0 < alpha < 1
    norm = float(np.mean([np.sum(moment**2) for moment in moments]))
    sharp, printed = (rank2020.lemma_13(d, regularity=alpha, version=v) for v in ("corrected", "printed"))
    assert norm <= sharp.value <= printed.value
    ratio = float(np.mean([d**2 / np.sum(moment**2) for moment in moments]))
    sharp, printed = (
        rank2020.theorem_2(d, regularity=alpha, threshold=0.5, version=v) for v in ("corrected", "printed")
    )
    assert ratio >= sharp.values["participation_ratio"] >= printed.values["participation_ratio"]
    assert float(np.mean(soft)) >= sharp.value >= printed.value


@given(st.integers(1, 10**4), st.floats(0, 0.999))
def test_the_corrected_rank_bounds_are_never_weaker(width: int, alpha: float) -> None:
    assert rank2020.lemma_13(width, regularity=alpha).value <= rank2020.lemma_13(
        width, regularity=alpha, version="printed"
    ).value * (1 + TOLERANCE.exact)
    assert (
        rank2020.theorem_2(width, regularity=alpha).value
        >= rank2020.theorem_2(width, regularity=alpha, version="printed").value
    )


def test_a_regularity_of_one_leaves_the_trivial_bound() -> None:
    assert rank2020.lemma_13(9, regularity=1.0).value == pytest.approx(81, rel=TOLERANCE.exact)
    assert rank2020.lemma_13(9, regularity=1.0, version="printed").value == math.inf
    assert rank2020.theorem_2(9, regularity=1.0, threshold=0.0).value == pytest.approx(1, rel=TOLERANCE.exact)
    assert rank2020.theorem_2(9, regularity=1.0).holds_for_input is False


# orth2021


@given(singular)
def test_the_spectrum_integral_by_two_routes(values: list[float]) -> None:
    quadrature = orth2021.expected_spectrum(values)
    assert quadrature.sum() == pytest.approx(1, abs=TOLERANCE.two_routes)
    if max(values) / min(values) < 12:
        series = orth2021.expected_spectrum(values, method="series")
        np.testing.assert_allclose(series, quadrature, rtol=TOLERANCE.two_routes)


@given(st.floats(1e-8, 1), st.floats(1e-8, 1))
def test_the_spectrum_integral_in_closed_form_for_two_samples(a: float, b: float) -> None:
    np.testing.assert_allclose(
        orth2021.expected_spectrum([a, b]), [a / (a + b), b / (a + b)], rtol=TOLERANCE.closed_form
    )


def test_the_spectrum_integral_against_sampling_and_at_its_edges() -> None:
    rng = np.random.default_rng(1)
    sigma = np.array([1.0, 0.7, 0.4, 0.1])
    draws = (sigma * rng.standard_normal((200_000, 4))) ** 2
    shares = draws / draws.sum(axis=1, keepdims=True)
    for share, expected in zip(shares.T, orth2021.expected_spectrum(sigma), strict=True):
        assert_within_standard_errors(float(share.mean()), float(expected), float(share.std()) / math.sqrt(200_000))
    np.testing.assert_allclose(orth2021.expected_spectrum([1.0, 0.0]), [1, 0])
    np.testing.assert_allclose(orth2021.expected_spectrum([5.0]), [1])
    np.testing.assert_allclose(orth2021.expected_spectrum(np.ones(64)), np.full(64, 1 / 64), rtol=TOLERANCE.closed_form)
    with pytest.raises(NumericalError, match="quadrature"):
        orth2021.expected_spectrum([1.0, 1e-4], method="series")


def test_deviations_contract_by_n_over_n_plus_2_near_orthogonality() -> None:
    n, size = 7, 1e-5
    deviation = size * np.array([1, -1, 0.5, -0.5, 0, 0.25, -0.25])
    after = orth2021.expected_spectrum(np.sqrt(1 / n + deviation)) - 1 / n
    np.testing.assert_allclose(after, deviation * n / (n + 2), atol=n * size**2)


@given(singular)
def test_lemma_8_holds_and_its_corrected_constant_is_sharper(values: list[float]) -> None:
    corrected, printed = (orth2021.lemma_8(values, version=v) for v in ("corrected", "printed"))
    assert corrected.respected
    assert printed.respected
    assert corrected.value <= printed.value * (1 + TOLERANCE.exact)


def test_lemma_8_is_attained_at_orthogonality() -> None:
    bound = orth2021.lemma_8(np.sqrt([1 / 3 - 1e-6, 1 / 3 + 5e-7, 1 / 3 + 5e-7]))
    assert bound.actual == pytest.approx(bound.value, rel=TOLERANCE.finite_difference)


def linear_chain(features: Array, layers: int, rng: np.random.Generator) -> list[Array]:
    """Singular values of each layer of H ↦ BN(HWᵀ)/√d with Gaussian weights; rows are samples."""
    d = features.shape[1]
    spectra = []
    for _ in range(layers):
        features = normalize_features(features @ rng.standard_normal((d, d))) / math.sqrt(d)
        spectra.append(np.linalg.svd(features, compute_uv=False))
    return spectra


def test_a_finite_chain_respects_theorems_1_and_5() -> None:
    rng = np.random.default_rng(5)
    n, d, layers = 4, 400, 12
    start = rng.standard_normal((n, d)) + 1.5 * rng.standard_normal((1, d))
    runs = [linear_chain(start, layers, rng) for _ in range(20)]
    smallest = min(float(spectrum.min()) for run in runs for spectrum in run)
    gaps = np.array([[orthogonality_gap(spectrum) for spectrum in run] for run in runs]).mean(axis=0)
    for version in ("corrected", "printed"):
        bound = orth2021.theorem_1(d, n, depth=layers - 1, smallest_singular_value=smallest, version=version)
        assert bound.profile is not None
        assert np.all(gaps <= bound.profile.series("orthogonality_gap").value)
    before = runs[0][0]
    steps = [
        1 / n - float(np.linalg.svd(step, compute_uv=False).min()) ** 2
        for step in (
            normalize_features(np.diag(before) @ rng.standard_normal((n, d))) / math.sqrt(d) for _ in range(200)
        )
    ]
    bound = orth2021.theorem_5(d, n, smallest_eigenvalue=float(before.min()) ** 2)
    assert float(np.mean(steps)) <= bound.value


def test_theorem_1_as_printed_is_false_because_a1_bounds_the_wrong_power() -> None:
    """At infinite width and 100 samples the gap decays by n/(n + 2), slower than 1 − (2/3)σ_n allows."""
    n, layers = 100, 200
    eigenvalues = np.full(n, 1 / n)
    eigenvalues[0] += 0.2 * 99 / n
    eigenvalues[1:] -= 0.2 / n
    smallest, gap = math.inf, []
    for _ in range(layers):
        eigenvalues = orth2021.expected_spectrum(np.sqrt(eigenvalues))
        smallest = min(smallest, math.sqrt(float(eigenvalues.min())))
        gap.append(orthogonality_gap(np.sqrt(eigenvalues)))
    wide = 10**30
    printed, corrected = (
        orth2021.theorem_1(wide, n, depth=layers - 1, smallest_singular_value=smallest, version=v)
        for v in ("printed", "corrected")
    )
    assert gap[-1] > printed.value
    assert gap[-1] <= corrected.value


@given(singular)
def test_the_wasserstein_distance_is_below_both_bounds(values: list[float]) -> None:
    for version in ("corrected", "printed"):
        assert orth2021.lemma_2(len(values), singular_values=values, version=version).respected


def test_the_corrected_wasserstein_radius_shrinks_like_one_over_root_width() -> None:
    def floor(width: int, version: str) -> float:
        return evaluate(
            "orth2021-corollary3",
            width=width,
            batch_size=4,
            depth=10**4,
            smallest_singular_value=0.4,
            version=version,
        ).value

    assert floor(10**6, "corrected") / floor(10**8, "corrected") == pytest.approx(100, rel=TOLERANCE.six_digits)
    assert floor(10**6, "printed") / floor(10**8, "printed") == pytest.approx(10, rel=TOLERANCE.six_digits)


# thesis2024, chapters 3, 4, 6


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


# thesis2024, chapter 5


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
        assert bound.respected or (bound.actual is not None and bound.actual < 1e-12)


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


# the record and the index


def test_a_bound_says_whether_it_speaks_about_the_input() -> None:
    open_question = rank2020.theorem_2(64, regularity=0.5)
    assert open_question.holds_for_input is None
    assert "≥" in str(open_question)
    assert "if its assumptions hold" in str(open_question)
    assert open_question.to_dict()["holds_for_input"] is None
    assert thesis2024.theorem_4_3(np.eye(3)).holds_for_input is True


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rank2020-theorem9", {}, "unknown theorem"),
        ("rank2020-theorem2", {"width": 64}, "needs regularity"),
        ("rank2020-theorem2", {"width": 64, "regularity": 0.5, "depth": 3}, "has no depth"),
        ("rank2020-theorem2", {"width": 0, "regularity": 0.5}, "width"),
        ("rank2020-theorem2", {"width": 64, "regularity": 2}, "regularity"),
        ("rank2020-theorem2", {"width": True, "regularity": 0.5}, "width"),
        ("rank2020-theorem2", {"width": 64, "regularity": "much"}, "regularity"),
        ("rank2020-lemma1", {"features": [[math.nan]]}, "finite"),
        ("rank2020-lemma1", {"features": "abc"}, "matrix"),
        ("rank2020-lemma1", {"features": [1.0, 2.0]}, "shape"),
        ("rank2020-lemma13", {"width": 4, "regularity": 0.5, "version": "revised"}, "version"),
        ("orth2021-lemma8", {"singular_values": [0.0, 0.0]}, "singular values"),
        ("orth2021-lemma8", {"singular_values": [1.0]}, "at least 2"),
        ("orth2021-lemma2", {"batch_size": 3}, "neither"),
        ("orth2021-lemma2", {"batch_size": 3, "singular_values": [1, 1]}, "3 singular values"),
        ("thesis2024-theorem4.3", {"features": [[0.0, 0.0], [1.0, 0.0]]}, "all zero"),
        ("thesis2024-theorem6.3", {"features": [[1.0, 0.0]]}, "square"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate(name, **arguments)


def test_the_index_names_every_theorem_as_it_names_itself() -> None:
    for name in THEOREMS:
        assert parameters(name)
        assert name.split("-")[0] in ("rank2020", "orth2021", "thesis2024")
    assert evaluate("rank2020-lemma13", width=4, regularity=0.5).name == "rank2020-lemma13"


def test_a_regularity_constant_needs_matrices() -> None:
    with pytest.raises(UsageError, match="draws, d, d"):
        rank2020.regularity_constant(np.ones(3))
    with pytest.raises(UsageError, match="positive trace"):
        rank2020.regularity_constant(np.zeros((2, 2)))
    assert rank2020.regularity_constant(rank2020.moment_of(np.eye(4) * 2)) == pytest.approx(1, rel=TOLERANCE.exact)
