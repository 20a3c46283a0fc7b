"""Chapters 4 and 6: normalization does not lower isometry, and Haar weights with batch norm raise it.

Isometry is det(G)^{1/n}/(Tr G/n). Chapter 6 rotates with a Haar matrix before batch norm without centring, n = d.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from scipy.stats import ortho_group

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.number import (
    GROUPS,
    Number,
    exact,
    extreme_of,
    fraction_of,
    lowest,
    mean_of,
    mean_slope_of,
    ratio_of,
    scaled,
    worst,
)
from sounding.claims.picture import Panel, Series, level, points_of, points_over, thin
from sounding.claims.thesis2024.networks import draw_inputs, gaps_over_depth
from sounding.measures import isometry, second_moment
from sounding.theory.bounds.bound import Bound
from sounding.theory.bounds.thesis2024 import corollary_4_4, corollary_4_5, corollary_6_4, theorem_4_3, theorem_6_3
from sounding.weights import draw_orthogonal

ROUNDING = 1e-8  # of ln isometry: the Gram matrix of a batch of condition 1e4 keeps eight of sixteen digits
LARGEST_CONDITION = 1e4  # of the batches that are tried
SHOWN = 80  # batches in a picture


def draw_batches(values: Values, context: Context) -> Iterator[Array]:
    """Batches (samples, features) of every shape in the settings, from nearly orthogonal to nearly dependent ones.

    Norms of samples and of features are spread over up to two powers of ten, and half of the batches have a common
    part that makes the samples correlated. A batch whose smallest singular value drowns in rounding is left out: its
    isometry is not known to enough digits.
    """
    generator = np.random.default_rng(context.random_seed)
    for trial in range(values["trials"]):
        size = int(generator.integers(2, values["largest"] + 1))
        more = int(generator.integers(0, values["largest"] + 1)) if values["shape"] != "square" else 0
        rows, columns = (size, size + more) if values["shape"] != "tall" else (size + more, size)
        batch = generator.standard_normal((rows, columns))
        if trial % 2:
            batch += generator.uniform(0, 3) * generator.standard_normal(columns)
        batch *= 10 ** (generator.uniform(0, 2) * generator.uniform(-1, 1, (rows, 1)))
        batch *= 10 ** (generator.uniform(0, 2) * generator.uniform(-1, 1, (1, columns)))
        if np.linalg.cond(batch) < LARGEST_CONDITION:
            yield batch


def compare(values: Values, context: Context, bound: Callable[..., Any], **options: Any) -> Array:
    """ln(isometry after / the bound's value) of each batch whose bound is positive; −∞ for a degenerate result."""
    every = (bound(batch, **options) for batch in draw_batches(values, context))
    ratios = [found.actual / found.value for found in every if found.value > 0]  # a bound of 0 promises nothing
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(ratios))


def least(logs: Array) -> Number:
    """The smallest ratio of isometry after normalization to the bound, over eight groups of batches."""
    return worst(np.exp(logs), np.min)


def middle(logs: Array) -> Number:
    """The median ratio of such a group."""
    return mean_of([np.exp(np.median(part)) for part in np.array_split(logs, GROUPS)])


def _least_of(lows: Sequence[Number]) -> Number:
    """The least of measured numbers, given that of each group: its interval reaches down to the lowest of theirs."""
    return dataclasses.replace(extreme_of([number.value for number in lows]), low=lowest(lows).low)


def ranked(logs: Array) -> tuple[Series, Series]:
    """Each batch's ratio, sorted, against its rank; the bound is the line 1."""
    kept = np.sort(logs)[thin(len(logs), SHOWN)]
    share = np.linspace(0, 100, len(kept))
    # a degenerate batch has ln 0, which a logarithmic axis cannot show
    return Series("batches", share, np.exp(np.maximum(kept, -12))), level("the bound", [0, 100], 1.0)


def measure_theorem_4_3(values: Values, context: Context) -> Outcome:
    """Isometry after unit-norm projection against the bound."""
    logs = compare(values, context, theorem_4_3)
    equal = np.random.default_rng(context.random_seed).standard_normal((6, 9))
    equal /= np.linalg.norm(equal, axis=1, keepdims=True)
    tight = theorem_4_3(equal)
    numbers = {
        "smallest_ratio": least(logs),
        "ratio_at_equal_norms": exact(float(tight.actual or 0.0) / tight.value, error=ROUNDING / 10),
        "median_ratio": middle(logs),
    }
    return present(numbers, ranked(logs))


