"""Operations that stand in the wrong place: a softmax or a norm over the wrong axis, an activation twice or nowhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from sounding.probe.records import FindingKind

# Activations that bend once more what they have bent; ReLU of ReLU changes nothing, and a sigmoid may follow others.
BENDS = frozenset({"gelu", "silu", "tanh", "elu", "leaky_relu", "mish", "hardswish", "softplus"})
# What a network consists of that only multiplies by weights, adds and rearranges.
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution"})
STRAIGHT = PRODUCTS | frozenset(
    {"add", "sub", "mul_by_number", "cat", "mean", "sum", "avg_pool2d", "_adaptive_avg_pool2d", "empty", "unbind"}
    | {"t", "view", "_unsafe_view", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select"}
    | {"split", "alias", "as_strided", "clone", "detach", "_to_copy", "copy"}
)
LAYERS = 3  # products from which on a network without activation was hardly meant: two are a factored matrix
ROW = 4  # within a network: a branch that ends in a linear map, a sum and a smoothing one make three
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
HARMFUL = frozenset({"one", "batch", "row"})  # what trainings lose to (docs/audit.md, what hurts); the others are notes
# (kind, why, what to do, what is expected there, what was found), by what was noted; {name} is the module.
SENTENCES: dict[str, tuple[FindingKind, str, str, str, str]] = {
    "queries": (
        "wrong_axis",
        "The softmax of the attention at {name} runs over the queries, and the weights are then summed over the keys: "
        "what a query takes from all keys does not add up to one",
        "softmax(dim=-1) for scores of the shape (…, queries, keys)",
        "weights that sum to one over the keys",
        "weights that sum to one over the queries",
    ),
    "places": (
        "wrong_axis",
        "{name} takes the output of a convolution, whose last axis holds places, and normalizes over this axis; its "
        "weights then belong to places, and not to channels",
        "move the channels to the last axis (permute), or use GroupNorm(1, channels)",
        "a norm over the channels",
        "a norm over the last axis of an image or a signal",
    ),
    "one": (
        "wrong_axis",
        "{name} normalizes over a single value, which always gives zero: its output does not depend on its input",
        "fewer groups, a larger image at this place, or no norm here",
        "a norm over two or more values",
        "a norm over one value",
    ),
    "batch": (
        "mixed_samples",
        "The softmax at {name} runs over the axis of the samples: how much one of them weighs depends on the others",
        "softmax over the axis of the keys, steps or classes, mostly dim=-1",
        "weights that sum to one within a sample",
        "weights that sum to one over the batch",
    ),
    "row": (
        "activation",
        "Up to {name} four layers or more stand in a row with no activation between them: together they compute what "
        "one layer could",
        "an activation behind each layer but the last",
        "an activation between layers",
        "none in a row of layers",
    ),
    "twice": (
        "activation",
        "At {name} an activation is applied to what the same activation has just made",
        "remove one of the two",
        "one activation between two layers",
        "the same activation twice",
    ),
    "straight": (
        "activation",
        "Between its layers the network only adds and rearranges: however many layers it has, it computes a linear "
        "function, as one layer would",
        "an activation behind each layer but the last",
        "an activation between layers",
        "none",
    ),
}


class Oddities:
    """What a pass had in the wrong place: (number of calls that had ended, key of `SENTENCES`), in order."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._bent: dict[int, str] = {}
        self._convolved: dict[int, tuple[Any, Any]] = {}
        self._products, self._straight = 0, True
        self._rows: dict[int, int] = {}  # by storage: products by weights since the last bend on every way to it
        self._row: int | None = None  # where a row of too many ended

    def note(
        self,
        name: str,
        args: Any,
        made: Sequence[Tensor],
        taken: list[int],
        fresh: list[int],
        signals: list[int],
        at: int,
    ) -> None:
        """Look at one operation; `taken` and `fresh` are the storages that it read and made, `signals` those that it
        read and that are no weights."""
        if name in BENDS and taken and self._bent.get(taken[0]) == name:
            self.found.append((at, "twice"))
        for key in fresh:
            self._bent.pop(key, None)
            self._convolved.pop(key, None)
            if name in BENDS:
                self._bent[key] = name
            elif name == "convolution":
                self._convolved[key] = (made[0].shape, made[0].stride())
        self._products += name in PRODUCTS
        if name in ("mul", "div") and len(args) > 1 and not isinstance(args[1], Tensor):
            name = "mul_by_number"
        self._straight = self._straight and name in STRAIGHT
        before = [self._rows.get(key, 0) for key in signals if name in PRODUCTS or key in self._rows]
        row = min(before, default=0) if name in STRAIGHT else 0
        if name in PRODUCTS:
            row = row + 1 if len(before) == 1 else 0
            self._row = at if row >= ROW else self._row
        self._rows.update(dict.fromkeys(fresh or signals[:1], row))

    def note_softmax(self, scores: Tensor, axis: int, at: int, *, batch: int, batch_axis: int, products: bool) -> None:
        """Look at a softmax; `products` says that its scores are (…, queries, keys)."""
        if axis % scores.dim() == batch_axis and scores.shape[batch_axis] == batch > 1 and scores.numel() > batch:
            self.found.append((at, "batch"))
        elif products and scores.dim() > 2 and axis % scores.dim() == scores.dim() - 2 and scores.shape[-2] > 1:
            self.found.append((at, "queries"))

    def note_norm(self, module: nn.Module, tensor: Tensor, key: int, at: int) -> None:
        """Look at what a norm is given."""
        places = math.prod(tensor.shape[2:])
        if isinstance(module, nn.LayerNorm):
            values = math.prod(module.normalized_shape)
            straight = self._convolved.get(key) == (tensor.shape, tensor.stride())
            if straight and tensor.dim() > 2 and len(module.normalized_shape) == 1:
                self.found.append((at, "places"))
        elif isinstance(module, nn.GroupNorm):
            values = module.num_channels // module.num_groups * places
        else:
            values = places
        if values == 1:
            self.found.append((at, "one"))

    def told(self) -> Iterator[tuple[int, str]]:
        """Everything noted; that a network is linear is known at its end."""
        yield from self.found
        if self._straight and self._products >= LAYERS:
            yield 0, "straight"
        elif self._row is not None:
            yield self._row, "row"
