"""Do a task in a process of its own kind: started once, used for task after task, killed when a task takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sounding import __version__

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
KILLED = "a worker process was killed before this task was done, often because memory ran out"


@dataclass(frozen=True)
class Outcome:
    """What came of a task: its rows, or why there are none."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0


class Hand:
    """A process that does one task at a time (`sounding.sweeping.hand`)."""

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
