"""Figures 5 and 6: a larger eps or a positive shift β at the start of training a VGG network."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
from torch import nn

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import Number, mean_of
from sounding.claims.picture import Map, Panel, Picture
from sounding.claims.share import share
from sounding.claims.train import train_alike_
from sounding.data import Augmentation, load_dataset
from sounding.models import Vgg19
from sounding.train import Recipe


@share("other", "looks")
def sweep(values: Mapping[str, Any], context: Context) -> Array:
    """Test accuracies (rates, eps, shifts, seeds, evaluations).

    The networks of a seed start from the same weights, see the same batches and are trained as one; another seed has
    another order of the samples and other crops.
    """
    data = load_dataset(values["data"], device=context.device)
    cells = list(product(values["rates"], values["eps"], values["shifts"]))
    recipe = Recipe(
        batch_size=values["batch_size"],
        steps=max(values["evaluate"]),
        evaluate=tuple(values["evaluate"]),
        statistics="batch",
        train_metrics="seen",
        augment=Augmentation() if values["augment"] else None,
    )
    found = []
    for seed in range(values["seeds"]):
        networks = [
            _make_network(values, data.shape[0], data.classes, eps=eps, shift=shift, seed=seed, context=context)
            for _, eps, shift in cells
        ]
        rates, order = [rate for rate, *_ in cells], context.generator(1000 + seed)
        history = train_alike_(networks, data, recipe, context, rates=rates, orders=order)
        found.append([[point.test_accuracy or 0.0 for point in history.curve(run)] for run in range(len(cells))])
    filled = np.moveaxis(np.nan_to_num(np.array(found), nan=1 / data.classes), 0, 1)
    shape = [len(values[name]) for name in ("rates", "eps", "shifts")]
    return np.asarray(filled.reshape(*shape, values["seeds"], len(values["evaluate"])))


def _make_network(
    values: Mapping[str, Any], channels: int, classes: int, *, eps: float, shift: float, seed: int, context: Context
) -> Any:
    """VGG-19, or a narrow stack of convolutions, with this eps and shift in every batch norm."""
    generator = context.generator(100 + seed)
    # the smallest eps that torch takes for 0 is its own default
    norm: dict[str, Any] = {"eps": eps or 1e-5, "shift": shift}
    if values["network"] == "vgg19":
        return Vgg19(channels, classes, width=values["width"], dropout=0.0, init="he", generator=generator, **norm)
    layers: list[nn.Module] = []
    for index in range(values["depth"]):
        convolution = nn.Conv2d(values["width"] if index else channels, values["width"], 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(values["width"], eps=norm["eps"]), nn.ReLU()]
        nn.init.kaiming_normal_(convolution.weight, generator=generator)
        nn.init.constant_(layers[-2].bias, shift)  # type: ignore[arg-type]
    readout = nn.Linear(values["width"] * 4, classes)
    nn.init.normal_(readout.weight, std=readout.in_features**-0.5, generator=generator)
    nn.init.zeros_(readout.bias)
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), readout)


def measure_acceleration(values: Mapping[str, Any], context: Context) -> Outcome:
    """The gain in early accuracy from eps > 0 and from β > 0, the other one at its best or at 0."""
    best_of_other = values["other"] == "best"
    accuracy = sweep(values, context)
    numbers: dict[str, Number] = {}
    panels = []
    for name, axis in (("eps", 1), ("shift", 2)):
        other = 3 - axis
        shown = accuracy if best_of_other else np.take(accuracy, [0], axis=other)
        table = np.moveaxis(shown, axis, 0)
        for place, when in ((0, "early"), (-1, "late"))[: len(values["evaluate"])]:
            cells = table[..., place].reshape(len(table), -1, values["seeds"])
            gains = _gain(cells[1:].reshape(-1, values["seeds"]), cells[0])
            numbers[f"gain_{name}_{when}"] = mean_of(gains, looks=values["looks"])
        median = np.median(shown[..., 0], axis=3).max(axis=other)
        label, columns = ("eps of batch norm", values["eps"]) if name == "eps" else ("β at the start", values["shifts"])
        panels.append(_draw(median, columns, values["rates"], label))
    caption = (
        f"Median test accuracy of {values['network']} on {values['data']} after {values['evaluate'][0]} steps, "
        f"{values['seeds']} seeds, {'the best of' if best_of_other else 'at 0 of'} the hyperparameter not shown. The "
        "leftmost "
        "column is the usual batch norm."
    )
    return Outcome(numbers, Picture(panels, caption))


def _draw(median: Array, columns: list[float], rates: list[float], label: str) -> Panel:
    """The grid of medians (rates, columns), cells side by side."""
    across, up = ([float(index) for index in range(len(values))] for values in (columns, rates))
    return Panel(
        label,
        "learning rate",
        map=Map("test accuracy", across, up, median),
        ticks={index: f"{value:g}" for index, value in zip(across, columns, strict=True)},
        y_ticks={index: f"{value:g}" for index, value in zip(up, rates, strict=True)},
    )


def _gain(candidates: Array, reference: Array) -> Array:
    """Per seed, the best candidate minus the best reference; both are chosen on the other half of the seeds.

    A maximum over more candidates is larger by chance; choosing on other seeds takes that away.
    """
    seeds = candidates.shape[1]
    gains = np.empty(seeds)
    for half in (np.arange(seeds) % 2 == 0, np.arange(seeds) % 2 == 1):
        chosen, base = (rows[rows[:, ~half].mean(1).argmax()] for rows in (candidates, reference))
        gains[half] = chosen[half] - base[half]
    return gains
