"""Draw the picture of a claim: points with intervals, theory over them, the paper's claim dashed, a caption below."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from sounding.claims.picture import Panel, Picture, Series
from sounding.look import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# inches by panels in a row: one or two columns of a paper; type of 7 and 8 points is legible there
WIDTHS = {1: 3.4, 2: 7.0, 3: 7.0}
PANEL_HEIGHT, MAX_COLUMNS, CAPTION_SIZE = 2.5, 3, 7
TEXT = ("font.size", "axes.titlesize", "axes.labelsize")
FONT: dict[Any, Any] = {**dict.fromkeys(TEXT, 8), "xtick.labelsize": 7, "ytick.labelsize": 7}
CHARACTERS = 18.5  # of the caption's size to an inch
TITLE_CHARACTERS = 15  # of the title's size to an inch
LABEL_CHARACTERS = 16  # of an axis label to an inch
NAME_CHARACTERS = 22  # of a number's name beside its point to a line
LEGEND: dict[str, Any] = {"fontsize": 7, "handlelength": 1.8, "columnspacing": 1.0, "labelspacing": 0.3}
INSIDE = 6  # entries; a longer legend goes below its panel, free corner or not
POINTS = 60  # of one series; more of them in order are drawn as a curve
ALLOWED = "#DDE8EE"  # the range that is expected of a number
ON_MAP = "#FFFFFF"  # lines over a map, with a dark edge: a map is dark at one end and bright at the other
# the look of a series on the first round through the colours, on the second, ...
MARKERS = ("o", "^", "s", "D")
DASHES: dict[str, tuple[Any, ...]] = {
    "measured": ("-", (0, (8, 2))),
    "theory": ("-", "-."),
    "paper": ("--", (0, (9, 3))),
    "bound": (":", (0, (1, 3))),
}


Expected: TypeAlias = Mapping[str, Mapping[str, Any]]  # expectations with their status, by the name of the number


def draw_picture(picture: Picture, *, title: str = "", expected: Expected | None = None) -> Figure:
    """A matplotlib figure of all panels, at most three in a row, the caption under them.

    A legend stands inside its panel where it covers no point and no line, otherwise below it; panels with the same
    entries share one. A list of named numbers shows the range that is `expected` of each.
    """
    import matplotlib

    with matplotlib.rc_context(FONT):
        return _draw(picture, title, expected or {})


def _draw(picture: Picture, title: str, expected: Expected) -> Figure:
    """The figure with its panels, legends and caption, in the type sizes that are set."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = _columns(picture.panels)
    wide = WIDTHS[columns]
    rows = -(-len(picture.panels) // columns)
    caption = textwrap.fill(picture.caption, int(CHARACTERS * wide))
    below = 0.15 + 0.125 * (caption.count("\n") + 1)
    title = textwrap.fill(title, int(TITLE_CHARACTERS * wide))
    above = 0.25 + 0.15 * title.count("\n") if title else 0.0
    layout = ConstrainedLayoutEngine()
    # inches: a list of numbers is as high as it is long
    heights = [0.5 + 0.35 * len(panel.ticks) if panel.across else PANEL_HEIGHT for panel in picture.panels]
    tall = rows * min(PANEL_HEIGHT, max(heights))
    figure = Figure(figsize=(wide, tall), layout=layout)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()  # an empty place of the grid is hidden
    for axes, panel in zip(grid, picture.panels, strict=False):
        _draw_panel(axes, panel, expected)
    for axes in grid[len(picture.panels) :]:
        axes.set_visible(False)
    legends = _place_legends(figure, list(grid)[: len(picture.panels)], picture.panels)
    height = tall + above + below + legends  # inches; the layout gets the rest below
    figure.set_size_inches(wide, height)
    bottom = below + (legends if figure.legends else 0.0)
    layout.set(rect=(0, bottom / height, 1, 1 - bottom / height))
    for legend in figure.legends:
        legend.set_bbox_to_anchor((0, below / height, 1, 1))
    if title:
        figure.suptitle(title, fontsize=9)
    figure.text(0.01, 0.08 / height, caption, fontsize=CAPTION_SIZE, va="bottom", ha="left", color="#333333")
    return figure


def _columns(panels: Sequence[Panel]) -> int:
    """Panels in a row: up to three, two of four, which would leave one alone."""
    return 2 if len(panels) == 4 else min(len(panels), MAX_COLUMNS)


def _draw_panel(axes: Axes, panel: Panel, expected: Expected) -> None:
    """Draw a map or every series in its look, with labels, scales and ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    if panel.across:
        _draw_across(axes, panel, expected)
        return
    axes.set(xscale=panel.x_scale, yscale=panel.y_scale)
    if panel.map is not None:
        grid = np.asarray(panel.map.values, dtype=np.float64)
        mesh = axes.pcolormesh(panel.map.x, panel.map.y, grid, shading="nearest", cmap="viridis", rasterized=True)
        axes.figure.colorbar(mesh, ax=axes, label=panel.map.label)
    drawn = {_thing(series) for series in panel.series if series.role != "measured"}
    # a cloud of points is not joined, nor are named places, which are no axis to draw a line along
    named = panel.map is None and any(text != f"{place:g}" for place, text in panel.ticks.items())
    joined = not named and all(_ordered(series) for series in panel.series if series.role == "measured")
    for series, look in zip(panel.series, _looks(panel), strict=True):
        # points with a curve of their own lie on it, or one sees how far they do not
        _draw_series(axes, series, look, joined=joined and _thing(series) not in drawn, named=named)
    inches = axes.get_window_extent().width / axes.figure.dpi
    axes.set(xlabel=_wrap(panel.x_label, inches), ylabel=_wrap(panel.y_label, PANEL_HEIGHT))
    _name_ticks(axes, panel)
    if panel.title:
        axes.set_title(panel.title)


def _draw_across(axes: Axes, panel: Panel, expected: Expected) -> None:
    """A strip for each named number, the first on top: the number, its interval, and the range expected of it, shaded.

    Numbers of a list have units of their own, so every strip has a scale of its own, which its text says.
    """
    axes.set(xlim=(0, 1), xticks=[], ylim=(len(panel.ticks) + 0.5, 0.5))
    axes.spines["bottom"].set_visible(False)
    (series,) = panel.series
    values = np.asarray(series.y, dtype=np.float64)
    error = np.zeros((2, len(values))) if series.error is None else np.broadcast_to(series.error, (2, len(values)))
    for place, name, value, below, above in zip(panel.ticks, panel.ticks.values(), values, *error, strict=True):
        wanted = expected.get(name, {"low": -np.inf, "high": np.inf, "status": "met"})
        ends = np.array([value - below, value + above, float(wanted["low"]), float(wanted["high"])])
        finite = ends[np.isfinite(ends)]
        spread = np.ptp(finite) or abs(value) or 1.0
        low, high = finite.min() - 0.2 * spread, finite.max() + 0.2 * spread
        # places of the strip between 0 and 1
        left, right, first, last = (np.clip(ends, low, high) - low) / (high - low)
        if name in expected:  # a range of one number is a line
            axes.fill_betweenx([place - 0.3, place + 0.3], max(first - 0.005, 0), min(last + 0.005, 1), color=ALLOWED)
        look = STATUS[wanted["status"]]
        axes.plot([left, right], [place, place], color=look.colour, lw=1.2)
        axes.plot((value - low) / (high - low), place, look.marker, ms=4, color=look.colour)
        interval = f" [{value - below:.3g}, {value + above:.3g}]" if below + above > 1e-6 * abs(value) else ""
        told = f"{value:.4g}{interval}" + (f"\nexpected {write_range(wanted)}" if name in expected else "")
        axes.text(1.04, place, told.replace("inf]", "∞)"), fontsize=6.5, va="center", ha="left", clip_on=False)
    axes.set_yticks(list(panel.ticks), [textwrap.fill(name, NAME_CHARACTERS) for name in panel.ticks.values()])


def write_range(expected: Mapping[str, Any]) -> str:
    """The range that an expectation requires, in the digits in which it was typed: 0.999999 is not 1."""
    low, high = float(expected["low"]), float(expected["high"])
    if low == high:
        return f"{low:.9g}"
    if np.isinf(low):
        return f"≤ {high:.9g}"
    return f"≥ {low:.9g}" if np.isinf(high) else f"{low:.9g} to {high:.9g}"


def _thing(series: Series) -> str:
    """What a series is about: "x", "x (theory)" and "x (bound)" are about x."""
    return series.label.split(" (")[0]


def _ordered(series: Series) -> bool:
    return bool(np.all(np.diff(np.asarray(series.x, dtype=np.float64)) > 0))


@dataclass(frozen=True)
class _Look:
    colour: str
    marker: str
    dash: Any


STATUS = {"met": _Look(SERIES[0], "o", "-"), "violated": _Look(SERIES[1], "X", "-"), "open": _Look("#666666", "D", "-")}


def _looks(panel: Panel) -> list[_Look]:
    """A look for every series of a panel, of which no two are the same.

    The points, the theory and the bound of one thing share its colour, as their labels "x", "x (theory)" and
    "x (bound)" say; two series of one kind never do.
    """
    colours: dict[str, int] = {}
    taken: set[tuple[int, str]] = set()
    looks = []
    for series in panel.series:
        key = _thing(series)
        if (colours.get(key), series.role) in taken:
            key = series.label
        place = colours.setdefault(key, len(colours))
        taken.add((place, series.role))
        again, dashes = place // len(SERIES), DASHES[series.role]
        colour = ON_MAP if panel.map is not None else SERIES[place % len(SERIES)]
        looks.append(_Look(colour, MARKERS[again % len(MARKERS)], dashes[again % len(dashes)]))
    return looks


def _draw_series(axes: Axes, series: Series, look: _Look, *, joined: bool, named: bool) -> None:
    """Draw theory as a line; measurements as points with intervals or, of many, as a curve with a band."""
    x, y = np.asarray(series.x, dtype=np.float64), np.asarray(series.y, dtype=np.float64)
    if series.role != "measured" and named:  # named places are no axis to draw a line along: a bar at each
        axes.plot(x, y, "_", ms=14, mew=1.6, color=look.colour, label=series.label)
        return
    if series.role != "measured":
        (line,) = axes.plot(x, y, linestyle=look.dash, lw=1.6, color=look.colour, alpha=0.9, label=series.label)
        if look.colour == ON_MAP:
            from matplotlib.patheffects import withStroke

            line.set_path_effects([withStroke(linewidth=3.4, foreground="#333333")])
        return
    curve = len(x) > POINTS and _ordered(series)
    if curve:
        axes.plot(x, y, linestyle=look.dash, lw=1.2, color=look.colour, label=series.label)
    else:
        size = 3.5 if len(x) <= POINTS / 2 else 2  # many points would touch
        dash = look.dash if joined else "none"
        axes.plot(x, y, look.marker, ms=size, lw=0.8, linestyle=dash, color=look.colour, label=series.label)
    if series.error is None:
        return
    error = np.nan_to_num(np.abs(np.asarray(series.error, dtype=np.float64)))
    low, high = (y - error[0], y + error[1]) if error.ndim == 2 else (y - error, y + error)
    if curve:
        some = np.unique(np.linspace(0, len(x) - 1, POINTS).round().astype(int))
        axes.fill_between(x[some], low[some], high[some], color=look.colour, alpha=0.2, lw=0)
    else:
        # a log axis has no room for 0: an interval that reaches it would be a line down to the edge
        low = np.where(low > 0, low, y) if axes.get_yscale() == "log" else low
        # all intervals as one broken line: a path of its own for each would be most of the file
        gaps = np.full_like(y, np.nan)
        axes.plot(np.repeat(x, 3), np.column_stack([low, high, gaps]).ravel(), "-", lw=1, color=look.colour)


def _name_ticks(axes: Axes, panel: Panel) -> None:
    """The panel's own names of places; on a log axis of few decades plain numbers, at the measured places if few."""
    places = sorted({float(x) for series in panel.series if series.role == "measured" for x in np.ravel(series.x)})
    if panel.x_scale == "log":
        _name_decades(axes.xaxis, axes.get_xlim(), places)
    elif all(place == round(place) for place in places):  # of layers, samples or steps there are no halves
        axes.locator_params(axis="x", integer=True)
    if panel.y_scale == "log":
        _name_decades(axes.yaxis, axes.get_ylim(), ())
    if panel.y_ticks:
        axes.set_yticks(list(panel.y_ticks), list(panel.y_ticks.values()))
        axes.set_yticks([], minor=True)
    if panel.ticks:
        axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axes.set_xticks([], minor=True)  # a log axis would write its own labels between ours
        if max(map(len, panel.ticks.values())) > 6 and len(panel.ticks) > 4:
            axes.tick_params(axis="x", labelrotation=35)


def _name_decades(axis: Any, limits: tuple[float, float], places: Sequence[float]) -> None:
    """Labels of a log axis that never touch: powers of ten over many decades, else few plain numbers."""
    from matplotlib import ticker

    axis.set_minor_formatter(ticker.NullFormatter())
    low, high = limits
    decades = np.log10(high / low)
    if len(axis.get_minorticklocs()) > 20:
        axis.set_minor_locator(ticker.NullLocator())  # so many are a grey band, and most of the file
    plain = low >= 1e-3 and high < 1e5
    if decades > (3 if plain else 2):
        return
    every = ticker.LogFormatterSciNotation(minor_thresholds=(np.inf, np.inf))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}") if plain else every)
    shown = [place for place in places if low <= place <= high]
    if plain and 2 <= len(shown) <= 8 and min(np.diff(np.log10(shown))) > 0.09 * decades:
        axis.set_major_locator(ticker.FixedLocator(shown))
    elif decades > 0.7:
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2 else (1.0,)))
    else:
        axis.set_major_locator(ticker.MaxNLocator(5))