def measure_corollary_4_4(values: Values, context: Context) -> Outcome:
    """Isometry before and after layer norm and RMS norm, on random samples."""
    printed, corrected = (compare(values, context, corollary_4_4, version=v) for v in ("printed", "corrected"))
    four = corollary_4_4(np.eye(4), version="printed")
    regular = printed[np.isfinite(printed)]
    numbers = {
        "layer_norm_smallest_ratio": least(printed),
        "layer_norm_smallest_positive_ratio": least(regular),
        "layer_norm_share_made_degenerate": fraction_of(len(printed) - len(regular), len(printed)),
        "layer_norm_share_violating": fraction_of(int(np.sum(printed < -ROUNDING)), len(printed)),
        "layer_norm_isometry_of_unit_vectors": exact(float(four.actual or 0.0), error=1e-12),
        "rms_norm_smallest_ratio": least(corrected),
    }
    return present(numbers, ranked(printed), ranked(corrected))


def measure_corollary_4_5(values: Values, context: Context) -> Outcome:
    """Isometry of the feature covariance after batch norm, with ā over n and over d."""
    printed, corrected = (compare(values, context, corollary_4_5, version=v) for v in ("printed", "corrected"))
    numbers = {
        "printed_smallest_ratio": least(printed),
        "printed_share_violating": fraction_of(int(np.sum(printed < -ROUNDING)), len(printed)),
        "corrected_smallest_ratio": least(corrected),
    }
    return present(numbers, ranked(printed), ranked(corrected))


def measure_lemma_6_2(values: Values, context: Context) -> Outcome:
    """Isometry after a rotation and batch norm against the variance of the rotated features' norms."""
    generator = np.random.default_rng(context.random_seed + 1)

    def rotated(batch: Array) -> Bound:
        rotation = ortho_group.rvs(batch.shape[1], random_state=generator) if batch.shape[1] > 1 else np.eye(1)
        return corollary_4_5(batch @ rotation)

    logs = compare(values, context, rotated)
    return present({"smallest_ratio": least(logs), "median_ratio": middle(logs)}, ranked(logs))


def rotate_many(inputs: Array, *, draws: int, context: Context, offset: int, norm: bool = True) -> Array:
    """Isometry of BN(WX), or of WX, for `draws` Haar matrices W; `inputs` is X as (samples, features)."""
    generator = context.generator(offset, device=context.device)
    batch = torch.as_tensor(inputs, dtype=torch.float64, device=context.device)
    shape = (draws, len(inputs), len(inputs))
    # up to a factor, which isometry does not see
    weights = draw_orthogonal(shape, generator=generator, dtype=torch.float64, device=context.device)
    rotated = batch @ weights.mT
    # batch norm without centring, up to a factor that isometry does not see
    features = rotated / rotated.norm(dim=1, keepdim=True) if norm else rotated
    return np.asarray(isometry(second_moment(features), tolerance=0.0).cpu().numpy())


def haar_inputs(values: Values, context: Context, group: int) -> Iterator[tuple[int, Array]]:
    """Batch-normalized square inputs X (features of norm 1) for each width, from near isometry to near dependence."""
    generator = np.random.default_rng([context.random_seed, group])
    for width in values["widths"]:
        for noise in values["noises"]:
            if noise == "gaussian":
                batch = generator.standard_normal((width, width))
            elif noise == "collinear":
                batch = generator.standard_normal(width) + 0.1 * generator.standard_normal((width, width))
            else:
                batch = np.eye(width) + noise * generator.standard_normal((width, width)) / np.sqrt(width)
            yield width, batch / np.linalg.norm(batch, axis=0)


