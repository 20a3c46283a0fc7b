"""Figures 5 and 7: perceptrons and convolutional networks at initialization, and the training of deep ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, pick, present
from sounding.claims.number import mean_of, mean_slope_of
from sounding.claims.orth2021.training import ORDERS, draw_curves, draw_inputs, load, products, shorten
from sounding.claims.picture import Panel, mean_over
from sounding.claims.train import curves_of, train_alike_
from sounding.data import Dataset, normalize
from sounding.models import AlexNet, Mlp
from sounding.models.initial import initialize_
from sounding.repair import orthogonalize_
from sounding.train import Recipe

LATE = 10  # layers at the end over which the gap is asked to stay constant


def conv_stack(channels: int, width: int, depth: int, *, batch_norm: bool, generator: torch.Generator) -> nn.Sequential:
    """{3×3 convolution with zero padding, batch norm or none, ReLU} × depth, Xavier's weights."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers.append(nn.Conv2d(channels if index == 0 else width, width, 3, padding=1, bias=False))
        if batch_norm:
            layers.append(nn.BatchNorm2d(width))
        layers.append(nn.ReLU())
    network = nn.Sequential(*layers)
    initialize_(network, "xavier", generator)
    return network


def _parts(features: torch.Tensor) -> torch.Tensor:
    """V of a batch, and the part of it that the angles make: with C = HHᵀ/tr HHᵀ, (‖C − I/n‖_F, ‖C − diag C‖_F)."""
    rows = features.detach().flatten(1).double()
    gram = rows @ rows.mT
    gram = gram / gram.trace()  # C of the docstring: its diagonal sums to 1
    diagonal = gram.diagonal()
    size = len(rows)
    angles = (gram - torch.diag(diagonal)).square().sum()
    return torch.stack([angles + (diagonal - 1 / size).square().sum(), angles]).sqrt()


