"""Lemmas of rank2020 on single batches, layers and chains, proposition 8, and the full rank of small batches."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch

from sounding import measures
from sounding.activations.activation import Array
from sounding.chain import simulate
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.number import DRAWN, Number, counted, estimate, exact, highest, mean_of, scaled, worst
from sounding.claims.picture import Series, level, points_of, scattered
from sounding.claims.rank2020.invariant import follow
from sounding.claims.walk import draw_normals, unit_features, walk
from sounding.measures import numerical_rank, soft_rank
from sounding.theory.bounds import rank2020
from sounding.weights import draw_uniform, resolve

ROUNDING = 1e-8  # relative: where r reaches the rank they differ by 7e-16
PARTS = 30  # of batches, each with its own extreme, so that the mean of the extremes has an interval


def draw_batches(count: int, size: int, *, generator: torch.Generator) -> torch.Tensor:
    """(count, size, size) batches of unit mean square features, of every rank and every decay of the spectrum."""

    def uniform() -> torch.Tensor:
        return torch.rand(count, 1, 1, generator=generator, dtype=torch.float64)

    def normal() -> torch.Tensor:
        return draw_normals(generator, count, size, size)

    # the k-th direction has the size k^(−3u), and those beyond the rank have none
    index = torch.arange(1, size + 1, dtype=torch.float64)
    kept = index <= 1 + torch.floor(uniform() * size)
    features = (normal() * index ** (-3 * uniform()) * kept) @ normal()
    return features / features.square().mean(-2, keepdim=True).sqrt()


def measure_lemma1(values: Values, context: Context) -> Outcome:
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
    groups = [slice(first, None, PARTS) for first in range(PARTS)]
    numbers = counted("batches_that_break_a_bound", broken) | {
        "largest_r_over_rank": mean_of([over[group].max() for group in groups]),
        "smallest_soft_rank_over_bound": mean_of([margin[group].min() for group in groups]),
    }
    shown = slice(None, None, -(-len(r) // 150))  # at most 150 points
    top = [0.0, float(ranks[shown].max())]
    cases = Series("batches", r[shown], ranks[shown])
    softs = (Series("measured", thresholds, share.min(axis=1)), Series("(1 − τ)²", thresholds, least, role="bound"))
    return present(numbers, scattered(cases, ("rank = r", top)), softs)


def measure_lemma4(values: Values, context: Context) -> Outcome:
    """Many chains from one input of positive entries: what their features remember of its sign, layer by layer."""
    width, depth, gamma = values["width"], values["depth"], values["strength"]
    generator = context.generator()
    start = torch.rand(width, width, generator=generator).add_(0.5)  # every entry is positive
    layers = sorted({int(layer) for layer in np.geomspace(1, depth, 14)})
    curves, products = ({law: list[Number]() for law in ("uniform", "one-sided")} for _ in range(2))
    for law in curves:
        shape = (values["runs"], width, width)
        draw = partial(resolve(law).draw, shape, generator=generator, dtype=start.dtype, device=start.device)
        weights = (draw() for _ in range(depth))
        states = walk(start.expand(shape), weights, norm=unit_features, inside=lambda h: gamma * h, skip=1.0)
        for layer, state in enumerate(states, start=1):
            if layer in layers:
                curves[law].append(mean_of(state.mean(dim=(-2, -1))))
                products[law].append(mean_of((state.mT @ state / width)[:, 0, 1]))
    numbers = {
        "mean_of_features": curves["uniform"][-1],
        "mean_of_m12": products["uniform"][-1],
        "mean_of_m12_one_sided_weights": products["one-sided"][-1],
    }

    def drawn_as(found: dict[str, list[Number]]) -> list[Series]:
        limit = level("0 (symmetric law)", layers, 0.0, "paper")
        return [*(points_of(law, layers, row) for law, row in found.items()), limit]

    return present(numbers, drawn_as(curves), drawn_as(products))


def measure_lemma7(values: Values, context: Context) -> Outcome:
    """One step of batch norm on random batches, averaged over W and −W, minus δ_F(M), at several widths and γ."""
    generator = context.generator()
    strengths = sorted(values["strengths"], reverse=True)
    smallest = strengths[-1]
    shrinking = (smallest / strengths[0]) ** 2  # an O(γ) rest leaves a squared misfit that falls as γ²
    numbers: dict[str, Number] = {}
    rests, left, points, curves = [], [], [], []
    for width, draws in zip(values["widths"], values["draws"], strict=True):
        batches = draw_batches(values["batches"], width, generator=generator)
        # batches are weighed by the typical change, not each by its own: that of a batch of rank one is 0
        squares, misfits = {}, []
        for gamma in strengths:
            predicted, found, error = _steps(batches, gamma, draws, generator)
            # the noise of the mean over draws adds its square
            squares[gamma] = ((found - predicted) ** 2 - error**2) / np.mean(predicted**2)
            square = mean_of(squares[gamma])  # once its noise is taken off it may lie below 0
            value, low, high = (math.sqrt(max(end, 0.0)) for end in (square.value, square.low, square.high))
            misfits.append(Number(value, low, high, square.samples))
            numbers[f"misfit_at_width_{width}_gamma_{gamma:g}"] = misfits[-1]
        rests.append(scaled(misfits[-1], 1 / (smallest * math.sqrt(width))))
        left.append(scaled(_share_of_means(squares[smallest], squares[strengths[0]]), 1 / shrinking))
        span = DRAWN * error / width**2
        points.append(Series(f"width {width}", predicted / width**2, found / width**2, error=span))
        curves.append(points_of(f"width {width}", strengths, misfits))
    numbers["largest_misfit_over_gamma_root_d"] = highest(rests)
    numbers["largest_share_left_over_that_of_gamma"] = highest(left)
    ends = [min(np.min(row.x) for row in points), max(np.max(row.x) for row in points)]
    widest = [gamma * math.sqrt(max(values["widths"])) for gamma in strengths]
    points.append(Series("equal (theory)", ends, ends, "theory"))
    curves.append(Series("γ√d at the widest", strengths, widest, "bound"))
    return present(numbers, points, curves, smallest=smallest)


def _steps(batches: torch.Tensor, gamma: float, draws: int, generator: torch.Generator) -> tuple[Array, Array, Array]:
    """By batch, over γ²: the change of ‖M‖_F² that lemma 7 predicts, the mean over draws, its standard error."""
    rows = []
    for batch in batches:
        shape = (draws, *batch.shape)
        drawn = resolve("uniform").draw(shape, generator=generator, dtype=batch.dtype, device=batch.device)
        before = (batch.mT @ batch / len(batch)).square().sum()
        # W and −W are equally likely: odd orders of γ cancel at once
        both = [next(walk(batch, [sign * gamma * drawn], norm=unit_features, skip=1.0)) for sign in (1, -1)]
        squares = [(after.mT @ after / len(batch)).square().sum(dim=(-2, -1)) for after in both]
        changes = torch.stack(squares).mean(0) - before
        drift = rank2020.lemma_7(batch.numpy(), step=gamma).value
        rows.append((drift, float(changes.mean()), float(changes.std()) / math.sqrt(draws)))
    predicted, found, error = np.array(rows).T / gamma**2
    return predicted, found, error


def _share_of_means(first: Array, second: Array) -> Number:
    """mean(first)/mean(second) of values that come in pairs, with Student's interval by linearization."""
    share, count = first.mean() / second.mean(), len(first)
    residuals = (first - share * second) / second.mean()  # the delta method for a ratio of means
    return estimate(share, float(residuals.std(ddof=1)) / math.sqrt(count), samples=count)


