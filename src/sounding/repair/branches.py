"""Where residual branches are: what each block adds to the stream, read from the autograd graph of one pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.probe.calls import named_parameters
from sounding.probe.outputs import tensors_in
from sounding.probe.shortcut import LEAF
from sounding.probe.state import DropoutAtRest, unwrap
from sounding.repair.passes import Inputs, call_model, check_inputs, map_tensors
from sounding.repair.snapshot import undisturbed

# operations through which a weight reaches the product that it takes part in
VIEWS = ("TBackward0", "Transpose", "View", "Permute", "Reshape", "Expand", "ToCopy", "Unsqueeze", "Alias", "Clone")

# operations whose result does not grow with what they are given: a matrix in front of them weights, it does not write
BOUNDED = ("Softmax", "Sigmoid", "Exp", "Topk")


@dataclass(frozen=True)
class Branch:
    """What one block adds to the stream, by the names of its parameters."""

    writers: tuple[str, ...]  # matrices that are last on their way to the stream, with the biases added to them
    behind: tuple[str, ...]  # vectors between the writers and the stream: of a norm, or a layer scale
    inner: tuple[str, ...]  # the other matrices of the branch
    values: tuple[str, ...]  # those of them that carry what is written, unlike queries, keys and gates
    normalized: bool  # whether something inside of it normalizes, so that the size of what it is given does not count

    @property
    def name(self) -> str:
        """The layer that writes to the stream."""
        return self.writers[0].rpartition(".")[0] or self.writers[0]

    @property
    def end(self) -> tuple[str, ...]:
        """The parameters to which the branch's size is proportional: what stands behind the writers, or they."""
        return self.behind or self.writers


def find_branches(model: nn.Module, inputs: Inputs) -> tuple[Branch, ...]:
    """Every residual branch of a network in the order in which they are added.

    A sum is residual where one of its terms was computed from the other; the former is the branch. Where a block has a
    weight on both ways, as the first of each stage of a ResNet, the branch is the one with more weights, if the other
    has a single one. The network runs once, forwards, and is left as it was.

    Raises:
        UsageError: no sum of the network is residual, or its graph does not show any (checkpointed blocks).
    """
    check_inputs(inputs)
    named = named_parameters(unwrap(model))
    frozen = [parameter for _, parameter in named if parameter.is_floating_point() and not parameter.requires_grad]
    # the graph begins at what asks for a gradient
    asking = map_tensors(inputs, lambda one: one.detach().requires_grad_() if one.is_floating_point() else one)
    try:
        for parameter in frozen:  # the graph holds only what asks for a gradient
            parameter.requires_grad_(True)
        with undisturbed(model), torch.enable_grad(), DropoutAtRest():
            output = call_model(model, asking)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    names = {id(parameter): name for name, parameter in named}
    graph = _Graph(names, [tensor.grad_fn for _, tensor in tensors_in(output) if tensor.grad_fn is not None])
    found = [branch for node in graph.sums() if (branch := graph.branch_at(node)) is not None]
    if not found:
        raise UsageError(
            f"found no residual branch in {type(unwrap(model)).__name__}: no sum has a term that is computed from the "
            "other",
            hint="another method; blocks under torch.utils.checkpoint are seen once checkpointing is off",
        )
    return tuple(found)


@dataclass(frozen=True)
class _Way:
    """Names of parameters met on the way back from the stream, and the nodes that were passed."""

    writers: dict[str, None] = field(default_factory=dict)
    behind: dict[str, None] = field(default_factory=dict)
    values: set[str] = field(default_factory=set)
    weighting: set[str] = field(default_factory=set)
    seen: set[Any] = field(default_factory=set)


