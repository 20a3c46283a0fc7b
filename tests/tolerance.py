"""The one table of tolerances. Tests name an entry, never a literal."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """Relative tolerances by what is compared with what."""

    exact: float = 1e-12  # the same float64 arithmetic in another order
    closed_form: float = 1e-10  # float64 result against a closed form
    two_routes: float = 1e-9  # two deterministic methods for one number
    six_digits: float = 5e-7  # a published or tabulated value
    finite_difference: float = 1e-5  # an analytic derivative against differences
    float32_forward: float = 2e-4  # a float32 pass through tens of layers
    bfloat16_forward: float = 3e-2
    standard_errors: float = 5.0  # Monte Carlo
    finite_width: float = 5e-3  # a mean field value at width 1000 and batches up to 64
    rounding: float = 1e-14  # beside `exact`, for numbers near 0: some float64 roundings of numbers of size 1
    float32: float = 1e-6  # a float32 number that is read or computed twice
    float32_layer: float = 1e-5  # a layer or a few in float32, and logarithms of norms of such
    four_digits: float = 1e-4  # an iteration, or a float32 measure that takes differences of near numbers
    three_digits: float = 1e-3  # a law at a finite size or time, against its limit
    percent: float = 1e-2  # a first order, or a statistic of some ten thousand draws of a fixed seed
    drawn: float = 5e-2  # a statistic of some hundred draws of a fixed seed
    rough: float = 0.1  # an exponent or an asymptotic law, read off few points


TOLERANCE = Tolerance()


def assert_within_standard_errors(value: float, expected: float, stderr: float, allowance: float = 0.0) -> None:
    """|value − expected| ≤ 5 standard errors plus a stated allowance for finite width."""
    assert math.isfinite(value), f"got {value}"
    assert math.isfinite(stderr), f"got a standard error of {stderr}"
    bound = TOLERANCE.standard_errors * stderr + allowance
    assert abs(value - expected) <= bound, f"{value} is not {expected} within {bound} ({stderr=}, {allowance=})"
