"""Prescriptions are held to the theory they come from, to their own promise of smallness, and to random networks."""

from __future__ import annotations

import json
import math
from functools import cache

import numpy as np
import pytest

from sounding.errors import SoundingError, UsageError
from sounding.theory.batchnorm import batchnorm, critical_eps
from sounding.theory.landscape import STEADY, Landscape, Setting, round_up
from sounding.theory.prescribe import ALLOWANCE, HAAR_SIZE, Option, Prescription, prescribe
from tolerance import TOLERANCE

CASES = [("relu", 64, 100), ("tanh", 64, 200), ("gelu", 64, 50), ("relu", 8, 50), ("sigmoid", 32, 500)]


@cache
def solve(activation: str, batch_size: float, depth: int, margin: float = 1.0) -> Prescription:
    return prescribe(activation, batch_size=batch_size, depth=depth, margin=margin)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-B{case[1]}-L{case[2]}")
def prescription(request: pytest.FixtureRequest) -> Prescription:
    return solve(*request.param)


def settings(option: Option) -> dict[str, float]:
    return {"eps": option.eps, "scale": option.scale, "shift": option.shift}


def is_batchnorm(option: Option) -> bool:
    return option.gain_exponent is None and option.weight_law == "gaussian"


def test_every_option_keeps_its_promise(prescription: Prescription) -> None:
    """Each is predicted again from scratch: trainable to the depth, attracting, not collapsed."""
    assert prescription.options
    for option in filter(is_batchnorm, prescription.options):
        again = batchnorm(prescription.activation, batch_size=prescription.batch_size, **settings(option))
        assert again.gradient_growth == pytest.approx(option.growth, rel=TOLERANCE.two_routes)
        assert again.trainable_depth >= prescription.depth
        assert again.fixed_point.attracting
        assert max(again.forward_eigenvalues.G, again.forward_eigenvalues.L) <= STEADY
        assert not again.collapsed
    for option in prescription.options:
        assert option.trainable_depth >= prescription.depth
        assert option.growth <= prescription.wanted_growth * (1 + TOLERANCE.exact)


def test_the_smallest_change_comes_first(prescription: Prescription) -> None:
    sizes = [option.size for option in prescription.options]
    assert sizes == sorted(sizes)
    assert prescription.best is prescription.options[0]
    assert all(size > 0 for size in sizes)


def test_a_single_change_is_as_small_as_it_can_be(prescription: Prescription) -> None:
    """Two digits upwards: a change smaller by 15% does not reach the depth."""
    for option in prescription.options:
        if option.kind in ("eps", "shift", "scale"):
            less = {
                "eps": 0.85 * option.eps,
                "shift": 0.85 * option.shift,
                "scale": 1 - 0.85 * (1 - option.scale),
            }
            short = batchnorm(prescription.activation, batch_size=prescription.batch_size, **less)
            slow = max(short.forward_eigenvalues.G, short.forward_eigenvalues.L) > STEADY
            assert short.trainable_depth < prescription.depth or not short.fixed_point.attracting or slow


def test_nothing_is_prescribed_to_a_network_that_trains() -> None:
    result = prescribe("relu", batch_size=64, depth=10)
    assert [option.kind for option in result.options] == ["none"]
    assert result.best is not None
    assert result.best.size == 0
    assert result.batchnorm is result.best
    assert result.unreachable == ()


def test_relu_needs_a_shift_and_the_others_are_explained() -> None:
    result = solve("relu", 64, 1000)
    assert result.batchnorm is not None
    assert result.batchnorm.kind == "shift+eps"
    why = {failure.kind: failure.why for failure in result.unreachable}
    assert "homogeneous" in why["scale"]
    assert "collapses" in why["eps"]
    assert "(B−2)/(B−3)" in why["shift"]
    assert critical_eps("relu", batch_size=64).collapse == pytest.approx(0.339406, rel=TOLERANCE.finite_difference)


def test_the_batch_size_named_as_needed_is_the_smallest_that_works() -> None:
    result = solve("relu", 64, 1000)
    why = next(failure.why for failure in result.unreachable if failure.kind == "shift")
    needed = int(why.rsplit(" ", 1)[1])
    assert batchnorm("identity", batch_size=needed).trainable_depth >= 1000
    assert batchnorm("identity", batch_size=needed - 1).trainable_depth < 1000


def test_no_scale_or_shift_beats_a_linear_network_at_eps_zero() -> None:
    for batch_size in (5, 64):
        linear = math.log((batch_size - 2) / (batch_size - 3))
        for activation in ("relu", "tanh", "gelu", "sin", "sigmoid"):
            landscape = Landscape(_resolve(activation), batch_size=batch_size, limit=1.0)
            assert landscape.linear_log_growth == pytest.approx(linear, rel=TOLERANCE.closed_form)
            for setting in (Setting(), Setting(shift=2.0), Setting(scale=0.05), Setting(shift=-0.7, scale=0.4)):
                assert landscape.at(setting).log_growth >= linear - TOLERANCE.two_routes


def _resolve(name: str):  # type: ignore[no-untyped-def]
    from sounding.activations import resolve

    return resolve(name)


