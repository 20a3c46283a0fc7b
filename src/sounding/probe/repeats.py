"""Repeated samples in a batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sounding.probe.outputs import sample_axis


def repeated_fraction(inputs: Iterable[Tensor], batch_size: int, *, first: int = 0) -> float:
    """The fraction of samples that equal an earlier one in every input tensor; 0 for a batch of different samples.

    Tensors without an axis of the batch's size (a mask, a constant) are the same for all samples and have no say.

    >>> repeated_fraction([torch.tensor([[1, 2], [3, 4], [1, 2], [1, 2]])], 4)
    0.5
    """
    keys: list[list[bytes]] = [[] for _ in range(batch_size)]
    for tensor in inputs:
        axis = sample_axis(tensor, batch_size, first=first)
        if axis is None or tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
            continue
        rows = tensor.detach().movedim(axis, 0).reshape(batch_size, -1)
        values = (rows.float() if rows.is_floating_point() else rows).cpu().numpy()
        for key, row in zip(keys, values, strict=True):
            key.append(row.tobytes())
    return 1 - len({tuple(key) for key in keys}) / batch_size if batch_size and keys[0] else 0.0
