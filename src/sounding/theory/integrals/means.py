"""Means over a line and over two coordinates in blocks of the range: the engine under `quadrature`.

Blocks of the range are added outwards while they matter, so that a growing integrand is followed as far as its mean
needs, and one without a mean is found out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from sounding.activations.activation import Array
from sounding.errors import NumericalError, UsageError
from sounding.theory.integrals.cells import AdaptedCells, Goal, PairFunction, Plane, Radial, Rings, integrate_cells
from sounding.theory.integrals.panels import SOFT_EDGES, Adapted, Panels, end_panel, integrate, interval

Function = Callable[[Array], Array]
Outcome = TypeVar("Outcome", Adapted, AdaptedCells)

# beyond 38 standard deviations the Gaussian density underflows; an integrand that still matters there has no mean
_BLOCKS = (13.0, 16.0, 20.0, 24.0, 28.0, 33.0, 38.0)


@dataclass(frozen=True)
class Line:
    """One coordinate y = mean + std·z with the density of z on |z| < support, and what is known of f(y)."""

    density: Function
    support: float
    mean: float
    std: float
    kinks: Sequence[float]  # where f is not smooth
    length: float  # over which it varies
    center: float  # around which it does


def line_means(f: Function, line: Line, *, tolerance: float, what: str = "the integrand") -> Adapted:
    """∫ f(y) density(z) dz over a line, for f: (n,) → (m, n)."""
    # the panels lie in y, so that a kink at 0 is approached without rounding
    mean, std, support, kinks = line.mean, line.std, line.support, line.kinks
    length, center = line.length, line.center
    if not (math.isfinite(mean) and math.isfinite(length) and length > 0 and math.isfinite(center)):
        raise UsageError(f"mean, length and center must be finite, length positive, got {mean}, {length}, {center}")
    scale = abs(std)
    soft = [mean + sign * edge * scale for edge in (*SOFT_EDGES, *_BLOCKS) for sign in (1, -1)]
    if length < scale:
        soft += [center + sign * length * 3.0**step for step in range(12) for sign in (1, -1)] + [center]

    def integrand(y: Array) -> Array:
        return np.atleast_2d(f(y)) * (line.density((y - mean) / std) / scale)

    def add(inner: float, outer: float, beside: Array | float) -> Adapted:
        shells = [(-outer, -inner), (inner, outer)] if inner else [(-outer, outer)]
        pieces = [_piece(mean, scale, a, b, support, kinks, soft) for a, b in shells]
        return integrate(integrand, Panels.join(pieces), tolerance=tolerance, beside=beside, what=what)

    blocks = _outwards(add, support, tolerance, what)
    sums = np.sum([(block.values, block.errors, block.magnitudes) for block in blocks], axis=0)
    return Adapted(sums[0], sums[1], sums[2], sum(block.evaluations for block in blocks))


def pair_means(
    f: PairFunction, plane: Plane, *, goal: Goal, weight: Function | None = None, rows: tuple[int, ...] = (0,)
) -> AdaptedCells:
    """(1/2π) ∫∫ weight(v) f dψ dv for f returning (m, n), in blocks of the radius while they matter."""
    size, spread = plane.batch_size, plane.spread
    # the radial variable is the angle χ with T = √(B−1) sin χ on the sphere, and T itself for a Gaussian; the default
    # weight is the law of T: (B−3) cos^(B−4)χ sin χ, and T exp(−T²/2)
    radius, variable, default = radial_law(size)
    reach = math.sqrt(size - 1) if math.isfinite(size) else math.inf
    turns = math.pi if plane.symmetric else 2 * math.pi
    law = weight or default

    def add(inner: float, outer: float, beside: Array | float) -> AdaptedCells:
        # the end of the support itself, since the arcsine makes 1e-8 of a rounding there
        end = reach if outer >= reach / spread else outer * spread
        radial = Radial(variable(inner * spread), variable(end), radius, variable, lambda v: law(v) / turns, rows)
        return integrate_cells(f, radial, plane, goal, beside)

    results = _outwards(add, reach / spread, goal.tolerance, goal.what)
    rings, evaluations = Rings.join([result.rings for result in results]), sum(result.evaluations for result in results)
    return AdaptedCells.of(rings, lambda v: law(v) / turns, rows, evaluations=evaluations)


def _outwards(
    add: Callable[[float, float, Array | float], Outcome], support: float, tolerance: float, what: str
) -> list[Outcome]:
    """What `add` finds from block to block, in standard deviations, while it matters beside what lies farther in."""
    ends = [*(block for block in _BLOCKS if block < support), *([support] if support <= _BLOCKS[-1] else [])]
    found = [add(0.0, ends[0], 0.0)]
    share = np.ones(1)
    for inner, outer in pairwise(ends):
        beside = np.sum([earlier.magnitudes for earlier in found], axis=0)
        found.append(add(inner, outer, beside))
        share = found[-1].magnitudes / np.maximum(beside, 1e-300)
        if bool((share < 1e-17).all()):
            return found
    if math.isinf(support) and bool((share > tolerance).any()):
        raise NumericalError(f"the expectation of {what} does not exist: it grows faster than the Gaussian decays")
    return found


def radial_law(batch_size: float) -> tuple[Function, Callable[[float], float], Function]:
    """The radius as a function of the radial variable, its inverse, and the law's weight, for `pair_means`."""
    if math.isinf(batch_size):
        return lambda v: v, lambda radius: radius, lambda v: v * np.exp(-0.5 * v * v)
    reach = math.sqrt(batch_size - 1)
    return (
        lambda v: reach * np.sin(v),
        lambda radius: math.asin(min(radius / reach, 1.0)),
        lambda v: (batch_size - 3) * np.cos(v) ** (batch_size - 4) * np.sin(v),
    )


def _piece(
    mean: float, scale: float, low: float, high: float, support: float, kinks: Sequence[float], soft: Sequence[float]
) -> Panels:
    """One interval in y; where it reaches the end of the support, an end panel absorbs the density's square root."""
    a, b = mean + scale * low, mean + scale * high
    inside = [k for k in kinks if a < k < b]
    cap = 0.25 * (b - a)
    left = low <= -support
    right = high >= support
    parts = []
    start, stop = a, b
    if left:
        start = min([a + cap, *(0.5 * (a + k) for k in inside)])
        parts.append(end_panel(a, start))
    if right:
        stop = max([b - cap, *(0.5 * (b + k) for k in inside)])
        parts.append(end_panel(b, stop))
    return Panels.join([interval(start, stop, kinks=inside, edges=soft), *parts])
