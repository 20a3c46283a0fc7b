"""Adaptive integration over a pair of correlated coordinates, in polar form.

Two coordinates with correlation cos ω of a rotation-invariant law are x₁ = T cos ψ and x₂ = T cos(ψ − ω), with ψ
uniform and independent of the radius T. A kink of the integrand at x₁ = k is the curve ψ = ±arccos(k/T). Cells lie
between two neighbouring curves and between two radii at which the order of the curves changes, so the integrand is
smooth on each; they are cut until two orders agree.
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
from sounding.theory.panels import legendre

ORDERS, GRADED_ORDERS = (9, 14), (14, 20)
_MAX_ROUNDS = 40
_MAX_CELLS = 12_000
_CHUNK = 1_000

PairFunction = Callable[..., Array]
# y of a coordinate from x, its distance from the kink that bounds the cell, and that kink (NaN where none does)
Placed = Callable[[Array, Array, Array], Array]


@dataclass(frozen=True)
class Cells:
    """Cells in (radial variable, angle). Columns: radial origin, width, power; curves below and above; unit ranges.

    With `grading` p > 1 the nodes crowd as t^p at the curves and at the radii where they appear, for integrands with a
    fractional power there.
    """

    table: Array
    grading: int = 1

    ORIGIN, WIDTH, POWER, W0, W1, Q0, Q1, K0, S0, O0, K1, S1, O1 = range(13)

    def orders(self) -> tuple[int, int]:
        """The two orders that are compared."""
        return ORDERS if self.grading == 1 else GRADED_ORDERS

    def column(self, index: int) -> Array:
        """One column, shaped to broadcast over (cells, radial nodes, angular nodes)."""
        return self.table[:, index, None, None]

    def nodes(self, order: int, radius: Callable[[Array], Array]) -> tuple[Array, Array, Array]:
        """Radial variable (cells, n, 1), angles (cells, n, n) and weights (cells, n, n) of a tensor rule."""
        x, w = legendre(order)
        unit, weight = 0.5 + 0.5 * x, 0.5 * w
        w0, w1, q0, q1 = (self.column(i) for i in (self.W0, self.W1, self.Q0, self.Q1))
        u, radial_weight = w0 + (w1 - w0) * unit[None, :, None], (w1 - w0) * weight[None, :, None]
        u, radial_weight = _grade(u, radial_weight, self.grading)
        power = self.column(self.POWER)
        variable = self.column(self.ORIGIN) + self.column(self.WIDTH) * u**power
        radial_weight = radial_weight * self.column(self.WIDTH) * power * u ** (power - 1.0)
        reach = np.maximum(radius(variable), np.finfo(float).tiny)
        below, above = (self._curve(reach, *columns) for columns in ((7, 8, 9), (10, 11, 12)))
        q, angular_weight = q0 + (q1 - q0) * unit[None, None, :], (q1 - q0) * weight[None, None, :]
        q, angular_weight = _grade(q, angular_weight, self.grading)
        angle = below + (above - below) * q
        return variable, angle, radial_weight * (above - below) * angular_weight

    def beside_kinks(self, order: int, reach: Array, coordinates: Sequence[float]) -> list[tuple[Array, Array]]:
        """For each coordinate T cos(ψ − c): how far it is from the kink bounding its cell, and that kink (else NaN).

        (cells, n, n) each. The difference of two cosines is taken as a product, so that the distance keeps its digits
        where the coordinate itself has lost them.
        """
        x, _ = legendre(order)
        q0, q1 = self.column(self.Q0), self.column(self.Q1)
        unit = (0.5 + 0.5 * x)[None, None, :]
        forth, _ = _grade(q0 + (q1 - q0) * unit, unit, self.grading)
        back, _ = _grade((1.0 - q1) + (q1 - q0) * (1.0 - unit), unit, self.grading)
        below, above = (self._curve(reach, *columns) for columns in ((7, 8, 9), (10, 11, 12)))
        first, last = below - self.column(self.O0), above - self.column(self.O1)
        from_below, from_above = 0.5 * (above - below) * forth, 0.5 * (above - below) * back
        rise = -2 * reach * np.sin(first + from_below) * np.sin(from_below)
        fall = 2 * reach * np.sin(last - from_above) * np.sin(from_above)
        found = []
        for coordinate in coordinates:
            starts, ends = (
                (np.cos(self.column(offset) - coordinate) > 1 - 1e-12) & (self.column(sign) != 0)
                for offset, sign in ((self.O0, self.S0), (self.O1, self.S1))
            )
            near = starts & ((forth <= back) | ~ends)
            kink = np.where(near, self.column(self.K0), np.where(ends, self.column(self.K1), np.nan))
            found.append((np.where(near, rise, fall), kink))
        return found

    def _curve(self, reach: Array, kink: int, sign: int, offset: int) -> Array:
        bend = np.arccos(np.clip(self.column(kink) / reach, -1.0, 1.0))
        return self.column(offset) + self.column(sign) * bend


def _grade(t: Array, weight: Array, power: int) -> tuple[Array, Array]:
    """The substitution of [0, 1] into itself whose derivative vanishes as t^(p−1) at both ends."""
    if power == 1:
        return t, weight
    return betainc(power, power, t), weight * (t * (1.0 - t)) ** (power - 1) / beta(power, power)


@dataclass(frozen=True)
class AdaptedCells:
    """Values, errors and ∫∫|·| (m,) of an adaptive integration."""

    values: Array
    errors: Array
    magnitudes: Array
    evaluations: int


@dataclass(frozen=True)
class Radial:
    """A radial law: the variable's range, the radius T as a function of it and back, the weight, and soft edges in T.

    `weight` maps an array of any shape to one of the same shape, or to a stack of them, one for each integrand.
    """

    start: float
    end: float
    radius: Callable[[Array], Array]
    variable: Callable[[float], float]
    weight: Callable[[Array], Array]
    edges: tuple[float, ...]


def build_cells(
    radial: Radial,
    angle: float,
    *,
    kinks: tuple[Sequence[float], Sequence[float]],
    symmetric: bool = False,
    grading: int = 1,
) -> Cells:
    """The first cells: between kink curves in the angle, between kink radii, crossings and soft edges in the radius."""
    curves = [
        (k, s, o) for lines, o in zip(kinks, (0.0, angle), strict=True) for k in sorted(set(lines)) for s in (1, -1)
    ]
    hard = {abs(k) for lines in kinks for k in lines} | set(_crossings(kinks, math.cos(angle)))
    bottom, top = (float(radial.radius(np.array(limit))) for limit in (radial.start, radial.end))
    hard = {radius for radius in hard if bottom < radius < top}
    soft = {e for e in radial.edges if bottom < e < top and all(abs(e - h) > 0.05 * max(e, 0.1) for h in hard)}
    cuts = sorted({radial.start, radial.end, *(radial.variable(radius) for radius in hard | soft)})
    sharp = {radial.variable(radius) for radius in hard}
    rows: list[list[float]] = []
    for low, high in pairwise(cuts):
        if high - low <= 1e-15 * radial.end:
            continue
        reach = float(radial.radius(np.array(0.5 * (low + high))))
        power = 2.0 if low in sharp and grading == 1 else 1.0
        for below, above in _slots(curves, reach, angle, symmetric):
            width = above[3] - below[3]
            pieces = max(1, math.ceil(width / (0.5 * math.pi) - 1e-9))
            for piece in range(pieces):
                unit = [0.0, 1.0, piece / pieces, (piece + 1) / pieces]
                rows.append([low, high - low, power, *unit, *below[:3], *above[:3]])
    return Cells(np.array(rows), grading)


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


def _crossings(kinks: tuple[Sequence[float], Sequence[float]], correlation: float) -> list[float]:
    """Radii where a kink of x₁ meets one of x₂, T² = (k₁² − 2ρk₁k₂ + k₂²)/(1 − ρ²), or the mirror axis x₁ = x₂."""
    radii = [abs(k) / math.sqrt(0.5 * (1 + correlation)) for lines in kinks for k in lines if correlation > -1 + 1e-12]
    spread = 1.0 - correlation**2
    if spread > 1e-14:
        for k in kinks[0]:
            for j in kinks[1]:
                square = (k * k - 2 * correlation * k * j + j * j) / spread
                radii.append(math.sqrt(max(square, 0.0)))
    return radii


def integrate_cells(
    f: PairFunction,
    radial: Radial,
    cells: Cells,
    angle: float,
    *,
    tolerance: float,
    what: str,
    beside: Array | float = 0.0,
    placed: Placed | None = None,
    radial_argument: bool = False,
    most: int = _MAX_CELLS,
) -> AdaptedCells:
    """∫∫ weight(v) f(x₁, x₂) dv dψ over the cells for f returning (m, n), each to `tolerance` relative to ∫∫|·|.

    `beside` is what other cells hold of ∫∫|·|; without it the noise of a negligible block would be refined. With
    `placed`, f takes (x₁, x₂, y₁, y₂), y from the distance to the kink: needed where a power of it is integrated; with
    `radial_argument` the radial variable follows. About `most` cells are cut; what they leave is in the errors.

    The error is the sum over cells of the difference between the tensor rules of order 9 and 14. A failing cell is cut
    across the direction in which its Legendre coefficients decay more slowly.
    """
    done: list[tuple[int, Array, Array, Array]] = []
    settled: Array | float = beside
    evaluations = 0
    for round_number in range(_MAX_ROUNDS):
        value, error, magnitude, slow = _in_chunks(f, radial, cells, angle, what, placed, radial_argument)
        size = cells.table.shape[0]
        evaluations += size * sum(order**2 for order in cells.orders())
        total = settled + magnitude.sum(axis=1)
        allowed = tolerance * np.maximum(total, np.finfo(float).tiny)
        count = size + sum(part[0] for part in done)
        good = (error <= np.maximum(allowed[:, None] / (2 * count), 4e-16 * total[:, None])).all(axis=0)
        last = round_number == _MAX_ROUNDS - 1 or count > most or bool((error.sum(axis=1) <= 0.5 * allowed).all())
        if last:
            good = np.ones_like(good)
        done.append((int(good.sum()), value[:, good], error[:, good], magnitude[:, good]))
        settled = settled + magnitude[:, good].sum(axis=1)
        if good.all():
            break
        cells = _cut(cells.table[~good], slow[~good], cells.grading)
    blocks = [part[1:] for part in done]
    values, errors, magnitudes = (np.sum([part[i].sum(axis=1) for part in blocks], axis=0) for i in range(3))
    return AdaptedCells(values, errors + 2e-16 * magnitudes, magnitudes, evaluations)


def _in_chunks(
    f: PairFunction, radial: Radial, cells: Cells, angle: float, what: str, placed: Placed | None, radial_argument: bool
) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """`_evaluate` on at most a thousand cells at a time, which bounds the memory."""
    parts = [
        _evaluate(
            f, radial, Cells(cells.table[start : start + _CHUNK], cells.grading), angle, what, placed, radial_argument
        )
        for start in range(0, cells.table.shape[0], _CHUNK)
    ]
    if len(parts) == 1:
        return parts[0]
    value, error, magnitude, slow = (np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))
    return value, error, magnitude, slow


def _evaluate(
    f: PairFunction, radial: Radial, cells: Cells, angle: float, what: str, placed: Placed | None, radial_argument: bool
) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    blocks = []
    for order in cells.orders():
        variable, psi, weight = cells.nodes(order, radial.radius)
        reach = radial.radius(variable)
        x1, x2 = reach * np.cos(psi), reach * np.cos(psi - angle)
        arguments = [x1.ravel(), x2.ravel()]
        if placed is not None:
            beside = cells.beside_kinks(order, reach, (0.0, angle))
            arguments += [placed(x, *place).ravel() for x, place in zip((x1, x2), beside, strict=True)]
        if radial_argument:
            arguments.append(np.broadcast_to(variable, psi.shape).ravel())
        with np.errstate(all="ignore"):
            values = np.atleast_2d(f(*arguments)).reshape(-1, *psi.shape) * radial.weight(variable)
        finite = np.isfinite(values).all(axis=0).ravel()
        if not finite.all():
            where = int(np.flatnonzero(~finite)[0])
            raise NumericalError(
                f"{what} is not finite at x = ({x1.ravel()[where]:.6g}, {x2.ravel()[where]:.6g}), so its expectation "
                "does not exist in float64",
                hint="an activation with a finite second moment",
            )
        blocks.append(values * weight)
    low, high = (block.sum(axis=(2, 3)) for block in blocks)
    return high, np.abs(high - low), np.abs(blocks[1]).sum(axis=(2, 3)), _slow_in_angle(blocks[1])


def _slow_in_angle(shaped: Array) -> NDArray[np.bool_]:
    """Per cell, whether the integrand's Legendre coefficients decay more slowly in the angle than in the radius.

    The integrand includes the cell's width between its curves, which depends on the radius: where a function is
    constant, that alone is left to resolve, and no cut of the angle would.
    """
    _, w = legendre(shaped.shape[-1])
    smooth = shaped / (w[:, None] * w)
    tail = _coefficients(shaped.shape[-1])[-3:]
    along_radius = np.abs(np.einsum("kr,mcrq->mckq", tail, smooth)).sum(axis=(2, 3))
    along_angle = np.abs(np.einsum("kq,mcrq->mckr", tail, smooth)).sum(axis=(2, 3))
    scale = np.abs(smooth).sum(axis=(1, 2, 3))[:, None] + np.finfo(float).tiny
    return np.asarray((along_angle / scale).sum(axis=0) >= (along_radius / scale).sum(axis=0))


@lru_cache(maxsize=4)
def _coefficients(order: int) -> Array:
    """The matrix from values at Gauss–Legendre nodes to Legendre coefficients."""
    x, w = legendre(order)
    matrix: Array = (np.polynomial.legendre.legvander(x, order - 1) * w[:, None]).T
    return matrix * (2 * np.arange(order) + 1)[:, None] / 2


def _cut(table: Array, in_angle: NDArray[np.bool_], grading: int) -> Cells:
    pieces = []
    for mask, low, high in ((in_angle, Cells.Q0, Cells.Q1), (~in_angle, Cells.W0, Cells.W1)):
        part = table[mask]
        middle = 0.5 * (part[:, low] + part[:, high])
        for column, other in ((low, high), (high, low)):
            piece = part.copy()
            piece[:, other] = middle
            piece[:, column] = part[:, column]
            pieces.append(piece)
    return Cells(np.concatenate(pieces), grading)
