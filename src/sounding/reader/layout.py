"""Which axis of a tensor holds samples, positions or features, kept through views, transposes and merged axes.

A layout names, for every axis of a tensor, the atoms it is made of, outermost first. An atom has a role, a key that
gives it its place among atoms of its role, and a size: in (batch · tokens, heads · size) the first axis is made of a
sample atom and a position atom, the second of two feature atoms. A view that cuts across atoms has no layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from sounding.theory.signal.description import Points

Role = Literal["sample", "position", "feature"]
Key = tuple[int, ...]


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
        return tuple(size_of(axis) for axis in self)

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

    def canonical(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How to bring a tensor of this layout to (samples, positions, features): one size per atom, then an order."""
        atoms = self.atoms
        wanted = [*self.of("sample"), *self.of("position"), *self.of("feature")]
        return tuple(atom.size for atom in atoms), tuple(atoms.index(atom) for atom in wanted)

    def with_axis(self, index: int, axis: Axis) -> Layout:
        """A layout with other atoms on one axis."""
        axes = list(self)
        axes[index] = axis
        return Layout(axes)


def size_of(axis: Axis) -> int:
    """The number of entries along an axis."""
    return math.prod(atom.size for atom in axis)


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
                axis.append(Atom(atom.role, (*atom.key, 0), left))
                waiting.append(Atom(atom.role, (*atom.key, 1), atom.size // left))
                left = 1
            else:
                return None
        axes.append(tuple(axis))
    return Layout(axes) if not waiting else None


def permute(layout: Layout, order: Sequence[int]) -> Layout:
    """The layout after a transposition of axes."""
    return Layout(layout[index] for index in order)


def same_roles(first: Layout, second: Layout) -> bool:
    """Whether two tensors of one shape mean the same axis by axis, and order their positions alike."""
    if first.shape != second.shape:
        return False
    for one, other in zip(first, second, strict=True):
        if [atom.role for atom in _merged(one)] != [atom.role for atom in _merged(other)]:
            return False
    return list(_ranks(first)) == list(_ranks(second)) or (_contiguous(first) and _contiguous(second))


def _merged(axis: Axis) -> Iterator[Atom]:
    """The atoms of an axis, neighbours of one role joined."""
    last: Atom | None = None
    for atom in axis:
        if atom.size == 1:
            continue
        if last is not None and last.role == atom.role:
            last = Atom(last.role, last.key, last.size * atom.size)
        else:
            if last is not None:
                yield last
            last = atom
    if last is not None:
        yield last


def _ranks(layout: Layout) -> Iterator[tuple[int, int]]:
    ordered = layout.of("position")
    return ((ordered.index(atom), atom.size) for atom in layout.atoms if atom.role == "position" and atom.size != 1)


def _contiguous(layout: Layout) -> bool:
    """Whether positions lie in memory in their canonical order."""
    return [atom for atom in layout.atoms if atom.role == "position"] == layout.of("position")
