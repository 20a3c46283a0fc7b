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
from sounding.theory.integrals.hermite import hermite_values
from sounding.theory.signal.description import Array

PLACES: Array = np.linspace(-7.0, 7.0, 1401)  # a kink between two of them costs 1e-5
WEIGHTS: Array = np.exp(-0.5 * PLACES**2)
WEIGHTS /= WEIGHTS.sum()
BELOW: Array = ndtr(PLACES)  # the chance of a value below each place
TERMS = 40  # of the series in the copula's correlation; the rest stands at the last power
CORRELATIONS: Array = np.linspace(-1.0, 1.0, 4001)
LOST = 1e-3  # of the largest direction of the coefficients over points, those below it are left out: far below a spread
RATIOS = 65  # places of mean/std at which a homogeneous function is expanded; between them coefficients are linear
CHUNK = 512  # points whose coefficients are computed at once: 6 MiB
PIECE = 2**15  # places that are looked up at once: what is made on the way stays in the cache of a core
ATOMS = 4  # of the places, every so many stand for a law in a sum


def pushed(activation: Activation, mean: float, std: float, shape: Array | None) -> Array | None:
    """The shape of φ(h) for h with a mean, a standard deviation and a shape; None for a constant."""
    values = activation(mean + std * (PLACES if shape is None else shape))
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(WEIGHTS[order]) - 0.5 * WEIGHTS[order]
    return _standardized(np.interp(BELOW, reached, values[order]))


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
        quantiles = _convolved(quantiles, lambda x, q=std * shape: np.interp(x, q, BELOW, 0.0, 1.0))
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
    return np.asarray(np.interp(BELOW, reached[rising], x[rising]))


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
    """E f(h_a) f(h_b), (blocks, n, n), and E f(h_a), f = φ or φ′, for values with a shape and these correlations."""
    f = activation.derivative if slope else activation.function
    basis = hermite_rows(TERMS)
    own = basis @ shape
    size = CORRELATIONS.size
    # the correlation of the copula's z is the one whose kernel is that of h
    inverse_kernel = np.interp(CORRELATIONS, _kernel(own), CORRELATIONS)
    places = correlation_places(look_up(inverse_kernel[None], correlation_places(correlation, size))[0], size)
    degree = None if activation.degree is None else activation.degree - slope
    level, scale = _units(mean, std, degree)
    laws, inverse = np.unique(np.round(np.stack([level, scale], 1), 12), axis=0, return_inverse=True)
    coefficients, second = np.empty((len(laws), TERMS)), np.empty(len(laws))
    for at in range(0, len(laws), CHUNK):
        values = f(laws[at : at + CHUNK, :1] + laws[at : at + CHUNK, 1:] * shape)
        # with an amplitude v of gradients what is wanted is E f f v v over E v v
        if amplitude is not None:
            values = values * amplitude
        coefficients[at : at + CHUNK] = values @ basis.T
        second[at : at + CHUNK] = values**2 @ WEIGHTS
    if degree is not None:
        # places closer to each other than rounding share their law
        coefficients, second = _from_units(level, coefficients[inverse], second[inverse], mean, std, degree)
        inverse = np.arange(std.size)
    inverse = inverse.reshape(std.shape)
    root = np.sqrt(np.maximum(second - (coefficients**2).sum(axis=1), 0.0))
    # The laws of points differ little, so that their coefficients span few directions: c_k(a) = Σ_r u_r(a) w_r(k), and
    # Σ_k c_k(a) c_k(b) ρ^k = Σ_rs u_r(a) u_s(b) F_rs(ρ), with one table F_rs for each pair of directions.
    sides, sizes, rows = np.linalg.svd(np.column_stack([coefficients, root]), full_matrices=False)
    kept = max(int((sizes > LOST * sizes[0]).sum()), 1)
    factors = (sides * sizes)[:, :kept][inverse]
    matrix = np.zeros_like(correlation)
    for r in range(kept):
        for s, table in enumerate(look_up((rows[r] * rows[: r + 1]) @ _powers(), places)):
            crossed = factors[:, :, None, r] * factors[:, None, :, s]
            matrix += (crossed if r == s else crossed + np.swapaxes(crossed, 1, 2)) * table
    index = np.arange(std.shape[1])
    matrix[:, index, index] = second[inverse]
    if amplitude is not None:
        (together,) = look_up(_kernel(basis @ amplitude)[None], places)
        together[:, index, index] = 1.0
        matrix /= np.maximum(together, 1e-12)
    return matrix, coefficients[inverse, 0]


