"""All expectations of a function of a normalized vector that the theory of batch normalization is assembled from.

φ stands for φ(γx + β) − φ(β) and D for its derivative γφ′(γx + β). The names of the fields spell the integrand: `s2_`
multiplies by s², `r2_` by s^−2, `r4_` by eps·s^−4. `Expectations` chooses the method; docs/methods.md says how.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

import numpy as np

from sounding.activations.activation import Array
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.means import Line, line_means
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.plane import MOST_KINKS, PAIRS, PlaneCells
from sounding.theory.integrals.polynomials import PairSums, Polynomials, line_sums, line_weights
from sounding.theory.integrals.powers import gaussian_powers, line_powers, pair_powers, power_spread
from sounding.theory.integrals.table import Table, Tables

_CLOSED_ERROR = 2e-14  # relative, of closed forms: some dozens of roundings and the hypergeometric function
_CALLABLE_TOLERANCE = 2e-11  # ten digits of a callable read from its table: two more would take twice the cells
_ENOUGH = 1e-3  # a share of error from which on polynomials are summed too, to see which of both is better

MethodName = Literal["closed form", "one variable", "polynomials", "cells", "bounded polynomials"]
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


Moments = tuple[GaussianMoments] | tuple[LineMoments, PairMoments]
"""The moments of one fixed point: of an infinite batch, or of one and of two coordinates of a finite batch."""


@dataclass(frozen=True)
class Method:
    """How pair moments were computed, and why so."""

    name: MethodName
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


class Expectations:
    """The moments of one function and one batch size, under any number of laws.

    What the first law costs most, such as panels, the degree of the polynomials and the cells, serves the next.
    """

    def __init__(self, affine: Affine, batch_size: float) -> None:
        self.affine = affine
        self.batch_size = batch_size
        self.tables = Tables(affine)
        self.polynomials = Polynomials(self.tables)
        self.cells = PlaneCells(affine)
        # what is tried first, which for closed forms, one variable and fractional powers is known without work
        if affine.power is not None:
            self.method = Method("closed form", "the activation is positively homogeneous and nothing shifts it")
        elif math.isinf(batch_size):
            self.method = Method("one variable", "the samples of an infinite batch are independent")
        elif affine.kink_power != 0:
            why = "a slope with a fractional power at a kink has no table; cells crowd nodes there"
            self.method = Method("cells", why)
        else:
            why = "one table and polynomials of moderate degree tell what two samples share"
            self.method = Method("polynomials", why)

    def at(self, law: NormalizedLaw, *, tolerance: float = 1e-12) -> tuple[Moments, Moments]:
        """The moments of the batch size, and their errors."""
        if math.isinf(self.batch_size):
            found, error = self.gaussian(law, tolerance=tolerance)
            return (found,), (error,)
        power = self.affine.power
        if power is not None:
            line, line_error = _closed(LineMoments, line_powers(*power, law))
            pair, pair_error = _closed(PairMoments, pair_powers(*power, law))
        elif self.affine.kink_power == 0:
            pairs, table = self._tabled(law, PAIRS, tolerance)
            line, line_error = _pack(LineMoments, *line_sums(table, law))
            pair, pair_error = _pack(PairMoments, pairs.values, pairs.errors)
        else:
            line, line_error = self.line(law, tolerance=tolerance)
            pair, pair_error = self.planar(law, tolerance=tolerance)
        return (line, pair), (line_error, pair_error)

    def gaussian(self, law: NormalizedLaw, *, tolerance: float = 1e-12) -> tuple[GaussianMoments, GaussianMoments]:
        """The moments of the limit B → ∞, and their errors."""
        if self.affine.power is not None:
            return _closed(GaussianMoments, gaussian_powers(*self.affine.power, law))
        affine = self.affine

        def integrands(y: Array) -> Array:
            x = (y - affine.shift) / affine.scale
            phi, slope, z = affine.rise(y), affine.slope(y), x / law.spread
            rows = (phi, phi * phi, phi * z, phi * z * z, (phi * z) ** 2, slope, slope * slope)
            return np.stack(rows) * law.line_weight(x, 0.0)

        return _pack(GaussianMoments, *self._along_line(law, integrands, tolerance), affine.slope_noise(law.spread))

    def line(self, law: NormalizedLaw, *, tolerance: float = 1e-12) -> tuple[LineMoments, LineMoments]:
        """The moments of one coordinate by adaptive panels, and their errors; the second way beside the table."""
        affine = self.affine

        def integrands(y: Array) -> Array:
            x = (y - affine.shift) / affine.scale
            phi, slope = affine.rise(y), affine.slope(y)
            rows = np.stack([phi, *[phi * phi] * 3, slope, *[slope * slope] * 4])
            return rows * line_weights(x, law, lambda power: law.line_weight(x, power))

        return _pack(LineMoments, *self._along_line(law, integrands, tolerance), affine.slope_noise(law.spread))

    def planar(self, law: NormalizedLaw, *, tolerance: float = 1e-12) -> tuple[PairMoments, PairMoments]:
        """The moments of two coordinates by cells without a table, and their errors; the second way for many."""
        noise = self.affine.slope_noise(law.spread)
        found = self.cells.sums(law, tolerance=max(tolerance, noise, self.affine.noise(law.spread)))
        return _pack(PairMoments, found.values, found.errors, noise)

    def spread(self, law: NormalizedLaw, *, tolerance: float = 1e-12, checked: bool = True) -> tuple[float, float]:
        """E φ(x₁)² − E φ(x₁)φ(x₂) and its error: the forward map of μ (meanfield2019, Theorem 4), at any eps."""
        affine = self.affine
        if affine.power is not None:
            found = power_spread(*affine.power, law)
            return found, _CLOSED_ERROR * found
        # without `checked` polynomials are summed once, in a third of the time, for callers that check the result
        if math.isfinite(law.batch_size) and affine.kink_power == 0:
            pairs, table = self._tabled(law, PAIRS[:1], tolerance, checked=checked)
            values, errors = line_sums(table, law)
            return float(values[1] - pairs.values[0]), float(errors[1] + pairs.errors[0])

        def squares(y: Array) -> Array:
            phi = affine.rise(y)
            weight = law.line_weight((y - affine.shift) / affine.scale, 0.0)
            return np.stack([phi * phi * weight, phi * weight])

        (square, mean), (square_error, mean_error) = self._along_line(law, squares, tolerance)
        if math.isinf(law.batch_size):
            return float(square - mean**2), float(square_error + 2 * abs(mean) * mean_error)
        pair, pair_error = self.planar(law, tolerance=tolerance)
        return float(square - pair.product), float(square_error + pair_error.product)

    def _tabled(
        self, law: NormalizedLaw, wanted: tuple[tuple[int, int, int], ...], tolerance: float, *, checked: bool = True
    ) -> tuple[PairSums, Table]:
        """The pair moments of an activation without fractional powers, and the table of one coordinate."""
        # by polynomials; where they would be of too high a degree, by cells; where there are too many of those, by as
        # many polynomials as time allows, with what they leave as error
        affine = self.affine
        allowed = max(tolerance, affine.noise(law.spread))
        if self.method.name == "polynomials":
            found = self.polynomials.sums(law, wanted, tolerance=allowed, checked=checked)
            if found is not None:
                return found
            # nor would polynomials serve at the next law
            self.method = Method(
                "cells", "kinks, steep slopes or waves in a small batch ask for polynomials of too high a degree"
            )
        kinks = affine.kinks_within(law.support)
        if self.method.name == "cells" and kinks <= MOST_KINKS:
            table = self.tables.at(law, degree=0, tolerance=allowed)
            goal = max(allowed, _CALLABLE_TOLERANCE if affine.activation.derivative_error > 0 else 0.0)
            cells = self.cells.sums(law, tolerance=goal, table=table)
            if cells.worst <= max(_ENOUGH, tolerance):
                return cells, table
            bounded = self.polynomials.bounded(law, wanted, tolerance=allowed)
            if cells.worst <= bounded[0].worst:
                return cells, table
            self.method = Method("bounded polynomials", "cells ran out before they resolved the waves or steep slopes")
            return bounded
        if self.method.name == "cells":
            why = f"{kinks} kinks within reach of a small batch; cells serve up to {MOST_KINKS}"
            self.method = Method("bounded polynomials", why)
        return self.polynomials.bounded(law, wanted, tolerance=allowed)

    def _along_line(
        self, law: NormalizedLaw, integrands: Callable[[Array], Array], tolerance: float
    ) -> tuple[Array, Array]:
        """Means of several integrands of y over one coordinate, and their errors."""
        affine = self.affine
        line = Line(
            density=lambda z: np.full_like(z, law.spread),
            support=law.support / law.spread,
            mean=affine.shift,
            std=affine.scale * law.spread,
            kinks=affine.activation.kinks,
            length=affine.activation.length,
            center=affine.activation.center,
        )
        allowed = max(tolerance, affine.slope_noise(law.spread), affine.noise(law.spread))
        what = f"the second moment of {affine.activation.name} or of its derivative"
        found = line_means(integrands, line, tolerance=allowed, what=what)
        return found.values, found.errors


def rescaled(moments: Moments, mu: float) -> Moments:
    """Moments at eps = 0 for another μ than 1: x does not depend on μ there, and s² is proportional to it."""
    if len(moments) == 1:
        return moments

    def scaled(record: Record) -> Record:
        powers = {name: {"sl": -0.5, "s2": 1.0, "r2": -1.0, "r4": -1.0}.get(name[:2], 0.0) for name in vars(record)}
        return replace(record, **{name: getattr(record, name) * mu**power for name, power in powers.items()})

    line, pair = moments
    return scaled(line), scaled(pair)


def _closed(kind: type[Record], values: tuple[float, ...]) -> tuple[Record, Record]:
    """The record of closed forms, and that of their rounding."""
    return kind(*values), kind(*(_CLOSED_ERROR * abs(value) for value in values))


def _pack(kind: type[Record], values: Array, errors: Array, noise: float = 0.0) -> tuple[Record, Record]:
    """The record and that of its errors, to which slopes known with a relative error of `noise` add theirs."""
    names = [field.name for field in fields(kind)]
    errors = errors + np.array([2 * noise if "slope" in name else 0.0 for name in names]) * np.abs(values)
    return kind(*map(float, values)), kind(*map(float, errors))
