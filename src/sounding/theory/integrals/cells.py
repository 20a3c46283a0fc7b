"""Adaptive integration over a pair of correlated coordinates, in polar form.

Two coordinates with correlation cos ω of a rotation-invariant law are x₁ = T cos ψ and x₂ = T cos(ψ − ω), with ψ
uniform and independent of the radius T. A kink of the integrand at x₁ = k is the curve ψ = ±arccos(k/T). Cells lie
between two neighbouring curves and between two radii at which the order of the curves changes, so the integrand is
smooth on each; they are cut until the last Legendre coefficients say that Gauss's rule is exact enough. Only the weight
of the radius knows the law of T: means over the angle are kept with their radii, and serve another law at no cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.special import beta, betainc

from sounding.activations.activation import Array
from sounding.errors import NumericalError
from sounding.theory.integrals.panels import SOFT_EDGES, Adapted, Columns, coefficients, legendre

# Gauss nodes in each direction of a cell: fewer make more cells, more are wasted on cells between many kinks. Graded
# nodes crowd at fractional powers, and need some to spare in the middle.
ORDER, GRADED_ORDER = 14, 20
_MAX_ROUNDS = 40  # halvings of a cell: 2^-40 of a radius or an angle is next to its rounding
MAX_CELLS = 12_000  # some three seconds
_CHUNK = 1_000  # cells evaluated at once: 2 MB for each integrand, which caches hold
# how many of the last Legendre coefficients speak for those that follow, and the factor on what they say
_TERMS, _DOUBT = 3, 2.0
# how far from the curves two further nodes lie, the weight that a miss at them has in the error (a layer of that width
# would be a fiftieth of the cell), and the multiple of the last coefficients that a polynomial may miss there by itself
_HAIR, _OUTSIDE, _EXPLAINED = 1e-5, 0.02, 100.0
# shares of a radius: within which two are one but for rounding, or almost meet, and from where on cuts approach them
_EQUAL, _MEETING, _APPROACHED = 1e-12, 2e-3, 0.05
# A cell that misses eight times as much at one end as at the other is cut at a fifth from there. Cut in the middle,
# relu(x) + tanh(300x) in a batch of 4 comes out 1e-9 off beside a stated 2e-11, and takes a quarter longer.
_ONE_SIDED, _NEAR = 8.0, 0.2


@dataclass(frozen=True)
class Cells:
    """Cells in (radial variable, angle)."""

    table: Array
    # p > 1: nodes crowd as t^p at the curves and at the radii where they appear, as fractional powers there ask for
    grading: int = 1

    # columns: radial origin, width and power; ranges of the unit square; kink, sign and offset of the curves around it
    ORIGIN, WIDTH, POWER, W0, W1, Q0, Q1, K0, S0, O0, K1, S1, O1 = range(13)

    @property
    def order(self) -> int:
        """Nodes in each direction."""
        return ORDER if self.grading == 1 else GRADED_ORDER

    def column(self, index: int) -> Array:
        """One column, shaped to broadcast over (cells, radial nodes, angular nodes)."""
        return self.table[:, index, None, None]

    def nodes(self, radius: Callable[[Array], Array]) -> tuple[Array, Array, Array, Array]:
        """Radial variable (cells, n, 1), angles (cells, n, m), and the weights of both."""
        x, w = legendre(self.order)
        unit, weight = 0.5 + 0.5 * x, 0.5 * w
        w0, w1, q0, q1 = (self.column(i) for i in (self.W0, self.W1, self.Q0, self.Q1))
        u, radial_weight = w0 + (w1 - w0) * unit[None, :, None], (w1 - w0) * weight[None, :, None]
        u, radial_weight = _grade(u, radial_weight, self.grading)
        power = self.column(self.POWER)
        variable = self.column(self.ORIGIN) + self.column(self.WIDTH) * u**power
        radial_weight = radial_weight * self.column(self.WIDTH) * power * u ** (power - 1.0)
        reach = np.maximum(radius(variable), np.finfo(float).tiny)  # kinks are divided by it
        below, above = (self._curve(reach, *columns) for columns in ((7, 8, 9), (10, 11, 12)))
        # two more, of no weight, at the curves: what lies beyond the last node is seen there, so m = n + 2
        if self.grading == 1:
            unit, weight = np.concatenate([[_HAIR], unit, [1.0 - _HAIR]]), np.pad(weight, 1)
        q, angular_weight = q0 + (q1 - q0) * unit[None, None, :], (q1 - q0) * weight[None, None, :]
        q, angular_weight = _grade(q, angular_weight, self.grading)
        angle = below + (above - below) * q
        return variable, angle, radial_weight, (above - below) * angular_weight

    def _curve(self, reach: Array, kink: int, sign: int, offset: int) -> Array:
        """The angle of a kink curve, offset ± arccos(kink/T), at radii T."""
        bend = np.arccos(np.clip(self.column(kink) / reach, -1.0, 1.0))
        return self.column(offset) + self.column(sign) * bend


def _grade(t: Array, weight: Array, power: int) -> tuple[Array, Array]:
    """The substitution of [0, 1] into itself whose derivative vanishes as t^(p−1) at both ends."""
    if power == 1:
        return t, weight
    return betainc(power, power, t), weight * (t * (1.0 - t)) ** (power - 1) / beta(power, power)


@dataclass(frozen=True)
class Points:
    """Nodes of cells at which an integrand is asked for, flat: the two coordinates and the radial variable."""

    first: Array
    second: Array
    radial: Array


PairFunction = Callable[[Points], Array]


@dataclass(frozen=True)
class Goal:
    """How far an integral is refined."""

    tolerance: float = 1e-12  # the wanted error relative to ∫|f|
    # an error that f itself makes, below which nothing is refined; one number, or one for each weight
    floor: Array | float = 0.0
    most: int = MAX_CELLS  # about how many cells are cut; what they leave is in the stated errors
    what: str = "the integrand"  # what f is called in an error message


@dataclass(frozen=True)
class Rings(Columns):
    """Integrals over the angle at the radial nodes of cells, times the radial rule but not the law's weight."""

    variable: Array  # (cells, n)
    values: Array  # (m, cells, n)
    sizes: Array  # of the integrand's absolute value
    errors: Array
    place: Array  # (cells,): where in its angular range a cell had best be cut

    deep = ("values", "sizes", "errors")

    def under(self, weight: Callable[[Array], Array], rows: tuple[int, ...]) -> tuple[Array, Array, Array, Array]:
        """Values, errors from the angle, errors from the radius and ∫∫|·| of each cell under a law, (m, cells) each."""
        law, picked = weight(self.variable), list(rows)  # of the m integrands each weight meets one of the rows
        values = self.values[picked] * law
        along_angle, size = ((stack[picked] * law).sum(axis=2) for stack in (self.errors, self.sizes))
        return values.sum(axis=2), along_angle, _rule_error(values @ _readings(values.shape[2])[:, 1:]), size


