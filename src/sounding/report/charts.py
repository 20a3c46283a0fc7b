"""From a report's profile to what the page draws: columns over depth, once each, rounded to what an eye can see."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sounding.encoding import fields_of
from sounding.probe.findings.collapse import share_outside
from sounding.probe.inside.precision import HEADROOMS, find_headroom
from sounding.probe.inside.roles import find_roles
from sounding.probe.reading import LayerCall, Reading
from sounding.probe.records import Report
from sounding.profile import Estimate
from sounding.report.words import CHARTS, SHARE_OUTSIDE

# directions, of which no batch has less than one, whatever a band of two standard deviations says
COUNTS = {"participation_ratio", "effective_rank", "token_participation_ratio"}
DIGITS = 6  # of a number in the page, which shows them under the pointer


def to_columns(report: Report, name: str) -> dict[str, Any]:
    """One network for the page: calls in order, a column per measure, theory's lines, the fitted gradient line."""
    reading = report.reading
    calls = [reading.input, *reading.calls] if reading.input.values else list(reading.calls)
    roles = find_roles(reading)
    drawn = [measure for chart in CHARTS for measure in chart.measures]
    columns = {measure: [_cell(call, measure) for call in calls] for measure in drawn}
    measured = {name: cells for name, cells in columns.items() if any(isinstance(cell, float | int) for cell in cells)}
    errors = {measure: [_round(call.stderr(measure) or math.nan) for call in calls] for measure in drawn}
    return {
        "name": name,
        "depth": [call.depth for call in calls],
        "names": [call.name for call in calls],
        "kinds": [call.kind for call in calls],
        "weighs": [int(call.weighs) for call in calls],
        "roles": [roles.get(call.depth, "") for call in calls],
        "measures": measured,
        "stderr": {measure: column for measure, column in errors.items() if any(column)},
        "theory": _theory(calls, drawn),
        "fit": fit_line(reading, reading.network),
        "expected": fit_line(reading, reading.predicted),
        "findings": [fields_of(one, "kind severity depth") for one in report.verdict.findings if one.depth is not None],
    }


def fit_line(reading: Reading, rates: Mapping[str, Estimate]) -> dict[str, Any] | None:
    """The straight line of a gradient rate, measured or predicted, through the weight layers' gradient norms.

    The slope is `gradient_log_rate` (per weight layer, positive towards the input); the height is the mean of the
    measured points, which is where a least-squares line of that slope lies.
    """
    rate = rates.get("gradient_log_rate")
    norms = [(order, call.depth, call.get("gradient_log_norm")) for order, call in enumerate(reading.weight_layers)]
    points = [point for point in norms if math.isfinite(point[2])]
    # a line through two points fits whatever they are
    if rate is None or not math.isfinite(rate.value) or len(points) < 3:
        return None
    middle = sum(order for order, _, _ in points) / len(points)
    height = sum(value for _, _, value in points) / len(points)
    growth = rates.get("gradient_growth")
    return {
        "depth": [depth for _, depth, _ in points],
        # the rate is positive towards the input: the line falls with the order
        "value": [_round(height - rate.value * (order - middle)) for order, _, _ in points],
        "growth": None if growth is None else str(growth),
    }


def _cell(call: LayerCall, measure: str) -> float | int | str | None:
    """None where nothing was measured; a text where the value is not finite, which a line shows as a gap."""
    if measure in HEADROOMS:
        return _round(find_headroom(call.values, measure))
    source = "participation_ratio" if measure == SHARE_OUTSIDE else measure
    if source not in call:
        return None
    value = call.get(source)
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    return _round(share_outside(value) if measure == SHARE_OUTSIDE else value)


def _theory(calls: Sequence[LayerCall], drawn: list[str]) -> dict[str, dict[str, list[float | int | None]]]:
    """Theory's lines by measure, each with its band."""
    lines: dict[str, dict[str, list[float | int | None]]] = {}
    for row in (row for call in calls for row in call.predicted if row.source == "theory"):
        values = {row.measure: row.value}
        if row.measure == "participation_ratio":
            values[SHARE_OUTSIDE] = share_outside(row.value)
        for measure in filter(drawn.__contains__, values):  # not as a set, whose order differs from run to run
            line = lines.setdefault(measure, {"depth": [], "value": [], "low": [], "high": []})
            least = 1.0 if measure in COUNTS else -math.inf
            line["depth"].append(row.layer)
            line["value"].append(_round(max(values[measure], least)))
            # two standard deviations over seeds, where theory knows them
            for edge, sign in (("low", -1), ("high", 1)):
                value = row.value + sign * 2 * (row.stderr or math.nan)
                bent = share_outside(max(value, 1.0)) if measure == SHARE_OUTSIDE else max(value, least)
                line[edge].append(_round(bent if math.isfinite(value) else math.nan))
    return lines


def _round(value: float) -> float | int | None:
    """Six digits; JSON has no NaN or infinity, and a chart leaves a gap there."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    # a larger number is shorter with an exponent, as a float is written
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