def measure_lemma5(values: Values, context: Context) -> Outcome:
    """The least rank over the layers of chains with γ = 1/(8d), with batch norm and without, float64."""
    least: dict[str, list[float]] = {"batch": [], "none": []}
    for index, width in enumerate(values["widths"]):
        for norm, found in least.items():
            # at γ = 1/(8d) a chain needs some d² layers to change
            profile = follow(
                context.generator(index), width=width, depth=values["depth_over_square"] * width**2, every=8 * width**2,
                runs=values["runs"], residual=1 / (8 * width), weights="uniform", norm=norm, input="orthogonal",
                measures=["numerical_rank"],
            )  # fmt: skip
            found.append(min(profile.value("numerical_rank", layer=layer).value for layer in profile.layers if layer))
    numbers = {
        "least_rank_with_batch_norm": exact(min(least["batch"])),
        "least_rank_without_norm": exact(max(least["none"])),
    }
    return present(numbers, [points_of(norm, values["widths"], map(exact, row)) for norm, row in least.items()])


def measure_lemma6(values: Values, context: Context) -> Outcome:
    """How far M = HHᵀ/N of a batch of rank one moves in a network, and its entries are from ±1."""
    generator, changes, entries = context.generator(), [], []
    for width in values["widths"]:
        column = draw_normals(generator, values["runs"], width, 1)
        start = unit_features(column @ draw_normals(generator, values["runs"], 1, width))
        draw = partial(draw_uniform, (values["runs"], width, width), generator=generator, dtype=start.dtype)
        weights = (draw(device=start.device) for _ in range(values["depth"]))
        first = start.mT @ start / width
        for state in walk(start, weights, norm=unit_features, skip=1 / (8 * width)):
            moment = state.mT @ state / width
            changes.append((moment - first).abs().amax(dim=(-2, -1)))
            entries.append((moment.abs() - 1).abs().amax(dim=(-2, -1)))
    numbers = {
        "largest_change_of_M": worst(torch.cat(changes)),
        "largest_distance_of_entries_from_1": worst(torch.cat(entries)),
    }
    return present(numbers)


