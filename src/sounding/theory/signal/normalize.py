"""Normalizations as maps of the signal, forwards and backwards.

Each is y = γ x̂ + β with x̂ = (x − μ)/σ. What μ and σ are taken over differs, and with it what the signal loses:

- rms, layer: over the features of a point. K̂ = K_ab/(s_a s_b), with the feature mean's square off for layer; the
  gradient is divided alike. Terms along y are of relative size 1/features and left out.
- batch: each channel over all points (`batch`).
- group: the channels of a group over all positions of a sample. With c channels in a group, P positions, K̃ = K − m mᵀ
  and m̄ the mean of m over positions, what is left after the mean is K̃_ab − (r_ab + r_ba − R)/c + (m_a − m̄)(m_b − m̄),
  r_ab the mean of K̃ over the positions of b's sample and R over those of both. Layer norm over whole samples is one
  group; instance norm one channel per group, where centring is complete. Backwards the same centring, and what points
  along y: −(Y D + D Y)/(cP) + (2 Y D Y + c tr(Y D) Y)/(cP)² within a sample. E σ⁻² is that of a Gamma variable with the
  mean and the variance of σ², 2 Σλ²/c.
- running statistics: a fixed map of each channel.

A scale mixture of Gaussians comes out of a batch norm over few independent points; the functions behind it take it for
Gaussian, an error of relative order 1/(participation ratio of the points).
"""

from __future__ import annotations

import numpy as np

from sounding.theory.signal.batch import batch_norm, batch_norm_backward
from sounding.theory.signal.description import ZERO, Array, Law, Normalize
from sounding.theory.signal.signal import Signal

FEWEST = 4.0  # degrees of freedom of σ², below which E σ⁻² is not trusted to a Gamma law and no longer grows


def normalize(rule: Normalize, signal: Signal, features: int) -> Signal:
    """The signal behind a normalization."""
    return scale(_standardize(rule, signal, features), rule.scale, rule.shift)


def normalize_backward(rule: Normalize, signal: Signal, gradient: Signal, features: int) -> Signal:
    """The gradient in front of a normalization, from the signal in front of it and the gradient behind."""
    inner = scale(gradient, rule.scale, ZERO)
    if rule.running is not None:
        weight = _running_weight(rule)
        return inner.like(weight[1] * inner.matrix, weight[0] * inner.mean)
    if rule.kind == "batch":
        return batch_norm_backward(rule, signal, inner, gradient.shape)
    if rule.kind == "group":
        return _group_norm_backward(rule, signal, inner, features)
    std = np.sqrt(spread_of(rule, signal) + rule.eps)
    return inner.like(inner.matrix / (std[:, :, None] * std[:, None, :]), inner.mean / std)


def scale(signal: Signal, factor: Law, shift: Law) -> Signal:
    """y = c x + u with one c and one u per feature, independent of x: K′ = E c² K + E c E u (m_a + m_b) + E u²."""
    cross = factor.mean * shift.mean
    matrix = factor.second_moment * signal.matrix + shift.second_moment
    if cross != 0:
        matrix += cross * (signal.mean[:, :, None] + signal.mean[:, None, :])
    return signal.like(matrix, factor.mean * signal.mean + shift.mean)


def _standardize(rule: Normalize, signal: Signal, features: int) -> Signal:
    """The signal behind a norm, in front of its scale and shift."""
    if rule.running is not None:
        weight = _running_weight(rule)
        centred = scale(signal, Law(0.0, 1.0), Law(rule.running[0].variance, -rule.running[0].mean))
        return centred.like(weight[1] * centred.matrix, weight[0] * centred.mean)
    if rule.kind == "batch":
        return batch_norm(rule, signal)
    if rule.kind == "group":
        return _group_norm(rule, signal, features)
    matrix, mean = signal.matrix, signal.mean
    if rule.kind == "layer":
        matrix, mean = matrix - mean[:, :, None] * mean[:, None, :], np.zeros_like(mean)
    std = np.sqrt(spread_of(rule, signal) + rule.eps)
    return signal.like(matrix / (std[:, :, None] * std[:, None, :]), mean / std)


def spread_of(rule: Normalize, signal: Signal) -> Array:
    """What rms and layer norm divide by, squared, before eps."""
    square = signal.diagonal
    return np.asarray(np.maximum(square - signal.mean**2, 0.0) if rule.kind == "layer" else square)


