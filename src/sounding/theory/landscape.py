"""The growth of a batch norm network as a function of its settings, evaluated once per setting, and searched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scipy.optimize import brentq

from sounding.activations import Activation
from sounding.errors import NumericalError
from sounding.theory.batchnorm import batchnorm, critical_eps

LAYERS_PER_SCALE = 16.0


@dataclass(frozen=True)
class Setting:
    """The eps, scale and shift of every batch norm."""

    eps: float = 0.0
    scale: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class Point:
    """What theory predicts at a setting.

    Args:
        growth: factor per layer of the squared gradient norm.
        variance: batch variance of the pre-activations at the fixed point; 0 where it has collapsed.
        attracting: whether deep batches go there.
    """

    setting: Setting
    growth: float
    variance: float
    attracting: bool

    @property
    def alive(self) -> bool:
        """Whether samples stay distinct."""
        return self.variance > 0

    @property
    def log_growth(self) -> float:
        return math.log(self.growth) if self.growth > 0 else -math.inf

    @property
    def trainable_depth(self) -> float:
        """16/|ln growth| layers (meanfield2019: the overlay of its training figures)."""
        return LAYERS_PER_SCALE / abs(self.log_growth) if self.growth != 1 else math.inf

    def reaches(self, limit: float) -> bool:
        """Whether |ln growth| ≤ `limit` at an attracting fixed point that is alive."""
        return self.alive and self.attracting and abs(self.log_growth) <= limit


@dataclass
class Landscape:
    """Growth over settings, for one activation and batch size."""

    activation: Activation
    batch_size: float
    limit: float
    _points: dict[Setting, Point] = field(default_factory=dict)
    _collapse: dict[tuple[float, float], float] = field(default_factory=dict)

    @property
    def linear_log_growth(self) -> float:
        """ln((B − 2)/(B − 3)), the growth of a linear network: no scale or shift goes below it at eps = 0."""
        return math.log1p(1 / (self.batch_size - 3))

    def at(self, setting: Setting) -> Point:
        """The prediction at a setting."""
        if setting not in self._points:
            self._points[setting] = self._predict(setting)
        return self._points[setting]

    def _predict(self, setting: Setting) -> Point:
        result = batchnorm(
            self.activation,
            batch_size=self.batch_size,
            eps=setting.eps,
            scale=setting.scale,
            shift=setting.shift,
        )
        share = 1.0 if math.isinf(self.batch_size) else 1 - 1 / self.batch_size
        return Point(setting, result.gradient_growth, result.fixed_point.mu * share, result.fixed_point.attracting)

    def collapse(self, setting: Setting) -> float:
        """The eps at which the batch collapses, at this scale and shift."""
        key = (setting.scale, setting.shift)
        if key not in self._collapse:
            found = critical_eps(self.activation, batch_size=self.batch_size, scale=key[0], shift=key[1])
            self._collapse[key] = found.collapse
        return self._collapse[key]

    def size(self, point: Point) -> float:
        """RMS change of the normalized pre-activation x ↦ γ√(v/(v + eps))x + β, in standard deviations of x."""
        setting = point.setting
        shrink = math.sqrt(point.variance / (point.variance + setting.eps)) if setting.eps else 1.0
        return math.hypot(setting.scale * shrink - 1, setting.shift)

    def walk(self, path: Callable[[float], Setting], grid: Sequence[float]) -> tuple[Point | None, Point | None]:
        """Along a path of growing change: the smallest change that reaches the limit, and the best point seen alive.

        The grid finds the first interval that ends in reach; a root finder and two-digit rounding away from the start
        finish it.
        """
        best: Point | None = None
        before = 0.0
        for step in grid:
            try:
                point = self.at(path(step))
            except NumericalError:
                break
            if point.alive and point.attracting and (best is None or abs(point.log_growth) < abs(best.log_growth)):
                best = point
            if point.reaches(self.limit):
                return self._refine(path, before, step), best
            before = step
        return None, best

    def _refine(self, path: Callable[[float], Setting], outside: float, inside: float) -> Point:
        def excess(step: float) -> float:
            point = self.at(path(step))
            return abs(point.log_growth) - self.limit if point.alive and point.attracting else 1.0

        crossing = inside
        if excess(outside) > 0 > excess(inside):
            crossing = brentq(excess, outside, inside, rtol=5e-3, xtol=1e-3 * inside)
        for rounded in (round_up(crossing, 2), round_up(crossing, 3), round_up(inside, 2)):
            if rounded <= 1.1 * inside and self.at(path(rounded)).reaches(self.limit):
                return self.at(path(rounded))
        return self.at(path(inside))


def round_up(value: float, digits: int) -> float:
    """`value` rounded up to so many significant digits.

    >>> round_up(0.3412, 2), round_up(1.001, 2)
    (0.35, 1.1)
    """
    if value <= 0:
        return value
    power = digits - 1 - math.floor(math.log10(value))
    shown: float = math.ceil(value * 10.0**power * (1 - 1e-12)) / 10.0**power
    return round(shown, max(power, 0) + 1)