def _wrap(label: str, inches: float) -> str:
    return label if "$" in label else textwrap.fill(label, int(LABEL_CHARACTERS * inches))


def _place_legends(figure: Figure, grid: Sequence[Axes], panels: Sequence[Panel]) -> float:
    """Draw the legends; the inches that those below their panels add to the height of the figure."""
    # the numbers of a list stand beside their names and need no legend
    named = [(axes, panel) for axes, panel in zip(grid, panels, strict=True)
             if not panel.across and any(series.label for series in panel.series)]  # fmt: skip
    if not named:
        return 0.0
    entries = {tuple((series.label, series.role) for series in panel.series) for _, panel in named}
    common = len(entries) == 1 and len(named) == len(panels)
    outside = named
    if len(named) == 1 or not common:
        outside = [(axes, panel) for axes, panel in named if not _place_inside(figure, axes, panel)]
    if not outside:
        return 0.0
    if common:
        return _place_below(figure, figure, outside[0], figure.get_figwidth() - 0.1)
    figure.draw_without_rendering()
    columns = _columns(panels)
    heights = np.zeros(len(panels))
    for axes, panel in outside:
        heights[grid.index(axes)] = _place_below(figure, axes, (axes, panel), figure.get_figwidth() / columns - 0.3)
    return float(sum(max(heights[start : start + columns]) for start in range(0, len(panels), columns)))


