"""Positively homogeneous activations: the closed forms of their moments, theorems, and quadrature that is not told."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import mpmath
import numpy as np
import pytest

from sounding.activations import Activation, resolve
from sounding.theory.batchnorm import BatchNormPrediction, batchnorm
from sounding.theory.homogeneous import HomogeneousPrediction, homogeneous_batchnorm
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.arc_cosine import gamma_ratio
from sounding.theory.integrals.moments import Expectations
from sounding.theory.integrals.normalized import NormalizedLaw
from tolerance import TOLERANCE

SIZES = [4, 5, 6, 8, 32, 256, 1024, math.inf]


def hidden(name: str) -> Activation:
    """The activation without its degree, which sends it through tables, polynomials and cells."""
    return replace(resolve(name), degree=None, slopes=None)


def pairs(found: BatchNormPrediction, expected: HomogeneousPrediction) -> list[tuple[float, float]]:
    """Every number of a prediction beside that of the theorems."""
    return [
        (found.fixed_point.variance, expected.variance),
        (found.fixed_point.mu, expected.mu),
        *zip(astuple(found.forward_eigenvalues), astuple(expected.forward), strict=True),
        *zip(astuple(found.backward_eigenvalues), astuple(expected.backward), strict=True),
        (found.cross_batch.covariance, expected.cross_covariance),
        (found.cross_batch.eigenvalue, expected.cross_eigenvalue),
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["relu", "identity", "leaky_relu:0.2", "relu_power:1.5", "relu_power:2.3"])
def test_quadrature_and_closed_moments_meet_the_theorems(name, size):
    """Every number, against Theorems B.25, B.68, C.11, D.6 and F.2 of meanfield2019 with their lost π restored."""
    expected = homogeneous_batchnorm(resolve(name), size)
    for activation in (name, hidden(name)):
        for value, reference in pairs(batchnorm(activation, batch_size=size), expected):
            assert value == pytest.approx(reference, rel=TOLERANCE.two_routes, abs=TOLERANCE.exact)


@pytest.mark.parametrize(("degree", "size"), [(0.55, 4), (0.6, 9), (0.6, 16), (0.8, 24)])
def test_a_slope_with_an_integrable_singularity_keeps_its_stated_error(degree, size):
    """φ′² ~ x^(2α−2); the pair integrals state their larger error, and keep it."""
    found = batchnorm(hidden(f"relu_power:{degree}"), batch_size=size)
    closed = homogeneous_batchnorm(resolve(f"relu_power:{degree}"), size)
    for value, expected in zip(astuple(found.backward_eigenvalues), astuple(closed.backward), strict=True):
        assert abs(value - expected) <= min(3 * found.error, TOLERANCE.two_routes) * max(1.0, expected)


@pytest.mark.parametrize("name", ["relu", "leaky_relu:-0.4", "relu_power:0.55", "relu_power:2.5"])
@pytest.mark.parametrize(("size", "mu", "eps"), [(4, 1.0, 0.0), (6, 0.4, 1e-4), (6, 1.0, 0.3), (9, 0.02, 1.0)])
def test_closed_moments_of_powers_meet_panels_and_cells(name, size, mu, eps):
    """Every moment of one and two samples, relative to the one-coordinate moments that the second are added to."""
    law = NormalizedLaw(float(size), mu, eps)
    expectations = Expectations(Affine(resolve(name), 0.7, 0.0), float(size))
    (closed_line, closed_pair), _ = expectations.at(law)
    line, planar = expectations.line(law)[0], expectations.planar(law)[0]
    assert astuple(closed_line) == pytest.approx(astuple(line), rel=TOLERANCE.two_routes)
    beside = np.array(astuple(line))[[1, 2, 3, 3, 5, 6, 6, 7, 7, 6]]
    off = np.abs(np.array(astuple(closed_pair)) - np.array(astuple(planar)))
    assert (off <= TOLERANCE.two_routes * beside).all()
    assert expectations.spread(law)[0] == pytest.approx(line.square - planar.product, rel=TOLERANCE.two_routes)


@pytest.mark.parametrize("size", [8, 10**5])
@pytest.mark.parametrize("name", ["identity", "leaky_relu:0.1", "relu_power:0.75", "relu_power:1.5"])
def test_closed_forms_keep_their_digits_in_large_batches(name, size):
    """Theorems B.68 and C.11 of meanfield2019 against the moments: differences of ln Γ lost six digits at B = 1e5."""
    found, closed = batchnorm(name, batch_size=size), homogeneous_batchnorm(resolve(name), size)
    for part in ("L", "M"):
        for mine, theirs in (
            (found.forward_eigenvalues, closed.forward),
            (found.backward_eigenvalues, closed.backward),
        ):
            assert getattr(mine, part) == pytest.approx(getattr(theirs, part), rel=TOLERANCE.exact)


@pytest.mark.parametrize(("x", "shift"), [(2.2, -1.0), (3.0, 0.5), (40.0, -3.3), (5e4, 1.25), (1e5, -0.5)])
def test_ratios_of_gamma_functions_are_exact(x, shift):
    with mpmath.workdps(40):
        expected = float(mpmath.gamma(mpmath.mpf(x) + shift) / mpmath.gamma(mpmath.mpf(x)))
    assert gamma_ratio(x, shift) == pytest.approx(expected, rel=TOLERANCE.exact)


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("name", ["relu", "relu_power:1.5"])
def test_an_activation_that_hides_its_degree_gives_what_the_closed_form_gives(name, eps):
    """The same function by tables, polynomials and cells."""
    for size in (5, 32):
        found, expected = (batchnorm(phi, batch_size=size, eps=eps) for phi in (hidden(name), name))
        assert expected.method.name == "closed form"
        assert found.method.name in ("polynomials", "cells")
        assert found.to_dict()["backward_eigenvalues"] == pytest.approx(
            expected.to_dict()["backward_eigenvalues"], rel=TOLERANCE.two_routes
        )
        assert found.fixed_point.mu == pytest.approx(expected.fixed_point.mu, rel=TOLERANCE.two_routes)


@pytest.mark.parametrize(
    ("name", "size", "eps", "scale"), [("relu_power:0.75", 5, 0.5, 0.1), ("relu_power:0.6", 32, 2.0, 0.01)]
)
def test_a_power_below_one_never_collapses(name, size, eps, scale):
    """F(μ)/μ grows without bound as μ → 0, so that a fixed point exists for every eps, however small its μ."""
    found = batchnorm(name, batch_size=size, eps=eps, scale=scale)
    assert found.fixed_point.mu > 0
    assert math.isfinite(found.gradient_growth)
    law = NormalizedLaw(float(size), found.fixed_point.mu, eps)
    image = Expectations(Affine(hidden(name), scale, 0.0), float(size)).spread(law)[0]
    assert image == pytest.approx(found.fixed_point.mu, rel=TOLERANCE.two_routes)
    assert size != 5 or math.log(found.fixed_point.mu) == pytest.approx(-16.95, abs=TOLERANCE.percent)
