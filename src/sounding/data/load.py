"""`load_dataset`: any data set by name, in memory and on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sounding.data.batch import Batch, Request
from sounding.data.catalogue import CATALOGUE, Entry, Stored, find_entry
from sounding.data.dataset import Dataset
from sounding.data.digits import SIDE, make_digits
from sounding.data.download import Progress
from sounding.data.formats import read_cifar, read_idx
from sounding.data.npz import make_npz
from sounding.data.sources import FILES, draw_from
from sounding.data.store import read_files
from sounding.data.synthetic import CLASSES_SHAPE, DEFAULT_CLASSES, NOISE_SHAPE, make_gaussian_classes, make_noise
from sounding.errors import UsageError

MADE: dict[str, Callable[[Request], Dataset]] = {"gaussian-classes": make_gaussian_classes, "noise": make_noise}
MADE_SHAPES = {"gaussian-classes": CLASSES_SHAPE, "noise": NOISE_SHAPE}


def dataset_names() -> tuple[str, ...]:
    """What `load_dataset` accepts.

    >>> dataset_names()
    ('digits', 'mnist', 'fashion-mnist', 'cifar-10', 'cifar-100', 'gaussian-classes', 'noise', 'FILE.npz')
    """
    return ("digits", *CATALOGUE, *MADE, *(f"FILE{suffix}" for suffix in FILES))


def load_dataset(
    spec: str | Path,
    *,
    device: str | torch.device = "cpu",
    generator: torch.Generator | None = None,
    shape: Sequence[int] | None = None,
    folder: Path | None = None,
    fetch: bool = True,
    progress: Progress | None = None,
) -> Dataset:
    """A data set by name, its tensors on a device.

    Args:
        spec: a name of `dataset_names()`; "gaussian-classes:20" and "noise:100" give the number of classes.
        device: where the tensors are to live.
        generator: a CPU generator for the generated sets; None is torch's default generator.
        shape: of one sample, for the generated sets and for files.
        folder: where official files are; None is `data_folder()`.
        fetch: whether to download what is missing or damaged; False stays offline.
        progress: called with a file's name, the bytes so far and the bytes in all, while downloading.

    Raises:
        DataError: a file is missing or damaged and cannot be downloaded.
        UsageError: unknown name, unreadable file.

    >>> load_dataset("digits")
    Dataset(digits: 1437 + 360 samples of 1×8×8, 10 classes, on cpu)
    """
    name, _, parameter = str(spec).partition(":")
    wanted = None if shape is None else tuple(shape)
    if name in MADE:
        made = MADE[name](Request(parameter, None, generator, wanted))
    elif Path(spec).suffix.lower() in FILES:
        made = make_npz(Request(str(spec), None, generator, wanted))
    elif spec == "digits":
        made = make_digits()
    elif spec in CATALOGUE:
        made = read_entry(find_entry(str(spec)), folder=folder, fetch=fetch, progress=progress)
    else:
        raise UsageError(f"unknown data set {str(spec)!r}", hint=f"one of {', '.join(dataset_names())}")
    return made if torch.device(device) == made.device else made.to(device)


def known_shape(spec: str) -> tuple[tuple[int, ...], int] | None:
    """A sample's shape and the number of classes, without loading anything; None where only the data knows.

    >>> known_shape("cifar-100"), known_shape("own.npz")
    (((3, 32, 32), 100), None)
    """
    name, _, parameter = spec.partition(":")
    if spec in CATALOGUE:
        return CATALOGUE[spec].shape, CATALOGUE[spec].classes
    if spec == "digits":
        return (1, SIDE, SIDE), 10
    if name in MADE:
        return MADE_SHAPES[name], int(parameter) if parameter.isdecimal() else DEFAULT_CLASSES
    return None


def read_entry(
    entry: Entry, *, folder: Path | None = None, fetch: bool = True, progress: Progress | None = None
) -> Dataset:
    """A data set of the catalogue from its files, which are fetched where they are not there."""
    contents = read_files(entry, entry.stored, folder=folder, fetch=fetch, progress=progress)
    split = len(entry.train)
    train_inputs, train_labels = _read_part(entry, entry.train, contents[:split], entry.samples[0])
    test_inputs, test_labels = _read_part(entry, entry.test, contents[split:], entry.samples[1])
    return Dataset(
        name=entry.name,
        train_inputs=train_inputs,
        train_labels=train_labels,
        test_inputs=test_inputs,
        test_labels=test_labels,
        classes=entry.classes,
        mean=entry.mean,
        std=entry.std,
        licence=entry.licence,
        citation=entry.citation,
    )


def draw_from_catalogue(request: Request) -> Batch:
    """A batch of the data set that `request.parameter` names."""
    return draw_from(read_entry(find_entry(request.parameter)), request)


def _read_part(
    entry: Entry, files: tuple[Stored, ...], contents: list[bytearray], samples: int
) -> tuple[Tensor, Tensor]:
    """The images and labels of the training or the test part."""
    if entry.layout == "idx":
        images, labels = files
        pixels = read_idx(contents[0], (samples, *entry.shape[1:]), name=images.path)
        return pixels.unsqueeze(1), read_idx(contents[1], (samples,), name=labels.path).long()
    label_bytes = files[0].size * len(files) // samples - 3 * 32 * 32
    parts = [
        read_cifar(content, label_bytes=label_bytes, classes=entry.classes, name=file.path)
        for file, content in zip(files, contents, strict=True)
    ]
    return torch.cat([pixels for pixels, _ in parts]), torch.cat([labels for _, labels in parts])
