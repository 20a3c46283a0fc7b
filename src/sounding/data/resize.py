"""Images in the shape a network takes: reshaped where the values suffice, else resized and spread over channels."""

from __future__ import annotations

import math

from torch import Tensor, nn

from sounding.data.batch import describe_shape, reshape_samples
from sounding.errors import UsageError
from sounding.limits import require_memory


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
