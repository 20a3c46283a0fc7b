"""The growth of a batch norm network as a function of its settings, evaluated once per setting, and searched."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from scipy.optimize import brentq

from sounding.activations import Activation
from sounding.errors import NumericalError
from sounding.theory.batchnorm import DEPTH_SCALES, batchnorm, critical_eps

# The forward eigenvalues G (collapse) and L (a few samples take the variance) that a prescribed point may have. Nearer
# to 1 a deviation lives for more than 20 layers, and the fluctuations of a finite width carry a batch across. M, what
# two samples keep of their likeness, is near 1 wherever growth is, and should be.
STEADY = 0.95


@dataclass(frozen=True)
class Setting:
    """The eps, scale and shift of every batch norm."""

    eps: float = 0.0
    scale: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class Point:
    """What theory predicts at a setting."""

    setting: Setting
    growth: float  # factor per layer of the squared gradient norm
    variance: float  # batch variance of the pre-activations at the fixed point; 0 where it has collapsed
    attracting: bool  # whether deep batches go there
    slowest: float  # the larger of the forward eigenvalues G and L

    @property
    def alive(self) -> bool:
        """Whether samples stay distinct."""
        return self.variance > 0

    @property
    def log_growth(self) -> float:
        """ln growth, −∞ where gradients vanish at once."""
        return math.log(self.growth) if self.growth > 0 else -math.inf

    @property
    def trainable_depth(self) -> float:
        """16/|ln growth| layers (meanfield2019: the overlay of its training figures)."""
        return DEPTH_SCALES / abs(self.log_growth) if self.growth != 1 else math.inf

    @property
    def steady(self) -> bool:
        """Whether samples stay distinct and batches of finite width stay close to the fixed point."""
        return self.alive and self.attracting and self.slowest <= STEADY

    def reaches(self, limit: float) -> bool:
        """Whether |ln growth| ≤ `limit` at a steady point."""
        return self.steady and abs(self.log_growth) <= limit


@dataclass(frozen=True)
class Landscape:
    """Growth over settings, for one activation, batch size and law of the weights, of variance weight_std²/fan_in."""

    activation: Activation
    batch_size: float
    limit: float
    weight_std: float = 1.0

    @property
    def linear_log_growth(self) -> float:
        """ln((B − 2)/(B − 3)), the growth of a linear network: no scale or shift goes below it at eps = 0."""
        return math.log1p(1 / (self.batch_size - 3))

    def at(self, setting: Setting) -> Point:
        """The prediction at a setting."""
        return _predict(self.activation, self.batch_size, self.weight_std, setting)

    def collapse(self, setting: Setting) -> float:
        """The eps at which the batch collapses, at this scale and shift."""
        found = _critical_eps(self.activation, batch_size=self.batch_size, scale=setting.scale, shift=setting.shift)
        return found.collapse * self.weight_std**2

    def size(self, point: Point) -> float:
        """RMS change of the normalized pre-activation x ↦ γ√(v/(v + eps))x + β, in standard deviations of x."""
        setting = point.setting
        shrink = math.sqrt(point.variance / (point.variance + setting.eps)) if setting.eps else 1.0
        return math.hypot(setting.scale * shrink - 1, setting.shift)

    def walk(
        self, path: Callable[[float], Setting], grid: Sequence[float]
    ) -> Generator[None, None, tuple[Point | None, Point | None]]:
        """Along a path of growing change: the smallest change that reaches the limit, and the best steady point.

        It yields after each step, so that a page can answer in between.
        """
        # the grid finds the first interval that ends in reach; a root finder and rounding to two digits finish it
        best: Point | None = None
        before = 0.0
        for step in grid:
            try:
                point = self.at(path(step))
            except NumericalError:
                break  # far out an activation may be constant, which batch norm divides by 0
            if point.steady and (best is None or abs(point.log_growth) < abs(best.log_growth)):
                best = point
            if point.alive and point.attracting and abs(point.log_growth) <= self.limit:
                found = self._refine(path, before, step)
                if found is not None:
                    return found, best
            before = step
            yield
        return None, best

    def _refine(self, path: Callable[[float], Setting], outside: float, inside: float) -> Point | None:
        """The smallest change between two steps that reaches the limit, None where no steady point does."""
        # a step may also come to a steady point from one that is not, or go beyond the last steady one
        settles = self.at(path(inside)).steady

        def excess(step: float) -> float:
            point = self.at(path(step))
            if not (point.alive and point.attracting):
                return 1.0
            return max(abs(point.log_growth) - self.limit, point.slowest - STEADY if settles else -math.inf)

        crossing = inside
        if excess(outside) > 0 > excess(inside):
            crossing = brentq(excess, outside, inside, rtol=5e-3, xtol=1e-3 * inside)
        for rounded in (round_up(crossing, 2), round_up(crossing, 3), round_up(inside, 2), inside):
            if rounded <= 1.1 * inside and self.at(path(rounded)).reaches(self.limit):
                return self.at(path(rounded))
        return None


def round_up(value: float, digits: int) -> float:
    """`value` rounded up to so many significant digits.

    >>> round_up(0.3412, 2), round_up(1.001, 2)
    (0.35, 1.1)
    """
    if value <= 0:
        return value
    power = digits - 1 - math.floor(math.log10(value))
    # a number that has these digits already stays, though rounding may have raised it
    shown: float = math.ceil(value * 10.0**power * (1 - 1e-12)) / 10.0**power
    return round(shown, max(power, 0) + 1)


# A prescription looks at some hundred settings, and one for another depth at most of them again.
@functools.lru_cache(maxsize=4096)
def _predict(activation: Activation, batch_size: float, weight_std: float, setting: Setting) -> Point:
    """The prediction at a setting, reduced to what the search looks at."""
    result = batchnorm(activation, batch_size=batch_size, weight_std=weight_std, **vars(setting))
    share = weight_std**2 * (1.0 if math.isinf(batch_size) else 1 - 1 / batch_size)
    point, forward = result.fixed_point, result.forward_eigenvalues
    return Point(setting, result.gradient_growth, point.mu * share, point.attracting, max(forward.G, forward.L))


_critical_eps = functools.lru_cache(maxsize=512)(critical_eps)
