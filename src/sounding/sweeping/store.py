"""The directory of a sweep: one file a result, one a failure, named by their tasks; it alone says what is done.

`sweep.json` is the sweep, `tasks.txt` the names of its tasks, `pace.json` the seconds that a task takes on the average
(of a run with all its workers), `results/ab/NAME.json` a result and
`failures/ab/NAME.json` the message of a task that failed. Two digits of the name choose a folder, so that none of
100 000 results is in a folder of more than about 400. Files appear whole, by a rename; all of them are JSON or text.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sounding import __version__
from sounding.errors import UsageError
from sounding.files import cannot_write, locked, place
from sounding.sweeping.spec import Call, Spec, spec_of

SWEEP, TASKS, PACE = "sweep.json", "tasks.txt", "pace.json"
SHOWN = 20  # failures that a status lists; all of them are files
NUMBERS = {"nan", "inf", "-inf"}  # what JSON has no number for


@dataclass(frozen=True)
class Status:
    """How far a sweep is; `failures` are the first few (options, message), `pace` the last run's seconds a task."""

    total: int
    done: int
    failed: int
    failures: tuple[tuple[Mapping[str, Any], str], ...] = ()
    pace: float | None = None

    @property
    def left(self) -> int:
        """Tasks without a result, the failed ones included."""
        return self.total - self.done

    @property
    def seconds_left(self) -> float | None:
        """How long the tasks that have neither a result nor a failure take at the pace of the last run."""
        return None if self.pace is None else self.pace * (self.left - self.failed)


@dataclass(frozen=True)
class Store:
    """A run directory."""

    folder: Path

    @contextlib.contextmanager
    def opened(self, spec: Spec) -> Iterator[None]:
        """Alone with the directory, which is made and described if it is new.

        Raises:
            UsageError: another client works here, or it holds something else.
            DataError: it cannot be written.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            # a client that was killed at its start leaves a lock, and perhaps the names of tasks
            strange = [entry for entry in os.listdir(self.folder) if not entry.startswith(".") and entry != TASKS]
            if strange and SWEEP not in strange:
                raise UsageError(f"{self.folder} holds something that is no sweep", hint="another --out")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot write into {self.folder}: {error.strerror or error}", hint="another --out"
            ) from error
        with locked(self.folder / SWEEP):
            names = "".join(f"{call.address}\n" for part in spec.parts() for call in part.calls())
            place(self.folder / TASKS, names.encode())
            place(self.folder / SWEEP, _dump({**spec.to_dict(), "version": __version__}))
            yield

    def read_spec(self) -> Spec:
        """The sweep of the directory.

        Raises:
            UsageError: the directory holds none, or one of another version of the package.
        """
        path = self.folder / SWEEP
        try:
            data = json.loads(path.read_text("utf-8"))
            version = data.pop("version")
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"{self.folder} holds no sweep", hint="sounding sweep run SPEC.toml --out DIR") from error
        if version != __version__:  # names of tasks hold the version: none would be found again
            raise UsageError(f"the sweep in {self.folder} is of version {version} of sounding, this is {__version__}",
                             hint="that version, or sounding sweep run with another --out")  # fmt: skip
        return spec_of(data, where=str(path))

    def done(self) -> set[str]:
        """The names of all tasks that have a result."""
        return set(self._names("results"))

    def keep(self, call: Call, rows: list[dict[str, Any]], *, seconds: float) -> None:
        """Write the result of a task; its failure, if it had one, is forgotten."""
        self._write("results", call, {"rows": rows, "seconds": seconds})
        with contextlib.suppress(OSError):
            self._path("failures", call.address).unlink()

    def keep_failure(self, call: Call, message: str) -> None:
        """Write why a task failed, without the name of the user's home; the next run tries it again."""
        home = str(Path.home())
        self._write("failures", call, {"message": message.replace(home, "~") if len(home) > 1 else message})

    def read(self, call: Call) -> list[dict[str, Any]] | None:
        """The rows of a task; None where there is no result, or a damaged one, which is removed to be made again."""
        path = self._path("results", call.address)
        try:
            rows = json.loads(path.read_text("utf-8"))["rows"]
            return [{name: _number(value) for name, value in row.items()} for row in rows]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            path.unlink(missing_ok=True)
            return None

    def keep_pace(self, seconds: float) -> None:
        """Write how long a task takes, so that `status` can tell the time left from the directory alone."""
        place(self.folder / PACE, _dump({"seconds": seconds}))

    def results(self, verb: str) -> Iterator[tuple[Mapping[str, Any], list[dict[str, Any]]]]:
        """The options and rows of every result of a verb that is there, of earlier sweeps too."""
        told = self._read_all("results", sorted(self.done()), "rows")
        return ((options, rows) for found, options, rows in told if found == verb)

    def forget(self, calls: Iterable[Call]) -> None:
        """Remove the results of some tasks, so that they are done again."""
        for call in calls:
            self._path("results", call.address).unlink(missing_ok=True)

    def status(self) -> Status:
        """How far the sweep is, from names alone: a second suffices for 100 000 tasks."""
        try:
            tasks = set((self.folder / TASKS).read_text("ascii").split())
        except OSError as error:
            raise UsageError(f"{self.folder} holds no sweep", hint="sounding sweep run SPEC.toml --out DIR") from error
        done = tasks & self.done()  # the folder may have results of earlier sweeps
        failed = sorted((tasks & set(self._names("failures"))) - done)
        pace = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            pace = float(json.loads((self.folder / PACE).read_text("utf-8"))["seconds"])
        told = self._read_all("failures", failed[:SHOWN], "message")
        return Status(len(tasks), len(done), len(failed), tuple((options, why) for _, options, why in told), pace)

    def _read_all(self, kind: str, names: Iterable[str], field: str) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
        for name in names:
            # a file may go while we read, and a damaged one counts as none
            with contextlib.suppress(OSError, ValueError, KeyError):
                found = json.loads(self._path(kind, name).read_text("utf-8"))
                yield found["verb"], found["options"], found[field]

    def _names(self, kind: str) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError):
            for folder in os.scandir(self.folder / kind):
                for name in os.listdir(folder):
                    if name.endswith(".json") and not name.startswith("."):
                        yield name.removesuffix(".json")

    def _path(self, kind: str, address: str) -> Path:
        return self.folder / kind / address[:2] / f"{address}.json"

    def _write(self, kind: str, call: Call, content: Mapping[str, Any]) -> None:
        path = self._path(kind, call.address)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from error
        place(path, _dump({"verb": call.verb, "options": call.options, "version": __version__, **content}))


def _dump(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False).encode()


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in NUMBERS else value
