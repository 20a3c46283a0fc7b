"""The rules that need few lines: what each does to the signal forwards, and to the gradient backwards.

Every forward function takes (rule, node, inputs) and gives the signal of the node; every backward function takes
(rule, node, inputs, gradient) and gives one gradient per input, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from sounding.activations import Activation
from sounding.errors import UsageError
from sounding.theory.signal import description as kinds
from sounding.theory.signal.description import Array, Law, Node, Points
from sounding.theory.signal.gaussian import map_pairs
from sounding.theory.signal.normalize import spread_of
from sounding.theory.signal.shapes import amplitude_before, amplitude_of_term, pushed, summed
from sounding.theory.signal.signal import Signal, block_points

Inputs = tuple[Signal, ...]
Gradients = tuple[Signal, ...]


def linear(rule: kinds.Linear, node: Node, inputs: Inputs) -> Signal:
    """K′ = n_in v K + (n_in μ)² m mᵀ + n_in μ β (m_a + m_b) + E b² behind y = W x + b; μ, v the weights' moments."""
    # exact in the mean over weights at any width; over seeds K′ scatters by √(2/n_out)
    return through_weights(inputs[0], rule.weight, rule.bias, rule.fan_in)


def through_weights(signal: Signal, weight: Law, bias: Law, fan_in: int, taps: int = 1) -> Signal:
    """The signal behind random weights that each see `fan_in` features, summed over so many taps."""
    total = fan_in * weight.mean
    moments, variance = signal.matrix, weight.variance
    if weight.balanced:  # n weights that sum to zero do not see what their inputs share, and each two have −v/(n − 1)
        moments = moments - signal.mean[:, :, None] * signal.mean[:, None, :] / taps
        variance /= 1 - 1 / (fan_in * taps)
    matrix = fan_in * variance * moments + bias.second_moment
    if total != 0:
        level = total * signal.mean + bias.mean
        matrix += level[:, :, None] * level[:, None, :] - bias.mean**2
    return signal.like(matrix, total * signal.mean + bias.mean)


def linear_backward(rule: kinds.Linear, node: Node, inputs: Inputs, gradient: Signal) -> Gradients:
    """D′ = n_in (v D + μ² G Gᵀ), G the sum of the gradient over features; G′ = n_in μ G."""
    return (back_through_weights(gradient, rule.weight, rule.fan_in),)


def back_through_weights(gradient: Signal, weight: Law, fan_in: int) -> Signal:
    """The gradient in front of random weights that each see `fan_in` features."""
    matrix = fan_in * weight.variance * gradient.matrix
    if weight.mean != 0:
        matrix += fan_in * weight.mean**2 * gradient.mean[:, :, None] * gradient.mean[:, None, :]
    return gradient.like(matrix, fan_in * weight.mean * gradient.mean)


def tied(rule: kinds.Tied, inputs: Inputs, share: Array) -> Signal:
    """K′ = n_in v (K + c_a c_b (I_ab − E_ab)) + E b² where the stream holds c_a times the embedding e_a, K(e) = E."""
    # The rest of the stream went through other random maps and meets W as a linear map does. The embedding is made of
    # rows of W: its image I is measured. Exact in the mean over all other weights; what is left out is how the rest
    # scatters with c, of relative size 1/features.
    stream, own, image = inputs
    grown = share[:, :, None] * share[:, None, :] * (image.matrix - own.matrix)
    return linear(rule, Node(rule, (), stream.points, rule.fan_out), (stream.like(stream.matrix + grown, stream.mean),))


def share_of(source: int, at: int, nodes: Sequence[Node], forward: Sequence[Signal | None]) -> Array:
    """How much of one node's own value another holds, (blocks, size): what comes through sums, scales and norms."""
    shares: dict[int, Array] = {}
    for index in range(source, at + 1):
        signal, node = forward[index], nodes[index]
        if signal is None:
            continue
        share = np.full_like(signal.mean, float(index == source))
        before = {one: shares[one] for one in node.inputs if one in shares and shares[one].shape == share.shape}
        for at_input, held in before.items():
            inner = forward[at_input]
            # every other rule sends it through random weights or a function, behind which nothing of it is told apart
            match node.rule:
                case kinds.Add(coefficients):
                    share = share + _merge(coefficients, node.inputs)[node.inputs.index(at_input)] * held
                case kinds.Scale(factor):
                    share = factor.mean * held
                case kinds.Normalize("rms" | "layer", eps, factor) if inner is not None:
                    share = factor.mean * held / np.sqrt(spread_of(node.rule, inner) + eps)
        shares[index] = share
    return shares[at]


