"""Training perceptrons of many depths: what the figures on training share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.claims.claim import Context
from sounding.claims.number import Number, exact, over_runs, student
from sounding.claims.train import train_alike_
from sounding.data import load_dataset
from sounding.models import Mlp
from sounding.train import History, Recipe, choose_rates

Array = np.ndarray[Any, Any]


def load_pixels(name: str, context: Context) -> tuple[torch.Tensor, ...]:
    """Flat training and test images with pixels in [0, 1], each followed by their labels."""
    dataset = load_dataset(name, device=context.device)
    factor = 1.0 if dataset.train_inputs.is_floating_point() else 1 / 255
    train, test = (dataset.part(part)[0].flatten(1).float() * factor for part in ("train", "test"))
    return train, dataset.train_labels, test, dataset.test_labels


@dataclass(frozen=True)
class Trained:
    """Runs of one architecture at the best learning rate of a grid.

    Args:
        rate: the chosen one.
        curves: (runs, evaluations) of each recorded quantity, by name.
        epochs: of the evaluations.
        networks: of those runs, trained.
    """

    rate: float
    curves: dict[str, Array]
    epochs: Array
    networks: list[Mlp]

    def final(self, name: str) -> Number:
        """The last value, over runs."""
        return over_runs(self.curves[name][:, -1])


def train_grid(
    make: Callable[[torch.Generator], Mlp],
    data: Sequence[torch.Tensor],
    *,
    rates: Sequence[float],
    runs: int,
    recipe: Recipe,
    context: Context,
    offset: int,
) -> Trained:
    """Train `runs` initializations at every rate together; the rate is chosen by the mean of the last training loss.

    A run has weights and an order of the samples of its own, which are the same at all rates.
    Where every rate diverges, the smallest is reported, with its losses as they were before.
    """
    orders = [context.generator(1000 * offset + 500 + run, device=context.device) for run in range(runs)]
    networks = [make(context.generator(1000 * offset + run)) for _ in rates for run in range(runs)]
    history = train_alike_(networks, tuple(data), recipe, context, rates=rates, orders=orders)
    choice = choose_rates(history, [0] * len(networks))[0]
    picked = list(choice.runs) if choice.learning_rate is not None else list(range(runs))
    rate = float(rates[picked[0] // runs])
    epochs = np.array([point.epoch for point in history.curve(0)])
    return Trained(rate, curves_of(history, picked), epochs, [networks[run] for run in picked])


def curves_of(history: History, runs: Sequence[int]) -> dict[str, Array]:
    """(runs, evaluations) of losses and accuracies; NaN where there is none."""
    names = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
    curves = [history.curve(run) for run in runs]
    return {
        name: np.array([[np.nan if (v := getattr(p, name)) is None else v for p in curve] for curve in curves])
        for name in names
    }


def draw_samples(inputs: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Indices of so many samples, by chance."""
    return torch.randperm(len(inputs), generator=generator)[:count].to(inputs.device)


def make_one_sided_(network: nn.Module, generator: torch.Generator) -> None:
    """Give every linear map and convolution weights from U[0, 2/√fan_in]."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.uniform_(0, 2 / module.weight[0].numel() ** 0.5, generator=generator)


def last_hidden(network: Mlp, inputs: torch.Tensor) -> torch.Tensor:
    """The last hidden representation of a batch, with the batch's own statistics."""
    parts = list(network.children())[:-1]
    hidden = inputs.flatten(1).to(next(network.parameters()).device)
    with torch.no_grad():
        for part in parts:
            hidden = part(hidden)
    return hidden


def difference(first: Array, second: Array) -> Number:
    """The difference of two means over independent runs, with Welch's interval at the level of the ledger."""
    return contrast([first], [second])


def contrast(added: Sequence[Array], subtracted: Sequence[Array]) -> Number:
    """Means over independent runs, added and subtracted: every group's spread counts, its degrees as Welch has them."""
    groups = [np.asarray(group, dtype=np.float64) for group in (*added, *subtracted)]
    means = [float(group.mean()) for group in groups]
    value = sum(means[: len(added)]) - sum(means[len(added) :])
    parts = np.array([group.var(ddof=1) / len(group) for group in groups])
    if not parts.sum() > 0:
        return exact(value)
    freedom = parts.sum() ** 2 / np.sum(parts**2 / [len(group) - 1 for group in groups])
    half = student(float(freedom)) * math.sqrt(float(parts.sum()))
    return Number(value, value - half, value + half, sum(len(group) for group in groups))