@dataclass(frozen=True)
class AdaptedCells(Adapted):
    """An adaptive integration over cells, and the rings for other laws."""

    rings: Rings

    @classmethod
    def of(
        cls, rings: Rings, weight: Callable[[Array], Array], rows: tuple[int, ...], *, evaluations: int = 0
    ) -> AdaptedCells:
        """Under a law of the radius."""
        values, along_angle, along_radius, sizes = (cells.sum(axis=1) for cells in rings.under(weight, rows))
        return cls(values, along_angle + along_radius + 2e-16 * sizes, sizes, evaluations, rings)


@dataclass(frozen=True)
class Plane:
    """Two coordinates T cos ψ and T cos(ψ − angle) of a rotation-invariant law, and where their plane is cut."""

    batch_size: float  # B of the sphere of radius √(B−1), or infinity for a Gaussian
    angle: float  # the arc cosine of the correlation
    kinks: tuple[Sequence[float], Sequence[float]]  # where the integrand is not smooth, in each coordinate
    spread: float = 1.0  # the scale of a coordinate under the weight
    symmetric: bool = False  # whether f(x₁, x₂) = f(x₂, x₁), which halves the work
    grading: int = 1  # above 1 nodes crowd at the kinks, as fractional powers need
    edges: Sequence[float] = ()  # further radii to cut at; a kink nearby replaces an edge, and not a firm one
    firm: tuple[float, ...] = ()


