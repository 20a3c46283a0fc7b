"""Figures 1 and 2: random linear networks at initialization."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.chain import Simulation, simulate
from sounding.claims.claim import Context, Outcome, pick
from sounding.claims.number import DRAWN, Number, estimate, jackknife, slope_of, student
from sounding.claims.picture import Panel, Picture, Series
from sounding.theory.bounds import orth2021 as bounds


def linear_chain(context: Context, offset: int, **options: Any) -> Simulation:
    """Random linear networks with batch norm without centring, and their profile."""
    return simulate(centring=False, profile=True, device=context.device, generator=context.generator(offset), **options)


def _nearly_rank_one(width: int, samples: int, spread: float) -> torch.Tensor:
    """Samples diag(1, ε, …, ε) as the released program starts, (samples, width)."""
    start = torch.zeros(samples, width, dtype=torch.float64)
    start[range(samples), range(samples)] = spread
    start[0, 0] = 1.0
    return start * math.sqrt(width)


def measure_figure1(values: Mapping[str, Any], context: Context) -> Outcome:
    """|cos| between two samples over depth: with batch norm from nearly equal samples, without from orthogonal ones."""
    width, eps = values["width"], values["eps"]
    correlated = torch.zeros(2, width, dtype=torch.float64)
    correlated[0, 0], correlated[1, 0], correlated[1, 1] = 1.0, 1 - eps, eps
    shape = {**pick(values, "width depth runs"), "batch_size": 2}
    measures = ("mean_absolute_cosine",)
    batch = linear_chain(context, 0, input=correlated * math.sqrt(width), measures=measures, **shape)
    vanilla = linear_chain(context, 1, input="orthogonal", norm="none", measures=measures, **shape)
    runs = {"batch norm": batch, "vanilla": vanilla}
    curves = {name: run.profile.series("mean_absolute_cosine") for name, run in runs.items()}
    numbers = {}
    for name, series in curves.items():
        key = name.replace(" ", "_")
        for place, index in (("first", 0), ("half", values["depth"] // 2), ("last", values["depth"])):
            numbers[f"{key}_{place}"] = estimate(
                float(series.value[index]), float(np.nan_to_num(series.stderr[index])), samples=values["runs"]
            )
    first, half = numbers["vanilla_half"], numbers["vanilla_last"]
    numbers["vanilla_rise_second_half"] = estimate(
        half.value - first.value, math.hypot(first.high - first.value, half.high - half.value) / DRAWN
    )
    chance = math.gamma(width / 2) / math.gamma((width + 1) / 2) / math.sqrt(math.pi)
    layers = [0, values["depth"]]
    panel = Panel(
        "layer",
        "|cos| between the two samples",
        (
            *(Series(n, s.layer, s.value, error=DRAWN * np.nan_to_num(s.stderr)) for n, s in curves.items()),
            Series("independent directions (theory)", layers, [chance, chance], role="theory"),
        ),
    )
    caption = "With batch norm two nearly equal samples become as orthogonal as chance; without, orthogonal ones align."
    return Outcome(numbers, Picture((panel,), caption))


def _mean_field(samples: int, spread: float, depth: int) -> Array:
    """The gap along the infinitely wide chain."""
    sigma = np.append(1.0, np.full(samples - 1, spread))
    path = []
    for _ in range(depth + 1):
        eigenvalues = sigma**2 / np.sum(sigma**2)
        path.append(float(np.linalg.norm(eigenvalues - 1 / samples)))
        sigma = np.sqrt(bounds.expected_spectrum(sigma))
    return np.array(path)


def predict_floor(samples: int, width: int) -> float:
    """E V at the floor, to leading order in 1/d.

    HᵀH is a mean of d independent projections on a direction, so E‖HᵀH − I/n‖² after a layer is r²V² + (1 − 1/n)/d
    with r = n/(n + 2) near orthogonality. The fixed point is V² = (1 − 1/n)/(d(1 − r²)), spread evenly over the
    k = (n − 1)(n + 2)/2 directions of a symmetric matrix without trace: E V = V·√(2/k)·Γ((k + 1)/2)/Γ(k/2).
    """
    ratio, k = samples / (samples + 2), (samples - 1) * (samples + 2) / 2
    size = math.sqrt((1 - 1 / samples) / (width * (1 - ratio**2)))
    return size * math.sqrt(2 / k) * math.gamma((k + 1) / 2) / math.gamma(k / 2)


def over_groups(curves: Array, function: Callable[[Array], float]) -> Number:
    """A function of the mean curves (widths, layers) of (widths, groups, layers).

    The groups are independent, the layers of a chain are not: the interval is over groups.
    """
    return jackknife(lambda groups: function(groups.mean(0)), np.moveaxis(curves, 1, 0))


def _slope(gaps: Array, first: int, last: int) -> float:
    """The slope of ln V over the layers from first to last."""
    return float(np.polyfit(np.arange(first, last + 1), np.log(gaps[first : last + 1]), 1)[0])


def _share(gaps: Array, first: int, last: int) -> float:
    """How fast ln V falls from first to last, over how fast it falls from layer 1 to 20: 1 on a straight line."""
    return float(np.log(gaps[first] / gaps[last]) / (last - first) / (np.log(gaps[1] / gaps[20]) / 19))


def _straightness(gaps: Array) -> float:
    """R² of a straight line through ln V of layers 1 to 20."""
    return float(np.corrcoef(np.arange(20), np.log(gaps[1:21]))[0, 1] ** 2)


def describe_gaps(curves: Array, *, samples: int, width: int, spread: float) -> dict[str, Number]:
    """What V does along (narrow and wide, groups, layers); `width` is the wide one's."""
    depth = curves.shape[2] - 1
    half, theory, floor = depth // 2, _mean_field(samples, spread, depth), predict_floor(samples, width)
    numbers = {}
    for index, name in enumerate(("narrow", "wide")):
        chosen = curves[index : index + 1]
        numbers[f"slope_first_20_{name}"] = over_groups(chosen, lambda gaps: _slope(gaps[0], 1, 20))
        numbers[f"early_rate_{name}"] = over_groups(chosen, lambda gaps: _share(gaps[0], 1, 5))
        numbers[f"late_rate_{name}"] = over_groups(chosen, lambda gaps: _share(gaps[0], 15, 20))
        numbers[f"straightness_first_20_{name}"] = over_groups(chosen, lambda gaps: _straightness(gaps[0]))
        numbers[f"drift_after_half_{name}"] = over_groups(chosen, lambda gaps: _slope(gaps[0], half, depth))
        numbers[f"plateau_{name}"] = over_groups(chosen, lambda gaps: float(gaps[0, 3] / theory[3]))
    wide = curves[1:]
    return numbers | {
        "floor_ratio": over_groups(curves, lambda gaps: float(gaps[0, half:].mean() / gaps[1, half:].mean())),
        "slope_6_to_12": over_groups(wide, lambda gaps: _slope(gaps[0], 6, 12)),
        "bend_at_9": over_groups(wide, lambda gaps: _slope(gaps[0], 9, 12) / _slope(gaps[0], 6, 9)),
        "layers_17_to_20": over_groups(wide, lambda gaps: float(gaps[0, 17:21].mean() / gaps[0, half:].mean())),
        "floor_over_theory": over_groups(wide, lambda gaps: float(gaps[0, half:].mean() / floor)),
    }


