"""Kernel maps: how one layer changes the correlation of two samples, and where that ends (thesis2024, chapter 5).

In a wide network with weights of variance 1/fan-in, two samples whose features have correlation ρ have correlation κ(ρ)
after the next activation. κ(ρ) = E ψ(X)ψ(Y), where X, Y are standard Gaussian with correlation ρ and ψ is what a layer
does to a neuron, scaled to E ψ² = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from scipy.optimize import brentq

from sounding.activations import Activation, ActivationLike, resolve
from sounding.activations.activation import Array
from sounding.activations.kinks import ROUGH, kink_exponent
from sounding.encoding import fields_of
from sounding.errors import UsageError
from sounding.theory.bounds.bound import Version
from sounding.theory.bounds.kernel_maps import NORMS, Norm, case_rate
from sounding.theory.integrals.arc_cosine import second_moment
from sounding.theory.integrals.hermite import expand
from sounding.theory.integrals.powers import kernel_slope
from sounding.theory.integrals.quadrature import Integral, gaussian_joint_mean, gaussian_mean
from sounding.theory.length import product_moment, squared_slope

COEFFICIENTS = 16  # told in the result; κ itself needs the first two
CENTRED = 1e-8  # |c_0| below this makes κ(0) = c_0² vanish next to κ(1) = 1 in float64
EDGE = 1e-9  # κ′(1) within this of 1 is 1: it is exactly 1 for homogeneous activations and exp
SMALLEST = 1e-4  # the angle arccos ρ below which a fixed point counts as 1
ROUNDING = 1e-14  # of a closed form: some dozens of roundings and the hypergeometric function


@dataclass(frozen=True)
class FixedPoint:
    """A correlation that a layer leaves as it is; `attracting` when nearby correlations approach it."""

    correlation: float
    slope: float
    attracting: bool


@dataclass(frozen=True)
class Kernel:
    """The kernel map of an activation and where its sequence ρ, κ(ρ), κ(κ(ρ)), … ends.

    Args:
        activation, norm: what it belongs to.
        second_moment: E φ(z)² of the bare activation.
        hermite: c_0, c_1, … of ψ; Σ c_k² = 1 over all k and κ(ρ) = Σ c_k²ρ^k.
        zero, slope_zero: κ(0) = c_0² and κ′(0) = c_1².
        slope_one: κ′(1) = E ψ′²; infinite when φ jumps or rises as steeply as a square root.
        fixed_point, slope_fixed_point: the one ρ* in [0, 1] to which every ρ in (−1, 1) converges, and κ′(ρ*).
        attracting: False only for a linear activation, which leaves every ρ as it is.
        case: 1 to 4 of Theorem 5.11.
        rate: the factor by which the distance to ρ* shrinks per layer at worst; 1 in case 3, where it shrinks like 1/ℓ.
        rate_printed: as printed in the paper, where that is not always true.
        algebraic_rate: in case 3 the α of 1 − ρ_ℓ ≤ x/(1 + αℓx), x = 1 − ρ_0; None otherwise.
        fixed_points: all of them in [−1, 1].
        error: an upper estimate of the error of the numbers above.
    """

    activation: str
    norm: Norm
    second_moment: float
    hermite: tuple[float, ...]
    zero: float
    slope_zero: float
    slope_one: float
    fixed_point: float
    slope_fixed_point: float
    attracting: bool
    case: int
    rate: float
    rate_printed: float
    algebraic_rate: float | None
    fixed_points: tuple[FixedPoint, ...]
    error: float

    def to_dict(self) -> dict[str, Any]:
        """Plain types under the names of `sounding predict kernel --json`."""
        start = fields_of(self, "activation norm second_moment hermite")
        ends = "fixed_point slope_fixed_point attracting case rate rate_printed algebraic_rate fixed_points error"
        return {**start, "kappa": fields_of(self, "zero slope_zero slope_one"), **fields_of(self, ends)}

    def __str__(self) -> str:
        speed = f"what is left of the way shrinks by ×{self.rate:.6g} per layer at worst"
        if self.algebraic_rate is not None:
            speed = f"slowly: what is left of the way is below 1/({self.algebraic_rate:.6g} × layers)"
        end = f"correlations go to {self.fixed_point:.6g}, {speed}"
        if not self.attracting:
            end = "linear, every correlation stays as it is"
        return (
            f"Kernel({self.activation}, norm {self.norm}): {end}\n  κ(0) {self.zero:.6g}  κ′(0) {self.slope_zero:.6g}  "
            f"κ′(1) {self.slope_one:.6g}  κ′(ρ*) {self.slope_fixed_point:.6g}"
        )


@dataclass(frozen=True)
class Neuron:
    """ψ = (φ − mean)/std: what a layer, its normalization included, does to a neuron in the mean field.

    Norms before the activation scale φ by a constant alone, for Gaussian preactivations have mean 0. After it, RMS norm
    divides by √E φ² and layer norm subtracts E φ = c_0 first (thesis2024, proof of Theorem 5.15).
    """

    activation: Activation
    mean: float
    std: float
    second_moment: float

    def function(self, x: Array) -> Array:
        """ψ(x)."""
        return (self.activation(x) - self.mean) / self.std

    def derivative(self, x: Array) -> Array:
        """ψ′(x) away from jumps."""
        return self.activation.derivative(x) / self.std

    def roughness(self) -> float:
        """The smallest exponent of φ's kinks; E ψ′² is finite above ½."""
        if self.activation.degree is not None:
            return math.inf if self.activation.name == "identity" else self.activation.degree
        return min((kink_exponent(self.activation.function, kink) for kink in self.activation.kinks), default=math.inf)


