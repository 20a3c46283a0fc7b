"""Any Python callable as an activation: checked, differentiated, its kinks found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sounding.activations.activation import Activation, Array, Growth
from sounding.errors import UsageError


def from_callable(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    derivative: Callable[..., Any] | None = None,
    kinks: tuple[float, ...] | None = None,
    growth: Growth = "polynomial",
) -> Activation:
    """Any vectorized Python function as an activation.

    Without `derivative`, φ′ is a five-point central difference, one-sided next to a kink, whose relative error on
    smooth functions is about 1e-11 (stated in `derivative_error`). Without `kinks`, they are searched for on
    [−12, 12] as places where the second difference does not shrink with the step.

    >>> square = from_callable(lambda x: x**2, name="square")
    >>> bool(abs(square.derivative(np.array([3.0]))[0] - 6.0) < 1e-9)
    True
    """
    label = name or getattr(function, "__name__", type(function).__name__)

    def f(x: Array) -> Array:
        try:
            y = np.asarray(function(x), dtype=np.float64)
        except Exception as error:
            raise UsageError(
                f"activation {label!r} must accept a float64 numpy array, but raised {type(error).__name__}: {error}",
                hint="writing it with numpy functions, or numpy.vectorize",
            ) from error
        if y.shape != np.shape(x):
            raise UsageError(
                f"activation {label!r} must return an array of its input's shape {np.shape(x)}, got {y.shape}",
                hint="a function that acts on each element",
            )
        return y

    probe = np.linspace(-8.0, 8.0, 2001)
    with np.errstate(all="ignore"):
        values = f(probe)
    if not np.all(np.isfinite(values)):
        bad = probe[~np.isfinite(values)][0]
        raise UsageError(
            f"activation {label!r} must be finite on [−8, 8], got {f(np.array([bad]))[0]} at x = {bad:.3g}"
        )
    found = tuple(sorted(float(k) for k in kinks)) if kinks is not None else _find_kinks(f)
    if derivative is not None:
        given = derivative
        return Activation(label, f, lambda x: np.asarray(given(x), dtype=np.float64), found, growth=growth)
    return Activation(label, f, _difference(f, found), found, growth=growth, derivative_error=1e-10)


def _difference(f: Callable[[Array], Array], kinks: tuple[float, ...]) -> Callable[[Array], Array]:
    """A five-point difference that never straddles a kink: the stencil is moved to one side of it."""
    step = 1e-3

    def derivative(x: Array) -> Array:
        x = np.asarray(x, dtype=np.float64)
        h = step * np.maximum(1.0, np.abs(x))
        centre = x.copy()
        for kink in kinks:
            right = (x >= kink) & (x < kink + 2 * h)
            left = (x < kink) & (x > kink - 2 * h)
            centre = np.where(right, np.maximum(centre, kink + 2 * h), centre)
            centre = np.where(left, np.minimum(centre, kink - 2 * h), centre)
        offset = (x - centre) / h
        total = np.zeros_like(x)
        nodes = (-2.0, -1.0, 0.0, 1.0, 2.0)
        for i, node in enumerate(nodes):
            # the derivative at `offset` of the Lagrange polynomial that is 1 at this node and 0 at the others
            slope = np.zeros_like(x)
            others = [m for j, m in enumerate(nodes) if j != i]
            for left_out in others:
                slope += np.prod([offset - m for m in others if m != left_out], axis=0)
            weight = slope / math.prod(node - m for m in others)
            total += weight * f(centre + node * h)
        return total / h

    return derivative


def _find_kinks(f: Callable[[Array], Array]) -> tuple[float, ...]:
    """Jumps of φ′ on [−12, 12]: where the change of slope over a cell stays as the cell is halved, five times over."""
    grid = np.linspace(-12.0, 12.0, 4802)  # an even number of points: 0 is never a node, so a kink there is straddled
    kinks: list[float] = []
    with np.errstate(all="ignore"):
        y = f(grid)
        bend = np.abs(np.diff(y, 2)) / (grid[1] - grid[0])
    scale = np.median(np.abs(np.diff(y))) / (grid[1] - grid[0]) + 1e-12
    for i in np.flatnonzero(bend > 1e-3 * (scale + bend.max())):
        low, high = grid[i], grid[i + 2]
        if kinks and low - kinks[-1] < 1e-2:
            continue
        kink = _refine_kink(f, low, high)
        if kink is not None:
            kinks.append(kink)
    return tuple(kinks)


def _refine_kink(f: Callable[[Array], Array], low: float, high: float) -> float | None:
    """Narrow in on the largest second difference: a kink keeps its jump, a smooth bend loses it with the step."""

    def jump(a: float, b: float) -> float:
        y = f(np.array([a, (a + b) / 2, b]))
        return float(abs(y[0] - 2 * y[1] + y[2]) / ((b - a) / 2))

    start = jump(low, high)
    for _ in range(24):
        quarter = (high - low) / 4
        windows = [(low + k * quarter, low + (k + 2) * quarter) for k in range(3)]
        low, high = max(windows, key=lambda window: jump(*window))
    if jump(low, high) < 0.2 * start:
        return None
    return round((low + high) / 2, 7) + 0.0
