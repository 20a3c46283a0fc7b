"""The batch norm mean field by two routes: quadrature against closed forms, series, Monte Carlo and known numbers."""

from __future__ import annotations

import json
import math
from dataclasses import astuple
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sounding.activations import from_callable, resolve
from sounding.encoding import to_plain
from sounding.errors import NumericalError, UsageError
from sounding.theory.batchnorm import batchnorm, critical_eps, depth_scale
from sounding.theory.gegenbauer import gegenbauer_batchnorm
from sounding.theory.integrals.affine import Affine
from sounding.theory.integrals.arc_cosine import arc_cosine
from sounding.theory.integrals.moments import Expectations
from sounding.theory.integrals.normalized import NormalizedLaw
from sounding.theory.integrals.plane import PAIRS
from sounding.theory.integrals.quadrature import sphere_mean, sphere_pair_mean
from tolerance import TOLERANCE, assert_within_standard_errors

SIZES = [4, 5, 6, 8, 32, 256, 1024, math.inf]
SMOOTH = ["tanh", "erf", "sin", "sigmoid", "softplus", "exp", "gelu", "gelu_tanh", "silu", "hermite:3"]


def eigenvalues(record):
    return [record.G, record.L, record.M]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_activations_agree_with_the_gegenbauer_series(name, size):
    """Theorem 9 of meanfield2019, from Gauss–Gegenbauer nodes, with a shift and a scale."""
    found = batchnorm(name, batch_size=size, scale=0.8, shift=0.3)
    series = gegenbauer_batchnorm(name, batch_size=size, scale=0.8, shift=0.3)
    assert found.fixed_point.variance == pytest.approx(series.variance, rel=TOLERANCE.two_routes)
    assert found.fixed_point.correlation == pytest.approx(series.correlation, abs=TOLERANCE.two_routes)
    assert found.gradient_growth == pytest.approx(series.growth, rel=TOLERANCE.two_routes)


def test_relu_numbers_of_the_paper():
    """Variance 1/2 at every batch size, correlation J₁(−1/(B−1)), growth → π/(π−1), Theorem 8 in closed form."""
    for size in (4, 10, 32, 300):
        rho = -1 / (size - 1)
        found = batchnorm("relu", batch_size=size)
        zero, one = arc_cosine(rho, degree=0.0), arc_cosine(rho, degree=1.0)
        growth = ((size - 1 + zero) / (1 - one) - 1) / (size - 3)
        assert found.fixed_point.variance == pytest.approx(0.5, rel=TOLERANCE.closed_form)
        assert found.fixed_point.correlation == pytest.approx(one, rel=TOLERANCE.closed_form)
        assert found.gradient_growth == pytest.approx(growth, rel=TOLERANCE.closed_form)
    limit = batchnorm("relu", batch_size=math.inf)
    assert limit.gradient_growth == pytest.approx(math.pi / (math.pi - 1), rel=TOLERANCE.closed_form)
    assert limit.depth_scale == pytest.approx(1 / math.log(math.pi / (math.pi - 1)), rel=TOLERANCE.closed_form)
    assert limit.trainable_depth == 16 * limit.depth_scale


def test_identity_grows_by_the_batch_size_alone():
    for size in (4, 7, 64):
        found = batchnorm("identity", batch_size=size)
        assert found.gradient_growth == pytest.approx((size - 2) / (size - 3), rel=TOLERANCE.closed_form)
        assert pytest.approx((size - 1) / (size + 1), rel=TOLERANCE.closed_form) == found.forward_eigenvalues.L
        assert pytest.approx((size - 1) / (size + 1), rel=TOLERANCE.closed_form) == found.forward_eigenvalues.M