def _units(mean: Array, std: Array, degree: float | None) -> tuple[Array, Array]:
    """Means and standard deviations for which coefficients are computed."""
    if degree is None:
        return mean.ravel(), std.ravel()
    # A homogeneous function needs those of the ratio mean/std alone, at `RATIOS` places of its range at most
    ratio = (mean / np.maximum(std, 1e-300)).ravel()
    low, high = float(ratio.min()), float(ratio.max())
    places = np.linspace(low, high, RATIOS) if high - low > 1e-9 * (abs(low) + abs(high)) else np.array([low])
    return places, np.ones_like(places)


def _from_units(
    places: Array, coefficients: Array, second: Array, mean: Array, std: Array, degree: float
) -> tuple[Array, Array]:
    """Coefficients and second moments of every point from those at unit standard deviation, linear in the ratio."""
    spread = std.ravel()
    if len(places) == 1:
        return spread[:, None] ** degree * coefficients, spread ** (2 * degree) * second
    ratio = (mean.ravel() / np.maximum(spread, 1e-300) - places[0]) / (places[1] - places[0])
    index = np.clip(ratio.astype(np.int64), 0, len(places) - 2)
    rest = ratio - index
    between = coefficients[index] * (1 - rest[:, None]) + coefficients[index + 1] * rest[:, None]
    squares = second[index] * (1 - rest) + second[index + 1] * rest
    return spread[:, None] ** degree * between, spread ** (2 * degree) * squares


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
    """v at one term of a sum, from v at the sum: its mean square over the other terms, taken for Gaussian."""
    # total and term are (standard deviation, shape); `others` is the standard deviation of the other terms together
    std, shape = total
    values = std * (PLACES if shape is None else shape)
    own = term[0] * (PLACES if term[1] is None else term[1])
    steps, chances = PLACES[::20], WEIGHTS[::20] / WEIGHTS[::20].sum()
    seen = np.interp(own[:, None] + others * steps, values, v**2)
    return unit_amplitude(np.sqrt(seen @ chances))


@lru_cache(maxsize=4)
def hermite_rows(terms: int) -> Array:
    """he_k at the places, times their weights, (terms, places): coefficients c_k = rows @ f."""
    rows = hermite_values(PLACES, 0, terms) * (WEIGHTS / np.exp(-0.25 * PLACES**2))
    rows.setflags(write=False)
    return rows


@lru_cache(maxsize=1)
def _powers() -> Array:
    """r^k over `CORRELATIONS`, (TERMS + 1, places)."""
    return np.asarray(CORRELATIONS ** np.arange(TERMS + 1)[:, None])


def horner(coefficients: Array, x: Array) -> Array:
    """Σ c_k x^k."""
    total = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total *= x
        total += coefficient
    return total


def look_up(tables: Array, places: Array) -> Array:
    """Tables (count, size) interpolated linearly at places, counted in steps of a table: (count, *places)."""
    flat, steps = places.reshape(-1), np.diff(tables)
    found = np.empty((len(tables), flat.size))
    for start in range(0, flat.size, PIECE):
        part = slice(start, start + PIECE)
        index = np.clip(flat[part].astype(np.int64), 0, tables.shape[1] - 2)  # of NaN too, which then stays NaN
        rest = flat[part] - index
        for own, table, step in zip(found, tables, steps, strict=True):
            own[part] = table.take(index) + rest * step.take(index)
    return found.reshape(len(tables), *places.shape)


def correlation_places(correlation: Array, size: int) -> Array:
    """Where correlations lie in a table over equal steps from −1 to 1."""
    places = np.clip(correlation, -1.0, 1.0)
    places += 1.0
    places *= 0.5 * (size - 1)
    return np.asarray(places)


def _kernel(coefficients: Array) -> Array:
    """Σ c_k² r^k over `CORRELATIONS` for Σ c_k² = 1, what the coefficients leave of it at the next power."""
    squares = coefficients**2
    return horner(np.append(squares, max(1.0 - float(squares.sum()), 0.0)), CORRELATIONS)
