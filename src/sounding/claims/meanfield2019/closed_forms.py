"""The closed forms of theorems D.6, E.1 and F.2, for φ positively homogeneous, and the integrals they stand for.

φ(x) = a·x^α for x > 0 and −b·|x|^α for x < 0, with a = 1, and P(x, y) = Γ(x + y)/Γ(x). The integrals over the angle are
taken by quadrature, without any special function but the constant that makes sin^(B−3)θ a density.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from scipy.integrate import quad
from scipy.special import beta, poch

from sounding.activations import Activation
from sounding.activations.activation import Array
from sounding.predict import batchnorm
from sounding.theory.batchnorm import BatchNormPrediction
from sounding.theory.homogeneous import kernel, kernel_slope
from sounding.theory.integrals.arc_cosine import second_moment


@dataclass(frozen=True)
class Case:
    """The degree α, the slope b of the negative side and the batch size."""

    alpha: float
    b: float
    size: int


def power(alpha: float, b: float) -> Activation:
    """x^α for x > 0 and −b·|x|^α for x < 0: α-ReLU at b = 0, its leaky variant else."""

    def twin() -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.where(x > 0, 1.0, -b) * x.abs() ** alpha

    return Activation(
        f"power:{alpha:g},{b:g}",
        lambda x: np.where(x > 0, 1.0, -b) * np.abs(x) ** alpha,
        lambda x: np.where(x > 0, 1.0, b) * alpha * np.abs(x) ** (alpha - 1),
        kinks=(0.0,),
        degree=alpha,
        slopes=(1.0, b),
        twin=twin,
    )


@cache
def predicted(case: Case) -> BatchNormPrediction:
    """The fixed point by the product's quadrature, which knows nothing of closed forms."""
    return batchnorm(power(case.alpha, case.b), batch_size=case.size)


def covariance_by_kernel(case: Case) -> float:
    """D.6, first form: c_α ((B−1)/2)^α P((B−1)/2, α/2)⁻² J_φ(0)."""
    half = (case.size - 1) / 2
    at_zero = kernel(0.0, degree=case.alpha, slopes=(1.0, case.b))
    return float(second_moment(case.alpha) * half**case.alpha * at_zero / poch(half, case.alpha / 2) ** 2)


def covariance_by_gamma(case: Case) -> float:
    """D.6, second form: (a − b)²/(4π) (B−1)^α [Γ((B−1)/2) Γ((α+1)/2)/Γ((α+B−1)/2)]²."""
    width, alpha = case.size - 1, case.alpha
    root = math.gamma((alpha + 1) / 2) * math.exp(math.lgamma(width / 2) - math.lgamma((alpha + width) / 2))
    return float((1 - case.b) ** 2 / (4 * math.pi) * width**alpha * root**2)


def eigenvalue_by_spread(case: Case) -> float:
    """E.1, first form: (B/2) ((B−1)/2)^(α−1) P(B/2, α/2)⁻² μ⁻¹ c_α J_φ′(0), μ by quadrature."""
    size, alpha = case.size, case.alpha
    slope = kernel_slope(0.0, degree=alpha, slopes=(1.0, case.b))
    front = size / 2 * ((size - 1) / 2) ** (alpha - 1) / poch(size / 2, alpha / 2) ** 2
    return float(front * second_moment(alpha) * slope / predicted(case).fixed_point.mu)


def eigenvalue_by_kernel(case: Case) -> float:
    """E.1, second form: B P((B−1)/2, α)/((B−1) P(B/2, α/2)²) · J_φ′(0)/(J_φ(1) − J_φ(−1/(B−1)))."""
    size, slopes = case.size, (1.0, case.b)
    front = size * poch((size - 1) / 2, case.alpha) / ((size - 1) * poch(size / 2, case.alpha / 2) ** 2)
    top, low = (kernel(c, degree=case.alpha, slopes=slopes) for c in (1.0, -1 / (size - 1)))
    return float(front * kernel_slope(0.0, degree=case.alpha, slopes=slopes) / (top - low))


def eigenvalue_by_beta(case: Case) -> float:
    """F.2: (1/8π) B (B−1)^(α−1) μ⁻¹ α² (a + b)² Beta(α/2, B/2)², μ by quadrature."""
    size, alpha = case.size, case.alpha
    front = size * (size - 1) ** (alpha - 1) / (8 * math.pi * predicted(case).fixed_point.mu)
    return float(front * alpha**2 * (1 + case.b) ** 2 * beta(alpha / 2, size / 2) ** 2)


def over_angle(function: Callable[[Array], Array], size: int, *, power_of_sine: int) -> tuple[float, float]:
    """∫₀^π sin^k θ f(−√(B−1) cos θ) dθ, cut at the kink, and the bound of its error."""

    def integrand(theta: float) -> float:
        return float(math.sin(theta) ** power_of_sine * function(np.array(-math.sqrt(size - 1) * math.cos(theta))))

    parts = [quad(integrand, *ends, epsabs=0.0, epsrel=1e-11, limit=200)
             for ends in ((0.0, math.pi / 2), (math.pi / 2, math.pi))]  # fmt: skip
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def _front(size: int) -> float:
    """Γ((B−1)/2)/(√π Γ((B−2)/2)): sin^(B−3)θ times it is a density."""
    return math.exp(math.lgamma((size - 1) / 2) - math.lgamma((size - 2) / 2)) / math.sqrt(math.pi)


def covariance_integral(case: Case) -> tuple[float, float]:
    """(E φ(x₁))² by the integral of theorem D.3, and the bound of its relative error."""
    value, error = over_angle(power(case.alpha, case.b), case.size, power_of_sine=case.size - 3)
    return (_front(case.size) * value) ** 2, 2 * error / abs(value)


def forward_integral(case: Case) -> tuple[float, float]:
    """(2B/μ) [Γ(B/2)/Γ((B−1)/2) · E x₁φ(x₁)/(B−1)]², and the bound of its relative error.

    The slope at zero of E φ(x)φ(x′)ᵀ in the covariance of h and h′ is (E φ(x)hᵀ/μ)⊗², by integration by parts; |h|
    and x are independent. No derivative of φ is taken.
    """
    phi, size, found = power(case.alpha, case.b), case.size, predicted(case)
    value, error = over_angle(lambda x: x * phi(x), size, power_of_sine=size - 3)
    radius = math.exp(math.lgamma(size / 2) - math.lgamma((size - 1) / 2))
    root = radius * _front(size) * value / (size - 1)
    mu = found.fixed_point.mu
    return 2 * size / mu * root**2, 2 * error / abs(value) + found.error * max(1.0, 1 / mu)


def backward_integral(case: Case) -> tuple[float, float]:
    """B/(2πμ) [∫ sin^(B−1)θ φ′(−√(B−1) cos θ) dθ]², theorem F.1, and the bound of its relative error."""
    size, found = case.size, predicted(case)
    value, error = over_angle(power(case.alpha, case.b).derivative, size, power_of_sine=size - 1)
    mu = found.fixed_point.mu
    return size / (2 * math.pi * mu) * value**2, 2 * error / abs(value) + found.error * max(1.0, 1 / mu)
