"""Attention heads drawn at random: queries and keys with a given Gram matrix, and what becomes of their scores.

All samples of a batch pass through the same weights, so the queries of a head are drawn jointly over all points. Each
feature of a head is then one Gaussian vector over the points, whose covariance is the Gram matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag, lapack

from sounding.errors import UsageError
from sounding.theory.signal.description import Array, Attention, Law, Normalize

Floats = NDArray[Any]  # of single precision, which is four times as fast and far finer than the draws

# A mask this far below the largest of its row hides a key whatever its score: many networks write −10 000 or the
# smallest number of their dtype instead of −inf.
FAINT = -1000.0
ALIKE = 0.01  # of the mean square: biases of two projections leave their Gram matrices less apart than that
MOST_FEATURES = 4096  # above, what a finite width adds is below the error of the draws, and drawing it would cost more
ONE_HOT = 0.9  # the weight from which on a row of attention counts as looking at one key alone


@dataclass(frozen=True)
class Projections:
    """The Gram matrices (means over features) of an attention's three inputs, over all points of all samples."""

    queries: Array  # (samples · query positions) squared
    keys: Array  # (samples · key positions) squared
    values: Array  # of the same points as the keys
    samples: int  # how many samples the points belong to; attention acts within each of them
    # of how many random features keys and values are made; infinite where their Gram matrix is measured
    width: float = math.inf

    def __post_init__(self) -> None:
        for name in ("queries", "keys", "values"):
            gram = np.asarray(getattr(self, name))
            square = gram.ndim == 2 and gram.shape[0] == gram.shape[1]
            if not square or self.samples < 1 or len(gram) % self.samples:
                raise UsageError(
                    f"expected a square Gram matrix of {name} over the points of {self.samples} samples, "
                    f"got shape {gram.shape}"
                )
            if not np.isfinite(gram).all():
                raise UsageError(f"expected finite numbers in the Gram matrix of {name}, got some that are not")
        if self.keys.shape != self.values.shape:
            raise UsageError(
                f"expected keys and values of the same points, got {len(self.keys)} and {len(self.values)} points"
            )

    @property
    def positions(self) -> tuple[int, int]:
        """How many positions of queries and of keys each sample has."""
        return len(self.queries) // self.samples, len(self.keys) // self.samples


class Statistics(NamedTuple):
    """What the scores of one head look like."""

    square: float  # mean square of the scores that a row sees
    largest: float  # largest absolute score
    entropy: float  # of the rows that see more than one key, over that of uniform attention
    one_hot: float  # share of the same rows with a weight above ONE_HOT


@dataclass(frozen=True)
class Side:
    """Queries or keys of one head as the scores use them: normalized, rotated."""

    features: Floats  # (points, head size)
    turns: tuple[Floats, Floats] | None  # cosines and sines of the rotary embedding, or None
    # γ/r of each point and feature, r the root mean square that the norm divided by; None without a norm
    scales: Floats | None
    units: Floats | None  # what the norm divided to unit mean square, None without a norm
    centred: bool  # whether the norm took the mean over features off

    def pull_back(self, gradient: Floats) -> Floats:
        """A gradient at `features` taken back through rotation and norm, to what the projection left."""
        if self.turns is not None:
            cosines, sines = self.turns
            gradient = _rotate(gradient, (cosines, -sines))
        if self.scales is None or self.units is None:
            return gradient
        gradient = gradient * self.scales
        along = np.mean(gradient * self.units, axis=1, keepdims=True)
        if self.centred:
            gradient = gradient - gradient.mean(axis=1, keepdims=True)
        return np.asarray(gradient - along * self.units)


@dataclass(frozen=True)
class Head:
    """One head: its queries and keys, its attention weights, and its statistics."""

    queries: Side
    keys: Side
    weights: Floats  # (samples, queries, keys)
    statistics: Statistics
    inner: Floats | None = (
        None  # the features (points, width) that keys and values are made of, None for infinitely many
    )


def factor(gram: Array) -> Floats:
    """F with F Fᵀ = gram, as many columns as the matrix has numerical rank; in single precision."""
    # pivoted Cholesky serves singular matrices: the first token of a causal network is often the same in all samples
    packed, pivots, rank, _ = lapack.dpstrf(gram, lower=1)
    root = np.empty((len(gram), rank), dtype=np.float32)
    root[pivots - 1] = np.tril(packed[:, :rank].astype(np.float32))
    return root


