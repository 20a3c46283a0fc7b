"""Operations that stand in the wrong place: a softmax or a norm over the wrong axis, an activation twice or nowhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from sounding.probe.inside.storages import key_of
from sounding.probe.thresholds import THRESHOLDS
from sounding.probe.units import BOUNDS, saturated_fraction

# Activations that bend once more what they have bent; ReLU of ReLU changes nothing, and a sigmoid may follow others.
BENDS = frozenset({"gelu", "silu", "tanh", "elu", "leaky_relu", "mish", "hardswish", "softplus"})
GATES = frozenset({"sigmoid", "silu", "hardsigmoid", "softplus", "gelu"})  # what opens and shuts a gate
SHUT = 1e-3  # of what a gate multiplies: steps of a state space start there, at the least (0.001 to 0.1)
SAMPLES = 16  # of a batch that activations are looked at for
DROWNING = 40.0  # positions over tokens: sines beside tokens of a standard deviation of 0.02 are at 35, and train
COPYING = frozenset({"clone", "copy", "_to_copy", "repeat"})
HIDDEN, SOLE = 1e3, 0.99  # scores so far below the largest are masked; the share of an entry that leaves none
COUNTED = 10.0  # the size of what was counted (steps, places, pixels) and not scaled
LOOKUPS = frozenset({"embedding"})
# What a network consists of that only multiplies by weights, adds and rearranges.
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution"})
STRAIGHT = PRODUCTS | frozenset(
    {"add", "sub", "mul_by_number", "cat", "mean", "sum", "avg_pool2d", "_adaptive_avg_pool2d", "empty", "unbind"}
    | {"t", "view", "_unsafe_view", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select"}
    | {"split", "alias", "as_strided", "clone", "detach", "_to_copy", "copy", "zeros", "ones", "full", "zeros_like"}
)
# What takes each row of a matrix for the features of one place.
ROW_BY_ROW = (PRODUCTS - {"convolution"}) | {"_euclidean_dist", "_cdist_forward", "_softmax", "native_layer_norm"}
LAYERS = 3  # products from which on a network without activation was hardly meant: two are a factored matrix
ROW = 4  # within a network: a branch that ends in a linear map, a sum and a smoothing one make three
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)


class Note(NamedTuple):
    """Something to be said of a call: the key of a sentence, and what it names besides, a number being that of another
    call."""

    at: int
    key: str
    words: tuple[int | str, ...] = ()


@dataclass
class Mean:
    """A mean over places: of which shape it is, whether nothing else has read what it is of, and at which call a layer
    was given it in the place of that."""

    shape: tuple[int, ...]
    alone: bool
    at: int | None = None


@dataclass
class Known:
    """What is known of a storage since an operation has made it."""

    bent: str = ""  # the activation that made it
    features: tuple[int, int] | None = None  # the stride of the axis that holds features, and how many
    shut: bool = False  # whether it is a gate that is shut
    looked_up: bool = False  # whether it comes out of a table
    shares: int | None = None  # the stride of the axis over which a softmax made it sum to one
    entered: int | None = None  # how many features entered the layer that made it
    row: int | None = None  # products by weights since the last bend on every way to it
    readers: int = 0  # how many operations have read it
    mean: Mean | None = None  # the mean over places that it is
    source: Mean | None = None  # the mean over places that was taken of it


class Oddities:
    """What a pass had in the wrong place."""

    def __init__(self) -> None:
        self.found: list[Note] = []
        self._known: dict[int, Known] = {}
        self._products, self._straight = 0, True
        self._row: int | None = None  # where a row of too many ended
        self._all_means: list[Mean] = []

    def _of(self, place: Tensor | int) -> Known:
        """What is known of a storage, or of that of a tensor."""
        return self._known.setdefault(place if isinstance(place, int) else key_of(place), Known())

    def tell(self, at: int, key: str, *words: int | str) -> None:
        """Something is to be said of a call."""
        self.found.append(Note(at, key, words))

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
        if name in BENDS and taken and self._of(taken[0]).bent == name:
            self.tell(at, "activation_twice")
        elif name == "native_layer_norm" and args[0].dim() > 2:
            axis = self._axis_of_features(args[0])
            if axis is not None and axis < args[0].dim() - len(args[1]):
                self.tell(at, "norm_over_places")
        elif name == "mul" and len(signals) == 2 and any(self._of(key).shut for key in taken):
            self.tell(at, "shut_gate")
            for key in taken:  # of a gate for all steps, one product speaks
                self._of(key).shut = False
        elif name == "tanh" and signals and _share_flat(made[0]) >= THRESHOLDS.saturated:
            self.tell(at - 1, "flat_activation")  # of what the last layer gave
        elif name == "cat" and len(args) > 1 and args[1] and _is_one_twice(args[0]) and signals:
            self.tell(at, "joined_twice")
        if name in PRODUCTS and name != "convolution":
            self._look_at_weights(args[-2:], at)
        if name in ROW_BY_ROW and any(self._cuts_across(one) for one in args):
            self.tell(at, "cut_rows")
        new = Known(
            bent=name if name in BENDS else "",
            features=self._features_of(name, args, made),
            shut=name in GATES and bool(signals) and _is_shut(args[0], made[0]),
            looked_up=name in LOOKUPS,
            shares=made[0].stride(args[1]) if name in ("_softmax", "_safe_softmax") else None,
            mean=self._look_at_means(name, args, made, taken, fresh, at),
        )
        self._products += name in PRODUCTS
        if name in ("mul", "div") and len(args) > 1 and not isinstance(args[1], Tensor):
            name = "mul_by_number"
        self._straight = self._straight and name in STRAIGHT
        new.row, new.entered = self._count_row(name, args, made, signals, at)
        for key in fresh:
            self._known[key] = replace(new)
        for key in signals[:1] if not fresh else ():  # changed in place
            self._of(key).row = new.row

    def _look_at_means(
        self, name: str, args: Any, made: Sequence[Tensor], taken: list[int], fresh: list[int], at: int
    ) -> Mean | None:
        """The mean over places that an operation makes or copies. What a mean stands for in front of a layer is noted,
        where nothing else has read what it is of."""
        if name in PRODUCTS or name == "native_layer_norm":
            for tensor in (one for one in args if isinstance(one, Tensor)):
                mean = self._of(tensor).mean
                if mean is not None and mean.at is None and tensor.numel() == math.prod(mean.shape):
                    mean.at = at
        for known in map(self._of, taken if fresh else ()):
            known.readers += 1
            if known.source is not None:
                known.source.alone = False
        if name == "mean" and made[0].dim() == args[0].dim() > 2 and made[0].shape[-1] == args[0].shape[-1]:
            source = self._of(taken[0])
            source.source = Mean(tuple(args[0].shape), alone=source.readers == 1)
            self._all_means.append(source.source)
            return source.source
        return self._of(taken[0]).mean if taken and name in COPYING else None

    def _count_row(
        self, name: str, args: Any, made: Sequence[Tensor], signals: list[int], at: int
    ) -> tuple[int, int | None]:
        """How many products by weights stand in a row with no bend between them, and how many features the last one of
        them took."""
        known = [self._of(key) for key in signals]
        before = [one.row or 0 for one in known if name in PRODUCTS or one.row is not None]
        row = min(before, default=0) if name in STRAIGHT else 0
        entered = known[0].entered if row and len(signals) == 1 else None
        if name in PRODUCTS:
            row = row + 1 if len(before) == 1 else 0
            self._row = at if row >= ROW else self._row
            inner, entering = 0, entered
            if row and name in ("mm", "addmm") and key_of(args[-2]) == signals[0]:
                inner = int(args[-2].shape[-1])
                # a factor of low rank narrows; what widens between two layers asks for an activation
                if row == 2 and entering is not None and inner > max(entering, made[0].shape[-1]):
                    self.tell(at, "wide_layer")
            entered = inner or None
        return row, entered

    def _features_of(self, name: str, args: Any, made: Sequence[Tensor]) -> tuple[int, int] | None:
        """The axis that holds features in what an operation makes, by its stride and size: those of the last layer."""
        if not made or made[0].dim() < 2:
            return None
        out = made[0]
        if name == "convolution":
            return out.stride(1), out.shape[1]
        if name in ("mm", "addmm", *LOOKUPS):
            return out.stride(-1), out.shape[-1]
        read = [one for part in args[:2] for one in (part if isinstance(part, list | tuple) else (part,))]
        known = [self._axis_of_features(one) for one in read if isinstance(one, Tensor) and one.dim() == out.dim()]
        axes = {axis for axis in known if axis is not None}
        if len(axes) == 1:
            axis = axes.pop()
            return out.stride(axis), out.shape[axis]
        same = (
            bool(read)
            and isinstance(read[0], Tensor)
            and (read[0].shape, read[0].stride()) == (out.shape, out.stride())
        )
        return self._of(read[0]).features if same else None  # what lies in memory stays there, however it is viewed

    def _axis_of_features(self, tensor: Tensor) -> int | None:
        """The axis that holds features, where only one has their stride."""
        stride, _ = self._of(tensor).features or (None, 0)
        axes = [axis for axis, size in enumerate(tensor.shape) if size > 1 and tensor.stride(axis) == stride]
        return axes[0] if len(axes) == 1 else None

    def _cuts_across(self, rows: Any) -> bool:
        """Whether rows are as long as there are features, and hold places: no axis has the stride of the features, so
        that a view or a reshape stands where axes should have been moved."""
        known = self._of(rows).features if isinstance(rows, Tensor) and rows.dim() == 2 else None
        if known is None or not rows.is_contiguous() or rows.shape[1] != known[1] > 1:
            return False
        return known[0] not in rows.stride() and known[0] < rows.numel()

    def _look_at_weights(self, pair: Any, at: int) -> None:
        """Note weights of a softmax that are summed over another axis than they add up to one over."""
        for one, axis in zip(pair, (-1, -2), strict=True):
            shared = self._of(one).shares if isinstance(one, Tensor) and one.dim() > 1 else None
            if shared is not None and one.shape[axis] > 1 and one.stride(axis) != shared and shared in one.stride():
                self.tell(at, "softmax_over_queries")

    def note_sum(self, args: Any, weights: Sequence[bool], grown: Sequence[bool], at: int, axis: int) -> None:
        """Look at a sum of two tensors, of which a table or a raw count, grown from no weights, may drown the other."""
        pair = args[:2]
        sizes = [float(one.detach().float().square().mean()) ** 0.5 for one in pair]
        raw = [not (weight or by_weights) for weight, by_weights in zip(weights, grown, strict=True)]
        if sum(raw) == 1:
            count, other = sizes[raw.index(True)], sizes[raw.index(False)]
            if COUNTED < count < math.inf and count > THRESHOLDS.odd * other > 0:
                self.tell(at, "huge_side_input", f"{count:.3g}")
        if not any(weights) and not all(self._of(one).looked_up for one in pair):
            return
        rank = max(one.dim() for one in pair)
        fixed = [weight or _is_fixed(one, axis, rank) for one, weight in zip(pair, weights, strict=True)]
        if sum(fixed) == 1 and sum(size > 1 for size in pair[fixed.index(True)].shape) > 1:
            table, other = (sizes[fixed.index(which)] for which in (True, False))
            if DROWNING * other < table < math.inf and other > 0:
                self.tell(at, "drowned_tokens")

    def note_softmax(self, scores: Tensor, axis: int, weights: Tensor | None, at: int, batch: int, first: int) -> None:
        """Look at the axis of a softmax and, given what it made, at the share of the largest entry among those that no
        mask hides."""
        if weights is not None:
            given, made = (one.detach()[:SAMPLES].movedim(axis, -1).float() for one in (scores, weights))
            largest = made.amax(-1)[(given > given.amax(-1, keepdim=True) - HIDDEN).sum(-1) > 1]
            if largest.numel() and float((largest > SOLE).float().mean()) >= THRESHOLDS.flat:
                self.tell(at, "one_hot_softmax")
        if axis % scores.dim() == first and scores.shape[first] == batch > 1 and scores.numel() > batch:
            self.tell(at, "softmax_over_batch")

    def note_norm(self, module: nn.Module, tensor: Tensor, at: int) -> None:
        """Look at what a norm is given."""
        places = math.prod(tensor.shape[2:])
        if isinstance(module, nn.LayerNorm):
            values = math.prod(module.normalized_shape)
        elif isinstance(module, nn.GroupNorm):
            values = module.num_channels // module.num_groups * places
        else:
            values = places
        if values == 1:
            self.tell(at, "norm_over_one_value")

    def told(self) -> Iterator[Note]:
        """Everything noted; that a network is linear is known at its end."""
        yield from self.found
        yield from (Note(mean.at, "merged_places") for mean in self._all_means if mean.alone and mean.at is not None)
        if self._straight and self._products >= LAYERS:
            yield Note(0, "no_activation")
        elif self._row is not None:
            yield Note(self._row, "row_of_layers")


def _is_fixed(tensor: Tensor, axis: int, rank: int) -> bool:
    """Whether a tensor holds the same for every sample, one axis of so many being that of the samples."""
    if tensor.dim() < rank or tensor.shape[axis] < 2:
        return True
    rows = tensor.detach().movedim(axis, 0)
    return bool((rows[1:] == rows[:1]).all())


def _is_one_twice(joined: Sequence[Tensor]) -> bool:
    """Whether two of the tensors that are joined along features or places are one."""
    views = [(one.data_ptr(), one.shape, one.stride()) for one in joined if one.requires_grad and one.numel() > 1]
    return len(set(views)) < len(views)


def _is_shut(given: Tensor, made: Tensor) -> bool:
    """Whether an activation gives nearly nothing for what is not small: a gate that its bias shuts.

    A gate of exactly zero is a way to start, and small signals make small ones.
    """
    size = float(made.detach()[:SAMPLES].abs().mean())
    return 0 < size < SHUT and float(given.detach()[:SAMPLES].abs().mean()) > 1


def _share_flat(made: Tensor) -> float:
    """The share of outputs of a tanh at which its slope is below 1% of the largest one."""
    return saturated_fraction(made.detach()[:SAMPLES], BOUNDS[nn.Tanh])
