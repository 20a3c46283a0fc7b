"""Pairs of coordinates of a batch-normalized neuron, by the Gegenbauer series of one coordinate.

Given its radius, a batch-normalized neuron is uniform on a sphere, x = √(B−1)·R·t with t a coordinate of S^(B−2), and
R = r/√(r² + B·eps) is 1 at eps = 0. On the sphere two coordinates at angle cosine ρ₀ = −1/(B−1) satisfy

    E f(x₁) g(x₂) = Σ_k f_k g_k P_k(ρ₀)

with orthonormal coefficients f_k, g_k and P_k the Gegenbauer polynomial of index (B−3)/2 scaled to P_k(1) = 1 (the
addition theorem; meanfield2019, Theorem 9). So a pair costs one-dimensional integrals: panels in the angle with an edge
at every kink, times a rule for the radius where eps > 0. What a truncation leaves out is at most
max|P_k(ρ₀)|·‖f − Σ‖·‖g − Σ‖ over the rest, and P_k(ρ₀) falls like k^(−(B−3)/2): kinked activations need a batch of some
twenty samples, smooth ones none. Where the series would be too long the answer is None, and
`sounding.theory.integrals.cells` integrates over the plane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import beta, betainc

from sounding.activations.activation import Array
from sounding.errors import NumericalError
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.means import half_gamma_ratio
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.panels import legendre
from sounding.theory.integrals.table import SOFT_EDGES, outer_end

ORDERS = (10, 14)
_GRADED_ORDERS = (40, 56)
_GRADING = 12
_FIRST_TERMS, _MAX_TERMS = 24, 480
_MAX_WORK, _MAX_GRADED_WORK = 4e7, 3e7  # beyond, the plane is as fast; for fractional powers sooner
_MAX_PANELS = 2_000
# with a radius to integrate over, the plane's cells are faster for kinked activations that need no more edges than this
_FEW_EDGES = 20


@dataclass(frozen=True)
class Edges:
    """Panel edges in x, increasing, the same in y = scale·x + shift (exact at kinks), and whether kinks are steep."""

    x: Array
    y: Array
    moving: bool
    graded: bool

    def cut(self, reach: float, degree: int) -> Edges:
        """The same with further edges, so that a polynomial of this degree on the sphere turns by 8 at most in each.

        Graded panels, which end at kinks, have the nodes for three times as much.
        """
        angles = np.arccos(np.clip(self.x / reach, -1, 1))
        turns = degree * -np.diff(angles) / (24.0 if self.graded else 8.0)
        if float(turns.max()) <= 1.0:
            return self
        x, y = [self.x[:1]], [self.y[:1]]
        for index, pieces in enumerate(np.ceil(turns).astype(int)):
            share = np.arange(1, pieces) / pieces
            inner = reach * np.cos(angles[index] + (angles[index + 1] - angles[index]) * share)
            slope = (self.y[index + 1] - self.y[index]) / (self.x[index + 1] - self.x[index])
            x += [inner, self.x[index + 1 : index + 2]]
            y += [self.y[index] + slope * (inner - self.x[index]), self.y[index + 1 : index + 2]]
        return Edges(np.concatenate(x), np.concatenate(y), self.moving, self.graded)


@dataclass(frozen=True)
class PairSeries:
    """E s^(2p) f(x₁) g(x₂) for each requested (f, g, p), the errors, and √(E s^(2p) f²·E s^(2p) g²)."""

    values: Array
    errors: Array
    scales: Array


def second_coordinates(batch_size: float, terms: int) -> Array:
    """P_k(−1/(B−1)) for k < terms, by (k+B−3)P_{k+1} = (2k+B−3)tP_k − kP_{k−1}."""
    t, shift = -1.0 / (batch_size - 1.0), batch_size - 3.0
    values = [1.0, t]
    for k in range(1, terms - 1):
        values.append(((2 * k + shift) * t * values[k] - k * values[k - 1]) / (k + shift))
    return np.array(values[:terms])


@lru_cache(maxsize=16)
def _tabulated(batch_size: float) -> tuple[Array, Array]:
    """P_k(−1/(B−1)), and a bound on it and on those that follow; they oscillate with a period of about 4."""
    second = second_coordinates(batch_size, _MAX_TERMS + 8)
    envelope = np.lib.stride_tricks.sliding_window_view(np.abs(second), 8)[:_MAX_TERMS].max(axis=1)
    second.setflags(write=False)
    envelope.setflags(write=False)
    return second, envelope


def radial_rule(law: NormalizedLaw, step: float) -> tuple[Array, Array, Array]:
    """R, s² and probability weights of the radius, (M,) each; one node at eps = 0.

    The trapezoid rule in ln r, r² = μχ²_{B−1}: the law's density is analytic there and falls off on both sides, and
    the poles of s^−2 stay half a turn away whatever eps is, so it converges exponentially in 1/step; `step` is in units
    of what the density alone needs.
    """
    if law.eps == 0:
        return np.ones(1), np.full(1, math.nan), np.ones(1)
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


def find_edges(affine: Affine, law: NormalizedLaw, *, tolerance: float, slopes: bool = True) -> Edges | None:
    """Panel edges at the kinks and wherever one coordinate's integrands ask for more, out to where they end.

    None where more than two thousand panels would be needed.
    """
    reach, spread = law.support, law.spread
    kinks = {k: (k - affine.shift) / affine.scale for k in affine.activation.kinks}
    inside = {x: k for k, x in kinks.items() if abs(x) < reach}
    end = outer_end(affine, law)
    soft = [sign * edge * spread for edge in SOFT_EDGES for sign in (1, -1) if edge * spread < end]
    if affine.activation.length < 0.7 * abs(affine.scale):
        soft.append((affine.activation.center - affine.shift) / affine.scale)
    gap = 1e-3 * min(spread, end)
    soft = [e for e in soft if abs(e) < end and all(abs(e - k) > gap for k in inside)]
    cuts = sorted({-end, end, *soft, *(x for x in inside if abs(x) < end)})
    top = reach * float(radial_rule(law, 1.0)[0].max())
    angles = _settle(affine, law, np.arccos(np.clip(np.array(cuts[::-1]) / top, -1, 1)), top, tolerance, slopes)
    if angles is None:
        return None
    x = top * np.cos(angles[::-1])
    x = np.where(np.abs(angles[::-1] - 0.5 * math.pi) < 1e-15, 0.0, x)
    y = affine.scale * x + affine.shift
    for place, kink in inside.items():
        near = np.abs(x - place) < 1e-9 * reach
        x[near], y[near] = place, kink
    return Edges(x, y, bool(inside), affine.kink_power != 0)


def _settle(
    affine: Affine, law: NormalizedLaw, angles: Array, reach: float, tolerance: float, slopes: bool
) -> Array | None:
    """Angles cut until two orders agree on one coordinate's integrands over the sphere of this reach; increasing."""
    angles = np.unique(angles)
    pending, settled, total = angles, [angles], 0.0
    low, high = pending[:-1], pending[1:]
    for _ in range(14):
        sums = []
        for order in ORDERS:
            u, w = legendre(order)
            theta = 0.5 * (low + high)[:, None] + 0.5 * (high - low)[:, None] * u
            x = reach * np.cos(theta)
            y = affine.scale * x + affine.shift
            rows = np.stack([affine.rise(y), affine.slope(y)] if slopes else [affine.rise(y)])
            rows = np.concatenate([rows, rows * x**3])
            weight = np.sin(theta) ** (law.batch_size - 3.0) * 0.5 * (high - low)[:, None] * w
            sums.append((rows * weight).sum(axis=2))
            size = (np.abs(rows) * weight).sum(axis=2)
        total = np.maximum(total, size.sum(axis=1))
        allowed = tolerance * np.maximum(total, 1e-300)
        bad = (np.abs(sums[1] - sums[0]) > 0.1 * allowed[:, None]).any(axis=0)
        if not bad.any() or affine.kink_power != 0:  # graded panels resolve fractional powers without cuts
            break
        middle = 0.5 * (low[bad] + high[bad])
        settled.append(middle)
        low, high = np.concatenate([low[bad], middle]), np.concatenate([middle, high[bad]])
        if sum(part.size for part in settled) > _MAX_PANELS:
            return None
    return np.sort(np.concatenate(settled))


