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
ROWS_BESIDE = 3  # behind a partial Gram matrix: squares of the samples, their products with the mean, single numbers
# Columns of a tile, warps of a program and programs for each multiprocessor, by the rows of a tile.
TILES = {16: (128, 2, 8), 32: (128, 4, 4), 64: (64, 4, 4), 128: (64, 8, 2)}
TOGETHER = 16  # partial sums that are loaded at a time


def can_fuse(samples: Tensor) -> bool:
    """Whether the kernels take this sample matrix (n, d)."""
    return (
        samples.is_cuda
        and samples.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and samples.shape[0] <= MOST_SAMPLES
        and samples.shape[1] >= LEAST_COLUMNS
        and samples.stride(1) == 1
        and _kernels_run(samples.get_device(), samples.dtype)
    )


@functools.cache
def _kernels_run(device: int, dtype: torch.dtype) -> bool:
    """Whether Triton is there and can compile: it needs a C compiler, which not every machine has."""
    if importlib.util.find_spec("triton") is None:
        return False
    samples = torch.zeros(2, 1000, dtype=dtype, device=f"cuda:{device}")
    out = torch.empty(2, 2, dtype=torch.float64, device=samples.device)
    try:
        multiply_fused(samples, out, averaging=True)
    except Exception:  # whatever it lacks, products in float64 serve as well, at more cost
        return False
    return True


def multiply_fused(samples: Tensor, out: Tensor, *, averaging: bool) -> tuple[Tensor, Tensor | None]:
    """Put the inner products of the samples (n, d) into `out` (n, n), NaN where an entry is not finite.

    Args:
        samples: the matrix, with its columns beside each other in memory.
        out: a matrix of float64.
        averaging: whether the mean sample is wanted.

    Returns:
        The number of entries that are not finite, and the mean sample (d,), or None.
    """
    n, d = samples.shape
    rows = max(triton.next_power_of_2(n), 16)  # a product of tiles has at least 16 rows
    columns, warps, programs = TILES[rows]
    programs *= torch.cuda.get_device_properties(samples.device).multi_processor_count
    share = columns * triton.cdiv(d, columns * programs)  # columns of a program
    parts = triton.cdiv(d, share)
    partial = torch.empty(parts, rows + ROWS_BESIDE, rows, dtype=torch.float32, device=samples.device)
    means = torch.empty(d, dtype=torch.float32, device=samples.device) if averaging else None
    broken = torch.empty((), dtype=torch.float64, device=samples.device)
    with torch.cuda.device_of(samples):  # Triton launches on the device that is current
        _collect[(parts,)](
            samples, samples.stride(0), partial, means, n, d, share, AVERAGING=averaging, ROWS=rows, COLUMNS=columns,
            num_warps=warps,
        )  # fmt: skip
        _add_up[(n,)](partial, parts, out, out.stride(0), broken, n, ROWS=rows, TOGETHER=TOGETHER, num_warps=4)
    return broken, means


@triton.jit
def _collect(
    samples, stride, partial, means, n, d, share, AVERAGING: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """A program: some columns of all samples; their centred products, and what restores the mean, as partial sums."""
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
    place = partial + program * (ROWS + 3) * ROWS
    tl.store(place + row[:, None] * ROWS + row[None, :], gram + tl.trans(gram))
    place += ROWS * ROWS
    tl.store(place + row, squares)
    tl.store(place + ROWS + row, cross)
    tl.store(place + 2 * ROWS, tl.sum(level, 0))
    tl.store(place + 2 * ROWS + 1, tl.sum(broken, 0))
    tl.store(place + 2 * ROWS + 2, scale)


@triton.jit
def _add_up(partial, parts, out, stride, broken_out, n, ROWS: tl.constexpr, TOGETHER: tl.constexpr):
    """A program: one row of the inner products, out of all partial sums, in float64."""
    line = tl.program_id(0)
    row = tl.arange(0, ROWS)
    found = tl.zeros((ROWS,), tl.float64)
    cross = tl.zeros((ROWS,), tl.float64)
    square = tl.zeros((TOGETHER,), tl.float64)
    level = tl.zeros((TOGETHER,), tl.float64)
    broken = tl.zeros((TOGETHER,), tl.float64)
    for start in range(0, parts, TOGETHER):
        part = start + tl.arange(0, TOGETHER)
        there = part < parts
        place = partial + part.to(tl.int64) * (ROWS + 3) * ROWS
        beside = place + ROWS * ROWS
        scale = tl.load(beside + 2 * ROWS + 2, mask=there, other=0.0).to(tl.float64)
        weight = scale * scale
        taken = there[:, None] & (row[None, :] < ROWS)
        products = tl.load(place[:, None] + line * ROWS + row[None, :], mask=taken, other=0.0)
        found += tl.sum(products * weight[:, None], 0)
        means = tl.load(beside[:, None] + ROWS + row[None, :], mask=taken, other=0.0)
        cross += tl.sum(means * weight[:, None], 0)
        square += tl.load(beside + line, mask=there, other=0.0) * weight
        level += tl.load(beside + 2 * ROWS, mask=there, other=0.0) * weight
        broken += tl.load(beside + 2 * ROWS + 1, mask=there, other=0.0)
    own = row == line
    count = tl.sum(broken, 0)
    found = tl.where(own, tl.sum(square, 0), found)
    found += cross + tl.sum(tl.where(own, cross, 0.0), 0) + tl.sum(level, 0)
    found = tl.where(count > 0, float("nan"), found)
    tl.store(out + line * stride + row, found, mask=row < n)
    if line == 0:
        tl.store(broken_out, count)
