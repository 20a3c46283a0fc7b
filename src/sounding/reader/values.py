"""What the trace knows of a tensor: a constant, a measured value, a node of the description, a function of one node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sounding.reader.layout import ROLES, Layout
from sounding.theory.signal.description import Law, Points, Rule, Scale


@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on the inputs: a parameter, a buffer, a table of positions, a mask."""

    tensor: Tensor  # its value
    parameter: str = ""  # the name of the parameter it is, or is a transposition of; "" for anything else


@dataclass(frozen=True)
class Measured:
    """A tensor whose Gram matrix is measured where it is needed: an input, or what no rule covers."""

    tensor: Tensor  # its value
    reason: str = ""  # why it is not predicted; "" for an input and what is computed from inputs alone
    # the nodes it was computed from; their gradients are not predicted through it
    depends: frozenset[int] = frozenset()
    # which axes hold the samples, every other one called positions, as far as views and functions of single numbers let
    # it be followed; which axis holds the features is known only when a layer takes them
    layout: Layout | None = None
    own: bool = False  # whether parameters of the module took part, as in an embedding


@dataclass(frozen=True)
class Traced:
    """A tensor that is the value of a node, with the meaning of its axes."""

    node: int
    layout: Layout


@dataclass(frozen=True)
class Function:
    """A tensor computed from the value of one node and constants alone, not yet a node of its own."""

    base: Traced  # the node's value it is computed from
    tensor: Tensor  # its value
    layout: Layout | None = None  # the meaning of its axes, None where it is not known
    apply: Callable[[Tensor], Tensor] | None = None  # the function, if it acts on each number alone
    factor: float | None = None  # c, if the function is x ↦ c·x
    label: str = ""  # what a person would call it
    numbers: tuple[float, ...] = ()  # the plain numbers that went into it, among which the eps of a norm is found

    @property
    def known(self) -> bool:
        """Whether it acts on each number alone, so that it can become a node."""
        return self.apply is not None or self.factor is not None


@dataclass(frozen=True)
class Padded(Function):
    """The value of a node with zeros (before, after) each axis of its grid, which a convolution takes as its own."""

    sides: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Scores:
    """Products of queries and keys on their way to a softmax."""

    queries: Traced  # their value, with layout (sample and heads, positions, size of a head)
    keys: Traced  # the keys' value, its last two axes as those of the queries
    factor: float = 1.0  # what the products were multiplied by
    mask: Tensor | None = None  # what was added to them, None for nothing
    normalized: bool = False  # whether the softmax has been taken


Value = Constant | Measured | Traced | Function | Scores
Place = tuple[Any, ...]
# operations that only look at a parameter in another way, which keeps its name
VIEWS = frozenset(
    ["t", "transpose", "permute", "view", "detach", "alias", "_to_copy", "unsqueeze", "squeeze", "expand", "clone"]
)


@dataclass
class Draft:
    """A node while it is being written."""

    rule: Rule  # what makes the value
    inputs: tuple[int, ...]  # the nodes it is made from
    points: Points  # where it lives
    features: int  # of each point
    # which random maps its randomness comes from; sums and products need inputs that share none
    sources: frozenset[object]
    label: str = ""  # what a person reads
    weight: str = ""  # the name of its weight parameter
    name: str = ""  # the call under which a check measures it
    # for a measured node, its value as (samples, positions, features)
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


def written(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    pairs = zip(func._schema.arguments, args, strict=False)
    writes = [item for argument, item in pairs if argument.alias_info is not None and argument.alias_info.is_write]
    return [item for item in writes if isinstance(item, Tensor)]


def to_canonical(tensor: Tensor, layout: Layout) -> Tensor:
    """A tensor as (samples, positions, features)."""
    atoms, points = layout.atoms, layout.points
    order = [atoms.index(atom) for role in ROLES for atom in layout.of(role)]
    split = tensor.reshape([atom.size for atom in atoms])  # one axis for each atom
    return split.permute(order).reshape(points.samples, points.positions, layout.features)


def times(number: float) -> Scale:
    """The rule of a product with one number."""
    return Scale(Law(0.0, number, "constant"))


def each(sizes: Any, count: int) -> tuple[int, ...]:
    """One size for each of so many axes of a grid; torch takes one number for all of them."""
    found = tuple(int(size) for size in (sizes if isinstance(sizes, list | tuple) else [sizes]))
    return found * count if len(found) == 1 else found


def scalar(item: Any) -> float | None:
    """A plain number or a tensor of one element as a number, None for anything else."""
    if isinstance(item, bool | int | float):
        return float(item)
    if isinstance(item, Tensor) and item.numel() == 1 and not item.is_complex():
        return float(item.detach())
    return None
