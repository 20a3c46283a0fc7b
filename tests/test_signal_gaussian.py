"""Pair expectations of functions, for all pairs at once, against quadrature pair by pair."""

from __future__ import annotations

import numpy as np
import pytest

from sounding.activations import resolve
from sounding.activations.table import REGISTRY
from sounding.theory.integrals.quadrature import gaussian_mean, gaussian_pair_mean
from sounding.theory.signal.gaussian import FLAT, _flat, map_pairs
from sounding.theory.signal.shapes import PLACES, WEIGHTS, pushed, summed
from sounding.theory.signal.spread import _pairs
from tolerance import TOLERANCE

PARAMETERS = {"relu_power": "2", "hermite": "3", "leaky_relu": "0.2", "elu": "0.7"}
SMOOTH = ("gelu", "tanh", "silu", "softplus", "sin")
KINKED = ("relu", "leaky_relu:0.2")


def assert_pairs(name: str, means: tuple[float, float], stds: tuple[float, float], correlation: float) -> None:
    """E φφ, E φ′φ′ and the diagonal to six digits of E φ²."""
    phi = resolve(name)
    mean, std = np.array(means), np.array(stds)
    matrix = np.array([[1.0, correlation], [correlation, 1.0]]) * np.outer(std, std) + np.outer(mean, mean)
    for slope in (False, True):
        f = phi.derivative if slope else phi.function
        found = map_pairs(phi, matrix[None], mean[None], slope=slope)
        squares = [
            gaussian_mean(lambda x: f(x) ** 2, mean=m, std=s, kinks=phi.kinks).value  # noqa: B023 - used at once
            for m, s in zip(means, stds, strict=True)
        ]
        pair = gaussian_pair_mean(f, f, correlation, mean=means, std=stds, kinks_f=phi.kinks, tolerance=1e-10).value
        size = float(np.sqrt(squares[0] * squares[1]))
        assert abs(found.matrix[0, 0, 1] - pair) <= TOLERANCE.six_digits * size
        np.testing.assert_allclose(np.diag(found.matrix[0]), squares, rtol=TOLERANCE.two_routes)


@pytest.mark.parametrize("name", [f"{name}:{PARAMETERS[name]}" if name in PARAMETERS else name for name in REGISTRY])
def test_points_of_one_variance(name: str) -> None:
    """Every registered function; near ρ = 1 the series converges slowly and the table is bridged."""
    for correlation in (-0.6, 0.3, 0.97):
        assert_pairs(name, (0.0, 0.0), (1.2, 1.2), correlation)


@pytest.mark.parametrize("name", [*SMOOTH, *KINKED])
def test_points_of_different_variance_and_mean(name: str) -> None:
    for correlation in (-0.6, 0.3, 0.99):
        assert_pairs(name, (0.3, -0.5), (0.7, 1.5), correlation)


@pytest.mark.parametrize("correlation", [-0.9, 0.0, 0.6, 0.999, 1 - 1e-9])
def test_a_small_mean_has_a_closed_form(correlation: float) -> None:
    """Rectified values of means far below their spread, as biases give them, against 300 nodes of the integral."""
    a, b = 0.012, -0.004 if correlation < 0.9 else 0.012
    for power in (0, 1):
        closed, _, exponent = _flat(np.array([correlation]), np.array([(a * a + b * b) / 2]), np.array([a * b]), power)
        assert exponent <= FLAT
        angle, weight = np.polynomial.legendre.leggauss(300)
        half = 0.5 * np.arcsin(correlation)
        sine, cosine = np.sin(half * (1 + angle)), np.cos(half * (1 + angle))
        value = np.exp(-(a * a - 2 * sine * a * b + b * b) / (2 * cosine**2)) * (correlation - sine) ** power
        expected = half * float(weight @ value) / (2 * np.pi)
        assert abs(closed[0] - expected) <= TOLERANCE.closed_form


@pytest.mark.parametrize("level", [0.01, 0.3, 2.0])
def test_a_slope_takes_what_its_function_has_left(level: float) -> None:
    """To the bit what it would find itself, whether the means are far below the spread or above it."""
    rows = np.random.default_rng(0).standard_normal((6, 20))
    mean = level * rows[:, :1].T
    moments = (rows @ rows.T / 20)[None] + mean[:, :, None] * mean[:, None, :]
    kept: dict[str, np.ndarray] = {}
    map_pairs(resolve("leaky_relu:0.2"), moments, mean, kept=kept)
    alone = map_pairs(resolve("leaky_relu:0.2"), moments, mean, slope=True)
    assert kept
    assert np.array_equal(
        map_pairs(resolve("leaky_relu:0.2"), moments, mean, slope=True, kept=kept).matrix, alone.matrix
    )


