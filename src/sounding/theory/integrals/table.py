"""One coordinate of a batch-normalized neuron on panels: values and slopes of an activation, each with its error.

Panels lie in the angle a, x = √(B−1) sin a, in which the law of x is smooth up to the ends of its support. They end at
kinks and are halved until a Legendre series of sixteen terms holds φ and D on each. Every moment is then a sum over one
set of nodes, and a slope that is not given is the derivative of the series: it never reaches across a kink and follows
the function's own scale. What a series leaves out, and rounding, is the error at each node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from sounding.activations.activation import Array
from sounding.errors import NumericalError
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.panels import Columns, composite, legendre

ORDER = 16  # of the series on a panel: twelve digits of a smooth φ on panels as wide as its own scale
# some 0.2 s of work; with eps the polynomials are orthogonalized over all nodes, which costs three times as much
MAX_NODES, MAX_NODES_WITH_EPS = 200_000, 64_000
_MAX_ROUNDS = 44  # halvings from a panel of width 1 to one at rounding
# panels that are no longer cut, and panels so narrow that a kink must lie within them
_NARROWEST, _TELLING = 1e-11, 1e-9
_SCAN = 4097  # points on which the series are compared with φ, over the support and over |y| < 12: narrow features
_SCANNED = 12.0
_TURNS = 8.0  # radians of a polynomial that one panel resolves beside φ
# standard deviations at which panels end: the law is smooth between them to sixteen terms
SOFT_EDGES = (0.0, 1.0, 2.0, 3.25, 4.75, 6.5, 8.0, 9.5, 11.25, 13.0, 16.0, 20.0, 24.0, 28.0, 33.0, 38.0)
_USELESS = 0.1  # a share of error from which on the table says nothing
_STEEP = 8.0  # times narrower than the widest panel: there φ itself asks for cuts in the plane of two coordinates
_ALIKE = 5.0  # times the narrowest panel: two halvings, and what a change of the angle makes of one wave
_SAME = 0.1  # as a ratio of μ/eps: laws whose x differ so little share panels, with room left in their tolerance
_MOST_BREAKS = 64  # more would be a function that no panel holds
_LARGEST = 1e120  # squares, times x⁶, must be numbers
_ROUNDING = 4 * np.finfo(np.float64).eps


@dataclass(frozen=True)
class Table:
    """Nodes in ascending order, (n,) each: x, cos a, dx, φ − φ(β) and D with their errors; `edges` in a."""

    edges: Array
    x: Array
    cosine: Array
    step: Array
    rise: Array
    slope: Array
    rise_error: Array
    slope_error: Array

    @cached_property
    def _weights(self) -> dict[float, Array]:
        """The law's weights by power of s², each computed once."""
        return {}

    def weight(self, law: NormalizedLaw, power: float) -> Array:
        """The law's density times the mean of s^(2·power), and dx, at each node; of the law it was made for."""
        if power not in self._weights:
            self._weights[power] = law.line_weight(self.x, power, rest=self.cosine**2) * self.step
        return self._weights[power]

    def values_at(self, x: Array, reach: float) -> Array:
        """φ − φ(β) and D at any |x| within the table, (2, n), from its series; x = √(B−1)·sin a and √(B−1) = reach."""
        angle = np.arcsin(np.clip(x / reach, -1.0, 1.0))
        panel = np.clip(np.searchsorted(self.edges, angle, side="right") - 1, 0, self.edges.size - 2)
        low, high = self.edges[panel], self.edges[panel + 1]
        u = np.clip(2.0 * (angle - low) / (high - low) - 1.0, -1.0, 1.0)
        # Clenshaw's rule for Legendre series
        later, last = np.zeros((2, u.size)), np.zeros((2, u.size))
        for k in range(ORDER - 1, -1, -1):
            fresh = self._columns[k].take(panel, axis=1)
            fresh += ((2 * k + 1) / (k + 1)) * u * later
            fresh -= ((k + 1) / (k + 2)) * last
            later, last = fresh, later
        return later

    @cached_property
    def _columns(self) -> Array:
        """Legendre coefficients of φ and D, (ORDER, 2, panels)."""
        series = [column.reshape(-1, ORDER) @ _transforms()[0].T for column in (self.rise, self.slope)]
        return np.ascontiguousarray(np.stack(series).transpose(2, 0, 1))

    def steep_places(self, reach: float) -> list[tuple[float, float]]:
        """x where panels are narrow beside their neighbours: φ bends or rises there, over the distance that follows."""
        width = np.diff(self.edges)
        found = []
        for start, stop in _runs(width < width.max() / _STEEP):
            for first, last in _runs(width[start:stop] < 1.5 * width[start:stop].min()):
                low, high = (float(self.edges[start + place]) for place in (first, last))
                # next to the end of the support it is the law that is steep
                if abs(low + high) < 2 * (self.edges[-1] - 0.3):
                    found.append((reach * math.sin(0.5 * (low + high)), reach * (high - low)))
        return found

    @property
    def wavy(self) -> bool:
        """Whether most of the range has panels about as narrow as the narrowest, as for waves."""
        width = np.diff(self.edges)
        return bool(width[width < _ALIKE * width.min()].sum() > 0.5 * width.sum())


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where each run of true entries starts, and where the next entry is false."""
    turns = np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))
    return list(zip(np.flatnonzero(turns == 1).tolist(), np.flatnonzero(turns == -1).tolist(), strict=True))


@lru_cache(maxsize=1)
def _transforms() -> tuple[Array, Array, Array]:
    """From values at the nodes: Legendre coefficients, slopes, and the norms of the rows of the latter."""
    x, w = legendre(ORDER)
    vandermonde = np.polynomial.legendre.legvander(x, ORDER - 1).astype(np.float64)
    coefficients: Array = (vandermonde * w[:, None]).T * (np.arange(ORDER) + 0.5)[:, None]
    derived = np.stack([np.polynomial.legendre.legval(x, np.polynomial.legendre.legder(row)) for row in np.eye(ORDER)])
    slopes: Array = derived.T @ coefficients
    return coefficients, slopes, np.sqrt((slopes**2).sum(axis=1))


def outer_end(affine: Affine, law: NormalizedLaw) -> float:
    """The |x| beyond which the integrands have become negligible on both sides, or the end of the support."""
    reach, spread = law.support, law.spread
    ends = [edge * spread for edge in SOFT_EDGES[9:] if edge * spread < reach]
    top = 0.0
    for inner, outer in zip([0.0, *ends], [*ends, reach], strict=True):
        x = np.linspace(inner, outer, 66)[1:-1]
        x = np.concatenate([x, -x])
        y = affine.scale * x + affine.shift
        with np.errstate(all="ignore"):
            rows = (affine.rise(y) ** 2 + affine.slope(y) ** 2) * (1 + x**4) * law.line_weight(x, 0.0)
        size = float(np.max(rows, where=np.isfinite(rows), initial=0.0))
        if inner > 0 and size <= 1e-19 * top:
            return float(inner)
        top = max(top, size)
    return float(min(reach, SOFT_EDGES[-1] * spread))


class Tables:
    """Tables of one φ(scale·x + shift), with panels kept for laws of almost the same x, as met on the way to a root."""

    def __init__(self, affine: Affine) -> None:
        self.affine = affine
        self._breaks: list[float] = []  # x of kinks that the search did not see
        self._panels: dict[float, tuple[NormalizedLaw, _Panels, float]] = {}  # by tolerance

    def at(self, law: NormalizedLaw, *, degree: int, tolerance: float) -> Table:
        """The table to `tolerance` in the mean square of the law, fit for polynomials of `degree`."""
        known = self._panels.get(tolerance)
        if known is None or not math.isclose(known[0].mu * law.eps, law.mu * known[0].eps, rel_tol=_SAME):
            end = outer_end(self.affine, law)
            panels = _settled(self.affine, law, end, tolerance, self._breaks)
            # where panels became very narrow are kinks that the search did not see: panels shall end there
            narrow, before = panels.high - panels.low < _TELLING, len(self._breaks)
            for angle in 0.5 * (panels.low + panels.high)[narrow]:
                x = law.support * math.sin(angle)
                apart = all(abs(x - other) > 1e-7 * law.support for other in self._breaks)
                if len(self._breaks) < _MOST_BREAKS and apart:
                    self._breaks.append(x)
            if len(self._breaks) > before:
                panels = _settled(self.affine, law, end, tolerance, self._breaks)
            known = self._panels[tolerance] = law, panels, end
        # where the panels run out the errors of the table say so
        _, panels, end = known
        return panels.table(law.support, _further_edges(law, end, degree))


def _settled(affine: Affine, law: NormalizedLaw, end: float, tolerance: float, breaks: list[float]) -> _Panels:
    """Panels halved until each holds its share, in ascending order."""
    reach = law.support
    pending = _first_edges(affine, law, end, breaks)
    low, high = pending[:-1], pending[1:]
    settled: list[_Panels] = []
    limit = (MAX_NODES if law.eps == 0 else MAX_NODES_WITH_EPS) // ORDER
    norms = np.zeros((2, 2))
    for _ in range(3):
        held = np.sum([part.totals() for part in settled], axis=0) if settled else np.zeros((2, 2))
        kept = sum(part.low.size for part in settled)
        for _ in range(_MAX_ROUNDS):
            panels = _Panels.of(affine, law, low, high)
            norms = np.maximum(norms, panels.totals() + held)
            count = low.size + kept
            bad = panels.unsettled(tolerance * np.stack([np.sqrt(norms[0] / count), norms[1] / count]))
            if count + bad.sum() > limit:
                bad = np.zeros_like(bad)
            settled.append(panels.take(~bad))
            held, kept = held + settled[-1].totals(), kept + settled[-1].low.size
            if not bad.any():
                break
            middle = 0.5 * (low[bad] + high[bad])
            low, high = np.concatenate([low[bad], middle]), np.concatenate([middle, high[bad]])
        whole = _Panels.join(settled)
        whole = whole.take(np.argsort(whole.low))
        missed = whole.missed(affine, reach, end, tolerance * math.sqrt(norms[0, 0] / count))
        if not missed.any() or 2 * count > limit:
            break
        settled = [whole.take(~missed)]
        middle = 0.5 * (whole.low[missed] + whole.high[missed])
        low, high = np.concatenate([whole.low[missed], middle]), np.concatenate([middle, whole.high[missed]])
    if 2 * count > limit and bool((whole.totals(errors=True)[0] > _USELESS**2 * norms[0]).any()):
        raise NumericalError(
            f"{affine.activation.name} at scale {affine.scale:g} varies too fast: {count} panels do not hold it or its "
            "slope, whose second moment may be infinite",
            hint="a smaller scale",
        )
    return whole


def _first_edges(affine: Affine, law: NormalizedLaw, end: float, breaks: list[float]) -> Array:
    """Angles at the kinks and around the law's bulk."""
    reach, spread = law.support, law.spread
    lines = np.array([(k - affine.shift) / affine.scale for k in affine.activation.kinks])
    lines = np.concatenate([lines, breaks])
    hard = np.arcsin(lines[np.abs(lines) < end] / reach)
    soft = [math.asin(edge * spread / reach) for edge in SOFT_EDGES if edge * spread < end]
    last = math.asin(min(end / reach, 1.0))
    if end == reach:
        soft.append(last - 0.25)
    return _joined(hard, np.array([sign * edge for edge in soft for sign in (-1, 1)]), last)


