"""The covariance map at any batch, the backward recursion, identity networks and broken symmetry."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sounding.activations import resolve
from sounding.errors import UsageError
from sounding.theory.backward import backward_profile, gradient_covariance, split_covariance
from sounding.theory.batchnorm import batchnorm
from sounding.theory.broken_symmetry import bsb2_transition, simulate_broken_state
from sounding.theory.covariance_map import center, covariance_map, laplace_covariance_map
from sounding.theory.homogeneous import homogeneous_batchnorm
from sounding.theory.identity import identity_convergence
from sounding.theory.integrals.arc_cosine import arc_cosine, arc_cosines
from sounding.theory.integrals.projected import projected_map
from sounding.theory.integrals.quadrature import gaussian_mean, gaussian_pair_mean
from tolerance import TOLERANCE


def wishart(size, generator, degrees=9):
    factor = generator.standard_normal((size, degrees))
    return factor @ factor.T / degrees


def directions(size):
    """One matrix of each part: G, L and M."""
    weights = np.zeros(size)
    weights[:2] = 1, -1
    cycle = np.zeros((size, size))
    for i, j, value in ((0, 1, 1), (1, 2, -1), (2, 3, 1), (3, 0, -1)):
        cycle[i, j] = cycle[j, i] = value
    return {"G": center(np.eye(size)), "L": center(np.diag(weights)), "M": cycle}


@pytest.mark.parametrize("degree", [0.0, 0.3, 0.7, 1.0, 1.6, 2.0, 3.0])
def test_the_arc_cosine_kernel_is_a_gaussian_expectation(degree):
    """J_α from its hypergeometric closed form against pair quadrature, and its table against itself."""
    power = lambda x: np.where(x > 0, np.where(x > 0, x, 1.0) ** degree, 0.0)  # noqa: E731
    scale = gaussian_mean(lambda x: power(x) ** 2, kinks=(0.0,)).value
    for correlation in (-0.9, -0.2, 0.5):
        expected = gaussian_pair_mean(power, power, correlation, kinks_f=(0.0,), tolerance=1e-11).value / scale
        assert arc_cosine(correlation, degree=degree) == pytest.approx(expected, rel=TOLERANCE.two_routes)
    grid = np.cos(np.linspace(0, math.pi, 5001))
    few = np.array([arc_cosine(float(c), degree=degree) for c in grid[::500]])
    np.testing.assert_allclose(arc_cosines(grid, degree=degree)[::500], few, atol=TOLERANCE.exact)


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("name", ["relu", "leaky_relu:0.3", "relu_power:1.5", "relu_power:0.7"])
def test_the_laplace_integral_agrees_with_sampled_batches(name, eps):
    """Theorem 2 of meanfield2019, with the factor for eps, at a covariance without any symmetry."""
    generator = np.random.default_rng(3)
    sigma = wishart(6, generator)
    found = covariance_map(name, sigma, eps=eps)
    assert found.method == "laplace"
    undeclared = replace(resolve(name), degree=None, slopes=None)  # without a degree it goes the sampled way
    sampled = covariance_map(undeclared, sigma, eps=eps, samples=100_000, generator=generator)
    assert sampled.method == "sampled"
    assert np.all(np.abs(found.covariance - sampled.covariance) <= TOLERANCE.standard_errors * sampled.error)
    assert found.error.max() < TOLERANCE.closed_form


@pytest.mark.parametrize(("name", "eps"), [("relu", 0.0), ("relu", 0.1), ("relu_power:1.5", 0.1), ("identity", 0.4)])
def test_forward_eigenvalues_are_derivatives_of_the_map(name, eps):
    """Implicit derivatives from the quadrature of B = 8 against differences of the Laplace map along G, L and M."""
    found = batchnorm(name, batch_size=8, eps=eps)
    mu, phi = found.fixed_point.mu, resolve(name)
    fixed = laplace_covariance_map(phi, mu * np.eye(8), eps=eps).covariance
    assert fixed[0, 0] == pytest.approx(found.fixed_point.variance, rel=TOLERANCE.two_routes)
    assert fixed[0, 1] == pytest.approx(
        found.fixed_point.variance * found.fixed_point.correlation, rel=TOLERANCE.two_routes, abs=TOLERANCE.two_routes
    )
    step = 1e-4 * mu
    for part, direction in directions(8).items():
        values = [
            center(laplace_covariance_map(phi, mu * center(np.eye(8)) + k * step * direction, eps=eps).covariance)
            for k in (-2, -1, 1, 2)
        ]
        slope = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)
        expected = getattr(found.forward_eigenvalues, part)
        np.testing.assert_allclose(slope, expected * direction, atol=TOLERANCE.finite_difference)


def test_a_symmetric_covariance_needs_no_samples_for_any_activation():
    found = covariance_map("tanh", 0.7 * np.eye(6) + 0.3, eps=0.1, scale=1.4, shift=0.2)
    assert found.method == "symmetric"
    generator = np.random.default_rng(0)
    tilted = 0.7 * np.eye(6) + 0.3
    tilted[0, 0] += 1e-9
    sampled = covariance_map("tanh", tilted, eps=0.1, scale=1.4, shift=0.2, samples=50_000, generator=generator)
    assert sampled.method == "sampled"
    assert np.all(np.abs(found.covariance - sampled.covariance) <= TOLERANCE.standard_errors * sampled.error)


@pytest.mark.parametrize(("size", "eps"), [(4, 0.0), (6, 0.0), pytest.param(4, 0.2, marks=pytest.mark.slow)])
def test_projected_density_gives_the_laplace_integral_at_any_covariance(size, eps):
    """Two routes that share nothing, at covariances without symmetry, of full and of deficient rank."""
    generator = np.random.default_rng(size)
    for rank in {3, size + 2}:
        factor = generator.standard_normal((size, rank))
        sigma = factor @ factor.T
        mapped, error = projected_map(resolve("relu"), center(sigma), eps=eps, tolerance=1e-10)
        expected = laplace_covariance_map(resolve("relu"), sigma, eps=eps).covariance
        np.testing.assert_allclose(mapped, expected, rtol=0, atol=TOLERANCE.two_routes)
        assert np.abs(mapped - expected).max() <= error.max()


@pytest.mark.parametrize("eps", [0.0, pytest.param(0.3, marks=pytest.mark.slow)])
def test_projected_density_gives_the_symmetric_map(eps):
    """At a batch-symmetric covariance, against the quadratures of one sphere."""
    mapped, _ = projected_map(resolve("tanh").scaled(1.5, 0.4), 0.7 * center(np.eye(5)), eps=eps)
    expected = covariance_map("tanh", 0.7 * np.eye(5), eps=eps, scale=1.5, shift=0.4)
    assert expected.method == "symmetric"
    np.testing.assert_allclose(mapped, expected.covariance, rtol=0, atol=TOLERANCE.two_routes)


@pytest.mark.parametrize("eps", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_quadrature_at_any_covariance_agrees_with_sampling(eps):
    generator = np.random.default_rng(5)
    sigma = np.diag([0.5, 1.0, 2.0, 4.0]) + 0.3
    found = covariance_map("gelu", sigma, eps=eps, shift=0.5)
    assert found.method == "quadrature"
    sampled = covariance_map("gelu", sigma, eps=eps, shift=0.5, samples=50_000, generator=generator)
    assert sampled.method == "sampled"
    assert (np.abs(found.covariance - sampled.covariance) <= TOLERANCE.standard_errors * sampled.error).all()


def test_equal_and_opposite_samples_are_one_coordinate():
    """A batch of x, x, −x, y, −y: pairs on a line, and a sample at the mean."""
    rows = np.array([[1.0, 0, 0], [1, 0, 0], [-2, 0.5, 0], [0, -1, 1], [0, 0.5, -1], [0, 0, 0]])
    sigma = rows @ rows.T
    mapped, _ = projected_map(resolve("relu"), center(sigma), eps=0.0)
    expected = laplace_covariance_map(resolve("relu"), sigma).covariance
    np.testing.assert_allclose(mapped, expected, rtol=0, atol=TOLERANCE.two_routes)


def test_bad_covariances_say_what_is_wrong():
    with pytest.raises(UsageError, match="shape"):
        covariance_map("relu", np.ones(4))
    with pytest.raises(UsageError, match="symmetric"):
        covariance_map("relu", np.triu(np.ones((4, 4))))
    with pytest.raises(UsageError, match="semidefinite"):
        covariance_map("relu", -np.eye(4))
    with pytest.raises(UsageError, match="equal"):
        covariance_map("relu", np.ones((4, 4)))
    with pytest.raises(UsageError, match="generator"):
        covariance_map("tanh", np.diag(np.arange(1.0, 70.0)))


@given(st.integers(0, 2**32 - 1), st.integers(2, 7), st.integers(1, 6))
@settings(max_examples=20)
def test_identity_converges_to_a_projector_from_any_covariance(seed, size, rank):
    """Theorem B.11, Corollary B.12: limit (B/C)·projector, the spread shrinking in every layer, finally by C/(C+2)."""
    generator = np.random.default_rng(seed)
    rank = min(rank, size - 1)
    factor = generator.standard_normal((size, rank))
    found = identity_convergence(factor @ factor.T, depth=40)
    assert found.rank == rank
    np.testing.assert_allclose(found.limit @ found.limit, size / rank * found.limit, atol=TOLERANCE.two_routes)
    spreads = found.spreads
    scale = size / rank
    assert np.all(spreads[2:] <= spreads[1:-1] + 1e-11 * scale)
    if rank > 1 and 1e-9 < spreads[-1] < 1e-3 * scale:
        assert spreads[-1] / spreads[-2] == pytest.approx(found.rate, rel=TOLERANCE.percent)
    np.testing.assert_allclose(found.eigenvalues[1:].sum(axis=1), size, rtol=TOLERANCE.two_routes)


def test_the_parts_of_a_covariance_are_orthogonal_and_complete():
    sigma = wishart(7, np.random.default_rng(2))
    parts = split_covariance(sigma)
    np.testing.assert_allclose(parts.G + parts.L + parts.M, center(sigma), atol=TOLERANCE.exact)
    for a, b in ((parts.G, parts.L), (parts.G, parts.M), (parts.L, parts.M)):
        assert abs((a * b).sum()) < TOLERANCE.exact
    assert np.abs(np.diag(parts.M)).max() < TOLERANCE.exact


def test_the_backward_recursion_multiplies_each_part():
    prediction = batchnorm("relu", batch_size=6)
    gradient = center(wishart(6, np.random.default_rng(5)))
    twice = gradient_covariance(prediction, gradient_covariance(prediction, gradient, layers=1), layers=1)
    np.testing.assert_allclose(twice, gradient_covariance(prediction, gradient, layers=2), rtol=TOLERANCE.closed_form)
    assert np.trace(twice) == pytest.approx(prediction.gradient_growth**2 * np.trace(gradient), rel=TOLERANCE.exact)
    profile = backward_profile(prediction, gradient, depth=40)
    norms = profile.series("gradient_log_norm").value
    assert norms[0] - norms[-1] == pytest.approx(39 * 0.5 * math.log(prediction.gradient_growth), rel=TOLERANCE.exact)
    weights = profile.series("weight_gradient_log_norm").value
    np.testing.assert_allclose(weights - norms, 0.5 * math.log(prediction.fixed_point.mu), rtol=TOLERANCE.exact)
    uneven = profile.series("uneven_gradient").value
    assert np.all(np.diff(uneven) > 0)  # from the output (last row) to the input the gradient becomes even
    with pytest.raises(UsageError, match="samples"):
        backward_profile(prediction, np.eye(5), depth=3)


def test_the_transition_is_where_the_eigenvalue_passes_one():
    """α(10) ≈ 1.40, in the window of figure 1 of meanfield2019; infinite at B = 4; 1 in the limit."""
    for size in (5, 10, 64):
        alpha = bsb2_transition(size)
        assert (
            pytest.approx(1.0, abs=TOLERANCE.closed_form)
            == homogeneous_batchnorm(resolve(f"relu_power:{alpha!r}"), size).forward.L
        )
        assert batchnorm(f"relu_power:{alpha * 0.99!r}", batch_size=size).fixed_point.attracting
        assert not batchnorm(f"relu_power:{alpha * 1.01!r}", batch_size=size).fixed_point.attracting
    assert math.isinf(bsb2_transition(4))
    assert bsb2_transition(math.inf) == 1.0
    assert np.all(np.diff([bsb2_transition(size) for size in (5, 6, 8, 16, 64, 512)]) < 0)


def test_symmetry_holds_below_the_transition_and_breaks_above():
    below = simulate_broken_state("relu_power:1.2", batch_size=10, generator=np.random.default_rng(0))
    assert below.symmetric
    assert below.converged
    expected = homogeneous_batchnorm(resolve("relu_power:1.2"), 10)
    np.testing.assert_allclose(below.variances, expected.variance, rtol=TOLERANCE.float32)
    above = simulate_broken_state("relu_power:2", batch_size=10, generator=np.random.default_rng(0))
    assert not above.symmetric
    assert above.converged
    assert 1 <= above.winners < 10
    assert above.winner_share > 0.9
    again = laplace_covariance_map(resolve("relu_power:2"), above.covariance).covariance
    np.testing.assert_allclose(again, above.covariance, atol=TOLERANCE.float32 * above.covariance.max())
    with pytest.raises(UsageError, match="generator"):
        simulate_broken_state("relu_power:2", batch_size=10)
