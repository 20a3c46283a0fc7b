"""A guest below autograd: every operation of a forward pass goes by, and a few are looked at.

Attention is a fused kernel, or a softmax over a product of two activations. A residual addition is a sum of a tensor
that other operations have read since it was made, a product among them, and of one that was made later. Tensors are
known by their storage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sounding.probe.calls import Pass
from sounding.probe.gradients import hook_gradient, log_norm
from sounding.probe.inside.attention import Attention, Divisions, look_at_products, look_at_scores
from sounding.probe.inside.gates import Gates, WrittenGates, look_at_gates, note_rate, unpacked
from sounding.probe.inside.oddities import NORMS, Oddities
from sounding.probe.inside.precision import Range, ends_of
from sounding.probe.inside.router import Router, count_choices
from sounding.probe.inside.storages import keys_of, tensors_of
from sounding.probe.inside.stream import SAMPLES, Addition, look_behind, sizes_of
from sounding.probe.inside.tokens import are_told_apart, share_unread
from sounding.probe.inside.trail import Trail
from sounding.probe.moments import no_autocast
from sounding.probe.outputs import main_tensor, tensors_in, why_unmeasurable

# What scores go through between the product and the softmax, and weights between the softmax and the values.
FOLLOWED = frozenset(
    {"mul", "div", "add", "sub", "masked_fill", "where", "tanh", "clamp", "neg"}
    | {"_to_copy", "clone", "copy", "native_dropout", "_unsafe_view"}
)
PRODUCTS = frozenset({"bmm", "mm", "baddbmm"})
LAYERS = PRODUCTS | {"addmm", "convolution", "_thnn_fused_lstm_cell", "mkldnn_rnn_layer"}
SOFTMAX = frozenset({"_softmax", "_safe_softmax"})
FUSED = "_scaled_dot_product_"
WEIGHT, SCORES, ROWS, LOGITS = "weight", "scores", "rows", "logits"
MIXERS = frozenset({"mm", "addmm", "_sparse_mm", "_sparse_addmm", "spmm"})
GATHERS = frozenset({"index_add", "scatter_add", "scatter_reduce"})
CHOICES = frozenset({"topk", "max", "argmax"})
GATING = frozenset({"sigmoid", "mul", "cat", "mm", "addmm", "bmm"})  # what tells the gates of a cell written out
CUTTING = LAYERS | {"cat", "add", "mul", "relu", "silu", "gelu", "avg_pool2d", "max_pool2d_with_indices", "stack"}
# A layer with fewer outputs than inputs and than this may be a router; its logits go through these to the choice.
EXPERTS = 1024
ROUNDING = 1e-6  # of float32, up to which rows are the same
ROUTED = FOLLOWED | SOFTMAX | {"sigmoid"}
SUMMANDS = 8  # additions within which a stream that comes in again was hardly meant: a block has two or three
Mark = tuple[str, Any]


class Inside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at the operations of forward passes; what it cannot look at it leaves alone, and says so in `reason`.

    Args:
        weights: parameters and buffers, which are no activations.
        passes: the records of the watch; the last one knows the number of samples and the calls that have ended.
        axis: which axis holds the samples.
        tokens: the shapes of inputs that hold tokens; what else is looked up are distances and types.
    """

    supports_higher_order_operators = True

    def __init__(
        self, weights: Sequence[Tensor], passes: Sequence[Pass], *, axis: int, tokens: Container[tuple[int, ...]] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._passes, self._axis, self._tokens = weights, passes, axis, tokens
        self._born: dict[int, int] = {}
        self.read: dict[int, int] = {}  # when each storage was last read
        self._marks: dict[int, Mark] = dict.fromkeys(keys_of(weights), (WEIGHT, None))
        self._time = self._product = 0
        self._attended = False
        self._divisions = Divisions()
        self._names: dict[Any, str] = {}
        self._factors: dict[int, float] = {}  # of tensors that are another one times a number
        self._sums: dict[int, dict[int, int]] = {}  # of sums: what streams they hold, and when these were made
        self._trained = set(keys_of(weight for weight in weights if weight.requires_grad))
        # storages of what a product with trained weights is behind, detached or not, by the calls before they were made
        self._learned: dict[int, int] = {}
        self.written = WrittenGates()
        self.attentions: list[Attention] = []
        self.gates: list[Gates] = []
        self.routers: list[Router] = []
        self.ranges: list[Range] = []
        self.additions: list[Addition] = []
        self.given: dict[int, float] = {}  # mean squares of what layers are given as it comes, by the calls before them
        self.unread = math.nan  # the largest share of different tokens, or of positions, that no gradient comes back to
        self.oddities = Oddities()
        self.trail = Trail()
        self.reason: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, which takes a second, to keep it away from a pass that is eager."""
        return False

    @property
    def found(self) -> bool:
        """Whether there was anything to look at between modules."""
        return bool(self.attentions or self.additions or self.gates or self.routers)

    def calls(self) -> int:
        """How many module calls of the pass have ended."""
        return len(self._passes[-1].calls) if self._passes else 0

    def _batch(self) -> int:
        return (self._passes[-1].batch_size or 0) if self._passes else 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = self._names.get(func)
        if name is None:
            packet = getattr(func, "_overloadpacket", None)
            name = self._names[func] = "" if packet is None else packet.__name__.removesuffix("_")
        sizes = None
        if name == "add" and self.reason is None:
            sizes = self._safely(partial(self._weigh, args, kwargs))
        out = func(*args, **kwargs)
        if self.reason is None:
            self._safely(partial(self._take, name, func, args, kwargs, out, sizes))
        return out

    def _safely(self, look: Callable[[], Any]) -> Any:
        """A guest that fails says so and leaves; the pass goes on."""
        try:
            return look()
        except Exception as error:
            self.reason = f"the inside of the network: {type(error).__name__}: {error}"
            return None

    def _take(self, name: str, func: Any, args: Any, kwargs: Any, out: Any, sizes: Tensor | None) -> None:
        """Note one operation: when its tensors were made and read, what they are, and what it tells."""
        self._time += 1
        self.trail.note(name)
        if name in LAYERS or name.startswith(FUSED):
            self._product = self._time
        taken, made = keys_of(tensors_of((args, kwargs))), list(tensors_of(out))
        fresh = [key for key in keys_of(made) if key not in taken]
        mark = self._mark(name, func, args, kwargs, out, taken)
        asking = keys_of(one for one in args if isinstance(one, nn.Parameter) and one.requires_grad)
        if any(self._marks.get(key, ("",))[0] != WEIGHT for key in asking) and torch.is_grad_enabled():
            self.oddities.tell(self.calls() - 1, "unlisted_parameter")
        signals = [key for key in taken if self._marks.get(key, ("",))[0] != WEIGHT]
        self.oddities.note(name, args, made, taken, fresh, signals, self.calls())
        if name in MIXERS or name in GATHERS:
            self._mix(name, args)
        if name == "add" and len(args) > 1 and all(isinstance(one, Tensor) for one in args[:2]):
            marks = [self._marks.get(key, ("",))[0] for key in keys_of(args[:2])]
            if len(marks) == 2 and SCORES not in marks and made[0].dim() > 1:
                grown = [one.requires_grad or self._is_learned(one) for one in args[:2]]
                with _disable_current_modes():
                    self.oddities.note_sum(args, [one == WEIGHT for one in marks], grown, self.calls(), self._axis)
        changes = not fresh and bool(made) and name in ("add", "mul", "copy")
        if fresh or changes or not made:
            self.read.update(dict.fromkeys(taken, self._time))
        # a correction that is added without a gradient is how rounding lets gradients through
        corrects = name == "add" and any(tensor.requires_grad for tensor in tensors_of(args))
        if name in CUTTING and torch.is_grad_enabled() and not corrects:
            self._notice_cuts(args)
        if name in GATING:
            old = [key for key in taken if self._born.get(key, 0) < self._product]
            last = self._passes[-1].calls[-1].name if self.calls() else ""
            self.written.take(name, args, taken, fresh, last, old)
        else:
            self.written.forget(fresh)
        if name in ("mm", "addmm") and WEIGHT in (self._marks.get(key, ("",))[0] for key in taken):
            self._note_given(args[-2])
        scores = [key for key in taken if self._marks.get(key, ("",))[0] == SCORES]
        begins = name in LAYERS and not self._trained.isdisjoint(taken)
        self._divisions.note(name, args, kwargs, () if begins else scores or taken, keys_of(made))
        source, factor = self._scaled(name, args, made)
        learned = any(key in self._learned or (name in LAYERS and key in self._trained) for key in taken)
        # of a shape alone, and of comparisons, nothing could be learned
        of_shapes = name.endswith("_like") or name.startswith("new_")
        learned = learned and not of_shapes and all(one.is_floating_point() for one in made)
        for key in fresh:
            self._born[key] = self._time if source is None else self._born.get(source, 0)
            for known in (self.read, self._marks, self._factors, self._sums, self._learned):
                known.pop(key, None)  # another storage at the same address inherits nothing
            if learned:
                self._learned[key] = self.calls()
            if mark is not None:
                self._marks[key] = mark
            if source is not None:  # a stream times a number is still the stream, and was read as it was
                self.read[key], self._factors[key] = self._time, factor
        if sizes is not None:
            with _disable_current_modes(), torch.no_grad():
                behind = look_behind(self._thinned(made[0]), min(self._batch(), SAMPLES), self._axis)
            shape = tuple(made[0].shape)
            stream, branch = sorted(keys_of(args[:2]), key=lambda key: self._born.get(key, 0))
            born, held = self._born.get(stream, 0), self._sums.get(branch, {})
            again = stream in self._sums and held.get(stream) == born  # a sum that is added to what holds it already
            factor = self._factors.get(stream, 1.0) + again
            summed = stream in self._sums
            self.additions.append(Addition(self.calls(), self._attended, shape, sizes, behind, factor, again, summed))
            self._attended = False
            held = {**self._sums.get(stream, {}), **held, stream: born}
            for key in keys_of(made):
                self._sums[key] = dict(list(held.items())[-SUMMANDS:])

    def _scaled(self, name: str, args: Any, made: list[Tensor]) -> tuple[int | None, float]:
        """The storage of which a result is a multiple, and by which number."""
        if len(args) < 2 or not isinstance(args[0], Tensor) or len(made) != 1:
            return None, 1.0
        keys = keys_of(args[:1])
        if name == "add" and args[1] is args[0] and keys:
            return keys[0], 2 * self._factors.get(keys[0], 1.0)
        if name not in ("mul", "div") or not isinstance(args[1], float | int) or not keys or args[1] == 0:
            return None, 1.0
        return keys[0], self._factors.get(keys[0], 1.0) * (args[1] if name == "mul" else 1 / args[1])

    def _note_given(self, tensor: Tensor) -> None:
        """Note the size of what a layer is given that no trained layer has made: a side input, as it comes."""
        keys = keys_of([tensor])
        if keys and not self._is_learned(tensor) and self._marks.get(keys[0], ("",))[0] != WEIGHT:
            with _disable_current_modes():
                self.given[self.calls()] = float(tensor.detach().double().square().mean())

    def _notice_cuts(self, args: Any) -> None:
        """Note a read without a gradient of what trained weights have made: something detached it on this way."""
        for tensor in tensors_of(args):
            matters = tensor.is_floating_point() and tensor.dim() > 1
            if matters and not tensor.requires_grad and self._is_learned(tensor):
                self.oddities.tell(self.calls(), "cut_way", self._learned[keys_of([tensor])[0]] - 1)

    def _is_learned(self, tensor: Tensor) -> bool:
        return any(key in self._learned for key in keys_of([tensor]))

    def see_outputs(self, output: Any) -> None:
        """Note an output that is the same for every sample; of several outputs, those that are detached, and twins."""
        whole = [(path, tensor) for path, tensor in tensors_in(output) if tensor.is_floating_point() and tensor.dim()]
        if not any(tensor.requires_grad for _, tensor in whole) or self.reason is not None:
            return
        for path, tensor in whole:
            made, rows = self._is_learned(tensor), tensor.detach().double()
            if made and not tensor.requires_grad:
                self.oddities.tell(self.calls(), "cut_way", self.calls())
            placed = made and len(rows) == self._batch() > 1 and self._axis == 0
            if placed and (rows - rows[:1]).norm() <= ROUNDING * rows.norm() and not self._starts_at_zero():
                self.oddities.tell(
                    self.calls(), *(("one_output_alike", path) if len(whole) > 1 else ("outputs_alike",))
                )
        for (first, one), (second, other) in itertools.combinations(whole, 2):
            apart = keys_of([one]) != keys_of([other]) and one.shape == other.shape and one.numel() > 1
            if apart and self._is_learned(one) and torch.equal(one, other):
                self.oddities.tell(self.calls(), "repeated_output", first, second)

    def _starts_at_zero(self) -> bool:
        """Whether a weight or a gate is zero: it gives the same to every sample, which is a practice."""
        return any((one.dim() > 1 or one.numel() == 1) and not bool(one.any()) for one in self._weights)

    def _mark(self, name: str, func: Any, args: Any, kwargs: Any, out: Any, taken: list[int]) -> Mark | None:
        """What the result of an operation is for attention, and a look at it where it is one."""
        if name.startswith(FUSED) and "backward" not in name:
            self._fused(func, args, kwargs)
            return None
        marks = [self._marks.get(key) for key in taken]
        if marks and all(mark is not None and mark[0] == WEIGHT for mark in marks):
            return (WEIGHT, None)
        if name in CHOICES and marks[:1] and marks[0] is not None and marks[0][0] == LOGITS:
            self._route(args, kwargs, out)
            return None
        if name in PRODUCTS or name == "addmm":
            left, right = args[-2:]
            kinds = [self._marks.get(key, ("", None)) for key in (*keys_of([left]), *keys_of([right]))]
            if kinds[0][0] == ROWS:
                self._hook(kinds[0][1], value=right)
            elif len(kinds) == 2 and WEIGHT in (kinds[0][0], kinds[1][0]):
                return (LOGITS, None) if 1 < out.shape[-1] < min(left.shape[-1], EXPERTS) else None
            elif len(kinds) == 2 and name in PRODUCTS and {kinds[0][0], kinds[1][0]} <= {"", LOGITS}:
                gradients: dict[str, float] = {}
                self._hook(gradients, query=left, key=right)
                return (SCORES, (gradients, self._divisions.lack(left, right.transpose(-1, -2))))
            return None
        found = next((mark for mark in marks if mark is not None and mark[0] != WEIGHT), None)
        if name in SOFTMAX and args[0].dim() > 1:
            made = out if found is None or found[0] != SCORES else None  # of attention, scores are looked at below
            with _disable_current_modes():
                self.oddities.note_softmax(args[0], args[1], made, self.calls(), self._batch(), self._axis)
        if found is not None and found[0] == LOGITS:
            return found if name in ROUTED else None
        if found is not None and found[0] == SCORES and name in SOFTMAX:
            scores = args[0]
            if args[1] % scores.dim() != scores.dim() - 1 or scores.shape[-1] < 2:
                return None
            gradients, raw = found[1]
            raw = raw and not self._divisions.hold(scores)
            with _disable_current_modes(), torch.no_grad(), no_autocast(scores):
                self._attend(look_at_scores(scores, self._batch()), gradients, raw=raw)
            return (ROWS, gradients)
        return found if name in FOLLOWED else None

    def _fused(self, func: Any, args: Any, kwargs: Any) -> None:
        """Measure an attention that was called as one operation, from its queries and keys."""
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key, value = given["query"], given["key"], given["value"]
        if query.dim() != 4 or key.shape[-2] < 2:
            return
        mask = given.get("attn_mask", given.get("attn_bias"))
        with _disable_current_modes(), torch.no_grad(), no_autocast(query):
            heads = look_at_products(
                query.detach(), key.detach(), scale=given.get("scale"), mask=mask, causal=bool(given.get("is_causal"))
            )
        gradients: dict[str, float] = {}
        self._hook(gradients, query=query, key=key, value=value)
        scale = given.get("scale")
        whole = scale is not None and scale * query.shape[-1] ** 0.5 > 2
        raw = whole and self._divisions.lack(query, key)
        self._attend(heads, gradients, raw=raw)

    def _route(self, args: Any, kwargs: Any, out: Any) -> None:
        """A choice among the outputs of a layer, over its last axis: experts, if it is a mixture of them."""
        logits, chosen = args[0], out if isinstance(out, Tensor) else out[1]
        axis = kwargs.get("dim", args[2] if len(args) > 2 and chosen.dim() == logits.dim() else None)
        axis = args[1] if axis is None and len(args) > 1 and chosen.dim() < logits.dim() else axis
        if logits.dim() < 2 or (-1 if axis is None else axis) % logits.dim() != logits.dim() - 1:
            return
        experts = logits.shape[-1]
        each = chosen.shape[-1] if chosen.dim() == logits.dim() else 1
        if experts > each and logits.numel() // experts > 1 and not chosen.is_floating_point():
            with _disable_current_modes(), torch.no_grad():
                self.routers.append(Router(self.calls(), count_choices(chosen, experts), each))

    def observe(self, module: nn.Module, args: Any, output: Any, record: Callable[[], Any]) -> Any:
        """Record a module call, and look at the gates of recurrent layers and at the size of what was returned.

        Args:
            module: what was called.
            args: what it was given.
            output: what it returned.
            record: makes the record of the watch; what it returns stands for the output, unless it is None.
        """
        before = self.calls()
        if self.reason is None and isinstance(module, nn.RNNBase | nn.RNNCellBase):
            self._safely(partial(self._open_gates, module, args))
        if self.reason is None and isinstance(module, NORMS) and args and isinstance(args[0], Tensor):
            self.oddities.note_norm(module, args[0], before)
        seeded = record()
        tensor = main_tensor(output if seeded is None else seeded) if self.calls() > before else None
        if self.reason is None and tensor is not None and why_unmeasurable(tensor) is None:
            self._safely(partial(self._size, tensor))
            if isinstance(module, nn.Embedding):
                self._safely(partial(self._await_tokens, args, tensor))
        return seeded

    def _await_tokens(self, args: Any, tensor: Tensor) -> None:
        tokens = args[0].detach() if args and isinstance(args[0], Tensor) else None
        if tokens is None or tuple(tokens.shape) not in self._tokens:
            return
        if tensor.requires_grad and are_told_apart(tokens):
            self._await(tensor, partial(self._note_unread, tokens.clone()))

    def _note_unread(self, tokens: Tensor, gradient: Tensor | None) -> None:
        if gradient is not None:
            with _disable_current_modes(), torch.no_grad():
                self.unread = max(share_unread(tokens, gradient.detach()), self.unread)

    def _size(self, tensor: Tensor) -> None:
        one = Range(self.calls() - 1, tensor.dtype, ends_of(tensor))
        self.ranges.append(one)
        if tensor.requires_grad and not tensor.is_inference():
            self._await(tensor, one.take_gradient)

    def _mix(self, name: str, args: Any) -> None:
        """Note the first product or sum in which rows of the batch meet: a graph, or a batch axis that is not one."""
        size = self._batch()
        if size < 2 or len(args) < 2 or any(key == "rows_that_meet" for _, key, _ in self.oddities.found):
            return  # the first one is enough
        left, right, how = args[-2], args[-1], ""
        if name in MIXERS and isinstance(left, Tensor) and isinstance(right, Tensor) and right.dim() == left.dim() == 2:
            weighs = any(self._marks.get(key, ("",))[0] == WEIGHT for key in keys_of([right]))
            if left.shape[-1] == right.shape[0] == size == left.shape[0] and not weighs:
                how = "a matrix of all pairs of rows multiplies them"
        elif name in GATHERS and isinstance(args[0], Tensor) and args[0].dim() > 1 and args[1] == 0:
            indices = args[2] if isinstance(args[2], Tensor) else None
            repeated = indices is not None and indices.dim() == 1 and len(indices) > size
            if args[0].shape[0] == size and repeated and args[0].is_floating_point():
                how = "rows are added to one another by an index, as along the edges of a graph"
        if how:
            self.oddities.tell(self.calls() - 1, "rows_that_meet", how)

    def _open_gates(self, module: nn.Module, args: Any) -> None:
        args = (unpacked(module, args[0]), *args[1:])
        with torch.no_grad(), no_autocast(args[0]):
            found = look_at_gates(module, args, self.calls())
        self.gates += found
        if found and isinstance(module, nn.RNNBase) and args[0].requires_grad:
            self._await(args[0], partial(note_rate, found[0].rate, int(module.batch_first)))

    def _attend(self, heads: Tensor, gradients: dict[str, float], *, raw: bool) -> None:
        self._attended = True
        self.attentions.append(Attention(self.calls(), heads, gradients, raw))

    def _hook(self, gradients: dict[str, float], **tensors: Tensor) -> None:
        """Note the norm of the gradient that comes back to a tensor; the hook goes with the graph."""
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                self._await(tensor, partial(_note, gradients, name))

    def _await(self, tensor: Tensor, take: Callable[[Tensor | None], None]) -> None:
        """Call it with the gradient of a tensor; one that fails (inside a transform) is left out and named."""
        hook_gradient(tensor, lambda gradient: self._safely(partial(take, gradient)))

    def _weigh(self, args: Any, kwargs: Any) -> Tensor | None:
        """The sizes of branch and stream, if an addition is one of a branch to its stream."""
        if len(args) < 2 or not isinstance(args[1], Tensor) or kwargs.get("alpha", 1) != 1:
            return None
        left, right = args[:2]
        if left is right or left.shape != right.shape or left.dim() < 2 or left.numel() < 2:
            return None
        keys = keys_of([left, right]) if left.is_floating_point() else []
        if len(keys) < 2 or any(self._marks.get(key, (LOGITS,))[0] != LOGITS for key in keys):
            return None  # weights, or scores of attention and their bias
        first, second = (self._born.get(key, 0) for key in keys)
        older, stream = (keys[0], left) if first <= second else (keys[1], right)
        if stream.numel() * stream.element_size() != stream.untyped_storage().nbytes():
            return None  # one step of a recurrence, cut out of what was computed for all
        made = self._born.get(older, 0)
        if self.read.get(older, 0) <= made or self._product <= made:
            return None  # two fresh tensors (embeddings, gates, the sides of a rotation), or a function like x + x³
        with _disable_current_modes(), torch.no_grad():
            return sizes_of(self._thinned(right if stream is left else left), self._thinned(stream))

    def _thinned(self, tensor: Tensor) -> Tensor:
        """The first samples of a tensor, where one axis holds them."""
        fits = tensor.shape[self._axis] == self._batch() > SAMPLES
        return tensor.narrow(self._axis, 0, SAMPLES) if fits else tensor


def _note(gradients: dict[str, float], name: str, gradient: Tensor | None) -> None:
    if gradient is not None:
        gradients[name] = log_norm(gradient)