def test_a_known_good_combination_is_not_smaller_than_what_is_prescribed() -> None:
    """Shift 2 with eps 0.5 carries ReLU beyond 1000 layers; the prescription is at most that large."""
    known = batchnorm("relu", batch_size=128, shift=2.0, eps=0.5)
    assert known.trainable_depth > 1000
    landscape = Landscape(_resolve("relu"), batch_size=128, limit=16 / 1000)
    best = solve("relu", 128, 1000).batchnorm
    assert best is not None
    assert best.size < landscape.size(landscape.at(Setting(shift=2.0, eps=0.5)))


def test_a_margin_asks_for_more() -> None:
    plain, generous = (solve("relu", 128, 50, margin) for margin in (1, 8))
    assert plain.batchnorm is not None
    assert generous.batchnorm is not None
    assert generous.batchnorm.trainable_depth >= 400
    assert generous.batchnorm.size > plain.batchnorm.size


def test_a_root_on_the_far_side_of_two_digits_is_rounded_up() -> None:
    """hardtanh, B = 8, 60 layers: gains ℓ^-0.12 are enough, where a root rounded down once gave ℓ^-4."""
    option = next(option for option in solve("hardtanh", 8, 60).options if option.kind == "gains")
    assert option.gain_exponent == pytest.approx(0.12)


@pytest.mark.parametrize("weight_std", [3**-0.5, 2.0])
def test_an_eps_is_meant_for_the_weights_that_are_named(weight_std: float) -> None:
    """Every option holds for its own weights, and its eps goes with their variance."""
    plain = solve("relu", 64, 200)
    other = prescribe("relu", batch_size=64, depth=200, margin=1, weight_std=weight_std)
    assert f"variance {weight_std**2:.4g}/fan_in" in str(other)
    for mine, theirs in zip(other.options, plain.options, strict=True):
        assert mine.kind == theirs.kind
        assert mine.eps == pytest.approx(theirs.eps * weight_std**2, rel=TOLERANCE.drawn)
        again = batchnorm("relu", batch_size=64, weight_std=weight_std, **settings(mine))
        assert again.trainable_depth >= 200
        if mine.eps:
            assert batchnorm("relu", batch_size=64, weight_std=1.7 * weight_std, **settings(mine)).trainable_depth < 200


def test_points_next_to_losing_their_fixed_point_are_not_offered() -> None:
    """GELU at B = 128 has a shift of 0.081 and a scale of 0.11 that reach 50 layers with L = 1.000 and 0.998."""
    result = solve("gelu", 128, 50)
    assert result.options
    for option in filter(is_batchnorm, result.options):
        forward = batchnorm("gelu", batch_size=128, **settings(option)).forward_eigenvalues
        assert max(forward.G, forward.L) <= STEADY
    assert "steady" in next(failure.why for failure in result.unreachable if failure.kind == "scale")


def test_gains_spend_exactly_the_budget() -> None:
    """Σ ln growth(α_ℓ) over the layers, each predicted by itself, stays within 16 and close to it."""
    depth = 150
    result = prescribe("tanh", batch_size=64, depth=depth, margin=1)
    option = next(option for option in result.options if option.kind == "gains")
    assert option.gain_exponent is not None
    layers = np.arange(1, depth + 1)
    total = sum(
        math.log(batchnorm("tanh", batch_size=64, scale=float(gain)).gradient_growth)
        for gain in layers**-option.gain_exponent
    )
    assert 0.9 * 16 < total <= 16 * (1 + TOLERANCE.finite_width)
    assert total / depth == pytest.approx(math.log(option.growth), rel=TOLERANCE.finite_width)


@pytest.mark.parametrize("batch_size", [5, 32, 64])
def test_haar_weights_carry_a_linear_network_to_any_depth(batch_size: int) -> None:
    result = prescribe("identity", batch_size=batch_size, depth=10_000)
    haar = next(option for option in result.options if option.kind == "haar")
    assert haar.trainable_depth == math.inf
    assert haar.weight_law == "haar"
    assert "Theorem 6.5" in haar.rests_on
    assert result.batchnorm is None or result.batchnorm.weight_law == "gaussian"


def test_the_size_of_haar_weights_is_the_distance_to_the_nearest_orthogonal_matrix() -> None:
    rng = np.random.default_rng(0)
    n = 300
    matrix = rng.standard_normal((n, n)) / math.sqrt(n)
    u, _, v = np.linalg.svd(matrix)
    assert np.linalg.norm(matrix - u @ v) / math.sqrt(n) == pytest.approx(HAAR_SIZE, rel=TOLERANCE.finite_width)


def test_a_fixed_point_that_deep_batches_leave_is_not_trusted() -> None:
    result = solve("gelu", 64, 50)
    assert not result.attracting
    assert result.trainable_depth > 50
    assert all(option.kind != "none" for option in result.options)
    assert "leave" in str(result)


