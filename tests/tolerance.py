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


TOLERANCE = Tolerance()


def assert_within_standard_errors(value: float, expected: float, stderr: float, allowance: float = 0.0) -> None:
    """|value − expected| ≤ 5 standard errors plus a stated allowance for finite width."""
    assert math.isfinite(value), f"got {value}"
    assert math.isfinite(stderr), f"got a standard error of {stderr}"
    bound = TOLERANCE.standard_errors * stderr + allowance
    assert abs(value - expected) <= bound, f"{value} is not {expected} within {bound} ({stderr=}, {allowance=})"