class _Graph:
    """The autograd graph of a pass; operations are numbered in the order in which they ran."""

    def __init__(self, names: dict[int, str], roots: list[Any]) -> None:
        self._names = names
        # leaves have no number, and were there before all else
        self._order = {node: -1 if node.name() == LEAF else int(node._sequence_nr()) for node in _go_back(roots)}

    def sums(self) -> Iterator[Any]:
        """Sums of two terms, in the order in which they ran."""
        found = [node for node in self._order if node.name() == "AddBackward0" and len(_operands(node)) == 2]
        return iter(sorted(found, key=self._order.__getitem__))

    def branch_at(self, node: Any) -> Branch | None:
        """The branch of a sum, None where it has none."""
        one, other = _operands(node)
        # x + x and the bias of a layer are no branch
        if one is other or self._parameter(one) is not None or self._parameter(other) is not None:
            return None
        # what is computed from the other ran after it
        late, early = (one, other) if self._order[one] > self._order[other] else (other, one)
        reached = self._region(late, {early})
        if early in reached:
            return self._describe(late, reached - {early})
        return self._with_projection(late, early)

    def _region(self, start: Any, stops: set[Any]) -> set[Any]:
        """What a node was computed from, as far back as the first of the stops ran; stops are part of it."""
        first = min(self._order[node] for node in stops)

        def is_inside(node: Any) -> bool:
            return self._order[node] >= first or node in stops or node.name() == LEAF

        return set(_go_back([start], is_inside, stops))

    def _with_projection(self, one: Any, other: Any) -> Branch | None:
        """The branch of a block whose shortcut has a single weight; both come from one node that is no parameter."""
        whole = self._region(other, {min(self._order, key=self._order.__getitem__)})
        shared = [n for n in self._region(one, {min(whole, key=self._order.__getitem__)}) & whole if n.name() != LEAF]
        if not shared:
            return None
        source = max(shared, key=self._order.__getitem__)  # the latest node that both ways come from
        ways = [(start, self._region(start, {source}) - {source}) for start in (one, other)]
        counts = [len(self._matrices(way)) for _, way in ways]
        if min(counts) == 1 and max(counts) > 1:  # the single one is the projection of the shortcut
            return self._describe(*ways[counts.index(max(counts))])
        return None

    def _describe(self, start: Any, region: set[Any]) -> Branch | None:
        """The parameters of a branch by their place; None for a way without a matrix."""
        way = _Way()
        self._walk(start, region, way)
        if not way.writers:
            return None
        layers = {name.rpartition(".")[0] for name in way.writers}  # whose biases are added to what they write
        biases = [name for name in way.behind if name.rpartition(".")[0] in layers]
        inner = [name for name in self._matrices(region) if name not in way.writers]
        return Branch(
            (*sorted(way.writers, key=lambda name: "bias" in name), *biases),
            tuple(name for name in way.behind if name not in biases),
            tuple(inner),
            tuple(name for name in inner if name in way.values and name not in way.weighting),
            # Rsqrt is the mark of an RMS norm written out
            any("Norm" in node.name() or "Rsqrt" in node.name() for node in region),
        )

    def _walk(self, node: Any, region: set[Any], way: _Way, *, written: bool = False) -> bool:
        """Go back from the stream along what is written, and note every parameter by its place; whether one was met."""
        if node not in region or node in way.seen or self._parameter(node) is not None:
            return False
        way.seen.add(node)
        if any(word in node.name() for word in BOUNDED):
            way.weighting.update(self._matrices(_go_back([node], region.__contains__)))
            return False
        operands = _operands(node)
        if "ScaledDotProduct" in node.name():
            for operand in operands[:2]:
                way.weighting.update(self._matrices(_go_back([operand], region.__contains__)))
            operands = operands[2:3]  # the values; queries and keys only weight them
        own = [parameter for operand in operands if (parameter := self._parameter(operand)) is not None]
        names = [self._names[id(parameter)] for parameter in own]
        matrix = any(parameter.dim() > 1 for parameter in own)
        if written:
            way.values.update(names)
        else:
            (way.writers if matrix else way.behind).update(dict.fromkeys(names))
        met = matrix
        for operand in operands:
            met |= self._walk(operand, region, way, written=written or matrix)
            if met and node.name() == "MulBackward0":
                break  # one factor is enough: a product scaled by both would be scaled twice
        return met

    def _matrices(self, region: Iterable[Any]) -> list[str]:
        """The names of the matrices in a region, in the order in which they are used."""
        found: dict[str, None] = {}
        for node in sorted(region, key=self._order.__getitem__):
            for operand in _operands(node):
                parameter = self._parameter(operand)
                if parameter is not None and parameter.dim() > 1:
                    found[self._names[id(parameter)]] = None
        return list(found)

    def _parameter(self, node: Any) -> Tensor | None:
        """The parameter that a node hands over as it is, or None."""
        while node.name() != LEAF:
            operands = _operands(node)
            if len(operands) != 1 or not any(view in node.name() for view in VIEWS):
                return None
            node = operands[0]
        variable: Tensor = node.variable
        return variable if id(variable) in self._names else None


def _operands(node: Any) -> list[Any]:
    return [operand for operand, _ in node.next_functions if operand is not None]


def _go_back(
    starts: Iterable[Any], is_inside: Callable[[Any], bool] = lambda _: True, stops: Container[Any] = ()
) -> dict[Any, None]:
    """The nodes inside that some nodes were computed from, these among them; none is looked for behind a stop."""
    found: dict[Any, None] = {}
    waiting = deque(starts)
    while waiting:
        node = waiting.popleft()
        if node not in found and is_inside(node):
            found[node] = None
            if node not in stops:
                waiting.extend(_operands(node))
    return found