def _roots(inputs: Projections, joint: bool) -> tuple[Floats, Floats]:
    """Factors of the Gram matrices of queries and keys; of one alone where the other is a multiple of it."""
    queries, keys, samples = inputs.queries, inputs.keys, inputs.samples

    def root(gram: Array) -> Floats:
        if joint:
            return factor(gram)
        own = gram.reshape(samples, len(gram) // samples, samples, -1)
        return np.asarray(block_diag(*(factor(own[at, :, at]) for at in range(samples))))

    first, sizes = root(queries), [float(np.trace(gram)) for gram in (queries, keys)]
    ratio = sizes[1] / sizes[0] if sizes[0] > 0 else 0.0
    if keys.shape == queries.shape and np.abs(keys - ratio * queries).max() <= 1e-12 * sizes[1]:
        return first, first * np.float32(math.sqrt(ratio))
    return first, root(keys)


def rotary_angles(positions: int, head_size: int, *, base: float = 10_000.0, share: float = 1.0) -> Array:
    """The usual angles p·base^(−2i/r) of rotary embeddings: positions p, pairs i of the first r features of a head.

    >>> rotary_angles(3, 4, base=100.0).round(3).tolist()
    [[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]]
    """
    pairs = round(head_size * share) // 2
    angles: Array = np.arange(positions)[:, None] * base ** (-np.arange(pairs) / pairs)
    return angles


def draw_heads(
    rule: Attention, inputs: Projections, *, generator: np.random.Generator, joint: bool = True
) -> Iterator[tuple[Head, Head]]:
    """Pairs of heads without end; the second of a pair has the same keys and the opposite queries."""
    roots = _roots(
        inputs, joint
    )  # statistics of scores need no joint law of different samples, whose factors cost more
    masks = [score_mask(rule, inputs, head) for head in range(1 if rule.own_masks is None else len(rule.own_masks))]
    turn = 0
    turns = [_turns(rule, inputs.samples, positions) for positions in inputs.positions]
    # how many features keys and values share, 0 for infinitely many or where the two are not made of the same
    ratio = float(np.trace(inputs.values)) / max(float(np.trace(inputs.keys)), 1e-300)
    apart = np.abs(inputs.values - ratio * inputs.keys).max()
    same = apart <= ALIKE * float(np.trace(inputs.values)) / len(inputs.values)
    shared = round(inputs.width) if same and inputs.width < MOST_FEATURES else 0
    while True:
        inner = None
        if shared:
            inner = _normals(generator, (roots[1].shape[1], shared), roots[1]) / np.float32(math.sqrt(shared))
        made_of = roots[0], roots[1] if inner is None else inner
        q, k = (_normals(generator, (root.shape[1], rule.head_size), root) for root in made_of)
        gains = _gains(rule, generator)
        additive, turn = masks[turn % len(masks)], turn + 1
        keys = _side(rule.query_norm, k, gains[1], turns[1])
        # opposite queries have the same law and opposite scores, so that terms of odd order in the scores, the noisiest
        # ones while scores are small, cancel from the mean of a pair
        pair = [_head(rule, inputs, _side(rule.query_norm, sign * q, gains[0], turns[0]), keys, additive)
                for sign in (1, -1)]  # fmt: skip
        yield replace(pair[0], inner=inner), replace(pair[1], inner=inner)


def score_mask(rule: Attention, inputs: Projections, head: int = 0) -> Array:
    """What is added to the scores of a head, (samples or 1, queries, keys): −inf where hidden, 0 for the largest."""
    rows, columns = inputs.positions
    mask: Array = np.zeros((1, rows, columns))
    if rule.mask is not None:
        given = np.asarray(rule.mask, dtype=np.float64)
        if given.shape not in ((rows, columns), (1, rows, columns), (inputs.samples, rows, columns)):
            raise UsageError(
                f"expected an attention mask of shape ({rows}, {columns}) or ({inputs.samples}, {rows}, {columns}), "
                f"got {given.shape}"
            )
        mask = mask + given
    if rule.own_masks is not None:
        if rule.own_masks.shape[1:] != (rows, columns):
            raise UsageError(f"expected a bias of ({rows}, {columns}) for every head, got {rule.own_masks.shape[1:]}")
        mask = mask + rule.own_masks[head]
    if rule.causal:
        mask = mask + np.where(np.arange(columns) <= np.arange(rows)[:, None], 0.0, -np.inf)
    if not (mask > -np.inf).any(axis=2).all():
        raise UsageError("expected that every position sees at least one key, got a mask that hides them all")
    mask = mask - mask.max(axis=2, keepdims=True)
    mask[mask < FAINT] = -np.inf
    return mask


def _normals(generator: np.random.Generator, shape: tuple[int, int], root: Floats) -> Floats:
    return root @ generator.standard_normal(shape, dtype=np.float32)


def _gains(rule: Attention, generator: np.random.Generator) -> list[tuple[Floats, Floats]]:
    """Scale and shift of the norm of queries and of keys, one entry per feature of a head."""
    if rule.query_norm is None:
        return [(np.ones(1), np.zeros(1))] * 2
    norm = rule.query_norm
    if norm.kind not in ("rms", "layer"):
        raise UsageError(f"expected an rms or layer norm of queries and keys, got {norm.kind!r}")

    def entries(law: Law) -> Floats:
        return law.mean + math.sqrt(law.variance) * generator.standard_normal(rule.head_size, dtype=np.float32)

    return [(entries(norm.scale), entries(norm.shift)) for _ in range(2)]


def _side(
    norm: Normalize | None, raw: Floats, gains: tuple[Floats, Floats], turns: tuple[Floats, Floats] | None
) -> Side:
    """The queries or keys of a head, normalized and turned as the rule says."""
    features, scales, units = raw, None, None
    if norm is not None:
        if norm.kind == "layer":
            features = features - features.mean(axis=1, keepdims=True)
        root = np.sqrt(np.mean(features**2, axis=1, keepdims=True) + norm.eps)
        units = features / root
        scales = gains[0] / root
        features = gains[0] * units + gains[1]
    if turns is not None:
        features = _rotate(features, turns)
    return Side(features, turns, scales, units, norm is not None and norm.kind == "layer")


def _turns(rule: Attention, samples: int, positions: int) -> tuple[Floats, Floats] | None:
    """Cosines and sines of the rotary angles of each point, for the pairs that are rotated."""
    if rule.angles is None:
        return None
    if rule.angles.ndim != 2 or len(rule.angles) != positions or 2 * rule.angles.shape[1] > rule.head_size:
        raise UsageError(
            f"expected rotary angles for {positions} positions and at most {rule.head_size // 2} pairs, "
            f"got shape {rule.angles.shape}"
        )
    tiled = np.tile(rule.angles, (samples, 1))
    return np.cos(tiled).astype(np.float32), np.sin(tiled).astype(np.float32)


def _rotate(features: Floats, turns: tuple[Floats, Floats]) -> Floats:
    """Pairs (i, i + r/2) of the first r features turned; which features pair up makes no difference to the law."""
    cosines, sines = turns
    pairs = cosines.shape[1]
    first, second = features[:, :pairs], features[:, pairs : 2 * pairs]
    turned = [first * cosines - second * sines, first * sines + second * cosines, features[:, 2 * pairs :]]
    return np.concatenate(turned, axis=1)


def _head(rule: Attention, inputs: Projections, queries: Side, keys: Side, additive: Array) -> Head:
    """The attention of one head: its weights, and statistics of its scores."""
    shape = (inputs.samples, -1, rule.head_size)
    scores = np.float32(rule.scale) * queries.features.reshape(shape) @ keys.features.reshape(shape).swapaxes(1, 2)
    visible = np.broadcast_to(additive > -np.inf, scores.shape)
    seen = visible.sum(axis=2)
    masked = scores + additive.astype(np.float32)
    masked -= masked.max(axis=2, keepdims=True)
    weights = np.exp(masked)
    total = weights.sum(axis=2, keepdims=True)
    weights /= total
    # entropy −Σ A ln A with ln A = masked − ln total; hidden keys have A = 0 and ln A = −inf
    entropy = np.log(total[..., 0]) - np.where(visible, weights * np.where(visible, masked, 0.0), 0.0).sum(axis=2)
    free = seen > 1
    several = bool(free.any())
    statistics = Statistics(
        square=float(np.mean(scores[visible].astype(np.float64) ** 2)),
        largest=float(np.abs(scores[visible]).max()),
        entropy=float(np.mean(entropy[free] / np.log(seen[free]))) if several else 1.0,
        one_hot=float(np.mean(weights.max(axis=2)[free] > ONE_HOT)) if several else 0.0,
    )
    return Head(queries, keys, weights, statistics)
