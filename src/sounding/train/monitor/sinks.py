"""Where measured steps go: the shape of a sink, the one in memory, and lines of JSON in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sounding.encoding import fields_of
from sounding.errors import UsageError, require_whole
from sounding.probe.reading import NETWORK
from sounding.probe.records import Verdict
from sounding.profile import Profile
from sounding.train.monitor.changes import Event

# What a tracker plots of every weight layer: size, directions, gradients and the optimizer's step. All measures of all
# calls are more than a thousand curves for 24 layers, in which nobody finds anything.
TRACKED = ("mean_square", "participation_ratio", "gradient_log_norm", "update_ratio")

SCHEMA = "sounding.monitor/1"


class Snapshot:
    """One measured step: its number, the profile, the verdict, and what is new since the last one.

    The profile may be given by a function, which is called when it is first asked for: most steps are looked at by
    nobody.
    """

    def __init__(
        self, step: int, profile: Profile | Callable[[], Profile], verdict: Verdict, events: tuple[Event, ...] = ()
    ) -> None:
        self.step, self.verdict, self.events = step, verdict, events
        self._profile = profile

    @property
    def profile(self) -> Profile:
        """What was measured, over depth."""
        if not isinstance(self._profile, Profile):
            self._profile = self._profile()  # what the function holds is let go
        return self._profile

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return fields_of(self, "step profile verdict events")

    def scalars(self, measures: Collection[str] | None = TRACKED) -> dict[str, float]:
        """The network's numbers and these measures of its weight layers, under tags that sort by depth for trackers.

        The layer is part of the tag, with leading zeros: `mean_square/0031.features.3`, `network/gradient_growth`.
        With None, every measure of every call.
        """
        layers = self.profile.settings.get("weight_layers")
        found: dict[str, float] = {}
        for row in self.profile.rows:
            if row.name == NETWORK:
                found[f"network/{row.measure}"] = row.value
            elif measures is None or (row.measure in measures and (layers is None or row.layer in layers)):
                found[f"{row.measure}/{row.layer:04d}.{row.name}"] = row.value
        return found


@runtime_checkable
class Sink(Protocol):
    """Anything that takes snapshots. `close` ends a run; a later `write` may open it again."""

    def write(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


class Memory:
    """The measured steps as profiles, in bounded memory.

    Args:
        keep: at most this many steps are held. When it is full every second one is dropped, and from then on every
            second (fourth, eighth, …) measurement is kept: the whole run at even spacing, the first step and the
            latest always among them.

    >>> memory = Memory(keep=4)
    >>> for step in range(0, 1000, 10):
    ...     memory.write(Snapshot(step, Profile(), Verdict("healthy", (), "")))
    >>> list(memory.profiles)
    [0, 320, 640, 960, 990]
    """

    def __init__(self, keep: int = 64) -> None:
        require_whole("keep", keep, least=2)
        self._keep, self._stride, self._seen = keep, 1, 0
        self._kept: list[tuple[int, Snapshot]] = []
        self.latest: Snapshot | None = None  # the last step measured, which `keep` may have left out

    @property
    def profiles(self) -> Mapping[int, Profile]:
        """Step → profile, in order."""
        found = {snapshot.step: snapshot.profile for _, snapshot in self._kept}
        if self.latest is not None:
            found[self.latest.step] = self.latest.profile
        return found

    @property
    def profile(self) -> Profile:
        """All steps held in one table; the source of a row is its step, "step 400"."""
        profiles = self.profiles
        rows = tuple(row for profile in profiles.values() for row in profile.rows)
        latest = self.latest.profile.settings if self.latest is not None else {}
        return Profile(rows, {**latest, "steps": list(profiles)})

    def write(self, snapshot: Snapshot) -> None:
        """Take a step."""
        self.latest = snapshot
        if self._seen % self._stride == 0:
            self._kept.append((self._seen, snapshot))
            if len(self._kept) > self._keep:
                self._stride *= 2  # the steps held stay evenly spaced
                self._kept = [(index, held) for index, held in self._kept if index % self._stride == 0]
        self._seen += 1

    def close(self) -> None:
        """Nothing to close."""


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
            while line:  # the system may take less than it is given
                line = line[os.write(file, line) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, end)  # back to the end of the last whole line
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
                if os.read(self._file, 1) != b"\n":  # the rest of the half line will never come
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
            half = number == raw.count(b"\n") + 1  # only the last line can be half
            what = "half a line, the writer was stopped" if half else "no measured step"
            skipped.append(f"line {number}: {what} ({f'{type(error).__name__}: {error}':.120})")
    steps = sorted(found)
    events = tuple(event for step in steps for event in found[step][1])
    return Log({step: found[step][0] for step in steps}, events, tuple(skipped))
