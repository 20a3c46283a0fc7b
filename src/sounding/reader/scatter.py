"""Measures of Gram matrices in the mean over seeds, and how far they scatter: many matrices of one size at once.

A network does not show its Gram matrix G but G + E, where E is what a mean over some number of directions, Gaussian
features, scatters around G. To first order a measure moves by Σ M_ab E_ab, of variance 2 tr(M G M G) / directions. What
all features share (the mean of rectified values) does not scatter by itself, only together with the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sounding.theory.signal.description import Array

Moments = tuple[Array, Array]  # means and standard deviations over seeds, one of each for every matrix

# What theory itself may be off by beyond the scatter over seeds, as a share of the noise's own first order: terms of
# the next order in 1/width. Chosen on MLPs, a convolutional network and transformers of width 64 to 256.
NEXT_ORDER = 0.5
ROUNDING = 2e-4  # of float32 passes
# Terms of order 1/width that are not followed at all, per direction: the lengths of samples scatter too.
FLOORS: Mapping[str, float] = {
    "mean_cosine": 0.3,
    "distinct_share": 0.3,
    "participation_ratio": 0.3,
    "orthogonality_gap": 0.1,
}


@dataclass(frozen=True)
class Grams:
    """Gram matrices that scatter."""

    whole: Array  # G, (matrices, n, n)
    loose: Array  # G without what all features share, which alone scatters
    shared: Array  # (matrices, n), the root of the shared part's diagonal
    directions: Array  # (matrices,), of how many independent features each matrix is a mean

    @cached_property
    def traces(self) -> Array:
        """The trace of every matrix."""
        return np.asarray(np.einsum("kii->k", self.whole))

    @cached_property
    def squared(self) -> Array:
        """The squares of all entries that scatter."""
        return self.loose**2

    def participation(self, own: Array | float = 0.0) -> tuple[Array, Array, Array]:
        """(Σ G_aa)² / Σ G_ab² in the mean and as it is without scatter, and the relative deviation of the mean.

        It is the ratio of the means, to which E adds 2 Σ G_ab² and Σ G_ab² + (Σ G_aa)², over directions; `own` is what
        lengths of samples that scatter add to Σ G_ab².
        """
        traces, loose_traces = self.traces, np.einsum("kii->k", self.loose)
        squares, moved = np.einsum("kij,kij->k", self.whole, self.whole), self.squared.sum(axis=(1, 2))
        scattered = squares + own + (moved + loose_traces**2) / self.directions
        ratio = (traces**2 + 2 * moved / self.directions) / scattered
        # M = 2/tr G · 1 − 2/‖G‖² · G
        influence = (-2 / squares)[:, None, None] * self.whole
        np.einsum("kii->ki", influence)[:] += (2 / traces)[:, None]
        product = influence @ self.loose
        bent = _times(influence, self.shared)
        variance = 2 * np.einsum("kij,kji->k", product, product) + 4 * _between(bent, self.loose)
        return ratio, traces**2 / squares, np.sqrt(np.maximum(variance, 0.0) / self.directions)

    def deviation(self, own: Array, level: Array, scales: Array | None = None) -> Array:
        """The standard deviation of Σ M_ab E_ab for M = diag(own) + level 1 1ᵀ, row and column a scaled by scales_a.

        `own` and `scales` are (matrices, n), `level` is (matrices,); the trace of (M G)² needs no product of matrices.
        """
        scales = np.ones_like(self.shared) if scales is None else scales
        shared, sums = scales * self.shared, scales * _times(self.loose, scales)
        weighed = own * scales**2
        squares = _between(weighed, self.squared) + 2 * level * np.einsum("ki,ki->k", own, sums**2)
        squares += (level * sums.sum(axis=1)) ** 2
        bent = (own * shared + (level * shared.sum(axis=1))[:, None]) * scales
        variance = 2 * squares + 4 * _between(bent, self.loose)
        return np.asarray(np.sqrt(np.maximum(variance, 0.0) / self.directions))


def of_samples(grams: Grams, lengths: Array) -> dict[str, Moments]:
    """The measures of samples with these Gram matrices.

    Lengths whose squares scatter by the variance v of their logarithm, one v for each matrix in `lengths`, add e^v − 1
    to the squares of the diagonal and take e^(−v/4) off the others.
    """
    found = {"mean_cosine": cosines(grams)}
    count, traces = grams.whole.shape[-1], grams.traces
    own = np.einsum("kii,kii->k", grams.whole, grams.whole) * np.expm1(lengths)
    ratio, exact, relative = grams.participation(own)
    found["participation_ratio"] = ratio, _unsure("participation_ratio", ratio, exact, ratio * relative, grams)
    gap, still = (np.sqrt(np.maximum(1 / one - 1 / count, 0.0)) for one in (ratio, exact))
    deviation = np.divide(relative, 2 * ratio * gap, out=np.full_like(gap, 1 / count), where=gap > 0)
    found["orthogonality_gap"] = gap, _unsure("orthogonality_gap", gap, still, deviation, grams)
    whole = grams.whole.sum(axis=(1, 2))
    share = 1 - (traces + (whole - traces) * np.exp(-lengths / 4)) / (count * traces)
    even = np.broadcast_to((whole / (count * traces**2))[:, None], grams.shared.shape)
    deviation = grams.deviation(even, -1 / (count * traces))
    exact = 1 - whole / (count * traces)
    found["distinct_share"] = share, _unsure("distinct_share", share, exact, deviation, grams)
    return found


def cosines(grams: Grams) -> Moments:
    """The mean cosine between different samples."""
    count, squared = grams.whole.shape[-1], np.einsum("kii->ki", grams.whole)
    inverse = 1 / np.sqrt(np.maximum(squared, 1e-12 * squared.mean(axis=1, keepdims=True)))
    sums = inverse * _times(grams.whole, inverse)
    each = 1 / (count * (count - 1))
    average = (sums.sum(axis=1) - count) * each
    # the influence of a pair is 1/(n (n − 1)), and of a sample's length what its cosines lose by it
    own = -each * (1 + sums - squared * inverse**2)
    deviation = grams.deviation(own, np.full(len(average), each), inverse)
    return average, _unsure("mean_cosine", average, average, deviation, grams)


def of_positions(grams: Grams) -> Moments:
    """The participation ratio across the positions of a sample, a matrix for each sample."""
    ratio, exact, relative = grams.participation()
    floor = FLOORS["participation_ratio"] / grams.directions
    return ratio, np.hypot(np.hypot(ratio * relative, NEXT_ORDER / 2 * np.abs(ratio - exact)), floor)


def _unsure(measure: str, mean: Array, exact: Array, deviation: Array, grams: Grams) -> Array:
    """A standard deviation with what is left out: what a finite width adds to a mean is known to first order only."""
    more = NEXT_ORDER / 2 * np.abs(mean - exact), FLOORS[measure] / grams.directions, ROUNDING * np.abs(mean)
    return np.asarray(np.sqrt(deviation**2 + sum(one**2 for one in more)))


def _times(matrices: Array, vectors: Array) -> Array:
    return np.asarray((matrices @ vectors[:, :, None])[:, :, 0])


def _between(vectors: Array, matrices: Array) -> Array:
    """vᵀ M v of every vector and matrix."""
    return np.asarray(np.einsum("ki,ki->k", vectors, _times(matrices, vectors)))
