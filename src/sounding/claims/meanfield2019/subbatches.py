"""Batch norm whose statistics are those of a part of the batch."""

from __future__ import annotations

from torch import Tensor, nn


class SubBatchNorm(nn.Module):
    """Batch norm without scale, shift and running statistics, over consecutive groups of `size` samples.

    meanfield2019, figure 2b: the batch of the optimizer stays the same while the batch that is normalized shrinks.
    Samples that are not a multiple of `size` are one group.
    """

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps

    def forward(self, input: Tensor) -> Tensor:
        """(samples, features) in, the same out."""
        size = self.size if input.shape[0] % self.size == 0 else input.shape[0]
        groups = input.reshape(-1, size, input.shape[1])
        centred = groups - groups.mean(1, keepdim=True)
        scaled = centred * (centred.square().mean(1, keepdim=True) + self.eps).rsqrt()
        return scaled.reshape(input.shape)
