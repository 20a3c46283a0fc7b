"""From a report's profile to what the page draws: columns over depth, once each, rounded to what an eye can see."""

from __future__ import annotations

import math
from typing import Any

from sounding.probe.reading import PREDICTED, WEIGHT_GRADIENT, Call, Reading, read
from sounding.probe.records import Report
from sounding.profile import Profile
from sounding.report.words import CHARTS

DIGITS = 6


def to_columns(report: Report, name: str) -> dict[str, Any]:
    """One network for the page: calls in order, a column per measure, theory's lines, the fitted gradient line."""
    reading = read(report.profile)
    calls = [reading.input, *reading.calls] if reading.input.values else list(reading.calls)
    weighing = {call.depth for call in reading.weight_layers}
    drawn = [measure for chart in CHARTS for measure in chart.measures]
    columns = {measure: [_round(call.get(measure)) for call in calls] for measure in drawn}
    return {
        "name": name,
        "depth": [call.depth for call in calls],
        "names": [call.name for call in calls],
        "kinds": [call.kind for call in calls],
        "weighs": [int(call.depth in weighing) for call in calls],
        "measures": {measure: values for measure, values in columns.items() if any(v is not None for v in values)},
        "stderr": _stderr_columns(report.profile, calls, drawn),
        "theory": _theory(report.profile, drawn),
        "fit": fit_line(reading),
        "findings": [
            {"kind": finding.kind, "severity": finding.severity, "depth": finding.depth}
            for finding in report.verdict.findings
            if finding.depth is not None
        ],
    }


def fit_line(reading: Reading) -> dict[str, Any] | None:
    """The straight line of the fitted rate through the weight layers' gradient norms.

    The slope is the measured `gradient_log_rate` (per weight layer, positive towards the input); the height is the
    mean of the measured points, which is where a least-squares line of that slope lies.
    """
    rate = reading.network.get("gradient_log_rate")
    points = [
        (order, call.depth, call.get("gradient_log_norm"))
        for order, call in enumerate(reading.weight_layers)
        if math.isfinite(call.get("gradient_log_norm"))
    ]
    if rate is None or not math.isfinite(rate.value) or len(points) < 2:
        return None
    center = sum(order for order, _, _ in points) / len(points)
    height = sum(value for _, _, value in points) / len(points)
    growth = reading.network.get("gradient_growth")
    return {
        "depth": [depth for _, depth, _ in points],
        "value": [_round(height - rate.value * (order - center)) for order, _, _ in points],
        "growth": None if growth is None else str(growth),
    }


def _theory(profile: Profile, drawn: list[str]) -> dict[str, dict[str, list[float | int | None]]]:
    lines: dict[str, dict[str, list[float | int | None]]] = {}
    wanted = set(drawn)
    for row in profile.rows:
        if row.source in PREDICTED and row.measure in wanted:
            line = lines.setdefault(row.measure, {"depth": [], "value": []})
            line["depth"].append(row.layer)
            line["value"].append(_round(row.value))
    return lines


def _stderr_columns(profile: Profile, calls: list[Call], drawn: list[str]) -> dict[str, list[float | None]]:
    """Standard errors, only of measures that have one."""
    wanted = set(drawn)
    found: dict[str, dict[int, float]] = {}
    for row in profile.rows:
        # a call with several parameters has several weight gradients, of which the first is drawn
        if row.measure in wanted and row.stderr and row.source not in PREDICTED:
            cells = found.setdefault(row.measure, {})
            if row.measure != WEIGHT_GRADIENT or row.layer not in cells:
                cells[row.layer] = row.stderr
    return {
        measure: [_round(cells.get(call.depth, math.nan)) for call in calls]
        for measure, cells in found.items()
        if any(math.isfinite(value) for value in cells.values())
    }


def _round(value: float) -> float | int | None:
    """Six digits; JSON has no NaN or infinity, and a chart leaves a gap there."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
