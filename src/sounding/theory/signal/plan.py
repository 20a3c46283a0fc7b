"""Which pairs of points to follow: all where they are few, sub-grids where a grid is large."""

from __future__ import annotations

import math
from itertools import product

from sounding.errors import UsageError
from sounding.theory.signal.description import Description
from sounding.theory.signal.signal import FULL

PAIRS = 2**20  # followed at one node: 8 MiB; more pairs sharpen the means over all of them that batch norm needs


def spacings(description: Description, *, points: int = FULL, pairs: int = PAIRS) -> tuple[tuple[int, ...], ...]:
    """The spacing of the sub-grids to follow at each node, for `Signal.of_features`; 1 along every axis for all pairs.

    Nodes whose grids have equally many axes are planned together. All their pairs are followed if none of them has more
    than `points` points. Otherwise every node has the same number of positions in a sub-grid, the largest that divides
    all grids and needs at most `pairs` pairs at the largest.

    Raises:
        UsageError: no sub-grid of at least 2 positions divides all grids.
    """
    lattices: dict[int, tuple[int, ...] | None] = {}
    for axes in {len(node.points.grid) for node in description.nodes}:
        all_points = [node.points for node in description.nodes if len(node.points.grid) == axes]
        lattices[axes] = None
        if max(one.size for one in all_points) > points:
            grids = {one.grid for one in all_points if one.positions > 1}
            most = pairs / max(one.samples * one.size for one in all_points)
            lattices[axes] = _largest_lattice(grids, most)
    return tuple(_spacing(node.points.grid, lattices[len(node.points.grid)]) for node in description.nodes)


def _spacing(grid: tuple[int, ...], lattice: tuple[int, ...] | None) -> tuple[int, ...]:
    if lattice is None or math.prod(grid) == 1:
        return (1,) * len(grid)
    return tuple(size // places for size, places in zip(grid, lattice, strict=True))


def _largest_lattice(grids: set[tuple[int, ...]], most: float) -> tuple[int, ...]:
    """The largest sub-grid of at most `most` positions that divides all grids, the squarest of equally large ones."""
    shared = [math.gcd(*sizes) for sizes in zip(*grids, strict=True)]
    choices = [
        lattice
        for lattice in product(*([n for n in range(1, size + 1) if size % n == 0] for size in shared))
        if 2 <= math.prod(lattice) <= max(most, 2)
    ]
    if not choices:
        raise UsageError(
            "theory follows a coarser grid of positions where there are too many, and no grid of two or more positions "
            f"divides all of {sorted(grids)}",
            hint="fewer or smaller samples",
        )
    return max(choices, key=lambda lattice: (math.prod(lattice), -max(lattice)))
