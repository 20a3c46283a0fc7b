"""Figure 5: the orthogonality gap through the layers of perceptrons and convolutional networks at initialization."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, pick
from sounding.claims.number import DRAWN, Number, mean_of, mean_slope_of
from sounding.claims.orth2021.training import load
from sounding.claims.picture import Panel, Picture, Series
from sounding.data import Dataset, normalize
from sounding.models import Mlp
from sounding.models.initial import initialize_

LATE = 10
"""Layers at the end over which the gap is asked to stay constant."""


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
    gram = gram / gram.trace()
    diagonal = gram.diagonal()
    size = len(rows)
    angles = (gram - torch.diag(diagonal)).square().sum()
    return torch.stack([angles + (diagonal - 1 / size).square().sum(), angles]).sqrt()


def _through_layers(network: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """`_parts` of the input and of Q_ℓ = BN(W F(Q_{ℓ−1})), what each activation gets, (2, layers + 1)."""
    found = [_parts(inputs)]
    handles = [
        module.register_forward_pre_hook(lambda module, arguments: found.append(_parts(arguments[0])))
        for module in network.modules()
        if isinstance(module, nn.ReLU)
    ]
    try:
        with torch.no_grad():
            network.train()(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(found, dim=1)


def _network(
    values: Mapping[str, Any], kind: str, data: Dataset, *, batch_norm: bool, seed: int, context: Context
) -> Any:
    """A stack of convolutions or a perceptron, with weights of a random stream of its own."""
    offset = 4 * seed + 2 * (kind == "ConvNet") + batch_norm
    shape: dict[str, Any] = {**pick(values, "width depth"), "generator": context.generator(offset)}
    if kind == "ConvNet":
        return conv_stack(data.shape[0], **shape, batch_norm=batch_norm)
    shape["norm"] = "batch" if batch_norm else "none"
    return Mlp(math.prod(data.shape), data.classes, init="xavier", **shape)


def _over_networks(values: Mapping[str, Any], kind: str, *, batch_norm: bool, context: Context) -> Array:
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
                inputs = (stored[chosen].float() / 255 - mean) / deviation
            found.append(_through_layers(network, inputs))
        rows.append(torch.stack(found).mean(0))
    return np.asarray(torch.stack(rows).cpu().numpy())


def _drift(curves: Array) -> Number:
    """The slope over the last layers, a mean over networks."""
    late = curves[:, -LATE:]
    return mean_slope_of(np.arange(late.shape[1]), late)


def measure_figure5(values: Mapping[str, Any], context: Context) -> Outcome:
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
            numbers[f"{key}_change"] = mean_of(gaps[:, -1] - gaps[:, 0])
            numbers[f"{key}_late_drift"] = _drift(gaps)
            numbers[f"{key}_angles_change"] = mean_of(angles[:, -1] - angles[:, 0])
            numbers[f"{key}_angles_late_drift"] = _drift(angles)
            layers = np.unique([*range(min(6, gaps.shape[1])), *range(6, gaps.shape[1], 3), gaps.shape[1] - 1])
            shown = (("", gaps), (", angles alone", angles)) if norm else (("", gaps),)
            series += [
                Series(
                    f"{label}{what}",
                    layers,
                    c.mean(0)[layers],
                    error=DRAWN * c.std(0, ddof=1)[layers] / math.sqrt(len(c)),
                )
                for what, c in shown
            ]
            context.progress((2 * place + norm + 1) / 4)
        panels.append(Panel("layer (0 is the input)", "orthogonality gap V", series, title=kind))
        vanilla, normed = (last[f"{kind.lower()}_{label}"] for label in ("vanilla", "batch_norm"))
        numbers[f"{kind.lower()}_vanilla_minus_batch_norm"] = mean_of(vanilla - normed)
    caption = (
        f"Mean and 99% interval over {values['networks']} networks of each kind, {values['batches']} batches of "
        f"{values['batch_size']} images through each. Angles alone: the part of V that is not due to unequal norms."
    )
    return Outcome(numbers, Picture(panels, caption))
