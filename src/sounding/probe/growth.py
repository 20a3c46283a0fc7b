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

import numpy as np

LEVEL = 0.95
NOISE = np.concatenate([[0.0], np.logspace(-1.5, 3, 28)])  # variance of layer noise over that of the walk's steps
EVIDENCE = 1.92  # log-likelihood below the best that is still plausible: half the 95% point of χ²₁


@dataclass(frozen=True)
class Growth:
    """A fitted rate.

    Args:
        log_rate: change of ln‖gradient‖ per layer towards the input, with its standard error.
        growth: exp(2·log_rate), the factor per layer of the squared norm (meanfield2019), with its standard error.
        interval: of `growth`, at 95% (Student's t).
        depth: number of layers fitted.
        degrees: degrees of freedom of the interval.
        grouped: whether layers of different kind and shape had a level of their own.
    """

    log_rate: float
    log_rate_stderr: float
    growth: float
    growth_stderr: float
    interval: tuple[float, float]
    depth: int
    degrees: int
    grouped: bool


def fit_growth(
    log_norms: Sequence[Sequence[float]], groups: Sequence[Hashable] | None = None, *, level: float = LEVEL
) -> Growth | None:
    """The growth of gradient norms towards the input, from ln‖gradient‖ at every layer, first to last.

    Model: y_ℓ = level of its group − ℓ·drift + random walk + layer noise. Layers of one group (same kind of module,
    same output shape) are compared with each other only, so that a narrow head or the inside of a residual branch does
    not read as growth. Differences of neighbours have the covariance σ²(1 + q·T), T the tridiagonal (−1, 2, −1), which
    the sine transform makes diagonal; q is the least that the restricted likelihood finds plausible, mostly zero, the
    pure random walk. With more than one repeat the fit is of their mean and the scatter of their own
    drifts is added to the variance.

    Args:
        log_norms: (repeats, layers). The longest run of layers with finite values in every repeat is fitted.
        groups: one label per layer, None for one group.
        level: confidence of the interval.

    Returns:
        None when fewer than 3 layers can be compared.

    >>> fit = fit_growth([[3.0, 2.1, 1.0, 0.1, -1.0]])
    >>> round(fit.log_rate, 3), fit.depth
    (1.0, 5)
    """
    curves = np.atleast_2d(np.asarray(log_norms, dtype=np.float64))
    labels: list[Hashable] = list(groups) if groups is not None else [0] * curves.shape[1]
    run = _longest_run(_usable(curves))
    curves, labels = curves[:, run], labels[run]
    depth = curves.shape[1]
    if depth < 3:
        return None
    frame = _frame(tuple(labels))
    steps = curves[:, :-1] - curves[:, 1:]
    rotated = frame.basis @ steps.mean(axis=0)
    choice = _least_noise(frame, rotated)
    drift, stderr = _solve(frame, choice, rotated)
    if len(curves) > 1:
        own = [_solve(frame, choice, frame.basis @ step)[0] for step in steps]
        stderr = math.hypot(stderr, float(np.std(own, ddof=1)) / math.sqrt(len(own)))
    degrees = frame.degrees
    half = student_quantile(0.5 + level / 2, degrees) * stderr
    growth = bounded_exp(2 * drift)
    interval = (bounded_exp(2 * (drift - half)), bounded_exp(2 * (drift + half)))
    return Growth(drift, stderr, growth, 2 * growth * stderr, interval, depth, degrees, frame.grouped)


def can_fit(log_norms: Sequence[Sequence[float]]) -> bool:
    """Whether `fit_growth` finds enough: 3 layers in a row with finite values in every repeat."""
    run = _longest_run(_usable(np.atleast_2d(np.asarray(log_norms, dtype=np.float64))))
    return bool(run.stop - run.start >= 3)


def _usable(curves: np.ndarray) -> list[bool]:
    """Whether a layer has a finite value in every curve."""
    return [bool(good) for good in np.isfinite(curves).all(axis=0)]


