"""Figures 3, 4 and thesis2024 figure A.1: orthogonality of the representations, and training."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, pick, present
from sounding.claims.number import Number, fraction_of, jackknife, mean_of
from sounding.claims.picture import Series, points_of
from sounding.claims.share import share
from sounding.claims.train import last_hidden, train_alike_
from sounding.data import Dataset, load_dataset, normalize
from sounding.measures import orthogonality_gap
from sounding.models import Mlp
from sounding.repair import haar_, orthogonalize_
from sounding.train import Recipe

Curves = dict[int, Array]
N = TypeVar("N", bound=nn.Module)


@cache
def load(name: str, device: str) -> Dataset:
    """A data set on the device, read once; without its test part, which no row of the paper looks at."""
    data = load_dataset(name, device=device)
    # the test part would take memory for nothing
    return replace(data, test_inputs=data.test_inputs[:0], test_labels=data.test_labels[:0])


@contextmanager
def products(precision: str, device: str) -> Iterator[None]:
    """Matrix products on a GPU with the given precision of torch: "highest", float32, or "high", TF32."""
    before = torch.get_float32_matmul_precision()
    try:
        if device.startswith("cuda"):
            torch.set_float32_matmul_precision(precision)
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def jackknife_correlation(x: Array, y: Array) -> Number:
    """Pearson's correlation over all entries of (conditions, seeds), the interval over seeds, which are independent.

    It is that of Fisher's z.
    """

    def fisher(pairs: Array) -> float:
        found = float(np.corrcoef(pairs[..., 0].ravel(), pairs[..., 1].ravel())[0, 1])
        return math.atanh(min(max(found, -1 + 1e-12), 1 - 1e-12))  # a perfect correlation has no finite z

    z = jackknife(fisher, np.stack([x.T, y.T], axis=-1))
    return Number(math.tanh(z.value), math.tanh(z.low), math.tanh(z.high), z.samples)


def draw_networks(values: Values, depth: int, context: Context) -> list[Mlp]:
    """One network of Xavier's weights per seed; a deeper one begins with the layers of a shallower one."""
    data = load(values["data"], context.device)
    # Xavier's variance times gain² = 2 is He's where the fans are equal
    shape: dict[str, Any] = {"depth": depth, "width": values["width"], "bias": False, "init": "he"}
    return [
        Mlp(math.prod(data.shape), data.classes, **shape, generator=context.generator(seed)).to(context.device)
        for seed in range(values["seeds"])
    ]


def change_weights_(networks: Sequence[Mlp], values: Values, variant: str, context: Context) -> None:
    """Turn Xavier's weights into those of a variant, in place; the first and last layer keep theirs."""
    outer = ["1.linear", "readout"]
    for seed, network in enumerate(networks):
        generator = context.generator(1000 + seed, device=context.device)  # apart from those of the weights
        if variant in ("iterative", "orthonormal", "released"):
            inputs = draw_inputs(values, values["init_samples"], context.generator(2000 + seed), context)
            exponent = -1.0 if variant == "released" else -0.5
            frame: Any = "haar" if variant == "orthonormal" else "slice"
            orthogonalize_(network, inputs, exponent=exponent, frame=frame, exclude=outer, generator=generator)
            # eq. (6) has ‖WH‖_F = 1, the product a mean square of 1 after the ReLU, which is 2 before it. Without
            # biases a ReLU network is homogeneous: one factor at the first orthogonalized layer does it for all.
            weight = network.get_parameter("2.linear.weight")
            with torch.no_grad():
                weight.div_(math.sqrt(2 * weight.shape[0] * len(inputs)))
        elif variant == "orthogonal":
            haar_(network, gain=math.sqrt(2), exclude=outer, generator=generator)


def shorten(deep: nn.Module, shallow: N, kind: type[nn.Module] = nn.Linear) -> N:
    """`shallow` with the layers of one kind that a deeper network has in their places, and its own readout."""
    for name, module in shallow.named_modules():  # named by their places, the same at all depths
        if isinstance(module, kind) and name != "readout":
            module.load_state_dict(deep.get_submodule(name).state_dict())
    return shallow


