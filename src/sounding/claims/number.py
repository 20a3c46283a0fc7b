"""A measured number and the interval that a verdict trusts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from sounding.activations.activation import Array
from sounding.errors import UsageError

# confidence of every interval in the ledger: with some hundreds of numbers, 95% would accuse a dozen by chance
LEVEL = 0.99

GROUPS = 8  # groups of drawn cases whose extremes enclose the median one at that level

DRAWN = 2.576  # half width of a drawn interval at that level, in standard errors


@dataclass(frozen=True)
class Number:
    """A value with the interval [low, high] that holds the true one, at the level of the ledger (99%).

    Made by `exact`, `estimate`, `mean_of`, `jackknife`, `extreme_of`, `fraction_of` or `slope_of`, so that every
    interval has a stated origin.
    """

    value: float
    low: float
    high: float
    samples: int | None = None


def exact(value: float, *, error: float = 0.0) -> Number:
    """A computed number; `error` is the bound of its numerical error.

    >>> exact(2.0, error=0.5)
    Number(value=2.0, low=1.5, high=2.5, samples=None)
    """
    return Number(float(value), float(value) - error, float(value) + error)


def estimate(value: float, stderr: float, *, samples: int | None = None) -> Number:
    """A number with a standard error: Student's interval for a mean over `samples` runs, the normal one without."""
    from scipy import stats

    if samples is not None and samples < 2:
        raise UsageError(f"an interval needs at least 2 samples, got {samples}")
    # without a count the error is taken to be known
    half = float(stats.norm.ppf((1 + LEVEL) / 2)) if samples is None else student(samples - 1)
    return Number(float(value), float(value - half * stderr), float(value + half * stderr), samples)


def mean_of(samples: ArrayLike, *, looks: int = 1) -> Number:
    """The mean of independent runs, with Student's interval.

    Of a row that was judged in several `looks` in turn, all intervals together are at the level of the ledger
    (Bonferroni).
    """
    values = np.asarray(samples, dtype=np.float64).ravel()
    if len(values) < 2:
        raise UsageError(f"an interval needs at least 2 samples, got {len(values)}")
    # `estimate` multiplies by the quantile of one look
    wider = student(len(values) - 1, looks=looks) / student(len(values) - 1)
    stderr = wider * float(values.std(ddof=1)) / math.sqrt(len(values))
    return estimate(float(values.mean()), stderr, samples=len(values))


def over_runs(samples: ArrayLike) -> Number:
    """The mean of independent runs, with Student's interval; exact where all runs agree.

    >>> over_runs([4.0, 4.0, 4.0])
    Number(value=4.0, low=4.0, high=4.0, samples=None)
    """
    values = np.asarray(samples)
    # no spread, no interval: a count or a rank that all runs share
    return exact(float(values[0])) if np.ptp(values) == 0 else mean_of(values)


def jackknife(statistic: Callable[[Array], float], runs: ArrayLike) -> Number:
    """A function of independent runs, the first axis, with Student's interval from leaving out one at a time.

    The squared standard error is (n − 1)/n Σ (s₋ᵢ − s̄)², s₋ᵢ the statistic without run i; of a mean it is that of
    `mean_of`.

    >>> jackknife(lambda rows: float(rows.mean()), [1.0, 2.0, 4.0]) == mean_of([1.0, 2.0, 4.0])
    True
    """
    rows = np.asarray(runs, dtype=np.float64)
    count = len(rows)
    without = np.array([statistic(np.delete(rows, run, axis=0)) for run in range(count)])
    # std has 1/n inside: (n − 1)/n Σ is (n − 1) times its square
    return estimate(statistic(rows), math.sqrt(count - 1) * float(without.std()), samples=count)


def jackknife_ratio(top: ArrayLike, bottom: ArrayLike) -> Number:
    """The mean of `top` over that of `bottom`, of the same runs."""
    return jackknife(lambda rows: float(rows[:, 0].mean() / rows[:, 1].mean()), np.stack([top, bottom], axis=1))


