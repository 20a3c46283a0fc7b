"""Which samples and which pairs of points theory follows, and where a network has more than it can follow."""

from __future__ import annotations

import dataclasses

from sounding.theory.signal import Description, Normalize, Points
from sounding.theory.signal.plan import Spacing, plan

# Points of which all pairs are followed at most, where a rule allows fewer samples: time grows as the square. With 256,
# twelve blocks over 8 × 128 tokens take a third of what the check itself takes; with 512 as long as it.
MOST_POINTS = 256
FEW_POINTS = 512  # of grids: above, sub-grids are followed
MOST_PAIRS = 2**20  # of sub-grids at one node


def plan_of(description: Description) -> tuple[Spacing | None, ...]:
    """Which pairs to follow at every node: all, those of sub-grids where grids are large, or none (None)."""
    return plan(description, points=FEW_POINTS, pairs=MOST_PAIRS)


def thinned(description: Description, *, most: int | None = None) -> tuple[Description, int]:
    """The description over as many samples as theory can follow in full; batch norm needs them all."""
    samples = max(node.points.samples for node in description.nodes)
    positions = max(node.points.positions for node in description.nodes)
    batched = any(
        isinstance(node.rule, Normalize) and node.rule.kind == "batch" and node.rule.running is None
        for node in description.nodes
    )
    kept = samples if batched else min(samples, max(2, MOST_POINTS // positions), most or samples)
    if kept == samples:
        return description, samples
    nodes = tuple(dataclasses.replace(node, points=Points(kept, node.points.grid)) for node in description.nodes)
    return dataclasses.replace(description, nodes=nodes), kept
