"""The measures against closed forms, each other, their claims, and awkward inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batches import batches, scales
from sounding import measures
from sounding.errors import UsageError
from sounding.measures import of_gram, of_spectrum
from tolerance import TOLERANCE

OF_FEATURES = {name: f for name, f in measures.MEASURES.items() if name not in ("isometry", "isometry_gap")}
SCALE_FREE = sorted(set(OF_FEATURES) - {"soft_rank", "log_norm"})


def value_of(name: str, batch: Tensor) -> float:
    """Any measure of a batch, through its Gram matrix where it is defined on one."""
    measure = measures.MEASURES[name]
    return float(measure(batch if name in OF_FEATURES else measures.gram(batch)))


def close(left: float | Tensor, right: float | Tensor, tolerance: float = TOLERANCE.closed_form) -> bool:
    return float(left) == float(right) or abs(float(left) - float(right)) <= tolerance * max(1.0, abs(float(right)))


def diagonal(*entries: float) -> Tensor:
    return torch.diag(torch.tensor(entries, dtype=torch.float64))


CLOSED_FORMS = [
    # batch with singular values 1, 2, 2 and three samples: λ = 1/3, 4/3, 4/3, shares 1/9, 4/9, 4/9
    ("numerical_rank", 3.0),
    ("soft_rank", 2.0),
    ("participation_ratio", 81 / 33),
    ("effective_rank", math.exp(math.log(9) - 8 / 9 * math.log(4))),
    ("orthogonality_gap", math.sqrt(33 / 81 - 1 / 3)),
    ("isometry", 16 ** (1 / 3) / 3),
    ("isometry_gap", math.log(3) - math.log(16) / 3),
    ("mean_cosine", 0.0),
    ("gradient_alignment", 0.0),
    ("distinct_share", 2 / 3),  # the mean sample is (1, 2, 2)/3 of squared length 1, the mean square 3
    ("condition_number", 2.0),
    ("log_norm", math.log(3)),
    ("isotropy_distance", math.sqrt(2 - 2 * (5 / 3) / math.sqrt(3))),
]


@pytest.mark.parametrize(("name", "expected"), CLOSED_FORMS)
def test_closed_forms_on_a_diagonal_batch(name: str, expected: float) -> None:
    assert close(value_of(name, diagonal(1, 2, 2)), expected)


def test_every_measure_has_a_closed_form_here() -> None:
    assert {name for name, _ in CLOSED_FORMS} == set(measures.MEASURES)


def test_gram_and_second_moment_of_a_non_square_batch() -> None:
    """Rows are samples: the Gram matrix is samples × samples, the second moment features × features."""
    batch = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0]], dtype=torch.float64)
    assert measures.gram(batch).tolist() == [[5.0, 2.0], [2.0, 10.0]]
    assert (2 * measures.second_moment(batch)).tolist() == [[1.0, 2.0, 0.0], [2.0, 5.0, 3.0], [0.0, 3.0, 9.0]]


@given(batches(), st.sampled_from(sorted(measures.MEASURES)))
def test_bounds(batch: Tensor, name: str) -> None:
    n, d = batch.shape
    least, greatest = {
        "numerical_rank": (1, min(n, d)),
        "soft_rank": (0, min(n, d)),
        "participation_ratio": (1, min(n, d)),
        "effective_rank": (1, min(n, d)),
        "orthogonality_gap": (math.sqrt(max(1 / d - 1 / n, 0)), math.sqrt(1 - 1 / n)),
        "isometry": (0, 1),
        "isometry_gap": (0, math.inf),
        "mean_cosine": (-1 / max(n - 1, 1), 1),
        "gradient_alignment": (0, 1),
        "distinct_share": (0, 1),
        "condition_number": (1, math.inf),
        "log_norm": (-math.inf, math.inf),
        "isotropy_distance": (0, math.sqrt(2 - 2 / math.sqrt(n))),
    }[name]
    assert least - TOLERANCE.closed_form <= value_of(name, batch) <= greatest + TOLERANCE.closed_form


@given(batches(), scales(), st.sampled_from(SCALE_FREE))
def test_scale_invariance(batch: Tensor, scale: float, name: str) -> None:
    batch = torch.where(batch.abs() > 1e-9, batch, 0)  # keep the smallest entries clear of the subnormal numbers
    assert close(value_of(name, batch * scale), value_of(name, batch), TOLERANCE.two_routes)


@given(batches(), st.integers(-900, 900), st.sampled_from(SCALE_FREE))
def test_scaling_by_a_power_of_two_changes_not_one_bit(batch: Tensor, exponent: int, name: str) -> None:
    batch = torch.where(batch.abs() > 1e-9, batch, 0)
    assert value_of(name, batch * 2.0**exponent) == value_of(name, batch)


@given(batches(), scales())
def test_isometry_is_scale_invariant(batch: Tensor, scale: float) -> None:
    """Lemma 4.2 of thesis2024, first part."""
    gram = measures.gram(batch)
    assert close(measures.isometry(gram * scale), measures.isometry(gram), TOLERANCE.two_routes)


@given(batches(), scales())
def test_log_norm_adds_the_log_of_a_factor(batch: Tensor, scale: float) -> None:
    assert close(measures.log_norm(batch * scale), measures.log_norm(batch) + math.log(scale), TOLERANCE.two_routes)


@given(batches(), st.integers(0, 2**31), st.sampled_from(sorted(measures.MEASURES)))
def test_rotation_and_permutation_invariance(batch: Tensor, seed: int, name: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(batch.shape[1], batch.shape[1], dtype=torch.float64, generator=generator)
    moved = batch[torch.randperm(len(batch), generator=generator)] @ torch.linalg.qr(square).Q
    assert close(value_of(name, moved), value_of(name, batch), TOLERANCE.six_digits)


@given(batches())
def test_participation_ratio_never_exceeds_the_rank(batch: Tensor) -> None:
    """Lemma 1 of rank2020, first side, on batches of every rank, including nearly degenerate ones."""
    ratio, entropy = measures.participation_ratio(batch), measures.effective_rank(batch)
    amplitude = measures.effective_rank(batch, of="singular_values")
    rank = measures.numerical_rank(batch)
    slack = 1 + TOLERANCE.closed_form
    assert ratio <= entropy * slack
    assert entropy <= amplitude * slack
    assert amplitude <= rank * slack


@given(batches(min_samples=2), st.floats(0.01, 1.0))
def test_soft_rank_bounds_the_participation_ratio_at_unit_mean_square(batch: Tensor, threshold: float) -> None:
    """Lemma 1 of rank2020, second side, where its proof holds: the mean square of every feature is 1."""
    mean_square = batch.square().mean(dim=0)
    normalized = batch[:, mean_square > 1e-20] / mean_square[mean_square > 1e-20].sqrt()
    soft = measures.soft_rank(normalized, threshold=threshold)
    assert soft >= (1 - threshold) ** 2 * measures.participation_ratio(normalized) - TOLERANCE.closed_form
    assert soft <= measures.numerical_rank(normalized)


def test_the_second_side_fails_at_another_scale() -> None:
    small = 0.1 * torch.eye(3)
    assert measures.soft_rank(small) == 0
    assert close(measures.participation_ratio(small), 3)


def test_soft_rank_counts_an_eigenvalue_at_the_threshold() -> None:
    batch = math.sqrt(3) * torch.eye(3, dtype=torch.float64)  # λ = 1, three times, up to rounding
    assert measures.soft_rank(batch, threshold=1.0) == 3
    assert measures.soft_rank(batch, threshold=1.0 + TOLERANCE.closed_form) == 0


def test_soft_rank_does_not_count_the_rounding_of_a_huge_direction() -> None:
    assert measures.soft_rank(torch.full((3, 4), 1e300, dtype=torch.float64)) == 1


@given(batches(full_rank=True, min_samples=2), st.data())
def test_normalizing_the_samples_raises_isometry(batch: Tensor, data: st.DataObject) -> None:
    """Theorem 4.3 of thesis2024, with its quantitative factor; (4.7) is an inequality, tight for equal norms only."""
    factors = data.draw(st.lists(st.floats(0.1, 10), min_size=len(batch), max_size=len(batch)))
    batch = batch * torch.tensor(factors, dtype=torch.float64)[:, None]
    lengths = batch.norm(dim=1)
    before = measures.isometry(measures.gram(batch))
    after = measures.isometry(measures.gram(batch / lengths[:, None]))
    factor = 1 + lengths.var(correction=0) / lengths.mean() ** 2
    assert after >= before * factor * (1 - TOLERANCE.six_digits)
    exact = lengths.square().mean() / lengths.square().log().mean().exp()
    assert close(after, before * exact, TOLERANCE.six_digits)


def test_isometry_is_one_only_for_multiples_of_the_identity_and_zero_only_for_degenerate() -> None:
    """Lemma 4.2 of thesis2024, second and third parts; the printed "only the identity" forgets the multiples."""
    assert measures.isometry(3.7 * torch.eye(5)) == 1
    assert measures.isometry(torch.eye(5) + 1e-3 * torch.diag(torch.arange(5.0))) < 1
    assert measures.isometry(measures.gram(torch.ones(3, 4))) == 0
    assert measures.isometry(diagonal(1, 1e-12)) > 0


@pytest.mark.parametrize("deviation", [1e-2, 1e-5, 1e-9])
def test_small_isometry_gaps_keep_their_digits(deviation: float) -> None:
    """For eigenvalues 1 ± δ the gap is −½ ln(1 − δ²) = δ²/2 + …, far below eps for δ = 1e-9."""
    gap = measures.isometry_gap(diagonal(1 + deviation, 1 - deviation))
    assert abs(float(gap) / (-0.5 * math.log1p(-(deviation**2))) - 1) < TOLERANCE.six_digits


def test_large_isometry_gaps_keep_their_digits() -> None:
    gap = measures.isometry_gap(diagonal(1, 1e-14))
    assert close(gap, math.log((1 + 1e-14) / 2) - math.log(1e-14) / 2)


@pytest.mark.parametrize("deviation", [1e-3, 1e-8])
def test_small_orthogonality_gaps_keep_their_digits(deviation: float) -> None:
    """Two samples of squared lengths 1 ± δ: V = δ/√2, which √(‖G‖²/tr² − 1/n) would lose at δ = 1e-8."""
    batch = torch.diag(torch.tensor([1 + deviation, 1 - deviation], dtype=torch.float64).sqrt())
    assert abs(float(measures.orthogonality_gap(batch)) / (deviation / math.sqrt(2)) - 1) < TOLERANCE.six_digits


@given(batches())
def test_orthogonality_gap_and_participation_ratio_are_one_number(batch: Tensor) -> None:
    inverse = measures.orthogonality_gap(batch) ** 2 + 1 / len(batch)
    assert close(1 / inverse, measures.participation_ratio(batch))


def test_orthogonality_gap_is_the_definition() -> None:
    """orth2021 eq. (2), literally, for more samples than features and for fewer."""
    for shape in ((6, 3), (3, 6)):
        batch = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        literal = batch @ batch.T / batch.square().sum() - torch.eye(len(batch)) / len(batch)
        assert close(measures.orthogonality_gap(batch), literal.norm())


@given(batches(min_samples=2))
def test_mean_cosine_is_the_definition(batch: Tensor) -> None:
    cosines = torch.nn.functional.cosine_similarity(batch[:, None], batch[None], dim=-1)
    off_diagonal = cosines[~torch.eye(len(batch), dtype=torch.bool)]
    assert close(measures.mean_cosine(batch), off_diagonal.mean(), TOLERANCE.two_routes)
    assert close(measures.gradient_alignment(batch), off_diagonal.abs().mean(), TOLERANCE.two_routes)


@given(batches(min_samples=2), st.data())
def test_cosines_forget_the_length_of_every_sample(batch: Tensor, data: st.DataObject) -> None:
    factors = data.draw(st.lists(scales(), min_size=len(batch), max_size=len(batch)))
    stretched = batch * torch.tensor(factors, dtype=torch.float64)[:, None]
    for name in ("mean_cosine", "gradient_alignment"):
        assert close(value_of(name, stretched), value_of(name, batch), TOLERANCE.two_routes)


def test_gradients_of_a_collapsed_layer_are_collinear() -> None:
    """Proposition 19 of rank2020: ∂ℓ_i/∂W = δ_i h_iᵀ, so for h_i = c_i h each row is one direction up to sign."""
    generator = torch.Generator().manual_seed(2)
    signals = torch.randn(7, 3, dtype=torch.float64, generator=generator)
    lengths = torch.randn(7, 1, dtype=torch.float64, generator=generator)
    collapsed = lengths * torch.randn(1, 11, dtype=torch.float64, generator=generator)
    per_output = (signals[:, :, None] * collapsed[:, None, :]).movedim(1, 0)
    assert measures.gradient_alignment(per_output).shape == (3,)
    assert torch.allclose(measures.gradient_alignment(per_output), torch.ones(3, dtype=torch.float64))


def test_gradient_alignment_of_random_directions() -> None:
    """E|cos| = √(2/(πd))·(1 + O(1/d)) in d dimensions: exactly Γ(d/2)/(√π Γ((d+1)/2))."""
    d = 400
    batch = torch.randn(300, d, generator=torch.Generator().manual_seed(3))
    expected = math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2)) / math.sqrt(math.pi)
    pairs = 300 * 299 / 2
    stderr = expected * math.sqrt(math.pi / 2 - 1) / math.sqrt(pairs)
    assert abs(float(measures.gradient_alignment(batch)) - expected) < TOLERANCE.standard_errors * stderr


@given(batches())
def test_distinct_share_is_one_minus_the_common_part(batch: Tensor) -> None:
    common = batch.mean(dim=0).square().sum() / batch.square().sum(dim=1).mean()
    assert close(measures.distinct_share(batch), 1 - common)
    directions = batch / batch.norm(dim=1, keepdim=True)
    expected = (1 - 1 / len(batch)) * (1 - measures.mean_cosine(batch))
    assert close(measures.distinct_share(directions), expected, TOLERANCE.two_routes)


def test_distinct_share_keeps_its_digits_near_collapse() -> None:
    batch = torch.ones(2, 1, dtype=torch.float64)
    batch[0] += 2.0**-50
    assert close(float(measures.distinct_share(batch)) / 2.0**-102, 1, TOLERANCE.two_routes)


def test_isotropy_distance_by_the_bures_formula() -> None:
    """W₂² between centred Gaussians is tr A + tr B − 2 tr (A^½ B A^½)^½: a route without singular values of H."""
    batch = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    batch = batch / batch.norm()
    covariance, n = measures.gram(batch), 5
    cross = torch.linalg.eigvalsh(covariance / n).clamp(min=0).sqrt().sum()
    squared = covariance.trace() + 1 - 2 * cross
    assert close(measures.isotropy_distance(batch) ** 2, squared, TOLERANCE.six_digits)  # √ of rounded zeros
    assert close(measures.isotropy_distance(2 * batch, normalized=False), _distance(2 * batch))


def _distance(batch: Tensor) -> float:
    singular = torch.linalg.svdvals(batch)
    padded = torch.cat([singular, singular.new_zeros(len(batch) - len(singular))])
    return float((padded - len(batch) ** -0.5).norm())


@given(batches(min_samples=2))
def test_isotropy_distance_keeps_the_bound_of_lemma_2(batch: Tensor) -> None:
    """orth2021: W₂² ≤ n V² ≤ 2n V at ‖H‖_F = 1."""
    gap, n = measures.orthogonality_gap(batch), len(batch)
    assert measures.isotropy_distance(batch) ** 2 <= n * gap**2 + TOLERANCE.closed_form


ROUTES = sorted(set(OF_FEATURES) - {"condition_number"})


@given(batches(), st.sampled_from(ROUTES))
def test_gram_route_agrees_with_the_route_through_features(batch: Tensor, name: str) -> None:
    batch = batch / batch.norm()
    through_gram = getattr(of_gram, name)(measures.gram(batch))
    if name in ("numerical_rank", "soft_rank"):
        spread = torch.linalg.svdvals(batch)
        if ((spread > 1e-14) & (spread < 1e-6)).any():
            return  # the Gram matrix resolves singular values to √eps only
    tolerance = TOLERANCE.six_digits if name == "isotropy_distance" else TOLERANCE.two_routes
    assert close(through_gram, measures.MEASURES[name](batch), tolerance)


@given(batches(full_rank=True))
def test_condition_number_by_both_routes_and_by_torch(batch: Tensor) -> None:
    expected = torch.linalg.cond(batch)
    assert close(measures.condition_number(batch) / expected, 1, TOLERANCE.two_routes)
    assert close(of_gram.condition_number(measures.gram(batch)) / expected, 1, TOLERANCE.two_routes)


@given(batches())
def test_spectrum_serves_every_spectral_measure(batch: Tensor) -> None:
    n = len(batch)
    eigenvalues = measures.spectrum(batch)
    assert close(of_spectrum.participation_ratio(eigenvalues), measures.participation_ratio(batch))
    assert close(of_spectrum.orthogonality_gap(eigenvalues, samples=n), measures.orthogonality_gap(batch))
    assert close(of_spectrum.effective_rank(eigenvalues), measures.effective_rank(batch))
    amplitude = of_spectrum.effective_rank(eigenvalues, of="singular_values")
    assert close(amplitude, measures.effective_rank(batch, of="singular_values"))
    assert of_spectrum.soft_rank(eigenvalues, threshold=0.01) == measures.soft_rank(batch, threshold=0.01)
    for normalized in (True, False):
        distance = of_spectrum.isotropy_distance(eigenvalues, samples=n, normalized=normalized)
        assert close(distance, measures.isotropy_distance(batch, normalized=normalized))
    if n <= batch.shape[1]:
        padded = of_gram.spectrum(measures.gram(batch))
        assert torch.allclose(padded, eigenvalues, rtol=0, atol=TOLERANCE.exact)


def test_isometry_from_a_spectrum_knows_about_left_out_zeros() -> None:
    eigenvalues = torch.tensor([4.0, 1.0], dtype=torch.float64)
    assert close(of_spectrum.isometry(eigenvalues), 0.8)
    assert of_spectrum.isometry(eigenvalues, samples=3) == 0
    assert of_spectrum.isometry_gap(eigenvalues, samples=3) == math.inf
    with pytest.raises(UsageError, match="samples=1"):
        of_spectrum.orthogonality_gap(eigenvalues, samples=1)
