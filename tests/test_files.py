"""Files of a guest: locks that die with their process, writes that are tried first, results that outlive the disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import make_data, make_mlp, seeded
from sounding.claims import find_claim
from sounding.cli import main
from sounding.errors import DataError, ExitCode, InterruptedRun, UsageError
from sounding.files import SUMS, changed_files, locked, place
from sounding.reproduction import FILES, find_kept, reproduce
from sounding.train import Checkpoint, Recipe, train_, train_together_
from tolerance import TOLERANCE

ROW = "orth2021-lemma4"
RECIPE = Recipe(optimizer="adam", batch_size=16, epochs=3)
LONG = ("orth2021-fig7",)  # a row of half a minute and more
HERE = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start Python with arguments, `-m sounding` first; when the test is over none of its processes is left."""
    begun: list[subprocess.Popen[str]] = []

    def start(*arguments: str, first: tuple[str, ...] = ("-m", "sounding")) -> subprocess.Popen[str]:
        command = [sys.executable, *first, *arguments]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # workers stay in the session of their parent, by which they can be ended when it has gone
        begun.append(
            subprocess.Popen(command, cwd=tmp_path, env=os.environ | HERE, text=True, start_new_session=True, **pipes)
        )
        return begun[-1]

    yield start
    for process in begun:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def train(path: Any, **options: Any) -> Any:
    chosen = {"learning_rate": 0.01, "recipe": RECIPE, "generator": seeded(), "checkpoint": path, **options}
    return train_(make_mlp(0), make_data(), **chosen)


def stopping(step: int) -> Any:
    def stop(progress: Any) -> None:
        if progress.step >= step:
            raise KeyboardInterrupt

    return stop


def fail_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A disk that is full from the `count`th writing on."""
    genuine, calls = os.fsync, iter(range(10**9))

    def fsync(descriptor: int) -> None:
        if next(calls) >= count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        genuine(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("init", ["he", "haar"])
def test_a_training_resumes_with_another_number_of_threads(init: str, tmp_path: Path) -> None:
    """Haar weights come from a factorization whose last bits depend on the threads: the checkpoint is still its own."""
    from sounding.models import Mlp

    data = make_data(features=6)
    whole: list[Any] = []
    kept = torch.get_num_threads()
    try:
        for threads, progress in ((1, None), (1, stopping(6)), (4, None)):
            torch.set_num_threads(threads)
            network = Mlp(6, 3, depth=3, width=160, init=init, generator=seeded()).float()  # type: ignore[arg-type]
            options: dict[str, Any] = {"learning_rate": 0.01, "recipe": Recipe(batch_size=16, epochs=3)}
            path = None if not whole else tmp_path / "run"
            try:
                found = train_(network, data, generator=seeded(), checkpoint=path, progress=progress, **options)
            except InterruptedRun as stop:
                found = stop.partial
            whole.append(found)
    finally:
        torch.set_num_threads(kept)
    assert [point.step for point in whole[2].curves] == [point.step for point in whole[0].curves]
    for one, other in zip(whole[0].curves, whole[2].curves, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=TOLERANCE.three_digits)


def test_weights_of_another_seed_are_still_refused(tmp_path: Path) -> None:
    train(tmp_path / "run")
    options: dict[str, Any] = {"learning_rate": 0.01, "recipe": RECIPE, "generator": seeded()}
    with pytest.raises(UsageError, match="belongs to another run: its model"):
        train_(make_mlp(1), make_data(), checkpoint=tmp_path / "run", **options)


def test_a_place_that_cannot_be_written_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after(monkeypatch, 0)
    told: list[int] = []
    with pytest.raises(DataError, match="No space left"):
        train(tmp_path / "run", progress=lambda progress: told.append(progress.step))
    assert told == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="no regular file"):
        train("/dev/null")


@pytest.mark.parametrize("kind", ["alone", "together"])
def test_results_outlive_a_disk_that_fills(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(None) if kind == "alone" else None
    fail_after(monkeypatch, 1)
    target = Checkpoint(tmp_path / "run", seconds=1e9)
    options: dict[str, Any] = {"learning_rates": [0.01], "recipe": RECIPE, "generator": seeded(), "checkpoint": target}
    with pytest.raises(DataError, match="No space left") as failed:
        train(target) if kind == "alone" else train_together_([make_mlp(0)], make_data(), **options)
    history = failed.value.partial
    assert [point.step for point in history.curves] == [6, 12, 18]
    if expected is not None:
        assert history.curves == expected.curves
        assert "partial" not in history.record


def test_the_command_prints_what_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_after(monkeypatch, 1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--depth", "2", "--width", "8", "--epochs", "1", "--json", "--out", "history.json"])
    shown = capsys.readouterr()
    assert ended.value.code == ExitCode.USAGE
    assert json.loads(shown.out)["curves"]
    assert "No space left" in shown.err


@pytest.mark.parametrize(
    "command",
    [
        "check mlp,depth=2,width=8 --input-shape 64 --html report.html --json",
        "repair mlp,depth=2,width=8 --method orthogonalize --input-shape 64 --out weights.pt --html report.html --json",
        "predict vanilla --activation tanh --weight-std 1.5 --plot picture.svg --json",
        "predict gram --activation relu --depth 3 --batch-size 4 --correlation 0.5 --plot picture.svg --json",
        "prescribe --activation relu --batch-size 16 --depth 20 --plot picture.svg --json",
    ],
)
def test_every_verb_prints_what_it_cannot_write(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full at the end costs the file; the result is on stdout, and names no file that is not there."""
    fail_after(monkeypatch, 0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    shown = capsys.readouterr()
    assert ended.value.code == ExitCode.USAGE, shown.err
    assert json.loads(shown.out).get("weights") is None
    assert "No space left" in shown.err
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_share_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    refused: list[str] = []

    def again(progress: Any) -> None:
        if not refused:
            with pytest.raises(UsageError, match="in use by another run") as second:
                train(path)
            refused.append(second.value.message)

    train(path, progress=again)
    assert refused
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "run.previous"]
    train(path)