@dataclass(frozen=True)
class Radial:
    """A block of a radial law."""

    start: float  # of the variable
    end: float
    radius: Callable[[Array], Array]  # T as a function of the variable
    variable: Callable[[float], float]  # and back
    # of an array of any shape one of the same shape, or a stack of them, of which each meets one of the rows
    weight: Callable[[Array], Array]
    rows: tuple[int, ...]  # of the integrand


def _first_cells(radial: Radial, plane: Plane) -> Cells:
    """Between kink curves in the angle, between kink radii, crossings and soft edges in the radius."""
    kinks, angle = plane.kinks, plane.angle
    curves = [
        (k, s, o) for lines, o in zip(kinks, (0.0, angle), strict=True) for k in sorted(set(lines)) for s in (1, -1)
    ]
    hard = {abs(k) for lines in kinks for k in lines} | set(crossings(kinks, math.cos(angle)))
    bottom, top = (float(radial.radius(np.array(limit))) for limit in (radial.start, radial.end))
    hard = {radius for radius in hard if bottom < radius < top}
    scaled = (*(edge * plane.spread for edge in SOFT_EDGES[1:]), *plane.edges)
    soft = {e for e in scaled if bottom < e < top and all(abs(e - h) > 0.05 * max(e, 0.1) for h in hard)}
    # Next to two radii that almost meet, as of one kink in both coordinates at a correlation near ±1, the curves are
    # roots with a branch point just outside a cell. Its nodes do not see that, so cuts approach it by powers of four.
    gaps = [(above, above - below) for below, above in pairwise(sorted(hard))]
    near = [(above, gap) for above, gap in gaps if _EQUAL * above < gap < _MEETING * above]
    ladder = [above + step for above, gap in near for step in gap * 4.0 ** np.arange(24) if step < _APPROACHED * above]
    firm = {e for e in (*plane.firm, *ladder) if bottom < e < top}
    cuts = sorted({radial.start, radial.end, *(radial.variable(radius) for radius in hard | soft | firm)})
    sharp = {radial.variable(radius) for radius in hard}
    if any(abs(k) < 1e-9 * top for lines in kinks for k in lines):
        sharp.add(radial.start)  # curves that start together
    rows: list[list[float]] = []
    for low, high in pairwise(cuts):
        if high - low <= 1e-15 * radial.end:
            continue
        reach = float(radial.radius(np.array(0.5 * (low + high))))
        power = 2.0 if low in sharp and plane.grading == 1 else 1.0
        for below, above in _slots(curves, reach, angle, plane.symmetric):
            width = above[3] - below[3]
            pieces = max(1, math.ceil(width / (0.5 * math.pi) - 1e-9))
            for piece in range(pieces):
                unit = [0.0, 1.0, piece / pieces, (piece + 1) / pieces]
                rows.append([low, high - low, power, *unit, *below[:3], *above[:3]])
    return Cells(np.array(rows), plane.grading)


def _slots(
    curves: list[tuple[float, int, float]], reach: float, angle: float, symmetric: bool
) -> list[tuple[tuple[float, float, float, float], tuple[float, float, float, float]]]:
    """Neighbouring curves at one radius as (kink, sign, offset, angle), once around (or half, from the mirror axis)."""
    start, turn = 0.5 * angle, (math.pi if symmetric else 2 * math.pi)
    ends = [(0.0, 0.0, start, start), (0.0, 0.0, start + turn, start + turn)]
    inner = []
    for kink, sign, offset in curves:
        if abs(kink) >= reach:
            continue
        position = offset + sign * math.acos(kink / reach)
        wraps = math.floor((position - start) / (2 * math.pi))
        position -= 2 * math.pi * wraps
        if start < position < start + turn:
            inner.append((kink, float(sign), offset - 2 * math.pi * wraps, position))
    ordered = [ends[0], *sorted(inner, key=lambda curve: curve[3]), ends[1]]
    return [(below, above) for below, above in pairwise(ordered) if above[3] - below[3] > 1e-14]


