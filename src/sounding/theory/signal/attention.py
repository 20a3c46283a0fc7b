"""Softmax attention as a map of Gram matrices, forwards and backwards.

Forwards, K_out = E A V Aᵀ, where A = softmax(scale · q kᵀ + mask) acts within each sample and the mean is over heads:
q and k of one head are Gaussian over all points, jointly, because all samples meet the same weights. Backwards, with D
the Gram matrix of gradients at the output, J^a = diag(A_a) − A_a A_aᵀ the softmax Jacobian of row a and V that of the
values,

    D_V = E Aᵀ D A
    D_Q[a, c] = scale² D_ac E Σ_bd (J^a V J^c)_bd k_b·k_d
    D_K[b, d] = scale² E Σ_ac D_ac (q_a·q_c) (J^a V J^c)_bd

The score path (D_Q and D_K) is of the relative size of the scores' variance while scores are small, and vanishes again
where attention looks at one key alone. Norms of queries and keys and rotary embeddings act on the drawn heads. Grouped
queries change none of these means, since gradients of different heads are uncorrelated.

Keys and values are made of the same N features, so the products of their Gram matrices in D_Q scatter together:
E tr(J^a V̂ J^c K̂) = tr(J^a V J^c K)(1 + 1/N) + tr(J^a V) tr(J^c K)/N. With n keys in sight the last term is n/N of the
first: it is followed, in both routes. In D_K, D_V and K_out it is of relative size 1/N, or of higher order in the
scores, and left out.

Two routes: heads drawn at random, right at any size of the scores and any head size (the mean over heads of a layer
with that head size, wide in everything else); and the closed form of `small_scores`. Of the rule's output only two
kinds of entries are ever used: pairs within a sample decide all signal sizes and gradients, pairs of different samples
the sample measures, weight gradients, and again pairs of different samples. All are computed, because A V Aᵀ over all
pairs costs 2 n² · positions operations per head in single precision, about as much as drawing the head's queries and
keys jointly, and needs no second pass. What saves time is how few heads are needed: opposite queries cancel terms of
odd order, and drawing stops when the mean is known well enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np

from sounding.errors import UsageError
from sounding.theory.signal.description import Array, Attention
from sounding.theory.signal.heads import Floats, Head, Projections, Statistics, draw_heads, factor
from sounding.theory.signal.signal import Signal
from sounding.theory.signal.small_scores import SmallScores, left, mixed

Route = Literal["auto", "heads", "small scores"]

# Variance of a row's scores around the row's mean, root mean square over rows, up to which the closed form stands in
# for heads: at 0.065 it missed squared gradients by 0.15%, a third of the square; heads drawn in that time leave 1%.
SMALL = 0.1
DRAWS = 64  # heads at most: a layer has 8 to 64 of its own, so their mean is known better than the layer's spread
FEWEST = 4  # pairs of heads before the spread between pairs is believed
PRECISION = 0.015  # relative standard error of a branch's signal at which drawing stops; the stream it joins has less
LOOSER = 3.0  # times that error is allowed at queries and keys alone: a layer's own gradients there scatter by 10%
SIGNS = 4  # value and gradient features drawn with each head: they cost less than the head and tell as much


@dataclass(frozen=True)
class Attended:
    """What attention makes of its inputs, in the mean over heads."""

    gram: Array  # K_out, over the query points; its features have mean 0, like those of the values
    score_std: float  # root mean square of the scores that are not masked
    largest_score: float  # the largest absolute score of one head, over all samples and positions
    entropy: float  # of the rows that see more than one key, as a share of uniform attention's: 1 is uniform, 0 one-hot
    one_hot: float  # the share of these rows in which one key has a weight above 0.9
    stderr: float  # the standard error of the mean square, relative; of the closed form `spread` squared, an estimate
    draws: int  # how many heads were drawn for `gram`; 0 for the closed form


@dataclass(frozen=True)
class AttendedBackward:
    """The Gram matrices (sums over features) of the gradients at queries, keys and values, with their error."""

    queries: Array  # D at the queries as the projection leaves them
    keys: Array  # D at the keys
    values: Array  # D at the values
    stderr: float  # the relative standard error of all squared gradients together; see `Attended`
    draws: int  # how many heads were drawn; 0 for the closed form


def attend(
    rule: Attention,
    inputs: Projections,
    *,
    generator: np.random.Generator,
    draws: int = DRAWS,
    precision: float = PRECISION,
    route: Route = "auto",
) -> Attended:
    """K_out of softmax attention from the Gram matrices of its queries, keys and values.

    Args:
        rule: heads, mask, rotary embedding, norm of queries and keys.
        inputs: the Gram matrices; they are independent of each other, as separate projections make them.
        generator: of the heads that are drawn.
        draws: the most heads that are drawn, at least 8.
        precision: the relative standard error at which drawing stops.
        route: "heads", "small scores" (refused where queries are normed or rotated), or "auto".

    >>> from sounding.theory.signal.description import Attention
    >>> inputs = Projections(np.eye(4), np.eye(4), np.eye(4), samples=2)
    >>> rule = Attention(heads=4, key_heads=4, head_size=16, scale=0.0)
    >>> attend(rule, inputs, generator=np.random.default_rng(0)).gram.round(3).tolist()[0]
    [0.5, 0.5, 0.0, 0.0]
    """
    closed = _closed_form(rule, inputs, route)
    pairs = draw_heads(rule, inputs, generator=generator, joint=closed is None)
    seen: list[Statistics] = []
    if closed is not None:
        seen += [head.statistics for pair in islice(pairs, 2) for head in pair]
        return _described(closed.forward(), seen, closed.error, 0)
    size = _size(inputs.values)
    values = (inputs.values / size).astype(np.float32)
    total = np.zeros(inputs.queries.shape)

    def visit(head: Head) -> Array:
        gram = mixed(head.weights, values)
        np.add(total, gram, out=total)
        seen.append(head.statistics)
        return np.array([np.trace(gram)], dtype=np.float64)

    error, used = _visit_pairs(pairs, visit, most=draws, precision=precision, least=_least(rule))
    return _described(size / used * total, seen, error, used)


def _described(gram: Array, seen: list[Statistics], error: float, draws: int) -> Attended:
    square, largest, entropy, one_hot = np.mean(np.array(seen), axis=0).tolist()
    return Attended(gram, math.sqrt(square), largest, entropy, one_hot, error, draws)


def attend_backward(
    rule: Attention,
    inputs: Projections,
    *,
    gradient: Array,
    generator: np.random.Generator,
    draws: int = DRAWS,
    precision: float = PRECISION,
    route: Route = "auto",
) -> AttendedBackward:
    """D at queries, keys and values from D at the output, a sum over the features of all heads.

    `gradient` is D at the output, over the query points; the other settings are those of `attend`. The value path is
    exact for each head. The score path is quadratic in a value feature ξ and a gradient feature γ, so random signs
    through a factor of V and of D stand for their means.
    """
    if gradient.shape != inputs.queries.shape:
        raise UsageError(f"expected gradients at {len(inputs.queries)} points, got shape {gradient.shape}")
    closed = _closed_form(rule, inputs, route)
    if closed is not None:
        return AttendedBackward(*closed.backward(gradient), closed.error, 0)
    sizes = _size(inputs.values), _size(gradient)
    arriving = (gradient / sizes[1]).astype(np.float32)
    roots = factor(inputs.values / sizes[0]), factor(gradient / sizes[1])
    diagonal, share = np.diag(arriving), np.float32(_size(inputs.keys) ** -0.5)
    at_values, at_queries, at_keys = np.zeros(inputs.values.shape), [], []
    # The projections multiply squared gradients by their gains, which the sizes of what they made tell.
    gains = sizes[0] * _size(inputs.queries), sizes[0] * _size(inputs.keys), sizes[0]

    def visit(head: Head) -> Array:
        squares = np.zeros(4)
        made_of = (roots[0] if head.inner is None else share * head.inner), roots[1]
        for _ in range(SIGNS):
            feature, sent = (
                root @ generator.choice(np.array([-1.0, 1.0], np.float32), root.shape[1]) for root in made_of
            )
            queries, keys = _score_path(rule, head, feature, sent)
            at_queries.append(queries)
            at_keys.append(keys)
            squares[1:3] += float(diagonal @ np.sum(queries**2, axis=1)) / SIGNS, float(np.sum(keys**2)) / SIGNS
        values = mixed(head.weights.swapaxes(1, 2), arriving)
        np.add(at_values, values, out=at_values)
        squares[3] = np.trace(values)
        squares[0] = np.dot(gains, squares[1:])
        return squares[:3]

    pairs = draw_heads(rule, inputs, generator=generator)
    error, used = _visit_pairs(pairs, visit, most=draws, precision=precision, least=_least(rule))
    return AttendedBackward(
        queries=gradient * _gram(at_queries) * (sizes[0] / (used * SIGNS)),
        keys=_gram(at_keys) * (sizes[0] * sizes[1] / (used * SIGNS)),
        values=at_values * (sizes[1] / used),
        stderr=error,
        draws=used,
    )


def attend_signals(
    rule: Attention, inputs: tuple[Signal, ...], *, width: float = math.inf, **settings: Any
) -> tuple[Attended, Signal]:
    """`attend` with these settings on the signals of queries, keys and values, and the signal of its output."""
    inner, pairs, projections = _projections(rule, inputs, width)
    found = attend(inner, projections, **settings)
    return found, _put_back(found.gram, pairs, inputs[0])


def attend_signals_backward(
    rule: Attention, inputs: tuple[Signal, ...], *, gradient: Signal, width: float = math.inf, **settings: Any
) -> tuple[Signal, ...]:
    """`attend_backward` with these settings on signals: the gradients at queries, keys and values."""
    inner, pairs, projections = _projections(rule, inputs, width)
    found = attend_backward(inner, projections, gradient=gradient.gram[pairs], **settings)
    grams = found.queries, found.keys, found.values
    return tuple(_put_back(gram, pairs, one) for gram, one in zip(grams, inputs, strict=True))


def _projections(rule: Attention, inputs: tuple[Signal, ...], width: float) -> tuple[Attention, Any, Projections]:
    """Attention within windows as attention within more, smaller samples: that rule, which pairs, their Grams."""
    if len(inputs) != 3:
        raise UsageError(f"attention has three inputs, queries, keys and values, got {len(inputs)}")
    samples, (queries, keys, values) = inputs[0].points.samples, (one.gram for one in inputs)
    if rule.windows is None:
        return rule, slice(None), Projections(queries, keys, values, samples, width)
    within, count = np.array(rule.windows), len(rule.windows)
    if any(len(gram) != samples * within.size for gram in (queries, keys, values)):
        raise UsageError(f"expected windows over all positions, got {within.size} places in them")
    # softmax acts within a window, and all windows of all samples meet the same weights: so this is exact
    order = (np.arange(samples)[:, None] * within.size + within.ravel()).ravel()
    mask, pairs = rule.mask, np.ix_(order, order)
    if mask is not None and len(mask) == count and mask.ndim == 3:
        mask = np.tile(mask, (samples, 1, 1))
    inner = replace(rule, windows=None, mask=mask)
    return inner, pairs, Projections(queries[pairs], keys[pairs], values[pairs], samples * count, width)


def _put_back(gram: Array, pairs: Any, like: Signal) -> Signal:
    """A Gram matrix over points in their own order again."""
    whole = np.empty_like(gram)
    whole[pairs] = gram
    return Signal.full(whole, like.points)


def _score_path(rule: Attention, head: Head, feature: Floats, sent: Floats) -> tuple[Floats, Floats]:
    """Gradients at queries (without the factor that D is) and keys for one value and one gradient feature."""
    # with softmax weights A of a row: A(ξk) − (Aξ)(Ak) at a query, and Σ_a γ_a A_ab (ξ_b − (Aξ)_a) q_a at a key
    weights = head.weights
    average = left(weights, feature[:, None])
    keys, queries = head.keys.features, head.queries.features
    at_queries = left(weights, feature[:, None] * keys) - average * left(weights, keys)
    back = weights.swapaxes(1, 2)
    weighted = sent[:, None] * queries
    at_keys = feature[:, None] * left(back, weighted) - left(back, average * weighted)
    scale = np.float32(rule.scale)
    return scale * head.queries.pull_back(at_queries), scale * head.keys.pull_back(at_keys)


def _closed_form(rule: Attention, inputs: Projections, route: Route) -> SmallScores | None:
    """The closed form where it is asked for, or accurate; None where heads are to be drawn."""
    covered = rule.angles is None and rule.query_norm is None and rule.own_masks is None
    if route == "small scores" and not covered:
        raise UsageError(
            "the closed form covers no rotary embedding, no norm of queries, no bias of a head", hint="route='heads'"
        )
    if route == "heads" or not covered:
        return None
    closed = SmallScores(rule, inputs)
    return closed if route == "small scores" or closed.spread <= SMALL else None


def _visit_pairs(
    pairs: Iterator[tuple[Head, Head]], visit: Callable[[Head], Array], *, most: int, precision: float, least: int
) -> tuple[float, int]:
    """Shows pairs of heads to `visit` until the means of what it returns are known, all but the first to LOOSER."""
    if most < 2 * FEWEST:
        raise UsageError(f"expected at least {2 * FEWEST} draws of heads, got {most}")
    sizes: list[Array] = []
    error = math.inf
    while True:
        first, second = next(pairs)
        sizes.append(visit(first) + visit(second))
        if len(sizes) >= FEWEST and len(sizes) % least == 0:
            middle = np.mean(sizes, axis=0)
            errors = np.std(sizes, axis=0, ddof=1) / math.sqrt(len(sizes)) / np.where(middle > 0, middle, math.inf)
            error = float(errors[0])  # the relative standard error of the first mean is what is returned
            if 2 * (len(sizes) + least) > max(most, 4 * least) or (
                error <= precision and (errors <= LOOSER * precision).all()
            ):
                return error, 2 * len(sizes)


def _least(rule: Attention) -> int:
    """How many pairs of heads are drawn at once: where each head has a bias of its own, one pair of each."""
    own = 1 if rule.own_masks is None else len(rule.own_masks)
    return own * math.ceil(FEWEST / own) if own > 1 else 1


def _size(gram: Array) -> float:
    """The mean of the diagonal, or 1 where all of it is 0; what is divided by it fits single precision."""
    return float(np.mean(np.diag(gram))) or 1.0


def _gram(features: list[Floats]) -> Array:
    """The sum over heads of their features' Gram matrices."""
    together = np.concatenate(features, axis=1)
    return np.asarray(together @ together.T, dtype=np.float64)
