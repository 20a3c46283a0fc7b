"""Measures of a batch from its Gram matrix alone, for whoever holds the inner products and not the features.

Every function takes G = HHᵀ, (..., samples, samples), at any positive scale, and returns (...) in float64. Those with a
`tolerance` or threshold take one eigendecomposition, the others norms of G alone. Eigenvalues below samples · eps of
the dtype, relative to the largest, count as zero: the rounding of a computed G.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sounding.errors import UsageError
from sounding.measures import of_spectrum
from sounding.measures.inputs import Scaled, divide, scale_gram

ASYMMETRY = 1e-2  # beyond any rounding, also of bfloat16: then it is no Gram matrix


def participation_ratio(gram: Tensor) -> Tensor:
    """(tr G)²/‖G‖_F², rank2020 eq. (4); see `sounding.measures.participation_ratio`."""
    scaled = scale_gram(gram)
    return scaled.settle(ratio_of(scaled.matrix))


def orthogonality_gap(gram: Tensor) -> Tensor:
    """‖G/tr G − I/n‖_F, orth2021 eq. (2); see `sounding.measures.orthogonality_gap`."""
    scaled = scale_gram(gram)
    return scaled.settle(gap_of(scaled.matrix, samples=gram.shape[-1]))


def mean_cosine(gram: Tensor) -> Tensor:
    """Mean of G_ij/√(G_ii G_jj) over i ≠ j; see `sounding.measures.mean_cosine`."""
    scaled = scale_gram(gram)
    return scaled.settle(_mean_over_pairs(*_cosines(scaled.matrix)))


def gradient_alignment(gram: Tensor) -> Tensor:
    """Mean of |G_ij|/√(G_ii G_jj) over i ≠ j; see `sounding.measures.gradient_alignment`."""
    scaled = scale_gram(gram)
    cosines, present = _cosines(scaled.matrix)
    return scaled.settle(_mean_over_pairs(cosines.abs(), present))


def distinct_share(gram: Tensor) -> Tensor:
    """1 − (1ᵀG1/n)/tr G; see `sounding.measures.distinct_share`."""
    scaled = scale_gram(gram)
    n = gram.shape[-1]
    trace = _trace(scaled.matrix)
    common = divide(scaled.matrix.sum(dim=(-2, -1)) / n, trace, otherwise=1.0)
    return scaled.settle((1 - common).clamp(0, 1))


def log_norm(gram: Tensor) -> Tensor:
    """½ ln tr G; see `sounding.measures.log_norm`."""
    scaled = scale_gram(gram)
    return scaled.settle(half_log(_trace(scaled.matrix)) + scaled.scale.log() / 2)


def spectrum(gram: Tensor) -> Tensor:
    """The eigenvalues of G/n, descending, (..., samples): those of the second moment HᵀH/n and zeros.

    What is rounding is returned as zero. Input for the functions of `of_spectrum`; NaN where G is not finite.

    >>> spectrum(torch.diag(torch.tensor([2.0, 4.0])))
    tensor([2., 1.], dtype=torch.float64)
    """
    scaled, share = _with_tolerance(gram, None)
    values = _eigenvalues(scaled)
    values = torch.where(of_spectrum.resolved(values, share), values, 0.0)
    values = values * (scaled.scale / gram.shape[-1])[..., None]
    return torch.where(scaled.finite[..., None], values, torch.nan)


def numerical_rank(gram: Tensor, *, tolerance: float | None = None) -> Tensor:
    """#{λ(G) > tolerance · λ_max}; see `sounding.measures.numerical_rank`."""
    scaled, share = _with_tolerance(gram, tolerance)
    return scaled.settle(of_spectrum.numerical_rank(_eigenvalues(scaled), tolerance=share))


def soft_rank(gram: Tensor, *, threshold: float = 0.5) -> Tensor:
    """#{λ(G)/n ≥ threshold}, rank2020 eq. (3); see `sounding.measures.soft_rank`."""
    return of_spectrum.soft_rank(spectrum(gram), threshold=threshold)


def effective_rank(gram: Tensor, *, of: str = "eigenvalues") -> Tensor:
    """exp of the entropy of the eigenvalues' shares; see `sounding.measures.effective_rank`."""
    return of_spectrum.effective_rank(spectrum(gram), of=of)


def condition_number(gram: Tensor, *, tolerance: float | None = None) -> Tensor:
    """√(λ_max/λ_min) of G, the ratio of the batch's singular values; ∞ for more samples than features."""
    scaled, share = _with_tolerance(gram, tolerance)
    return scaled.settle(of_spectrum.condition_number(_eigenvalues(scaled), tolerance=share))


def isotropy_distance(gram: Tensor, *, normalized: bool = True) -> Tensor:
    """√Σ(√λ(G) − n^{-1/2})², orth2021 Lemma 2; see `sounding.measures.isotropy_distance`."""
    return of_spectrum.isotropy_distance(spectrum(gram), normalized=normalized)


