"""Normalizations as maps of the signal, forwards and backwards.

Each is y = γ x̂ + β with x̂ = (x − μ)/σ. What μ and σ are taken over differs, and with it what the signal loses:

- rms, layer: over the features of a point. K̂ = K_ab/(s_a s_b), with the feature mean's square off for layer; the
  gradient is divided alike. Terms along y are of relative size 1/features and left out.
- batch: each channel over all points (`batch`).
- group: the channels of a group over the positions of a sample (`group`).
- running statistics: a fixed map of each channel.

A scale mixture of Gaussians comes out of a batch norm over few independent points; the functions behind it take it for
Gaussian, an error of relative order 1/(participation ratio of the points).
"""

from __future__ import annotations

import numpy as np

from sounding.theory.signal.batch import batch_norm, batch_norm_backward
from sounding.theory.signal.description import Array, Law, Normalize
from sounding.theory.signal.group import group_norm, group_norm_backward
from sounding.theory.signal.signal import Signal


def normalize(rule: Normalize, signal: Signal, features: int) -> Signal:
    """The signal behind a normalization."""
    return scale(_standardize(rule, signal, features), rule.scale, rule.shift)


def normalize_backward(rule: Normalize, signal: Signal, gradient: Signal, features: int) -> Signal:
    """The gradient in front of a normalization, from the signal in front of it and the gradient behind."""
    factor = rule.scale.second_moment
    inner = gradient.like(factor * gradient.matrix, rule.scale.mean * gradient.mean)
    if rule.running is not None:
        weight = _running_weight(rule)
        return inner.like(weight[1] * inner.matrix, weight[0] * inner.mean)
    if rule.kind == "batch":
        return batch_norm_backward(rule, signal, inner, gradient.shape)
    if rule.kind == "group":
        return group_norm_backward(rule, signal, inner, features)
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
        return group_norm(rule, signal, features)
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
