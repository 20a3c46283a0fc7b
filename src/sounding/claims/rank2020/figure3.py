"""Figure 3: the rank averaged over depth against the width, and nearly collinear inputs on their way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sounding.claims.claim import Claim, Context, Correction, Expectation, Outcome, Scale, Setting
from sounding.claims.number import Number, estimate, mean_of
from sounding.claims.picture import Panel, Picture, Series
from sounding.claims.rank2020.invariant import averages_of, log_slope, measured, name_of, number_of

if TYPE_CHECKING:
    import torch


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
    from sounding.chain import simulate

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
    from sounding.chain import simulate

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


def _fig3a_settings(measure: str, label: str, caption: str, *, dtype_note: str) -> dict[Scale, Setting]:
    common = {"measure": measure, "label": label, "caption": caption, "weights": "gaussian"}
    quick = {"widths": [8, 16, 32, 64], "depth": 4000, "burn_in": 2000, "every": 10, "runs": 4}
    full = {"widths": [8, 16, 32, 64, 128, 256], "depth": 30000, "burn_in": 20000, "every": 10, "runs": 100}
    if measure == "numerical_rank":  # singular values of 100 matrices at a time are what such a look costs
        full["every"] = 200
    return {
        "quick": Setting(
            {**common, **quick, "residuals": [0.1, 1.0, math.inf]},
            "widths up to 64, three values of γ, 8000 chain-layers each after the burn-in" + dtype_note,
        ),
        "paper": Setting({**common, **full, "residuals": [0.01, 0.1, 1.0, math.inf]}, dtype_note.removeprefix("; ")),
    }


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="rank2020-fig3a",
        seed="rank2020",
        place="figure 3a (soft rank, as captioned)",
        kind="figure",
        statement="The soft rank at ½, averaged over depth, grows at least like √d, for every γ including no skip "
        "connection.",
        expectations=(
            Expectation("smallest_exponent", "order √d or more for every γ", low=0.45),
            Expectation("largest_exponent", "less than full rank, which has exponent 1", high=0.9),
            Expectation(
                "smallest_rank_over_sqrt_width", "a constant of order 1: at least the theorem's (1 − τ)²", low=0.25
            ),
        ),
        settings=_fig3a_settings(
            "soft_rank",
            "mean soft rank at ½ over depth",
            "At every γ the soft rank is close to √d and grows a little faster, far below full rank.",
            dtype_note="",
        ),
        measure=measure_fig3a,
        paper="d = N ∈ {8, 16, …, 256}, Gaussian data and weights, several γ and γ = ∞, L = 10⁶",
        released="M₀ = I, γ = 0.01, one sample every 10 000 layers after 1000, no centring; the plotted rank mixes "
        "torch.matrix_rank and #{σ > 1e-9}, see rank2020-fig3a-rank",
    ),
    Claim(
        id="rank2020-fig3a-rank",
        seed="rank2020",
        place="figure 3a (the rank that was plotted)",
        kind="figure",
        statement="The numerical rank, averaged over depth, grows at least like √d, for every γ.",
        expectations=(
            Expectation("smallest_exponent", "order √d or more for every γ", low=0.45),
            Expectation("smallest_rank_over_sqrt_width", "at least √d", low=1.0),
        ),
        settings=_fig3a_settings(
            "numerical_rank",
            "mean numerical rank over depth",
            "Between √d and 3√d directions are left at every γ, the others have fallen below rounding: from width 32 "
            "on that is less than half of full rank.",
            dtype_note="",
        ),
        measure=measure_fig3a,
        correction=Correction(
            "The rank is at least √d at every γ, and grows like √d or faster where the chain has forgotten its start. "
            "At γ = 0.01 that takes more than 30 000 layers: the narrow networks still hold directions that they lose "
            "later, which flattens the curve.",
            (
                Expectation("smallest_rank_over_sqrt_width", "at least √d", low=1.0),
                *(
                    Expectation(f"exponent_at_gamma_{gamma}", f"order √d or more at γ = {gamma}", low=0.45)
                    for gamma in ("0.1", "1", "inf")
                ),
            ),
        ),
        paper="as figure 3a; the caption says soft rank",
        released="torch.matrix_rank for some widths and #{σ > 1e-9} for others",
        note="In exact arithmetic every state has rank d, since the weights are invertible almost surely. The plotted "
        "number counts the directions that have not fallen below rounding. It is no artefact of precision: the others "
        "fall exponentially, and float32 and float64 leave the same number (difference_between_precisions). So the "
        "invariant law that a long chain shows is carried by matrices of rank 1.4 to 1.9 √d. At γ = 0.01 and width 8 "
        "eight chains have 7.2 ± 0.1 (standard error) over layers 20 000 to 30 000 and 5.5 ± 0.05 over the last third "
        "of 300 000, as of a million (CPU, simulate with these settings).",
    ),
    Claim(
        id="rank2020-fig3b",
        seed="rank2020",
        place="figure 3b",
        kind="figure",
        statement="From nearly collinear inputs, batch norm quickly amplifies small variations and reduces the largest "
        "singular value.",
        expectations=(
            Expectation("change_of_largest", "log₁₀ of the largest eigenvalue falls", high=-0.1),
            Expectation("smallest_growth_of_others", "each of the next nine grows a thousandfold at least", low=3.0),
        ),
        settings={
            "quick": Setting({"width": 50, "depth": 100, "runs": 24, "residual": 1.0, "noise": 1e-5}),
        },
        measure=measure_fig3b,
        paper="top ten singular values over depth, nearly collinear inputs",
        released="d = 50, L = 100, effective γ = 1, a constant matrix plus 1e-5 noise",
    ),
)
