"""Gram dynamics: two exact routes, the fixed point, its rate, and the deviation of finite networks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sounding.activations import from_callable, resolve
from sounding.encoding import to_plain
from sounding.errors import UsageError
from sounding.theory.batchnorm import batchnorm
from sounding.theory.covariance_map import covariance_map, laplace_covariance_map
from sounding.theory.gram import gram, gram_map, planar_map
from sounding.theory.gram_deviation import gram_deviation
from tolerance import TOLERANCE

ANY = np.random.default_rng(0)


def random_gram(size: int, rank: int, seed: int) -> np.ndarray:
    features = np.random.default_rng(seed).standard_normal((size, rank))
    return np.asarray(features @ features.T / rank)


@pytest.mark.parametrize("spec", ["relu", "leaky_relu:0.1", "identity", "relu_power:2", "relu_power:0.5"])
@pytest.mark.parametrize("size", [3, 6])
def test_an_angle_and_a_laplace_integral_agree(spec: str, size: int) -> None:
    """Two deterministic routes to eq. (3.3): one integral over the angle, and Theorem 2 of meanfield2019."""
    matrix = random_gram(size, 2, seed=size)
    plane, laplace = planar_map(spec, matrix), laplace_covariance_map(resolve(spec), matrix)
    np.testing.assert_allclose(plane.covariance, laplace.covariance, atol=TOLERANCE.two_routes)


def test_the_angle_agrees_with_sampling_for_any_activation() -> None:
    matrix = random_gram(5, 2, seed=1)
    exact = planar_map("hardtanh", matrix)
    sampled = covariance_map("hardtanh", matrix, generator=np.random.default_rng(2))
    assert sampled.method == "sampled"
    assert (np.abs(exact.covariance - sampled.covariance) <= TOLERANCE.standard_errors * sampled.error + 1e-9).all()


def test_a_batch_of_two_is_plus_minus_one() -> None:
    """Centred and scaled, two samples are (1, −1) or (−1, 1): G* = [[(a² + b²)/2, ab], …], a, b = φ(±1), at once."""
    a, b = math.exp(1), math.exp(-1)
    found = gram("exp", np.array([[2.0, 0.5], [0.5, 1.0]]), depth=3)
    expected = np.array([[(a**2 + b**2) / 2, a * b], [a * b, (a**2 + b**2) / 2]])
    np.testing.assert_allclose(found.matrices[1], expected, rtol=TOLERANCE.closed_form)
    np.testing.assert_allclose(found.fixed_point, expected, rtol=TOLERANCE.closed_form)
    assert found.rate == 0


@pytest.mark.parametrize("spec", ["tanh", "gelu", "relu", "sigmoid"])
def test_a_symmetric_gram_reaches_the_fixed_point_in_one_step(spec: str) -> None:
    """V of any permutation-symmetric Gram matrix is the BSB1 fixed point of meanfield2019."""
    size = 6
    found = gram(spec, 3 * np.eye(size) + 0.5, depth=1)
    point = batchnorm(spec, batch_size=size).fixed_point
    expected = point.variance * ((1 - point.correlation) * np.eye(size) + point.correlation)
    np.testing.assert_allclose(found.matrices[-1], expected, atol=TOLERANCE.two_routes)
    np.testing.assert_allclose(found.fixed_point, expected, atol=TOLERANCE.two_routes)


@pytest.mark.parametrize(("spec", "size"), [("relu", 5), ("leaky_relu:0.2", 8), ("identity", 7), ("relu_power:1.2", 5)])
def test_the_distance_shrinks_at_the_predicted_rate(spec: str, size: int) -> None:
    found = gram(spec, random_gram(size, size + 2, seed=3), depth=30)
    ratios = found.distances[1:] / found.distances[:-1]
    assert found.attracting
    assert ratios[-6:] == pytest.approx(found.rate, abs=TOLERANCE.three_digits)


@pytest.mark.parametrize("spec", ["tanh", "gelu", "relu", "softplus"])
def test_the_rate_of_a_batch_of_three(spec: str) -> None:
    """λ_L on the circle, against the iterates themselves."""
    found = gram(spec, np.diag([1.0, 2.0, 4.0]), depth=25)
    assert found.distances[-1] / found.distances[-2] == pytest.approx(found.rate, abs=TOLERANCE.four_digits)
    assert found.method == "symmetric"


def test_linear_networks_have_a_singular_fixed_point_that_is_not_the_identity() -> None:
    """Erratum: G* = (n/(n−1))(I − 11ᵀ/n), so that the condition number of Theorem 3.2 is infinite."""
    size = 6
    found = gram("identity", random_gram(size, 9, seed=4), depth=60)
    expected = size / (size - 1) * (np.eye(size) - 1 / size)
    np.testing.assert_allclose(found.matrices[-1], expected, atol=TOLERANCE.float32)
    np.testing.assert_allclose(found.fixed_point, expected, atol=TOLERANCE.closed_form)
    assert found.condition_number == math.inf
    assert gram("relu", np.eye(size), depth=0).condition_number < 10


@given(seed=st.integers(0, 10_000), rank=st.integers(2, 7), scale=st.floats(1e-3, 1e3))
@settings(max_examples=15)
def test_a_step_ignores_scale_and_common_mean_and_keeps_the_order_of_matrices(
    seed: int, rank: int, scale: float
) -> None:
    matrix = random_gram(5, rank, seed)
    phi = resolve("relu")
    mapped = gram_map(phi, matrix).covariance
    np.testing.assert_allclose(gram_map(phi, scale * matrix).covariance, mapped, atol=TOLERANCE.two_routes)
    np.testing.assert_allclose(gram_map(phi, matrix + 2.0).covariance, mapped, atol=TOLERANCE.two_routes)
    assert np.linalg.eigvalsh(mapped)[0] > -TOLERANCE.closed_form
    order = np.random.default_rng(seed).permutation(5)
    permuted = gram_map(phi, matrix[np.ix_(order, order)]).covariance
    np.testing.assert_allclose(permuted, mapped[np.ix_(order, order)], atol=TOLERANCE.two_routes)


def test_a_network_follows_the_trajectory() -> None:
    """Three layers of the chain itself, φ after BN, at width 20000; the noise is the predicted d^{−1/2}."""
    generator = np.random.default_rng(5)
    size, width = 5, 20_000
    start = random_gram(size, 7, seed=6)
    found = gram("relu", start, depth=3)
    h = generator.standard_normal((width, size)) @ np.linalg.cholesky(start).T
    for layer in range(1, 4):
        centred = h - h.mean(axis=1, keepdims=True)
        features = np.maximum(centred / np.sqrt((centred**2).mean(axis=1, keepdims=True)), 0.0)
        measured = features.T @ features / width
        spread = np.sqrt(np.var(np.einsum("ri,rj->rij", features, features), axis=0) / width)
        assert (np.abs(measured - found.matrices[layer]) <= (TOLERANCE.standard_errors + 2) * spread + 1e-9).all()
        h = generator.standard_normal((width, size)) @ np.linalg.cholesky(measured).T


def test_sampling_says_so_and_is_repeatable() -> None:
    matrix = random_gram(5, 6, seed=8)
    first, second = (
        gram("tanh", matrix, depth=2, samples=20_000, generator=np.random.default_rng(1)) for _ in range(2)
    )
    assert first.method == "sampled"
    assert 0 < max(first.errors) < 0.01
    np.testing.assert_array_equal(first.matrices, second.matrices)
    integrated = gram("tanh", matrix, depth=1)
    assert integrated.method == "quadrature"
    assert max(integrated.errors) < TOLERANCE.two_routes
    gap = np.abs(integrated.matrices[1] - first.matrices[1]).max()
    assert gap < TOLERANCE.standard_errors * first.errors[1]


def test_the_record_travels() -> None:
    found = gram("relu", np.diag([1.0, 2.0, 3.0, 4.0]), depth=4)
    profile = found.profile()
    assert profile.measures == ("gram_distance", "mean_square", "mean_cosine")
    assert profile.layers == (0, 1, 2, 3, 4)
    data = json.loads(json.dumps(to_plain(found.to_dict()), allow_nan=False))
    assert {"fixed_point", "rate", "distances", "attracting", "error"} <= set(data)
    assert "batch 4" in str(found)


@pytest.mark.parametrize("size", [4, 6, 20])
def test_the_deviation_of_a_linear_network_in_closed_form(size: int) -> None:
    """n(n−2)(n+1)²/(4(n−1)d); one layer n²(n−2)/((n−1)d): x xᵀ on the sphere, forgotten by (n−1)/(n+1) per layer."""
    found = gram_deviation("identity", batch_size=size, width=500, generator=np.random.default_rng(0), samples=500)
    expected = math.sqrt(size * (size - 2) * (size + 1) ** 2 / (4 * (size - 1) * 500))
    assert found.stationary.value == pytest.approx(expected, rel=TOLERANCE.two_routes)
    assert found.one_layer == pytest.approx(
        math.sqrt(size**2 * (size - 2) / (size - 1) / 500), rel=TOLERANCE.two_routes
    )


@pytest.mark.parametrize(("spec", "size"), [("relu", 6), ("gelu", 10)])
def test_finite_networks_stray_as_predicted_at_every_depth(spec: str, size: int) -> None:
    """Started at G*: one layer's noise, two layers', and the stationary level, in standard errors of 80 networks."""
    generator = np.random.default_rng(11)
    width, networks, depth = 2000, 80, 12
    phi = resolve(spec)
    fixed = gram(spec, np.eye(size), depth=0).fixed_point
    squares = np.empty((networks, depth))
    for network in range(networks):
        current = fixed
        for layer in range(depth):
            values, vectors = np.linalg.eigh(current)
            h = generator.standard_normal((width, size)) @ (vectors * np.sqrt(np.maximum(values, 0))).T
            h -= h.mean(axis=1, keepdims=True)
            features = phi(h / np.sqrt((h**2).mean(axis=1, keepdims=True)))
            current = features.T @ features / width
            squares[network, layer] = ((current - fixed) ** 2).sum()
    predicted = gram_deviation(spec, batch_size=size, width=width, generator=generator)
    expected = predicted.profile(depth).series("gram_deviation").value ** 2
    stderr = squares.std(axis=0, ddof=1) / math.sqrt(networks)
    assert (np.abs(squares.mean(axis=0) - expected) <= TOLERANCE.standard_errors * stderr + 0.03 * expected).all()


def test_the_deviation_falls_with_the_root_of_the_width_and_grows_faster_than_the_batch() -> None:
    """Theorem 3.2's d^{−1/2}; erratum: the slope against the batch size is above the 1 of eq. (3.9)."""

    def level(size: int, width: int) -> float:
        found = gram_deviation("relu", batch_size=size, width=width, generator=np.random.default_rng(0))
        return found.stationary.value

    assert level(8, 1000) / level(8, 4000) == pytest.approx(2.0, rel=TOLERANCE.exact)
    slope = math.log(level(32, 1000) / level(8, 1000)) / math.log(4)
    assert 1.0 < slope < 1.6


