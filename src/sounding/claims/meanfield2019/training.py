"""Figures 3, 5 and 6: networks in the first steps of training, and a larger eps or a positive shift β at its start."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.number import Number, mean_of, mean_slope_of, scaled
from sounding.claims.picture import Panel, Series, cells_of, mean_over, points_of
from sounding.claims.share import share
from sounding.claims.train import train_alike_
from sounding.claims.walk import batch_norm, walk
from sounding.data import Augmentation, load_dataset, normalize
from sounding.models import Mlp, Vgg19
from sounding.predict import batchnorm
from sounding.train import Recipe, train_

PARTS = ("weights", "gradients", "weight_gradients")  # whose norms are followed; gradients are at pre-activations


@share("part", "depths", "rates")
def first_steps(values: Values, context: Context, depth: int) -> dict[str, Array]:
    """ln of the three norms, (runs, steps + 1, depth) each; layer 1 first, step 0 before any learning."""
    size, width = values["batch_size"], values["width"]
    data = load_dataset(values["data"], device=context.device)
    found: dict[str, list[Array]] = {name: [] for name in PARTS}
    for run in range(values["runs"]):
        generator = context.generator(100 * run + depth)
        place = context.place(run)
        sizes = [math.prod(data.shape), *[width] * depth, data.classes]
        weights = [
            (torch.randn(out, into, **place) / math.sqrt(into)).requires_grad_() for into, out in pairwise(sizes)
        ]
        rows: dict[str, list[torch.Tensor]] = {name: [] for name in PARTS}
        for _ in range(values["steps"] + 1):
            chosen = torch.randint(len(data.train_labels), (size,), generator=generator).to(context.device)
            state = normalize(data, data.train_inputs[chosen]).flatten(1)
            inner: list[torch.Tensor] = []
            norm = partial(batch_norm, eps=values["eps"])
            *_, state = walk(state, weights[:-1], norm=norm, activation=torch.relu, products=inner)
            loss = torch.nn.functional.cross_entropy(state @ weights[-1].T, data.train_labels[chosen])
            gradients = torch.autograd.grad(loss, [*weights, *inner])
            rows["weights"].append(_norms(weights[:-1]))
            rows["gradients"].append(_norms(gradients[len(weights) :]))
            rows["weight_gradients"].append(_norms(gradients[: len(weights) - 1]))  # without the readout
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=False):
                    weight -= values["rate"] * size * gradient  # the paper's rate is for the sum over a batch
        for name, part in rows.items():
            found[name].append(torch.stack(part).log().cpu().numpy())
    return {name: np.array(part) for name, part in found.items()}


def _norms(tensors: Any) -> Any:
    return torch.stack([tensor.detach().double().norm() for tensor in tensors])


def measure_first_steps(values: Values, context: Context) -> Outcome:
    """Slopes and ranges over depth of one of the three norms, before the first step and after it.

    Of several `rates`, which the paper does not give, the one counts at which the upper layers are most stable after
    a step: it is found on half of the runs and judged on the others.
    """
    part, depths, rates = values["part"], values["depths"], values.get("rates", [values["rate"]])
    tried = {rate: {depth: first_steps({**values, "rate": rate}, context, depth) for depth in depths} for rate in rates}
    # of several rates one is chosen on the first half of the runs
    third, half = (max(depths) - 1) // 3, values["runs"] // 2 if len(rates) > 1 else 0
    stable = {rate: np.ptp(taken[max(depths)][part][:, 1, -third:], axis=1) for rate, taken in tried.items()}
    best = min(rates, key=lambda rate: stable[rate][:half].mean()) if half else rates[0]
    found = {depth: norms[part][half:, :, 1:] for depth, norms in tried[best].items()}
    weights = tried[best][max(depths)]["weights"][half:, 1, 1:]
    deepest = found[max(depths)]
    # growth is that of the square
    rate = 0.5 * math.log(batchnorm("relu", batch_size=values["batch_size"], eps=values["eps"]).gradient_growth)
    lower = slice(0, deepest.shape[2] // 2)
    before, after, last = deepest[:, 0], deepest[:, 1], deepest[:, -1]

    def slope_over_theory(rows: Array) -> Number:
        """The slope over the layers, in units of what theory has for it."""
        return scaled(mean_slope_of(np.arange(rows.shape[1]), rows), -1 / rate)

    numbers = {
        "slope_before_over_theory": slope_over_theory(before),
        "slope_after_over_theory": slope_over_theory(after[:, lower]),
        "relative_slope_after_over_theory": slope_over_theory((after - weights)[:, lower]),
        "range_before": mean_of(np.ptp(before, axis=1)),
        "range_after": mean_of(np.ptp(after, axis=1)),
        "range_after_over_before": mean_of(np.ptp(after, axis=1) / np.ptp(before, axis=1)),
        "upper_range_after": mean_of(stable[best][half:]),
        "upper_range_after_at_least_rate": mean_of(stable[min(rates)][half:]),
        "range_after_last_step": mean_of(np.ptp(last, axis=1)),
        "range_of_last_over_first_step": mean_of(np.ptp(last, axis=1) / np.ptp(after, axis=1)),
    }
    panels = []
    for depth, logs in found.items():
        layers = np.arange(2, depth + 1)
        shown = layers % max(1, depth // 11) == 0
        series = [
            mean_over(f"step {step}", layers[shown], (logs[:, step] - logs[:, step, -1:])[:, shown])
            for step in (0, 1, 2, 10)
            if step < logs.shape[1]
        ]
        if part != "weights":
            series.append(Series("step 0 (½ ln λ_G per layer)", [2, depth], [(depth - 2) * rate, 0.0], role="theory"))
        panels.append(Panel(series=series, title=f"depth {depth}"))
    return present(numbers, *panels, shown_rate=best * values["batch_size"])


def measure_lower_layers(values: Values, context: Context) -> Outcome:
    """How far the weights of each layer go in training after the first step, over their norm there."""
    data, depth = load_dataset(values["data"], device=context.device), values["depth"]
    moved = []
    for run, _ in context.each(range(values["runs"])):
        network = Mlp(
            math.prod(data.shape), data.classes, depth=depth, width=values["width"], norm="batch", bias=False,
            init="lecun", eps=values["eps"], generator=context.generator(run),
        ).to(context.device)  # fmt: skip
        order = context.generator(100 + run, device=context.device)
        recipe = Recipe(batch_size=values["batch_size"], steps=1, evaluate="end", statistics="batch")
        train_(network, data, learning_rate=values["rate"], recipe=recipe, generator=order, device=context.device)
        names = [f"{layer}.linear.weight" for layer in range(1, depth + 1)]
        first = [network.get_parameter(name).detach().clone() for name in names]
        recipe = replace(recipe, steps=values["steps"])
        train_(network, data, learning_rate=values["rate"], recipe=recipe, generator=order, device=context.device)
        last = [network.get_parameter(name).detach() for name in names]
        moved.append([float((b - a).norm() / a.norm()) for a, b in zip(first, last, strict=True)])
    rows, part = np.array(moved), depth // 4  # quarters of the layers
    lower, upper = rows[:, :part].mean(1), rows[:, -part:].mean(1)
    numbers = {
        "relative_change_of_lower_quarter": mean_of(lower),
        "relative_change_of_upper_quarter": mean_of(upper),
        "lower_over_upper": mean_of(lower / upper),
    }
    layers = np.arange(1, depth + 1)
    return present(numbers, [points_of("measured", layers[::3], [mean_of(column) for column in rows.T[::3]])])


@share("other", "looks")
def sweep(values: Values, context: Context) -> Array:
    """Test accuracies (rates, eps, shifts, seeds, evaluations).

    The networks of a seed start from the same weights, see the same batches and are trained as one; another seed has
    another order of the samples and other crops.
    """
    data = load_dataset(values["data"], device=context.device)
    cells = list(product(values["rates"], values["eps"], values["shifts"]))
    recipe = Recipe(
        batch_size=values["batch_size"], steps=max(values["evaluate"]), evaluate=tuple(values["evaluate"]),
        statistics="batch", train_metrics="seen", augment=Augmentation() if values["augment"] else None,
    )  # fmt: skip
    found = []
    for seed in range(values["seeds"]):
        networks: list[nn.Module] = []
        for _, eps, shift in cells:
            generator, width = context.generator(100 + seed), values["width"]
            # the smallest eps that torch takes for 0 is its own default
            norm: dict[str, Any] = {"eps": eps or 1e-5, "shift": shift}
            if values["network"] == "vgg19":
                options: dict[str, Any] = {"width": width, "dropout": 0.0, "init": "he", "generator": generator, **norm}
                networks.append(Vgg19(data.shape[0], data.classes, **options))
                continue
            layers: list[nn.Module] = []  # a narrow stack of convolutions
            for index in range(values["depth"]):
                convolution = nn.Conv2d(width if index else data.shape[0], width, 3, padding=1, bias=False)
                layers += [convolution, nn.BatchNorm2d(width, eps=norm["eps"]), nn.ReLU()]
                nn.init.kaiming_normal_(convolution.weight, generator=generator)
                nn.init.constant_(layers[-2].bias, shift)  # type: ignore[arg-type]
            readout = nn.Linear(width * 4, data.classes)
            nn.init.normal_(readout.weight, std=readout.in_features**-0.5, generator=generator)
            nn.init.zeros_(readout.bias)
            networks.append(nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), readout))
        rates, order = [rate for rate, *_ in cells], context.generator(1000 + seed)
        history = train_alike_(networks, data, recipe, context, rates=rates, orders=order)
        found.append([[point.test_accuracy or 0.0 for point in history.curve(run)] for run in range(len(cells))])
    filled = np.moveaxis(np.nan_to_num(np.array(found), nan=1 / data.classes), 0, 1)  # a run that diverged guesses
    shape = [len(values[name]) for name in ("rates", "eps", "shifts")]
    return np.asarray(filled.reshape(*shape, values["seeds"], len(values["evaluate"])))


def measure_acceleration(values: Values, context: Context) -> Outcome:
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
        columns = values["eps" if name == "eps" else "shifts"]
        panels.append(cells_of(columns, values["rates"], median))
    return present(numbers, *panels, others="the best of" if best_of_other else "at 0 of")


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
