"""Blame: which one change of a description makes an unhealthy prediction healthy."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sounding.probe.records import Finding
from sounding.probe.thresholds import THRESHOLDS
from sounding.profile import Profile
from sounding.reader.changes import Change, propose_changes
from sounding.reader.module import Blueprint
from sounding.reader.prediction import Prediction, start_of
from sounding.theory.signal import Attention, Convolution, Description, Given, Linear, Propagation, Signal, propagate

ILL = THRESHOLDS.near  # the share of a line from which the verdict warns; below it nothing is blamed
HELP = 0.3  # a change that takes away less of the illness than this share is no cause
SAMPLES = 4  # followed while blaming, where no batch norm needs them all: rates do not depend on how many
PATIENCE = 2.0  # seconds after which no further change is tried
DISTINCT = THRESHOLDS.bypassed  # the share in which samples differ that the verdict calls fatal


@dataclass(frozen=True)
class Illness:
    """How far a prediction is on its way to each line of the verdict: 1 is on the line.

    Args:
        gradient: depth scales that the squared gradients of the weight layers span, over 16.
        signal: depth scales that the mean squares of the weight layers span, over 16.
        collapse: ln of the share in which samples differ at the end, over ln 10⁻⁴; what the input lacks is not counted.
        scores: standard deviation of attention scores over √(2 ln T), from which one of T keys takes all of the weight
            (the freezing of the random energy model).
    """

    gradient: float
    signal: float
    collapse: float
    scores: float

    @property
    def worst(self) -> float:
        """The largest share; infinite where a prediction is not finite."""
        parts = (self.gradient, self.signal, self.collapse, self.scores)
        return max(part if math.isfinite(part) else math.inf for part in parts)

    def __str__(self) -> str:
        line = THRESHOLDS.depth_scales
        told = {
            f"gradients span {self.gradient * line:.0f} depth scales, and networks train to {line:.0f}": self.gradient,
            f"the signal spans {self.signal * line:.0f} depth scales, and networks train to {line:.0f}": self.signal,
            f"samples differ in 10^{math.log10(DISTINCT) * self.collapse:.1f} of the signal at the end": self.collapse,
            f"attention scores are {self.scores:.1f} times as large as where softmax freezes": self.scores,
        }
        return max(told, key=lambda words: told[words])


def measure_illness(description: Description, found: Propagation) -> Illness:
    """How ill a prediction is; queries and keys are left out, whose gradients are small wherever attention is even."""
    asking = _asking(description)
    gradients, squares = [], []
    last: float | None = None
    first: float | None = None
    for index, node in enumerate(description.nodes):
        signal, gradient = found.forward[index], found.backward[index]
        if isinstance(node.rule, Given) and signal is not None and not node.rule.constant and first is None:
            first = _distinct(signal)
        if not isinstance(node.rule, Linear | Convolution) or signal is None:
            continue
        squares.append(_log(float(np.trace(signal.sample_gram)) / len(signal.sample_gram)))
        last = _distinct(signal)
        if index not in asking and gradient is not None:
            gradients.append(_log(gradient.total))
    line = THRESHOLDS.depth_scales
    scores = 0.0
    for index, one in found.attention.items():
        keys = description.nodes[description.nodes[index].inputs[1]].points.positions
        scores = max(scores, one.score_std / math.sqrt(2 * math.log(max(keys, 2))))
    lost = math.log(last / min(first or 1.0, 1.0)) / math.log(DISTINCT) if last else 0.0
    return Illness(_span(gradients) / line, _span(squares) / line, max(lost, 0.0), scores)


def find_cause(profile: Profile, blueprint: Blueprint, prediction: Prediction) -> tuple[Finding, ...]:
    """The one change of the description that takes an unhealthy prediction back to health, as a finding; at most one.

    Changes are tried from the smallest (one layer) to the largest (all of them); the first that heals is the cause, or
    else the one that helps most.
    """
    before = measure_illness(blueprint.description, prediction.propagation)
    if before.worst < ILL:
        return ()
    found = blame(blueprint)
    if found is None:
        return ()
    change, before, after = found
    depths = {row.name: row.layer for row in profile.rows if row.source == "check"}
    outcome = "is healthy" if after.worst < ILL else f"still has this: {after}"
    return (
        Finding(
            "cause",
            "medium" if before.worst >= 1 else "low",
            change.layer or None,
            depths.get(change.layer),
            {"before": before.worst, "after": after.worst} if math.isfinite(before.worst) else {"after": after.worst},
            f"By theory {before}. {change.text[0].upper()}{change.text[1:]}; {change.cure}, the network {outcome}.",
            "meanfield2019",
            (change.cure,),
            None,
            change.cure,
            change.text,
        ),
    )


def blame(blueprint: Blueprint, *, patience: float = PATIENCE) -> tuple[Change, Illness, Illness] | None:
    """The change that is to blame, with the illness before and after it; None where nothing helps."""
    description, given, gradients = start_of(blueprint, most=SAMPLES)
    before = _predict(description, given, gradients)
    if before.worst < ILL:
        return None
    began = time.monotonic()
    best: tuple[Change, Illness] | None = None
    for change in propose_changes(description, given):
        healed = best is not None and best[1].worst < ILL and change.size > best[0].size
        if healed or time.monotonic() - began > patience:
            break
        signals = ({change.place(at): one for at, one in some.items()} for some in (given, gradients))
        after = _predict(change.description, *signals)
        if best is None or after.worst < best[1].worst:
            best = change, after
    if best is None or not best[1].worst <= (1 - HELP) * min(before.worst, 1e6):
        return None
    return best[0], before, best[1]


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


def _distinct(signal: Signal) -> float:
    gram = signal.sample_gram
    samples, trace = len(gram), float(np.trace(gram))
    return 1.0 if samples < 2 or not trace > 0 else max(1 - float(gram.sum()) / (samples * trace), 1e-15)


def _log(value: float) -> float:
    return math.log(value) if value > 0 and math.isfinite(value) else math.nan if value == 0 else math.inf


def _span(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return max(known) - min(known) if known else 0.0
