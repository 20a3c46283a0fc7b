"""The front door: from a module and a batch to a description, and the signals that theory starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from sounding.errors import TargetError, UsageError
from sounding.probe.batches import Batch, make_batch
from sounding.probe.calls import Spec, named_parameters, survey
from sounding.probe.hooks import Hooks
from sounding.probe.losses import Loss, evaluate_loss, implied_targets
from sounding.probe.outputs import answer_tensor, guess_axis, main_tensor, tensors_in
from sounding.probe.state import (
    DropoutAtRest,
    Mode,
    materializable,
    plain_execution,
    preserve,
    set_mode,
    untouched,
    unwrap,
)
from sounding.reader import linear, pointwise, shapes, softmax  # noqa: F401 - importing registers their rules
from sounding.reader.followed import plan_of, thinned
from sounding.reader.page import render
from sounding.reader.trace import QUIET, NotCovered, Trace
from sounding.reader.values import Function, Measured, Traced, Value, to_canonical
from sounding.theory.signal.description import Add, Attention, Convolution, Description, Given, Linear, Node, Tied


@dataclass(frozen=True)
class Blueprint:
    """A network as theory sees it, with the measured signals that its prediction starts from.

    Args:
        description: the graph of rules.
        given: for every measured node its value as (samples, positions, features).
        gradients: for every output node the gradient of the loss in the same form; and for the nodes in front of a part
            that no rule covers, where it is measured.
        aliases: further names under which a check measures a node (modules that return what they got).
        weight_layers: how many calls multiply by a weight, and how many of them theory predicts.
        cuts: calls of modules whose input depends on trainable weights and yet carries no gradient back to them.
        shared: weights that more than one operation takes; their gradient is a sum that no rule covers.
    """

    description: Description
    given: Mapping[int, Tensor] = field(repr=False)
    gradients: Mapping[int, Tensor] = field(repr=False)
    aliases: Mapping[str, int]
    weight_layers: tuple[int, int]
    cuts: tuple[str, ...] = ()
    shared: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """The page that a person can check: one line a node, with its rule, its inputs and the laws of its weights."""
        return render(self.description, self.weight_layers)


def read(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    loss: str | Loss | None = None,
    mode: Mode = "train",
    batch_axis: int | None = None,
    generator: torch.Generator | None = None,
) -> Blueprint:
    """The description of a module: which rule of theory stands for each of its parts, with the laws of its weights.

    The model runs once, forwards, on the batch; every operation is seen, functional calls included. What no rule covers
    is named, and theory goes on from what is measured behind it. The model is left as it was.

    Args:
        model: any module.
        inputs: as for `check`.
        targets: as for `check`; they and the loss decide which gradient arrives at the output.
        loss: as for `check`.
        mode: as for `check`.
        batch_axis: as for `check`.
        generator: where the random direction comes from that stands for a loss.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> blueprint = read(model, torch.eye(4))
    >>> [node.label for node in blueprint.description.nodes]
    ['measured', 'linear 4 → 8', 'relu', 'linear 8 → 2']
    """
    root, batch = materializable(unwrap(model)), make_batch(inputs, targets)
    with preserve(root), untouched(batch.uncopied()):
        return read_batch(root, batch, loss=loss, mode=mode, batch_axis=batch_axis, generator=generator)


def read_batch(
    root: nn.Module,
    batch: Batch,
    *,
    loss: str | Loss | None,
    mode: Mode,
    batch_axis: int | None,
    generator: torch.Generator | None,
) -> Blueprint:
    """The description of a module on a batch that has been checked already; who calls it puts the module back."""
    axis = guess_axis(root) if batch_axis is None else batch_axis
    size = batch.size(axis)
    if size is None:
        raise UsageError("expected inputs with at least one tensor, got none")
    with torch.inference_mode(False), torch.enable_grad():
        set_mode(root, mode, dropout=False)
        reader = _Reader(root, size, axis)
        try:
            output = reader.run(batch)
        except TargetError:  # a model that asks for gradients itself, as wav2vec 2 does, needs leaves
            reader = _Reader(root, size, axis)
            output = reader.run(batch, plain=True)
        return reader.blueprint(output, batch, loss, generator)


class _Reader:
    """One pass of a model under the trace, with names given to nodes as module calls return."""

    def __init__(self, root: nn.Module, batch_size: int, axis: int) -> None:
        self._root = root
        self._specs = survey(root, only=None, types=None)
        parameters = dict(named_parameters(root))
        self._trainable = {name for name, one in parameters.items() if one.requires_grad}
        self._cuts: list[str] = []
        self._trace = Trace(parameters, batch_size=batch_size, batch_axis=axis)
        self._counts: dict[str, int] = {}
        self._last: tuple[Tensor, int] | None = None
        self._weighing: list[int | None] = []
        self._aliases: dict[str, int] = {}

    def run(self, batch: Batch, *, plain: bool = False) -> Any:
        """The model’s output on the batch, while the trace listens to every operation."""
        arguments, keywords, _ = batch.prepare(plain=plain)
        hooks = Hooks()
        handles: list[Any] = [hooks]
        try:
            for spec in self._specs:
                handles.append(spec.module.register_forward_pre_hook(self._enter(spec)))
                hooks.on_call(spec.module, self._leave(spec))
                hooks.on_forward(spec.module, self._leave(spec))
            for tensor in Batch(arguments, keywords, None).tensors():
                self._trace.put(tensor, Measured(tensor, layout=self._trace.input_layout(tensor)))
            with plain_execution(), DropoutAtRest(), self._trace:
                return self._root(*arguments, **keywords)
        except Exception as error:
            raise TargetError(f"the model raised {type(error).__name__} while it was read: {error}") from error
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, spec: Spec) -> Any:
        def enter(_module: nn.Module, args: tuple[Any, ...]) -> None:
            self._trace.where = spec.name
            if spec.leaf and torch.is_grad_enabled():
                with QUIET():
                    loose = [item for item in args if isinstance(item, Tensor) and not item.requires_grad]
                if loose:  # to leave the modes takes longer than all that is asked of most layers
                    with _disable_current_modes():
                        self._cuts += [spec.name for item in loose if self._is_cut(item)]

        return enter

    def _is_cut(self, tensor: Tensor) -> bool:
        """Whether a tensor that carries no gradient is made with trainable weights."""
        value = self._trace.value(tensor)
        if not isinstance(value, Traced | Function):
            return False
        asked, seen = [*self._trace.nodes_of(value)], set[int]()
        while asked:
            draft = self._trace.drafts[at := asked.pop()]
            if draft.weight in self._trainable:
                return True
            seen.add(at)
            asked += [item for item in draft.inputs if item not in seen]
        return False

    def _leave(self, spec: Spec) -> Any:
        def leave(*seen: Any) -> None:  # a hook sees (module, arguments, output), a call of forward the last two
            with QUIET():
                self._name(spec, main_tensor(seen[-1]))

        return leave

    def _name(self, spec: Spec, tensor: Tensor | None) -> None:
        """Give the node behind what a module returned the name under which a check measures it."""
        self._trace.where = ""
        if tensor is None:
            return
        last = self._last
        if not spec.leaf and last is not None and last[0] is tensor and last[1] == tensor._version:
            return  # a container returns what its last part returned, which has that part's name
        self._last = (tensor, tensor._version)
        count = self._counts[spec.name] = self._counts.get(spec.name, 0) + 1
        name = spec.name if count == 1 else f"{spec.name}#{count}"
        node = self._node(self._trace.value(tensor), tensor)
        if spec.weighs:
            self._weighing.append(node)
        if node is None:
            return
        draft = self._trace.drafts[node]
        if draft.name:
            self._aliases[name] = node
        else:
            draft.name = name

    def _node(self, value: Value, tensor: Tensor) -> int | None:
        if isinstance(value, Traced):
            return value.node
        try:
            settled = self._trace.ready(value)
        except NotCovered:
            return None
        if settled is None:
            return None
        self._trace.put(tensor, settled)
        return settled.node

    def blueprint(self, output: Any, batch: Batch, loss: Any, generator: Any) -> Blueprint:
        """The description of the pass, cut down to what leads to a named node or to an output that the loss sees."""
        answer = answer_tensor(output)
        returned = dict.fromkeys([answer, *(tensor for _, tensor in tensors_in(output))])  # the answer first
        known = [one for one in returned if one is not None and one.is_floating_point() and one.dim() > 0]
        placed = [(one, node) for one in known if (node := self._node(self._trace.value(one), one)) is not None]
        gradients: dict[int, Tensor] = {}
        outputs: list[int] = []
        if placed and placed[0][0] is answer:
            targets = implied_targets(output, batch.targets, loss=loss, inputs=batch.tensors(), root=self._root)
            seen = _gradients_at(output, [one for one, _ in placed], targets, loss, generator)
            for one, gradient in seen:
                final = self._trace.value(one)
                if isinstance(final, Traced):
                    gradients.setdefault(final.node, to_canonical(gradient, final.layout))
            outputs = list(gradients)
            gradients |= self._resumed(seen)
        shared = frozenset(name for name, count in self._trace.uses.items() if count > 1)
        found = _cut_down(self._trace, outputs, gradients, self._aliases, self._weighing)
        return dataclasses.replace(found, cuts=tuple(dict.fromkeys(self._cuts)), shared=shared)

    def _resumed(self, returned: Sequence[tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
        """The measured gradients in front of tied heads and of parts that no rule covers, from which theory goes on."""
        drafts = self._trace.drafts
        wanted, seen = set[int](), set[int]()
        waiting = [at for draft in drafts if isinstance(draft.rule, Given) for at in draft.inputs]
        waiting += [draft.inputs[0] for draft in drafts if isinstance(draft.rule, Tied)]
        while waiting:
            at = waiting.pop()
            # A maximum lets through what is large, and a tied head sends back embeddings that the stream holds: in
            # front of it the gradient knows the values, and a function or a norm would have to know that too. Behind a
            # random map or a sum of them it does not matter.
            if isinstance(drafts[at].rule, Linear | Convolution | Attention | Add):
                wanted.add(at)
            elif at not in seen:
                seen.add(at)
                waiting += drafts[at].inputs
        # a tensor that was written over has the gradient of what it is now
        values = {value: self._trace.tensor_of(value) for value in self._trace.held if value.node in wanted}
        ends = {id(one) for one, _ in returned}
        found = {at: one for at, one in values.items() if one is not None and one.requires_grad and id(one) not in ends}
        asked = [(one, gradient) for one, gradient in returned if one.requires_grad]
        if not found or not asked:
            return {}
        try:
            reached = torch.autograd.grad(
                [one for one, _ in asked], list(found.values()), [gradient for _, gradient in asked],
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
        except RuntimeError:  # a value that was changed in place has no gradient to ask for
            return {}
        whole: dict[int, Tensor] = {}
        for value, one in zip(found, reached, strict=True):
            if one is not None and value.node not in whole:  # a node's views have the same gradient
                whole[value.node] = to_canonical(one.detach(), value.layout)
        return whole


def _gradients_at(
    output: Any, returned: Sequence[Tensor], targets: Any, loss: Any, generator: Any
) -> list[tuple[Tensor, Tensor]]:
    """The tensors that a model returns and the loss sees, each with its gradient."""
    leaves = [one.detach().clone().requires_grad_() for one in returned]
    replaced = _with_leaves(output, {id(one): leaf for one, leaf in zip(returned, leaves, strict=True)})
    scalar = evaluate_loss(replaced, targets, loss=loss, generator=generator)
    if not scalar.requires_grad:
        return []
    found = torch.autograd.grad(scalar, leaves, allow_unused=True)
    return [(one, gradient.detach()) for one, gradient in zip(returned, found, strict=True) if gradient is not None]


def _with_leaves(output: Any, leaves: Mapping[int, Tensor]) -> Any:
    """The output with leaves in the place of its tensors, by their identity."""
    if isinstance(output, Tensor):
        return leaves.get(id(output), output)
    if isinstance(output, Mapping):
        changed = {key: _with_leaves(item, leaves) for key, item in output.items()}
        return type(output)(**changed) if type(output) is not dict else changed
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = {f.name: _with_leaves(getattr(output, f.name), leaves) for f in dataclasses.fields(output) if f.init}
        return dataclasses.replace(output, **fields)
    if isinstance(output, tuple | list):
        items = [_with_leaves(item, leaves) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    return output


def _cut_down(
    trace: Trace, outputs: list[int], gradients: Mapping[int, Tensor], aliases: Mapping[str, int],
    weighing: list[int | None],
) -> Blueprint:  # fmt: skip
    """The blueprint of the nodes that outputs and named modules depend on, numbered anew."""
    drafts = trace.drafts
    wanted: set[int] = {index for index, draft in enumerate(drafts) if draft.name} | set(outputs)
    for index in range(len(drafts) - 1, -1, -1):
        if index in wanted:
            wanted.update(drafts[index].inputs)
    order = sorted(wanted)
    place = {old: new for new, old in enumerate(order)}
    nodes = []
    for draft in (drafts[old] for old in order):
        inputs = tuple(place[item] for item in draft.inputs)
        nodes.append(Node(draft.rule, inputs, draft.points, draft.features, draft.name, draft.weight, draft.label))
    given = {place[old]: array for old in order if (array := drafts[old].features_array) is not None}
    values = {
        place[value.node]: (value, tensor)
        for value in trace.held
        if value.node in place and (tensor := trace.tensor_of(value)) is not None
    }
    beyond = _leave_out(nodes, given, values) if nodes else set[int]()
    reasons = [node.rule.reason for node in nodes if isinstance(node.rule, Given) and node.rule.reason]
    reasons += [] if nodes else ["nothing that a module of the network returns is made by an operation with a rule"]
    reached = [at is not None and not isinstance(nodes[place[at]].rule, Given) for at in weighing]
    return Blueprint(
        Description(tuple(nodes), tuple(place[old] for old in outputs), tuple(dict.fromkeys(reasons))),
        given,
        {place[old]: gradient for old, gradient in gradients.items() if old in place and place[old] not in beyond},
        {name: place[old] for name, old in aliases.items() if old in place},
        (len(reached), sum(reached)),
    )


def _leave_out(nodes: list[Node], given: dict[int, Tensor], values: Mapping[int, tuple[Traced, Tensor]]) -> set[int]:
    """The nodes with more points than theory can follow; what is made of them is measured instead."""
    description = thinned(Description(tuple(nodes), ()))[0]
    beyond = {at for at, spacing in enumerate(plan_of(description)) if spacing is None}
    for at, node in enumerate(nodes):
        cut = [one for one in node.inputs if one in beyond]
        if at in beyond or (cut and not isinstance(node.rule, Given)):
            points = nodes[cut[0]].points if cut else node.points
            size = " × ".join(map(str, (points.samples, *points.grid)))
            nodes[at] = dataclasses.replace(node, rule=Given(f"the pairs of {size} points are too many to follow"))
            given.pop(at, None)
            if at not in beyond and at in values:
                value, tensor = values[at]
                given[at] = to_canonical(tensor.detach(), value.layout)
            else:
                beyond.add(at)
    return beyond
