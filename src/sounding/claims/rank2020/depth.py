"""Rank against depth: figures 2 and 3b, and Corollary 15 with its assumption."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from sounding.activations import resolve
from sounding.chain import simulate
from sounding.claims.claim import Context, Outcome, pick
from sounding.claims.number import DRAWN, Number, estimate, exact, lowest, over_runs, ratio_of, scaled
from sounding.claims.picture import Panel, Picture, Series, points_of
from sounding.claims.walk import measure_at, unit_features, unit_matrix, walk
from sounding.measures import numerical_rank
from sounding.profile import Estimate, Profile
from sounding.weights import draw_uniform


def follow_ranks(
    values: Mapping[str, Any], context: Context, *, norm: str, offset: int
) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Layers and the numerical rank of each run there: H ↦ φ(BN(HWᵀ)), or φ(HWᵀ) over its Frobenius norm.

    Weights are uniform of unit variance, inputs Gaussian, as many samples as features. Dividing by the Frobenius norm
    at each layer is what the released program does without batch norm; tanh then acts as if it were linear.
    """
    function, device = resolve(values["activation"]).torch(), context.device
    seed = torch.randint(2**31, (), generator=context.generator(offset))
    on = torch.Generator(device).manual_seed(int(seed))
    shape = (values["runs"], values["width"], values["width"])
    start = torch.randn(shape, generator=on, device=device)
    weights = (draw_uniform(shape, generator=on, dtype=start.dtype, device=device) for _ in range(values["depth"]))
    if norm == "batch":
        states = walk(start, weights, norm=partial(unit_features, centring=True), activation=function)
    else:
        states = walk(start, weights, activation=lambda product: unit_matrix(function(product)))
    layers = range(values["every"], values["depth"] + 1, values["every"])
    ranks = torch.cat([numerical_rank(start)[None], measure_at(states, layers, numerical_rank)])
    return [0, *layers], ranks.cpu().numpy()


def measure_fig2(values: Mapping[str, Any], context: Context) -> Outcome:
    """The rank of the last hidden layer against depth, with and without batch norm."""
    numbers: dict[str, Number] = {}
    series = []
    for index, (norm, label) in enumerate((("batch", "batch norm"), ("none", "no norm"))):
        layers, ranks = follow_ranks(values, context, norm=norm, offset=index)
        late = 3 * len(layers) // 4
        numbers[f"rank_{'with' if norm == 'batch' else 'without'}_batch_norm"] = over_runs(ranks[late:].mean(axis=0))
        series.append(points_of(label, layers, [over_runs(row) for row in ranks]))
    root = math.sqrt(values["width"])
    series.append(Series("√d (the paper's floor)", [0, values["depth"]], [root, root], role="paper"))
    series.append(Series("1: collapse", [0, values["depth"]], [1.0, 1.0], role="bound"))
    panel = Panel("layer", "numerical rank", series, y_scale="log", title=values["activation"])
    return Outcome(numbers, Picture((panel,), values["caption"]))


def measure_cor15(values: Mapping[str, Any], context: Context) -> Outcome:
    """The rank at every layer, from orthogonal inputs, over widths."""
    smallest, over, series = [], [], []
    for index, (width, alpha) in enumerate(zip(values["widths"], values["regularities"], strict=True)):
        profile = _follow(
            values, context.generator(index), width=width, start="orthogonal", measures=["numerical_rank"]
        )
        ranks = [profile.value("numerical_rank", layer=layer) for layer in profile.layers if layer]
        least = min(ranks, key=lambda rank: rank.value)
        smallest.append(_of_runs(least, values["runs"]))
        over.append(scaled(smallest[-1], 1 / math.sqrt((1 - alpha) * width)))
        series.append(_curve(f"d = {width}", profile, "numerical_rank"))
        context.progress((index + 1) / len(values["widths"]))
    plain = _follow(
        values, context.generator(99), width=width, start="orthogonal", measures=["numerical_rank"], norm="none"
    )
    last = plain.value("numerical_rank", layer=values["depth"])
    growth = ratio_of(smallest[-1], smallest[0])
    stretch = math.log(values["widths"][-1] / values["widths"][0])
    value, low, high = (math.log(end) / stretch for end in (growth.value, growth.low, growth.high))
    numbers = {
        "smallest_rank_over_bound": lowest(over),
        "exponent_of_rank": Number(value, low, high, values["runs"]),
        "rank_without_norm_over_bound": scaled(_of_runs(last, values["runs"]), 1 / math.sqrt((1 - alpha) * width)),
    }
    series.append(_curve(f"d = {width}, no norm", plain, "numerical_rank"))
    widths = np.array(values["widths"])
    bounds = np.sqrt((1 - np.array(values["regularities"])) * widths)
    panels = (
        Panel("layer", "rank of H", series, title="every layer", x_scale="log", y_scale="log"),
        Panel(
            "width d",
            "smallest rank over the layers",
            (
                points_of("measured", widths, smallest),
                Series("√((1 − α)d)", widths, bounds, role="bound"),
            ),
            title="smallest",
            x_scale="log",
            y_scale="log",
        ),
    )
    caption = "The rank of a full-rank input, as floating point numbers show it, stays above the bound at every layer."
    return Outcome(numbers, Picture(panels, caption))


