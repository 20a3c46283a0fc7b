"""What a residual addition does: how much a branch writes into its stream, and what the stream is like behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLES = 16  # of a batch that are looked at, as for the other measures across positions
FEATURES = 16  # a vector of fewer has no median worth the name
MEASURES = ("branch_over_stream", "branch_mean_square", "stream_mean_square", "largest_over_median", "token_cosine")


@dataclass(eq=False)
class Addition:
    """One addition of a branch to a stream.

    Args:
        at: how many module calls had ended before it.
        attends: whether the branch holds an attention.
        shape: of the stream, without its samples.
        sizes: mean squares of branch and stream before the addition.
        behind: (mean square, largest over median, token cosine) behind it; NaN where there are no positions.
        factor: the number that the stream is multiplied by on its way around the branch.
        again: whether the branch is a sum that holds the stream already.
        summed: whether the stream is a sum itself, and not what a norm or an activation has made of one.
    """

    at: int
    attends: bool
    shape: tuple[int, ...]
    sizes: Tensor
    behind: Tensor
    factor: float = 1.0
    again: bool = False
    summed: bool = False

    def values(self) -> dict[str, float]:
        """Measure → value, in the order of `MEASURES`."""
        branch, before = self.sizes.double().tolist()
        after, largest, cosine = self.behind.double().tolist()
        ratio = (branch / before) ** 0.5 if before > 0 else float("inf") if branch > 0 else float("nan")
        found = dict(zip(MEASURES, (ratio, branch, after, largest, cosine), strict=True))
        return {name: value for name, value in found.items() if value == value}  # not NaN


def sizes_of(branch: Tensor, stream: Tensor) -> Tensor:
    """The mean squares of a branch and of its stream."""
    return torch.stack([part.detach().double().square().mean() for part in (branch, stream)])


def look_behind(stream: Tensor, batch_size: int, axis: int) -> Tensor:
    """Mean square, largest entry over the median one, and mean cosine between the positions of a sample.

    The median is of the vector that holds the largest entry, without its zeros: positions that are padding, and the
    half that a ReLU cuts off, say nothing about the size of the others. The cosine is of (samples, positions,
    features), where ‖Σ u‖² over unit vectors is the sum of all cosines.
    """
    stream = stream.detach().float()
    features = stream if stream.dim() < 4 else stream.movedim(1, -1)
    vectors = features.reshape(-1, features.shape[-1] if features.shape[-1] >= FEATURES else features.numel()).abs()
    vector = vectors[vectors.argmax() // vectors.shape[-1]]
    largest = vector.max() / vector.masked_fill(vector == 0, torch.nan).nanmedian()
    cosine = torch.full((), torch.nan, device=stream.device)
    if stream.dim() == 3 and stream.shape[axis] == batch_size and stream.shape[1 - axis] > 1:
        points = stream.transpose(0, axis)
        units = torch.nn.functional.normalize(points, dim=-1)
        count = points.shape[1]
        cosine = ((units.sum(1).square().sum(-1) - count) / (count * (count - 1))).mean()
    return torch.stack([stream.square().mean(), largest, cosine])
