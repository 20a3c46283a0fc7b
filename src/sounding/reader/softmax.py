"""Attention, however it was written: fused kernels, or products, masks and a softmax one after the other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sounding.probe.inside.attention import HIDDEN
from sounding.reader.layout import Layout
from sounding.reader.trace import NotCovered, Trace, handles
from sounding.reader.values import Scores, Traced, Value, scalar
from sounding.theory.signal.description import Attention, Normalize, Rotate, Scale

SAME = 1e-5  # of sums of single precision that differ only by rounding


@handles(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
def fused(trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Value]:
    """A fused kernel: queries, keys and values of shape (samples, heads, positions, size)."""
    given = trace.arguments(args, kwargs)
    queries, keys, values = (trace.settle(trace.of(given[name])) for name in ("query", "key", "value"))
    mask = given.get("attn_mask", given.get("attn_bias"))
    factor = given.get("scale")
    factor = float(factor) if factor is not None else queries.layout.shape[-1] ** -0.5
    scores = Scores(queries, keys, factor, mask.detach() if mask is not None else None, True)
    causal = bool(given.get("is_causal", False))
    return [attend(trace, scores, values, out[0], causal=causal)]


def score(trace: Trace, left: Traced, right: Traced) -> Scores:
    """Products of two signals as scores of attention: (…, queries, size) times (…, size, keys)."""
    keys = Traced(right.node, Layout([*right.layout[:-2], right.layout[-1], right.layout[-2]]))
    for value in (left, keys):
        if value.layout.roles(-1) != {"feature"} or value.layout.roles(-2) - {"position"}:
            raise NotCovered("a product of two signals that is no attention over positions")
    return Scores(left, keys)


def on_scores(trace: Trace, args: tuple[Any, ...]) -> Value:
    """What an operation does to scores: a factor, a mask, the softmax."""
    name = trace.name
    values = [trace.of(item) if isinstance(item, Tensor) else None for item in args]
    place = next(index for index, value in enumerate(values) if isinstance(value, Scores))
    scores = values[place]
    assert isinstance(scores, Scores)
    if name in ("_softmax", "_safe_softmax"):
        return replace(scores, normalized=True)
    if scores.normalized:
        if name in ("mul", "div", "native_dropout"):
            raise NotCovered("attention whose weights are changed behind the softmax")
        return scores
    other = args[1 - place] if len(args) > 1 else None
    number = scalar(other)
    if name == "mul" and number is not None:
        return replace(scores, factor=scores.factor * number, mask=_times(scores.mask, number))
    if name == "div" and number is not None and place == 0:
        return replace(scores, factor=scores.factor / number, mask=_times(scores.mask, 1 / number))
    if name in ("add", "sub") and isinstance(other, Tensor) and not isinstance(values[1 - place], Traced):
        sign = 1.0 if name == "add" else -1.0
        return replace(scores, mask=_plus(scores.mask, sign * other.detach().float()))
    if name == "masked_fill":
        return replace(scores, mask=_plus(scores.mask, _hide(args[1].detach(), scalar(args[2]) or 0.0)))
    if name == "where" and place in (1, 2):
        hidden = ~args[0].detach() if place == 1 else args[0].detach()
        filled = scalar(args[3 - place])
        return replace(scores, mask=_plus(scores.mask, _hide(hidden, -np.inf if filled is None else filled)))
    raise NotCovered(f"scores of attention go through {name!r}")


def attend(trace: Trace, scores: Scores, values: Value, out: Tensor, *, causal: bool = False) -> Traced:
    """The node of attention: weights times values."""
    if not scores.normalized:
        raise NotCovered("scores of attention multiply values without a softmax")
    value = trace.settle(values)
    queries, keys = scores.queries, scores.keys
    layout = Layout([*queries.layout[:-1], value.layout[-1]])
    for item in (queries, keys, value):
        if item.layout.roles(-1) != {"feature"} or item.layout.roles(-2) - {"position"}:
            raise NotCovered("attention whose rows are not positions")
    heads = _heads(queries)
    head_size = queries.layout.shape[-1]
    queries, angles, norm, by = _unwrap(trace, queries)
    keys, also, other, too = _unwrap(trace, keys)
    if (angles is None) != (also is None) or (norm is None) != (other is None):
        raise NotCovered("queries and keys are rotated or normalized differently")
    windows = {_windows(item.layout) for item in (queries, keys, value)}
    if len(windows) > 1:
        raise NotCovered("queries and keys of different windows")
    within = windows.pop()
    mask, own = _mask(scores.mask, trace.batch_size, len(within or (1,)), queries.layout.shape[-2], heads)
    key_heads = _heads(keys, distinct=True)
    rule = Attention(heads, key_heads, head_size, scores.factor * by * too, causal, mask, angles, norm, own, within)
    label = f"attention, {heads} heads of {head_size}" + (f" in {len(within)} windows" if within else "")
    return trace.add(rule, (queries, keys, value), layout, label=label)


def _unwrap(trace: Trace, value: Traced) -> tuple[Traced, Any, Normalize | None, float]:
    """Queries or keys as the projection left them; the angles, norm and factor they met on the way to the product."""
    angles, norm, factor = None, None, 1.0
    while True:
        draft = trace.drafts[value.node]
        rule = draft.rule
        if isinstance(rule, Rotate) and angles is None and norm is None:
            angles = rule.angles
        elif isinstance(rule, Normalize) and rule.kind in ("rms", "layer") and norm is None:
            norm = rule
        elif isinstance(rule, Scale) and rule.factor.shape == "constant" and rule.shift.second_moment == 0:
            if norm is not None:  # in front of a norm a factor has no effect, and none of it may be kept
                break
            factor *= rule.factor.mean
        else:
            break
        value = Traced(draft.inputs[0], value.layout)
    return value, angles, norm, factor


def _heads(value: Traced, *, distinct: bool = False) -> int:
    """How many heads a value has: its features outside the last axis; repeated ones once if `distinct`."""
    outside = [atom for axis in value.layout[:-1] for atom in axis if atom.role == "feature"]
    return math.prod(atom.size for atom in outside if not (distinct and atom.key[0] < 0))


def _windows(layout: Layout) -> tuple[tuple[int, ...], ...] | None:
    """The positions of each window, where an axis in front of a head's rows holds positions too."""
    inner = [atom for atom in layout[-2] if atom.role == "position"]
    ordered = layout.of("position")
    outer = [atom for axis in layout[:-2] for atom in axis if atom.role == "position"]
    if not outer:
        return None
    numbers = np.arange(layout.points.positions).reshape([atom.size for atom in ordered])
    turned = numbers.transpose([ordered.index(atom) for atom in (*outer, *inner)])
    rows = turned.reshape(math.prod(atom.size for atom in outer), -1)
    return tuple(tuple(map(int, row)) for row in rows)


