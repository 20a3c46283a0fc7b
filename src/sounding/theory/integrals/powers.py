"""Moments of positively homogeneous functions of a normalized vector: closed forms, times one mean over the radius.

φ(x) = a·x^α for x > 0 and −b·|x|^α for x < 0, D = φ′, u Gaussian with u₁ of variance v = μ(B−1)/B and correlation
ρ = −1/(B−1), x = u/s, s² = |u|²/B + eps. A product f(x₁)g(x₂) of degree d is s^−d f(u₁)g(u₂), and length and direction
of u are independent, so

    E s^(2p) f(x₁)g(x₂) = v^(d/2) E f(z₁)g(z₂) · E[(μχ²/B + eps)^(p − d/2)],  χ² of B − 1 + d degrees of freedom.

The Gaussian means follow from K = E φφ (the arc-cosine kernel) and K′ = E DD: integration by parts with xφ′ = αφ gives
E z₁φ·z₂φ = (1−ρ²)K′ + (1+2α)ρK, E z₁²φ·φ = (1+α+αρ²)K + ρ(1−ρ²)K′ and E z₁φ·D = (1−ρ²)K′ + αρK.
"""

from __future__ import annotations

import math

import numpy as np

from sounding.errors import NumericalError
from sounding.theory.integrals.arc_cosine import arc_cosine, gamma_ratio, second_moment, two_sided
from sounding.theory.integrals.normalized import NormalizedLaw

Slopes = tuple[float, float]


def kernel(correlation: float, *, degree: float, slopes: Slopes) -> float:
    """J_φ(c), see `two_sided`."""
    return float(two_sided(np.array(correlation), degree=degree, slopes=slopes))


def kernel_slope(correlation: float, *, degree: float, slopes: Slopes) -> float:
    """J_φ′(c), from J_α′ = α²/(2α − 1) J_{α−1}, for α > 1/2."""
    a, b = slopes
    same, opposite = (arc_cosine(sign * correlation, degree=degree - 1) for sign in (1, -1))
    return degree**2 / (2 * degree - 1) * ((a * a + b * b) * same + 2 * a * b * opposite)


def half_moment(power: float) -> float:
    """E max(z, 0)^power of a standard Gaussian z; power > −1."""
    return second_moment(0.5 * power)


def line_powers(degree: float, slopes: Slopes, law: NormalizedLaw) -> tuple[float, ...]:
    """The nine moments of one coordinate, in the order of `LineMoments`."""
    require_slope(degree)
    (a, b), square = slopes, slopes[0] ** 2 + slopes[1] ** 2

    def mean(power: float, s_power: float) -> float:
        """E s^(2·s_power) of a function whose Gaussian mean is that of |z|^power on one side."""
        return half_moment(power) * _radial(law, power, s_power)

    even, slope2 = 2 * degree, degree**2 * square
    straight = mean(degree - 1, -0.5) - mean(degree + 1, -0.5) / (law.batch_size - 1.0)
    return (
        (a - b) * mean(degree, 0),
        square * mean(even, 0),
        square * mean(even, 1),
        square * mean(even + 2, 1),
        degree * (a + b) * straight,
        slope2 * mean(even - 2, -1),
        slope2 * mean(even, -1),
        slope2 * mean(even + 2, -1),
        slope2 * law.eps * mean(even, -2) if law.eps > 0 else 0.0,
    )


def pair_powers(degree: float, slopes: Slopes, law: NormalizedLaw) -> tuple[float, ...]:
    """The ten moments of two coordinates, in the order of `PairMoments`."""
    require_slope(degree)
    rho = -1.0 / (law.batch_size - 1.0)
    free, square = 1.0 - rho * rho, degree**2
    whole = second_moment(degree) * kernel(rho, degree=degree, slopes=slopes)
    slope = second_moment(degree) * kernel_slope(rho, degree=degree, slopes=slopes)
    both, once = free * slope + (1 + 2 * degree) * rho * whole, free * slope + degree * rho * whole
    twice = (1 + degree + degree * rho * rho) * whole + rho * free * slope
    low, even, high = (_radial(law, 2 * degree + step, -1) for step in (-2, 0, 2))
    raised = _radial(law, 2 * degree + 2, 1)
    return (
        whole * _radial(law, 2 * degree, 0),
        whole * _radial(law, 2 * degree, 1),
        both * raised,
        twice * raised,
        slope * low,
        square * whole * even,
        degree * once * even,
        square * both * high,
        square * twice * high,
        square * whole * law.eps * _radial(law, 2 * degree, -2) if law.eps > 0 else 0.0,
    )


