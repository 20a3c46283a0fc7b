"""Quadrature against closed forms, mpmath and itself: kinks, gains, fractional powers, small spheres, awkward input."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gamma

from sounding.activations import names, resolve
from sounding.errors import NumericalError, UsageError
from sounding.theory import integrals
from sounding.theory.integrals.arc_cosine import arc_cosine
from sounding.theory.quadrature import (
    gaussian_joint_mean,
    gaussian_mean,
    gaussian_pair_mean,
    sphere_joint_mean,
    sphere_mean,
    sphere_pair_mean,
)
from tolerance import TOLERANCE

GAINS = (0.01, 0.1, 1.0, 5.0, 20.0)


def close(value, expected, tolerance=TOLERANCE.closed_form):
    assert value == pytest.approx(expected, rel=tolerance, abs=tolerance * 1e-3)


@pytest.mark.parametrize("gain", GAINS)
def test_the_square_of_erf_is_an_arcsine_at_every_gain(gain):
    erf = resolve("erf").scaled(gain)
    found = gaussian_mean(lambda z: erf(z) ** 2, length=erf.length, center=erf.center)
    close(found.value, 2 / math.pi * math.asin(2 * gain**2 / (1 + 2 * gain**2)))
    assert found.error <= TOLERANCE.closed_form * found.value


@pytest.mark.parametrize("gain", GAINS)
def test_steep_slopes_agree_with_mpmath(gain):
    """E[tanh′(gz)²], where Gauss–Hermite with 200 nodes is off by 59% at gain 10."""
    tanh = resolve("tanh").scaled(gain)
    with mpmath.workdps(30):
        cuts = sorted({s * x for s in (1, -1) for x in (0, 0.1 / gain, 1 / gain, 4 / gain, 20 / gain, 12) if x <= 12})
        expected = mpmath.quad(lambda z: (gain * mpmath.sech(gain * z) ** 2) ** 2 * mpmath.npdf(z), cuts)
    close(gaussian_mean(lambda z: tanh.derivative(z) ** 2, length=tanh.length).value, float(expected))


@pytest.mark.parametrize("gain", [0.01, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("correlation", [-1.0, -0.9, 0.0, 0.3, 1 - 1e-9, 1.0])
def test_pairs_of_erf_are_an_arcsine_up_to_full_correlation(gain, correlation):
    erf = resolve("erf").scaled(gain)
    found = gaussian_pair_mean(erf, erf, correlation, length=erf.length)
    expected = 2 / math.pi * math.asin(2 * gain**2 * correlation / (1 + 2 * gain**2))
    assert found.value == pytest.approx(expected, rel=TOLERANCE.closed_form, abs=TOLERANCE.closed_form * 1e-2)


@pytest.mark.parametrize("gain", [0.1, 1.0, 3.0])
def test_pairs_of_sines_are_exponentials(gain):
    found = gaussian_pair_mean(np.sin, np.sin, 0.7, std=gain)
    expected = math.exp(-(gain**2)) * math.sinh(0.7 * gain**2)
    assert found.value == pytest.approx(expected, rel=TOLERANCE.closed_form, abs=TOLERANCE.exact)


@given(st.floats(-1, 1))
@settings(max_examples=25, deadline=None)
def test_pairs_of_relus_are_the_arc_cosine_kernel(correlation):
    relu = resolve("relu")
    found = gaussian_pair_mean(relu, relu, correlation, kinks_f=(0.0,))
    expected = 0.5 * arc_cosine(correlation, degree=1.0)
    assert abs(found.value - expected) <= TOLERANCE.closed_form
    assert abs(found.value - expected) <= found.error + TOLERANCE.exact


@pytest.mark.parametrize("alpha", [0.51, 0.6, 0.75, 1.0, 1.5, 2.5])
def test_fractional_powers_at_a_kink_are_exact(alpha):
    """φ′² ~ x^(2α−2) is singular and integrable for α in (1/2, 1): 2^(α−2) α² Γ(α − 1/2)/√π."""
    phi = resolve(f"relu_power:{alpha}")
    found = gaussian_mean(lambda z: phi.derivative(z) ** 2, kinks=phi.kinks)
    close(found.value, alpha**2 * 2 ** (alpha - 2) * gamma(alpha - 0.5) / math.sqrt(math.pi))


def test_a_kink_away_from_the_origin_keeps_its_singularity():
    """The same integral in the coordinate of the kink (mean, std) and in a shifted one agree to the error stated."""
    phi = resolve("relu_power:0.6")
    exact = gaussian_mean(lambda y: phi.derivative(y) ** 2, mean=0.5, std=2.0, kinks=(0.0,))
    moved = phi.scaled(2.0, 0.5)
    found = gaussian_mean(lambda z: (moved.derivative(z) / 2.0) ** 2, kinks=moved.kinks, length=moved.length)
    assert found.value == pytest.approx(exact.value, rel=TOLERANCE.six_digits)
    assert abs(found.value - exact.value) <= 10 * (found.error + exact.error)


@pytest.mark.parametrize("name", [n.split(":")[0] for n in names() if ":" not in n or n.startswith(("leaky", "elu"))])
def test_every_activation_agrees_with_mpmath_when_shifted(name):
    """E[φ(1.3z + 0.4)²] with the kink moved, against adaptive mpmath split at the kink."""
    phi = resolve(name)
    found = gaussian_mean(lambda y: phi(y) ** 2, mean=0.4, std=1.3, kinks=phi.kinks, length=phi.length)
    cuts = sorted({-10.0, -4.0, -1.0, 1.0, 4.0, 10.0, *((k - 0.4) / 1.3 for k in phi.kinks)})
    with mpmath.workdps(20):

        def integrand(z):
            return float(phi(np.array([1.3 * float(z) + 0.4]))[0]) ** 2 * mpmath.npdf(z)

        expected = float(mpmath.quad(integrand, cuts))
    close(found.value, expected, TOLERANCE.two_routes)


@pytest.mark.parametrize("size", [4, 5, 6, 7, 32, 1024])
def test_even_moments_of_the_sphere_are_exact(size):
    """E x₁^(2k) = (B−1)^k (2k−1)!!/((B−1)(B+1)…(B+2k−3))."""
    moment = 1.0
    for k in range(1, 6):
        moment *= (size - 1) * (2 * k - 1) / (size - 1 + 2 * (k - 1))
        close(sphere_mean(lambda x, k=k: x ** (2 * k), size).value, moment)


@pytest.mark.parametrize("size", [4, 5, 6, 7, 32, 1024, math.inf])
def test_relu_on_the_sphere_is_one_half_and_the_arc_cosine_kernel(size):
    relu = resolve("relu")
    close(sphere_mean(lambda x: relu(x) ** 2, size, kinks=(0.0,)).value, 0.5)
    rho = -1 / (size - 1)
    close(sphere_pair_mean(relu, relu, size, kinks_f=(0.0,)).value, 0.5 * arc_cosine(rho, degree=1.0))


@pytest.mark.parametrize("size", [4, 5, 9, 40])
def test_the_pair_agrees_with_the_double_integral_of_the_theorem(size):
    """meanfield2019, Theorem 4, by a plain tensor rule over its two angles."""
    phi = resolve("softplus")
    found = sphere_pair_mean(phi, phi, size).value
    t1, w1 = np.polynomial.legendre.leggauss(120)
    theta = 0.5 * math.pi * (t1 + 1)
    weight = 0.5 * math.pi * w1
    first = -math.sqrt((size - 1) / size) * np.cos(theta)[:, None]
    second = np.cos(theta)[:, None] / math.sqrt(size * (size - 1)) - math.sqrt((size - 2) / (size - 1)) * np.sin(theta)[
        :, None
    ] * np.cos(theta)
    measure = (weight * np.sin(theta) ** (size - 3))[:, None] * (weight * np.sin(theta) ** (size - 4))
    values = phi(math.sqrt(size) * first) * phi(math.sqrt(size) * second)
    expected = (size - 3) / (2 * math.pi) * float((measure * values).sum())
    close(found, expected, TOLERANCE.two_routes)


def test_joint_functions_need_not_be_products():
    found = sphere_joint_mean(lambda x, y: (x - y) ** 2, 6)
    close(found.value, 2 * (1 + 1 / 5))
    found = gaussian_joint_mean(lambda x, y: np.maximum(x, 0.0) * (y > 0), 0.0, kinks=((0.0,), (0.0,)))
    close(found.value, 0.5 / math.sqrt(2 * math.pi))


def test_pairs_take_their_own_mean_and_standard_deviation():
    found = gaussian_pair_mean(lambda x: x, lambda y: y, 0.3, mean=(1.0, -2.0), std=(2.0, 0.5))
    close(found.value, -2.0 + 0.3 * 2.0 * 0.5)


def test_kinks_that_cross_inside_the_plane_do_not_cost_digits():
    """Two kinked functions with kinks off zero and different from each other, against a fine tensor rule on panels."""
    hard = resolve("hardtanh")
    elu = resolve("elu").scaled(1.5, -0.7)
    found = gaussian_pair_mean(hard, elu, 0.4, kinks_f=hard.kinks, kinks_g=elu.kinks)

    def inner(x):
        mean, std = 0.4 * x, math.sqrt(1 - 0.16)
        return gaussian_mean(elu, mean=mean, std=std, kinks=elu.kinks).value

    outer = gaussian_mean(lambda z: hard(z) * np.array([inner(float(x)) for x in z]), kinks=hard.kinks)
    close(found.value, outer.value, TOLERANCE.two_routes)


@pytest.mark.parametrize("function", [lambda x: np.exp(x * x), lambda x: np.exp(x * x / 2), lambda x: 1.0 / x])
def test_an_expectation_that_does_not_exist_is_an_error(function):
    with pytest.raises(NumericalError):
        gaussian_mean(function, kinks=(0.0,))


def test_a_growing_integrand_that_has_a_mean_is_followed_outwards():
    close(gaussian_mean(lambda x: np.exp(10 * x)).value, math.exp(50))
    close(gaussian_mean(lambda x: np.exp(0.4 * x * x)).value, 1 / math.sqrt(0.2))


def test_nan_and_shape_and_range_are_reported():
    with pytest.raises(NumericalError, match="not finite"):
        gaussian_mean(lambda x: np.where(x > 1, np.nan, x))
    with pytest.raises(UsageError, match="shape"):
        gaussian_mean(lambda x: np.float64(1.0))
    with pytest.raises(UsageError, match="correlation"):
        gaussian_pair_mean(np.sin, np.sin, 1.5)
    for size in (3, 4.5, -1, "many", math.nan, True):
        with pytest.raises(UsageError, match="batch"):
            sphere_mean(np.sin, size)
    with pytest.raises(UsageError, match="std"):
        gaussian_mean(np.sin, std=0.0)


@pytest.mark.parametrize(("batch_size", "mean", "std"), [(5, -0.7, 2.5), (8, -0.7, 2.5), (12, 0.82, 2.44)])
def test_where_a_function_is_flat_only_the_radius_is_cut(batch_size, mean, std):
    # between its kinks' curves a clipped product is constant, and a cut of the angle leaves its error as it is
    def clipped(y):
        return np.clip(y, -1, 1) + 0.7

    found = sphere_pair_mean(clipped, clipped, batch_size, mean=mean, std=std, kinks_f=(-1.0, 1.0))
    assert found.evaluations < 200_000
    assert found.error < TOLERANCE.closed_form


def test_integrals_know_nothing_of_networks():
    """The room of numerics imports functions and errors, and nothing else of the house."""
    room = Path(integrals.__file__).parent
    allowed = ("sounding.theory.integrals", "sounding.activations", "sounding.errors")
    for path in room.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sounding"):
                assert node.module.startswith(allowed), f"{path.name} imports {node.module}"
