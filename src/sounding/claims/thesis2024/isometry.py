"""Chapter 4 and the one-layer statements of chapter 6: normalization does not lower isometry.

Isometry is det(G)^{1/n}/(Tr G/n). Chapter 6 rotates with a Haar matrix before batch norm without centring, n = d.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import ortho_group

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import GROUPS, Number, exact, extreme_of, fraction_of, lowest, mean_of
from sounding.claims.picture import Panel, Picture, Series, points_of
from sounding.claims.thesis2024.gram_paths import thin
from sounding.measures import isometry, second_moment
from sounding.theory.bounds.bound import Bound
from sounding.theory.bounds.thesis2024 import corollary_4_4, corollary_4_5, corollary_6_4, theorem_4_3, theorem_6_3
from sounding.weights import draw_orthogonal

ROUNDING = 1e-8  # of ln isometry: the Gram matrix of a batch of condition 1e4 keeps eight of sixteen digits
LARGEST_CONDITION = 1e4  # of the batches that are tried
SHOWN = 80  # batches in a picture


def draw_batches(values: Mapping[str, Any], context: Context) -> Iterator[Array]:
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


def compare(values: Mapping[str, Any], context: Context, bound: Callable[..., Any], **options: Any) -> Array:
    """ln(isometry after / the bound's value) of each batch whose bound is positive; −∞ for a degenerate result."""
    ratios = []
    for batch in draw_batches(values, context):
        found = bound(batch, **options)
        if found.value > 0:
            ratios.append(found.actual / found.value)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(ratios))


def least(logs: Array) -> Number:
    """The smallest ratio of isometry after normalization to the bound, over eight groups of batches."""
    return extreme_of([np.exp(part.min()) for part in np.array_split(logs, GROUPS)])


def middle(logs: Array) -> Number:
    """The median ratio of such a group."""
    return mean_of([np.exp(np.median(part)) for part in np.array_split(logs, GROUPS)])


def _least_of(lows: Sequence[Number]) -> Number:
    """The least of measured numbers, given that of each group: its interval reaches down to the lowest of theirs."""
    return dataclasses.replace(extreme_of([number.value for number in lows]), low=lowest(lows).low)


def histogram(panels: Mapping[str, Array], caption: str) -> Picture:
    """Each batch's ratio, sorted, against its rank; the bound is the line 1."""
    drawn = []
    for title, logs in panels.items():
        kept = np.sort(logs)[thin(len(logs), SHOWN)]
        share = np.linspace(0, 100, len(kept))
        series = (
            Series("batches", share, np.exp(np.maximum(kept, -12))),
            Series("the bound", [0, 100], [1.0, 1.0], role="bound"),
        )
        drawn.append(Panel("share of batches (%)", "isometry after / bound", series, title=title, y_scale="log"))
    return Picture(drawn, caption)


def measure_theorem_4_3(values: Mapping[str, Any], context: Context) -> Outcome:
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
    caption = "Batches sorted by their ratio. None lies below the bound; at equal norms the bound is reached."
    return Outcome(numbers, histogram({"projection onto the sphere": logs}, caption))


def measure_corollary_4_4(values: Mapping[str, Any], context: Context) -> Outcome:
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
    caption = "Layer norm centres each sample, which can lower isometry (below 1); RMS norm cannot."
    return Outcome(numbers, histogram({"layer norm": printed, "RMS norm": corrected}, caption))


def measure_corollary_4_5(values: Mapping[str, Any], context: Context) -> Outcome:
    """Isometry of the feature covariance after batch norm, with ā over n and over d."""
    printed, corrected = (compare(values, context, corollary_4_5, version=v) for v in ("printed", "corrected"))
    numbers = {
        "printed_smallest_ratio": least(printed),
        "printed_share_violating": fraction_of(int(np.sum(printed < -ROUNDING)), len(printed)),
        "corrected_smallest_ratio": least(corrected),
    }
    caption = "With ā = (1/n)Σa the bound exceeds the isometry of many batches; with ā = (1/d)Σa of none."
    return Outcome(numbers, histogram({"ā = (1/n) Σ a": printed, "ā = (1/d) Σ a": corrected}, caption))


