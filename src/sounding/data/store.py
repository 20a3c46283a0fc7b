"""The data folder: where files lie, whether they are intact, and how they get there."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zlib
from pathlib import Path
from typing import Literal

from sounding.data.catalogue import Entry, Stored
from sounding.data.download import Progress, cannot_write, download, md5_of, set_aside
from sounding.errors import DataError
from sounding.files import locked, place

State = Literal["intact", "missing", "damaged"]
VARIABLE = "SOUNDING_DATA"


def data_folder() -> Path:
    """`$SOUNDING_DATA`, else `$XDG_CACHE_HOME/sounding/data`, else `~/.cache/sounding/data`.

    A relative XDG_CACHE_HOME is ignored, as its specification asks.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "sounding" / "data"


def file_state(file: Stored, folder: Path, *, sums: bool = True) -> State:
    """Whether a file is there, has its size and, unless `sums` is False, its sum."""
    path = folder / file.path
    try:
        if not path.is_file():
            return "missing"
        if path.stat().st_size != file.size or (sums and md5_of(path) != file.md5):
            return "damaged"
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}", hint="chmod u+r") from error
    return "intact"


def read_files(
    entry: Entry, *, folder: Path | None = None, fetch: bool = True, progress: Progress | None = None
) -> list[bytearray]:
    """The contents of a data set's stored files; what is missing or damaged is fetched first, or is an error.

    The sum is taken of the very bytes returned, so a file that changes in between is never read.
    """
    home = (folder or data_folder()) / entry.name
    contents = [_read_intact(file, home) for file in entry.stored]
    if None in contents and not fetch:
        absent = [file for file, content in zip(entry.stored, contents, strict=True) if content is None]
        states = ", ".join(f"{file.path} is {file_state(file, home)}" for file in absent)
        raise DataError(f"{entry.name} is not complete in {home}: {states}", hint=f"sounding data get {entry.name}")
    if None in contents:
        fetch_entry(entry, folder=folder, progress=progress)
        contents = [_read_intact(file, home) for file in entry.stored]
    complete = [content for content in contents if content is not None]
    if len(complete) < len(contents):
        raise DataError(f"{entry.name} in {home} was changed while it was read", hint="again")
    return complete


def fetch_entry(entry: Entry, *, folder: Path | None = None, progress: Progress | None = None) -> list[str]:
    """Make every file of a data set intact; returns the paths that were fetched.

    Damaged files are renamed to `NAME.corrupt` and fetched again. One process at a time works in a data set's folder;
    the others wait and find the files there.

    Raises:
        DataError: the folder cannot be written, or the homes do not give the files.
    """
    home = (folder or data_folder()) / entry.name
    if all(file_state(file, home) == "intact" for file in entry.stored):
        return []
    try:
        home.mkdir(parents=True, exist_ok=True)
        with locked(home / "files", wait=True):
            # looked at again: another process may have fetched them while this one waited
            wanted = [file for file in entry.stored if file_state(file, home) != "intact"]
            damaged = [set_aside(home / file.path) for file in wanted if (home / file.path).is_file()]
            try:
                if entry.archived and wanted:
                    archive = home / entry.remotes[0].name
                    if not (archive.is_file() and md5_of(archive) == entry.remotes[0].md5):
                        if archive.is_file():
                            set_aside(archive)
                        download(entry.remotes[0], archive, progress=progress)
                    unpack(archive, wanted, home)
                    archive.unlink()  # its files are all that is ever read
                else:
                    paths = {file.path for file in wanted}
                    for remote in entry.remotes:
                        if remote.name in paths:
                            download(remote, home / remote.name, progress=progress)
            except DataError as error:
                if not damaged:
                    raise
                kept = ", ".join(map(str, damaged))
                raise DataError(f"{error.message}; the damaged file is kept as {kept}", hint=error.hint) from error
            return [file.path for file in wanted]
    except OSError as error:
        raise cannot_write(home, error) from error


def _read_intact(file: Stored, home: Path) -> bytearray | None:
    """The bytes of a file if its size and sum are the published ones, else None."""
    path = home / file.path
    try:
        if path.stat().st_size != file.size:
            return None
        content = bytearray(file.size)
        with path.open("rb") as stream:
            count = stream.readinto(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        hint = "another folder in SOUNDING_DATA"
        raise DataError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
    return content if count == file.size and _is_intact(content, file) else None


def _is_intact(content: bytes | bytearray, file: Stored) -> bool:
    return hashlib.md5(content, usedforsecurity=False).hexdigest() == file.md5


def unpack(archive: Path, wanted: list[Stored], folder: Path) -> None:
    """Write the wanted members of a .tar.gz below `folder`, and nothing else.

    Names in the archive are only compared, never used as paths; a member must be a regular file of the known size and
    sum. Each takes its name by rename when it is complete.
    """
    missing = {file.path: file for file in wanted}
    hint = f"to remove {archive} and try again"
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                file = missing.get(member.name.removeprefix("./"))
                if file is None or not member.isreg() or member.size != file.size:
                    continue
                stream = tar.extractfile(member)
                assert stream is not None
                content = stream.read(file.size)
                if not _is_intact(content, file):
                    continue
                path = folder / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                place(path, content)
                del missing[file.path]
                if not missing:
                    return
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive} cannot be unpacked: {error}", hint=hint) from error
    raise DataError(f"{archive} does not hold {', '.join(missing)} as published", hint=hint)
