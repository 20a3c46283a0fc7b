"""How far one network scatters around the prediction, which is the mean over seeds: the laws of finite width.

A layer of N random features estimates every second moment by a mean over N draws. Its relative error is a source of
noise of variance 2/N for the size of the signal and 1/N for each correlation, which the rules behind it pass on: a norm
removes noise of size, a residual sum dilutes it, a function multiplies noise of correlation by the slope of its kernel
map. To first order the noise at a node is a linear combination of the sources; its coefficients are followed here,
forwards for the signal and backwards for the gradient. Points that are alike err alike, so a mean over points averages
noise only as far as their Gram matrix has directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sounding.activations.activation import Activation
from sounding.theory.signal.description import (
    Add,
    Array,
    Attention,
    Convolution,
    Description,
    Elementwise,
    Given,
    Join,
    Linear,
    Mix,
    Multiply,
    Node,
    Normalize,
    Part,
    Pool,
)
from sounding.theory.signal.gaussian import map_pairs
from sounding.theory.signal.propagate import Propagation
from sounding.theory.signal.signal import Signal

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(96)  # a kink off 0 leaves 0.2% of a kurtosis
# A pair of Gaussians in polar coordinates: radii r = √(2s) by Gauss–Laguerre in s, and angles by Gauss–Legendre between
# those at which one of the two is zero. Homogeneous functions are exact, smooth ones to 1e-3 of the scatter; a Hermite
# grid of 96 × 96 costs six times as much, and misses 1% of a rectifier's.
RADII, CHANCES = np.polynomial.laguerre.laggauss(32)
ANGLES, ARCS = np.polynomial.legendre.leggauss(12)
FEW = 256  # points that tell how alike all of them are; their products cost the cube
STEP = 1e-3  # relative step of numerical slopes: their error, 1e-6, is far below what a spread deserves


@dataclass(frozen=True)
class Spread:
    """The scatter over seeds at every node, to first order in 1/width.

    Args:
        size: the standard deviation of ln(mean square).
        directions: 1/variance of a correlation between samples, in units of (1 − c²)²: the number of independent
            features that a Gram matrix with this scatter would have.
        tokens: the number of independent features for correlations between positions of one sample.
        lengths: the variance of ln of a sample's mean square beside the others'. ReLU and batch norm keep it, so that
            over many layers lengths walk apart; norms of each sample take it away.
        gradient: the standard deviation of the logarithm of the squared gradient norm.
        weight_gradient: the same for the squared norm of the weight's gradient.
    """

    size: Array
    directions: Array
    tokens: Array
    lengths: Array
    gradient: Array
    weight_gradient: Array


def spread(description: Description, propagation: Propagation) -> Spread:
    """The scatter over seeds of what a description predicts."""
    nodes, forward = description.nodes, propagation.forward
    count = len(nodes)
    # The second half of the columns of `size` is of one sample's length beside the others', of `shape` of pairs of
    # positions; the first halves are of the whole batch and of pairs of samples.
    sizes, shape = np.zeros((count, 2 * count)), np.zeros((count, 2 * count))
    size, length = sizes[:, :count], sizes[:, count:]
    size_noise, length_noise, shape_noise = np.zeros(count), np.zeros(count), np.zeros(2 * count)
    alike = np.array([(1.0, 1.0) if one is None else (one.alike, _alike_positions(one)) for one in forward])
    for index, node in enumerate(nodes):
        signal = forward[index]
        inputs = [one for at in node.inputs if (one := forward[at]) is not None]
        if signal is None or isinstance(node.rule, Given) or len(inputs) < len(node.inputs):
            continue
        before = list(node.inputs)
        cosines = [
            math.hypot(one.cosine, math.sqrt(shape[at, :count] ** 2 @ shape_noise[:count]))
            for at, one in zip(before, inputs, strict=True)
        ]
        sizes[index], shape[index] = _passed(node, signal, inputs, sizes[before], shape[before], cosines)
        if isinstance(node.rule, Normalize) and node.rule.kind == "batch":
            length[index] = length[before[0]]  # a channel is divided for all samples alike
        if isinstance(node.rule, Attention | Mix | Pool):
            # positions that are averaged err alike: what a mean over different ones left out of a source comes back
            grown = np.maximum(alike[index] / np.maximum(alike, alike[before[-1]]), 1.0) ** 0.5
            size[index] *= grown[:, 0]
            shape[index, :count] *= grown[:, 1]
        if isinstance(node.rule, Mix | Pool):
            # the size of an average is made of correlations between positions, whose scatter no norm takes away
            more, scattered = alike[index, 0] - alike[before[0], 0], shape[before[0], count:] ** 2 @ shape_noise[count:]
            size[index, index], size_noise[index] = 1.0, 2 * max(more, 0.0) * scattered
        own = _own_noise(node, signal, inputs, nodes, cosines)
        if own is not None:
            size[index, index] = shape[index, index] = shape[index, count + index] = length[index, index] = 1.0
            length_noise[index] = own[0] * alike[index, 1] * (1 - signal.cosine**2)
            size_noise[index], shape_noise[count + index] = own[0] * alike[index, 0], own[1]
            shape_noise[index] = own[1] * alike[index, 1]
    gradient, gradient_noise = _backwards(description, propagation, size)
    size_variance = (size**2) @ size_noise
    gradient_variance = (gradient**2) @ np.concatenate([size_noise, gradient_noise])
    inputs_of = np.array([node.inputs[0] if node.inputs else index for index, node in enumerate(nodes)])
    # The gradient of a weight is a sum over points of products: it has the noise of both factors.
    joint = np.array(
        [_joint(node, forward, gradient) for node, gradient in zip(nodes, propagation.backward, strict=True)]
    )
    forward_part = ((size[inputs_of] + gradient[:, :count]) ** 2) @ size_noise
    backward_part = (gradient[:, count:] ** 2) @ gradient_noise
    arrived_alike = np.array([1.0 if one is None else one.alike for one in propagation.backward])
    own_alike = alike[inputs_of, 0]
    weight_variance = forward_part * np.maximum(joint / own_alike, 1) + backward_part * np.maximum(
        joint / arrived_alike, 1
    )
    widths = np.maximum(np.array([node.features for node in nodes]), 1)
    return Spread(
        np.sqrt(size_variance),
        1.0 / np.maximum((shape[:, :count] ** 2) @ shape_noise[:count], 1e-300),
        1.0 / np.maximum((shape[:, count:] ** 2) @ shape_noise[count:], 1e-300),
        (length**2) @ length_noise,
        np.sqrt(gradient_variance),
        np.sqrt(weight_variance + 2 * joint / widths),
    )


def _passed(
    node: Node, signal: Signal, inputs: Sequence[Signal], sizes: Array, shapes: Array, cosines: Sequence[float]
) -> tuple[Array, Array]:
    """How the noise of the inputs arrives at a node."""
    rule, q = node.rule, signal.mean_square
    match rule:
        case Linear() | Convolution():
            share = max(0.0, 1.0 - rule.bias.second_moment / q) if q > 0 else 1.0
            return share * sizes[0], share * shapes[0]
        case Elementwise():
            slope = _size_slope(rule.activation, inputs[0])
            return slope * sizes[0], _pairs(rule.activation, *_typical_pair(inputs[0]))[0] * shapes[0]
        case Normalize(running=None):
            left = rule.eps / (inputs[0].mean_square + rule.eps)
            return left * sizes[0], shapes[0]
        case Add() | Join():
            shares = _shares(rule.coefficients if isinstance(rule, Add) else [1.0] * len(inputs), inputs)
            return shares @ sizes, shares @ shapes
        case Multiply():
            return sizes.sum(axis=0), _product(*cosines)[0] @ shapes
        case Attention():
            return sizes[-1], shapes[-1]
    return sizes[0], shapes[0]


def _product(first: float, second: float) -> tuple[Array, float]:
    """What a product of independent pairs, of correlations c and d, makes of their scatter, and what it adds.

    r = c d moves by d δc + c δd, in units of 1 − r². The influence of one feature on r is y_a y_b − r (y_a² + y_b²)/2
    with y the product of two Gaussian values, whose fourth moments are products of theirs.
    """
    c, d = np.clip((first, second), -0.999, 0.999)
    r = c * d
    slopes = np.array([d * (1 - c**2), c * (1 - d**2)])
    pairs = (1 + 2 * c**2) * (1 + 2 * d**2)
    whole = pairs - 18 * r**2 + r**2 / 2 * (9 + pairs)
    return slopes / (1 - r**2), max(whole - float(slopes @ slopes), 0.0) / (1 - r**2) ** 2


def _shares(coefficients: Sequence[float], inputs: Sequence[Signal]) -> Array:
    """Which share of a sum's mean square each summand has."""
    parts = np.array([c**2 * one.mean_square for c, one in zip(coefficients, inputs, strict=True)])
    return np.asarray(parts / max(parts.sum(), 1e-300))


