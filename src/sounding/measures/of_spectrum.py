"""Measures of a batch from its spectrum alone, for whoever holds many: one batched eigendecomposition serves them all.

`eigenvalues` are those of the second moment HᵀH/n, descending, as `spectrum` and `of_gram.spectrum` return them:
(..., k) in float64. Trailing zeros may be left out; then `samples` says how large the batch was. A `tolerance` is
relative to the largest eigenvalue: at or below it counts as zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sounding.errors import UsageError
from sounding.measures.inputs import divide

TIE = 1e-12  # a threshold met up to rounding is met: exact eigenvalues of 1/2 are common at the default threshold


def resolution(count: int, *, dtype: torch.dtype = torch.float64) -> float:
    """Eigenvalues of a computed Gram matrix below this share of the largest are rounding: count · eps of its dtype."""
    information = torch.finfo(dtype)
    # in 16 bits that can exceed every eigenvalue: there √count · eps, twice a bound on the rounding of the entries
    return min((count if information.bits > 16 else count**0.5) * float(information.eps), 0.5)


def numerical_rank(eigenvalues: Tensor, *, tolerance: float | None = None) -> Tensor:
    """#{λ > tolerance · λ_max}; the default tolerance is k · eps of float64."""
    return _settle(eigenvalues, resolved(eigenvalues, tolerance).sum(dim=-1).double())


def soft_rank(eigenvalues: Tensor, *, threshold: float = 0.5) -> Tensor:
    """#{λ ≥ threshold}, rank2020 eq. (3), of those that are not rounding."""
    check_threshold(threshold)
    reached = eigenvalues >= threshold * (1 - TIE)
    return _settle(eigenvalues, (reached & resolved(eigenvalues, None)).sum(dim=-1).double())


def participation_ratio(eigenvalues: Tensor) -> Tensor:
    """(Σλ)²/Σλ², rank2020 eq. (4)."""
    shares = _shares(eigenvalues)
    ratio = divide(torch.ones_like(shares[..., 0]), shares.square().sum(dim=-1), otherwise=0.0)
    return _settle(eigenvalues, torch.where(ratio > 0, ratio.clamp(1, eigenvalues.shape[-1]), 0.0))


def effective_rank(eigenvalues: Tensor, *, of: str = "eigenvalues") -> Tensor:
    """exp of the entropy of the shares of the eigenvalues, or of their roots with `of="singular_values"`."""
    if of not in ("eigenvalues", "singular_values"):
        raise UsageError(f"expected of='eigenvalues' or of='singular_values', got {of!r}")
    return _settle(eigenvalues, entropy_rank(eigenvalues if of == "eigenvalues" else roots(eigenvalues)))


def entropy_rank(weights: Tensor) -> Tensor:
    """exp(−Σ p ln p) with p the shares of non-negative weights; 0 when all are zero."""
    shares = _shares(weights)
    positive = shares > 0
    safe = torch.where(positive, shares, 1.0)
    rank = torch.exp(-(safe * safe.log()).sum(dim=-1)).clamp(1, weights.shape[-1])
    return torch.where(positive.any(dim=-1), rank, 0.0)


def orthogonality_gap(eigenvalues: Tensor, *, samples: int | None = None) -> Tensor:
    """√(Σ(λ/Σλ − 1/n)²) over all n eigenvalues of the Gram matrix, orth2021 eq. (2)."""
    count, n = _counts(eigenvalues, samples)
    shares = _shares(eigenvalues)
    missing = (n - count) / n**2  # of the zeros that were left out, (0 − 1/n)² each
    squared = (shares - 1 / n).square().sum(dim=-1) + missing
    most = (1 - 1 / n) ** 0.5
    gap = torch.where(eigenvalues.sum(dim=-1) > 0, roots(squared).clamp(max=most), most)
    return _settle(eigenvalues, gap)


