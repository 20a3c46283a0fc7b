"""Measured steps as lines of JSON, whole after a kill, a crash or a full disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sounding.errors import UsageError
from sounding.profile import Profile
from sounding.train.monitor.changes import Event
from sounding.train.monitor.sinks import Snapshot

SCHEMA = "sounding.monitor/1"


class JsonLines:
    """Appends one line of JSON per measured step.

    A line is handed to the system whole and at once, so a process that is killed loses no line it had written; a
    machine that stops may leave half a line, which the reader skips and names, and which the next run ends before it
    appends. When the disk is full the half line is taken back.

    Args:
        path: the file; its directory must exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: int | None = None
        self._open()
        self.close()

    def write(self, snapshot: Snapshot) -> None:
        """Append a line."""
        text = json.dumps({"schema": SCHEMA, **snapshot.to_dict()}, allow_nan=False, separators=(",", ":"))
        file = self._file if self._file is not None else self._open()
        line, end = memoryview(f"{text}\n".encode()), os.fstat(file).st_size
        try:
            while line:
                line = line[os.write(file, line) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, end)
            raise

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        """Open the file for appending, and end the half line that a stopped writer left."""
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            size = os.fstat(self._file).st_size
            if size:
                os.lseek(self._file, size - 1, os.SEEK_SET)
                if os.read(self._file, 1) != b"\n":
                    os.write(self._file, b"\n")
        except OSError as error:
            raise UsageError(
                f"expected a file that can be written, got {self.path} ({error.strerror})",
                hint="a path in a directory that exists",
            ) from error
        return self._file


@dataclass(frozen=True)
class Log:
    """What a file of JSON lines holds.

    Args:
        profiles: step → profile, in order of steps; of a step measured twice (a resumed run) the later line counts.
        events: the news of all steps, in the same order.
        skipped: the lines that are no snapshot, each with its number and why.
    """

    profiles: Mapping[int, Profile]
    events: tuple[Event, ...]
    skipped: tuple[str, ...]


def read_json_lines(path: str | Path) -> Log:
    """Read what `JsonLines` wrote; a half line is skipped and named."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"expected a file of JSON lines, got {path} ({error.strerror})") from error
    found: dict[int, tuple[Profile, list[Event]]] = {}
    skipped: list[str] = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            found[int(data["step"])] = Profile.from_dict(data["profile"]), [Event(**event) for event in data["events"]]
        except (ValueError, KeyError, TypeError) as error:
            half = number == raw.count(b"\n") + 1
            what = "half a line, the writer was stopped" if half else "no measured step"
            skipped.append(f"line {number}: {what} ({f'{type(error).__name__}: {error}':.120})")
    steps = sorted(found)
    events = tuple(event for step in steps for event in found[step][1])
    return Log({step: found[step][0] for step in steps}, events, tuple(skipped))
