"""Gaussian moments of an activation: what a wide layer does to the squared length and cosine of two samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sounding.activations.activation import Activation
from sounding.theory.integrals.quadrature import gaussian_mean, gaussian_pair_mean

QUADRATURE = 1e-7  # far below the finite-width noise of any measurement it is laid beside


@dataclass(frozen=True)
class Moments:
    """Gaussian moments of an activation φ at pre-activations of mean square q and correlation c.

    Args:
        square: E φ².
        product: E φφ′, of two samples.
        slope: E φ′², of the derivative.
        kurtosis: E φ′⁴ / (E φ′²)², for the finite-width allowance.
    """

    square: float
    product: float
    slope: float
    kurtosis: float


def gaussian_moments(activation: Activation, length: float, correlation: float) -> Moments:
    r"""The moments behind the length and correlation maps (meanfield2019, section 2).

    For φ of degree one with slopes (a, b) and $J_1(c) = (\sqrt{1-c^2} + (\pi - \arccos c)\,c)/\pi$ in closed form:
    $E\varphi^2 = q (a^2+b^2)/2$, $E\varphi\varphi = q[(a^2+b^2) J_1(c) - 2ab J_1(-c)]/2$, $E\varphi'^2 = (a^2+b^2)/2$.
    By quadrature otherwise.

    >>> from sounding.activations import resolve
    >>> relu = gaussian_moments(resolve("relu"), 2.0, 0.0)
    >>> relu.square, round(relu.product, 6), relu.slope, relu.kurtosis
    (1.0, 0.31831, 0.5, 2.0)
    """
    if activation.degree == 1.0 and activation.slopes is not None:
        a, b = activation.slopes
        both = a * a + b * b
        product = both * _arc_cosine(correlation) - 2 * a * b * _arc_cosine(-correlation)
        return Moments(length * both / 2, length * product / 2, both / 2, 2 * (a**4 + b**4) / both**2)
    std = math.sqrt(length)
    f, slope = activation.function, activation.derivative
    shape: dict[str, Any] = {"length": activation.length, "center": activation.center, "tolerance": QUADRATURE}

    def mean(power: int, of: Any) -> float:
        return gaussian_mean(lambda x: of(x) ** power, std=std, kinks=activation.kinks, **shape).value

    slope_square = mean(2, slope)
    product = gaussian_pair_mean(f, f, correlation, std=std, kinks_f=activation.kinks, **shape).value
    return Moments(mean(2, f), product, slope_square, mean(4, slope) / slope_square**2 if slope_square else math.inf)


def uncorrelated_shares(
    activation: Activation, length: float, layers: Sequence[tuple[float, float]]
) -> tuple[float, ...]:
    r"""What a stack leaves of the difference between uncorrelated samples: $1 - c_\ell$ at each of its linear maps.

    The length and correlation maps (meanfield2019, section 2) from correlation zero at the first linear map. For ReLU
    $1 - c_\ell \to (2/(0.30\,(\ell + 6.7)))^2$ (thesis2024, (5.9) sharpened), below 0.1 from layer 14 on; a network on
    the edge of chaos of a smooth activation keeps more, an orthogonal or linear one all. Short where the signal fades
    to zero or leaves the range of floating-point numbers.

    Args:
        activation: of every layer.
        length: mean square q at the first linear map.
        layers: (σ_w², σ_b²) of each further linear map.

    >>> from sounding.activations import resolve
    >>> shares = uncorrelated_shares(resolve("relu"), 1.0, [(2.0, 0.0)] * 49)
    >>> round(shares[0], 3), round(shares[1], 3), sum(share < 0.1 for share in shares)
    (1.0, 0.682, 37)
    """
    correlation, shares = 0.0, [1.0]
    for weight, bias in layers:
        moments = gaussian_moments(activation, length, max(-1.0, min(1.0, correlation)))
        length, product = weight * moments.square + bias, weight * moments.product + bias
        if not (math.isfinite(length) and length > 0):
            break
        correlation = product / length
        shares.append(1 - correlation)
    return tuple(shares)


def _arc_cosine(c: float) -> float:
    return (math.sqrt(max(1 - c * c, 0.0)) + (math.pi - math.acos(max(-1.0, min(1.0, c)))) * c) / math.pi