def extreme_of(extremes: ArrayLike) -> Number:
    """The largest or smallest of some drawn cases, given that of each of k ≥ 8 groups of as many: their median.

    The interval reaches from the least to the greatest. It misses the median of all such groups with probability
    2^(1 − k), below 1%, whatever their law, and no case that was drawn lies beyond it.

    >>> extreme_of([0.2, 0.5, 0.4, 0.3, 0.6, 0.4, 0.1, 0.4])
    Number(value=0.4, low=0.1, high=0.6, samples=8)
    """
    values = np.asarray(extremes, dtype=np.float64).ravel()
    if len(values) < GROUPS:  # fewer would miss the median more often than the level allows
        raise UsageError(f"the interval of an extreme needs at least {GROUPS} groups of cases, got {len(values)}")
    return Number(float(np.median(values)), float(values.min()), float(values.max()), len(values))


def worst(cases: ArrayLike, extreme: Callable[[Array], float] = np.max, *, dealt: bool = False) -> Number:
    """The largest of drawn cases, or another extreme, from eight groups of them in their order.

    Cases that come by size or by rank are `dealt` out to the groups in turn.
    """
    values = np.asarray(cases, dtype=np.float64).ravel()
    parts = [values[first::GROUPS] for first in range(GROUPS)] if dealt else np.array_split(values, GROUPS)
    return extreme_of([extreme(part) for part in parts])


def highest(numbers: Iterable[Number]) -> Number:
    """The number whose interval reaches highest: the one that decides whether all stay below a bound."""
    return max(numbers, key=lambda number: number.high)


def lowest(numbers: Iterable[Number]) -> Number:
    """The number whose interval reaches lowest: the one that decides whether all stay above a bound."""
    return min(numbers, key=lambda number: number.low)


def unfinished(number: Number, *, towards: float) -> Number:
    """The number at the end of a longer training than was run: anything between what was measured and `towards`.

    A run that is still on its way there cannot refute what a paper shows after its own, longer training.

    >>> unfinished(Number(1.2, 1.1, 1.3), towards=math.inf)
    Number(value=1.2, low=1.1, high=inf, samples=None)
    """
    return replace(number, low=min(number.low, towards), high=max(number.high, towards))


def scaled(number: Number, factor: float) -> Number:
    """The number times a factor, its interval with it."""
    ends = sorted((number.low * factor, number.high * factor))  # a negative factor turns the interval round
    return Number(number.value * factor, ends[0], ends[1], number.samples)


def distance_from(number: Number, point: float) -> Number:
    """|number − point|; its interval begins at 0 where that of the number holds the point.

    >>> distance_from(Number(3.0, 1.0, 5.0), 2.0)
    Number(value=1.0, low=0.0, high=3.0, samples=None)
    """
    ends = sorted((abs(number.low - point), abs(number.high - point)))
    least = 0.0 if number.low <= point <= number.high else ends[0]
    return Number(abs(number.value - point), least, ends[1], number.samples)


def farthest_ratio(measured: Sequence[Number], theory: Sequence[float]) -> Number:
    """The ratio of a measured number to its theory that is farthest from 1, among several.

    >>> farthest_ratio([exact(2.0), exact(6.0)], [2.0, 3.0]).value
    2.0
    """
    ratios = [scaled(number, 1 / unit) for number, unit in zip(measured, theory, strict=True)]
    return max(ratios, key=lambda ratio: abs(ratio.value - 1))  # the one that decides


def ratio_of(first: Number, second: Number) -> Number:
    """first/second of independent positive numbers: their relative half widths add in squares."""
    value = first.value / second.value
    shares = ((number.high - number.low) / 2 / number.value for number in (first, second))
    half = value * math.hypot(*shares)  # relative errors of a quotient add in squares
    return Number(value, value - half, value + half)


