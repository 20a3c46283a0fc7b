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
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from sounding.theory.affine import Affine
from sounding.theory.arc_cosine import arc_cosine
from sounding.theory.eigenvalues import Eigenvalues
from sounding.theory.homogeneous import kernel
from sounding.theory.moments import batch_spread
from sounding.theory.normalized import NormalizedLaw

_LOWEST_RATIO, _LOWEST_JUMP = 1e-7, 1e-3
_ROUGH = 1e-7


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
        if abs(next_to) > 1.02 * abs(near) + 1e-12:
            sides.append(math.inf)
        elif abs(next_to) < 0.98 * abs(near) - 1e-12:
            sides.append(0.0)
        else:
            sides.append(2 * near - far)
    return sides[0], sides[1]


def collapse_rates(affine: Affine, batch_size: float) -> CollapseRates:
    """The linear rates at μ = 0 times eps; infinite where a one-sided slope is.

    With ρ₀ = −1/(B−1) and J of degree 1: forward G = (B−1)/B·(J_φ(1) − J_φ(ρ₀))/2, M = E DD, L = (1−2/B)(E D² − w) +
    (2/B)E DD with w = (a−b)²√(1−ρ₀²)/2π; backward with A = GDG/√eps. All are φ′(β)² for a smooth activation.
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
    return CollapseRates(forward, _backward(square, both, share), (0.5 * (a + b)) ** 2)


def _backward(square: float, both: float, share: float) -> Eigenvalues:
    """Backward eigenvalues of A = GDG for D with E D² = `square` and E DD = `both`, share = 1/B."""
    if share == 0:
        return Eigenvalues(square, square, both)
    size = 1 / share
    kept = 1 - share
    own = size * kept * square
    cross = own - (size - 1) * both
    norm = own - cross * share
    diagonal = size * kept**2 * square
    trace_square = diagonal + size * (size - 1) * kept**2 * both
    square_trace = diagonal + (size - 1) * share * both
    mixed = diagonal - (size - 1) * kept * both
    own_squares = diagonal - 2 * mixed * share + cross * share**2
    whole = norm / (size - 1)
    single = size / ((size - 2) * (size - 1)) * (own_squares - norm * share)
    pairs = 2 / (size * (size - 3)) * (0.5 * (trace_square + square_trace) - (size - 1) * single - whole)
    return Eigenvalues(whole, single, pairs)


def solve_spread(affine: Affine, batch_size: float, eps: float) -> float:
    """The largest fixed point μ = F(μ/eps), or 0 where none is positive.

    It is the one reached from above, from inputs of large variance. F is scanned downwards from its value at eps = 0
    until it crosses, and the crossing is refined; the scan ends at η = 1e-7, or at 1e-3 where μ = 0 is stable and only
    a jump could leave a fixed point above it.
    """
    exact = NormalizedLaw(batch_size, 1.0, 0.0)
    top = batch_spread(affine, exact, tolerance=1e-12 if eps == 0 else _ROUGH, checked=eps == 0)
    if eps == 0 or top <= 0:
        return max(top, 0.0)

    @cache
    def excess(log_ratio: float, tolerance: float = _ROUGH) -> float:
        law = NormalizedLaw(batch_size, math.exp(log_ratio), 1.0)
        checked = tolerance < _ROUGH and not affine.activation.kinks  # smooth series are short
        value = batch_spread(affine, law, tolerance=tolerance, checked=checked)
        return math.log(max(value, 1e-300)) - log_ratio - math.log(eps)

    high = math.log(top / eps)
    at_high = excess(high)
    if at_high > -0.2:
        return eps * math.exp(_polish(excess, high, at_high, -1.0))
    previous, at_previous = high, at_high
    bottom = _LOWEST_RATIO if eps < collapse_rates(affine, batch_size).forward.G else _LOWEST_JUMP
    for step in (0.3, 0.7, 1.2, 2, 3, 4, 5, 6, 8, 10, 12, 14, 17, 20):
        low = high - step
        if low < math.log(bottom):
            break
        at_low = excess(low)
        if at_low >= 0:
            if step < 1.5:  # near enough for a straight line
                root = previous - at_previous * (previous - low) / (at_previous - at_low)
                at_root = excess(root)
                slope = (at_previous - at_root) / (previous - root)
            else:
                root = brentq(excess, low, previous, xtol=1e-2)
                at_root = excess(root)
                slope = (at_root - excess(root - 1e-2)) / 1e-2
            return eps * math.exp(_polish(excess, root, at_root, slope))
        previous, at_previous = low, at_low
    return 0.0


def _polish(excess: Callable[..., float], start: float, at_start: float, slope: float) -> float:
    """The root next to `start` by the secant rule, roughly first and then to the last digits.

    A step below `enough` is made on trust: the slope is known to a thousandth or better.
    """
    x, y = start, at_start
    for tolerance, enough, most in ((_ROUGH, 1e-5, 12), (1e-12, 1e-7, 3)):
        if tolerance != _ROUGH:
            y = excess(x, tolerance)
        last = math.inf
        for _ in range(most):
            step = -y / slope
            if abs(step) < enough or abs(step) > 0.5 * last:  # the second: rounding, not the function, is left
                break
            last = abs(step)
            value = excess(x + step, tolerance)
            if abs(step) > 1e-3 * enough:
                slope = (value - y) / step
            x, y = x + step, value
        x -= y / slope
    return x


@dataclass(frozen=True)
class CriticalEps:
    """Where the batch collapses to a point as eps grows, and what the gradient does there.

    Attributes:
        collapse: the largest eps with a positive fixed point; infinite for a kink steeper than linear.
        continuous: whether μ goes to 0 there, rather than jump.
        linear: the eps above which μ = 0 is stable against small perturbations.
        unit_growth: the eps at which gradients neither grow nor vanish in the collapsed phase, where growth is
            unit_growth/eps.
    """

    collapse: float
    continuous: bool
    linear: float
    unit_growth: float


def find_critical_eps(affine: Affine, batch_size: float) -> CriticalEps:
    """The critical eps of an activation: max over η of F(η)/η, its linear value, and the collapsed growth times eps."""
    rates = collapse_rates(affine, batch_size)
    linear = rates.forward.G
    if math.isinf(linear):
        return CriticalEps(math.inf, True, math.inf, math.inf)

    def ratio(log_eta: float) -> float:
        eta = math.exp(log_eta)
        return batch_spread(affine, NormalizedLaw(batch_size, eta, 1.0), tolerance=1e-11) / eta

    grid = np.linspace(math.log(1e-4), math.log(1e3), 33)
    values = np.array([ratio(float(point)) for point in grid])
    best = int(values.argmax())
    if best == 0 or values[best] <= linear * (1 + 1e-9):
        return CriticalEps(linear, True, linear, rates.backward.G)
    bounds = (float(grid[best - 1]), float(grid[min(best + 1, grid.size - 1)]))
    found = minimize_scalar(lambda point: -ratio(point), bounds=bounds, method="bounded", options={"xatol": 1e-8})
    return CriticalEps(float(-found.fun), False, linear, rates.backward.G)
