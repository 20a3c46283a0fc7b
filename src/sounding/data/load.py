"""`load_dataset`: any data set by name, in memory and on a device; nothing here runs code from a file."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sounding.data.batch import Batch, Request, describe_shape, draw, fit_images, reshape_samples
from sounding.data.catalogue import CATALOGUE, Entry, Stored, find_entry
from sounding.data.dataset import Dataset, normalize
from sounding.data.digits import SIDE, make_digits
from sounding.data.download import Progress
from sounding.data.npz import SUFFIX, make_npz
from sounding.data.store import read_files
from sounding.data.synthetic import DEFAULT_CLASSES, MADE
from sounding.errors import DataError, UsageError

UNSIGNED_BYTE = 0x08  # IDX’s code of that type of numbers
CIFAR_SHAPE = (3, 32, 32)


def dataset_names() -> tuple[str, ...]:
    """What `load_dataset` accepts.

    >>> dataset_names()
    ('digits', 'mnist', 'fashion-mnist', 'cifar-10', 'cifar-100', 'gaussian-classes', 'noise', 'FILE.npz')
    """
    return ("digits", *CATALOGUE, *MADE, f"FILE{SUFFIX}")


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
        made = MADE[name][0](Request(parameter, None, generator, wanted))
    elif Path(spec).suffix.lower() == SUFFIX:
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
        return MADE[name][1], int(parameter) if parameter.isdecimal() else DEFAULT_CLASSES
    return None


def read_entry(
    entry: Entry, *, folder: Path | None = None, fetch: bool = True, progress: Progress | None = None
) -> Dataset:
    """A data set of the catalogue from its files, which are fetched where they are not there."""
    contents = read_files(entry, folder=folder, fetch=fetch, progress=progress)
    split = len(entry.train)
    train = _read_part(entry, entry.train, contents[:split], entry.samples[0])
    test = _read_part(entry, entry.test, contents[split:], entry.samples[1])
    known = {name: getattr(entry, name) for name in ("classes", "mean", "std", "licence", "citation")}
    return Dataset(entry.name, *train, *test, **known)


def draw_from(dataset: Dataset, request: Request) -> Batch:
    """Normalized samples of a data set's training part, images in the shape asked for."""
    inputs, labels = dataset.part("train")
    chosen = draw(len(inputs), request, source=dataset.name).to(dataset.device)
    samples = normalize(dataset, inputs[chosen])
    images = samples.ndim == 4
    fitted = (fit_images if images else reshape_samples)(samples, request.shape, source=dataset.name)
    name = f"{dataset.name} ({describe_shape(dataset.shape)}{' images' if images else ''}, normalized)"
    return Batch(fitted, labels[chosen], name, classes=dataset.classes)


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
    label_bytes = files[0].size * len(files) // samples - math.prod(CIFAR_SHAPE)  # the rest of a record is pixels
    parts = [
        read_cifar(content, label_bytes=label_bytes, classes=entry.classes, name=file.path)
        for file, content in zip(files, contents, strict=True)
    ]
    return torch.cat([pixels for pixels, _ in parts]), torch.cat([labels for _, labels in parts])


def read_idx(content: bytes | bytearray, shape: tuple[int, ...], *, name: str) -> Tensor:
    """A gzipped IDX file of unsigned bytes with the expected shape.

    The header is two zero bytes, the type (8: unsigned byte), the number of axes, and every length as a big-endian
    32-bit integer; the values follow. Not one byte more than expected is unpacked.
    """
    header = bytes([0, 0, UNSIGNED_BYTE, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    expected = len(header) + math.prod(shape)
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # 16 asks for the header of gzip
    try:
        values = bytearray(unpacker.decompress(content, expected + 1))
    except zlib.error as error:
        raise DataError(f"{name} is no gzip file ({error})") from error
    if values[: len(header)] != header:
        raise DataError(f"expected {name} to begin as an IDX file of shape {shape}, got {bytes(values[:16]).hex()}")
    if len(values) != expected:
        size = "more" if len(values) > expected else str(len(values))
        raise DataError(f"expected {expected} bytes in {name}, got {size}")
    return torch.frombuffer(values, dtype=torch.uint8, offset=len(header)).reshape(shape)


def read_cifar(content: bytearray, *, label_bytes: int, classes: int, name: str) -> tuple[Tensor, Tensor]:
    """Images (samples, 3, 32, 32) and labels of a CIFAR binary file.

    A record is the label bytes and 3072 bytes: the red, green and blue planes, row by row. Of CIFAR-100's two labels
    the second, finer one is taken.
    """
    record = label_bytes + math.prod(CIFAR_SHAPE)
    if not content or len(content) % record:
        raise DataError(f"expected records of {record} bytes in {name}, got {len(content)} bytes")
    records = torch.frombuffer(content, dtype=torch.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1].long()
    if int(labels.max()) >= classes:
        raise DataError(f"expected labels below {classes} in {name}, got {int(labels.max())}")
    return records[:, label_bytes:].reshape(-1, *CIFAR_SHAPE), labels
