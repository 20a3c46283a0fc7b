"""Odd activations inside the branch, H ↦ BN(H + γ W F(H)): figures 1 and 4, table 1 and theorem 5 of rank2020v1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from sounding.activations import resolve
from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.number import (
    DRAWN,
    Number,
    counted,
    estimate,
    exact,
    fraction_of,
    highest,
    lowest,
    mean_of,
    over_runs,
    slope_of,
)
from sounding.claims.picture import Panel, Series, level, points_of
from sounding.claims.walk import measure_at, unit_features, unit_matrix, walk
from sounding.measures import numerical_rank, participation_ratio, soft_rank
from sounding.weights import draw_uniform

Scaling = Literal["batch", "frobenius", "none"]
Measure = Callable[[torch.Tensor], torch.Tensor]
ZERO = 1e-9  # singular values below this share of the largest count as zero, as in figure 1 of the paper
# r of a state whose second singular value is 16% of the first: a whole rank that is at least as large is 2 or more
NEAR_ONE = 1.05


def follow_chain(
    values: Values,
    context: Context,
    measure: Measure,
    *,
    width: int,
    strength: float,
    activation: str,
    scaling: Scaling,
    layers: Sequence[int],
    start: str = "gaussian",
    offset: int = 0,
) -> Array:
    """(layers, runs): a measure of H ↦ S(H + γ W F(H)), rows as samples, as many as features, uniform weights.

    S divides each feature by its root mean square ("batch"), the whole by its Frobenius norm ("frobenius"), or does
    nothing ("none"); γ = ∞ leaves W F(H) alone.
    """
    function = resolve(activation).torch()
    generator = context.generator(offset, device=context.device)
    options: dict[str, Any] = {"dtype": torch.float64, "device": context.device}
    runs = values["runs"]
    shape = (runs, width, width)
    state = torch.randn(shape, generator=generator, **options)
    if start == "rank one":
        # every feature is plus or minus the first one
        signs = torch.randint(2, (runs, 1, width), generator=generator, device=context.device) * 2.0 - 1
        state = state[..., :1] * signs
    weights = (draw_uniform(shape, generator=generator, **options) for _ in range(layers[-1]))
    norm = {"batch": unit_features, "frobenius": unit_matrix, "none": None}[scaling]
    states = walk(state, weights, norm=norm, inside=function, skip=strength)
    return measure_at(states, layers, measure).cpu().numpy()


count_directions = partial(numerical_rank, tolerance=ZERO)  # the rank as figure 1 counts it


def measure_fig1(values: Values, context: Context) -> Outcome:
    """ln of the rank over depth, with and without batch norm, for two strengths."""
    depth, width = values["depth"], values["width"]
    layers = sorted(
        {int(layer) for layer in np.geomspace(1, depth, 14)} | set(range(3 * depth // 4, depth, depth // 12))
    )
    panels, numbers = [], {}
    kinds: tuple[tuple[Scaling, str], ...] = (("batch", "batch norm"), ("frobenius", "no norm"))
    for index, gamma in enumerate(values["strengths"]):
        series = []
        for scaling, label in kinds:
            kind: dict[str, Any] = {"strength": gamma, "activation": "identity", "scaling": scaling}
            offset = 2 * index + (scaling == "batch")
            ranks = follow_chain(values, context, count_directions, width=width, layers=layers, offset=offset, **kind)
            late = np.array(layers) >= 3 * depth // 4  # the rank has settled by then
            name = "with" if scaling == "batch" else "without"
            numbers[f"rank_{name}_batch_norm_at_gamma_{gamma:g}"] = over_runs(ranks[late].mean(axis=0))
            points = [over_runs(row) for row in ranks]
            error = [(n.high - n.low) / 2 / n.value for n in points]  # d ln x = dx/x
            series.append(Series(label, layers, np.log([n.value for n in points]), error=error))
        ends = [1, depth]
        series.append(level("ln √d (the order claimed)", ends, 0.5 * math.log(width), "paper"))
        panels.append(Panel(series=series, title=f"γ = {gamma:g}"))
    numbers |= {
        "smallest_rank_with_batch_norm": lowest(n for name, n in numbers.items() if "with_" in name),
        "largest_rank_without_batch_norm": highest(n for name, n in numbers.items() if "without_" in name),
    }
    return present(numbers, *panels)


def measure_by_width(measure: Measure, values: Values, context: Context, *, offset: int, **chain: Any) -> list[Number]:
    """The average of a measure over depth, at each width; `chain` are further options of `follow_chain`."""
    layers = range(values["burn_in"], values["depth"] + 1, values["every"])
    found = []
    for index, width in enumerate(values["widths"]):
        place = {"width": width, "layers": layers, "offset": 100 * offset + index}
        found.append(over_runs(follow_chain(values, context, measure, **place, **chain).mean(axis=0)))
    return found


def exponent_of(widths: Sequence[int], numbers: Sequence[Number]) -> Number:
    """The mean slope of ln value against ln width, from the narrowest to the widest."""
    ends = (numbers[0], numbers[-1])
    errors = [_stderr(n) / n.value for n in ends]
    # two points have no scatter, only their errors
    return slope_of(np.log([widths[0], widths[-1]]), np.log([n.value for n in ends]), stderr=errors)


def exponent_of_growth(numbers: Sequence[Number]) -> Number:
    """b of a + c·dᵇ, from the last three widths, each twice the one before: log₂ of the ratio of the increments."""
    first, second, third = numbers[-3:]
    early, late = second.value - first.value, third.value - second.value
    # both increments share the middle value
    parts = (_stderr(first) / early, _stderr(second) * (1 / early + 1 / late), _stderr(third) / late)
    return estimate(math.log2(late / early), math.hypot(*parts) / math.log(2))


def _stderr(number: Number) -> float:
    """The standard error whose normal interval is the number's."""
    return (number.high - number.low) / 2 / DRAWN


