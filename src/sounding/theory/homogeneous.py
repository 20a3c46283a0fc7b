"""Closed forms for positively homogeneous activations: the second, independent route to the batch norm theory.

φ(x) = a·x^α for x > 0 and −b·|x|^α for x < 0 (meanfield2019, appendix H). J_α is the arc-cosine kernel of degree α,
scaled to J_α(1) = 1, and J_φ(c) = (a² + b²) J_α(c) − 2ab J_α(−c).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sounding.activations import Activation
from sounding.errors import UsageError
from sounding.theory.eigenvalues import Eigenvalues
from sounding.theory.integrals.arc_cosine import gamma_ratio, second_moment
from sounding.theory.integrals.powers import half_moment, kernel, kernel_slope
from sounding.theory.integrals.quadrature import check_batch_size

__all__ = ["HomogeneousPrediction", "homogeneous_batchnorm", "kernel", "kernel_slope"]


@dataclass(frozen=True)
class HomogeneousPrediction:
    """The BSB1 fixed point of a positively homogeneous activation at eps = 0, in closed form."""

    variance: float
    correlation: float
    forward: Eigenvalues
    backward: Eigenvalues
    cross_covariance: float
    cross_eigenvalue: float

    @property
    def mu(self) -> float:
        """variance·(1 − correlation)."""
        return self.variance * (1.0 - self.correlation)


def homogeneous_batchnorm(activation: Activation, batch_size: float) -> HomogeneousPrediction:
    """The closed forms of meanfield2019 (Theorems B.25, B.68, C.11, D.6, F.2) for a homogeneous activation, eps = 0.

    Needs degree α > 1/2, where E φ′² is finite. Erratum: the third displayed form of λ_G in Theorem C.11 has
    (2α−1)(J(1) − J(ρ₀)) where (2α−1)J(ρ₀) is meant; the first two forms, used here, are right.
    """
    size = check_batch_size(batch_size)
    if activation.power is None:
        raise UsageError(
            f"{activation.name} is not positively homogeneous", hint="relu, leaky_relu:0.1 or relu_power:1.5"
        )
    degree, slopes = activation.power
    if degree <= 0.5:
        raise UsageError(f"E φ′² is infinite for degree {degree}", hint="a degree above 1/2")
    return _infinite(degree, slopes) if math.isinf(size) else _finite(degree, slopes, size)


def _finite(alpha: float, slopes: tuple[float, float], size: float) -> HomogeneousPrediction:
    """The closed forms at a finite batch."""
    a, b = slopes
    rho, width = -1.0 / (size - 1.0), size - 1.0
    top = kernel(1.0, degree=alpha, slopes=slopes)
    low = kernel(rho, degree=alpha, slopes=slopes)
    slope = kernel_slope(rho, degree=alpha, slopes=slopes)
    # E φ(x)² of x on the sphere is that of a Gaussian over E|u|^(2α)/(B−1)^α, the moment of χ² with B − 1 degrees
    scale = second_moment(alpha) * (0.5 * width) ** alpha / gamma_ratio(0.5 * width, alpha)
    variance, mu = scale * top, scale * (top - low)
    shared = second_moment(alpha) / mu * (0.5 * width) ** alpha / (width * gamma_ratio(0.5 * (size + 1), alpha))
    forward = Eigenvalues(
        G=0.0, L=shared * (alpha * (size - 2) * (top - low) + size / width * slope), M=shared * size * slope
    )
    ratio = slope / (top - low)
    odd = 2 * alpha - 1
    growth = (size - 3 + 2 * alpha) * (odd * slope + alpha**2 * width * top) / (
        odd * (size - 3) * width * (top - low)
    ) - alpha**2 / (size - 3)
    pairs = size * (size**2 + 2 * (alpha - 2) * size + 2 * alpha * (alpha - 3) + 3)
    common = (size - 3) * width * (width + 2 * alpha)
    single = (
        2
        * ratio
        / (common * width)
        * (alpha**2 * (3 * size - 4) + alpha * (3 * size**2 - 11 * size + 8) + (size - 3) * width**2)
        - 2 * alpha**2 * (size - 2) * (width + alpha) / common
    )
    single += alpha**2 * (size - 2) * (size - 3 + 2 * alpha) * top / (odd * (size - 3) * width * (top - low))
    backward = Eigenvalues(G=growth, L=single, M=pairs / common * ratio)
    root = math.gamma(0.5 * (alpha + 1)) / gamma_ratio(0.5 * width, 0.5 * alpha)
    covariance = (a - b) ** 2 / (4 * math.pi) * width**alpha * root**2
    steep = math.gamma(0.5 * alpha) / gamma_ratio(0.5 * size, 0.5 * alpha)
    crossed = size * width ** (alpha - 1) / (8 * math.pi * mu) * (alpha * (a + b) * steep) ** 2
    return HomogeneousPrediction(variance, 1 - mu / variance, forward, backward, covariance, crossed)


def _infinite(alpha: float, slopes: tuple[float, float]) -> HomogeneousPrediction:
    """The closed forms in the limit of an infinite batch."""
    a, b = slopes
    scale = second_moment(alpha)
    top, low = (kernel(c, degree=alpha, slopes=slopes) for c in (1.0, 0.0))
    slope = kernel_slope(0.0, degree=alpha, slopes=slopes)
    variance, mu = scale * top, scale * (top - low)
    growth = alpha**2 * top / ((2 * alpha - 1) * (top - low))
    mean, mean_slope = half_moment(alpha), alpha * half_moment(alpha - 1)
    return HomogeneousPrediction(
        variance,
        1 - mu / variance,
        Eigenvalues(0.0, alpha, slope / (top - low)),  # L = α: above degree 1 a batch without end breaks its symmetry
        Eigenvalues(growth, growth, slope / (top - low)),
        ((a - b) * mean) ** 2,
        ((a + b) * mean_slope) ** 2 / mu,
    )
