"""Figure 7: training deep convolutional networks from Xavier's weights and from orthogonalized ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, pick
from sounding.claims.number import mean_of
from sounding.claims.orth2021.propagation import conv_stack
from sounding.claims.orth2021.training import LABELS, draw_curves, draw_inputs, draw_orders, load, products
from sounding.claims.picture import Panel, Picture
from sounding.claims.train import train_alike_
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
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.weight.mul_(math.sqrt(2))
    return network.to(context.device)


def _draw_without_norm(data: Dataset, width: int, depth: int, generator: torch.Generator) -> nn.Module:
    stack = conv_stack(data.shape[0], width, depth, batch_norm=False, generator=generator)
    readout = nn.Linear(width * math.prod(data.shape[1:]), data.classes)
    initialize_(readout, "xavier", generator)
    return nn.Sequential(stack, nn.Flatten(), readout)


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
            if isinstance(module, nn.Conv2d):
                module.weight.copy_(deep.get_submodule(name).get_parameter("weight"))
    return shallow


def draw_variants(values: Mapping[str, Any], context: Context) -> dict[tuple[int, str], list[nn.Module]]:
    """Networks by depth and variant, one a seed; each layer is set from those before, so depths share their layers.

    The largest depth has the first `deep_seeds` only, all by default.
    """
    depths, every = sorted(values["depths"]), range(values["seeds"])
    deep_seeds = values.get("deep_seeds", len(every))
    drawn = [
        {depth: draw_network(values, depth, seed, context) for depth in (depths if seed < deep_seeds else depths[:-1])}
        for seed in every
    ]
    found: dict[tuple[int, str], list[nn.Module]] = {(d, v): [] for d in depths for v in ("xavier", "iterative")}
    for seed, networks in enumerate(drawn):
        deep = copy.deepcopy(networks[max(networks)])
        inputs = draw_inputs(values, values["init_samples"], context.generator(2000 + seed), context)
        orthogonalize_printed_(deep, inputs, context.generator(50 + seed))
        for depth, network in networks.items():
            found[depth, "xavier"].append(network)
            shorter = depth < max(networks)
            found[depth, "iterative"].append(_shorten(deep, copy.deepcopy(network)) if shorter else deep)
        context.progress((seed + 1) / len(every) / 2)
    return found


def train_variants(
    variants: Sequence[Sequence[nn.Module]], values: Mapping[str, Any], marks: tuple[int, ...], context: Context
) -> Array:
    """Training losses on the batches up to each mark, (variants, seeds, marks); a run that diverged counts as chance.

    `variants` are the networks of every seed from Xavier's weights, and those from orthogonalized ones. Of these seeds
    so many are trained `at_once`, all by default.
    """
    data, orders = load(values["data"], context.device), draw_orders(len(variants[0]), context)
    at_once = values.get("at_once", len(orders))
    found = []
    for start in range(0, len(orders), at_once):
        some = slice(start, start + at_once)
        networks = [network for variant in variants for network in variant[some]]
        with products("high", context.device):  # TF32, as torch's convolutions have it
            recipe = Recipe(**pick(values, "batch_size steps"), evaluate=marks, train_metrics="seen")
            history = train_alike_(networks, data, recipe, context, rates=[values["rate"]], orders=orders[some])
        losses = np.array([[point.train_loss for point in history.curve(run)] for run in range(len(networks))])
        found.append(losses.reshape(len(variants), -1, len(marks)))
    curves = np.concatenate(found, axis=1)
    return np.asarray(np.where(np.isfinite(curves), curves, math.log(data.classes)))


def measure_figure7(values: Mapping[str, Any], context: Context) -> Outcome:
    """Training loss of convolutional networks of two depths, from Xavier's weights and from orthogonalized ones."""
    networks = draw_variants(values, context)
    steps = values["steps"]
    marks = tuple(range(steps // 10, steps + 1, steps // 10))
    panels, numbers = [], {}
    for index, depth in enumerate(values["depths"]):
        # what is trained is let go: the networks of all depths at once are half of a GPU's memory
        curves = train_variants([networks.pop((depth, v)) for v in ("xavier", "iterative")], values, marks, context)
        label = "shallow" if depth == min(values["depths"]) else "deep"
        difference = curves[0, :, -1] - curves[1, :, -1]
        numbers[f"{label}_xavier_minus_iterative"] = mean_of(difference, looks=values.get("looks", 1))
        series = [
            draw_curves(LABELS[name], dict(zip(marks, part.T, strict=True)))
            for name, part in zip(("xavier", "iterative"), curves, strict=True)
        ]
        panels.append(Panel("step", "training loss", series, title=f"{depth} convolutions"))
        context.progress((index + 2) / 3)
    caption = "The paper: orthogonalized weights are slower at 20 layers and much faster at 80."
    return Outcome(numbers, Picture(panels, caption))
