"""Running averages with standard errors that respect autocorrelation, in memory that does not grow with depth.

The measured layers of a run are split into a fixed number of consecutive batches, and only the sums over each batch are
kept. Means of long batches are nearly independent, whatever the correlation between neighbouring layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sounding.activations.activation import Array

BATCHES = 64  # so many fix a standard error to about 10%
MANY_RUNS = 32  # with so many their means alone do, and need no assumption about correlation along depth
CORRELATED = 0.2  # batches whose neighbours correlate more are merged


def batch_count(samples: int, runs: int) -> int:
    """How many batches each run keeps."""
    # means of runs are independent without a doubt; where they are many, batches within them add nothing
    return 1 if runs >= 2 * MANY_RUNS else max(1, min(BATCHES, samples))


@dataclass(frozen=True)
class BatchMeans:
    """Means over consecutive batches of measured layers."""

    sums: Array  # (runs, batches, columns), sums over each batch
    counts: Array  # (runs, batches), how many layers each holds

    def mean(self, column: int) -> float:
        """The average over everything measured."""
        total = self.counts.sum()
        return float(self.sums[..., column].sum() / total) if total else math.nan

    def standard_error(self, column: int) -> float | None:
        """The standard error of `mean`."""
        return _error_of_mean(self.sums[..., column], self.counts)

    def ratio(self, numerator: int, denominator: int) -> tuple[float, float | None]:
        """A ratio of two averages and its standard error, by linearization: the error of (x − r·y)/ȳ."""
        below = self.mean(denominator)
        if not below or not math.isfinite(below):
            return math.nan, None
        ratio = self.mean(numerator) / below
        residuals = (self.sums[..., numerator] - ratio * self.sums[..., denominator]) / below
        return ratio, _error_of_mean(residuals, self.counts)


def _error_of_mean(sums: Array, counts: Array) -> float | None:
    """The standard error of Σsums/Σcounts for (runs, batches) sums; None where one of them is infinite or NaN."""
    if not np.all(np.isfinite(sums)):
        return None
    runs = counts.sum(axis=1) > 0  # an interrupted run may have measured nothing
    sums, counts = sums[runs], counts[runs]
    if len(sums) >= MANY_RUNS:
        return _spread(sums.sum(axis=1), counts.sum(axis=1))
    best: float | None = None
    while True:
        used = counts > 0
        error = _spread(sums[used], counts[used])
        correlation = _neighbour_correlation(sums, counts)
        if error is not None:
            # to first order in what correlation is left between neighbours
            best = error * math.sqrt(1 + 2 * max(correlation, 0.0))
        # fewer groups would make the error itself uncertain; the correlation that is left is in it to first order
        if correlation < CORRELATED or sums.size <= MANY_RUNS or sums.shape[1] < 2:
            return best
        sums, counts = _merge(sums), _merge(counts)


def _spread(sums: Array, counts: Array) -> float | None:
    """√(Σ(s − c·mean)² · k/(k − 1)) / Σc over k independent groups: a ratio estimator's standard error."""
    groups = len(sums)
    if groups < 2:
        return None
    mean = sums.sum() / counts.sum()
    scatter = np.square(sums - counts * mean).sum() * groups / (groups - 1)
    return float(math.sqrt(scatter) / counts.sum())


def _neighbour_correlation(sums: Array, counts: Array) -> float:
    """The correlation between consecutive batches of a run."""
    deviations = sums - counts * (sums.sum() / counts.sum())
    variance = np.square(deviations).sum()
    if variance <= 0 or sums.shape[1] < 2:
        return 0.0
    return float((deviations[:, 1:] * deviations[:, :-1]).sum() / variance)


def _merge(values: Array) -> Array:
    """Pairs of neighbours added up; an odd one at the end joins the last pair."""
    pairs = values.shape[1] // 2
    merged: Array = values[:, : 2 * pairs].reshape(len(values), pairs, 2).sum(axis=2)
    if values.shape[1] % 2:
        merged[:, -1] += values[:, -1]
    return merged
