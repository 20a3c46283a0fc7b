"""Inner products of sample matrices on a GPU, in few kernels and without a look at any number.

On a CPU a matrix whose squares could leave the range of its type is found by its norm. To read a norm from a GPU costs
more than to scale every matrix by a power of two, which rounds nothing, so that is done to all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sounding.measures.inputs import power_of_two_below

PIECE = 2**12  # features multiplied at a time in one batched product; float32 sums over more lose digits
SLAB = 2**24  # entries taken to the type of the products at a time: 128 MiB in float64, half in float32


def product_type(samples: Tensor, *, full: bool) -> torch.dtype:
    """The type to multiply in: float64 for the spectral measures, and where the user lets float32 products be rounded
    to the ten bits of TF32, which a collapsed layer would not survive."""
    if full or samples.dtype == torch.float64 or (samples.is_cuda and _rounds_products()):
        return torch.float64
    return torch.float32


def _rounds_products() -> bool:
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is not None:
        return str(read("cuda", "matmul")) not in ("ieee", "none")
    return bool(torch.backends.cuda.matmul.allow_tf32)


def scale_rows_(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scale a stack of sample matrices (calls, n, d) in place; a matrix that is not finite becomes zero.

    Returns:
        The scales (calls,), and how many entries of each matrix are not finite (calls,).
    """
    broken = torch.count_nonzero(rows - rows, dim=(1, 2))
    scales = _scale_of(torch.linalg.vector_norm(rows, torch.inf, dim=(1, 2)))
    rows /= scales[:, None, None].to(rows.dtype)
    rows.masked_fill_((broken > 0)[:, None, None], 0.0)
    return scales, broken


def multiply(samples: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Centre the samples (n, d) and put their inner products into `out` (n, n).

    Returns:
        b and M as `reductions` has them, the mean sample, the scale that all of these are divided by (M and the
        products by its square), and how many entries are not finite.
    """
    n = samples.shape[0]
    peak = torch.linalg.vector_norm(samples, torch.inf)
    scale, spoiled = _scale_of(peak), ~peak.isfinite()
    divisor = scale.to(out.dtype)
    total = torch.zeros(n, n, dtype=torch.float64, device=out.device)
    cross = torch.zeros(n, dtype=torch.float64, device=out.device)
    squared_mean, broken = torch.zeros(2, dtype=torch.float64, device=out.device).unbind()
    means = []
    width = max(SLAB // n // PIECE, 1) * PIECE
    for slab in torch.split(samples, width, dim=1):
        broken += torch.count_nonzero(slab - slab)
        wide = slab.to(out.dtype, copy=True).div_(divisor).masked_fill_(spoiled, 0.0)
        mean = wide.mean(0)
        wide -= mean
        squared_mean += torch.linalg.vector_norm(mean, dtype=torch.float64).square()
        whole = wide.shape[1] // PIECE * PIECE
        for start, stop, size in ((0, whole, PIECE), (whole, wide.shape[1], wide.shape[1] - whole)):
            if stop > start:
                pieces = wide[:, start:stop].view(n, -1, size).transpose(0, 1)
                total += torch.bmm(pieces, pieces.mT).sum(0, dtype=torch.float64)
                cross += torch.bmm(pieces, mean[start:stop].view(-1, size, 1)).sum(0, dtype=torch.float64)[:, 0]
        means.append(mean)
    out.copy_(total)
    return cross, squared_mean, means[0] if len(means) == 1 else torch.cat(means), scale, broken


def _scale_of(peak: Tensor) -> Tensor:
    """The power of two below the largest entry; 1 where it is zero or not finite."""
    peak = peak.double()
    return power_of_two_below(torch.where((peak > 0) & peak.isfinite(), peak, 1.0))
