"""Which deep batch-normalized networks train: grids of accuracies beside 16ξ, the depth that the mean field allows."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.activations.activation import Array
from sounding.claims.claim import Context
from sounding.claims.meanfield2019.parted import Parted
from sounding.claims.number import Number, exact, fraction_of, mean_of
from sounding.claims.picture import Map, Panel, Series
from sounding.data import Dataset, known_shape, load_dataset, normalize
from sounding.models import Mlp
from sounding.models.initial import initialize_
from sounding.train import Recipe
from sounding.train.evaluate import evaluate_part
from sounding.train.group import Group
from sounding.train.products import Products
from sounding.train.samples import Streams, take_samples

CLEARLY_DEEPER = 1.5
"""Between 16ξ and so many times 16ξ a network is neither called inside nor outside: the boundary is not sharp."""


def train_cells(
    norms: Sequence[Mapping[str, float]], values: Mapping[str, Any], context: Context, *, batch_size: int, offset: int
) -> Array:
    """Test accuracies (depths, norms, seeds): networks of one depth, one for each norm and seed, trained as one.

    `norms` are eps, scale and shift of every batch norm of a network, all constant. The learning rate is
    `rate` × batch size, or `learning_rate`. A seed has weights and an order of the samples of its own, which are the
    same for all norms: near the deepest that train, the order alone moves the accuracy as much as the weights do. Of
    `seeds` so many are trained `at_once`, all by default.
    """
    # figure 2d at quick scale has a generated set, which must follow the random seed too
    data = load_dataset(values["data"], device=context.device, generator=context.generator(900_001))
    device = torch.device(context.device)
    inputs, tests = (normalize(data, part).flatten(1) for part in (data.train_inputs, data.test_inputs))
    recipe = Recipe(
        optimizer=values.get("optimizer", "sgd"),
        batch_size=batch_size,
        steps=values.get("steps"),
        epochs=None if values.get("steps") else values["epochs"],
        statistics="batch",
    )
    parts = (inputs, data.train_labels, tests, data.test_labels)
    samples = take_samples(parts, recipe, device=device, dtype=inputs.dtype)
    assert samples.test is not None
    rate, part = values.get("learning_rate") or values["rate"] * batch_size, values.get("statistics_over")
    every = range(values["seeds"])
    at_once = values.get("at_once", len(every))
    found = []
    for place, depth in enumerate(values["depths"]):
        accuracies: list[float] = []
        for start in range(0, len(every), at_once):
            offsets = [1000 * offset + 100 * place + seed for seed in every[start : start + at_once]]
            networks = draw_networks(norms, values, data, context, depth=depth, offsets=offsets)
            stack = Parted(networks, device, statistics_over=part) if part else Products(networks, device)
            orders = [context.generator(50 + one) for one in offsets]
            stream = Streams(samples, recipe, [order for order in orders for _ in norms])
            group = Group(stack, [rate] * stack.runs, recipe, device, own=True)
            for _ in range(stream.steps):
                group.step(*stream.next())
            right = evaluate_part(group.outputs, samples.test, samples, recipe).accuracy or []
            accuracies += [math.nan if gone else share for share, gone in zip(right, group.diverged(), strict=True)]
        # a run that left the finite numbers has learned nothing
        filled = np.nan_to_num(accuracies, nan=1 / data.classes)
        found.append(filled.reshape(len(every), len(norms)).T)
    return np.array(found)


def draw_networks(
    norms: Sequence[Mapping[str, float]],
    values: Mapping[str, Any],
    data: Dataset,
    context: Context,
    *,
    depth: int,
    offsets: Sequence[int],
) -> list[nn.Module]:
    """A network for each offset and norm, with weights drawn on the device: the same for all norms."""
    patterns = []
    for norm in norms:
        options: dict[str, Any] = {key: values[key] for key in ("width", "activation")} | dict(norm)
        made = Mlp(math.prod(data.shape), data.classes, depth=depth, norm="batch", bias=False, init="lecun",
                   generator=torch.Generator(), **options)  # fmt: skip
        patterns.append(hold_norms(made).to(context.device))
    networks: list[nn.Module] = []
    for offset in offsets:
        for pattern in patterns:
            networks.append(copy.deepcopy(pattern))
            initialize_(networks[-1], "lecun", context.generator(offset, device=context.device))
    return networks


def hold_norms(network: Any) -> Any:
    """The network with the scale and shift of its batch norms held constant."""
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            for parameter in module.parameters():
                parameter.requires_grad = False
    return network


def chance_of(values: Mapping[str, Any]) -> float:
    """The accuracy of guessing."""
    shape = known_shape(values["data"])
    return 1 / shape[1] if shape else 0.1


def judge_cells(
    accuracy: Array, depths: Sequence[int], allowed: Sequence[float], *, chance: float
) -> dict[str, Number]:
    """Share of cells on the right side of 16ξ, the fall across it, what is left beyond, in units of best − chance.

    Args:
        accuracy: (depths, columns, seeds).
        allowed: 16ξ of each column.
    """
    best = float(accuracy.mean(2).max())
    score = (accuracy - chance) / max(best - chance, 1e-9)
    told = tell_apart(score.mean(2), depths, allowed)
    depth = np.array(depths, dtype=np.float64)[:, None, None] + 0 * score
    limit = np.array(allowed, dtype=np.float64)[None, :, None] + 0 * score
    right = (score > 0.5) == (depth <= limit)
    inside, beyond = depth <= limit, depth >= CLEARLY_DEEPER * limit
    seeds = range(score.shape[2])
    within, left = ([_mean(score[..., s][side[..., s]]) for s in seeds] for side in (inside, beyond))
    return {
        "share_on_right_side": _widest(fraction_of(int(right.sum()), right.size), mean_of(right.mean((0, 1)))),
        "gap_across_boundary": mean_of(np.array(within) - np.array(left)),
        "score_beyond": mean_of(left),
        "best_accuracy": mean_of(accuracy.max((0, 1))),
        **told,
    }


def tell_apart(score: Array, depths: Sequence[int], allowed: Sequence[float]) -> dict[str, Number]:
    """What a grid of mean scores (depths, columns) can tell apart: how many cells other laws than 16ξ get right.

    `smallest_k` and `largest_k` are the ends of the multiples of ξ that get no fewer cells right than 16ξ does;
    `share_right_by_constant_depth` is that of the best depth that ignores the columns.
    """
    trains = score > 0.5
    depth, limit = np.array(depths, dtype=np.float64)[:, None], np.array(allowed, dtype=np.float64)[None, :]

    def right(limits: Array) -> float:
        return float(np.mean(trains == (depth <= limits)))

    multiples = np.arange(1.0, 64.0, 0.1)
    good = [k for k in multiples if right(limit * k / 16) >= right(limit)]
    constants = [right(np.full_like(limit, constant)) for constant in (0, *depths)]
    return {
        "smallest_k": exact(min(good), error=0.1),
        "largest_k": exact(max(good), error=0.1),
        "share_right_by_16_xi": exact(right(limit)),
        "share_right_by_constant_depth": exact(max(constants)),
    }


def last_trainable(accuracy: Array, depths: Sequence[int], *, chance: float) -> Array:
    """The depth at which each seed of a column falls below half of best minus chance, by ln depth; (depths, seeds) in.

    A seed that trains at no depth has the shallowest one, a seed that trains at all of them the deepest: the grid must
    reach beyond both.
    """
    score = (accuracy - chance) / max(float(accuracy.mean(1).max()) - chance, 1e-9)
    logs, found = np.log(np.array(depths, dtype=np.float64)), []
    for row in score.T:
        trained = np.flatnonzero(row > 0.5)
        at = int(trained[-1]) if len(trained) else 0
        if not len(trained) or at == len(logs) - 1:
            found.append(logs[at])
        else:
            share = (row[at] - 0.5) / (row[at] - row[at + 1])
            found.append(logs[at] + share * (logs[at + 1] - logs[at]))
    return np.exp(found)


def _widest(first: Number, second: Number) -> Number:
    """The first share with the interval that covers both: runs of one seed need not be independent of each other."""
    low, high = min(first.low, second.low), max(first.high, second.high)
    return Number(first.value, max(0.0, low), min(1.0, high), first.samples)


def _mean(values: Array) -> float:
    """NaN where a grid has no cell on that side: the verdict is then left open."""
    return float(values.mean()) if values.size else math.nan


def draw_cells(
    accuracy: Array, depths: Sequence[int], columns: Sequence[float], allowed: Sequence[float], *, label: str
) -> Panel:
    """The grid with 16ξ over it, cells side by side; the line lies between depths in proportion to ln depth."""
    places = np.arange(len(depths), dtype=np.float64)
    logs = np.log(np.array(depths, dtype=np.float64))
    wanted = np.log(np.minimum(np.array(allowed, dtype=np.float64), 1e9))
    line = np.interp(wanted, logs, places)
    outer = (logs[-1] - logs[0]) / max(len(logs) - 1, 1)
    line = np.where(wanted > logs[-1], np.minimum(places[-1] + (wanted - logs[-1]) / outer, places[-1] + 0.5), line)
    across = [float(index) for index in range(len(columns))]
    return Panel(
        label,
        "depth [layers]",
        (Series("16ξ", across, line, role="paper"),),
        map=Map("test accuracy", across, list(places), accuracy.mean(2)),
        ticks={index: f"{column:g}" for index, column in zip(across, columns, strict=True)},
        y_ticks={float(place): str(depth) for place, depth in zip(places, depths, strict=True)},
    )