def isometry(gram: Tensor, *, tolerance: float | None = None) -> Tensor:
    """How close a Gram matrix is to a multiple of the identity: det(G)^{1/n} / (tr G/n), from 0 to 1.

    thesis2024 eq. (4.2). 1 exactly for multiples of the identity (Lemma 4.2 prints "identity"), 0 exactly for a
    degenerate batch. Scale- and rotation-invariant; normalizing every sample never lowers it (Theorem 4.3).

    Args:
        gram: (..., samples, samples), symmetric; `gram(features)` for a batch, `second_moment(features)` for the
            isometry across features.
        tolerance: eigenvalues at or below this share of the largest count as zero; by default samples · eps of dtype.

    >>> isometry(torch.diag(torch.tensor([1.0, 4.0])))
    tensor(0.8000, dtype=torch.float64)
    """
    return torch.exp(-isometry_gap(gram, tolerance=tolerance))


def isometry_gap(gram: Tensor, *, tolerance: float | None = None) -> Tensor:
    """−ln isometry(G) = ln(tr G/n) − (1/n) ln det G, from 0 to ∞ (thesis2024 section 4.1, and eq. 6.5 for G = XXᵀ).

    ∞ for a degenerate batch, where its gradient is reported as 0. A sum of terms ≥ 0, so that gaps of 1e-20 keep their
    digits, as the decay over depth needs.

    >>> isometry_gap(torch.stack([2 * torch.eye(3), torch.ones(3, 3)]))
    tensor([0., inf], dtype=torch.float64)
    """
    scaled, share = _with_tolerance(gram, tolerance)
    with torch.no_grad():  # the largest entry is between 1 and 2: no scale is needed
        skew = (scaled.matrix - scaled.matrix.mT).abs().amax(dim=(-2, -1))
    if bool((skew > ASYMMETRY).any()):
        raise UsageError(
            "expected a symmetric Gram matrix, got one that differs from its transpose",
            hint="isometry_gap(gram(features)): it is defined on inner products, not on features",
        )
    return scaled.settle(of_spectrum.isometry_gap(_eigenvalues(scaled), tolerance=share))


def ratio_of(small: Tensor) -> Tensor:
    """(tr S)²/‖S‖_F² of either Gram matrix, in [1, size]; 0 for zero."""
    ratio = divide(_trace(small).square(), small.square().sum(dim=(-2, -1)), otherwise=0.0)
    return torch.where(ratio > 0, ratio.clamp(1, small.shape[-1]), 0.0)


def gap_of(small: Tensor, *, samples: int) -> Tensor:
    """The orthogonality gap from either Gram matrix S of size k ≤ n: V² = ‖S/tr S − I/k‖² + 1/k − 1/n."""
    size = small.shape[-1]
    trace = _trace(small)
    shares = divide(small, trace[..., None, None], otherwise=0.0)
    # a norm of a difference: √(‖S‖²/tr² − 1/n) would lose half the digits near an orthogonal batch
    deviation = shares - torch.eye(size, dtype=small.dtype, device=small.device) / size
    squared = deviation.square().sum(dim=(-2, -1)) + (1 / size - 1 / samples)  # n − k more eigenvalues are zero
    most = (1 - 1 / samples) ** 0.5
    return torch.where(trace > 0, of_spectrum.roots(squared).clamp(max=most), most)


def half_log(squared: Tensor) -> Tensor:
    """½ ln of a sum of squares, −∞ for zero, where its gradient is reported as 0."""
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1.0).log() / 2, -torch.inf)


def _with_tolerance(gram: Tensor, tolerance: float | None) -> tuple[Scaled, float]:
    scaled = scale_gram(gram)
    if tolerance is None:
        return scaled, of_spectrum.resolution(gram.shape[-1], dtype=gram.dtype)
    return scaled, tolerance


def _eigenvalues(scaled: Scaled) -> Tensor:
    ascending: Tensor = torch.linalg.eigvalsh(scaled.matrix)
    return ascending.flip(-1).clamp(min=0)  # below 0 only by rounding


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(dim=-1)


def _cosines(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines between samples, zero for samples of length zero; and which samples have a length."""
    squares = matrix.diagonal(dim1=-2, dim2=-1)
    present = squares > 0
    # twice `where`, so that the gradient of the branch not taken stays finite
    inverse = torch.where(present, torch.where(present, squares, 1.0).rsqrt(), 0.0)
    return matrix * inverse[..., :, None] * inverse[..., None, :], present


def _mean_over_pairs(cosines: Tensor, present: Tensor) -> Tensor:
    """Mean over pairs of different samples that both have a direction; 0 when there is no such pair."""
    count = present.sum(dim=-1).double()
    off_diagonal = cosines - torch.diag_embed(cosines.diagonal(dim1=-2, dim2=-1))
    mean = divide(off_diagonal.sum(dim=(-2, -1)), count * (count - 1), otherwise=0.0)
    return mean.clamp(-1, 1)
