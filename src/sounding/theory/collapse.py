"""Batch normalization with eps > 0: the fixed point of μ, and the collapsed phase in which μ goes to 0.

The law of x depends on μ and eps through η = μ/eps alone. With F(η) = E φ(x₁)² − E φ(x₁)φ(x₂), a positive fixed point
μ = F(μ/eps) exists exactly when eps = F(η)/η for some η > 0, so the critical eps is the largest value of F(η)/η.
Where it is approached as η → 0 the transition is continuous and the critical eps is that of linear stability; where it
is attained at a positive η, the fixed point disappears at a finite μ.

Near η = 0 the activation is its two one-sided slopes at the shift, a to the right and b to the left, and everything is
the closed form of a leaky ReLU under N(0, μG) divided by √eps: all rates are constants over eps. A smooth activation
has a = b = φ′(β), and the constant is φ′(β)².
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from sounding.errors import NumericalError
from sounding.theory.eigenvalues import Eigenvalues, backward_eigenvalues
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.arc_cosine import arc_cosine
from sounding.theory.integrals.moments import Expectations, LineMoments, PairMoments
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.powers import kernel
from sounding.theory.integrals.sketch import Sketch

# the η = μ/eps at which a scan for fixed points ends: below the first μ has seven digits less than eps and a batch is
# collapsed for every purpose; below the second no activation of the bench has a jump that leaves one
_LOWEST_RATIO, _LOWEST_JUMP = 1e-7, 1e-3
_LOWEST_POWER = 1e-140  # the same for a power below 1, which never collapses: squares of μ are still numbers
_SCANNED, _NEAR = 0.25, 1e-3  # steps in ln η: of the scan, wide of any two roots seen, and for a slope
# what a first step of Newton's method may leave of ln η, and a later one, and how many there are
_TRUSTED, _GOOD, _MOST_STEPS = 5e-10, 1e-8, 4


@dataclass(frozen=True)
class CollapseRates:
    """The eigenvalues of the collapsed phase times eps: forward, backward and cross-batch."""

    forward: Eigenvalues
    backward: Eigenvalues
    cross: float


def one_sided_slopes(affine: Affine) -> tuple[float, float]:
    """dφ/dx just right and just left of x = 0; equal where φ is smooth, infinite at a kink like √x."""
    phi, beta = affine.activation, affine.shift
    if not any(abs(kink - beta) < 1e-9 * max(1.0, abs(beta)) for kink in phi.kinks):
        slope = float(affine.slope(np.array([beta]))[0])
        return slope, slope
    sides = []
    for sign in (math.copysign(1.0, affine.scale), -math.copysign(1.0, affine.scale)):
        step = 1e-6 * max(1.0, abs(beta))
        near, far, next_to = (
            float(affine.slope(np.array([beta + sign * h]))[0]) for h in (step, 2 * step, 1e-3 * step)
        )
        # a power at the kink changes by 1000^(p − 1) over three decades, a smooth side by its curvature times 1e-6
        if abs(next_to) > 1.02 * abs(near) + 1e-12:
            sides.append(math.inf)
        elif abs(next_to) < 0.98 * abs(near) - 1e-12:
            sides.append(0.0)
        else:
            sides.append(2 * near - far)
    return sides[0], sides[1]


def require_slope(affine: Affine) -> None:
    """Raise where φ has no slope at x = 0 though differences give one, as for x sin(1/x), whose is 0 by symmetry."""
    phi, beta = affine.activation, affine.shift
    slopes = [slope / affine.scale for slope in one_sided_slopes(affine)]
    if phi.derivative_error == 0 or slopes[0] != slopes[1]:
        return
    steps = np.outer([1e-7, 1.7e-7, 2.9e-7, -1e-7, -1.7e-7, -2.9e-7], [1.0, 2.0]) * max(1.0, abs(beta))
    quotients = affine.rise(beta + steps) / steps
    found = 2 * quotients[:, 0] - quotients[:, 1]
    noise = 1e-7 * (1.0 + abs(affine.level)) + 1e-2 * max(abs(slopes[0]), float(np.abs(found).max()))
    if float(np.abs(found - slopes[0]).max()) > noise:
        raise NumericalError(
            f"{phi.name} varies too fast at x = {beta:g}, to which the batch collapses: it has no slope there",
            hint="another shift",
        )


def collapse_rates(affine: Affine, batch_size: float) -> CollapseRates:
    """The linear rates at μ = 0 times eps; infinite where a one-sided slope is.

    With ρ₀ = −1/(B−1) and J of degree 1: forward G = (B−1)/B·(J_φ(1) − J_φ(ρ₀))/2, M = E DD, L = (1−2/B)(E D² − w) +
    (2/B)E DD with w = (a−b)²√(1−ρ₀²)/2π; backward with A = GDG/√eps.
    """
    a, b = one_sided_slopes(affine)
    if math.isinf(a) or math.isinf(b):
        endless = Eigenvalues(math.inf, math.inf, math.inf)
        return CollapseRates(endless, endless, math.inf)
    share = 0.0 if math.isinf(batch_size) else 1.0 / batch_size
    rho = 0.0 if share == 0 else -1.0 / (batch_size - 1.0)
    same, opposite = arc_cosine(rho, degree=0.0), arc_cosine(-rho, degree=0.0)
    square = 0.5 * (a * a + b * b)
    both = square * same + a * b * opposite
    gap = 0.5 * (kernel(1.0, degree=1.0, slopes=(a, b)) - kernel(rho, degree=1.0, slopes=(a, b)))
    bend = (a - b) ** 2 * math.sqrt(1 - rho * rho) / (2 * math.pi)
    forward = Eigenvalues(G=(1 - share) * gap, L=(1 - 2 * share) * (square - bend) + 2 * share * both, M=both)
    return CollapseRates(forward, _backward(square, both, batch_size), (0.5 * (a + b)) ** 2)


def _backward(square: float, both: float, batch_size: float) -> Eigenvalues:
    """Backward eigenvalues of A = GDG for D with E D² = `square` and E DD = `both`: those of x = 0, where s = 1."""
    if math.isinf(batch_size):
        return Eigenvalues(square, square, both)
    line = replace(LineMoments(*[0.0] * 9), r2_slope2=square)
    return backward_eigenvalues(line, replace(PairMoments(*[0.0] * 10), r2_slopes=both), batch_size=batch_size)


def solve_spread(expectations: Expectations, eps: float) -> float:
    """The largest fixed point μ = F(μ/eps), eps > 0, or 0 where none is positive."""
    # The root is the one reached from above, from inputs of large variance. A sketch of F, on circles that serve every
    # η, is scanned downwards until it crosses; the crossing is refined with F itself, unless the sketch is exact. The
    # scan ends at η = 1e-7, or at 1e-3 where μ = 0 is stable and only a jump could leave a fixed point above it. Where
    # φ has an infinite slope at 0, as a power below 1, F(η)/η grows without bound as η → 0 and there always is a root.
    rough, highest, exact = _rough_map(expectations)
    if not 0 < highest < math.inf:
        return max(highest, 0.0)

    def excess(log_ratio: float) -> float:
        value = rough(NormalizedLaw(expectations.batch_size, math.exp(log_ratio), 1.0))
        return math.log(max(value, 1e-300)) - log_ratio - math.log(eps)

    high = math.log(highest / eps) + 1e-9  # a hair above the bound, which a root may touch
    rate = collapse_rates(expectations.affine, expectations.batch_size).forward.G
    bottom = math.log(_LOWEST_RATIO if eps < rate else _LOWEST_JUMP)
    while high > bottom:
        low = high - _SCANNED
        if excess(low) >= 0:
            root = brentq(excess, low, high, xtol=1e-13)
            slope = (excess(root + _NEAR) - excess(root - _NEAR)) / (2 * _NEAR)
            return eps * math.exp(root if exact else _polish(expectations, eps, root, slope))
        high = low
    if math.isinf(rate) and excess(math.log(_LOWEST_POWER)) > 0:
        return eps * math.exp(brentq(excess, math.log(_LOWEST_POWER), high, xtol=1e-13))
    return 0.0


def _rough_map(expectations: Expectations) -> tuple[Callable[[NormalizedLaw], float], float, bool]:
    """F to some digits, a bound on it, and whether its digits are all that there are."""
    affine, size = expectations.affine, expectations.batch_size
    if math.isinf(size) or affine.power is not None or math.isinf(max(map(abs, one_sided_slopes(affine)))):
        laws = [NormalizedLaw(size, 10.0**power, 1.0) for power in np.arange(-3.0, 4.0)]
        highest = max(expectations.spread(law)[0] for law in [*laws, NormalizedLaw(size, 1.0, 0.0)])
        return lambda law: expectations.spread(law)[0], 1.2 * highest, True
    sketch = Sketch.of(affine, size)
    return sketch.spread, float(sketch.means.max()), sketch.resolved  # no F exceeds the largest mean over a circle


def _polish(expectations: Expectations, eps: float, root: float, slope: float) -> float:
    """The root of F itself next to that of its sketch, whose slope serves until there are two values of F."""
    step = before = math.nan
    for attempt in range(_MOST_STEPS):
        law = NormalizedLaw(expectations.batch_size, math.exp(root), 1.0)
        value, error = expectations.spread(law, checked=False)
        off = math.log(max(value, 1e-300)) - root - math.log(eps)
        if math.isfinite(step):
            slope = (off - before) / step  # the sketch's slope is off by about as much as its root
        last, step, before = step, -off / slope, off
        root += step
        # what a step leaves: its square, and less where F hardly depends on η; or rounding, where steps stop to shrink
        left = 5.0 * step**2 * min(1.0, 3.0 * abs(1.0 + slope))
        enough = _TRUSTED if attempt == 0 else _GOOD
        if left < enough or abs(step) * value < error or abs(step) > 0.5 * abs(last):
            break
    return root


@dataclass(frozen=True)
class CriticalEps:
    """Where the batch collapses to a point as eps grows, and what the gradient does there."""

    collapse: float  # the largest eps with a positive fixed point; infinite for a kink steeper than linear
    continuous: bool  # whether μ goes to 0 there, rather than jump
    linear: float  # the eps above which μ = 0 is stable against small perturbations
    # the eps at which gradients neither grow nor vanish in the collapsed phase, where growth is unit_growth/eps
    unit_growth: float


def find_critical_eps(expectations: Expectations) -> CriticalEps:
    """The critical eps of an activation: max over η of F(η)/η, its linear value, and the collapsed growth times eps."""
    batch_size = expectations.batch_size
    rates = collapse_rates(expectations.affine, batch_size)
    linear = rates.forward.G
    if math.isinf(linear):
        return CriticalEps(math.inf, True, math.inf, math.inf)

    rough, _, _ = _rough_map(expectations)

    def ratio(log_eta: float) -> float:
        eta = math.exp(log_eta)
        return expectations.spread(NormalizedLaw(batch_size, eta, 1.0), tolerance=1e-11)[0] / eta

    grid = np.linspace(math.log(1e-4), math.log(1e3), 33)
    sketched = [rough(NormalizedLaw(batch_size, math.exp(point), 1.0)) / math.exp(point) for point in grid]
    # the sketch finds the place, but may be off by more than what decides
    values = {int(place): ratio(float(grid[place])) for place in np.argsort(sketched)[-3:]}
    best = max(values, key=lambda place: values[place])
    if best == 0 or values[best] <= linear * (1 + 1e-9):
        return CriticalEps(linear, True, linear, rates.backward.G)
    bounds = (float(grid[best - 1]), float(grid[min(best + 1, grid.size - 1)]))
    found = minimize_scalar(lambda point: -ratio(point), bounds=bounds, method="bounded", options={"xatol": 1e-8})
    return CriticalEps(float(-found.fun), False, linear, rates.backward.G)