def kernel(activation: ActivationLike, norm: Norm = "none") -> Kernel:
    """The kernel map of an activation, its fixed points, their case and the speed of approach.

    thesis2024, Theorem 5.11, on κ with κ(1) = 1. A power series with coefficients c_k² ≥ 0 is convex on [0, 1], so one
    fixed point ρ* attracts all of (−1, 1); `bounds.kernel_maps.theorem_5_11` tells the four cases and their errata.

    Args:
        activation: name, record or callable.
        norm: "none" (the activation scaled to E φ² = 1), "pre-rms", "post-rms", "pre-ln" or "post-ln" (Theorem 5.15).

    Raises:
        UsageError: E φ² does not exist or is 0, or a layer norm follows a constant.

    >>> relu = kernel("relu")
    >>> relu.case, relu.fixed_point, round(relu.zero, 6)
    (3, 1.0, 0.31831)
    """
    neuron = normalized(activation, norm)
    series = expand(neuron.activation, count=COEFFICIENTS)
    coefficients = np.array(series.coefficients) / neuron.std
    coefficients[0] = (series.coefficients[0] - neuron.mean) / neuron.std
    # what quadrature cannot tell from 0 is 0: it decides whether an activation counts as odd or centred
    coefficients[np.abs(coefficients) <= 4 * series.error / neuron.std] = 0.0
    if abs(coefficients[0]) <= CENTRED:
        coefficients[0] = 0.0
    zero, slope_zero = float(coefficients[0] ** 2), float(coefficients[1] ** 2)
    slope_one = _slope_one(neuron)
    linear = slope_zero > 1 - 1e-12  # all of Σ c_k² = 1 in c_1²
    case = 3 if abs(slope_one.value - 1) <= EDGE else 2 if slope_one.value < 1 else 4
    case = 1 if zero == 0.0 else case
    point, slope, error = (0.0, slope_zero, 0.0) if case == 1 else (1.0, slope_one.value, 0.0)
    if case == 4:
        point = crossing(neuron)
        error = SMALLEST**2
        if point != 1.0:
            at_point = slope_at(neuron, point)
            # an error δ of κ moves the crossing with the diagonal by δ/(1 − κ′)
            slope, error = at_point.value, at_point.error + 2e-13 / max(1 - at_point.value, 1e-6)
    rate, printed = (
        case_rate(case, zero, slope_zero, slope_one.value, fixed_point=point, slope=slope, version=version)
        for version in get_args(Version)
    )
    fixed_points = [FixedPoint(point, slope, True)]
    if point != 1.0:
        fixed_points.append(FixedPoint(1.0, slope_one.value, False))
    opposite = kappa(neuron, -1.0)
    if abs(opposite.value + 1) <= max(10 * opposite.error, 1e-10):  # ψ is odd; κ has no others on [−1, 1]
        fixed_points.insert(0, FixedPoint(-1.0, slope_one.value, False))
    if linear:
        fixed_points = [FixedPoint(rho, 1.0, False) for rho in (-1.0, 0.0, 1.0)]
    fallible = 2 * neuron.activation.derivative_error * slope_one.value if math.isfinite(slope_one.value) else 0.0
    return Kernel(
        activation=neuron.activation.name,
        norm=norm,
        second_moment=neuron.second_moment,
        hermite=tuple(coefficients.tolist()),
        zero=zero,
        slope_zero=slope_zero,
        slope_one=slope_one.value,
        fixed_point=point,
        slope_fixed_point=slope,
        attracting=not linear,
        case=case,
        rate=rate,
        rate_printed=printed,
        algebraic_rate=1.0 - zero - slope_zero if case == 3 else None,
        fixed_points=tuple(fixed_points),
        error=max(error, slope_one.error, series.error / neuron.std, fallible),
    )


