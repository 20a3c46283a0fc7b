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
from sounding.theory.integrals.panels import composite
from sounding.theory.signal import description as kinds
from sounding.theory.signal.description import Array, Description, Node
from sounding.theory.signal.gaussian import map_pairs
from sounding.theory.signal.propagate import Propagation
from sounding.theory.signal.signal import Signal

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(96)  # a kink off 0 leaves 0.2% of a kurtosis
# A pair of Gaussians in polar coordinates: radii r = √(2s) by Gauss–Laguerre in s, and angles by Gauss–Legendre between
# those at which one of the two is zero. Homogeneous functions are exact, smooth ones to 1e-3 of the scatter; a Hermite
# grid of 96 × 96 costs six times as much, and misses 1% of a rectifier's.
RADII, CHANCES = np.polynomial.laguerre.laggauss(32)
FEW = 256  # points that tell how alike all of them are; their products cost the cube
STEP = 1e-3  # relative step of numerical slopes: their error, 1e-6, is far below what a spread deserves


@dataclass(frozen=True)
class Spread:
    """The scatter over seeds at every node, to first order in 1/width."""

    size: Array  # the standard deviation of ln(mean square)
    # 1/variance of a correlation between samples, in units of (1 − c²)²: the number of independent features that a Gram
    # matrix with this scatter would have
    directions: Array
    tokens: Array  # the number of independent features for correlations between positions of one sample
    # the variance of ln of a sample's mean square beside the others'. ReLU and batch norm keep it, so that over many
    # layers lengths walk apart; norms of each sample take it away.
    lengths: Array
    gradient: Array  # the standard deviation of the logarithm of the squared gradient norm
    weight_gradient: Array  # the same for the squared norm of the weight's gradient


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
        if signal is None or isinstance(node.rule, kinds.Given) or len(inputs) < len(node.inputs):
            continue
        before = list(node.inputs)
        cosines = [
            math.hypot(one.cosine, math.sqrt(shape[at, :count] ** 2 @ shape_noise[:count]))
            for at, one in zip(before, inputs, strict=True)
        ]
        sizes[index], shape[index], own = _passed(node, signal, inputs, nodes, sizes[before], shape[before], cosines)
        if isinstance(node.rule, kinds.Normalize) and node.rule.kind == "batch":
            length[index] = length[before[0]]  # a channel is divided for all samples alike
        if isinstance(node.rule, kinds.Attention | kinds.Mix | kinds.Pool):
            # positions that are averaged err alike: what a mean over different ones left out of a source comes back
            grown = np.maximum(alike[index] / np.maximum(alike, alike[before[-1]]), 1.0) ** 0.5
            size[index] *= grown[:, 0]
            shape[index, :count] *= grown[:, 1]
        if isinstance(node.rule, kinds.Mix | kinds.Pool):
            # the size of an average is made of correlations between positions, whose scatter no norm takes away
            more, scattered = alike[index, 0] - alike[before[0], 0], shape[before[0], count:] ** 2 @ shape_noise[count:]
            size[index, index], size_noise[index] = 1.0, 2 * max(more, 0.0) * scattered
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
    node: Node,
    signal: Signal,
    inputs: Sequence[Signal],
    nodes: Sequence[Node],
    sizes: Array,
    shapes: Array,
    cosines: Sequence[float],
) -> tuple[Array, Array, tuple[float, float] | None]:
    """How the noise of the inputs arrives at a node, in sizes and in correlations, and what the node adds to them.

    The last is the noise of a finite number of features, for one point and for one pair; None where there is none.
    """
    rule, q = node.rule, signal.mean_square
    size, shape, own = sizes[0], shapes[0], None
    match rule:
        case kinds.Linear() | kinds.Convolution():
            share = max(0.0, 1.0 - rule.bias.second_moment / q) if q > 0 else 1.0
            size, shape = share * size, share * shape
            # an orthogonal matrix keeps lengths and angles of what it does not project away
            paired = 1.0 - share**2 * _kept(rule, backwards=False)
            own = 2 * paired, paired
        case kinds.Elementwise():
            moments, (slope, paired) = _moments_at(rule.activation, inputs[0]), _pairs_at(rule.activation, inputs[0])
            size, shape = moments.size_slope * size, slope * shape
            own = max(moments.kurtosis - 1 - 2 * moments.size_slope**2, 0.0), paired
        case kinds.Normalize(running=None):
            # a norm takes noise of size off, but for the share that eps has in its root
            size = rule.eps / (inputs[0].mean_square + rule.eps) * size
        case kinds.Add() | kinds.Join():
            shares = _shares(rule.coefficients if isinstance(rule, kinds.Add) else [1.0] * len(inputs), inputs)
            size, shape = shares @ sizes, shares @ shapes
            if isinstance(rule, kinds.Add):
                # The cross term of two summands is 0 in the mean only: it scatters by √(2/N) of their geometric mean.
                crossed = 1 - float(np.sum(shares**2))
                own = 2 * crossed, crossed
        case kinds.Multiply():
            slopes, paired = _product(*cosines)
            size, shape = sizes.sum(axis=0), slopes @ shapes
            own = (
                4.0,
                paired,
            )  # E y⁴ = 9 of a product of Gaussian values, of which the scatter of the two explains 2 each
        case kinds.Part():
            whole = nodes[node.inputs[0]].features
            left = 1 - node.features / whole if whole else 0.0
            own = 2 * left, left
        case kinds.Attention():
            size, shape = sizes[-1], shapes[-1]  # those of the values
    features = max(node.features, 1)
    return size, shape, None if own is None else (own[0] / features, own[1] / features)


