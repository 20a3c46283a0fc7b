"""The data sets with official files: what they are called, where they live, their sums, and what they hold.

No torch here: the command line lists the catalogue without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sounding.errors import UsageError

CIFAR_HOME = "https://www.cs.toronto.edu/~kriz/"
LARGEST_ARCHIVE = 256 * 2**20  # bytes; the largest of the catalogue, CIFAR-10, has 170 MB


@dataclass(frozen=True)
class Remote:
    """A file as its homes serve it, under its official name."""

    name: str
    urls: tuple[str, ...]
    md5: str
    size: int | None = None  # None where only the sum is published

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
    """A data set of the catalogue."""

    name: str
    layout: Literal["idx", "cifar"]
    train: tuple[Stored, ...]  # in order; for IDX the images and then the labels
    test: tuple[Stored, ...]
    remotes: tuple[Remote, ...]  # what is downloaded: the stored files themselves, or one archive that holds them
    samples: tuple[int, int]  # in the training and the test part
    shape: tuple[int, int, int]  # of one sample: channels, height, width
    classes: int
    mean: tuple[float, ...]  # of the training pixels in [0, 1], by channel
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


def _idx(name: str, homes: tuple[str, ...], files: dict[str, tuple[str, int]], **known: Any) -> Entry:
    """The entry of a data set in MNIST's format, four gzipped files with their sums and sizes."""
    stored = tuple(Stored(file, md5, size) for file, (md5, size) in files.items())
    remotes = tuple(
        Remote(file.path, tuple(home + file.path for home in homes), file.md5, file.size) for file in stored
    )
    return Entry(
        name, "idx", stored[:2], stored[2:], remotes, samples=(60000, 10000), shape=(1, 28, 28), classes=10, **known
    )


def _cifar(
    name: str, folder: str, archive: str, archive_md5: str, train: dict[str, str], test: dict[str, str], **known: Any
) -> Entry:
    """The entry of a data set in CIFAR's binary format, files in one archive."""
    label_bytes = 2 if name == "cifar-100" else 1  # CIFAR-100 has a coarse label in front of the fine one
    record = label_bytes + 3 * 32 * 32
    each = 50000 // len(train)
    return Entry(
        name,
        "cifar",
        tuple(Stored(f"{folder}/{member}", md5, each * record) for member, md5 in train.items()),
        tuple(Stored(f"{folder}/{member}", md5, 10000 * record) for member, md5 in test.items()),
        (Remote(archive, (CIFAR_HOME + archive,), archive_md5),),
        samples=(50000, 10000),
        shape=(3, 32, 32),
        licence="none stated",
        citation="Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
        **known,
    )


ENTRIES = (
    _idx(
        "mnist",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        {
            "train-images-idx3-ubyte.gz": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9912422),
            "train-labels-idx1-ubyte.gz": ("d53e105ee54ea40749a09fcbcd1e9432", 28881),
            "t10k-images-idx3-ubyte.gz": ("9fb629c4189551a2d022fa330f9573f3", 1648877),
            "t10k-labels-idx1-ubyte.gz": ("ec29112dd5afa0611ce80d1b7f02629c", 4542),
        },
        mean=(0.1307,),
        std=(0.3081,),
        licence="CC BY-SA 3.0",
        citation="LeCun, Cortes and Burges, The MNIST database of handwritten digits, 1998",
    ),
    _idx(
        "fashion-mnist",
        (
            # an S3 website answers on plain http only; the sums make the way it came irrelevant
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        {
            "train-images-idx3-ubyte.gz": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26421880),
            "train-labels-idx1-ubyte.gz": ("25c81989df183df01b3e8a0aad5dffbe", 29515),
            "t10k-images-idx3-ubyte.gz": ("bef4ecab320f06d8554ea6380940ec79", 4422102),
            "t10k-labels-idx1-ubyte.gz": ("bb300cfdad3c16e7a12a480ee83cd310", 5148),
        },
        mean=(0.2860,),
        std=(0.3530,),
        licence="MIT (Zalando SE)",
        citation="Xiao, Rasul and Vollgraf, Fashion-MNIST, arXiv:1708.07747, 2017",
    ),
    _cifar(
        "cifar-10",
        "cifar-10-batches-bin",
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        {
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        },
        {"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"},
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    _cifar(
        "cifar-100",
        "cifar-100-binary",
        "cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        {"train.bin": "6172c7755cfe09b2fe270c85cebc1b15"},
        {"test.bin": "4499cfba6c016c1be1438163640a0898"},
        classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
)
CATALOGUE = {entry.name: entry for entry in ENTRIES}