def gaussian_powers(degree: float, slopes: Slopes, law: NormalizedLaw) -> tuple[float, ...]:
    """The seven moments of the limit B → ∞, in the order of `GaussianMoments`, where x = std·z exactly."""
    require_slope(degree)
    (a, b), square, size = slopes, slopes[0] ** 2 + slopes[1] ** 2, math.pow(law.spread, degree)
    return (
        (a - b) * size * half_moment(degree),
        square * size**2 * half_moment(2 * degree),
        (a + b) * size * half_moment(degree + 1),
        (a - b) * size * half_moment(degree + 2),
        square * size**2 * half_moment(2 * degree + 2),
        degree * (a + b) * size / law.spread * half_moment(degree - 1),
        square * (degree * size / law.spread) ** 2 * half_moment(2 * degree - 2),
    )


def power_spread(degree: float, slopes: Slopes, law: NormalizedLaw) -> float:
    """E φ(x₁)² − E φ(x₁)φ(x₂) = c_α (J_φ(1) − J_φ(ρ)), times the mean over the radius."""
    if math.isinf(law.batch_size):
        a, b = slopes
        mean = (a - b) * half_moment(degree)
        return math.pow(law.spread, 2 * degree) * ((a * a + b * b) * half_moment(2 * degree) - mean * mean)
    top, low = (kernel(c, degree=degree, slopes=slopes) for c in (1.0, -1.0 / (law.batch_size - 1.0)))
    return second_moment(degree) * (top - low) * _radial(law, 2 * degree, 0)


def require_slope(degree: float) -> None:
    """Raise where E D² is infinite."""
    if degree <= 0.5:  # D² ∝ |x|^(2α − 2), whose integral at 0 diverges
        raise NumericalError(
            f"the squared slope of a power of degree {degree:g} has an infinite mean", hint="a degree above 1/2"
        )


def _radial(law: NormalizedLaw, degree: float, power: float) -> float:
    """v^(d/2) E[(μχ²/B + eps)^(p − d/2)] over χ² of B − 1 + d degrees of freedom."""
    size, count, exponent = law.batch_size, law.batch_size - 1.0 + degree, power - 0.5 * degree
    half = 0.5 * count
    if law.eps == 0:
        # v^(d/2) (μ/B)^(p − d/2) = μ^p B^−p (B−1)^(d/2)
        ratio = gamma_ratio(half, exponent) * math.pow(0.5 * (size - 1.0), 0.5 * degree)
        return math.pow(law.mu * 2.0 / size, power) * ratio
    # a trapezoid sum in ln χ², where the density is analytic and falls off on both sides: it converges geometrically,
    # and at this step to rounding
    unit = law.mu / size
    # the integrand falls like χ^(2(half + exponent)) down to where eps takes over, and then like χ^(2·half)
    rest = math.log(max(unit * count / law.eps, 1.0)) + 44.0 / half
    low = -(min(rest, 44.0 / (half + exponent)) if half + exponent > 0 else rest) - 9.0 / math.sqrt(count)
    # e^(−2π·strip/step) of two trapezoid rules: 1e-16 at these steps, where 0.25 left 2e-11 for some ten degrees
    step = min(0.15, 0.7 / math.sqrt(count))
    places = step * np.arange(math.floor(low / step), math.ceil(4.2 / step))
    weights = np.exp(half * (places - np.expm1(places)))
    means = (unit * count * np.exp(places) + law.eps) ** exponent
    return math.pow(law.mu * (size - 1.0) / size, 0.5 * degree) * float(weights @ means) / float(weights.sum())
