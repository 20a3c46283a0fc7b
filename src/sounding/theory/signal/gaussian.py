"""E φ(x)φ(y) for millions of Gaussian pairs at once: what an elementwise function does to the signal.

Positively homogeneous functions have closed forms. For all others, φ(m + s z) = Σ c_k he_k(z) and, by Mehler,
E φ(x_a)φ(x_b) = Σ_k c_k(a) c_k(b) ρ^k. The diagonal is integrated on its own, so that it is exact however slowly the
series converges, and what the series leaves out near ρ = ±1 is taken from the table of one typical point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from sounding.activations.activation import Activation
from sounding.theory.integrals.arc_cosine import second_moment, two_sided
from sounding.theory.integrals.hermite import hermite_functions
from sounding.theory.integrals.panels import composite, legendre
from sounding.theory.integrals.powers import half_moment
from sounding.theory.signal.description import Array
from sounding.theory.signal.shapes import PLACES, horner, look_up, map_shaped

Function = Callable[[Array], Array]

TERMS = 96  # of the series for points of different variance: each costs a pass over all pairs
LONG = 1024  # of the series of one typical point, which is summed on a grid only
LEFT_OUT = 1e-9  # of E φ²: a series stops where it has less than this share left
GRID = 2**15 + 1  # angles of a table; linear interpolation between them leaves (π/2¹⁵)²/8 ≈ 1e-9 of the curvature
NEAR = 0.25  # radians from ρ = ±1, where ρ^1024 no longer vanishes and a polynomial in the angle bridges the gap
BRIDGE, BRIDGE_NODES = 0.75, 12  # how far the bridge's nodes reach, and how many they are
MANY = 160  # places in ln s, at most, between which coefficients are interpolated
PANEL_NODES = 14
STEEP = 12  # rungs of the ladder of panels around the place where φ varies
SAME = 1e-11  # relative difference of two standard deviations that count as one
KEPT = 2**16  # pairs whose integrals are kept from a function to its slope: half a megabyte for a node
NO_MEAN = 1e-9  # a mean below this share of the standard deviation counts as 0
# Nodes of `_plackett` by the largest exponent at ρ. Compared with 300 nodes on random pairs: a flat exponential loses
# little, and what is left of its error shrinks with it.
NODES = ((1e-3, 8), (0.1, 12), (math.inf, 20))
# An exponent up to FLAT has a closed form to second order, in a quarter of the time; its third order is below 1e-11.
# The second order stops at an angle whose cosine is STEEPEST, where rounding would grow: that leaves 1e-11, too.
FLAT, STEEPEST = 3e-4, 1e-3
LAST = math.sqrt(1 - STEEPEST**2)


@dataclass(frozen=True)
class Mapped:
    """The second moments (blocks, n, n) and the means (blocks, n) of f(x) for Gaussian x."""

    matrix: Array
    mean: Array


def map_pairs(
    activation: Activation,
    matrix: Array,
    mean: Array,
    *,
    slope: bool = False,
    shape: Array | None = None,
    amplitude: Array | None = None,
    kept: dict[str, Any] | None = None,
) -> Mapped:
    """E f(x_a) f(x_b) and E f(x_a), f = φ or, with `slope`, φ′, for x Gaussian with these means and second moments.

    The matrix is (blocks, n, n), the mean (blocks, n). `shape` is the law of x over features where it is not Gaussian,
    `amplitude` how gradients depend on x; see `shapes`. What φ and φ′ of one x have in common is put into `kept`, which
    is empty at first, and taken from there.

    Error: rounding for positively homogeneous φ (of degree 1 also with means: 1e-9); elsewhere about 1e-9 of E f² where
    all points have one variance, and LEFT_OUT or what `TERMS` terms leave out times how much the tail's shape differs
    between points where they have several.
    """
    variance = np.maximum(np.diagonal(matrix, axis1=1, axis2=2) - mean**2, 0.0)
    std = np.sqrt(variance)
    centred = bool((np.abs(mean) <= NO_MEAN * np.maximum(std, 1e-300)).all())
    gaussian = shape is None and amplitude is None
    if gaussian and not centred and activation.degree == 1.0 and activation.slopes is not None and (std > 0).all():
        return _bent(activation.slopes, mean, std, matrix, slope, {} if kept is None else kept)
    if gaussian and activation.degree is not None and activation.slopes is not None and centred:
        # block by block, so that what is made on the way stays in the cache of a core
        blocks = [
            _homogeneous(activation.degree, activation.slopes, deviations, block, slope)
            for deviations, block in zip(std, matrix, strict=True)
        ]
        return Mapped(np.stack([one.matrix for one in blocks]), np.stack([one.mean for one in blocks]))
    correlation = _correlations(matrix if centred else matrix - mean[:, :, None] * mean[:, None, :], std)
    if not gaussian:
        law = PLACES if shape is None else shape
        return Mapped(*map_shaped(activation, mean, std, correlation, law, slope=slope, amplitude=amplitude))
    return _series(activation, mean, std, correlation, slope)


def _correlations(covariance: Array, std: Array) -> Array:
    """Covariances over standard deviations: 0 where there are none, 1 on the diagonal."""
    inverse = np.divide(1.0, std, out=np.zeros_like(std), where=std > 0)
    correlation = covariance * inverse[..., :, None]
    correlation *= inverse[..., None, :]
    np.clip(correlation, -1.0, 1.0, out=correlation)
    np.einsum("...ii->...i", correlation)[:] = 1.0
    return np.asarray(correlation)


def _homogeneous(degree: float, slopes: tuple[float, float], std: Array, covariance: Array, slope: bool) -> Mapped:
    """c_α [(a² + b²) J_α(ρ) − 2ab J_α(−ρ)] (s_a s_b)^α for φ = a x^α and −b |x|^α on the two sides of 0."""
    (a, b), alpha = slopes, degree
    if slope:
        a, b, alpha = degree * a, -degree * b, degree - 1.0
    if a == b and alpha == 1.0:
        return Mapped(a * a * covariance, np.zeros_like(std))
    if a == -b and alpha == 0.0:
        return Mapped(np.full_like(covariance, a * a), np.full_like(std, a))
    matrix = two_sided(_correlations(covariance, std), degree=alpha, slopes=(a, b))
    if alpha != 0:
        size = std if alpha == 1.0 else std**alpha
        matrix *= size[:, None]
        matrix *= size
    matrix *= second_moment(alpha)
    return Mapped(matrix, (a - b) * half_moment(alpha) * std**alpha)


def _bent(
    slopes: tuple[float, float], mean: Array, std: Array, moments: Array, slope: bool, kept: dict[str, Any]
) -> Mapped:
    """φ = b x + (a − b) max(x, 0) at x = m + s z with means m, from the second moments of x.

    By Plackett, d/dρ of E f(x)g(y) is s_a s_b E f′(x)g′(y), and the second derivative of relu is a delta, so that
    E 1(x>0)1(y>0) = Φ(u_a)Φ(u_b) + I₀, E relu relu = E relu E relu + ρ s_a s_b Φ(u_a)Φ(u_b) + s_a s_b I₁, u = m/s,
    I_j = ∫_0^{asin ρ} (ρ − sin t)^j exp(−(u_a² − 2 sin t u_a u_b + u_b²)/(2 cos² t)) dt/2π.
    """
    a, b = slopes
    ratio = mean / std
    above = ndtr(ratio)
    size = std.shape[1]
    rows, columns, upper, lower = _upper(size)  # the diagonal has closed forms, and the rest is symmetric

    def pair(values: Array) -> tuple[Array, Array]:
        return values.take(rows, axis=1), values.take(columns, axis=1)

    if slope and "turn" in kept:
        turn = kept["turn"]
    else:
        (m, n), (s, t) = pair(mean), pair(std)
        outer = s * t
        covariance = moments.reshape(len(std), -1).take(upper, axis=1) - m * n
        rho = covariance / np.maximum(outer, 1e-300)
        np.clip(rho, -1.0, 1.0, out=rho)
        bend, turn = _plackett(m / s, n / t, rho, 0 if slope else 1)
        if turn.size <= KEPT:
            kept["turn"] = turn
    first, second = pair(above)
    both = first * second
    if slope:
        pairs = (a - b) ** 2 * (both + turn)
        if b != 0:
            pairs += b * b + b * (a - b) * (first + second)
        level = b + (a - b) * above
        own = a * a * above + b * b * (1 - above)
    else:
        density = np.exp(-0.5 * ratio**2) / math.sqrt(2 * math.pi)
        rectified = mean * above + std * density
        left, right = pair(rectified)
        pairs = (a - b) ** 2 * (left * right + outer * (rho * both + bend))
        if b != 0:
            pairs += b * b * (covariance + m * n)
            pairs += b * (a - b) * (m * right + n * left + covariance * (first + second))
        level = b * mean + (a - b) * rectified
        square = (mean**2 + std**2) * above + mean * std * density
        own = b * b * (mean**2 + std**2 - square) + a * a * square
    matrix = np.empty_like(moments)
    flat = matrix.reshape(len(std), -1)
    flat[:, upper] = flat[:, lower] = pairs
    flat[:, :: size + 1] = own
    return Mapped(matrix, level)


def _plackett(first: Array, second: Array, rho: Array, power: int) -> tuple[Array, Array]:
    """I_power and I₀ of `_bent` for pairs of u: closed for u = 0, by Gauss–Legendre what the exponential takes away."""
    squares, cross = 0.5 * (first**2 + second**2), first * second
    if float(np.max(squares, initial=0.0)) < 2 * FLAT:  # half of it is the least that the exponent can be
        *found, exponent = _flat(rho, squares, cross, power)
        if exponent <= FLAT:
            return found[0], found[1]
    cosine = np.sqrt(np.maximum(1.0 - rho * rho, 0.0))
    steepest = float(np.max((squares - rho * cross) / np.maximum(cosine * cosine, 1e-12), initial=0.0))
    nodes, weights = legendre(next(count for line, count in NODES if not steepest > line))
    # With v = tan(t/2) the integrand is rational but for its exponential. A substitution crowds nodes towards ρ = ±1,
    # where the exponent may be steep; a flat one takes fewer. The error is below 4e-9; where |ρ| > 0.999 and u_a ≠ u_b
    # that of I₀ stays below 2e-5.
    end = rho / (1.0 + cosine)
    loss, own_loss = np.zeros_like(rho), np.zeros_like(rho)
    for node, weight in zip(nodes, weights, strict=True):
        turn = 0.5 * (node + 1.0)
        v = turn * (2.0 - turn) * end  # its slope vanishes at the far end
        scale = 1.0 / (1.0 + v * v)
        sine, tilt = 2.0 * v * scale, 2.0 * scale - 1.0  # sin t and cos t
        lost = np.exp((sine * cross - squares) / np.maximum(tilt * tilt, 1e-300))
        lost -= 1.0
        lost *= (weight * (1.0 - turn)) * scale
        own_loss += lost
        if power:
            loss += lost * (rho - sine)
    angle = np.arcsin(rho)
    own = np.asarray((0.5 * angle + end * own_loss) / math.pi)
    return np.asarray((0.5 * (rho * angle + cosine - 1.0) + end * loss) / math.pi) if power else own, own


@lru_cache(maxsize=8)
def _upper(size: int) -> tuple[NDArray[np.intp], ...]:
    """The entries above the diagonal of a square matrix: their rows, their columns, their places in memory, and those
    of their mirror images."""
    rows, columns = np.triu_indices(size, 1)
    return rows, columns, rows * size + columns, columns * size + rows


def _flat(correlation: Array, squares: Array, cross: Array, power: int) -> tuple[Array, Array, float]:
    """I_power and I₀ of `_bent` to second order in the exponent x = (s − c sin t)/cos² t, and the largest |x|."""
    # ρ the correlation, s = (u_a² + u_b²)/2, c = u_a u_b, T = tan t, S_k = (1/cos^k t − 1)/k: ∫ x dt = s T − c S₁, ∫ x
    # sin t dt = s S₁ − c (T − t), ∫ x² dt = s² (T + T³/3) − 2sc S₃ + c² T³/3, and ∫ x² sin t dt = s² S₃ − 2sc T³/3 + c²
    # (S₃ − S₁)
    cosine = np.sqrt(np.maximum(1.0 - correlation * correlation, 1e-14))  # at ρ = 1 both u are equal, and x is bounded
    exponent = float(np.max(np.abs(squares - correlation * cross) / (cosine * cosine), initial=0.0))
    angle, tangent, secant = np.arcsin(correlation), correlation / cosine, 1.0 / cosine - 1.0
    near = np.maximum(cosine, STEEPEST)
    slant, far = np.clip(correlation, -LAST, LAST) / near, 1.0 / near
    cube, third = slant * slant * slant / 3, (far * far * far - 1.0) / 3
    mixed, twice = 2 * squares * cross, cross * cross
    lost = squares * tangent - cross * secant
    lost -= 0.5 * (squares * squares * (slant + cube) - mixed * third + twice * cube)
    own = (angle - lost) / (2 * math.pi)
    if not power:
        return own, own, exponent
    turned = squares * secant - cross * (tangent - angle)
    turned -= 0.5 * (squares * squares * third - mixed * cube + twice * (third - far + 1.0))
    return (correlation * (angle - lost) + cosine - 1.0 + turned) / (2 * math.pi), own, exponent


def _series(activation: Activation, mean: Array, std: Array, correlation: Array, slope: bool) -> Mapped:
    """Expectations of all pairs by Hermite series: terms that every point needs, and one typical tail for the rest."""
    f = activation.derivative if slope else activation.function
    laws, inverse = _distinct(mean, std)
    if len(laws) == 1:
        typical = _expand(activation, f, laws, LONG, width=0.25)
        table = _tabulate(typical, start=0)
        level = np.full_like(std, typical.coefficients[0, 0])
        return Mapped(_look_up(table, correlation), level)
    expansion = _expand_all(activation, f, laws)
    coefficients, second = expansion.coefficients[inverse], expansion.second[inverse]
    left = np.maximum(second - (expansion.coefficients**2).sum(axis=1)[inverse], 0.0)
    enough = LEFT_OUT * max(float(second.max()), 1e-300)
    kept = np.cumsum((expansion.coefficients**2)[:, ::-1], axis=1)[:, ::-1]
    beyond = (kept > 0.1 * enough).any(axis=0)
    terms = int(np.flatnonzero(beyond)[-1]) + 1 if beyond.any() else 1
    matrix = coefficients[..., None, terms - 1] * coefficients[:, None, :, terms - 1]
    for k in range(terms - 2, -1, -1):
        matrix *= correlation
        matrix += coefficients[..., None, k] * coefficients[:, None, :, k]
    if float(left.max()) > enough:
        middle = laws[[np.argsort(laws[:, 1])[len(laws) // 2]]]
        tail = _tabulate(_expand(activation, f, middle, LONG, width=0.25), start=terms)
        if tail[0] < 0.1 * left.max():  # the typical point's series has ended: that of the slowest has the tail's shape
            slowest = laws[[int(inverse.ravel()[np.argmax(left)])]]
            tail = _tabulate(_expand(activation, f, slowest, LONG, width=0.25), start=terms)
        root = np.sqrt(left / max(float(tail[0]), 1e-300))
        matrix += root[:, :, None] * root[:, None, :] * _look_up(tail, correlation)
    index = np.arange(std.shape[1])
    matrix[:, index, index] = second
    return Mapped(matrix, coefficients[..., 0].copy())


def _distinct(mean: Array, std: Array) -> tuple[Array, NDArray[np.int64]]:
    """The different (mean, std), (laws, 2), and which of them every point has."""
    scale = max(float(std.max()), float(np.abs(mean).max()), 1e-300)
    keys = np.stack([np.round(mean.ravel() / (SAME * scale)), np.round(std.ravel() / (SAME * scale))], axis=1)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    laws = np.stack([mean.ravel()[first], std.ravel()[first]], axis=1)
    return laws, np.asarray(inverse.reshape(std.shape), dtype=np.int64)


class _Expansion(NamedTuple):
    """What the moments of a function under each of several laws are made of."""

    coefficients: Array  # c_k, (laws, terms)
    second: Array  # E f²
    opposite: Array  # E f(m + s z) f(m − s z)


def _expand_all(activation: Activation, f: Function, laws: Array) -> _Expansion:
    """The coefficients of many laws: directly, or by Chebyshev interpolation in ln s where only s differs."""
    low, high = float(laws[:, 1].min()), float(laws[:, 1].max())
    alike = low > 0 and np.ptp(laws[:, 0]) <= NO_MEAN * low
    half = 0.5 * math.log(high / low) if alike else 0.0
    rate = math.asinh(0.25 * math.pi / max(half, 1e-3))  # c_k(s) is analytic for |arg s| < π/4
    count = min(max(math.ceil(26.0 / rate), 6), MANY)
    if alike and len(laws) > count:
        nodes = np.cos(math.pi * (np.arange(count) + 0.5) / count)
        chosen = np.sqrt(low * high) * np.exp(half * nodes)
        at = _expand(activation, f, np.stack([np.full(count, laws[0, 0]), chosen], axis=1), TERMS, width=0.75)
        places = np.log(laws[:, 1] / math.sqrt(low * high)) / half
        basis = np.polynomial.chebyshev.chebvander(places, count - 1)
        to_series = np.polynomial.chebyshev.chebvander(nodes, count - 1).T * (2.0 / count)
        to_series[0] *= 0.5
        weights = basis @ to_series
        return _Expansion(*(weights @ column for column in at))
    parts = [_expand(activation, f, laws[at : at + 32], TERMS, width=0.75) for at in range(0, len(laws), 32)]
    return _Expansion(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _expand(activation: Activation, f: Function, laws: Array, terms: int, *, width: float) -> _Expansion:
    """c_k = E f(m + s z) he_k(z) for k < terms, by Gauss–Legendre on panels with an edge at every kink."""
    mean, std = laws[:, :1], np.maximum(laws[:, 1:], 1e-300)
    reach = 12.0 + (2.0 * float(std.max()) if activation.growth == "exponential" else 0.0)
    base = np.arange(-math.ceil(reach / width), math.ceil(reach / width) + 1) * width
    rungs = activation.length * 3.0 ** np.arange(-1, STEEP)
    places = [*activation.kinks, activation.center, *(activation.center + rungs), *(activation.center - rungs)]
    own = np.clip((np.array(places) - mean) / std, base[0], base[-1])
    edges = np.sort(np.concatenate([np.broadcast_to(base, (len(laws), base.size)), own, -own], axis=1), axis=1)
    z, step = (found.reshape(len(laws), -1) for found in composite(edges, PANEL_NODES))
    density = step * np.exp(-0.25 * z * z) / math.sqrt(2 * math.pi)
    values = f(mean + std * z)
    weighted = values * density
    coefficients = np.empty((len(laws), terms))
    for k, function in enumerate(islice(hermite_functions(z), terms)):
        coefficients[:, k] = np.einsum("ij,ij->i", weighted, function)
    mirrored, envelope = f(mean - std * z), np.exp(-0.25 * z**2)
    return _Expansion(
        coefficients, (values * weighted * envelope).sum(axis=1), (mirrored * weighted * envelope).sum(axis=1)
    )


def _tabulate(expansion: _Expansion, *, start: int) -> Array:
    """Σ_{k ≥ start} c_k² cos^k θ of one law on `GRID` equal angles from 0 to π."""
    powers = expansion.coefficients[0] ** 2
    parity = np.where(np.arange(powers.size) % 2, -1.0, 1.0)
    kept = powers.copy()
    kept[:start] = 0.0
    end = max(float(expansion.second[0] - powers[:start].sum()), 0.0)
    other = float(expansion.opposite[0] - (powers * parity)[:start].sum())
    angle = np.linspace(0.0, math.pi, GRID)
    used = np.flatnonzero(kept > 1e-17 * max(end, 1e-300))
    values = horner(kept[: int(used[-1]) + 1] if used.size else kept[:1], np.cos(angle))
    # Kinks leave Σ c_k² slowly convergent at ρ = ±1, while the sum is a smooth function of θ there. Within NEAR of the
    # ends it is the polynomial through the exact value at the end and nodes beyond.
    if end - kept.sum() > LEFT_OUT * max(float(expansion.second[0]), 1e-300):
        for exact, turn in ((end, 0.0), (other, math.pi)):
            nodes = NEAR + 0.5 * BRIDGE * (1 - np.cos(math.pi * (np.arange(BRIDGE_NODES) + 0.5) / BRIDGE_NODES))
            at = np.abs(turn - nodes)
            known = np.concatenate([[exact], horner(kept, np.cos(at))])
            places = np.concatenate([[0.0], nodes])
            close = np.abs(angle - turn) < NEAR
            fit = np.polynomial.chebyshev.Chebyshev.fit(places, known, BRIDGE_NODES, domain=(0.0, NEAR + BRIDGE))
            values[close] = fit(np.abs(angle[close] - turn))
    else:
        values[0], values[-1] = end, other
    return values


def _look_up(table: Array, correlation: Array) -> Array:
    """A table over angles, at arccos ρ."""
    place = np.arccos(correlation)
    place *= (GRID - 1) / math.pi
    return np.asarray(look_up(table[None], place)[0])
