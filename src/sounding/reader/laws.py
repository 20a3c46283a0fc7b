"""The law of a weight's entries, as the module holds them, with a test of how sure it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sounding.theory.signal.description import Law

# The kurtosis of n entries scatters by √(24/n) around 3; entries beyond 20 000 add time and no certainty that matters.
ENTRIES = 20_000
SURE = 4.0  # standard errors within which a law is accepted: one false refusal in 16 000 weights
KURTOSIS = {"gaussian": 3.0, "uniform": 1.8}
# A row or column of a random matrix has a norm that scatters by √(2/n); an orthogonal one has none.
ORTHOGONAL = 1e-3
NEAR = 1e-6  # of the mean square: the square of a mean below it costs a variance 1e-6 of its digits and no more


@dataclass(frozen=True)
class Surveyed:
    """A law and the evidence for it.

    Args:
        law: of the entries.
        mean_error: the mean's distance from zero in standard errors.
        shape_error: the kurtosis' distance from that of the named shape in standard errors, NaN where none fits.
    """

    law: Law
    mean_error: float
    shape_error: float


def survey_law(weight: Tensor, *, entries: Tensor | None = None) -> Surveyed:
    """The law of a tensor's entries: mean, variance, and which shape its fourth moment and its range fit.

    The moments are those of `entries` where a caller has drawn some of them from a large tensor. A mean within four
    standard errors of zero is taken as zero: a random matrix has such a mean by chance, and theory would otherwise add
    it up over the features.
    """
    entries = (weight if entries is None else entries).detach().double().flatten()
    count = entries.numel()
    mean = float(entries.mean()) if count else math.nan
    if not math.isfinite(mean):
        return Surveyed(Law(math.nan, shape="other"), math.nan, math.nan)
    square, centred = float(torch.dot(entries, entries)) / count, entries
    variance = square - mean**2
    if not mean**2 < NEAR * square:  # the difference of two large numbers would be rounding
        centred = entries - mean
        variance = float(torch.dot(centred, centred)) / count
    if variance <= 1e-14 * mean**2 or variance == 0.0:
        return Surveyed(Law(0.0, mean, "constant"), math.inf if mean else 0.0, 0.0)
    mean_error = abs(mean) / math.sqrt(variance / count)
    if weight.dim() > 1 and mean_error < SURE:
        mean, variance, centred = 0.0, square, entries
    elif centred is entries:
        centred = entries - mean
    sampled = centred[:: max(1, count // ENTRIES)] / math.sqrt(variance)
    largest = max(abs(end.item()) for end in torch.aminmax(sampled))
    squares = sampled.square_()
    kurtosis = float(torch.dot(squares, squares)) / squares.numel()  # pow(4) takes ten times as long
    shape, shape_error = _shape(largest, squares.numel(), kurtosis)
    if weight.dim() == 2 and _is_orthogonal(weight):
        shape = "orthogonal"
    return Surveyed(Law(variance, mean, shape, kurtosis), mean_error, shape_error)


def law_of(weight: Tensor | None, default: Law) -> Law:
    """The law of a tensor's entries, or the default where there is no tensor."""
    return default if weight is None else survey_law(weight).law


def _shape(largest: float, count: int, kurtosis: float) -> tuple[str, float]:
    """The named shape whose kurtosis and largest entry fit, and how many standard errors the kurtosis is off."""
    if largest <= math.sqrt(3.0) * 1.02:
        # a uniform law's fourth power scatters by √(144/175) around 9/5
        return "uniform", abs(kurtosis - KURTOSIS["uniform"]) / math.sqrt(144 / 175 * 9 / count)
    error = abs(kurtosis - KURTOSIS["gaussian"]) / math.sqrt(24.0 / count)
    if error < SURE:
        return "gaussian", error
    # cut at ±2 standard deviations, a Gaussian has the variance 0.774 and the kurtosis 2.37
    truncated = abs(kurtosis - 2.37) / math.sqrt(8.0 / count)
    return ("truncated", truncated) if largest < 2.4 and truncated < 2 * SURE else ("other", math.nan)


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
