"""The law of a weight's entries, as the module holds them, with a test of how sure it is."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from sounding.theory.signal.description import Law

# The kurtosis of n entries scatters by √(24/n) around 3; entries beyond 20 000 add time and no certainty that matters.
ENTRIES = 20_000
SURE = 4.0  # standard errors within which a law is accepted: one false refusal in 16 000 weights
# A row or column of a random matrix has a norm that scatters by √(2/n); an orthogonal one has none.
ORTHOGONAL = 1e-3
BALANCED = 1e-6  # the squared sum of random weights is that of their squares; rounding leaves 1e-12
NEAR = 1e-6  # of the mean square: the square of a mean below it costs a variance 1e-6 of its digits and no more


def survey_law(weight: Tensor, *, entries: Tensor | None = None) -> Law:
    """The law of a tensor's entries: mean, variance, and which shape its fourth moment and its range fit.

    The moments are those of `entries` where a caller has drawn some of them from a large tensor. A mean within four
    standard errors of zero is taken as zero: a random matrix has such a mean by chance, and theory would otherwise add
    it up over the features.
    """
    entries = (weight if entries is None else entries).detach().double().flatten()
    count = entries.numel()
    mean = float(entries.mean()) if count else math.nan
    if not math.isfinite(mean):
        return Law(math.nan, shape="other")
    square, centred = float(torch.dot(entries, entries)) / count, entries
    variance = square - mean**2
    if not mean**2 < NEAR * square:  # the difference of two large numbers would be rounding
        centred = entries - mean
        variance = float(torch.dot(centred, centred)) / count
    if variance <= 1e-14 * mean**2 or variance == 0.0:
        return Law(0.0, mean, "constant")
    # the mean of a bias is kept: its few entries are what they are, and no matrix adds them up
    if weight.dim() > 1 and is_chance(mean, variance, count):
        mean, variance, centred = 0.0, square, entries
    elif centred is entries:
        centred = entries - mean
    sampled = centred[:: max(1, count // ENTRIES)] / math.sqrt(variance)
    largest = max(abs(end.item()) for end in torch.aminmax(sampled))
    squares = sampled.square_()
    kurtosis = float(torch.dot(squares, squares)) / squares.numel()  # pow(4) takes ten times as long
    orthogonal = weight.dim() == 2 and _is_orthogonal(weight)
    return Law(variance, mean, "orthogonal" if orthogonal else _shape(largest, squares.numel(), kurtosis), kurtosis)


def is_balanced(weight: Tensor) -> bool:
    """Whether the entries of every output, along the first axis, sum to zero, as those of standardized weights do."""
    rows = weight.detach()[:2].flatten(1).double()  # no random row does
    return bool((rows.sum(1).square() < BALANCED * rows.square().sum(1)).all())


def is_chance(mean: float, variance: float, count: int) -> bool:
    """Whether so many entries of mean zero and this variance may well have such a mean."""
    return abs(mean) / math.sqrt(variance / count) < SURE


def _shape(largest: float, count: int, kurtosis: float) -> str:
    """The named shape that the largest entry, in standard deviations, and the kurtosis fit."""
    if largest <= math.sqrt(3.0) * 1.02:  # a uniform law ends at √3 standard deviations
        return "uniform"
    if abs(kurtosis - 3.0) / math.sqrt(24.0 / count) < SURE:
        return "gaussian"
    # cut at ±2 standard deviations, a Gaussian has the variance 0.774 and the kurtosis 2.37
    truncated = abs(kurtosis - 2.37) / math.sqrt(8.0 / count) < 2 * SURE
    return "truncated" if largest < 2.4 and truncated else "other"


def _is_orthogonal(weight: Tensor) -> bool:
    """Whether the rows or the columns of a matrix, whichever are fewer, are orthogonal and of one length."""
    wide = weight.detach()
    wide = wide if wide.shape[0] <= wide.shape[1] else wide.T
    # two rows of a random matrix give it away mostly; 64 are looked at where they do not
    return len(wide) > 1 and all(_are_orthogonal(wide[:count].cpu().double()) for count in (2, 64))


def _are_orthogonal(rows: Tensor) -> bool:
    gram = (rows @ rows.T).numpy()
    scale = gram.trace() / len(gram)
    return bool(scale > 0 and np.abs(gram / scale - np.eye(len(gram))).max() < ORTHOGONAL)
