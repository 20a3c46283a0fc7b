"""How an activation grows at infinity, and whether its Gaussian second moment exists."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from sounding.activations.activation import Activation, Array, Growth

REACH = 38.0  # exp(−38²/2) is the smallest number float64 tells from 0


def growth_of(function: Callable[[Array], Array]) -> Growth:
    """Judged from the values: bounded when doubling x from 40 to 80 adds nothing, exponential when it overflows
    or multiplies by more than 2⁴⁰, else polynomial."""
    with np.errstate(all="ignore"):
        near = np.abs(function(np.linspace(-40.0, 40.0, 801))).max()
        far = np.abs(function(np.linspace(-80.0, 80.0, 801))).max()
    if not math.isfinite(far) or far > 2.0**40 * max(near, 1.0):
        return "exponential"
    return "bounded" if far <= 1.001 * near else "polynomial"


def has_second_moment(activation: Activation, *, std: float = 1.0) -> bool:
    """Whether E φ(std·z)² exists for z ~ N(0, 1) and float64 can hold it.

    The exponent of the integrand, 2 ln|φ(std·z)| − z²/2, must fall by 40 (seventeen digits) from its maximum before
    |z| = 38, the last z whose density is not 0. exp(x²/5) passes, exp(x²/4) does not: its second moment diverges.

    >>> from sounding.activations import from_callable, resolve
    >>> has_second_moment(resolve("exp")), has_second_moment(from_callable(lambda x: np.exp(x**2 / 4)))
    (True, False)
    """
    z = np.linspace(-REACH, REACH, 1521)
    with np.errstate(all="ignore"):
        exponent = 2 * np.log(np.abs(activation(std * z))) - z**2 / 2
    if not exponent.max() < 700.0:  # also NaN
        return False
    return bool(max(exponent[0], exponent[-1]) < max(exponent.max(), -40.0) - 40.0)
