"""Sweeps: efficiency of processes, overhead of a task, and very many tasks: `python bench/sweep.py [NAME ...]`.

Prints one line a figure: the efficiency of two processes for tasks of a second (goal: 90%), milliseconds that a task
costs beyond its work in processes and with Dask (goal: 20), and time, memory and the answer time of `status` for a
sweep of 100 000 tasks (goal: memory that does not grow with them, a status within a second). TASKS=N in the
environment changes their number.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sounding.sweeping import Progress, Spec, run_sweep

SECOND, TINY, MANY = 24, 1000, int(os.environ.get("TASKS", "100000"))


def work(x: int, seconds: float = 1.0) -> float:
    """x, after so many seconds of CPU time."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return float(x)


def tiny(x: int, y: int = 0) -> float:
    """x, at once."""
    return float(x + y)


def ends_of(spec: Spec, **engine: Any) -> list[float]:
    """When each task of a sweep ended, in seconds."""
    marks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run_sweep(spec, Path(folder) / "out", progress=lambda state: marks.append(time.perf_counter()), **engine)
    return marks


def efficiency() -> None:
    """Work done by two processes in a time, over that time twice; the start of the processes is outside."""
    marks = ends_of(Spec("sweep:work", {"x": list(range(SECOND))}, {"seconds": 1.0}), jobs=2)
    # from the second result on, when both processes have started
    share = (len(marks) - 2) / 2 / (marks[-1] - marks[1])
    print(f"efficiency of 2 processes, {SECOND} tasks of 1 s: {100 * share:.1f}%")


def overhead() -> None:
    """Milliseconds between two ends of tasks that do nothing, on one worker, its start left out."""
    for label, engine in (("processes", {"jobs": 1}), ("Dask", {"cluster": "local:1"})):
        marks = ends_of(Spec("sweep:tiny", {"x": list(range(TINY))}), **engine)
        print(f"overhead a task, {label}: {1000 * (marks[-1] - marks[99]) / (len(marks) - 100):.2f} ms")


def many() -> None:
    """A sweep of very many tasks: its time, the client's memory, and how long `status` takes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        memory: dict[int, int] = {}

        def note(state: Progress) -> None:
            if state.done in (MANY // 10, MANY):
                memory[state.done] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        began = time.perf_counter()
        run_sweep(Spec("sweep:tiny", {"x": list(range(MANY // 100)), "y": list(range(100))}), out, progress=note)
        spent = time.perf_counter() - began
        early, late = (memory[count] / 1024 for count in sorted(memory))
        print(
            f"{MANY} tiny tasks: {spent:.0f} s, client memory {early:.0f} MiB after a tenth, {late:.0f} MiB at the end"
        )
        began = time.perf_counter()
        command = [sys.executable, "-m", "sounding", "sweep", "status", str(out), "--json"]
        found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        print(f"status: {time.perf_counter() - began:.2f} s, {found['done']} of {found['total']} done")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    for name in sys.argv[1:] or ("efficiency", "overhead", "many"):
        {"efficiency": efficiency, "overhead": overhead, "many": many}[name]()