def _mask(mask: Tensor | None, samples: int, windows: int, rows: int, heads: int) -> tuple[Any, Any]:
    """What is added to the scores: of all heads, (queries, keys) or one each, and what each head adds besides.

    One each is for every sample, every window, or every window of every sample.
    """
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        mask = _hide(~mask, -np.inf)
    shown = mask.double()  # below: (samples and windows, heads, queries, keys), one of each where all agree
    if shown.shape[-2] == 1:
        shown = shown.expand(*shown.shape[:-2], rows, shown.shape[-1])
    if shown.dim() == 3 and shown.shape[0] == samples * windows * heads:
        shown = shown.reshape(-1, heads, *shown.shape[1:])
    if shown.dim() <= 3:
        shown = shown.reshape(-1, 1, *shown.shape[-2:])
    shown = shown.flatten(0, -4)
    if windows > 1 and len(shown) == samples * windows:
        each = shown.reshape(samples, windows, *shown.shape[1:])
        shown = each[0] if bool((each == each[:1]).all()) else shown
    if bool((shown == shown[:1]).all()):
        shown = shown[:1]
    hidden = shown < HIDDEN
    own = (shown - shown[:, :1]).masked_fill(hidden, -np.inf).amax(0)
    own = own.masked_fill(own < HIDDEN, 0.0)
    far = (shown - shown[:, :1] - own).masked_fill(hidden, 0.0).abs().max()
    if not bool((hidden == hidden[:, :1]).all()) or float(far) > SAME:
        raise NotCovered("attention with a bias of its own for every head and every sample")
    shared = shown[0, 0] if len(shown) == 1 else shown[:, 0]
    return _numbers(shared), _numbers(own)


def _numbers(shown: Tensor) -> Any:
    numbers = shown.cpu().numpy()
    return np.where(numbers < HIDDEN, -np.inf, numbers) if bool((numbers != 0).any()) else None


def _times(mask: Tensor | None, number: float) -> Tensor | None:
    return None if mask is None else mask * number


def _plus(mask: Tensor | None, more: Tensor) -> Tensor:
    return more if mask is None else mask + more


def _hide(hidden: Tensor, filled: float) -> Tensor:
    zeros = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return zeros.masked_fill(hidden.bool(), filled if filled < HIDDEN else -np.inf)
