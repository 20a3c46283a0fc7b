"""Adaptive composite Gauss–Legendre on a line: panels that end at kinks, bisected until two orders agree.

A panel is the image of u ∈ [low, high] under y = origin + sign·u^power. Power 1 is a plain interval measured from its
origin, so that a distance of 1e-30 from a kink at 0 is representable; power 2 turns a square-root singularity at the
origin into an analytic integrand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, Self

import numpy as np

from sounding.activations.activation import Array
from sounding.errors import NumericalError

# two orders whose difference is the error: 14 nodes resolve 8 radians, and 22 are exact where 14 almost are
LOW_ORDER, HIGH_ORDER = 14, 22
_MAX_ROUNDS = 48  # halvings: a panel is then at rounding
_MAX_EVALUATIONS = 2_000_000  # some 0.2 s; what they leave is in the error
# first panels of a Gaussian: two orders agree on each for a smooth integrand, so that none is cut
SOFT_EDGES = (0.0, 2.0, 4.0, 6.5, 9.5)
_LADDER_RATIO = 4.0  # of neighbouring rungs towards a power at a kink: 22 nodes hold the power on each to rounding
_LADDER_DEPTH = 3  # cuts after which a panel at a kink is taken for a power


class Columns:
    """A record of arrays with one entry for each panel or cell: along the first axis, the second of those in `deep`."""

    deep: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The entries of all parts, in order."""
        columns = {name: [getattr(part, name) for part in parts] for name in cls._names()}
        return cls(**{name: np.concatenate(column, axis=int(name in cls.deep)) for name, column in columns.items()})

    def take(self, index: Array | np.ndarray) -> Self:
        """The entries at `index` (positions or a mask)."""
        columns = {name: getattr(self, name) for name in self._names()}
        return type(self)(**{n: array[:, index] if n in self.deep else array[index] for n, array in columns.items()})

    @classmethod
    def _names(cls) -> list[str]:
        return [field.name for field in fields(cls)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Panels(Columns):
    """A set of panels, one array entry each; `depth` counts how often a panel was cut."""

    origin: Array
    sign: Array
    power: Array
    low: Array
    high: Array
    depth: Array

    def nodes(self, order: int) -> tuple[Array, Array]:
        """Nodes and weights, (panels, order) each; the substitution's Jacobian is in the weights."""
        x, w = legendre(order)
        half = 0.5 * (self.high - self.low)[:, None]
        u = 0.5 * (self.high + self.low)[:, None] + half * x
        power = self.power[:, None]
        stretched = np.where(power == 1.0, u, u**power)
        return self.origin[:, None] + self.sign[:, None] * stretched, half * w * power * u ** (power - 1.0)


@dataclass(frozen=True)
class Adapted:
    """The outcome of an adaptive integration of m integrands at once: values, errors and ∫|f|, (m,) each."""

    values: Array
    errors: Array
    magnitudes: Array
    evaluations: int


@lru_cache(maxsize=32)
def legendre(order: int) -> tuple[Array, Array]:
    """Gauss–Legendre nodes and weights on [−1, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(order)
    nodes.setflags(write=False)
    weights.setflags(write=False)
    return nodes, weights


def composite(edges: Array, order: int) -> tuple[Array, Array]:
    """Gauss–Legendre nodes and weights between neighbours along the last axis of `edges`, (…, pieces, order)."""
    nodes, weights = legendre(order)
    half = 0.5 * np.diff(edges)[..., None]
    return 0.5 * (edges[..., 1:] + edges[..., :-1])[..., None] + half * nodes, half * weights


def interval(low: float, high: float, *, kinks: Iterable[float], edges: Iterable[float]) -> Panels:
    """Panels over [low, high] with an edge at every kink and near every one of `edges`."""
    span = high - low
    inner = sorted({float(k) for k in kinks if low < k < high})
    fixed = [low, *inner, high]
    # an edge closer to a kink than a thousandth of the span gives way
    soft = [e for e in edges if low < e < high and min(abs(e - f) for f in fixed) > 1e-3 * span / len(fixed)]
    cuts = sorted({*fixed, *soft})
    kinked = set(inner)
    rows: list[tuple[float, ...]] = []
    for a, b in pairwise(cuts):
        if a in kinked and b in kinked:  # panels next to a kink are measured from it
            middle = 0.5 * (a + b)
            rows += [(a, 1.0, 1.0, 0.0, middle - a, 0.0), (b, -1.0, 1.0, 0.0, b - middle, 0.0)]
        elif b in kinked:
            rows.append((b, -1.0, 1.0, 0.0, b - a, 0.0))
        else:
            rows.append((a, 1.0, 1.0, 0.0, b - a, 0.0))
    return Panels(*(np.array(column) for column in zip(*rows, strict=True)))


def end_panel(edge: float, inner: float) -> Panels:
    """The panel between `inner` and an end of the domain; its substitution edge ∓ u² absorbs a square root."""
    row = (edge, 1.0 if inner > edge else -1.0, 2.0, 0.0, abs(inner - edge) ** 0.5, 0.0)
    return Panels(*(np.array([entry]) for entry in row))


def integrate(
    f: Callable[[Array], Array],
    panels: Panels,
    *,
    tolerance: float,
    beside: Array | float = 0.0,
    what: str = "the integrand",
) -> Adapted:
    """∫ f over the panels for f: (n,) → (m, n), each to `tolerance` relative to ∫|f|, here and `beside` together."""
    done: list[tuple[Array, Array, Array]] = []
    tail_value: Array | float = 0.0
    tail_error: Array | float = 0.0
    evaluations = 0
    settled_sum: Array | float = beside
    for round_number in range(_MAX_ROUNDS):
        value, error, magnitude = _evaluate(f, panels, what)
        evaluations += panels.low.size * (LOW_ORDER + HIGH_ORDER)
        total = settled_sum + magnitude.sum(axis=1)
        count = panels.low.size + sum(part[0].shape[1] for part in done)
        allowed = tolerance * np.maximum(total, np.finfo(float).tiny)
        good = (error <= np.maximum(allowed[:, None] / (2 * count), 4e-16 * total[:, None])).all(axis=0)
        if evaluations > _MAX_EVALUATIONS or round_number == _MAX_ROUNDS - 1:
            good[:] = True
        # a panel may miss its share where all together keep within half of what is allowed
        good |= bool((error.sum(axis=1) <= 0.5 * allowed).all())
        done.append((value[:, good], error[:, good], magnitude[:, good]))
        settled_sum = settled_sum + magnitude[:, good].sum(axis=1)
        bad = panels.take(~good)
        if not bad.low.size:
            break
        # a panel at a kink that keeps failing is replaced by a geometric ladder of panels down to the kink, and the
        # remainder by the ladder's own geometric series
        at_kink = (bad.low == 0.0) & (bad.power == 1.0) & (bad.depth >= _LADDER_DEPTH)
        rungs: list[Panels] = []
        for row in np.flatnonzero(at_kink):
            ladder = _ladder(bad, int(row))
            series, series_error = _series(f, ladder, what)
            tail_value, tail_error = tail_value + series, tail_error + series_error
            evaluations += ladder.low.size * HIGH_ORDER
            rungs.append(ladder)
        cut = bad.take(~at_kink)
        middle = 0.5 * (cut.low + cut.high)
        halves = (replace(cut, high=middle, depth=cut.depth + 1), replace(cut, low=middle, depth=cut.depth + 1))
        panels = Panels.join([*halves, *rungs])
    values, errors, magnitudes = (np.sum([part[k].sum(axis=1) for part in done], axis=0) for k in range(3))
    # the difference between orders 14 and 22, of which the second is returned, plus rounding
    return Adapted(values + tail_value, errors + tail_error + 2e-16 * magnitudes, magnitudes, evaluations)


def _evaluate(f: Callable[[Array], Array], panels: Panels, what: str) -> tuple[Array, Array, Array]:
    """Values, differences between the two orders and ∫|f| per panel, (m, panels) each."""
    size = panels.low.size
    rules = [panels.nodes(order) for order in (LOW_ORDER, HIGH_ORDER)]
    nodes = np.concatenate([rule[0].ravel() for rule in rules])
    values = _finite(f, nodes, what)
    split = size * LOW_ORDER
    low = values[:, :split].reshape(-1, size, LOW_ORDER)
    high = values[:, split:].reshape(-1, size, HIGH_ORDER)
    sums = [np.einsum("mpn,pn->mp", block, rule[1]) for block, rule in zip((low, high), rules, strict=True)]
    magnitude = np.einsum("mpn,pn->mp", np.abs(high), rules[1][1])
    return sums[1], np.abs(sums[1] - sums[0]), magnitude


def _finite(f: Callable[[Array], Array], nodes: Array, what: str) -> Array:
    """f at the nodes, or an error that says where it is not finite."""
    with np.errstate(all="ignore"):
        values = np.atleast_2d(f(nodes))
    if not np.isfinite(values).all():
        where = nodes[~np.isfinite(values).all(axis=0)][0]
        raise NumericalError(
            f"{what} is not finite at x = {where:.6g}, so its expectation does not exist in float64",
            hint="an activation with a finite second moment",
            state=float(where),
        )
    return values


def _ladder(panels: Panels, row: int) -> Panels:
    """[0, high] cut at high·4^−j, down to 1e-30 of it, or to where distances from the kink lose their digits."""
    origin, high = float(panels.origin[row]), float(panels.high[row])
    floor = max(1e-30 * high, 1e-9 * abs(origin))
    rungs = int(np.clip(np.log(high / floor) / np.log(_LADDER_RATIO), 4, 60))
    edges = high * _LADDER_RATIO ** -np.arange(rungs + 1.0)
    shape = np.ones(rungs)
    depth = (panels.depth[row] + 1) * shape
    return Panels(origin * shape, panels.sign[row] * shape, shape, edges[1:], edges[:-1], depth)


def _series(f: Callable[[Array], Array], ladder: Panels, what: str) -> tuple[Array, Array]:
    """What lies below the ladder, from the geometric series of its last rungs: c·r/(1 − r)."""
    last = ladder.take(np.arange(ladder.low.size - 3, ladder.low.size))
    nodes, weights = last.nodes(HIGH_ORDER)
    rungs = np.einsum("mpn,pn->mp", _finite(f, nodes.ravel(), what).reshape(-1, 3, HIGH_ORDER), weights)
    with np.errstate(all="ignore"):
        ratio = np.where(rungs[:, 1] != 0, rungs[:, 2] / rungs[:, 1], 0.0)
        earlier = np.where(rungs[:, 0] != 0, rungs[:, 1] / rungs[:, 0], 0.0)
    # rungs shrink by 4^−(p+1) towards an integrable power p > −1; here they do not
    if bool((ratio >= 1.0 - 1e-6).any()):
        raise NumericalError(
            f"{what} grows too fast towards x = {ladder.origin[0]:.6g}: its expectation is infinite",
            hint="a power above 1/2, or an activation with a square-integrable derivative",
            state=float(ladder.origin[0]),
        )
    tail = rungs[:, 2] * ratio / (1.0 - ratio)
    return tail, np.abs(tail) * (np.abs(ratio - earlier) / (1.0 - ratio) + 1e-14)


@lru_cache(maxsize=16)
def coefficients(order: int) -> Array:
    """(order, order): from values times Gauss's weights to twice the Legendre coefficients."""
    nodes, _ = legendre(order)
    found: Array = np.polynomial.legendre.legvander(nodes, order - 1) * (2.0 * np.arange(order) + 1.0)
    found.setflags(write=False)
    return found


@dataclass(frozen=True)
class PiecewiseSeries:
    """A function as a Chebyshev series on each of the intervals between `edges`; `coefficients` are (terms, pieces)."""

    edges: Array
    coefficients: Array

    @classmethod
    def fit(cls, function: Callable[[Array], Array], edges: Array, *, terms: int) -> PiecewiseSeries:
        """The series through the values at the Chebyshev points of every piece."""
        angles = np.pi * (np.arange(terms) + 0.5) / terms
        places = edges[:-1, None] + 0.5 * np.diff(edges)[:, None] * (1.0 + np.cos(angles))
        transform = 2.0 / terms * np.cos(np.outer(np.arange(terms), angles))
        transform[0] *= 0.5
        return cls(edges, transform @ function(places).T)

    def __call__(self, x: Array) -> Array:
        """The function at places between the outer edges, by Clenshaw's rule."""
        piece = np.clip(np.searchsorted(self.edges, x, side="right") - 1, 0, self.edges.size - 2)
        t = 2.0 * (x - self.edges[piece]) / np.diff(self.edges)[piece] - 1.0
        later, last = np.zeros_like(t), np.zeros_like(t)
        for row in self.coefficients[:0:-1]:
            later, last = row[piece] + 2.0 * t * later - last, later
        return np.asarray(self.coefficients[0][piece] + t * later - last)
