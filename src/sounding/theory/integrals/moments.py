"""The expectations from which every mean field quantity of batch normalization is assembled.

φ stands for φ(γx + β) − φ(β) and D for its derivative γφ′(γx + β). Batch normalization takes constants off, so φ(β)
enters only the variance and the covariances that are reported. The names of the fields spell the integrand: `s2_`
multiplies by s², `r2_` by s^−2, `r4_` by eps·s^−4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from sounding.activations.activation import Array
from sounding.errors import NumericalError
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.arc_cosine import homogeneous_spread
from sounding.theory.integrals.cells import AdaptedCells, crossings
from sounding.theory.integrals.circle import Circles, circle_sums
from sounding.theory.integrals.means import line_means, pair_means
from sounding.theory.integrals.nested import nested_sums
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.polynomials import line_sums, pair_sums
from sounding.theory.integrals.series import PairSeries, pair_series
from sounding.theory.integrals.table import Table, tabulate

GRADING = 8
# x₁ = T cos ψ carries a rounding of 1e-16, which a kink like |x|^−0.4 in φ′ raises to about 1e-10
STEEP_TOLERANCE = 3e-10
NESTED_TOLERANCE = 1e-11  # below, square roots and layers take the nested integral twice the time
FEW_KINKS, FEW_PANELS = 7, 64  # with so many, cells in the plane are faster than nested panels
MANY_WAVES = 200  # on the largest circle
MOST_CELLS, ENOUGH = 500, 1e-3
CALLABLE_TOLERANCE = 2e-11
MOST_KINKS = 20  # the plane of two samples is cut into some ten cells for each pair of kinks
USELESS = 1e-5  # a larger share of error would pose as a prediction
# of each field of `PairMoments`: which of φ, xφ, x²φ, D, xD, x²D, x³D meet, and the power of s²
PAIRS = (
    (0, 0, 0),
    (0, 0, 1),
    (1, 1, 1),
    (2, 0, 1),
    (3, 3, -1),
    (4, 4, -1),
    (5, 3, -1),
    (5, 5, -1),
    (6, 4, -1),
    (4, 4, -2),
)
BESIDE = 1e-3  # of the moments of one coordinate: what is smaller counts as if it were as large
PEAK = 4.0  # widths of a steep place
NEAR = 0.5  # another law, as a ratio of μ/eps: cells that follow the edge of one are blind to that of a far one
BOUNDS = (1, 2, 3, 3, 5, 6, 6, 7, 7, 6)  # the field of `LineMoments` that bounds each by Cauchy and Schwarz
ROWS = (0, 0, 1, 2, 3, 4, 5, 6, 7, 4)  # of the integrands of cells, for each field
Record = TypeVar("Record", "LineMoments", "PairMoments", "GaussianMoments")
Moments = TypeVar("Moments", "LineMoments", "PairMoments")


@dataclass(frozen=True)
class LineMoments:
    """Expectations of one coordinate; x is x₁."""

    mean: float  # E φ
    square: float  # E φ²
    s2_square: float
    s2_square_x2: float
    slope: float  # E[s^−1 D (1 − x²/(B−1))]
    r2_slope2: float
    r2_slope2_x2: float
    r2_slope2_x4: float
    r4_slope2_x2: float


@dataclass(frozen=True)
class PairMoments:
    """Expectations of two coordinates, φφ = φ(x₁)φ(x₂), DD = D(x₁)D(x₂); x2 is x₁² symmetrized."""

    product: float
    s2_product: float
    s2_product_xx: float
    s2_product_x2: float
    r2_slopes: float
    r2_slopes_xx: float
    r2_slopes_x2: float
    r2_slopes_x2x2: float
    r2_slopes_x3x: float
    r4_slopes_xx: float


@dataclass(frozen=True)
class GaussianMoments:
    """Expectations of one coordinate at B → ∞, z = x/std x standard Gaussian."""

    mean: float
    square: float
    mean_z: float
    mean_z2: float
    square_z2: float
    slope: float
    slope2: float


def line_moments(affine: Affine, law: NormalizedLaw, *, tolerance: float = 1e-12) -> tuple[LineMoments, LineMoments]:
    """All one-coordinate expectations, and their errors."""
    width = law.batch_size - 1.0

    def integrands(y: Array) -> Array:
        x = (y - affine.shift) / affine.scale
        phi, slope, x2 = affine.rise(y), affine.slope(y), x * x
        w1, w0, h, r2 = (law.line_weight(x, power) for power in (1.0, 0.0, -0.5, -1.0))
        r4 = law.eps * law.line_weight(x, -2.0) if law.eps > 0 else np.zeros_like(x)
        square, slope2 = phi * phi, slope * slope
        rows = (phi * w0, square * w0, square * w1, square * x2 * w1, slope * (1.0 - x2 / width) * h)
        return np.stack([*rows, slope2 * r2, slope2 * x2 * r2, slope2 * x2 * x2 * r2, slope2 * x2 * r4])

    return _pack(LineMoments, *_line(affine, law, integrands, tolerance), affine.slope_noise(law.spread))


def finite_moments(
    affine: Affine, law: NormalizedLaw, *, tolerance: float = 1e-12
) -> tuple[LineMoments, LineMoments, PairMoments, PairMoments]:
    """All expectations of one coordinate and their errors, of two and theirs; finite batches.

    From one table (`polynomials`) where polynomials of moderate degree tell what two coordinates know of
    each other; by the series of `series` for fractional powers; else over the plane of two coordinates.
    """
    if affine.kink_power == 0:
        pairs, table = _tabled(affine, law, tolerance, alone=False)
        return *_pack(LineMoments, *line_sums(table, law)), *_pack(PairMoments, pairs.values, pairs.errors)
    allowed = _pair_tolerance(affine, law, tolerance)
    line = line_moments(affine, law, tolerance=tolerance)
    found = pair_series(affine, law, PAIRS, tolerance=allowed)
    if found is not None:
        return *line, *_pack(PairMoments, found.values, found.errors, affine.slope_noise(law.spread))
    return *line, *planar_pair_moments(affine, law, tolerance=tolerance)


def at_spread(moments: Moments, mu: float) -> Moments:
    """Moments of a finite batch at eps = 0 and μ = 1, at another μ, which x does not know and s² is proportional to."""
    powers = {"s2": 1.0, "r2": -1.0, "r4": -1.0}
    factors = {"slope": -0.5} if isinstance(moments, LineMoments) else {}
    factors |= {name: powers[name[:2]] for name in (f.name for f in fields(moments)) if name[:2] in powers}
    return replace(moments, **{name: getattr(moments, name) * mu**power for name, power in factors.items()})


def planar_pair_moments(
    affine: Affine, law: NormalizedLaw, *, tolerance: float = 1e-12
) -> tuple[PairMoments, PairMoments]:
    """The same by cells in the plane of two coordinates: the second method, and the first for few kinks."""
    found = _cells(affine, law, tolerance)
    return _pack(PairMoments, found.values, found.errors, affine.slope_noise(law.spread))


def _cells(
    affine: Affine,
    law: NormalizedLaw,
    tolerance: float,
    *,
    most: int | None = None,
    table: Table | None = None,
    floor: Array | float = 0.0,
) -> PairSeries:
    """The pair moments by cells in the plane, or by those of another law where they are as good for this one.

    A callable without a derivative is read from the table, whatever its own cost. Nothing is refined below an error of
    `floor`. `scales` are ∫|·|, or a share of the moments of one coordinate to which these are added, where that is
    larger.
    """

    def weight(angle: Array) -> Array:
        one, square, inverse = (law.radial_weight(angle, power) for power in (0, 1, -1))
        quartic = law.eps * law.radial_weight(angle, -2) if law.eps > 0 else np.zeros_like(angle)
        weights = [one, square, square, square, inverse, inverse, inverse, inverse, inverse, quartic]
        return np.stack(weights) / math.pi  # half a turn: the pair is symmetric

    bound = np.zeros(len(PAIRS)) if table is None else BESIDE * _beside(table, law)
    key = ("rings", law.batch_size, tolerance, most)
    made, rings, worst = affine.kept.get(key, (law, None, 0.0))
    if rings is not None and math.isclose(made.mu * law.eps, law.mu * made.eps, rel_tol=NEAR):
        again = AdaptedCells.of(rings, weight)
        sizes = np.maximum(again.magnitudes, bound)
        if bool((again.errors <= 2 * worst * sizes).all()):
            return PairSeries(again.values, again.errors, sizes)

    def integrands(x1: Array, x2: Array, y1: Array, y2: Array) -> Array:
        if table is None or affine.activation.derivative_error == 0:
            phi, slope = affine.rise(y1) * affine.rise(y2), affine.slope(y1) * affine.slope(y2)
        else:
            phi, slope = table.values_at(x1, law.support) * table.values_at(x2, law.support)
        xx, half = x1 * x2, 0.5 * (x1 * x1 + x2 * x2)
        once = slope * xx
        return np.stack([phi, phi * xx, phi * half, slope, once, slope * half, once * xx, once * half])

    steep = [] if table is None else table.steep_places(law.support)
    allowed = _pair_tolerance(affine, law, tolerance) if table is None else tolerance
    found = _pair(affine, law, integrands, weight, allowed, most, steep, np.maximum(floor, allowed * bound))
    sizes = np.maximum(found.magnitudes, bound)
    affine.kept[key] = law, found.rings, float((found.errors / np.maximum(sizes, 1e-300)).max())
    return PairSeries(found.values, found.errors, sizes)


def gaussian_moments(
    affine: Affine, law: NormalizedLaw, *, tolerance: float = 1e-12
) -> tuple[GaussianMoments, GaussianMoments]:
    """All expectations of the limit B → ∞, and their errors."""

    def integrands(y: Array) -> Array:
        x = (y - affine.shift) / affine.scale
        phi, slope, z = affine.rise(y), affine.slope(y), x / law.spread
        rows = (phi, phi * phi, phi * z, phi * z * z, (phi * z) ** 2, slope, slope * slope)
        return np.stack(rows) * law.line_weight(x, 0.0)

    return _pack(GaussianMoments, *_line(affine, law, integrands, tolerance), affine.slope_noise(law.spread))


def batch_spread(affine: Affine, law: NormalizedLaw, *, tolerance: float = 1e-12) -> float:
    """E φ(x₁)² − E φ(x₁)φ(x₂): the forward map of μ (meanfield2019, Theorem 4), at any eps."""
    return spread_with_error(affine, law, tolerance=tolerance)[0]


def spread_with_error(
    affine: Affine, law: NormalizedLaw, *, tolerance: float = 1e-12, checked: bool = True
) -> tuple[float, float]:
    """`batch_spread` and its error.

    Without `checked` a series is summed once, which takes a third of the time, for callers that check the result.
    """
    degree, slopes = affine.activation.degree, affine.slopes
    if degree is not None and slopes is not None and math.isfinite(law.batch_size):
        found = homogeneous_spread(degree, slopes, batch_size=law.batch_size, ratio=law.eps / law.mu)
        return found, 1e-14 * found
    if math.isfinite(law.batch_size):
        if affine.kink_power == 0:
            pairs, table = _tabled(affine, law, tolerance, alone=True, checked=checked)
            values, errors = line_sums(table, law)
            return float(values[1] - pairs.values[0]), float(errors[1] + pairs.errors[0])
        allowed = _pair_tolerance(affine, law, tolerance)
        series = pair_series(affine, law, ((0, 0, 0),), tolerance=allowed, checked=checked)
        if series is not None:
            return float(series.scales[0] - series.values[0]), float(series.errors[0])

    def squares(y: Array) -> Array:
        phi = affine.rise(y)
        weight = law.line_weight((y - affine.shift) / affine.scale, 0.0)
        return np.stack([phi * phi * weight, phi * weight])

    (square, mean), (square_error, mean_error) = _line(affine, law, squares, tolerance)
    if math.isinf(law.batch_size):
        return float(square - mean**2), float(square_error + 2 * abs(mean) * mean_error)
    cells = _cells(affine, law, tolerance)
    return float(square - cells.values[0]), float(square_error + cells.errors[0])


def _tabled(
    affine: Affine, law: NormalizedLaw, tolerance: float, *, alone: bool, checked: bool = True
) -> tuple[PairSeries, Table]:
    """The pair moments, or E φφ alone, and the table of one coordinate; for activations without fractional powers.

    By polynomials; where they would be of too high a degree, on circles for waves and nested for kinks and steep
    slopes; where there are too many of those, by as many polynomials as time allows, with what they leave as error.
    """
    wanted = PAIRS[:1] if alone else PAIRS
    allowed = max(tolerance, affine.noise(law.spread))
    key = ("polynomials", law.batch_size)
    if affine.kept.get(key, True):
        found = pair_sums(affine, law, wanted, tolerance=allowed, checked=checked)
        if found is not None:
            return found
        affine.kept[key] = False  # nor at the next law of the same activation and batch
    kinks = affine.kinks_within(law.support)
    table = tabulate(affine, law, degree=16 if kinks > FEW_KINKS else 0, tolerance=allowed)
    circles = affine.kept.setdefault(
        ("circles", law.batch_size), Circles(affine, law.batch_size, tuple((i, j) for i, j, _ in PAIRS))
    )
    cells, key = None, ("cells", law.batch_size)
    few = kinks <= FEW_KINKS and table.edges.size < FEW_PANELS and affine.kept.get(key, True)
    if not (few and circles.most > MANY_WAVES):  # else cells are faster
        waves = circle_sums(circles, law, tuple(p for _, _, p in PAIRS), tolerance=allowed)
        if waves is not None:
            return waves, table
    if few:
        # ten digits of a callable: two more would take twice the cells
        steep = CALLABLE_TOLERANCE if affine.activation.derivative_error > 0 else 0.0
        noise = _table_noise(table, law)
        cells = _cells(affine, law, max(allowed, steep), most=MOST_CELLS, table=table, floor=5 * noise)
        enough = bool((cells.errors <= max(ENOUGH, tolerance) * cells.scales).all())
        cells = PairSeries(cells.values, cells.errors + noise, cells.scales)
        if enough:
            return cells, table
        affine.kept[key] = False
    nested = nested_sums(affine, law, table, tolerance=max(allowed, NESTED_TOLERANCE), slopes=not alone)
    tried = [found for found in (cells, nested) if found is not None]
    if tried:
        best = min(tried, key=lambda found: float((found.errors / np.maximum(found.scales, 1e-300)).max()))
        return best, table
    found = pair_sums(affine, law, wanted, tolerance=allowed, checked=not alone, bounded=True)
    if found is None:
        raise NumericalError(f"the pair moments of {affine.activation.name} could not be computed")
    return found


def _beside(table: Table, law: NormalizedLaw) -> Array:
    """The moments of one coordinate to which those of two are added in every eigenvalue."""
    line = line_sums(table, law)[0]
    return np.where(np.arange(len(PAIRS)) < 4, line[list(BOUNDS)], np.maximum(line[list(BOUNDS)], line[5]))


def _table_noise(table: Table, law: NormalizedLaw) -> Array:
    """The part of the table's errors in each pair moment, twice what it would be of two independent coordinates."""
    parts = ((table.rise, table.rise_error), (table.slope, table.slope_error))
    size = np.abs(table.x)

    def mean(field: Array, index: int, power: int) -> float:
        if power == -2 and law.eps == 0:
            return 0.0
        weight = table.weight(law, float(power)) * (law.eps if power == -2 else 1.0)
        return float(weight @ (np.abs(field) * size ** (index if index < 3 else index - 3)) / math.sqrt(weight.sum()))

    return np.array([
        2 * sum(mean(parts[f > 2][0], f, power) * mean(parts[g > 2][1], g, power) for f, g in ((i, j), (j, i)))
        for i, j, power in PAIRS
    ])  # fmt: skip