def _own_noise(
    node: Node, signal: Signal, inputs: Sequence[Signal], nodes: Sequence[Node], cosines: Sequence[float]
) -> tuple[float, float] | None:
    """The noise that a node's own finite number of features adds to sizes and to correlations, of one point or pair."""
    rule, features = node.rule, max(node.features, 1)
    match rule:
        case Linear() | Convolution():
            # an orthogonal matrix keeps lengths and angles of what it does not project away
            share = 1.0 - rule.bias.second_moment / signal.mean_square if signal.mean_square > 0 else 1.0
            paired = 1.0 - share**2 * _kept(rule, backwards=False)
            extra = 2 * paired
        case Elementwise():
            moments = _moments(rule.activation, _unit(rule.activation, inputs[0].mean_square))
            slope = _size_slope(rule.activation, inputs[0])
            extra = max(moments.kurtosis - 1 - 2 * slope**2, 0.0)
            paired = _pairs(rule.activation, *_typical_pair(inputs[0]))[1]
        case Add():
            # The cross term of two summands is 0 in the mean only: it scatters by √(2/N) of their geometric mean.
            crossed = 1 - float(np.sum(_shares(rule.coefficients, inputs) ** 2))
            extra, paired = 2 * crossed, crossed
        case Multiply():
            # E y⁴ = 9 of a product of Gaussian values, of which the scatter of the two explains 2 each
            extra, paired = 4.0, _product(*cosines)[1]
        case Part():
            whole = nodes[node.inputs[0]].features
            extra, paired = (2.0 * (1 - node.features / whole), 1 - node.features / whole) if whole else (0.0, 0.0)
        case _:
            return None
    return extra / features, paired / features


