"""Forward and backward eigenvalues of batch normalization at a BSB1 fixed point, from its moments.

The space of covariances that batch normalization sees splits, under permutations of the batch, into three parts: G, the
multiples of I − 11ᵀ/B (dimension 1); L, one number per sample (dimension B − 1); M, zero diagonal (dimension
B(B − 3)/2). Both Jacobians act on each as a number (meanfield2019, sections B.4 and C).

Forward, u = Gh, φ̃ = φ − mean φ, with the score of a Gaussian in place of derivatives of the covariance:

    λ_G = E[|φ̃|² (|u|²/μ − (B−1))] / (2μ(B−1)) = dμ′/dμ                                   (0 at eps = 0)
    λ_L = B/(2μ²(B−1)(B−2)) E[Σφ̃ᵢ²uᵢ² − |φ̃|²|u|²/B]
    λ_M = 1/(μ²B(B−3)) E[(φ·u)² − B/(B−2) (Σφ̃ᵢ²uᵢ² − |φ̃|²|u|²/B) − |φ̃|²|u|²/(B−1)]

Backward, A = s^−1 G D (G − xxᵀ/B), D = diag φ′(x):

    λ_G = E|A|²/(B−1),  λ_L = B/((B−2)(B−1)) E[ΣAᵢᵢ² − |A|²/B],
    λ_M = 2/(B(B−3)) {E[(tr A)² + tr A²]/2 − (B−1)λ_L − λ_G}

At eps = 0 they are the formulas of meanfield2019 for any activation; positively homogeneous ones have the closed forms
of its Theorems B.68 and C.11, which `sounding.theory.homogeneous` computes on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from sounding.theory.integrals.moments import GaussianMoments, LineMoments, PairMoments


@dataclass(frozen=True)
class Eigenvalues:
    """One eigenvalue for each part: G (the batch as a whole), L (one sample), M (two samples)."""

    G: float
    L: float
    M: float


def forward_eigenvalues(
    line: LineMoments, pair: PairMoments, *, batch_size: float, mu: float, eps: float
) -> Eigenvalues:
    """How a small change of the covariance at the fixed point is passed on by one layer, B finite."""
    size = batch_size
    spread = (size - 1) * (line.square - pair.product)
    both = size * (size - 1) * (line.s2_square - pair.s2_product) - size * eps * spread
    mean_part = line.s2_square + (size - 1) * pair.s2_product - eps * (line.square + (size - 1) * pair.product)
    samples = (size - 2) * line.s2_square_x2 - 2 * (size - 1) * pair.s2_product_x2 + mean_part
    uneven = samples - both / size
    dot = size * line.s2_square_x2 + size * (size - 1) * pair.s2_product_xx
    return Eigenvalues(
        G=(both / mu - (size - 1) * spread) / (2 * mu * (size - 1)) if eps > 0 else 0.0,
        L=size * uneven / (2 * mu**2 * (size - 1) * (size - 2)),
        M=(dot - size / (size - 2) * uneven - both / (size - 1)) / (mu**2 * size * (size - 3)),
    )


def backward_eigenvalues(line: LineMoments, pair: PairMoments, *, batch_size: float) -> Eigenvalues:
    """How the covariance of the gradient is passed on by one layer towards the input, B finite."""
    size = batch_size
    ordered = size * (size - 1)
    kept = 1 - 1 / size
    own = size * (kept * line.r2_slope2 - (line.r2_slope2_x2 + line.r4_slope2_x2) / size)
    cross = own - (size - 1) * (pair.r2_slopes + pair.r2_slopes_xx + pair.r4_slopes_xx)
    norm = own - cross / size
    diagonal = size * (kept**2 * line.r2_slope2 - 2 * kept * line.r2_slope2_x2 / size + line.r2_slope2_x4 / size**2)
    trace_square = diagonal + ordered * (
        kept**2 * pair.r2_slopes - 2 * kept * pair.r2_slopes_x2 / size + pair.r2_slopes_x2x2 / size**2
    )
    square_trace = diagonal + ordered * (pair.r2_slopes + 2 * pair.r2_slopes_xx + pair.r2_slopes_x2x2) / size**2
    mixed = diagonal - (size - 1) * (
        kept * (pair.r2_slopes + pair.r2_slopes_xx) - (pair.r2_slopes_x2 + pair.r2_slopes_x3x) / size
    )
    own_squares = diagonal - 2 * mixed / size + cross / size**2
    whole = norm / (size - 1)
    single = size / ((size - 2) * (size - 1)) * (own_squares - norm / size)
    return Eigenvalues(
        G=whole,
        L=single,
        M=2 / (size * (size - 3)) * (0.5 * (trace_square + square_trace) - (size - 1) * single - whole),
    )


def infinite_batch_eigenvalues(moments: GaussianMoments, *, mu: float, eps: float) -> tuple[Eigenvalues, Eigenvalues]:
    """The forward and the backward eigenvalues in the limit B → ∞, where s² = μ + eps and the samples are independent.

    With z = x/std x: forward L = E[φ̃²(z² − 1)]/(2μ), G = L·eps/(μ + eps), M = E[φz]²/μ; backward G = L =
    E D²/(μ + eps), M = (E D)²/(μ + eps).
    """
    uneven = moments.square_z2 - moments.square - 2 * moments.mean * (moments.mean_z2 - moments.mean)
    single = uneven / (2 * mu)
    forward = Eigenvalues(G=single * eps / (mu + eps), L=single, M=moments.mean_z**2 / mu)
    growth = moments.slope2 / (mu + eps)
    return forward, Eigenvalues(G=growth, L=growth, M=moments.slope**2 / (mu + eps))