def measure_fig4(values: Values, context: Context) -> Outcome:
    """r averaged over depth against the width, F = tanh, for several strengths."""
    widths = values["widths"]
    numbers: dict[str, Number] = {}
    exponents, every, series = [], [], []
    for index, gamma in enumerate(values["strengths"]):
        chain: dict[str, Any] = {"strength": gamma, "activation": "tanh", "scaling": "batch"}
        found = measure_by_width(participation_ratio, values, context, offset=index, **chain)
        exponents.append(exponent_of(widths, found))
        numbers[f"exponent_at_gamma_{gamma:g}"] = exponents[-1]
        every += found
        series.append(points_of("no skip connection" if math.isinf(gamma) else f"γ = {gamma:g}", widths, found))
    numbers["smallest_exponent"] = lowest(exponents)
    numbers["smallest_r"] = lowest(every)
    order = Series("√d (linear networks' order)", widths, np.sqrt(widths), role="paper")
    return present(numbers, [*series, order, level("2 (theorem 5)", widths, 2.0)])


def measure_table1(values: Values, context: Context) -> Outcome:
    """Soft ranks of linear and tanh networks, with and without batch norm, by width."""
    widths, gamma = values["widths"], values["strength"]
    kinds: dict[str, tuple[str, Scaling]] = {
        "linear, batch norm": ("identity", "batch"),
        "tanh, batch norm": ("tanh", "batch"),
        "linear, no norm": ("identity", "frobenius"),
        "tanh, no norm": ("tanh", "none"),
        "tanh, no norm, kept small": ("tanh", "frobenius"),
    }

    def measure(state: torch.Tensor) -> torch.Tensor:
        # scaled to unit mean square, so that states without a norm have a soft rank too
        return soft_rank(state / state.square().mean(dim=(-2, -1), keepdim=True).sqrt())

    found = {}
    for index, (label, (name, scaling)) in enumerate(kinds.items()):
        chain: dict[str, Any] = {"strength": gamma, "activation": name, "scaling": scaling}
        found[label] = measure_by_width(measure, values, context, offset=index, **chain)
    numbers = {
        "exponent_linear_with_batch_norm": exponent_of(widths, found["linear, batch norm"]),
        "exponent_tanh_with_batch_norm": exponent_of(widths, found["tanh, batch norm"]),
        "exponent_of_growth_tanh_with_batch_norm": exponent_of_growth(found["tanh, batch norm"]),
        "smallest_tanh_with_batch_norm": lowest(found["tanh, batch norm"]),
        "largest_linear_without_norm": highest(found["linear, no norm"]),
        "tanh_without_norm_at_widest": found["tanh, no norm"][-1],
        "largest_tanh_kept_small": highest(found["tanh, no norm, kept small"]),
    }
    series = [points_of(label, widths, row) for label, row in found.items()]
    linear = Series("√d, linear (the paper)", widths, np.sqrt(widths), role="paper")
    tanh = Series("d, tanh (the paper)", widths, widths, role="paper")
    return present(numbers, [*series, linear, tanh, level("1: collapse", widths, 1.0)])