def draw_inputs(values: Values, count: int, generator: torch.Generator, context: Context) -> torch.Tensor:
    """`count` training samples drawn by chance, normalized."""
    data = load(values["data"], context.device)
    samples = data.part("train")[0]
    chosen = torch.randperm(len(samples), generator=generator)[:count]  # on the CPU: the same samples on every device
    return normalize(data, samples[chosen.to(samples.device)])


ORDERS = 5000  # offset of the generators that order the samples, one for each seed, the same whatever is trained


def draw_batches(values: Values, context: Context) -> list[torch.Tensor]:
    """A batch for each seed, on which its gap is measured."""
    offsets = range(3000, 3000 + values["seeds"])
    return [draw_inputs(values, values["batch_size"], context.generator(offset), context) for offset in offsets]


def gaps_of(networks: Sequence[nn.Module], batches: Sequence[torch.Tensor]) -> Array:
    """V of what reaches each network's readout, on its own batch."""
    pairs = zip(networks, batches, strict=True)
    return np.array([float(orthogonality_gap(last_hidden(network, batch))) for network, batch in pairs])


# the settings that a training depends on: rows that agree in them share it
SHARED = "data width batch_size rates seeds init_samples epochs precision depths"


def over_depth(values: Values, variant: str, context: Context) -> Curves:
    """Losses at the end by depth; rows that show the same training share it."""
    return _losses(pick(values, SHARED), context, variant)


@share()
def _losses(values: Values, context: Context, variant: str) -> Curves:
    """Training losses by depth, one per seed, at the rate of the lowest mean; a run that diverged counts as chance.

    A layer is set from those before it, so the deepest networks hold the layers of all.
    """
    data, rates = load(values["data"], context.device), values["rates"]
    clipping = float(variant.split(":")[1]) if variant.startswith("clipping") else None
    deepest = max(values["depths"])  # only these are changed; shallower ones take over their layers
    changed = draw_networks(values, deepest, context)
    change_weights_(changed, values, variant, context)
    recipe = Recipe(**pick(values, "batch_size epochs"), clipping=clipping, clipping_by="parameter", evaluate="end")
    found = {}
    for depth in values["depths"]:
        networks = changed
        if depth < deepest:
            drawn = draw_networks(values, depth, context)
            networks = [shorten(deep, shallow) for deep, shallow in zip(changed, drawn, strict=True)]
        runs = [copy.deepcopy(network) for _ in rates for network in networks]  # a block of networks for each rate
        orders = context.generators(ORDERS, len(networks))
        with products(values["precision"], context.device):
            history = train_alike_(runs, data, recipe, context, rates=rates, orders=orders)
        ends = np.array([history.final(run).train_loss for run in range(len(runs))])
        losses = np.where(np.isfinite(ends), ends, math.log(data.classes)).reshape(len(rates), -1)
        found[depth] = np.asarray(losses[losses.mean(1).argmin()])  # the best rate of all seeds, not of each
    return found


def draw_curves(label: str, curves: Curves) -> Series:
    """Means and 99% intervals over seeds, by depth, epoch or step."""
    drawn = points_of(label, list(curves), [mean_of(samples) for samples in curves.values()])
    # an interval of few seeds would leave the picture
    return replace(drawn, error=np.minimum(np.asarray(drawn.error), 2.0))


def measure_figure3a(values: Values, context: Context) -> Outcome:
    """The gap at initialization and the training loss at the end, over depth."""
    batches = draw_batches(values, context)
    gaps: Curves = {depth: gaps_of(draw_networks(values, depth, context), batches) for depth in values["depths"]}
    losses = over_depth(values, "xavier", context)
    shallow, deep = values["depths"][0], values["depths"][-1]
    rows = [np.array([curves[depth] for depth in values["depths"]]) for curves in (gaps, losses)]
    numbers = {
        "gap_rise": mean_of(gaps[deep] - gaps[shallow]),
        "loss_rise": mean_of(losses[deep] - losses[shallow]),
        "correlation": jackknife_correlation(*rows),
    }
    return present(numbers, (draw_curves("Xavier's weights", gaps),), (draw_curves("Xavier's weights", losses),))


