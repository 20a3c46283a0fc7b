"""A picture as data: what is drawn, not how. `sounding.figures` draws it; the ledger keeps its points as CSV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sounding.claims.number import DRAWN, Number, over_runs

Role: TypeAlias = Literal["measured", "theory", "paper", "bound"]
AxisScale: TypeAlias = Literal["linear", "log", "symlog"]


@dataclass(frozen=True)
class Series:
    """One curve or set of points.

    Attributes:
        role: measured (points with intervals), theory (a line), paper (what the paper claims, dashed) or bound (a
            proven limit, dotted).
        error: half widths of the intervals of y, or (low, high) of them.
    """

    label: str
    x: Sequence[float] | ArrayLike
    y: Sequence[float] | ArrayLike
    role: Role = "measured"
    error: ArrayLike | None = None


@dataclass(frozen=True)
class Map:
    """A quantity over a grid: values[i, j] at (x[j], y[i])."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    values: ArrayLike


def points_of(label: str, x: ArrayLike, numbers: Iterable[Number]) -> Series:
    """Measured numbers as points with their intervals."""
    found = list(numbers)
    error = [[n.value - n.low for n in found], [n.high - n.value for n in found]]
    return Series(label, x, [n.value for n in found], error=error)


def points_over(label: str, x: ArrayLike, runs: ArrayLike) -> Series:
    """The mean over runs at each column of `runs`, with its interval."""
    columns = np.asarray(runs).T  # runs are rows
    return points_of(label, x, [over_runs(column) for column in columns])


def mean_over(label: str, x: ArrayLike, runs: ArrayLike, *, ddof: int = 0) -> Series:
    """The mean over runs at each column of `runs`, with the normal interval of its standard error."""
    rows = np.asarray(runs)
    return Series(label, x, rows.mean(0), error=DRAWN * rows.std(0, ddof=ddof) / math.sqrt(len(rows)))


@dataclass(frozen=True)
class Panel:
    """One pair of axes. Labels carry units; `ticks` names positions on the x axis, `y_ticks` on the y axis.

    `across` draws y to the right over x downwards: a list of named numbers.
    """

    x_label: str = ""
    y_label: str = ""
    series: Sequence[Series] = ()
    title: str = ""
    x_scale: AxisScale = "linear"
    y_scale: AxisScale = "linear"
    map: Map | None = None
    ticks: Mapping[float, str] = field(default_factory=dict)
    y_ticks: Mapping[float, str] = field(default_factory=dict)
    across: bool = False


LOG_LOG: Mapping[str, Any] = {"x_scale": "log", "y_scale": "log"}


def level(label: str, x: ArrayLike, height: float, role: Role = "bound") -> Series:
    """A horizontal line from the first place to the last."""
    places = np.asarray(x)
    return Series(label, [places[0], places[-1]], [height, height], role=role)


def thin(count: int, most: int = 40) -> NDArray[np.int64]:
    """Indices 0 … count − 1, at most so many: which of some points are drawn."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def cells_of(columns: Sequence[float], rows: Sequence[float], values: ArrayLike, *series: Series) -> Panel:
    """Test accuracies (rows, columns) as cells side by side under the names of their places, with curves over them."""
    ticks, y_ticks = ({float(at): f"{place:g}" for at, place in enumerate(places)} for places in (columns, rows))
    cells = Map("test accuracy", list(ticks), list(y_ticks), values)
    return Panel(series=series, map=cells, ticks=ticks, y_ticks=y_ticks)


def scattered(cases: Series, line: tuple[str, Sequence[float]], role: Role = "bound") -> tuple[Series, Series]:
    """Each case as a point, beside the line where both numbers are equal, with its name and its ends."""
    name, ends = line
    return cases, Series(name, ends, ends, role=role)


@dataclass(frozen=True)
class Picture:
    """Panels side by side, and a caption that says what to see."""

    panels: Sequence[Panel]
    caption: str = ""


def write_words(picture: Picture, texts: Mapping[str, Any], known: Mapping[str, Any]) -> Picture:
    """The picture with its caption and what its axes say, from the `[picture]` of a row's file.

    The texts name in braces what is `known`. What is said of the last panel holds for all that follow; `ticks` names a
    setting, each of whose values is named on the x axis; `labels` has words for names of series.
    """
    said, labels, panels = texts.get("panels", [{}]), texts.get("labels", {}), []
    for place, panel in enumerate(picture.panels):
        axes = {key: text.format_map(known) for key, text in said[min(place, len(said) - 1)].items()}
        if "ticks" in axes:
            axes["ticks"] = {float(value): f"{value:g}" for value in known[axes["ticks"]]}
        series = tuple(replace(one, label=labels.get(one.label, one.label)) for one in panel.series)
        panels.append(replace(panel, series=series, **axes))
    return Picture(panels, texts["caption"].format_map(known))


def describe_axes(picture: Picture) -> tuple[dict[str, Any], ...]:
    """What a picture's panels say beside their points: labels, scales, ticks, and the label of a map."""
    return tuple(
        {
            part.name: value.label if part.name == "map" else value
            for part in fields(Panel)
            if part.name != "series" and (value := getattr(panel, part.name)) and value != part.default
        }
        for panel in picture.panels
    )


def rebuild_picture(axes: Iterable[Mapping[str, Any]], points: Iterable[Mapping[str, str]], caption: str) -> Picture:
    """The picture of such axes with the points of a series.csv, which lie in the order of panels and series."""
    panels = []
    for said, (_, inside) in zip(axes, groupby(points, key=lambda point: point["panel"]), strict=True):
        rows = list(inside)
        cells = [row for row in rows if row["role"] == "map"]  # a map stands before the curves of its panel
        series = [
            _rebuild_series(label, role, list(found))
            for (label, role), found in groupby(rows[len(cells) :], key=lambda row: (row["series"], row["role"]))
        ]
        known: dict[str, Any] = {"x_label": "", "y_label": ""}  # a label that is empty was not kept
        known |= {name: value for name, value in said.items() if name != "map"}
        for name in {"ticks", "y_ticks"} & set(known):
            known[name] = {float(place): text for place, text in known[name].items()}  # JSON has strings for keys
        panels.append(Panel(series=series, map=_rebuild_map(said["map"], cells) if cells else None, **known))
    return Picture(panels, caption)


def _rebuild_map(label: str, rows: Sequence[Mapping[str, str]]) -> Map:
    # "test accuracy at y=3": the label of a cell ends in its row
    heights = list(dict.fromkeys(float(row["series"].rpartition("=")[2]) for row in rows))
    values = np.array([float(row["y"]) for row in rows]).reshape(len(heights), -1)
    return Map(label, [float(row["x"]) for row in rows[: values.shape[1]]], heights, values)


def _rebuild_series(label: str, role: Any, rows: Sequence[Mapping[str, str]]) -> Series:
    x, y, low, high = (np.array([float(row[name]) for row in rows]) for name in ("x", "y", "low", "high"))
    # a curve without intervals was written with empty ones
    error = None if np.array_equal(low, high) else np.array([y - low, high - y])
    return Series(label, x, y, role=role, error=error)


def chart_of(numbers: Mapping[str, Number], caption: str = "") -> Picture:
    """Numbers below each other with their names, for rows that check a few numbers and draw no curve."""
    ticks = {float(place): name.replace("_", " ") for place, name in enumerate(numbers, start=1)}  # one name a line
    series = points_of("", list(ticks), numbers.values())
    return Picture((Panel("", "measured", (series,), ticks=ticks, across=True),), caption)
