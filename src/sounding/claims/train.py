"""Networks of one architecture that a row trains together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import sounding.train
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
    """Train networks as one on the device of the context.

    Args:
        rates: a learning rate for each, or several for as many parts of equal length.
        orders: generators that order the samples, in the same way; one for all shares an order.
    """
    each = [rate for rate in rates for _ in range(len(networks) // len(rates))]
    if not isinstance(orders, torch.Generator):
        orders = [*orders] * (len(networks) // len(orders))
    return sounding.train.train_together_(
        networks, data, learning_rates=each, recipe=recipe, generator=orders, device=context.device
    )
