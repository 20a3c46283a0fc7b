"""Random crops and flips of a batch of images, where the images are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sounding.errors import UsageError


@dataclass(frozen=True)
class Augmentation:
    """What to do to training images.

    Args:
        padding: zeros (black) around the image, out of which a window of the image's size is cut; 0 for no crops.
        flip: whether half of the images are mirrored left to right.
    """

    padding: int = 4
    flip: bool = True


def augment_images(images: Tensor, augmentation: Augmentation, *, generator: torch.Generator | None = None) -> Tensor:
    """Each image cropped and flipped on its own; dtype, shape and device stay.

    Args:
        images: (samples, channels, height, width), as stored, so that the padding is black.
        augmentation: what to do.
        generator: on the images' device.
    """
    if augmentation.padding < 0:
        raise UsageError(f"padding must not be negative, got {augmentation.padding}")
    device = images.device
    if augmentation.padding:
        count, channels, height, width = images.shape
        padded = nn.functional.pad(images, [augmentation.padding] * 4)
        corners = torch.randint(2 * augmentation.padding + 1, (2, count, 1), generator=generator, device=device)
        rows = (corners[0] + torch.arange(height, device=device))[:, None, :, None]
        columns = (corners[1] + torch.arange(width, device=device))[:, None, None, :]
        # an index for each axis: every image is cut at a corner of its own
        samples = torch.arange(count, device=device)[:, None, None, None]
        images = padded[samples, torch.arange(channels, device=device)[:, None, None], rows, columns]
    if augmentation.flip:
        mirrored = torch.randint(2, (len(images), 1, 1, 1), generator=generator, device=device).bool()
        images = torch.where(mirrored, images.flip(-1), images)
    return images
