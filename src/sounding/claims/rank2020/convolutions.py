"""Batch norm broken, uncentred and missing in VGG-19 and ResNet-50: figures 5, 7, 10 and 13."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.number import Number, exact, over_runs, unfinished
from sounding.claims.picture import Series, points_over
from sounding.claims.rank2020.perceptrons import difference, draw_samples, make_one_sided_
from sounding.claims.share import share
from sounding.data import Dataset, load_dataset, normalize
from sounding.data.batch import fit_images
from sounding.measures import gradient_alignment, numerical_rank, participation_ratio
from sounding.models import build
from sounding.train import Progress, Recipe, train_

KINDS = ("standard", "one-sided", "uncentred", "plain", "plain, 100 times the rate", "plain, random images")

PARTS = 3  # the number of parts into which a training is cut whose path is compared


@dataclass(frozen=True)
class Runs:
    """(runs, evaluations) of training accuracy, and (runs, evaluations + 1) of what the last hidden layer shows."""

    accuracy: Array
    rank: Array
    ratio: Array
    alignment: Array


def make_network(kind: str, values: Values, channels: int, generator: torch.Generator) -> nn.Module:
    """A network with PyTorch's start, or with weights from U[0, 2/√fan_in] for the one-sided kind."""
    # running statistics are those of the last batch
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


def look_times(kind: str, values: Values) -> list[int]:
    """The SGD steps after which a network is looked at; those that do not learn get fewer."""
    family = "plain" if kind.startswith("plain") else kind
    every = values["plain_every"] if family == "plain" else values["every"]
    return list(range(every, values["steps"][family] + 1, every))  # the last look is at the end


@lru_cache(maxsize=1)  # large: one set at a time
def load_square(name: str, side: int, device: str) -> Dataset:
    """A data set with its training images resized to side × side."""
    dataset = load_dataset(name, device=device)
    images = dataset.train_inputs
    return replace(dataset, train_inputs=fit_images(images, (images.shape[1], side, side), source=name))


