"""Training perceptrons of many depths (figure 1), and raising the rank before it (figures 4, 6, 11 and 12)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, pick, present
from sounding.claims.number import Number, exact, highest, lowest, over_runs, slope_of, student
from sounding.claims.picture import Panel, Series, level, points_of, points_over
from sounding.claims.share import share
from sounding.claims.train import curves_of, evenly, last_hidden, train_alike_
from sounding.data import load_dataset
from sounding.measures import numerical_rank, participation_ratio
from sounding.models import Mlp
from sounding.repair import raise_rank_
from sounding.train import Recipe, choose_rates


def load_pixels(name: str, context: Context) -> tuple[torch.Tensor, ...]:
    """Flat training and test images with pixels in [0, 1], each followed by their labels."""
    dataset = load_dataset(name, device=context.device)
    factor = 1.0 if dataset.train_inputs.is_floating_point() else 1 / 255  # bytes become [0, 1]
    train, test = (dataset.part(part)[0].flatten(1).float() * factor for part in ("train", "test"))
    return train, dataset.train_labels, test, dataset.test_labels


@dataclass(frozen=True)
class Trained:
    """Runs of one architecture at the best learning rate of a grid."""

    rate: float
    curves: dict[str, Array]  # (runs, evaluations) of each recorded quantity
    epochs: Array  # of the evaluations
    networks: list[Mlp]


def train_grid(
    make: Callable[[torch.Generator], Mlp],
    data: Sequence[torch.Tensor],
    *,
    rates: Sequence[float],
    runs: int,
    recipe: Recipe,
    context: Context,
    offset: int,
) -> Trained:
    """Train `runs` initializations at every rate together; the rate is chosen by the mean of the last training loss.

    A run has weights and an order of the samples of its own, which are the same at all rates.
    Where every rate diverges, the smallest is reported, with its losses as they were before.
    """
    orders = context.generators(1000 * offset + 500, runs)
    networks = [make(context.generator(1000 * offset + run)) for _ in rates for run in range(runs)]
    history = train_alike_(networks, tuple(data), recipe, context, rates=rates, orders=orders)
    choice = choose_rates(history, [0] * len(networks))[0]
    # where all diverge the smallest rate is shown as it went
    picked = list(choice.runs) if choice.learning_rate is not None else list(range(runs))
    rate = float(rates[picked[0] // runs])
    epochs = np.array([point.epoch for point in history.curve(0)])
    return Trained(rate, curves_of(history, picked), epochs, [networks[run] for run in picked])


def draw_samples(inputs: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Indices of so many samples, by chance."""
    return torch.randperm(len(inputs), generator=generator)[:count].to(inputs.device)


def make_one_sided_(network: nn.Module, generator: torch.Generator) -> None:
    """Give every linear map and convolution weights from U[0, 2/√fan_in]."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                # the variance of PyTorch's own law, but one sign
                module.weight.uniform_(0, 2 / module.weight[0].numel() ** 0.5, generator=generator)


def difference(first: Array, second: Array) -> Number:
    """The difference of two means over independent runs, with Welch's interval at the level of the ledger."""
    return contrast([first], [second])


def contrast(added: Sequence[Array], subtracted: Sequence[Array]) -> Number:
    """Means over independent runs, added and subtracted: every group's spread counts, its degrees as Welch has them."""
    groups = [np.asarray(group, dtype=np.float64) for group in (*added, *subtracted)]
    means = [float(group.mean()) for group in groups]
    value = sum(means[: len(added)]) - sum(means[len(added) :])
    parts = np.array([group.var(ddof=1) / len(group) for group in groups])
    if not parts.sum() > 0:  # no spread: runs agree to the last digit
        return exact(value)
    freedom = parts.sum() ** 2 / np.sum(parts**2 / [len(group) - 1 for group in groups])
    half = student(float(freedom)) * math.sqrt(float(parts.sum()))
    return Number(value, value - half, value + half, sum(len(group) for group in groups))


LEARNING_DEPTH = 10  # beyond so many layers the paper's plain networks do not learn


def make_fig1_network(generator: torch.Generator, *, features: int, depth: int, width: int, norm: str) -> Mlp:
    """PyTorch's initial weights; batch norm without biases, affine map or running statistics, as released."""
    released: dict[str, Any] = {"norm": "batch", "bias": False, "affine": False, "running": False, "eps": 0.0}
    law = {} if norm == "none" else released
    return Mlp(features, 10, depth=depth, width=width, init="torch", generator=generator, **law)


