"""The layers that normalization cures put into a model: plain modules, picklable, names of parameters kept."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sounding.errors import UsageError, require_known
from sounding.repair.layers import weight_of

Kind = Literal["batch", "layer", "rms", "none"]
Axis = Literal["last", "channel"]
EPS = 1e-5  # as in the other norms; RMSNorm alone would take the machine epsilon
KINDS: tuple[Kind, ...] = get_args(Kind)


class ChannelRMSNorm(nn.Module):
    """x/√(mean of x² over a sample's channels and positions + eps), one scale a channel; channels are axis 1."""

    def __init__(self, channels: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over every axis but the first."""
        size = x.square().mean(tuple(range(1, x.dim())), keepdim=True)
        return x * torch.rsqrt(size + self.eps) * self.weight.view(1, -1, *[1] * (x.dim() - 2))

    def extra_repr(self) -> str:
        """What the printed model shows."""
        return f"{len(self.weight)}, eps={self.eps}"


class ChannelBatchNorm(nn.BatchNorm1d):
    """Batch normalization of axis 1 of a tensor with any number of positions, none included."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected samples and channels, got {input.dim()} axes")


class FeatureBatchNorm(nn.BatchNorm1d):
    """Batch normalization of the last axis over all others: for tokens, (samples, tokens, features)."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each feature over samples and tokens."""
        flat: Tensor = super().forward(input.flatten(0, -2))  # to the base class a token is a sample
        return flat.view_as(input)


class _Normalized:
    """A linear map whose output goes through `self.norm`; it stays the layer it was, under its own names."""

    norm: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """The map, then the norm."""
        output: Tensor = self.norm(super().forward(input))  # type: ignore[misc]
        # a tensor of its own: a check passes over a module that returns just what its child returned
        return output.view_as(output)


class NormalizedLinear(_Normalized, nn.Linear):
    """`nn.Linear` followed by its own norm."""


class NormalizedConv1d(_Normalized, nn.Conv1d):
    """`nn.Conv1d` followed by its own norm."""


class NormalizedConv2d(_Normalized, nn.Conv2d):
    """`nn.Conv2d` followed by its own norm."""


class NormalizedConv3d(_Normalized, nn.Conv3d):
    """`nn.Conv3d` followed by its own norm."""


NORMALIZED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: NormalizedLinear,
    nn.Conv1d: NormalizedConv1d,
    nn.Conv2d: NormalizedConv2d,
    nn.Conv3d: NormalizedConv3d,
}


def make_norm(kind: Kind, width: int, *, axis: Axis, dimensions: int) -> nn.Module:
    """A normalization of `width` features along the last axis or along axis 1 of a tensor with so many dimensions.

    Layer and RMS norm treat each sample on its own: over the features of a token when they are the last axis, over all
    channels and positions when they are axis 1.
    """
    require_known("normalization", kind, KINDS)
    if kind == "none":
        return nn.Identity()
    if axis == "last" and dimensions != 2:
        if kind == "rms":
            return nn.RMSNorm(width, eps=EPS)
        return FeatureBatchNorm(width) if kind == "batch" else nn.LayerNorm(width)
    if kind == "batch":
        batch: dict[int, type[nn.Module]] = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
        return batch.get(dimensions, nn.BatchNorm1d)(width)
    if dimensions == 2:
        return nn.LayerNorm(width) if kind == "layer" else nn.RMSNorm(width, eps=EPS)
    # one group: all channels and positions of a sample
    return nn.GroupNorm(1, width) if kind == "layer" else ChannelRMSNorm(width)


def put_norm_after_(layer: nn.Module, norm: nn.Module) -> None:
    """Let a Linear or convolution layer pass its output through `norm`; its parameters keep their names."""
    wrapped = NORMALIZED.get(type(layer))
    if wrapped is None:
        raise UsageError(f"expected a plain Linear or convolution layer, got {type(layer).__name__}")
    weight = weight_of(layer)
    layer.__class__ = wrapped  # in place, so that whoever holds the layer has the norm too
    layer.norm = norm.to(device=weight.device, dtype=weight.dtype)
