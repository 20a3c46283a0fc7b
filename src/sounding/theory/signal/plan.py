"""Which pairs of points to follow: all where they are few, sub-grids where a grid is large."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from sounding.errors import UsageError
from sounding.theory.signal import description as kinds
from sounding.theory.signal.description import Description, Node
from sounding.theory.signal.signal import FULL

PAIRS = 2**20  # followed at one node: 8 MiB; more pairs sharpen the means over all of them that batch norm needs
# Positions of a sub-grid, at most. On 16 smooth images of 64 × 64, 56% of the rows of a ResNet-50 lay in their bands
# with 2, 77% with 4 and 91% with 16; on 4 images 99.1% with 64, and 99.2% with all 256.
PLACES = 16
Spacing = tuple[int, ...]


def spacings(description: Description, *, points: int = FULL, pairs: int = PAIRS) -> tuple[Spacing, ...]:
    """The spacing of the sub-grids to follow at each node, for `Signal.of_features`; 1 along every axis for all pairs.

    Raises:
        UsageError: some grids are too large to follow all pairs, and no sub-grid fits all that are made of them.
    """
    found = plan(description, points=points, pairs=pairs)
    missing = sorted({node.points.grid for node, one in zip(description.nodes, found, strict=True) if one is None})
    if missing:
        raise UsageError(
            "theory follows a coarser grid of positions where there are too many, and no grid of two or more positions "
            f"fits {missing}",
            hint="fewer or smaller samples",
        )
    return tuple(one for one in found if one is not None)


def plan(description: Description, *, points: int = FULL, pairs: int = PAIRS) -> tuple[Spacing | None, ...]:
    """The spacing at each node, None where neither all pairs nor those of sub-grids can be followed."""
    # What stands between measured values is planned together. All its pairs are followed if no node has more than
    # `points` points. Otherwise positions are dealt to sub-grids: the largest grid to those of every r-th position,
    # with at most `pairs` pairs at what is not measured, and a grid s times as coarse, behind strides of s, to those of
    # every r/gcd(r, s)-th, at whose offsets the same pairs meet. Where no r fits, the nodes of the largest grid are
    # left out, and the rest is planned anew.
    nodes = description.nodes
    found: list[Spacing | None] = [None] * len(nodes)
    waiting = [set(range(len(nodes)))]
    while waiting:
        for part in _connected(nodes, waiting.pop()):
            planned = _planned(nodes, sorted(part), points, pairs)
            if planned is None:
                largest = max(nodes[at].points.size for at in part)
                waiting.append({at for at in part if nodes[at].points.size < largest})
            else:
                for at, spacing in planned.items():
                    found[at] = spacing
    return tuple(found)


def _connected(nodes: Sequence[Node], kept: set[int]) -> list[set[int]]:
    """The nodes in groups that share no value; what is measured comes from none."""
    group = {at: {at} for at in kept}
    for at in sorted(kept):
        for other in () if isinstance(nodes[at].rule, kinds.Given) else nodes[at].inputs:
            if other in kept and group[other] is not group[at]:
                group[at] |= group[other]
                for member in group[other]:
                    group[member] = group[at]
    return list({id(one): one for one in group.values()}.values())


def _planned(nodes: Sequence[Node], part: Sequence[int], points: int, pairs: int) -> dict[int, Spacing] | None:
    """The spacings of connected nodes, None where none fits."""
    if max(nodes[at].points.size for at in part) <= points:
        return {at: (1,) * len(nodes[at].points.grid) for at in part}
    whole = max((nodes[at].points for at in part), key=lambda one: one.size)
    random = [nodes[at].points for at in part if not isinstance(nodes[at].rule, kinds.Given)]
    most = min(max(pairs / max((one.samples * one.size for one in random), default=1), 2), PLACES)
    for spacing in _spacings_of(whole.grid, most):
        found = {at: _behind(nodes[at].points.grid, whole.grid, spacing) for at in part}
        if all(one is not None and _fits(nodes, at, found) for at, one in found.items()):
            return {at: one for at, one in found.items() if one is not None}
    return None


def _spacings_of(grid: Spacing, most: float) -> Iterator[Spacing]:
    """Spacings whose sub-grids have 2 to `most` positions, the largest first, of equally large ones the squarest."""
    choices = product(*([n for n in range(1, size + 1) if size % n == 0] for size in grid))
    fitting = [one for one in choices if 2 <= math.prod(grid) / math.prod(one) <= most]
    yield from sorted(fitting, key=lambda one: (math.prod(one), max(g / n for g, n in zip(grid, one, strict=True))))


def _behind(grid: Spacing, whole: Spacing, spacing: Spacing) -> Spacing | None:
    """The spacing of a grid that strides made of the whole one, None where they did not."""
    if len(grid) != len(whole) or math.prod(grid) == 1:
        return (1,) * len(grid)
    if any(large % size for size, large in zip(grid, whole, strict=True)):
        return None
    steps = [large // size for size, large in zip(grid, whole, strict=True)]
    found = tuple(one // math.gcd(one, step) for one, step in zip(spacing, steps, strict=True))
    return None if any(size % one for size, one in zip(grid, found, strict=True)) else found


def _fits(nodes: Sequence[Node], at: int, found: dict[int, Spacing | None]) -> bool:
    """Whether a node's rule can follow these sub-grids; one with an input that is not followed will be measured."""
    node, own = nodes[at], found[at] or ()
    rule, points = node.rule, node.points
    if isinstance(rule, kinds.Given) or any(one not in found for one in node.inputs):
        return True
    before = [found[one] or () for one in node.inputs]
    if isinstance(rule, kinds.Attention | kinds.Mix | kinds.Take | kinds.Regrid | kinds.Rotate) or (
        isinstance(rule, kinds.Join) and rule.axis != "features"
    ):
        return max((*own, *(step for one in before for step in one)), default=1) == 1
    if isinstance(rule, kinds.Pool) and points.positions > 1:
        return max((*own, *before[0]), default=1) == 1
    if isinstance(rule, kinds.Convolution) and max((*own, *before[0]), default=1) > 1:
        grids = points.grid, nodes[node.inputs[0]].points.grid
        large, small = grids if rule.transposed else grids[::-1]
        ratio = tuple(b // a for a, b in zip(small, large, strict=False))
        return ratio == rule.stride and not (rule.transposed and max(before[0]) == 1)
    return True