def draw_images(kind: str, values: Values, context: Context, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
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
            module.eval()  # a look must not depend on what dropout leaves out
    with torch.no_grad():
        network(images)
    hook.remove()
    network.train()
    features = kept[0].flatten(1)
    return tuple(float(f(features)) for f in (numerical_rank, participation_ratio, gradient_alignment))  # type: ignore[return-value]


def walk_weights(kind: str, values: Values, context: Context, *, offset: int, pixels: int) -> list[torch.Tensor]:
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
def train_kind(values: Values, context: Context, kind: str) -> Runs:
    """Train the runs of one kind by plain SGD, looking at the last hidden layer on the way; figures share it.

    Nothing that is drawn is shared by two runs or by two kinds.
    """
    first = 1000 * KINDS.index(kind)  # offsets of a kind are its own
    device, times = context.device, look_times(kind, values)
    gpu = device.startswith("cuda")
    recipe = Recipe(batch_size=values["batch_size"], steps=times[-1], evaluate=tuple(times), train_metrics="seen")
    rate = values["plain_rate"] if kind.startswith("plain") else values["rate"]
    rate = 100 * rate if kind.endswith("100 times the rate") else rate
    accuracy, seen = [], []
    for offset in range(first, first + values["runs"]):
        data = draw_images(kind, values, context, offset + 400)
        network = make_network(kind, values, data[0].shape[1], context.generator(offset)).to(device)
        if gpu:  # the layout that tensor cores take
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = data[0][draw_samples(data[0], values["rank_batch"], context.generator(offset + 300))]
        looks = [see_last_hidden(network, batch)]  # the first is before training

        def look(now: Progress, network: nn.Module = network, batch: Any = batch, looks: Any = looks) -> None:
            if now.step in times:
                looks.append(see_last_hidden(network, batch))

        # dropout draws from torch's own generator: lend it a seed and put it back
        with fast_convolutions(device), torch.random.fork_rng(devices=[device] if gpu else []):
            torch.manual_seed(int(torch.randint(2**31, (), generator=context.generator(offset + 200))))
            order = context.place(offset + 100)
            history = train_(network, data, learning_rate=rate, recipe=recipe, progress=look, **order)
        found = [point.train_accuracy for point in history.curve(0)]
        # a run that diverged has learned nothing
        accuracy.append([0.1 if value is None or not np.isfinite(value) else value for value in found])
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


def find_runs(values: Values, context: Context) -> dict[str, Runs]:
    """The runs of every kind that a figure shows."""
    return {kind: train_kind(values, context, kind) for _, kind in context.each(values["kinds"])}


def draw_runs(found: Mapping[str, Runs], name: str, values: Values) -> list[Series]:
    """One quantity over steps, for every kind."""
    series = []
    for kind, runs in found.items():
        rows = getattr(runs, name)
        steps = [0, *look_times(kind, values)][-rows.shape[1] :]  # accuracy has no value at step 0
        series.append(points_over(kind, steps, rows))
    return series


def measure_breaking(values: Values, context: Context) -> Outcome:
    """Figures 5 and 13: accuracy and rank with standard and one-sided starts, with and without centring."""
    found = find_runs(values, context)
    standard, broken = found["standard"], found["one-sided"]
    last = broken.accuracy.shape[1] - 1  # a one-sided start may be given up earlier: compared at its last step
    numbers = {
        "accuracy_one_sided": over_runs(broken.accuracy[:, last]),
        "accuracy_standard_minus_one_sided": difference(standard.accuracy[:, last], broken.accuracy[:, last]),
        "rank_standard_minus_one_sided_at_start": difference(standard.rank[:, 0], broken.rank[:, 0]),
        "log_r_standard_minus_one_sided_at_start": difference(np.log(standard.ratio[:, 0]), np.log(broken.ratio[:, 0])),
    }
    if "uncentred" in found:
        numbers["accuracy_standard_minus_uncentred"] = _lag(standard, found["uncentred"])
    return present(numbers, *(draw_runs(found, name, values) for name in ("accuracy", "rank", "ratio")))


def measure_centring(values: Values, context: Context) -> Outcome:
    """Figure 7: accuracy and r(H) with and without centring."""
    found = find_runs(values, context)
    standard, uncentred = found["standard"], found["uncentred"]
    numbers = {
        "accuracy_standard_minus_uncentred": _lag(standard, uncentred),
        "accuracy_uncentred": over_runs(uncentred.accuracy[:, -1]),
        "log2_r_standard_over_uncentred": difference(
            np.log2(standard.ratio[:, 1:]).mean(axis=1), np.log2(uncentred.ratio[:, 1:]).mean(axis=1)
        ),
        "log2_r_standard_over_uncentred_at_start": difference(
            np.log2(standard.ratio[:, 0]), np.log2(uncentred.ratio[:, 0])
        ),
    }
    return present(numbers, *(draw_runs(found, name, values) for name in ("accuracy", "ratio")))


def _lag(standard: Runs, uncentred: Runs) -> Number:
    """What centring adds to the training accuracy; longer training may close the gap where networks still learn."""
    lag = difference(standard.accuracy[:, -1], uncentred.accuracy[:, -1])
    middle = uncentred.accuracy.shape[1] // 2 - 1  # halfway through the looks
    learns = difference(uncentred.accuracy[:, -1], uncentred.accuracy[:, middle]).low > 0
    return unfinished(lag, towards=0.0) if learns else lag


def measure_alignment(values: Values, context: Context) -> Outcome:
    """Figure 10: gradients of different samples in the readout, and what plain networks learn."""
    found = find_runs(values, context)
    plain, faster, noise = (found[kind] for kind in KINDS[3:])
    numbers: dict[str, Number] = {
        "alignment_plain": over_runs(plain.alignment.mean(axis=1)),
        "alignment_batch_norm": over_runs(found["standard"].alignment.mean(axis=1)),
        "accuracy_plain": over_runs(plain.accuracy[:, -1]),
        "accuracy_plain_100_times_the_rate": over_runs(faster.accuracy[:, -1]),
        "accuracy_batch_norm": over_runs(found["standard"].accuracy[:, -1]),
        "accuracy_plain_minus_random_images": difference(plain.accuracy.mean(axis=1), noise.accuracy.mean(axis=1)),
        "chance": exact(0.1),
    }
    return present(numbers, *(draw_runs(found, name, values) for name in ("accuracy", "alignment")))


def measure_paths(values: Values, context: Context) -> Outcome:
    """Figure 10: cosines between what training adds to the weights on images and on random pixels, all else equal."""
    found: dict[str, list[list[float]]] = {"plain": [], "standard": []}
    for run, _ in context.each(range(values["runs"])):
        for kind, cosines in found.items():
            names = (kind, f"{kind}, random images")
            paths = [walk_weights(name, values, context, offset=run, pixels=1000 + run) for name in names]
            cosines.append([float(a @ b / (a.norm() * b.norm())) for a, b in zip(*paths, strict=True)])
    numbers = {
        f"cosine_of_paths_{name}": over_runs(np.array(found[kind])[:, -1])
        for kind, name in (("plain", "plain"), ("standard", "batch_norm"))
    }
    steps = [values["steps"] * part // PARTS for part in range(1, PARTS + 1)]
    return present(numbers, [points_over(kind, steps, np.array(rows)) for kind, rows in found.items()])
