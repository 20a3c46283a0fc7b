"""Kernel maps: closed forms, two routes to every number, the theorem's cases and bounds, and what it cannot do."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import gamma

from sounding.activations import from_callable, resolve
from sounding.encoding import to_plain
from sounding.errors import UsageError
from sounding.theory.bounds.kernel_maps import theorem_5_11
from sounding.theory.integrals.hermite import expand, hermite_values
from sounding.theory.integrals.panels import composite
from sounding.theory.kernel import NORMS, Kernel, evaluate, kappa, kernel, normalized, slope_at, slope_by_density
from sounding.theory.kernel_path import bound, interpolate, sequence
from tolerance import TOLERANCE, assert_within_standard_errors

RHOS = [-1.0, -0.7, -0.2, 0.0, 0.3, 0.8, 0.97, 0.9999, 1.0]
SPECS = ["relu", "leaky_relu:0.1", "tanh", "erf", "sin", "sigmoid", "softplus", "exp", "gelu", "silu", "elu", "selu",
         "hardtanh", "relu_power:0.5", "relu_power:0.6", "relu_power:2", "hermite:3"]  # fmt: skip


def arc_cosine(rho: float) -> float:
    return (math.sqrt(1 - rho**2) + (math.pi - math.acos(rho)) * rho) / math.pi


CLOSED = {
    "relu": (arc_cosine, lambda r: 1 - math.acos(r) / math.pi),
    "erf": (
        lambda r: math.asin(2 * r / 3) / math.asin(2 / 3),
        lambda r: (2 / 3) / math.sqrt(1 - (2 * r / 3) ** 2) / math.asin(2 / 3),
    ),
    "exp": (lambda r: math.exp(r - 1), lambda r: math.exp(r - 1)),
    "sin": (lambda r: math.sinh(r) / math.sinh(1), lambda r: math.cosh(r) / math.sinh(1)),
    "hermite:1": (lambda r: r, lambda r: 1.0),
    "hermite:2": (lambda r: r**2, lambda r: 2 * r),
    "hermite:5": (lambda r: r**5, lambda r: 5 * r**4),
    "relu_power:2": (
        lambda r: (3 * r * math.sqrt(1 - r**2) + (1 + 2 * r**2) * (math.pi - math.acos(r))) / (3 * math.pi),
        lambda r: 4 / 3 * arc_cosine(r),
    ),
}


@pytest.mark.parametrize("spec", CLOSED)
@pytest.mark.parametrize("rho", RHOS)
def test_kernel_maps_and_slopes_in_closed_form(spec: str, rho: float) -> None:
    """Arc-cosine kernels (Cho and Saul), arcsine law (Williams), and Mehler's formula for the rest."""
    value, slope = CLOSED[spec]
    assert evaluate(spec, rho).value == pytest.approx(value(rho), rel=TOLERANCE.closed_form, abs=TOLERANCE.exact)
    assert evaluate(spec, rho, order=1).value == pytest.approx(
        slope(rho), rel=TOLERANCE.closed_form, abs=TOLERANCE.closed_form
    )


@pytest.mark.parametrize("rho", [-0.9, 0.0, 0.5, 0.999])
def test_the_arcsine_law_of_a_jump(rho: float) -> None:
    """κ = (2/π) arcsin ρ for the sign; its slope is infinite at 1 and comes from the density elsewhere."""
    sign = from_callable(np.sign)
    assert evaluate(sign, rho).value == pytest.approx(2 / math.pi * math.asin(rho), abs=TOLERANCE.closed_form)
    expected = 2 / math.pi / math.sqrt(1 - rho**2)
    assert evaluate(sign, rho, order=1).value == pytest.approx(expected, rel=TOLERANCE.two_routes)
    assert kernel(sign).slope_one == math.inf


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rho", [-0.8, 0.25, 0.85])
def test_the_hermite_series_agrees_with_quadrature_in_the_plane(spec: str, rho: float) -> None:
    """Corollary 5.7: κ(ρ) = Σ c_k²ρ^k, and term by term its derivative."""
    neuron = normalized(spec)
    squares = (np.array(expand(spec, count=400).coefficients) / neuron.std) ** 2
    k = np.arange(400)
    assert kappa(neuron, rho).value == pytest.approx(math.fsum(squares * rho**k), abs=TOLERANCE.two_routes)
    slope = math.fsum(k[1:] * squares[1:] * rho ** (k[1:] - 1.0))
    assert slope_at(neuron, rho).value == pytest.approx(slope, abs=TOLERANCE.two_routes)
    assert slope_by_density(neuron, rho).value == pytest.approx(slope, abs=TOLERANCE.two_routes)


