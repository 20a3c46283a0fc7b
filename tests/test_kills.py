"""Kills by SIGKILL and SIGTERM at random moments: nothing is lost, the numbers are the same, nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "killed.py"


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param({"train": 3, "unpack": 3}, id="some"),
        pytest.param(
            {"train": 10, "train-command": 6, "simulate": 6, "reproduce": 6, "unpack": 6, "weights": 6},
            id="many",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_work_that_is_killed_ends_as_if_it_was_not(kills: dict[str, int], tmp_path: Path) -> None:
    words = [f"{kind}={count}" for kind, count in kills.items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), str(tmp_path), *words]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines() == [f"{kind}: {count} kills" for kind, count in kills.items()]
