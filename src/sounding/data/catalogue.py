"""The data sets with official files: what they are called, where they live, their sums, and what they hold.

They stand in `catalogue.toml`. No torch here: the command line lists the catalogue without it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sounding.errors import require_known

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
    require_known("data set", name, CATALOGUE)
    return CATALOGUE[name]


def _entry(name: str, told: dict[str, Any]) -> Entry:
    """The entry that a table of the file describes."""
    homes, files = told.pop("homes"), {part: told.pop(part) for part in ("train", "test")}
    served = [told.pop("archive")] if "archive" in told else [*files["train"], *files["test"]]
    remotes = tuple(Remote(path, tuple(home + path for home in homes), *sums) for path, *sums in served)
    train, test = (tuple(Stored(*file) for file in held) for held in files.values())
    known: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}
    return Entry(name, train=train, test=test, remotes=remotes, **known)


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
CATALOGUE = {name: _entry(name, told) for name, told in TABLES.items()}
