"""A process that does tasks, one at a time, and `Hand`, which starts it, asks it, and kills it when a task is too long.

The process is `python -m sounding.sweeping.hand`, a JSON object a line in and out. It ends when its input ends, in the
middle of a task too, so that no task outlives the process that asked for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pkgutil
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sounding import __version__
from sounding.errors import SoundingError, UsageError

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
KILLED = "a worker process was killed before this task was done, often because memory ran out"


@dataclass(frozen=True)
class Outcome:
    """What came of a task: its rows, or why there are none."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0


class Hand:
    """What drives a process that does one task at a time."""

    def __init__(self, *, threads: int, environment: Mapping[str, str] | None = None) -> None:
        settings = {name: str(threads) for name in THREADS}
        path = os.pathsep.join(entry for entry in sys.path if entry)  # the worker finds what its parent finds
        self._environment = {**os.environ, **settings, "PYTHONPATH": path, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def do(self, function: str, arguments: Mapping[str, Any], *, limit: float | None = None) -> Outcome:
        """What a function gives; after `limit` seconds the process is killed, and the next task gets a fresh one."""
        call = {"function": function, "arguments": arguments, "version": __version__}
        process = self._start()
        if process is None:
            return Outcome(error="the sweep was stopped before this task was done")
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def expire() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(limit or 0.0, expire)
        timer.daemon = True  # a process that ends need not wait for it
        try:
            if limit is not None:
                timer.start()
            process.stdin.write(json.dumps(call).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
        except (OSError, ValueError):  # a closed pipe, or half a line of one
            self._end()
            return Outcome(error=f"took longer than its limit of {limit:g} s" if late.is_set() else KILLED)
        finally:
            timer.cancel()
        if late.is_set():  # it was killed just after its answer: the next task must not find it dying
            self._end()
        return Outcome(**answer)

    def stop(self) -> None:
        """Kill the process, from any thread; no other is started."""
        with self._lock:
            self._stopped = True
        self._end()

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopped:
                return None
            if self._process is None or self._process.poll() is not None:
                # a session of its own: Ctrl-C at a terminal is for the client, which then ends its workers
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "sounding.sweeping.hand"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, env=self._environment, start_new_session=True,
                )  # fmt: skip
            return self._process

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()


_own = threading.local()
_hands: dict[str, list[Hand]] = {}


def do_for(
    run: str, function: str, arguments: Mapping[str, Any], *, threads: int, limit: float | None
) -> dict[str, Any]:
    """What a function gives, done by the hand that this thread of a Dask worker has for a run."""
    if getattr(_own, "run", None) != run:
        _own.run, _own.hand = run, Hand(threads=threads)
        _hands.setdefault(run, []).append(_own.hand)
    return asdict(_own.hand.do(function, arguments, limit=limit))


def stop_hands(run: str) -> None:
    """End all processes that this Dask worker has for a run."""
    for hand in _hands.pop(run, []):
        hand.stop()


def do(function: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that a function gives, plain and flat.

    A mapping, or an object with `to_dict`, is one row, a number is a row with the column `value`, a list has a row for
    each entry. Mappings inside a row become columns `outer.inner`; lists inside a row are left out.
    """
    found = find_function(function)(**arguments)
    entries = found if isinstance(found, list | tuple) else [found]
    plain = [entry.to_dict() if hasattr(entry, "to_dict") else entry for entry in entries]
    rows = [dict(_flat(entry if isinstance(entry, Mapping) else {"value": entry})) for entry in plain]
    if not any(rows):
        raise UsageError(f"expected numbers from {function}, got {type(found).__name__} without any",
                         hint="a mapping of names to numbers")  # fmt: skip
    return rows


def find_function(address: str) -> Any:
    """The function at `module:name`; modules of the working directory are found too."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = pkgutil.resolve_name(address)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"no function {address!r} here: {error}", hint="module:name, importable by every worker"
        ) from error
    if not callable(found):
        raise UsageError(f"expected a function at {address!r}, got {type(found).__name__}")
    return found


def explain(error: BaseException) -> str:
    """What a failed task says: the sentence of an error of ours, else its kind and message, never a traceback."""
    return str(error) if isinstance(error, SoundingError) else f"{type(error).__name__}: {error}"


def _flat(found: Mapping[str, Any], prefix: str = "") -> Any:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
            continue
        if hasattr(value, "item"):  # a number of numpy or torch; an array of several has no single one
            with contextlib.suppress(ValueError, RuntimeError):
                value = value.item()
        if isinstance(value, float):
            yield f"{prefix}{name}", value if math.isfinite(value) else str(value)
        elif value is None or isinstance(value, bool | int | str):
            yield f"{prefix}{name}", value


def _answer(line: str) -> dict[str, Any]:
    call = json.loads(line)
    if call["version"] != __version__:
        return {"error": f"the worker has version {__version__} of sounding, the client {call['version']}"}
    began = time.perf_counter()
    try:
        return {"rows": do(call["function"], call["arguments"]), "seconds": time.perf_counter() - began}
    except (Exception, KeyboardInterrupt, SystemExit) as error:  # whatever a task raises must not end the worker
        return {"error": explain(error)}


def main() -> None:
    """Answer until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a task prints must not be taken for an answer
    # read by a thread, so that the end of the input is seen in the middle of a task
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # an exit of this thread alone would leave the task running

    threading.Thread(target=listen, daemon=True).start()
    while True:
        replies.write(json.dumps(_answer(lines.get()), allow_nan=False) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
