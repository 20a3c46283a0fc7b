"""What the rows of an attention look like, head by head."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sounding.probe.inside.storages import keys_of

HIDDEN = -1e4  # masks hide a key by −∞ or by the most negative number of a type; all of them lie below this
# Scores that are looked at in one call: enough for a thousand rows of 512 keys, and a few milliseconds on one core.
BUDGET = 2**19
HEAD = 4  # features from which on products add up so that they have to be divided
SAME_LENGTH = 1e-3  # up to which queries are normalized
ONE_HOT = 0.99  # the weight of one key from which a row looks at nothing else
MEASURES = ("score_std", "score_max", "attention_entropy", "one_hot_fraction", "condensation")


@dataclass(eq=False)
class Attention:
    """One attention of a pass.

    Args:
        at: how many module calls had ended before it.
        heads: (measures, heads), in the order of `MEASURES`; NaN for a head without a row of two or more keys.
        gradients: ln of the norm of the loss's gradient at queries, keys and values, as they enter the products.
        raw: whether nothing has divided the products by √d.
    """

    at: int
    heads: Tensor
    gradients: dict[str, float] = field(default_factory=dict)
    raw: bool = False


class Divisions:
    """Which tensors a number has multiplied or divided since the last layer, as scores of attention should be."""

    def __init__(self) -> None:
        self._known: set[int] = set()  # storages

    def note(self, name: str, args: Any, kwargs: Any, taken: Iterable[int], made: Iterable[int]) -> None:
        """Look at one operation: the storages whose division it passes on, and those that it makes."""
        numbers = [one for one in args[1:2] if not isinstance(one, Tensor) or one.numel() == 1]
        divided = (name in ("mul", "div") and bool(numbers)) or kwargs.get("alpha", 1) != 1
        divided = divided or not self._known.isdisjoint(taken)
        (self._known.update if divided else self._known.difference_update)(made)

    def hold(self, tensor: Tensor) -> bool:
        """Whether this is one of them."""
        return not self._known.isdisjoint(keys_of([tensor]))

    def lack(self, queries: Tensor, keys: Tensor) -> bool:
        """Whether the products of queries and keys of one sequence, each (…, places, features), have nothing that
        divides them by √d: no number, no law of the queries (T5's), and no norm."""
        size = queries.shape[-1]
        if size < HEAD or queries.shape[-2] != keys.shape[-2] or self.hold(queries) or self.hold(keys):
            return False
        with _disable_current_modes(), torch.no_grad():
            lengths, others = (one.detach().float().norm(dim=-1) for one in (queries, keys))
            smaller = lengths.square().mean() < others.square().mean() / size**0.5
            return not bool(smaller) and bool(lengths.std() > SAME_LENGTH * lengths.mean())


def fold(shape: tuple[int, ...], batch_size: int) -> tuple[int, int]:
    """How many samples (or windows) and heads the leading axes of scores (…, queries, keys) hold.

    >>> fold((4, 12, 64, 64), 4), fold((48, 64, 64), 4), fold((64, 64), 4)
    ((4, 12), (4, 12), (1, 1))
    """
    leading = shape[:-2]
    if len(leading) == 1:
        heads = leading[0] // batch_size if batch_size and leading[0] % batch_size == 0 else 1
        return leading[0] // heads, heads
    return (leading[0], math.prod(leading[1:])) if leading else (1, 1)


def thin(samples: int, heads: int, queries: int, keys: int) -> tuple[int, int]:
    """How many samples to look at, and the step between their queries, for at most `BUDGET` scores."""
    rows = max(BUDGET // max(heads * keys, 1), 1)
    taken = min(samples, max(rows // min(queries, 32), 1))  # a sample gives 32 rows before the next one is left out
    return taken, max(-(-queries * taken // rows), 1)


def summarize_scores(scores: Tensor) -> Tensor:
    """(measures, heads) of scores (samples, heads, queries, keys); hidden keys lie below `HIDDEN`.

    Entropy is over that of uniform attention on a row's allowed keys, and the standard deviation is within rows: what a
    row's scores have in common moves no weight. Rows with fewer than two allowed keys have no say.
    `condensation` is σ/√(2 ln n): above 1 a row of n independent Gaussian scores looks at few keys however many there
    are (the random energy model), which is where `sounding.predict.transformer` draws its line.
    """
    scores = scores.detach().float()
    allowed = scores > HIDDEN
    count = allowed.sum(-1)
    top = scores.masked_fill(~allowed, -math.inf).amax(-1, keepdim=True)
    below = (scores - top).masked_fill_(~allowed, 0.0)
    mean = below.sum(-1) / count
    variance = (below.square().sum(-1) / count - mean.square()).clamp_min_(0.0)
    weights = below.exp().mul_(allowed)
    total = weights.sum(-1)
    entropy = (total.log() - weights.mul_(below).sum(-1) / total) / count.log()
    hot = (total < 1 / ONE_HOT).float()
    used = count > 1

    def over_rows(values: Tensor) -> Tensor:
        kept = values.masked_fill(~used, 0.0).sum((0, 2))
        return kept / used.sum((0, 2))

    condensed = over_rows(variance / (2 * count.log())).sqrt()
    largest = top.squeeze(-1).masked_fill(~used, -math.inf).amax((0, 2))
    return torch.stack([over_rows(variance).sqrt(), largest, over_rows(entropy), over_rows(hot), condensed])


def look_at_scores(scores: Tensor, batch_size: int) -> Tensor:
    """`summarize_scores` of what went into a softmax over its last axis, thinned out."""
    shape = tuple(scores.shape)
    samples, heads = fold(shape, batch_size)
    taken, step = thin(samples, heads, *shape[-2:])
    whole = scores.reshape(samples, heads, *shape[-2:])
    return summarize_scores(whole[:taken, :, (shape[-2] - 1) % step :: step])


def look_at_products(
    queries: Tensor, keys: Tensor, *, scale: float | None, mask: Tensor | None, causal: bool
) -> Tensor:
    """`summarize_scores` of what a fused kernel computes from queries and keys (samples, heads, positions, size)."""
    samples, heads, rows, size = queries.shape
    taken, step = thin(samples, heads, rows, keys.shape[-2])
    start = (rows - 1) % step
    left, right = queries[:taken, :, start::step].float(), keys[:taken].float()
    if right.shape[1] != heads:  # several heads of queries share one of keys
        right = right.repeat_interleave(heads // right.shape[1], 1)
    scores = left @ right.transpose(-1, -2) * (size**-0.5 if scale is None else scale)
    if causal:
        places = torch.arange(rows, device=scores.device)
        later = places[: keys.shape[-2]] > places[start::step, None]
        scores[..., : later.shape[-1]].masked_fill_(later, -math.inf)
    if mask is not None:
        mask = mask.expand(*(samples, heads, rows, keys.shape[-2])[-mask.dim() :]) if mask.dim() < 4 else mask
        mask = mask.expand(samples, heads, rows, keys.shape[-2])[:taken, :, start::step]
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()
    return summarize_scores(scores)