def test_the_result_is_plain_json() -> None:
    result = solve("tanh", 64, 200)
    data = json.loads(json.dumps(result.to_dict()))
    assert data["reachable"] is True
    assert {"change", "growth", "trainable_depth", "size", "eps", "scale", "shift"} <= set(data["options"][0])
    assert {"kind", "why", "best_growth", "best_depth"} <= set(data["unreachable"][0])
    assert "eps" in str(result)


def test_an_infinite_batch_has_no_linear_limit() -> None:
    result = prescribe("tanh", batch_size=math.inf, depth=200)
    kinds = {option.kind for option in result.options}
    assert {"scale", "eps"} <= kinds


@pytest.mark.parametrize(
    "arguments",
    [
        {"activation": "relu", "batch_size": 3, "depth": 10},
        {"activation": "relu", "batch_size": 64, "depth": 0},
        {"activation": "relu", "batch_size": 64, "depth": 2.5},
        {"activation": "relu", "batch_size": 64, "depth": True},
        {"activation": "relu", "batch_size": 64, "depth": 10, "margin": 0},
        {"activation": "relu", "batch_size": 64, "depth": 10, "margin": "wide"},
        {"activation": "swish", "batch_size": 64, "depth": 10},
    ],
)
def test_bad_input_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        prescribe(**arguments)  # type: ignore[arg-type]


def test_an_activation_without_variance_is_an_error_not_an_option() -> None:
    with pytest.raises(SoundingError):
        prescribe(lambda x: 0.0 * x + 1.0, batch_size=64, depth=10)


def test_settings_are_numbers_one_would_type(prescription: Prescription) -> None:
    for option in prescription.options:
        for value in (option.eps, 1 - option.scale, option.shift, option.gain_exponent or 0.0):
            assert value == pytest.approx(float(f"{value:.3g}"), abs=TOLERANCE.exact)


def test_rounding_is_away_from_the_start() -> None:
    for value in np.random.default_rng(0).uniform(1e-6, 20, 200):
        rounded = round_up(float(value), 2)
        assert value <= rounded * (1 + TOLERANCE.exact)
        assert rounded <= value * 1.1 * (1 + TOLERANCE.exact)
    assert round_up(0.35, 2) == 0.35
    assert round_up(0.0, 2) == 0.0


def log_gradients(weights: str, gains: np.ndarray, *, batch_size: int, width: int, seed: int) -> np.ndarray:
    """ln of the squared gradient norm at each pre-activation of a random tanh network with batch norm."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    features, traced = torch.randn(batch_size, width, **draw), []
    for gain in gains:
        weight = torch.randn(width, width, **draw) / math.sqrt(width)
        if weights == "haar":
            weight, upper = torch.linalg.qr(weight)
            weight = weight * torch.sign(torch.diagonal(upper))
        hidden = (features @ weight.T).requires_grad_()
        hidden.retain_grad()
        traced.append(hidden)
        centred = hidden - hidden.mean(0)
        features = torch.tanh(float(gain) * centred / centred.pow(2).mean(0).sqrt())
    (features * torch.randn(batch_size, width, **draw)).sum().backward()
    return np.array([math.log(float(hidden.grad.pow(2).sum())) for hidden in traced])


@pytest.mark.slow
def test_gains_in_a_wide_network_tame_gradients_as_predicted() -> None:
    """Width 600, 16 samples: ln of the gradient ratio between layers 3 and 30 against Σ ln growth(α_ℓ)."""
    gains = np.arange(1, 34) ** -0.4
    runs = np.array([log_gradients("gaussian", gains, batch_size=16, width=600, seed=seed) for seed in range(6)])
    drops = runs[:, 2] - runs[:, 29]
    rates = [math.log(batchnorm("tanh", batch_size=16, scale=float(gain)).gradient_growth) for gain in gains]
    variances = [batchnorm("tanh", batch_size=16, scale=float(gain)).fixed_point.mu for gain in gains]
    # the telescoped boundary: the factor at layer ℓ has the variance of layer ℓ − 1 in its denominator
    expected = sum(rates[2:29]) + math.log(variances[28] / variances[1])
    stderr = float(drops.std(ddof=1)) / math.sqrt(len(drops))
    assert abs(drops.mean() - expected) <= TOLERANCE.standard_errors * stderr + 27 * TOLERANCE.finite_width


@pytest.mark.slow
@pytest.mark.parametrize("gain", [0.35, 0.5, 1.0])
def test_haar_weights_leave_the_nonlinear_part_of_the_growth(gain: float) -> None:
    """As many samples as features, past the first 60 layers: between 0.8 and 2 times the mean field's excess."""
    batch_size = width = 32
    runs = np.array(
        [log_gradients("haar", np.full(200, gain), batch_size=batch_size, width=width, seed=s) for s in range(5)]
    )
    rate = float(np.mean(runs[:, 60] - runs[:, 170])) / 110
    growth = batchnorm("tanh", batch_size=batch_size, scale=gain).gradient_growth
    excess = math.log(growth) - math.log((batch_size - 2) / (batch_size - 3))
    assert 0.8 * excess <= rate <= ALLOWANCE * excess


def test_a_depth_beyond_reason_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="at most 10,000,000 layers"):
        prescribe("tanh", batch_size=64, depth=10**9)