@pytest.mark.parametrize("kwargs", [{}, {"eps": 0.05}, {"scale": 2.0, "shift": -0.4}, {"eps": 0.2, "shift": 0.5}])
@pytest.mark.parametrize("name", ["relu", "tanh", "hardtanh", "elu"])
def test_large_batches_approach_the_limit_at_rate_one_over_b(name, kwargs):
    """The formulas for B → ∞ against the finite ones: the difference shrinks fourfold from B to 4B, or is tiny."""
    limit = batchnorm(name, batch_size=math.inf, **kwargs)
    near, far = (batchnorm(name, batch_size=size, **kwargs) for size in (4096, 1024))
    for part in ("forward_eigenvalues", "backward_eigenvalues"):
        values = [np.array(eigenvalues(getattr(p, part))) for p in (limit, near, far)]
        assert np.all(np.abs(values[1] - values[0]) <= 0.3 * np.abs(values[2] - values[0]) + 1e-2 / 4096)
    assert near.cross_batch.eigenvalue == pytest.approx(limit.cross_batch.eigenvalue, rel=2 * TOLERANCE.three_digits)


def test_a_scaled_activation_and_a_batch_norm_scale_are_one_thing():
    for name in ("hardtanh", "elu", "gelu"):
        inside = batchnorm(resolve(name).scaled(1.7, -0.3), batch_size=12, eps=0.02)
        outside = batchnorm(name, batch_size=12, eps=0.02, scale=1.7, shift=-0.3)
        for part in ("forward_eigenvalues", "backward_eigenvalues"):
            for a, b in zip(eigenvalues(getattr(inside, part)), eigenvalues(getattr(outside, part)), strict=True):
                assert a == pytest.approx(b, rel=TOLERANCE.two_routes)


def test_weight_scale_matters_only_through_eps():
    plain = batchnorm("tanh", batch_size=16, eps=0.1 / 4.0)
    heavy = batchnorm("tanh", batch_size=16, eps=0.1, weight_std=2.0)
    assert heavy.gradient_growth == pytest.approx(plain.gradient_growth, rel=TOLERANCE.exact)
    assert batchnorm("tanh", batch_size=16, weight_std=3.0).gradient_growth == pytest.approx(
        batchnorm("tanh", batch_size=16).gradient_growth, rel=TOLERANCE.exact
    )


def sampled(phi, size, mu, eps, count, generator):
    """Forward and backward eigenvalues from their definitions, (value, stderr) by batches of matrices."""
    ones = np.full((size, size), 1 / size)
    project = np.eye(size) - ones
    u = generator.standard_normal((count, size)) @ project * math.sqrt(mu)
    s = np.sqrt((u**2).mean(axis=1) + eps)
    x = u / s[:, None]
    value = phi(x)
    centred = value - value.mean(axis=1, keepdims=True)
    whole = (centred**2).sum(axis=1) * (u**2).sum(axis=1)
    uneven = (centred**2 * u**2).sum(axis=1) - whole / size
    dot = (value * u).sum(axis=1) ** 2
    forward = {
        "G": ((centred**2).sum(axis=1) * ((u**2).sum(axis=1) / mu - (size - 1))) / (2 * mu * (size - 1)),
        "L": size / (2 * mu**2 * (size - 1) * (size - 2)) * uneven,
        "M": (dot - size / (size - 2) * uneven - whole / (size - 1)) / (mu**2 * size * (size - 3)),
    }
    slope = phi.derivative(x)
    jacobian = (project - x[:, :, None] * x[:, None, :] / size) / s[:, None, None]
    a = slope[:, :, None] * jacobian
    a -= a.mean(axis=1, keepdims=True)
    norm = (a**2).sum(axis=(1, 2))
    trace = np.einsum("nii->n", a)
    single = size / ((size - 2) * (size - 1)) * ((np.einsum("nii->ni", a) ** 2).sum(axis=1) - norm / size)
    square = 0.5 * (trace**2 + np.einsum("nij,nji->n", a, a))
    backward = {
        "G": norm / (size - 1),
        "L": single,
        "M": 2 / (size * (size - 3)) * (square - (size - 1) * single - norm / (size - 1)),
    }
    return [{k: (v.mean(), v.std() / math.sqrt(count)) for k, v in part.items()} for part in (forward, backward)]


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("tanh", {"eps": 0.3, "scale": 1.5, "shift": 0.2}), ("relu", {"eps": 0.1}), ("hardtanh", {"eps": 0.05})],
)
def test_eigenvalues_with_eps_agree_with_their_definitions_by_monte_carlo(name, kwargs):
    """The radius integrated out by hand against 60000 sampled batches of 10, forward and backward, G, L and M."""
    found = batchnorm(name, batch_size=10, **kwargs)
    phi = resolve(name).scaled(kwargs.get("scale", 1.0), kwargs.get("shift", 0.0))
    parts = sampled(phi, 10, found.fixed_point.mu, kwargs["eps"], 60_000, np.random.default_rng(7))
    for record, part in zip((found.forward_eigenvalues, found.backward_eigenvalues), parts, strict=True):
        for key, (value, stderr) in part.items():
            assert_within_standard_errors(value, getattr(record, key), stderr)


