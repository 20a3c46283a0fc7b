"""Shaped networks with batch norm and Haar weights in training: figures 6.4, 6.6 and C.3 to C.8.

A step Δ from an orthogonal W leaves the orthogonal matrices by the symmetric part of WᵀΔ alone: the isometry gap of
W + Δ is 2‖sym(WᵀΔ)‖_F²/d to leading order. A Δ without preferred direction has half of its square in that part, which
gives ‖Δ‖_F²/d; a smaller gap shows a bias towards orthogonal matrices, the mere smallness of a gap does not.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, pick, present
from sounding.claims.number import Number, highest, lowest, mean_of, over_runs, unfinished
from sounding.claims.picture import Panel, Series, points_over, thin
from sounding.claims.share import share
from sounding.claims.train import curves_of, evenly, train_alike_
from sounding.data import Dataset, load_dataset
from sounding.data.dataset import batches
from sounding.models import Mlp
from sounding.train import Recipe

Curves = dict[tuple[str, int], dict[str, Array]]

NONLINEAR = ("tanh", "sin")
ACTIVATIONS = (*NONLINEAR, "identity")


def shaped_networks(dataset: Dataset, depth: int, values: Values, *, activation: str, context: Context) -> list[Mlp]:
    """One network per seed: batch norm, Haar weights, gains ℓ^(−exponent) in front of the activation."""
    law: dict[str, Any] = {"norm": "batch", "init": "haar", "gain_exponent": values["exponent"]}
    law |= {"depth": depth, "width": values["width"], "activation": activation}
    return [
        Mlp(math.prod(dataset.shape), dataset.classes, **law, generator=context.generator(100 * depth + seed))
        for seed in range(values["seeds"])
    ]


# offset of the generators that order the samples, one for each seed, the same for all depths and activations
ORDERS = 900_000


@share("parts")
def train_all(values: Values, context: Context) -> Curves:
    """What `curves_of` has of the seeds, by activation and depth.

    Training accuracy is that on the batches since the last look; networks of one seed start from the same weights and
    see the same batches.
    """
    dataset, seeds = load_dataset(values["data"], device=context.device), values["seeds"]
    looks = evenly(values["steps"], values["looks"])
    recipe = Recipe(**pick(values, "batch_size steps"), evaluate=looks, train_metrics="seen")
    found: Curves = {}
    for depth in values["depths"]:
        for activation in ACTIVATIONS:
            networks = shaped_networks(dataset, depth, values, activation=activation, context=context)
            rates, orders = [values["learning_rate"]], context.generators(ORDERS, seeds)
            history = train_alike_(networks, dataset, recipe, context, rates=rates, orders=orders)
            found[activation, depth] = curves_of(history, range(seeds))
    return found


def measure_accuracy(values: Values, context: Context) -> Outcome:
    """Errors of linear over those of nonlinear networks, and what depth changes.

    Every scale trains for less long than the paper. Where the training errors still part at the end, longer training
    takes the ratio further up, and its interval has no upper end.
    """
    found = train_all(values, context)
    depths, parts = values["depths"], values["parts"]
    numbers: dict[str, Number] = {}
    for part in parts:
        final = {key: curves[f"{part}_accuracy"][:, -1] for key, curves in found.items()}
        error = {a: np.mean([1 - final[a, depth] for depth in depths], axis=0) for a in ACTIVATIONS}
        for activation in NONLINEAR:
            widening = over_runs(_ratio(found, activation, -1) / _ratio(found, activation, values["looks"] // 2 - 1))
            # a network without an error left has no ratio
            ratio = over_runs(error["identity"] / np.maximum(error[activation], 1e-4))
            ratio = unfinished(ratio, towards=math.inf) if widening.low > 1 else ratio
            numbers |= {f"widening_over_{activation}": widening, f"{part}_error_of_identity_over_{activation}": ratio}
        for activation in ACTIVATIONS:
            numbers[f"{part}_accuracy_{activation}"] = over_runs(1 - error[activation])
            change = final[activation, max(depths)] - final[activation, min(depths)]  # pairs of one seed
            numbers[f"{part}_change_with_depth_{activation}"] = over_runs(change)
    panels = []
    for part in parts:
        series = [
            points_over(f"{activation}, {depth} layers", curves["step"][0], curves[f"{part}_accuracy"])
            for activation in ACTIVATIONS
            for curves, depth in ((found[activation, depth], depth) for depth in depths)
        ]
        panels.append(
            Panel(y_label="training accuracy" if part == "train" else "test accuracy", series=series, title=part)
        )
    return present(numbers, *panels)


def _ratio(found: Curves, activation: str, look: int) -> Array:
    """The training error of linear over that of nonlinear networks at one look, mean over depths, for every seed."""
    error = {
        name: np.mean([1 - c["train_accuracy"][:, look] for (kind, _), c in found.items() if kind == name], axis=0)
        for name in ("identity", activation)
    }
    return np.asarray(error["identity"] / np.maximum(error[activation], 1e-4))


@dataclass(frozen=True)
class Deep:
    """What became of the square layers of networks of one depth; arrays are (seeds, layers)."""

    gaps: Array  # isometry gaps of the weights after training
    unbiased: Array  # ‖Δ‖_F²/d, the gap that a step of the same length without preferred direction makes
    before: Array  # Frobenius norms of the weights' gradients on one batch, of each seed its own
    after: Array
    accuracy: Array  # on the training batches of the last tenth, (seeds,)


def train_deep(values: Values, context: Context, *, activation: str, depth: int) -> dict[float, Deep]:
    """Networks of one depth, trained, by learning rate; rows that show the same training share it.

    The deepest of the first activation, of figure 6.6, are trained at both rates: in one stack that costs little more.
    """
    both = activation == values["activations"][0] and depth == max(values["depths"])  # figure 6.6 shows this one
    rates = (values["learning_rate"], values["larger_rate"]) if both else (values["learning_rate"],)
    return _train(values, context, activation, depth, rates)


@share("shown", "activations", "depths", "learning_rate", "larger_rate")
def _train(
    values: Values, context: Context, activation: str, depth: int, rates: tuple[float, ...]
) -> dict[float, Deep]:
    """What became of the networks at each of the rates, which are trained as one."""
    seeds, steps, batch_size, device = values["seeds"], values["steps"], values["batch_size"], context.device
    dataset = load_dataset(values["data"], device=device)
    dataset = replace(dataset, test_inputs=dataset.test_inputs[:0], test_labels=dataset.test_labels[:0])
    draws = context.generators(910_000, seeds)
    measured = [next(batches(dataset, batch_size, generator=generator)) for generator in draws]
    first = shaped_networks(dataset, depth, values, activation=activation, context=context)
    for network in first:
        network.to(device)
    old = [square_weights(network) for network in first]
    before = [gradient_norms(network, *batch) for network, batch in zip(first, measured, strict=True)]
    # the same start at each rate
    networks = [*first, *(copy.deepcopy(network) for _ in rates[1:] for network in first)]
    looks = (steps - max(1, steps // 10), steps)  # training accuracy is that since the last look: of the last tenth
    recipe = Recipe(batch_size=batch_size, steps=steps, evaluate=looks, train_metrics="seen")
    history = train_alike_(networks, dataset, recipe, context, rates=rates, orders=context.generators(ORDERS, seeds))
    accuracy = [history.final(run).train_accuracy for run in range(len(networks))]
    found = {}
    for place, rate in enumerate(rates):
        runs = slice(place * seeds, (place + 1) * seeds)
        new = [square_weights(network) for network in networks[runs]]
        found[rate] = Deep(
            gaps=_rows([weight_gaps(weights) for weights in new]),
            unbiased=_rows([(w - v).square().sum((-2, -1)) / values["width"] for w, v in zip(new, old, strict=True)]),
            before=_rows(before),
            after=_rows([gradient_norms(n, *batch) for n, batch in zip(networks[runs], measured, strict=True)]),
            accuracy=np.array(accuracy[runs], dtype=np.float64),
        )
    return found


def _rows(tensors: list[torch.Tensor]) -> Array:
    return np.asarray(torch.stack(tensors).cpu().numpy())


def square_weights(network: Mlp) -> torch.Tensor:
    """The weights from the second layer on, (layers, d, d) in float64."""
    return torch.stack([weight.detach() for weight in _weights(network)]).double()


def _weights(network: Mlp) -> list[torch.Tensor]:
    named = dict(network.named_parameters())
    return [named[f"{layer}.linear.weight"] for layer in range(2, len(network))]  # the first layer is not square


def weight_gaps(weights: torch.Tensor) -> torch.Tensor:
    """ln(tr(WWᵀ)/d) − ln det(WWᵀ)/d of each W, by Cholesky, which a GPU batches well; good to 1e-14 in float64."""
    gram = weights @ weights.mT
    roots = torch.linalg.cholesky(gram).diagonal(dim1=-2, dim2=-1)  # ln det = 2 Σ ln of its diagonal
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    gaps: torch.Tensor = mean.log() - 2 * roots.log().mean(dim=-1)
    return gaps.clamp_min(0.0)  # rounding may leave a gap of −1e-16


def gradient_norms(network: Mlp, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """‖∂loss/∂W_ℓ‖_F of the square layers on a batch; running statistics are left as they are."""
    network = copy.deepcopy(network).train()  # running statistics are those of the copy
    loss = torch.nn.functional.cross_entropy(network(inputs), labels)
    found = torch.autograd.grad(loss, _weights(network))
    return torch.stack([gradient.double().norm() for gradient in found])


def middle(rows: Array) -> Array:
    """The mean over the middle fifth of the layers, (seeds,)."""
    layers = rows.shape[1]
    return np.asarray(rows[:, 2 * layers // 5 : max(3 * layers // 5, 2 * layers // 5 + 1)].mean(axis=1))


def measure_bias(values: Values, context: Context) -> Outcome:
    """Figure 6.6: gaps and gradients over the layers of the deepest network."""
    depth, activation = max(values["depths"]), values["activations"][0]
    both = train_deep(values, context, activation=activation, depth=depth)
    found, longer = both[values["learning_rate"]], both[values["larger_rate"]]
    last = found.gaps[:, -max(1, found.gaps.shape[1] // 20) :].mean(axis=1)  # the last twentieth of the layers
    numbers = {
        "middle_gap": mean_of(middle(found.gaps)),
        "middle_gap_over_last": mean_of(middle(found.gaps) / last),
        "middle_gap_over_unbiased": mean_of(middle(found.gaps) / middle(found.unbiased)),
        "middle_gradient_over_mean": mean_of(middle(found.after) / found.after.mean(axis=1)),
        "accuracy": mean_of(found.accuracy),
        "middle_gap_over_unbiased_at_larger_rate": mean_of(middle(longer.gaps) / middle(longer.unbiased)),
        "middle_gap_at_larger_rate": mean_of(middle(longer.gaps)),
        "accuracy_at_larger_rate": mean_of(longer.accuracy),
    }
    picked = thin(found.gaps.shape[1], 13)
    layers = picked + 2  # rows begin with layer 2
    gaps = []
    for rate, deep in ((values["learning_rate"], found), (values["larger_rate"], longer)):
        gaps.append(points_over(f"after training at {rate:g}", layers, deep.gaps[:, picked]))
        unbiased = deep.unbiased[:, picked].mean(0)
        gaps.append(Series(f"no preferred direction at {rate:g}", layers, unbiased, role="theory"))
    gradients = [
        points_over("before", layers, found.before[:, picked]),
        points_over(f"after training at {values['learning_rate']:g}", layers, found.after[:, picked]),
    ]
    return present(numbers, gaps, gradients, activation=activation, depth=depth)


def measure_depths(values: Values, context: Context) -> Outcome:
    """Figures C.3 and C.4: gaps of weights and norms of gradients for several depths and activations."""
    numbers: dict[str, Number] = {}
    panels = []
    for activation in values["activations"]:
        made = {
            depth: train_deep(values, context, activation=activation, depth=depth)[values["learning_rate"]]
            for depth in values["depths"]
        }
        shallow, deep = made[min(made)], made[max(made)]
        numbers[f"largest_middle_gap_{activation}"] = highest(mean_of(middle(found.gaps)) for found in made.values())
        numbers[f"middle_gap_deep_over_shallow_{activation}"] = mean_of(middle(deep.gaps) / middle(shallow.gaps))
        spared = [mean_of(middle(f.gaps) / f.gaps.max(axis=1)) for f in made.values()]
        numbers[f"middle_gap_over_largest_{activation}"] = highest(spared)
        weakest = [mean_of(f.after.min(axis=1) / np.median(f.after, axis=1)) for f in made.values()]
        numbers[f"weakest_gradient_over_median_{activation}"] = lowest(weakest)
        lasting = [mean_of(middle(f.after) / middle(f.before)) for f in made.values()]
        numbers[f"middle_gradient_after_over_before_{activation}"] = lowest(lasting)
        series = []
        for depth, found in made.items():
            shown = found.gaps if values["shown"] == "gaps" else found.after
            picked = thin(shown.shape[1], 9)
            series.append(points_over(f"{depth} layers", (picked + 2) / depth, shown[:, picked]))
        panels.append(Panel(series=series, title=activation))
    return present(numbers, *panels)
