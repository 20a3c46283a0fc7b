"""Functions that the tests of sweeps send to workers."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from sounding.errors import InterruptedRun


def wave(x: int, seed: int = 0, wait: float = 0.0, log: str = "") -> dict[str, float]:
    """Numbers that belong to (x, seed), whoever draws them; with `log`, a line in that file for every call."""
    if log:
        with open(log, "a") as file:
            file.write(f"{x} {seed}\n")
    time.sleep(wait)
    return {"drawn": random.Random(f"{x} {seed}").gauss(0, 1), "third": x / 3}


def stumble(x: int, folder: str) -> float:
    """x, once there is a file `mended`; until then 3 raises, 4 hangs, and 5 ends its process."""
    if not (Path(folder) / "mended").exists():
        if x == 3:
            raise ValueError(f"three is refused, see {Path.home()}/notes")
        if x == 4:
            time.sleep(600)
        if x == 5:
            os._exit(1)
    return float(x)


def stacked(x: int, seed: list[int]) -> list[dict[str, Any]]:
    """A row for each seed."""
    return [{"sum": x + one, "seeds_together": len(seed)} for one in seed]


def threads(x: int) -> dict[str, int]:
    """How many threads torch would use."""
    import torch

    return {"threads": torch.get_num_threads()}


def talk(x: int) -> dict[str, float]:
    """Prints, which must not be taken for an answer, and gives what JSON has no number for."""
    print("{}")  # noqa: T201
    return {"infinite": float("inf"), "nothing": float("nan"), "list": [1, 2], "inner": {"deep": x}}  # type: ignore[dict-item]


def place(x: int) -> dict[str, Any]:
    """Which GPUs a task sees, and the process that its worker belongs to."""
    return {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "parent": os.getppid()}


def interrupted(x: int) -> float:
    """Ctrl-C in the second task, as the verbs tell it."""
    if x == 1:
        raise InterruptedRun("interrupted", partial=0.5)
    return float(x)
