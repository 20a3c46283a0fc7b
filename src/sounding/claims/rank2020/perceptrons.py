"""Training perceptrons of many depths: what the figures on training share, and figure 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.claims.claim import Context, Outcome, Values, pick
from sounding.claims.number import Number, exact, highest, lowest, over_runs, student
from sounding.claims.picture import Panel, Picture, Series, level, points_of
from sounding.claims.train import curves_of, last_hidden, train_alike_
from sounding.data import load_dataset
from sounding.measures import numerical_rank
from sounding.models import Mlp
from sounding.train import Recipe, choose_rates

Array = np.ndarray[Any, Any]


def load_pixels(name: str, context: Context) -> tuple[torch.Tensor, ...]:
    """Flat training and test images with pixels in [0, 1], each followed by their labels."""
    dataset = load_dataset(name, device=context.device)
    factor = 1.0 if dataset.train_inputs.is_floating_point() else 1 / 255  # bytes become [0, 1]
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
    orders = context.generators(1000 * offset + 500, runs)
    networks = [make(context.generator(1000 * offset + run)) for _ in rates for run in range(runs)]
    history = train_alike_(networks, tuple(data), recipe, context, rates=rates, orders=orders)
    choice = choose_rates(history, [0] * len(networks))[0]
    # where all diverge the smallest rate is shown as it went
    picked = list(choice.runs) if choice.learning_rate is not None else list(range(runs))
    rate = float(rates[picked[0] // runs])
    epochs = np.array([point.epoch for point in history.curve(0)])
    return Trained(rate, curves_of(history, picked), epochs, [networks[run] for run in picked])


def draw_samples(inputs: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Indices of so many samples, by chance."""
    return torch.randperm(len(inputs), generator=generator)[:count].to(inputs.device)


def make_one_sided_(network: nn.Module, generator: torch.Generator) -> None:
    """Give every linear map and convolution weights from U[0, 2/√fan_in]."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                # the variance of PyTorch's own law, but one sign
                module.weight.uniform_(0, 2 / module.weight[0].numel() ** 0.5, generator=generator)


def difference(first: Array, second: Array) -> Number:
    """The difference of two means over independent runs, with Welch's interval at the level of the ledger."""
    return contrast([first], [second])


def contrast(added: Sequence[Array], subtracted: Sequence[Array]) -> Number:
    """Means over independent runs, added and subtracted: every group's spread counts, its degrees as Welch has them."""
    groups = [np.asarray(group, dtype=np.float64) for group in (*added, *subtracted)]
    means = [float(group.mean()) for group in groups]
    value = sum(means[: len(added)]) - sum(means[len(added) :])
    parts = np.array([group.var(ddof=1) / len(group) for group in groups])
    if not parts.sum() > 0:  # no spread: runs agree to the last digit
        return exact(value)
    freedom = parts.sum() ** 2 / np.sum(parts**2 / [len(group) - 1 for group in groups])
    half = student(float(freedom)) * math.sqrt(float(parts.sum()))
    return Number(value, value - half, value + half, sum(len(group) for group in groups))


LEARNING_DEPTH = 10  # beyond so many layers the paper's plain networks do not learn


def make_fig1_network(generator: torch.Generator, *, features: int, depth: int, width: int, norm: str) -> Mlp:
    """PyTorch's initial weights; batch norm without biases, affine map or running statistics, as released."""
    released: dict[str, Any] = {"norm": "batch", "bias": False, "affine": False, "running": False, "eps": 0.0}
    law = {} if norm == "none" else released
    return Mlp(features, 10, depth=depth, width=width, init="torch", generator=generator, **law)


def measure_fig1(values: Values, context: Context) -> Outcome:
    """The rank at the start and the training accuracy at the end, by depth, with and without batch norm."""
    inputs, labels, *_ = load_pixels(values["dataset"], context)
    released: dict[str, Any] = {"sampling": "replacement", "statistics": "batch"}
    recipe = Recipe(**pick(values, "batch_size steps"), **released, evaluate="end")
    names = {"none": "no norm", "batch": "batch norm"}
    ranks, scores = ({norm: list[Number]() for norm in names} for _ in range(2))
    used: dict[str, list[float]] = {norm: [] for norm in names}
    for _, (norm, (index, depth)) in context.each(product(names, enumerate(values["depths"]))):
        make = partial(make_fig1_network, features=inputs.shape[1], depth=depth, width=values["width"], norm=norm)
        offset = 2 * index + (norm == "batch")  # networks with and without norm share nothing
        started = [make(context.generator(1000 * offset + run)) for run in range(values["runs"])]
        draws = [context.generator(1000 * offset + 700 + run) for run in range(values["runs"])]
        share = []
        for network, generator in zip(started, draws, strict=True):
            batch = inputs[draw_samples(inputs, values["rank_batch"], generator)].cpu()
            share.append(float(numerical_rank(last_hidden(network, batch))) / values["width"])
        ranks[norm].append(over_runs(np.array(share)))
        grid = pick(values, "rates runs")
        found = train_grid(make, (inputs, labels), **grid, recipe=recipe, context=context, offset=offset)
        scores[norm].append(over_runs(_accuracies(found, (inputs, labels), values, draws)))
        used[norm].append(found.rate)
    numbers = {
        "vanilla_rank_share_at_deepest": ranks["none"][-1],
        "batch_norm_rank_share_at_deepest": ranks["batch"][-1],
        "vanilla_accuracy_at_deepest": scores["none"][-1],
        "vanilla_accuracy_at_shallowest": scores["none"][0],
        "batch_norm_accuracy_at_deepest": scores["batch"][-1],
        "batch_norm_accuracy_at_shallowest": scores["batch"][0],
        "batch_norm_smallest_accuracy": lowest(scores["batch"]),
        "batch_norm_smallest_rank_share": lowest(ranks["batch"]),
    }
    depths = values["depths"]
    deep = [number for depth, number in zip(depths, scores["none"], strict=True) if depth > LEARNING_DEPTH]
    numbers["vanilla_largest_accuracy_beyond_10_layers"] = highest(deep)

    def drawn(found: dict[str, list[Number]]) -> list[Series]:
        return [points_of(names[k], depths, row) for k, row in found.items()]

    chance = level("chance", depths, 0.1)
    panels = (
        Panel("hidden layers", "rank at the start, over width", drawn(ranks), title="rank"),
        Panel("hidden layers", "training accuracy", [*drawn(scores), chance], title="training"),
    )
    caption = "Rank and accuracy of plain networks fall together with depth; batch norm keeps both."
    remarks = "; ".join(
        f"{names[k]}: rates {', '.join(f'{d}: {r:g}' for d, r in zip(depths, row, strict=True))}"
        for k, row in used.items()
    )
    return Outcome(numbers, Picture(panels, caption), f"Chosen learning rates by depth. {remarks}.")


def _accuracies(
    found: Trained, data: tuple[torch.Tensor, torch.Tensor], values: Values, generators: Sequence[torch.Generator]
) -> np.ndarray[Any, Any]:
    """The accuracy of each run on samples of its own, with statistics of batches of the training size, as released."""
    size = values["batch_size"]
    count = values["evaluated"] // size * size  # whole batches: their statistics are those of training
    result = []
    for network, generator in zip(found.networks, generators, strict=True):
        chosen = draw_samples(data[0], count, generator)
        inputs, labels = (part[chosen] for part in data)
        network.to(inputs.device)
        with torch.no_grad():
            answers = torch.cat([network(part).argmax(1) for part in torch.split(inputs, size)])
        result.append(float((answers == labels).double().mean()))
    return np.array(result)
