"""Two coordinates of a batch-normalized neuron for smooth activations that oscillate: one transform for each radius.

In polar form x₁ = T cos ψ, x₂ = T cos(ψ − ω), cos ω = −1/(B−1), ψ uniform and independent of T. With the Chebyshev
series f(T cos ψ) = Σ f_m(T) cos mψ, and g alike,

    (1/2π) ∫ f(T cos ψ) g(T cos(ψ − ω)) dψ = f_0 g_0 + ½ Σ_{m≥1} f_m(T) g_m(T) cos mω

so a radius costs one cosine transform of φ; D is its derivative, taken on the coefficients, and x multiplies by a shift
of them. What remains is an integral over T against the law's weight, the only place where μ and eps enter: the angular
means are kept, panel by panel, for every law that is asked of the same activation and batch size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy.fft import dct, next_fast_len

from sounding.activations.activation import Array
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.panels import gauss_error, legendre
from sounding.theory.integrals.series import PairSeries

ORDER = 32
_FIRST, _MOST = 40, 760  # samples of half a circle; beyond, the function is steep rather than oscillating
_MAX_SAMPLES = 1_400_000
_MAX_ROUNDS = 14
_TURNS = 40.0  # radians that a panel of this order resolves
_CHUNK = 400_000


@dataclass
class Circles:
    """Angular means of the wanted pairs on panels in χ, T = √(B−1) sin χ, kept by panel.

    `wanted` are pairs of φ, xφ, x²φ, D, xD, x²D, x³D by index. A panel holds the means at its nodes and their error,
    (pairs, ORDER) and (pairs,).
    """

    affine: Affine
    batch_size: float
    wanted: tuple[tuple[int, int], ...]
    kept: dict[tuple[float, float], tuple[Array, Array]] = field(default_factory=dict)
    needed: list[tuple[float, int]] = field(default_factory=list)
    samples: int = 0

    @cached_property
    def most(self) -> int:
        """How many terms the largest circle has; 0 where it cannot be sampled, or where a kink lies within it."""
        reach = math.sqrt(self.batch_size - 1.0)
        if self.affine.kinks_within(reach):
            return 0
        series = np.abs(self._series(np.array([reach]), _MOST)[0])
        if series[-_MOST // 16 :].max() > 1e-13 * series.max():
            return 0
        terms = int(np.flatnonzero(series > 1e-14 * series.max())[-1]) + 1
        return terms if terms < _MOST else 0

    def means(self, low: Array, high: Array) -> tuple[Array, Array]:
        """(pairs, panels, ORDER) and errors (pairs, panels)."""
        keys = list(zip(low.tolist(), high.tolist(), strict=True))
        missing = sorted((key for key in keys if key not in self.kept), key=lambda key: key[1])
        while missing:
            count = self._expected(missing[0][1])
            last = 1
            while last < len(missing) and self._expected(missing[last][1]) <= 1.25 * count:
                last += 1
            part, missing = missing[: min(last, max(1, _CHUNK // (count * ORDER)))], missing
            self._fill(part, self._expected(part[-1][1]))
            missing = missing[len(part) :]
        found = [self.kept[key] for key in keys]
        return np.stack([entry[0] for entry in found], axis=1), np.stack([entry[1] for entry in found], axis=1)

    def _expected(self, chi: float) -> int:
        """How many samples a circle of this radius will need, from those that were: about as the radius grows."""
        sine = math.sin(chi)
        known = self.needed[-3:] or [(1.0, int(1.04 * self.most) + 16)]
        return int(min(max(_FIRST, *(1.02 * count * sine / at + 16.0 for at, count in known)), _MOST))

    def _fill(self, panels: list[tuple[float, float]], count: int) -> None:
        """Compute panels with as many samples as their series need."""
        edges = np.array(panels)
        nodes, _ = legendre(ORDER)
        chi = 0.5 * edges.sum(axis=1)[:, None] + 0.5 * np.diff(edges, axis=1) * nodes
        radius = (math.sqrt(self.batch_size - 1.0) * np.sin(chi)).ravel()
        while True:
            count = next_fast_len(count, real=True)
            series = self._series(radius, count)
            size = np.abs(series).max(axis=1)
            floor = np.maximum(self._floor(radius, series), 1e-15 * size)
            significant = np.abs(series) > floor[:, None]
            last = int(np.flatnonzero(significant.any(axis=0))[-1]) if significant.any() else 0
            tail = np.abs(series[:, -6:]).max(axis=1)
            over = tail > floor
            if last < count - 6 or not over.any() or count >= _MOST:
                break
            count = min(int(1.4 * count), _MOST)
        self.needed.append((math.sin(panels[-1][1]), max(int(1.04 * last) + 16, _FIRST)))
        series[~significant] = 0.0
        means, errors = self._products(radius, series[:, : last + 1], np.where(over, tail, 0.0) + floor)
        shaped = means.reshape(len(self.wanted), -1, ORDER)
        shaped_errors = errors.reshape(len(self.wanted), -1, ORDER).max(axis=2)
        for index, key in enumerate(panels):
            self.kept[key] = shaped[:, index], shaped_errors[:, index]

    def _series(self, radius: Array, count: int) -> Array:
        psi = math.pi * (np.arange(count) + 0.5) / count
        y = self.affine.scale * radius[:, None] * np.cos(psi) + self.affine.shift
        self.samples += y.size
        series = np.asarray(dct(self.affine.rise(y), type=2, axis=1)) / count
        series[:, 0] *= 0.5
        return series

    def _floor(self, radius: Array, series: Array) -> Array:
        """Rounding of the coefficients: of the values, and of y times the slope."""
        phi = self.affine
        steep = np.sqrt((series * series) @ np.arange(series.shape[1]) ** 2.0) / radius
        blur = (abs(phi.shift / phi.scale) + radius) * steep
        size = np.abs(series).max(axis=1)
        return np.asarray(np.finfo(np.float64).eps * (size + abs(phi.level) + 0.5 * blur))

    def _products(self, radius: Array, series: Array, error: Array) -> tuple[Array, Array]:
        turns = np.cos(np.arange(series.shape[1] + 4) * math.acos(-1.0 / (self.batch_size - 1.0)))
        turns[1:] *= 0.5
        slopes = any(max(pair) > 2 for pair in self.wanted)
        rows = [np.pad(series, ((0, 0), (0, 4)))]
        for _ in range(2 if slopes else 0):
            rows.append(_times_x(rows[-1], radius))
        if slopes:
            rows.append(_derived(rows[0], radius))
            for _ in range(3):
                rows.append(_times_x(rows[-1], radius))
        count = max(float(np.count_nonzero(series, axis=1).max()), 2.0)
        norms = [np.sqrt((row * row).sum(axis=1)) for row in rows]
        means, errors = [], []
        for i, j in self.wanted:
            means.append((rows[i] * rows[j]) @ turns)
            # the slope's coefficients carry the error of φ's times their number, over the radius
            own = [3 * error * (1.0 if k < 3 else count / radius) * radius ** (k if k < 3 else k - 3) for k in (i, j)]
            errors.append(norms[i] * own[1] + norms[j] * own[0])
        return np.stack(means), np.stack(errors)


def _times_x(series: Array, radius: Array) -> Array:
    """T cos ψ·Σ f_m cos mψ."""
    found = np.zeros_like(series)
    found[:, 1:] += 0.5 * series[:, :-1]
    found[:, :-1] += 0.5 * series[:, 1:]
    found[:, 1] += 0.5 * series[:, 0]
    return found * radius[:, None]


def _derived(series: Array, radius: Array) -> Array:
    """df/dx of f(T cos ψ) = Σ f_m cos mψ: f′_{m−1} = f′_{m+1} + 2m f_m/T, the first one halved."""
    m = np.arange(series.shape[1])
    terms = 2 * m * series / radius[:, None]
    found = np.zeros_like(series)
    for parity in (0, 1):
        sums = np.cumsum(terms[:, parity::2][:, ::-1], axis=1)[:, ::-1]
        if parity == 1:
            found[:, 0::2][:, : sums.shape[1]] = sums[:, : found[:, 0::2].shape[1]]
        else:
            found[:, 1::2][:, : sums.shape[1] - 1] = sums[:, 1:]
    found[:, 0] *= 0.5
    return found


def circle_sums(
    circles: Circles, law: NormalizedLaw, powers: tuple[int, ...], *, tolerance: float
) -> PairSeries | None:
    """E s^(2p) f_i(x₁) f_j(x₂) for the pairs of `circles` and p of each; p = −2 carries a factor eps.

    None where φ has kinks, is too steep for its circles, or where panels or samples run out. `scales` are ∫ |·|.
    """
    if not circles.most:
        return None
    edges = _first_edges(law, circles.most)
    low, high = edges[:-1], edges[1:]
    _, weights = legendre(ORDER)
    totals = np.zeros((3, len(powers)))
    for _ in range(_MAX_ROUNDS):
        chi = _nodes(low, high)
        weight = _weights(law, chi, powers) * (0.5 * (high - low)[:, None] * weights)
        # a panel on which the law has no mass needs no samples
        present = weight.max(axis=(0, 2)) > 1e-22
        low, high, weight = low[present], high[present], weight[:, present]
        means, noise = circles.means(low, high)
        rows = means * weight
        size = np.abs(rows).sum(axis=2)
        beside = totals[2] + size.sum(axis=1)
        allowed = tolerance * np.maximum(beside, 1e-300)
        tail = gauss_error(rows, order=ORDER, terms=3, doubt=10.0)
        rounding = noise * np.abs(weight).sum(axis=2)
        error = tail + rounding
        bad = (tail > np.maximum(0.02 * allowed[:, None], rounding)).any(axis=0) & (high - low > 1e-9)
        if circles.samples > _MAX_SAMPLES:
            return None
        totals += np.stack([part[:, ~bad].sum(axis=1) for part in (rows.sum(axis=2), error, size)])
        if not bad.any():
            return PairSeries(totals[0], totals[1] + 1e-15 * totals[2], totals[2])
        middle = 0.5 * (low[bad] + high[bad])
        low, high = np.concatenate([low[bad], middle]), np.concatenate([middle, high[bad]])
    return None


def _first_edges(law: NormalizedLaw, terms: int) -> Array:
    """Angles that laws of a batch size share: dyadic, as dense as the terms ask, geometric towards ends that matter."""
    half = 0.25 * math.pi
    pieces = 2 ** math.ceil(math.log2(max(4.0, 2.0 * terms / _TURNS)))
    width = math.sqrt(0.5 * law.batch_size * law.eps / law.mu)
    inner = math.ceil(math.log2(1.0 / min(law.spread, 1.0))) + 2
    outer = min(math.ceil(math.log2(1.0 / min(width, 1.0))) + 2, 16) if width > 0 else 1
    ladders = [half * 0.5 ** np.arange(float(inner)), 2 * half - half * 0.5 ** np.arange(float(outer))]
    return np.unique(np.concatenate([2 * half * np.arange(pieces + 1) / pieces, *ladders]))


def _nodes(low: Array, high: Array) -> Array:
    nodes, _ = legendre(ORDER)
    return np.asarray(0.5 * (low + high)[:, None] + 0.5 * (high - low)[:, None] * nodes)


def _weights(law: NormalizedLaw, chi: Array, powers: tuple[int, ...]) -> Array:
    """(powers, panels, ORDER)"""
    made = {}
    for power in set(powers):
        if power == -2:
            made[power] = law.eps * law.radial_weight(chi, -2) if law.eps > 0 else np.zeros_like(chi)
        else:
            made[power] = law.radial_weight(chi, power)
    return np.stack([made[power] for power in powers])