@pytest.mark.parametrize("spec", ["hardtanh", "selu", "gelu"])
@pytest.mark.parametrize("rho", [-0.99999, -0.98, -0.3, 0.6, 0.9, 0.99999])
def test_one_coordinate_after_the_other_agrees_with_the_plane(spec: str, rho: float) -> None:
    """Y = ρX + √(1−ρ²)W: each kink is one edge, also near ±1, where in the plane two kinks run side by side."""
    neuron, phi = normalized(spec), resolve(spec)
    free, steps = math.sqrt(1 - rho**2), 4.0 ** np.arange(-1, 10)
    turns = [kink / rho + sign * free * step for kink in phi.kinks for step in steps for sign in (1, -1)]
    edges = np.unique(
        np.clip([*np.linspace(-10, 10, 21), *phi.kinks, *(kink / rho for kink in phi.kinks), *turns], -10, 10)
    )
    x, weight = (part.ravel() for part in composite(edges, 22))
    lines = (np.array(phi.kinks) - rho * x[:, None]) / free
    inner = np.concatenate([np.broadcast_to(np.linspace(-10, 10, 21), (x.size, 21)), np.clip(lines, -10, 10)], axis=1)
    w, inner_weight = (part.reshape(x.size, -1) for part in composite(np.sort(inner, axis=1), 22))
    mean = (neuron.function(rho * x[:, None] + free * w) * inner_weight * np.exp(-0.5 * w**2)).sum(axis=1)
    nested = float((neuron.function(x) * mean * weight * np.exp(-0.5 * x**2)).sum()) / (2 * math.pi)
    found = kappa(neuron, rho)
    assert nested == pytest.approx(found.value, abs=TOLERANCE.closed_form)
    assert found.error < TOLERANCE.closed_form


@pytest.mark.parametrize("spec", SPECS)
def test_hermite_coefficients_in_closed_form_or_by_parseval(spec: str) -> None:
    """Σ c_k² = 1; the tail of 1024 coefficients carries what smoothness allows."""
    found = expand(spec, count=1024)
    share = 1 - math.fsum(c * c for c in found.coefficients) / found.second_moment
    smooth = spec in ("tanh", "erf", "sin", "sigmoid", "softplus", "exp", "gelu", "silu", "hermite:3")
    assert share < (TOLERANCE.closed_form if smooth else 1e-3)
    assert found.error < TOLERANCE.closed_form


