"""One pass of a model with every operation seen, each turned into a node of the description or named as not covered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sounding.activations import Activation
from sounding.errors import SoundingError
from sounding.probe.inside.storages import tensors_of
from sounding.reader.layout import MOVES, Atom, Keys, Layout, moved, reshape
from sounding.reader.recognize import as_activation, recognize
from sounding.reader.values import (
    Constant,
    Draft,
    Function,
    Measured,
    Place,
    Scores,
    Traced,
    Value,
    constant_of,
    place_of,
    times,
    to_canonical,
    written,
)
from sounding.theory.signal.description import Elementwise, Flatten, Given, Join, Normalize, Rule, Scale

QUIET = torch._C.DisableTorchFunction  # else every look at a tensor's shape goes through the modes of the pass
Handler = Callable[["Trace", tuple[Any, ...], dict[str, Any], Any], Any]
HANDLERS: dict[str, Handler] = {}
Reader = TypeVar("Reader", bound=Handler)
# Where theory may start: on measured values these operations make nodes, all others only more measured values.
STARTERS = frozenset(
    {"mm", "addmm", "bmm", "convolution", "native_layer_norm", "native_group_norm", "_fused_rms_norm"}
    | {"native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"}
)


def handles(*names: str) -> Callable[[Reader], Reader]:
    """Register a function as the reader of these operations."""

    def register(handler: Reader) -> Reader:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


class NotCovered(Exception):
    """No rule describes an operation on these values; the text says why."""


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that follows every tensor of a pass.

    Args:
        parameters: the name of every parameter.
        batch_size: how many samples the inputs hold, along `batch_axis`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, batch_size: int, batch_axis: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch_size, self.batch_axis = batch_size, batch_axis
        self.keys = Keys()
        self.drafts: list[Draft] = []
        self.where = ""  # the module that is running, for reasons that name a place
        self._values: dict[Place, Value] = {}
        self._places: dict[int, set[Place]] = {}  # of every storage, so that a change in place forgets its views
        self._kept: list[Tensor] = []  # holds every storage, so that none is used again under another meaning
        self._activations: dict[str, Activation] = {}
        self._settled: dict[tuple[int, int | None], tuple[Value, Traced]] = {}
        self.held: dict[Traced, tuple[Tensor, int]] = {}  # with a number that changes when it is written over
        self.parts: dict[Traced, Traced] = {}  # of which value a part was cut
        self._parts: dict[tuple[Rule, int], int] = {}
        self._measured: dict[Place, Traced] = {}  # what was measured, by where it begins in memory
        self.uses: Counter[str] = Counter()  # how many operations on signals take each parameter
        self.embedded: set[str] = set()  # parameters whose rows are embeddings
        for name, parameter in parameters.items():
            self.put(parameter, Constant(parameter.detach(), name))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, which takes a second, to keep it away from a pass that is eager."""
        return False

    # ---- values ------------------------------------------------------------------------------------------------------

    def put(self, tensor: Tensor, value: Value) -> None:
        """Remember what a tensor is."""
        place = place_of(tensor)
        if place is None:
            return
        self._values[place] = value
        if isinstance(value, Traced):
            self.held.setdefault(value, (tensor, tensor._version))
        self._places.setdefault(place[0], set()).add(place)
        self._kept.append(tensor)

    def tensor_of(self, value: Traced) -> Tensor | None:
        """The tensor of a node's value, None where it was written over."""
        tensor, version = self.held.get(value, (None, 0))
        return tensor if tensor is not None and tensor._version == version else None

    def value(self, tensor: Tensor) -> Value:
        """What is known of a tensor; one that was never seen was made outside and is a constant."""
        place = place_of(tensor)
        return self._values.get(place, Constant(tensor)) if place is not None else Constant(tensor)

    def forget(self, tensor: Tensor) -> None:
        """Drop every view of a storage that was written to."""
        place = place_of(tensor)
        if place is not None:
            for other in self._places.pop(place[0], set()):
                self._values.pop(other, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with QUIET():
            known = [(item, self.value(item)) for item in tensors_of((args, kwargs))]
        out = func(*args, **kwargs)
        with QUIET():
            self._remember(func, args, kwargs, out, known)
        return out

    def _remember(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, known: list[tuple[Tensor, Value]]
    ) -> None:
        """Remember what an operation on known values has made."""
        if func._schema.is_mutable:
            changed = written(func, args)
            for item in changed:
                self.forget(item)
            for item, value in known:  # what only shares the call keeps its meaning
                if place_of(item) not in self._values and all(item is not one for one in changed):
                    self.put(item, value)
        for item, value in self._understand(func, args, kwargs, out, {id(item): value for item, value in known}):
            self.put(item, value)

    def _understand(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, known: Mapping[int, Value]
    ) -> list[tuple[Tensor, Value]]:
        """What the outputs of an operation are, by the rule that covers it; without one they are measured."""
        outputs = list(tensors_of(out))
        values = list(known.values())
        self.func, self._known = func, known
        name = self.name
        if all(isinstance(value, Constant) for value in values):
            return [(item, constant_of(func, item, values)) for item in outputs]
        self.uses.update({value.parameter for value in values if isinstance(value, Constant) and value.parameter})
        if name == "embedding":
            self.embedded |= {value.parameter for value in values if isinstance(value, Constant)} - {""}
        starts = name in STARTERS or (name == "constant_pad_nd" and outputs[0].dim() > 2)
        if not starts and not any(isinstance(value, Traced | Function | Scores) for value in values):
            layout = self._followed(name, args, outputs)
            return [(item, replace(self._unpredicted(item, values), layout=layout)) for item in outputs]
        reason = f"no rule covers the operation {name!r}"
        handler = HANDLERS.get(name)
        if handler is None and torch.Tag.pointwise in func.tags:
            handler = HANDLERS["pointwise"]
        try:
            found = handler(self, args, kwargs, out) if handler is not None else None
        except NotCovered as why:
            found, reason = None, str(why)
        if found is not None:
            paired = found if isinstance(found, list) else [found]
            return list(zip(outputs, paired, strict=False))
        same = self._unchanged((args, kwargs), outputs)
        if same is not None:
            return [(outputs[0], same)]
        if name in STARTERS:
            return [(item, self._unpredicted(item, values, reason)) for item in outputs]
        plain = tuple(float(n) for n in (*args, *kwargs.values()) if isinstance(n, int | float))
        return [(item, self._function_or_measured(item, values, reason, plain)) for item in outputs]

    def _followed(self, name: str, args: tuple[Any, ...], outputs: list[Tensor]) -> Layout | None:
        """The axes of what an operation made of measured values alone."""
        known = [(item, value) for item in tensors_of(args) if isinstance(value := self._known.get(id(item)), Measured)]
        if len(outputs) != 1 or not known or known[0][1].layout is None:
            return None
        item, layout, shape = known[0][0], known[0][1].layout, tuple(outputs[0].shape)
        if name in MOVES:
            return moved(name, layout, args, shape)
        if name == "embedding" and len(known) == 1:
            return Layout([*layout, (self.keys.atom("position", shape[-1]),)])
        same = all(tuple(one.shape) == shape for one, _ in known)
        return layout if same and torch.Tag.pointwise in self.func.tags and tuple(item.shape) == shape else None

    def _unchanged(self, arguments: Any, outputs: list[Tensor]) -> Value | None:
        """The value that an operation returned as it was (dropout at rest, a cache that was empty)."""
        for item in tensors_of(arguments) if outputs else ():
            value = self._known.get(id(item))
            if not isinstance(value, Traced | Function) or item is outputs[0] or item.dtype != outputs[0].dtype:
                continue
            if item.shape == outputs[0].shape and torch.equal(item, outputs[0]):
                return value
        return None

    def _function_or_measured(self, item: Tensor, values: list[Value], reason: str, plain: tuple[float, ...]) -> Value:
        """A function of one node where only constants came in besides, else a value to be measured."""
        bases = {one.base if isinstance(one, Function) else one for one in values if not isinstance(one, Constant)}
        if len(bases) == 1 and isinstance(base := bases.pop(), Traced) and item.is_floating_point():
            inherited = [n for value in values if isinstance(value, Function) for n in value.numbers]
            numbers = tuple(dict.fromkeys([*plain, *inherited]))
            layout = base.layout if tuple(item.shape) == base.layout.shape else None
            function = Function(base, item, layout, numbers=numbers, label=reason + self.place_words())
            return recognize(self, function) or function
        return self._unpredicted(item, values, reason)

    def _unpredicted(self, item: Tensor, values: list[Value], reason: str = "") -> Measured:
        reasons = [reason + self.place_words()] if reason else []
        reasons += [value.reason for value in values if isinstance(value, Measured) and value.reason]
        depends = frozenset().union(*(self.nodes_of(value) for value in values))
        own = any(value.parameter if isinstance(value, Constant) else getattr(value, "own", False) for value in values)
        return Measured(item, reasons[0] if reasons else "", depends, own=bool(own))

    @property
    def name(self) -> str:
        """The name of the operation at hand, the same in place and out of place."""
        return str(self.func._overloadpacket.__name__.removesuffix("_"))

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the operation at hand by their names, without those that were left out."""
        return dict(zip((one.name for one in self.func._schema.arguments), args, strict=False)) | kwargs

    def place_words(self) -> str:
        return f" in {self.where!r}" if self.where else ""

    def nodes_of(self, value: Value) -> frozenset[int]:
        """The nodes that a value was computed from."""
        match value:
            case Traced():
                return frozenset({value.node})
            case Function():
                return frozenset({value.base.node})
            case Scores():
                return frozenset({value.queries.node, value.keys.node})
            case Measured():
                return value.depends
        return frozenset()

    def of(self, item: Any) -> Value:
        """What an argument of the operation at hand is."""
        if not isinstance(item, Tensor):
            raise NotCovered(f"an argument of type {type(item).__name__} where a tensor was expected")
        return self._known.get(id(item)) or self.value(item)

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def add(
        self,
        rule: Rule,
        inputs: tuple[Traced, ...],
        layout: Layout,
        *,
        label: str,
        sources: frozenset[object] | None = None,
        weight: str = "",
    ) -> Traced:
        """A new node; its randomness comes from its inputs unless `sources` says otherwise.

        What acts on each feature alone acts on each part of joined features, which differ in size and law.
        """
        alone = isinstance(rule, Elementwise | Scale) or (isinstance(rule, Normalize) and rule.kind == "batch")
        if alone and self._is_joined(inputs[0].node):
            parts = self.drafts[inputs[0].node].inputs
            return self.joined(tuple(self._of_part(rule, part, label) for part in parts), layout, weight=weight)
        if sources is None:
            sources = frozenset().union(*(self.drafts[item.node].sources for item in inputs))
        nodes = tuple(item.node for item in inputs)
        self.drafts.append(Draft(rule, nodes, layout.points, layout.features, sources, label=label, weight=weight))
        return Traced(len(self.drafts) - 1, layout)

    def joined(self, parts: tuple[int, ...], layout: Layout, *, weight: str = "") -> Traced:
        """Values side by side; of one that is joined already, its parts. Their Gram matrices need no independence."""
        flat = [at for part in parts for at in (self.drafts[part].inputs if self._is_joined(part) else (part,))]
        inputs = tuple(Traced(at, layout) for at in flat)
        return self.add(Join("features"), inputs, layout, label="features joined", weight=weight)

    def _is_joined(self, at: int) -> bool:
        rule = self.drafts[at].rule
        return isinstance(rule, Join) and rule.axis == "features"

    def _of_part(self, rule: Rule, part: int, label: str) -> int:
        """The node of a rule on one part; one node for all joined values that hold the part and treat it alike."""
        key = (rule, part)
        if key not in self._parts:
            whole = self.drafts[part]
            self.drafts.append(Draft(rule, (part,), whole.points, whole.features, whole.sources, label=label))
            self._parts[key] = len(self.drafts) - 1
        return self._parts[key]

    def fresh(self, rule: Rule, inputs: tuple[Traced, ...], layout: Layout, *, label: str, weight: str = "") -> Traced:
        """A new node whose randomness is its own: a random map, or a measured value."""
        return self.add(rule, inputs, layout, label=label, weight=weight, sources=frozenset({len(self.drafts)}))

    def ready(self, value: Value) -> Traced | None:
        """The node behind a value that can become one, None for a function that may yet be recognized."""
        can = isinstance(value, Traced) or (isinstance(value, Function) and value.known)
        return self.settle(value) if can else None

    def settle(self, value: Value, *, features: int | None = None) -> Traced:
        """The node behind a value; `features` is the axis that holds them in a measured tensor, the last where None."""
        if isinstance(value, Traced):
            return value
        # a function whose axes are known is one node, whichever of them the next layer takes for features
        key = (id(value), None if isinstance(value, Function) and value.layout is not None else features)
        if key not in self._settled:
            self._settled[key] = (value, self._settle(value, features))
            if isinstance(value, Function) and value.layout is not None:
                self.held.setdefault(self._settled[key][1], (value.tensor, value.tensor._version))
        return self._settled[key][1]

    def _settle(self, value: Value, features: int | None) -> Traced:
        """The node of a value: a function becomes a rule, what was computed from inputs alone is measured."""
        match value:
            case Function() if value.layout is not None and value.factor is not None:
                return self.add(times(value.factor), (value.base,), value.layout, label=value.label)
            case Function() if value.layout is not None and value.apply is not None:
                activation = self.activation(value)
                return self.add(Elementwise(activation), (value.base,), value.layout, label=activation.name)
            case Measured() | Constant():
                tensor = value.tensor
                # views of one tensor are one measured value, where all of them have the features at their end
                place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype)
                plain = tensor.is_contiguous() and (features is None or features % tensor.dim() == tensor.dim() - 1)
                seen = self._measured.get(place) if plain else None
                view = reshape(seen.layout, tensor.shape) if seen is not None else None
                if seen is not None and view is not None and view.roles(tensor.dim() - 1) <= {"feature"}:
                    return Traced(seen.node, view)
                followed = value.layout if isinstance(value, Measured) else None
                node = self.measure(value, self.guess_layout(tensor, features=features, followed=followed))
                if plain:
                    self._measured[place] = node
                return node
            case Function():
                measured = Measured(value.tensor, value.label, self.nodes_of(value))
                layout = value.layout or self.guess_layout(value.tensor, features=features)
                return self.measure(measured, layout)
        raise NotCovered("products of queries and keys are used outside a softmax")

    def measure(self, value: Measured | Constant, layout: Layout) -> Traced:
        """A node whose Gram matrix is measured."""
        tensor = value.tensor.detach()
        constant = isinstance(value, Constant)
        reason, own = (value.reason, value.own) if isinstance(value, Measured) else ("", True)
        if not tensor.is_floating_point():
            raise NotCovered("whole numbers are used as a signal")
        inputs = tuple(sorted(value.depends)) if isinstance(value, Measured) else ()
        node = self.fresh(Given(reason, constant, own), (), layout, label="constant" if constant else "measured")
        draft = self.drafts[node.node]
        draft.inputs, draft.features_array = inputs, to_canonical(tensor, layout)
        return node

    def input_layout(self, tensor: Tensor) -> Layout | None:
        """The axes of an input: its samples, and everything else."""
        if self.batch_axis >= tensor.dim() or tensor.shape[self.batch_axis] != self.batch_size:
            return None
        return Layout(
            (self.keys.atom("sample" if axis == self.batch_axis else "position", size),)
            for axis, size in enumerate(tensor.shape)
        )

    def guess_layout(self, tensor: Tensor, *, features: int | None = None, followed: Layout | None = None) -> Layout:
        """The meaning of a measured tensor's axes: samples first, features where the next layer takes them."""
        axes: list[tuple[Any, ...]] = [()] * tensor.dim()
        place = (tensor.dim() - 1 if features is None else features) if tensor.dim() > 1 else None
        if followed is not None and place is not None and followed.roles(place) <= {"position"}:
            taken = tuple(Atom("feature", atom.key, atom.size) for atom in followed[place])
            return followed.with_axis(place, taken)
        fitting = [axis for axis in (self.batch_axis, *range(tensor.dim())) if axis != place and axis < tensor.dim()]
        # torch's own attention puts positions first; where no axis has the size, the first may hold samples · positions
        sample = next((axis for axis in fitting if tensor.shape[axis] == self.batch_size), 0)
        if tensor.dim() == 0 or sample == place:
            raise NotCovered(f"a tensor of shape {tuple(tensor.shape)} has no axis of samples")
        for axis, size in enumerate(tensor.shape):
            if axis == place:
                axes[axis] = (self.keys.atom("feature", size),) if size > 1 else ()
            elif axis == sample:
                rest, odd = divmod(size, self.batch_size)
                if odd:
                    shape = tuple(tensor.shape)
                    raise NotCovered(f"a tensor of shape {shape} has no axis of {self.batch_size} samples")
                axes[axis] = (self.keys.atom("sample", self.batch_size), *self.keys.axis("position", rest))
            else:
                axes[axis] = self.keys.axis("position", size)
        return Layout(axes)

    def activation(self, value: Function) -> Activation:
        """The activation that an elementwise function of numbers is."""
        label, apply = value.label, value.apply
        if label not in self._activations:
            assert apply is not None
            try:
                with _disable_current_modes():
                    self._activations[label] = as_activation(apply, label)
            except SoundingError as error:
                raise NotCovered(f"theory cannot take {label} as an activation: {error}") from error
        return self._activations[label]

    def flattened(self, value: Traced, axis: int) -> Traced:
        """The value with all positions made features, where an axis holds both."""
        layout = value.layout
        others = [layout.roles(place) for place in range(len(layout)) if place != axis]
        if any(roles - {"sample"} for roles in others):
            raise NotCovered("some of the positions became features")
        flat = layout.with_axis(axis, (self.keys.atom("feature", layout.shape[axis]),))
        return self.add(Flatten(), (value,), flat, label="flatten")

    def is_foreign(self, node: Traced, value: Value) -> bool:
        """Whether a node owes its randomness to no map that a value was computed from."""
        behind = frozenset().union(*(self.drafts[at].sources for at in self.nodes_of(value)))
        return not behind & self.drafts[node.node].sources

    def independent(self, *values: Traced) -> bool:
        """Whether no two of the values owe their randomness to the same map."""
        sources = [self.drafts[value.node].sources for value in values]
        return sum(map(len, sources)) == len(frozenset().union(*sources))