def measure_lemma_6_2(values: Mapping[str, Any], context: Context) -> Outcome:
    """Isometry after a rotation and batch norm against the variance of the rotated features' norms."""
    generator = np.random.default_rng(context.random_seed + 1)

    def rotated(batch: Array) -> Bound:
        rotation = ortho_group.rvs(batch.shape[1], random_state=generator) if batch.shape[1] > 1 else np.eye(1)
        return corollary_4_5(batch @ rotation)

    logs = compare(values, context, rotated)
    numbers = {"smallest_ratio": least(logs), "median_ratio": middle(logs)}
    caption = "Square batches, each under a rotation of its own, sorted by their ratio; the lemma holds for each."
    return Outcome(numbers, histogram({"rotation, then batch norm": logs}, caption))


def rotate_many(inputs: Array, *, draws: int, context: Context, offset: int, norm: bool = True) -> Array:
    """Isometry of BN(WX), or of WX, for `draws` Haar matrices W; `inputs` is X as (samples, features)."""
    generator = context.generator(offset, device=context.device)
    batch = torch.as_tensor(inputs, dtype=torch.float64, device=context.device)
    shape = (draws, len(inputs), len(inputs))
    weights = draw_orthogonal(shape, generator=generator, dtype=torch.float64, device=context.device)
    rotated = batch @ weights.mT
    features = rotated / rotated.norm(dim=1, keepdim=True) if norm else rotated
    return np.asarray(isometry(second_moment(features), tolerance=0.0).cpu().numpy())


def haar_inputs(values: Mapping[str, Any], context: Context, group: int) -> Iterator[tuple[int, float, Array]]:
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
            yield width, np.inf if isinstance(noise, str) else noise, batch / np.linalg.norm(batch, axis=0)


def measure_theorem_6_3(values: Mapping[str, Any], context: Context) -> Outcome:
    """E I(BN(WX)) by Monte Carlo against the bound, and the eigenvalues of XXᵀ."""
    lows, results, largest, widest = [], [], [], []
    for group in range(GROUPS):
        ratios, eigenvalues = [], []
        for index, (width, _, batch) in enumerate(haar_inputs(values, context, group)):
            bound = theorem_6_3(batch)
            offset = 1000 * group + index
            after = rotate_many(batch, draws=values["draws"], context=context, offset=offset)
            ratios.append(mean_of(after / bound.value))
            eigenvalues.append(np.linalg.eigvalsh(batch.T @ batch))
            if group == 0:
                results.append((width, bound.values["isometry_before"], ratios[-1], 1 / bound.values["factor"]))
        lows.append(lowest(ratios))
        largest.append(max(e.max() for e in eigenvalues))
        widest.append(max(e.max() / len(e) for e in eigenvalues))
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
    panel = Panel("isometry of X", "E I(BN(WX))/I(X) − 1", series, y_scale="log")
    caption = "Points: the gain of one Haar layer in isometry; dotted: the least gain the theorem promises."
    return Outcome(numbers, Picture((panel,), caption))


def measure_corollary_6_4(values: Mapping[str, Any], context: Context) -> Outcome:
    """E ψ(WX) and E ψ(BN(WX)) against ψ(X) + ln(1 − Σ(λ − 1)²/(2d²(d + 2)))."""
    lows, highs = [], []
    series: dict[int, list[tuple[float, Number, Number]]] = {}
    for group in range(GROUPS):
        plain, normed = [], []
        for index, (width, _, batch) in enumerate(haar_inputs(values, context, group)):
            bound = corollary_6_4(batch)
            promised = bound.values["isometry_gap"] - bound.value
            offset = 1000 * group + index
            after = rotate_many(batch, draws=values["draws"], context=context, offset=offset)
            before = rotate_many(batch, draws=20, context=context, offset=offset, norm=False)
            normed.append(mean_of((bound.values["isometry_gap"] + np.log(after)) / promised))
            plain.append(mean_of((bound.values["isometry_gap"] + np.log(before)) / promised))
            if group == 0:
                series.setdefault(width, []).append((bound.values["isometry_gap"], normed[-1], plain[-1]))
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
    drawn.append(Series("promised", [min(gaps), max(gaps)], [1.0, 1.0], role="bound"))
    panel = Panel("isometry gap of X", "fall of the gap over the promised one", drawn, x_scale="log", y_scale="symlog")
    caption = "A rotation alone leaves the gap as it is (fall 0); with batch norm it falls by more than promised (1)."
    return Outcome(numbers, Picture((panel,), caption))
