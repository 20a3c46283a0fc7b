"""Draw the picture of a claim: points with intervals, theory over them, the paper's claim dashed, a caption below."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from sounding.claims.picture import Panel, Picture, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = 4.6
MAX_COLUMNS = 3
CAPTION_SIZE = 9
CHARACTERS = 14.5  # of the caption's size to an inch
# colours that stay apart for the colour-blind (Okabe and Ito)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")


def draw_picture(picture: Picture, *, title: str = "") -> Figure:
    """A matplotlib figure of all panels, at most three in a row, the caption under them."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(len(picture.panels), MAX_COLUMNS)
    rows = -(-len(picture.panels) // columns)
    caption = textwrap.fill(picture.caption, int(14.5 * PANEL_INCHES * columns))
    below = 0.2 + 0.16 * (caption.count("\n") + 1)
    title = textwrap.fill(title, int(11 * PANEL_INCHES * columns))
    height = rows * 3.5 + below + (0.3 + 0.2 * title.count("\n") if title else 0.0)
    layout = ConstrainedLayoutEngine(rect=(0, below / height, 1, 1 - below / height))
    figure = Figure(figsize=(PANEL_INCHES * columns, height), layout=layout)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, picture.panels, strict=False):
        _draw_panel(axes, panel)
    for axes in grid[len(picture.panels) :]:
        axes.set_visible(False)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.text(0.01, 0.08 / height, caption, fontsize=CAPTION_SIZE, va="bottom", ha="left", color="#333333")
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    if panel.map is not None:
        grid = np.asarray(panel.map.values, dtype=np.float64)
        mesh = axes.pcolormesh(panel.map.x, panel.map.y, grid, shading="nearest", cmap="viridis", rasterized=True)
        axes.figure.colorbar(mesh, ax=axes, label=panel.map.label)
    colours: dict[str, str] = {}
    for series in panel.series:
        # the measured points and the theory of one thing share its colour: labels "x" and "x (theory)"
        key = series.label.split(" (")[0]
        colour = colours.setdefault(key, COLOURS[len(colours) % len(COLOURS)])
        _draw_series(axes, series, "#FFFFFF" if panel.map is not None else colour)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label, xscale=panel.x_scale, yscale=panel.y_scale)
    if len(axes.yaxis.get_minorticklocs()) > 30 or len(axes.xaxis.get_minorticklocs()) > 30:
        axes.minorticks_off()  # over many decades they are grey, and most of the file
    if panel.title:
        axes.set_title(panel.title, fontsize=10)
    if panel.y_ticks:
        axes.set_yticks(list(panel.y_ticks), list(panel.y_ticks.values()))
        axes.set_yticks([], minor=True)
    if panel.ticks:
        axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axes.set_xticks([], minor=True)  # a log axis would write its own labels between ours
        if max(map(len, panel.ticks.values())) > 6 and len(panel.ticks) > 4:
            axes.tick_params(axis="x", labelrotation=35)
    if any(series.label for series in panel.series):
        dark = {"facecolor": "#555555", "labelcolor": "#FFFFFF"} if panel.map is not None else {"frameon": False}
        axes.legend(fontsize=8, **dark)


def _draw_series(axes: Axes, series: Series, colour: str) -> None:
    x, y = np.asarray(series.x, dtype=np.float64), np.asarray(series.y, dtype=np.float64)
    if series.role == "measured":
        error = None if series.error is None else np.nan_to_num(np.abs(np.asarray(series.error, dtype=np.float64)))
        curve = len(x) > 60 and bool(np.all(np.diff(x) > 0))
        if curve:
            axes.plot(x, y, "-", lw=1.2, color=colour, label=series.label)
            if error is not None:
                low, high = (error[0], error[1]) if error.ndim == 2 else (error, error)
                axes.fill_between(x, y - low, y + high, color=colour, alpha=0.2, lw=0)
        else:
            axes.errorbar(
                x,
                y,
                yerr=error,
                fmt="o",
                ms=4 if len(x) <= 60 else 2,
                lw=1,
                capsize=2,
                color=colour,
                label=series.label,
            )
        return
    style = {"theory": "-", "paper": "--", "bound": ":"}[series.role]
    axes.plot(x, y, style, lw=1.6, color=colour, alpha=0.9, label=series.label)
