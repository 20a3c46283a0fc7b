"""Checkpoints that survive a kill: written beside, checked by a sum, placed by a rename; the last but one stays."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sounding.errors import DataError, SoundingError, UsageError
from sounding.files import locked, place

MAGIC = b"SOUNDING CHECKPOINT 1\n"
# between float32's rounding of factorized weights (1e-6 of a sketch) and the distance of two seeds (about 1)
SKETCH_TOLERANCE = 1e-3
NEWLINE = "\n"
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
        self._settings = json.loads(json.dumps(settings))  # as they will be read back: tuples become lists
        self._written = time.monotonic()

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Keep every other run off the file; see `sounding.files.locked`."""
        return contextlib.nullcontext() if self._checkpoint is None else locked(Path(self._checkpoint.path))

    def resume(self, restore: Callable[[dict[str, Any]], None], state: Callable[[], Mapping[str, Any]]) -> None:
        """Restore what was kept; where nothing was, write the state there is.

        That first writing finds a place without room or permission before the work, not after it.
        """
        try:
            kept = self.read()
            if kept is not None:
                restore(kept)
                return
        except SoundingError:  # says already what is wrong
            raise
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise DataError(
                f"the checkpoint {self._checkpoint and self._checkpoint.path} does not hold the state of this run "
                f"({type(error).__name__}: {str(error).strip().partition(NEWLINE)[0]:.200})",
                hint="another path, or deleting it",
            ) from error
        self.write(state())

    def due(self) -> bool:
        """Whether it is time to write."""
        return self._checkpoint is not None and time.monotonic() - self._written >= self._checkpoint.seconds

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint; where there is no room or no permission, those that were there are untouched."""
        if self._checkpoint is None:
            return
        buffer = io.BytesIO()  # in memory first: the sum stands in front of what it is of
        torch.save({"settings": json.dumps(self._settings), **state}, buffer)
        payload = buffer.getvalue()
        path = Path(self._checkpoint.path)
        place(path, MAGIC + hashlib.sha256(payload).digest() + payload, previous=previous_of(path))
        self._written = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """What was kept by this run, or None where nothing is; a damaged file is left as it is."""
        if self._checkpoint is None:
            return None
        path = Path(self._checkpoint.path)
        # a kill between the two renames leaves the older one only
        found = next((each for each in (path, previous_of(path)) if each.exists()), None)
        if found is None:
            return None
        state = read_checkpoint(found)
        theirs = json.loads(state["settings"])
        for name in dict.fromkeys([*self._settings, *theirs]):  # what either has: a setting that is new counts too
            kept, asked = theirs.get(name), self._settings.get(name)
            if not _agree(kept, asked):
                if isinstance(kept, Mapping) and isinstance(asked, Mapping):  # just the entries in which they differ
                    apart = [key for key in dict.fromkeys([*kept, *asked]) if kept.get(key) != asked.get(key)]
                    kept, asked = ({key: told.get(key) for key in apart} for told in (kept, asked))
                told = f"its {name} is {kept!s:.200}, this run's {asked!s:.200}"
                raise UsageError(
                    f"the checkpoint {found} belongs to another run: {told}",
                    hint="another path, or the settings it was written with",
                )
        return state


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
    # half a file has its beginning, so this comes second
    if hashlib.sha256(payload).digest() != data[len(MAGIC) : len(MAGIC) + DIGEST]:
        previous = previous_of(path)
        hint = f"deleting it; training then continues from {previous}" if previous.exists() else "deleting it"
        raise DataError(
            f"the checkpoint {path} is damaged (its bytes do not have the sum written with them)", hint=hint
        )
    try:
        # anything else could run code of a stranger
        found: dict[str, Any] = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever a crafted file makes it stumble over
        raise DataError(f"the checkpoint {path} holds something else than tensors and plain values") from error
    return found


def _agree(kept: Any, asked: Any) -> bool:
    """Whether two settings are equal; the sketches of the initial weights need be equal to rounding only."""
    if isinstance(kept, Mapping) and isinstance(asked, Mapping) and "weights" in kept and "weights" in asked:
        one, other = (torch.tensor(told["weights"], dtype=torch.float64) for told in (kept, asked))
        near = one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=SKETCH_TOLERANCE)
        return near and {**kept, "weights": None} == {**asked, "weights": None}
    return bool(kept == asked)
