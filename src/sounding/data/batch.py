"""A batch, and the steps every source shares: draw samples, give them a shape, refuse what is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.limits import require_memory

DEFAULT_BATCH_SIZE = 128  # samples: enough for ranks up to a hundred, and a check of a deep network takes seconds


@dataclass(frozen=True)
class Batch:
    """Samples to send through a network.

    Args:
        inputs: (samples, ...); floating point, or integers where they are tokens.
        targets: (samples, ...) or None where the source has none.
        name: where they come from, in words.
        classes: how many labels the targets are taken from; None where they are no labels, or it is not known.
        arguments: what to call the network with where it is more than `inputs`, which are the first of them then: a
            mapping of keyword arguments, or a tuple.
    """

    inputs: Tensor
    targets: Tensor | None
    name: str
    classes: int | None = None
    arguments: Mapping[str, Tensor] | tuple[Any, ...] | None = None

    @property
    def given(self) -> Any:
        """What the network is called with."""
        return self.inputs if self.arguments is None else self.arguments

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Request:
    """What is asked of a source."""

    parameter: str  # what follows the colon of "name:parameter", or the file's path
    batch_size: int | None
    generator: torch.Generator | None
    shape: tuple[int, ...] | None


def draw(count: int, request: Request, *, source: str, default: int = DEFAULT_BATCH_SIZE) -> Tensor:
    """Indices of `batch_size` different samples out of `count`, in random order.

    Without a batch size: `default` of them, or all there are if fewer.
    """
    wanted = min(default, count) if request.batch_size is None else request.batch_size
    if wanted > count:
        raise UsageError(
            f"{source} has {count} samples, got a batch size of {wanted}", hint=f"a batch size of {count} or less"
        )
    return torch.randperm(count, generator=request.generator)[:wanted]


def reshape_samples(inputs: Tensor, shape: tuple[int, ...] | None, *, source: str) -> Tensor:
    """Each sample with another shape of the same number of values."""
    if shape is None or tuple(inputs.shape[1:]) == shape:
        return inputs
    if math.prod(shape) != inputs[0].numel():
        count = inputs[0].numel()
        raise UsageError(
            f"a sample of {source} is {describe_shape(inputs.shape[1:])} and cannot become {describe_shape(shape)}",
            hint=f"an input shape of {count} value{'s' if count > 1 else ''}",
        )
    return inputs.reshape(len(inputs), *shape)


def fit_images(images: Tensor, shape: tuple[int, ...] | None, *, source: str) -> Tensor:
    """(samples, channels, height, width) with another shape for each sample.

    A shape of as many values is a reshape. (channels, height, width) is resized bilinearly; one channel is repeated,
    several are averaged into one.
    """
    channels, height, width = images.shape[1:]
    if shape is None or math.prod(shape) == channels * height * width:
        return reshape_samples(images, shape, source=source)
    if len(shape) != 3 or (shape[0] != channels and 1 not in (shape[0], channels)):
        kind = f"{height}×{width} images" if channels == 1 else f"{describe_shape(images.shape[1:])} images"
        raise UsageError(
            f"{source} are {kind} and cannot become {describe_shape(shape)}, the shape given or read from the network",
            hint=f"a shape of {channels * height * width} values (--input-shape {channels * height * width}), "
            "or channels,height,width, or gaussian data for any shape",
        )
    require_memory(4 * len(images) * math.prod(shape), what=f"{len(images)} images of {describe_shape(shape)}")
    if shape[0] == 1:
        images = images.mean(dim=1, keepdim=True)
    if shape[1:] != (height, width):
        images = nn.functional.interpolate(images, size=shape[1:], mode="bilinear", align_corners=False)
    return images if images.shape[1] == shape[0] else images.repeat(1, shape[0], 1, 1)


def describe_shape(shape: Sequence[int]) -> str:
    """A sample's shape in words.

    >>> describe_shape((3, 32, 32)), describe_shape(())
    ('3×32×32', 'a single value')
    """
    return "×".join(map(str, shape)) or "a single value"


def require_finite(values: Tensor, *, what: str, masks: bool = False) -> None:
    """NaN or infinity in the data is the data's fault, and is said before a network is accused of it."""
    if not values.is_floating_point() or not values.numel():
        return
    flat = values.reshape(len(values) if values.dim() else 1, -1)
    # −∞ is how a mask that is added to scores says "not this one"
    bad = ~(torch.isfinite(flat) | (flat.isneginf() & masks)).all(dim=1)
    if bad.any():
        first = int(bad.nonzero()[0])
        raise UsageError(
            f"{what} must be finite, got NaN or infinity in {int(bad.sum())} of {len(flat)} samples "
            f"(the first is sample {first})",
            hint="to drop or fill those samples first",
        )