def elementwise(rule: kinds.Elementwise, node: Node, inputs: Inputs) -> Signal:
    """K′ = E φ(x_a)φ(x_b) for Gaussian x with the signal's means and second moments; see `gaussian.map_pairs`."""
    (signal,) = inputs
    # wide sums are Gaussian; behind a sum that holds another function's output (a residual stream of rectified values)
    # the law over features is followed (`shapes`), pairs by a copula
    mapped = map_pairs(rule.activation, signal.matrix, signal.mean, shape=signal.shape, kept=signal.kept)
    return signal.like(mapped.matrix, mapped.mean, lambda: pushed(rule.activation, *signal.typical, signal.shape))


def elementwise_backward(rule: kinds.Elementwise, node: Node, inputs: Inputs, gradient: Signal) -> Gradients:
    """D′ = D ∘ E φ′(x_a)φ′(x_b): wide random weights make gradients independent of the values that they meet."""
    (signal,) = inputs
    kept, law = signal.kept, signal.shape
    mapped = map_pairs(
        rule.activation, signal.matrix, signal.mean, slope=True, shape=law, amplitude=gradient.shape, kept=kept
    )
    return (
        gradient.like(
            gradient.matrix * mapped.matrix,
            gradient.mean * mapped.mean,
            lambda: amplitude_before(rule.activation, *signal.typical, law, gradient.shape),
        ),
    )


def add(rule: kinds.Add, node: Node, inputs: Inputs) -> Signal:
    """K′ = Σ c_i² K_i + Σ_{i≠j} c_i c_j m_i m_jᵀ: inputs share nothing but their feature means."""
    parts = spread_all(inputs, node.points)
    # a branch whose last weights are centred and independent of the stream is independent of it; an input that is added
    # to itself is merged with itself
    merged = _merge(rule.coefficients, node.inputs)
    first = parts[0]
    matrix, mean = np.zeros_like(first.matrix), np.zeros_like(first.mean)
    for at, coefficient in merged.items():
        own = coefficient * parts[at].mean
        if own.any() and mean.any():
            cross = mean[:, :, None] * own[:, None, :]
            matrix += cross + np.swapaxes(cross, 1, 2)
        matrix += coefficient**2 * parts[at].matrix
        mean = mean + own
    return first.like(matrix, mean, lambda: summed(list(_terms(merged, tuple(parts)).values())))


def add_backward(rule: kinds.Add, node: Node, inputs: Inputs, gradient: Signal) -> Gradients:
    """D_i = c_i² D, summed over what was spread out."""
    merged = _merge(rule.coefficients, node.inputs)

    @cache
    def whole() -> tuple[dict[int, tuple[float, Array | None]], float, Array | None]:
        terms = _terms(merged, inputs)
        return terms, math.sqrt(sum(std**2 for std, _ in terms.values())), summed(list(terms.values()))

    def amplitude(at: int) -> Array | None:
        if gradient.shape is None:
            return None
        terms, std, law = whole()
        others = math.sqrt(max(std**2 - terms[at][0] ** 2, 0.0))
        return amplitude_of_term(gradient.shape, (std, law), terms[at], others)

    found = []
    for at, one in enumerate(inputs):
        coefficient = merged.get(at, 0.0)
        matrix = gradient.matrix if coefficient == 1.0 else coefficient**2 * gradient.matrix
        own = gather(gradient.like(matrix, coefficient * gradient.mean), one)
        found.append(replace(own, make_shape=partial(amplitude, at) if at in merged else None))
    return tuple(found)


def _terms(merged: Mapping[int, float], inputs: Inputs) -> dict[int, tuple[float, Array | None]]:
    """The standard deviation and the shape of every summand."""
    return {at: (abs(c) * inputs[at].typical[1], inputs[at].shape) for at, c in merged.items()}


def _merge(coefficients: tuple[float, ...], nodes: tuple[int, ...]) -> dict[int, float]:
    """The coefficient of each input, those of one node that comes twice added up at its first place."""
    if len(coefficients) != len(nodes):
        raise UsageError(f"expected one coefficient per input, got {len(coefficients)} for {len(nodes)} inputs")
    merged: dict[int, float] = {}
    for coefficient, node in zip(coefficients, nodes, strict=True):
        at = nodes.index(node)
        merged[at] = merged.get(at, 0.0) + coefficient
    return merged


SQUARE = Activation("square", lambda x: x * x, lambda x: 2.0 * x, degree=2.0, slopes=(1.0, -1.0))