def _kept(rule: Linear | Convolution, *, backwards: bool) -> float:
    """The share of a vector that an orthogonal matrix keeps, whatever its seed; 0 for independent entries."""
    if not isinstance(rule, Linear) or rule.weight.shape != "orthogonal":
        return 0.0
    share = rule.fan_in / rule.fan_out if backwards else rule.fan_out / rule.fan_in
    return min(1.0, share)


def _backwards(description: Description, propagation: Propagation, size: Array) -> tuple[Array, Array]:
    """The coefficients of the gradient's noise in the forward sources and in those of the backward pass."""
    nodes, count = description.nodes, len(description.nodes)
    gradient, noise = np.zeros((count, 3 * count)), np.zeros(2 * count)
    weight, squares = np.zeros(count), np.zeros(count)  # of what has arrived so far
    for index in range(count - 1, -1, -1):
        node, arrived = nodes[index], propagation.backward[index]
        if arrived is None or isinstance(node.rule, Given) or not node.inputs:
            continue
        if weight[index] > 0:
            gradient[index] /= weight[index]
            # Gradients that arrive from several sides have a cross term as the summands of a signal do.
            crossed = 1 - squares[index] / weight[index] ** 2
            gradient[index, 2 * count + index] = 1.0
            noise[count + index] = 2 * crossed / max(node.features, 1) * arrived.alike
        inputs = [propagation.forward[at] for at in node.inputs]
        known = [one for one in inputs if one is not None]
        if len(known) < len(inputs):
            continue
        vector, extra = _returned(node, known, gradient[index], size[list(node.inputs)], arrived)
        if extra > 0:
            noise[index] = extra
            vector = vector.copy()
            vector[count + index] = 1.0
        total = _gain(node, known) * arrived.total
        for at in node.inputs:
            gradient[at] += total * vector
            weight[at] += total
            squares[at] += total**2
    return gradient, noise


