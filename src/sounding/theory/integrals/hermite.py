"""The Hermite expansion of an activation, stable to thousands of terms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from sounding.activations import Activation, ActivationLike, has_second_moment, resolve
from sounding.activations.activation import Array
from sounding.errors import UsageError
from sounding.theory.integrals.panels import integrate, interval

MOST = 2048  # coefficients: of ReLU they take 0.13 s and come to 5e-16
CHUNK = 256  # coefficients integrated at once: bounds the memory


@dataclass(frozen=True)
class Hermite:
    """The expansion φ(z) = Σ c_k he_k(z) of the activation as it is, not scaled."""

    coefficients: tuple[float, ...]  # c_0, c_1, …
    second_moment: float  # E φ(z)² = Σ c_k² over all k, those left out included
    error: float  # an upper estimate of the error of every coefficient


def hermite_functions(z: Array) -> Iterator[Array]:
    """he_k(z)·exp(−z²/4) for k = 0, 1, …, one after the other, by the orthonormal three-term recurrence.

    √(k+1)·he_{k+1} = z·he_k − √k·he_{k−1}, with E he_j he_k = δ_jk for z ~ N(0, 1) (thesis2024, Definition 5.4). The
    factor exp(−z²/4) keeps every value below 1; the bare polynomials overflow at order 300.
    """
    previous, current = np.zeros_like(z), np.exp(-0.25 * z**2)
    for k in count():
        yield current
        previous, current = current, (z * current - math.sqrt(k) * previous) / math.sqrt(k + 1)


def hermite_values(z: Array, start: int, stop: int) -> Array:
    """`hermite_functions` for start ≤ k < stop, (stop − start, *z.shape)."""
    return np.stack(list(islice(hermite_functions(z), start, stop)))


def expand(activation: ActivationLike, *, count: int = 16, tolerance: float = 1e-13) -> Hermite:
    """The first `count` coefficients c_k = E[φ(z) he_k(z)], z ~ N(0, 1) (thesis2024, Definition 5.5).

    Each to `tolerance` relative to E|φ·he_k|.

    Raises:
        UsageError: `count` is not from 1 to 2048, or E φ² does not exist.

    >>> [round(c, 6) for c in expand("exp", count=4).coefficients]  # √e/√k!
    [1.648721, 1.648721, 1.165822, 0.673088]
    """
    phi = resolve(activation)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST:
        raise UsageError(f"the number of Hermite coefficients must be a whole number from 1 to {MOST}, got {count!r}")
    if not has_second_moment(phi, std=1.0):
        raise UsageError(
            f"activation {phi.name!r} must have a second moment E φ(z)² for z ~ N(0, 1), but it diverges or exceeds "
            "float64",
            hint="an activation that grows more slowly than exp(x²/4)",
        )
    reach = _reach(phi)
    edges = [phi.center - phi.length, phi.center + phi.length]  # a narrow φ would fall between the first nodes
    coefficients: list[float] = []
    error, second_moment, root = 0.0, 0.0, (2 * math.pi) ** -0.25

    def products(z: Array) -> Array:
        """φ² and φ·he_k for start ≤ k < stop, times the Gaussian density, one row each."""
        weighted = phi(z) * root * np.exp(-0.25 * z**2)
        rows = hermite_values(z, start, stop)
        rows *= root * weighted
        return np.concatenate([[weighted**2], rows])

    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        # 14 nodes resolve 8 radians of an oscillation of frequency √k
        soft = [*edges, *np.arange(-reach, reach, min(8.0 / math.sqrt(stop), 2.0))]
        adapted = integrate(
            products,
            interval(-reach, reach, kinks=phi.kinks, edges=soft),
            tolerance=tolerance,
            what=f"the square of activation {phi.name!r}",
        )
        second_moment = second_moment or float(adapted.values[0])
        coefficients.extend(adapted.values[1:].tolist())
        error = max(error, float(adapted.errors[1:].max()))
    return Hermite(tuple(coefficients), second_moment, error)


def _reach(activation: Activation) -> float:
    """Beyond this |z|, φ(z)² times the Gaussian density is below 1e-34 of its maximum."""
    z = np.linspace(0.0, 38.0, 761)
    with np.errstate(all="ignore"):
        size = np.maximum(np.abs(activation(z)), np.abs(activation(-z)))
        exponent = 2 * np.log(size) - 0.5 * z**2
    inside = np.flatnonzero(exponent > max(float(exponent.max()), -600.0) - 78.0)
    return float(z[inside[-1]]) + 1.0 if inside.size else 13.0