def isometry_gap(eigenvalues: Tensor, *, samples: int | None = None, tolerance: float | None = None) -> Tensor:
    """−ln(geometric mean / arithmetic mean of the n eigenvalues), thesis2024 eq. (4.2); ∞ when any is zero.

    With δ = λ/mean − 1, whose sum vanishes, it is the mean of δ − ln(1 + δ): every term is ≥ 0 and small gaps keep
    their digits, where the difference of two logarithms would lose them.
    """
    count, n = _counts(eigenvalues, samples)
    full = resolved(eigenvalues, tolerance).all(dim=-1) & (count == n)
    safe = torch.where(full[..., None], eigenvalues, 1.0)
    ratio = safe / safe.mean(dim=-1, keepdim=True)
    excess = ratio - 1
    # log1p keeps the digits of a small δ; the clamp keeps the gradient of the branch that is not taken finite
    logarithm = torch.where(excess > -0.5, torch.log1p(excess.clamp(min=-0.75)), ratio.log())
    gap = (excess - logarithm).mean(dim=-1).clamp(min=0)
    return _settle(eigenvalues, torch.where(full, gap, torch.inf))


def isometry(eigenvalues: Tensor, *, samples: int | None = None, tolerance: float | None = None) -> Tensor:
    """Geometric mean over arithmetic mean of the n eigenvalues, in [0, 1], thesis2024 eq. (4.2)."""
    return torch.exp(-isometry_gap(eigenvalues, samples=samples, tolerance=tolerance))


def condition_number(eigenvalues: Tensor, *, tolerance: float | None = None) -> Tensor:
    """√(λ_max/λ_min) over the eigenvalues given: the ratio of the singular values; ∞ when the least counts as zero."""
    return ratio_of_extremes(eigenvalues, tolerance=tolerance).sqrt()


def ratio_of_extremes(values: Tensor, *, tolerance: float | None = None) -> Tensor:
    """Largest over smallest of descending values; ∞ when the smallest counts as zero."""
    full = resolved(values, tolerance).all(dim=-1)
    safe = torch.where(full[..., None], values, 1.0)
    return _settle(values, torch.where(full, safe[..., 0] / safe[..., -1], torch.inf))


def isotropy_distance(eigenvalues: Tensor, *, samples: int | None = None, normalized: bool = True) -> Tensor:
    """√Σ(σ − n^{-1/2})² with σ² = nλ, scaled to Σσ² = 1 unless told otherwise; orth2021 Lemma 2."""
    _, n = _counts(eigenvalues, samples)
    distance = amplitude_distance(roots(eigenvalues * n), samples=n, normalized=normalized)
    return _settle(eigenvalues, distance)


def amplitude_distance(singular: Tensor, *, samples: int, normalized: bool) -> Tensor:
    """The distance from the singular values themselves, whose gradients stay finite at zero."""
    if normalized:
        norm = torch.linalg.vector_norm(singular, dim=-1, keepdim=True)
        singular = divide(singular, norm, otherwise=0.0)
    missing = (samples - singular.shape[-1]) / samples  # of the zeros that were left out, (0 − n^{-1/2})² each
    squared = (singular - samples**-0.5).square().sum(dim=-1) + missing
    return roots(squared)


def check_threshold(threshold: float) -> None:
    """UsageError unless the threshold is positive: at 0 rounding would decide."""
    if not threshold > 0:
        raise UsageError(f"expected a threshold above 0, got {threshold}", hint="numerical_rank for an exact rank")


def roots(values: Tensor) -> Tensor:
    """Square roots with gradient 0, not ∞, at zero."""
    positive = values > 0
    # twice `where`: the gradient of the branch that is not taken is multiplied by 0, and 0 · ∞ is NaN
    return torch.where(positive, torch.where(positive, values, 1.0).sqrt(), 0.0)


def resolved(eigenvalues: Tensor, tolerance: float | None) -> Tensor:
    """Which values exceed the tolerance (count · eps unless given) times the largest."""
    share = resolution(eigenvalues.shape[-1]) if tolerance is None else tolerance
    if not 0 <= share < 1:
        raise UsageError(f"expected a tolerance of at least 0 and less than 1, got {share}")
    return eigenvalues > share * eigenvalues.amax(dim=-1, keepdim=True)


def _settle(eigenvalues: Tensor, value: Tensor) -> Tensor:
    """NaN where the spectrum is: comparisons would have turned it into a rank of zero."""
    return torch.where(torch.isfinite(eigenvalues).all(dim=-1), value, torch.nan)


def _shares(weights: Tensor) -> Tensor:
    return divide(weights, weights.sum(dim=-1, keepdim=True), otherwise=0.0)


def _counts(eigenvalues: Tensor, samples: int | None) -> tuple[int, int]:
    count = eigenvalues.shape[-1]
    if samples is not None and samples < count:
        raise UsageError(f"expected at least as many samples as eigenvalues ({count}), got samples={samples}")
    return count, count if samples is None else samples
