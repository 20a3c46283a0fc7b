"""Where a function is not smooth, found by how its differences shrink with the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from sounding.activations.activation import Array

ORDER = 5  # differences of fifth order: h⁵ on a smooth function, h^p on |x − k|^p
SMOOTH = 3.5  # an exponent below this is a kink: jumps 0, |x| 1, x|x| 2, x²|x| 3
CELLS = 4801  # an odd number of cells, so that 0 is never a node and a kink there is straddled
ROUGH = 0.5005  # E φ′² is infinite from the kink |x|^½ on
LEVELS = 34  # halvings of a cell of 0.005, down to 3e-13
MANY, FINER = 128, 16  # up to so many kinks, a grid so many times finer looks for others next to them
EARLY, FAST = 3, 16.0  # among many, what has shrunk so fast for so many halvings is let go


class Kink(NamedTuple):
    """A place where φ behaves like |x − place|^exponent plus something smoother: 0 a jump, 1 a bend, ½ a root."""

    place: float
    exponent: float


def find_kinks(function: Callable[[Array], Array], *, reach: float = 12.0, beyond: float = 0.0) -> tuple[Kink, ...]:
    """The kinks of `function` on [−reach, reach], in ascending order; those at |x| ≥ `beyond` alone.

    A fifth difference with step h shrinks like h⁵ where the function is smooth and like h^p next to a kink of exponent
    p. Local maxima of the fifth differences on a grid are narrowed by halving until they drown in rounding; the
    exponent is the slope of the last halvings. Exponents of 3.5 or more count as smooth: quadrature converges fast
    there anyway.

    >>> [(round(k.place, 9), round(k.exponent)) for k in find_kinks(lambda x: np.abs(x - 0.3))]
    [(0.3, 1)]
    >>> find_kinks(lambda x: np.tanh(20 * x))  # it looks kinked on the grid and smooth further down
    ()
    """
    cells = 2 * round(0.5 * CELLS * max(1.0, reach / 12.0)) + 1
    grid = np.linspace(-reach, reach, cells + 1)
    with np.errstate(all="ignore"):
        y = function(grid)
        differences = np.abs(np.diff(y, ORDER))
        # Terms as large as the largest value may cancel where the function is small, as in x·(1 + tanh(x)) at −10:
        # what is left there is their rounding, which would pass for hundreds of jumps.
        largest = float(np.max(np.abs(y), where=np.isfinite(y), initial=0.0))
        floor = _rounding(y) + 2.0**ORDER * np.finfo(np.float64).eps * largest
    peaks = _local_maxima(differences, width=ORDER)
    ends = np.maximum(np.abs(grid[peaks]), np.abs(grid[peaks + ORDER]))
    chosen = peaks[(differences[peaks] > 4 * floor[peaks]) & (ends >= beyond)]
    if not chosen.size:
        return ()
    found = _narrow(function, grid[chosen], grid[chosen + ORDER])
    if 1 < len(found) <= MANY:
        found += _beside(function, found, 2 * reach / cells)
    kinks: list[Kink] = []
    for kink in sorted(found):
        if abs(kink.place) < beyond:
            continue
        if not kinks or kink.place - kinks[-1].place > 1e-6:
            kinks.append(kink)
    return tuple(kinks)


def _beside(function: Callable[[Array], Array], kinks: list[Kink], cell: float) -> list[Kink]:
    """Kinks within a few cells of another, which hides them on the grid: the same search on a finer one around each."""
    fine = cell / FINER
    places = np.array([kink.place for kink in kinks])
    x: Array = places[:, None] + fine * (np.arange(2 * (ORDER + 2) * FINER) - (ORDER + 2) * FINER + 0.5)
    with np.errstate(all="ignore"):
        y = function(x.ravel()).reshape(x.shape)
        differences = np.abs(np.diff(y, ORDER, axis=1))
        floor = _rounding(y)
    starts = []
    for row, size in enumerate(differences):
        peaks = _local_maxima(size, width=ORDER)
        far = np.abs(x[row, peaks] + 0.5 * ORDER * fine - places[row]) > ORDER * fine
        starts.append(x[row, peaks[far & (size[peaks] > 16 * floor[row, peaks])]])
    low = np.concatenate(starts)
    return _narrow(function, low, low + ORDER * fine) if low.size else []


def kink_exponent(function: Callable[[Array], Array], place: float) -> float:
    """The p with which φ behaves like |x − place|^p at a known place: 0 at a jump, ∞ where φ is smooth.

    E φ′(z)² is infinite when p ≤ ½.

    >>> round(kink_exponent(lambda x: np.sqrt(np.abs(x - 2.0)), 2.0), 4)
    0.5
    """
    history: list[float] = []
    step = 1e-3
    for _ in range(24):
        x: Array = place + step * (np.arange(2.0 * ORDER + 2) - ORDER - 0.5)
        with np.errstate(all="ignore"):
            y = function(x)
        differences = np.abs(np.diff(y, ORDER))
        best = int(np.argmax(differences))
        if not differences[best] > 1e4 * _rounding(y)[best]:
            break
        history.append(float(differences[best]))
        step /= 2
    if len(history) < 3:
        return math.inf
    exponent = math.log2(history[len(history) // 2] / history[-1]) / (len(history) - 1 - len(history) // 2)
    return exponent if exponent < SMOOTH else math.inf


def _rounding(y: Array) -> Array:
    """How large a fifth difference of pure rounding error may be, for each window of ORDER + 1 values."""
    largest = sliding_window_view(np.abs(y), ORDER + 1, axis=-1).max(axis=-1)
    # binomial weights of 2^ORDER in all, on values that are right to half an eps
    floor: Array = 2.0**ORDER * np.finfo(np.float64).eps * largest + np.finfo(np.float64).tiny
    return floor


def _local_maxima(values: Array, *, width: int) -> NDArray[np.int64]:
    """The positions that are the first maximum of the values within ±width."""
    padded = np.pad(np.nan_to_num(values, nan=0.0, posinf=0.0), width, constant_values=-1.0)
    return np.flatnonzero(sliding_window_view(padded, 2 * width + 1).argmax(axis=-1) == width)


def _narrow(function: Callable[[Array], Array], low: Array, high: Array) -> list[Kink]:
    """Halve the step around the largest fifth difference; the rate at which it shrinks tells kink from smooth."""
    # all brackets at once: a wave has hundreds of candidates, and a call of the function costs more than its arithmetic
    start, step = low.copy(), (high - low) / ORDER
    reach = np.maximum(np.abs(low), np.abs(high))
    history = np.zeros((LEVELS, low.size))
    counts = np.zeros(low.size, dtype=np.int64)
    active = np.arange(low.size)
    for level in range(LEVELS):
        step[active] /= 2
        width = step[active, None]
        x: Array = start[active, None] - 2 * width + width * np.arange(2.0 * ORDER + 5)
        with np.errstate(all="ignore"):
            y = function(x.ravel()).reshape(x.shape)
            steps = np.diff(y, axis=1)
            differences = np.abs(np.diff(steps, ORDER - 1, axis=1))
            # the abscissae are rounded as well: their error times the slope is an error of the values
            blur = np.finfo(np.float64).eps * reach[active] * np.abs(steps).max(axis=1) / step[active]
        best = np.argmax(differences, axis=1)
        rows = np.arange(active.size)
        size = differences[rows, best]
        rounding = _rounding(y[rows[:, None], best[:, None] + np.arange(ORDER + 1)])[:, 0]
        clear = size > 8 * (rounding + 2.0**ORDER * blur)
        if level >= EARLY and active.size > MANY:
            clear &= history[level - 2, active] < FAST * history[level - 1, active]
        active, kept = active[clear], rows[clear]
        history[level, active] = size[kept]
        counts[active] += 1
        start[active] = x[kept, best[kept]]
        if not active.size:
            break
    exponents, width = _exponents(history, counts), ORDER * step
    return [
        Kink(_snapped(float(start[i] + 0.5 * width[i]), float(width[i])), max(float(exponents[i]), 0.0))
        for i in np.flatnonzero(exponents < SMOOTH)
    ]


def _exponents(history: Array, counts: NDArray[np.int64]) -> Array:
    """The rates of the halvings, infinite of too few."""
    # the last few levels are touched by rounding, the first see the function's shape: both are skipped where there are
    # many, and a line fitted to the rest, since where in its stencil a kink lies changes a difference by a factor of 2
    first, last = np.where(counts >= 16, counts // 4, counts - 6), np.where(counts >= 16, counts - 3, counts)
    level = np.arange(len(history))[:, None]
    used = (level >= first) & (level < last)
    places = np.where(used, level - 0.5 * (first + last - 1), 0.0)
    logs = np.log2(np.where(used & (history > 0), history, 1.0))
    return np.where(counts >= 6, -(places * logs).sum(axis=0) / np.maximum((places**2).sum(axis=0), 1.0), math.inf)


def _snapped(place: float, width: float) -> float:
    """The shortest decimal inside the bracket: people put kinks at 0.3, not at 0.29999999998."""
    for digits in range(16):
        rounded = round(place, digits)
        if abs(rounded - place) <= width:
            return rounded + 0.0
    return place