def _further_edges(law: NormalizedLaw, end: float, degree: int) -> Array:
    """Where not φ but a polynomial of `degree`, or the law in its layer at the end of the support, asks for panels."""
    reach, spread = law.support, law.spread
    last = math.asin(min(end / reach, 1.0))
    edges: list[float] = []
    if end == reach and law.eps > 0:
        layer = math.sqrt(0.5 * law.batch_size * law.eps / law.mu)
        # below 1e-7 the layer holds nothing
        scales = max(layer, 1e-7) * 2.0 ** np.arange(-2.0, 24.0)
        edges += [last - scale for scale in scales if scale < 0.4]
    dense = math.ceil(2 * last * math.sqrt(degree * (degree + law.batch_size)) / spread / _TURNS) if degree else 0
    if dense > 4:
        inner = min(last, math.asin(min(SOFT_EDGES[9] * spread / reach, 1.0)))
        count = math.ceil(dense * inner / last)
        edges += list(inner * np.arange(1, count // 2 + 1) / (count // 2 + 0.5))
    return np.array([sign * edge for edge in edges for sign in (-1, 1)])


def _joined(hard: Array, soft: Array, last: float) -> Array:
    """Edges in order: −last, last, all of `hard`, and those of `soft` that keep some distance from the others."""
    fixed = np.unique(np.concatenate([hard, [-last, last]]))
    soft = np.unique(soft)
    soft = soft[np.abs(soft) < last]
    if hard.size:
        place = np.clip(np.searchsorted(fixed, soft), 1, fixed.size - 1)
        gap = np.minimum(soft - fixed[place - 1], fixed[place] - soft)
        spacing = np.minimum(np.diff(soft, prepend=-last), np.diff(soft, append=last))
        soft = soft[gap > 0.1 * np.minimum(spacing, 0.1 * last)]
    return np.unique(np.concatenate([fixed, soft]))


@dataclass(frozen=True)
class _Panels(Columns):
    """Panels with their values, (p, ORDER) each, and the mass (p,) of the law on them."""

    low: Array
    high: Array
    rise: Array
    slope: Array
    rise_error: Array
    slope_error: Array
    truncated: Array
    mass: Array

    deep = ("truncated",)

    @classmethod
    def of(cls, affine: Affine, law: NormalizedLaw, low: Array, high: Array) -> _Panels:
        """Panels between `low` and `high`, with φ, D and what sixteen terms leave of them."""
        nodes, weights = legendre(ORDER)
        to_series, to_slopes, amplified = _transforms()
        half = 0.5 * (high - low)[:, None]
        angle = 0.5 * (low + high)[:, None] + half * nodes
        cosine = np.cos(angle)
        x = law.support * np.sin(angle)
        y = affine.scale * x + affine.shift
        rise = affine.rise(y)
        largest = np.abs(rise).max(axis=1, keepdims=True)
        along = rise @ to_slopes.T / half  # d/da
        # rounding of the values, and that of y times the slope
        summed = np.abs(affine.scale * x) + abs(affine.shift)
        blur = summed * np.abs(along / (affine.scale * law.support * cosine))
        rounding = 0.25 * _ROUNDING * (np.abs(rise) + abs(affine.level) + blur) + 0.25 * affine.grain
        series = rise @ to_series.T
        left_out = np.abs(series[:, -2:]).max(axis=1, keepdims=True)
        if affine.activation.derivative_error > 0:
            slope = along / (law.support * cosine)
            left_in_slope = left_out * ORDER / (half * law.support * cosine)
            slope_rounding = rounding.max(axis=1, keepdims=True) * amplified / (half * law.support * cosine)
        else:
            slope = affine.slope(y)
            left_in_slope = np.abs((slope @ to_series.T)[:, -2:]).max(axis=1, keepdims=True) + np.zeros_like(slope)
            slope_rounding = 0.25 * _ROUNDING * np.abs(slope)
        if not max(float(largest.max()), float(np.abs(slope).max())) < _LARGEST:  # also NaN
            raise NumericalError(
                f"the second moment of {affine.activation.name} or of its derivative at scale {affine.scale:g} is too "
                "large for float64",
                hint="a smaller scale",
            )
        mass = (1 + x * x) * law.line_weight(x, 0.0, rest=cosine**2) * half * weights * law.support * cosine
        at_floor = (left_out <= 16 * rounding.max(axis=1, keepdims=True)) | (half < _NARROWEST)
        return cls(
            low, high, rise, slope, left_out + rounding, left_in_slope + slope_rounding,
            np.stack([np.where(at_floor, 0.0, left_out) + np.zeros_like(rise), np.where(at_floor, 0.0, left_in_slope)]),
            mass,
        )  # fmt: skip

    def totals(self, *, errors: bool = False) -> Array:
        """∫ φ², ∫ D² and ∫ |φ|, ∫ |D| under the law, (2, 2); or those of their errors."""
        rise, slope = (self.rise_error, self.slope_error) if errors else (self.rise, self.slope)
        squares = [(rise**2 * self.mass).sum(), (slope**2 * self.mass).sum()]
        return np.array([squares, [(np.abs(rise) * self.mass).sum(), (np.abs(slope) * self.mass).sum()]])

    def unsettled(self, allowed: Array) -> NDArray[np.bool_]:
        """Panels on which what is left out has more than its share of the mean squares, or of the means."""
        shares = np.sqrt((self.truncated**2 * self.mass).sum(axis=2))
        means = (self.truncated * self.mass).sum(axis=2)
        over = (shares > np.maximum(allowed[0], 1e-300)[:, None]) | (means > np.maximum(allowed[1], 1e-300)[:, None])
        return np.asarray(over.any(axis=0))

    def missed(self, affine: Affine, reach: float, end: float, allowed: float) -> NDArray[np.bool_]:
        """Panels whose series is off between its nodes, on a scan of the support and of the activation's own scale."""
        x = np.linspace(-end, end, _SCAN)
        own = (np.linspace(-_SCANNED, _SCANNED, _SCAN) - affine.shift) / affine.scale
        x = np.concatenate([x[1:-1], own[np.abs(own) < end]])
        angle = np.arcsin(x / reach)
        edges = np.append(self.low, self.high[-1])
        panel = np.clip(np.searchsorted(edges, angle, side="right") - 1, 0, self.low.size - 1)
        place = 2 * (angle - self.low[panel]) / (self.high[panel] - self.low[panel]) - 1
        series = (self.rise @ _transforms()[0].T)[panel]
        expected = np.einsum("ij,ij->i", series, np.polynomial.legendre.legvander(place, ORDER - 1))
        off = np.abs(affine.rise(affine.scale * x + affine.shift) - expected)
        weight = np.sqrt(self.mass.sum(axis=1))[panel]
        far = (off * weight > 100 * allowed) & (off > 300 * self.rise_error.max(axis=1)[panel])
        found = np.zeros(self.low.size, dtype=bool)
        found[panel[far]] = True
        return found & (self.high - self.low > 1e-6)

    def table(self, reach: float, further: Array) -> Table:
        """The table, cut at `further` edges too, where the series are evaluated instead of φ."""
        to_series = _transforms()[0]
        own = np.append(self.low, self.high[-1])
        edges = _joined(own[1:-1], further, float(own[-1]))
        parent = np.clip(np.searchsorted(own, 0.5 * (edges[1:] + edges[:-1])) - 1, 0, self.low.size - 1)
        angle, step = composite(edges, ORDER)
        columns = [column[parent] for column in (self.rise, self.slope, self.rise_error, self.slope_error)]
        cut = np.flatnonzero(np.diff(edges) < 0.999 * (self.high - self.low)[parent])
        if cut.size:
            low, high = self.low[parent[cut], None], self.high[parent[cut], None]
            place = 2.0 * (angle[cut] - low) / (high - low) - 1.0
            basis = np.polynomial.legendre.legvander(np.clip(place, -1.0, 1.0), ORDER - 1)
            nearest = np.clip(np.searchsorted(legendre(ORDER)[0], place), 0, ORDER - 1)
            for column, values in enumerate((self.rise, self.slope)):
                columns[column][cut] = np.einsum("pnk,pk->pn", basis, (values @ to_series.T)[parent[cut]])
                errors = columns[column + 2]
                errors[cut] = 1.5 * np.take_along_axis(errors[cut], nearest, axis=1)
        cosine = np.cos(angle)
        flat = (reach * np.sin(angle), cosine, step * reach * cosine, *columns)
        return Table(edges, *(a.ravel() for a in flat))