def measure_soft_rank(values: Mapping[str, Any], context: Context) -> Outcome:
    """Rank and soft rank at every layer from nearly collinear inputs, which are of full rank."""
    width, tau = values["width"], values["threshold"]
    name = f"soft_rank:{tau}"
    near = _follow(
        values, context.generator(), width=width, start=values["collinear"], measures=["numerical_rank", name]
    )
    layers = [layer for layer in near.layers if layer]
    rank, soft = ([near.value(measure, layer=layer) for layer in layers] for measure in ("numerical_rank", name))
    floor = math.sqrt((1 - values["regularity"]) * width)
    bound, runs = (1 - tau) ** 2 * floor, values["runs"]
    # one run's average over layers has no larger spread than the largest of a layer
    spread = max(e.stderr or 0.0 for e in soft)
    average = float(np.mean([e.value for e in soft]))
    error = math.hypot(*(e.stderr or 0.0 for e in (soft[0], soft[-1])))
    numbers = {
        "increase_of_soft_rank": _of_runs(Estimate(soft[-1].value - soft[0].value, error), runs),
        "smallest_soft_rank_over_bound": min((_of_runs(e, runs, unit=bound) for e in soft), key=lambda n: n.value),
        "average_soft_rank_over_bound": _of_runs(Estimate(average, spread), runs, unit=bound),
        "smallest_rank_over_bound": lowest(_of_runs(e, runs, unit=floor) for e in rank),
    }
    ends = [1, layers[-1]]
    panels = (
        Panel(
            "layer",
            f"soft rank at {tau}",
            (
                _curve("nearly collinear input", near, name),
                Series("(1 − τ)²√((1 − α)d)", ends, [bound, bound], role="paper"),
            ),
            title="soft rank",
            x_scale="log",
        ),
        Panel(
            "layer",
            "rank of H",
            (
                _curve("nearly collinear input", near, "numerical_rank"),
                Series("√((1 − α)d)", ends, [floor, floor], role="bound"),
            ),
            title="rank",
            x_scale="log",
        ),
    )
    caption = "From nearly collinear samples the soft rank begins below its bound and grows; the rank is above its own."
    return Outcome(numbers, Picture(panels, caption))


def _follow(
    values: Mapping[str, Any],
    generator: torch.Generator,
    *,
    width: int,
    start: str,
    measures: list[str],
    norm: str = "batch",
) -> Profile:
    """Chains H ↦ BN((I + γW)H), or (I + γW)H, with uniform weights and as many samples as features."""
    return simulate(
        **pick(values, "depth runs residual every"),
        width=width,
        batch_size=width,
        weights="uniform",
        norm=norm,
        centring=False,
        input=start,
        measures=measures,
        profile=True,
        dtype="float64",
        generator=generator,
    ).profile


def _curve(label: str, profile: Profile, name: str) -> Series:
    """A measure at a dozen layers."""
    known = np.array([layer for layer in profile.layers if layer])
    wanted = np.geomspace(known[0], known[-1], 12)
    picked = sorted({int(known[np.argmin(np.abs(known - layer))]) for layer in wanted})
    points = [profile.value(name, layer=layer) for layer in picked]
    return Series(label, picked, [p.value for p in points], error=[DRAWN * (p.stderr or 0.0) for p in points])


def _of_runs(mean: Estimate, runs: int, *, unit: float = 1.0) -> Number:
    """Student's interval of a mean over runs, in some unit; all runs alike is exact."""
    value, stderr = mean.value / unit, (mean.stderr or 0.0) / unit
    return exact(value) if stderr == 0 else estimate(value, stderr, samples=runs)
