"""The fitted gradient growth: right on average, and as sure as it says."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import sounding
from sounding.probe import growth
from sounding.probe.growth import fit_growth
from tolerance import TOLERANCE


def walk(rng: np.random.Generator, depth: int, *, drift: float, step: float, noise: float = 0.0) -> np.ndarray:
    """ln‖gradient‖ from the first layer to the last: a random walk growing by `drift` per layer towards the input."""
    steps = drift + step * rng.standard_normal(depth - 1)
    upwards = np.concatenate([[0.0], np.cumsum(steps[::-1])])[::-1]
    return upwards + noise * rng.standard_normal(depth)


def covered(trials: int, level: float = 0.95) -> int:
    """The least number of hits out of `trials` that a test at this level would give 999 999 times of a million."""
    return int(stats.binom.ppf(1e-6, trials, level))


@pytest.mark.parametrize("depth", [4, 8, 16, 64, 200])
def test_the_interval_covers_a_random_walk(depth: int) -> None:
    """Where least squares with independent errors would cover about half of the time."""
    rng = np.random.default_rng(depth)
    trials, drift = 400, 0.21
    hits = 0
    for _ in range(trials):
        fit = fit_growth([walk(rng, depth, drift=drift, step=0.1)])
        assert fit is not None
        hits += fit.interval[0] <= math.exp(2 * drift) <= fit.interval[1]
    assert hits >= covered(trials)


def test_least_squares_would_be_too_sure() -> None:
    """The reason for the random walk: independent errors promise 95% and keep far less."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        curve = walk(rng, 64, drift=0.0, step=0.1)
        line = stats.linregress(np.arange(64), curve)
        hits += abs(line.slope) <= 2 * line.stderr
    assert hits < 100


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_the_interval_covers_a_walk_with_layer_noise(noise: float) -> None:
    rng = np.random.default_rng(5)
    trials = 300
    fits = [fit_growth([walk(rng, 40, drift=-0.1, step=0.05, noise=noise)]) for _ in range(trials)]
    assert sum(f is not None and f.interval[0] <= math.exp(-0.2) <= f.interval[1] for f in fits) >= covered(trials)


def test_pure_layer_noise_is_recognized_and_narrows_the_interval() -> None:
    """Differences of independent values are anticorrelated; the walk alone would give an error of 0.3·√2/√39."""
    rng = np.random.default_rng(6)
    fits = [fit_growth([walk(rng, 40, drift=0.1, step=0.0, noise=0.3)]) for _ in range(50)]
    errors = [fit.log_rate_stderr for fit in fits if fit is not None]
    assert np.median(errors) < 0.5 * 0.3 * math.sqrt(2 / 39)


def test_groups_take_out_jumps_between_kinds_of_layers() -> None:
    """A bottleneck that shifts every third layer by two units, and a head of its own kind, are not growth."""
    rng = np.random.default_rng(2)
    groups = [index % 3 for index in range(30)] + ["head"]
    jumps = np.array([2.0 * (label == 1) - 5.0 * (label == "head") for label in groups])
    fits = [fit_growth([walk(rng, 31, drift=0.05, step=0.02) + jumps], groups) for _ in range(200)]
    assert all(fit is not None and fit.grouped for fit in fits)
    rates = [fit.log_rate for fit in fits if fit is not None]
    assert np.mean(rates) == pytest.approx(0.05, abs=TOLERANCE.standard_errors * np.std(rates) / math.sqrt(200))
    assert sum(f is not None and f.interval[0] <= math.exp(0.1) <= f.interval[1] for f in fits) >= covered(200)


def test_layers_that_are_all_different_are_fitted_as_one_group() -> None:
    fit = fit_growth([[3.0, 2.0, 1.0, 0.0]], ["a", "b", "c", "d"])
    assert fit is not None
    assert not fit.grouped
    assert fit.log_rate == pytest.approx(1.0, rel=TOLERANCE.exact)


