"""A picture as data: what is drawn, not how. `sounding.figures` draws it; the ledger keeps its points as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from numpy.typing import ArrayLike

from sounding.claims.number import Number

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


@dataclass(frozen=True)
class Panel:
    """One pair of axes. Labels carry units; `ticks` names positions on the x axis, `y_ticks` on the y axis.

    `across` draws y to the right over x downwards: a list of named numbers.
    """

    x_label: str
    y_label: str
    series: Sequence[Series] = ()
    title: str = ""
    x_scale: AxisScale = "linear"
    y_scale: AxisScale = "linear"
    map: Map | None = None
    ticks: Mapping[float, str] = field(default_factory=dict)
    y_ticks: Mapping[float, str] = field(default_factory=dict)
    across: bool = False


@dataclass(frozen=True)
class Picture:
    """Panels side by side, and a caption that says what to see."""

    panels: Sequence[Panel]
    caption: str


def chart_of(numbers: Mapping[str, Number], caption: str, *, log: bool = False) -> Picture:
    """Numbers below each other with their names, for rows that check a few numbers and draw no curve."""
    ticks = {float(place): name.replace("_", " ") for place, name in enumerate(numbers, start=1)}
    series = points_of("", list(ticks), numbers.values())
    panel = Panel("", "measured", (series,), ticks=ticks, y_scale="log" if log else "linear", across=True)
    return Picture((panel,), caption)