def normalized(activation: ActivationLike, norm: Norm = "none") -> Neuron:
    """ψ for a normalization: φ/√E φ², or (φ − E φ)/√Var φ for "post-ln"."""
    phi = resolve(activation)
    if norm not in NORMS:
        raise UsageError(f"expected a norm among {', '.join(NORMS)}, got {norm!r}")
    series = expand(phi, count=2)
    if not series.second_moment > 0:
        raise UsageError(f"activation {phi.name!r} is 0 almost everywhere, so no correlation is defined after it")
    if norm != "post-ln":
        return Neuron(phi, 0.0, math.sqrt(series.second_moment), series.second_moment)
    mean = series.coefficients[0]
    spread = gaussian_mean(lambda z: (phi(z) - mean) ** 2, **phi.outline, tolerance=1e-13).value
    if spread <= 1e-24 * series.second_moment:
        raise UsageError(f"activation {phi.name!r} is constant: a layer norm after it divides 0 by 0")
    return Neuron(phi, mean, math.sqrt(spread), series.second_moment)


def evaluate(activation: ActivationLike, rho: float, *, norm: Norm = "none", order: int = 0) -> Integral:
    """κ(ρ) or its derivative of the given order at ρ ∈ [−1, 1], with its error.

    Orders 0 and 1 are `kappa` and `slope_at`; higher ones sum the Hermite series Σ c_k² k!/(k−n)! ρ^(k−n), for |ρ| ≤
    0.98.

    >>> [round(evaluate("hermite:3", 0.5, order=order).value, 12) for order in range(4)]
    [0.125, 0.75, 3.0, 6.0]
    """
    value = check_correlation(rho)
    if not isinstance(order, int) or order < 0:
        raise UsageError(f"the order of a derivative must be a whole number from 0, got {order}")
    neuron = normalized(activation, norm)
    if order > 1:
        return _series_derivative(neuron, value, order)
    found = (slope_at if order else kappa)(neuron, value)
    # near 0 without the digits that the error does not vouch for
    return replace(found, value=0.0) if abs(found.value) < found.error else found


def kappa(neuron: Neuron, rho: float) -> Integral:
    """E ψ(X)ψ(Y), in closed form for a positively homogeneous activation; 1 exactly at ρ = 1."""
    if rho == 1.0:
        return Integral(1.0, 0.0, 0)
    if neuron.activation.power is not None:
        value = product_moment(neuron.activation, 1.0, rho).value - neuron.mean**2
        return Integral(value / neuron.std**2, ROUNDING * neuron.second_moment / neuron.std**2, 0)
    return _pair_mean(neuron, lambda x, y: neuron.function(x) * neuron.function(y), rho)


def slope_at(neuron: Neuron, rho: float) -> Integral:
    """κ′(ρ): E ψ′(X)ψ′(Y), or where ψ jumps the derivative of the density (see `slope_by_density`)."""
    if rho == 1.0:
        return _slope_one(neuron)
    phi, roughness = neuron.activation, neuron.roughness()
    if phi.power is not None and roughness > ROUGH:
        degree, slopes = phi.power
        value = second_moment(degree) * kernel_slope(rho, degree=degree, slopes=slopes) / neuron.std**2
        return Integral(value, ROUNDING * max(value, 1.0), 0)
    # ψ′ is unbounded at a kink of exponent below 1; its product is integrable but slow, so keep it for near ±1
    if roughness >= 1.0 or (roughness > ROUGH and abs(rho) > 0.99):
        return _pair_mean(neuron, lambda x, y: neuron.derivative(x) * neuron.derivative(y), rho)
    return slope_by_density(neuron, rho)