@pytest.mark.parametrize("size", [4, 8, 64, math.inf])
def test_forward_eigenvalue_g_is_the_slope_of_the_variance_map(size):
    """dμ′/dμ by differences of the map itself."""
    affine, eps = Affine(resolve("elu"), 1.2, 0.3), 0.2
    found = batchnorm("elu", batch_size=size, eps=eps, scale=1.2, shift=0.3)
    mu, step = found.fixed_point.mu, 1e-3
    laws = [NormalizedLaw(float(size), mu * (1 + k * step), eps) for k in (-2, -1, 1, 2)]
    values = [Expectations(affine, float(size)).spread(law)[0] for law in laws]
    slope = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step * mu)
    assert pytest.approx(slope, rel=TOLERANCE.finite_difference) == found.forward_eigenvalues.G


def nested_pair(f, g, size, kinks, outer_kinks):
    """E f(x₁) g(x₂) as an outer mean over x₁ of the conditional mean of x₂, itself a mean over a smaller sphere."""
    sine = math.sqrt(1 - 1 / (size - 1) ** 2)

    def inner(x):
        std = sine * math.sqrt(max(size - 1 - x * x, 1e-300) / (size - 2))
        return sphere_mean(g, size - 1, mean=-x / (size - 1), std=std, kinks=kinks, tolerance=1e-11).value

    def outer(x):
        return f(x) * np.array([inner(float(value)) for value in x])

    return sphere_mean(outer, size, kinks=outer_kinks, tolerance=1e-10).value


@pytest.mark.parametrize(("name", "scale", "shift"), [("hardtanh", 1.4, 0.3), ("elu", 2.0, -0.6), ("relu", 1.0, -0.5)])
def test_kinks_off_the_origin_agree_with_a_nested_integral(name, scale, shift):
    """Theorem 7 at B = 8 with conditional expectations in place of the polar form."""
    size = 8
    phi = resolve(name).scaled(scale, shift)
    edges = set(phi.kinks)
    for kink in phi.kinks:  # where the conditional range of x₂ starts to contain the kink
        rest = math.sqrt(max((1 - 1 / (size - 1) ** 2) * (size - 1 - kink**2), 0.0))
        edges |= {-kink / (size - 1) + rest, -kink / (size - 1) - rest}
    slopes = nested_pair(phi.derivative, phi.derivative, size, phi.kinks, tuple(edges))
    crossed = nested_pair(
        lambda x: x * phi.derivative(x), lambda x: x * phi.derivative(x), size, phi.kinks, tuple(edges)
    )
    own = sphere_mean(lambda x: (size - 1 - x * x) * phi.derivative(x) ** 2, size, kinks=phi.kinks).value
    spread = sphere_mean(lambda x: phi(x) ** 2, size, kinks=phi.kinks).value - nested_pair(
        phi, phi, size, phi.kinks, tuple(edges)
    )
    found = batchnorm(name, batch_size=size, scale=scale, shift=shift)
    assert found.fixed_point.mu == pytest.approx(spread, rel=TOLERANCE.two_routes)
    expected = (own + slopes + crossed) / (spread * (size - 3))
    assert found.gradient_growth == pytest.approx(expected, rel=TOLERANCE.two_routes)


