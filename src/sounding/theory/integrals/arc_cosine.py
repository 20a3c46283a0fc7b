"""The arc-cosine kernel of any degree: the Gaussian covariance of max(u, 0)^α (meanfield2019, appendix H)."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.special import hyp2f1

from sounding.activations.activation import Array
from sounding.errors import UsageError
from sounding.theory.integrals.panels import PiecewiseSeries

_TABLE_PAYS = 4000  # correlations from which on the set-up of the table costs less than hypergeometric functions
_NODES, _HALVINGS = 20, 22  # of a piece of the table, and pieces towards each end: 1e-14 for degrees from −0.4 to 20


def arc_cosine(correlation: float, *, degree: float) -> float:
    """J_α(c) = E[ρ_α(u)ρ_α(v)]/E[ρ_α(u)²] for ρ_α(u) = max(u, 0)^α and correlation c; α > −1/2.

    In halves, even and odd: E|u|^α|v|^α = (2^α/π) Γ((α+1)/2)² F(−α/2, −α/2; 1/2; c²) and its odd twin. J_0(c) =
    1 − arccos(c)/π and J_1(c) = (√(1−c²) + (π − arccos c)c)/π. The printed J_α (meanfield2019, H.4) lost a π.

    >>> print(f"{arc_cosine(-1 / 31, degree=1.0):.10f}")
    0.3023464822
    """
    return float(arc_cosines(np.array(correlation), degree=degree))


def arc_cosines(correlation: Array, *, degree: float) -> Array:
    """`arc_cosine` over an array of correlations."""
    if degree <= -0.5:
        raise UsageError(f"the arc-cosine kernel needs a degree above −1/2, got {degree}")
    c = np.clip(correlation, -1.0, 1.0)
    if degree == 0.0:
        return np.asarray(1.0 - np.arccos(c) / np.pi)
    if degree == 1.0:
        return np.asarray((np.sqrt(1.0 - c * c) + (np.pi - np.arccos(c)) * c) / np.pi)
    if c.size > _TABLE_PAYS:
        return _table(degree)(np.arccos(c))
    return _by_series(c, degree)


def two_sided(correlation: Array, *, degree: float, slopes: tuple[float, float]) -> Array:
    """J_φ(c) = (a² + b²) J_α(c) − 2ab J_α(−c) for φ = a x^α and −b |x|^α on the two sides of 0.

    It is E φφ over E max(z, 0)^(2α) for standard Gaussian values of correlation c.
    """
    a, b = slopes
    found = (a * a + b * b) * arc_cosines(correlation, degree=degree)
    if a * b != 0:
        found -= 2 * a * b * arc_cosines(-correlation, degree=degree)
    return np.asarray(found)


def _by_series(c: Array, degree: float) -> Array:
    """J_α by hypergeometric functions of its even and odd part."""
    even = math.gamma(0.5 * (degree + 1)) ** 2 * hyp2f1(-degree / 2, -degree / 2, 0.5, c * c)
    odd = 2.0 * math.gamma(0.5 * degree + 1) ** 2 * c * hyp2f1(0.5 * (1 - degree), 0.5 * (1 - degree), 1.5, c * c)
    return np.asarray(2.0 ** (degree - 2) / math.pi * (even + odd) / second_moment(degree))


def second_moment(degree: float) -> float:
    """c_α = E max(u, 0)^(2α) = 2^(α−1) Γ(α + 1/2)/√π for a standard Gaussian u; the printed one lost the π."""
    return math.pow(2.0, degree - 1) * math.gamma(degree + 0.5) / math.sqrt(math.pi)


def gamma_ratio(x: float, shift: float) -> float:
    """Γ(x + shift)/Γ(x) to rounding, where the difference of two lgamma would lose a digit for each of x."""
    if x < 30.0 or x + shift < 30.0:
        # up to where Stirling's series has all digits
        steps = math.ceil(30.0 - min(x, x + shift))
        factors = (x + np.arange(float(steps))) / (x + shift + np.arange(float(steps)))
        return gamma_ratio(x + steps, shift) * float(np.prod(factors))
    y = x + shift
    logarithm = (x - 0.5) * math.log1p(shift / x) + shift * (math.log(y) - 1.0)
    for index, coefficient in enumerate((1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188)):
        logarithm += coefficient * (y ** -(2 * index + 1) - x ** -(2 * index + 1))
    return math.exp(logarithm)


@lru_cache(maxsize=32)
def _table(degree: float) -> PiecewiseSeries:
    """J_α(cos θ) on pieces of [0, π] that halve towards both ends, where it has the powers sin^(2α+1)θ."""
    # the hypergeometric function is slow close to |c| = 1, so that pieces are short there
    half = 0.5 * np.pi * 2.0 ** -np.arange(_HALVINGS, -1.0, -1.0)
    edges = np.concatenate([[0.0], half, np.pi - half[-2::-1], [np.pi]])
    return PiecewiseSeries.fit(lambda theta: _by_series(np.cos(theta), degree), edges, terms=_NODES)
