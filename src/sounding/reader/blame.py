"""Blame: which one change of a description makes an unhealthy prediction healthy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import islice
from statistics import median

import numpy as np

from sounding.probe.records import Finding
from sounding.probe.thresholds import THRESHOLDS
from sounding.profile import Profile
from sounding.reader.changes import Change, propose_changes
from sounding.reader.disagreement import depths_of
from sounding.reader.module import Blueprint
from sounding.reader.prediction import Prediction, estimate_seconds, start_of
from sounding.theory.signal import (
    Add,
    Attention,
    Convolution,
    Description,
    Given,
    Linear,
    Propagation,
    Signal,
    propagate,
)

# The share of a line from which one layer is blamed, and from which a kind of layer or the whole network is: those of
# the verdict, which names a single layer from half of its line on and warns of a rate from three quarters.
ILL = {1: THRESHOLDS.broken, 2: THRESHOLDS.near, 3: THRESHOLDS.near}
HEALTHY = THRESHOLDS.near
HELP = 0.3  # a change that takes away less of the illness than this share is no cause
MOST = 1e6  # illness beyond which no difference counts: scores of networks without norms have any size
SAMPLES = 4  # followed while blaming, where no batch norm needs them all: rates do not depend on how many
PATIENCE = 4.0  # seconds that trying changes may take, by estimate, so that a busy machine finds what an idle one does
FEWEST = 4  # changes that are tried however long one takes; the oddest come first
DISTINCT = THRESHOLDS.bypassed  # the share in which samples differ that the verdict calls fatal


@dataclass(frozen=True)
class Illness:
    """How far a prediction is on its way to each line of the verdict: 1 is on the line.

    The first layers, whose inputs come in units of their own, and the last, which may start as small as one likes, are
    left out, and so are queries and keys, whose gradients are small wherever attention is even.
    """

    gradient: float  # depth scales that the squared gradients of the weight layers span, over 16
    # depth scales by which the largest layer or stream exceeds the usual layer, over 16. Layers that are smaller than
    # usual harm only gradients: the end of a branch may start as small as one likes
    signal: float
    # ln of the share in which samples differ at the end, over ln 10⁻⁴; what the input lacks is not counted
    collapse: float
    # standard deviation of attention scores over 2√(2 ln T): from 1/2 on one of T keys takes all of the weight (the
    # freezing of the random energy model)
    scores: float

    @property
    def worst(self) -> float:
        """The largest share; infinite where a prediction is not finite."""
        return max(part if math.isfinite(part) else math.inf for part in astuple(self))

    def left(self, parts: Collection[str]) -> float:
        """The sum of these shares."""
        return sum(min(part, MOST) if math.isfinite(part := getattr(self, name)) else MOST for name in parts)

    def tell(self, part: str) -> str:
        """One part in words."""
        value, line = getattr(self, part), THRESHOLDS.depth_scales
        if part == "gradient":
            return f"gradients span {value * line:.0f} depth scales, and networks train to {line:.0f}"
        if part == "signal":
            return f"one signal is 10^{value * line / math.log(10):.0f} times as large as the usual one"
        if part == "collapse":
            return f"samples differ in 10^{math.log10(DISTINCT) * value:.1f} of the signal at the end"
        return f"attention scores are {2 * value:.1f} times as large as where softmax freezes"


PARTS = tuple(one.name for one in fields(Illness))


def measure_illness(description: Description, found: Propagation) -> Illness:
    """How ill a prediction is."""
    asking, ends = _asking(description), _ends(description)
    gradients, squares, streams = list[float](), list[float](), list[float]()
    first: float | None = None
    last: float | None = None
    for index, node in enumerate(description.nodes):
        signal, gradient = found.forward[index], found.backward[index]
        if signal is None:
            continue
        size = signal.mean_square
        if isinstance(node.rule, Given) and not node.rule.constant and first is None:
            first = _distinct(signal)
        if isinstance(node.rule, Add):
            streams.append(size)
        if not isinstance(node.rule, Linear | Convolution):
            continue
        last = _distinct(signal)
        if index in ends:
            continue
        squares.append(size)
        if index not in asking and gradient is not None:
            gradients.append(gradient.total)
    line = THRESHOLDS.depth_scales
    scores = 0.0
    for index, one in found.attention.items():
        keys = description.nodes[description.nodes[index].inputs[1]].points.positions
        scores = max(scores, one.score_std / (2 * math.sqrt(2 * math.log(max(keys, 2)))))
    lost = math.log(last / min(first or 1.0, 1.0)) / math.log(DISTINCT) if last else 0.0
    spanned, layers, largest = _logs(gradients), _logs(squares), _logs([*squares, *streams])
    span = max(spanned) - min(spanned) if spanned else 0.0
    excess = max(largest) - median(layers) if layers else 0.0
    return Illness(span / line, excess / line, max(lost, 0.0), scores)


def find_cause(profile: Profile, blueprint: Blueprint, prediction: Prediction) -> tuple[Finding, ...]:
    """The one change of the description that takes an unhealthy prediction back to health, as a finding; at most one.

    Changes are tried from the smallest (one layer) to the largest (all of them); the first that heals is the cause, or
    else the one that helps most.
    """
    before = measure_illness(blueprint.description, prediction.propagation)
    found = blame(blueprint) if before.worst >= min(ILL.values()) else None
    if found is None:
        return ()
    change, before, after = found
    cured = max(PARTS, key=lambda part: before.left([part]) - after.left([part]))
    still = max(PARTS, key=lambda part: after.left([part]))
    text = f"{change.text[0].upper()}{change.text[1:]}"
    outcome = "is healthy" if after.worst < HEALTHY else f"still has this: {after.tell(still)}"
    return (
        Finding(
            "cause",
            "medium" if before.worst >= 1 else "low",
            change.layer or None,
            depths_of(profile).get(change.layer),
            {"before": before.worst, "after": after.worst} if math.isfinite(before.worst) else {"after": after.worst},
            f"By theory {before.tell(cured)}. {text}; {change.cure}, the network {outcome}.",
            "meanfield2019",
            (f"build the network {change.cure}",),
            None,
            change.cure,
            change.text,
        ),
    )


def blame(blueprint: Blueprint) -> tuple[Change, Illness, Illness] | None:
    """The change that is to blame, with the illness before and after it; None where nothing helps.

    Only parts that are ill count, each with its own line. A larger change is preferred to a smaller one only where the
    smaller one does not heal and the larger one takes away 30% of what it leaves.
    """
    description, given, gradients = start_of(blueprint, most=SAMPLES)
    before = _predict(description, given, gradients)
    tries = max(FEWEST, int(PATIENCE / estimate_seconds(blueprint, most=SAMPLES)))
    proposed = (change for change in propose_changes(description, given) if before.worst >= _line(change))
    best: tuple[Change, Illness] | None = None
    for change in islice(proposed, tries):
        larger = best is not None and change.size > best[0].size
        if best is not None and larger and best[1].worst < HEALTHY:
            break
        signals = ({change.place(at): one for at, one in some.items()} for some in (given, gradients))
        after = _predict(change.description, *signals)
        ill = [part for part in PARTS if before.left([part]) >= _line(change)]
        bound = (1 - HELP) * before.left(ill) if best is None else best[1].left(ill) * (1 - HELP if larger else 1)
        if after.left(ill) < bound and after.worst <= 1.01 * max(before.worst, ILL[1]):
            best = change, after
    return None if best is None else (best[0], before, best[1])


def _line(change: Change) -> float:
    """How ill a prediction must be to blame a change; inputs come in units of their own, and these are no fault."""
    return HEALTHY if change.kind == "input" else ILL[change.size]


def _predict(description: Description, given: Mapping[int, Signal], gradients: Mapping[int, Signal]) -> Illness:
    with np.errstate(all="ignore"):
        found = propagate(description, given=given, gradients=gradients, draws=8, generator=np.random.default_rng(0))
        return measure_illness(description, found)


def _asking(description: Description) -> set[int]:
    """Nodes whose values become queries or keys and nothing else, norms and rotations in between passed over."""
    free: set[int] = set(description.outputs)  # nodes that lead to something else
    for index in range(len(description.nodes) - 1, -1, -1):
        node = description.nodes[index]
        if isinstance(node.rule, Attention):
            free.add(node.inputs[2])
        elif index in free or isinstance(node.rule, Linear | Convolution):
            free.update(node.inputs)
    return set(range(len(description.nodes))) - free


def _ends(description: Description) -> set[int]:
    """Weight layers that read what was measured, and those behind which there is no other."""
    nodes = description.nodes
    weights = [index for index, node in enumerate(nodes) if isinstance(node.rule, Linear | Convolution)]
    first = {index for index in weights if isinstance(nodes[nodes[index].inputs[0]].rule, Given)}
    read: set[int] = set()  # nodes that lead to a weight layer
    for index in range(len(nodes) - 1, -1, -1):
        if index in read or isinstance(nodes[index].rule, Linear | Convolution):
            read.update(nodes[index].inputs)
    return first | {index for index in weights if index not in read}


def _distinct(signal: Signal) -> float:
    gram = signal.sample_gram
    samples, trace = len(gram), float(np.trace(gram))
    return 1.0 if samples < 2 or not trace > 0 else max(1 - float(gram.sum()) / (samples * trace), 1e-15)


def _logs(values: Sequence[float]) -> list[float]:
    """Logarithms of all that is not zero, infinite where there is none: zeros are a practice, overflows are not."""
    return [math.log(one) if one > 0 and math.isfinite(one) else math.inf for one in values if one != 0]