@given(st.floats(-3, 3), st.integers(3, 40), st.floats(-50, 50))
def test_an_exact_power_is_found_exactly(rate: float, depth: int, level: float) -> None:
    fit = fit_growth([[level - rate * index for index in range(depth)]])
    assert fit is not None
    assert fit.log_rate == pytest.approx(rate, abs=TOLERANCE.two_routes)
    assert fit.growth == pytest.approx(math.exp(2 * rate), rel=TOLERANCE.float32)


def test_layers_without_a_finite_gradient_are_left_out() -> None:
    """Underflow near the input: the run next to the output is fitted."""
    fit = fit_growth([[-math.inf, -math.inf, -3.0, -2.0, -1.0, 0.0]])
    assert fit is not None
    assert (fit.depth, fit.log_rate) == (4, pytest.approx(-1.0))
    assert fit_growth([[math.nan, 1.0, 2.0, math.inf]]) is None
    assert fit_growth([[1.0, 2.0]]) is None


def test_repeats_that_disagree_widen_the_interval() -> None:
    """Each repeat is straight, so the walk shows no scatter; the repeats' own rates differ by 0.2."""
    agreeing = fit_growth([[3.0, 2.0, 1.0, 0.0]] * 2)
    differing = fit_growth([[3.3, 2.2, 1.1, 0.0], [2.7, 1.8, 0.9, 0.0]])
    assert agreeing is not None
    assert differing is not None
    assert agreeing.log_rate_stderr == pytest.approx(0.0, abs=TOLERANCE.exact)
    assert differing.log_rate_stderr == pytest.approx(0.1, rel=TOLERANCE.two_routes)


def test_the_growth_of_a_relu_network_is_that_of_its_weights() -> None:
    """W of variance c/N: the squared gradient grows by c/2 per layer on average (He's argument). Over 30 networks the
    mean rate meets it, up to the bias of a logarithm at width N, and the spread is what each fit said it was."""
    generator = torch.Generator().manual_seed(3)
    width, depth, gain = 96, 24, 2.5
    rates, errors = [], []
    for _ in range(30):
        model = nn.Sequential(
            *(part for _ in range(depth) for part in (nn.Linear(width, width, bias=False), nn.ReLU()))
        )
        for part in model[::2]:
            nn.init.normal_(part.weight, std=math.sqrt(gain / width), generator=generator)
        report = sounding.check(model, torch.randn(16, width, generator=generator), tier="fast", generator=generator)
        rate = report.profile.value("gradient_log_rate", source="check")
        rates.append(rate.value)
        errors.append(rate.stderr)
    expected = math.log(gain / 2) / 2
    spread = float(np.std(rates, ddof=1))
    assert abs(np.mean(rates) - expected) < TOLERANCE.standard_errors * spread / math.sqrt(30) + 2 / width
    assert 0.5 < float(np.sqrt(np.mean(np.square(errors)))) / spread < 2.0


@pytest.mark.parametrize("depth", [3, 4, 5, 9])
@pytest.mark.parametrize("grouped", [False, True])
def test_few_layers_and_many_are_fitted_alike(depth: int, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain Python for a handful of layers, numpy for more: one fit."""
    rng = np.random.default_rng(depth)
    curves = [walk(rng, depth, drift=0.3, step=0.4, noise=0.2) for _ in range(20)]
    groups = [index % 2 for index in range(depth)] if grouped else None
    fits = {}
    for few in (0, 100):
        monkeypatch.setattr(growth, "FEW", few)
        growth._frame.cache_clear()
        fits[few] = [fit_growth([curve], groups) for curve in curves]
    growth._frame.cache_clear()
    for one, other in zip(fits[0], fits[100], strict=True):
        assert one is not None
        assert other is not None
        assert astuple(one)[:4] == pytest.approx(astuple(other)[:4], rel=TOLERANCE.two_routes)
        assert one.interval == pytest.approx(other.interval, rel=TOLERANCE.two_routes)
