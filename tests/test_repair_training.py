"""And they train: digits, 50 layers of width 128, 300 SGD steps of batch 128, the same five rates for all.

The table over all cures and five seeds is docs/cures.md; here the claims, on fewer seeds. A claim "at least" needs one
rate that shows it, a claim "under" needs all five.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from sounding.models import Mlp
from sounding.repair import (
    add_batchnorm_,
    haar_,
    raise_rank_,
    shape_activations_,
    swap_normalization_,
    tune_batchnorm_,
)
from sounding.train.products import Products
from tolerance import TOLERANCE

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
import compare_cures
from compare_cures import NORMED, PLAIN, RATES, RESIDUAL, TANH, load_digits, make_network

SEEDS = 2


def train(networks: list[torch.nn.Module], rates: tuple[float, ...]) -> Tensor:
    return torch.tensor(compare_cures.train(networks, load_digits(), rates=rates, seed=7))


def make(kind: str, seed: int) -> torch.nn.Module:
    return make_network(kind, 50, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("swapped", ["batch", "layer", "rms"])
@pytest.mark.parametrize("kind", [PLAIN, NORMED, TANH, RESIDUAL])
def test_networks_together_are_the_networks_apart(kind: str, swapped: Literal["batch", "layer", "rms"]) -> None:
    """Two routes to one forward pass and one SGD step: stacked tensors and torch's own modules."""
    inputs, targets = load_digits()
    batch = inputs[:64]
    models = [make_network(kind, 5, torch.Generator().manual_seed(seed)) for seed in range(2)]
    for seed, model in enumerate(models):
        haar_(model, generator=torch.Generator().manual_seed(seed))
        if kind == TANH:
            shape_activations_(model, batch, exponent=0.4 + 0.1 * seed)
        if kind == PLAIN:
            add_batchnorm_(model, batch)
        if kind != RESIDUAL and swapped != "batch":
            swap_normalization_(model, kind=swapped)
    together, _ = Products(models, torch.device("cpu")).run(batch, "batch")
    for mine, model in zip(together, models, strict=True):
        assert torch.allclose(mine, model(batch), atol=TOLERANCE.float32_forward)
    accuracy = compare_cures.train(models, (batch, targets[:64]), rates=(0.01,), steps=3, batch_size=64)
    for mine, model in zip(accuracy, models, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), targets[:64]).backward()
            optimizer.step()
        # one sample of 64 may stand on the edge between two classes
        assert abs(float(mine[0]) - float((model(batch).argmax(1) == targets[:64]).double().mean())) <= 1.5 / 64


@pytest.mark.slow
def test_tuned_batch_norm_trains_a_deep_relu_network() -> None:
    """From under 70% at every rate to at least 95%: theory's choice of eps and shift."""
    inputs, _ = load_digits()
    plain = train([make(NORMED, 0)], RATES)
    assert float(plain.max()) < 0.70
    tuned = [make(NORMED, seed) for seed in range(SEEDS)]
    for model in tuned:
        tune_batchnorm_(model, inputs[:128])
    best = train(tuned, (0.01,))[:, 0]
    low = float(best.mean() - 12.706 * best.std() / math.sqrt(SEEDS))  # Student's 97.5% point for 1 degree of freedom
    assert low >= 0.95


@pytest.mark.slow
def test_haar_weights_and_shaped_gains_train_at_more_rates() -> None:
    inputs, _ = load_digits()
    rates = (0.003, 0.1)
    plain = train([make(TANH, 0)], rates)
    shaped = [make(TANH, seed) for seed in range(SEEDS)]
    for seed, model in enumerate(shaped):
        generator = torch.Generator().manual_seed(seed)
        haar_(model, generator=generator)
        shape_activations_(model, inputs[:128], exponent=0.4)
    trained = train(shaped, rates)
    assert float(trained[:, 1].min()) >= 0.98
    # the ends of the range of rates: without shaping neither reaches 95%, with it both do
    assert float(plain.max()) < 0.95
    assert float(trained.mean(0).min()) >= 0.95


@pytest.mark.slow
def test_raising_the_rank_helps_a_plain_relu_network() -> None:
    """Paired over seeds at the small rates, where both are at their best."""
    inputs, _ = load_digits()
    rates = (0.003, 0.01)
    plain = [make(PLAIN, seed) for seed in range(SEEDS)]
    raised = [make(PLAIN, seed) for seed in range(SEEDS)]
    for seed, model in enumerate(raised):
        raise_rank_(model, inputs, generator=torch.Generator().manual_seed(seed))
    before, after = train(plain, rates).amax(1), train(raised, rates).amax(1)
    assert float((after - before).mean()) > 0.05
    assert bool((after > before).all())


def test_networks_of_the_table_are_what_it_says() -> None:
    """Depth counts hidden layers of width 128; pixels are standardized one by one and blank ones are zero."""
    inputs, targets = load_digits()
    assert inputs.shape == (1797, 64)
    assert len(targets.unique()) == 10
    spread = inputs.std(0, correction=0)
    assert torch.allclose(spread[spread > 0], torch.ones(61), atol=TOLERANCE.float32_forward)
    model = make_network(NORMED, 50, torch.Generator().manual_seed(0))
    assert isinstance(model, Mlp)
    assert sum(isinstance(module, torch.nn.Linear) for module in model.modules()) == 51