def _product(first: float, second: float) -> tuple[Array, float]:
    """What a product of independent pairs, of correlations c and d, makes of their scatter, and what it adds."""
    # r = c d moves by d δc + c δd, in units of 1 − r². The influence of one feature on r is y_a y_b − r (y_a² + y_b²)/2
    # with y the product of two Gaussian values, whose fourth moments are products of theirs.
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


def _kept(rule: kinds.Linear | kinds.Convolution, *, backwards: bool) -> float:
    """The share of a vector that an orthogonal matrix keeps, whatever its seed; 0 for independent entries."""
    if not isinstance(rule, kinds.Linear) or rule.weight.shape != "orthogonal":
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
        if arrived is None or isinstance(node.rule, kinds.Given) or not node.inputs:
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
        vector, extra, gain = _returned(node, known, gradient[index], size[list(node.inputs)], arrived)
        if extra > 0:
            noise[index], vector[count + index] = extra, 1.0
        total = gain * arrived.total
        for at in node.inputs:
            gradient[at] += total * vector
            weight[at] += total
            squares[at] += total**2
    return gradient, noise


def _returned(
    node: Node, inputs: Sequence[Signal], gradient: Array, sizes: Array, arrived: Signal
) -> tuple[Array, float, float]:
    """The noise of a gradient in front of a node, the variance of what the node adds to it, and the node's gain.

    The gain, by how much a squared gradient grows, is rough: it weighs what arrives from several sides.
    """
    rule, alike, features = node.rule, arrived.alike, max(node.features, 1)
    vector, width = gradient.copy(), sizes.shape[1]
    extra, gain = 0.0, 1.0
    match rule:
        case kinds.Linear() | kinds.Convolution():
            fan, kept = (
                (rule.fan_in if isinstance(rule, kinds.Linear) else rule.channels_in),
                _kept(rule, backwards=True),
            )
            extra, gain = 2.0 / fan * alike * (1 - kept), fan * rule.weight.second_moment
        case kinds.Elementwise():
            moments = _moments_at(rule.activation, inputs[0])
            vector[:width] += moments.gradient_slope * sizes[0]
            # how many units let a gradient through is one number for points that are alike, whatever their gradients
            extra = max(moments.slope_kurtosis - 1, 0.0) / features * max(alike, inputs[0].alike)
        case kinds.Normalize(running=None):
            vector[:width] -= sizes[0]  # a gradient is divided by the size in front of the norm
            gain = rule.scale.second_moment / (inputs[0].mean_square + rule.eps)
        case kinds.Multiply():
            vector[:width] += sizes.mean(axis=0)
            extra = 2.0 / features * alike
        case kinds.Attention():
            # a gradient at queries is made of gradients, values and keys, each of finitely many features
            extra = 6.0 / features * alike
    return vector, extra, gain