def crossings(kinks: tuple[Sequence[float], Sequence[float]], correlation: float) -> list[float]:
    """Radii where a kink of x₁ meets one of x₂, T² = (k₁² − 2ρk₁k₂ + k₂²)/(1 − ρ²), or the mirror axis x₁ = x₂."""
    radii = [abs(k) / math.sqrt(0.5 * (1 + correlation)) for lines in kinks for k in lines if correlation > -1 + 1e-12]
    spread = 1.0 - correlation**2
    if spread > 1e-14:
        for k in kinks[0]:
            for j in kinks[1]:
                square = (k * k - 2 * correlation * k * j + j * j) / spread
                radii.append(math.sqrt(max(square, 0.0)))
    return radii


def integrate_cells(f: PairFunction, radial: Radial, plane: Plane, goal: Goal, beside: Array | float) -> AdaptedCells:
    """∫∫ weight(v) f(x₁, x₂) dv dψ over a block of the radius for f returning (m, n), each as near as `goal` asks."""
    cells = _first_cells(radial, plane)
    done: list[Rings] = []
    settled: Array | float = beside  # ∫∫|·| of other cells: without it the noise of a negligible block would be refined
    count, evaluations, spent = 0, 0, 0.0
    for round_number in range(_MAX_ROUNDS):
        chunks = (Cells(cells.table[k : k + _CHUNK], cells.grading) for k in range(0, len(cells.table), _CHUNK))
        rings = Rings.join([_evaluate(f, radial, chunk, plane.angle, goal.what) for chunk in chunks])
        evaluations += rings.variable.size * cells.order
        _, along_angle, along_radius, magnitude = rings.under(radial.weight, radial.rows)
        error = along_angle + along_radius
        total = settled + magnitude.sum(axis=1)
        allowed = np.maximum(goal.tolerance * np.maximum(total, np.finfo(float).tiny), goal.floor)
        whole = count + len(cells.table)
        share = (np.where(error <= 4e-16 * total[:, None], 0.0, error) / allowed[:, None]).max(axis=0)
        order = np.argsort(share)
        good = np.zeros(share.size, dtype=bool)
        good[order] = np.cumsum(share[order]) <= 0.5 * (1.0 - spent)  # the largest errors alone are worth a cut
        if round_number == _MAX_ROUNDS - 1 or whole > goal.most:
            good = np.ones_like(good)
        spent += float(share[good].sum())
        done.append(rings.take(good))
        count += int(good.sum())
        settled = settled + magnitude[:, good].sum(axis=1)
        if good.all():
            break
        # a failing cell is cut across the direction in which Gauss's rule errs more
        worse = (along_angle / allowed[:, None]).sum(axis=0) >= (along_radius / allowed[:, None]).sum(axis=0)
        cells = _cut(cells.table[~good], worse[~good], rings.place[~good], cells.grading)
    return AdaptedCells.of(Rings.join(done), radial.weight, radial.rows, evaluations=evaluations)