@pytest.mark.parametrize(("name", "size", "eps"), [("tanh", 4, 0.2), ("softplus", 4, 1e-3), ("silu", 12, 0.1)])
def test_eps_agrees_with_an_integral_over_the_radius(name, size, eps):
    """Fixed point and growth as a mean over r² = μχ²_{B−1} of sphere means at gain √ρ, meanfield2019's own order."""
    phi = resolve(name)
    found = batchnorm(name, batch_size=size, eps=eps)
    mu = found.fixed_point.mu
    nodes, weights = np.polynomial.legendre.leggauss(20)
    cuts = [0, 0.02, 0.06, 0.2, 0.6, 1.5, 3, 4.5, 6, 8, 11]
    chi = np.concatenate([0.5 * (a + b) + 0.5 * (b - a) * nodes for a, b in pairwise(cuts)])
    weight = np.concatenate([0.5 * (b - a) * weights for a, b in pairwise(cuts)])
    weight *= chi ** (size - 2) * np.exp(-0.5 * chi**2)
    weight /= weight.sum()
    spread = growth = 0.0
    for radius, mass in zip(chi, weight, strict=True):
        if mass < 1e-13:
            continue
        s2 = mu * radius**2 / size + eps
        rho = mu * radius**2 / size / s2
        gain = math.sqrt(rho)

        def one(f, gain=gain):
            return sphere_mean(lambda y: f(gain * y), size).value

        def two(f, gain=gain):
            return sphere_pair_mean(lambda y: f(gain * y), lambda y: f(gain * y), size, tolerance=1e-11).value

        spread += mass * (one(lambda x: phi(x) ** 2) - two(phi))
        own = one(lambda x, rho=rho: phi.derivative(x) ** 2 * (1 - 1 / size - (2 - rho) * x * x / size))
        crossed = two(phi.derivative) + (2 - rho) * two(lambda x: x * phi.derivative(x))
        norm = size * own - own + (1 - 1 / size) * crossed
        growth += mass * norm / (s2 * (size - 1))
    assert found.fixed_point.mu == pytest.approx(spread, rel=TOLERANCE.two_routes)
    assert found.gradient_growth == pytest.approx(growth, rel=TOLERANCE.two_routes)


@given(st.floats(1e-9, 1e-3))
@settings(max_examples=15)
def test_small_eps_is_continuous(eps):
    """Growth tends to its value at eps = 0; at B = 8 the first correction is of order eps."""
    exact, moved = batchnorm("relu", batch_size=8), batchnorm("relu", batch_size=8, eps=eps)
    assert abs(moved.gradient_growth - exact.gradient_growth) <= 30 * eps + TOLERANCE.two_routes


def test_gelu_loses_its_symmetric_fixed_point_near_a_batch_of_39():
    assert batchnorm("gelu", batch_size=38).fixed_point.attracting
    assert not batchnorm("gelu", batch_size=40).fixed_point.attracting
    assert not batchnorm("gelu", batch_size=math.inf).fixed_point.attracting
    assert batchnorm("relu", batch_size=8, shift=-0.5).fixed_point.attracting
    assert not batchnorm("relu", batch_size=256, shift=-0.5).fixed_point.attracting
    assert batchnorm("relu", batch_size=math.inf).fixed_point.attracting


def test_the_collapsed_phase_is_a_result():
    """tanh at eps = 1.2: μ = 0 and growth φ′(0)²/eps; at 0.9 a positive fixed point with growth just above 1."""
    collapsed = batchnorm("tanh", batch_size=16, eps=1.2)
    assert collapsed.collapsed
    assert collapsed.fixed_point.correlation == 1.0
    assert collapsed.gradient_growth == pytest.approx(1 / 1.2, rel=TOLERANCE.closed_form)
    for name, shift in (("tanh", 0.0), ("identity", 0.0), ("relu", 2.0)):
        alive = batchnorm(name, batch_size=16, eps=0.9, shift=shift)
        assert alive.fixed_point.mu > 0
        assert 1.0 < alive.gradient_growth < 1.01