def multiply(rule: kinds.Multiply, node: Node, inputs: Inputs) -> Signal:
    """K′ = K₁ ∘ K₂ for independent inputs; a value times itself is the function x², with Gaussian x."""
    if node.inputs[0] == node.inputs[1]:
        return elementwise(kinds.Elementwise(SQUARE), node, inputs[:1])
    left, right = spread_all(inputs, node.points)
    return left.like(left.matrix * right.matrix, left.mean * right.mean)


def multiply_backward(rule: kinds.Multiply, node: Node, inputs: Inputs, gradient: Signal) -> Gradients:
    """D₁ = D ∘ K₂ and D₂ = D ∘ K₁."""
    if node.inputs[0] == node.inputs[1]:
        (whole,) = elementwise_backward(kinds.Elementwise(SQUARE), node, inputs[:1], gradient)
        return whole, whole.like(np.zeros_like(whole.matrix))
    left, right = spread_all(inputs, node.points)
    return (
        gather(gradient.like(gradient.matrix * right.matrix, gradient.mean * right.mean), inputs[0]),
        gather(gradient.like(gradient.matrix * left.matrix, gradient.mean * left.mean), inputs[1]),
    )


def spread_all(inputs: Inputs, points: Points) -> list[Signal]:
    """All inputs over the pairs of those that have every point: what has no positions, or one sample, is repeated."""
    whole = next((one for one in inputs if one.points.size == points.size), None)
    spacing = (1,) * len(points.grid) if whole is None else whole.spacing
    parts = [one if one.points.size == points.size else _spread_out(one, points, spacing) for one in inputs]
    if any(one.matrix.shape != parts[0].matrix.shape for one in parts):
        raise UsageError(f"expected inputs with the same sub-grids, got {[one.spacing for one in parts]}")
    return parts


def _spread_out(signal: Signal, points: Points, spacing: tuple[int, ...]) -> Signal:
    if not signal.is_full or signal.points.positions not in (1, points.positions):
        raise UsageError(f"expected signals over {points} or one that spreads out to them, got {signal.points}")
    samples = np.arange(points.samples) if signal.points.samples > 1 else np.zeros(points.samples, dtype=int)
    places = np.arange(points.positions) if signal.points.positions > 1 else np.zeros(points.positions, dtype=int)
    index = (samples[:, None] * signal.points.positions + places).ravel()[block_points(points, spacing)]
    matrix = np.stack([signal.gram[np.ix_(one, one)] for one in index])
    return Signal(matrix, points, signal.mean[0][index], spacing)


def gather(gradient: Signal, target: Signal) -> Signal:
    """The gradient at a signal that was spread out: the sum over its copies."""
    if gradient.points.size == target.points.size:
        return Signal(gradient.matrix, target.points, gradient.mean, target.spacing)
    samples, positions = gradient.points.samples, gradient.points.positions
    if target.points.positions == 1:
        pairs, means = gradient.position_sums()
        summed, mean = pairs.reshape(samples, 1, samples, 1), means.reshape(samples, 1)
    else:
        summed = gradient.gram.reshape(samples, positions, samples, positions)
        mean = gradient.mean.reshape(samples, positions)
    if target.points.samples == 1:
        summed, mean = summed.sum(axis=(0, 2), keepdims=True), mean.sum(axis=0, keepdims=True)
    return Signal.full(summed.reshape(target.points.size, -1), target.points, mean)


def mixed(matrix: Array, signal: Signal, points: Points) -> Signal:
    """The positions of each sample mixed by a fixed matrix (positions out, positions in)."""
    samples, out = points.samples, matrix.shape[0]
    if matrix.shape != (points.positions, signal.points.positions):
        raise UsageError(
            f"expected a matrix of {points.positions} × {signal.points.positions} positions, got {matrix.shape}"
        )
    rows = matrix @ signal.gram.reshape(samples, -1, signal.points.size)
    pairs = rows.reshape(samples * out * samples, -1) @ matrix.T
    mean = signal.mean.reshape(samples, -1) @ matrix.T
    return Signal.full(pairs.reshape(points.size, points.size), points, mean)


