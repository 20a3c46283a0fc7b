"""The invariant law of linear batch-norm networks: its rank, its regularity constant, its Frobenius norm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sounding.chain import simulate_many
from sounding.claims.claim import Context, Outcome, pick
from sounding.claims.number import Number, estimate, highest, lowest
from sounding.claims.picture import Panel, Picture, Series, over_widths, points_of
from sounding.claims.share import share
from sounding.profile import Estimate
from sounding.theory.bounds import rank2020

GROUPS = 32
"""Behind a simulation's standard error there are so many runs or more, or about so many batches of layers."""
MEASURES = ("participation_ratio", "soft_rank", "frobenius_squared", "regularity")


@share("measure", "label", "caption")
def averages_of(
    values: Mapping[str, Any], context: Context, *, measures: tuple[str, ...] = MEASURES
) -> dict[float, list[Mapping[str, Estimate]]]:
    """By residual strength, the averages at each width of H ↦ BN(H + γWH); figures that show one experiment share it.

    The chains start at M₀ = I, with as many samples as features.
    """
    found = simulate_many(
        **pick(values, "widths residuals depth burn_in every runs weights"),
        dtype=values.get("dtype", "float32"),
        centring=False,
        input="orthogonal",
        measures=measures,
        device=context.device,
        generator=context.generator(),
    )
    count = len(values["residuals"])
    each = enumerate(values["residuals"])
    return {gamma: [simulation.averages for simulation in found[index::count]] for index, gamma in each}


def number_of(average: Estimate, *, scale: float = 1.0) -> Number:
    """The average of a simulation, times a known factor."""
    return estimate(scale * average.value, abs(scale) * (average.stderr or 0.0), samples=GROUPS)


def share_of(average: Estimate, reference: float, *, relative_error: float = 0.0) -> Number:
    """average / reference, where the reference was measured too, with that relative standard error."""
    value = average.value / reference
    error = abs(value) * math.hypot((average.stderr or 0.0) / average.value, relative_error)
    return estimate(value, error, samples=GROUPS)


def relative_error(average: Estimate) -> float:
    """The standard error as a share of the value."""
    return (average.stderr or 0.0) / average.value


def error_of_bound(regularity: Estimate) -> float:
    """The relative error that α leaves in a bound: both bounds grow at most like √(1 − α)."""
    return 0.5 * (regularity.stderr or 0.0) / (1 - regularity.value)


def log_slope(widths: Sequence[int], averages: Sequence[Estimate]) -> Number:
    """The mean exponent of a power law, from the narrowest width to the widest."""
    ends, span = (averages[0], averages[-1]), math.log(widths[-1] / widths[0])
    error = math.hypot(*(relative_error(average) for average in ends))
    return estimate(math.log(ends[1].value / ends[0].value) / span, error / span, samples=GROUPS)


def name_of(gamma: float) -> str:
    """γ in words for keys and legends."""
    return "inf" if math.isinf(gamma) else f"{gamma:g}"


def measured(label: str, widths: Sequence[int], averages: Sequence[Estimate]) -> Series:
    """Points with the ledger's intervals."""
    return points_of(label, widths, [number_of(average) for average in averages])


def measure_theorem2(values: Mapping[str, Any], context: Context) -> Outcome:
    """r and the soft rank beside the printed and the corrected bound, with the measured regularity constant."""
    widths = values["widths"]
    ((_, found),) = averages_of(values, context).items()
    alphas = [average["regularity"] for average in found]
    printed, corrected = (
        [
            rank2020.theorem_2(d, regularity=a.value, threshold=0.0, version=version).value
            for d, a in zip(widths, alphas, strict=True)
        ]
        for version in ("printed", "corrected")
    )
    ratios = [average["participation_ratio"] for average in found]
    softs = [average["soft_rank"] for average in found]
    errors = [error_of_bound(a) for a in alphas]
    over, sharper = (
        lowest(share_of(r, bound, relative_error=e) for r, bound, e in zip(ratios, bounds, errors, strict=True))
        for bounds in (printed, corrected)
    )
    soft = lowest(
        share_of(s, r.value / 4, relative_error=relative_error(r)) for s, r in zip(softs, ratios, strict=True)
    )
    numbers = {
        "largest_regularity": highest(number_of(a) for a in alphas),
        "smallest_r_over_bound": over,
        "smallest_soft_rank_over_r_bound": soft,
        "exponent_of_r": log_slope(widths, ratios),
        "exponent_of_soft_rank": log_slope(widths, softs),
        "smallest_r_over_corrected_bound": sharper,
    }
    panels = (
        over_widths(
            "average over depth",
            widths,
            (
                measured("participation ratio r", widths, ratios),
                measured("soft rank at ½", widths, softs),
                Series("√((1 − α)d), printed bound on r", widths, printed, role="bound"),
                Series("corrected bound on r", widths, corrected, role="theory"),
            ),
            y_scale="log",
            title="rank",
        ),
        over_widths(
            "regularity constant α",
            widths,
            (measured("α", widths, alphas), Series("1", [widths[0], widths[-1]], [1.0, 1.0], role="bound")),
            title="regularity",
        ),
    )
    caption = (
        "The average of r over depth lies above the printed bound and close above the corrected one, and grows like "
        "√d or a little faster; the regularity constant that both bounds need stays below 1."
    )
    return Outcome(numbers, Picture(panels, caption))


