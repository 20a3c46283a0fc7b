# mypy: ignore-errors
# ruff: noqa: SIM108
"""Triton kernels for batch norm in a stack, one pass over memory each way; `train.operations` is the reference.

A program takes some features of one run with all its samples, so that mean, variance and the sums of the backward pass
stay in registers.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # nothing below is called then, but documentation tools still read it
    from types import SimpleNamespace

    triton, tl = SimpleNamespace(jit=lambda function: function), SimpleNamespace(constexpr=float)

LARGEST_BATCH = 512  # samples that fit the registers of a program
TILE = 4096  # values of a program


def can_fuse(x: Tensor) -> bool:
    """Whether the kernels take this batch, (runs, samples, features)."""
    return (
        x.is_cuda
        and x.shape[1] <= LARGEST_BATCH
        and x.dtype in (torch.float32, torch.float64)
        and importlib.util.find_spec("triton") is not None
    )


@triton.jit
def _forward(
    x, output, mean_out, variance_out, inverse_out, bias, scale, shift, eps_each, eps,
    samples, features,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, EPS_EACH: tl.constexpr,
    CENTRED: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program of the forward pass: some features of one run, normalized, scaled, shifted and rectified."""
    run = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    inside = (row[:, None] < samples) & (column[None, :] < features)
    place = run * samples * features + row[:, None] * features + column[None, :]
    vector = run * features + column
    valid = column < features
    values = tl.load(x + place, mask=inside, other=0.0)
    if HAS_BIAS:
        values = tl.where(inside, values + tl.load(bias + vector, mask=valid, other=0.0)[None, :], 0.0)
    mean = tl.sum(values, axis=0) / samples
    if CENTRED:
        values = tl.where(inside, values - mean[None, :], 0.0)
    variance = tl.sum(values * values, axis=0) / samples
    if EPS_EACH:
        inverse = 1.0 / tl.sqrt(variance + tl.load(eps_each + run))
    else:
        inverse = 1.0 / tl.sqrt(variance + eps)
    normal = values * inverse[None, :]
    tl.store(x + place, normal, mask=inside)
    if HAS_SCALE:
        normal = normal * tl.load(scale + vector, mask=valid, other=0.0)[None, :]
    if HAS_SHIFT:
        normal = normal + tl.load(shift + vector, mask=valid, other=0.0)[None, :]
    if RELU:
        normal = tl.where(normal > 0, normal, tl.where(normal == normal, 0.0, normal))
    tl.store(output + place, normal, mask=inside)
    if CENTRED:
        tl.store(mean_out + vector, mean, mask=valid)
    tl.store(variance_out + vector, variance, mask=valid)
    tl.store(inverse_out + vector, inverse, mask=valid)


@triton.jit
def _backward(
    gradient, output, normal, inverse, scale, back, of_scale, of_shift, of_bias,
    samples, features,
    HAS_SCALE: tl.constexpr, CENTRED: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program of the backward pass: the gradient of some features of one run, and its sums over samples."""
    run = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    inside = (row[:, None] < samples) & (column[None, :] < features)
    place = run * samples * features + row[:, None] * features + column[None, :]
    vector = run * features + column
    valid = column < features
    delta = tl.load(gradient + place, mask=inside, other=0.0)
    if RELU:
        delta = tl.where(tl.load(output + place, mask=inside, other=0.0) > 0, delta, 0.0)
    hat = tl.load(normal + place, mask=inside, other=0.0)
    total = tl.sum(delta, axis=0)
    along = tl.sum(delta * hat, axis=0)
    tl.store(of_shift + vector, total, mask=valid)
    tl.store(of_scale + vector, along, mask=valid)
    if CENTRED:
        delta = delta - (total / samples)[None, :]
    factor = tl.load(inverse + vector, mask=valid, other=0.0)
    if HAS_SCALE:
        factor = factor * tl.load(scale + vector, mask=valid, other=0.0)
    delta = tl.where(inside, (delta - hat * (along / samples)[None, :]) * factor[None, :], 0.0)
    tl.store(back + place, delta, mask=inside)
    tl.store(of_bias + vector, tl.sum(delta, axis=0), mask=valid)


def _tile(samples: int) -> tuple[int, int]:
    rows = max(16, triton.next_power_of_2(samples))
    return rows, max(8, min(64, TILE // rows))


def normalize_fused_(
    x: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    *,
    eps: float | Tensor,
    centred: bool,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Batch norm of x + bias: γ x̂ + β (with ReLU if asked), x̂ in the place of x, 1/√(v + eps), m, v."""
    runs, samples, features = x.shape
    output = torch.empty_like(x)
    mean, variance, inverse = (x.new_empty(runs, 1, features) for _ in range(3))
    rows, columns = _tile(samples)
    if x.dtype == torch.float64 and not isinstance(eps, Tensor):  # a number would travel in single precision
        eps = x.new_full((runs,), eps)
    each = isinstance(eps, Tensor)
    _forward[(runs, triton.cdiv(features, columns))](
        x, output, mean, variance, inverse, x if bias is None else bias, x if scale is None else scale,
        x if shift is None else shift,
        eps if each else x, 0.0 if each else float(eps), samples, features,
        HAS_BIAS=bias is not None, HAS_SCALE=scale is not None, HAS_SHIFT=shift is not None, EPS_EACH=each,
        CENTRED=centred, RELU=relu, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return output, x, inverse, mean if centred else x.new_zeros(()), variance


def normalize_backward_fused(
    gradient: Tensor, output: Tensor | None, normal: Tensor, inverse: Tensor, scale: Tensor | None, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """∂L/∂x, ∂L/∂γ, ∂L/∂β, and the sum over samples of ∂L/∂x, a bias' gradient; through a ReLU where `output` is."""
    runs, samples, features = normal.shape
    back = torch.empty_like(normal)
    of_scale, of_shift, of_bias = (normal.new_empty(runs, features) for _ in range(3))
    rows, columns = _tile(samples)
    _backward[(runs, triton.cdiv(features, columns))](
        gradient.contiguous(), normal if output is None else output, normal, inverse,
        normal if scale is None else scale, back, of_scale, of_shift, of_bias, samples, features,
        HAS_SCALE=scale is not None, CENTRED=centred, RELU=output is not None, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return back, of_scale, of_shift, of_bias
