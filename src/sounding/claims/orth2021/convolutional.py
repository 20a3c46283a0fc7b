"""Figure 7: training deep convolutional networks from Xavier's weights and from orthogonalized ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch import nn as modules

import sounding.train
from sounding.claims.claim import Context, Outcome
from sounding.claims.orth2021.propagation import conv_stack
from sounding.claims.orth2021.training import LABELS, difference_of, draw_curves, draw_inputs, draw_orders, load
from sounding.claims.picture import Panel, Picture
from sounding.data import Dataset
from sounding.models import AlexNet
from sounding.models.initial import initialize_
from sounding.repair import orthogonalize_
from sounding.train import Recipe


def draw_network(values: Mapping[str, Any], depth: int, seed: int, context: Context) -> nn.Module:
    """Xavier's weights times √2, zero biases; a deeper network begins with the convolutions of a shallower one."""
    data, generator = load(values["data"], context.device), context.generator(seed)
    network: nn.Module
    if values["plain"]:
        network = _draw_without_norm(data, values["width"], depth, generator)
    else:
        width, channels = values["width"], data.shape[0]
        network = AlexNet(channels, data.classes, depth=depth, width=width, dropout=0.0, generator=generator)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, modules.Linear | modules.Conv2d):
                module.weight.mul_(math.sqrt(2))
    return network.to(context.device)


def _draw_without_norm(data: Dataset, width: int, depth: int, generator: torch.Generator) -> nn.Module:
    stack = conv_stack(data.shape[0], width, depth, batch_norm=False, generator=generator)
    readout = modules.Linear(width * math.prod(data.shape[1:]), data.classes)
    initialize_(readout, "xavier", generator)
    return modules.Sequential(stack, modules.Flatten(), readout)


def orthogonalize_printed_(network: nn.Module, inputs: torch.Tensor, generator: torch.Generator) -> None:
    """Eq. (22) for the layers with as many outputs as inputs, as in the released program: V′ a slice, ‖WH‖_F = 1."""
    equal = [n for n, m in network.named_modules() if getattr(m, "in_channels", 0) == getattr(m, "out_channels", 1)]
    orthogonalize_(network, inputs, include=equal, frame="slice", generator=generator)

    def set_scale(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = output / output.norm()
        module.get_parameter("weight").div_(output.norm())
        return scaled

    handles = [network.get_submodule(name).register_forward_hook(set_scale) for name in equal]
    try:
        with torch.no_grad():
            network(inputs)
    finally:
        for handle in handles:
            handle.remove()


def _shorten(deep: nn.Module, shallow: nn.Module) -> nn.Module:
    """`shallow` with the convolutions that `deep` has in their places, and its own classifier."""
    with torch.no_grad():
        for name, module in shallow.named_modules():
            if isinstance(module, modules.Conv2d):
                module.weight.copy_(deep.get_submodule(name).get_parameter("weight"))
    return shallow


def draw_variants(values: Mapping[str, Any], context: Context) -> dict[tuple[int, str], list[nn.Module]]:
    """Networks by depth and variant, one a seed; each layer is set from those before, so depths share their layers."""
    depths = sorted(values["depths"])
    found: dict[tuple[int, str], list[nn.Module]] = {(d, v): [] for d in depths for v in ("xavier", "iterative")}
    for seed in range(values["seeds"]):
        drawn = {depth: draw_network(values, depth, seed, context) for depth in depths}
        deepest = copy.deepcopy(drawn[depths[-1]])
        inputs = draw_inputs(values, values["init_samples"], context.generator(2000 + seed), context)
        orthogonalize_printed_(deepest, inputs, context.generator(50 + seed))
        for depth, network in drawn.items():
            found[depth, "xavier"].append(network)
            shorter = depth < depths[-1]
            found[depth, "iterative"].append(_shorten(deepest, copy.deepcopy(network)) if shorter else deepest)
        context.progress((seed + 1) / values["seeds"] / 2)
    return found


def _train(
    networks: list[nn.Module], values: Mapping[str, Any], marks: tuple[int, ...], context: Context
) -> NDArray[np.float64]:
    """Training losses on the batches up to each mark, (networks, marks); a run that diverged counts as chance.

    `networks` are those of every seed from Xavier's weights, then from orthogonalized ones.
    """
    data = load(values["data"], context.device)
    history = sounding.train.train_together_(
        networks,
        data,
        learning_rates=[values["rate"]] * len(networks),
        recipe=Recipe(batch_size=values["batch_size"], steps=values["steps"], evaluate=marks, train_metrics="seen"),
        generator=draw_orders(values["seeds"], context) * 2,
        device=context.device,
    )
    curves = np.array([[p.train_loss for p in history.curve(run)] for run in range(len(networks))])
    return np.asarray(np.where(np.isfinite(curves), curves, math.log(data.classes)))


def measure_figure7(values: Mapping[str, Any], context: Context) -> Outcome:
    """Training loss of convolutional networks of two depths, from Xavier's weights and from orthogonalized ones."""
    found = draw_variants(values, context)
    steps, seeds = values["steps"], values["seeds"]
    marks = tuple(range(steps // 10, steps + 1, steps // 10))
    panels, numbers = [], {}
    for index, depth in enumerate(values["depths"]):
        curves = _train([*found[depth, "xavier"], *found[depth, "iterative"]], values, marks, context)
        xavier, iterative = curves[:seeds], curves[seeds:]
        label = "shallow" if depth == min(values["depths"]) else "deep"
        numbers[f"{label}_xavier_minus_iterative"] = difference_of(xavier[:, -1], iterative[:, -1])
        series = [
            draw_curves(LABELS[name], dict(zip(marks, part.T, strict=True)))
            for name, part in (("xavier", xavier), ("iterative", iterative))
        ]
        panels.append(Panel("step", "training loss", series, title=f"{depth} convolutions"))
        context.progress((index + 2) / 3)
    caption = "The paper: orthogonalized weights are slower at 20 layers and much faster at 80."
    return Outcome(numbers, Picture(panels, caption))