def measure_figure2a(values: Mapping[str, Any], context: Context) -> Outcome:
    """ln V over depth at two widths, from a nearly rank-one batch, for groups of independent chains."""
    n, depth, groups = values["batch_size"], values["depth"], values["groups"]
    found = []
    for index, width in enumerate(values["widths"]):
        options = {"width": width, "batch_size": n, "depth": depth, "runs": values["runs"] // groups}
        start = _nearly_rank_one(width, n, values["eps"])
        for group in range(groups):
            run = linear_chain(
                context,
                1000 * index + group,
                input=start,
                measures=("orthogonality_gap",),
                dtype="float64",
                **options,
            )
            found.append(run.profile.series("orthogonality_gap").value)
            context.progress((index + (group + 1) / groups) / 2)
    curves = np.array(found).reshape(2, groups, depth + 1)
    numbers = describe_gaps(curves, samples=n, width=values["widths"][1], spread=values["eps"])
    panel = Panel("layer", "orthogonality gap V", _draw_gaps(curves, values), y_scale="log")
    caption = (
        "V stays where it starts, falls, and comes to rest at its floor. With wide networks it leaves the start sooner "
        "and falls faster, fastest with infinitely wide ones, in the end by n/(n + 2) = ⅔ per layer."
    )
    return Outcome(numbers, Picture((panel,), caption))


def _draw_gaps(curves: Array, values: Mapping[str, Any]) -> list[Series]:
    """Curves with their floors, the straight line of the statement, and the infinitely wide chain."""
    n, depth, groups = values["batch_size"], values["depth"], values["groups"]
    layers = np.arange(depth + 1)
    mean, error = curves.mean(1), student(groups - 1) * curves.std(1, ddof=1) / math.sqrt(groups)
    theory = _mean_field(n, values["eps"], depth)
    seen = theory > mean.min() / 2
    drawn = [Series(f"d = {width}", layers, mean[i], error=error[i]) for i, width in enumerate(values["widths"])]
    drawn.append(Series("infinite width (theory)", layers[seen], theory[seen], role="theory"))
    for width in values["widths"]:
        level = predict_floor(n, width)
        drawn.append(Series(f"floor, d = {width} (theory)", [depth // 2, depth], [level, level], role="theory"))
    drawn.append(Series("straight over 20 layers, as stated", [1, 20], mean[1, [1, 20]], role="paper"))
    return drawn


def measure_figure2b(values: Mapping[str, Any], context: Context) -> Outcome:
    """The average gap over a window of layers against the width, on logarithmic axes."""
    n, widths = values["batch_size"], np.array(values["widths"])
    first, last = values["window"]
    means, errors = [], []
    for index, width in enumerate(widths):
        run = linear_chain(
            context,
            index,
            width=int(width),
            batch_size=n,
            depth=last,
            burn_in=first,
            runs=values["runs"],
            input=_nearly_rank_one(int(width), n, values["eps"]),
            measures=("orthogonality_gap",),
        )
        average = run.averages["orthogonality_gap"]
        means.append(average.value)
        errors.append(average.stderr or 0.0)
    mean, error = np.array(means), np.array(errors)
    slope = slope_of(np.log(widths), np.log(mean), stderr=list(error / mean), straight=False)
    panel = Panel(
        "width d",
        f"V averaged over layers {first}–{last}",
        (
            Series("measured", widths, mean, error=DRAWN * error),
            Series("d^(−1/2) (theory)", widths, mean[-1] * (widths / widths[-1]) ** -0.5, role="theory"),
            Series("slope −0.46, as printed", widths, mean[-1] * (widths / widths[-1]) ** -0.46, role="paper"),
        ),
        x_scale="log",
        y_scale="log",
    )
    caption = (
        f"The slope over layers {first} to {last} is {slope.value:.3f}; with layer 0 the way down to the floor counts."
    )
    return Outcome({"slope": slope}, Picture((panel,), caption))


FASTEST = math.log(4 / 6)
"""ln(n/(n + 2)), the slope of log V of the infinitely wide chain near orthogonality, n = 4."""
