"""The invariant law of linear batch-norm networks: its rank, its regularity constant, its Frobenius norm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sounding.chain import simulate, simulate_many
from sounding.claims.claim import Context, Outcome, Values, pick, present
from sounding.claims.number import Number, estimate, highest, lowest
from sounding.claims.picture import Series, level, points_of
from sounding.claims.share import share
from sounding.profile import Estimate, Profile
from sounding.theory.bounds import rank2020

GROUPS = 32  # behind a simulation's standard error there are so many runs or more, or about so many batches of layers
MEASURES = ("participation_ratio", "soft_rank", "frobenius_squared", "regularity")


def follow(generator: torch.Generator, *, width: int, **options: Any) -> Profile:
    """The profile of chains H ↦ BN((I + γW)H) in float64, or (I + γW)H, with as many samples as features."""
    square: dict[str, Any] = {"width": width, "batch_size": width, "centring": False, "dtype": "float64"}
    return simulate(profile=True, generator=generator, **square, **options).profile


@share("measure", "label", "caption")
def averages_of(
    values: Values, context: Context, *, measures: tuple[str, ...] = MEASURES
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
    count = len(values["residuals"])  # simulations come by width, then by strength
    each = enumerate(values["residuals"])
    return {gamma: [simulation.averages for simulation in found[index::count]] for index, gamma in each}


def number_of(average: Estimate, *, scale: float = 1.0) -> Number:
    """The average of a simulation, times a known factor."""
    return estimate(scale * average.value, abs(scale) * (average.stderr or 0.0), samples=GROUPS)


def share_of(average: Estimate, reference: float, *, relative_error: float = 0.0) -> Number:
    """average / reference, where the reference was measured too, with that relative standard error."""
    value = average.value / reference
    # relative errors of a quotient add in squares
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


def measured(label: str, widths: Sequence[int], averages: Sequence[Estimate]) -> Series:
    """Points with the ledger's intervals."""
    return points_of(label, widths, [number_of(average) for average in averages])


def _columns(values: Values, context: Context, *names: str) -> list[list[Estimate]]:
    """Averages by width, for each name, of the one residual strength that a row has."""
    ((_, found),) = averages_of(values, context).items()
    return [[average[name] for average in found] for name in names]


def _over_bounds(averages: Sequence[Estimate], bounds: Sequence[float], alphas: Sequence[Estimate]) -> list[Number]:
    """Each average over its bound, which has an error of its own: α was measured, and they grow at most as √(1 − α)."""
    errors = [0.5 * (alpha.stderr or 0.0) / (1 - alpha.value) for alpha in alphas]  # d ln √(1 − α) = −dα/(2(1 − α))
    found = zip(averages, bounds, errors, strict=True)
    return [share_of(average, bound, relative_error=error) for average, bound, error in found]


def measure_theorem2(values: Values, context: Context) -> Outcome:
    """r and the soft rank beside the printed and the corrected bound, with the measured regularity constant."""
    widths = values["widths"]
    alphas, ratios, softs = _columns(values, context, "regularity", "participation_ratio", "soft_rank")
    pairs = list(zip(widths, alphas, strict=True))
    printed, corrected = (
        [rank2020.theorem_2(d, regularity=a.value, threshold=0.0, version=version).value for d, a in pairs]
        for version in ("printed", "corrected")
    )
    # the theorem's (1 − τ)² r at τ = ½ is r/4
    quarters = [share_of(s, r.value / 4, relative_error=relative_error(r)) for s, r in zip(softs, ratios, strict=True)]
    numbers = {
        "largest_regularity": highest(number_of(a) for a in alphas),
        "smallest_r_over_bound": lowest(_over_bounds(ratios, printed, alphas)),
        "smallest_soft_rank_over_r_bound": lowest(quarters),
        "exponent_of_r": log_slope(widths, ratios),
        "exponent_of_soft_rank": log_slope(widths, softs),
        "smallest_r_over_corrected_bound": lowest(_over_bounds(ratios, corrected, alphas)),
    }
    ranks = (
        measured("participation ratio r", widths, ratios),
        measured("soft rank at ½", widths, softs),
        Series("√((1 − α)d), printed bound on r", widths, printed, role="bound"),
        Series("corrected bound on r", widths, corrected, role="theory"),
    )
    constants = (measured("α", widths, alphas), level("1", widths, 1.0))
    return present(numbers, ranks, constants)


def measure_lemma13(values: Values, context: Context) -> Outcome:
    """E‖M‖_F² beside its printed and corrected upper bounds, and the balance that the corrected one comes from."""
    widths = values["widths"]
    squares, alphas = _columns(values, context, "frobenius_squared", "regularity")
    pairs = list(zip(widths, alphas, strict=True))
    printed, corrected = (
        [rank2020.lemma_13(d, regularity=a.value, version=version).value for d, a in pairs]
        for version in ("printed", "corrected")
    )
    numbers = {
        "largest_share_of_printed_bound": highest(_over_bounds(squares, printed, alphas)),
        "largest_share_of_corrected_bound": highest(_over_bounds(squares, corrected, alphas)),
        "exponent": log_slope(widths, squares),
    }
    series = (
        measured("measured", widths, squares),
        Series("d^(3/2)/√(1 − α), printed", widths, printed, role="bound"),
        Series("corrected bound", widths, corrected, role="theory"),
    )
    return present(numbers, series)


def measure_fig8(values: Values, context: Context) -> Outcome:
    """The regularity constant against the width."""
    widths = values["widths"]
    (alphas,) = _columns(values, context, "regularity")
    wide = [number_of(a) for d, a in zip(widths, alphas, strict=True) if d > 10]  # the paper says it for d > 10
    falls = [
        estimate(a.value - b.value, math.hypot(a.stderr or 0.0, b.stderr or 0.0), samples=GROUPS)
        for a, b in itertools.pairwise(alphas)
    ]
    numbers = {"largest_regularity_above_width_10": highest(wide), "smallest_fall_to_the_next_width": lowest(falls)}
    series = (measured("measured", widths, alphas), level("0.9 (the paper's limit)", widths, 0.9, "paper"))
    return present(numbers, series)


def measure_fig9(values: Values, context: Context) -> Outcome:
    """log₂ E‖M‖_F² against log₂ d."""
    widths = values["widths"]
    (squares,) = _columns(values, context, "frobenius_squared")
    logs = np.log2(widths)
    errors = [(number_of(s).high / s.value - 1) / math.log(2) for s in squares]  # d log₂ s = ds/(s ln 2)
    largest = highest(number_of(s, scale=d**-1.5) for s, d in zip(squares, widths, strict=True))
    numbers = {"exponent": log_slope(widths, squares), "largest_over_d_to_3_halves": largest}
    series = (
        Series("measured", logs, [math.log2(s.value) for s in squares], error=errors),
        Series("log₂ d^1.5 (the paper's line)", logs, 1.5 * logs, role="paper"),
    )
    return present(numbers, series)