def slope_by_density(neuron: Neuron, rho: float) -> Integral:
    """κ′(ρ) without ψ′: E ψ(X)ψ(Y)·∂_ρ ln p_ρ(X, Y), p_ρ the Gaussian density, for |ρ| < 1."""
    if abs(rho) == 1.0:
        raise UsageError(f"the density has no derivative at correlation {rho:g}")
    # it needs no derivative, so it also serves jumps; its error grows like (1 − ρ²)^−2 near ±1
    free = 1 - rho**2

    def integrand(x: Array, y: Array) -> Array:
        # ∂_ρ ln p_ρ = ρ/(1−ρ²) + ((1+ρ²)xy − ρ(x²+y²))/(1−ρ²)²
        score = rho / free + ((1 + rho**2) * x * y - rho * (x**2 + y**2)) / free**2
        return np.asarray(neuron.function(x) * neuron.function(y) * score)

    return _pair_mean(neuron, integrand, rho)


def check_correlation(rho: float) -> float:
    """ρ as a float in [−1, 1]."""
    try:
        value = float(rho)
    except (TypeError, ValueError):
        value = math.nan
    if not -1.0 <= value <= 1.0:
        raise UsageError(f"a correlation must lie in [−1, 1], got {rho!r}")
    return value


def _pair_mean(neuron: Neuron, h: Callable[[Array, Array], Array], rho: float) -> Integral:
    """E h(X, Y) of standard Gaussian X, Y that both go through the activation."""
    return gaussian_joint_mean(h, rho, **neuron.activation.pair_outline)


def _slope_one(neuron: Neuron) -> Integral:
    """κ′(1) = E ψ′², infinite where ψ jumps or rises like a square root."""
    found = squared_slope(neuron.activation, 1.0)
    return replace(found, value=found.value / neuron.std**2, error=found.error / neuron.std**2)


def crossing(neuron: Neuron, *, weight: float = 1.0) -> float:
    """The ρ in (0, 1) where weight·κ(ρ) + 1 − weight = ρ, for a map whose slope weight·κ′(1) at 1 exceeds 1; else 1."""

    # solved as weight·(1 − κ(ρ))/(1 − ρ) = 1, whose left side increases; 1 − κ = ½E(ψ(X) − ψ(Y))² has no cancellation
    def excess(angle: float) -> float:
        spread = _pair_mean(neuron, lambda x, y: 0.5 * (neuron.function(x) - neuron.function(y)) ** 2, math.cos(angle))
        return weight * spread.value / (2 * math.sin(0.5 * angle) ** 2) - 1

    if excess(SMALLEST) <= 0:
        return 1.0
    if excess(0.5 * math.pi) >= 0:
        return 0.0
    return math.cos(float(brentq(excess, SMALLEST, 0.5 * math.pi, xtol=1e-15, rtol=1e-15)))


def _series_derivative(neuron: Neuron, rho: float, order: int) -> Integral:
    """Σ c_k² k!/(k−n)! ρ^(k−n), with a bound on the terms left out."""
    # as many terms as ρ^k needs to fall below rounding, and a kink's coefficients fall too slowly to help
    count = 128 if abs(rho) < 0.7 else 512 if abs(rho) < 0.92 else 2048
    if abs(rho) > 0.98:
        raise UsageError(
            f"derivatives of order {order} need |ρ| ≤ 0.98, got {rho:g}", hint="order 0 or 1, or a smaller correlation"
        )
    series = expand(neuron.activation, count=count)
    squares = (np.array(series.coefficients) / neuron.std) ** 2
    k = np.arange(count, dtype=np.float64)
    factor = np.prod([np.maximum(k - i, 0) for i in range(order)], axis=0)
    terms = squares[order:] * factor[order:] * float(rho) ** np.arange(count - order)
    return Integral(math.fsum(terms), abs(terms[-1]) * count + 1e-14 * abs(terms).max(), count)
