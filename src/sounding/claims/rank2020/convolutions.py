"""Batch norm broken, uncentred and missing in VGG-19 and ResNet-50: figures 5, 7, 10 and 13."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from sounding.claims.claim import Claim, Context, Correction, Expectation, Outcome, Scale, Setting
from sounding.claims.number import Number, exact
from sounding.claims.picture import Panel, Picture, Series
from sounding.claims.rank2020.perceptrons import Array, difference, over_runs

if TYPE_CHECKING:
    import torch
    from torch import nn

KINDS = {
    "standard": "batch norm",
    "one-sided": "batch norm, one-sided start",
    "uncentred": "batch norm without centring",
    "plain": "no norm",
    "plain, 100 times the rate": "no norm, 100 × rate",
    "plain, random images": "no norm, random images",
}


@dataclass(frozen=True)
class Runs:
    """(runs, evaluations) of training accuracy, and (runs, evaluations + 1) of what the last hidden layer shows."""

    accuracy: Array
    rank: Array
    ratio: Array
    alignment: Array


def make_network(kind: str, values: Mapping[str, Any], channels: int, generator: torch.Generator) -> nn.Module:
    """A network with PyTorch's start, or with weights from U[0, 2/√fan_in] for the one-sided kind."""
    import torch
    from torch import nn

    from sounding.models import build

    options: dict[str, Any] = {"norm": "none"} if kind.startswith("plain") else {"norm": "batch", "momentum": 1.0}
    if kind == "uncentred":
        options["centring"] = False
    if values["network"] == "vgg19":
        options["dropout"] = values["dropout"]
    network = build(
        values["network"],
        shape=(channels, values["side"], values["side"]),
        width=values["width"],
        generator=generator,
        **options,
    )
    if kind == "one-sided":
        with torch.no_grad():
            for module in network.modules():
                if isinstance(module, nn.Conv2d | nn.Linear):
                    fan_in = module.weight[0].numel()
                    module.weight.uniform_(0, 2 / fan_in**0.5, generator=generator)
    return network


def steps_between(kind: str, values: Mapping[str, Any]) -> int:
    """SGD steps from one evaluation to the next; networks that do not learn get fewer."""
    steps = values["plain_steps"] if kind.startswith("plain") else values["steps"]
    return int(steps) // int(values["evaluations"])