def measure_proposition8(values: Values, context: Context) -> Outcome:
    """Two sides of eq. (44) and (45) for matrices whose rows have equal norms: circulant and positive, of trace d."""
    random, off = np.random.default_rng(context.random_seed), []
    for d in values["widths"]:
        for _ in range(values["draws"]):
            wanted = np.abs(np.fft.fft(random.standard_normal(d))) ** 2  # symmetric in frequency, so M is real
            row = np.fft.ifft(wanted / wanted.sum() * d).real  # eigenvalues sum to the trace d
            matrix = np.array([np.roll(row, shift) for shift in range(d)])
            eigen = np.linalg.eigvalsh(matrix)
            square = matrix @ matrix
            # what the proposition says of the cubes, of the rows and of the squares: matrix left, eigenvalues right
            sides = (
                (np.trace(square @ matrix), np.sum(eigen**3)),
                (np.sum(np.diag(square) ** 2), np.sum(eigen**2) ** 2 / d),
                (np.trace(square), np.sum(eigen**2)),
            )
            change = [2 * d**2 - 2 * norm - 8 * cubes + 8 * rows for cubes, rows, norm in zip(*sides, strict=True)]
            off.append(max(abs(a - b) / max(abs(b), 1.0) for a, b in (*sides, change)))
    return present({"largest_deviation": exact(max(off), error=1e-9)})


def measure_full_rank(values: Values, context: Context) -> Outcome:
    """The rank over the batch size for N = c√d samples and, as control, N = d, in deep chains, float64."""
    small, ends = list[float](), list[float]()
    for index, width in enumerate(values["widths"]):
        for place, size in enumerate((round(values["factor"] * math.sqrt(width)), width)):
            found = simulate(
                width=width, batch_size=size, depth=values["depth"], burn_in=values["depth"] // 2, runs=values["runs"],
                residual=values["residual"], centring=False, input="gaussian", every=100,
                measures=["numerical_rank:1e-5"], dtype="float64", generator=context.generator(10 * index + place),
            ).averages["numerical_rank:1e-5"]  # fmt: skip
            (ends if place else small).append(found.value / size)
    numbers = {
        "smallest_share_of_full_rank": exact(min(small)),
        "largest_share_at_as_many_samples_as_features": exact(max(ends)),
    }
    root = "N = √d" if values["factor"] == 1 else f"N = {values['factor']:g}√d"
    series = [points_of(name, values["widths"], map(exact, found)) for name, found in ((root, small), ("N = d", ends))]
    return present(numbers, series)
