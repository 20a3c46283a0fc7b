# mypy: ignore-errors
"""Triton kernels for inner products of large sample matrices on a GPU: one pass over memory for each matrix.

The plain way (`probe.on_device`) converts the samples to float64 and reads them three times. Here a program takes some
columns with all samples, subtracts their mean, and multiplies the upper and lower digits of the rest in bfloat16, which
keep those of float32; sums over columns are added up in float64. Since the mean is taken off first, samples that differ
little keep the digits of what differs.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # nothing below is called then, but documentation tools still read it
    from types import SimpleNamespace

    triton, tl = SimpleNamespace(jit=lambda function: function), SimpleNamespace(constexpr=float)

MOST_SAMPLES = 128  # whose Gram matrix fits the registers of a program
# Columns from which a float32 product will do. A singular value counts as zero below max(n, d)·eps of the largest
# (`reductions.reduce_spectrum`): with so many columns its square is 1e-5 of the largest eigenvalue, a hundred times the
# error of the product.
LEAST_COLUMNS = 2**15
# Columns of a tile, warps of a program and programs for each multiprocessor, by the rows of a tile: the fastest of some
# sixty choices on an H200, for 50 000 to 800 000 columns.
TILES = {16: (128, 4, 2), 32: (128, 4, 2), 64: (64, 4, 2), 128: (32, 8, 1)}


def can_fuse(samples: Tensor) -> bool:
    """Whether the kernel takes this sample matrix (n, d)."""
    return (
        samples.is_cuda
        and samples.shape[1] >= LEAST_COLUMNS
        and samples.shape[0] <= MOST_SAMPLES
        and samples.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and samples.stride(1) == 1
        and _programs(samples.get_device()) > 0
    )


@functools.cache
def _programs(device: int) -> int:
    """How many multiprocessors the device has; 0 where Triton is not there, or has no compiler to work with."""
    if importlib.util.find_spec("triton") is None:
        return 0
    samples = torch.zeros(2, 1000, device=f"cuda:{device}")
    out, broken = torch.zeros(2, 2, dtype=torch.float64, device=samples.device), torch.zeros((), device=samples.device)
    try:
        _launch(samples, out, broken, None, programs=1)
    except Exception:  # whatever it lacks, products in float64 serve as well, at more cost
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def multiply_fused(samples: Tensor, out: Tensor, broken: Tensor, *, averaging: bool) -> Tensor | None:
    """Add the inner products of the samples (n, d) to `out`, and the number of entries that are not finite to `broken`.

    Where there are any, `out` becomes NaN.

    Args:
        samples: the matrix, with its columns beside each other in memory.
        out: a matrix (n, n) of float64.
        broken: a number of float32.
        averaging: whether the mean sample (d,) is wanted, which is returned.
    """
    means = torch.empty(samples.shape[1], dtype=torch.float32, device=samples.device) if averaging else None
    _launch(samples, out, broken, means, programs=_programs(samples.get_device()))
    return means


def _launch(samples: Tensor, out: Tensor, broken: Tensor, means: Tensor | None, *, programs: int) -> None:
    n, d = samples.shape
    rows = max(triton.next_power_of_2(n), 16)  # a product of tiles has at least 16 rows
    columns, warps, each = TILES[rows]
    share = columns * -(-d // (columns * each * programs))  # columns of a program
    with torch.cuda.device_of(samples):  # Triton launches on the device that is current
        _collect[(-(-d // share),)](
            samples, samples.stride(0), out, out.stride(0), broken, means, n, d, share, AVERAGING=means is not None,
            ROWS=rows, COLUMNS=columns, num_warps=warps,
        )  # fmt: skip


@triton.jit
def _collect(
    samples, stride, out, out_stride, broken_out, means, n, d, share,
    AVERAGING: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program: some columns of all samples, whose inner products it adds to those of the others."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    gram = tl.zeros((ROWS, ROWS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    cross = tl.zeros((ROWS,), tl.float32)
    broken = tl.zeros((ROWS,), tl.float32)
    level = tl.zeros((COLUMNS,), tl.float32)
    scale = 1.1754943508222875e-38  # the smallest normal float32: a power of two near the largest entry so far
    for offset in range(0, share, COLUMNS):
        column = program * share + offset + tl.arange(0, COLUMNS)
        valid = column < d
        inside = (row[:, None] < n) & valid[None, :]
        values = tl.load(samples + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)
        values = values.to(tl.float32)
        spoilt = values - values != 0.0
        broken += tl.sum(spoilt.to(tl.float32), 1)
        values = tl.where(spoilt, 0.0, values)
        # Squares of what is far from 1 would leave float32. The power of two below the largest entry is found by its
        # bits; what was summed up so far is brought to the new scale.
        peak = tl.max(tl.max(tl.abs(values), 1), 0)
        power = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        wider = tl.maximum(scale, tl.minimum(power, 8.507059173023462e37))
        shrink = (scale / wider) * (scale / wider)
        scale = wider
        values = values * (1.0 / scale)
        mean = tl.sum(values, 0) / n
        if AVERAGING:
            tl.store(means + column, mean * scale, mask=valid)
        values = tl.where(inside, values - mean[None, :], 0.0)
        # Half of the products: of c = high + low, both of bfloat16, the sum of ½·high·highᵀ + high·lowᵀ and of its
        # transpose lacks low·lowᵀ alone, which is 2⁻¹⁸ of it. Each tile has a sum of its own, since the accumulators
        # of tensor cores cut off digits instead of rounding.
        high = values.to(tl.bfloat16)
        low = (values - high.to(tl.float32)).to(tl.bfloat16)
        half = (high.to(tl.float32) * 0.5).to(tl.bfloat16)
        gram = gram * shrink + tl.dot(high, tl.trans(low), tl.dot(high, tl.trans(half)))
        squares = squares * shrink + tl.sum(values * values, 1)
        cross = cross * shrink + tl.sum(values * mean[None, :], 1)
        level = level * shrink + mean * mean
    # ⟨h_i, h_j⟩ = ⟨c_i, c_j⟩ + b_i + b_j + M, see `reductions`
    weight = scale.to(tl.float64) * scale.to(tl.float64)
    gram = tl.where(row[:, None] == row[None, :], squares[:, None], gram + tl.trans(gram))
    products = gram.to(tl.float64) + cross.to(tl.float64)[:, None] + cross.to(tl.float64)[None, :]
    products = (products + tl.sum(level, 0).to(tl.float64)) * weight
    count = tl.sum(broken, 0)
    products = tl.where(count > 0, float("nan"), products)
    kept = (row[:, None] < n) & (row[None, :] < n)
    tl.atomic_add(out + row[:, None] * out_stride + row[None, :], products, mask=kept, sem="relaxed")
    if count > 0:
        tl.atomic_add(broken_out, count, sem="relaxed")
