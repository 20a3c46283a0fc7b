"""Moments of one and two coordinates of a batch-normalized neuron, from one table of an activation.

One coordinate is a sum over the table's nodes. Two coordinates see each other only through polynomials of low degree:
at eps = 0

    E f(x₁) g(x₂) = Σ_k f_k g_k P_k(ρ₀),  ρ₀ = −1/(B−1)

with the Gegenbauer coefficients of f and g (meanfield2019, Theorem 9). At eps > 0 the same holds on the sphere of every
radius. There f and g are replaced by their projections on the polynomials that are orthonormal under the law of x₁,
which leaves the moments as they are once the degree is high enough: then the activation itself is needed at no other
radius, and sixty radii cost sums over some hundred nodes of polynomials. How much is left out is bounded by
max|P_k(ρ₀)|·‖f − Σ‖·‖g − Σ‖ and, at eps > 0, measured by a lower degree. Where the degree would be too high (kinks in
batches below some sixteen, fast oscillations at eps > 0) the answer is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from scipy.linalg import eigh_tridiagonal

from sounding.activations.activation import Array
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.table import Table, Tables

# Degrees up to which the sums take about 0.1 s. Without eps a term costs one pass over the table; with eps the
# polynomials are also evaluated at every radius.
MOST_TERMS, MOST_TERMS_WITH_EPS = 2400, 256
MOST_WAVES_WITH_EPS = 640  # for waves, which take as many terms as radians, and seconds
_FIRST_TERMS = 32  # smooth activations need 20 to 60
# degrees from which on no fall of the coefficients means none to come; those of a wave begin after its own radians
_TELLING, _TELLING_WAVES = 128, 512
_SLACK = 50.0  # times the tolerance: at the highest degree a little less is better than another method
_MOST_WORK = 2e7  # nodes times terms: some 0.1 s
_LOWER = 0.8  # of the degree: where the difference that measures the rest is taken
_HALF = 0.5  # of the degree: a further difference where the sums have not converged, and fall like a power of it
_FINE = 0.6  # the step in the radius, in units of what a smooth integrand needs, where that is not known to do
_FINEST = 0.04  # steps for waves of some 300 radians; four seconds at most
_DOUBT = 3.0  # times those differences: covers a decay as slow as the root of the degree

Wanted = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class PairSums:
    """E s^(2p) f(x₁) g(x₂) for each wanted (f, g, p), the errors, and the sizes to which errors are compared."""

    values: Array
    errors: Array
    scales: Array

    @property
    def worst(self) -> float:
        """The largest error as a share of its size."""
        return float((self.errors / np.maximum(self.scales, 1e-300)).max())


def line_weights(x: Array, law: NormalizedLaw, weight: Callable[[float], Array]) -> Array:
    """What φ, φ² (three times), D and D² (four times) meet in the nine fields of `LineMoments`, (9, n).

    `weight` gives the density times the mean of s^(2·power) at x.
    """
    x2 = x * x
    w1, w0, h, r2 = (weight(power) for power in (1.0, 0.0, -0.5, -1.0))
    r4 = law.eps * weight(-2.0) if law.eps > 0 else np.zeros_like(x)
    return np.stack([w0, w0, w1, x2 * w1, (1 - x2 / law.support**2) * h, r2, x2 * r2, x2 * x2 * r2, x2 * r4])


def line_sums(table: Table, law: NormalizedLaw) -> tuple[Array, Array]:
    """The nine fields of `LineMoments` and their errors."""
    weights = line_weights(table.x, law, lambda power: table.weight(law, power))
    phi, slope, e, d = table.rise, table.slope, table.rise_error, table.slope_error
    square_error, slope2_error = (2 * np.abs(phi) + e) * e, (2 * np.abs(slope) + d) * d
    found = np.stack([phi, *[phi * phi] * 3, slope, *[slope * slope] * 4])
    blurred = np.stack([e, *[square_error] * 3, d, *[slope2_error] * 4])
    values, errors, sizes = (np.einsum("ij,ij->i", weights, rows) for rows in (found, blurred, np.abs(found)))
    missing = abs(float(weights[0].sum()) - 1.0)
    return values, errors + (missing + 1e-15) * sizes


def pair_sizes(table: Table, law: NormalizedLaw, wanted: Wanted) -> tuple[Array, Array]:
    """√(E s^(2p) f²·E s^(2p) g²) of each wanted, p = −1 for −2, and the part of the table's errors in it."""
    # eps·s^−4 is at most s^−2, beside which it is added: its own bound may be smaller by orders
    x2 = table.x * table.x

    @cache
    def size(index: int, power: int) -> tuple[float, float]:
        field, error = (table.rise, table.rise_error) if index < 3 else (table.slope, table.slope_error)
        weight = table.weight(law, float(power)) * x2 ** (index if index < 3 else index - 3)
        return math.sqrt(weight @ field**2), math.sqrt(weight @ error**2)

    pairs = [(size(i, max(p, -1)), size(j, max(p, -1))) for i, j, p in wanted]
    noise = [f * g_error + g * f_error for (f, f_error), (g, g_error) in pairs]
    return np.array([f * g for (f, _), (g, _) in pairs]), np.array(noise)


