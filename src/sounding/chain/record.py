"""What a batch of chains leaves behind: sums over batches of layers, and moments over runs at each profiled layer.

The measured layers of a run are split into a fixed number of consecutive batches, and only the sums over each batch are
kept: memory does not grow with depth. Means of long batches are nearly independent, whatever the correlation between
neighbouring layers, and give averages a standard error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sounding.activations.activation import Array

if TYPE_CHECKING:
    from sounding.chain.engine import Plan, Task

WAITING = 256  # layers whose values wait on the device and are reduced together: a GPU is asked for numbers rarely
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


@dataclass(frozen=True)
class LayerMoments:
    """Moments over runs at each profiled layer, mergeable."""

    layers: tuple[int, ...]
    mean: Array  # (layers, columns)
    scatter: Array  # (layers, columns, columns), sums of products of deviations from the mean
    runs: Array  # (layers,), how many runs reached each

    def merge(self, other: LayerMoments) -> LayerMoments:
        """The moments of both sets of runs together (Chan's update); layers that one alone reached stay as they are."""
        if len(other.layers) > len(self.layers):
            return other.merge(self)  # an interrupted task is the shorter one
        count = len(other.layers)
        mean, scatter, runs = self.mean.copy(), self.scatter.copy(), self.runs.copy()
        ours, theirs = runs[:count], other.runs
        total = ours + theirs
        with np.errstate(invalid="ignore"):
            difference = other.mean - mean[:count]
            outer = difference[:, :, None] * difference[:, None, :]
            scatter[:count] += other.scatter + outer * (ours * theirs / total)[:, None, None]
            # not mean + difference·share: an infinite measure would become NaN
            mean[:count] = (mean[:count] * ours[:, None] + other.mean * theirs[:, None]) / total[:, None]
        runs[:count] = total
        return LayerMoments(self.layers, mean, scatter, runs)


@dataclass(frozen=True)
class Record:
    """What one group of runs with one law left behind."""

    means: BatchMeans
    moments: LayerMoments | None
    layers: int  # how deep it came

    def merge(self, other: Record) -> Record:
        """The record of both groups of runs together."""
        means = BatchMeans(
            np.concatenate([self.means.sums, other.means.sums]), np.concatenate([self.means.counts, other.means.counts])
        )
        moments = self.moments.merge(other.moments) if self.moments and other.moments else self.moments
        return Record(means, moments, max(self.layers, other.layers))


class Recorder:
    """Collects rows of numbers from a task's chains, group by group (one group per law)."""

    def __init__(self, plan: Plan, task: Task) -> None:
        self.plan = plan
        self.groups, self.runs = len(task.laws), task.runs  # chains are ordered law by law
        self.batches = batch_count(plan.samples, plan.runs)
        self.sums = np.zeros((self.groups * self.runs, self.batches, len(plan.observer.columns)))
        self.counts = np.zeros(self.batches)
        self.taken = 0  # layers past the burn-in so far
        self._waiting: list[tuple[int, torch.Tensor]] = []
        self._layers: list[int] = []
        self._means: list[Array] = []
        self._scatters: list[Array] = []

    def add(self, layer: int, values: torch.Tensor) -> None:
        """Take the (chains, columns) numbers of a layer."""
        self._waiting.append((layer, values))
        if len(self._waiting) >= WAITING:
            self.flush()

    def flush(self) -> None:
        """Reduce the values that wait on the device."""
        if not self._waiting:
            return
        stacked = torch.stack([values for _, values in self._waiting])
        averaged = [index for index, (layer, _) in enumerate(self._waiting) if layer > self.plan.burn_in]
        # how many layers there will be is known beforehand, and so is the batch of each
        batches = [(self.taken + i) * self.batches // self.plan.samples for i in range(len(averaged))]
        for batch in sorted(set(batches)):
            chosen = [index for index, b in zip(averaged, batches, strict=True) if b == batch]
            self.sums[:, batch] += stacked[chosen[0] : chosen[-1] + 1].sum(dim=0).cpu().numpy()
            self.counts[batch] += len(chosen)
        self.taken += len(averaged)
        if self.plan.profile:
            by_group = stacked.view(len(stacked), self.groups, self.runs, -1)
            mean = by_group.mean(dim=2)
            deviations = by_group - mean.unsqueeze(2)
            self._layers += [layer for layer, _ in self._waiting]
            self._means.append(mean.cpu().numpy())
            self._scatters.append((deviations.mT @ deviations).cpu().numpy())
        self._waiting.clear()

    def records(self, layers: int) -> list[Record]:
        """One record per group."""
        self.flush()
        records = []
        for group in range(self.groups):
            rows = slice(group * self.runs, (group + 1) * self.runs)
            means = BatchMeans(self.sums[rows], np.tile(self.counts, (self.runs, 1)))
            moments = None
            if self._means:
                mean = np.concatenate(self._means)[:, group]
                scatter = np.concatenate(self._scatters)[:, group]
                moments = LayerMoments(tuple(self._layers), mean, scatter, np.full(len(mean), float(self.runs)))
            records.append(Record(means, moments, layers))
        return records
