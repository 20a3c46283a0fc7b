"""Which part of a tensor lies in this process: shards of a DTensor, and plain tensors that were taken out of one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

PENDING = "the processes hold summands of it that they have not added up"
ABSENT = "this process is not in the mesh that it lies in"
MIXED = "it is made of parts that are cut in different ways"
UNKNOWN = "without an autograd graph a tensor-parallel model does not tell which part of it this process holds"
SENT = 2**16  # entries of a gradient that processes send to each other to be added: half a megabyte, scales and biases
TO_LOCAL = "_ToTorchTensorBackward"  # the node that DTensor.to_local leaves in the autograd graph


class Place(NamedTuple):
    """Where the whole of a tensor lies."""

    # the processes whose parts make up the whole, this one among them; none where this process holds all
    ranks: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()  # the axes along which the tensor was cut; none where the processes hold summands of it
    reason: str | None = None  # why the parts cannot be put together, or None

    @property
    def summed(self) -> bool:
        """Whether the whole is the sum of what the processes hold."""
        return bool(self.ranks) and not self.cut


WHOLE = Place()


class Part(float):
    """The logarithm of the norm of this process's part of a gradient, where the other parts lie, and a summand itself:
    the norm of a sum does not follow from those of its summands."""

    place: Place
    summand: Tensor | None

    def __new__(cls, value: float, place: Place, summand: Tensor | None = None) -> Part:
        part = super().__new__(cls, value)
        part.place, part.summand = place, summand
        return part


def is_distributed(tensor: Any) -> bool:
    """Whether it is a DTensor; torch's module of them is not imported to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def part_of(gradient: Any, norm: Callable[[Tensor], float]) -> Part:
    """The part of a DTensor that this process holds; a summand too large to be sent around has a reason instead."""
    local, place = local_part(gradient), place_of(gradient)
    if place.summed and local.numel() > SENT:
        return Part(norm(local), Place(reason=PENDING))
    return Part(norm(local), place, local.double().cpu().reshape(-1) if place.summed else None)


def place_of(tensor: Any) -> Place:
    """Where a DTensor lies."""
    return _place(tensor.device_mesh, tensor.placements)


def local_part(tensor: Any) -> Tensor:
    """The part of a DTensor that this process holds, outside its autograd graph."""
    part: Tensor = tensor.detach().to_local()
    return part


class Places:
    """Where the outputs of a pass lie, followed through its autograd graph.

    Between two parallel layers modules work on plain tensors, which do not say that they are parts of one. What they
    were computed from does: the graph leads back to the node where a part was taken out of a DTensor.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Place] = {}

    def of(self, tensor: Tensor) -> Place:
        """Where a module's output lies."""
        if is_distributed(tensor):
            return place_of(tensor)
        root = tensor.grad_fn
        if root is None:
            return Place(reason=UNKNOWN)
        stack: list[tuple[Any, bool]] = [(root, False)]
        while stack:  # graphs are deeper than Python's stack
            node, ready = stack.pop()
            if node in self._known:
                continue
            children = [child for child, _ in node.next_functions if child is not None]
            if node.name() == TO_LOCAL:
                spec: Any = getattr(node, "dtensor_spec", None)
                self._known[node] = Place(reason=UNKNOWN) if spec is None else _place(spec.mesh, spec.placements)
            elif ready or not children:
                self._known[node] = _merge(self._known.get(child, WHOLE) for child in children)
            else:
                stack.append((node, True))
                stack.extend((child, False) for child in children)
        return self._known[root]

    def forget(self) -> None:
        """Let go of the graph: what a pass saved for its backward pass hangs on it."""
        self._known = {}


def _place(mesh: Any, placements: Sequence[Any]) -> Place:
    """Which processes hold the parts of a tensor, and along which axes it is cut."""
    here = mesh.get_coordinate()
    if here is None:
        return Place(reason=ABSENT)
    pending = any(placement.is_partial() for placement in placements)
    if pending and not all(placement.is_partial("sum") or placement.is_replicate() for placement in placements):
        return Place(reason=PENDING)
    sharded = [not placement.is_replicate() for placement in placements]
    index = tuple(slice(None) if cut else place for cut, place in zip(sharded, here, strict=True))
    ranks = tuple(mesh.mesh[index].flatten().tolist()) if any(sharded) else ()
    if len(ranks) < 2:
        return WHOLE
    return Place(ranks, () if pending else tuple(p.dim for p, cut in zip(placements, sharded, strict=True) if cut))


def _merge(places: Iterable[Place]) -> Place:
    """What is computed from parts is a part; a whole beside it (a bias, a mask) does not change that."""
    found = set(places) - {WHOLE}
    if not found:
        return WHOLE
    if len(found) == 1:
        return found.pop()
    reasons = [place.reason for place in found if place.reason is not None]
    return Place(reason=reasons[0] if reasons else MIXED)
