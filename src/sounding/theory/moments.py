"""The expectations from which every mean field quantity of batch normalization is assembled.

φ stands for φ(γx + β) − φ(β) and D for its derivative γφ′(γx + β). Batch normalization takes constants off, so φ(β)
enters only the variance and the covariances that are reported. The names of the fields spell the integrand: `s2_`
multiplies by s², `r2_` by s^−2, `r4_` by eps·s^−4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

from sounding.activations.activation import Array
from sounding.errors import NumericalError
from sounding.theory.affine import Affine
from sounding.theory.arc_cosine import homogeneous_spread
from sounding.theory.circle import Circles, circle_sums
from sounding.theory.expansion import line_sums, pair_sums
from sounding.theory.means import line_means, pair_means
from sounding.theory.nested import nested_sums
from sounding.theory.normalized import NormalizedLaw
from sounding.theory.series import PairSeries, pair_series
from sounding.theory.tabulated import Table, tabulate

GRADING = 8
# x₁ = T cos ψ carries a rounding of 1e-16, which a kink like |x|^−0.4 in φ′ raises to about 1e-10
STEEP_TOLERANCE = 1e-9
NESTED_TOLERANCE = 1e-11  # below, square roots and layers take the nested integral twice the time
FEW_KINKS, FEW_PANELS = 10, 64  # with so many, cells in the plane are faster than nested panels
MOST_CELLS, ENOUGH = 2_000, 1e-8
ROUGH, CALLABLE_TOLERANCE = 1e-9, 1e-10
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
Record = TypeVar("Record", "LineMoments", "PairMoments", "GaussianMoments")


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

    From one table (`sounding.theory.expansion`) where polynomials of moderate degree tell what two coordinates know of
    each other; by the series of `sounding.theory.series` for fractional powers; else over the plane of two coordinates.
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


def planar_pair_moments(
    affine: Affine, law: NormalizedLaw, *, tolerance: float = 1e-12
) -> tuple[PairMoments, PairMoments]:
    """The same by cells in the plane of two coordinates: the second method, and the first for few kinks."""
    found = _cells(affine, law, tolerance, alone=False)
    return _pack(PairMoments, found.values, found.errors, affine.slope_noise(law.spread))


def _cells(
    affine: Affine,
    law: NormalizedLaw,
    tolerance: float,
    *,
    alone: bool,
    most: int | None = None,
    table: Table | None = None,
) -> PairSeries:
    """The pair moments, or E φφ alone, by cells in the plane; slopes that are not given come from the table."""
    if alone:
        return _pair(
            affine,
            law,
            lambda x1, x2, y1, y2: affine.rise(y1) * affine.rise(y2),
            lambda angle: law.radial_weight(angle, 0),
            tolerance,
            most,
        )

    def integrands(x1: Array, x2: Array, y1: Array, y2: Array) -> Array:
        phi = affine.rise(y1) * affine.rise(y2)
        if table is None or affine.activation.derivative_error == 0:
            slope = affine.slope(y1) * affine.slope(y2)
        else:
            slope = table.slope_at(x1, law.support) * table.slope_at(x2, law.support)
        xx, half = x1 * x2, 0.5 * (x1 * x1 + x2 * x2)
        forward = (phi, phi, phi * xx, phi * half)
        backward = (slope, slope * xx, slope * half, slope * xx * xx, slope * xx * half, slope * xx)
        return np.stack([*forward, *backward])

    def weight(angle: Array) -> Array:
        one, square, inverse = (law.radial_weight(angle, power) for power in (0, 1, -1))
        quartic = law.eps * law.radial_weight(angle, -2) if law.eps > 0 else np.zeros_like(angle)
        return np.stack([one, square, square, square, inverse, inverse, inverse, inverse, inverse, quartic])

    return _pair(affine, law, integrands, weight, tolerance, most)


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


def batch_spread(affine: Affine, law: NormalizedLaw, *, tolerance: float = 1e-12, checked: bool = True) -> float:
    """E φ(x₁)² − E φ(x₁)φ(x₂): the forward map of μ (meanfield2019, Theorem 4), at any eps.

    Without `checked` a series is summed once, which takes a third of the time, for callers that check the result.
    """

    phi = affine.activation
    if phi.degree is not None and phi.slopes is not None and affine.shift == 0 and math.isfinite(law.batch_size):
        sized = phi.scaled(affine.scale)
        if sized.slopes is not None:
            return homogeneous_spread(phi.degree, sized.slopes, batch_size=law.batch_size, ratio=law.eps / law.mu)
    if math.isfinite(law.batch_size):
        if affine.kink_power == 0:
            pairs, table = _tabled(affine, law, tolerance, alone=True, checked=checked)
            return float(line_sums(table, law)[0][1] - pairs.values[0])
        allowed = _pair_tolerance(affine, law, tolerance)
        found = pair_series(affine, law, ((0, 0, 0),), tolerance=allowed, checked=checked)
        if found is not None:
            return float(found.scales[0] - found.values[0])

    def squares(y: Array) -> Array:
        phi = affine.rise(y)
        weight = law.line_weight((y - affine.shift) / affine.scale, 0.0)
        return np.stack([phi * phi * weight, phi * weight])

    (square, mean), _ = _line(affine, law, squares, tolerance)
    if math.isinf(law.batch_size):
        return float(square - mean**2)
    return float(square - _cells(affine, law, tolerance, alone=True).values[0])


def _tabled(
    affine: Affine, law: NormalizedLaw, tolerance: float, *, alone: bool, checked: bool = True
) -> tuple[PairSeries, Table]:
    """The pair moments, or E φφ alone, and the table of one coordinate; for activations without fractional powers.

    By polynomials; where they would be of too high a degree, on circles for waves and nested for kinks and steep
    slopes; where there are too many of those, by as many polynomials as time allows, with what they leave as error.
    """
    wanted = PAIRS[:1] if alone else PAIRS
    allowed = max(tolerance, affine.noise(law.spread))
    key = ("polynomials", law.batch_size, tolerance < ROUGH)
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
    cells, key = None, ("cells", law.batch_size, tolerance < ROUGH)
    few = kinks <= FEW_KINKS and table.edges.size < FEW_PANELS and affine.kept.get(key, True)
    if not (few and affine.activation.derivative_error == 0):  # where slopes are given, few cells are faster
        rings = circle_sums(circles, law, tuple(p for _, _, p in PAIRS), tolerance=allowed)
        if rings is not None:
            return rings, table
    if few:
        # ten digits of a callable: two more would take twice the cells
        steep = CALLABLE_TOLERANCE if affine.activation.derivative_error > 0 else 0.0
        cells = _cells(affine, law, max(tolerance, steep), alone=alone, most=MOST_CELLS, table=table)
        if bool((cells.errors <= max(ENOUGH, tolerance) * cells.scales).all()):
            return cells, table
        affine.kept[key] = False
        if affine.activation.derivative_error == 0:
            return _tabled(affine, law, tolerance, alone=alone, checked=checked)
    nested = nested_sums(affine, law, table, tolerance=max(allowed, NESTED_TOLERANCE), slopes=not alone)
    tried = [found for found in (cells, nested) if found is not None]
    if tried:
        return min(tried, key=lambda found: float((found.errors / np.maximum(found.scales, 1e-300)).max())), table
    found = pair_sums(affine, law, wanted, tolerance=allowed, checked=not alone, bounded=True)
    if found is None:
        raise NumericalError(f"the pair moments of {affine.activation.name} could not be computed")
    return found


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
) -> PairSeries:
    lines, power = affine.kinks(), affine.kink_power
    inside = sum(abs(line) < law.support for line in lines)
    if inside > MOST_KINKS:
        raise NumericalError(
            f"{affine.activation.name} has {inside} kinks within reach of a batch of {law.batch_size:g} at scale "
            f"{affine.scale:g}: too many for the integrals over two samples",
            hint="a smaller scale, or a batch of 24 or more, which needs no such integral",
        )

    def plain(x1: Array, x2: Array) -> Array:
        return integrands(x1, x2, affine.scale * x1 + affine.shift, affine.scale * x2 + affine.shift)

    found = pair_means(
        integrands if power else plain,
        batch_size=law.batch_size,
        angle=math.acos(-1.0 / (law.batch_size - 1.0)),
        kinks=(lines, lines),
        weight=weight,
        spread=law.spread,
        symmetric=True,
        grading=1 if power == 0 else GRADING,
        edges=law.layer,
        placed=affine.place if power else None,
        most=most,
        tolerance=_pair_tolerance(affine, law, tolerance),
        what=f"the second moment of {affine.activation.name} or of its derivative",
    )
    worst = float((found.errors / np.maximum(found.magnitudes, 1e-300)).max())
    if worst > USELESS and most is None:
        raise NumericalError(
            f"{affine.activation.name} at scale {affine.scale:g} varies too fast for the integrals over two samples of "
            f"a batch of {law.batch_size:g}: they are off by {worst:.1g} of themselves",
            hint="a smaller scale or a larger batch",
        )
    return PairSeries(found.values, found.errors, found.magnitudes)


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
