"""The law of a batch-normalized neuron at any eps, with powers of its denominator.

With pre-activations h ~ N(0, Σ), Σ a BSB1 covariance, u = Gh is Gaussian of variance μ in each direction of the plane
orthogonal to ones. Batch normalization gives x = u/s with s² = |u|²/B + eps. Every quantity of the theory is an
expectation E[s^(2k) f(x₁)] or E[s^(2k) f(x₁, x₂)]. Splitting u into its part a along the coordinates asked for and the
rest b, s² = (|b|² + B·eps)/(B(1 − τ)) with τ = |x-part|²/(B − 1), and |b|² can be integrated out at fixed x:

    two coordinates, x₁ = T cos ψ, T² = (B−1)τ:
        w_k(τ) = (1/2μ) e^(−B·eps·τ/(2μ(1−τ))) (1−τ)^((B−7)/2−k) B^−k E[(μ(1−τ)χ²_{B−3} + B·eps)^(k+1)]
    one coordinate, x₁ = √(B−1) t:
        w_k(t) = (2πμ)^(−1/2) e^(−B·eps·t²/(2μ(1−t²))) (1−t²)^((B−5)/2−k) B^−k E[(μ(1−t²)χ²_{B−2} + B·eps)^(k+1/2)]

At eps = 0 these are the densities of meanfield2019 (Theorems 4 and 7) times E s^(2k). They turn the triple integrals
that eps > 0 asks for into double ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sounding.activations.activation import Array
from sounding.theory.integrals.arc_cosine import gamma_ratio
from sounding.theory.integrals.panels import PiecewiseSeries, composite


@dataclass(frozen=True)
class NormalizedLaw:
    """The law of (x, s) at batch size B (or infinity), pre-activation variance μ > 0 per direction, and eps ≥ 0."""

    batch_size: float
    mu: float
    eps: float

    @property
    def spread(self) -> float:
        """About the standard deviation of x₁: √(μ/(μ + eps)), 1 at eps = 0."""
        return math.sqrt(self.mu / (self.mu + self.eps))

    @property
    def support(self) -> float:
        """|x₁| is below √(B − 1)."""
        return math.sqrt(self.batch_size - 1.0)

    @property
    def layer(self) -> tuple[float, ...]:
        """Radii around which the weight of a small eps falls to 0 next to the edge of the sphere, and on the way."""
        width = self.batch_size * self.eps / self.mu if math.isfinite(self.batch_size) else 0.0
        # the fall has a tail of eps/μ over the distance from the edge, which nodes far from the edge would not see
        steps = (1.0, 8.0, *(64.0 ** np.arange(1.0, 8.0)))
        return tuple(self.support * math.sqrt(1.0 - width * step) for step in steps if _THINNEST < width * step < 0.5)

    def line_weight(self, x: Array, power: float, *, rest: Array | None = None) -> Array:
        """The density of x₁ times the mean of s^(2·power) given x₁."""
        size, mu, eps = self.batch_size, self.mu, self.eps
        if math.isinf(size):
            variance = mu / (mu + eps)
            return math.pow(mu + eps, power) * np.exp(-0.5 * x * x / variance) / math.sqrt(2 * math.pi * variance)
        tau = x * x / (size - 1.0)
        # the caller may know 1 − x²/(B − 1) to more digits than that difference has
        rest = np.maximum(1.0 - tau, 0.0) if rest is None else rest
        norm = 1.0 / math.sqrt(2 * math.pi * mu * (size - 1.0)) * math.pow(size, -power)
        if eps == 0:
            # E[(χ²_m)^(k + 1/2)], m = B − 2, without the cancellation of two lgamma
            root = math.sqrt(2.0) * gamma_ratio(0.5 * size - 1.0, 0.5)
            mean = math.pow(mu, power + 0.5)
            mean *= {1.0: (size - 1.0) * root, 0.0: root, -0.5: 1.0, -1.0: root / (size - 3.0)}[power]
            return np.asarray(norm * mean * rest ** (0.5 * (size - 4.0)))
        with np.errstate(divide="ignore", invalid="ignore"):
            logarithm = np.where(tau < 0.5, np.log1p(-tau), np.log(rest))
            decay = np.exp(-0.5 * size * eps / mu * tau / rest + (0.5 * (size - 5.0) - power) * logarithm)
        decay = np.where(rest > 0, decay, 0.0)
        return np.asarray(norm * decay) * _power_mean(size - 2.0, mu * rest, size * eps, power + 0.5)

    def radial_weight(self, angle: Array, power: int) -> Array:
        """The density of χ, T = √(B−1) sin χ, times the mean of s^(2·power) given the pair."""
        size, mu, eps = self.batch_size, self.mu, self.eps
        cosine, sine = np.cos(angle), np.sin(angle)
        if eps == 0:
            ratio = {1: mu * (size - 1.0) / size, 0: 1.0, -1: size / (mu * (size - 3.0)), -2: math.nan}[power]
            return ratio * (size - 3.0) * cosine ** (size - 4.0) * sine
        rest = cosine * cosine
        a, b, m = mu * rest, size * eps, size - 3.0
        # E[(aχ²_m + b)^(k+1)], a polynomial in a and b but for the last
        if power == -2:
            mean = _power_mean(m, a, b, -1.0)
        else:
            mean = {1: a * a * m * (m + 2) + 2 * a * b * m + b * b, 0: a * m + b, -1: np.ones_like(a)}[power]
        exponent = size - 6.0 - 2.0 * power
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            decay = np.exp(-0.5 * b / mu * (sine / cosine) ** 2 + exponent * np.log(np.abs(cosine)))
        return np.asarray(np.where(rest > 1e-30, decay, 0.0) * sine / mu * size**-power * mean)


def _power_mean(degrees: float, a: Array, b: float, power: float) -> Array:
    """E[(a χ²_m + b)^power] over an array of a ≥ 0, with b > 0."""
    if power == 0:  # of s^−1, whose power is −1/2 + 1/2
        return np.ones_like(a)
    with np.errstate(divide="ignore"):
        logarithm = np.log(b / np.maximum(a, 1e-300))
    # it is (a·m + b)^power·h(ln(b/a)) with h analytic in a strip of half-width π: piecewise Chebyshev series of degree
    # 17 on pieces of length 2 give it to rounding, where the sum over χ² for each a would dominate everything else
    shape = _power_series(degrees, power)(np.clip(logarithm, _LOG_LOW, _LOG_HIGH))
    return np.asarray((a * degrees + b) ** power * shape)


# ln(b/a) beyond which the mean is its own limit, the length of a Chebyshev piece and its degree: 1e-16 on each
_LOG_LOW, _LOG_HIGH, _PIECE, _DEGREE = math.log(1e-18), math.log(1e14), 2.0, 17
_THINNEST = 1e-13  # a layer at the edge of the sphere that holds less than rounding


@lru_cache(maxsize=128)
def _power_series(degrees: float, power: float) -> PiecewiseSeries:
    """E[(χ²_m + c)^p]/(m + c)^p as a function of ln c."""
    square, weight = _chi_square_rule(degrees)

    def ratio(logarithm: Array) -> Array:
        c = np.exp(logarithm.ravel())
        return np.asarray(weight @ _half_power((square[:, None] + c) / (degrees + c), power)).reshape(logarithm.shape)

    edges = np.arange(_LOG_LOW, _LOG_HIGH + _PIECE, _PIECE)
    return PiecewiseSeries.fit(ratio, edges, terms=_DEGREE + 1)


def _half_power(base: Array, power: float) -> Array:
    """base^power for the half-integers in use, by square roots: ten times faster than a general power."""
    if power == -1.0:
        return 1.0 / base
    root = np.sqrt(base)
    if power > 0:
        return root if power == 0.5 else base * root
    return 1.0 / root if power == -0.5 else 1.0 / (base * root)


@lru_cache(maxsize=64)
def _chi_square_rule(degrees: float) -> tuple[Array, Array]:
    """Values of χ²_m and weights: panels in χ, geometric towards 0 where few degrees leave mass there."""
    center = math.sqrt(max(degrees - 1.0, 0.0))
    high = center + 9.5
    if center > 9.5:
        edges = np.linspace(center - 9.5, high, 13)
    else:
        inner = 4.0 ** -np.arange(15.0, -1.0, -1.0)
        edges = np.concatenate([[0.0], inner, np.linspace(1.0, high, int(high / 1.6) + 2)[1:]])
    chi, step = composite(edges, 16)
    log_density = (degrees - 1.0) * np.log(chi) - 0.5 * chi * chi
    density = np.exp(log_density - log_density.max()) * step
    keep = density > 1e-22 * density.max()
    return chi[keep] ** 2, density[keep] / density.sum()
