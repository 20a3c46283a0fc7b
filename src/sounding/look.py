"""One palette, one scale of type and one way to write numbers for pictures, report, ledger, explorer and terminal.

The series are the colours of Okabe and Ito (2008), which people with any common colour blindness tell apart; a test
simulates the three kinds (Machado et al. 2009) and measures the distances. The style sheets of report and explorer
hold the same values, and a test compares them. A terminal shows its own colours of
the names below, which its owner chose to be legible on its background, always beside a word or a mark.
"""

from __future__ import annotations

import math
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


def write_number(value: float) -> str:
    """Three digits, without an exponent where it is readable.

    >>> [write_number(v) for v in (0.12345, 63.9871, 12345.6, 1.2e-9, 0.0, float("nan"))]
    ['0.123', '64.0', '1.2e+04', '1.2e-09', '0', '–']
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    # the # of the format keeps zeros at the end, which say how many digits are meant
    if 1e-3 <= abs(value) < 1e4:  # where plain digits are no longer than an exponent
        return f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:.0f}"
    return f"{value:.1e}"


def write_evidence(value: float) -> str:
    """A number behind a finding: a count is written as one, and not as 12.0.

    >>> write_evidence(65.0), write_evidence(0.04886)
    ('65', '0.0489')
    """
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e6 else write_number(value)


def write_share(value: float) -> str:
    """A share in percent, tiny ones in scientific notation.

    >>> [write_share(v) for v in (1.0, 0.0312, 8e-4, 3e-7, float("nan"))]
    ['100%', '3.1%', '0.08%', '3e-05%', '–']
    """
    if not math.isfinite(value):
        return "–"
    percent = 100 * value
    if percent == 0:
        return "0%"
    if percent >= 10:
        return f"{percent:.0f}%"
    return f"{percent:.1f}%" if percent >= 0.1 else f"{percent:.1g}%"


def write_log_norm(value: float) -> str:
    """e^value with its exponent, also where it would overflow.

    >>> [write_log_norm(v) for v in (0.0, 2000.0, -1000.0, float("-inf"))]
    ['1.0', '3.9e+868', '5.1e-435', '0']
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "0" if value < 0 else "∞"
    decimal = value / math.log(10)  # e^value may overflow, its decimal exponent does not
    if -2 <= decimal < 4:
        return f"{math.exp(value):#.2g}".rstrip(".")
    exponent = math.floor(decimal)
    mantissa = round(10 ** (decimal - exponent), 1)
    if mantissa >= 10:  # 9.96 rounds to 10.0
        mantissa, exponent = 1.0, exponent + 1
    return f"{mantissa}e{exponent:+03d}"
