"""The standard pictures of a sweep: curves with intervals, heat maps over two axes, theory as a line on top."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sounding.claims.number import mean_of
from sounding.claims.picture import Map, Panel, Picture, Series
from sounding.errors import UsageError
from sounding.sweeping.spec import SEED, Spec
from sounding.sweeping.table import Table

KEYS = ("x", "y", "curves", "value", "title", "caption", "x_label", "y_label", "label", "x_scale", "y_scale",
        "x_power", "y_power")  # fmt: skip


def make_picture(spec: Spec, table: Table, line: Table | None = None, **changes: Any) -> Picture:
    """The picture that the table [picture] of a sweep describes.

    `x` and `value` are columns. With `y`, another axis, the picture is a heat map of the mean over seeds; without, it
    has a curve for each value of `curves`, and 99% intervals over seeds. `x_power = 2` draws variances where the grid
    has standard deviations. Everything else is labels and scales ("log"). `changes` take the place of entries of
    [picture]; `line` is the table of the theory line.
    """
    wanted = {**spec.picture, **{name: value for name, value in changes.items() if value is not None}}
    wanted |= {name: str(wanted[name]).replace("-", "_") for name in ("x", "y", "curves") if name in wanted}
    _check(wanted, spec, table)
    x_label, label = wanted.get("x_label", wanted["x"]), wanted.get("label", wanted["value"])
    scales = {"x_scale": wanted.get("x_scale", "linear"), "y_scale": wanted.get("y_scale", "linear")}
    drawn = [] if line is None else [_line(spec, line, wanted)]
    seeds = len(spec.axes.get(SEED, ()))
    if "y" in wanted:
        xs, ys, value = spec.axes[wanted["x"]], spec.axes[wanted["y"]], wanted["value"]
        means = [[_mean(_samples(table, value, **{wanted["x"]: x, wanted["y"]: y})) for x in xs] for y in ys]
        grid = Map(label, _power(xs, wanted.get("x_power")), _power(ys, wanted.get("y_power")), means)
        panel = Panel(x_label, wanted.get("y_label", wanted["y"]), drawn, map=grid, **scales)
        told = f"{label}, mean of {seeds} seeds." if seeds > 1 else f"{label}."
    else:
        panel = Panel(x_label, label, [*_curves(spec, table, wanted), *drawn], **scales)
        told = f"{label}, mean and 99% interval over {seeds} seeds." if seeds > 1 else f"{label}."
    return Picture((panel,), wanted.get("caption", told))


def _check(wanted: Mapping[str, Any], spec: Spec, table: Table) -> None:
    """Refuse a picture of columns or axes that the sweep has not, or that hides an axis."""
    unknown = sorted(set(wanted) - set(KEYS))
    if unknown:
        raise UsageError(f"[picture] has {unknown[0]!r}, which no picture has", hint=f"one of {', '.join(KEYS)}")
    for name in ("x", "value"):
        if name not in wanted:
            raise UsageError(f"expected {name!r} in the table [picture], got none", hint=f"--{name}")
    if not table.rows:
        raise UsageError("the sweep has no result to draw yet", hint="sounding sweep resume DIR")
    if wanted["value"] not in table.columns:
        raise UsageError(f"no column {wanted['value']!r}", hint=f"one of {', '.join(table.columns)}")
    shown = [wanted[name] for name in ("x", "y", "curves") if name in wanted]
    strange = [name for name in shown if name not in spec.axes]
    if strange:
        raise UsageError(f"expected an axis of the grid, got {strange[0]!r}", hint=f"one of {', '.join(spec.axes)}")
    left = [name for name, values in spec.axes.items() if name not in {*shown, SEED} and len(values) > 1]
    if left:
        raise UsageError(f"the picture shows nothing of the axis {left[0]!r}", hint="y or curves in [picture]")


def _samples(table: Table, value: str, **place: Any) -> list[float]:
    """The finite numbers of a column at a place of the grid."""
    rows = (row for row in table.rows if all(row[name] == wanted for name, wanted in place.items()))
    found = [row.get(value) for row in rows]
    return [float(number) for number in found if isinstance(number, int | float) and math.isfinite(number)]


def _curves(spec: Spec, table: Table, wanted: Mapping[str, Any]) -> list[Series]:
    """A curve of means for each value of an axis, with the intervals over seeds."""
    name = wanted.get("curves")
    found = []
    for curve in spec.axes[name] if name else [None]:
        here = {} if name is None else {name: curve}
        points = [(x, _samples(table, wanted["value"], **{wanted["x"]: x}, **here)) for x in spec.axes[wanted["x"]]]
        points = [(x, samples) for x, samples in points if samples]
        halves = [(number.high - number.low) / 2 if (number := mean_of(samples) if len(samples) > 1 else None) else 0.0
                  for _, samples in points]  # fmt: skip
        label = "" if name is None else f"{name} {curve}"
        places = _power([x for x, _ in points], wanted.get("x_power"))
        error = halves if any(halves) else None
        found.append(Series(label, places, [_mean(samples) for _, samples in points], error=error))
    return found


def _line(spec: Spec, line: Table, wanted: Mapping[str, Any]) -> Series:
    """The theory line, along either axis of the picture and cut where a map ends."""
    along, value = str(spec.line["along"]).replace("-", "_"), spec.line["value"]
    rows = [row for row in line.rows if isinstance(row.get(value), int | float) and math.isfinite(row[value])]
    if not rows and value not in line.columns:
        raise UsageError(f"the line has no column {value!r}", hint=f"one of {', '.join(line.columns)}")
    ends, heights = [row[along] for row in rows], [row[value] for row in rows]
    xs, ys = (heights, ends) if along == wanted.get("y") else (ends, heights)
    x, y = np.array(_power(xs, wanted.get("x_power"))), np.array(_power(ys, wanted.get("y_power")))
    if "y" in wanted:  # a line that leaves the map would stretch its axes
        inside = [np.array(_power(spec.axes[wanted[name]], wanted.get(f"{name}_power"))) for name in ("x", "y")]
        for points, grid in zip((x, y), inside, strict=True):
            points[(points < grid.min()) | (points > grid.max())] = np.nan  # NaN ends a line
    return Series(spec.line.get("label", value), x, y, role="theory")


def _mean(samples: Sequence[float]) -> float:
    return float(np.mean(samples)) if samples else math.nan


def _power(values: Iterable[Any], power: float | None) -> list[float]:
    try:
        return [float(value) ** (power or 1) for value in values]
    except ValueError as error:
        raise UsageError(f"expected an axis of numbers, got {error}") from error