def pair_series(
    affine: Affine,
    law: NormalizedLaw,
    wanted: tuple[tuple[int, int, int], ...],
    *,
    tolerance: float,
    checked: bool = True,
) -> PairSeries | None:
    """E s^(2p) f_i(x₁) f_j(x₂) for each (i, j, p), f = φ, xφ, x²φ, D, xD, x²D, x³D; p = −2 carries a factor eps.

    Each to `tolerance` relative to its Cauchy–Schwarz bound, or None where the series is too long for that. The error
    adds the difference of two orders in the angle and in the radius to the bound on the terms left out; without
    `checked` those differences are not taken.
    """
    second, envelope = _tabulated(law.batch_size)
    steep = affine.kink_power < 0
    decay = np.ones(_MAX_TERMS) if steep else 1.0 / np.arange(1.0, _MAX_TERMS + 1)
    enough, likely = (np.flatnonzero(tail < 0.5 * tolerance) for tail in (envelope, envelope * decay))
    if affine.activation.kinks and not likely.size:
        return None
    slopes = any(max(i, j) > 2 for i, j, _ in wanted)
    edges = find_edges(affine, law, tolerance=tolerance, slopes=slopes)
    simple = edges is not None and edges.moving and not edges.graded and edges.x.size < _FEW_EDGES
    if edges is None or (law.eps > 0 and simple):
        return None
    limit = int(enough[0]) + 1 if enough.size else _MAX_TERMS
    terms = int(likely[0]) + 1 if edges.moving else min(limit, _FIRST_TERMS)
    cuts, step = 1, 1.0
    while cuts <= 4 and step >= 0.25:
        finer = edges.cut(law.support, terms * cuts)
        sums = _Sums(affine, law, finer, wanted, second[:terms], float(envelope[terms - 1]), step)
        if sums.work() > (_MAX_GRADED_WORK if edges.graded else _MAX_WORK):
            return None
        values, left_out, scale = sums.evaluate(step, 1)
        if bool((left_out > tolerance * scale).any()):
            left = float((left_out / np.maximum(scale, 1e-300)).max())
            # a geometric series squares what it leaves when its terms double
            needed = 1.1 * terms * math.log(tolerance) / math.log(left) if left < 0.01 else 2.0 * terms
            if terms == limit or needed > 1.5 * limit:
                return None
            terms = min(max(int(needed), terms + 8), limit)
            continue
        if not checked:
            return PairSeries(values, left_out, scale)
        in_angle = np.abs(values - sums.evaluate(step, 0)[0])
        in_radius = np.abs(values - sums.evaluate(1.3 * step, 1)[0]) if law.eps > 0 else np.zeros_like(values)
        bad_angle = bool((in_angle > 30 * tolerance * scale).any())
        bad_radius = bool((in_radius > (3 * tolerance) ** (1 / 1.3) * scale).any())
        if not (bad_angle or bad_radius):
            # the trapezoid rule's error is exp(−c/step) or less: a step 1.3 times shorter raises it to the power 1.3
            in_radius = 3 * scale * (in_radius / np.maximum(scale, 1e-300)) ** 1.3
            return PairSeries(values, in_angle + in_radius + left_out + 1e-15 * scale, scale)
        cuts, step = cuts * (1 + bad_angle), step * (0.5 if bad_radius else 1.0)
    return None


