"""Engines behind one interface, shaped like `concurrent.futures`: this process, local processes, Dask."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import math
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

from sounding.errors import DataError, UsageError
from sounding.lazy import import_extra
from sounding.sweeping.hand import THREADS, Hand, Outcome, do, do_for, explain, stop_hands
from sounding.sweeping.spec import Call

Future: TypeAlias = "concurrent.futures.Future[Outcome]"
HERE = "in-process"
CLUSTERS = "in-process, local:4, tcp://HOST:8786 or tls://HOST:8786"
AHEAD = 3  # calls submitted for each worker; fewer leave it idle between two tiny tasks, more only use memory
LEAST = 32  # calls submitted to a cluster, also while its workers have yet to come
LOOK = 5.0  # seconds between two looks at how many workers a cluster has
CONNECT = 10.0  # seconds in which a scheduler must answer, at first and when a connection broke
WORKER_WAIT = 60.0  # seconds for the workers of a local cluster to start; they import little, so this is a slow machine


class Executor(Protocol):
    """What does calls. A future that ends always has an `Outcome`, unless the engine itself is lost.

    Attributes:
        capacity: calls to have under way, some more than there are workers, so that none of them waits for the next.
    """

    @property
    def capacity(self) -> int: ...

    def submit(self, call: Call) -> Future:
        """Have a call done."""

    def close(self) -> None:
        """End at once: what is running is stopped."""


@contextlib.contextmanager
def open_executor(
    cluster: Any = None,
    *,
    jobs: int | None = None,
    threads: int = 1,
    limit: float | None = None,
    resources: Mapping[str, float] | None = None,
) -> Iterator[Executor]:
    """An engine, closed at the end however the body ends.

    Args:
        cluster, jobs, threads, limit: as for `sounding.sweep`.
        resources: what a Dask worker must have for a task; {"GPU": 1} gives each local process a GPU of its own.

    Raises:
        UsageError: there is no such engine, or it cannot do what is asked.
        DataError: the scheduler does not answer.
        MissingExtraError: Dask is not installed.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {jobs}")
    if cluster is not None and jobs is not None:
        raise UsageError("expected either --jobs or --cluster, got both", hint="--cluster local:4")
    executor: Executor
    if cluster == HERE:
        if limit is not None:
            raise UsageError("a limit of time needs a process that can be killed, got in-process", hint="--jobs 1")
        executor = InProcess(threads=threads)
    elif cluster is None:
        executor = Processes(jobs, threads=threads, limit=limit, gpus=bool((resources or {}).get("GPU")))
    else:
        executor = Dask(cluster, threads=threads, limit=limit, resources=resources or {})
    try:
        yield executor
    finally:
        executor.close()


class InProcess:
    """Calls done by this process, each as it is submitted."""

    def __init__(self, *, threads: int) -> None:
        self.capacity = 1
        self._threads = threads
        self._before = {name: os.environ.get(name) for name in THREADS}
        self._torch = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
        os.environ.update(dict.fromkeys(THREADS, str(threads)))  # for a torch that a task imports

    def submit(self, call: Call) -> Future:
        from threadpoolctl import threadpool_limits

        future: Future = concurrent.futures.Future()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(self._threads)
        began = time.perf_counter()
        try:
            with threadpool_limits(self._threads):
                rows = do(call.function, call.arguments)
            future.set_result(Outcome(rows, seconds=time.perf_counter() - began))
        except KeyboardInterrupt:
            raise
        except Exception as error:  # a task that fails must not end the others
            future.set_result(Outcome(error=explain(error)))
        return future

    def close(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(self._torch or os.cpu_count() or 1)


class Processes:
    """Calls done by processes of this machine: a thread for each, which waits for its own process."""

    def __init__(self, jobs: int | None, *, threads: int, limit: float | None, gpus: bool) -> None:
        devices: list[str | None] = [None]
        if gpus:
            import torch

            named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            devices = [*(named or map(str, range(torch.cuda.device_count())))]
        if not devices:
            told = "the sweep asks for a GPU, and there is none here"
            raise UsageError(told, hint="--cluster with workers that have one")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = jobs or (len(devices) if gpus else cores)
        self.capacity = AHEAD * workers
        self._limit = limit
        given = itertools.islice(itertools.cycle(devices), workers)
        environments = [{} if device is None else {"CUDA_VISIBLE_DEVICES": device} for device in given]
        self._hands = [Hand(threads=threads, environment=environment) for environment in environments]
        self._free = list(self._hands)
        self._own = threading.local()  # a thread keeps its process from task to task
        self._pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="sounding-sweep")

    def submit(self, call: Call) -> Future:
        return self._pool.submit(self._do, call)

    def _do(self, call: Call) -> Outcome:
        if not hasattr(self._own, "hand"):
            self._own.hand = self._free.pop()
        hand: Hand = self._own.hand
        return hand.do(call.function, call.arguments, limit=self._limit)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)  # first, so that no thread takes another task
        for hand in self._hands:
            hand.stop()
        self._pool.shutdown(wait=True)