def _through_layers(network: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """`_parts` of the input and of Q_ℓ = BN(W F(Q_{ℓ−1})), what each activation gets, (2, layers + 1)."""
    found = [_parts(inputs)]  # the hooks append what follows
    handles = [
        module.register_forward_pre_hook(lambda module, arguments: found.append(_parts(arguments[0])))
        for module in network.modules()
        if isinstance(module, nn.ReLU)
    ]
    try:
        with torch.no_grad():
            network.train()(inputs)  # batch norm takes the statistics of the batch
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(found, dim=1)


def _network(values: Values, kind: str, data: Dataset, *, batch_norm: bool, seed: int, context: Context) -> Any:
    """A stack of convolutions or a perceptron, with weights of a random stream of its own."""
    offset = 4 * seed + 2 * (kind == "ConvNet") + batch_norm  # four kinds of network to a seed
    shape: dict[str, Any] = {**pick(values, "width depth"), "generator": context.generator(offset)}
    if kind == "ConvNet":
        return conv_stack(data.shape[0], **shape, batch_norm=batch_norm)
    shape["norm"] = "batch" if batch_norm else "none"
    return Mlp(math.prod(data.shape), data.classes, init="xavier", **shape)


def _over_networks(values: Values, kind: str, *, batch_norm: bool, context: Context) -> Array:
    """The gap and its part of the angles, (networks, 2, layers + 1): means over the batches that a network is given."""
    data = load(values["data"], context.device)
    stored = data.part("train")[0]
    generator = context.generator(100_000)
    rows = []
    for seed in range(values["networks"]):
        network = _network(values, kind, data, batch_norm=batch_norm, seed=seed, context=context).to(context.device)
        found = []
        for _ in range(values["batches"]):
            chosen = torch.randperm(len(stored), generator=generator)[: values["batch_size"]].to(context.device)
            inputs = normalize(data, stored[chosen])
            if "constants" in values:
                mean, deviation = values["constants"]
                # instead of those of the data set, where a row names them
                inputs = (stored[chosen].float() / 255 - mean) / deviation
            found.append(_through_layers(network, inputs))
        rows.append(torch.stack(found).mean(0))
    return np.asarray(torch.stack(rows).cpu().numpy())


def measure_figure5(values: Values, context: Context) -> Outcome:
    """V over layers, for several networks of each kind and several batches through each."""
    numbers, panels = {}, []
    last = {}
    for place, kind in enumerate(("MLP", "ConvNet")):
        series = []
        for norm, label in enumerate(("vanilla", "batch norm")):
            found = _over_networks(values, kind, batch_norm=norm == 1, context=context)
            gaps, angles = found[:, 0], found[:, 1]
            key = f"{kind.lower()}_{label.replace(' ', '_')}"
            last[key] = gaps[:, -1]
            for part, curves in (("", gaps), ("_angles", angles)):
                late = curves[:, -LATE:]
                numbers[f"{key}{part}_change"] = mean_of(curves[:, -1] - curves[:, 0])
                numbers[f"{key}{part}_late_drift"] = mean_slope_of(np.arange(late.shape[1]), late)
            # all of the first layers, then every third, and the last
            layers = np.unique([*range(min(6, gaps.shape[1])), *range(6, gaps.shape[1], 3), gaps.shape[1] - 1])
            shown = (("", gaps), (", angles alone", angles)) if norm else (("", gaps),)
            series += [mean_over(f"{label}{what}", layers, curves[:, layers], ddof=1) for what, curves in shown]
            context.progress((2 * place + norm + 1) / 4)
        panels.append(Panel(series=series, title=kind))
        vanilla, normed = (last[f"{kind.lower()}_{label}"] for label in ("vanilla", "batch_norm"))
        numbers[f"{kind.lower()}_vanilla_minus_batch_norm"] = mean_of(vanilla - normed)
    return present(numbers, *panels)


def draw_network(values: Values, depth: int, seed: int, context: Context) -> nn.Module:
    """Xavier's weights times √2, zero biases; a deeper network begins with the convolutions of a shallower one."""
    data, generator = load(values["data"], context.device), context.generator(seed)
    width, channels = values["width"], data.shape[0]
    network: nn.Module
    if values["plain"]:
        stack = conv_stack(channels, width, depth, batch_norm=False, generator=generator)
        readout = nn.Linear(width * math.prod(data.shape[1:]), data.classes)
        initialize_(readout, "xavier", generator)
        network = nn.Sequential(stack, nn.Flatten(), readout)
    else:
        network = AlexNet(channels, data.classes, depth=depth, width=width, dropout=0.0, generator=generator)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.weight.mul_(math.sqrt(2))  # keeps the mean square of states through ReLU
    return network.to(context.device)


def orthogonalize_printed_(network: nn.Module, inputs: torch.Tensor, generator: torch.Generator) -> None:
    """Eq. (22) for the layers with as many outputs as inputs, as in the released program: V′ a slice, ‖WH‖_F = 1."""
    # defaults differ, so that a layer without channels is left out
    equal = [n for n, m in network.named_modules() if getattr(m, "in_channels", 0) == getattr(m, "out_channels", 1)]
    orthogonalize_(network, inputs, include=equal, frame="slice", generator=generator)

    def set_scale(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = output / output.norm()
        # the hook has the output; dividing the weight makes it so for later batches
        module.get_parameter("weight").div_(output.norm())
        return scaled

    handles = [network.get_submodule(name).register_forward_hook(set_scale) for name in equal]
    try:
        with torch.no_grad():
            network(inputs)
    finally:
        for handle in handles:
            handle.remove()


def draw_variants(values: Values, context: Context) -> dict[tuple[int, str], list[nn.Module]]:
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
        deep = copy.deepcopy(networks[max(networks)])  # the original stays the one from Xavier's weights
        inputs = draw_inputs(values, values["init_samples"], context.generator(2000 + seed), context)
        orthogonalize_printed_(deep, inputs, context.generator(50 + seed))
        for depth, network in networks.items():
            found[depth, "xavier"].append(network)
            shorter = depth < max(networks)
            found[depth, "iterative"].append(shorten(deep, copy.deepcopy(network), nn.Conv2d) if shorter else deep)
        context.progress((seed + 1) / len(every) / 2)
    return found


def train_variants(
    variants: Sequence[Sequence[nn.Module]], values: Values, marks: tuple[int, ...], context: Context
) -> Array:
    """Training losses on the batches up to each mark, (variants, seeds, marks); a run that diverged counts as chance.

    `variants` are the networks of every seed from Xavier's weights, and those from orthogonalized ones. Of these seeds
    so many are trained `at_once`, all by default.
    """
    data, orders = load(values["data"], context.device), context.generators(ORDERS, len(variants[0]))
    at_once = values.get("at_once", len(orders))
    found = []
    for start in range(0, len(orders), at_once):
        some = slice(start, start + at_once)
        networks = [network for variant in variants for network in variant[some]]
        with products("high", context.device):  # TF32, as torch's convolutions have it
            recipe = Recipe(**pick(values, "batch_size steps"), evaluate=marks, train_metrics="seen")
            history = train_alike_(networks, data, recipe, context, rates=[values["rate"]], orders=orders[some])
        losses = curves_of(history, range(len(networks)))["train_loss"]
        found.append(losses.reshape(len(variants), -1, len(marks)))
    curves = np.concatenate(found, axis=1)
    return np.asarray(np.where(np.isfinite(curves), curves, math.log(data.classes)))


def measure_figure7(values: Values, context: Context) -> Outcome:
    """Training loss of convolutional networks of two depths, from Xavier's weights and from orthogonalized ones."""
    networks = draw_variants(values, context)
    steps = values["steps"]
    marks = tuple(range(steps // 10, steps + 1, steps // 10))  # ten looks
    panels, numbers = [], {}
    for index, depth in enumerate(values["depths"]):
        # what is trained is let go: the networks of all depths at once are half of a GPU's memory
        curves = train_variants([networks.pop((depth, v)) for v in ("xavier", "iterative")], values, marks, context)
        label = "shallow" if depth == min(values["depths"]) else "deep"
        difference = curves[0, :, -1] - curves[1, :, -1]  # pairs: both start from one seed
        numbers[f"{label}_xavier_minus_iterative"] = mean_of(difference, looks=values.get("looks", 1))
        series = [
            draw_curves(name, dict(zip(marks, part.T, strict=True)))
            for name, part in zip(("xavier", "iterative"), curves, strict=True)
        ]
        panels.append(Panel(series=series, title=f"{depth} convolutions"))
        context.progress((index + 2) / 3)
    return present(numbers, *panels)
