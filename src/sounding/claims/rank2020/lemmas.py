"""Lemmas of rank2020 on single batches and single layers: rank bounds, symmetry, one step of batch norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sounding.claims.claim import Claim, Context, Expectation, Outcome, Setting
from sounding.claims.number import DRAWN, Number, exact, fraction_of, mean_of
from sounding.claims.picture import Panel, Picture, Series

if TYPE_CHECKING:
    import torch

ROUNDING = 1e-8
GROUPS = 30
LINES = 8


def draw_batches(count: int, size: int, *, generator: torch.Generator) -> torch.Tensor:
    """(count, size, size) batches of unit mean square features, of every rank and every decay of the spectrum."""
    import torch

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
    import torch

    from sounding.measures import numerical_rank, participation_ratio, soft_rank

    generator = context.generator()
    thresholds = values["thresholds"]
    ratio, rank, soft = [], [], []
    for size in range(2, values["largest"] + 1):
        batches = draw_batches(values["batches"], size, generator=generator)
        ratio.append(participation_ratio(batches))
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
    import torch

    from sounding.weights import resolve

    width, depth, gamma = values["width"], values["depth"], values["strength"]
    generator = context.generator()
    start = torch.rand(width, width, generator=generator).add_(0.5)
    layers = sorted({int(layer) for layer in np.geomspace(1, depth, 14)})
    curves: dict[str, list[Number]] = {"uniform": [], "one-sided": []}
    products: dict[str, list[Number]] = {"uniform": [], "one-sided": []}
    for law in curves:
        state = start.expand(values["runs"], width, width)
        for layer in range(1, depth + 1):
            drawn = resolve(law).draw(
                tuple(state.shape), generator=generator, dtype=state.dtype, device=torch.device("cpu")
            )
            state = state + gamma * state @ drawn.mT
            state = state / state.square().mean(-2, keepdim=True).sqrt()
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
        return [
            Series(names[law], layers, [n.value for n in row], error=[n.high - n.value for n in row])
            for law, row in found.items()
        ] + [Series("0 (symmetric law)", [layers[0], layers[-1]], [0.0, 0.0], role="paper")]

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
    """One step of batch norm on random batches, averaged over W and −W, beside δ_F(M)."""
    import torch

    from sounding.theory.bounds import rank2020
    from sounding.weights import resolve

    generator = context.generator()
    batches = draw_batches(values["batches"], values["width"], generator=generator)
    slopes: dict[float, Number] = {}
    series = []
    for gamma in values["strengths"]:
        predicted, found, errors = [], [], []
        for batch in batches:
            drift = rank2020.lemma_7(batch.numpy(), step=gamma).value / gamma**2
            shape = (values["draws"], values["width"], values["width"])
            drawn = resolve("uniform").draw(shape, generator=generator, dtype=batch.dtype, device=batch.device)
            before = float((batch.mT @ batch / len(batch)).square().sum())
            changes = torch.stack([_square_norm(batch, sign * gamma * drawn) for sign in (1, -1)]).mean(0) - before
            predicted.append(drift)
            found.append(float(changes.mean()) / gamma**2)
            errors.append(float(changes.std()) / math.sqrt(len(changes)) / gamma**2)
        # the O(γ) term differs from batch to batch: slopes of groups of batches show by how much
        parts = [np.polyfit(predicted[first::LINES], found[first::LINES], 1)[0] for first in range(LINES)]
        slopes[gamma] = mean_of(parts)
        if gamma == min(values["strengths"]):
            spread = DRAWN * np.array(errors)
            series = [
                Series("one layer, mean over W", predicted, found, error=spread),
                Series("equal (theory)", [min(predicted), max(predicted)], [min(predicted), max(predicted)], "theory"),
            ]
    smallest = min(slopes)
    numbers = {f"slope_at_gamma_{gamma:g}": number for gamma, number in slopes.items()}
    numbers["slope_at_smallest_gamma"] = slopes[smallest]
    steps = list(slopes)
    panels = (
        Panel("δ_F(M) of lemma 7", "measured change of ‖M‖_F² over γ²", series, title=f"γ = {smallest:g}"),
        Panel(
            "γ",
            "measured over predicted (slope)",
            (
                Series(
                    "measured",
                    steps,
                    [n.value for n in slopes.values()],
                    error=[n.high - n.value for n in slopes.values()],
                ),
                Series("1 (theory)", [min(steps), max(steps)], [1.0, 1.0], "theory"),
            ),
            x_scale="log",
            title="the O(γ) term",
        ),
    )
    return Outcome(
        numbers, Picture(panels, "The change in one layer is the printed polynomial of M, more so the smaller γ.")
    )


def _square_norm(batch: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """‖M₊‖_F² after H ↦ BN(H + H stepᵀ), for each draw."""
    after = batch + batch @ step.mT
    after = after / after.square().mean(-2, keepdim=True).sqrt()
    return (after.mT @ after / len(batch)).square().sum(dim=(-2, -1))


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="rank2020-lemma1",
        seed="rank2020",
        place="lemma 1",
        kind="theorem",
        statement="rank(H) and, for features of unit mean square, the soft rank are bounded below by r(H): "
        "rank(H) ≥ r(H) and rank_τ(H) ≥ (1 − τ)² r(H).",
        expectations=(
            Expectation("batches_that_break_a_bound", "none, at any τ", high=0.0),
            Expectation("share_of_batches_that_break_a_bound", "nor would more of them", high=0.01),
            Expectation("largest_r_over_rank", "rank ≥ r, in each of 30 groups on average", high=1.0 + ROUNDING),
            Expectation("smallest_soft_rank_over_bound", "soft rank ≥ (1 − τ)² r, likewise", low=1.0 - ROUNDING),
        ),
        settings={
            "quick": Setting({"batches": 100, "largest": 24, "thresholds": [0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98]}),
            "standard": Setting({"batches": 400, "largest": 64, "thresholds": [0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98]}),
        },
        measure=measure_lemma1,
        paper="a lemma; no experiment",
        note="The second part needs features of unit mean square, which batch norm gives: 0.1·I₃ has soft rank "
        "0, r = 3.",
    ),
    Claim(
        id="rank2020-lemma4",
        seed="rank2020",
        place="lemma 4",
        kind="theorem",
        statement="Under a unique invariant law, symmetric weights make each feature as likely as its negative, "
        "so that "
        "E M_ij = 0 for i ≠ j.",
        expectations=(
            Expectation("mean_of_features", "0: the sign of the input is forgotten", low=-0.03, high=0.03),
            Expectation("mean_of_m12", "0 for two different features", low=-0.03, high=0.03),
            Expectation("mean_of_m12_one_sided_weights", "without the symmetry it is not 0", low=0.1),
        ),
        settings={"quick": Setting({"width": 8, "strength": 0.3, "depth": 300, "runs": 20000})},
        measure=measure_lemma4,
        paper="a lemma; no experiment",
        note="Uniqueness matters: from an input of rank one M stays ±1 for ever (lemma 6), and its mean with it.",
    ),
    Claim(
        id="rank2020-lemma7",
        seed="rank2020",
        place="lemma 7",
        kind="theorem",
        statement="In one layer E‖M₊‖_F² − ‖M‖_F² = γ²(2d² − 2‖M‖_F² − 8 Tr M³ + 8 Tr diag(M²)²) + O(γ³), for bounded "
        "symmetric weights of unit variance.",
        expectations=(Expectation("slope_at_smallest_gamma", "measured over predicted is 1", low=0.97, high=1.03),),
        settings={"quick": Setting({"width": 8, "batches": 40, "draws": 8000, "strengths": [0.1, 0.03, 0.01]})},
        measure=measure_lemma7,
        paper="a lemma; no experiment",
    ),
)