def test_a_fixed_point_that_repels_has_no_stationary_deviation() -> None:
    """GELU leaves the symmetric fixed point near a batch of 39 (meanfield2019's scope)."""
    found = gram_deviation("gelu", batch_size=64, width=1000, generator=np.random.default_rng(0), samples=500)
    assert found.stationary.value == math.inf
    assert "inf" in str(found)
    json.dumps(to_plain(found.to_dict()), allow_nan=False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gram("relu", np.ones((2, 3)), depth=1), "shape"),
        (lambda: gram("relu", np.eye(1), depth=1), "batch of 2 or more"),
        (lambda: gram("relu", -np.eye(4), depth=1), "positive semidefinite"),
        (lambda: gram("relu", np.ones((4, 4)), depth=1), "divides 0 by 0"),
        (lambda: gram("relu", np.array([[1.0, np.nan], [np.nan, 1.0]]), depth=1), "finite"),
        (lambda: gram("relu", np.eye(4), depth=-1), "depth to be"),
        (lambda: gram("relu", np.eye(4), depth=1, eps=-1.0), "eps must be"),
        (lambda: gram("relu", np.eye(3), depth=1, eps=0.1), "batch of at least 4"),
        (lambda: planar_map("relu", np.eye(5)), "1 or 2 directions"),
        (lambda: gram_deviation("relu", batch_size=3, width=10, generator=ANY), "at least 4"),
        (lambda: gram_deviation("relu", batch_size=8, width=0, generator=ANY), "width to be"),
        (lambda: gram_deviation("relu", batch_size=8, width=9, generator=ANY, samples=2), "samples"),
        (lambda: gram(from_callable(lambda x: np.where(np.abs(x) < 8.5, x, np.nan)), np.eye(4), depth=1), "NaN"),
    ],
)  # fmt: skip
def test_bad_input_says_what_was_expected(call: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()  # type: ignore[operator]