def ratio_of_moments(state: torch.Tensor) -> torch.Tensor:
    """r = (Tr M)²/‖M‖_F² without eigenvalues, quick enough to look at every layer."""
    # Tr M = ‖H‖_F², and ‖HᵀH‖_F = ‖HHᵀ‖_F
    return state.square().sum(dim=(-2, -1)) ** 2 / (state.mT @ state).square().sum(dim=(-2, -1))


def measure_theorem5(values: Values, context: Context) -> Outcome:
    """The smallest r over all layers of each run, γ = 1/(8d): odd activations with batch norm, linear without."""
    width, depth, runs = values["width"], values["depth"], values["runs"]
    common: dict[str, Any] = {"strength": 1 / (8 * width), "width": width}  # the largest γ that the theorem allows
    every = range(1, depth + 1)
    shown = np.array(sorted({int(layer) for layer in np.geomspace(1, depth, 14)}))
    smallest, series, raised = [], [], []

    def follow(activation: str, scaling: Scaling, label: str, offset: int) -> Array:
        chain: dict[str, Any] = {"activation": activation, "scaling": scaling, "layers": every, "offset": offset}
        ratios = follow_chain(values, context, ratio_of_moments, **chain, **common)
        points = ratios[shown - 1]  # layers count from 1
        low, mean, high = points.min(axis=1), points.mean(axis=1), points.max(axis=1)
        series.append(Series(label, shown, mean, error=np.stack([mean - low, high - mean])))
        return np.asarray(ratios.min(axis=0))

    for index, activation in enumerate(values["activations"]):
        smallest.append(follow(activation, "batch", activation, index))
        if activation != "identity":
            # a rank of one must be left within two layers
            few: dict[str, Any] = {"activation": activation, "scaling": "batch", "layers": [2], "offset": index}
            raised.append(follow_chain(values, context, count_directions, start="rank one", **few, **common))
    without = follow("identity", "frobenius", "identity, no norm", len(smallest))
    near_one, reached = np.concatenate(smallest) < NEAR_ONE, np.concatenate(raised, axis=1) >= 2
    numbers = counted("runs_that_come_near_rank_one", near_one) | {
        "share_without_norm_that_come_near_rank_one": fraction_of(int((without < NEAR_ONE).sum()), runs),
        "smallest_r_of_a_run": lowest(mean_of(ratios) for ratios in smallest),
        "smallest_r_of_all": exact(min(float(ratios.min()) for ratios in smallest)),
        "share_of_runs_raised_from_rank_one_in_two_layers": fraction_of(int(reached.sum()), reached.size),
    }
    return present(numbers, [*series, level(f"{NEAR_ONE}: next to rank one", [1, depth], NEAR_ONE)])