def measure_fig1(values: Values, context: Context) -> Outcome:
    """The rank at the start and the training accuracy at the end, by depth, with and without batch norm."""
    inputs, labels, *_ = load_pixels(values["dataset"], context)
    released: dict[str, Any] = {"sampling": "replacement", "statistics": "batch"}
    recipe = Recipe(**pick(values, "batch_size steps"), **released, evaluate="end")
    names = {"none": "no norm", "batch": "batch norm"}
    ranks, scores = ({norm: list[Number]() for norm in names} for _ in range(2))
    used: dict[str, list[float]] = {norm: [] for norm in names}
    size = values["batch_size"]
    for _, (norm, (index, depth)) in context.each(product(names, enumerate(values["depths"]))):
        make = partial(make_fig1_network, features=inputs.shape[1], depth=depth, width=values["width"], norm=norm)
        offset = 2 * index + (norm == "batch")  # networks with and without norm share nothing
        started = [make(context.generator(1000 * offset + run)) for run in range(values["runs"])]
        draws = [context.generator(1000 * offset + 700 + run) for run in range(values["runs"])]
        share = []
        for network, generator in zip(started, draws, strict=True):
            batch = inputs[draw_samples(inputs, values["rank_batch"], generator)].cpu()
            share.append(float(numerical_rank(last_hidden(network, batch))) / values["width"])
        ranks[norm].append(over_runs(np.array(share)))
        grid = pick(values, "rates runs")
        found = train_grid(make, (inputs, labels), **grid, recipe=recipe, context=context, offset=offset)
        used[norm].append(found.rate)
        right = []
        for network, generator in zip(found.networks, draws, strict=True):
            # samples of its own for each run, in whole batches: their statistics are those of training, as released
            chosen = draw_samples(inputs, values["evaluated"] // size * size, generator)
            network.to(inputs.device)
            with torch.no_grad():
                answers = torch.cat([network(part).argmax(1) for part in torch.split(inputs[chosen], size)])
            right.append(float((answers == labels[chosen]).double().mean()))
        scores[norm].append(over_runs(np.array(right)))
    numbers = {
        "vanilla_rank_share_at_deepest": ranks["none"][-1],
        "batch_norm_rank_share_at_deepest": ranks["batch"][-1],
        "vanilla_accuracy_at_deepest": scores["none"][-1],
        "vanilla_accuracy_at_shallowest": scores["none"][0],
        "batch_norm_accuracy_at_deepest": scores["batch"][-1],
        "batch_norm_accuracy_at_shallowest": scores["batch"][0],
        "batch_norm_smallest_accuracy": lowest(scores["batch"]),
        "batch_norm_smallest_rank_share": lowest(ranks["batch"]),
    }
    depths = values["depths"]
    deep = [number for depth, number in zip(depths, scores["none"], strict=True) if depth > LEARNING_DEPTH]
    numbers["vanilla_largest_accuracy_beyond_10_layers"] = highest(deep)

    def drawn(found: dict[str, list[Number]]) -> list[Series]:
        return [points_of(names[k], depths, row) for k, row in found.items()]

    chance = level("chance", depths, 0.1)
    remarks = "; ".join(
        f"{names[k]}: rates {', '.join(f'{d}: {r:g}' for d, r in zip(depths, row, strict=True))}"
        for k, row in used.items()
    )
    return present(
        numbers, drawn(ranks), [*drawn(scores), chance], remarks=f"Chosen learning rates by depth. {remarks}."
    )


LEVELS = ("no pre-training", "25 steps", "75 steps")
NORMED = ("batch norm", "batch norm, one-sided start")
# the plain networks by their initial weights; those that are not called pre-trained are the controls
STARTS = {"pre-trained": "he", "He's start": "he", "PyTorch's start": "torch", "PyTorch's start, pre-trained": "torch"}


@share("shown", "caption")
def compare_with_batch_norm(values: Values, context: Context) -> dict[str, list[Trained]]:
    """Plain networks, pre-trained or not, and batch-norm networks by depth, each at its best rate; figures share it."""
    data = load_pixels(values["dataset"], context)
    pixels = data[0].cpu()  # single small networks are pre-trained faster there
    features, width = data[0].shape[1], values["width"]
    looks = evenly(values["steps"], values["evaluations"])
    recipe = Recipe(**pick(values, "batch_size steps"), evaluate=looks, train_metrics="seen")
    found: dict[str, list[Trained]] = {kind: [] for kind in ("batch norm", *STARTS)}
    for index, depth in enumerate(values["depths"]):
        made: dict[tuple[str, int], Mlp] = {}

        def make(generator: torch.Generator, kind: str, depth: int = depth, made: dict[Any, Mlp] = made) -> Mlp:
            """A copy of the network that starts from this generator; learning rates share the pre-training."""
            seed = generator.initial_seed()  # the generator names the network: runs at other rates ask for the same one
            if (kind, seed) not in made:
                normed = {"norm": "batch", "init": "xavier"} if kind == "batch norm" else {"init": STARTS[kind]}
                network = Mlp(features, 10, depth=depth, width=width, generator=generator, **normed)  # type: ignore[arg-type]
                if kind.endswith("pre-trained"):
                    order = torch.Generator().manual_seed(seed + 250)
                    batches = values["pretraining"]
                    # also from PyTorch's start, which is collapsed: what pre-training makes of it is the question
                    raise_rank_(network, pixels, batches=batches, batch_size=64, force=True, generator=order)
                made[kind, seed] = network
            return copy.deepcopy(made[kind, seed])  # training changes it in place

        for place, (kind, row) in enumerate(found.items()):
            rates = values["normed_rates" if kind == "batch norm" else "rates"]
            shape: dict[str, Any] = {"rates": rates, "runs": values["runs"], "offset": len(found) * index + place}
            row.append(train_grid(partial(make, kind=kind), data, recipe=recipe, context=context, **shape))
    return found


def measure_comparison(values: Values, context: Context) -> Outcome:
    """Curves over epochs of the quantities that the figure shows, and their differences at the deepest network."""
    found = compare_with_batch_norm(values, context)
    numbers: dict[str, Number] = {}
    panels = []
    words = {"train_loss": "training loss", "train_accuracy": "training accuracy", "test_loss": "test loss"}
    for name in values["shown"]:
        sign = -1.0 if name.endswith("accuracy") else 1.0  # above 0 is always to the advantage of the second
        last = {kind: [sign * trained.curves[name][:, -1] for trained in row] for kind, row in found.items()}
        normed, raised = last["batch norm"], last["pre-trained"]
        numbers[f"{name}_advantage_at_deepest"] = difference(normed[-1], raised[-1])
        numbers[f"{name}_slow_down_of_batch_norm_minus_pretrained"] = contrast(
            [normed[-1], raised[0]], [normed[0], raised[-1]]
        )
        pairs = {"he": ("He's start", "pre-trained"), "torch": ("PyTorch's start", "PyTorch's start, pre-trained")}
        for key, (plain, cured) in pairs.items():
            numbers[f"{name}_advantage_of_{key}_without_pretraining"] = difference(normed[-1], last[plain][-1])
            numbers[f"{name}_gain_of_pretraining_from_{key}"] = difference(last[plain][-1], last[cured][-1])
        for depth, place in ((values["depths"][0], 0), (values["depths"][-1], -1)):
            series = [points_over(kind, row[place].epochs, row[place].curves[name]) for kind, row in found.items()]
            panels.append(Panel("epoch", words[name], series, title=f"{words[name]}, {depth} layers"))
    rates = "; ".join(f"{kind}: {', '.join(f'{t.rate:g}' for t in row)}" for kind, row in found.items())
    remarks = f"Learning rates by depth, of least last training loss: {rates}."
    return present(numbers, *panels, remarks=remarks)


def measure_fig6(values: Values, context: Context) -> Outcome:
    """Training accuracy and r(H) through training, for three levels of pre-training and two starts of batch norm."""
    inputs, labels, *_ = load_pixels(values["dataset"], context)
    features, pixels, shape, device = inputs.shape[1], inputs.cpu(), pick(values, "depth width"), context.device
    # levels of a run start alike: what is compared is the pre-training alone
    kinds: list[list[Mlp]] = []
    for steps in (0, 25, 75):
        kinds.append([Mlp(features, 10, **shape, generator=context.generator(run)) for run in range(values["runs"])])
        law: dict[str, Any] = {"batches": steps, "batch_size": 64, "target": values["target"], "force": True}
        for run, network in enumerate(kinds[-1]):
            if steps:  # without steps the network is as drawn
                raise_rank_(network, pixels, generator=context.generator(100 + run), **law)
            network.to(device)
    starts: list[list[Mlp]] = []
    for one_sided in (False, True):
        generators = [context.generator(200 + run) for run in range(values["normed_runs"])]
        law = {"norm": "batch", "init": "torch", "running": False, **shape}
        starts.append([Mlp(features, 10, **law, generator=generator) for generator in generators])
        for network, generator in zip(starts[-1], generators, strict=True):
            if one_sided:  # after the usual start, which has taken its numbers from the stream
                make_one_sided_(network, generator)
            network.to(device)
    # the levels of a run are compared with each other, the starts of batch norm are independent
    plain = _follow(kinds, (inputs, labels), values, context, orders=[*range(300, 300 + values["runs"])] * 3)
    normed = _follow(starts, (inputs, labels), values, context, orders=range(400, 400 + 2 * values["normed_runs"]))
    curves, ratios = (
        dict(zip((*LEVELS, *NORMED), [*first, *second], strict=True))
        for first, second in zip(plain, normed, strict=True)
    )
    accuracy = {name: rows[:, -1] for name, rows in curves.items()}
    area = {name: rows.mean(axis=1) for name, rows in curves.items()}
    ends = {name: rows[:, -1] for name, rows in ratios.items()}
    starting = {name: rows[:, 0] for name, rows in ratios.items()}
    initial = np.log(np.concatenate([starting[name] for name in LEVELS]))
    numbers: dict[str, Number] = {}
    for name, scores in (("mean_accuracy", area), ("accuracy", accuracy)):
        first, middle, most = (scores[level] for level in LEVELS)
        numbers[f"{name}_gain_of_75_steps"] = over_runs(most - first)
        numbers[f"{name}_gain_of_25_steps"] = over_runs(middle - first)
        numbers[f"slope_of_{name}_with_log_initial_r"] = slope_of(initial, np.concatenate([first, middle, most]))
    numbers |= {
        "accuracy_loss_of_one_sided_start": difference(accuracy[NORMED[0]], accuracy[NORMED[1]]),
        "final_r_75_steps_minus_none": over_runs(ends[LEVELS[2]] - ends[LEVELS[0]]),
        "final_r_batch_norm_minus_one_sided": difference(ends[NORMED[0]], ends[NORMED[1]]),
        "initial_r_75_steps_minus_none": over_runs(starting[LEVELS[2]] - starting[LEVELS[0]]),
    }
    epochs = values["steps"] * values["batch_size"] / len(inputs) * np.arange(values["evaluations"] + 1)
    epochs = epochs / values["evaluations"]
    learned = [points_over(name, epochs[1:], rows) for name, rows in curves.items()]
    ranks = [points_over(name, epochs, rows) for name, rows in ratios.items()]
    return present(numbers, learned, ranks)


def _follow(
    kinds: list[list[Mlp]], data: Sequence[torch.Tensor], values: Values, context: Context, *, orders: Sequence[int]
) -> tuple[list[Array], list[Array]]:
    """Training accuracies and r(H) of the last hidden layer, (runs, evaluations) of each kind; r also at the start.

    `orders` are the offsets of each network's generators: of its order of the samples, and of the batch for r. All
    networks are trained together, in parts; plain SGD has no state to lose between them.
    """
    networks = [network for kind in kinds for network in kind]
    part = values["steps"] // values["evaluations"]  # an evaluation ends each part
    recipe = Recipe(
        batch_size=values["batch_size"], steps=part, evaluate=(part,), train_metrics="seen", statistics="batch"
    )
    generators = {offset: context.generator(offset, device=context.device) for offset in orders}
    chosen = {o: draw_samples(data[0], values["rank_batch"], context.generator(200 + o)) for o in orders}

    def ratios() -> list[float]:
        pairs = zip(networks, orders, strict=True)
        stacked = torch.stack([last_hidden(network, data[0][chosen[offset]]) for network, offset in pairs])
        return [float(value) for value in participation_ratio(stacked)]

    ratio, accuracy = [ratios()], []
    for _ in range(values["evaluations"]):
        each = [generators[offset] for offset in orders]
        history = train_alike_(networks, tuple(data), recipe, context, rates=[values["rate"]], orders=each)
        accuracy.append(curves_of(history, range(len(networks)))["train_accuracy"][:, -1])
        ratio.append(ratios())
    return np.split(np.array(accuracy).T, len(kinds)), np.split(np.array(ratio).T, len(kinds))