def measure_theorem_6_3(values: Values, context: Context) -> Outcome:
    """E I(BN(WX)) by Monte Carlo against the bound, and the eigenvalues of XXᵀ."""
    lows, results, largest, widest = [], [], [], []
    for group in range(GROUPS):
        ratios, eigenvalues = [], []
        for index, (width, batch) in enumerate(haar_inputs(values, context, group)):
            bound = theorem_6_3(batch)
            after = rotate_many(batch, draws=values["draws"], context=context, offset=1000 * group + index)
            ratios.append(mean_of(after / bound.value))
            eigenvalues.append(np.linalg.eigvalsh(batch.T @ batch))
            if group == 0:
                results.append((width, bound.values["isometry_before"], ratios[-1], 1 / bound.values["factor"]))
        lows.append(lowest(ratios))
        largest.append(max(e.max() for e in eigenvalues))
        widest.append(max(e.max() / len(e) for e in eigenvalues))
    # isometric already: nothing to gain
    identity = rotate_many(np.eye(values["widths"][0]), draws=200, context=context, offset=99_999)
    numbers = {
        "smallest_ratio": _least_of(lows),
        "orthogonal_input_isometry": exact(float(identity.min()), error=1e-10),
        "largest_eigenvalue": extreme_of(largest),
        "largest_eigenvalue_over_width": extreme_of(widest),
    }
    series = []
    for width in values["widths"]:
        chosen = sorted((row for row in results if row[0] == width), key=lambda row: row[1])
        x = [row[1] for row in chosen]
        gains = [row[2].value * row[3] - 1 for row in chosen]
        errors = [(row[2].high - row[2].value) * row[3] for row in chosen]
        series.append(Series(f"d = {width}", x, gains, error=errors))
        series.append(Series(f"d = {width} (bound)", x, [row[3] - 1 for row in chosen], role="bound"))
    return present(numbers, series)


def measure_corollary_6_4(values: Values, context: Context) -> Outcome:
    """E ψ(WX) and E ψ(BN(WX)) against ψ(X) + ln(1 − Σ(λ − 1)²/(2d²(d + 2)))."""
    lows, highs = [], []
    series: dict[int, list[tuple[float, Number, Number]]] = {}
    for group in range(GROUPS):
        plain, normed = [], []
        for index, (width, batch) in enumerate(haar_inputs(values, context, group)):
            bound = corollary_6_4(batch)
            gap, offset = bound.values["isometry_gap"], 1000 * group + index
            after = rotate_many(batch, draws=values["draws"], context=context, offset=offset)
            before = rotate_many(batch, draws=20, context=context, offset=offset, norm=False)
            normed.append(mean_of((gap + np.log(after)) / (gap - bound.value)))
            plain.append(mean_of((gap + np.log(before)) / (gap - bound.value)))
            if group == 0:
                series.setdefault(width, []).append((gap, normed[-1], plain[-1]))
        lows.append(lowest(normed))
        highs.append(max(number.value for number in plain))
    numbers = {
        "fall_without_batch_norm_over_promised": extreme_of(highs),
        "fall_with_batch_norm_over_promised": _least_of(lows),
    }
    drawn: list[Series] = []
    gaps: list[float] = []
    for width, rows in series.items():
        x, *found = zip(*rows, strict=True)
        gaps += x
        drawn += [points_of(f"{name}, d = {width}", x, row) for name, row in zip(("BN(WX)", "WX"), found, strict=True)]
    return present(numbers, [*drawn, level("promised", [min(gaps), max(gaps)], 1.0)])


RELEASED_CONSTANT = 0.015  # C of Theorem 6.1 in the program behind the figure, set by hand
PROVED_CONSTANT = 32.0  # C of its proof
RESOLVED_GAP = 1e-11  # below this a mean gap is rounding


def measure_gap_decay(values: Values, context: Context) -> Outcome:
    """Figure 6.1: the isometry gap over depth from (1 − f)I + f·uvᵀ."""
    depth, share, runs = values["depth"], values["share"], values["runs"]
    layers = np.arange(depth + 1)
    numbers: dict[str, Number] = {}
    series, rates = [], []
    for index, width in enumerate(values["widths"]):
        generator = context.generator(100 + index, device=context.device)
        pair = torch.rand(2, runs, width, generator=generator, dtype=torch.float64, device=context.device)
        unit = torch.eye(width, dtype=torch.float64, device=context.device)
        start = (1 - share) * unit + share * pair[0].unsqueeze(-1) * pair[1].unsqueeze(-2)
        gaps = gaps_over_depth(start, depth=depth, context=context, offset=index)
        logs = np.log(gaps)  # looked at from layer 5 on: the first layers are the start's
        half = depth // 2
        late = slice(half, depth + 1)
        numbers[f"slope_{width}"] = mean_slope_of(layers[5:], logs[:, 5:])
        by_run = (logs[:, -1] - logs[:, half]) / (depth - half) / ((logs[:, half] - logs[:, 5]) / (half - 5))
        numbers[f"late_over_early_slope_{width}"] = mean_of(by_run)
        limit = math.log(width / (width + 2))
        numbers[f"slope_over_theory_{width}"] = scaled(mean_slope_of(layers[late], logs[:, late]), 1 / limit)
        rates.append(-(logs[:, -1] - logs[:, 5]) / (depth - 5))  # as a positive number
        shown = thin(depth + 1, 21)
        first = float(gaps[:, 0].mean())
        line = gaps[:, 5].mean() * (width / (width + 2)) ** (shown - 5.0)
        stated = first * np.exp(-shown / (RELEASED_CONSTANT * width**2 * (1 + width * first)))
        series += [
            points_over(f"d = {width}", shown, gaps[:, shown]),
            Series(f"d = {width} (d/(d + 2) per layer)", shown, line, role="theory"),
            Series(f"d = {width} (Theorem 6.1, C = {RELEASED_CONSTANT})", shown, stated, role="paper"),
        ]
    numbers["rate_difference"] = mean_of(rates[0] - rates[-1])
    narrow, wide = (numbers[f"slope_{width}"] for width in (values["widths"][0], values["widths"][-1]))
    numbers["ratio_of_rates"] = ratio_of(scaled(narrow, -1.0), scaled(wide, -1.0))
    return present(numbers, series, RELEASED_CONSTANT=RELEASED_CONSTANT)