class Dask:
    """Calls done by the workers of a Dask cluster, each in a process of the worker's that can be killed."""

    def __init__(self, cluster: Any, *, threads: int, limit: float | None, resources: Mapping[str, float]) -> None:
        distributed = import_extra("distributed", extra="dask", needed_for="a sweep on a cluster")
        self._run = uuid.uuid4().hex
        self._settings = {"threads": threads, "limit": limit}
        self._resources = dict(resources)
        self._closing = contextlib.ExitStack()
        self._capacity, self._looked = LEAST, -math.inf
        try:
            self._client = self._connect(distributed, cluster)
        except BaseException:
            self._closing.close()
            raise

    @property
    def capacity(self) -> int:
        """How many tasks may be with the scheduler: more when workers come, fewer when they go."""
        if time.monotonic() - self._looked > LOOK and self._client.status == "running":
            with contextlib.suppress(Exception):  # of a scheduler that is lost, which `submit` tells
                self._capacity = max(LEAST, AHEAD * sum(self._client.nthreads().values()))
            self._looked = time.monotonic()
        return self._capacity

    def _connect(self, distributed: Any, cluster: Any) -> Any:
        """The client of the cluster that was named, or the one that was given."""
        if isinstance(cluster, distributed.Client):
            return cluster
        for name in [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "distributed"]:
            # what a lost connection means is told in a sentence of ours, not by tracebacks
            self._closing.callback(logging.getLogger(name).setLevel, logging.getLogger(name).level)
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        kind, _, rest = str(cluster).partition(":")
        if kind == "local":
            return self._closing.enter_context(distributed.Client(self._start(distributed, rest), set_as_default=False))
        if kind not in ("tcp", "tls") or not rest.startswith("//"):
            raise UsageError(f"no cluster {cluster!r}", hint=CLUSTERS)
        try:
            return self._closing.enter_context(distributed.Client(cluster, timeout=CONNECT, set_as_default=False))
        except (OSError, TimeoutError, ValueError) as error:
            raise DataError(
                f"no Dask scheduler answers at {cluster}", hint="dask scheduler --host 127.0.0.1"
            ) from error

    def _start(self, distributed: Any, text: str) -> Any:
        """A Dask cluster of some processes on this machine, reachable from here alone."""
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"expected a number of workers in --cluster local:N, got {text!r}", hint="local:4")
        import tempfile

        import dask

        scratch = self._closing.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        self._closing.enter_context(dask.config.set({"temporary-directory": scratch}))
        # loopback only: whoever reaches a scheduler without authentication runs code as its user
        cluster = distributed.LocalCluster(
            n_workers=int(text), threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0",
            memory_limit=0, resources=self._resources or None, silence_logs=50,
        )  # fmt: skip
        self._closing.enter_context(cluster)
        cluster.wait_for_workers(int(text), timeout=WORKER_WAIT)
        return cluster

    def submit(self, call: Call) -> Future:
        future: Future = concurrent.futures.Future()
        try:
            asked = self._client.submit(
                do_for, self._run, call.function, call.arguments, **self._settings,
                pure=False, resources=self._resources or None, key=f"sounding-{call.address}-{uuid.uuid4().hex[:8]}",
            )  # fmt: skip
            asked.add_done_callback(lambda done: _pass_on(done, future))
        except Exception as error:  # whatever a client says that has no scheduler any more
            raise _lost() from error
        return future

    def close(self) -> None:
        if self._client.status == "running":  # a cluster that is gone would be waited for
            with contextlib.suppress(Exception):
                self._client.run(stop_hands, self._run)
        with contextlib.suppress(Exception):
            self._closing.close()


def _pass_on(done: Any, future: Future) -> None:
    """Hand a Dask future's end to ours: its outcome, the death of its workers, or the loss of the scheduler."""
    try:
        if done.status == "error":
            future.set_result(Outcome(error=explain(done.exception(timeout=60))))
        else:
            future.set_result(Outcome(**done.result(timeout=60)))
    except (Exception, concurrent.futures.CancelledError):
        future.set_exception(_lost())


def _lost() -> DataError:
    told = "the Dask scheduler was lost; finished tasks are kept"
    return DataError(told, hint="sounding sweep resume DIR, with a cluster that is there")
