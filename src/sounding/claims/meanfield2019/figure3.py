"""Figure 3: weights and gradients over depth in the first ten steps of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import DRAWN, Number, mean_of, mean_slope_of, scaled
from sounding.claims.picture import Panel, Picture, Series, points_of
from sounding.claims.share import share
from sounding.claims.walk import batch_norm, walk
from sounding.data import load_dataset, normalize
from sounding.models import Mlp
from sounding.predict import batchnorm
from sounding.train import Recipe, train_

PARTS = {
    "weights": "norm of the weights",
    "gradients": "norm of the gradient at pre-activations",
    "weight_gradients": "norm of the weights' gradient",
}


@share("part", "depths", "rates")
def first_steps(values: Mapping[str, Any], context: Context, depth: int) -> dict[str, Array]:
    """ln of the three norms, (runs, steps + 1, depth) each; layer 1 first, step 0 before any learning."""
    size, width = values["batch_size"], values["width"]
    data = load_dataset(values["data"], device=context.device)
    found: dict[str, list[Array]] = {name: [] for name in PARTS}
    for run in range(values["runs"]):
        generator = context.generator(100 * run + depth)
        place: dict[str, Any] = {"device": context.device, "generator": context.generator(run, device=context.device)}
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
            rows["weight_gradients"].append(_norms(gradients[: len(weights) - 1]))
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=False):
                    weight -= values["rate"] * size * gradient
        for name, part in rows.items():
            found[name].append(torch.stack(part).log().cpu().numpy())
    return {name: np.array(part) for name, part in found.items()}


def _norms(tensors: Any) -> Any:
    return torch.stack([tensor.detach().double().norm() for tensor in tensors])


def measure_first_steps(values: Mapping[str, Any], context: Context) -> Outcome:
    """Slopes and ranges over depth of one of the three norms, before the first step and after it.

    Of several `rates`, which the paper does not give, the one counts at which the upper layers are most stable after
    a step: it is found on half of the runs and judged on the others.
    """
    part, depths, rates = values["part"], values["depths"], values.get("rates", [values["rate"]])
    tried = {rate: {depth: first_steps({**values, "rate": rate}, context, depth) for depth in depths} for rate in rates}
    third, half = (max(depths) - 1) // 3, values["runs"] // 2 if len(rates) > 1 else 0
    stable = {rate: np.ptp(taken[max(depths)][part][:, 1, -third:], axis=1) for rate, taken in tried.items()}
    best = min(rates, key=lambda rate: stable[rate][:half].mean()) if half else rates[0]
    found = {depth: norms[part][half:, :, 1:] for depth, norms in tried[best].items()}
    weights = tried[best][max(depths)]["weights"][half:, 1, 1:]
    deepest = found[max(depths)]
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
    panels = [_draw(logs, depth, part, rate) for depth, logs in found.items()]
    caption = (
        f"ReLU networks of width {values['width']}, {values['data']}, batches of {values['batch_size']}, rate "
        f"{best * values['batch_size']:g}, relative to the last layer, mean over runs. Before the first step gradients "
        "grow exponentially towards the input; one step later the lower weights have grown and the gradients of the "
        "lower layers have fallen."
    )
    return Outcome(numbers, Picture(panels, caption))


def _draw(logs: Array, depth: int, part: str, rate: float) -> Panel:
    layers = np.arange(2, depth + 1)
    shown = layers % max(1, depth // 11) == 0
    series = []
    for step in (0, 1, 2, 10):
        if step < logs.shape[1]:
            relative = logs[:, step] - logs[:, step, -1:]
            error = DRAWN * relative.std(0) / math.sqrt(len(relative))
            series.append(Series(f"step {step}", layers[shown], relative.mean(0)[shown], error=error[shown]))
    if part != "weights":
        series.append(Series("step 0 (½ ln λ_G per layer)", [2, depth], [(depth - 2) * rate, 0.0], role="theory"))
    return Panel("layer", f"ln {PARTS[part]}", series, title=f"depth {depth}")


def measure_lower_layers(values: Mapping[str, Any], context: Context) -> Outcome:
    """How far the weights of each layer go in training after the first step, over their norm there."""
    data, depth = load_dataset(values["data"], device=context.device), values["depth"]
    moved = []
    for run in range(values["runs"]):
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
        context.progress((run + 1) / values["runs"])
    rows, part = np.array(moved), depth // 4
    lower, upper = rows[:, :part].mean(1), rows[:, -part:].mean(1)
    numbers = {
        "relative_change_of_lower_quarter": mean_of(lower),
        "relative_change_of_upper_quarter": mean_of(upper),
        "lower_over_upper": mean_of(lower / upper),
    }
    layers = np.arange(1, depth + 1)
    series = points_of("measured", layers[::3], [mean_of(column) for column in rows.T[::3]])
    panel = Panel("layer", "‖W − W₁‖/‖W₁‖ after training", (series,), y_scale="log")
    return Outcome(numbers, Picture((panel,), f"After {values['steps']} steps beyond the first, {depth} layers."))
