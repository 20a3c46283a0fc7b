"""Inner products of sample matrices on a GPU, in few kernels and without a look at any number.

On a CPU samples are centred before they are multiplied, and matrices whose squares could leave the range of their type
are found by their norm and scaled. A GPU would have to be asked for the norm, and each pass over the samples costs as
much as their products. In float64 neither is needed: the squares of narrower types have room, and of a layer in which
all samples are equal up to 1e-6 four digits of what differs are left. Large matrices take kernels of Triton where it is
installed (`product_kernels`), which read the samples once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sounding.probe.product_kernels import can_fuse, multiply_fused

PIECE = 2**12  # features multiplied at a time in one batched product: more leaves most of a GPU idle
MANY = 64  # samples from which one plain product keeps a GPU as busy
SHARE = 128  # entries in float64 at a time take this part of a GPU's memory: in fewer slabs Python is in the way less


def multiply(samples: Tensor, out: Tensor, broken: Tensor, *, alive: bool = False) -> Tensor | None:
    """Put the inner products of samples (n, d) into `out` (n, n), and the number of entries not finite into `broken`.

    Both hold zeros before. Where entries are not finite, products are not finite either. With `alive`, for samples that
    are not negative, a vector (d,) is returned that is zero where all of them are.
    """
    if can_fuse(samples):
        return multiply_fused(samples, out, broken, averaging=alive)
    n, d = samples.shape
    entries = torch.cuda.get_device_properties(out.device).total_memory // (8 * SHARE) if out.is_cuda else d * n
    width = max(entries // n // PIECE, 1) * PIECE
    if n >= MANY and d <= width:
        wide = samples.to(torch.float64, memory_format=torch.contiguous_format)
        torch.mm(wide, wide.mT, out=out)
        broken += count_broken(samples)
    else:
        for slab in torch.split(samples, width, dim=1):
            broken += count_broken(slab)
            wide = slab.to(torch.float64, memory_format=torch.contiguous_format)
            whole = wide.shape[1] // PIECE * PIECE
            for start, stop, size in ((0, whole, PIECE), (whole, wide.shape[1], wide.shape[1] - whole)):
                if stop > start:
                    pieces = wide[:, start:stop].view(n, -1, size).transpose(0, 1)
                    out += torch.bmm(pieces, pieces.mT).sum(0)
    return samples.amax(0) if alive else None


def count_broken(samples: Tensor) -> Tensor:
    """How many entries are not finite: those that are not zero when they are taken away from themselves."""
    found: Tensor = torch.linalg.vector_norm((samples - samples).float(), 0)
    return found


def fetch(parts: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU, by way of page-locked memory, which torch keeps for the next time.

    Into memory that was never touched, the 175 matrices of a ResNet-50 took 70 ms.
    """
    copies = [torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda) for part in parts]
    for copy, part in zip(copies, parts, strict=True):
        copy.copy_(part, non_blocking=True)
    for device in {part.device for part in parts if part.is_cuda}:
        torch.cuda.synchronize(device)
    return copies


def gather(parts: Sequence[Tensor]) -> list[Tensor]:
    """Flat tensors on the host: those of a GPU in one transfer for each type, the others as they are."""
    found = list(parts)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for at, part in enumerate(parts):
        if not part.is_cpu:
            groups.setdefault((part.device, part.dtype), []).append(at)
    for members in groups.values():
        whole = torch.cat([parts[at] for at in members]).cpu()
        for at, part in zip(members, torch.split_with_sizes(whole, [len(parts[at]) for at in members]), strict=True):
            found[at] = part
    return found


def centre_(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Turn Gram matrices (calls, n, n) into those of the centred samples, in place; gives b and M of `reductions`.

    With r_i = (1/n)·Σ_j G_ij the centred products are G_ij − r_i − r_j + M, M is the mean of r, and b_i = r_i − M. A
    matrix that is not finite becomes zero.
    """
    gram.masked_fill_(~gram.diagonal(dim1=1, dim2=2).sum(1).isfinite()[:, None, None], 0.0)
    means = gram.mean(2)
    squared_mean = means.mean(1)
    cross = means - squared_mean[:, None]
    gram -= means[:, :, None]
    gram -= cross[:, None, :]
    gram.diagonal(dim1=1, dim2=2).clamp_(min=0)
    return cross, squared_mean


def count_broken_(rows: Tensor) -> Tensor:
    """How many entries of each sample matrix of a stack (calls, n, d) are not finite; such matrices become zero."""
    broken: Tensor = torch.linalg.vector_norm(rows - rows, 0, dim=(1, 2))
    rows.masked_fill_((broken > 0)[:, None, None], 0.0)
    return broken
