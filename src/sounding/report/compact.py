"""A report as a few kilobytes of JSON, enough for its page: verdict, findings, charts at some weight layers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from sounding.encoding import to_plain
from sounding.probe.reading import NETWORK, PREDICTED, read
from sounding.probe.records import Finding, Report, Unmeasured, Verdict
from sounding.profile import Profile, Row

LAYERS = 12  # points of a chart that are kept: a curve still shows its shape, and 260 reports are 700 kB
DIGITS = 3  # of a number that is only drawn
MEASURES = ("gradient_log_norm", "participation_ratio", "mean_cosine", "mean_square")
SETTINGS = {
    "batch_size": None,
    "samples": None,
    "shortest_depth": None,
    "start": ("sentence",),
    "theory": ("applied", "note", "reading", "measured_instead"),
}
CIRCUMSTANCES = ("model", "data", "seed", "device", "dtypes")
LOST = "weight gradient: "
PLAIN = ("returns more than one tensor", "of shape (1, ", "gradient: ")  # nothing is missing


def unmeasured_weights(report: Report, model: nn.Module) -> tuple[Unmeasured, ...]:
    """What was not measured and matters: the signal of modules that hold weights, or a number of the whole network.

    Tokens carry no signal, and a dropout that is off is not called. A module that was not called matters unless all its
    weights got a gradient in another way, as tied ones do. A gradient is known at the weight where it is not at the
    output, or there is none. What is the same for all samples has no axis of the batch, as a table of positions.
    """
    lost = {item.name for item in report.unmeasured if item.reason.startswith(LOST)}
    tensors = {id(tensor): name not in lost for name, tensor in model.named_parameters()}
    modules = dict(model.named_modules())
    weights = {name: [tensors[id(one)] for one in module.parameters()] for name, module in modules.items()}

    def matters(item: Unmeasured) -> bool:
        name = re.sub(r"#\d+$", "", item.name)
        found = weights.get(name, [])
        if item.name == NETWORK or not found:
            return item.name == NETWORK
        if isinstance(table := modules[name], nn.Embedding) and not table.weight.requires_grad:
            return False
        if "never called" in item.reason:
            return not all(found)
        return not any(words in item.reason for words in PLAIN)

    return tuple(filter(matters, report.unmeasured))


def shorten(report: Report, missing: Sequence[Unmeasured]) -> dict[str, Any]:
    """Plain JSON types from which `restore` makes a report again; of what was not measured it keeps `missing`."""
    reading = read(report.profile)
    layers = reading.weight_layers
    # evenly over the depth, both ends included; of a short network some come twice
    kept = (layers[round(i * (len(layers) - 1) / (LAYERS - 1))] for i in range(LAYERS if layers else 0))
    chosen = {call.depth: call for call in kept}
    theory: dict[str, list[list[float | None]]] = {}
    # of two rows the first counts
    rows = {(row.layer, row.measure): row for row in reversed(report.profile.rows) if row.source in PREDICTED}
    for measure in MEASURES:
        found = [rows.get((depth, measure)) for depth in chosen]
        if any(found):
            theory[measure] = [[] if row is None else [_cell(row.value), _cell(row.stderr)] for row in found]
    verdict, about = report.verdict, report.environment
    findings = [
        {key: value for key, value in finding.to_dict().items() if key != "seed" and value not in (None, "")}
        | {"evidence": {key: str(float(f"{value:.4g}")) for key, value in finding.evidence.items()}}
        for finding in verdict.findings
    ]
    return {
        "sentence": verdict.sentence,
        "warnings": verdict.warnings,
        "not_judged": list(verdict.not_judged),
        "findings": findings,
        # names that differ in numbers only are told once, with a star
        "unmeasured": list(dict.fromkeys(tuple(re.sub(r"\d+", "*", it) for it in (m.name, m.reason)) for m in missing)),
        "depth": list(chosen),
        "names": [call.name for call in chosen.values()],
        "kinds": [call.kind for call in chosen.values()],
        "measured": {measure: [_cell(call.get(measure)) for call in chosen.values()] for measure in MEASURES},
        "theory": theory,
        "network": {
            row.measure: [_cell(row.value), _cell(row.stderr), row.source]
            for row in report.profile.rows
            if row.name == NETWORK
        },
        "settings": {
            name: to_plain(value if parts is None else {part: value[part] for part in parts if part in value})
            for name, parts in SETTINGS.items()
            if (value := report.profile.settings.get(name)) is not None
        },
        "environment": to_plain({name: about[name] for name in CIRCUMSTANCES if name in about}),
    }


def restore(record: Mapping[str, Any], status: Any) -> Report:
    """The report that a record was made of, with what the record kept of it."""
    rows: list[Row] = []
    places = list(zip(record["depth"], record["names"], strict=True))
    for measure, values in record["measured"].items():
        cells = zip(places, values, strict=True)
        rows += [Row(depth, name, measure, value, None, "check") for (depth, name), value in cells if value is not None]
    for measure, pairs in record["theory"].items():
        for (depth, name), pair in zip(places, pairs, strict=True):
            if pair and pair[0] is not None:
                rows.append(Row(depth, name, measure, pair[0], pair[1], "theory"))
    last = record["depth"][-1] if record["depth"] else 0
    rows += [Row(last, NETWORK, measure, value, error, source)
             for measure, (value, error, source) in record["network"].items() if value is not None]  # fmt: skip
    kinds = {str(depth): kind for depth, kind in zip(record["depth"], record["kinds"], strict=True)}
    settings = {**record["settings"], "kinds": kinds, "weight_layers": record["depth"]}
    findings = []
    for found in record["findings"]:
        fields = {"layer": None, "depth": None, "paper": "", **found}
        fields["evidence"] = {key: float(value) for key, value in found["evidence"].items()}
        findings.append(Finding(remedies=tuple(fields.pop("try")), **fields))
    verdict = Verdict(status, tuple(findings), record["sentence"], tuple(record["not_judged"]), record["warnings"])
    unmeasured = tuple(Unmeasured(name, reason) for name, reason in record["unmeasured"])
    return Report(Profile(tuple(rows), settings), verdict, unmeasured, record["environment"])


def _cell(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")
