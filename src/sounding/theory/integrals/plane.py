"""Pair moments of φ and its derivative by cells in the plane of two coordinates of a normalized vector.

Cells follow kinks and steep places, and serve fractional powers. Their number grows as the cube of the kinks, since n
kinks of either coordinate cross at n² radii.
"""

from __future__ import annotations

import math

import numpy as np

from sounding.activations.activation import Array
from sounding.errors import NumericalError
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.cells import AdaptedCells, Goal, Plane, Points, Rings, crossings
from sounding.theory.integrals.means import pair_means
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.polynomials import PairSums, pair_sizes
from sounding.theory.integrals.table import Table

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
_ROWS = (0, 0, 1, 2, 3, 4, 5, 6, 7, 4)  # of the integrands below, for each field
# 24 kinks make some 8000 first cells, which take a second; the number grows as their cube
MOST_KINKS = 24
# Beyond the first cells so many are cut. Over 700 settings of named activations and callables 500 sufficed for those
# without waves; 6000 bring waves of some hundred radians to 1e-8, in one or two seconds.
MOST_CELLS = 6000
_GRADING = 8  # nodes crowd like t⁸ at fractional powers: ten digits at a kink like |x|^−0.4
# x₁ = T cos ψ carries a rounding of 1e-16, of which a kink like |x|^p with p < 0 in φ′ makes its power 1 + p; cells cut
# down to that would be noise. The least tolerance of such kinks, and the multiple of that rounding.
_STEEP_TOLERANCE, _ROUNDINGS = 3e-10, 20.0
_BESIDE = 1e-3  # of the moments of one coordinate: a pair moment that is smaller counts as if it were as large
_PEAK = 4.0  # widths of a steep place within which the product of two slopes has its peak
_NEAR = 0.5  # as a ratio of μ/eps: cells that follow the edge of one law are blind to that of a farther one
_USELESS = 1e-5  # a larger share of error would pose as a prediction where no table bounds it


class PlaneCells:
    """The ten pair moments of one function and batch size by cells, kept for laws close to the last one."""

    def __init__(self, affine: Affine) -> None:
        self.affine = affine
        self._last: tuple[NormalizedLaw, float, Rings, float] | None = None

    def sums(self, law: NormalizedLaw, *, tolerance: float, table: Table | None = None) -> PairSums:
        """All pair moments; with the table of one coordinate a callable without a derivative is read from it."""
        bound, noise = np.zeros(len(PAIRS)), np.zeros(len(PAIRS))
        if table is not None:
            bound, noise = pair_sizes(table, law, PAIRS)
            bound *= _BESIDE
        # cells of the last law are used again where they are as good for this one
        if self._last is not None and self._last[1] == tolerance:
            made, _, rings, worst = self._last
            if math.isclose(made.mu * law.eps, law.mu * made.eps, rel_tol=_NEAR):
                again = AdaptedCells.of(rings, lambda angle: self._weight(law, angle) / math.pi, _ROWS)
                sizes = np.maximum(again.magnitudes, bound)
                if bool((again.errors <= 2 * worst * sizes).all()):
                    return PairSums(again.values, again.errors + noise, sizes)
        power = self.affine.kink_power
        allowed = max(tolerance, _STEEP_TOLERANCE, _ROUNDINGS * 1e-16 ** (1.0 + power)) if power < 0 else tolerance
        # with a table the errors say what the budget left; without one too large an error raises
        found = self._integrated(law, table, allowed, np.maximum(5 * noise, allowed * bound))
        # errors count beside ∫|·|, or beside a share of the moments of one coordinate, to which these are added
        sizes = np.maximum(found.magnitudes, bound)
        self._last = law, tolerance, found.rings, float((found.errors / np.maximum(sizes, 1e-300)).max())
        return PairSums(found.values, found.errors + noise, sizes)

    def _integrated(self, law: NormalizedLaw, table: Table | None, tolerance: float, floor: Array) -> AdaptedCells:
        """Cells between the kinks and steep places, refined down to `floor`."""
        affine = self.affine
        steep = [] if table is None else table.steep_places(law.support)
        lines = affine.kinks(centred=not steep)
        if len(lines) + len(steep) > MOST_KINKS:
            steep, lines = [], affine.kinks(centred=False)  # among many kinks or waves every cell is cut anyway
        lines += tuple(x for x, width in steep if all(abs(x - line) > max(width, 1e-3 * law.spread) for line in lines))
        inside = affine.kinks_within(law.support)
        name = affine.activation.name
        if inside > MOST_KINKS:
            raise NumericalError(
                f"{name} has {inside} kinks within reach of a batch of {law.batch_size:g} at scale {affine.scale:g}: "
                "too many for the integrals over two samples",
                hint="a smaller scale, or a batch of 24 or more, which needs no such integral",
            )
        rho = -1.0 / (law.batch_size - 1.0)
        plane = Plane(
            batch_size=law.batch_size,
            angle=math.acos(rho),
            kinks=(lines, lines),
            spread=law.spread,
            symmetric=True,
            grading=_GRADING if affine.kink_power != 0 else 1,
            edges=law.layer,
            firm=_peaks(steep, rho),
        )
        what = f"the second moment of {name} or of its derivative"
        goal = Goal(tolerance, floor=floor, what=what) if table is None else Goal(tolerance, floor, MOST_CELLS, what)
        read = table if table is not None and affine.activation.derivative_error > 0 else None
        found = pair_means(
            lambda at: self._integrands(at, law, read),
            plane,
            goal=goal,
            weight=lambda angle: self._weight(law, angle),
            rows=_ROWS,
        )
        worst = float((found.errors / np.maximum(found.magnitudes, 1e-300)).max())
        if worst > _USELESS and table is None:
            raise NumericalError(
                f"{name} at scale {affine.scale:g} varies too fast for the integrals over two samples of a batch of "
                f"{law.batch_size:g}: they are off by {worst:.1g} of themselves",
                hint="a smaller scale or a larger batch",
            )
        return found

    def _integrands(self, at: Points, law: NormalizedLaw, table: Table | None) -> Array:
        """φφ, φφ·x₁x₂, φφ·(x₁²+x₂²)/2, DD, and DD times these and their products, (8, n)."""
        affine, x1, x2 = self.affine, at.first, at.second
        if table is not None:
            phi, slope = table.values_at(x1, law.support) * table.values_at(x2, law.support)
        else:
            y1, y2 = affine.scale * x1 + affine.shift, affine.scale * x2 + affine.shift
            phi, slope = affine.rise(y1) * affine.rise(y2), affine.slope(y1) * affine.slope(y2)
        xx, half = x1 * x2, 0.5 * (x1 * x1 + x2 * x2)
        once = slope * xx
        return np.stack([phi, phi * xx, phi * half, slope, once, slope * half, once * xx, once * half])

    @staticmethod
    def _weight(law: NormalizedLaw, angle: Array) -> Array:
        """The law's weight of each field."""
        made = {power: law.radial_weight(angle, power) for power in (0, 1, -1)}
        made[-2] = law.eps * law.radial_weight(angle, -2) if law.eps > 0 else np.zeros_like(angle)
        return np.stack([made[power] for _, _, power in PAIRS])


def _peaks(steep: list[tuple[float, float]], rho: float) -> tuple[float, ...]:
    """Radii around those where steep places of x₁ and x₂ meet: there D(x₁)D(x₂) has a peak that few nodes would see."""
    found = []
    for x, width in steep:
        for other, beside in steep:
            reach = _PEAK * max(width, beside)
            found += [radius + sign * reach for radius in crossings(((x,), (other,)), rho)[2:] for sign in (1, -1)]
    return tuple(found)
