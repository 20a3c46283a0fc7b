"""The length map q ↦ σ_w² E φ(√q z)² + σ_b² of a network without normalization: its moments and fixed points."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from sounding.activations import Activation, has_second_moment
from sounding.activations.activation import Array
from sounding.activations.kinks import ROUGH, kink_exponent
from sounding.encoding import fields_of
from sounding.errors import NumericalError, UsageError
from sounding.theory.integrals.powers import half_moment, kernel
from sounding.theory.integrals.quadrature import Integral, gaussian_joint_mean, gaussian_mean

SMALLEST, LARGEST = 1e-12, 1e8  # the range searched; above it, an activation that is not bounded diverges
VANISHING = 1e-24  # stands for the limit q → 0: φ is linear on each side of 0 over a distance of 1e-12
PER_DECADE = 6  # variances on the grid between which fixed points are bracketed; two closer than ×1.5 would be missed
HALF_RANGE = 40.0  # of the inputs on which the size and the turns of a bounded function are looked for
FEW_TURNS = 4  # a bump or a step has so few; what has more goes on turning
# Turns of an oscillating function within one standard deviation. For a sine the critical weights are right to 1e-11 up
# to 1.9e4 and wrong in the sixth digit at 6e4; at 6e5 they take more than 20 s.
MOST_WAVES = 2e4
NOISE = 1e-12  # what quadrature leaves of q′/q − 1 where it is 0


@dataclass(frozen=True)
class LengthPoint:
    """A variance the length map leaves as it is, and the map's slope there; attracting when |slope| < 1."""

    variance: float
    slope: float

    @property
    def attracting(self) -> bool:
        """Whether nearby variances approach it."""
        return abs(self.slope) < 1

    def to_dict(self) -> dict[str, Any]:
        """Plain types."""
        return fields_of(self, "variance slope attracting")


@dataclass(frozen=True)
class LengthTable:
    """E φ(√q z)² on a grid of q, tabulated once for many weight and bias variances."""

    activation: Activation
    variances: Array
    values: Array

    @property
    def increasing(self) -> bool:
        """Whether E φ² grows with q everywhere, so that iterates of the length map move in one direction."""
        finite = self.values[np.isfinite(self.values)]
        return bool((np.diff(finite) >= -1e-9 * finite[1:]).all())


def second_moment(phi: Activation, variance: float) -> Integral:
    """E φ(√q z)²; infinite where it does not exist."""
    if variance == 0:
        return Integral(float(phi(np.zeros(1))[0]) ** 2, 0.0, 1)
    if phi.power is not None:
        degree, (a, b) = phi.power
        return _closed((a * a + b * b) * half_moment(2 * degree), variance**degree)
    return _mean(phi, lambda y: phi(y) ** 2, variance)


def squared_slope(phi: Activation, variance: float) -> Integral:
    """E φ′(√q z)², the slope of the correlation map at 1 per unit of weight variance; infinite where φ jumps."""
    plain = phi.degree == 1.0 and phi.slopes is not None  # its kink at the origin is known, and costs a search
    if not plain and any(kink_exponent(phi.function, kink) <= ROUGH for kink in phi.kinks):
        return Integral(math.inf, 0.0, 0)
    if phi.power is not None and (variance > 0 or phi.degree == 1.0):
        degree, (a, b) = phi.power
        slope = degree**2 * (a * a + b * b) * half_moment(2 * degree - 2)
        return _closed(slope, max(variance, VANISHING) ** (degree - 1.0))
    found = _mean(phi, lambda y: phi.derivative(y) ** 2, max(variance, VANISHING))
    # at q = 0 it is the limit of vanishing variance, which is 0 or infinite for a power other than 1 at the origin
    if variance == 0:
        trend = found.value / max(squared_slope(phi, 1e4 * VANISHING).value, 1e-300)
        return Integral(0.0, 0.0, 0) if trend < 0.5 else Integral(math.inf, 0.0, 0) if trend > 2 else found
    return found


def moment_slope(phi: Activation, variance: float) -> Integral:
    """d/dq E φ(√q z)² = E[φ(y) φ′(y) y]/q with y = √q z: meanfield2019's E[φ′² + φφ″], which needs no φ″."""
    if variance == 0 and second_moment(phi, 0.0).value == 0:
        return squared_slope(phi, 0.0)  # where φ(0) = 0 the two agree, limits included
    q = max(variance, VANISHING)
    # where φ jumps, φ′ misses the jump and E[φ(y)²(z² − 1)]/(2q) serves
    if any(kink_exponent(phi.function, kink) <= ROUGH for kink in phi.kinks):
        found = _mean(phi, lambda y: phi(y) ** 2 * (y**2 / q - 1) / 2, q)
    else:
        found = _mean(phi, lambda y: phi(y) * phi.derivative(y) * y, q)
    value = 0.0 if abs(found.value) <= found.error else found.value
    return Integral(value / q, found.error / q, found.evaluations)


def limit(moment: Callable[[Activation, float], Integral], phi: Activation) -> float:
    """What `moment` (a slope) tends to as q → ∞; infinite when it keeps growing."""
    # activations that become linear far out approach their limit like a + b/√q, which two values remove
    near, far = (moment(phi, q).value for q in (LARGEST / 4, LARGEST))
    if not far < 1.1 * near:
        return math.inf
    return 2 * far - near if far > 0 else 0.0


