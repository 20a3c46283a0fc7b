"""An activation with a batch norm's scale and shift in front, as the theory integrates it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sounding.activations import Activation
from sounding.activations.activation import Array
from sounding.errors import NumericalError, UsageError


@dataclass(frozen=True)
class Affine:
    """φ(scale·x + shift): the activation with a batch norm's scale and shift in front."""

    activation: Activation
    scale: float
    shift: float

    def value(self, y: Array) -> Array:
        """φ at y = scale·x + shift."""
        return self.activation.function(y)

    @cached_property
    def level(self) -> float:
        """φ at x = 0."""
        return float(self.value(np.array([self.shift]))[0])

    @cached_property
    def grain(self) -> float:
        """Rounding of φ next to x = 0, its own and that of y: third differences of steps so small that φ is a line."""
        y = self.shift + 1e-9 * max(1.0, abs(self.shift)) * np.arange(64.0)
        return float(np.median(np.abs(np.diff(self.value(y), 3))))

    @cached_property
    def power(self) -> tuple[float, tuple[float, float]] | None:
        """The degree and the two slopes of φ(scale·x) where it is positively homogeneous and nothing shifts it."""
        return None if self.shift != 0 else self.activation.scaled(self.scale).power

    def rise(self, y: Array) -> Array:
        """φ at y less its level: without it, a large φ(β) would drown how φ varies over the batch."""
        return self.value(y) - self.level

    def slope(self, y: Array) -> Array:
        """dφ/dx at y = scale·x + shift."""
        return self.scale * self.activation.derivative(y)

    def kinks(self, *, centred: bool = True) -> tuple[float, ...]:
        """Kinks in x; `centred`, the centre of a function much narrower than x is one, so that panels end there."""
        phi = self.activation
        lines = [(k - self.shift) / self.scale for k in phi.kinks]
        if centred and phi.length < 0.7 * abs(self.scale):
            lines.append((phi.center - self.shift) / self.scale)
        return tuple(lines)

    def kinks_within(self, reach: float) -> int:
        """How many kinks of φ lie at |x| < reach."""
        return sum(abs(k - self.shift) < reach * abs(self.scale) for k in self.activation.kinks)

    @cached_property
    def kink_power(self) -> float:
        """The smallest power with which φ′ behaves at a kink: 0 for ReLU, −0.4 for relu_power:0.6, 0 without kinks."""
        kinks = np.array(self.activation.kinks)
        if not kinks.size:
            return 0.0
        steps = np.array([1e-7, 4e-7, -1e-7, -4e-7]) * np.maximum(1.0, np.abs(kinks))[:, None]
        slopes = np.abs(self.activation.derivative((kinks[:, None] + steps).ravel())).reshape(-1, 2, 2)
        near, far = slopes[..., 0], slopes[..., 1]
        # slopes by differences are rounding on a flat side, and beyond the last kink reach across one not looked for
        known = self.activation.derivative_error == 0
        least, blurred = (1e-12, 1e-3) if known else (1e-6 * float(slopes.max()), 2e-2)
        there = (near > least) & (far > least)
        powers = np.log(far[there] / near[there]) / math.log(4.0)
        # differences that say that the mean square of a slope is infinite are rounding: `reject_jumps` has looked at φ
        fractional = (np.abs(powers - np.round(powers)) > blurred) & (known | (powers > -0.5))
        return float(min(powers[fractional], default=0.0))

    def noise(self, spread: float) -> float:
        """Rounding of φ(y) − φ(β) relative to its size over x of about `spread`: no quadrature converges below it."""
        x = spread * np.array([-2.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0])
        rise = self.rise(self.scale * x + self.shift)
        size = math.sqrt(float(np.mean(rise * rise)))
        return 4e-16 * abs(self.level) / size if size > 0 else 0.0

    def slope_noise(self, spread: float) -> float:
        """Error of D relative to its size over x of about `spread`; the activation states it for its largest slope."""
        phi = self.activation
        if phi.derivative_error == 0:
            return 0.0
        largest = abs(self.scale) * float(np.abs(phi.derivative(np.linspace(-8.0, 8.0, 131))).max())
        typical = self.slope(self.scale * spread * np.linspace(-2.0, 2.0, 32) + self.shift)
        size = math.sqrt(float(np.mean(typical * typical)))
        return phi.derivative_error * max(1.0, largest / max(size, 1e-3 * largest, 1e-300))

    def reject_jumps(self) -> None:
        """Raise where gradients do not exist: at a jump, or at an infinite slope known only by differences."""
        phi = self.activation
        kinks = np.array(phi.kinks)
        if not kinks.size:
            return
        steps = np.array([1e-8, 1e-6, -1e-8, -1e-6]) * np.maximum(1.0, np.abs(kinks))[:, None]
        sides = phi((kinks[:, None] + steps).ravel()).reshape(-1, 2, 2)
        near, far = np.abs(sides[:, 0] - sides[:, 1]).T
        for kink in kinks[(near > 0.5 * far) & (near > 1e-9)]:
            raise NumericalError(
                f"{phi.name} has a jump at x = {kink:.6g}: its squared slope has no mean",
                hint="a continuous activation",
            )
        if phi.derivative_error == 0:
            return  # a slope that is given may be infinite at a kink: cells crowd their nodes there
        rises = np.abs(sides - phi(kinks)[:, None, None])
        near, far = rises[..., 0], rises[..., 1]
        # beside a side that rises, a flat one shows only how well the kink is known
        seen = far > 1e-12 * (1.0 + np.abs(sides).max(axis=(1, 2), keepdims=True)[..., 0])
        steep = (near > 0.0105 * far) & (far > 1e-3 * far.max(axis=1, keepdims=True)) & seen
        for kink in kinks[steep.any(axis=1)]:
            raise UsageError(
                f"{phi.name} has an infinite slope at x = {kink:.6g}, which differences cannot give",
                hint="sounding.activations.from_callable with its derivative",
            )
