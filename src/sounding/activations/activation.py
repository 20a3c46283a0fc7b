"""The record: an activation and what the theory needs to know of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from sounding.errors import UsageError

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float64]
Growth = Literal["bounded", "polynomial", "exponential"]
REACH = 38.0  # exp(−38²/2) is the smallest number float64 tells from 0


@dataclass(frozen=True)
class Activation:
    """An activation φ and what the theory needs to know of it.

    Args:
        name: how it is called on the command line, parameters included.
        function, derivative: φ and φ′, vectorized over float64 arrays; φ′ at a kink is either one-sided value.
        kinks: where φ or one of its derivatives is not continuous; quadrature puts panel edges there.
        degree: α when φ(cx) = c^α φ(x) for every c > 0, else None.
        slopes: (a, b) with φ(x) = a·x^α for x > 0 and −b·|x|^α for x < 0 when `degree` is set (meanfield2019, H).
        growth: how φ grows at infinity; "exponential" includes exp, whose Gaussian moments exist.
        length, center: the distance over which φ varies, 1/gain for a scaled one, and around which point.
        derivative_error: error of `derivative` relative to the largest slope; 0 when it is analytic.
        twin: makes the torch function; None for a Python callable without one.
        kinks_within: `kinks` is complete on [−kinks_within, kinks_within]; infinite unless they were searched for.

    >>> from sounding.activations import resolve
    >>> relu = resolve("relu")
    >>> relu(np.array([-1.0, 2.0])), relu.degree, relu.kinks
    (array([0., 2.]), 1.0, (0.0,))
    >>> relu.scaled(2.0, shift=1.0)(np.array([-1.0, 2.0]))
    array([0., 5.])
    """

    name: str
    function: Callable[[Array], Array]
    derivative: Callable[[Array], Array]
    kinks: tuple[float, ...] = ()
    degree: float | None = None
    slopes: tuple[float, float] | None = None
    growth: Growth = "polynomial"
    length: float = 1.0
    center: float = 0.0
    derivative_error: float = 0.0
    twin: Callable[[], Callable[[torch.Tensor], torch.Tensor]] | None = None
    kinks_within: float = math.inf

    def __call__(self, x: Array) -> Array:
        return self.function(np.asarray(x, dtype=np.float64))

    def torch(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The activation as a differentiable function of torch tensors; imports torch."""
        if self.twin is not None:
            return self.twin()
        return _numpy_twin(self)

    @property
    def power(self) -> tuple[float, tuple[float, float]] | None:
        """The degree and the two slopes of a positively homogeneous activation, which closed forms need."""
        return None if self.degree is None or self.slopes is None else (self.degree, self.slopes)

    @property
    def linear(self) -> bool:
        """Whether the activation is a multiple of the identity."""
        return self.degree == 1.0 and self.slopes is not None and self.slopes[0] == self.slopes[1]

    @property
    def outline(self) -> dict[str, Any]:
        """What a mean over a line needs to know beside the function: kinks, length and centre, as its arguments."""
        return {"kinks": self.kinks, "length": self.length, "center": self.center}

    @property
    def pair_outline(self) -> dict[str, Any]:
        """What a mean over two coordinates needs to know where both go through the activation."""
        return {**self.outline, "kinks": (self.kinks, self.kinks)}

    def scaled(self, gain: float = 1.0, shift: float = 0.0) -> Activation:
        """x ↦ φ(gain·x + shift): what a batch norm with scale `gain` and shift `shift` presents to φ.

        Homogeneity survives without a shift: φ(gx) has the slopes (a, b)·g^α for g > 0 and (−b, −a)·|g|^α for g < 0.

        >>> from sounding.activations import resolve
        >>> resolve("leaky_relu:0.1").scaled(-2.0).slopes
        (-0.2, -2.0)
        """
        if not (math.isfinite(gain) and math.isfinite(shift)) or gain == 0:
            raise UsageError(f"gain must be finite and not 0 and shift finite, got gain {gain}, shift {shift}")
        if gain == 1.0 and shift == 0.0:
            return self
        f, df, twin = self.function, self.derivative, self.torch

        def scaled_twin() -> Callable[[torch.Tensor], torch.Tensor]:
            inner = twin()
            return lambda x: inner(gain * x + shift)

        slopes = None
        if self.power is not None and shift == 0:
            degree, (a, b) = self.power
            factor = abs(gain) ** degree
            slopes = (a * factor, b * factor) if gain > 0 else (-b * factor, -a * factor)
        return replace(
            self,
            name=f"{self.name}({gain:g}x{shift:+g})" if shift else f"{self.name}({gain:g}x)",
            function=lambda x: f(gain * x + shift),
            derivative=lambda x: gain * df(gain * x + shift),
            kinks=tuple(sorted((kink - shift) / gain for kink in self.kinks)),
            degree=self.degree if slopes else None,
            slopes=slopes,
            length=self.length / abs(gain),
            center=(self.center - shift) / gain,
            twin=scaled_twin,
            kinks_within=max(self.kinks_within - abs(shift), 0.0) / abs(gain),
        )


def _numpy_twin(activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    """A torch function for an activation that exists only in numpy: computed on the CPU, differentiable once."""
    import torch

    class Twin(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            y = activation.function(x.detach().cpu().double().numpy())
            return torch.from_numpy(np.ascontiguousarray(y)).to(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            slope = activation.derivative(x.detach().cpu().double().numpy())
            return gradients[0] * torch.from_numpy(np.ascontiguousarray(slope)).to(x)

    return lambda x: Twin.apply(x)  # type: ignore[no-untyped-call]


def growth_of(function: Callable[[Array], Array]) -> Growth:
    """Judged from the values: bounded when doubling x from 40 to 80 adds nothing, exponential when it overflows
    or multiplies by more than 2⁴⁰, else polynomial."""
    with np.errstate(all="ignore"):
        near = np.abs(function(np.linspace(-40.0, 40.0, 801))).max()
        far = np.abs(function(np.linspace(-80.0, 80.0, 801))).max()
    if not math.isfinite(far) or far > 2.0**40 * max(near, 1.0):
        return "exponential"
    return "bounded" if far <= 1.001 * near else "polynomial"


def has_second_moment(activation: Activation, *, std: float = 1.0) -> bool:
    """Whether E φ(std·z)² exists for z ~ N(0, 1) and float64 can hold it.

    The exponent of the integrand, 2 ln|φ(std·z)| − z²/2, must fall by 40 (seventeen digits) from its maximum before
    |z| = 38, the last z whose density is not 0. exp(x²/5) passes, exp(x²/4) does not: its second moment diverges.

    >>> from sounding.activations import from_callable, resolve
    >>> has_second_moment(resolve("exp")), has_second_moment(from_callable(lambda x: np.exp(x**2 / 4)))
    (True, False)
    """
    z = np.linspace(-REACH, REACH, 1521)
    # from logarithms, as φ² itself may overflow where the density makes up for it
    with np.errstate(all="ignore"):
        exponent = 2 * np.log(np.abs(activation(std * z))) - z**2 / 2
    if not exponent.max() < 700.0:  # also NaN
        return False
    return bool(max(exponent[0], exponent[-1]) < max(exponent.max(), -40.0) - 40.0)


ActivationLike = str | Activation | Callable[..., Any]
"""What `resolve` takes: a name, a record or a function."""