def _evaluate(f: PairFunction, radial: Radial, cells: Cells, angle: float, what: str) -> Rings:
    """Sums over the angle at the radial nodes of each cell, with what Gauss's rule may miss of them."""
    variable, psi, radial_weight, angular_weight = cells.nodes(radial.radius)
    reach = radial.radius(variable)
    x1, x2 = reach * np.cos(psi), reach * np.cos(psi - angle)
    points = Points(x1.ravel(), x2.ravel(), np.broadcast_to(variable, psi.shape).ravel())
    with np.errstate(all="ignore"):
        found = np.atleast_2d(f(points)).reshape(-1, *psi.shape)
        ends = found[..., [0, -1]] if cells.grading == 1 else None
        found *= angular_weight
        sizes = np.abs(found).sum(axis=3)
    if not np.isfinite(sizes).all():
        where = int(np.flatnonzero(~np.isfinite(found).all(axis=0).ravel())[0])
        raise NumericalError(
            f"{what} is not finite at x = ({x1.ravel()[where]:.6g}, {x2.ravel()[where]:.6g}), so its expectation "
            "does not exist in float64",
            hint="an activation with a finite second moment",
        )
    read = _readings(cells.order)
    if ends is None:
        found = found @ read
    else:
        found = found @ np.pad(np.concatenate([read, _to_ends(cells.order)], axis=1), ((1, 1), (0, 0)))
    last = 1 + 2 * _TERMS
    errors = _rule_error(found[..., 1:last])
    step = radial_weight[..., 0]
    place = np.full(len(step), 0.5)
    if ends is not None:
        off = np.abs(found[..., last:] - ends * angular_weight.sum(axis=2)[..., None] / 2)
        # beyond the last node lies a layer where that is not the polynomial's own doing
        tail = np.abs(found[..., last - _TERMS : last]).max(axis=3)
        errors += _OUTSIDE * np.maximum(off.sum(axis=3) - _EXPLAINED * tail, 0.0)
        whole = np.maximum(sizes.sum(axis=(1, 2)), 1e-300)
        start, stop = (off.sum(axis=2) / whole[:, None, None]).sum(axis=0).T
        place[start > _ONE_SIDED * stop], place[stop > _ONE_SIDED * start] = _NEAR, 1.0 - _NEAR
    return Rings(variable[..., 0], found[..., 0] * step, sizes * step, errors * step, place)


def _rule_error(read: Array) -> Array:
    """The error of Gauss's rule from the middle coefficients of the integrand and the last ones."""
    # The rule of n nodes errs by about c_2n. Where coefficients fall as a power, c_2n/c_n = c_n/c_{n/2}; where they
    # fall geometrically it is less.
    middle, tail = (np.abs(part).max(axis=-1) for part in (read[..., :_TERMS], read[..., _TERMS:]))
    return np.asarray(tail * np.minimum(1.0, _DOUBT * tail / np.maximum(middle, 1e-300)))


@lru_cache(maxsize=4)
def _readings(order: int) -> Array:
    """From values times Gauss's weights: the sum, and twice the Legendre coefficients in the middle and at the end."""
    series, start = coefficients(order), (order - _TERMS) // 2
    return np.concatenate([np.ones((order, 1)), series[:, start : start + _TERMS], series[:, -_TERMS:]], axis=1)


@lru_cache(maxsize=4)
def _to_ends(order: int) -> Array:
    """From values times Gauss's weights on [−1, 1]: what the polynomial through them is a hair off the ends."""
    places = np.array([2 * _HAIR - 1.0, 1.0 - 2 * _HAIR])
    return np.asarray(0.5 * coefficients(order) @ np.polynomial.legendre.legvander(places, order - 1).T)


def _cut(table: Array, in_angle: NDArray[np.bool_], place: Array, grading: int) -> Cells:
    """Cells cut in two across the angle where `in_angle` says so, at `place`, and across the radius elsewhere."""
    pieces = []
    for mask, low, high in ((in_angle, Cells.Q0, Cells.Q1), (~in_angle, Cells.W0, Cells.W1)):
        part = table[mask]
        share = place[mask] if low == Cells.Q0 else 0.5
        middle = part[:, low] + share * (part[:, high] - part[:, low])
        for column, other in ((low, high), (high, low)):
            piece = part.copy()
            piece[:, other] = middle
            piece[:, column] = part[:, column]
            pieces.append(piece)
    return Cells(np.concatenate(pieces), grading)
