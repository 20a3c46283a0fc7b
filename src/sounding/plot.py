"""Pictures: a Profile in, matplotlib Axes out.

matplotlib is imported when a function is called, and never through pyplot: no backend is chosen, no global figure is
left behind. Without `axes` each function makes a figure of its own, `axes.figure`; `save` writes it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from sounding.errors import UsageError
from sounding.files import place
from sounding.look import BAD, SERIES, TWO_COLUMNS_INCHES, style
from sounding.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Line: TypeAlias = tuple[ArrayLike, ArrayLike]

FORMATS = ("svg", "png", "pdf")
INTERVAL = 1.959964  # half width of a 95% interval in standard errors


def new_axes(*, height: float = 3.6) -> Axes:
    """Empty axes on a figure of their own, as wide as two columns of a paper; the height in inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(style()):
        return Figure(figsize=(TWO_COLUMNS_INCHES, height), layout="constrained").add_subplot()


def plot_profile(
    profile: Profile, measure: str, *, axes: Axes | None = None, log: bool = False, label: str | None = None
) -> Axes:
    """One measure over depth, a line per source, a 95% band where there are standard errors.

    Theory and measurement of one quantity are laid over each other by plotting `predicted + measured`.
    """
    chosen = profile.select(measure)
    if not len(chosen):
        raise UsageError(f"profile has no {measure!r}", hint=f"one of {', '.join(profile.measures) or '(empty)'}")
    axes = axes or new_axes()
    for source in chosen.sources:
        series = chosen.series(measure, source=source)
        theory = not np.any(np.isfinite(series.stderr))  # theory has no error, measurements have
        name = source if label is None else f"{label} ({source})" if len(chosen.sources) > 1 else label
        (line,) = axes.plot(series.layer, series.value, "-" if theory else ".-", label=name)
        if not theory:
            half = INTERVAL * np.nan_to_num(series.stderr)
            low, high = series.value - half, series.value + half
            axes.fill_between(series.layer, low, high, alpha=0.2, color=line.get_color(), lw=0)
    return _finish(axes, xlabel="layer", ylabel=measure.replace("_", " "), log=log)


def plot_lines(
    lines: Mapping[str, Line], *, xlabel: str, ylabel: str, title: str = "", log: bool = False, axes: Axes | None = None
) -> Axes:
    """Named curves (x, y) on one pair of axes."""
    axes = axes or new_axes()
    for label, (x, y) in lines.items():
        axes.plot(np.asarray(x), np.asarray(y), label=label)
    return _finish(axes, xlabel=xlabel, ylabel=ylabel, title=title, log=log)


def plot_bars(
    values: Mapping[str, float],
    *,
    xlabel: str,
    title: str = "",
    threshold: float | None = None,
    log: bool = False,
    axes: Axes | None = None,
) -> Axes:
    """Horizontal bars, the first on top; `threshold` is drawn as a line."""
    axes = axes or new_axes(height=1.2 + 0.35 * len(values))
    finite = [value for value in values.values() if np.isfinite(value)]
    longest = max([*finite, threshold or 0.0, 1e-300])  # a bar without end is drawn a little longer than the longest
    axes.barh(list(values), [min(value, longest * 1.2) for value in values.values()], color=SERIES[0], alpha=0.8)
    axes.invert_yaxis()
    if threshold is not None:
        axes.axvline(threshold, color=BAD, lw=1)
    if log:
        axes.set_xscale("log")
    return _name(axes, title, xlabel=xlabel)


def save(figure: Figure | Any, path: str | Path) -> None:
    """Write a figure as svg, png or pdf, by the file's ending; the same figure gives the same svg bytes."""
    import matplotlib

    ending = require_picture(Path(path))
    with matplotlib.rc_context({"svg.hashsalt": "sounding", "svg.fonttype": "none"}):
        # no date in the file, so that a picture changes only when what it shows changes
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(ending)
        drawn = io.BytesIO()
        figure.savefig(drawn, format=ending, dpi=150, metadata=metadata)
    place(Path(path), drawn.getvalue())


def require_picture(path: Path) -> str:
    """The format that the ending of a file names; UsageError for one that is no picture."""
    ending = path.suffix.removeprefix(".").lower()
    if ending not in FORMATS:
        raise UsageError(
            f"cannot write {str(path)!r}: expected a picture named .svg, .png or .pdf", hint=f"{path.stem}.svg"
        )
    return ending


def _finish(axes: Axes, *, xlabel: str, ylabel: str, log: bool, title: str = "") -> Axes:
    if log:
        axes.set_yscale("log")
    if len(axes.get_legend_handles_labels()[0]) > 1:  # a single line is told by its axis
        axes.legend(frameon=False, fontsize=9)
    return _name(axes, title, xlabel=xlabel, ylabel=ylabel)


def _name(axes: Axes, title: str, **labels: str) -> Axes:
    axes.set(**labels)
    if title:  # without one, axes of the caller keep theirs
        axes.set_title(title)
    return axes