def measure_lemma13(values: Mapping[str, Any], context: Context) -> Outcome:
    """E‖M‖_F² beside its printed and corrected upper bounds, and the balance that the corrected one comes from."""
    widths = values["widths"]
    ((_, found),) = averages_of(values, context).items()
    squares = [average["frobenius_squared"] for average in found]
    alphas = [average["regularity"] for average in found]
    errors = [error_of_bound(a) for a in alphas]
    bounds = {
        version: [
            rank2020.lemma_13(d, regularity=a.value, version=version).value for d, a in zip(widths, alphas, strict=True)
        ]
        for version in ("printed", "corrected")
    }
    shares = {
        version: highest(share_of(s, b, relative_error=e) for s, b, e in zip(squares, bound, errors, strict=True))
        for version, bound in bounds.items()
    }
    numbers = {
        "largest_share_of_printed_bound": shares["printed"],
        "largest_share_of_corrected_bound": shares["corrected"],
        "exponent": log_slope(widths, squares),
    }
    series = (
        measured("measured", widths, squares),
        Series("d^(3/2)/√(1 − α), printed", widths, bounds["printed"], role="bound"),
        Series("corrected bound", widths, bounds["corrected"], role="theory"),
    )
    panel = over_widths("E‖M‖_F²", widths, series, y_scale="log")
    caption = "The printed bound is true and two to four times too large; the one with the right sign nearly touches."
    return Outcome(numbers, Picture((panel,), caption))


def measure_fig8(values: Mapping[str, Any], context: Context) -> Outcome:
    """The regularity constant against the width."""
    widths = values["widths"]
    ((_, found),) = averages_of(values, context).items()
    alphas = [average["regularity"] for average in found]
    wide = [number_of(a) for d, a in zip(widths, alphas, strict=True) if d > 10]
    falls = [
        estimate(a.value - b.value, math.hypot(a.stderr or 0.0, b.stderr or 0.0), samples=GROUPS)
        for a, b in itertools.pairwise(alphas)
    ]
    numbers = {
        "largest_regularity_above_width_10": highest(wide),
        "smallest_fall_to_the_next_width": lowest(falls),
    }
    ends = [widths[0], widths[-1]]
    series = (measured("measured", widths, alphas), Series("0.9 (the paper's limit)", ends, [0.9, 0.9], role="paper"))
    panel = over_widths("regularity constant α", widths, series)
    return Outcome(numbers, Picture((panel,), "From width 11 on α is below 0.9, and it falls as the width grows."))


def measure_fig9(values: Mapping[str, Any], context: Context) -> Outcome:
    """log₂ E‖M‖_F² against log₂ d."""
    widths = values["widths"]
    ((_, found),) = averages_of(values, context).items()
    squares = [average["frobenius_squared"] for average in found]
    logs = np.log2(widths)
    errors = [(number_of(s).high / s.value - 1) / math.log(2) for s in squares]
    largest = highest(number_of(s, scale=d**-1.5) for s, d in zip(squares, widths, strict=True))
    numbers = {"exponent": log_slope(widths, squares), "largest_over_d_to_3_halves": largest}
    panel = Panel(
        "log₂ d",
        "log₂ of the average of ‖M‖_F²",
        (
            Series("measured", logs, [math.log2(s.value) for s in squares], error=errors),
            Series("log₂ d^1.5 (the paper's line)", logs, 1.5 * logs, role="paper"),
        ),
    )
    caption = "The points follow the line of slope 3/2: far from 1 (orthogonal features) and from 2 (collapse)."
    return Outcome(numbers, Picture((panel,), caption))
