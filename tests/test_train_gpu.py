"""On a GPU the step is a graph: the same trajectories, masks and checkpoints as operation by operation on a CPU."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch

from runs import largest_difference, make_conv, make_data, make_images, make_mlp, seeded
from sounding.train import Checkpoint, Progress, Recipe, train_, train_together_
from sounding.train.products import Products
from tolerance import TOLERANCE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "rmsprop"])
def test_a_graph_goes_the_way_of_the_processor(optimizer: str, own: bool) -> None:
    """float64 on both, so that only rounding differs; convolutions and perceptrons."""
    for make, data in ((make_mlp_without_bias, make_data()), (make_conv, make_images())):
        recipe = Recipe(optimizer=optimizer, batch_size=16, epochs=2, clipping=0.1, weight_decay=0.01)
        here = [make(seed) for seed in range(3)]
        there = [copy.deepcopy(network) for network in here]
        rates = [0.01, 0.02, 0.005]
        orders = [[seeded(seed) for seed in range(3)] if own else seeded() for _ in range(2)]
        mine = train_together_(here, data, learning_rates=rates, recipe=recipe, generator=orders[0])
        theirs = train_together_(there, data, learning_rates=rates, recipe=recipe, generator=orders[1], device="cuda")
        assert theirs.record["device"] != mine.record["device"]
        for one, other in zip(here, there, strict=True):
            assert largest_difference(one, other) < TOLERANCE.six_digits


@pytest.mark.parametrize("samples", [5, 20, 96])
def test_fused_batch_norm_is_the_reference(samples: int) -> None:
    """Outputs and all gradients of the kernels, at sizes that are no powers of two, for every kind of norm."""
    for options in (
        {},
        {"affine": False},
        {"centring": False, "eps": 0.3},
        {"activation": "tanh"},
        {"placement": "after"},
        {"running": False, "shift": 0.5},
    ):
        networks = [make_mlp(seed, norm="batch", width=37, **options) for seed in range(3)]
        if "eps" in options:
            networks[1][0].norm.eps = 0.7
        found = []
        for device in ("cpu", "cuda"):
            stack = Products(networks, torch.device(device))
            outputs, fresh = stack.run(make_data()[0][:samples].to(device), "batch")
            gradients = torch.autograd.grad(outputs.square().sum(), stack.parameters)
            found.append([tensor.detach().cpu() for tensor in (outputs, *gradients, *fresh.values())])
        for mine, theirs in zip(*found, strict=True):
            size = float(torch.linalg.vector_norm(theirs.double()).clamp_min(1.0))
            assert float(torch.linalg.vector_norm((mine - theirs).double())) < TOLERANCE.two_routes * size


def make_mlp_without_bias(seed: int):
    return make_mlp(seed, norm="batch", bias=False)


def test_a_run_in_a_graph_goes_the_way_it_goes_alone_on_the_device() -> None:
    networks = [make_mlp_without_bias(seed) for seed in range(3)]
    alone = [copy.deepcopy(network) for network in networks]
    recipe = Recipe(optimizer="adam", batch_size=16, epochs=2)
    train_together_(networks, make_data(), learning_rates=[0.01] * 3, recipe=recipe, generator=seeded(), device="cuda")
    for network, other in zip(networks, alone, strict=True):
        train_(other, make_data(), learning_rate=0.01, recipe=recipe, generator=seeded(), device="cuda")
        assert largest_difference(network, other.cpu()) < TOLERANCE.six_digits


def test_a_diverged_run_is_masked_in_the_graph() -> None:
    networks = [make_mlp_without_bias(seed) for seed in range(3)]
    with torch.no_grad():
        networks[1].readout.weight.fill_(math.inf)
    lost = copy.deepcopy(networks[1])
    recipe = Recipe(optimizer="adam", batch_size=16, epochs=2)
    history = train_together_(
        networks, make_data(), learning_rates=[0.01] * 3, recipe=recipe, generator=seeded(), device="cuda"
    )
    assert history.diverged == (None, 1, None)
    assert all(torch.equal(a, b) for a, b in zip(networks[1].parameters(), lost.parameters(), strict=True))
    assert all(bool(torch.isfinite(parameter).all()) for parameter in networks[0].parameters())


def test_the_same_seed_gives_the_same_bits_on_the_device() -> None:
    ends = []
    for _ in range(2):
        networks = [make_mlp_without_bias(seed).float() for seed in range(3)]
        data = tuple(part.float() if part.is_floating_point() else part for part in make_data())
        recipe = Recipe(optimizer="momentum", batch_size=16, epochs=2)
        history = train_together_(
            networks, data, learning_rates=[0.01] * 3, recipe=recipe, generator=seeded(), device="cuda"
        )
        ends.append((history, [parameter.clone() for network in networks for parameter in network.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


def test_an_interrupted_graph_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def start() -> list:
        return [make_mlp_without_bias(seed) for seed in range(3)]

    def train(networks: list, **options):
        recipe = Recipe(optimizer="adam", batch_size=16, epochs=3)
        return train_together_(
            networks,
            make_data(),
            learning_rates=[0.01] * 3,
            recipe=recipe,
            generator=seeded(),
            device="cuda",
            **options,
        )

    def stop(progress: Progress) -> None:
        if progress.step >= 6:
            raise KeyboardInterrupt

    whole = start()
    expected = train(whole)
    with pytest.raises(KeyboardInterrupt):
        train(start(), checkpoint=Checkpoint(tmp_path / "run.pt"), progress=stop)
    resumed = start()
    assert train(resumed, checkpoint=Checkpoint(tmp_path / "run.pt")) == expected
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
