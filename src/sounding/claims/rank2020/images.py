"""Training VGG-19 and ResNet-50 run by run, with looks at the last hidden layer: what figures 5, 7, 10 and 13 share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.claims.claim import Context
from sounding.claims.rank2020.perceptrons import Array, draw_samples, make_one_sided_
from sounding.claims.share import share
from sounding.data import Dataset, load_dataset, normalize
from sounding.data.resize import fit_images
from sounding.measures import gradient_alignment, numerical_rank, participation_ratio
from sounding.models import build
from sounding.train import Progress, Recipe, train_

KINDS = {
    "standard": "batch norm",
    "one-sided": "batch norm, one-sided start",
    "uncentred": "batch norm without centring",
    "plain": "no norm",
    "plain, 100 times the rate": "no norm, 100 × rate",
    "plain, random images": "no norm, random images",
}

PARTS = 3
"""The number of parts into which a training is cut whose path is compared."""


@dataclass(frozen=True)
class Runs:
    """(runs, evaluations) of training accuracy, and (runs, evaluations + 1) of what the last hidden layer shows."""

    accuracy: Array
    rank: Array
    ratio: Array
    alignment: Array


def make_network(kind: str, values: Mapping[str, Any], channels: int, generator: torch.Generator) -> nn.Module:
    """A network with PyTorch's start, or with weights from U[0, 2/√fan_in] for the one-sided kind."""
    options: dict[str, Any] = {"norm": "none"} if kind.startswith("plain") else {"norm": "batch", "momentum": 1.0}
    if kind == "uncentred":
        options["centring"] = False
    if values["network"] == "vgg19":
        options["dropout"] = values["dropout"]
    shape = (channels, values["side"], values["side"])
    network = build(values["network"], shape=shape, width=values["width"], generator=generator, **options)
    if kind == "one-sided":
        make_one_sided_(network, generator)
    return network


def look_times(kind: str, values: Mapping[str, Any]) -> list[int]:
    """The SGD steps after which a network is looked at; those that do not learn get fewer."""
    family = "plain" if kind.startswith("plain") else kind
    every = values["plain_every"] if family == "plain" else values["every"]
    return list(range(every, values["steps"][family] + 1, every))


@lru_cache(maxsize=1)
def load_square(name: str, side: int, device: str) -> Dataset:
    """A data set with its training images resized to side × side."""
    dataset = load_dataset(name, device=device)
    images = dataset.train_inputs
    if images.shape[-1] == side:
        return dataset
    return replace(dataset, train_inputs=fit_images(images, (images.shape[1], side, side), source=name))


def draw_images(
    kind: str, values: Mapping[str, Any], context: Context, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalized training images and labels; random pixels under the same labels for the kind that says so."""
    dataset = load_square(values["dataset"], values["side"], context.device)
    images = dataset.train_inputs
    if kind.endswith("random images"):
        generator = context.generator(offset, device=context.device)
        images = torch.rand(images.shape, generator=generator, device=images.device)
    return normalize(dataset, images), dataset.train_labels


def see_last_hidden(network: nn.Module, images: torch.Tensor) -> tuple[float, float, float]:
    """Rank, r and alignment of what the readout receives.

    The gradient of a sample's loss in a row of the readout is a multiple of that sample's hidden features, so the mean
    absolute cosine between features is the alignment of the gradients (proposition 19).
    """
    readout = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
    kept: list[torch.Tensor] = []
    hook = readout.register_forward_pre_hook(lambda _, arguments: kept.append(arguments[0]))
    network.train()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    with torch.no_grad():
        network(images)
    hook.remove()
    network.train()
    features = kept[0].flatten(1)
    return tuple(float(f(features)) for f in (numerical_rank, participation_ratio, gradient_alignment))  # type: ignore[return-value]


def walk_weights(
    kind: str, values: Mapping[str, Any], context: Context, *, offset: int, pixels: int
) -> list[torch.Tensor]:
    """What training has added to all weights after each of `PARTS` parts of the steps; start and order by `offset`."""
    data, device = draw_images(kind, values, context, pixels), context.device
    network = make_network(kind, values, data[0].shape[1], context.generator(offset)).to(device)
    start = nn.utils.parameters_to_vector(network.parameters()).detach().clone()
    part, order, found = values["steps"] // PARTS, context.generator(offset + 100, device=device), []
    for _ in range(PARTS):
        recipe = Recipe(batch_size=values["batch_size"], steps=part, evaluate="end", train_metrics="seen")
        train_(network, data, learning_rate=values["rate"], recipe=recipe, generator=order, device=device)
        found.append(nn.utils.parameters_to_vector(network.parameters()).detach() - start)
    return found


@share("kinds")
def train_kind(values: Mapping[str, Any], context: Context, kind: str) -> Runs:
    """Train the runs of one kind by plain SGD, looking at the last hidden layer on the way; figures share it.

    Nothing that is drawn is shared by two runs or by two kinds.
    """
    first = 1000 * list(KINDS).index(kind)
    accuracy, seen = [], []
    with fast_convolutions(context.device):
        for run in range(values["runs"]):
            scores, looks = _train_once(kind, values, context, first + run)
            accuracy.append(scores)
            seen.append(looks)
    rank, ratio, alignment = np.moveaxis(np.array(seen), -1, 0)
    return Runs(np.array(accuracy), rank, ratio, alignment)


@contextmanager
def fast_convolutions(device: str) -> Iterator[None]:
    """On a GPU, let cuDNN time its algorithms for each shape once, and put the choice back as it was."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or device.startswith("cuda")
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _train_once(
    kind: str, values: Mapping[str, Any], context: Context, offset: int
) -> tuple[list[float], list[tuple[float, float, float]]]:
    """Training accuracy between looks, and the looks, the first of which is before training."""
    data, device = draw_images(kind, values, context, offset + 400), context.device
    network = make_network(kind, values, data[0].shape[1], context.generator(offset)).to(device)
    if device.startswith("cuda"):  # the layout that tensor cores take
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    times = look_times(kind, values)
    recipe = Recipe(batch_size=values["batch_size"], steps=times[-1], evaluate=tuple(times), train_metrics="seen")
    rate = values["plain_rate"] if kind.startswith("plain") else values["rate"]
    rate = 100 * rate if kind.endswith("100 times the rate") else rate
    batch = data[0][draw_samples(data[0], values["rank_batch"], context.generator(offset + 300))]
    looks = [see_last_hidden(network, batch)]

    def look(now: Progress) -> None:
        if now.step in times:
            looks.append(see_last_hidden(network, batch))

    # dropout draws from torch's own generator: lend it a seed and put it back
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
        torch.manual_seed(int(torch.randint(2**31, (), generator=context.generator(offset + 200))))
        history = train_(
            network,
            data,
            learning_rate=rate,
            recipe=recipe,
            generator=context.generator(offset + 100, device=device),
            device=device,
            progress=look,
        )
    found = [point.train_accuracy for point in history.curve(0)]
    # a run that diverged has learned nothing
    return [0.1 if value is None or not np.isfinite(value) else value for value in found], looks
