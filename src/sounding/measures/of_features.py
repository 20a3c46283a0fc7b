"""Measures of a batch from its features: (..., samples, features) in, (...) in float64 out.

H is the batch, rows are samples (the papers write Hᵀ), n their number, d the number of features, σ the singular values
of H and λ = σ²/n the eigenvalues of the second moment HᵀH/n. All functions batch over leading axes, accept float64,
float32, float16 and bfloat16, are differentiable unless they count, and give NaN for a batch that holds NaN or
infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sounding.errors import UsageError
from sounding.measures import of_gram, of_spectrum
from sounding.measures.inputs import (
    Scaled,
    as_float64,
    check_matrix,
    divide,
    power_of_two_below,
    scale_features,
    small_gram,
)


def gram(features: Tensor) -> Tensor:
    """The inner products between samples, G = HHᵀ: (..., samples, samples), float64 (thesis2024 Theorem 4.3).

    Squares overflow in float64 beyond 1e154; the measures of features scale first and don't.

    >>> gram(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    tensor([[1., 1.],
            [1., 2.]], dtype=torch.float64)
    """
    check_matrix(features, name="features", axes="(..., samples, features)")
    wide = as_float64(features)
    return wide @ wide.mT


def second_moment(features: Tensor) -> Tensor:
    """The uncentred covariance of the features, M = HᵀH/n: (..., features, features), float64 (rank2020 eq. 2).

    >>> second_moment(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
    tensor([[1., 1.],
            [1., 2.]], dtype=torch.float64)
    """
    check_matrix(features, name="features", axes="(..., samples, features)")
    wide = as_float64(features)
    return wide.mT @ wide / features.shape[-2]


def singular_values(features: Tensor) -> Tensor:
    """The singular values σ of H, descending: (..., min(samples, features)), float64; NaN where H is not finite.

    >>> singular_values(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    tensor([4., 3.], dtype=torch.float64)
    """
    scaled = scale_features(features)
    values = torch.linalg.svdvals(scaled.matrix) * scaled.scale[..., None]
    return torch.where(scaled.finite[..., None], values, torch.nan)


def spectrum(features: Tensor) -> Tensor:
    """The eigenvalues λ = σ²/n of the second moment, descending: (..., min(samples, features)), float64.

    What the functions of `sounding.measures.of_spectrum` take (with `samples=n` where they ask). From the singular
    values, eigenvalues down to 1e-32 of the largest are right; the Gram matrix would give half as many digits.

    >>> spectrum(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    tensor([8.0000, 4.5000], dtype=torch.float64)
    """
    return singular_values(features).square() / features.shape[-2]


def numerical_rank(features: Tensor, *, tolerance: float | None = None) -> Tensor:
    """How many singular values are not zero to rounding, #{σ > tolerance · σ_max}; a count, so without gradient.

    rank2020 uses torch.matrix_rank for it, rank2020v1 a fixed 1e-9.

    Args:
        tolerance: relative to the largest singular value. By default max(samples, features) · eps of the dtype, as
            torch and numpy have it; for 16 bits, where that can exceed 1, √min(samples, features) · eps.

    >>> numerical_rank(torch.tensor([[1.0, 2.0], [2.0, 4.0]]))
    tensor(1., dtype=torch.float64)
    """
    singular, scaled, share = _resolved_amplitudes(features, tolerance)
    return scaled.settle(of_spectrum.numerical_rank(singular, tolerance=share))


def soft_rank(features: Tensor, *, threshold: float = 0.5) -> Tensor:
    """How many directions carry a mean square of at least the threshold, #{λ ≥ threshold} (rank2020 eq. 3).

    It is meant for features of unit mean square, as after batch norm, where soft_rank ≥ (1 − threshold)² ·
    participation_ratio (Lemma 1); at another scale it need not hold: 0.1·I₃ has soft rank 0 and participation ratio 3.
    What is rounding of a huge direction is not counted. A count, so without gradient.

    Args:
        threshold: above 0, in units of the mean square; an eigenvalue that meets it to 12 digits counts.

    >>> soft_rank(torch.tensor([[2.0, 0.0], [0.0, 0.1]]))
    tensor(1., dtype=torch.float64)
    """
    of_spectrum.check_threshold(threshold)
    singular, scaled, share = _resolved_amplitudes(features, None)
    least = (threshold * features.shape[-2]) ** 0.5 * (1 - of_spectrum.TIE)
    reached = singular * scaled.scale[..., None] >= least  # compared as amplitudes: their squares may overflow
    return scaled.settle((reached & of_spectrum.resolved(singular, share)).sum(dim=-1).double())


def participation_ratio(features: Tensor) -> Tensor:
    """How many directions carry the batch: (Σλ)²/Σλ², from 1 (collinear samples) to the rank; 0 for an all-zero batch.

    The r(H) of rank2020 eq. (4), which is not the stable rank ‖H‖_F²/‖H‖₂² that inspired it. Scale- and
    rotation-invariant, differentiable.

    >>> participation_ratio(torch.eye(3))
    tensor(3., dtype=torch.float64)
    """
    scaled = scale_features(features)
    return scaled.settle(of_gram.ratio_of(small_gram(scaled.matrix)))


def effective_rank(features: Tensor, *, of: str = "eigenvalues") -> Tensor:
    """How many directions carry the batch, by entropy: exp(−Σ p ln p) with p = λ/Σλ; 0 for an all-zero batch.

    Between participation_ratio and the rank: both are exponentials of Rényi entropies of the same shares, of order 1
    here and 2 there. Scale- and rotation-invariant, differentiable.

    Args:
        of: "eigenvalues", or "singular_values" for p = σ/Σσ, the larger effective rank of Roy and Vetterli (2007).

    >>> effective_rank(torch.ones(2, 3))
    tensor(1., dtype=torch.float64)
    """
    if of not in ("eigenvalues", "singular_values"):
        raise UsageError(f"expected of='eigenvalues' or of='singular_values', got {of!r}")
    scaled = scale_features(features)
    singular = torch.linalg.svdvals(scaled.matrix)
    return scaled.settle(of_spectrum.entropy_rank(singular.square() if of == "eigenvalues" else singular))


def orthogonality_gap(features: Tensor) -> Tensor:
    """How far the samples are from orthogonal and equally long: V(H) = ‖HHᵀ/‖H‖_F² − I/n‖_F.

    orth2021 eq. (2); the norm (its appendix E uses the square). From 0 (an orthogonal batch) to √(1 − 1/n) (collinear
    samples, and a zero batch, for which the papers leave it undefined); at least √(1/d − 1/n) when n > d. V² + 1/n is
    the inverse of the participation ratio. Scale- and rotation-invariant, differentiable.

    >>> orthogonality_gap(torch.stack([torch.eye(2), torch.ones(2, 2)]))
    tensor([0.0000, 0.7071], dtype=torch.float64)
    """
    scaled = scale_features(features)
    return scaled.settle(of_gram.gap_of(small_gram(scaled.matrix), samples=features.shape[-2]))


def mean_cosine(features: Tensor) -> Tensor:
    """The mean cosine between different samples: mean over i ≠ j of ⟨h_i, h_j⟩/(‖h_i‖‖h_j‖), from −1/(n − 1) to 1.

    The correlation that meanfield2019 and thesis2024 chapter 5 follow through depth. Invariant under rotations and
    under scaling of every sample by itself, differentiable. Samples of length zero are left out; 0 when fewer than two
    remain.

    >>> mean_cosine(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    tensor(0.7071, dtype=torch.float64)
    """
    scaled = scale_features(features)
    directions, present = _directions(scaled.matrix)
    count = present.sum(dim=-1).double()
    # Σ over i ≠ j of ⟨u_i, u_j⟩ is ‖Σu_i‖² − Σ‖u_i‖²: no n × n matrix is needed
    resultant = directions.sum(dim=-2).square().sum(dim=-1)
    own = directions.square().sum(dim=(-2, -1))
    return scaled.settle(divide(resultant - own, count * (count - 1), otherwise=0.0).clamp(-1, 1))


def gradient_alignment(gradients: Tensor) -> Tensor:
    """How collinear the gradients of different samples are: mean over i ≠ j of |⟨g_i, g_j⟩|/(‖g_i‖‖g_j‖), from 0 to 1.

    Directional gradient vanishing (rank2020, Proposition 19): behind a last hidden layer of rank one the gradients of
    two samples with respect to any row of the last weight matrix are equal up to sign and length, hence the absolute
    value. Random directions in d dimensions give about √(2/(πd)). Zero gradients are left out; 0 when fewer than two
    remain.

    Args:
        gradients: (..., samples, features), one flattened gradient per row. For a weight of shape (outputs, inputs),
            (outputs, samples, inputs) give the alignment for each output, as in the proposition.

    >>> gradient_alignment(torch.tensor([[1.0, 2.0], [-2.0, -4.0]]))
    tensor(1., dtype=torch.float64)
    """
    scaled = scale_features(gradients, name="gradients")
    directions, _ = _directions(scaled.matrix)
    return scaled.settle(of_gram.gradient_alignment(directions @ directions.mT))


def distinct_share(features: Tensor) -> Tensor:
    """The share of the signal that differs between samples: Σ‖h_i − h̄‖²/Σ‖h_i‖², with h̄ the mean sample.

    From 0 (all samples equal, or a zero batch) to 1 (centred). After ReLU the mean dominates the second moment and a
    healthy layer has a participation ratio near 1; this share still tells samples apart. Of normalized rows it is (1 −
    1/n)(1 − mean_cosine). Scale- and rotation-invariant, differentiable; shares of 1e-30 keep their digits.

    >>> distinct_share(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    tensor(0.5000, dtype=torch.float64)
    """
    scaled = scale_features(features)
    rows = scaled.matrix
    deviations = rows - rows.mean(dim=-2, keepdim=True)
    share = divide(deviations.square().sum(dim=(-2, -1)), rows.square().sum(dim=(-2, -1)), otherwise=0.0)
    return scaled.settle(share.clamp(0, 1))


def condition_number(features: Tensor, *, tolerance: float | None = None) -> Tensor:
    """The ratio of the largest to the smallest singular value, σ_max/σ_min, of min(samples, features) of them.

    From 1 to ∞, which it is exactly when numerical_rank, at the same tolerance, is not full. Scale- and
    rotation-invariant, differentiable; the gradient at ∞ is reported as 0.

    Args:
        tolerance: relative to the largest singular value, as in `numerical_rank`; 0 counts any positive value.

    >>> condition_number(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    tensor(1.3333, dtype=torch.float64)
    """
    singular, scaled, share = _resolved_amplitudes(features, tolerance)
    return scaled.settle(of_spectrum.ratio_of_extremes(singular, tolerance=share))


def log_norm(features: Tensor) -> Tensor:
    """ln ‖H‖_F, finite for entries from 1e-308 to 1e308; −∞ for zero, where the gradient is reported as 0.

    Of gradients over depth its slope is a factor per layer (thesis2024 section 6.2 and figure 6.3).

    >>> log_norm(torch.tensor([[3.0, 4.0]])).exp()
    tensor(5.0000, dtype=torch.float64)
    """
    scaled = scale_features(features)
    squares = scaled.matrix.square().sum(dim=(-2, -1))
    return scaled.settle(of_gram.half_log(squares) + scaled.scale.log())


def isotropy_distance(features: Tensor, *, normalized: bool = True) -> Tensor:
    """Wasserstein-2 distance of the next layer's preactivations from an isotropic Gaussian: √Σ_i(σ_i − n^{-1/2})².

    For Gaussian weights W of variance 1/fan_out the law of HWᵀ is Gaussian, and this is exact; the sum runs over all n
    singular values, zeros included. orth2021 Lemma 2 bounds W₂² by 2n·E[V(H)] for ‖H‖_F = 1; the equality is in its
    proof. From 0 (orthogonal batch) to √(2 − 2/√n) (collinear samples); 1, of the point mass, for a zero batch.
    Differentiable.

    Args:
        normalized: divide by ‖H‖_F first; False takes the features as they are.

    >>> isotropy_distance(torch.stack([torch.eye(4), torch.ones(4, 4)]))
    tensor([0., 1.], dtype=torch.float64)
    """
    scaled = scale_features(features)
    singular = torch.linalg.svdvals(scaled.matrix)
    if not normalized:
        singular = singular * scaled.scale[..., None]
    return scaled.settle(of_spectrum.amplitude_distance(singular, samples=features.shape[-2], normalized=normalized))


def _resolved_amplitudes(features: Tensor, tolerance: float | None) -> tuple[Tensor, Scaled, float]:
    """Scaled singular values and the share of the largest that counts as zero."""
    scaled = scale_features(features)
    if tolerance is None:
        # torch's and numpy's rule; in 16 bits max · eps could exceed 1, and `resolution` takes a root
        size = (max if torch.finfo(features.dtype).bits > 16 else min)(features.shape[-2:])
        tolerance = of_spectrum.resolution(size, dtype=features.dtype)
    return torch.linalg.svdvals(scaled.matrix), scaled, tolerance


def _directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Every row at length 1, zero rows left zero; and which rows have a length."""
    with torch.no_grad():
        # by powers of two of their own first: a sample 1e200 times shorter than its neighbour still has a direction
        largest = rows.abs().amax(dim=-1, keepdim=True)
        present = largest > 0
        scale = power_of_two_below(torch.where(present, largest, 1.0))
    scaled = rows / scale
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)  # unlike a root, with gradient 0 at 0
    return divide(scaled, length, otherwise=0.0), present[..., 0]
