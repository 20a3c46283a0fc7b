"""Figures 6.4 and C.5 to C.8: shaped networks with batch norm and Haar weights in training, beside linear ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import Number, over_runs, unfinished
from sounding.claims.picture import Panel, Picture, points_over
from sounding.claims.share import share
from sounding.claims.train import train_alike_
from sounding.data import Dataset, load_dataset
from sounding.models import Mlp
from sounding.train import Recipe

Curves = dict[tuple[str, int], dict[str, Array]]

NONLINEAR = ("tanh", "sin")
ACTIVATIONS = (*NONLINEAR, "identity")


def shaped_networks(
    dataset: Dataset, depth: int, values: Mapping[str, Any], *, activation: str, context: Context
) -> list[Mlp]:
    """One network per seed: batch norm, Haar weights, gains ℓ^(−exponent) in front of the activation."""
    law: dict[str, Any] = {"norm": "batch", "init": "haar", "gain_exponent": values["exponent"]}
    law |= {"depth": depth, "width": values["width"], "activation": activation}
    return [
        Mlp(math.prod(dataset.shape), dataset.classes, **law, generator=context.generator(100 * depth + seed))
        for seed in range(values["seeds"])
    ]


def draw_orders(seeds: int, context: Context) -> list[torch.Generator]:
    """A generator for each seed that orders its samples, the same for all depths and activations."""
    return [context.generator(900_000 + seed, device=context.device) for seed in range(seeds)]


@share("parts")
def train_all(values: Mapping[str, Any], context: Context) -> Curves:
    """step, train and test accuracy, (seeds, looks) each, by activation and depth.

    Training accuracy is that on the batches since the last look; networks of one seed start from the same weights and
    see the same batches.
    """
    dataset, seeds, steps = load_dataset(values["data"], device=context.device), values["seeds"], values["steps"]
    recipe = Recipe(
        batch_size=values["batch_size"],
        steps=steps,
        evaluate=tuple(int(step) for step in np.linspace(0, steps, values["looks"] + 1)[1:]),
        train_metrics="seen",
    )
    found: Curves = {}
    for depth in values["depths"]:
        for activation in ACTIVATIONS:
            networks = shaped_networks(dataset, depth, values, activation=activation, context=context)
            rates, orders = [values["learning_rate"]], draw_orders(seeds, context)
            history = train_alike_(networks, dataset, recipe, context, rates=rates, orders=orders)
            curves = [history.curve(seed) for seed in range(seeds)]
            found[activation, depth] = {
                name: np.array([[getattr(point, field) for point in curve] for curve in curves], dtype=np.float64)
                for name, field in (("step", "step"), ("train", "train_accuracy"), ("test", "test_accuracy"))
            }
    return found


def measure_accuracy(values: Mapping[str, Any], context: Context) -> Outcome:
    """Errors of linear over those of nonlinear networks, and what depth changes.

    Every scale trains for less long than the paper. Where the training errors still part at the end, longer training
    takes the ratio further up, and its interval has no upper end.
    """
    found = train_all(values, context)
    depths, parts = values["depths"], values["parts"]
    numbers: dict[str, Number] = {}
    for part in parts:
        final = {key: curves[part][:, -1] for key, curves in found.items()}
        error = {a: np.mean([1 - final[a, depth] for depth in depths], axis=0) for a in ACTIVATIONS}
        for activation in NONLINEAR:
            widening = over_runs(_ratio(found, activation, -1) / _ratio(found, activation, values["looks"] // 2 - 1))
            ratio = over_runs(error["identity"] / np.maximum(error[activation], 1e-4))
            still = widening.low > 1
            numbers[f"widening_over_{activation}"] = widening
            numbers[f"{part}_error_of_identity_over_{activation}"] = (
                unfinished(ratio, towards=math.inf) if still else ratio
            )
        for activation in ACTIVATIONS:
            numbers[f"{part}_accuracy_{activation}"] = over_runs(1 - error[activation])
            change = final[activation, max(depths)] - final[activation, min(depths)]
            numbers[f"{part}_change_with_depth_{activation}"] = over_runs(change)
    panels = [
        Panel(
            "step of SGD",
            f"{'training' if part == 'train' else 'test'} accuracy",
            [
                points_over(f"{activation}, {depth} layers", curves["step"][0], curves[part])
                for activation in ACTIVATIONS
                for curves, depth in ((found[activation, depth], depth) for depth in depths)
            ],
            title=part,
        )
        for part in parts
    ]
    caption = (
        f"{values['data']}, width {values['width']}, batch {values['batch_size']}, SGD at {values['learning_rate']:g}, "
        f"gains ℓ^−{values['exponent']:g}, {values['seeds']} seeds: mean and 99% interval of each activation and "
        "depth."
    )
    return Outcome(numbers, Picture(panels, caption))


def _ratio(found: Curves, activation: str, look: int) -> Array:
    """The training error of linear over that of nonlinear networks at one look, mean over depths, for every seed."""
    error = {
        name: np.mean([1 - curves["train"][:, look] for (kind, _), curves in found.items() if kind == name], axis=0)
        for name in ("identity", activation)
    }
    return np.asarray(error["identity"] / np.maximum(error[activation], 1e-4))
