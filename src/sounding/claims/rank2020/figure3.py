"""Figure 3: the rank averaged over depth against the width, and nearly collinear inputs on their way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sounding.chain import simulate
from sounding.claims.claim import Context, Outcome, pick
from sounding.claims.number import Number, highest, lowest, mean_of
from sounding.claims.picture import Panel, Picture, Series, over_widths
from sounding.claims.rank2020.invariant import averages_of, log_slope, measured, name_of, number_of

TOLERANCES = ("1e-5", "1e-7", "1e-9", "1e-12")
"""Shares of the largest singular value above which a direction is counted: the released programs have 1e-9 and what
float32 resolves, about 1e-5 at width 256; float64 resolves directions down to 1e-13."""


def measure_fig3a(values: Mapping[str, Any], context: Context) -> Outcome:
    """The rank averaged over depth against the width, for each residual strength, and at each tolerance if it has one.

    Both rows of the figure share the chains, so both have all measures taken.
    """
    widths, counted = values["widths"], [f"numerical_rank:{share}" for share in TOLERANCES]
    by_gamma = averages_of(values, context, measures=("soft_rank", *counted))
    shown = counted if values["measure"] == "numerical_rank" else ["soft_rank"]
    numbers: dict[str, Number] = {}
    exponents: dict[str, list[Number]] = {measure: [] for measure in shown}
    series = []
    for gamma, found in by_gamma.items():
        for measure in shown:
            exponents[measure].append(log_slope(widths, [average[measure] for average in found]))
        numbers[f"exponent_at_gamma_{name_of(gamma)}"] = lowest(e[-1] for e in exponents.values())
        drawn = [average[shown[len(shown) // 2]] for average in found]
        label = "no skip connection" if math.isinf(gamma) else f"γ = {gamma:g}"
        series.append(measured(label, widths, drawn))
    every = [number for found in exponents.values() for number in found]
    numbers["smallest_exponent"] = lowest(every)
    numbers["largest_exponent"] = highest(every)
    over = [(found[place][m], d) for found in by_gamma.values() for place, d in enumerate(widths) for m in shown]
    shares = [number_of(rank, scale=1 / math.sqrt(d)) for rank, d in over]
    numbers["smallest_rank_over_sqrt_width"] = lowest(shares)
    if len(shown) > 1:
        weakest = by_gamma[min(by_gamma)]
        for measure, share in zip(shown, TOLERANCES, strict=True):
            numbers[f"smallest_exponent_at_tolerance_{share}"] = lowest(exponents[measure])
            for place in (0, -1):
                name = f"rank_at_width_{widths[place]}_tolerance_{share}"
                numbers[name] = number_of(weakest[place][measure])
    series.append(Series("√d (the paper's order)", widths, np.sqrt(widths), role="paper"))
    series.append(Series("d (full rank)", widths, widths, role="bound"))
    panel = over_widths(values["label"], widths, series, y_scale="log")
    return Outcome(numbers, Picture((panel,), values["caption"]))


def measure_fig3b(values: Mapping[str, Any], context: Context) -> Outcome:
    """The ten largest eigenvalues of nearly collinear inputs on their way through batch norm."""
    last = values["depth"]
    layers = [layer for layer in range(1, last + 1) if (layer < 20 and layer % 2) or layer % max(last // 20, 1) == 0]
    # eigenvalues that grow at random spread over orders of magnitude: their logarithms are averaged, run by run
    logs = np.stack([_log_eigenvalues(values, context.generator(run), layers) for run in range(values["runs"])])
    changes = [mean_of(change) for change in (logs[:, -1] - logs[:, 0]).T]
    numbers = {
        "change_of_largest": changes[0],
        "smallest_growth_of_others": lowest(changes[1:]),
    }
    typical = np.sqrt(values["width"] * 10 ** logs.mean(axis=0))
    series = [Series(f"σ{k}", layers, row) for k, row in enumerate(typical.T, start=1)]
    panel = Panel("layer", "singular value of H, geometric mean over runs", series, y_scale="log")
    caption = "Differences of 1e-5 between samples grow to the size of the largest singular value, which falls."
    return Outcome(numbers, Picture((panel,), caption))


def _log_eigenvalues(
    values: Mapping[str, Any], generator: torch.Generator, layers: Sequence[int]
) -> np.ndarray[Any, Any]:
    """(layers, 10): log₁₀ of the largest eigenvalues of one run."""
    top = 10
    found = simulate(
        **pick(values, "width depth residual"),
        batch_size=values["width"],
        runs=1,
        centring=False,
        input=f"collinear:{values['noise']}",
        measures=[f"top_eigenvalues:{top}"],
        profile=True,
        dtype="float64",
        generator=generator,
    ).profile
    return np.log10([[found.value(f"eigenvalue_{k}", layer=at).value for k in range(1, top + 1)] for at in layers])