def test_rates_at_collapse_are_the_limit_of_the_rates_before_it():
    """Plain ReLU just below its critical eps against the closed forms of the collapsed phase."""
    critical = critical_eps("relu", batch_size=12)
    before = batchnorm("relu", batch_size=12, eps=critical.collapse * (1 - 1e-6))
    after = batchnorm("relu", batch_size=12, eps=critical.collapse * (1 + 1e-6))
    assert after.collapsed
    assert not before.collapsed
    for part in ("forward_eigenvalues", "backward_eigenvalues"):
        for a, b in zip(eigenvalues(getattr(before, part)), eigenvalues(getattr(after, part)), strict=True):
            assert a == pytest.approx(b, rel=TOLERANCE.four_digits)


def test_critical_eps_of_smooth_and_kinked_activations():
    for name, shift, expected in (
        ("tanh", 0.0, 1.0),
        ("identity", 0.0, 1.0),
        ("relu", 2.0, 1.0),
        ("sigmoid", 0.0, 1 / 16),
    ):
        assert critical_eps(name, batch_size=32, shift=shift).collapse == pytest.approx(
            expected, rel=TOLERANCE.two_routes
        )
    relu = critical_eps("relu", batch_size=32)
    assert relu.collapse == pytest.approx((1 - arc_cosine(-1 / 31, degree=1.0)) * 31 / 64, rel=TOLERANCE.closed_form)
    assert relu.unit_growth > relu.collapse
    assert math.isinf(critical_eps("relu_power:0.8", batch_size=32).collapse)


def test_a_discontinuous_collapse_is_found():
    """relu(x − 0.5) is flat at the origin: μ = 0 is always stable, yet a large fixed point lives until it jumps."""
    critical = critical_eps("relu", batch_size=32, shift=-0.5)
    assert not critical.continuous
    assert critical.linear == 0.0
    assert batchnorm("relu", batch_size=32, shift=-0.5, eps=0.98 * critical.collapse).fixed_point.mu > 1e-3
    assert batchnorm("relu", batch_size=32, shift=-0.5, eps=1.02 * critical.collapse).collapsed


def test_the_record_speaks_json_and_profile():
    found = batchnorm("relu", batch_size=32)
    plain = json.loads(json.dumps(to_plain(found.to_dict())))
    assert {"fixed_point", "forward_eigenvalues", "backward_eigenvalues", "cross_batch"} <= set(plain)
    assert {"gradient_growth", "depth_scale", "trainable_depth", "error"} <= set(plain)
    assert set(plain["forward_eigenvalues"]) == {"G", "L", "M"}
    assert {"variance", "correlation", "attracting"} <= set(plain["fixed_point"])
    assert set(plain["cross_batch"]) == {"covariance", "eigenvalue"}
    profile = found.profile(11)
    series = profile.series("gradient_log_norm", source="theory")
    assert series.value[-1] == 0.0
    assert series.value[0] == pytest.approx(10 * 0.5 * math.log(found.gradient_growth), rel=TOLERANCE.exact)
    assert "×1.52195 per layer" in str(found)
    assert depth_scale(1.0) == math.inf
    assert depth_scale(0.5) == depth_scale(2.0)


