"""Rank and training of perceptrons: figures 1, 4, 6, 11 and 12."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from sounding.claims.claim import Context, Outcome
from sounding.claims.number import Number, highest, lowest, over_runs
from sounding.claims.picture import Panel, Picture, Series, points_of
from sounding.claims.rank2020.perceptrons import Trained, draw_samples, last_hidden, load_pixels, train_grid
from sounding.measures import numerical_rank
from sounding.models import Mlp
from sounding.train import Recipe

LEARNING_DEPTH = 10
"""Beyond so many layers the paper's plain networks do not learn."""


def make_fig1_network(generator: torch.Generator, *, features: int, depth: int, width: int, norm: str) -> Mlp:
    """PyTorch's initial weights; batch norm without biases, affine map or running statistics, as released."""
    released: dict[str, Any] = {"norm": "batch", "bias": False, "affine": False, "running": False, "eps": 0.0}
    law = {} if norm == "none" else released
    return Mlp(features, 10, depth=depth, width=width, init="torch", generator=generator, **law)


def measure_fig1(values: Mapping[str, Any], context: Context) -> Outcome:
    """The rank at the start and the training accuracy at the end, by depth, with and without batch norm."""
    inputs, labels, *_ = load_pixels(values["dataset"], context)
    recipe = Recipe(
        batch_size=values["batch_size"],
        steps=values["steps"],
        evaluate="end",
        sampling="replacement",
        statistics="batch",
    )
    ranks: dict[str, list[Number]] = {"none": [], "batch": []}
    scores: dict[str, list[Number]] = {"none": [], "batch": []}
    used: dict[str, list[float]] = {"none": [], "batch": []}
    for norm in ranks:
        for index, depth in enumerate(values["depths"]):
            make = partial(make_fig1_network, features=inputs.shape[1], depth=depth, width=values["width"], norm=norm)
            offset = 2 * index + (norm == "batch")
            started = [make(context.generator(1000 * offset + run)) for run in range(values["runs"])]
            draws = [context.generator(1000 * offset + 700 + run) for run in range(values["runs"])]
            share = []
            for network, generator in zip(started, draws, strict=True):
                batch = inputs[draw_samples(inputs, values["rank_batch"], generator)].cpu()
                share.append(float(numerical_rank(last_hidden(network, batch))) / values["width"])
            ranks[norm].append(over_runs(np.array(share)))
            found = train_grid(
                make,
                (inputs, labels),
                rates=values["rates"],
                runs=values["runs"],
                recipe=recipe,
                context=context,
                offset=offset,
            )
            accuracies = _accuracies(found, (inputs, labels), values, draws)
            scores[norm].append(over_runs(accuracies))
            used[norm].append(found.rate)
            context.progress((index + 1 + (norm == "batch") * len(values["depths"])) / 2 / len(values["depths"]))
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
    names = {"none": "no norm", "batch": "batch norm"}

    def drawn(found: dict[str, list[Number]]) -> list[Series]:
        return [points_of(names[k], depths, row) for k, row in found.items()]

    chance = Series("chance", [depths[0], depths[-1]], [0.1, 0.1], role="bound")
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
    found: Trained,
    data: tuple[torch.Tensor, torch.Tensor],
    values: Mapping[str, Any],
    generators: Sequence[torch.Generator],
) -> np.ndarray[Any, Any]:
    """The accuracy of each run on samples of its own, with statistics of batches of the training size, as released."""
    size = values["batch_size"]
    count = values["evaluated"] // size * size
    result = []
    for network, generator in zip(found.networks, generators, strict=True):
        chosen = draw_samples(data[0], count, generator)
        inputs, labels = (part[chosen] for part in data)
        network.to(inputs.device)
        with torch.no_grad():
            answers = torch.cat([network(part).argmax(1) for part in torch.split(inputs, size)])
        result.append(float((answers == labels).double().mean()))
    return np.array(result)