def fraction_of(successes: int, trials: int) -> Number:
    """A share of trials, with the interval of Clopper and Pearson.

    >>> fraction_of(0, 100).high < 0.06
    True
    """
    from scipy import stats

    if trials < 1 or not 0 <= successes <= trials:
        raise UsageError(f"expected 0 ≤ successes ≤ trials, got {successes} of {trials}")
    tail = (1 - LEVEL) / 2  # what either side may miss
    # at 0 or all successes one end is exact, and Beta is not defined
    low = float(stats.beta.ppf(tail, successes, trials - successes + 1)) if successes else 0.0
    high = float(stats.beta.ppf(1 - tail, successes + 1, trials - successes)) if successes < trials else 1.0
    return Number(successes / trials, low, high, trials)


def counted(name: str, found: ArrayLike) -> dict[str, Number]:
    """How many drawn cases are so, and what share of fresh ones that leaves open.

    >>> {name: number.value for name, number in counted("odd", [True, False]).items()}
    {'odd': 1.0, 'share_of_odd': 0.5}
    """
    cases = np.asarray(found)
    count = int(cases.sum())
    return {name: exact(count), f"share_of_{name}": fraction_of(count, cases.size)}


def slope_of(x: ArrayLike, y: ArrayLike, *, stderr: Sequence[float] | None = None, straight: bool = True) -> Number:
    """The slope of the straight line through (x, y).

    The interval takes the larger of two standard errors: the scatter about the line (Student's t, points − 2), and
    what the given `stderr` of the points imply. A line through two points needs `stderr`. Points that are not meant to
    be `straight` have their least-squares slope, which only `stderr` makes uncertain.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(xs) < 2 or len(xs) != len(ys) or (len(xs) == 2 and stderr is None):
        raise UsageError(f"a slope with an interval needs 3 points, or 2 with stderr, got {len(xs)}")
    centred = xs - xs.mean()
    weight = centred / np.sum(centred**2)  # the slope is Σ weight·y, whose error follows from those of y
    value = float(weight @ ys)
    half = 0.0
    if not straight and stderr is None:
        # scatter about a line that is not meant says nothing
        raise UsageError("the slope of points that lie on no line needs their stderr")
    if len(xs) > 2 and straight:
        scatter = ys - ys.mean() - value * centred
        # two numbers are fitted, so two degrees are gone
        half = student(len(xs) - 2) * math.sqrt(float(np.sum(scatter**2)) / (len(xs) - 2) / float(np.sum(centred**2)))
    if stderr is not None:
        given = estimate(0.0, math.sqrt(float(np.sum((weight * np.asarray(stderr)) ** 2)))).high
        half = max(half, given)  # points may lie on a line by chance, or off it by more than their errors
    return Number(value, value - half, value + half, len(xs))


def mean_slope_of(x: ArrayLike, runs: ArrayLike) -> Number:
    """The mean over independent runs of the slope of each row of `runs` against x.

    >>> mean_slope_of([1.0, 2.0, 3.0], [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]).value
    1.0
    """
    places: Array = np.asarray(x, dtype=np.float64)
    centred = places - places.mean()
    # each run has a slope of its own: layers of a run are not independent
    return mean_of(np.asarray(runs) @ centred / np.sum(centred**2))


def apart_from(path: ArrayLike, mean: ArrayLike, half: ArrayLike, *, samples: int) -> Number:
    """The largest distance from a path of measured means with these half intervals, with the interval of that one."""
    gaps = np.abs(np.asarray(mean) - np.asarray(path))
    far = int(np.argmax(gaps))
    off, slack = float(gaps[far]), float(np.asarray(half)[far])
    return Number(off, max(off - slack, 0.0), off + slack, samples)  # a distance is not below 0


def student(freedom: float, *, looks: int = 1) -> float:
    """Student's quantile at the level of the ledger, for one of some looks: half an interval, in standard errors."""
    from scipy import stats

    # Bonferroni: each look may miss with a share of the level, on two sides
    return float(stats.t.ppf(1 - (1 - LEVEL) / (2 * looks), freedom))
