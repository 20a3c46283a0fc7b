"""Files written whole or not at all, locks that die with their process, and one sum over all files of a folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sounding.errors import DataError, UsageError

SUMS = "SHA256SUMS"  # as sha256sum writes it, so that `sha256sum -c` checks a result without us
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
BUSY = (errno.EAGAIN, errno.EACCES)


def place(path: Path, data: bytes, *, previous: Path | None = None) -> None:
    """Write a file whole or not at all: beside its place, to the disk, then renamed.

    Args:
        path: the place.
        data: all of it.
        previous: where a file that is in the place goes.

    Raises:
        UsageError: the path is a folder or a device, or its folder is not there.
        DataError: it cannot be written; nothing that was there is lost.
    """
    require_place(path)
    new = _unfinished(path)
    try:
        with open(new, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())  # or a crash could leave an empty file under the new name
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(new, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(new)


def require_place(path: Path) -> None:
    """UsageError unless a file can have this path."""
    if path.is_dir():
        raise UsageError(f"expected the path of a file, got the folder {path}")
    if path.exists() and not path.is_file():
        # renaming would replace a device or a pipe by a file
        raise UsageError(f"cannot write {path}: it is no regular file", hint="another name")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}", hint=f"mkdir -p {path.parent}")


def cannot_write(path: Path, error: OSError) -> DataError:
    """The sentence for a disk that refuses: no room, no permission."""
    hint = "making room, then the same command again" if error.errno in NO_ROOM else None
    told = f"{path} cannot be written: {error.strerror or error}; what was there before is kept"
    return DataError(told, hint=hint)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Alone with a path: a second process, or a second run in this one, is refused, or waits.

    The lock is the system's, on an empty file `.NAME.lock` beside the path, so that it goes when its process dies,
    however it dies. What a killed process left unfinished beside the path is removed. On disks without locks everybody
    is let in.

    Raises:
        UsageError: another run has it, and `wait` is False.
        DataError: nothing can be written beside the path.
    """
    require_place(path)
    name = path.with_name(f".{path.name}.lock")
    while True:
        try:
            stream = open(name, "ab")  # noqa: SIM115, closed when the lock is given back
        except OSError as error:
            raise cannot_write(path, error) from error
        if not _take(stream, wait=wait):
            stream.close()
            raise UsageError(f"{path} is in use by another run", hint="another path, or again when that run has ended")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(stream.fileno()), os.stat(name)):
                break
        stream.close()  # whoever had the lock removed its file while we waited for it
    try:
        _unfinished(path).unlink(missing_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            name.unlink()
        stream.close()


def _take(stream: IO[bytes], *, wait: bool) -> bool:
    """Whether the lock was taken; True also where the file system has no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(stream.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return error.errno not in BUSY  # any other error: a disk without locks
    return True


def _unfinished(path: Path) -> Path:
    """Where a file is written before it is renamed: one name, so that a kill leaves at most one of them."""
    return path.with_name(f".{path.name}.new")


def write_sums(folder: Path) -> None:
    """Write the SHA-256 sum of every file of a folder into its file SHA256SUMS."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    (folder / SUMS).write_text("".join(f"{_sum(folder / name)}  {name}\n" for name in names), "utf-8")


def changed_files(folder: Path) -> list[str]:
    """The files of a folder that are not what its SHA256SUMS says; a folder without one has none.

    Files that are not there are not counted: a result without its pictures is still right.
    """
    try:
        lines = (folder / SUMS).read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    pairs = [line.split("  ", 1) for line in lines]
    if not pairs or any(len(pair) < 2 or os.path.basename(pair[1]) != pair[1] for pair in pairs):
        return [SUMS]
    return [name for told, name in pairs if (folder / name).is_file() and _sum(folder / name) != told]


def _sum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
