"""What a check says of the start: parameters, loss, gradients that do not arrive, and signals beyond all scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sounding.probe.calls import Pass
from sounding.probe.reading import Reading
from sounding.probe.records import Finding, Severity
from sounding.probe.thresholds import THRESHOLDS
from sounding.start.arrivals import find_arrivals
from sounding.start.findings import find_all
from sounding.start.loss import StartLoss, judge_loss
from sounding.start.parameters import take_stock

RAW = 10.0  # the root mean square of inputs that nobody has scaled: pixels up to 255 have 100


def judge_start(
    root: nn.Module, passes: Sequence[Pass], reading: Reading, loss: StartLoss | None
) -> tuple[Finding, ...]:
    """Every finding about the start, for the verdict of a check."""
    start = take_stock(root)
    parameters = find_all(start)
    practice = [finding for finding in parameters if finding.kind == "zero_start"]
    whole = loss is None or loss.whole
    zeros = [one.name for one in start.parameters if one.low == one.high == 0 and "bias" not in one.kind]
    arrivals = find_arrivals(root, passes, whole=whole, practice=practice, zeros=zeros)
    last = reading.calls[-1] if reading.calls else None
    at_end: dict[str, Any] = (
        {} if last is None else {"layer": last.name, "depth": last.depth}
    )  # the layer that makes the outputs
    losses = [replace(f, **at_end) if f.kind != "class_imbalance" else f for f in judge_loss(loss)]
    given = _size(reading.input.get("mean_square"))
    if given > RAW and _way_of_inputs(reading):
        losses = [_blame_inputs(f, given) if f.kind == "start_loss" else f for f in losses]
    return (*losses, *_judge_signal(root, reading), *parameters, *arrivals)


def _blame_inputs(finding: Finding, given: float) -> Finding:
    """A loss that is too high, with the likely cause that the inputs are too large."""
    why = f"{finding.why} The inputs have a root mean square of {given:.3g}, and outputs grow with them."
    return replace(finding, why=why, remedies=("scale the inputs to unit mean square", *finding.remedies))


def _judge_signal(root: nn.Module, reading: Reading) -> list[Finding]:
    """Inputs that no norm brings back, and outputs that are huge; each at its place."""
    given, calls = _size(reading.input.get("mean_square")), reading.calls
    found = []
    way = _way_of_inputs(reading)
    if given > THRESHOLDS.huge_input and way:
        severity: Severity = "high" if given > THRESHOLDS.beyond else "medium"
        if any("Norm" in call.kind for call in calls):  # a third of its accuracy was left, and not none: docs/audit.md
            severity = "medium" if given > THRESHOLDS.beyond else "low"
        why = f"The inputs have a root mean square of {given:.3g}, and {way}."
        found.append(_finding(severity, reading.input.name, 0, given, why, ("scale the inputs to unit mean square",)))
    last = calls[-1] if calls else None
    made = _size(last.get("mean_square")) if last is not None else 0.0
    if last is not None and made > THRESHOLDS.huge_output and made > 10 * given:
        still = [part for part in root.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)
                 and not part.training and part.track_running_stats]  # fmt: skip
        cause = (
            " Its batch norms are in evaluation mode, where they divide by running statistics that nobody has "
            "estimated yet." if still else ""
        )  # fmt: skip
        remedies = (
            ("put batch norms into training mode",
             "sounding repair TARGET --method batch_statistics: let them normalize by the batch") if still else
            (f"look at the weights of {last.name!r}, and at the norm before it", "sounding audit TARGET")
        )  # fmt: skip
        why = f"The last layer gives out a root mean square of {made:.3g}, and nothing behind it brings it back.{cause}"
        found.append(
            _finding("high" if made > THRESHOLDS.beyond else "medium", last.name, last.depth, made, why, remedies)
        )
    return found


def _way_of_inputs(reading: Reading) -> str:
    """On which way inputs reach the outputs as large as they come, "" where a norm stands on all of them.

    A norm counts as one of the stream where it stands before the first weight layer or beside it in the same module;
    norms inside of residual branches leave the way around them as it is.
    """
    norms = [call for call in reading.calls if "Norm" in call.kind]
    if not norms:
        return "no normalization brings them back"
    first = next((call for call in reading.weight_layers), None)
    shortest = reading.settings.get("shortest_depth")
    if first is None or shortest is None or shortest >= reading.depth:
        return ""
    early = norms[0].depth < first.depth or norms[0].name.rpartition(".")[0] == first.name.rpartition(".")[0]
    return "" if early else "the stream goes around the norms, which stand inside of the branches: it stays as large"


def _size(mean_square: float) -> float:
    return math.sqrt(mean_square) if mean_square >= 0 else 0.0


def _finding(
    severity: Severity, layer: str, depth: int, size: float, why: str, remedies: tuple[str, ...]
) -> Finding:  # fmt: skip
    return Finding(
        "huge_signal", severity, layer, depth, {"root_mean_square": size}, why, "", remedies,
        expected="a root mean square around 1", found=f"{size:.3g}",
    )  # fmt: skip