@dataclass(frozen=True)
class _Sums:
    """One choice of panels and terms; `evaluate` takes the step in the radius and which of two orders in the angle."""

    affine: Affine
    law: NormalizedLaw
    edges: Edges
    wanted: tuple[tuple[int, int, int], ...]
    second: Array
    envelope: float
    step: float

    def orders(self) -> tuple[int, int]:
        return _GRADED_ORDERS if self.edges.graded else ORDERS

    def work(self) -> float:
        """About how many nanoseconds one evaluation takes."""
        nodes = (self.edges.x.size - 1) * self.orders()[1] * radial_rule(self.law, self.step)[0].size
        rows = 2 if self.slopes() else 1
        return float(nodes * (rows * (60.0 + 0.5 * self.second.size) + 5.0 * self.second.size * self.edges.moving))

    def slopes(self) -> bool:
        return any(max(i, j) > 2 for i, j, _ in self.wanted)

    def evaluate(self, step: float, angular: int) -> tuple[Array, Array, Array]:
        """Values, the bound on the terms left out, and the Cauchy–Schwarz scale of each."""
        size, eps, mu = self.law.batch_size, self.law.eps, self.law.mu
        radius, square, chance = radial_rule(self.law, step)
        cosine, y, weight = self._nodes(radius, self.orders()[angular])
        rows = np.stack([self.affine.rise(y), self.affine.slope(y)] if self.slopes() else [self.affine.rise(y)])
        if not np.isfinite(rows).all():
            raise NumericalError(f"{self.affine.activation.name} or its derivative is not finite on the batch")
        weighted = rows * weight
        coefficients, norms = self._raised(weighted, rows, cosine, radius)
        rest = np.sqrt(np.maximum(norms - (coefficients**2).sum(axis=2), 0.0))
        norms = np.sqrt(norms)
        found = np.zeros((3, len(self.wanted)))
        for column, (i, j, p) in enumerate(self.wanted):
            if eps == 0:
                factor = {1: mu * (size - 1.0) / size, 0: 1.0, -1: size / (mu * (size - 3.0)), -2: 0.0}[p] * chance
            else:
                factor = square ** float(p) * chance * (eps if p == -2 else 1.0)
            found[0, column] = factor @ ((coefficients[i] * coefficients[j]) @ self.second)
            found[1, column] = self.envelope * float(factor @ (rest[i] * rest[j]))
            found[2, column] = factor @ (norms[i] * norms[j])
        return found[0], found[1], found[2]

    def _raised(self, weighted: Array, rows: Array, cosine: Array, radius: Array) -> tuple[Array, Array]:
        """Coefficients (7, radii, terms) and squared norms (7, radii) of φ, xφ, x²φ, D, xD, x²D, x³D; or of φ alone.

        t p_k = step_{k+1} p_{k+1} + step_k p_{k−1} multiplies a series by t, so that only φ and D are integrated.
        """
        terms = self.second.size
        found, step = self._coefficients(weighted, cosine, terms + 3)
        square = cosine * cosine
        powers = np.stack([np.ones_like(square), square, square * square, square**3], axis=2)
        if cosine.shape[0] == 1:
            norms = (weighted * rows) @ powers[0]
        else:
            norms = np.einsum("fmn,mnp->fmp", weighted * rows, powers)
        reach = self.law.support * radius
        lists, sizes = [], []
        for row, highest in zip(range(len(rows)), (2, 3), strict=False):
            current = found[row]
            for power in range(highest + 1 if self.slopes() else 1):
                lists.append(current[:, :terms])
                sizes.append(norms[row, :, power] * reach ** (2 * power))
                padded = np.pad(current, ((0, 0), (1, 1)))
                kept = current.shape[1] - 1
                current = reach[:, None] * (
                    step[:kept] * padded[:, 2 : kept + 2] + _shifted(step, kept) * padded[:, :kept]
                )
        return np.stack(lists), np.stack(sizes)

    def _nodes(self, radius: Array, order: int) -> tuple[Array, Array, Array]:
        """t, y and probability weights, (radii, nodes); t and the weights have one row where no kink moves.

        y is measured from the nearer edge of its panel, so that the distance from a kink keeps its digits.
        """
        reach, size, affine = self.law.support, self.law.batch_size, self.affine
        u, w = legendre(order)
        place, share = 0.5 + 0.5 * u, 0.5 * w
        back = 1.0 - place
        if self.edges.graded:
            share = share * (place * back) ** (_GRADING - 1) / beta(_GRADING, _GRADING)
            place, back = betainc(_GRADING, _GRADING, place), betainc(_GRADING, _GRADING, back)
        span = reach * (radius[:, None] if self.edges.moving else radius.max())
        ratio = self.edges.x[::-1] / span
        if not self.edges.moving:
            ratio = self._reach_out(ratio, radius)
        angle = np.atleast_2d(np.arccos(np.clip(ratio, -1.0, 1.0)))
        low, width = angle[:, :-1, None], np.diff(angle, axis=1)[:, :, None]
        theta = low + width * place
        weight = width * share * np.sin(theta) ** (size - 3.0) * half_gamma_ratio(0.5 * size - 1.0) / math.sqrt(math.pi)
        shape = (angle.shape[0], -1)
        cosine = np.cos(theta)
        if not self.edges.moving:
            flat = cosine.reshape(shape)
            return flat, affine.scale * reach * radius[:, None] * flat + affine.shift, weight.reshape(shape)
        at = np.where(
            np.abs(ratio) < 1.0, self.edges.y[::-1], affine.scale * span * np.clip(ratio, -1, 1) + affine.shift
        )
        high = angle[:, 1:, None]
        from_low = -2 * np.sin(low + 0.5 * width * place) * np.sin(0.5 * width * place)
        from_high = 2 * np.sin(high - 0.5 * width * back) * np.sin(0.5 * width * back)
        stretch = affine.scale * span[:, :, None]
        y = np.where(place < 0.5, at[:, :-1, None] + stretch * from_low, at[:, 1:, None] + stretch * from_high)
        return cosine.reshape(shape), y.reshape(shape), weight.reshape(shape)

    def _reach_out(self, ratio: Array, radius: Array) -> Array:
        """Edges in t that at the largest radius are those in x, continued to where x ends at the smallest."""
        end = min(1.0, float(ratio[0]) * float(radius.max() / radius.min()))
        if end <= ratio[0]:
            return ratio
        extra = np.linspace(math.acos(end), math.acos(float(ratio[0])), 2 + int((end - ratio[0]) / 0.1))[:-1]
        return np.concatenate([np.cos(extra), ratio, -np.cos(extra[::-1])])

    def _coefficients(self, weighted: Array, cosine: Array, terms: int) -> tuple[Array, Array]:
        """f_k of each row at each radius, (rows, radii, terms), and the recurrence's steps."""
        index = 0.5 * (self.law.batch_size - 3.0)
        k = np.arange(1.0, terms + 1.0)
        step = np.sqrt(k * (k + 2 * index - 1) / (4 * (k + index) * (k + index - 1)))
        found = np.empty((*weighted.shape[:2], terms))
        earlier, current = np.zeros_like(cosine), np.ones_like(cosine)
        block: list[Array] = []
        for degree in range(terms):
            block.append(current)
            if len(block) == 16 or degree == terms - 1:
                columns = slice(degree + 1 - len(block), degree + 1)
                basis = np.stack(block)
                if cosine.shape[0] == 1:
                    found[:, :, columns] = weighted @ basis[:, 0].T
                else:
                    found[:, :, columns] = (weighted.transpose(1, 0, 2) @ basis.transpose(1, 2, 0)).transpose(1, 0, 2)
                block = []
            back = step[degree - 1] if degree else 0.0
            earlier, current = current, (cosine * current - back * earlier) / step[degree]
        return found, step


def _shifted(step: Array, size: int) -> Array:
    """step_{k−1} with step_{−1} = 0."""
    return np.concatenate([[0.0], step[: size - 1]])