def _running_weight(rule: Normalize) -> tuple[float, float]:
    """E (v + eps)^(−1/2) and E (v + eps)^(−1) of the running variances v, to second order in their spread."""
    law = rule.running[1] if rule.running is not None else Law(0.0, 1.0)
    level = law.mean + rule.eps
    spread = min(law.variance / level**2, 1.0)
    return level**-0.5 * (1 + 0.375 * spread), (1 + spread) / level


def _group_norm(rule: Normalize, signal: Signal, features: int) -> Signal:
    """x̂ of a group norm, before scale and shift."""
    matrix, mean = _centred(signal, features / rule.groups)
    deviation = np.sqrt(_group_spread(signal, matrix) + rule.eps)
    return signal.like(matrix / (deviation[:, :, None] * deviation[:, None, :]), mean / deviation)


def _group_norm_backward(rule: Normalize, signal: Signal, gradient: Signal, features: int) -> Signal:
    """The gradient in front of a group norm whose scale has been applied to `gradient`."""
    channels, positions = features / rule.groups, signal.points.positions
    matrix = _centred(signal, channels)[0]
    spread = _group_spread(signal, matrix)
    sample = np.repeat(np.arange(signal.points.samples), signal.matrix.shape[1] // signal.points.samples)
    within = sample[:, None] == sample  # which pairs are of one sample
    squares = signal.row_sums(np.where(within, matrix**2, 0.0))
    squares = _over_positions(signal, squares) / positions  # Σλ² of each sample
    freedom = np.maximum(channels * spread**2 / np.maximum(squares, 1e-300), FEWEST)
    share = spread / (spread + rule.eps)
    deviation = np.sqrt((spread + rule.eps) / (1 + 2 * share**2 / (freedom - 2)))
    outer = np.sqrt((spread + rule.eps)[:, :, None] * (spread + rule.eps)[:, None, :])
    y = np.where(within, matrix / outer, 0.0)
    group = channels * positions
    yd = signal.multiply(y, gradient.matrix)
    inside = np.where(within, gradient.matrix, 0.0)
    traces = _over_positions(signal, signal.row_sums(y * inside)) * positions  # tr(Y D) of each sample
    ydy = signal.multiply(signal.multiply(y, inside), y)
    inner = gradient.matrix - (yd + np.swapaxes(yd, 1, 2)) / group
    inner += (2 * ydy + channels * traces[:, :, None] * y) / group**2
    centred = _take_means(gradient, 0.5 * (inner + np.swapaxes(inner, 1, 2)), channels)
    level = gradient.mean - _over_positions(gradient, gradient.mean)
    return gradient.like(centred / (deviation[:, :, None] * deviation[:, None, :]), level / deviation)


def _centred(signal: Signal, channels: float) -> tuple[Array, Array]:
    """The second moments and feature means after each group's mean is off."""
    mean = signal.mean - _over_positions(signal, signal.mean)
    varying = signal.matrix - signal.mean[:, :, None] * signal.mean[:, None, :]
    return _take_means(signal, varying, channels) + mean[:, :, None] * mean[:, None, :], mean


def _take_means(signal: Signal, matrix: Array, channels: float) -> Array:
    """M_ab − (r_ab + r_ba − R)/c, with means over the positions of each sample."""
    samples, positions = signal.points.samples, signal.points.positions
    blocks, size, _ = matrix.shape
    rest = size // samples
    apart = signal.weigh(matrix).reshape(blocks, size, samples, rest).sum(axis=3)
    rows = apart / positions  # (blocks, point, sample)
    both = rows.reshape(blocks, samples, rest, samples).mean(axis=(0, 2))
    over = np.repeat(rows, rest, axis=2)
    whole = np.repeat(np.repeat(both, rest, axis=0), rest, axis=1)
    return np.asarray(matrix - (over + np.swapaxes(over, 1, 2) - whole) / channels)


def _group_spread(signal: Signal, matrix: Array) -> Array:
    """σ² of every point's sample, (blocks, size)."""
    square = np.diagonal(matrix, axis1=1, axis2=2)
    return np.asarray(np.maximum(_over_positions(signal, square), 0.0))


def _over_positions(signal: Signal, values: Array) -> Array:
    """The mean over all positions of each sample of values (blocks, size), given to every point of the sample."""
    samples = signal.points.samples
    mean = values.reshape(len(values), samples, -1).mean(axis=(0, 2))
    return np.broadcast_to(np.repeat(mean, values.shape[1] // samples), values.shape)
