"""Work of a benchmark in several processes, each with one thread."""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_order(work: Callable[[Task], Result], tasks: Sequence[Task], *, processes: int) -> Iterator[Result]:
    """Yield what `work` returns for each task, in the order of the tasks.

    Args:
        work: a function of a module, so that other processes can import it.
        tasks: what it is given, one after the other.
        processes: how many compute; 1 computes here.
    """
    if processes == 1:
        settle()
        yield from map(work, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(processes, settle) as pool:
        yield from pool.imap(work, tasks)


def settle() -> None:
    """One thread, and no words of other libraries between the rows of a table."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
