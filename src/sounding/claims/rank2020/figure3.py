"""Figure 3: the rank averaged over depth against the width, and nearly collinear inputs on their way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sounding.chain import simulate
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import Number, estimate, mean_of
from sounding.claims.picture import Panel, Picture, Series
from sounding.claims.rank2020.invariant import averages_of, log_slope, measured, name_of, number_of


def measure_fig3a(values: Mapping[str, Any], context: Context) -> Outcome:
    """The rank averaged over depth against the width, for each residual strength."""
    widths, measure = values["widths"], values["measure"]
    by_gamma = averages_of(values, context, measures=(measure,))
    numbers: dict[str, Number] = {}
    series = []
    for gamma, found in by_gamma.items():
        ranks = [average[measure] for average in found]
        numbers[f"exponent_at_gamma_{name_of(gamma)}"] = log_slope(widths, ranks)
        series.append(measured(f"γ = {name_of(gamma)}", widths, ranks))
    over = [(average[measure], d) for found in by_gamma.values() for average, d in zip(found, widths, strict=True)]
    numbers["smallest_exponent"] = min(numbers.values(), key=lambda n: n.low)
    numbers["largest_exponent"] = max(numbers.values(), key=lambda n: n.high)
    numbers["smallest_rank_over_sqrt_width"] = min(
        (number_of(rank, scale=1 / math.sqrt(d)) for rank, d in over), key=lambda n: n.low
    )
    if measure == "numerical_rank":
        numbers["difference_between_precisions"] = _compare_precisions(values, context)
    series.append(Series("√d (the paper's order)", widths, np.sqrt(widths), role="paper"))
    series.append(Series("d (full rank)", widths, widths, role="bound"))
    panel = Panel(
        "width d",
        values["label"],
        series,
        x_scale="log",
        y_scale="log",
        ticks={float(d): str(d) for d in widths},
    )
    return Outcome(numbers, Picture((panel,), values["caption"]))


def _compare_precisions(values: Mapping[str, Any], context: Context) -> Number:
    """The numerical rank that float64 leaves minus the one that float32 leaves, at width 16 and γ = 1."""
    ranks = [
        simulate(
            width=16,
            batch_size=16,
            residual=1.0,
            depth=4000,
            burn_in=3000,
            every=100,
            runs=16,
            weights=values["weights"],
            center=False,
            start="orthogonal",
            measures=["numerical_rank"],
            dtype=dtype,
            generator=context.generator(7),
        ).averages["numerical_rank"]
        for dtype in ("float64", "float32")
    ]
    return estimate(ranks[0].value - ranks[1].value, math.hypot(*(rank.stderr or 0.0 for rank in ranks)))


def measure_fig3b(values: Mapping[str, Any], context: Context) -> Outcome:
    """The ten largest eigenvalues of nearly collinear inputs on their way through batch norm."""
    last = values["depth"]
    layers = [layer for layer in range(1, last + 1) if (layer < 20 and layer % 2) or layer % max(last // 20, 1) == 0]
    # eigenvalues that grow at random spread over orders of magnitude: their logarithms are averaged, run by run
    logs = np.stack([_log_eigenvalues(values, context.generator(run), layers) for run in range(values["runs"])])
    changes = [mean_of(change) for change in (logs[:, -1] - logs[:, 0]).T]
    numbers = {
        "change_of_largest": changes[0],
        "smallest_growth_of_others": min(changes[1:], key=lambda n: n.low),
    }
    typical = np.sqrt(values["width"] * 10 ** logs.mean(axis=0))
    series = [
        Series(f"σ{k}", layers, row, role="theory" if k % 2 else "paper") for k, row in enumerate(typical.T, start=1)
    ]
    panel = Panel("layer", "singular value of H, geometric mean over runs", series, y_scale="log")
    caption = "Differences of 1e-5 between samples grow to the size of the largest singular value, which falls."
    return Outcome(numbers, Picture((panel,), caption))


def _log_eigenvalues(
    values: Mapping[str, Any], generator: torch.Generator, layers: Sequence[int]
) -> np.ndarray[Any, Any]:
    """(layers, 10): log₁₀ of the largest eigenvalues of one run."""
    top = 10
    found = simulate(
        width=values["width"],
        batch_size=values["width"],
        depth=values["depth"],
        runs=1,
        residual=values["residual"],
        center=False,
        start=f"collinear:{values['noise']}",
        measures=[f"top_eigenvalues:{top}"],
        profile=True,
        dtype="float64",
        generator=generator,
    ).profile
    return np.log10([[found.value(f"eigenvalue_{k}", layer=at).value for k in range(1, top + 1)] for at in layers])
