"""Checkpoints that survive a kill: written beside, checked by a sum, placed by a rename; the last but one stays."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sounding.errors import DataError, UsageError

MAGIC = b"SOUNDING CHECKPOINT 1\n"
DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often to keep the state of a run.

    The state is written at the first step that ends `seconds` after the last writing, at the end, and on Ctrl-C. When
    training starts and the file is there, it continues from it, exactly; a finished run is read, not repeated. The
    state before is kept beside it with the suffix `.previous`.

    Args:
        path: of the file.
        seconds: between two writings; 0 writes after every step.
    """

    path: str | Path
    seconds: float = 60.0

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise UsageError(f"seconds between checkpoints must not be negative, got {self.seconds!r}")


class Keeper:
    """Writes and reads the checkpoint of one run; does nothing without one."""

    def __init__(self, checkpoint: Checkpoint | str | Path | None, settings: Mapping[str, Any]) -> None:
        if isinstance(checkpoint, str | Path):
            checkpoint = Checkpoint(checkpoint)
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            raise UsageError(f"expected the path of a checkpoint or a Checkpoint, got {type(checkpoint).__name__}")
        self._checkpoint = checkpoint
        self._settings = json.loads(json.dumps(settings))
        self._written = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to write."""
        return self._checkpoint is not None and time.monotonic() - self._written >= self._checkpoint.seconds

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint.

        Raises:
            DataError: no room, no permission; the checkpoints that were there are untouched.
        """
        if self._checkpoint is None:
            return
        buffer = io.BytesIO()
        torch.save({"settings": json.dumps(self._settings), **state}, buffer)
        payload = buffer.getvalue()
        path = Path(self._checkpoint.path)
        place(path, MAGIC + hashlib.sha256(payload).digest() + payload, previous=previous_of(path))
        self._written = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """What was kept, or None where nothing is.

        Raises:
            DataError: the file is damaged; it is left as it is.
            UsageError: it belongs to another run.
        """
        if self._checkpoint is None:
            return None
        path = Path(self._checkpoint.path)
        _check_place(path)
        # a kill between the two renames leaves the older one only
        found = next((each for each in (path, previous_of(path)) if each.exists()), None)
        if found is None:
            return None
        state = read_checkpoint(found)
        self._compare(found, json.loads(state["settings"]))
        return state

    def _compare(self, path: Path, found: Mapping[str, Any]) -> None:
        for name in dict.fromkeys([*self._settings, *found]):
            if self._settings.get(name) != found.get(name):
                kept, asked = _differing(found.get(name), self._settings.get(name))
                raise UsageError(
                    f"the checkpoint {path} belongs to another run: its {name} is {kept}, this run's {asked}",
                    hint="another path, or the settings it was written with",
                )


def previous_of(path: Path) -> Path:
    """Where the checkpoint before the last one is."""
    return path.with_name(path.name + ".previous")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a file, once its sum is right. Only tensors and plain values are ever loaded."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    payload = data[len(MAGIC) + DIGEST :]
    if not data.startswith(MAGIC):
        raise DataError(f"{path} is no checkpoint of Sounding", hint="another path")
    if hashlib.sha256(payload).digest() != data[len(MAGIC) : len(MAGIC) + DIGEST]:
        previous = previous_of(path)
        hint = f"deleting it; training then continues from {previous}" if previous.exists() else "deleting it"
        raise DataError(
            f"the checkpoint {path} is damaged (its bytes do not have the sum written with them)", hint=hint
        )
    try:
        found: dict[str, Any] = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise DataError(f"the checkpoint {path} holds something else than tensors and plain values") from error
    return found


def place(path: Path, data: bytes, *, previous: Path | None = None) -> None:
    """Write a file whole or not at all: beside its place, to the disk, then renamed.

    Args:
        path: the place.
        data: all of it.
        previous: where a file that is in the place goes.

    Raises:
        DataError: it cannot be written; nothing that was there is lost.
    """
    _check_place(path)
    new = path.with_name(f".{path.name}.new")  # one name, so that a kill leaves at most one of them
    try:
        with open(new, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(new, path)
    except OSError as error:
        raise DataError(_refusal(path, error), hint=_remedy(error)) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(new)


def _check_place(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"expected the path of a file, got the folder {path}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} into", hint="making it first")


def _refusal(path: Path, error: OSError) -> str:
    return f"{path} cannot be written: {error.strerror or error}; what was there before is kept"


def _remedy(error: OSError) -> str | None:
    return "making room, then the same command again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None


def _differing(kept: Any, asked: Any) -> tuple[str, str]:
    """Both, or just the entries in which two mappings differ."""
    if isinstance(kept, Mapping) and isinstance(asked, Mapping):
        names = [name for name in dict.fromkeys([*kept, *asked]) if kept.get(name) != asked.get(name)]
        return str({name: kept.get(name) for name in names}), str({name: asked.get(name) for name in names})
    return f"{kept!s:.200}", f"{asked!s:.200}"
