"""Networks of one architecture that a row trains together, and what they make of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import sounding.train
from sounding.activations.activation import Array
from sounding.claims.claim import Context
from sounding.train import History, Recipe


def train_alike_(
    networks: Sequence[nn.Module],
    data: Any,
    recipe: Recipe,
    context: Context,
    *,
    rates: Sequence[float],
    orders: torch.Generator | Sequence[torch.Generator],
) -> History:
    """Train networks as one on the device of the context, in blocks of equal length: one block for each rate.

    `orders` are generators that order the samples, one for each run of a block; one for all shares an order.
    """
    each = [rate for rate in rates for _ in range(len(networks) // len(rates))]
    if not isinstance(orders, torch.Generator):  # one order for each run of a block, the same in all blocks
        orders = [*orders] * (len(networks) // len(orders))
    return sounding.train.train_together_(
        networks, data, learning_rates=each, recipe=recipe, generator=orders, device=context.device
    )


def curves_of(history: History, runs: Iterable[int]) -> dict[str, Array]:
    """(runs, evaluations) of steps, losses and accuracies; NaN where there is none."""
    names = ("step", "train_loss", "train_accuracy", "test_loss", "test_accuracy")
    curves = [history.curve(run) for run in runs]
    # float64 makes NaN of None
    return {name: np.array([[getattr(p, name) for p in curve] for curve in curves], dtype=np.float64) for name in names}


def evenly(steps: int, looks: int) -> tuple[int, ...]:
    """The steps after which a training of so many steps is looked at, the last of which is its end."""
    return tuple(int(step) for step in np.linspace(0, steps, looks + 1)[1:])


def last_hidden(network: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """What reaches the last layer from a batch."""
    hidden = inputs.flatten(1).to(next(network.parameters()).device)
    with torch.no_grad():
        for layer in list(network.children())[:-1]:
            hidden = layer(hidden)
    return hidden
