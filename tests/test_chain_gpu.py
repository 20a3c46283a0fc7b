"""Chains on a GPU have the CPU's law, in every way of running them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sounding import simulate
from sounding.chain import gpu, simulate_many
from tolerance import TOLERANCE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MEASURES = ("orthogonality_gap", "participation_ratio", "mean_cosine", "log_norm", "numerical_rank")
LAWS: tuple[dict[str, Any], ...] = (
    {"width": 32, "batch_size": 4, "centring": False},
    {"width": 100, "batch_size": 11, "activation": "relu"},
    {"width": 40, "batch_size": 6, "input": "repeated:3"},
    {"width": 40, "batch_size": 20, "activation": "tanh", "gain": "power:0.3"},
    {"width": 32, "batch_size": 8, "residual": 0.3},
    {"width": 24, "batch_size": 24, "weights": "orthogonal", "centring": False},
    {"width": 24, "batch_size": 6, "norm": "none", "activation": "relu"},
    {"width": 24, "batch_size": 30, "norm": "rms", "placement": "after", "activation": "gelu"},
)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("every", [1, 7])
def test_the_gpu_has_the_law_of_the_cpu(law, every):
    settings = {"depth": 50, "burn_in": 10, "every": every, "measures": MEASURES, **law}
    cpu = simulate(runs=200, generator=torch.Generator().manual_seed(0), **settings)
    cuda = simulate(runs=400, generator=torch.Generator().manual_seed(1), device="cuda", profile=True, **settings)
    assert cuda.profile.layers == tuple(range(0, 51, every))
    for measure in MEASURES:
        a, b = cpu.averages[measure], cuda.averages[measure]
        error = math.hypot(a.stderr or 0.0, b.stderr or 0.0)
        bound = TOLERANCE.standard_errors * error + TOLERANCE.float32_forward * abs(a.value)
        assert abs(a.value - b.value) <= bound, (measure, a, b)


def test_a_seed_repeats_on_the_gpu():
    for law in LAWS[:5]:
        runs = [
            simulate(depth=30, runs=20, device="cuda", generator=torch.Generator().manual_seed(2), **law)
            for _ in range(2)
        ]
        assert runs[0].averages == runs[1].averages


def test_the_streaming_kernel_follows_the_reference_from_nearly_collinear_samples():
    settings = {
        "width": 64,
        "batch_size": 3,
        "centring": False,
        "input": "collinear:1e-5",
        "depth": 30,
        "profile": True,
    }
    one = simulate(runs=300, generator=torch.Generator().manual_seed(3), measures=["mean_cosine"], **settings)
    two = simulate(
        runs=900, generator=torch.Generator().manual_seed(4), measures=["mean_cosine"], device="cuda", **settings
    )
    for a, b in zip(one.profile.rows[1:], two.profile.rows[1:], strict=True):
        error = math.hypot(a.stderr, b.stderr)
        assert abs(a.value - b.value) <= TOLERANCE.standard_errors * error + TOLERANCE.float32_forward


def test_strengths_share_a_batch():
    settings = {"widths": [16], "residuals": [0.1, math.inf], "depth": 60, "burn_in": 20, "centring": False}
    cpu = simulate_many(runs=100, generator=torch.Generator().manual_seed(5), measures=["soft_rank"], **settings)
    cuda = simulate_many(
        runs=200, generator=torch.Generator().manual_seed(6), measures=["soft_rank"], device="cuda", **settings
    )
    for a, b in zip(cpu, cuda, strict=True):
        one, two = a.averages["soft_rank"], b.averages["soft_rank"]
        assert abs(one.value - two.value) <= TOLERANCE.standard_errors * math.hypot(one.stderr, two.stderr)


def test_which_laws_stream():
    assert gpu.has_triton()
    assert gpu.STREAMED_SAMPLES >= 10


@pytest.mark.parametrize(
    "law",
    [
        {"width": 1000, "batch_size": 9, "centring": False, "depth": 512},
        {"width": 48, "batch_size": 40, "residual": 0.2, "depth": 512},
        {"width": 48, "batch_size": 40, "residual": 0.2, "depth": 3},
    ],
    ids=str,
)
def test_compiling_is_set_up_and_leaves_the_numbers_alone(law):
    first, second = (
        simulate(runs=2112, device="cuda", measures=["orthogonality_gap"], generator=torch.Generator().manual_seed(7),
                 **law)
        for _ in range(2)
    )  # fmt: skip
    assert first.averages == second.averages
    assert first.setup_seconds > 0
    assert first.seconds < 3 * second.seconds + 0.05
    assert first.chain_layers_per_second == pytest.approx(2112 * law["depth"] / first.seconds)


def test_a_backward_chain_has_the_growth_of_the_cpu():
    settings = {"width": 64, "batch_size": 8, "depth": 60, "activation": "relu", "backward": True}
    cpu = simulate(runs=40, generator=torch.Generator().manual_seed(8), measures=["log_norm"], **settings)
    cuda = simulate(
        runs=80, generator=torch.Generator().manual_seed(9), measures=["log_norm"], device="cuda", **settings
    )
    a, b = cpu.gradients["log_rate"], cuda.gradients["log_rate"]
    assert abs(a.value - b.value) <= TOLERANCE.standard_errors * math.hypot(a.stderr, b.stderr)