HOLDER = """
import sys, time
from pathlib import Path
from sounding.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_of_another_process_holds_until_it_is_killed(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "run"
    (tmp_path / ".run.new").write_bytes(b"half a checkpoint")
    process = start(str(path), first=("-c", HOLDER))
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UsageError, match="in use by another run"), locked(path):
        pass
    process.kill()
    process.communicate()
    with locked(path):
        assert not (tmp_path / ".run.new").exists(), "what the killed run left behind is cleaned"
    assert list(tmp_path.iterdir()) == []


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    place(path, b"old")
    fail_after(monkeypatch, 0)
    with pytest.raises(DataError, match="what was there before is kept"):
        place(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    reproduce(ROW, out=out)
    return out


@pytest.mark.parametrize("name", FILES)
def test_every_file_of_a_result_is_under_its_sum(name: str, measured: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(measured, tmp_path / "out")
    folder = tmp_path / "out" / ROW / "quick"
    assert changed_files(folder) == []
    options: dict[str, Any] = {"out": tmp_path / "out", "device": "cpu", "random_seed": 0}
    assert find_kept(find_claim(ROW), "quick", **options) is not None
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(bytes(content))
    assert name == SUMS or changed_files(folder) == [name]
    assert find_kept(find_claim(ROW), "quick", **options) is None


def test_an_exchanged_picture_is_named_by_the_ledger(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    shutil.copytree(measured, tmp_path / "out")
    (tmp_path / "out" / ROW / "quick" / "figure.png").write_bytes(b"another picture")
    with pytest.raises(SystemExit) as ended:
        main(["claims", "list", "--results", str(tmp_path / "out")])
    assert ended.value.code == ExitCode.USAGE
    assert "figure.png" in capsys.readouterr().err


def test_leftovers_of_a_killed_reproduction_are_cleaned(tmp_path: Path) -> None:
    left = tmp_path / ROW / ".quick-abc123"
    left.mkdir(parents=True)
    (left / "result.json").write_text("{")
    reproduce(ROW, out=tmp_path)
    assert [entry.name for entry in (tmp_path / ROW).iterdir()] == ["quick"]


def wait_for(there: Any) -> None:
    deadline = time.monotonic() + 180  # a machine that others use too starts processes slowly
    while not there() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_sigterm_is_ctrl_c(tmp_path: Path, start: Start) -> None:
    """What was trained is printed and kept, and the same command goes on from it."""
    arguments = ["train", "--depth", "2", "--width", "8", "--epochs", "100000", "--json", "--checkpoint", "run"]
    process = start(*arguments)
    wait_for((tmp_path / "run").exists)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.TERMINATED, err
    assert json.loads(out)["interrupted"] is True
    assert "the same command goes on from run" in err
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]
    from sounding.train.checkpoint import read_checkpoint

    assert read_checkpoint(tmp_path / "run")["step"] > 0


@pytest.mark.slow
def test_a_signal_to_the_parent_ends_its_workers(tmp_path: Path, start: Start) -> None:
    """Ctrl-C at a terminal reaches every process, `kill PID` only the parent: no worker may go on alone."""
    process = start("reproduce", *LONG, ROW, "--jobs", "2", "--out", "out")
    wait_for(lambda: list(tmp_path.glob("out/*/quick")))
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == ExitCode.TERMINATED, err
    assert "goes on with the rest" in err
    assert "leaked" not in err
    assert not [entry for entry in (tmp_path / "out" / LONG[0]).glob("*") if entry.name == "quick"]


@pytest.mark.slow
def test_a_killed_worker_is_told_and_the_rest_is_kept(tmp_path: Path, start: Start) -> None:
    process = start("reproduce", *LONG, ROW, "--jobs", "2", "--out", "out")
    wait_for(lambda: list(tmp_path.glob("out/*/quick")))
    listed = subprocess.run(["ps", "-wweo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    for worker in [int(row[0]) for row in rows if row[1] == str(process.pid) and "sweeping.hand" in row[2]]:
        os.kill(worker, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.NUMERICAL, err
    assert "internal error" not in err
    assert "was killed" in err
    assert list(tmp_path.glob("out/*/quick/result.json"))