def tabulate(phi: Activation, *, weight: float, bias: float) -> LengthTable:
    """E φ(√q z)² on a grid of q that holds every fixed point for weight and bias variances up to the given ones."""
    largest = LARGEST
    if phi.growth == "bounded":
        # no fixed point exceeds weight·sup φ² + bias, and a sine is hard to integrate far beyond
        sampled = phi(np.linspace(-HALF_RANGE, HALF_RANGE, 8001))
        largest = max(4 * (weight * float(np.abs(sampled).max()) ** 2 + bias), 1.0)
        _require_few_waves(phi, sampled, math.sqrt(largest))
    count = math.ceil(PER_DECADE * math.log10(largest / SMALLEST)) + 1
    variances = np.geomspace(SMALLEST, largest, count)
    values = [second_moment(phi, float(q)).value for q in variances]
    return LengthTable(phi, variances, np.array(values))


def _require_few_waves(phi: Activation, sampled: Array, std: float) -> None:
    """UsageError where a function that oscillates, like a sine, turns too often within a standard deviation."""
    steps = np.diff(sampled)
    steps = steps[np.abs(steps) > 1e-9 * np.abs(steps).max(initial=0.0)]  # without the rounding of a flat tail
    turns = int((steps[1:] * steps[:-1] < 0).sum())
    waves = turns / (2 * HALF_RANGE) * std
    if turns > FEW_TURNS and waves > MOST_WAVES:
        raise UsageError(
            f"{phi.name} oscillates, and over a standard deviation of {std:.3g} it turns about {waves:.2g} times: "
            f"integrals are right up to {MOST_WAVES:.2g} turns",
            hint="smaller standard deviations of weights and biases",
        )


def fixed_points(moments: LengthTable, weight: float, bias: float) -> tuple[LengthPoint, ...]:
    """All q ≥ 0 with weight·E φ(√q z)² + bias = q, ascending; weight = σ_w², bias = σ_b²."""
    phi = moments.activation
    found: list[LengthPoint] = []
    if bias == 0 and second_moment(phi, 0.0).value == 0:
        found.append(LengthPoint(0.0, weight * moment_slope(phi, 0.0).value))

    def excess(log_variance: float) -> float:
        q = math.exp(log_variance)
        return weight * second_moment(phi, q).value / q + bias / q - 1

    # near misses between grid points are bracketed too
    values = relative_change(moments, weight, bias)
    for low, high in _brackets(np.log(moments.variances), values, excess):
        q = math.exp(float(brentq(excess, low, high, xtol=1e-14, rtol=1e-14)))
        found.append(LengthPoint(q, weight * moment_slope(phi, q).value))
    return tuple(found)


def relative_change(moments: LengthTable, weight: float, bias: float) -> Array:
    """q′/q − 1 on the grid: positive where a layer increases the variance."""
    with np.errstate(all="ignore"):
        return np.asarray((weight * moments.values + bias) / moments.variances - 1)


def _brackets(positions: Array, values: Array, excess: Callable[[float], float]) -> list[tuple[float, float]]:
    """Intervals with one sign change each; a dip that almost reaches 0 is followed to its bottom."""
    known = np.isfinite(values) & (np.abs(values) > NOISE)  # below, a sign is rounding
    positions, values = positions[known], values[known]
    pairs = []
    for i in range(len(values) - 1):
        if (values[i] < 0) != (values[i + 1] < 0):
            pairs.append((float(positions[i]), float(positions[i + 1])))
            continue
        sign = math.copysign(1.0, values[i])
        if i and sign * values[i - 1] > 0 and abs(values[i]) < min(abs(values[i - 1]), abs(values[i + 1]), 0.1):
            around = (float(positions[i - 1]), float(positions[i + 1]))
            bottom = minimize_scalar(lambda u, s=sign: s * excess(u), bounds=around, method="bounded")
            if bottom.fun < -NOISE:
                pairs += [(around[0], float(bottom.x)), (float(bottom.x), around[1])]
    return pairs


def product_moment(phi: Activation, variance: float, correlation: float) -> Integral:
    """E φ(u)φ(v) for Gaussian u and v of one variance and a correlation: the correlation map before it is normalized.

    In closed form for a positively homogeneous activation (the arc-cosine kernel); infinite where it does not exist.

    >>> from sounding.activations import resolve
    >>> round(product_moment(resolve("relu"), 2.0, 0.0).value, 6)  # 1/π
    0.31831
    """
    if phi.power is not None:
        degree, slopes = phi.power
        return _closed(kernel(correlation, degree=degree, slopes=slopes) * half_moment(2 * degree), variance**degree)
    product, outline = (lambda u, v: phi(u) * phi(v)), phi.pair_outline
    return _if_there(phi, variance, lambda std: gaussian_joint_mean(product, correlation, std=std, **outline))


def _closed(shape: float, size: float) -> Integral:
    """A closed form with its rounding."""
    return Integral(shape * size, 1e-15 * abs(shape) * size, 1)


def _mean(phi: Activation, f: Callable[[Array], Array], variance: float) -> Integral:
    """E f(√q z), infinite where it does not exist."""
    # a digit more than a mean over a line gives by itself: roots of differences of these means are searched for
    return _if_there(phi, variance, lambda std: gaussian_mean(f, std=std, **phi.outline, tolerance=1e-13))


def _if_there(phi: Activation, variance: float, mean: Callable[[float], Integral]) -> Integral:
    """A mean over inputs of this variance, infinite where it does not exist."""
    std = math.sqrt(variance)
    if phi.growth == "exponential" and not has_second_moment(phi, std=std):
        return Integral(math.inf, 0.0, 0)
    try:
        return mean(std)
    except NumericalError:
        return Integral(math.inf, 0.0, 0)
