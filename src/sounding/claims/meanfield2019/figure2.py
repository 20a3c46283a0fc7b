"""Figure 2: the depth to which ReLU networks with batch norm train, over the batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sounding.claims.claim import Context, Outcome
from sounding.claims.meanfield2019.trainable import chance_of, draw_cells, judge_cells, last_trainable, train_cells
from sounding.claims.number import Number, mean_of
from sounding.claims.picture import Panel, Picture, Series, points_of
from sounding.predict import batchnorm

EPS = 0.001
"""The paper's eps; a column with another has it in its name."""


def measure_depth_by_batch_size(values: Mapping[str, Any], context: Context) -> Outcome:
    """Accuracy over depth × batch size; with `whole_batch`, batches of that size and statistics over a part of them."""
    sizes, whole = values["batch_sizes"], values.get("whole_batch")
    norm = {"eps": values["eps"]}
    parts = []
    for place, size in enumerate(sizes):
        settings = {**values, "activation": "relu", "statistics_over": size if whole else None}
        parts.append(train_cells([norm], settings, context, batch_size=whole or size, offset=place))
        context.progress((place + 1) / len(sizes))
    accuracy = np.concatenate(parts, axis=1)
    allowed = [batchnorm("relu", batch_size=size, eps=values["eps"]).trainable_depth for size in sizes]
    numbers = judge_cells(accuracy, values["depths"], allowed, chance=chance_of(values))
    panel = draw_cells(accuracy, values["depths"], sizes, allowed, label="batch size B")
    caption = (
        f"Test accuracy on {values['data']}, width {values['width']}, mean of {values['seeds']} seeds. Networks much "
        "deeper than 16ξ (white) learn nothing, whatever the batch size."
    )
    return Outcome(numbers, Picture((panel,), caption))


def measure_depth_against_xi(values: Mapping[str, Any], context: Context) -> Outcome:
    """The depth to which networks train over the mean field's ξ: k of kξ in each column, and whether a constant does.

    A column is an activation, the size of the normalized part of the batch and eps. Its depths are the given multiples
    of its own 16ξ, so every column brackets its limit as finely as the others.
    """
    whole, chance = values["whole_batch"], 0.1
    names, scales, limits = [], [], []
    for place, (activation, size, eps) in enumerate(values["columns"]):
        scale = batchnorm(activation, batch_size=size, eps=eps).depth_scale
        depths = [max(2, round(16 * scale * multiple)) for multiple in values["multiples"]]
        settings = {**values, "activation": activation, "statistics_over": size, "depths": depths}
        cells = train_cells([{"eps": eps}], settings, context, batch_size=whole, offset=place)
        names.append(f"{activation}_{size}" + (f"_eps_{eps:g}" if eps > EPS else ""))
        scales.append(scale)
        limits.append(last_trainable(cells[:, 0], depths, chance=chance))
        context.progress((place + 1) / len(values["columns"]))
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
    panel = Panel(
        "ξ of the mean field, layers",
        "deepest network that trains",
        [
            points_of("measured", xi, [mean_of(row) for row in deepest]),
            Series("16ξ (the paper)", ends, 16 * ends, role="paper"),
            Series("the best constant depth", ends, np.full(2, np.exp(logs.mean())), role="bound"),
        ],
        x_scale="log",
        y_scale="log",
    )
    caption = (
        f"Depth at which accuracy on {values['data']} falls to half of best minus chance, {values['seeds']} seeds; "
        "a point is an activation, the size of the normalized parts and eps."
    )
    return Outcome(numbers, Picture((panel,), caption))
