"""Whether all samples pull the last layer the same way: directional gradient vanishing (rank2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sounding.measures import gradient_alignment
from sounding.probe.calls import OpenCall
from sounding.probe.late import Late
from sounding.probe.outputs import sample_axis

OUTPUTS = 64  # rows of the weight looked at, evenly spread; a vocabulary has too many
BROKEN = "the gradients of the last layer are not finite"
SEQUENCES = 32  # samples looked at where each has many positions


@dataclass
class LastLayer:
    """The last weight layer of a pass: what came in, until the gradient of what went out is known.

    The input is the tensor autograd keeps for the weight's gradient anyway, so holding it costs nothing.
    """

    call: OpenCall
    received: Tensor
    version: int
    batch_size: int
    axis: int


def align(last: LastLayer, gradient: Tensor, *, limit: int) -> float | str:
    """The mean |cosine| between the samples' gradients of a row of the last weight, mean over its rows that have any.

    The gradient of the batch loss with respect to row k is Σ_i g_ik, with g_ik = Σ_t δ_itk a_it over the positions t of
    sample i, a its input to the layer and δ the gradient of the batch loss with respect to its output. g_ik is what
    sample i contributes. That is exact under batch normalization too, where a "loss of one sample" does not exist: the
    contributions add up to the gradient of the batch. For one position |cos(g_ik, g_jk)| = |cos(a_i, a_j)| whatever the
    loss, which is Proposition 8 of rank2020: collapsed features align every row.

    Returns:
        A number, or the reason why there is none.
    """
    module, name = last.call.spec.module, last.call.name
    if not isinstance(module, nn.Linear):
        return f"the last weight layer {name!r} is a {type(module).__name__}; alignment is defined for a linear layer"
    if last.received._version != last.version:
        return f"the input of {name!r} was changed in place after it was used"
    received = last.received.detach()
    if (
        received.dim() == gradient.dim() == 2
        and len(received) == len(gradient) == last.batch_size > 1
        and not last.axis
    ):
        return _of_vectors(*_first(received, gradient, limit))  # the common case is spared the search for its axes
    inputs = _positions(received, last)
    deltas = _positions(gradient, last)
    if inputs is None or deltas is None or inputs.shape[:2] != deltas.shape[:2]:
        return f"the last weight layer {name!r} has no axis of the batch size {last.batch_size}"
    keep = limit if inputs.shape[1] == 1 else min(limit, SEQUENCES)
    inputs, deltas = _first(inputs, deltas, keep)
    if len(inputs) < 2:
        return "alignment between samples needs at least 2 of them"
    return _of_vectors(inputs[:, 0], deltas[:, 0]) if inputs.shape[1] == 1 else _of_sequences(inputs, deltas)


def _first(inputs: Tensor, deltas: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """The first samples, in float64, with as many rows of the weight as are looked at."""
    if len(inputs) > keep:
        inputs, deltas = inputs[:keep], deltas[:keep]
    if deltas.shape[-1] > OUTPUTS:
        rows = torch.linspace(0, deltas.shape[-1] - 1, OUTPUTS, device=deltas.device).round().long()
        deltas = deltas[..., rows]
    return inputs.double(), deltas.double()


@np.errstate(over="ignore", invalid="ignore")
def _of_vectors(inputs: Tensor, deltas: Tensor) -> float | str:
    """One position: row k compares the inputs of the samples it has a gradient for. (n, features), (n, rows).

    In numpy: between the steps of a training loop a small operation of torch costs several times as much. On a GPU the
    products of the inputs are taken there, and the rest is done when they are read.
    """
    if not inputs.is_cuda:
        x, d = inputs.cpu().numpy(), deltas.cpu().numpy()
        products = x @ x.T
        if not 0 < products.trace() < math.inf:  # a cosine has no scale, and float64 may not hold the squares
            peak = np.abs(x).max()
            x = x / (peak if 0 < peak < math.inf else 1.0)
            products = x @ x.T
        return _of_products(products, d)
    peak = inputs.abs().amax()
    scaled = inputs / torch.where((peak > 0) & peak.isfinite(), peak, 1.0)
    n = len(inputs)
    return Late(torch.cat([scaled @ scaled.mT, deltas], dim=1), lambda found: _of_products(found[:, :n], found[:, n:]))


@np.errstate(over="ignore", invalid="ignore")
def _of_products(products: np.ndarray, d: np.ndarray) -> float | str:
    """Mean |cosine| between the samples' gradients of one layer, from the products of its inputs and its deltas."""
    lengths = np.sqrt(products.diagonal())
    seen = lengths > 0
    inverse = seen / np.where(seen, lengths, 1.0)
    products = np.abs(products)
    if seen.all() and d.all() and math.isfinite(d.sum()):
        n = len(d)  # every row compares all samples, the rule outside dead units
        return _finite((float(inverse @ products @ inverse) - n) / (n * (n - 1)))
    cosines = inverse[:, None] * products * inverse
    present = ((d != 0) & seen[:, None]).astype(np.float64)
    count = present.sum(axis=0)
    together = (present * (cosines @ present)).sum(axis=0) - count
    return _mean_over_rows(together / np.maximum(count * (count - 1), 1), count > 1, d.sum(axis=0))


def _of_sequences(inputs: Tensor, deltas: Tensor) -> float | str:
    """Many positions: row k compares Σ_t δ_itk a_it. (n, positions, features), (n, positions, rows)."""
    peak = deltas.abs().amax()
    contributions = torch.einsum("ntd,ntk->knd", inputs, deltas / torch.where(peak > 0, peak, 1.0))
    alive = contributions.any(dim=2).sum(dim=1) > 1
    found = torch.stack([gradient_alignment(contributions), alive.double(), deltas.sum(dim=(0, 1))])
    return Late(found, _of_columns) if found.is_cuda else _of_columns(found.cpu().numpy())


def _of_columns(found: np.ndarray) -> float | str:
    scores, alive, sums = found
    return _mean_over_rows(scores, alive > 0, sums)


def _finite(score: float) -> float | str:
    return score if math.isfinite(score) else BROKEN


def _mean_over_rows(scores: np.ndarray, alive: np.ndarray, sums: np.ndarray) -> float | str:
    """The mean score; rows that fewer than two samples have a gradient for (dead units) say nothing, 0 when all are
    such. The sums of the gradients tell whether one of them is not finite."""
    if not np.isfinite(sums).all():
        return BROKEN
    return _finite(float(scores[alive].mean())) if alive.any() else 0.0


def _positions(tensor: Tensor, last: LastLayer) -> Tensor | None:
    """(samples, positions, features)."""
    axis = sample_axis(tensor, last.batch_size, first=last.axis)
    if axis is None:
        if tensor.dim() != 2 or tensor.shape[0] % last.batch_size:
            return None
        return tensor.reshape(last.batch_size, -1, tensor.shape[-1])
    if tensor.dim() < 2 or axis == tensor.dim() - 1:
        return None
    moved = tensor.transpose(0, axis)
    return moved.reshape(moved.shape[0], -1, moved.shape[-1])