def _line(
    affine: Affine, law: NormalizedLaw, integrands: Callable[[Array], Array], tolerance: float
) -> tuple[Array, Array]:
    found = line_means(
        integrands,
        density=lambda z: np.full_like(z, law.spread),
        support=law.support / law.spread,
        mean=affine.shift,
        std=affine.scale * law.spread,
        kinks=affine.activation.kinks,
        length=affine.activation.length,
        center=affine.activation.center,
        tolerance=_tolerance(affine, law, tolerance),
        what=f"the second moment of {affine.activation.name} or of its derivative",
    )
    return found.values, found.errors


def _pair(
    affine: Affine,
    law: NormalizedLaw,
    integrands: Callable[[Array, Array, Array, Array], Array],
    weight: Callable[[Array], Array],
    tolerance: float,
    most: int | None,
    steep: list[tuple[float, float]],
    floor: Array,
) -> AdaptedCells:
    power = affine.kink_power
    lines = affine.kinks(centred=not steep)
    lines += tuple(x for x, width in steep if all(abs(x - line) > max(width, 1e-3 * law.spread) for line in lines))
    inside = sum(abs(line) < law.support for line in lines)
    if inside > MOST_KINKS:
        raise NumericalError(
            f"{affine.activation.name} has {inside} kinks within reach of a batch of {law.batch_size:g} at scale "
            f"{affine.scale:g}: too many for the integrals over two samples",
            hint="a smaller scale, or a batch of 24 or more, which needs no such integral",
        )

    def plain(x1: Array, x2: Array) -> Array:
        return integrands(x1, x2, affine.scale * x1 + affine.shift, affine.scale * x2 + affine.shift)

    rho = -1.0 / (law.batch_size - 1.0)
    found = pair_means(
        integrands if power else plain,
        batch_size=law.batch_size,
        angle=math.acos(rho),
        kinks=(lines, lines),
        weight=lambda angle: math.pi * weight(angle),
        spread=law.spread,
        symmetric=True,
        grading=1 if power == 0 else GRADING,
        edges=law.layer,
        firm=_peaks(steep, rho),
        rows=ROWS,
        placed=affine.place if power else None,
        most=most,
        floor=floor,
        tolerance=tolerance,
        what=f"the second moment of {affine.activation.name} or of its derivative",
    )
    worst = float((found.errors / np.maximum(found.magnitudes, 1e-300)).max())
    if worst > USELESS and most is None:
        raise NumericalError(
            f"{affine.activation.name} at scale {affine.scale:g} varies too fast for the integrals over two samples of "
            f"a batch of {law.batch_size:g}: they are off by {worst:.1g} of themselves",
            hint="a smaller scale or a larger batch",
        )
    return found