@pytest.mark.parametrize("c", [0.0, 0.5, 0.95])
def test_what_a_rectifier_adds_to_the_scatter_of_a_correlation(c: float) -> None:
    """The polar rule against the exact law of the angle: E over radii is E r⁴ = 8, and the angle has a fine grid."""
    turn = (np.arange(400_000) + 0.5) * (2 * np.pi / 400_000)
    x, y = np.cos(turn), np.cos(turn - np.arccos(c))
    first, second = np.maximum(x, 0), np.maximum(y, 0)
    square, product = 2 * float(np.mean(first**2)), 2 * float(np.mean(first * second))
    r = product / square
    influence = first * second / square - r * (first**2 + second**2) / (2 * square)
    base = x * y - c * (x**2 + y**2) / 2
    left = 8 * float(np.mean(influence**2)) - (8 * float(np.mean(influence * base))) ** 2 / (1 - c**2) ** 2
    assert abs(_pairs(resolve("relu"), c, 3.0)[1] - left / (1 - r**2) ** 2) <= TOLERANCE.six_digits


def test_many_variances_are_interpolated() -> None:
    """Coefficients of hundreds of variances come from a Chebyshev series in ln s; a few directly."""
    phi, std = resolve("tanh"), np.geomspace(0.3, 4.0, 300)
    matrix = 0.6 * np.outer(std, std) + 0.4 * np.diag(std**2)
    many = map_pairs(phi, matrix[None], np.zeros((1, 300))).matrix[0]
    chosen = np.array([0, 100, 299])
    few = map_pairs(phi, matrix[np.ix_(chosen, chosen)][None], np.zeros((1, 3))).matrix[0]
    np.testing.assert_allclose(many[np.ix_(chosen, chosen)], few, rtol=TOLERANCE.two_routes)


def test_the_law_of_a_rectified_sum_is_that_of_draws() -> None:
    """max(x, 0) + y for independent Gaussians: quantiles of the shape against a million draws."""
    rng = np.random.default_rng(0)
    relu = resolve("relu")
    rectified = pushed(relu, 0.2, 1.0, None)
    assert rectified is not None
    spread = float(np.sqrt(relu(rng.standard_normal(10**6) + 0.2).var()))
    shape = summed([(spread, rectified), (0.5, None)])
    assert shape is not None
    drawn = np.maximum(rng.standard_normal(10**6) + 0.2, 0.0) + 0.5 * rng.standard_normal(10**6)
    drawn = (drawn - drawn.mean()) / drawn.std()
    places = np.array([-1.5, -0.5, 0.0, 1.0, 2.0])
    expected = np.quantile(drawn, [float(WEIGHTS[place >= PLACES].sum()) for place in places])
    # quantiles of a million draws scatter by less than 0.005
    np.testing.assert_allclose(np.interp(places, PLACES, shape), expected, atol=TOLERANCE.finite_width * 2)


def test_a_shaped_signal_maps_as_drawn_pairs() -> None:
    """ReLU of a reflected walk's second step, at two points: the copula against draws."""
    rng = np.random.default_rng(1)
    root = np.linalg.cholesky(np.array([[1.0, 0.5], [0.5, 1.0]]))
    first, second = (root @ rng.standard_normal((2, 10**6)) for _ in range(2))
    values = np.maximum(first, 0.0) + second
    relu = resolve("relu")
    rectified = pushed(relu, 0.0, 1.0, None)
    assert rectified is not None
    shape = summed([(float(np.sqrt(0.5 - 0.5 / np.pi)), rectified), (1.0, None)])
    matrix, mean = values @ values.T / values.shape[1], values.mean(axis=1)
    rectified_values = np.maximum(values, 0.0)
    expected = rectified_values @ rectified_values.T / values.shape[1]
    found = map_pairs(relu, matrix[None], mean[None], shape=shape).matrix[0]
    np.testing.assert_allclose(found, expected, rtol=2 * TOLERANCE.finite_width)
    gaussian = map_pairs(relu, matrix[None], mean[None]).matrix[0]
    assert abs(gaussian[0, 0] - expected[0, 0]) > abs(found[0, 0] - expected[0, 0])
