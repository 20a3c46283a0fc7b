"""A deeper network by theory: the repeated block of a description is found, and copies of a typical one are put in."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from sounding.errors import UsageError
from sounding.reader.module import Blueprint
from sounding.theory.signal.description import Description, Elementwise, Given, Law, Node, Rule

NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Blocks:
    """Where a description repeats itself: nodes `start` to `stop` are `count` blocks of `period` nodes."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """One past the last node of the last block."""
        return self.start + self.period * self.count


def find_blocks(description: Description) -> Blocks | None:
    """The longest run of equal blocks, with the smallest block that makes it; None where nothing with weights repeats.

    Nodes are equal where their rules, sizes and labels (numbers in names aside) are, and where their inputs lie as far
    back, or are one and the same node before the run. What is measured inside a block is never equal.
    """
    nodes = description.nodes
    best: Blocks | None = None
    for period in range(1, len(nodes) // 2 + 1):
        run = 0
        for index in range(len(nodes) - period + 1):
            if index + period < len(nodes) and _alike(nodes, index, period, index - run):
                run += 1
                continue
            found = Blocks(index - run, period, run // period + 1)
            weighs = any(node.weight for node in nodes[found.start : found.start + period])
            longer = best is None or period * found.count > best.period * best.count
            if found.count > 1 and weighs and longer:
                # a part of a block that is left over goes to the front: the run ends where the network goes on
                best = Blocks(found.start + run % period, period, found.count)
            run = 0
    return best


def _alike(nodes: Sequence[Node], index: int, period: int, start: int) -> bool:
    """Whether a node and the one a period later do the same with inputs that stand alike."""
    first, second = nodes[index], nodes[index + period]
    if isinstance(first.rule, Given) or _signature(first) != _signature(second):
        return False
    pairs = zip(first.inputs, second.inputs, strict=True)
    return all(later - earlier == period or (later == earlier < start) for earlier, later in pairs)


def _signature(node: Node) -> tuple[object, ...]:
    """What equal nodes share; of a label names are left out ("scale by blocks.0.norm.weight"), and sizes stay."""
    activation = node.rule.activation if isinstance(node.rule, Elementwise) else None
    names = NUMBER.sub("", node.name), NUMBER.sub("", node.weight), re.sub(r"\S*\.\S*", "", node.label)
    return type(node.rule), activation, node.points, node.features, len(node.inputs), *names


def extend(blueprint: Blueprint, blocks: int) -> Blueprint:
    """The blueprint of a network with this many blocks in all.

    A new block has at each place the median over the old blocks of each law's variance and mean, and everything else
    as the last block has it; a factor that depends on the depth, such as 1/√L, stays what it was. New blocks stand
    behind the old ones and take the next numbers in names.

    Raises:
        UsageError: nothing repeats, or the network has more blocks already.
    """
    description = blueprint.description
    found = find_blocks(description)
    if found is None:
        raise UsageError(
            "expected a network with a block that repeats, got one in which theory sees none",
            hint="a function of the depth that makes the network",
        )
    more = blocks - found.count
    if isinstance(blocks, bool) or not isinstance(blocks, int) or more < 0:
        raise UsageError(f"expected at least the {found.count} blocks that there are, got {blocks!r}")
    shift, last = more * found.period, found.stop - found.period
    steps = _steps(description.nodes, found)

    def moved(index: int) -> int:
        return index + shift if index >= last else index

    copies = []
    for number, at in product(range(1, more + 1), range(last, found.stop)):
        node, earlier = description.nodes[at], description.nodes[at - found.period]
        # what every block takes from before the run, as a mask or an encoder's output, the new ones take as well
        inputs = tuple(
            item if item < found.start and item in earlier.inputs else item + number * found.period
            for item in node.inputs
        )
        rules = [one.rule for one in description.nodes[found.start + at - last : found.stop : found.period]]
        copies.append(dataclasses.replace(_counted_node(node, steps, number), rule=_typical(rules), inputs=inputs))
    behind = [
        dataclasses.replace(_counted_node(node, steps, more), inputs=tuple(map(moved, node.inputs)))
        for node in description.nodes[found.stop :]
    ]
    nodes = (*description.nodes[: found.stop], *copies, *behind)
    weighing = sum(bool(node.weight) for node in description.nodes[last : found.stop])
    layers, predicted = blueprint.weight_layers
    return Blueprint(
        dataclasses.replace(description, nodes=nodes, outputs=tuple(map(moved, description.outputs))),
        {at if at < found.stop else at + shift: array for at, array in blueprint.given.items()},
        {moved(at): array for at, array in blueprint.gradients.items()},
        _aliases(blueprint.aliases, found, steps, more),
        (layers + more * weighing, predicted + more * weighing),
        shared=blueprint.shared,
    )


def _aliases(aliases: Mapping[str, int], found: Blocks, steps: dict[str, int], more: int) -> dict[str, int]:
    """Further names of nodes, those of the new blocks included."""
    known = {}
    for name, at in aliases.items():
        behind = at >= found.stop
        known[_counted(name, steps, more) if behind else name] = at + more * found.period if behind else at
        if found.stop - found.period <= at < found.stop:
            known |= {_counted(name, steps, number): at + number * found.period for number in range(1, more + 1)}
    return known


def _typical(rules: Sequence[Rule]) -> Rule:
    """The last rule with the median of each law over all."""
    names = [field.name for field in dataclasses.fields(rules[-1])]
    return dataclasses.replace(rules[-1], **{name: _median([getattr(rule, name) for rule in rules]) for name in names})


def _median(values: Sequence[Any]) -> Any:
    if all(isinstance(value, Law) for value in values):
        variance, mean = (float(np.median([getattr(law, name) for law in values])) for name in ("variance", "mean"))
        return dataclasses.replace(values[-1], variance=variance, mean=mean)
    if all(isinstance(value, tuple) and value and isinstance(value[0], Law) for value in values):
        return tuple(_median(each) for each in zip(*values, strict=True))
    return values[-1]


def _steps(nodes: Sequence[Node], found: Blocks) -> dict[str, int]:
    """By how much the number behind a prefix of names grows from block to block: {"blocks.": 1}."""
    steps = {}
    for index in range(found.start, found.stop - found.period):
        for attribute in ("name", "weight"):
            first, second = (NUMBER.split(getattr(nodes[at], attribute)) for at in (index, index + found.period))
            for place in range(1, min(len(first), len(second)), 2):
                if first[place] != second[place]:
                    steps["".join(second[:place])] = int(second[place]) - int(first[place])
                    break
    return steps


def _counted_node(node: Node, steps: dict[str, int], blocks: int) -> Node:
    return dataclasses.replace(
        node, name=_counted(node.name, steps, blocks), weight=_counted(node.weight, steps, blocks)
    )


def _counted(name: str, steps: dict[str, int], blocks: int) -> str:
    """The name that stands so many blocks further on."""
    parts = NUMBER.split(name)
    for place in range(1, len(parts), 2):
        step = steps.get("".join(parts[:place]))
        if step is not None:
            parts[place] = str(int(parts[place]) + step * blocks)
            break
    return "".join(parts)