def join(rule: kinds.Join, node: Node, inputs: Inputs, features: tuple[int, ...]) -> Signal:
    """Features side by side: the mean of the K_i weighed by their features. Positions side by side: blocks of K′."""
    if rule.axis == "features":
        parts = spread_all(inputs, node.points)
        shares = np.array(features) / sum(features)
        matrix = sum(share * one.matrix for share, one in zip(shares, parts, strict=True))
        mean = sum(share * one.mean for share, one in zip(shares, parts, strict=True))
        return parts[0].like(np.asarray(matrix), np.asarray(mean))
    where = _places(node.points, inputs)
    mean = np.zeros(node.points.size)
    for at, one in zip(where, inputs, strict=True):
        mean[at] = one.mean[0]
    matrix = np.outer(mean, mean)  # points of different inputs share nothing but their feature means
    for at, one in zip(where, inputs, strict=True):
        matrix[np.ix_(at, at)] = one.gram
    return Signal.full(matrix, node.points, mean)


def join_backward(
    rule: kinds.Join, node: Node, inputs: Inputs, gradient: Signal, features: tuple[int, ...]
) -> Gradients:
    """Each input's block of D; of joined features each gets its share, as if all features weighed alike."""
    if rule.axis == "features":
        shares = [count / sum(features) for count in features]
        parts = [gradient.like(share * gradient.matrix, share * gradient.mean) for share in shares]
        return tuple(gather(part, one) for part, one in zip(parts, inputs, strict=True))
    where = _places(node.points, inputs)
    return tuple(
        Signal.full(gradient.gram[np.ix_(at, at)], one.points, gradient.mean[0][at])
        for at, one in zip(where, inputs, strict=True)
    )


def _places(points: Points, inputs: Inputs) -> list[NDArray[np.int64]]:
    """The numbers of each input's points within the joined ones."""
    numbers = np.arange(points.size).reshape(points.samples, points.positions)
    ends = np.cumsum([one.points.positions for one in inputs])
    if ends[-1] != points.positions:
        raise UsageError(f"expected inputs with {points.positions} positions together, got {ends[-1]}")
    return [np.asarray(part.ravel(), dtype=np.int64) for part in np.split(numbers, ends[:-1], axis=1)]


def flatten(rule: kinds.Flatten, node: Node, inputs: Inputs) -> Signal:
    """K′[s, t] = the mean over positions of K at equal positions."""
    (signal,) = inputs
    mean = signal.mean.reshape(len(signal.matrix), signal.points.samples, -1).mean(axis=(0, 2))
    return Signal.full(signal.sample_gram, node.points, mean)


def flatten_backward(rule: kinds.Flatten, node: Node, inputs: Inputs, gradient: Signal) -> Gradients:
    """D/positions at equal positions; gradients of different positions come through different weights: 0."""
    return (over_positions(gradient, inputs[0], np.eye, inputs[0].points.positions),)


def over_positions(gradient: Signal, signal: Signal, pairs: Callable[[int], Array], divisor: float) -> Signal:
    """The gradient at one point of each sample, handed to these pairs of followed positions, over a divisor."""
    rest = signal.matrix.shape[1] // signal.points.samples
    block = np.kron(gradient.gram / divisor, pairs(rest)).astype(np.float64)
    mean = np.repeat(gradient.mean[0] / signal.points.positions, rest)
    count = len(signal.matrix)
    return signal.like(np.repeat(block[None], count, axis=0), np.repeat(mean[None], count, axis=0))


def turned(rule: kinds.Rotate, signal: Signal) -> Signal:
    """K′_ab = K_ab · the mean over pairs of features of cos(θ_a − θ_b), for features that are alike."""
    cosine, sine = np.cos(rule.angles), np.sin(rule.angles)
    factor = (cosine @ cosine.T + sine @ sine.T) / rule.angles.shape[1]
    if len(factor) != signal.points.positions:
        raise UsageError(f"expected angles for {signal.points.positions} positions, got {len(factor)}")
    samples = signal.points.samples
    mean = signal.mean * np.tile((cosine - sine).mean(axis=1), samples)
    return Signal.full(signal.gram * np.tile(factor, (samples, samples)), signal.points, mean)


def weight_gradient(seen: Signal, gradient: Signal, fan_in: int, samples: int | None = None) -> float:
    """E ‖dL/dW‖² = n_in Σ_ab D_ab K_ab, since dL/dW = Σ_a g_a h_aᵀ; `seen` is K, or its window sums."""
    products, followed = gradient.matrix * seen.matrix, gradient.points.samples
    whole = float(gradient.row_sums(products).sum())
    if samples is None or not 1 < followed < samples:
        return fan_in * whole
    # of a batch of more samples than are followed, pairs of different ones are more numerous than pairs within one,
    # which D stands for already: (samples − 1)/(followed − 1) times
    within = float(sum(one.sum() for one in gradient.like(gradient.weigh(products)).tokens()))
    return fan_in * (within + (samples - 1) / (followed - 1) * (whole - within))