def load_images(kind: str, values: Mapping[str, Any], context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalized square training images and labels; random pixels under the same labels for the kind that says so."""
    import torch

    from sounding.data import load_dataset, normalize
    from sounding.data.resize import fit_images

    dataset = load_dataset(values["dataset"], device=context.device)
    images = dataset.train_inputs
    if images.shape[-1] != values["side"]:
        images = fit_images(images, (images.shape[1], values["side"], values["side"]), source=values["dataset"])
    if kind.endswith("random images"):
        generator = context.generator(77, device=context.device)
        images = torch.rand(images.shape, generator=generator, device=images.device)
    return normalize(dataset, images), dataset.train_labels


def see_last_hidden(network: nn.Module, images: torch.Tensor) -> tuple[float, float, float]:
    """Rank, r and alignment of what the readout receives.

    The gradient of a sample's loss in a row of the readout is a multiple of that sample's hidden features, so the mean
    absolute cosine between features is the alignment of the gradients (proposition 19).
    """
    import torch
    from torch import nn

    from sounding.measures import gradient_alignment, numerical_rank, participation_ratio

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


@lru_cache(maxsize=16)
def train_kind(kind: str, settings: str, device: str, random_seed: int) -> Runs:
    """Train the runs of one kind by plain SGD, looking at the last hidden layer between parts; figures share it."""
    import torch

    from sounding.train import Recipe, train_

    values, context = json.loads(settings), Context(device=device, random_seed=random_seed)
    images, labels = load_images(kind, values, context)
    part = steps_between(kind, values)
    recipe = Recipe(batch_size=values["batch_size"], steps=part, evaluate=(part,), train_metrics="seen")
    rate = values["plain_rate"] if kind.startswith("plain") else values["rate"]
    rate = 100 * rate if kind.endswith("100 times the rate") else rate
    accuracy, seen = [], []
    for run in range(values["runs"]):
        network = make_network(kind, values, images.shape[1], context.generator(run)).to(device)
        order = context.generator(100 + run, device=device)
        looks, scores = [see_last_hidden(network, images[: values["rank_batch"]])], []
        # dropout draws from torch's own generator: lend it a seed and put it back
        with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
            torch.manual_seed(int(torch.randint(2**31, (), generator=context.generator(200 + run))))
            for _ in range(values["evaluations"]):
                history = train_(
                    network, (images, labels), learning_rate=rate, recipe=recipe, generator=order, device=device
                )
                found = history.final(0).train_accuracy
                # a run that diverged has learned nothing
                scores.append(0.1 if found is None or not np.isfinite(found) else found)
                looks.append(see_last_hidden(network, images[: values["rank_batch"]]))
        accuracy.append(scores)
        seen.append(looks)
    rank, ratio, alignment = np.moveaxis(np.array(seen), -1, 0)
    return Runs(np.array(accuracy), rank, ratio, alignment)


def find_runs(values: Mapping[str, Any], context: Context) -> dict[str, Runs]:
    """The runs of every kind that a figure shows."""
    settings = json.dumps({name: value for name, value in values.items() if name != "kinds"}, sort_keys=True)
    found = {}
    for index, kind in enumerate(values["kinds"]):
        found[kind] = train_kind(kind, settings, context.device, context.random_seed)
        context.progress((index + 1) / len(values["kinds"]))
    return found


def draw_runs(
    found: Mapping[str, Runs], name: str, values: Mapping[str, Any], label: str, *, log: bool = False
) -> Panel:
    """One quantity over steps, for every kind."""
    series = []
    for kind, runs in found.items():
        rows = getattr(runs, name)
        steps = steps_between(kind, values) * np.arange(values["evaluations"] + 1)[-rows.shape[1] :]
        points = [over_runs(column) for column in rows.T]
        error = [n.high - n.value for n in points]
        series.append(Series(KINDS[kind], steps, [n.value for n in points], error=error))
    return Panel("SGD step", label, series, title=label.split(" of ")[0], y_scale="log" if log else "linear")


def measure_breaking(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figures 5 and 13: accuracy and rank with standard and one-sided starts, with and without centring."""
    found = find_runs(values, context)
    standard, broken = found["standard"], found["one-sided"]
    numbers = {
        "accuracy_one_sided": over_runs(broken.accuracy[:, -1]),
        "accuracy_standard_minus_one_sided": difference(standard.accuracy[:, -1], broken.accuracy[:, -1]),
        "rank_standard_minus_one_sided_at_start": difference(standard.rank[:, 0], broken.rank[:, 0]),
        "log_r_standard_minus_one_sided_at_start": difference(np.log(standard.ratio[:, 0]), np.log(broken.ratio[:, 0])),
    }
    if "uncentred" in found:
        uncentred = found["uncentred"]
        numbers["accuracy_standard_minus_uncentred"] = difference(standard.accuracy[:, -1], uncentred.accuracy[:, -1])
    panels = (
        draw_runs(found, "accuracy", values, "training accuracy"),
        draw_runs(found, "rank", values, "rank of the last hidden layer"),
        draw_runs(found, "ratio", values, "r(H) of the last hidden layer", log=True),
    )
    caption = "A start of one-sided weights takes the rank and the learning from batch norm; centring matters less."
    return Outcome(numbers, Picture(panels, caption))


def measure_centring(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure 7: accuracy and r(H) with and without centring."""
    found = find_runs(values, context)
    standard, uncentred = found["standard"], found["uncentred"]
    numbers = {
        "accuracy_standard_minus_uncentred": difference(standard.accuracy[:, -1], uncentred.accuracy[:, -1]),
        "accuracy_uncentred": over_runs(uncentred.accuracy[:, -1]),
        "log2_r_standard_over_uncentred": difference(
            np.log2(standard.ratio[:, 1:]).mean(axis=1), np.log2(uncentred.ratio[:, 1:]).mean(axis=1)
        ),
        "log2_r_standard_over_uncentred_at_start": difference(
            np.log2(standard.ratio[:, 0]), np.log2(uncentred.ratio[:, 0])
        ),
    }
    panels = (
        draw_runs(found, "accuracy", values, "training accuracy"),
        draw_runs(found, "ratio", values, "r(H) of the last hidden layer", log=True),
    )
    return Outcome(numbers, Picture(panels, "Both curves of a panel would coincide if centring made no difference."))


def measure_alignment(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure 10: gradients of different samples in the readout, and what plain networks learn."""
    found = find_runs(values, context)
    plain, faster, noise = (found[kind] for kind in list(KINDS)[3:])

    numbers: dict[str, Number] = {
        "alignment_plain": over_runs(plain.alignment.mean(axis=1)),
        "alignment_batch_norm": over_runs(found["standard"].alignment.mean(axis=1)),
        "accuracy_plain": over_runs(plain.accuracy[:, -1]),
        "accuracy_plain_100_times_the_rate": over_runs(faster.accuracy[:, -1]),
        "accuracy_batch_norm": over_runs(found["standard"].accuracy[:, -1]),
        "accuracy_plain_minus_random_images": difference(plain.accuracy.mean(axis=1), noise.accuracy.mean(axis=1)),
        "chance": exact(0.1),
    }
    panels = (
        draw_runs(found, "accuracy", values, "training accuracy"),
        draw_runs(found, "alignment", values, "alignment of gradients, mean |cos|"),
    )
    caption = "Without a norm every sample pulls the readout along one line, and the images make no difference."
    return Outcome(numbers, Picture(panels, caption))


_BATCH_NORM = ["standard", "one-sided", "uncentred"]
_QUICK = {
    "network": "vgg19",
    "dataset": "digits",
    "side": 32,
    "width": 8,
    "dropout": 0.0,
    "batch_size": 16,
    "rank_batch": 64,
    "rate": 0.03,
    "plain_rate": 0.03,
    "steps": 75,
    "plain_steps": 60,
    "evaluations": 3,
    "runs": 4,
}
_FULL = {
    "network": "vgg19",
    "dataset": "cifar-10",
    "side": 32,
    "width": 64,
    "dropout": 0.5,
    "batch_size": 128,
    "rank_batch": 512,
    "rate": 0.02,
    "plain_rate": 0.02,
    "steps": 1170,
    "plain_steps": 195,
    "evaluations": 6,
    "runs": 3,
}
_RESNET = {"network": "resnet50", "width": 8, "side": 16, "batch_size": 32, "steps": 45, "evaluations": 3, "runs": 3}
_RESNET_FULL = {"network": "resnet50", "steps": 300, "evaluations": 3}


CENTRING_NOTE = (
    "The number of steps decides: in the first hundred, which quick scale shows, the uncentred network lags behind; "
    "the seed shows 30 000."
)


CENTRING_CORRECTION = Correction(
    "Centring leaves r(H) as it is, and networks without it learn too, but later: early in training they lag behind.",
    (
        Expectation("log2_r_standard_over_uncentred", "the same r within a factor of 2", low=-1.0, high=1.0),
        Expectation("accuracy_uncentred", "learns: well above chance, 0.1", low=0.2),
        Expectation("accuracy_standard_minus_uncentred", "behind the centred network", low=0.0),
    ),
)


def vgg_settings(kinds: list[str]) -> dict[Scale, Setting]:
    """Quick and paper settings of the VGG-19 figures, which share their runs."""
    return {
        "quick": Setting(
            {**_QUICK, "kinds": kinds},
            "digits resized to 32×32, an eighth of the channels, no dropout, 75 steps, 4 runs",
        ),
        "paper": Setting({**_FULL, "kinds": kinds}, "1170 steps (3 epochs), 195 without a norm, 3 runs"),
    }


_PAPER = "CIFAR-10 on VGG-19, 5 runs; learning rate, batch and number of epochs are not stated"
_RELEASED = (
    "configuration E, 3×3 convolutions, PyTorch's start, classifier Dropout-512-ReLU-Dropout-512-ReLU-10, batch "
    "norm then "
    "ReLU, momentum 1; no training program"
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="rank2020-fig5",
        seed="rank2020",
        place="figure 5",
        kind="figure",
        statement="VGG-19 with batch norm cannot fit CIFAR-10 from a uniform start on [0, 2/√d], which lowers "
        "its rank; "
        "without centring it trains as with it.",
        expectations=(
            Expectation("accuracy_standard_minus_one_sided", "the one-sided start is far behind", low=0.1),
            Expectation("accuracy_one_sided", "unable to fit: near chance, 0.1", high=0.3),
            Expectation("rank_standard_minus_one_sided_at_start", "and starts at a lower rank", low=0.0),
            Expectation("accuracy_standard_minus_uncentred", "centring changes little", low=-0.15, high=0.15),
        ),
        settings=vgg_settings(_BATCH_NORM),
        measure=measure_breaking,
        paper=_PAPER,
        released=_RELEASED,
    ),
    Claim(
        id="rank2020-fig7",
        seed="rank2020",
        place="figure 7",
        kind="figure",
        statement="Centring changes neither the training accuracy nor r(H) of a VGG-19 with batch norm.",
        expectations=(
            Expectation("accuracy_standard_minus_uncentred", "the same training", low=-0.1, high=0.1),
            Expectation("log2_r_standard_over_uncentred", "the same r within a factor of 2", low=-1.0, high=1.0),
        ),
        settings=vgg_settings(["standard", "uncentred"]),
        measure=measure_centring,
        correction=CENTRING_CORRECTION,
        note=CENTRING_NOTE,
        paper="a VGG net on CIFAR-10, 30 000 iterations",
        released=_RELEASED,
    ),
    Claim(
        id="rank2020-fig10",
        seed="rank2020",
        place="figure 10",
        kind="figure",
        statement="Without batch norm the gradients of a VGG-19's readout align perfectly over samples, it does "
        "not learn "
        "even at 100 times the rate, and random images in place of CIFAR-10's take it the same way.",
        expectations=(
            Expectation("alignment_plain", "perfectly aligned", low=0.99),
            Expectation("alignment_batch_norm", "not so with batch norm", high=0.95),
            Expectation("accuracy_plain", "does not learn: near chance", high=0.2),
            Expectation("accuracy_plain_100_times_the_rate", "nor at 100 times the rate", high=0.2),
            Expectation("accuracy_plain_minus_random_images", "the same on random images", low=-0.05, high=0.05),
        ),
        settings=vgg_settings(["standard", *list(KINDS)[3:]]),
        measure=measure_alignment,
        note="At 100 times the rate the features die: all zero, without a direction, which counts as alignment 0.",
        paper="CIFAR-10 on VGG-19 with batch norm, SGD, SGD at 100 times the rate, SGD on uniform random "
        "images; 5 runs",
        released=_RELEASED,
    ),
    Claim(
        id="rank2020-fig13",
        seed="rank2020",
        place="figure 13",
        kind="figure",
        statement="ResNet-50 with batch norm cannot fit CIFAR-10 from the one-sided start either; without centring it "
        "trains as with it.",
        expectations=(
            Expectation("accuracy_standard_minus_one_sided", "the one-sided start is behind", low=0.1),
            Expectation("accuracy_one_sided", "unable to fit: near chance, 0.1", high=0.3),
            Expectation("rank_standard_minus_one_sided_at_start", "and starts at a lower rank", low=0.0),
        ),
        settings={
            "quick": Setting(
                {**_QUICK, **_RESNET, "kinds": ["standard", "one-sided"]},
                "digits resized to 16×16, an eighth of the channels, 45 steps, 3 runs, not the uncentred kind",
            ),
            "paper": Setting({**_FULL, **_RESNET_FULL, "kinds": _BATCH_NORM}, "300 steps (less than an epoch), 3 runs"),
        },
        measure=measure_breaking,
        paper="CIFAR-10 on ResNet-50, PyTorch's start and a uniform one of the same variance on R⁺, 5 runs",
    ),
)
