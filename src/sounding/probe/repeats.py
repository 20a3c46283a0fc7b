"""Repeated samples in a batch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from sounding.probe.late import Late
from sounding.probe.outputs import sample_axis

MIXERS = (-7046029254386353131, -4658895280553007687)  # the odd factors of splitmix64, with bits everywhere
CHUNK = 2**22  # entries of which a GPU takes the digests at a time: 32 MiB of whole numbers


def repeated_fraction(inputs: Iterable[Tensor], batch_size: int, *, first: int = 0) -> float:
    """The fraction of samples that equal an earlier one in every input tensor; 0 for a batch of different samples.

    Tensors without an axis of the batch's size (a mask, a constant) are the same for all samples and have no say. On a
    GPU digests of the samples are compared, so that the batch need not be copied to the host; the number comes late.

    >>> repeated_fraction([torch.tensor([[1, 2], [3, 4], [1, 2], [1, 2]])], 4)
    0.5
    """
    found: list[Tensor] = []
    for tensor in inputs:
        axis = sample_axis(tensor, batch_size, first=first)
        if axis is None or tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
            continue
        rows = tensor.detach().movedim(axis, 0).reshape(batch_size, -1)
        rows = rows.float() if rows.is_floating_point() else rows
        found.append(digests(rows) if rows.is_cuda else rows)
    if not found or not batch_size:
        return 0.0
    if all(rows.is_cuda for rows in found):
        return Late(torch.cat([rows.to(found[0].device) for rows in found], dim=1), lambda rows: _share([rows]))
    return _share([rows.cpu().numpy() for rows in found])


def _share(found: list[np.ndarray]) -> float:
    keys = list(zip(*([row.tobytes() for row in rows] for rows in found), strict=True))
    return 1 - len(set(keys)) / len(keys)


def digests(rows: Tensor) -> Tensor:
    """Two whole numbers for each row (n, d) that are the same for equal rows, bit by bit, and by chance for no others.

    Sums modulo 2⁶⁴ of the entries' bits times factors that look random; in whole numbers the order does not matter.
    """
    total = torch.zeros(len(rows), len(MIXERS), dtype=torch.int64, device=rows.device)
    done = 0
    for part in torch.split(rows, max(CHUNK // max(len(rows), 1), 1), dim=1):
        bits = part.contiguous().view(torch.int32) if part.dtype is torch.float32 else part
        places = torch.arange(done + 1, done + 1 + part.shape[1], device=rows.device)
        for column, mixer in enumerate(MIXERS):
            factors = places * mixer
            factors = (factors ^ (factors >> 30)) * mixer
            total[:, column] += (bits.long() * (factors ^ (factors >> 27))).sum(dim=1)
        done += part.shape[1]
    return total
