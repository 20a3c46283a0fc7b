"""Each theorem against what it speaks about: bounds respected, corrections true, false printed statements refuted."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.integrate import quad

from sounding.errors import UsageError
from sounding.theory.bounds import THEOREMS, evaluate, orth2021, parameters, rank2020, thesis2024
from sounding.theory.bounds.spectrum import normalize_features, orthogonality_gap, second_moment
from tolerance import TOLERANCE, assert_within_standard_errors

Array = NDArray[np.float64]
singular = st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=12)


def unit_features(samples: int, width: int, rng: np.random.Generator) -> Array:
    """A batch whose features have mean square 1."""
    return normalize_features(rng.standard_normal((samples, width))) * math.sqrt(samples)


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


@given(singular)
def test_the_spectrum_integral_by_two_routes(values: list[float]) -> None:
    """The trapezoidal rule in ln t beside scipy's adaptive rule between the places where the integrand turns."""
    found = orth2021.expected_spectrum(values)
    assert found.sum() == pytest.approx(1, abs=TOLERANCE.two_routes)
    squares = np.array(values) ** 2 / np.max(np.square(values))

    def integrand(log_t: float, own: float) -> float:
        t = math.exp(log_t)
        return t * own / (1 + 2 * t * own) * math.exp(-0.5 * float(np.log1p(2 * t * squares).sum()))

    middle = -np.log(2 * squares)
    edges = [middle.min() - 40, *np.unique(middle), middle.max() + 90]
    for share, own in zip(found, squares, strict=True):
        parts = [quad(integrand, *ends, args=(own,), epsabs=0, epsrel=1e-11)[0] for ends in pairwise(edges)]
        assert share == pytest.approx(sum(parts), rel=TOLERANCE.two_routes)


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
    assert rank2020.regularity_constant(np.eye(4)) == pytest.approx(1, rel=TOLERANCE.exact)
