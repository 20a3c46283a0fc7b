"""Explicit weights, the Gram route and the lean loop have one law: moments and a two-sample test."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from sounding import simulate
from sounding.chain import engine
from sounding.chain.law import ChainLaw, make_law
from sounding.chain.lean import LeanChain
from sounding.chain.observe import View, make_observer, observe
from sounding.chain.step import Chains, Route, choose_route
from tolerance import TOLERANCE, assert_within_standard_errors

WIDTH, SAMPLES, LAYERS, RUNS = 16, 5, 6, 500
MEASURES = ("orthogonality_gap", "participation_ratio", "mean_cosine", "log_norm", "effective_rank")
# with about 700 comparisons in this file, a true null falls below once in 1400 runs of it; the seeds are fixed
LEAST_P = 1e-6
NORMS: tuple[dict[str, Any], ...] = (
    {"norm": "none"},
    {"norm": "batch", "centring": True},
    {"norm": "batch", "centring": False},
    {"norm": "batch", "centring": False, "placement": "after"},
    {"norm": "layer"},
    {"norm": "rms", "placement": "after", "eps": 0.01},
)


def final_measures(law: ChainLaw, route: Route, *, seed: int) -> np.ndarray:
    """(runs, measures) at the last layer."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(RUNS, law.batch_size, law.width, generator=generator)
    chains = Chains([law] * RUNS, state, route=route, generator=generator)
    for layer in range(1, LAYERS + 1):
        chains.step(law.gain.at(layer))
    return observe(chains, make_observer(MEASURES, law)).numpy()


def assert_same_law(one: np.ndarray, other: np.ndarray, context: str) -> None:
    for column, measure in enumerate(MEASURES):
        a, b = one[:, column], other[:, column]
        scale = max(1e-12, float(np.abs(a).max()))
        if max(np.ptp(a), np.ptp(b)) < TOLERANCE.float32_forward * scale:
            assert abs(a.mean() - b.mean()) < TOLERANCE.float32_forward * scale, (context, measure)
            continue
        error = math.hypot(a.std(ddof=1) / math.sqrt(len(a)), b.std(ddof=1) / math.sqrt(len(b)))
        assert_within_standard_errors(float(a.mean()), float(b.mean()), error)
        assert stats.ks_2samp(a, b).pvalue > LEAST_P, (context, measure)


@pytest.mark.parametrize("weights", ["gaussian", "orthogonal"])
@pytest.mark.parametrize("activation", ["identity", "relu", "tanh", "gelu"])
@pytest.mark.parametrize("residual", [math.inf, 0.4])
def test_explicit_weights_and_the_gram_route_have_one_law(weights, activation, residual):
    for index, options in enumerate(NORMS):
        law = make_law(
            width=WIDTH,
            batch_size=SAMPLES,
            weights=weights,
            activation=activation,
            residual=residual,
            gain=1.3,
            **options,
        )
        assert choose_route(law, explicit=False) == "gram"
        one = final_measures(law, "gram", seed=2 * index)
        other = final_measures(law, "explicit", seed=2 * index + 1)
        assert_same_law(one, other, str(options))


@pytest.mark.parametrize(
    ("weights", "options", "route", "dtype"),
    [
        ("gaussian", {"norm": "batch", "activation": "relu"}, "gram", torch.float32),
        ("gaussian", {"norm": "batch", "centring": False, "residual": 0.4}, "gram", torch.float64),
        ("orthogonal", {"norm": "layer", "placement": "after", "activation": "gelu"}, "gram", torch.float32),
        ("gaussian", {"norm": "none", "activation": "tanh", "gain": 0.5}, "gram", torch.float32),
        ("one-sided", {"norm": "batch"}, "explicit", torch.float32),
        ("uniform", {"norm": "rms", "gain": "power:0.5"}, "explicit", torch.float32),
    ],
)
def test_the_lean_loop_has_the_same_law(weights, options, route, dtype):
    law = make_law(width=WIDTH, batch_size=SAMPLES, weights=weights, **options)
    reference = final_measures(law, route, seed=3)
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(RUNS, SAMPLES, WIDTH, generator=generator).to(dtype)
    shape = (RUNS, LAYERS, SAMPLES if route == "gram" else WIDTH, WIDTH)
    if route == "gram":
        draws = torch.randn(shape, generator=generator, dtype=dtype)
    else:
        draws = law.weights.draw(shape, generator=generator, dtype=dtype, device="cpu")
    states, scales = [], []
    for state, draw in zip(start, draws.numpy(), strict=True):
        chain = LeanChain(law, state, route=route)
        chain.advance(draw, [law.gain.at(layer) for layer in range(1, LAYERS + 1)])
        states.append(torch.from_numpy(chain.state))
        scales.append(chain.log_scale)
    snapshot = View(torch.stack(states), torch.tensor(scales, dtype=torch.float64), route)
    assert_same_law(reference, observe(snapshot, make_observer(MEASURES, law)).numpy(), str(options))


