"""Two coordinates of a small batch for kinked and steep activations: one coordinate inside the other.

With x₁ = √(B−1) sin a the second coordinate runs over a chord, x₂ = √(B−1)(ρ₀ sin a + √(1−ρ₀²) cos a · v), |v| < 1,
and what is left of the sphere is 1 − τ = cos²a (1 − v²). Both coordinates use the panels of one table. A kink crosses
the chord at one place, so n kinks cut the plane into n² rectangles, and the inner integral

    I(a) = ∫ w(1 − τ) g(x₂) dx₂

is a product of a matrix, the law's density at pairs of nodes, with the table's values: neither φ nor D is evaluated
again. Only panels near an end of the chord, where the density may be singular, get nodes of their own, in b with
v = sin b. I(a) is smooth but for square roots where an end of the chord meets a kink: sin(a ± ω) = kink, cos ω = ρ₀.
Outer panels end there and at the table's edges, with nodes that crowd quadratically at both ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sounding.activations.activation import Array
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.panels import gauss_error, legendre
from sounding.theory.integrals.series import PairSeries
from sounding.theory.integrals.table import ORDER, Table

_NEAR = 0.8  # of its width: how near the end of the chord a panel may come before it gets nodes of its own
_OWN, _OWN_AMONG_MANY = 20, 12  # of them
_BLOCK = 60_000
_PAIRS, _EXACT_PAIRS = 700_000, 1_500_000  # of nodes, with eps and without
# nodes of outer and inner panels: many panels are narrow ones
_ORDERS = ((16, 16), (12, 10), (10, 8), (8, 8), (8, 6), (6, 6), (6, 5), (5, 4), (4, 4), (4, 3))
_FURTHER = (1.0, 1.4)  # as much of them where panels are halved: for E φφ alone, and for all
_NONE = (0.0,) * 4
# pairs of panels beyond which polynomials leave less: from a batch of 8 on they converge faster
_MOST_PANELS, _FEWER_PANELS, _LARGE_BATCH = 25_000, 4_000, 8.0
_MAX_ROUNDS = 9
_STEEP = 64
# inner kinds: index of φ, xφ, x²φ, D, xD, x²D, x³D and power of s²; of each wanted pair the outer index and the kind
_KINDS = ((0, 0), (0, 1), (1, 1), (3, -1), (4, -1), (5, -1), (4, -2))
_PAIRED = ((0, 0), (0, 1), (1, 2), (2, 1), (3, 3), (4, 4), (5, 3), (5, 5), (6, 4), (4, 6))


@dataclass(frozen=True)
class Nested:
    """The nested integral of one table and law: whether D is wanted or E φφ alone, and the nodes of an inner panel."""

    affine: Affine
    law: NormalizedLaw
    table: Table
    slopes: bool
    order: int

    @cached_property
    def rho(self) -> float:
        return -1.0 / (self.law.batch_size - 1.0)

    @cached_property
    def across(self) -> float:
        return math.sqrt(1.0 - self.rho**2)

    @cached_property
    def inner(self) -> tuple[Array, Array, Array, Array]:
        """sin a, dx, φ and D at the inner nodes, (n,) each."""
        if self.order == ORDER:
            return self.table.x / self.law.support, self.table.step, self.table.rise, self.table.slope
        nodes, weights = legendre(self.order)
        edges = self.table.edges
        half = 0.5 * np.diff(edges)[:, None]
        angle = 0.5 * (edges[1:] + edges[:-1])[:, None] + half * nodes
        basis = np.polynomial.legendre.legvander(nodes, ORDER - 1)
        rise, slope = (series @ basis.T for series in self.table.series())
        step = half * weights * self.law.support * np.cos(angle)
        return np.sin(angle).ravel(), step.ravel(), rise.ravel(), slope.ravel()

    def parts(self, rest: Array, inside: NDArray[np.bool_] | None = None) -> list[Array]:
        """What the densities are made of at 1 − τ = rest: e^(…)·rest^(…), and with eps that over rest and its square.

        With eps and D the last is the part that carries the mean of s^−4. All are 0 off `inside`.
        """
        law = self.law
        logarithm = np.log(rest)
        exponent = 0.5 * (law.batch_size - 5.0) * logarithm
        if law.eps > 0:
            inverse = 1.0 / rest
            exponent += 0.5 * law.batch_size * law.eps / law.mu * (1.0 - inverse)
        base = np.exp(exponent, out=exponent)
        if inside is not None:
            base *= inside
        if law.eps == 0:
            return [base]
        over = base * inverse
        if not self.slopes:
            return [base, over]
        return [base, over, over * inverse, base * rest * law.inverse_mean(rest, logarithm=logarithm)]

    @cached_property
    def mixture(self) -> dict[int, tuple[float, ...]]:
        """How much of each of `parts` makes the density of x₁ and x₂ times the mean of s^(2p), for each p."""
        law, size, mu, m = self.law, self.law.batch_size, self.law.mu, self.law.batch_size - 3.0
        front = 1.0 / (math.pi * (size - 1.0) * self.across)
        if law.eps == 0:
            once = 0.5 * front * m
            return {0: (once,), 1: (once * mu * (size - 1.0) / size,), -1: (once * size / (mu * m),), -2: (0.0,)}
        b, front = size * law.eps, front / (2.0 * mu)
        square = (front * mu**2 * m * (m + 2) / size, front * 2 * mu * b * m / size, front * b * b / size)
        return {
            0: (front * mu * m, front * b),
            1: square,
            -1: (front * size,),
            -2: (0.0, 0.0, 0.0, front * law.eps * size**2),
        }

    def coarse(self) -> float:
        """What fewer inner nodes than the table's leave out, relative: its coefficients from that order on, squared."""
        if self.order == ORDER:
            return 0.0
        found = 0.0
        for series in self.table.series() if self.slopes else self.table.series()[:1]:
            size = math.sqrt(float((series**2).sum()))
            beyond = math.sqrt(float((series[:, self.order :] ** 2).sum()))
            found = max(found, beyond / max(size, 1e-300))
        return found * min(1.0, 10 * found)

    def inner_sums(self, angle: Array) -> tuple[Array, Array]:
        """I of every kind, (kinds, n), at these outer angles; and how far the density's own integral is off, (n,)."""
        kinds = len(_KINDS) if self.slopes else 1
        sine, cosine = np.sin(angle), np.cos(angle)
        edges = np.sin(self.table.edges)
        found = np.zeros((kinds + 1, angle.size))
        place, step, rise, slope = self.inner
        columns = self._columns(place * self.law.support, step, rise, slope)
        rows = max(8, _BLOCK // place.size)
        lists = []
        for start in range(0, angle.size, rows):
            part = slice(start, start + rows)
            shift, stretch = self.rho * sine[part, None], self.across * cosine[part, None]
            ends = (edges - shift) / stretch
            low, high = np.maximum(ends[:, :-1], -1.0), np.minimum(ends[:, 1:], 1.0)
            width = ends[:, 1:] - ends[:, :-1]
            inside = np.minimum(1.0 - ends[:, 1:], 1.0 + ends[:, :-1]) >= _NEAR * width
            lists.append(np.argwhere(~inside & (high > low)) + np.array([start, 0]))
            some = np.flatnonzero(inside.any(axis=0))
            if not some.size:
                continue
            kept = slice(int(some[0]) * self.order, (int(some[-1]) + 1) * self.order)
            v = (place[kept] - shift) / stretch
            mask = np.repeat(inside[:, some[0] : some[-1] + 1], self.order, axis=1)
            rest = np.where(mask, cosine[part, None] ** 2 * (1.0 - v * v), 1.0)
            for number, matrix in enumerate(self.parts(rest, mask)):
                shares = np.array([(*self.mixture[power], *_NONE)[number] for _, power in self._powers()])
                used = np.flatnonzero(shares)
                if used.size:
                    found[used, part] += (matrix @ (columns[kept, used] * shares[used])).T
        self._near_ends(np.concatenate(lists), sine, cosine, found)
        exact = self.law.line_weight(self.law.support * sine, 0.0, rest=cosine**2)
        off = np.abs(found[-1] - exact) / np.maximum(exact, 1e-300)
        return found[:-1], off

    def _powers(self) -> list[tuple[int, int]]:
        kinds = len(_KINDS) if self.slopes else 1
        return [*((index, _KINDS[index][1]) for index in range(kinds)), (kinds, 0)]

    def _columns(self, x: Array, step: Array, rise: Array, slope: Array) -> Array:
        """g·dx of every kind, and dx itself for the density, along the last axis."""
        fields = {0: rise, 1: x * rise, 3: slope, 4: x * slope, 5: x * x * slope}
        kinds = _KINDS if self.slopes else _KINDS[:1]
        return np.stack([*(fields[index] * step for index, _ in kinds), step], axis=-1)

    def _near_ends(self, jobs: NDArray[np.int64], sine: Array, cosine: Array, found: Array) -> None:
        """Add panels that come near an end of the chord: nodes in b, v = sin b, cut where a small eps has its layer."""
        node, panel = jobs[:, 0], jobs[:, 1]
        edges = np.sin(self.table.edges)
        shift, stretch = self.rho * sine, self.across * cosine
        low, high = (
            np.arcsin(np.clip((edges[panel + side] - shift[node]) / stretch[node], -1.0, 1.0)) for side in (0, 1)
        )
        if self.law.eps > 0:
            layer = math.sqrt(0.5 * self.law.batch_size * self.law.eps / self.law.mu) / cosine
            for factor in (0.3, 1.0, 3.0, 9.0, 27.0, 81.0):
                for side in (-1.0, 1.0):
                    cut = side * (0.5 * math.pi - factor * layer[node])
                    split = (low < cut) & (cut < high) & (factor * layer[node] < 1.2)
                    node, panel = np.concatenate([node, node[split]]), np.concatenate([panel, panel[split]])
                    low = np.concatenate([low, cut[split]])
                    high = np.concatenate([np.where(split, cut, high), high[split]])
        wide = high - low > 1.0
        middle = 0.5 * (low + high)
        node, panel = np.concatenate([node, node[wide]]), np.concatenate([panel, panel[wide]])
        low, high = np.concatenate([low, middle[wide]]), np.concatenate([np.where(wide, middle, high), high[wide]])
        nodes, weights = legendre(_OWN if self.order == ORDER else _OWN_AMONG_MANY)
        half = 0.5 * (high - low)[:, None]
        b = 0.5 * (high + low)[:, None] + half * nodes
        t = shift[node, None] + stretch[node, None] * np.sin(b)
        step = self.law.support * stretch[node, None] * np.cos(b) * half * weights
        rise, slope = self._values(t, panel)
        columns = self._columns(self.law.support * t, step, rise, slope)
        made = [
            (part[:, None] @ columns)[:, 0]
            for part in self.parts(cosine[node, None] ** 2 * np.maximum(np.cos(b) ** 2, 1e-30))
        ]
        for index, power in self._powers():
            sums = sum(share * part[:, index] for share, part in zip(self.mixture[power], made, strict=False))
            found[index] += np.bincount(node, weights=sums, minlength=sine.size)

    def _values(self, t: Array, panel: NDArray[np.int64]) -> tuple[Array, Array]:
        """φ and D at sin a = t on these panels, (panels, n), by Clenshaw's rule on the table's series."""
        edges = self.table.edges
        low, high = edges[panel, None], edges[panel + 1, None]
        u = np.clip(2.0 * (np.arcsin(np.clip(t, -1.0, 1.0)) - low) / (high - low) - 1.0, -1.0, 1.0)
        basis = np.polynomial.legendre.legvander(u, ORDER - 1)
        rise, slope = self.table.series()
        values = np.einsum("pnk,pk->pn", basis, rise[panel])
        return values, np.einsum("pnk,pk->pn", basis, slope[panel]) if self.slopes else values


def nested_sums(
    affine: Affine, law: NormalizedLaw, table: Table, *, tolerance: float, slopes: bool = True
) -> PairSeries | None:
    """The ten pair moments (or E φφ alone), their errors and ∫|·|; None where it would take too many pairs of nodes."""
    edges = _outer_edges(affine, law, table)
    most = _PAIRS if law.eps > 0 else _EXACT_PAIRS
    panels = (edges.size - 1) * (table.edges.size - 1)
    if panels > (_MOST_PANELS if law.batch_size < _LARGE_BATCH else _FEWER_PANELS):
        return None
    chosen = [pair for pair in _ORDERS if panels * pair[0] * pair[1] <= most] or [_ORDERS[-1]]
    order = chosen[0][0]
    whole = Nested(affine, law, table, slopes, chosen[0][1])
    low, high = edges[:-1], edges[1:]
    pairs = _PAIRED if slopes else _PAIRED[:1]
    totals = np.zeros((3, len(pairs)))
    spent = 0
    for attempt in range(_MAX_ROUNDS):
        spent += low.size * order * whole.inner[0].size
        angle, weight = _outer_nodes(low, high, order)
        flat = angle.ravel()
        sums, off = whole.inner_sums(flat)
        step = (weight * law.support * np.cos(angle)).ravel()
        panel = np.clip(np.searchsorted(table.edges, 0.5 * (low + high)) - 1, 0, table.edges.size - 2)
        rise, slope = whole._values(np.sin(angle), panel)
        x = law.support * np.sin(flat)
        fields = {0: rise.ravel(), 3: slope.ravel()}
        outer = [fields[0 if i < 3 else 3] * x ** (i if i < 3 else i - 3) for i, _ in pairs]
        rows = np.stack([outer[k] * sums[kind] * step for k, (_, kind) in enumerate(pairs)])
        missed = (np.abs(rows) * (off + whole.coarse())).reshape(len(pairs), -1, order).sum(axis=2)
        shaped = rows.reshape(len(pairs), -1, order)
        tail, size = gauss_error(shaped, order=order, terms=2, doubt=300.0), np.abs(shaped).sum(axis=2)
        allowed = tolerance * np.maximum(totals[2] + size.sum(axis=1), 1e-300)
        bad = (tail > 0.1 * allowed[:, None]).any(axis=0) & (high - low > 1e-9)
        if attempt == _MAX_ROUNDS - 1 or spent + 2 * bad.sum() * order * whole.inner[0].size > _FURTHER[slopes] * most:
            bad[:] = False
        totals += np.stack([part[:, ~bad].sum(axis=1) for part in (shaped.sum(axis=2), tail + missed, size)])
        if not bad.any():
            break
        middle = 0.5 * (low[bad] + high[bad])
        low, high = np.concatenate([low[bad], middle]), np.concatenate([middle, high[bad]])
    # the mean of s^−4, the last, is interpolated to 1e-12
    rounding = np.array([1e-15] * 9 + [3e-12])[: len(pairs)]
    return PairSeries(totals[0], totals[1] + rounding * totals[2], totals[2])


def _outer_edges(affine: Affine, law: NormalizedLaw, table: Table) -> Array:
    """The table's edges, and where an end of the chord meets a kink."""
    omega, last = math.acos(-1.0 / (law.batch_size - 1.0)), float(table.edges[-1])
    lines = np.array([(k - affine.shift) / affine.scale for k in affine.activation.kinks]) / law.support
    kinks = np.arcsin(lines[np.abs(lines) < 1.0])
    if table.edges.size < _STEEP:
        kinks = table.edges[1:-1]  # steep places, around which the panels are narrow, are met as kinks are
    met = np.concatenate([kinks - omega, kinks + omega, math.pi - kinks - omega, math.pi - kinks + omega])
    met = np.mod(met + math.pi, 2 * math.pi) - math.pi
    edges = np.unique(np.concatenate([table.edges, met[np.abs(met) < last]]))
    return np.asarray(edges[np.concatenate([[True], np.diff(edges) > 1e-13])])


def _outer_nodes(low: Array, high: Array, order: int) -> tuple[Array, Array]:
    """Angles and weights, (panels, order), with nodes as 3u² − 2u³: a square root at either end becomes smooth."""
    nodes, weights = legendre(order)
    u = 0.5 + 0.5 * nodes
    width = (high - low)[:, None]
    return low[:, None] + width * u * u * (3.0 - 2.0 * u), width * 3.0 * u * (1.0 - u) * weights