def _returned(
    node: Node, inputs: Sequence[Signal], gradient: Array, sizes: Array, arrived: Signal
) -> tuple[Array, float]:
    """The noise of a gradient behind a node, going backwards, and the variance of what the node adds to it."""
    rule, alike = node.rule, arrived.alike
    vector = gradient.copy()
    width = sizes.shape[1]
    match rule:
        case Linear():
            return vector, 2.0 / rule.fan_in * alike * (1 - _kept(rule, backwards=True))
        case Convolution():
            return vector, 2.0 / rule.channels_in * alike
        case Elementwise():
            moments = _moments(rule.activation, _unit(rule.activation, inputs[0].mean_square))
            vector[:width] += moments.gradient_slope * sizes[0]
            # how many units let a gradient through is one number for points that are alike, whatever their gradients
            together = max(alike, inputs[0].alike)
            return vector, max(moments.slope_kurtosis - 1, 0.0) / max(node.features, 1) * together
        case Normalize(running=None):
            vector[:width] -= sizes[0]
            return vector, 0.0
        case Multiply():
            vector[:width] += sizes.mean(axis=0)
            return vector, 2.0 / max(node.features, 1) * alike
        case Attention():
            # a gradient at queries is made of gradients, values and keys, each of finitely many features
            return vector, 6.0 / max(node.features, 1) * alike
    return vector, 0.0


def _gain(node: Node, inputs: Sequence[Signal]) -> float:
    """Roughly by how much a squared gradient grows through a node, to weigh what arrives from several sides."""
    rule = node.rule
    match rule:
        case Linear() | Convolution():
            fan = rule.fan_in if isinstance(rule, Linear) else rule.channels_in
            return fan * rule.weight.second_moment
        case Normalize(running=None):
            return rule.scale.second_moment / (inputs[0].mean_square + rule.eps)
    return 1.0


@dataclass(frozen=True)
class _Moments:
    kurtosis: float  # E φ⁴ / (E φ²)²
    slope_kurtosis: float  # E φ′⁴ / (E φ′²)²
    gradient_slope: float  # d ln E φ′² / d ln q


def _unit(activation: Activation, q: float) -> float:
    """The mean square at which to ask for ratios of moments: any does for a homogeneous function."""
    return q if activation.degree is None else 1.0


@lru_cache(maxsize=256)
def _moments(activation: Activation, q: float) -> _Moments:
    """Ratios of moments of φ and of its slope at values of mean square q."""

    def mean(power: int, scale: float = 1.0, *, slope: bool = False) -> float:
        x = NODES * math.sqrt(q * scale)
        values = activation.derivative(x) if slope else activation(x)
        return float(WEIGHTS @ np.abs(values) ** power / WEIGHTS.sum())

    square, steep = mean(2), mean(2, slope=True)
    if not (square > 0 and steep > 0):
        return _Moments(3.0, 1.0, 0.0)
    change = math.log(mean(2, 1 + STEP, slope=True) / mean(2, 1 - STEP, slope=True)) / (2 * STEP)
    return _Moments(mean(4) / square**2, mean(4, slope=True) / steep**2, change)


def _size_slope(activation: Activation, signal: Signal) -> float:
    """d ln E φ² / d ln q at the signal's mean square."""
    if activation.degree is not None:
        return activation.degree
    q = signal.mean_square
    values = [float(WEIGHTS @ activation(NODES * math.sqrt(q * (1 + h))) ** 2) for h in (STEP, -STEP)]
    return math.log(values[0] / values[1]) / (2 * STEP) if min(values) > 0 else 1.0