def _peaks(steep: list[tuple[float, float]], rho: float) -> tuple[float, ...]:
    """Radii around those where steep places of x₁ and x₂ meet: there D(x₁)D(x₂) has a peak that few nodes would see."""
    found = []
    for x, width in steep:
        for other, beside in steep:
            reach = PEAK * max(width, beside)
            found += [radius + sign * reach for radius in crossings(((x,), (other,)), rho)[2:] for sign in (1, -1)]
    return tuple(found)


def _tolerance(affine: Affine, law: NormalizedLaw, tolerance: float) -> float:
    return max(tolerance, affine.slope_noise(law.spread), affine.noise(law.spread))


def _pair_tolerance(affine: Affine, law: NormalizedLaw, tolerance: float) -> float:
    return max(_tolerance(affine, law, tolerance), STEEP_TOLERANCE if affine.kink_power < 0 else 0.0)


def _pack(kind: type[Record], values: Array, errors: Array, noise: float = 0.0) -> tuple[Record, Record]:
    """The record and that of its errors, to which slopes known with a relative error of `noise` add theirs."""
    names = [field.name for field in fields(kind)]
    errors = errors + np.array([2 * noise if "slope" in name else 0.0 for name in names]) * np.abs(values)
    return (
        kind(**dict(zip(names, map(float, values), strict=True))),
        kind(**dict(zip(names, map(float, errors), strict=True))),
    )
