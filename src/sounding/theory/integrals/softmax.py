"""Softmax weights of independent Gaussian scores: their moments at any number of keys and any size of the scores.

With Z = Σ e^{s_b} and A_b = e^{s_b}/Z, 1/Z^k = ∫ t^{k−1} e^{−tZ} dt/(k−1)! turns every mean of products of A into one
integral over ln t of powers of φ(t) = E e^{−t e^s}, the scores being independent. The integrands are analytic in ln t
and in the Gaussian variable, so that equal steps (the trapezoid rule) converge geometrically. What replica theory
finds for infinitely many keys, condensation at √v = √(2 ln n), comes out smooth at a finite number of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.special import roots_genlaguerre

from sounding.activations.activation import Array

REACH = 8.0  # standard deviations of a score that are integrated; what lies beyond has probability 1e-15
STEP = 0.4  # of ln t and of a score: the trapezoid rule's error is exp(−π²/STEP), 2e-11
FINE = 0.4  # the largest step of a standard Gaussian variable
DEEP = 30.0  # e-folds below the smallest t that matters, where integrands have fallen below 1e-13
# Variances beyond which what a row lacks of one-hot falls as 1/√v, the chance that two scores are close: in itself, and
# over ln n, which is four times where attention begins to condense.
WIDEST, BEYOND = 64.0, 8.0
LARGEST = 700.0  # exponents beyond which e^{−x} is 0 anyway
CHI_NODES = 6  # of the law of a query's length; its relative variance is 2 over the head size


@dataclass(frozen=True)
class SoftmaxMoments:
    """Means over random scores of two rows that see the same n keys."""

    own: float  # E Σ A_b², 1/n for uniform and 1 for one-hot rows: the inverse number of keys that a row looks at
    shared: float  # E Σ A_b A′_b of two rows, whose scores of the same key correlate
    slope: float  # E tr J² of the softmax Jacobian J = diag(A) − A Aᵀ
    shared_slope: float  # E tr J J′ of two rows
    entropy: float  # E −Σ A ln A over ln n; 1 for a single key


# networks of several depths meet the same scores in their first blocks
@lru_cache(maxsize=4096)
def softmax_moments(variance: float, correlation: float, *, keys: int, head_size: int | None = None) -> SoftmaxMoments:
    """The moments for scores of this variance, independent between keys, correlated between two rows by ρ ≥ 0.

    With a head size, the length of a row's query varies: given the query its scores are independent Gaussians of
    variance v χ²/m, and the moments are averaged over χ² of m degrees of freedom.

    >>> softmax_moments(0.0, 0.5, keys=4)
    SoftmaxMoments(own=0.25, shared=0.25, slope=0.1875, shared_slope=0.1875, entropy=1.0)
    """
    if keys == 1 or variance == 0.0:
        slope = (keys - 1) / keys**2
        return SoftmaxMoments(1 / keys, 1 / keys, slope, slope, 1.0)
    widest = max(WIDEST, BEYOND * math.log(keys))
    if variance > widest:
        edge, less = softmax_moments(widest, correlation, keys=keys, head_size=head_size), math.sqrt(widest / variance)
        own, slope = 1 - (1 - edge.own) * less, edge.slope * less
        return SoftmaxMoments(own, edge.shared, slope, edge.shared_slope * less**2, edge.entropy * less)
    shares, weights = _lengths(head_size)
    rows = np.array([_row(variance * share, keys) for share in shares])
    own, slope, entropy = (float(number) for number in weights @ rows)
    shared, shared_slope = _pair(variance, correlation, keys)
    if head_size is not None:
        # the spread of lengths moves two rows together as it moves a row by itself
        alone = _row(variance, keys)
        shared, shared_slope = shared * own / alone[0], shared_slope * slope / alone[1]
    return SoftmaxMoments(own, shared, slope, shared_slope, entropy / math.log(keys))


@lru_cache(maxsize=8)
def _lengths(head_size: int | None) -> tuple[Array, Array]:
    """Nodes and weights for χ²/m, or 1 for an infinite head."""
    if head_size is None:
        return np.ones(1), np.ones(1)
    nodes, weights = roots_genlaguerre(CHI_NODES, head_size / 2 - 1)
    return 2 * nodes / head_size, weights / weights.sum()


def _grids(variance: float, keys: int) -> tuple[Array, Array, float]:
    """Places of a standard Gaussian variable, places of ln t, and the step between the latter."""
    std = math.sqrt(variance)
    count = math.ceil(REACH / min(FINE, STEP / std))
    z = np.linspace(-REACH, REACH, 2 * count + 1)
    low, high = -REACH * std - math.log(keys) - DEEP, REACH * std + 5.0
    steps = math.ceil((high - low) / STEP)
    return z, np.linspace(low, high, steps + 1), (high - low) / steps


def _density(z: Array) -> Array:
    density = np.exp(-0.5 * z**2)
    return np.asarray(density / density.sum())


def _row(variance: float, keys: int) -> tuple[float, float, float]:
    """E Σ A², E tr J² and the entropy of one row."""
    z, places, step = _grids(variance, keys)
    scores = math.sqrt(variance) * z
    tilted = np.exp(np.minimum(places[:, None] + scores, math.log(LARGEST)))  # t e^s
    left = np.exp(-tilted) * _density(z)
    powers = [left.sum(axis=1)]
    for _ in range(4):
        left = left * tilted
        powers.append(left.sum(axis=1))
    log_rest = np.log(np.maximum(powers[0], 1e-300))
    once, twice = np.exp((keys - 1) * log_rest), np.exp((keys - 2) * log_rest)
    second, third, fourth = (keys * step * float(powers[k] @ once) / math.factorial(k - 1) for k in (2, 3, 4))
    squared = fourth + keys * (keys - 1) * step * float(powers[2] ** 2 @ twice) / 6
    bare = np.exp(-tilted) * tilted * _density(z)
    energy = keys * step * float((bare @ scores) @ once)  # E Σ A s
    log_sum = step * float(
        np.sum(np.exp(-np.exp(np.minimum(places, math.log(LARGEST)))) - np.exp(keys * log_rest))
    )  # E ln Z
    return second, second - 2 * third + squared, max(log_sum - energy, 0.0)


def _pair(variance: float, correlation: float, keys: int) -> tuple[float, float]:
    """E Σ A A′ and E tr J J′: given the part that two rows' scores share, E e^{−t e^s − t′e^{s′}} is a product."""
    if correlation <= 0.0:
        # E J of independent rows is (1 − E ΣA²)/(n − 1) times the projection that takes means off
        level = (1 - _row(variance, keys)[0]) / (keys - 1)
        return 1 / keys, (keys - 1) * level**2
    z, places, step = _grids(variance, keys)
    weights = _density(z)
    own = np.exp(np.minimum(places[:, None] + math.sqrt(variance * max(1 - correlation, 0.0)) * z, math.log(LARGEST)))
    bare = np.exp(-own)
    tables = np.stack([bare @ weights, (own * bare) @ weights, (own**2 * bare) @ weights], axis=1)
    shift = np.clip(places[:, None] + math.sqrt(variance * correlation) * z, places[0], places[-1])
    given = CubicSpline(places, tables)(shift).transpose(2, 0, 1)

    def joint(first: int, second: int) -> Array:
        return np.asarray((given[first] * weights) @ given[second].T)

    rest = np.log(np.maximum(joint(0, 0), 1e-300))
    once, twice, one = np.exp((keys - 1) * rest), np.exp((keys - 2) * rest), joint(1, 1)
    area = keys * step**2
    overlap = area * float(np.sum(one * once))
    cubic = area * float(np.sum((joint(2, 1) + joint(1, 2)) * once))
    squared = area * float(np.sum(joint(2, 2) * once) + (keys - 1) * np.sum(one**2 * twice))
    return overlap, max(overlap - cubic + squared, 0.0)
