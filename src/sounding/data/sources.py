"""The registry of sources: one function per name, each imported when it is asked for."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from pathlib import Path

import torch

from sounding.data.batch import Batch, Request, describe_shape, draw, fit_images, reshape_samples
from sounding.data.catalogue import CATALOGUE
from sounding.data.dataset import Dataset, normalize
from sounding.errors import UsageError

DEFAULT_BATCH_SIZE = 128  # samples: enough for ranks up to a hundred, and a check of a deep network takes seconds

# name, or name:PARAMETER, → the function that makes the batch; imported when it is asked for
SOURCES = {
    "digits": "sounding.data.digits:load_digits",
    "gaussian": "sounding.data.synthetic:draw_gaussian",
    "tokens": "sounding.data.synthetic:draw_tokens",
    "gaussian-classes": "sounding.data.synthetic:draw_gaussian_classes",
    "noise": "sounding.data.synthetic:draw_noise",
    **dict.fromkeys(CATALOGUE, "sounding.data.load:draw_from_catalogue"),
}
FILES = {".npz": "sounding.data.npz:load_npz"}
NEEDED = {"tokens": "VOCABULARY"}  # parameters
OPTIONAL = {"gaussian-classes", "noise"}  # number of classes


def names() -> tuple[str, ...]:
    """What `load_batch` accepts.

    >>> names()
    ('digits', 'gaussian', 'tokens:VOCABULARY', 'gaussian-classes', 'noise', 'mnist', 'fashion-mnist', 'cifar-10', \
'cifar-100', 'FILE.npz')
    """
    return (*(f"{name}:{NEEDED[name]}" if name in NEEDED else name for name in SOURCES), *(f"FILE{s}" for s in FILES))


def load_batch(
    spec: str | Path | Dataset,
    *,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    shape: Sequence[int] | None = None,
) -> Batch:
    """A batch of different samples in random order.

    Args:
        spec: a name of `names()`, the path of a file with `inputs` and perhaps `targets`, or a data set in memory, of
            which the training part is drawn from. "gaussian-classes" and "noise" take a number of classes, "noise:100".
        batch_size: how many samples; by default 128, or all there are if a source has fewer.
        generator: where the randomness comes from; None is torch's default generator.
        shape: of one sample, without the batch axis. Needed by "gaussian"; images are resized to (channels, height,
            width); a file's samples are reshaped.

    Raises:
        DataError: a data set of the catalogue is not there and cannot be downloaded.
        UsageError: unknown name, unreadable file, impossible shape, too few samples, NaN or infinity.

    >>> batch = load_batch("digits", batch_size=5, generator=torch.Generator().manual_seed(0))
    >>> tuple(batch.inputs.shape), tuple(batch.targets.shape)
    ((5, 64), (5,))
    """
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch size must be at least 1, got {batch_size}")
    if shape is not None and any(size < 1 for size in shape):
        raise UsageError(f"input shape must have positive sizes, got {tuple(shape)}")
    wanted = None if shape is None else tuple(shape)
    if isinstance(spec, Dataset):
        return draw_from(spec, Request("", batch_size, generator, wanted))
    name, _, parameter = str(spec).partition(":")
    suffix = Path(spec).suffix.lower()
    if isinstance(spec, str) and name in SOURCES:
        if parameter and name not in NEEDED and name not in OPTIONAL:
            raise UsageError(f"data {name!r} takes no parameter, got {spec!r}", hint=name)
        address, parameter = SOURCES[name], name if name in CATALOGUE else parameter
    elif suffix in FILES:
        address, parameter = FILES[suffix], str(spec)
    else:
        raise UsageError(f"unknown data {str(spec)!r}", hint=f"one of {', '.join(names())}")
    batch: Batch = pkgutil.resolve_name(address)(Request(parameter, batch_size, generator, wanted))
    return batch


def draw_from(dataset: Dataset, request: Request) -> Batch:
    """Normalized samples of a data set's training part, images in the shape asked for."""
    inputs, labels = dataset.part("train")
    chosen = draw(len(inputs), request, default=DEFAULT_BATCH_SIZE, source=dataset.name).to(dataset.device)
    samples = normalize(dataset, inputs[chosen])
    images = samples.ndim == 4
    fitted = (fit_images if images else reshape_samples)(samples, request.shape, source=dataset.name)
    name = f"{dataset.name} ({describe_shape(dataset.shape)}{' images' if images else ''}, normalized)"
    return Batch(fitted, labels[chosen], name, classes=dataset.classes)
