"""The data sets with official files: what they are called, where they live, their sums, and what they hold.

No torch here: the command line lists the catalogue without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sounding.errors import UsageError

MNIST_HOMES = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
# an S3 website answers on plain http only; the sums make the way it came irrelevant
FASHION_HOMES = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
)
CIFAR_HOMES = ("https://www.cs.toronto.edu/~kriz/",)
LARGEST_ARCHIVE = 256 * 2**20  # bytes; the largest of the catalogue, CIFAR-10, has 170 MB


@dataclass(frozen=True)
class Remote:
    """A file as its homes serve it, under its official name; `size` is None where only the sum is published."""

    name: str
    urls: tuple[str, ...]
    md5: str
    size: int | None = None

    @property
    def most(self) -> int:
        """The number of bytes beyond which what a home sends is not the file."""
        return LARGEST_ARCHIVE if self.size is None else self.size


@dataclass(frozen=True)
class Stored:
    """A file in the data folder, by its path below the data set's own folder."""

    path: str
    md5: str
    size: int


@dataclass(frozen=True)
class Entry:
    """A data set of the catalogue.

    Args:
        train: the stored files of the training part, in order; for IDX the images and then the labels.
        remotes: what is downloaded; the stored files themselves, or one archive that holds them.
        samples: how many in the training and the test part.
        shape: of one sample, (channels, height, width).
        mean, std: of the training pixels in [0, 1], by channel.
    """

    name: str
    layout: Literal["idx", "cifar"]
    train: tuple[Stored, ...]
    test: tuple[Stored, ...]
    remotes: tuple[Remote, ...]
    samples: tuple[int, int]
    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    licence: str
    citation: str

    @property
    def stored(self) -> tuple[Stored, ...]:
        """Every file it needs."""
        return self.train + self.test

    @property
    def archived(self) -> bool:
        """Whether the stored files come out of an archive."""
        return self.layout == "cifar"

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.size for file in self.stored)


def find_entry(name: str) -> Entry:
    """The entry of that name.

    >>> find_entry("cifar-10").shape
    (3, 32, 32)
    """
    if name not in CATALOGUE:
        raise UsageError(f"unknown data set {name!r}", hint=f"one of {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


IDX_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def _idx(
    name: str,
    homes: tuple[str, ...],
    sums: tuple[str, ...],
    sizes: tuple[int, ...],
    mean: float,
    std: float,
    **words: str,
) -> Entry:
    """The entry of a data set in MNIST's format, four gzipped files."""
    files = tuple(Stored(*file) for file in zip(IDX_NAMES, sums, sizes, strict=True))
    return Entry(
        name=name,
        layout="idx",
        train=files[:2],
        test=files[2:],
        remotes=tuple(Remote(f.path, tuple(home + f.path for home in homes), f.md5, f.size) for f in files),
        samples=(60000, 10000),
        shape=(1, 28, 28),
        classes=10,
        mean=(mean,),
        std=(std,),
        **words,
    )


def _cifar(
    name: str,
    folder: str,
    archive: tuple[str, str],
    train: dict[str, str],
    test: dict[str, str],
    *,
    classes: int,
    label_bytes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Entry:
    """The entry of a data set in CIFAR's binary format, files in one archive."""
    record = label_bytes + 3 * 32 * 32
    each = 50000 // len(train)
    return Entry(
        name=name,
        layout="cifar",
        train=tuple(Stored(f"{folder}/{member}", md5, each * record) for member, md5 in train.items()),
        test=tuple(Stored(f"{folder}/{member}", md5, 10000 * record) for member, md5 in test.items()),
        remotes=(Remote(archive[0], tuple(home + archive[0] for home in CIFAR_HOMES), archive[1]),),
        samples=(50000, 10000),
        shape=(3, 32, 32),
        classes=classes,
        mean=mean,
        std=std,
        licence="none stated",
        citation="Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    )


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        _idx(
            "mnist",
            MNIST_HOMES,
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
            (9912422, 28881, 1648877, 4542),
            0.1307,
            0.3081,
            licence="CC BY-SA 3.0",
            citation="LeCun, Cortes and Burges, The MNIST database of handwritten digits, 1998",
        ),
        _idx(
            "fashion-mnist",
            FASHION_HOMES,
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
            (26421880, 29515, 4422102, 5148),
            0.2860,
            0.3530,
            licence="MIT (Zalando SE)",
            citation="Xiao, Rasul and Vollgraf, Fashion-MNIST, arXiv:1708.07747, 2017",
        ),
        _cifar(
            "cifar-10",
            "cifar-10-batches-bin",
            ("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
            {
                "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            },
            {"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"},
            classes=10,
            label_bytes=1,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
        ),
        _cifar(
            "cifar-100",
            "cifar-100-binary",
            ("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
            {"train.bin": "6172c7755cfe09b2fe270c85cebc1b15"},
            {"test.bin": "4499cfba6c016c1be1438163640a0898"},
            classes=100,
            label_bytes=2,
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
        ),
    )
}