@lru_cache(maxsize=256)
def _pairs(activation: Activation, c: float, q: float) -> tuple[float, float]:
    """What a function does to the scatter of the correlation c of a pair of samples of mean square q.

    First by how much it multiplies the scatter, in units of 1 − c²: r = E φφ/E φ² has the slope q E φ′φ′/E φ² in c
    by Plackett. Then the variance, times N, by which r over N features scatters beyond what the Gaussian pair explains.
    The influence of one feature on r is φ(x)φ(y)/E φ² − r (φ(x)² + φ(y)²)/(2 E φ²); for the Gaussian pair itself it has
    the variance (1 − c²)².
    """
    apart = math.acos(c)
    edges = np.array([-math.pi / 2, apart - math.pi / 2, math.pi / 2, apart + math.pi / 2, 1.5 * math.pi])
    half = 0.5 * np.diff(edges)[:, None]
    turn = (edges[:-1, None] + half * (1 + ANGLES)).ravel()
    weights = CHANCES[:, None] * (half * ARCS).ravel() / (2 * math.pi)
    x, y = (np.sqrt(2 * RADII)[:, None] * np.cos(turn - shift) for shift in (0.0, apart))
    first, second = (activation(math.sqrt(q) * one.ravel()).reshape(weights.shape) for one in (x, y))
    square = float(np.sum(weights * first**2))
    if not square > 0:
        return 0.0, 0.0
    r = float(np.sum(weights * first * second)) / square
    if activation.kinks:  # which the quadrature does not see, and deep networks multiply slopes of many layers
        pair = np.array([[[q, q * c], [q * c, q]]])
        steep, values = (
            map_pairs(activation, pair, np.zeros((1, 2)), slope=which).matrix[0] for which in (True, False)
        )
        r, slope = float(values[0, 1] / values[0, 0]), q * float(steep[0, 1] / values[0, 0])
    else:
        slopes = [activation.derivative(math.sqrt(q) * one.ravel()).reshape(weights.shape) for one in (x, y)]
        slope = q * float(np.sum(weights * slopes[0] * slopes[1])) / square
    influence = first * second / square - r * (first**2 + second**2) / (2 * square)
    base = x * y - c * (x**2 + y**2) / 2
    covariance = float(np.sum(weights * influence * base))
    left = float(np.sum(weights * influence**2)) - covariance**2 / (1 - c**2) ** 2
    room = max(1 - r**2, 1e-6)
    return slope * (1 - c**2) / room, max(left, 0.0) / room**2


def _typical_pair(signal: Signal) -> tuple[float, float]:
    """The correlation of a typical pair of samples, away from ±1 where its scatter vanishes, and their mean square."""
    return float(np.clip(signal.cosine, -0.999, 0.999)), signal.mean_square


def _joint(node: Node, forward: Sequence[Signal | None], gradient: Signal | None) -> float:
    """tr(DKDK)/(tr DK)²: how few directions of points decide the gradient of a weight, of up to FEW points."""
    signal = forward[node.inputs[0]] if node.inputs else None
    if gradient is None or signal is None or not isinstance(node.rule, Linear | Convolution):
        return 0.0
    if gradient.matrix.shape != signal.matrix.shape:  # a window or a stride lies between them: the less spread of both
        return max(gradient.alike, signal.alike)
    product = signal.matrix[0][:FEW, :FEW] @ gradient.matrix[0][:FEW, :FEW]
    trace = float(product.trace())
    return min(1.0, float(np.einsum("ij,ji->", product, product)) / trace**2) if trace > 0 else 1.0


def _alike_positions(signal: Signal) -> float:
    """How far positions of one sample err alike: 1 for vectors and for positions that are all one direction."""
    if signal.points.positions <= 1:
        return 1.0
    squares = signal.like(signal.weigh(signal.matrix**2)).tokens()
    ratios = [
        float(np.sum(square)) / max(float(np.trace(one)) ** 2, 1e-300)
        for one, square in zip(signal.tokens(), squares, strict=True)
    ]
    return min(1.0, float(np.mean(ratios)) / len(signal.matrix))