@dataclass(frozen=True)
class _Moments:
    kurtosis: float  # E φ⁴ / (E φ²)²
    size_slope: float  # d ln E φ² / d ln q
    slope_kurtosis: float  # E φ′⁴ / (E φ′²)²
    gradient_slope: float  # d ln E φ′² / d ln q


def _moments_at(activation: Activation, signal: Signal) -> _Moments:
    """`_moments` at a signal's mean square; for a homogeneous function any mean square has the same ratios."""
    return _moments(activation, signal.mean_square if activation.degree is None else 1.0)


@lru_cache(maxsize=256)
def _moments(activation: Activation, q: float) -> _Moments:
    """Ratios of moments of φ and of its slope at values of mean square q."""

    def mean(power: int, scale: float = 1.0, *, slope: bool = False) -> float:
        x = NODES * math.sqrt(q * scale)
        values = activation.derivative(x) if slope else activation(x)
        return float(WEIGHTS @ np.abs(values) ** power / WEIGHTS.sum())

    def change(*, slope: bool) -> float:
        return math.log(mean(2, 1 + STEP, slope=slope) / mean(2, 1 - STEP, slope=slope)) / (2 * STEP)

    square, steep = mean(2), mean(2, slope=True)
    if not square > 0:
        return _Moments(3.0, 1.0, 1.0, 0.0)
    growth = change(slope=False) if activation.degree is None else activation.degree
    if not steep > 0:
        return _Moments(3.0, growth, 1.0, 0.0)
    return _Moments(mean(4) / square**2, growth, mean(4, slope=True) / steep**2, change(slope=True))


def _pairs_at(activation: Activation, signal: Signal) -> tuple[float, float]:
    """`_pairs` at a typical pair of samples, away from correlations of ±1, where the scatter vanishes."""
    return _pairs(activation, float(np.clip(signal.cosine, -0.999, 0.999)), signal.mean_square)


@lru_cache(maxsize=256)
def _pairs(activation: Activation, c: float, q: float) -> tuple[float, float]:
    """By how much a function multiplies the scatter of a pair's correlation c, in units of 1 − c², and what it adds."""
    apart = math.acos(c)
    edges = np.array([-math.pi / 2, apart - math.pi / 2, math.pi / 2, apart + math.pi / 2, 1.5 * math.pi])
    turn, arcs = (found.ravel() for found in composite(edges, 12))
    weights = CHANCES[:, None] * arcs / (2 * math.pi)
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
        # r = E φφ/E φ² has the slope q E φ′φ′/E φ² in c, by Plackett
        r, slope = float(values[0, 1] / values[0, 0]), q * float(steep[0, 1] / values[0, 0])
    else:
        slopes = [activation.derivative(math.sqrt(q) * one.ravel()).reshape(weights.shape) for one in (x, y)]
        slope = q * float(np.sum(weights * slopes[0] * slopes[1])) / square
    # The influence of one feature on r is φ(x)φ(y)/E φ² − r (φ(x)² + φ(y)²)/(2 E φ²); that of the Gaussian pair has
    # the variance (1 − c²)². What the first has beyond the pair is the scatter that a function adds, times N.
    influence = first * second / square - r * (first**2 + second**2) / (2 * square)
    base = x * y - c * (x**2 + y**2) / 2
    covariance = float(np.sum(weights * influence * base))
    left = float(np.sum(weights * influence**2)) - covariance**2 / (1 - c**2) ** 2
    room = max(1 - r**2, 1e-6)
    return slope * (1 - c**2) / room, max(left, 0.0) / room**2


def _joint(node: Node, forward: Sequence[Signal | None], gradient: Signal | None) -> float:
    """tr(DKDK)/(tr DK)²: how few directions of points decide the gradient of a weight, of up to FEW points."""
    signal = forward[node.inputs[0]] if node.inputs else None
    if gradient is None or signal is None or not isinstance(node.rule, kinds.Linear | kinds.Convolution):
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
    within = np.einsum("bspsq->bspq", signal.by_sample(signal.matrix))
    own = np.einsum("bspp->bsp", within)
    near = np.sum(own**2, axis=2)
    squares = signal.near * near + signal.repeat * (np.einsum("bspq,bspq->bs", within, within) - near)
    ratios = squares / np.maximum(own.sum(axis=2) ** 2, 1e-300)
    return min(1.0, float(np.mean(ratios)) / len(signal.matrix))