def test_two_residual_strengths_share_a_batch_without_mixing():
    """Chains with γ = 0.1 and without a skip connection, side by side in one batch, as on a GPU."""
    laws = [make_law(width=WIDTH, batch_size=SAMPLES, residual=gamma, centring=False) for gamma in (0.1, math.inf)]
    generator = torch.Generator().manual_seed(5)
    state = torch.randn(2 * RUNS, SAMPLES, WIDTH, generator=generator)
    chains = Chains([law for law in laws for _ in range(RUNS)], state, route="gram", generator=generator)
    for _ in range(LAYERS):
        chains.step()
    mixed = observe(chains, make_observer(MEASURES, laws[0])).numpy()
    for index, law in enumerate(laws):
        assert_same_law(mixed[index * RUNS : (index + 1) * RUNS], final_measures(law, "explicit", seed=6), str(index))


@pytest.mark.parametrize(("weights", "samples"), list(product(["gaussian", "orthogonal"], [3, 8])))
def test_results_do_not_depend_on_the_number_of_threads(weights, samples, monkeypatch):
    def run() -> dict[str, float]:
        result = simulate(
            width=12, batch_size=samples, depth=30, runs=40, weights=weights, generator=torch.Generator().manual_seed(8)
        )
        return {name: estimate.value for name, estimate in result.averages.items()}

    alone = run()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert run() == alone
    finally:
        torch.set_num_threads(threads)


def test_normals_drawn_ahead_are_the_generators_own(monkeypatch):
    """One large chain on several cores overlaps drawing with products; the numbers must not change."""
    settings = {"width": 160, "batch_size": 160, "depth": 6, "residual": 0.1, "measures": ["orthogonality_gap"]}
    alone = simulate(generator=torch.Generator().manual_seed(9), **settings)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert engine.WORTH_OVERLAPPING <= 160 * 160
    ahead = simulate(generator=torch.Generator().manual_seed(9), **settings)
    assert ahead.averages == alone.averages


PLAIN: tuple[dict[str, Any], ...] = (
    {"width": 24, "batch_size": 4},
    {"width": 24, "batch_size": 4, "centring": False, "activation": "relu"},
    {"width": 10, "batch_size": 10, "centring": False, "residual": 0.5},
    {"width": 12, "batch_size": 20, "weights": "uniform", "norm": "rms", "activation": "tanh"},
    {
        "width": 16,
        "batch_size": 5,
        "weights": "orthogonal",
        "norm": "layer",
        "placement": "after",
        "activation": "tanh",
    },
    {"width": 20, "batch_size": 6, "eps": 0.5, "gain": 2.0, "activation": "tanh"},
)


def plain_gaps(options: dict[str, Any], *, layers: int, runs: int, rng: np.random.Generator) -> np.ndarray:
    """The orthogonality gap of each run, averaged over the second half of the layers: the definition, in a loop."""
    width, samples, gamma = options["width"], options["batch_size"], options.get("residual", math.inf)
    norm, eps, gain = options.get("norm", "batch"), options.get("eps", 0.0), options.get("gain", 1.0)
    function = {"identity": lambda x: x, "relu": lambda x: np.maximum(x, 0), "tanh": np.tanh}[
        options.get("activation", "identity")
    ]

    def normalize(x: np.ndarray) -> np.ndarray:
        axis = 0 if norm == "batch" else 1
        if norm == "layer" or (norm == "batch" and options.get("centring", True)):
            x = x - x.mean(axis=axis, keepdims=True)
        return x / np.sqrt((x**2).mean(axis=axis, keepdims=True) + eps)

    def draw() -> np.ndarray:
        if options.get("weights") == "orthogonal":
            return stats.ortho_group.rvs(width, random_state=rng) * math.sqrt(width)
        if options.get("weights") == "uniform":
            return rng.uniform(-math.sqrt(3), math.sqrt(3), (width, width))
        return rng.standard_normal((width, width))

    found = []
    for _ in range(runs):
        hidden, gaps = rng.standard_normal((samples, width)), []
        for layer in range(layers):
            product = hidden @ draw().T
            mixed = product / math.sqrt(width) if math.isinf(gamma) else hidden + gamma * product
            after = options.get("placement") == "after"
            hidden = normalize(function(gain * mixed)) if after else function(gain * normalize(mixed))
            gram = hidden @ hidden.T
            if layer >= layers // 2:
                gaps.append(np.linalg.norm(gram / np.trace(gram) - np.eye(samples) / samples))
        found.append(np.mean(gaps))
    return np.array(found)


@pytest.mark.parametrize("options", PLAIN, ids=str)
def test_averages_equal_those_of_a_plain_loop(options):
    """Nothing shared with the library: numpy, explicit matrices, the definition of the gap."""
    plain = plain_gaps(options, layers=40, runs=60, rng=np.random.default_rng(0))
    settings = {"depth": 40, "burn_in": 20, "runs": 300, "measures": ["orthogonality_gap"], **options}
    ours = simulate(generator=torch.Generator().manual_seed(0), **settings).averages["orthogonality_gap"]
    error = math.hypot(float(plain.std(ddof=1)) / math.sqrt(len(plain)), ours.stderr)
    assert_within_standard_errors(ours.value, float(plain.mean()), error)
