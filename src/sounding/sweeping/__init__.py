"""Sweeps: a grid of options becomes tasks, an executor does them, a directory keeps every result.

`sounding.sweep` and `sounding sweep` are the two doors. A task is known by what it computes (`spec`), a result is one
file (`store`), a worker does one task at a time in a process that can be killed (`hand`), and the engines
(`executors`: this process, local processes, Dask) look like `concurrent.futures`. `run` joins them, `table` and
`pictures` show what came out.
"""

from __future__ import annotations

from sounding.sweeping.executors import Executor, open_executor
from sounding.sweeping.run import Progress, complete, run_sweep, sweep
from sounding.sweeping.spec import Call, Spec, read_spec
from sounding.sweeping.store import Status, Store
from sounding.sweeping.table import Table

__all__ = [
    "Call", "Executor", "Progress", "Spec", "Status", "Store", "Table", "complete", "open_executor", "read_spec",
    "run_sweep", "sweep",
]  # fmt: skip