def measure_figure3b(values: Values, context: Context) -> Outcome:
    """The gap of the last layer and the training loss during training."""
    data, batches = load(values["data"], context.device), draw_batches(values, context)
    networks = draw_networks(values, values["depth"], context)
    orders = context.generators(ORDERS, len(networks))
    gaps = [gaps_of(networks, batches)]
    losses: list[list[float]] = []
    recipe = Recipe(batch_size=values["batch_size"], epochs=1, evaluate="end")
    for _ in context.each(range(values["epochs"])):  # epoch by epoch: plain SGD has no state to lose between them
        with products(values["precision"], context.device):
            history = train_alike_(networks, data, recipe, context, rates=values["rates"][:1], orders=orders)
        losses.append([history.final(run).train_loss for run in range(len(networks))])
        gaps.append(gaps_of(networks, batches))
    v, loss = np.array(gaps), np.array(losses)
    numbers = {
        "gap_change": mean_of(v[-1] - v[0]),
        "loss_change": mean_of(loss[-1] - loss[0]),
        "correlation_over_epochs": jackknife_correlation(v[1:], loss),  # the gap at the start belongs to no loss
    }
    epochs = np.arange(len(v))
    return present(
        numbers,
        (draw_curves("V", dict(zip(epochs, v, strict=True))),),
        (draw_curves("loss", dict(zip(epochs[1:], loss, strict=True))),),
    )


def train_variants(values: Values, context: Context) -> dict[str, Curves]:
    """Training losses at the end by depth, for each of the variants."""
    return {variant: over_depth(values, variant, context) for _, variant in context.each(values["variants"])}


def present_variants(numbers: Mapping[str, Number], found: Mapping[str, Curves], values: Values) -> Outcome:
    """The numbers, and the training loss at the end over depth."""
    drawn = [draw_curves(variant, curves) for variant, curves in found.items()]
    return present(numbers, drawn, trained="1 epoch" if values["epochs"] == 1 else f"{values['epochs']} epochs")


def measure_initializations(values: Values, context: Context) -> Outcome:
    """The training loss at the end over depth, for several ways to start or to train."""
    found = train_variants(values, context)
    shallow, deep = values["depths"][0], values["depths"][-1]
    numbers = {}
    for variant, curves in found.items():
        key = key_of(variant)
        numbers[f"rise_{key}"] = mean_of(curves[deep] - curves[shallow])
        if variant != "iterative":
            numbers[f"{key}_minus_iterative"] = mean_of(curves[deep] - found["iterative"][deep])
            numbers[f"rise_{key}_minus_iterative"] = mean_of(  # pairs of one seed
                (curves[deep] - curves[shallow]) - (found["iterative"][deep] - found["iterative"][shallow])
            )
    return present_variants(numbers, found, values)


def measure_clipping(values: Values, context: Context) -> Outcome:
    """How much less the training loss grows with depth when gradients are clipped; seeds share weights and order."""
    found = train_variants(values, context)
    return present_variants(compare_rises(found, values["depths"]), found, values)


def compare_rises(found: Mapping[str, Curves], depths: Sequence[int]) -> dict[str, Number]:
    """Rises with depth, Xavier's less each of the others', and the share of runs that clipping changed at all."""
    plain = found["xavier"]
    rises = {variant: curves[depths[-1]] - curves[depths[0]] for variant, curves in found.items()}
    numbers = {f"rise_{key_of(variant)}": mean_of(rise) for variant, rise in rises.items()}
    for variant, curves in found.items():
        if variant == "xavier":
            continue
        key = key_of(variant)
        numbers[f"rise_xavier_minus_{key}"] = mean_of(rises["xavier"] - rises[variant])
        for name, depth in (("shallow", depths[0]), ("deep", depths[-1])):
            numbers[f"{key}_minus_xavier_{name}"] = mean_of(curves[depth] - plain[depth])
            # a run that clipping never touched ends with the very same loss
            changed = int(np.sum(curves[depth] != plain[depth]))
            numbers[f"changed_by_{key}_{name}"] = fraction_of(changed, len(plain[depth]))
    return numbers


def key_of(variant: str) -> str:
    """A variant as part of a number's name."""
    return variant.replace(":", "_").replace(".", "")
