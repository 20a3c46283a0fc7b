"""Convolutions and average pooling: positions meet through windows of the grid.

The taps of a random kernel are independent, so a pair of output positions meets only pairs of input positions with the
same offset: K′[p, q] = n v Σ_δ K[p + δ, q + δ] over the taps δ, n the channels that an output sees, with zeros beyond
the border. Window sums go axis by axis. Groups change n, nothing else, as long as channels are alike; where an output
sees few inputs (depthwise) it is not Gaussian over channels, and what a function makes of it is approximate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from sounding.errors import UsageError
from sounding.theory.signal.description import Array, Convolution, Node, Pool
from sounding.theory.signal.rules import Gradients, Inputs, back_through_weights, mixed, over_positions, through_weights
from sounding.theory.signal.signal import Signal


def convolution(rule: Convolution, node: Node, inputs: Inputs) -> Signal:
    """K′ = n v W + (n μ)² w wᵀ + n μ β (w_a + w_b) + E b², W and w the window sums of K and m."""
    summed = window_sums(rule, node, inputs[0])
    return through_weights(summed, rule.weight, rule.bias, rule.channels_in // rule.groups, math.prod(rule.kernel))


def window_sums(rule: Convolution, node: Node, signal: Signal) -> Signal:
    """Σ_δ K[p + δ, q + δ] and Σ_δ m[p + δ] over the taps δ, at the pairs of the output."""
    spacing = spacing_behind(rule, signal.spacing)
    return _shift(rule, signal, Signal(np.empty((0, 0, 0)), node.points, np.empty((0, 0)), spacing), to_output=True)


def convolution_backward(rule: Convolution, node: Node, inputs: Inputs, gradient: Signal) -> Gradients:
    """D′ = n (v W + μ² w wᵀ), W and w the sums of D and G over the outputs that an input reaches."""
    summed = _shift(rule, gradient, inputs[0], to_output=False)
    return (back_through_weights(summed, rule.weight, rule.channels_in // rule.groups),)


def spacing_behind(rule: Convolution, spacing: tuple[int, ...]) -> tuple[int, ...]:
    """The spacing of sub-grids behind a convolution: over the stride, or times it where transposed; 1 stays 1."""
    if max(spacing, default=1) == 1:
        return spacing
    if rule.transposed:
        return tuple(step * stride for step, stride in zip(spacing, rule.stride, strict=True))
    return tuple(step // math.gcd(step, stride) for step, stride in zip(spacing, rule.stride, strict=True))


def _shift(rule: Convolution, source: Signal, target: Signal, *, to_output: bool) -> Signal:
    """Sums over the taps of what stands at the other end, axis by axis."""
    samples, axes = source.points.samples, len(source.points.grid)
    forwards = to_output != rule.transposed  # from the fine side, where taps are counted, to the coarse one
    spacing, lattice = list(source.spacing), list(source.lattice)
    pairs = source.matrix.reshape(*spacing, samples, *lattice, samples, *lattice)
    means = source.mean.reshape(*spacing, samples, *lattice)
    for axis in range(axes):
        before, behind = (spacing[axis], lattice[axis]), (target.spacing[axis], target.lattice[axis])
        fine, coarse = (before, behind) if forwards else (behind, before)
        spacing[axis], lattice[axis] = behind
        new_pairs = np.zeros((*spacing, samples, *lattice, samples, *lattice))
        new_means = np.zeros((*spacing, samples, *lattice))
        for meeting in _meetings(rule, axis, fine, coarse):
            (start_in, at_in), (start_out, at_out) = meeting if forwards else meeting[::-1]
            head_in, head_out = _index(axis, axes, start_in), _index(axis, axes, start_out)
            row_in, row_out = (slice(None), *_index(axis, axes, at_in)), (slice(None), *_index(axis, axes, at_out))
            new_pairs[(*head_out, *row_out, *row_out)] += pairs[(*head_in, *row_in, *row_in)]
            new_means[(*head_out, *row_out)] += means[(*head_in, *row_in)]
        pairs, means = new_pairs, new_means
    blocks, size = math.prod(spacing), samples * math.prod(lattice)
    matrix = pairs.reshape(blocks, size, size)
    found = Signal(matrix, target.points, means.reshape(blocks, size), target.spacing)
    stride = math.prod(rule.stride)
    if forwards or found.is_full or stride == 1:
        return found
    # A stride leaves nothing at offsets that are no multiple of it, and sub-grids see only multiples: what they follow
    # becomes the mean over both, which is what the sums over all pairs need.
    return found.like(matrix - (1 - 1 / stride) * found.apart(matrix), found.mean)


def _index(axis: int, axes: int, at: int | slice) -> tuple[Any, ...]:
    """An index into `axes` axes that chooses along one of them."""
    return (*(slice(None),) * axis, at, *(slice(None),) * (axes - axis - 1))


def _meetings(
    rule: Convolution, axis: int, fine: tuple[int, int], coarse: tuple[int, int]
) -> Iterator[tuple[tuple[int, slice], tuple[int, slice]]]:
    """Which sub-grid and which of its places meet along one axis: fine = stride · coarse + dilation · tap − padding."""
    # `fine` and `coarse` are (spacing, places of a sub-grid)
    stride, (spacing, places) = rule.stride[axis], fine
    step = stride * coarse[0] // spacing
    for start in range(coarse[0]):
        for tap in range(rule.kernel[axis]):
            first = stride * start + rule.dilation[axis] * tap - rule.padding[axis][0]
            shift, block = divmod(first, spacing)
            low = max(0, -(shift // step))  # the first h with shift + step · h ≥ 0
            high = min(coarse[1], (places - 1 - shift) // step + 1)
            if low < high:
                inner = slice(shift + step * low, shift + step * (high - 1) + 1, step)
                yield (block, inner), (start, slice(low, high))


def pool(rule: Pool, node: Node, inputs: Inputs) -> Signal:
    """K′ = A K Aᵀ with A the average over windows; over sub-grids only the average over the whole grid is followed."""
    (signal,) = inputs
    if signal.is_full:
        return mixed(_averages(rule, signal.points.grid, node), signal, node.points)
    if node.points.positions != 1 or any(sum(sides) for sides in rule.padding):
        raise UsageError(
            f"average pooling over windows of {rule.kernel} needs pairs of neighbours, which are not followed over a "
            f"grid of {signal.points.grid}",
            hint="fewer samples, so that all pairs are followed",
        )
    positions = signal.points.positions
    pairs, means = signal.position_sums()
    return Signal.full(pairs / positions**2, node.points, means / positions)


def pool_backward(rule: Pool, node: Node, inputs: Inputs, gradient: Signal) -> Gradients:
    """D′ = Aᵀ D A."""
    (signal,) = inputs
    if signal.is_full:
        return (mixed(_averages(rule, signal.points.grid, node).T, gradient, signal.points),)
    return (over_positions(gradient, signal, lambda rest: np.ones((rest, rest)), signal.points.positions**2),)


def _averages(rule: Pool, grid: tuple[int, ...], node: Node) -> Array:
    """The matrix (positions out, positions in) of the averages over windows."""
    result: Array = np.ones((1, 1))
    for axis, (size, out) in enumerate(zip(grid, node.points.grid or (1,) * len(grid), strict=True)):
        (before, after), kernel = rule.padding[axis], rule.kernel[axis]
        one = np.zeros((out, size))
        for place in range(out):
            start = place * rule.stride[axis] - before
            low, high = max(start, 0), min(start + kernel, size)
            # a window that rounding up lets overhang the padding counts only what lies within it, as in torch
            count = min(start + kernel, size + after) - start if rule.count_padding else high - low
            one[place, low:high] = 1.0 / max(count, 1)
        result = np.kron(result, one).astype(np.float64)
    return result