def _longest_run(usable: Sequence[bool]) -> slice:
    """The longest stretch of true values, the deepest of equals."""
    best = start = 0
    chosen = slice(0, 0)
    for index, good in enumerate([*usable, False]):
        if good:
            continue
        if index - start >= best and index > start:
            best, chosen = index - start, slice(start, index)
        start = index + 1
    return chosen


@dataclass(frozen=True)
class _Frame:
    """What the fit knows before it sees a gradient: of one sequence of groups, at every plausible amount of noise.

    Args:
        design: the columns of the differences, rotated by the sine transform.
        basis: that transform.
        weights: inverse variances of the rotated differences, up to a factor, one row per amount of noise.
        inverses: of the normal matrices, (noise, columns, columns).
        penalties: the part of the restricted likelihood that does not depend on the data.
        degrees: degrees of freedom.
        grouped: whether groups have levels of their own.
    """

    design: np.ndarray
    basis: np.ndarray
    weights: np.ndarray
    inverses: np.ndarray
    penalties: np.ndarray
    degrees: int
    grouped: bool


@lru_cache(maxsize=4)  # a network in training is fitted again and again
def _frame(labels: tuple[Hashable, ...]) -> _Frame:
    design, grouped = _design(labels)
    size, columns = design.shape
    basis = _sine_basis(size)
    rotated = basis @ design
    eigenvalues = 4 * np.sin(np.pi * np.arange(1, size + 1) / (2 * (size + 1))) ** 2
    weights = np.asarray(1 / (1 + NOISE[:, None] * eigenvalues))
    normal = rotated.T @ (weights[:, :, None] * rotated)
    penalties = np.log(weights).sum(axis=1) - np.linalg.slogdet(normal)[1]
    return _Frame(rotated, basis, weights, np.linalg.inv(normal), penalties, max(size - columns, 1), grouped)


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


def _sine_basis(size: int) -> np.ndarray:
    """The orthonormal eigenvectors of the tridiagonal matrix (−1, 2, −1), as rows."""
    k = np.arange(1, size + 1)
    return np.asarray(np.sqrt(2 / (size + 1)) * np.sin(np.pi * np.outer(k, k) / (size + 1)))


def _least_noise(frame: _Frame, steps: np.ndarray) -> int:
    """Which amount of noise to believe in: the least that is plausible, judged by the restricted likelihood.

    Noise explains scatter away, so too much of it makes too sure, too little only too modest.
    """
    projected = (frame.weights * steps) @ frame.design
    solutions = (frame.inverses @ projected[:, :, None])[:, :, 0]
    residuals = steps - solutions @ frame.design.T
    scatter = (frame.weights * residuals**2).sum(axis=1) / frame.degrees
    if (scatter <= 0).any():
        return 0
    freedom = len(steps) - frame.design.shape[1]
    scores = (frame.penalties - freedom * np.log(scatter)) / 2
    return int(np.argmax(scores >= scores.max() - EVIDENCE))


def _solve(frame: _Frame, choice: int, steps: np.ndarray) -> tuple[float, float]:
    """Weighted least squares: the drift and its standard error."""
    weights, inverse = frame.weights[choice], frame.inverses[choice]
    solution = inverse @ (frame.design.T @ (weights * steps))
    residual = steps - frame.design @ solution
    scatter = float(weights @ residual**2) / frame.degrees
    return float(solution[0]), math.sqrt(max(scatter * float(inverse[0, 0]), 0.0))


@lru_cache(maxsize=256)  # scipy takes longer for one quantile than a pass takes for a layer
def student_quantile(probability: float, degrees: float) -> float:
    """The quantile of Student's t; of the normal distribution for infinitely many degrees of freedom."""
    from scipy import stats

    return float(stats.t.ppf(probability, degrees))


def bounded_exp(value: float) -> float:
    """e^value, infinite where a float holds no more: the end of an interval may lie anywhere."""
    return math.exp(value) if value < 700 else math.inf
