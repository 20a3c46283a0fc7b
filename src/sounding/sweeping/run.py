"""Do a sweep: what has no result yet goes to an executor, what comes back goes to the directory."""

from __future__ import annotations

import itertools
import queue
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sounding.errors import InterruptedRun, UsageError
from sounding.sweeping.executors import HERE, Executor, Future, open_executor
from sounding.sweeping.hand import Outcome
from sounding.sweeping.spec import Call, Spec, address_of
from sounding.sweeping.store import Store
from sounding.sweeping.table import Table, read_table

TELL = 1.0  # seconds between two notes of the pace: a status is as fresh, and tiny tasks are not slowed by a file each


@dataclass(frozen=True)
class Progress:
    """How far a run is; `seconds_left` is from the pace of this run, None before its first task."""

    done: int
    failed: int
    total: int
    seconds_left: float | None


def complete(executor: Executor, calls: Iterable[Call]) -> Iterator[tuple[Call, Outcome]]:
    """Every call with its outcome, in the order in which they end; only a few are submitted ahead."""
    ended: queue.SimpleQueue[Future] = queue.SimpleQueue()  # filled by the threads of the engine
    under_way: dict[Future, Call] = {}
    waiting = iter(calls)

    def submit() -> None:
        for call in itertools.islice(waiting, max(0, executor.capacity - len(under_way))):
            future = executor.submit(call)
            under_way[future] = call
            future.add_done_callback(ended.put)

    submit()
    while under_way:
        future = ended.get()
        call = under_way.pop(future)
        yield call, future.result()
        submit()


def run_sweep(
    spec: Spec,
    out: Path,
    *,
    cluster: Any = None,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> None:
    """Do all tasks of a sweep that have no result in the directory, the failed ones again.

    Raises:
        UsageError: another client works in the directory, or the engine is not there.
        DataError: the disk refuses a result, or the scheduler is lost; all results that were written stay.
        InterruptedRun: Ctrl-C; all results that were written stay.
    """
    store = Store(out)
    with store.opened(spec):
        done = store.done()
        total = sum(len(part) for part in spec.parts())
        # a generator: 100 000 calls are never held at once
        missing = (call for part in spec.parts() for call in part.calls() if call.address not in done)
        left = sum(call.address not in done for part in spec.parts() for call in part.calls())
        if not left:
            return
        counted, failed, began = total - left, 0, time.monotonic()
        told_at = began
        told = f"interrupted; finished tasks are in {out}, sounding sweep resume {out} goes on with the rest"
        options = {"threads": spec.threads, "limit": spec.limit, "resources": spec.resources}
        try:
            with open_executor(cluster, jobs=jobs, **options) as executor:  # type: ignore[arg-type]
                for call, outcome in complete(executor, missing):
                    error, wanted = outcome.error, len(spec.rows_of(call))
                    if error is None and len(outcome.rows) != wanted:
                        runs = f"expected {wanted} rows from {call.verb}, one for each run of the task"
                        error = f"{runs}, got {len(outcome.rows)}"
                    if error is None:
                        store.keep(call, outcome.rows, seconds=outcome.seconds)
                        counted += 1
                    else:
                        store.keep_failure(call, error)
                        failed += 1
                    ended, now = counted + failed - (total - left), time.monotonic()
                    pace = (now - began) / ended  # of all workers together
                    if now - told_at > TELL or ended == 1:
                        store.keep_pace(pace)
                        told_at = now
                    if progress is not None:
                        progress(Progress(counted, failed, total, pace * (left - ended)))
        except KeyboardInterrupt:
            raise InterruptedRun(told) from None


def sweep(
    function: Callable[..., Any] | str,
    grid: Mapping[str, Sequence[Any]],
    *,
    options: Mapping[str, Any] | None = None,
    seeds: int | None = None,
    stack: Sequence[str] = (),
    out: str | Path | None = None,
    cluster: Any = None,
    jobs: int | None = None,
    threads: int = 1,
    limit: float | None = None,
    resources: Mapping[str, float] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Table:
    """The table of a function over a grid: a row for every combination of values.

    Args:
        function: at the top of a module that workers can import, or its address "module:name"; it takes the options as
            keywords and gives a mapping, an object with `to_dict`, or a number. A verb such as "predict kernel" works.
        grid: option to its values.
        options: of every call.
        seeds: so many random seeds, as a further axis `seed`; the function makes its generator from it.
        stack: axes whose values one call gets together, as lists; it then gives a list of rows.
        out: the directory that keeps the results, and has those that need not be done again; None keeps nothing.
        cluster: None for local processes, "in-process", "local:N", the address of a Dask scheduler, or its client.
        jobs: local processes; by default one a core.
        threads: of a task.
        limit: seconds that a task may take.
        resources: what a Dask worker must have, as {"GPU": 1}.
        progress: called with a `Progress` after every task.

    >>> table = sweep("sounding.predict:batchnorm", {"batch_size": [8, 32]}, options={"activation": "relu"},
    ...               cluster="in-process")
    >>> [round(row["gradient_growth"], 3) for row in table.rows]
    [1.788, 1.522]
    """
    address = address_of(function)
    if address.startswith("__main__:") and cluster != HERE:
        raise UsageError(f"{address[9:]!r} stands in the script that runs, where no worker finds it",
                         hint='a module of its own, or cluster="in-process"')  # fmt: skip
    spec = Spec(address, grid, options or {}, seeds, tuple(stack), limit, threads, resources or {})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "sweep" if out is None else Path(out)
        run_sweep(spec, folder, cluster=cluster, jobs=jobs, progress=progress)
        return read_table(Store(folder), spec)
