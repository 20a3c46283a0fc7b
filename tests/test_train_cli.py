"""`sounding train`: grids from one line, errors as sentences, Ctrl-C and kill -9 that lose nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sounding.cli import cli
from sounding.cli.train import draw_curve
from sounding.train import History

SMALL = ["train", "--depth", "2", "--width", "16", "--norm", "batch", "--batch-size", "200", "--epochs", "2"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, list(arguments))


def test_a_line_makes_a_grid(tmp_path: Path) -> None:
    """2 initializations × 2 eps × 2 rates × 2 seeds, the best rate of each group, and files that can be read again."""
    grid = ["--init", "he,haar", "--eps", "1e-5,0.1", "--lr", "0.01,0.3", "--seeds", "2", "--set", "bias=False"]
    result = run(*SMALL, *grid, "--out", "history.json", "--plot", "curves.svg", "--measure-at", "0,7", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found["settings"]) == 16
    assert len(found["choices"]) == 4
    assert "lowest train loss" in found["rule"]
    history = History.from_json(tmp_path / "history.json")
    assert history.runs == 16
    assert len(history.at(run=3, step=7)) > 0
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")


def test_the_table_names_runs_that_diverged() -> None:
    result = run(*SMALL, "--lr", "0.1,1e30", "--norm", "none")
    assert result.exit_code == 0
    assert "diverged at step" in result.stdout
    assert "best learning rate" in result.stdout


def test_the_same_command_reads_what_is_finished_and_gives_the_same_numbers() -> None:
    first, second = (run(*SMALL, "--json") for _ in range(2))
    assert "going on from" in second.stderr
    assert json.loads(first.stdout)["curves"] == json.loads(second.stdout)["curves"]
    third = run(*SMALL, "--json", "--fresh")
    assert "going on from" not in third.stderr
    assert json.loads(first.stdout)["curves"] == json.loads(third.stdout)["curves"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--depth", "6,7"], "takes one value"),
        (["--depth", "six"], "whole number"),
        (["--model", "nope"], "unknown model"),
        (["--set", "foo=1"], "no option 'foo'"),
        (["--set", "foo"], "expected --set KEY=VALUE"),
        (["--lr", "a"], "takes numbers"),
        (["--lr", "-1"], "learning rate"),
        (["--seeds", "0"], "at least 1"),
        (["--steps", "3"], "got both"),
        (["--device", "cuda:7"], "no device"),
        (["--data", "nope"], "unknown data set"),
        (["--init", "foo"], "unknown init"),
        (["--optimizer", "lion"], "unknown optimizer"),
        (["--measure-at", "1000"], "at most"),
        (["--out", "nowhere/h.json"], "cannot write"),
        (["--plot", "."], "cannot write"),
    ],
)
def test_wrong_usage_is_a_sentence(arguments: list[str], words: str) -> None:
    result = run(*SMALL, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


LONG = [*SMALL[:-2], "--steps", "100000", "--checkpoint", "run.ckpt", "--checkpoint-seconds", "0.2"]


def start(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "sounding", *LONG, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    before, deadline = written(), time.monotonic() + 60
    while written() == before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


def written() -> int:
    """When the checkpoint was written; 0 where there is none."""
    try:
        return Path("run.ckpt").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def test_an_interrupt_keeps_a_checkpoint_and_what_was_measured() -> None:
    process = start("--json")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert json.loads(out)["interrupted"] is True
    assert b"goes on from run.ckpt" in err


def test_killing_the_process_leaves_a_checkpoint_that_goes_on() -> None:
    """kill -9 at any time: the checkpoint is whole, and the next start takes it up."""
    process = start()
    process.kill()
    process.communicate(timeout=60)
    again = start()
    again.send_signal(signal.SIGINT)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 130, err
    assert b"going on from run.ckpt" in err


def test_a_curve_in_text() -> None:
    assert draw_curve([1.0, 2.0, 3.0]) == "▁▅█"
    assert len(draw_curve([float(i) for i in range(1000)])) == 24
    assert draw_curve([float("nan")]) == "not finite"
