"""Where measured steps go: memory that thins out, lines that survive a kill and a full disk, sinks of one's own."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.test_monitor import network, train

import sounding
from sounding.errors import UsageError
from sounding.profile import Profile, Row
from sounding.train.monitor import JsonLines, Memory, Monitor, Snapshot, read_json_lines

ROOT = Path(__file__).parent.parent
VERDICT = sounding.Verdict("healthy", (), "")


def snapshot(step: int, *rows: Row) -> Snapshot:
    return Snapshot(step, Profile(rows, {"step": step}), VERDICT)


def run(sinks: Any, *, steps: int = 5, every: int = 2, **options: Any) -> Monitor:
    model = network()
    with Monitor(model, every=every, sinks=sinks, limits={"mean_square": (None, 0.0)}, **options) as monitor:
        train(model, monitor, steps)
    return monitor


@pytest.mark.parametrize("keep", [2, 3, 8, 64])
def test_memory_keeps_an_even_share_of_the_run(keep: int) -> None:
    memory = Memory(keep)
    for step in range(0, 3000, 3):
        memory.write(snapshot(step))
        steps = list(memory.profiles)
        assert len(steps) <= keep + 1
        assert steps[0] == 0
        assert steps[-1] == step
        gaps = {b - a for a, b in itertools.pairwise(steps[:-1])}
        assert len(gaps) <= 1
    assert memory.profile.settings["steps"] == list(memory.profiles)


def test_lines_hold_what_memory_holds(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    monitor = run(JsonLines(path))
    log = read_json_lines(path)
    assert log.profiles == monitor.profiles
    assert log.events == monitor.findings
    assert log.events
    assert log.skipped == ()
    for line in path.read_text(encoding="utf-8").splitlines():
        assert json.loads(line)["schema"] == "sounding.monitor/1"


def test_values_that_json_cannot_hold_come_back(tmp_path: Path) -> None:
    rows = [Row(1, "a", "mean_square", value, None, "step 0") for value in (float("nan"), float("inf"), -float("inf"))]
    sink = JsonLines(tmp_path / "run.jsonl")
    sink.write(snapshot(0, *rows))
    sink.close()
    assert repr(read_json_lines(sink.path).profiles[0].rows) == repr(tuple(rows))


def test_a_half_line_is_skipped_and_named_and_the_next_run_appends(tmp_path: Path) -> None:
    """Cut anywhere in the last line: the lines before it are whole, the next run starts a line of its own."""
    path = tmp_path / "run.jsonl"
    run(JsonLines(path))
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for cut in (last + 1, last + 40, len(whole) - 2):
        path.write_bytes(whole[:cut])
        log = read_json_lines(path)
        assert list(log.profiles) == [0, 2]
        assert len(log.skipped) == 1
        assert log.skipped[0].startswith("line 3: half a line")
        sink = JsonLines(path)
        sink.write(snapshot(6))
        sink.close()
        log = read_json_lines(path)
        assert list(log.profiles) == [0, 2, 6]
        assert log.skipped[0].startswith("line 3: no measured step")


def test_a_step_measured_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "run.jsonl")
    for step, value in ((0, 1.0), (100, 2.0), (200, 3.0), (100, 4.0)):
        sink.write(snapshot(step, Row(1, "a", "mean_square", value, None, f"step {step}")))
    log = read_json_lines(sink.path)
    assert {step: profile.rows[0].value for step, profile in log.profiles.items()} == {0: 1.0, 100: 4.0, 200: 3.0}
    sink.close()


def test_kill_minus_nine_loses_no_line_that_was_measured(tmp_path: Path) -> None:
    """A process that measures every step is killed; every step it had announced is in the file."""
    path = tmp_path / "run.jsonl"
    script = f"""
import sys, torch
from sounding.train.monitor import JsonLines, Monitor
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
with Monitor(model, every=1, sinks=JsonLines({str(path)!r})) as monitor:
    while True:
        model.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        monitor.step()
        sys.stdout.write(f"{{monitor.steps}}\\n"); sys.stdout.flush()
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    announced = 0
    while announced < 20:
        announced = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    announced = max([announced, *(int(line) for line in child.stdout.read().split("\n")[:-1])])
    child.wait()
    child.stdout.close()
    log = read_json_lines(path)
    assert set(range(announced)) <= log.profiles.keys()
    assert len(log.skipped) <= 1


def test_a_full_disk_takes_the_half_line_back_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink, real = JsonLines(tmp_path / "run.jsonl"), os.write
    room = [2000]

    def write(file: int, data: Any) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        done = real(file, bytes(data)[: room[0]])
        room[0] -= done
        return done

    sink.write(snapshot(0))
    monkeypatch.setattr(os, "write", write)
    monitor = run(sink)
    monkeypatch.undo()
    assert list(monitor.profiles) == [0, 2, 4]
    assert list(read_json_lines(sink.path).profiles) == [0]
    assert read_json_lines(sink.path).skipped == ()
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "JsonLines failed at step 0 and is left out" in errors[0]
    assert "No space left" in errors[0]


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can be written"):
        JsonLines(tmp_path / "nowhere" / "run.jsonl")
    with pytest.raises(UsageError, match="can be written"):
        JsonLines(tmp_path)
    with pytest.raises(UsageError, match="JSON lines"):
        read_json_lines(tmp_path / "missing.jsonl")


def test_any_object_with_write_and_close_is_a_sink() -> None:
    class Mine:
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.closed = 0

        def write(self, snapshot: Snapshot) -> None:
            self.steps.append(snapshot.step)

        def close(self) -> None:
            self.closed += 1

    mine = Mine()
    run(mine)
    assert (mine.steps, mine.closed) == ([0, 2, 4], 1)


def test_a_sink_that_fails_leaves_the_others(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    class Broken:
        def write(self, snapshot: Snapshot) -> None:
            raise ConnectionError("tracker is down")

        def close(self) -> None: ...

    lines = JsonLines(tmp_path / "run.jsonl")
    monitor = run([Broken(), lines])
    assert read_json_lines(lines.path).profiles.keys() == monitor.profiles.keys()
    assert sum("tracker is down" in record.message for record in caplog.records) == 1