def test_bad_input_says_what_is_wrong():
    for size in (3, 1, 0, 4.5, math.nan):
        with pytest.raises(UsageError, match="batch"):
            batchnorm("relu", batch_size=size)
    with pytest.raises(UsageError, match="eps"):
        batchnorm("relu", batch_size=8, eps=-1e-5)
    with pytest.raises(UsageError, match="scale"):
        batchnorm("relu", batch_size=8, scale=0.0)
    with pytest.raises(UsageError, match="shift"):
        batchnorm("relu", batch_size=8, shift=math.inf)
    with pytest.raises(UsageError, match="weight_std"):
        batchnorm("relu", batch_size=8, weight_std=0.0)
    with pytest.raises(NumericalError, match="infinite"):
        batchnorm("relu_power:0.5", batch_size=8)
    with pytest.raises(NumericalError):
        batchnorm(from_callable(lambda x: np.exp(0.3 * x * x), name="steep"), batch_size=math.inf)
    with pytest.raises(NumericalError, match="constant"):
        batchnorm("hermite:0", batch_size=8)
    with pytest.raises(UsageError, match="NaN"):
        batchnorm(lambda x: np.sqrt(x), batch_size=8)
    with pytest.raises(UsageError, match="shape"):
        batchnorm(lambda x: 1.0, batch_size=8)
    with pytest.raises(NumericalError, match="jump"):
        batchnorm(np.sign, batch_size=8)
    with pytest.raises(UsageError, match="derivative"):
        batchnorm(lambda x: np.abs(x) ** 0.7, batch_size=8)
    with pytest.raises(NumericalError, match="constant"):
        batchnorm("relu", batch_size=8, shift=-3.0)  # |x| < √7


def test_a_large_level_does_not_drown_the_batch():
    """φ(β) = 1000 leaves μ, the eigenvalues and the growth those of the identity."""
    lifted, plain = (
        batchnorm("relu", batch_size=16, shift=1000.0, eps=0.1),
        batchnorm("identity", batch_size=16, eps=0.1),
    )
    assert lifted.fixed_point.mu == pytest.approx(plain.fixed_point.mu, rel=TOLERANCE.two_routes)
    for part in ("forward_eigenvalues", "backward_eigenvalues"):
        for a, b in zip(eigenvalues(getattr(lifted, part)), eigenvalues(getattr(plain, part)), strict=True):
            assert a == pytest.approx(b, rel=TOLERANCE.two_routes)


def test_a_python_callable_gives_what_the_registered_activation_gives():
    """Found kinks and the numerical derivative of a plain function, against the analytic activation."""
    for function, name in ((lambda x: np.maximum(x, 0.0), "relu"), (np.tanh, "tanh")):
        found, expected = batchnorm(function, batch_size=12), batchnorm(name, batch_size=12)
        assert found.gradient_growth == pytest.approx(expected.gradient_growth, rel=TOLERANCE.six_digits)


@pytest.mark.parametrize(
    ("name", "size", "eps", "scale", "shift"),
    [
        ("tanh", 4, 0.0, 1.0, 0.3),
        ("gelu", 5, 0.1, 1.0, -0.5),
        ("sin", 8, 0.0, 20.0, 0.0),
        ("relu", 32, 0.0, 1.0, 0.5),
        ("hermite:30", 256, 0.1, 1.0, 0.5),
        ("exp", 16, 1e-3, 1.0, 0.0),
    ],
)
def test_polynomials_and_plane_agree_on_every_pair_moment(name, size, eps, scale, shift):
    """Polynomials and cells in the plane, relative to the one-coordinate moments they are added to."""
    law = NormalizedLaw(float(size), 0.4, eps)
    expectations = Expectations(Affine(resolve(name), scale, shift), float(size))
    found = expectations.polynomials.sums(law, PAIRS, tolerance=1e-12)
    assert found is not None
    planar = np.array(astuple(expectations.planar(law)[0]))
    assert (np.abs(found[0].values - planar) <= TOLERANCE.two_routes * found[0].scales).all()


def test_where_the_fixed_point_does_not_attract_the_headline_promises_no_growth():
    """SiLU at B = 64: theory's ×1.234 is that of a state which networks leave; they measure ×1.396."""
    leaving, staying = batchnorm("silu", batch_size=64), batchnorm("tanh", batch_size=64)
    assert not leaving.fixed_point.attracting
    assert "does not attract" in str(leaving).splitlines()[0]
    assert "trainable to" not in str(leaving)
    assert staying.fixed_point.attracting
    assert "gradients grow" in str(staying).splitlines()[0]
