"""A data set in memory: tensors on a device, how to normalize and augment them, and what is known about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sounding.errors import UsageError, require_known

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Dataset:
    """Samples and labels of a training and a test part, as they are stored; `normalize` makes them inputs.

    Args:
        name: as `load_dataset` was asked for it.
        train_inputs: (samples, ...); uint8 pixels or floats.
        train_labels: (samples,) of int64.
        test_inputs: as `train_inputs`.
        test_labels: as `train_labels`.
        classes: how many labels there are.
        mean: by channel, or one; of pixels in [0, 1] where inputs are uint8.
        std: likewise.
        licence: under which the samples are published, in words.
        citation: whom to cite.
    """

    name: str
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    licence: str = ""
    citation: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.train_inputs.shape[1:])

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.train_inputs.device

    def to(self, device: str | torch.device) -> Dataset:
        """The data set with its tensors on a device."""
        names = ("train_inputs", "train_labels", "test_inputs", "test_labels")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def part(self, split: Split) -> tuple[Tensor, Tensor]:
        """Inputs and labels of one part, as stored."""
        require_known("part", split, ("train", "test"))
        return (self.train_inputs, self.train_labels) if split == "train" else (self.test_inputs, self.test_labels)

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape))
        return (
            f"Dataset({self.name}: {len(self.train_inputs)} + {len(self.test_inputs)} samples of {shape}, "
            f"{self.classes} classes, on {self.device})"
        )


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


def split_after(count: int, inputs: Tensor, labels: Tensor, **known: Any) -> Dataset:
    """A data set whose first samples are the training part and whose others are the test part."""
    return Dataset(
        train_inputs=inputs[:count],
        train_labels=labels[:count],
        test_inputs=inputs[count:],
        test_labels=labels[count:],
        **known,
    )


def normalize(dataset: Dataset, inputs: Tensor) -> Tensor:
    """(x − mean)/std by channel, in torch's default dtype; uint8 is scaled to [0, 1] first.

    Args:
        dataset: whose mean and standard deviation.
        inputs: (samples, ...) as stored.
    """
    scaled = inputs.to(torch.get_default_dtype())
    if inputs.dtype == torch.uint8:
        scaled = scaled / 255
    axes = (1, -1, *[1] * (inputs.ndim - 2)) if len(dataset.mean) > 1 else (1,) * inputs.ndim
    mean, std = (
        torch.tensor(v, dtype=scaled.dtype, device=inputs.device).view(axes) for v in (dataset.mean, dataset.std)
    )
    return (scaled - mean) / std


def batches(
    dataset: Dataset,
    batch_size: int,
    *,
    generator: torch.Generator | None = None,
    split: Split = "train",
    augment: Augmentation | None = None,
    keep_last: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """One pass over a part in batches of normalized inputs and labels, on the data set's device.

    The training part comes in a random order, the test part in its own. Order, crops and flips are drawn on the
    device; the same generator state gives the same batches there.

    Args:
        dataset: whose samples.
        batch_size: samples in a batch, at most as many as the part has.
        generator: on the data set's device; None is the default generator of that device.
        split: "train" or "test".
        augment: crops and flips, for images; None for none.
        keep_last: whether a smaller last batch is given too; always for the test part, which is to be seen whole.

    >>> from sounding.data import load_dataset
    >>> digits = load_dataset("digits")
    >>> sizes = [len(labels) for inputs, labels in batches(digits, 100, split="test")]
    >>> sizes
    [100, 100, 100, 60]
    """
    inputs, labels = dataset.part(split)
    if not 1 <= batch_size <= len(inputs):
        raise UsageError(
            f"batch size must be between 1 and {len(inputs)}, the samples of {dataset.name}, got {batch_size}"
        )
    if generator is not None and generator.device.type != dataset.device.type:
        raise UsageError(
            f"the generator is on {generator.device}, the data on {dataset.device}",
            hint=f"torch.Generator({str(dataset.device)!r})",
        )
    if augment is not None and len(dataset.shape) != 3:
        raise UsageError(f"expected images (channels, height, width) to augment, got samples of shape {dataset.shape}")

    def walk() -> Iterator[tuple[Tensor, Tensor]]:  # a generator of its own: the checks above come with the call
        count = len(inputs)
        order = torch.randperm(count, generator=generator, device=dataset.device) if split == "train" else None
        end = count if keep_last or split == "test" else count - count % batch_size
        for start in range(0, end, batch_size):
            chosen = slice(start, start + batch_size) if order is None else order[start : start + batch_size]
            images = inputs[chosen]
            if augment is not None:
                images = augment_images(images, augment, generator=generator)
            yield normalize(dataset, images), labels[chosen]

    return walk()
