"""Values that are not Gaussian over features: a residual stream that was rectified, and what a function makes of it.

ReLU(x + y), with x ≥ 0 from the block before and y from the branch, is the step of a walk reflected at 0, and far from
a Gaussian with the same mean and variance. A shape is the law of a value over features, scaled to mean 0 and variance
1, as its quantiles at the Gaussian places `PLACES`. It is followed through functions and sums, and given up where a
random linear map makes its outputs Gaussian again. Pairs are joined by a Gaussian copula, h_a = m_a + s_a L(z_a), with
the correlation of z_a and z_b that gives the covariance of h_a and h_b. One law serves all points, which is right for
points of one variance, as a batch norm leaves them.

Gradients that come down such a stream depend on the values there: what is positive now was more likely let through
later. Beside D they carry v, how large they are at each place relative to their root mean square.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy.special import ndtr

from sounding.activations.activation import Activation
from sounding.theory.signal.description import Array

PLACES: Array = np.linspace(-7.0, 7.0, 1401)  # a kink between two of them costs 1e-5
WEIGHTS: Array = np.exp(-0.5 * PLACES**2)
WEIGHTS /= WEIGHTS.sum()
TERMS = 40  # of the series in the copula's correlation; the rest stands at the last power
CORRELATIONS: Array = np.linspace(-1.0, 1.0, 4001)
CHUNK = 512  # points whose coefficients are computed at once: 6 MiB
ATOMS = 4  # of the places, every so many stand for a law in a sum


def pushed(activation: Activation, mean: float, std: float, shape: Array | None) -> Array | None:
    """The shape of φ(h) for h with a mean, a standard deviation and a shape; None for a constant."""
    values = activation(mean + std * (PLACES if shape is None else shape))
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(WEIGHTS[order]) - 0.5 * WEIGHTS[order]
    return _standardized(np.interp(ndtr(PLACES), reached, values[order]))


def summed(parts: Sequence[tuple[float, Array | None]]) -> Array | None:
    """The shape of a sum of independent values, given by (standard deviation, shape); None where all are Gaussian."""
    gaussian = math.sqrt(sum(std**2 for std, shape in parts if shape is None))
    others = [(std, shape) for std, shape in parts if shape is not None and std > 0]
    if not others:
        return None
    others.sort(key=lambda part: part[0])
    std, first = others.pop()
    quantiles = std * first
    for std, shape in others:
        quantiles = _convolved(quantiles, lambda x, q=std * shape: np.interp(x, q, ndtr(PLACES), 0.0, 1.0))
    if gaussian > 0:
        quantiles = _convolved(quantiles, lambda x: np.asarray(ndtr(x / gaussian)))
    return _standardized(quantiles)


def _convolved(quantiles: Array, distribution: object) -> Array:
    """The quantiles of X + Y, X by its quantiles, Y by its distribution function."""
    atoms, weights = quantiles[::ATOMS], WEIGHTS[::ATOMS] / WEIGHTS[::ATOMS].sum()
    spread = math.sqrt(float(WEIGHTS @ quantiles**2))
    x = np.linspace(quantiles[0] - 8 * spread, quantiles[-1] + 8 * spread, 801)
    reached = distribution(x[:, None] - atoms) @ weights  # type: ignore[operator]
    rising = np.concatenate([[True], np.diff(reached) > 0])
    return np.asarray(np.interp(ndtr(PLACES), reached[rising], x[rising]))


def _standardized(values: Array) -> Array | None:
    mean = float(WEIGHTS @ values)
    std = math.sqrt(max(float(WEIGHTS @ (values - mean) ** 2), 0.0))
    return (values - mean) / std if std > 0 else None


def map_shaped(
    activation: Activation,
    mean: Array,
    std: Array,
    correlation: Array,
    shape: Array,
    *,
    slope: bool,
    amplitude: Array | None = None,
) -> tuple[Array, Array]:
    """E f(h_a) f(h_b), (blocks, n, n), and E f(h_a), f = φ or φ′, for values with a shape and these correlations.

    With an `amplitude` v of gradients, E f f v v over E v v.
    """
    f = activation.derivative if slope else activation.function
    basis = hermite_rows(TERMS)
    own = basis @ shape
    mapped = np.interp(correlation, _kernel(own, 1.0), CORRELATIONS)
    laws, inverse = np.unique(np.round(np.stack([mean.ravel(), std.ravel()], 1), 12), axis=0, return_inverse=True)
    inverse = inverse.reshape(std.shape)
    coefficients, second = np.empty((len(laws), TERMS)), np.empty(len(laws))
    for at in range(0, len(laws), CHUNK):
        values = f(laws[at : at + CHUNK, :1] + laws[at : at + CHUNK, 1:] * shape)
        if amplitude is not None:
            values = values * amplitude
        coefficients[at : at + CHUNK] = values @ basis.T
        second[at : at + CHUNK] = values**2 @ WEIGHTS
    root = np.sqrt(np.maximum(second - (coefficients**2).sum(axis=1), 0.0))
    if len(laws) == 1:
        matrix = np.interp(mapped, CORRELATIONS, _kernel(coefficients[0], float(second[0])))
    else:
        rows = np.column_stack([coefficients, root])[inverse]
        matrix = rows[:, :, None, -1] * rows[:, None, :, -1]
        for k in range(TERMS - 1, -1, -1):
            matrix *= mapped
            matrix += rows[:, :, None, k] * rows[:, None, :, k]
    index = np.arange(std.shape[1])
    matrix[:, index, index] = second[inverse]
    if amplitude is not None:
        together = np.interp(mapped, CORRELATIONS, _kernel(basis @ amplitude, 1.0))
        together[:, index, index] = 1.0
        matrix /= np.maximum(together, 1e-12)
    return matrix, coefficients[inverse, 0]


def amplitude_before(activation: Activation, mean: float, std: float, shape: Array | None, v: Array | None) -> Array:
    """v in front of a function: φ′ at each place, times v behind it."""
    slope = activation.derivative(mean + std * (PLACES if shape is None else shape))
    return unit_amplitude(slope if v is None else slope * v)


def unit_amplitude(v: Array) -> Array:
    """v scaled to E v² = 1; 1 where it vanishes."""
    size = math.sqrt(float(WEIGHTS @ v**2))
    return v / size if size > 0 else np.ones_like(v)


def amplitude_of_term(
    v: Array, total: tuple[float, Array | None], term: tuple[float, Array | None], others: float
) -> Array:
    """v at one term of a sum, from v at the sum: its mean square over the other terms, taken for Gaussian.

    Args:
        v: at the places of the sum.
        total: standard deviation and shape of the sum.
        term: those of the term.
        others: the standard deviation of the other terms together.
    """
    std, shape = total
    values = std * (PLACES if shape is None else shape)
    own = term[0] * (PLACES if term[1] is None else term[1])
    steps, chances = PLACES[::20], WEIGHTS[::20] / WEIGHTS[::20].sum()
    seen = np.interp(own[:, None] + others * steps, values, v**2)
    return unit_amplitude(np.sqrt(seen @ chances))


@lru_cache(maxsize=4)
def hermite_rows(terms: int) -> Array:
    """he_k at the places, times their weights, (terms, places): coefficients c_k = rows @ f."""
    rows = np.empty((terms, PLACES.size))
    half = np.exp(-0.25 * PLACES**2)  # the bare polynomials overflow
    previous, current = np.zeros_like(PLACES), half
    for k in range(terms):
        rows[k] = current * (WEIGHTS / half)
        previous, current = current, (PLACES * current - math.sqrt(k) * previous) / math.sqrt(k + 1)
    rows.setflags(write=False)
    return rows


def _kernel(coefficients: Array, second: float) -> Array:
    """Σ c_k² r^k over `CORRELATIONS`, what is left of E f² at the next power."""
    squares = coefficients**2
    total = np.full_like(CORRELATIONS, max(second - float(squares.sum()), 0.0))
    for square in squares[::-1]:
        total *= CORRELATIONS
        total += square
    return total
