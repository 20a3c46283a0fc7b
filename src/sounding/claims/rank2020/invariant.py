"""The invariant law of linear batch-norm networks: its rank, its regularity constant, its Frobenius norm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sounding.chain import Simulation, simulate_many
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import Number, estimate
from sounding.claims.picture import Panel, Picture, Series
from sounding.profile import Estimate
from sounding.theory.bounds import rank2020

GROUPS = 32
"""Behind a simulation's standard error there are so many runs or more, or about so many batches of layers."""
MEASURES = ("participation_ratio", "soft_rank", "frobenius_squared", "regularity")


@lru_cache(maxsize=8)
def simulate_invariant(
    widths: tuple[int, ...],
    residuals: tuple[float, ...],
    *,
    depth: int,
    burn_in: int,
    every: int,
    runs: int,
    weights: str,
    device: str,
    random_seed: int,
    measures: tuple[str, ...] = MEASURES,
    dtype: str = "float32",
) -> tuple[Simulation, ...]:
    """H ↦ BN(H + γWH) from M₀ = I with as many samples as features; figures that show one experiment share it."""
    return simulate_many(
        widths=widths,
        residuals=residuals,
        depth=depth,
        burn_in=burn_in,
        every=every,
        runs=runs,
        weights=weights,
        centring=False,
        input="orthogonal",
        measures=measures,
        dtype=dtype,
        device=device,
        generator=Context(random_seed=random_seed).generator(),
    )


def averages_of(
    values: Mapping[str, Any], context: Context, *, measures: tuple[str, ...] = MEASURES
) -> dict[float, list[Mapping[str, Estimate]]]:
    """By residual strength, the averages at each width."""
    residuals = tuple(values["residuals"])
    found = simulate_invariant(
        tuple(values["widths"]),
        residuals,
        depth=values["depth"],
        burn_in=values["burn_in"],
        every=values["every"],
        runs=values["runs"],
        weights=values["weights"],
        device=context.device,
        random_seed=context.random_seed,
        measures=measures,
        dtype=values.get("dtype", "float32"),
    )
    count = len(residuals)
    return {gamma: [simulation.averages for simulation in found[index::count]] for index, gamma in enumerate(residuals)}


def number_of(average: Estimate, *, scale: float = 1.0) -> Number:
    """The average of a simulation, times a known factor."""
    return estimate(scale * average.value, abs(scale) * (average.stderr or 0.0), samples=GROUPS)


def half_width(average: Estimate, *, scale: float = 1.0) -> float:
    """Half of the ledger's interval."""
    number = number_of(average, scale=scale)
    return number.high - number.value


def share_of(average: Estimate, reference: float, *, relative_error: float = 0.0) -> Number:
    """average / reference, where the reference was measured too, with that relative standard error."""
    value = average.value / reference
    error = abs(value) * math.hypot((average.stderr or 0.0) / average.value, relative_error)
    return estimate(value, error, samples=GROUPS)


def relative_error(average: Estimate) -> float:
    """The standard error as a share of the value."""
    return (average.stderr or 0.0) / average.value


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
    return Series(label, widths, [a.value for a in averages], error=[half_width(a) for a in averages])


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
    # both bounds grow at most like √(1 − α), so that is how α's error reaches them
    errors = [0.5 * (a.stderr or 0.0) / (1 - a.value) for a in alphas]
    over, sharper = (
        min(
            (share_of(r, bound, relative_error=e) for r, bound, e in zip(ratios, bounds, errors, strict=True)),
            key=lambda n: n.low,
        )
        for bounds in (printed, corrected)
    )
    soft = min(
        (share_of(s, r.value / 4, relative_error=relative_error(r)) for s, r in zip(softs, ratios, strict=True)),
        key=lambda n: n.low,
    )
    numbers = {
        "largest_regularity": max((number_of(a) for a in alphas), key=lambda n: n.high),
        "smallest_r_over_bound": over,
        "smallest_soft_rank_over_r_bound": soft,
        "exponent_of_r": log_slope(widths, ratios),
        "exponent_of_soft_rank": log_slope(widths, softs),
        "smallest_r_over_corrected_bound": sharper,
    }
    panels = (
        Panel(
            "width d",
            "average over depth",
            (
                measured("participation ratio r", widths, ratios),
                measured("soft rank at ½", widths, softs),
                Series("√((1 − α)d), printed bound on r", widths, printed, role="bound"),
                Series("corrected bound on r", widths, corrected, role="theory"),
            ),
            x_scale="log",
            y_scale="log",
            title="rank",
            ticks={float(d): str(d) for d in widths},
        ),
        Panel(
            "width d",
            "regularity constant α",
            (measured("α", widths, alphas), Series("1", [widths[0], widths[-1]], [1.0, 1.0], role="bound")),
            x_scale="log",
            title="regularity",
            ticks={float(d): str(d) for d in widths},
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
    alphas = [average["regularity"].value for average in found]
    errors = [0.5 * (average["regularity"].stderr or 0.0) / (1 - average["regularity"].value) for average in found]
    bounds = {
        version: [
            rank2020.lemma_13(d, regularity=a, version=version).value for d, a in zip(widths, alphas, strict=True)
        ]
        for version in ("printed", "corrected")
    }
    shares = {
        version: max(
            (share_of(s, b, relative_error=e) for s, b, e in zip(squares, bound, errors, strict=True)),
            key=lambda n: n.high,
        )
        for version, bound in bounds.items()
    }
    numbers = {
        "largest_share_of_printed_bound": shares["printed"],
        "largest_share_of_corrected_bound": shares["corrected"],
        "exponent": log_slope(widths, squares),
    }
    panel = Panel(
        "width d",
        "E‖M‖_F²",
        (
            measured("measured", widths, squares),
            Series("d^(3/2)/√(1 − α), printed", widths, bounds["printed"], role="bound"),
            Series("corrected bound", widths, bounds["corrected"], role="theory"),
        ),
        x_scale="log",
        y_scale="log",
        ticks={float(d): str(d) for d in widths},
    )
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
        "largest_regularity_above_width_10": max(wide, key=lambda n: n.high),
        "smallest_fall_to_the_next_width": min(falls, key=lambda n: n.low),
    }
    ends = [widths[0], widths[-1]]
    panel = Panel(
        "width d",
        "regularity constant α",
        (measured("measured", widths, alphas), Series("0.9 (the paper's limit)", ends, [0.9, 0.9], role="paper")),
        x_scale="log",
        ticks={float(d): str(d) for d in widths},
    )
    return Outcome(numbers, Picture((panel,), "From width 11 on α is below 0.9, and it falls as the width grows."))


def measure_fig9(values: Mapping[str, Any], context: Context) -> Outcome:
    """log₂ E‖M‖_F² against log₂ d."""
    widths = values["widths"]
    ((_, found),) = averages_of(values, context).items()
    squares = [average["frobenius_squared"] for average in found]
    logs = np.log2(widths)
    errors = [half_width(s) / s.value / math.log(2) for s in squares]
    largest = max((number_of(s, scale=d**-1.5) for s, d in zip(squares, widths, strict=True)), key=lambda n: n.high)
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