def needed_constant(gaps: Array, width: int) -> tuple[float, float]:
    """The least C that serves Theorem 6.1 at every layer of one input's networks (runs, 1 + depth), and its upper end.

    Layers count as long as the mean gap is above rounding. Where the interval of that mean reaches ψ(X_0) the upper end
    is infinite.
    """
    first = float(gaps[0, 0])
    scale = width**2 * (1 + width * first)  # k of the theorem is C times this
    value = high = 0.0
    # E ψ(X_{ℓ+1}) ≤ ψ(X_0) exp(−ℓ/k): gaps[:, ℓ + 1] belongs to ℓ
    for layer in range(1, gaps.shape[1] - 1):
        mean = mean_of(gaps[:, layer + 1])
        if mean.value < RESOLVED_GAP:
            break
        value = max(value, layer / math.log(first / mean.value) / scale)
        high = max(high, layer / math.log(first / mean.high) / scale if mean.high < first else math.inf)
    return value, high


def measure_theorem_6_1(values: Values, context: Context) -> Outcome:
    """The constant C that Theorem 6.1 needs for each of many inputs, by the mean over networks of its own."""
    runs = values["runs"]
    each = GROUPS * values["inputs_per_group"]
    needed: dict[int, list[Array]] = {}
    series: dict[int, list[Series]] = {width: [] for width in values["widths"]}
    for index, (width, kind) in enumerate(product(values["widths"], values["kinds"])):
        depth = values["depth_at_0"] + values["depth_per_width"] * width
        inputs = draw_inputs(kind, width, each, generator=context.generator(100 + index, device=context.device))
        gaps = gaps_over_depth(inputs.repeat_interleave(runs, dim=0), depth=depth, context=context, offset=index)
        by_input = gaps.reshape(each, runs, depth + 1)
        needed.setdefault(width, []).append(np.array([needed_constant(one, width) for one in by_input]))
        means = by_input.mean(1)
        shown = thin(int(np.sum(np.all(means >= RESOLVED_GAP, axis=0))), 9)
        series[width].append(points_over(kind, shown, means[:, shown] / means[:, :1]))
        if index == 0:
            scale = width**2 * (1 + width * np.median(means[:, 0]))
            bound = np.exp(-np.maximum(shown - 1, 0) / (PROVED_CONSTANT * scale))
            promised = Series("Theorem 6.1, C = 32", shown, bound, role="bound")
    series[values["widths"][0]].append(promised)
    numbers = {"needed_constant": largest_over_inputs([part for parts in needed.values() for part in parts])}
    numbers |= {f"needed_constant_{width}": largest_over_inputs(parts) for width, parts in needed.items()}
    panels = [Panel(series=drawn, title=f"d = {width}") for width, drawn in series.items()]
    return present(numbers, *panels, each=each)


def largest_over_inputs(parts: list[Array]) -> Number:
    """The largest constant of a group of inputs, one eighth of each part (inputs, 2); up to the largest upper end."""
    groups = [np.concatenate(group) for group in zip(*(np.array_split(part, GROUPS) for part in parts), strict=True)]
    middle = extreme_of([group[:, 0].max() for group in groups])
    return dataclasses.replace(middle, high=max(float(group[:, 1].max()) for group in groups))