def _place_inside(figure: Figure, axes: Axes, panel: Panel) -> bool:
    """A legend in the panel's freest corner, kept if it covers nothing there."""
    if panel.map is not None or len(axes.get_legend_handles_labels()[1]) > INSIDE:
        return False
    legend = axes.legend(frameon=False, **LEGEND)
    figure.draw_without_rendering()
    box, covers = legend.get_window_extent().padded(3), False
    for line in axes.lines:
        path = line.get_transform().transform_path(line.get_path())
        # points alone have no path between them
        alone = line.get_linestyle() == "None"
        covers |= bool(box.count_contains(path.vertices) if alone else path.intersects_bbox(box, filled=False))
    bands = (axes.transData.transform_path(path) for band in axes.collections for path in band.get_paths())
    covers |= any(path.intersects_bbox(box, filled=True) for path in bands)
    if covers:
        legend.remove()
    return not covers


def _place_below(figure: Figure, host: Any, panel: tuple[Axes, Panel], width: float) -> float:
    """The panel's legend under it or, of the figure as host, under all panels, in columns; its height in inches."""
    from matplotlib.transforms import ScaledTranslation

    axes, content = panel
    style: dict[str, Any] = {**LEGEND, "frameon": False, "borderaxespad": 0.2}
    style["loc"] = "lower center" if host is figure else "upper center"
    if content.map is not None:
        style |= {"frameon": True, "facecolor": "#555555", "labelcolor": "#FFFFFF"}
    handles, labels = axes.get_legend_handles_labels()
    if host is not figure:
        labelled = axes.xaxis.get_tightbbox() or axes.get_window_extent()
        under = axes.get_window_extent().y0 - labelled.y0
        shift = ScaledTranslation(0, -under / figure.dpi, figure.dpi_scale_trans)
        style |= {"bbox_to_anchor": (0.5, 0), "bbox_transform": axes.transAxes + shift}
    for columns in range(len(labels), 0, -1):
        legend = host.legend(handles, labels, ncols=columns, **style)
        box = legend.get_window_extent()
        if box.width <= width * figure.dpi:
            break
        if columns > 1:
            legend.remove()
    return float(box.height / figure.dpi)
