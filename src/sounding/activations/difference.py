"""The numerical derivative of a callable, with the error it makes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from sounding.activations.activation import Array

NODES = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
# each function takes the step that serves it best: wide ones miss fast changes, narrow ones drown in rounding
STEPS = (1.6e-2, 8e-3, 4e-3, 2e-3, 1e-3, 5e-4, 2.5e-4)
CENTRAL = (-1 / 60, 3 / 20, -3 / 4, 0.0, 3 / 4, -3 / 20, 1 / 60)  # the weights where the stencil is not moved
MARGIN = 3.01  # the outermost node stays a hair off the kink, where a jump has either value


def difference(function: Callable[[Array], Array], kinks: tuple[float, ...]) -> tuple[Callable[[Array], Array], float]:
    """φ′ by seven-point differences, and its error relative to the largest slope on [−8, 8].

    The stencil never reaches across a kink: next to one it is moved aside and the interpolating polynomial is
    differentiated off its centre. The step is the one whose result changes least when it is halved; half of it is
    used, and that change is the stated error.
    """
    gaps = np.diff([-math.inf, *kinks, math.inf])
    widest = min(STEPS[0], gaps.min() / 16)
    steps = [step for step in STEPS if step <= widest] or [widest]
    sample = np.linspace(-8.0, 8.0, 803)
    for kink in kinks:
        sample = sample[np.abs(sample - kink) > 1e-3]  # roots have no slope at their kink
    trials = [_stencil(function, kinks, step)(sample) for step in [*steps, steps[-1] / 2]]
    # relative to the largest slope, or to the values where a function is flat between its jumps
    scale = max(float(np.abs(trials[-1]).max()), 1e-6 * float(np.abs(function(sample)).max()), 1e-300)
    errors = [float(np.abs(a - b).max()) / scale for a, b in itertools.pairwise(trials)]
    best = int(np.argmin(errors))
    return _stencil(function, kinks, steps[best] / 2), max(errors[best], np.finfo(np.float64).eps)


def _stencil(function: Callable[[Array], Array], kinks: tuple[float, ...], step: float) -> Callable[[Array], Array]:
    """The derivative by seven points around x with this step, moved aside where a kink is near."""
    edges = np.array([-math.inf, *kinks, math.inf])
    room = np.diff(edges) / (2 * MARGIN + 1)

    def derivative(x: Array) -> Array:
        x = np.asarray(x, dtype=np.float64)
        piece = np.searchsorted(edges, x, side="right") - 1
        # far out, a fixed step would drown in the rounding of x; between kinks, a wider one would reach across
        h = np.minimum(step * np.maximum(1.0, np.abs(x) / 16), room[piece])
        centre = np.minimum(np.maximum(x, edges[piece] + MARGIN * h), edges[piece + 1] - MARGIN * h)
        offset = (x - centre) / h
        moved = np.flatnonzero(offset)
        total = np.zeros_like(x)
        for node, weight in zip(NODES, CENTRAL, strict=True):
            share = np.full_like(x, weight)
            share.flat[moved] = _slope(node, offset.flat[moved])
            total += share * function(centre + node * h)
        return total / h

    return derivative


def _slope(node: float, at: Array) -> Array:
    """The derivative at `at` of the polynomial that is 1 at this node and 0 at the others."""
    others = [m for m in NODES if m != node]
    slope = np.zeros_like(at)
    for left_out in others:
        slope += np.prod([at - m for m in others if m != left_out], axis=0)
    return slope / math.prod(node - m for m in others)