class Polynomials:
    """Pair moments by polynomials for one table's φ and one batch size, with the degree kept for the next law."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._terms: dict[float, int] = {}  # what the last law needed, by tolerance

    def sums(
        self, law: NormalizedLaw, wanted: Wanted, *, tolerance: float, checked: bool = True
    ) -> tuple[PairSums, Table] | None:
        """E s^(2p) f_i(x₁) f_j(x₂) for each (i, j, p), f = φ, xφ, x²φ, D, xD, x²D, x³D; p = −2 carries a factor eps.

        Each to `tolerance` relative to its Cauchy–Schwarz bound, and the table; or None where that takes too many
        terms. Without `checked` the errors are not measured.
        """
        bends = self.tables.affine.kinks_within(law.support) > 0
        # where φ is steep in some places only, cells are faster than many polynomials
        waves = not bends and self.tables.at(law, degree=0, tolerance=tolerance).wavy
        limit = MOST_TERMS if law.eps == 0 else MOST_WAVES_WITH_EPS if waves else MOST_TERMS_WITH_EPS
        telling = _TELLING_WAVES if waves else _TELLING
        _, envelope = _tabulated(law.batch_size)
        # the coefficients of a bend fall like 1/k or faster
        bent = envelope[:limit] / np.arange(1, limit + 1)
        if bends and not bool((bent < 0.5 * tolerance).any()):
            return None
        small = np.flatnonzero(envelope < 0.5 * tolerance)
        if law.eps == 0 and small.size:
            limit = min(limit, int(small[0]) + 2)
        first = min(limit, _FIRST_TERMS, int(small[0]) + 2 if small.size else limit)
        asked, terms = tolerance, min(limit, self._terms.get(tolerance, first))
        while True:
            table = self.tables.at(law, degree=terms, tolerance=asked)
            if table.x.size * terms > _MOST_WORK:
                return None
            projection = _Projection.of(table, law, terms)
            needed = projection.needed(wanted, envelope, tolerance)
            enough = needed <= terms
            if terms == limit and not enough:
                enough = projection.needed(wanted, envelope, _SLACK * tolerance) <= terms
                tolerance *= _SLACK
            if enough:
                found = projection.sums(wanted, tolerance, float(envelope[terms - 1]), checked=checked)
                if found is not None:
                    self._terms[asked] = terms
                    return found, table
                needed = 1.5 * terms
            if needed > 3 * limit and terms < telling:
                needed = float(telling)
            if terms == limit or needed > 3 * limit:
                return None
            terms = min(max(int(needed), terms + 16), limit)

    def bounded(self, law: NormalizedLaw, wanted: Wanted, *, tolerance: float) -> tuple[PairSums, Table]:
        """What as many terms as time allows give, with a bound on what they leave."""
        terms = MOST_TERMS if law.eps == 0 else MOST_TERMS_WITH_EPS
        _, envelope = _tabulated(law.batch_size)
        table = self.tables.at(law, degree=terms, tolerance=tolerance)
        terms = min(terms, max(64, int(_MOST_WORK / table.x.size)))
        projection = _Projection.of(table, law, terms)
        return projection.bounded(wanted, float(envelope[terms - 1])), table


def radial_rule(law: NormalizedLaw, step: float) -> tuple[Array, Array, Array]:
    """R, s² and probability weights of the radius, (M,) each, for eps > 0; x₁ = √(B−1)·R·t with t on the sphere."""
    # the trapezoid rule in ln r, r² = μχ²_{B−1}: the law's density is analytic there and falls off on both sides, and
    # the poles of s^−2 stay half a turn away whatever eps is, so it converges exponentially in 1/step; `step` is in
    # units of what the density alone needs
    degrees = law.batch_size - 1.0
    center, spacing = 0.5 * math.log(degrees), step * min(0.13, 0.45 / math.sqrt(degrees))
    size = law.batch_size
    # small radii have little mass, but s^−2 and eps·s^−4 are large there, down to r² = B·eps
    bottom = 0.5 * math.log(size * law.eps / law.mu) - center - 6.0
    lowest = -min(max(14.0, -bottom), 41.0 / degrees + 9.0 / math.sqrt(degrees) - min(bottom, 0.0))
    offsets = spacing * np.arange(math.floor(lowest / spacing), math.ceil(2.0 / spacing) + 1)
    log_density = degrees * (offsets - 0.5 * np.expm1(2 * offsets))
    inverse = law.mu / (law.mu * np.exp(2 * (center + offsets)) / size + law.eps)
    keep = log_density + np.log1p(inverse * (1.0 + inverse * law.eps / law.mu)) > -40.0
    weight = np.exp(log_density[keep])
    square = law.mu * np.exp(2 * (center + offsets[keep]))
    return np.sqrt(square / (square + size * law.eps)), square / size + law.eps, weight / weight.sum()


@lru_cache(maxsize=16)
def _tabulated(batch_size: float) -> tuple[Array, Array]:
    """P_k(−1/(B−1)) by (k+B−3)P_{k+1} = (2k+B−3)tP_k − kP_{k−1}, and a bound on it and on those that follow."""
    t, shift = -1.0 / (batch_size - 1.0), batch_size - 3.0
    values = [1.0, t]
    for k in range(1, MOST_TERMS + 15):
        values.append(((2 * k + shift) * t * values[k] - k * values[k - 1]) / (k + shift))
    second = np.array(values)
    # they oscillate with a period of about 4
    envelope = np.lib.stride_tricks.sliding_window_view(np.abs(second), 8)[: MOST_TERMS + 8].max(axis=1)
    second.setflags(write=False)
    envelope.setflags(write=False)
    return second, envelope


def _steps(batch_size: float, terms: int) -> Array:
    """t p_k = step_k p_{k+1} + step_{k−1} p_{k−1} for the orthonormal polynomials of one coordinate of S^(B−2)."""
    index, k = 0.5 * (batch_size - 3.0), np.arange(1.0, terms + 1.0)
    return np.sqrt(k * (k + 2 * index - 1) / (4 * (k + index) * (k + index - 1)))


@dataclass(frozen=True)
class _Projection:
    """Coefficients of φ and D in the polynomials orthonormal under the law of x₁."""

    law: NormalizedLaw
    table: Table
    coefficients: Array  # (2, terms)
    steps: Array  # of the polynomials' recurrence
    norms: Array  # (7,): √E f² of φ, xφ, x²φ, D, xD, x²D, x³D
    rests: Array  # what the terms leave of them
    noise: tuple[float, float]  # root mean squares of the table's errors

    @classmethod
    def of(cls, table: Table, law: NormalizedLaw, terms: int) -> _Projection:
        """The projections of a table's φ and D on `terms` polynomials."""
        weight = table.weight(law, 0.0)
        rows = np.stack([table.rise, table.slope]) * weight
        if law.eps == 0:
            steps = law.support * _steps(law.batch_size, terms + 4)
            coefficients = _coefficients(rows, table.x, steps)
        else:
            coefficients, steps = _orthogonalized(rows, table.x, weight, terms + 4)
        x2 = table.x * table.x
        powers = np.stack([np.ones_like(x2), x2, x2 * x2, x2**3])
        norms = (rows * np.stack([table.rise, table.slope])) @ powers.T
        norms = np.array([*norms[0, :3], *norms[1]])
        raised = _raised(coefficients[:, None], steps, np.ones(1), terms)[:, 0]
        rests = np.sqrt(np.maximum(norms - (raised**2).sum(axis=1), 0.0))
        noise = [math.sqrt(weight @ error**2) for error in (table.rise_error, table.slope_error)]
        return cls(law, table, coefficients[:, :terms], steps, np.sqrt(norms), rests, (noise[0], noise[1]))

    def needed(self, wanted: Wanted, envelope: Array, tolerance: float) -> float:
        """How many terms would do, judged by how fast the coefficients fall over the second half of those here."""
        count = self.coefficients.shape[1]
        both = self.law.eps > 0
        found = 0.0
        for row in {i // 3 for pair in wanted for i in pair[:2]}:
            norm = max(self.norms[0 if row == 0 else 3], 1e-300)
            rest, half = (self._rest(min(row, 1), k) / norm for k in (count, count // 2))
            goal = tolerance / max(float(envelope[count - 1]), 1e-300)
            # on one sphere what is left out meets only itself; with eps > 0 it also meets what is kept
            goal = max(goal if both else math.sqrt(goal), self.noise[min(row, 1)] / norm)
            if rest <= goal:
                found = max(found, float(count))
                continue
            rate = math.log(max(half / rest, 1.0 + 1e-9)) / (0.5 * count)
            geometric = count + math.log(rest / goal) / rate
            # or until P_k alone is small enough
            enough = np.flatnonzero(envelope * rest ** (1 if both else 2) <= tolerance)
            found = max(found, min(geometric, float(enough[0]) + 1 if enough.size else math.inf))
        return found

    def _rest(self, row: int, count: int) -> float:
        """The norm of what the first `count` terms of φ (0) or D (1) leave out."""
        norm, coefficients = float(self.norms[0 if row == 0 else 3]), self.coefficients[row]
        rest = math.sqrt(max(norm**2 - float((coefficients[:count] ** 2).sum()), 0.0))
        # the difference of squares has no digits below 1e-7; there the last coefficients speak for those that follow
        if rest > 1e-7 * norm:
            return rest
        beyond = coefficients[count:]
        tail = 4 * float(np.abs(coefficients[max(count - 6, 0) : count]).max())
        return math.hypot(float(np.linalg.norm(beyond)), tail)

    def sums(self, wanted: Wanted, tolerance: float, envelope: float, *, checked: bool) -> PairSums | None:
        """The series at every radius, with errors; None where a lower degree gives something else."""
        scales, noise = pair_sizes(self.table, self.law, wanted)
        step = 1.0 if tolerance > 1e-9 else 0.85
        values, less = self._over_radii(wanted, step, _LOWER)
        bounds = self._bounds(wanted, scales, envelope)
        if not checked:
            return PairSums(values, bounds, scales)
        errors = bounds + noise + 1e-15 * scales
        if self.law.eps > 0:
            lower = np.abs(values - less) / np.maximum(scales, 1e-300)
            if bool((lower > tolerance**_LOWER).any()):
                return None
            coarser = np.abs(values - self._over_radii(wanted, 1.3 * step, _LOWER)[0])
            while bool((coarser > (3 * tolerance) ** (1 / 1.3) * scales).any()):
                step *= 0.6
                if step < _FINEST:
                    return None
                finer = self._over_radii(wanted, step, _LOWER)[0]
                values, coarser = finer, np.abs(finer - values)
            coarser = coarser / np.maximum(scales, 1e-300)
            # both errors are exponential in the degree and in 1/step: a higher one raises them to a power
            errors = errors + scales * (lower ** (1 / _LOWER) + 3 * coarser**1.3)
        return PairSums(values, errors, scales)

    def bounded(self, wanted: Wanted, envelope: float) -> PairSums:
        """The series with a bound on the rest, though it has not converged."""
        scales, noise = pair_sizes(self.table, self.law, wanted)
        errors = self._bounds(wanted, scales, envelope) + noise + 1e-15 * scales
        values, nearby = self._over_radii(wanted, _FINE, _LOWER)
        # On one sphere the rest meets only itself, and Cauchy and Schwarz bound it. With eps it also meets what is
        # kept; how much is read off two lower degrees, of which one close by may agree by chance, and the step in the
        # radius, for which waves are as hard as for the degree, is compared with a longer one.
        if self.law.eps > 0:
            coarse, far = self._over_radii(wanted, 1.0, _HALF)
            lower = np.maximum(np.abs(values - nearby), np.abs(coarse - far))
            errors = errors + _DOUBT * lower + np.abs(values - coarse)
        return PairSums(values, errors, scales)

    def _bounds(self, wanted: Wanted, scales: Array, envelope: float) -> Array:
        """max|P_k|·‖f − Σ‖·‖g − Σ‖ of each wanted pair."""
        left = self.rests / np.maximum(self.norms, 1e-300)
        return np.asarray(scales * np.array([envelope * left[i] * left[j] for i, j, _ in wanted]))

    def _over_radii(self, wanted: Wanted, step: float, share: float) -> tuple[Array, Array]:
        """The moments, and with eps > 0 those that a share of the terms gives."""
        law, coefficients = self.law, self.coefficients
        terms = coefficients.shape[1]
        second, _ = _tabulated(law.batch_size)
        slopes = any(max(i, j) > 2 for i, j, _ in wanted)
        if law.eps == 0:
            padded = np.pad(coefficients, ((0, 0), (0, 4)))
            raised = _raised(padded[: 1 + slopes, None], self.steps, np.ones(1), terms + 3, slopes=slopes)
            size, mu = law.batch_size, law.mu
            factors = {1: mu * (size - 1.0) / size, 0: 1.0, -1: size / (mu * (size - 3.0)), -2: 0.0}
            sums = [factors[p] * float((raised[i, 0] * raised[j, 0]) @ second[: terms + 3]) for i, j, p in wanted]
            return np.array(sums), np.array(sums)
        radius, square, chance = radial_rule(law, step)
        nodes, transform, steps = _sphere(law.batch_size, terms + 4 + terms % 2)
        half = nodes.size // 2
        places = law.support * radius[:, None] * nodes[half:]
        found = np.empty((2, len(wanted)))
        for row, parts in enumerate(_evaluated(coefficients[: 1 + slopes], self.steps, places, int(share * terms))):
            values = np.concatenate([(parts[0] - parts[1])[..., ::-1], parts[0] + parts[1]], axis=-1)
            raised = _raised(values @ transform, steps, law.support * radius, terms + 3, slopes=slopes)
            for column, (i, j, p) in enumerate(wanted):
                factor = square ** float(p) * chance * (law.eps if p == -2 else 1.0)
                found[row, column] = factor @ ((raised[i] * raised[j]) @ second[: terms + 3])
        return found[0], found[1]


def _coefficients(rows: Array, x: Array, steps: Array) -> Array:
    """Σ rows·p_k for k < steps.size, (rows, steps.size), by the recurrence of orthonormal polynomials."""
    found = np.empty((len(rows), steps.size))
    earlier, current = np.zeros_like(x), np.ones_like(x)
    for degree in range(steps.size):
        found[:, degree] = rows @ current
        back = steps[degree - 1] if degree else 0.0
        earlier, current = current, (x * current - back * earlier) / steps[degree]
    return found


def _orthogonalized(rows: Array, x: Array, weight: Array, terms: int) -> tuple[Array, Array]:
    """Coefficients, and the recurrence of the polynomials orthonormal under an even `weight` (Stieltjes)."""
    steps = np.empty(terms)
    found = np.empty((len(rows), terms))
    # each polynomial times the root of the weight: its norm is then that of a vector
    root = np.sqrt(weight)
    rows = np.divide(rows, root, out=np.zeros_like(rows), where=root > 0)
    earlier, current = np.zeros_like(x), root / math.sqrt(weight.sum())
    for degree in range(terms):
        found[:, degree] = rows @ current
        following = x * current - (steps[degree - 1] if degree else 0.0) * earlier
        steps[degree] = math.sqrt(following @ following)
        earlier, current = current, following / steps[degree]
    return found, steps


def _evaluated(coefficients: Array, steps: Array, places: Array, fewer: int) -> tuple[Array, Array]:
    """Σ_k c_k p_k at `places`, even and odd part apart, (2, rows, *places.shape), of all terms and of `fewer`."""
    x = places.ravel()
    found = np.zeros((2, len(coefficients), x.size))
    less = found
    # p_0 = 1: the law's weights add up to 1
    earlier, current = np.zeros_like(x), np.ones_like(x)
    for degree in range(coefficients.shape[1]):
        if degree == fewer:
            less = found.copy()
        found[degree % 2] += coefficients[:, degree, None] * current
        back = steps[degree - 1] if degree else 0.0
        earlier, current = current, (x * current - back * earlier) / steps[degree]
    shape = (2, len(coefficients), *places.shape)
    return found.reshape(shape), less.reshape(shape)


@lru_cache(maxsize=32)
def _sphere(batch_size: float, terms: int) -> tuple[Array, Array, Array]:
    """Gauss nodes of one coordinate of S^(B−2), the matrix from values to coefficients, the steps of the recurrence."""
    steps = _steps(batch_size, terms)
    nodes, vectors = eigh_tridiagonal(np.zeros(terms), steps[:-1])
    # row k of the eigenvectors is p_k(t)·√weight
    signed = vectors * np.sign(vectors[0])
    transform = (signed * signed[0]).T
    found: tuple[Array, Array, Array] = (np.asarray(nodes, dtype=np.float64), transform, steps)
    for array in found:
        array.setflags(write=False)
    return found


def _raised(coefficients: Array, steps: Array, reach: Array, terms: int, *, slopes: bool = True) -> Array:
    """(7, radii, terms) of φ, xφ, x²φ, D, xD, x²D, x³D from (2, radii, more) of φ and D; or of φ alone."""
    lists = []
    for current, highest in zip(coefficients, (2, 3), strict=False):
        lists.append(current)
        for _ in range(highest if slopes else 0):
            # x p_k = step_k p_{k+1} + step_{k−1} p_{k−1} multiplies a series by x; `reach` is x/t where the steps are
            # those of t
            more = np.zeros_like(current)
            more[:, :-1] += steps[: current.shape[1] - 1] * lists[-1][:, 1:]
            more[:, 1:] += steps[: current.shape[1] - 1] * lists[-1][:, :-1]
            lists.append(reach[:, None] * more)
    return np.stack(lists)[..., :terms]
