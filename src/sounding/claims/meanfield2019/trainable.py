"""Figures 2 and 4: the depth to which networks with batch norm train, over the batch size and the norm's numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, pick, present
from sounding.claims.number import Number, exact, fraction_of, mean_of
from sounding.claims.picture import Panel, Series, cells_of, points_of
from sounding.data import Dataset, known_shape, load_dataset, normalize
from sounding.models import Mlp
from sounding.models.initial import initialize_
from sounding.predict import batchnorm
from sounding.train import Recipe
from sounding.train.evaluate import evaluate_part
from sounding.train.group import Group
from sounding.train.layers import Step
from sounding.train.operations import Number as Scalar
from sounding.train.operations import apply_layer, apply_linear
from sounding.train.products import Products, Seen
from sounding.train.recipe import Statistics
from sounding.train.samples import Streams, take_samples


class Parted(Products):
    """A stack of perceptrons with batch norm behind each linear map, without scale, shift and running statistics.

    `statistics_over` consecutive samples of a batch are normalized together; a batch that is no multiple is one part.
    """

    def __init__(self, networks: Sequence[nn.Module], device: torch.device, *, statistics_over: int) -> None:
        super().__init__(networks, device)
        self._part = statistics_over

    def _batch_norm(
        self, step: Step, numbers: dict[str, Scalar], x: torch.Tensor, statistics: Statistics, seen: Seen
    ) -> torch.Tensor:
        inner = apply_linear(x, self.tensors[step.tensors["map"]], None) if "map" in step.tensors else x
        part = self._part if inner.shape[1] % self._part == 0 else inner.shape[1]
        # a part of the batch is to batch norm what a run is
        parts = inner.reshape(-1, part, inner.shape[2])
        eps, relu = numbers["eps"], step.label == "relu"
        normal, _, _ = apply_layer(parts, None, None, scale=None, shift=None, eps=eps, centred=True, relu=relu)
        return normal.view_as(inner)


# between 16ξ and so many times 16ξ a network is neither called inside nor outside: the boundary is not sharp
CLEARLY_DEEPER = 1.5


def train_cells(
    norms: Sequence[Mapping[str, float]], values: Values, context: Context, *, batch_size: int, offset: int
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
    values: Values,
    data: Dataset,
    context: Context,
    *,
    depth: int,
    offsets: Sequence[int],
) -> list[nn.Module]:
    """A network for each offset and norm, with weights drawn on the device: the same for all norms."""
    patterns = []
    for norm in norms:
        options: dict[str, Any] = {**pick(values, "width activation"), **norm, "generator": torch.Generator()}
        made = Mlp(math.prod(data.shape), data.classes, depth=depth, norm="batch", bias=False, init="lecun", **options)
        for module in made.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.requires_grad_(False)  # scale and shift are constants of a cell
        patterns.append(made.to(context.device))
    networks: list[nn.Module] = []
    for offset in offsets:
        for pattern in patterns:
            networks.append(copy.deepcopy(pattern))
            initialize_(networks[-1], "lecun", context.generator(offset, device=context.device))
    return networks


def chance_of(values: Values) -> float:
    """The accuracy of guessing."""
    shape = known_shape(values["data"])
    return 1 / shape[1] if shape else 0.1  # the paper's data sets have ten classes


def judge_cells(
    accuracy: Array, depths: Sequence[int], allowed: Sequence[float], *, chance: float
) -> dict[str, Number]:
    """Share of cells (depths, columns, seeds) on the right side of 16ξ, the fall across it, what is left beyond.

    `allowed` is 16ξ of each column; fall and rest are in units of best − chance.
    """
    best = float(accuracy.mean(2).max())
    score = (accuracy - chance) / max(best - chance, 1e-9)  # where nothing learns all scores are about 0
    told = tell_apart(score.mean(2), depths, allowed)
    depth = np.array(depths, dtype=np.float64)[:, None, None] + 0 * score
    limit = np.array(allowed, dtype=np.float64)[None, :, None] + 0 * score
    right = (score > 0.5) == (depth <= limit)
    inside, beyond = depth <= limit, depth >= CLEARLY_DEEPER * limit
    share, by_seed = fraction_of(int(right.sum()), right.size), mean_of(right.mean((0, 1)))
    # the interval covers both: runs of one seed need not be independent of each other
    low, high = max(0.0, min(share.low, by_seed.low)), min(1.0, max(share.high, by_seed.high))
    seeds = range(score.shape[2])
    within, left = ([_mean(score[..., s][side[..., s]]) for s in seeds] for side in (inside, beyond))
    return {
        "share_on_right_side": Number(share.value, low, high, share.samples),
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


def _mean(values: Array) -> float:
    """NaN where a grid has no cell on that side: the verdict is then left open."""
    return float(values.mean()) if values.size else math.nan


def draw_cells(accuracy: Array, depths: Sequence[int], columns: Sequence[float], allowed: Sequence[float]) -> Panel:
    """The grid with 16ξ over it, cells side by side; the line lies between depths in proportion to ln depth."""
    places = np.arange(len(depths), dtype=np.float64)
    logs = np.log(np.array(depths, dtype=np.float64))
    wanted = np.log(np.minimum(np.array(allowed, dtype=np.float64), 1e9))  # 16ξ may be infinite
    line = np.interp(wanted, logs, places)
    outer = (logs[-1] - logs[0]) / max(len(logs) - 1, 1)
    line = np.where(wanted > logs[-1], np.minimum(places[-1] + (wanted - logs[-1]) / outer, places[-1] + 0.5), line)
    limit = Series("16ξ", np.arange(len(columns)), line, role="paper")
    return cells_of(columns, depths, accuracy.mean(2), limit)


EPS = 0.001  # the paper's eps; a column with another has it in its name


def measure_depth_by_batch_size(values: Values, context: Context) -> Outcome:
    """Accuracy over depth × batch size; with `whole_batch`, batches of that size and statistics over a part of them."""
    sizes, whole = values["batch_sizes"], values.get("whole_batch")
    norm = {"eps": values["eps"]}
    parts = []
    for place, size in context.each(sizes):
        settings = {**values, "activation": "relu", "statistics_over": size if whole else None}
        parts.append(train_cells([norm], settings, context, batch_size=whole or size, offset=place))
    accuracy = np.concatenate(parts, axis=1)
    allowed = [batchnorm("relu", batch_size=size, eps=values["eps"]).trainable_depth for size in sizes]
    numbers = judge_cells(accuracy, values["depths"], allowed, chance=chance_of(values))
    return present(numbers, draw_cells(accuracy, values["depths"], sizes, allowed))


def measure_depth_against_xi(values: Values, context: Context) -> Outcome:
    """The depth to which networks train over the mean field's ξ: k of kξ in each column, and whether a constant does.

    A column is an activation, the size of the normalized part of the batch and eps. Its depths are the given multiples
    of its own 16ξ, so every column brackets its limit as finely as the others.
    """
    whole, chance = values["whole_batch"], 0.1
    names, scales, limits = [], [], []
    for place, (activation, size, eps) in context.each(values["columns"]):
        scale = batchnorm(activation, batch_size=size, eps=eps).depth_scale
        depths = [max(2, round(16 * scale * multiple)) for multiple in values["multiples"]]
        settings = {**values, "activation": activation, "statistics_over": size, "depths": depths}
        cells = train_cells([{"eps": eps}], settings, context, batch_size=whole, offset=place)
        names.append(f"{activation}_{size}" + (f"_eps_{eps:g}" if eps > EPS else ""))
        scales.append(scale)
        limits.append(last_trainable(cells[:, 0], depths, chance=chance))
    xi, deepest = np.array(scales), np.array(limits)  # (columns,), (columns, seeds)
    ratios = [mean_of(row / scale) for row, scale in zip(deepest, xi, strict=True)]
    logs, centred = np.log(deepest), np.log(xi) - np.log(xi).mean()
    slopes = centred @ logs / np.sum(centred**2)
    left = (logs - np.log(xi)[:, None]).std(axis=0)
    numbers = {f"k_{name}": number for name, number in zip(names, ratios, strict=True)}
    middle = float(np.exp(np.log([n.value for n in ratios]).mean()))
    numbers |= {
        "k": Number(middle, min(n.low for n in ratios), max(n.high for n in ratios), deepest.size),
        "exponent_of_depth_in_xi": mean_of(slopes),
        "spread_left_by_xi_over_constant": mean_of(left / logs.std(axis=0)),
    }
    ends = np.array([xi.min(), xi.max()])
    series = [
        points_of("measured", xi, [mean_of(row) for row in deepest]),
        Series("16ξ (the paper)", ends, 16 * ends, role="paper"),
        Series("the best constant depth", ends, np.full(2, np.exp(logs.mean())), role="bound"),
    ]
    return present(numbers, series)


def measure_depth_by_norm(values: Values, context: Context) -> Outcome:
    """Accuracy over depth × one number of the batch norm: its scale γ, its shift β or its eps."""
    knob, columns, size = values["knob"], values["columns"], values["batch_size"]
    fixed = {"eps": values["eps"], "scale": 1.0, "shift": values.get("shift", 0.0)}
    norms = [{**fixed, knob: value} for value in columns]
    accuracy = train_cells(norms, values, context, batch_size=size, offset=0)
    allowed = [batchnorm(values["activation"], batch_size=size, **norm).trainable_depth for norm in norms]
    chance = chance_of(values)
    numbers = judge_cells(accuracy, values["depths"], allowed, chance=chance)
    good, bad = (columns.index(values[which]) for which in ("deep_at", "shallow_at"))
    unit = numbers["best_accuracy"].value - chance
    numbers["gain_at_deepest"] = mean_of((accuracy[-1, good] - accuracy[-1, bad]) / unit)
    return present(numbers, draw_cells(accuracy, values["depths"], columns, allowed))
