"""How gradients grow over depth: a rate per layer with an honest interval.

Backpropagation multiplies: ln‖∂L/∂h_ℓ‖ changes from layer to layer by nearly independent increments, so along depth the
log-norm is a random walk with drift. Least squares with independent errors takes its wandering for precision and is
several times too sure. Here the increments are the data: their mean is the drift, their scatter its error.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import mul
from statistics import median

import numpy as np

LEVEL = 0.95  # of the interval, two standard errors, which readers of a table expect
NOISE = np.concatenate([[0.0], np.logspace(-1.5, 3, 28)])  # variance of layer noise over that of the walk's steps
BREAK, BREAK_DEVIATIONS = 2.0, 6.0  # `find_breaks` says why
FEW = 3  # differences that plain Python takes less time for
EVIDENCE = 1.92  # log-likelihood below the best that is still plausible: half the 95% point of χ²₁


@dataclass(frozen=True)
class Growth:
    """A fitted rate."""

    log_rate: float  # change of ln‖gradient‖ per layer towards the input, with its standard error
    log_rate_stderr: float
    growth: float  # exp(2·log_rate), the factor per layer of the squared norm (meanfield2019), with its standard error
    growth_stderr: float
    interval: tuple[float, float]  # of `growth`, at 95% (Student's t)
    depth: int  # number of layers fitted
    degrees: int  # degrees of freedom of the interval
    grouped: bool  # whether layers of different kind and shape had a level of their own


def fit_growth(log_norms: Sequence[Sequence[float]], groups: Sequence[Hashable] | None = None) -> Growth | None:
    """The growth of gradient norms towards the input, from ln‖gradient‖ at every layer, first to last.

    Model: y_ℓ = level of its group − ℓ·drift + random walk + layer noise. Layers of one group (same kind of module,
    same output shape) are compared with each other only, so that a narrow head or the inside of a residual branch does
    not read as growth. Differences of neighbours have the covariance σ²(1 + q·T), T the tridiagonal (−1, 2, −1), which
    the sine transform makes diagonal; q is the least that the restricted likelihood finds plausible, mostly zero, the
    pure random walk. With more than one repeat the fit is of their mean and the scatter of their own
    drifts is added to the variance. A break (`find_breaks`) is a jump between groups, no part of the drift.

    Args:
        log_norms: (repeats, layers). The longest run of layers with finite values in every repeat is fitted.
        groups: one label per layer, None for one group.

    Returns:
        None when fewer than 3 layers can be compared.

    >>> fit = fit_growth([[3.0, 2.1, 1.0, 0.1, -1.0]])
    >>> round(fit.log_rate, 3), fit.depth
    (1.0, 5)
    """
    run = _longest_run(log_norms)
    depth = run.stop - run.start
    if depth < 3:
        return None
    steps = [[this - following for this, following in pairwise(curve[run])] for curve in log_norms]
    mean = steps[0] if len(steps) == 1 else np.mean(steps, axis=0)
    labels: Sequence[Hashable] = groups[run] if groups is not None else (0,) * depth
    frame = _frame(_split(labels, find_breaks(mean)))
    choice, drift, stderr = _solve(frame, mean)
    if len(steps) > 1:
        own = np.array(steps) @ frame.drifts[choice]
        stderr = math.hypot(stderr, float(np.std(own, ddof=1)) / math.sqrt(len(own)))
    degrees = frame.degrees
    half = student_quantile(0.5 + LEVEL / 2, degrees) * stderr
    growth = bounded_exp(2 * drift)
    interval = (bounded_exp(2 * (drift - half)), bounded_exp(2 * (drift + half)))
    return Growth(drift, stderr, growth, 2 * growth * stderr, interval, depth, degrees, frame.grouped)


def find_breaks(steps: Sequence[float] | np.ndarray) -> list[int]:
    """The steps that are no part of a walk: single layers that multiply the gradient as no other does.

    A batch norm behind inputs in raw units divides by their scale, a layer whose weights have the wrong scale
    multiplies by it. One such step in sixty would be a third of the drift and all of its error. A step counts that is
    off the median by over 6 robust standard deviations (1.4826 times the median deviation), in a Gaussian walk once in
    5·10⁸ steps, and by more than the factor e² of the norm that weight layers of different shape differ by. Where more
    than one does, and more than one in eight, they are the pattern of a block (branches side by side) and no breaks.

    >>> find_breaks([0.1, 0.2, 0.1, 6.9, 0.0, 0.1])
    [3]
    >>> find_breaks([0.1, 1.2, -1.1, 2.9, 0.0, -2.1])
    []
    >>> find_breaks([1.4, -1.3, -1.4, 1.4, 1.4, -1.2, -1.6, 1.4, 1.4])
    []
    """
    if len(steps) < 4:
        return []
    middle = median(steps)
    if max(steps) - middle <= BREAK and middle - min(steps) <= BREAK:
        return []
    apart = [abs(step - middle) for step in steps]
    line = max(BREAK_DEVIATIONS * 1.4826 * median(apart), BREAK)
    found = [index for index, distance in enumerate(apart) if distance > line]
    return found if len(found) <= max(len(steps) // 8, 1) else []


def _split(labels: Sequence[Hashable], breaks: Sequence[int]) -> tuple[Hashable, ...]:
    """Layers on the two sides of a break belong to different groups."""
    if not breaks:
        return tuple(labels)
    return tuple((label, sum(index > end for end in breaks)) for index, label in enumerate(labels))


def can_fit(log_norms: Sequence[Sequence[float]]) -> bool:
    """Whether `fit_growth` finds enough: 3 layers in a row with finite values in every repeat."""
    run = _longest_run(log_norms)
    return bool(run.stop - run.start >= 3)


def _longest_run(curves: Sequence[Sequence[float]]) -> slice:
    """The longest stretch of layers with a finite value in every curve, the deepest of equals."""
    usable = [all(map(math.isfinite, layer)) for layer in zip(*curves, strict=True)]
    best = start = 0
    chosen = slice(0, 0)
    for index, good in enumerate([*usable, False]):  # the end closes the last stretch
        if good:
            continue
        if index - start >= best and index > start:
            best, chosen = index - start, slice(start, index)
        start = index + 1
    return chosen


@dataclass(frozen=True)
class _Frame:
    """What the fit knows before it sees a gradient: of one sequence of groups, at every plausible amount of noise."""

    design: np.ndarray  # the columns of the differences, rotated by the sine transform
    basis: np.ndarray  # that transform, which is its own transpose
    weights: np.ndarray  # inverse variances of the rotated differences, up to a factor, one row per amount of noise
    solvers: np.ndarray  # from rotated differences to the least squares solution, (noise, columns, differences)
    drifts: list[list[float]]  # from the differences themselves to the drift, (noise, differences)
    # from them to the weighted residuals, where they are few: (noise, rows, differences), as few rows as there
    # are degrees of freedom; empty where they are many
    forms: list[list[list[float]]]
    variances: list[float]  # of the drift, over the scatter of the differences, one per amount of noise
    penalties: list[float]  # the part of the restricted likelihood that does not depend on the data
    degrees: int  # degrees of freedom
    grouped: bool  # whether groups have levels of their own


@lru_cache(maxsize=4)  # a network in training is fitted again and again
def _frame(labels: tuple[Hashable, ...]) -> _Frame:
    """All that the fit needs and that depends on the labels of the layers alone, so that it is computed once."""
    design, grouped = _design(labels)
    size, columns = design.shape
    k = np.arange(1, size + 1)
    # the orthonormal eigenvectors of the tridiagonal matrix (−1, 2, −1), as rows
    basis = np.asarray(np.sqrt(2 / (size + 1)) * np.sin(np.pi * np.outer(k, k) / (size + 1)))
    rotated = basis @ design
    eigenvalues = 4 * np.sin(np.pi * k / (2 * (size + 1))) ** 2
    weights = np.asarray(1 / (1 + NOISE[:, None] * eigenvalues))
    normal = rotated.T @ (weights[:, :, None] * rotated)
    inverses = np.linalg.inv(normal)
    solvers = inverses @ (weights[:, :, None] * rotated).transpose(0, 2, 1)
    penalties = np.log(weights).sum(axis=1) - np.linalg.slogdet(normal)[1]
    drifts, variances = (solvers[:, 0] @ basis).tolist(), inverses[:, 0, 0].tolist()
    forms: list[list[list[float]]] = []
    if size <= FEW:
        residuals = np.sqrt(weights)[:, :, None] * (np.eye(size) - rotated @ solvers) @ basis
        _, sizes, directions = np.linalg.svd(residuals)
        forms = (sizes[:, :, None] * directions)[:, : size - columns].tolist()
    degrees = max(size - columns, 1)
    return _Frame(rotated, basis, weights, solvers, drifts, forms, variances, penalties.tolist(), degrees, grouped)


def _design(labels: tuple[Hashable, ...]) -> tuple[np.ndarray, bool]:
    """Columns for the differences: the drift and jumps between groups, or the drift alone if that leaves too little."""
    steps = len(labels) - 1
    drift = np.ones((steps, 1))
    kinds = list(dict.fromkeys(labels))
    if len(kinds) == 1:
        return drift, False
    member = np.array([[label == kind for kind in kinds[1:]] for label in labels], dtype=np.float64)
    design = np.hstack([drift, member[:-1] - member[1:]])
    if steps - design.shape[1] < 2 or np.linalg.matrix_rank(design) < design.shape[1]:
        return drift, False
    return design, True


def _solve(frame: _Frame, steps: Sequence[float] | np.ndarray) -> tuple[int, float, float]:
    """Weighted least squares: which amount of noise to believe in, the drift and its standard error.

    The least amount that is plausible, judged by the restricted likelihood: noise explains scatter away, so too much of
    it makes too sure, too little only too modest.
    """
    scatter = _scatter(frame, steps)
    choice = 0
    if min(scatter) > 0:
        freedom = len(steps) - frame.design.shape[1]
        scores = [penalty - freedom * math.log(one) for penalty, one in zip(frame.penalties, scatter, strict=True)]
        plausible = max(scores) - 2 * EVIDENCE
        choice = next(index for index, score in enumerate(scores) if score >= plausible)
    variance = scatter[choice] / frame.degrees * frame.variances[choice]
    return choice, float(sum(map(mul, frame.drifts[choice], steps))), math.sqrt(max(variance, 0.0))


def _scatter(frame: _Frame, steps: Sequence[float] | np.ndarray) -> list[float]:
    """The weighted sum of squared residuals at every amount of noise.

    In the midst of a training loop, where nothing of numpy is in the processor's cache, a single operation takes longer
    than all the arithmetic of a network of few layers.
    """
    if frame.forms:
        return [sum(sum(map(mul, row, steps)) ** 2 for row in form) for form in frame.forms]
    rotated = frame.basis.dot(steps)
    residuals = rotated - frame.solvers.dot(rotated).dot(frame.design.T)
    residuals *= residuals
    residuals *= frame.weights
    scatter: list[float] = residuals.sum(axis=1).tolist()
    return scatter


@lru_cache(maxsize=256)  # scipy takes longer for one quantile than a pass takes for a layer
def student_quantile(probability: float, degrees: float) -> float:
    """The quantile of Student's t; of the normal distribution for infinitely many degrees of freedom."""
    from scipy import stats

    return float(stats.t.ppf(probability, degrees))


def bounded_exp(value: float) -> float:
    """e^value, infinite where a float holds no more: the end of an interval may lie anywhere."""
    return math.exp(value) if value < 700 else math.inf
