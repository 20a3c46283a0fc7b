"""What the trace knows of a tensor: a constant, a measured value, a node of the description, a function of one node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sounding.reader.layout import Layout
from sounding.theory.signal.description import Points, Rule


@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on the inputs: a parameter, a buffer, a table of positions, a mask.

    Args:
        tensor: its value.
        parameter: the name of the parameter it is, or is a transposition of; "" for anything else.
    """

    tensor: Tensor
    parameter: str = ""


@dataclass(frozen=True)
class Measured:
    """A tensor whose Gram matrix is measured where it is needed: an input, or what no rule covers.

    Args:
        tensor: its value.
        reason: why it is not predicted; "" for an input and what is computed from inputs alone.
        depends: the nodes it was computed from; their gradients are not predicted through it.
        layout: which axes hold the samples, every other one called positions, as far as views and functions of single
            numbers let it be followed; which axis holds the features is known only when a layer takes them.
    """

    tensor: Tensor
    reason: str = ""
    depends: frozenset[int] = frozenset()
    layout: Layout | None = None


@dataclass(frozen=True)
class Traced:
    """A tensor that is the value of a node, with the meaning of its axes."""

    node: int
    layout: Layout


@dataclass(frozen=True)
class Function:
    """A tensor computed from the value of one node and constants alone, not yet a node of its own.

    Args:
        base: the node's value it is computed from.
        tensor: its value.
        layout: the meaning of its axes, None where it is not known.
        apply: the function, if it acts on each number alone.
        factor: c, if the function is x ↦ c·x.
        label: what a person would call it.
        numbers: the plain numbers that went into it, among which the eps of a norm is found.
    """

    base: Traced
    tensor: Tensor
    layout: Layout | None = None
    apply: Callable[[Tensor], Tensor] | None = None
    factor: float | None = None
    label: str = ""
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class Padded(Function):
    """The value of a node with zeros (before, after) each axis of its grid, which a convolution takes as its own."""

    sides: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Scores:
    """Products of queries and keys on their way to a softmax.

    Args:
        queries: their value, with layout (sample and heads, positions, size of a head).
        keys: the keys' value, its last two axes as those of the queries.
        factor: what the products were multiplied by.
        mask: what was added to them, None for nothing.
        normalized: whether the softmax has been taken.
    """

    queries: Traced
    keys: Traced
    factor: float = 1.0
    mask: Tensor | None = None
    normalized: bool = False


Value = Constant | Measured | Traced | Function | Scores
Place = tuple[Any, ...]
# operations that only look at a parameter in another way, which keeps its name
VIEWS = frozenset(
    ["t", "transpose", "permute", "view", "detach", "alias", "_to_copy", "unsqueeze", "squeeze", "expand", "clone"]
)


@dataclass
class Draft:
    """A node while it is being written.

    Args:
        rule: what makes the value.
        inputs: the nodes it is made from.
        points: where it lives.
        features: of each point.
        sources: which random maps its randomness comes from; sums and products need inputs that share none.
        label: what a person reads.
        weight: the name of its weight parameter.
        name: the call under which a check measures it.
        features_array: for a measured node, its value as (samples, positions, features).
    """

    rule: Rule
    inputs: tuple[int, ...]
    points: Points
    features: int
    sources: frozenset[object]
    label: str = ""
    weight: str = ""
    name: str = ""
    features_array: Tensor | None = field(default=None, repr=False)


def constant_of(func: Any, item: Tensor, values: list[Value]) -> Constant:
    """A constant; a view of a parameter keeps its name."""
    names = {value.parameter for value in values if isinstance(value, Constant)}
    kept = func._overloadpacket.__name__ in VIEWS and len(names) == 1
    return Constant(item, names.pop() if kept else "")


def place_of(tensor: Tensor) -> Place | None:
    """What identifies a tensor: its storage, and how it looks into it."""
    try:
        storage = tensor.untyped_storage()._cdata
        return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    except (RuntimeError, NotImplementedError):
        return None


def written(func: Any, args: tuple[Any, ...], item: Tensor) -> bool:
    """Whether an operation writes to one of its arguments."""
    return any(
        argument.alias_info is not None and argument.alias_info.is_write and other is item
        for argument, other in zip(func._schema.arguments, args, strict=False)
    )


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in a nest of lists, tuples and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [item for part in value for item in tensors_of(part)]
    return []


def to_canonical(tensor: Tensor, layout: Layout) -> Tensor:
    """A tensor as (samples, positions, features)."""
    sizes, order = layout.canonical()
    points = layout.points
    return tensor.reshape(sizes).permute(order).reshape(points.samples, points.positions, layout.features)


def scalar(item: Any) -> float | None:
    """A plain number or a tensor of one element as a number, None for anything else."""
    if isinstance(item, bool | int | float):
        return float(item)
    if isinstance(item, Tensor) and item.numel() == 1 and not item.is_complex():
        return float(item.detach())
    return None
