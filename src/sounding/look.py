"""One palette and one scale of type for pictures, report, ledger, explorer and terminal.

The series are the colours of Okabe and Ito (2008), which people with any common colour blindness tell apart; a test
simulates the three kinds (Machado et al. 2009) and measures the distances. The style sheets of report and explorer
hold the same values, and a test compares them. A terminal shows its own colours of
the names below, which its owner chose to be legible on its background, always beside a word or a mark.
"""

from __future__ import annotations

from typing import Any

SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
SERIES_ON_DARK = ("#56B4E9", "#E69F00", "#8FE0A0", "#E3A3C6")
GOOD, WARN, BAD = "#17693F", "#875900", "#AB2319"  # dark enough for text on white: contrast above 5
ACCENT, ACCENT_ON_DARK = "#0067A3", "#86BFE6"  # links and what can be moved
INK, MUTED, LINE = "#1B1F23", "#586069", "#E1E2DE"
TERMINAL_GOOD, TERMINAL_WARN, TERMINAL_BAD, TERMINAL_NOTE = "green", "yellow", "red", "cyan"
TWO_COLUMNS_INCHES = 6.75  # of a paper: figures of this width are set there as they are, with text of the sizes below
TITLE_POINTS, TEXT_POINTS, SMALL_POINTS = 10, 9, 8


def style() -> dict[Any, Any]:
    """Settings for `matplotlib.rc_context` that give figures this look."""
    from cycler import cycler

    return {
        "axes.prop_cycle": cycler(color=SERIES),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.titlesize": TITLE_POINTS,
        "axes.labelsize": TEXT_POINTS,
        "xtick.labelsize": SMALL_POINTS,
        "ytick.labelsize": SMALL_POINTS,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "legend.fontsize": SMALL_POINTS,
        "legend.frameon": False,
        "font.size": TEXT_POINTS,
        "text.color": INK,
    }
