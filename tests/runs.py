"""Small trainings that the tests of sounding.train share."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from generators import seeded
from sounding.models import Mlp
from sounding.train import History, Point, Recipe, train_, train_together_
from tolerance import TOLERANCE


def make_data(*, samples: int = 96, features: int = 6, classes: int = 3, seed: int = 0) -> tuple[Tensor, ...]:
    """Gaussian classes that overlap: training and test inputs and labels, float64."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=generator, dtype=torch.float64)
    parts: list[Tensor] = []
    for count in (samples, samples // 2):
        labels = torch.randint(classes, (count,), generator=generator)
        noise = torch.randn(count, features, generator=generator, dtype=torch.float64)
        parts += [centres[labels] + noise, labels]
    return tuple(parts)


def make_images(*, samples: int = 48, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise images of one channel and three labels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 1, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(3, (samples,), generator=generator)


def make_mlp(seed: int, **options: Any) -> nn.Module:
    """A small perceptron in float64."""
    chosen = {"depth": 3, "width": 8, **options}
    return Mlp(6, 3, generator=torch.Generator().manual_seed(seed), **chosen).double()


def make_conv(seed: int, **options: Any) -> nn.Module:
    """A small convolutional network with batch norm in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False),
        nn.BatchNorm2d(3, **options),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).double()


def both(
    networks: Sequence[nn.Module],
    data: Any,
    rates: Sequence[float],
    recipe: Recipe,
    *,
    orders: Sequence[int] | None = None,
    **options: Any,
) -> tuple[list[nn.Module], History, list[nn.Module], list[History]]:
    """The same runs in a stack and one by one: networks and histories of either.

    `orders` are the seeds of each run's own order of the samples; without them all share one.
    """
    stacked = [copy.deepcopy(network) for network in networks]
    alone = [copy.deepcopy(network) for network in networks]
    shared = {seed: seeded(seed) for seed in orders or ()}
    generator = seeded() if orders is None else [shared[seed] for seed in orders]
    together = train_together_(stacked, data, learning_rates=rates, recipe=recipe, generator=generator, **options)
    apart = [
        train_(network, data, learning_rate=rate, recipe=recipe, generator=seeded(seed))
        for network, rate, seed in zip(alone, rates, orders or [0] * len(alone), strict=True)
    ]
    return stacked, together, alone, apart


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Over parameters and buffers, relative to the size of each."""
    found = 0.0
    for (name, mine), (_, theirs) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        if not mine.is_floating_point():
            assert torch.equal(mine, theirs), name
            continue
        size = float(torch.linalg.vector_norm(theirs).clamp_min(1e-3))
        found = max(found, float(torch.linalg.vector_norm(mine - theirs)) / size)
    return found


def numbers_of(point: Point) -> list[float]:
    """All but the run, in which a stack and a run alone differ."""
    return [-1.0 if value is None else value for value in point[1:]]


def assert_same(
    stacked: Sequence[nn.Module], together: History, alone: Sequence[nn.Module], apart: Sequence[History]
) -> None:
    """Weights, curves and divergence of a stack are those of the runs alone, to rounding."""
    for run, (one, other) in enumerate(zip(stacked, alone, strict=True)):
        assert largest_difference(one, other) < TOLERANCE.two_routes
        for mine, theirs in zip(together.curve(run), apart[run].curve(0), strict=True):
            assert numbers_of(mine) == pytest.approx(numbers_of(theirs), rel=TOLERANCE.two_routes)
    assert together.diverged == tuple(history.diverged[0] for history in apart)
