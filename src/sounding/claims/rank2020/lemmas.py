"""Lemmas of rank2020 on single batches and single layers: rank bounds, symmetry, one step of batch norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from sounding import measures
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import DRAWN, Number, estimate, exact, fraction_of, highest, mean_of, scaled
from sounding.claims.picture import Panel, Picture, Series, points_of
from sounding.claims.walk import unit_features, walk
from sounding.measures import numerical_rank, soft_rank
from sounding.theory.bounds import rank2020
from sounding.weights import resolve

Array = np.ndarray[Any, Any]
ROUNDING = 1e-8  # relative: where r reaches the rank they differ by 7e-16
GROUPS = 30  # of batches, each with its own extreme, so that the mean of the extremes has an interval


def draw_batches(count: int, size: int, *, generator: torch.Generator) -> torch.Tensor:
    """(count, size, size) batches of unit mean square features, of every rank and every decay of the spectrum."""

    def uniform() -> torch.Tensor:
        return torch.rand(count, 1, 1, generator=generator, dtype=torch.float64)

    def normal() -> torch.Tensor:
        return torch.randn(count, size, size, generator=generator, dtype=torch.float64)

    index = torch.arange(1, size + 1, dtype=torch.float64)
    kept = index <= 1 + torch.floor(uniform() * size)
    features = (normal() * index ** (-3 * uniform()) * kept) @ normal()
    return features / features.square().mean(-2, keepdim=True).sqrt()


def measure_lemma1(values: Mapping[str, Any], context: Context) -> Outcome:
    """The participation ratio beside the rank, and beside the soft rank at each threshold."""
    generator = context.generator()
    thresholds = values["thresholds"]
    ratio, rank, soft = [], [], []
    for size in range(2, values["largest"] + 1):
        batches = draw_batches(values["batches"], size, generator=generator)
        ratio.append(measures.participation_ratio(batches))
        rank.append(numerical_rank(batches))
        soft.append(torch.stack([soft_rank(batches, threshold=tau) for tau in thresholds]))
    r, ranks = torch.cat(ratio).numpy(), torch.cat(rank).numpy()
    share = torch.cat(soft, dim=-1).numpy() / r
    least = (1 - np.array(thresholds)) ** 2
    over, margin = r / ranks, (share / least[:, None]).min(axis=0)
    broken = (over > 1 + ROUNDING) | (margin < 1 - ROUNDING)
    # batches come by size; every thirtieth makes groups that hold all sizes
    groups = [slice(first, None, GROUPS) for first in range(GROUPS)]
    numbers = {
        "batches_that_break_a_bound": exact(int(broken.sum())),
        "share_of_batches_that_break_a_bound": fraction_of(int(broken.sum()), len(broken)),
        "largest_r_over_rank": mean_of([over[group].max() for group in groups]),
        "smallest_soft_rank_over_bound": mean_of([margin[group].min() for group in groups]),
    }
    shown = slice(None, None, -(-len(r) // 150))
    top = [0.0, float(ranks[shown].max())]
    panels = (
        Panel(
            "participation ratio r(H)",
            "rank of H",
            (
                Series("batches", r[shown], ranks[shown]),
                Series("rank = r", top, top, role="bound"),
            ),
            title="rank",
        ),
        Panel(
            "threshold τ",
            "soft rank over r, smallest of all batches",
            (
                Series("measured", thresholds, share.min(axis=1)),
                Series("(1 − τ)²", thresholds, least, role="bound"),
            ),
            title="soft rank",
        ),
    )
    caption = "No batch lies below rank = r, nor below (1 − τ)² r at any threshold."
    return Outcome(numbers, Picture(panels, caption))


def measure_lemma4(values: Mapping[str, Any], context: Context) -> Outcome:
    """Many chains from one input of positive entries: what their features remember of its sign, layer by layer."""
    width, depth, gamma = values["width"], values["depth"], values["strength"]
    generator = context.generator()
    start = torch.rand(width, width, generator=generator).add_(0.5)
    layers = sorted({int(layer) for layer in np.geomspace(1, depth, 14)})
    curves: dict[str, list[Number]] = {"uniform": [], "one-sided": []}
    products: dict[str, list[Number]] = {"uniform": [], "one-sided": []}
    for law in curves:
        shape = (values["runs"], width, width)
        draw = partial(resolve(law).draw, shape, generator=generator, dtype=start.dtype, device=start.device)
        weights = (draw() for _ in range(depth))
        states = walk(start.expand(shape), weights, norm=unit_features, inside=lambda h: gamma * h, skip=1.0)
        for layer, state in enumerate(states, start=1):
            if layer in layers:
                curves[law].append(mean_of(state.mean(dim=(-2, -1))))
                cross = (state.mT @ state / width)[:, 0, 1]
                products[law].append(mean_of(cross))
    numbers = {
        "mean_of_features": curves["uniform"][-1],
        "mean_of_m12": products["uniform"][-1],
        "mean_of_m12_one_sided_weights": products["one-sided"][-1],
    }

    def drawn_as(found: dict[str, list[Number]]) -> list[Series]:
        names = {"uniform": "symmetric weights", "one-sided": "one-sided weights"}
        limit = Series("0 (symmetric law)", [layers[0], layers[-1]], [0.0, 0.0], role="paper")
        return [*(points_of(names[law], layers, row) for law, row in found.items()), limit]

    panels = (
        Panel("layer", "mean of a feature over chains", drawn_as(curves), x_scale="log", title="features"),
        Panel("layer", "mean of M₁₂ over chains", drawn_as(products), x_scale="log", title="products of two features"),
    )
    caption = (
        "Every chain starts at one input of positive features. With symmetric weights the sign is forgotten; with "
        "one-sided ones it never is."
    )
    return Outcome(numbers, Picture(panels, caption))


def measure_lemma7(values: Mapping[str, Any], context: Context) -> Outcome:
    """One step of batch norm on random batches, averaged over W and −W, minus δ_F(M), at several widths and γ."""
    generator = context.generator()
    strengths = sorted(values["strengths"], reverse=True)
    smallest = strengths[-1]
    shrinking = (smallest / strengths[0]) ** 2
    numbers: dict[str, Number] = {}
    rests, left, points, curves = [], [], [], []
    for width, draws in zip(values["widths"], values["draws"], strict=True):
        batches = draw_batches(values["batches"], width, generator=generator)
        # batches are weighed by the typical change, not each by its own: that of a batch of rank one is 0
        squares, misfits = {}, []
        for gamma in strengths:
            predicted, found, error = _steps(batches, gamma, draws, generator)
            squares[gamma] = ((found - predicted) ** 2 - error**2) / np.mean(predicted**2)
            misfits.append(_root_of(mean_of(squares[gamma])))
            numbers[f"misfit_at_width_{width}_gamma_{gamma:g}"] = misfits[-1]
        rests.append(scaled(misfits[-1], 1 / (smallest * math.sqrt(width))))
        left.append(scaled(_share_of_means(squares[smallest], squares[strengths[0]]), 1 / shrinking))
        span = DRAWN * error / width**2
        points.append(Series(f"width {width}", predicted / width**2, found / width**2, error=span))
        spread = np.array([[n.value - n.low, n.high - n.value] for n in misfits]).T
        curves.append(Series(f"width {width}", strengths, [n.value for n in misfits], error=spread))
    numbers["largest_misfit_over_gamma_root_d"] = highest(rests)
    numbers["largest_share_left_over_that_of_gamma"] = highest(left)
    ends = [min(np.min(row.x) for row in points), max(np.max(row.x) for row in points)]
    widest = [gamma * math.sqrt(max(values["widths"])) for gamma in strengths]
    panels = (
        Panel(
            "δ_F(M)/d² of lemma 7",
            "measured change of ‖M‖_F² over γ²d²",
            (*points, Series("equal (theory)", ends, ends, "theory")),
            title=f"γ = {smallest:g}",
        ),
        Panel(
            "γ",
            "misfit, as a share of δ_F(M)",
            (*curves, Series("γ√d at the widest", strengths, widest, "bound")),
            title="the O(γ) rest",
        ),
    )
    return Outcome(
        numbers, Picture(panels, "The change in one layer is the printed polynomial of M, more so the smaller γ.")
    )


def _steps(batches: torch.Tensor, gamma: float, draws: int, generator: torch.Generator) -> tuple[Array, Array, Array]:
    """By batch, over γ²: the change of ‖M‖_F² that lemma 7 predicts, the mean over draws, its standard error."""
    rows = []
    for batch in batches:
        shape = (draws, *batch.shape)
        drawn = resolve("uniform").draw(shape, generator=generator, dtype=batch.dtype, device=batch.device)
        before = (batch.mT @ batch / len(batch)).square().sum()
        changes = torch.stack([_square_norm(batch, sign * gamma * drawn) for sign in (1, -1)]).mean(0) - before
        drift = rank2020.lemma_7(batch.numpy(), step=gamma).value
        rows.append((drift, float(changes.mean()), float(changes.std()) / math.sqrt(draws)))
    predicted, found, error = np.array(rows).T / gamma**2
    return predicted, found, error


def _share_of_means(first: Array, second: Array) -> Number:
    """mean(first)/mean(second) of values that come in pairs, with Student's interval by linearization."""
    share, count = first.mean() / second.mean(), len(first)
    residuals = (first - share * second) / second.mean()
    return estimate(share, float(residuals.std(ddof=1)) / math.sqrt(count), samples=count)


def _root_of(square: Number) -> Number:
    """The root of a mean square that may lie below 0 once its noise is taken off."""
    value, low, high = (math.sqrt(max(end, 0.0)) for end in (square.value, square.low, square.high))
    return Number(value, low, high, square.samples)


def _square_norm(batch: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """‖M₊‖_F² after H ↦ BN(H + H stepᵀ), for each draw."""
    (after,) = walk(batch, [step], norm=unit_features, skip=1.0)
    return (after.mT @ after / len(batch)).square().sum(dim=(-2, -1))
