"""Coordinates of a normalized Gaussian vector with any covariance: their densities, and means over them.

Let u = Gh ~ N(0, S) and x = √B·w with w = u/√(|u|² + b), b = B·eps: a batch-normalized neuron. Let v be the coordinates
of u along one or two orthonormal directions. With C(s) their block of S(I + 2sS)^−1 and D(s) = det(I + 2sS)^(−1/2),
E[e^(−s|u|²)] at given v is D(s)·N(v; 0, C(s)). Inverting this Laplace transform in |u|² and integrating |u|² + b out at
fixed z = v/√(|u|² + b) leaves one integral along a vertical line, q = zᵀC(s)^−1 z and κ = q/2 − s:

    two coordinates  p(z) = (1/2πi) ∫ ds D(s)/(2π √det C(s)) e^(−bq/2) (1/κ² + b/κ)
    one coordinate   p(z) = (1/2πi) ∫ ds D(s)/√(2πC(s)) e^(−bq/2) (√b/κ + √π/2 κ^(−3/2) erfcx √(bκ))

With S^−1 = Λ in blocks, C(s)^−1 = 2s + K(s), K(s) = Λ₁₁ − Λ₁₂(Λ₂₂ + 2s)^−1Λ₂₁, so κ = −s(1−|z|²) + zᵀK(s)z/2. Every
zero of κ is real: at a complex one its real and imaginary part contradict each other. So the line may cross the real
axis anywhere between the branch point −1/(2λ_max) and the first zero, and bend to the right, where e^(−bq/2) decays. On
s = −c + c(i sinh y cos δ + (cosh y − 1) sin δ) the trapezoid rule converges geometrically: the integrand is analytic in
the strip where δ + Im y stays within ±π/2, and with b > 0 it grows to the left of the imaginary axis, so that within
(0, π/2) is what counts. How far up the nodes are needed depends on 1 − |z|², so places are summed in that order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import wofz

from sounding.activations import Activation
from sounding.activations.activation import Array
from sounding.errors import NumericalError
from sounding.theory.integrals.cells import Goal, Plane, Points
from sounding.theory.integrals.means import pair_means
from sounding.theory.integrals.panels import integrate, interval

Complex = NDArray[np.complex128]
_CROSSING = 0.25  # where the line crosses the real axis: half way to the branch point at −1/2 in units of the trace
# δ and the step in y, for eps = 0 and eps > 0: 1e-13 of the largest density
_PATHS = ((math.pi / 8, 0.2), (math.pi / 4, 0.14))
_CHUNK = 8_000  # places times nodes at once, which caches hold
_NEGLIGIBLE = 1e-17  # of the largest term of a sum
_FLAT = 1e-9  # a coordinate, or a sine between two, that counts as 0: the pair is then one coordinate


@dataclass(frozen=True)
class ProjectedLaw:
    """The law of a batch-normalized neuron at any covariance of the batch, in units in which tr S = 1."""

    points: Complex  # the nodes s of the contour's upper half
    weights: Complex  # ds·D(s)/π
    precisions: Array  # the eigenvalues of S^−1 on its range
    rows: Array  # (B, rank): the samples in that eigenbasis
    excess: float  # b

    @classmethod
    def of(cls, centred: Array, eps: float) -> ProjectedLaw:
        """The law for S = GΣG, of rank one at least."""
        values, vectors = np.linalg.eigh(centred)
        kept = values > 1e-12 * values[-1]  # centring alone leaves one direction at rounding
        values, vectors = values[kept], vectors[:, kept]
        unit = float(values.sum())
        values = values / unit
        bend, step = _PATHS[eps > 0]
        # the terms fall like (s(1 − |z|²))^(−rank/2), and few directions leave mass where 1 − |z|² is 1e-10
        last = math.log(8.0 / (_CROSSING * float(values[0]))) + 160.0 / values.size
        y = step * np.arange(0.0, math.ceil(last / step) + 1.0)
        turn = 1j * np.sinh(y) * math.cos(bend) + (np.cosh(y) - 1) * math.sin(bend)
        slope = 1j * np.cosh(y) * math.cos(bend) + np.sinh(y) * math.sin(bend)
        s = _CROSSING * (turn - 1.0)
        share = np.where(y == 0, 0.5 * step, step) * _CROSSING / math.pi
        determinant = np.exp(-0.5 * np.log(1.0 + 2.0 * s[:, None] * values).sum(axis=1))
        return cls(s, slope * share * determinant, 1.0 / values, vectors, len(centred) * eps / unit)

    def section(self, directions: Array) -> Section:
        """The law of the coordinates along orthonormal directions, (rank, 1 or 2)."""
        rank, count = directions.shape
        basis = np.linalg.qr(np.concatenate([directions, np.eye(rank)], axis=1))[0][:, :rank]
        basis[:, :count] = directions
        whole = basis.T @ (self.precisions[:, None] * basis)
        levels, turn = np.linalg.eigh(whole[count:, count:])
        mixed = whole[:count, count:] @ turn
        shrunk = 1.0 / (levels + 2.0 * self.points[:, None])
        bent = whole[:count, :count] - np.einsum("ak,sk,bk->sab", mixed, shrunk, mixed, optimize=True)
        return Section(self.points, self.weights, bent, self.excess)

    def spread(self, direction: Array) -> float:
        """About the standard deviation of one coordinate."""
        return math.sqrt(float((direction**2 / self.precisions).sum()) / (1.0 + self.excess))


@dataclass(frozen=True)
class Section:
    """One or two orthonormal coordinates of the law: K(s) at the contour's nodes, (nodes, 1 or 2, 1 or 2)."""

    points: Complex
    weights: Complex
    bent: Complex
    excess: float

    def line(self, z: Array, rest: Array) -> Array:
        """The density of one coordinate at z, with rest = 1 − z² given apart: next to the end it has the digits."""
        s, bent = self.points[:, None], self.bent[:, 0]
        front = self.weights * np.sqrt((bent[:, 0] + 2 * self.points) / (2 * math.pi))

        def total(part: Array, nodes: int) -> Array:
            kappa = 0.5 * bent[:nodes] * part[0] ** 2 - s[:nodes] * part[1]
            if self.excess == 0:
                return np.asarray(front[:nodes] @ (0.5 * math.sqrt(math.pi) * kappa**-1.5)).imag
            tail = math.sqrt(self.excess) / kappa
            tail = tail + 0.5 * math.sqrt(math.pi) * kappa**-1.5 * wofz(1j * np.sqrt(self.excess * kappa))
            return np.asarray(front[:nodes] @ (np.exp(-self.excess * (kappa + s[:nodes])) * tail)).imag

        return self._summed(total, front, np.stack([z, rest]))

    def plane(self, first: Array, second: Array, rest: Array) -> Array:
        """The joint density of two coordinates, with rest = 1 − |z|² given apart."""
        # in real and imaginary parts: every number of a batch's map passes here, and complex division and exponential
        # take several times as long
        s, b = self.points, self.excess
        first_own, mixed, second_own = (self.bent[:, k, m] for k, m in ((0, 0), (0, 1), (1, 1)))
        front = self.weights * np.sqrt((first_own + 2 * s) * (second_own + 2 * s) - mixed**2) / (2 * math.pi)
        form = np.stack([0.5 * first_own, mixed, 0.5 * second_own, -s], axis=1)
        form_real, form_imag = np.ascontiguousarray(form.real), np.ascontiguousarray(form.imag)

        def total(part: Array, nodes: int) -> Array:
            u, v, left = part
            squares = np.stack([u * u, u * v, v * v, left])
            real, imag = form_real[:nodes] @ squares, form_imag[:nodes] @ squares
            size = 1.0 / (real * real + imag * imag)
            upper, lower = real * size, -imag * size
            top, bottom = upper * (upper + b) - lower * lower, lower * (2 * upper + b)
            if b > 0:
                decay = np.exp(-b * (real + s.real[:nodes, None]))
                phase = b * (imag + s.imag[:nodes, None])
                cosine, sine = decay * np.cos(phase), decay * -np.sin(phase)
                top, bottom = top * cosine - bottom * sine, top * sine + bottom * cosine
            return np.asarray(front.real[:nodes] @ bottom + front.imag[:nodes] @ top)

        return self._summed(total, front, np.stack([first, second, rest]))

    def _summed(self, total: Callable[[Array, int], Array], front: Complex, places: Array) -> Array:
        """The sum over nodes at each place, (coordinates and 1 − |z|², n), in the order of 1 − |z|²."""
        order = np.argsort(places[-1], kind="stable")
        found = np.empty(order.size)
        start = 0
        while start < order.size:
            nodes = self._needed(front, places[-1, order[start : start + 1]])
            chosen = order[start : start + max(64, _CHUNK // nodes)]
            nodes = self._needed(front, places[-1, chosen[np.linspace(0, chosen.size - 1, 5).astype(int)]])
            found[chosen] = total(places[:, chosen], nodes)
            start += chosen.size
        return found

    def _needed(self, front: Complex, rest: Array) -> int:
        """How many nodes matter at places with these 1 − |z|², from |κ| ≈ |s|(1 − |z|²) + |z|²."""
        square = 1.0 - rest
        kappa = np.abs(self.points)[:, None] * rest + square
        terms = np.abs(front)[:, None] / kappa * (1.0 / kappa + self.excess)
        if self.excess > 0:
            terms = terms * np.exp(-self.excess * square * np.maximum(self.points.real, 0.0)[:, None])
        matter = (terms > _NEGLIGIBLE * terms.max(axis=0)).any(axis=1)
        return int(np.flatnonzero(matter)[-1]) + 1


def projected_map(
    activation: Activation, centred: Array, *, eps: float, tolerance: float = 1e-11
) -> tuple[Array, Array]:
    """E[φ(x)φ(x)ᵀ] and a bound on its error, (B, B) each, for x of the law above; any activation, any covariance."""
    # B(B−1)/2 double integrals of some 20 ms at eps = 0, longer with eps > 0; the density is integrated along with
    # them, and what it misses of 1 counts as error
    size, law = len(centred), ProjectedLaw.of(centred, eps)
    mapped, error = np.zeros((size, size)), np.zeros((size, size))
    ends = np.linalg.norm(law.rows, axis=1)
    for i in range(size):
        for j in range(i, size):
            cosine = float(law.rows[i] @ law.rows[j] / (ends[i] * ends[j])) if min(ends[i], ends[j]) > _FLAT else 1.0
            if i == j or abs(cosine) > 1.0 - _FLAT:
                mapped[i, j], error[i, j] = _along_line(activation, law, (i, j), cosine, tolerance)
            else:
                mapped[i, j], error[i, j] = _over_plane(activation, law, (i, j), cosine, tolerance)
            mapped[j, i], error[j, i] = mapped[i, j], error[i, j]
    return mapped, error


def _along_line(
    phi: Activation, law: ProjectedLaw, pair: tuple[int, int], cosine: float, tolerance: float
) -> tuple[float, float]:
    """E φ(x_i)φ(x_j) where one coordinate gives the other: x_j = ±x_i·ends_j/ends_i."""
    i, j = sorted(pair, key=lambda k: -float(np.linalg.norm(law.rows[k])))
    reach, other = (math.sqrt(len(law.rows)) * float(np.linalg.norm(law.rows[k])) for k in (i, j))
    if reach <= _FLAT:
        level = float(phi(np.zeros(1))[0]) ** 2
        return level, 1e-15 * level
    direction = law.rows[i] / np.linalg.norm(law.rows[i])
    section, spread = law.section(direction[:, None]), law.spread(direction)
    scales = (reach, math.copysign(other, cosine))
    lines = [kink / scale for kink in phi.kinks for scale in scales if abs(scale) > abs(kink)]
    soft = [sign * edge * spread for edge in (1.0, 2.0, 4.0, 6.5, 9.5, 13.0) for sign in (1, -1)]

    def integrand(angle: Array) -> Array:
        z, cosines = np.sin(angle), np.cos(angle)
        density = section.line(z, cosines**2) * cosines
        return np.stack([density, phi(scales[0] * z) * phi(scales[1] * z) * density])

    kinks, edges = ([math.asin(z) for z in some if abs(z) < 1] for some in (lines, soft))
    panels = interval(-0.5 * math.pi, 0.5 * math.pi, kinks=kinks, edges=[0.0, *edges])
    found = integrate(integrand, panels, tolerance=tolerance, what=f"activation {phi.name!r}")
    return _checked(phi, found.values, found.errors)


def _over_plane(
    phi: Activation, law: ProjectedLaw, pair: tuple[int, int], cosine: float, tolerance: float
) -> tuple[float, float]:
    """E φ(x_i)φ(x_j) over x_i = reach_i sin χ cos ψ, x_j = reach_j sin χ cos(ψ − ω), cos ω = `cosine`."""
    angle, sine = math.acos(cosine), math.sqrt(1.0 - cosine**2)
    reach = [math.sqrt(len(law.rows)) * float(np.linalg.norm(law.rows[k])) for k in pair]
    along = law.rows[pair[0]] / np.linalg.norm(law.rows[pair[0]])
    across = law.rows[pair[1]] - (law.rows[pair[1]] @ along) * along
    across = across / np.linalg.norm(across)
    section = law.section(np.stack([along, across], axis=1))

    def integrand(at: Points) -> Array:
        across = (at.second - cosine * at.first) / sine
        density = 2 * math.pi * section.plane(at.first, across, np.cos(at.radial) ** 2)
        return np.stack([density, phi(reach[0] * at.first) * phi(reach[1] * at.second) * density])

    spreads = [law.spread(direction) for direction in (along, cosine * along + sine * across)]
    lines = []
    for scale, spread in zip(reach, spreads, strict=True):
        line = [kink / scale for kink in phi.kinks]
        if phi.length < 0.7 * scale * min(1.0, 3 * spread):
            line.append(phi.center / scale)
        lines.append(line)
    found = pair_means(
        integrand,
        Plane(2.0, angle, (lines[0], lines[1]), spread=min(max(spreads), 1.0)),
        goal=Goal(tolerance, what=f"activation {phi.name!r}"),
        weight=lambda chi: np.sin(chi) * np.cos(chi),
        rows=(0, 1),
    )
    return _checked(phi, found.values, found.errors)


def _checked(phi: Activation, values: Array, errors: Array) -> tuple[float, float]:
    """The mean, and its error with what the density misses of 1."""
    missing = abs(float(values[0]) - 1.0)
    if missing > 1e-4 or not np.isfinite(values).all():
        raise NumericalError(
            f"the density of a batch-normalized pair came out with mass {values[0]:.6g} for {phi.name}",
            hint="method='sampled'",
            state=float(values[0]),
        )
    return float(values[1]), float(errors[1] + missing * max(abs(float(values[1])), 1e-300) + 1e-15)
