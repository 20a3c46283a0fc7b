"""Batch normalization with callables: kinks far out, functions too wild for a small batch, numerical slopes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.tolerance import TOLERANCE

from sounding.activations import from_callable
from sounding.errors import NumericalError
from sounding.theory.batchnorm import batchnorm


def test_kinks_of_a_callable_are_found_as_far_out_as_the_batch_reaches():
    """|sin x| at scale 5 has kinks beyond the first search, which ends at 12: against the same with its kinks given."""
    found = batchnorm(from_callable(lambda x: np.abs(np.sin(x)), name="wave"), batch_size=32, scale=5.0)
    given = from_callable(
        lambda x: np.abs(np.sin(x)),
        name="wave",
        kinks=[k * math.pi for k in range(-13, 14)],
        derivative=lambda x: np.cos(x) * np.sign(np.sin(x)),
    )
    expected = batchnorm(given, batch_size=32, scale=5.0)
    assert found.gradient_growth == pytest.approx(expected.gradient_growth, rel=TOLERANCE.two_routes)
    assert max(found.error, expected.error) < TOLERANCE.two_routes


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_what_varies_too_fast_for_a_small_batch_is_no_prediction(eps):
    """68 kinks cut the plane of two samples into too many cells: an error at once, not a number with an error of 5%."""
    wave = from_callable(lambda x: np.abs(np.sin(3 * x)), name="wave")
    with pytest.raises(NumericalError, match="kinks within reach"):
        batchnorm(wave, batch_size=4, eps=eps, scale=20.0)
    assert batchnorm(wave, batch_size=4, eps=eps).error < TOLERANCE.two_routes


def test_a_numerical_slope_costs_no_digits_of_a_narrow_function():
    """x/(1 + |x|) at scale 20: most of its slopes are small against the largest, for which the error is stated."""
    known = from_callable(
        lambda x: x / (1 + np.abs(x)), name="softsign", derivative=lambda x: 1 / (1 + np.abs(x)) ** 2, kinks=[0.0]
    )
    searched = from_callable(lambda x: x / (1 + np.abs(x)), name="softsign")
    for size in (4, 64):
        a, b = (batchnorm(phi, batch_size=size, eps=0.1, scale=20.0, shift=2.0) for phi in (known, searched))
        assert abs(a.gradient_growth / b.gradient_growth - 1) <= 2 * (a.error + b.error) < TOLERANCE.two_routes
