"""Figures 3, 4, 5, 7 and thesis2024 figure A.1: orthogonality of the representations, and training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from sounding.claims.claim import Context, Outcome
from sounding.claims.number import DRAWN, Number, mean_of
from sounding.claims.picture import Panel, Picture, Series

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import nn

    from sounding.data import Dataset
    from sounding.models.norms import Norm

LABELS = {
    "xavier": "Xavier's weights",
    "iterative": "iterative orthogonalization",
    "orthonormal": "the same with orthonormal V′",
    "released": "as released, Σ^(−1)",
    "orthogonal": "orthogonal weights",
    "clipping:0.1": "clipping, λ = 0.1",
    "clipping:1": "clipping, λ = 1",
}
Curves = dict[int, "NDArray[np.float64]"]


@cache
def load(name: str, device: str) -> Dataset:
    """A data set on the device, read once."""
    from sounding.data import load_dataset

    return load_dataset(name, device=device)


def correlation_of(x: Sequence[float], y: Sequence[float]) -> Number:
    """Pearson's correlation with Fisher's interval."""
    r = float(np.corrcoef(x, y)[0, 1])
    half = DRAWN / math.sqrt(len(x) - 3)
    z = math.atanh(min(max(r, -1 + 1e-12), 1 - 1e-12))
    return Number(r, math.tanh(z - half), math.tanh(z + half), len(x))


def difference_of(first: NDArray[np.float64], second: NDArray[np.float64]) -> Number:
    """The mean of first − second over seeds that they share."""
    return mean_of(first - second)


def make_networks(values: Mapping[str, Any], depth: int, variant: str, context: Context) -> list[nn.Module]:
    """One network per seed, the same Xavier weights for every variant before it is changed."""
    from sounding.models import Mlp
    from sounding.repair import haar_, orthogonalize_

    data = load(values["data"], context.device)
    networks: list[nn.Module] = []
    for seed in range(values["seeds"]):
        # Xavier's variance times gain² = 2 is He's where the fans are equal
        network = Mlp(
            math.prod(data.shape),
            data.classes,
            depth=depth,
            width=values["width"],
            bias=False,
            init="he",
            generator=context.generator(seed),
        ).to(context.device)
        outer = ["1.linear", "readout"]  # the first and last layer keep Xavier's weights
        generator = context.generator(1000 + seed)
        if variant in ("iterative", "orthonormal", "released"):
            inputs = data.part("train")[0][: values["init_samples"]]
            orthogonalize_(
                network,
                _scaled(data, inputs),
                exponent=-1.0 if variant == "released" else -0.5,
                frame="haar" if variant == "orthonormal" else "slice",
                exclude=outer,
                generator=generator,
            )
            _print_scale_(network, len(inputs))
        elif variant == "orthogonal":
            haar_(network, gain=math.sqrt(2), exclude=outer, generator=generator)
        networks.append(network)
    return networks


def _print_scale_(network: nn.Module, samples: int) -> None:
    """The scale of eq. (6), ‖WH‖_F = 1, in place of the product's, mean square 1 after the ReLU.

    Without biases a ReLU network is homogeneous: one factor at the first orthogonalized layer does it for all.
    """
    import torch

    weight = network.get_parameter("2.linear.weight")
    with torch.no_grad():
        weight.div_(math.sqrt(2 * weight.shape[0] * samples))


def _scaled(data: Dataset, inputs: torch.Tensor) -> torch.Tensor:
    from sounding.data import normalize

    return normalize(data, inputs)


def gap_of_last_layer(network: nn.Module, inputs: torch.Tensor) -> float:
    """V of what reaches the readout."""
    import torch

    from sounding.measures import orthogonality_gap

    with torch.no_grad():
        hidden = inputs.flatten(1)
        for layer in list(network.children())[:-1]:
            hidden = layer(hidden)
    return float(orthogonality_gap(hidden))


def final_losses(values: Mapping[str, Any], depth: int, variant: str, context: Context) -> NDArray[np.float64]:
    """Training loss at the end, one per seed, at the rate of the lowest mean; a run that diverged counts as chance."""
    from sounding.train import Recipe, train_together_

    data = load(values["data"], context.device)
    clipping = float(variant.split(":")[1]) if variant.startswith("clipping") else None
    networks = [
        network for _ in values["rates"] for network in make_networks(values, depth, variant.split(":")[0], context)
    ]
    history = train_together_(
        networks,
        data,
        learning_rates=[rate for rate in values["rates"] for _ in range(values["seeds"])],
        recipe=Recipe(
            batch_size=values["batch_size"],
            epochs=values["epochs"],
            clipping=clipping,
            clipping_by="parameter",
            evaluate="end",
        ),
        generator=context.generator(5),
        device=context.device,
    )
    losses = np.array([history.final(run).train_loss for run in range(len(networks))])
    losses = np.where(np.isfinite(losses), losses, math.log(data.classes)).reshape(len(values["rates"]), -1)
    return np.asarray(losses[losses.mean(1).argmin()])


def _over_depth(values: Mapping[str, Any], variants: Sequence[str], context: Context) -> dict[str, Curves]:
    found: dict[str, Curves] = {variant: {} for variant in variants}
    for index, depth in enumerate(values["depths"]):
        for variant in variants:
            found[variant][depth] = final_losses(values, depth, variant, context)
        context.progress((index + 1) / len(values["depths"]))
    return found


def _series(label: str, curves: Curves) -> Series:
    numbers = [mean_of(samples) for samples in curves.values()]
    error = [[n.value - n.low for n in numbers], [n.high - n.value for n in numbers]]
    return Series(label, list(curves), [n.value for n in numbers], error=np.minimum(error, 2.0))


def measure_figure3a(values: Mapping[str, Any], context: Context) -> Outcome:
    """The gap at initialization and the training loss at the end, over depth."""
    data = load(values["data"], context.device)
    inputs = _scaled(data, data.part("train")[0][: values["batch_size"]])
    gaps: Curves = {}
    for depth in values["depths"]:
        networks = make_networks(values, depth, "xavier", context)
        gaps[depth] = np.array([gap_of_last_layer(network, inputs) for network in networks])
    losses = _over_depth(values, ("xavier",), context)["xavier"]
    shallow, deep = values["depths"][0], values["depths"][-1]
    x = [float(v) for depth in values["depths"] for v in gaps[depth]]
    y = [float(v) for depth in values["depths"] for v in losses[depth]]
    numbers = {
        "gap_rise": difference_of(gaps[deep], gaps[shallow]),
        "loss_rise": difference_of(losses[deep], losses[shallow]),
        "correlation": correlation_of(x, y),
    }
    panels = (
        Panel("depth, layers", "orthogonality gap V at initialization", (_series("Xavier's weights", gaps),)),
        Panel("depth, layers", "training loss at the end", (_series("Xavier's weights", losses),)),
    )
    caption = "Deeper networks start with a larger gap, and end with a larger training loss."
    return Outcome(numbers, Picture(panels, caption))


def measure_figure3b(values: Mapping[str, Any], context: Context) -> Outcome:
    """The gap of the last layer and the training loss during training."""
    from sounding.train import Recipe, train_together_

    data = load(values["data"], context.device)
    inputs = _scaled(data, data.part("train")[0][: values["batch_size"]])
    networks = make_networks(values, values["depth"], "xavier", context)
    gaps = [[gap_of_last_layer(network, inputs) for network in networks]]
    losses: list[list[float]] = []
    for epoch in range(values["epochs"]):
        recipe = Recipe(batch_size=values["batch_size"], epochs=1, evaluate="end")
        history = train_together_(
            networks,
            data,
            learning_rates=[values["rates"][0]] * len(networks),
            recipe=recipe,
            generator=context.generator(100 + epoch),
            device=context.device,
        )
        losses.append([history.final(run).train_loss for run in range(len(networks))])
        gaps.append([gap_of_last_layer(network, inputs) for network in networks])
        context.progress((epoch + 1) / values["epochs"])
    v, loss = np.array(gaps), np.array(losses)
    numbers = {
        "gap_change": difference_of(v[-1], v[0]),
        "loss_change": difference_of(loss[-1], loss[0]),
        "correlation_over_epochs": correlation_of(v[1:].mean(1).tolist(), loss.mean(1).tolist()),
    }
    epochs = np.arange(len(v))
    panels = (
        Panel("epoch", "orthogonality gap V of the last layer", (_series("V", dict(zip(epochs, v, strict=True))),)),
        Panel("epoch", "training loss", (_series("loss", dict(zip(epochs[1:], loss, strict=True))),)),
    )
    caption = "While the training loss falls, the representations of the last layer become more orthogonal."
    return Outcome(numbers, Picture(panels, caption))


def measure_initializations(values: Mapping[str, Any], context: Context) -> Outcome:
    """The training loss at the end over depth, for several ways to start or to train."""
    variants: Sequence[str] = values["variants"]
    found = _over_depth(values, variants, context)
    shallow, deep = values["depths"][0], values["depths"][-1]
    numbers = {}
    for variant in variants:
        key = variant.replace(":", "_").replace(".", "")
        numbers[f"rise_{key}"] = difference_of(found[variant][deep], found[variant][shallow])
        if variant != "iterative":
            numbers[f"{key}_minus_iterative"] = difference_of(found[variant][deep], found["iterative"][deep])
            numbers[f"rise_{key}_minus_iterative"] = difference_of(
                found[variant][deep] - found[variant][shallow], found["iterative"][deep] - found["iterative"][shallow]
            )
    panel = Panel(
        "depth, layers",
        "training loss at the end",
        [_series(LABELS[variant], found[variant]) for variant in variants],
    )
    caption = f"Mean and 99% interval of {values['seeds']} seeds after {values['epochs']} epochs; lower is better."
    return Outcome(numbers, Picture((panel,), caption))


def _gaps_over_layers(network: nn.Module, inputs: torch.Tensor) -> list[float]:
    """V of the input and after each activation."""
    import torch
    from torch import nn as modules

    from sounding.measures import orthogonality_gap

    gaps = [float(orthogonality_gap(inputs.flatten(1)))]

    def note(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        gaps.append(float(orthogonality_gap(output.detach().flatten(1))))

    handles = [m.register_forward_hook(note) for m in network.modules() if isinstance(m, modules.ReLU)]
    try:
        with torch.no_grad():
            network.train()(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return gaps


def _conv_stack(channels: int, width: int, depth: int, *, batch_norm: bool, generator: torch.Generator) -> nn.Module:
    from torch import nn as modules

    from sounding.models.initial import initialize_

    layers: list[nn.Module] = []
    for index in range(depth):
        layers.append(modules.Conv2d(channels if index == 0 else width, width, 3, padding=1, bias=False))
        if batch_norm:
            layers.append(modules.BatchNorm2d(width))
        layers.append(modules.ReLU())
    network = modules.Sequential(*layers)
    initialize_(network, "xavier", generator)
    return network


def measure_figure5(values: Mapping[str, Any], context: Context) -> Outcome:
    """V over layers of one network of each kind, for many batches."""
    import torch

    from sounding.models import Mlp

    data = load(values["data"], context.device)
    networks: dict[tuple[str, str], nn.Module] = {}
    norms: tuple[Norm, ...] = ("none", "batch")
    for index, norm in enumerate(norms):
        networks["MLP", norm] = Mlp(
            math.prod(data.shape),
            data.classes,
            depth=values["depth"],
            width=values["width"],
            norm=norm,
            init="xavier",
            generator=context.generator(index),
        ).to(context.device)
        networks["ConvNet", norm] = _conv_stack(
            data.shape[0],
            values["width"],
            values["depth"],
            batch_norm=norm == "batch",
            generator=context.generator(10 + index),
        ).to(context.device)
    order = torch.randperm(len(data.part("train")[0]), generator=context.generator(20)).to(context.device)
    batches = order[: values["batches"] * values["batch_size"]].view(values["batches"], -1)
    numbers, panels = {}, []
    for kind in ("MLP", "ConvNet"):
        series = []
        for norm, label in (("none", "vanilla"), ("batch", "batch norm")):
            gaps = np.array(
                [_gaps_over_layers(networks[kind, norm], _scaled(data, data.part("train")[0][b])) for b in batches]
            )
            key = f"{kind.lower()}_{label.replace(' ', '_')}"
            numbers[f"{key}_change"] = mean_of(gaps[:, -1] - gaps[:, 0])
            late = gaps[:, -10:]
            layers = np.arange(late.shape[1]) - (late.shape[1] - 1) / 2
            numbers[f"{key}_late_drift"] = mean_of(late @ layers / np.sum(layers**2))
            series.append(
                Series(
                    label,
                    np.arange(gaps.shape[1]),
                    gaps.mean(0),
                    error=DRAWN * gaps.std(0, ddof=1) / math.sqrt(len(gaps)),
                )
            )
        panels.append(Panel("layer (0 is the input)", "orthogonality gap V", series, title=kind))
    caption = (
        f"Mean over {values['batches']} batches of {values['batch_size']} images through one network of each kind."
    )
    return Outcome(numbers, Picture(panels, caption))


def measure_figure7(values: Mapping[str, Any], context: Context) -> Outcome:
    """Training loss of convolutional networks of two depths, from Xavier's weights and from orthogonalized ones."""
    from sounding.models import AlexNet
    from sounding.repair import orthogonalize_
    from sounding.train import Recipe, train_together_

    data = load(values["data"], context.device)
    panels, numbers = [], {}
    for depth in values["depths"]:
        networks = []
        for variant in ("xavier", "iterative"):
            for seed in range(values["seeds"]):
                network: nn.Module
                if values["plain"]:
                    network = _conv_classifier(data, values["width"], depth, context.generator(seed))
                else:
                    network = AlexNet(
                        data.shape[0],
                        data.classes,
                        depth=depth,
                        width=values["width"],
                        dropout=0.0,
                        generator=context.generator(seed),
                    )
                network = network.to(context.device)
                if variant == "iterative":
                    inputs = _scaled(data, data.part("train")[0][: values["init_samples"]])
                    # layers with as many outputs as inputs, as in the released program
                    equal = [
                        n
                        for n, m in network.named_modules()
                        if getattr(m, "in_channels", 0) == getattr(m, "out_channels", 1)
                    ]
                    orthogonalize_(
                        network, inputs, include=equal, frame="slice", generator=context.generator(50 + seed)
                    )
                networks.append(network)
        steps = values["steps"]
        marks = tuple(range(0, steps + 1, max(1, steps // 10)))
        history = train_together_(
            networks,
            data,
            learning_rates=[values["rate"]] * len(networks),
            recipe=Recipe(batch_size=values["batch_size"], steps=steps, evaluate=marks, train_metrics="seen"),
            generator=context.generator(7),
            device=context.device,
        )
        curves = np.array([[p.train_loss for p in history.curve(run)] for run in range(len(networks))])
        curves = np.where(np.isfinite(curves), curves, math.log(data.classes))[:, 1:]
        xavier, iterative = curves[: values["seeds"]], curves[values["seeds"] :]
        label = "shallow" if depth == values["depths"][0] else "deep"
        numbers[f"{label}_xavier_minus_iterative"] = difference_of(xavier[:, -1], iterative[:, -1])
        series = [
            _series(LABELS[name], dict(zip(marks[1:], part.T, strict=True)))
            for name, part in (("xavier", xavier), ("iterative", iterative))
        ]
        panels.append(Panel("step", "training loss", series, title=f"{depth} convolutions"))
    caption = "The paper: orthogonalized weights are slower at 20 layers and much faster at 80."
    return Outcome(numbers, Picture(panels, caption))


def _conv_classifier(data: Dataset, width: int, depth: int, generator: torch.Generator) -> nn.Module:
    from torch import nn as modules

    from sounding.models.initial import initialize_

    stack = _conv_stack(data.shape[0], width, depth, batch_norm=False, generator=generator)
    assert isinstance(stack, modules.Sequential)
    readout = modules.Linear(width, data.classes)
    initialize_(readout, "xavier", generator)
    return modules.Sequential(*stack, modules.AdaptiveAvgPool2d(1), modules.Flatten(), readout)
