"""The mean field without normalization: closed forms, two routes, networks, and everything that has no fixed point."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import erf

from sounding.activations import from_callable, resolve
from sounding.encoding import to_plain
from sounding.errors import UsageError
from sounding.theory.critical import critical, phase_diagram
from sounding.theory.length import moment_slope, second_moment, squared_slope
from sounding.theory.vanilla import depth_scale, trajectory, vanilla
from tolerance import TOLERANCE, assert_within_standard_errors

VARIANCES = [1e-8, 1e-3, 0.3, 1.0, 7.0, 400.0]


@pytest.mark.parametrize("q", VARIANCES)
def test_moments_in_closed_form(q: float) -> None:
    assert second_moment(resolve("relu"), q).value == pytest.approx(q / 2, rel=TOLERANCE.closed_form)
    assert squared_slope(resolve("relu"), q).value == pytest.approx(0.5, rel=TOLERANCE.closed_form)
    expected = 2 / math.pi * math.asin(2 * q / (1 + 2 * q))
    assert second_moment(resolve("erf"), q).value == pytest.approx(expected, rel=TOLERANCE.closed_form)
    expected = 4 / math.pi / math.sqrt(1 + 4 * q)
    assert squared_slope(resolve("erf"), q).value == pytest.approx(expected, rel=TOLERANCE.closed_form)
    assert second_moment(resolve("sin"), q).value == pytest.approx(-math.expm1(-2 * q) / 2, rel=TOLERANCE.closed_form)
    if q < 10:
        assert second_moment(resolve("exp"), q).value == pytest.approx(math.exp(2 * q), rel=TOLERANCE.closed_form)


@pytest.mark.parametrize("spec", ["tanh", "gelu", "hardtanh", "selu", "sigmoid", "exp"])
@pytest.mark.parametrize("q", [1e-3, 0.7, 3.0])
def test_the_slope_of_the_length_map_three_ways(spec: str, q: float) -> None:
    """E[φφ′y]/q, E[φ²(z² − 1)]/(2q), and a difference quotient of E φ²."""
    phi = resolve(spec)
    found = moment_slope(phi, q).value
    h = 1e-4 * q
    quotient = (second_moment(phi, q + h).value - second_moment(phi, q - h).value) / (2 * h)
    assert found == pytest.approx(quotient, rel=TOLERANCE.finite_difference)
    density, _ = quad(
        lambda z: float(phi(np.array([math.sqrt(q) * z]))[0]) ** 2 * (z**2 - 1) * math.exp(-(z**2) / 2), -14, 14,
        points=sorted({0.0, *(k / math.sqrt(q) for k in phi.kinks if abs(k) < 13 * math.sqrt(q))}), limit=400,
        epsabs=1e-13,
    )  # fmt: skip
    assert found == pytest.approx(density / math.sqrt(2 * math.pi) / (2 * q), rel=TOLERANCE.float32)


@pytest.mark.parametrize(("weight_std", "bias_std"), [(1.2, 0.2), (2.0, 0.05), (0.7, 0.4), (5.0, 1.0)])
def test_erf_networks_by_the_arcsine_law(weight_std: float, bias_std: float) -> None:
    """q*, χ₁, c* and χ from closed forms and scalar root finding alone."""
    w, b = weight_std**2, bias_std**2
    q = brentq(lambda q: w * 2 / math.pi * math.asin(2 * q / (1 + 2 * q)) + b - q, 1e-9, 100, xtol=1e-15, rtol=1e-14)
    found = vanilla("erf", weight_std=weight_std, bias_std=bias_std)
    assert found.variance == pytest.approx(q, rel=TOLERANCE.two_routes)
    chi = lambda c: w * 4 / math.pi / math.sqrt((1 + 2 * q) ** 2 - (2 * q * c) ** 2)  # noqa: E731
    assert found.chi_1 == pytest.approx(chi(1), rel=TOLERANCE.two_routes)
    c = 1.0
    if chi(1) > 1:
        step = lambda c: (w * 2 / math.pi * math.asin(2 * q * c / (1 + 2 * q)) + b) / q  # noqa: E731
        c = brentq(lambda c: step(c) - c, 0, 1 - 1e-5, xtol=1e-15, rtol=1e-14)
    assert found.correlation == pytest.approx(c, abs=TOLERANCE.two_routes)
    assert found.chi == pytest.approx(chi(c), rel=TOLERANCE.two_routes)
    slope = w * 4 / math.pi / ((1 + 2 * q) * math.sqrt(1 + 4 * q))
    assert found.variance_scale == pytest.approx(-1 / math.log(slope), rel=TOLERANCE.two_routes)
    assert found.correlation_scale == pytest.approx(-1 / math.log(chi(c)), rel=TOLERANCE.two_routes)
    assert found.phase == ("chaotic" if chi(1) > 1 else "ordered")


@pytest.mark.parametrize("slope", [0.0, 0.2, -0.5])
def test_rectifiers_have_a_linear_length_map(slope: float) -> None:
    """q* = σ_b²/(1 − a), a = χ₁ = σ_w²(1 + s²)/2."""
    found = vanilla(f"leaky_relu:{slope}", weight_std=1.1, bias_std=0.3)
    a = 1.21 * (1 + slope**2) / 2
    assert found.variance == pytest.approx(0.09 / (1 - a), rel=TOLERANCE.closed_form)
    assert found.chi_1 == pytest.approx(a, rel=TOLERANCE.closed_form)
    assert (found.correlation, found.phase, found.status) == (1.0, "ordered", "fixed")


def test_selu_keeps_unit_variance_and_orthogonal_samples() -> None:
    found = vanilla("selu", weight_std=1.0)
    assert found.variance == pytest.approx(1.0, rel=TOLERANCE.two_routes)
    assert found.correlation == pytest.approx(0.0, abs=TOLERANCE.two_routes)
    assert found.phase == "chaotic"


@pytest.mark.parametrize(
    ("spec", "weight_std", "bias_std", "status", "variance", "phase"),
    [
        ("relu", 2.0, 0.0, "diverging", math.inf, "chaotic"),
        ("relu", 2.0, 0.5, "diverging", math.inf, "chaotic"),
        ("relu", math.sqrt(2), 0.0, "marginal", 1.0, "critical"),
        ("relu", math.sqrt(2), 0.1, "diverging", math.inf, "critical"),
        ("relu", 1.0, 0.0, "vanishing", 0.0, "ordered"),
        ("tanh", 0.9, 0.0, "vanishing", 0.0, "ordered"),
        ("tanh", 1.0, 0.0, "vanishing", 0.0, "critical"),
        ("identity", 1.0, 0.0, "marginal", 1.0, "critical"),
        ("gelu", 3.0, 0.2, "diverging", math.inf, "chaotic"),
        ("exp", 1.0, 0.0, "diverging", math.inf, "chaotic"),
        ("relu_power:2", 2.0, 0.1, "diverging", math.inf, "chaotic"),
        ("hermite:2", 1.2, 0.0, "diverging", math.inf, "chaotic"),
    ],
)  # fmt: skip
def test_without_an_ordinary_fixed_point_the_result_says_so(
    spec: str, weight_std: float, bias_std: float, status: str, variance: float, phase: str
) -> None:
    found = vanilla(spec, weight_std=weight_std, bias_std=bias_std)
    assert (found.status, found.variance, found.phase) == (status, variance, phase)
    assert found.note
    assert found.note in str(found)
    json.dumps(to_plain(found.to_dict()), allow_nan=False)


@pytest.mark.parametrize("spec", ["relu", "leaky_relu:0.3", "elu", "selu", "gelu", "silu", "softplus"])
def test_a_diverging_variance_has_the_correlation_of_what_the_activation_becomes_far_out(spec: str) -> None:
    """Far out each of these is a leaky ReLU, for which correlations go to 1 and χ is χ₁; ELU nears it like 1/√q."""
    found = vanilla(spec, weight_std=2.5, bias_std=0.3)
    assert (found.correlation, found.chi, found.correlation_scale) == (1.0, found.chi_1, math.inf)


@pytest.mark.parametrize("weight_std", [1.0, 30.0])
def test_a_falling_length_map_settles_all_the_same(weight_std: float) -> None:
    """A bump makes E φ(√q z)² fall with q, but no faster than 1/√q: the slope stays above −½ and nothing cycles."""
    bump = from_callable(lambda x: np.exp(-4 * x**2), name="bump")
    found = vanilla(bump, weight_std=weight_std)
    assert found.status == "fixed"
    assert -0.5 < found.fixed_points[0].slope < 0
    path = trajectory(bump, weight_std=weight_std, depth=40).series("mean_square").value
    assert path[-1] == pytest.approx(found.variance, rel=TOLERANCE.two_routes)


def test_the_start_decides_between_two_fixed_points() -> None:
    """relu_power:2 has q′ = σ_w²(3/2)q² + σ_b²: the smaller root attracts, the larger is the watershed."""
    w, b = 0.5**2, 0.01
    small, large = np.sort(np.roots([1.5 * w, -1, b]))
    low = vanilla("relu_power:2", weight_std=0.5, bias_std=0.1, start=1.0)
    assert [point.variance for point in low.fixed_points] == pytest.approx([small, large], rel=TOLERANCE.two_routes)
    assert [point.attracting for point in low.fixed_points] == [True, False]
    assert low.variance == pytest.approx(small, rel=TOLERANCE.two_routes)
    assert vanilla("relu_power:2", weight_std=0.5, bias_std=0.1, start=large * 1.01).status == "diverging"


def test_fixed_points_that_nearly_touch_are_both_found() -> None:
    """Just before the two roots of σ_w² e^{2q} = q merge at σ_w² = 1/(2e)."""
    w = (1 - 1e-4) / (2 * math.e)
    found = vanilla("exp", weight_std=math.sqrt(w), start=0.1)
    assert len(found.fixed_points) == 2
    for point in found.fixed_points:
        assert w * math.exp(2 * point.variance) == pytest.approx(point.variance, rel=TOLERANCE.two_routes)
    assert vanilla("exp", weight_std=math.sqrt((1 + 1e-4) / (2 * math.e)), start=0.1).status == "diverging"


@given(weight_std=st.floats(0.2, 6), bias_std=st.floats(0.01, 2))
@settings(max_examples=8)
def test_the_fixed_point_is_one_and_the_phase_reads_chi(weight_std: float, bias_std: float) -> None:
    found = vanilla("tanh", weight_std=weight_std, bias_std=bias_std)
    phi = resolve("tanh")
    again = weight_std**2 * second_moment(phi, found.variance).value + bias_std**2
    assert again == pytest.approx(found.variance, rel=TOLERANCE.two_routes)
    assert found.phase == ("ordered" if found.chi_1 < 1 else "chaotic")
    assert (found.correlation < 1) == (found.phase == "chaotic")
    assert found.chi <= 1 + TOLERANCE.two_routes
    assert found.chi <= found.chi_1 * (1 + TOLERANCE.exact)


@pytest.mark.parametrize(
    ("spec", "weight_std"),
    [("tanh", 1.0), ("erf", math.sqrt(math.pi) / 2), ("relu", math.sqrt(2)), ("leaky_relu:0.1", math.sqrt(2 / 1.01)),
     ("sin", 1.0), ("hardtanh", 1.0), ("elu", 1.0), ("identity", 1.0), ("gelu", 2.0), ("silu", 2.0)],
)  # fmt: skip
def test_the_edge_of_chaos_without_a_bias(spec: str, weight_std: float) -> None:
    assert critical(spec).weight_std == pytest.approx(weight_std, rel=TOLERANCE.two_routes)


@pytest.mark.parametrize("bias_std", [1e-5, 0.01, 0.2, 1.0, 3.0])
def test_the_edge_of_erf_from_its_closed_forms(bias_std: float) -> None:
    """σ_w² = (π/4)√(1+4q) with q − σ_b² = ½√(1+4q) arcsin(2q/(1+2q))."""
    residual = lambda q: q - 0.5 * math.sqrt(1 + 4 * q) * math.asin(2 * q / (1 + 2 * q)) - bias_std**2  # noqa: E731
    q = brentq(residual, 1e-5, 1e3, xtol=1e-15, rtol=1e-14)
    found = critical("erf", bias_std=bias_std)
    # at tiny bias q is a cube root of rounding; the weight is not
    assert found.weight_std == pytest.approx(math.sqrt(math.pi / 4 * math.sqrt(1 + 4 * q)), rel=TOLERANCE.two_routes)


@pytest.mark.parametrize("spec", ["tanh", "elu", "selu", "sigmoid", "hardtanh", "sin"])
@pytest.mark.parametrize("bias_std", [0.05, 0.5])
def test_at_the_edge_the_mean_field_is_critical(spec: str, bias_std: float) -> None:
    edge = critical(spec, bias_std=bias_std)
    assert edge.exists
    assert edge.weight_std is not None
    found = vanilla(spec, weight_std=edge.weight_std, bias_std=bias_std)
    assert found.phase == "critical"
    assert found.variance == pytest.approx(edge.variance, rel=TOLERANCE.float32)
    assert found.correlation_scale == math.inf
    assert vanilla(spec, weight_std=edge.weight_std * 0.99, bias_std=bias_std).phase == "ordered"
    assert vanilla(spec, weight_std=edge.weight_std * 1.01, bias_std=bias_std).phase == "chaotic"


@pytest.mark.parametrize(
    ("spec", "bias_std", "why"),
    [
        ("softplus", 0.0, "no variance"), ("exp", 0.1, "repels"), ("gelu", 0.2, "repels"),
        ("relu_power:2", 0.1, "repels"),
        ("relu_power:2", 0.0, "no variance"), ("relu_power:0.5", 0.1, "infinite"),
        (from_callable(np.sign), 0.1, "infinite"),
    ],
)  # fmt: skip
def test_where_no_edge_exists_the_result_says_why(spec: object, bias_std: float, why: str) -> None:
    found = critical(spec, bias_std=bias_std)  # type: ignore[arg-type]
    assert not found.exists
    assert found.weight_std is None
    assert why in found.note
    assert "no edge of chaos" in str(found)


def test_the_phase_diagram_is_the_edge_seen_from_afar() -> None:
    weights, biases = [0.8, 1.1, 1.4, 2.0], [0.05, 0.3]
    found = phase_diagram("tanh", weights, bias_stds=biases)
    assert found.chi_1.shape == (2, 4)
    for i, b in enumerate(biases):
        edge = critical("tanh", bias_std=b).weight_std
        assert edge is not None
        assert found.phase[i].tolist() == ["ordered" if w < edge else "chaotic" for w in weights]
    single = vanilla("tanh", weight_std=1.4, bias_std=0.3)
    assert found.chi_1[1, 2] == pytest.approx(single.chi_1, rel=TOLERANCE.two_routes)
    assert found.variance[1, 2] == pytest.approx(single.variance, rel=TOLERANCE.two_routes)
    json.dumps(to_plain(found.to_dict()), allow_nan=False)


@pytest.mark.parametrize(
    ("spec", "weight_std", "bias_std"), [("tanh", 2.5, 0.2), ("gelu", 1.2, 0.3), ("erf", 0.8, 0.5)]
)
def test_trajectories_reach_the_fixed_point(spec: str, weight_std: float, bias_std: float) -> None:
    path = trajectory(spec, weight_std=weight_std, bias_std=bias_std, depth=60, variance=2.0, correlation=-0.4)
    found = vanilla(spec, weight_std=weight_std, bias_std=bias_std)
    assert path.value("mean_square", layer=-1).value == pytest.approx(found.variance, rel=TOLERANCE.two_routes)
    assert path.value("mean_cosine", layer=-1).value == pytest.approx(found.correlation, abs=TOLERANCE.four_digits)
    assert path.sources == ("theory",)


def test_a_trajectory_ends_where_its_variance_leaves_float64() -> None:
    grown = trajectory("exp", weight_std=1.0, depth=10)
    assert "diverged_at" in grown.settings
    assert np.isfinite(grown.series("mean_square").value).all()
    gone = trajectory("relu_power:3", weight_std=0.1, depth=50, variance=0.01)
    assert "vanished_at" in gone.settings


def test_wide_networks_follow_variance_and_correlation() -> None:
    generator = np.random.default_rng(7)
    width, networks, depth, weight_std, bias_std = 800, 16, 5, 1.5, 0.3
    squares, cosines = [], []
    for _ in range(networks):
        first, second = generator.standard_normal((2, width))
        z = np.stack([first, 0.6 * first + 0.8 * second])
        for _ in range(depth):
            weights = generator.standard_normal((width, width)) * weight_std / math.sqrt(width)
            z = np.tanh(z) @ weights + bias_std * generator.standard_normal(width)
        squares.append((z**2).mean())
        cosines.append(z[0] @ z[1] / np.linalg.norm(z[0]) / np.linalg.norm(z[1]))
    path = trajectory("tanh", weight_std=weight_std, bias_std=bias_std, depth=depth, correlation=0.6)
    for measure, values in (("mean_square", squares), ("mean_cosine", cosines)):
        stderr = float(np.std(values, ddof=1)) / math.sqrt(networks)
        expected = path.value(measure, layer=-1).value
        assert_within_standard_errors(float(np.mean(values)), expected, stderr, allowance=TOLERANCE.finite_width)


@given(factor=st.floats(1e-6, 0.999))
def test_depth_scales(factor: float) -> None:
    assert math.exp(-1 / depth_scale(factor)) == pytest.approx(factor, rel=TOLERANCE.closed_form)
    assert depth_scale(-factor) == depth_scale(factor)


def test_depth_scales_at_the_edges() -> None:
    assert depth_scale(0.0) == 0.0
    assert depth_scale(1.0) == depth_scale(1.5) == math.inf
    assert math.isnan(depth_scale(math.nan))


def test_a_callable_gives_what_the_table_gives() -> None:
    own = from_callable(lambda x: erf(x), name="own")
    mine, known = (vanilla(a, weight_std=1.3, bias_std=0.1) for a in (own, "erf"))
    for field in ("variance", "correlation", "chi_1", "chi", "variance_scale", "correlation_scale"):
        assert getattr(mine, field) == pytest.approx(getattr(known, field), rel=TOLERANCE.two_routes)
    homogeneous = from_callable(lambda x: np.maximum(x, 0.0))
    assert vanilla(homogeneous, weight_std=math.sqrt(2)).status == "marginal"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vanilla("tanh", weight_std=0.0), "weight_std must be"),
        (lambda: vanilla("tanh", weight_std=-1.0), "weight_std must be"),
        (lambda: vanilla("tanh", weight_std=math.nan), "weight_std must be"),
        (lambda: vanilla("tanh", weight_std="2"), "weight_std must be"),  # type: ignore[arg-type]
        (lambda: vanilla("tanh", weight_std=1.0, bias_std=-0.1), "bias_std must be"),
        (lambda: vanilla("tanh", weight_std=1.0, start=0.0), "start variance"),
        (lambda: vanilla(lambda x: 0 * x, weight_std=1.0), "0 almost everywhere"),
        (lambda: vanilla("nope", weight_std=1.0), "unknown activation"),
        (lambda: critical("tanh", bias_std=math.inf), "bias_std must be"),
        (lambda: phase_diagram("tanh", [], bias_stds=[0.1]), "at least one"),
        (lambda: trajectory("tanh", weight_std=1.0, depth=-2), "depth to be"),
        (lambda: trajectory("tanh", weight_std=1.0, depth=2, correlation=2.0), "must lie in"),
        (lambda: trajectory("tanh", weight_std=1.0, depth=2, variance=0.0), "start variance"),
    ],
)  # fmt: skip
def test_bad_input_says_what_was_expected(call: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()  # type: ignore[operator]


def test_a_linear_network_at_the_edge_keeps_every_correlation_and_says_so():
    assert "every correlation is a fixed point" in vanilla("identity", weight_std=1.0).note
    assert "every correlation is a fixed point" in vanilla("leaky_relu:1", weight_std=1.0).note
    for other in (vanilla("relu", weight_std=math.sqrt(2)), vanilla("identity", weight_std=0.9, bias_std=0.1)):
        assert "correlation" not in other.note


@pytest.mark.parametrize("predict", [critical, lambda phi, bias_std: vanilla(phi, weight_std=1.0, bias_std=bias_std)])
@pytest.mark.parametrize("bias_std", [1e154, 1e300])
def test_a_deviation_whose_variance_overflows_is_refused(predict: Callable[..., object], bias_std: float) -> None:
    with pytest.raises(UsageError, match="bias_std must be at most"):
        predict("tanh", bias_std=bias_std)


def test_the_largest_deviation_gives_finite_numbers() -> None:
    """Far out tanh is a sign: E φ² = 1 and E φ′² = (4/3)/√(2πq), so that the edge lies at σ_w² = (3/4) √(2πq)."""
    found = critical("tanh", bias_std=1e100)
    assert found.variance == pytest.approx(1e200, rel=TOLERANCE.closed_form)
    assert found.weight_std == pytest.approx(
        math.sqrt(0.75 * math.sqrt(2 * math.pi * 1e200)), rel=TOLERANCE.closed_form
    )


@pytest.mark.parametrize("bias_std", [1e5, 1e6, 1e100])
def test_a_sine_far_beyond_its_period_is_refused(bias_std: float) -> None:
    """Its integrals would be wrong or take minutes; a tanh of the same size is easy."""
    with pytest.raises(UsageError, match="sin oscillates"):
        critical("sin", bias_std=bias_std)
    with pytest.raises(UsageError, match="sin oscillates"):
        vanilla("sin", weight_std=1.0, bias_std=bias_std)
    assert critical("tanh", bias_std=min(bias_std, 1e6)).exists
