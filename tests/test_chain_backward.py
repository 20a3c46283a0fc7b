"""Backward chains: against autograd, against theory, and at depth 1000."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from generators import seeded
from sounding import simulate
from sounding.chain.backward import bulk, growth_of
from sounding.chain.law import make_law
from sounding.chain.step import Chains
from sounding.errors import UsageError
from tolerance import TOLERANCE, assert_within_standard_errors


def test_log_norms_equal_autograd_through_the_whole_network():
    """The same seed, the same weights: one autograd pass through all layers gives the same norms."""
    from sounding.chain.engine import make_tasks
    from sounding.chain.law import normalize_
    from sounding.chain.run import Options, _make_plan

    options = Options(
        depth=5, runs=1, burn_in=0, every=1, measures=["log_norm"], profile=True, input="gaussian",
        explicit_weights=True, dtype="float64", device="cpu",
    )  # fmt: skip
    law = make_law(width=6, batch_size=4, activation="tanh", dtype="float64")
    plan = _make_plan((law,), options, generator=seeded(0))
    task = make_tasks(plan, generator=seeded(0))[0]
    generator = torch.Generator().manual_seed(task.seed)
    states = [torch.randn(1, 4, 6, generator=generator, dtype=torch.float64).requires_grad_()]
    for _ in range(5):
        weight = torch.randn(1, 6, 6, generator=generator, dtype=torch.float64)
        states.append(torch.tanh(normalize_(states[-1] @ weight.mT * 6**-0.5, law)))
        states[-1].retain_grad()
    cotangent = torch.randn(1, 4, 6, generator=generator, dtype=torch.float64)
    states[-1].backward(cotangent)
    expected = [math.log(float(state.grad.norm() / cotangent.norm())) for state in states]
    result = simulate(
        width=6, batch_size=4, depth=5, activation="tanh", dtype="float64", backward=True, profile=True,
        measures=["log_norm"], generator=seeded(0),
    )  # fmt: skip
    assert np.allclose(result.profile.series("gradient_log_norm").value, expected, atol=TOLERANCE.closed_form)


def test_linear_batch_norm_networks_explode_at_the_known_rate():
    """meanfield2019: with the identity, gradients grow by (B − 2)/(B − 3) per layer in squared norm, at large width."""
    batch = 8
    result = simulate(
        width=400, batch_size=batch, depth=60, runs=6, burn_in=10, backward=True, measures=["log_norm"],
        generator=seeded(1),
    )  # fmt: skip
    growth = result.gradients["growth"]
    assert_within_standard_errors(growth.value, (batch - 2) / (batch - 3), growth.stderr, allowance=0.02)
    low, high = growth.interval()
    assert low < growth.value < high
    assert result.gradients["log_rate"].value == pytest.approx(0.5 * math.log(growth.value))


@pytest.mark.parametrize("weights", ["gaussian", "orthogonal"])
def test_a_thousand_layers_stay_finite(weights):
    result = simulate(
        width=12, batch_size=6, depth=1000, runs=2, activation="relu", weights=weights, backward=True, every=100,
        profile=True, measures=["log_norm"], generator=seeded(2),
    )  # fmt: skip
    logs = result.profile.series("gradient_log_norm")
    assert np.all(np.isfinite(logs.value))
    assert logs.value[0] > 100
    assert logs.layer[0] == 0
    assert logs.layer[-1] == 1000
    assert logs.value[-1] == 0


def test_orthogonal_weights_without_centring_do_not_explode():
    """thesis2024 chapter 6: at isometry (n = d, orthogonal input) BN is the identity and gradients keep their norm."""
    result = simulate(
        width=16, batch_size=16, depth=200, runs=4, weights="orthogonal", input="near-orthogonal:1e-3", centring=False,
        backward=True, measures=["isometry_gap"], dtype="float64", generator=seeded(3),
    )  # fmt: skip
    assert abs(result.gradients["log_rate"].value) < TOLERANCE.three_digits
    gaussian = simulate(
        width=16, batch_size=16, depth=200, runs=4, input="near-orthogonal:1e-3", centring=False,
        backward=True, measures=["isometry_gap"], dtype="float64", generator=seeded(3),
    )  # fmt: skip
    assert gaussian.gradients["log_rate"].value > 0.01


def test_growth_from_known_slopes():
    layers = np.arange(101.0)
    logs = np.stack([-0.1 * layers, -0.2 * layers])
    found = growth_of(logs, burn_in=10)
    assert found["log_rate"].value == pytest.approx(0.15)
    assert found["log_rate"].stderr == pytest.approx(0.05)
    assert found["growth"].value == pytest.approx(math.exp(0.3))
    assert growth_of(logs[:1], burn_in=10)["log_rate"].stderr == pytest.approx(0, abs=TOLERANCE.exact)
    assert bulk(100, 0) == (10, 90)
    assert bulk(2, 0) == (0, 2)


def test_backward_chains_refuse_what_they_cannot_do():
    with pytest.raises(UsageError, match="normalization"):
        simulate(width=4, batch_size=2, depth=3, norm="none", backward=True)
    with pytest.raises(UsageError, match="depth of at least 2"):
        simulate(width=4, batch_size=2, depth=1, backward=True)


@pytest.mark.parametrize("weights", ["gaussian", "orthogonal", "uniform"])
@pytest.mark.parametrize("width", [40, 97])
def test_the_way_back_draws_the_weights_of_the_way_forward(weights, width):
    law = make_law(width=width, batch_size=5, weights=weights, residual=0.3, activation="tanh")
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(3, 5, width, generator=generator, dtype=torch.float64)
    chains = Chains([law] * 3, state.clone(), route="explicit", generator=generator)
    for _ in range(3):
        before, random = chains.state.clone(), generator.get_state()
        chains.step()
    forward = chains.state.clone()
    generator.set_state(random)
    chains.state = before.requires_grad_()
    assert torch.allclose(chains.finish(chains.multiply(), 1.0), forward, rtol=TOLERANCE.exact, atol=TOLERANCE.exact)
