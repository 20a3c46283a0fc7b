"""Numbers for a narrow column: few digits, and never an overflow."""

from __future__ import annotations

import math


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


def write_share(value: float) -> str:
    """A share in percent, small ones in scientific notation.

    >>> [write_share(v) for v in (1.0, 0.0312, 3e-7, float("nan"))]
    ['100%', '3.1%', '3e-05%', '–']
    """
    if not math.isfinite(value):
        return "–"
    percent = 100 * value
    if percent == 0:
        return "0%"
    if percent >= 10:
        return f"{percent:.0f}%"
    return f"{percent:.1f}%" if percent >= 0.1 else f"{percent:.0e}%"


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
