"""Which axis of a tensor holds samples, positions or features, kept through views, transposes and merged axes.

A layout names, for every axis of a tensor, the atoms it is made of, outermost first. An atom has a role, a key that
gives it its place among atoms of its role, and a size: in (batch · tokens, heads · size) the first axis is made of a
sample atom and a position atom, the second of two feature atoms. A view that cuts across atoms has no layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from sounding.theory.signal.description import Points

Role = Literal["sample", "position", "feature"]
ROLES: tuple[Role, ...] = ("sample", "position", "feature")  # in canonical order
Key = tuple[int, ...]

# torch's operations that only move numbers
VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias")
TURNS = ("permute", "transpose", "t", "unsqueeze", "squeeze")
COPIES = ("clone", "_to_copy", "detach", "alias", "contiguous")
MOVES = frozenset([*VIEWS, *TURNS, *COPIES])


class Atom(NamedTuple):
    """A factor of an axis: its role, its place among the atoms of that role, its size."""

    role: Role
    key: Key
    size: int


Axis = tuple[Atom, ...]


class Layout(tuple[Axis, ...]):
    """The atoms of every axis of a tensor."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(math.prod(atom.size for atom in axis) for axis in self)

    @property
    def atoms(self) -> list[Atom]:
        """All atoms in the order of the tensor's memory."""
        return [atom for axis in self for atom in axis]

    def of(self, role: Role) -> list[Atom]:
        """The atoms of one role in their canonical order, which transposes do not change."""
        return sorted((atom for atom in self.atoms if atom.role == role), key=lambda atom: atom.key)

    @property
    def points(self) -> Points:
        """The samples and the grid of positions."""
        return Points(math.prod(a.size for a in self.of("sample")), tuple(a.size for a in self.of("position")))

    @property
    def features(self) -> int:
        """How many features each point has."""
        return math.prod(atom.size for atom in self.of("feature"))

    def roles(self, axis: int) -> set[Role]:
        """The roles that occur on one axis; empty for an axis of size 1 that holds nothing."""
        return {atom.role for atom in self[axis]}

    def with_axis(self, index: int, axis: Axis) -> Layout:
        """A layout with other atoms on one axis."""
        axes = list(self)
        axes[index] = axis
        return Layout(axes)


class Keys:
    """Gives every new atom a key of its own, in order of birth."""

    def __init__(self) -> None:
        self._next = 0

    def atom(self, role: Role, size: int) -> Atom:
        """A new atom."""
        self._next += 1
        return Atom(role, (self._next,), size)

    def axis(self, role: Role, size: int) -> Axis:
        """An axis of one new atom; none for size 1, which holds nothing, unless it is the features."""
        return (self.atom(role, size),) if size != 1 or role != "position" else ()


def reshape(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """The layout after a view of another shape, or None where an axis cuts across atoms."""
    waiting: list[Atom] = [atom for atom in reversed(layout.atoms) if atom.size != 1]
    axes: list[Axis] = []
    for size in shape:
        axis: list[Atom] = []
        left = int(size)
        while left > 1:
            if not waiting:
                return None
            atom = waiting.pop()
            if left % atom.size == 0:
                axis.append(atom)
                left //= atom.size
            elif atom.size % left == 0:
                # the atom splits in two; the longer keys sort both parts to where the whole one stood
                axis.append(Atom(atom.role, (*atom.key, 0), left))
                waiting.append(Atom(atom.role, (*atom.key, 1), atom.size // left))
                left = 1
            else:
                return None
        axes.append(tuple(axis))
    return Layout(axes) if not waiting else None


def moved(name: str, layout: Layout, args: tuple[Any, ...], shape: tuple[int, ...]) -> Layout | None:
    """The layout after an operation that only moves numbers to other axes, None where it cuts across atoms."""
    count = len(layout)
    if name in VIEWS:
        return reshape(layout, shape)
    if name == "permute":
        return Layout(layout[axis % count] for axis in args[1])
    if name in ("transpose", "t"):
        axes = list(layout)
        first, second = (args[1], args[2]) if len(args) > 2 else (0, -1)
        axes[first], axes[second] = axes[second], axes[first]
        return Layout(axes)
    if name == "unsqueeze":
        axes = list(layout)
        axes.insert(args[1] % (count + 1), ())
        return Layout(axes)
    if name == "squeeze":
        given = args[1] if len(args) > 1 else range(count)
        chosen = {axis % count for axis in (given if isinstance(given, list | tuple | range) else [given])}
        return Layout(axis for at, axis in enumerate(layout) if at not in chosen or layout.shape[at] != 1)
    return layout if layout.shape == shape else None


def same_roles(first: Layout, second: Layout) -> bool:
    """Whether two tensors of one shape mean the same axis by axis, and order their positions alike."""
    if first.shape != second.shape or [_runs(axis) for axis in first] != [_runs(axis) for axis in second]:
        return False
    return _ranks(first) == _ranks(second) or (_contiguous(first) and _contiguous(second))


def _runs(axis: Axis) -> list[Role]:
    """The roles along an axis, neighbours of one role joined: how an axis was split before does not matter."""
    return [role for role, _ in groupby(atom.role for atom in axis if atom.size != 1)]


def _ranks(layout: Layout) -> list[tuple[int, int]]:
    """For each position atom in memory its canonical place, and its size."""
    ordered = layout.of("position")
    return [(ordered.index(atom), atom.size) for atom in layout.atoms if atom.role == "position" and atom.size != 1]


def _contiguous(layout: Layout) -> bool:
    """Whether positions lie in memory in their canonical order."""
    return [atom for atom in layout.atoms if atom.role == "position"] == layout.of("position")