def test_relu_coefficients_are_the_known_ones() -> None:
    """c_0 = 1/√(2π), c_1 = 1/2, c_k = (−1)^(k/2+1) (k−3)!!/√(2π k!) for even k, 0 for odd k ≥ 3."""
    found = np.array(expand("relu", count=12).coefficients)
    expected = np.zeros(12)
    expected[0], expected[1] = 1 / math.sqrt(2 * math.pi), 0.5
    for k in range(2, 12, 2):
        double = math.prod(range(k - 3, 0, -2))
        expected[k] = (-1) ** (k // 2 + 1) * double / math.sqrt(2 * math.pi * math.factorial(k))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE.exact)


def test_hermite_functions_are_orthonormal_at_high_order() -> None:
    z = np.linspace(-80, 80, 40001)
    rows = hermite_values(z, 490, 500)
    gram = rows @ rows.T * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(gram, np.eye(10), atol=TOLERANCE.closed_form)


@pytest.mark.parametrize("alpha", [0.6, 0.75, 1.0, 1.5, 2.0, 3.0])
def test_the_slope_at_one_of_a_power(alpha: float) -> None:
    """κ′(1) = α²/(2α − 1), finite above ½ (meanfield2019, J_α′ = α²/(2α−1) J_{α−1}); E φ² = 2^(α−1) Γ(α+½)/√π."""
    found = kernel(f"relu_power:{alpha}")
    assert found.slope_one == pytest.approx(alpha**2 / (2 * alpha - 1), rel=TOLERANCE.two_routes)
    moment = 2 ** (alpha - 1) * gamma(alpha + 0.5) / math.sqrt(math.pi)
    assert found.second_moment == pytest.approx(moment, rel=TOLERANCE.closed_form)


@pytest.mark.parametrize("alpha", [0.3, 0.5])
def test_the_slope_at_one_of_a_root_is_infinite_and_the_rest_is_not(alpha: float) -> None:
    found = kernel(f"relu_power:{alpha}")
    assert found.slope_one == math.inf
    assert found.case == 4
    assert 0 < found.fixed_point < 1
    assert found.rate < 1


CASES = {
    1: ["tanh", "erf", "sin", "selu", "hardtanh", "hermite:3", "hermite:2"],
    2: ["sigmoid", "softplus", "hermite:0"],
    3: ["relu", "leaky_relu:0.1", "exp"],
    4: ["gelu", "silu", "elu", "relu_power:2", "relu_power:0.6"],
}


@pytest.mark.parametrize(("case", "spec"), [(case, spec) for case, specs in CASES.items() for spec in specs])
def test_the_case_of_each_activation(case: int, spec: str) -> None:
    """Figure 5.2 calls ReLU case 2; κ′(1) = 1 exactly makes it case 3, as every homogeneous activation of degree 1."""
    found = kernel(spec)
    assert found.case == case
    assert found.attracting
    assert evaluate(spec, found.fixed_point).value == pytest.approx(found.fixed_point, abs=TOLERANCE.two_routes)
    assert found.slope_fixed_point <= 1 + TOLERANCE.closed_form
    assert {point.correlation for point in found.fixed_points if point.attracting} == {found.fixed_point}


def test_odd_activations_also_leave_minus_one_where_it_is() -> None:
    assert [point.correlation for point in kernel("tanh").fixed_points] == [-1.0, 0.0, 1.0]
    assert [point.correlation for point in kernel("selu").fixed_points] == [0.0, 1.0]
    assert [point.correlation for point in kernel("relu").fixed_points] == [1.0]


@pytest.mark.parametrize("spec", ["identity", "leaky_relu:1", "hermite:1"])
def test_a_linear_activation_is_said_to_attract_nothing(spec: str) -> None:
    found = kernel(spec)
    assert not found.attracting
    assert found.rate == pytest.approx(1.0, abs=TOLERANCE.exact)
    assert "linear" in str(found)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("spec", ["relu", "gelu", "tanh"])
def test_only_layer_norm_after_the_activation_changes_the_map(spec: str, norm: str) -> None:
    """Theorem 5.15: pre-RMS, pre-LN and post-RMS rescale; post-LN removes c_0: κ becomes (κ − κ(0))/(1 − κ(0))."""
    plain, found = kernel(spec), kernel(spec, norm)  # type: ignore[arg-type]
    assert found.second_moment == pytest.approx(plain.second_moment, rel=TOLERANCE.exact)
    if norm != "post-ln":
        assert found.hermite == plain.hermite
        assert found.rate == plain.rate
        return
    spread = 1 - plain.zero
    assert found.zero == 0
    assert found.case == 1
    assert found.slope_zero == pytest.approx(plain.slope_zero / spread, rel=TOLERANCE.two_routes)
    assert found.slope_one == pytest.approx(plain.slope_one / spread, rel=TOLERANCE.two_routes)
    # the corrected (5.14): K/(2K − κ′(0)) with K = κ(1) − κ(0) of the bare activation
    assert found.rate == pytest.approx(spread / (2 * spread - plain.slope_zero), rel=TOLERANCE.two_routes)
    assert found.rate_printed == pytest.approx(spread / plain.slope_one, rel=TOLERANCE.two_routes)
    assert evaluate(spec, 0.4, norm="post-ln").value == pytest.approx(
        (evaluate(spec, 0.4).value - plain.zero) / spread, rel=TOLERANCE.two_routes
    )


@pytest.mark.parametrize("norm", ["pre-ln", "post-ln", "pre-rms", "post-rms"])
@pytest.mark.parametrize("spec", ["relu", "gelu"])
def test_wide_networks_follow_the_map(spec: str, norm: str) -> None:
    """Three layers of width 1000 with real normalization; the spread over 12 networks is the noise."""
    generator = np.random.default_rng(3)
    width, networks, depth, rho = 1000, 12, 3, 0.3
    phi = resolve(spec)

    def normalize(z: np.ndarray) -> np.ndarray:
        z = z - z.mean(axis=1, keepdims=True) if norm.endswith("ln") else z
        return z / np.sqrt((z**2).mean(axis=1, keepdims=True))

    ends = []
    for _ in range(networks):
        a, b = generator.standard_normal((2, width))
        b = b - a * (a @ b) / (a @ a)
        pair = np.stack([a / np.linalg.norm(a), b / np.linalg.norm(b)]) * math.sqrt(width)
        h = np.stack([pair[0], rho * pair[0] + math.sqrt(1 - rho**2) * pair[1]])
        for _ in range(depth):
            z = h @ generator.standard_normal((width, width)) / math.sqrt(width)
            h = phi(normalize(z)) if norm.startswith("pre") else normalize(phi(z))
        ends.append(h[0] @ h[1] / (np.linalg.norm(h[0]) * np.linalg.norm(h[1])))
    predicted = sequence(spec, rho, depth=depth, norm=norm).value("mean_cosine", layer=-1).value  # type: ignore[arg-type]
    stderr = float(np.std(ends, ddof=1)) / math.sqrt(networks)
    assert_within_standard_errors(float(np.mean(ends)), predicted, stderr, allowance=TOLERANCE.finite_width)


STARTS = st.one_of(st.floats(-0.999, 0.9999), st.sampled_from([-0.999, -0.5, 0.0, 0.9, 0.9999]))


@pytest.mark.parametrize("spec", ["tanh", "selu", "sin", "sigmoid", "softplus", "relu", "exp", "gelu", "silu", "elu"])
def test_the_corrected_bound_holds_for_every_start(spec: str) -> None:
    known, series = kernel(spec), interpolate(normalized(spec))

    @given(start=STARTS)
    def holds(start: float) -> None:
        limits = bound(known, start, depth=30).series("mean_cosine_distance_bound").value
        rho = start
        for limit in limits:
            assert abs(rho - known.fixed_point) <= limit * (1 + TOLERANCE.two_routes) + 1e-10
            rho = series(rho)

    holds()


@pytest.mark.parametrize("spec", ["tanh", "selu", "sin"])
def test_the_printed_rate_is_too_small(spec: str) -> None:
    """Erratum: (5.7) with 1/κ′(1) is violated by a single layer, where (5.6) with 1/(2 − κ′(0)) holds."""
    printed = bound(spec, 0.1, depth=40, version="printed").series("mean_cosine_distance_bound").value
    path = sequence(spec, 0.1, depth=40).series("mean_cosine").value
    assert (path[1:] > printed[1:]).any()


@pytest.mark.slow
def test_the_printed_case_four_fails_for_a_steep_map() -> None:
    """Erratum: κ(ρ) = 0.9 + 0.1ρ³⁰, from c_0² = 0.9 and c_30² = 0.1, breaks the printed (5.10) close to ρ_0 = 1."""
    h30 = resolve("hermite:30")
    steep = from_callable(
        lambda x: math.sqrt(0.9) + math.sqrt(0.1) * h30(x), derivative=lambda x: math.sqrt(0.1) * h30.derivative(x)
    )
    found = kernel(steep)
    assert found.case == 4
    assert found.zero == pytest.approx(0.9, abs=TOLERANCE.two_routes)
    start = 1 - 1e-6
    path = [start]
    for _ in range(60):
        path.append(0.9 + 0.1 * path[-1] ** 30)
    distance = np.abs(np.array(path) - found.fixed_point)
    limit = {
        version: bound(found, start, depth=60, version=version).series("mean_cosine_distance_bound").value  # type: ignore[arg-type]
        for version in ("corrected", "printed")
    }
    assert (distance <= limit["corrected"] + TOLERANCE.two_routes).all()
    assert (distance > limit["printed"] + TOLERANCE.two_routes).any()


@pytest.mark.parametrize("spec", ["tanh", "sigmoid", "relu", "gelu"])
def test_bounds_agree_with_the_theorem_as_a_function(spec: str) -> None:
    """Two implementations of Theorem 5.11; the other states case 1 in the potential ρ/(1 − ρ)."""
    known = kernel(spec)
    mine = bound(known, 0.4, depth=12).series("mean_cosine_distance_bound").value[-1]
    theirs = theorem_5_11(
        kappa_zero=known.zero, slope_zero=known.slope_zero, slope_one=known.slope_one, fixed_point=known.fixed_point,
        slope_fixed_point=known.slope_fixed_point, start=0.4, depth=12,
    ).value  # fmt: skip
    assert mine == pytest.approx(theirs / (1 + theirs) if known.case == 1 else theirs, rel=TOLERANCE.two_routes)


@pytest.mark.parametrize("spec", ["relu", "tanh", "gelu", "hardtanh", "exp"])
def test_a_deep_sequence_interpolates_what_a_short_one_integrates(spec: str) -> None:
    deep = sequence(spec, 0.6, depth=200)
    short = sequence(spec, 0.6, depth=20)
    np.testing.assert_allclose(
        deep.series("mean_cosine").value[:21], short.series("mean_cosine").value, atol=TOLERANCE.two_routes
    )
    assert deep.settings["error"] < TOLERANCE.closed_form


def test_relu_approaches_one_like_the_square_of_depth() -> None:
    """Erratum: (5.9) promises 1/ℓ; since κ(1 − x) ≈ 1 − x + (2√2/3π) x^{3/2}, the true law is 9π²/(2ℓ²)."""
    path = sequence("relu", 0.0, depth=2000).series("mean_cosine").value
    assert (1 - path[2000]) * 2000**2 == pytest.approx(9 * math.pi**2 / 2, rel=TOLERANCE.drawn)


def test_a_sequence_is_a_profile_that_can_be_laid_over_a_measurement() -> None:
    path = sequence("relu", 0.5, depth=4, norm="pre-ln")
    assert path.measures == ("mean_cosine",)
    assert path.sources == ("theory",)
    assert path.layers == (0, 1, 2, 3, 4)
    assert path.settings["norm"] == "pre-ln"
    assert sequence("relu", 1.0, depth=3).value("mean_cosine", layer=-1).value == 1.0
    assert sequence("tanh", 0.3, depth=0).value("mean_cosine").value == 0.3


def test_the_record_has_the_keys_of_the_command_line() -> None:
    found = kernel("relu_power:0.5")
    data = found.to_dict()
    assert {"second_moment", "hermite", "kappa", "fixed_point", "slope_fixed_point", "case", "rate", "error"} <= set(
        data
    )
    assert set(data["kappa"]) == {"zero", "slope_zero", "slope_one"}
    assert len(data["hermite"]) >= 11
    assert json.loads(json.dumps(to_plain(data), allow_nan=False))["kappa"]["slope_one"] == "inf"


def test_a_callable_gives_what_the_table_gives() -> None:
    own, known = kernel(from_callable(lambda x: np.maximum(x, 0) + 0.0)), kernel("relu")
    for field in ("zero", "slope_zero", "slope_one", "fixed_point", "rate"):
        assert getattr(own, field) == pytest.approx(getattr(known, field), rel=TOLERANCE.two_routes)
    assert own.case == 3
    assert isinstance(own, Kernel)


@pytest.mark.parametrize("gain", [0.01, 0.3, 3.0, 20.0])
def test_gains_from_a_hundredth_to_twenty(gain: float) -> None:
    """erf(gx): κ = arcsin(2g²ρ/(1+2g²))/arcsin(2g²/(1+2g²))."""
    share = 2 * gain**2 / (1 + 2 * gain**2)
    erf = resolve("erf").scaled(gain)
    for rho in (-0.5, 0.2, 0.9, 0.999):
        expected = math.asin(share * rho) / math.asin(share)
        assert evaluate(erf, rho).value == pytest.approx(expected, rel=TOLERANCE.closed_form)
    slope = share / math.sqrt(1 - share**2) / math.asin(share)
    assert kernel(erf).slope_one == pytest.approx(slope, rel=TOLERANCE.closed_form)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernel("relu", "batch"), "expected a norm among"),  # type: ignore[arg-type]
        (lambda: kernel(lambda x: 0 * x), "0 almost everywhere"),
        (lambda: kernel("hermite:0", "post-ln"), "is constant"),
        (lambda: kernel(lambda x: np.exp(x**2 / 4)), "must have a second moment"),
        (lambda: kernel("nonsense"), "unknown activation"),
        (lambda: evaluate("relu", 1.5), "must lie in"),
        (lambda: evaluate("relu", math.nan), "must lie in"),
        (lambda: evaluate("relu", 0.5, order=-1), "order of a derivative"),
        (lambda: evaluate("relu", 0.999, order=2), "need |ρ| ≤ 0.98".replace("|", r"\|")),
        (lambda: slope_by_density(normalized("relu"), 1.0), "no derivative"),
        (lambda: sequence("relu", 0.5, depth=-1), "depth to be"),
        (lambda: sequence("relu", 0.5, depth=2.5), "depth to be"),  # type: ignore[arg-type]
        (lambda: sequence("relu", "a", depth=2), "must lie in"),  # type: ignore[arg-type]
        (lambda: bound("relu", 0.5, depth=2, version="exact"), "corrected or printed"),  # type: ignore[arg-type]
        (lambda: expand("relu", count=0), "number of Hermite coefficients"),
        (lambda: expand("relu", count=10**6), "number of Hermite coefficients"),
    ],
)  # fmt: skip
def test_bad_input_says_what_was_expected(call: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()  # type: ignore[operator]


def test_second_derivatives_by_the_series() -> None:
    for rho in (0.0, 0.5, -0.8, 0.95):
        assert evaluate("sin", rho, order=2).value == pytest.approx(
            math.sinh(rho) / math.sinh(1), rel=TOLERANCE.closed_form, abs=TOLERANCE.exact
        )
        expected = 1 / (math.pi * math.sqrt(1 - rho**2))
        assert evaluate("relu", rho, order=2).value == pytest.approx(expected, rel=TOLERANCE.two_routes)
