"""Sweeps of 200 tasks with killed processes, a full disk, a clock that runs back: nothing finished is lost."""

from __future__ import annotations

import contextlib
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

import sounding
from sounding.errors import ExitCode
from sounding.sweeping import Store
from sounding.sweeping.table import read_table

TASKS, ENOUGH = 200, 40
GRID = {"x": list(range(TASKS // 2))}
CLIENTS: list[subprocess.Popen[str]] = []
HERE = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def reference() -> str:
    """The table that this process makes, undisturbed; what is told of waiting and logging is left out."""
    return without_paths(sounding.sweep("swept:wave", GRID, seeds=2, cluster="in-process").to_csv())


def without_paths(table: str) -> str:
    lines = [line.split(",") for line in table.splitlines()]
    kept = [place for place, name in enumerate(lines[0]) if name not in ("log", "wait")]
    return "\n".join(",".join(line[place] for place in kept) for line in lines)


def start(folder: Path, *engine: str, **environment: str) -> subprocess.Popen[str]:
    """A client of a sweep of 200 short tasks, in a process of its own."""
    (folder / "spec.toml").write_text(
        f'verb = "swept:wave"\nseeds = 2\n[options]\nwait = 0.02\nlog = "{folder}/log"\n[grid]\nx = {GRID["x"]}\n'
    )
    return client(folder, "run", "spec.toml", "--out", "out", *engine, **environment)


def client(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sounding", "sweep", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=folder, env=HERE | environment, text=True, **pipes)
    CLIENTS.append(process)
    return process


@pytest.fixture(autouse=True)
def no_client_stays() -> Iterator[None]:
    """End the clients of a test that failed: an open pipe would fail whichever test runs when it is collected."""
    yield
    while CLIENTS:
        process = CLIENTS.pop()
        process.kill()
        process.communicate()


def done(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("out/results/*/*.json")}


def wait_for(there: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def children(parent: int, words: str) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return [int(row[0]) for row in rows if row[1] == str(parent) and words in row[2]]


def runs(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] != "Z"
    return False


def finish(folder: Path, reference: str, *engine: str) -> None:
    """Resume, and compare: the table is that of an undisturbed run, and what was done was not done again."""
    kept = {path.stem: json.loads(path.read_text())["options"] for path in folder.glob("out/results/*/*.json")}
    asked = (folder / "log").read_text().splitlines()
    process = client(folder, "resume", "out", *(engine or ("--jobs", "2")))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"{TASKS} of {TASKS} tasks done, 0 failed" in out
    again = (folder / "log").read_text().splitlines()[len(asked) :]
    assert not {f"{options['x']} {options['seed']}" for options in kept.values()} & set(again)
    store = Store(folder / "out")
    table = read_table(store, store.read_spec())
    assert without_paths(table.to_csv()) == reference
    assert not [path for path in folder.glob("out/**/.*") if path.name.endswith(".new")]


def test_a_killed_client_leaves_its_results_and_no_process(tmp_path: Path, reference: str) -> None:
    process = start(tmp_path, "--jobs", "2")
    wait_for(lambda: len(done(tmp_path)) > ENOUGH)
    workers = children(process.pid, "sweeping.hand")
    assert len(workers) == 2
    process.kill()
    process.communicate()
    assert ENOUGH < len(done(tmp_path)) < TASKS
    wait_for(lambda: not any(map(runs, workers)), 30)
    finish(tmp_path, reference)


def test_a_killed_worker_costs_one_task_at_most(tmp_path: Path, reference: str) -> None:
    process = start(tmp_path, "--jobs", "2")
    wait_for(lambda: len(done(tmp_path)) > ENOUGH)
    os.kill(children(process.pid, "sweeping.hand")[0], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    lost = int(process.returncode == ExitCode.NUMERICAL)  # none where the kill fell between two tasks
    assert process.returncode == (ExitCode.NUMERICAL if lost else ExitCode.HEALTHY), err
    assert f"{TASKS - lost} of {TASKS} tasks done, {lost} failed, 0 left" in out
    assert ("was killed" in out) == bool(lost)
    finish(tmp_path, reference)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_sweep_and_says_how_to_go_on(number: int, tmp_path: Path, reference: str) -> None:
    process = start(tmp_path, "--jobs", "2")
    wait_for(lambda: len(done(tmp_path)) > ENOUGH)
    workers = children(process.pid, "sweeping.hand")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert "sounding sweep resume out goes on with the rest" in err
    assert not any(map(runs, workers))
    if number == signal.SIGINT:
        finish(tmp_path, reference)


def test_a_full_disk_and_two_clients(tmp_path: Path, reference: str) -> None:
    """The disk takes sixty files and no more; a second client is refused while the first works."""
    broken = "import errno, itertools, os\ntrue, calls = os.fsync, itertools.count()\n"
    broken += "def full(file):\n    if next(calls) >= 60: raise OSError(errno.ENOSPC, 'No space left on device')\n"
    (tmp_path / "sitecustomize.py").write_text(f"{broken}    true(file)\nos.fsync = full\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = start(tmp_path, "--jobs", "2", PYTHONPATH=path)
    wait_for(lambda: len(done(tmp_path)) > 5)
    second = client(tmp_path, "resume", "out")
    _, err = second.communicate(timeout=60)
    if process.poll() is None:
        assert second.returncode == ExitCode.USAGE
        assert "in use by another run" in err
    _, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.USAGE, err
    assert "No space left" in err
    assert "making room" in err
    (tmp_path / "sitecustomize.py").unlink()
    finish(tmp_path, reference)


def test_a_clock_that_runs_backwards_changes_nothing(tmp_path: Path, reference: str) -> None:
    back = "import time\nnow = [time.time()]\ndef back():\n    now[0] -= 60\n    return now[0]\ntime.time = back\n"
    (tmp_path / "sitecustomize.py").write_text(back)
    process = start(tmp_path, "--jobs", "2", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"{TASKS} of {TASKS} tasks done" in out
    finish(tmp_path, reference)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of a scheduler on loopback, and the processes: the scheduler, a worker, and one that offers a GPU."""
    file = folder / "scheduler.json"
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": HERE, "cwd": folder}
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    processes = [subprocess.Popen([*command, "--no-dashboard", "--scheduler-file", str(file)], **quiet)]
    try:
        wait_for(lambda: file.exists() and file.read_text().endswith("}"))
        address = json.loads(file.read_text())["address"]
        command = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--nthreads", "1", "--no-nanny"]
        offered = ([], ["--resources", "GPU=1"])
        processes += [subprocess.Popen([*command, "--no-dashboard", *more], **quiet) for more in offered]
        yield address, processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_one_table_from_separate_workers_of_dask_of_which_one_is_killed(tmp_path: Path, reference: str) -> None:
    """Dask gives the tasks of the dead worker to the other: nothing fails, and nothing is counted twice."""
    pytest.importorskip("distributed")
    with cluster(tmp_path) as (address, processes):
        process = start(tmp_path, "--cluster", address)
        wait_for(lambda: len(done(tmp_path)) > ENOUGH)
        hands = [hand for worker in processes[1:] for hand in children(worker.pid, "sweeping.hand")]
        processes[1].kill()
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert f"{TASKS} of {TASKS} tasks done, 0 failed" in out
        wait_for(lambda: not any(map(runs, hands)), 30)
        finish(tmp_path, reference)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["scheduler", "client"])
def test_a_killed_scheduler_or_client_of_dask(victim: str, tmp_path: Path, reference: str) -> None:
    with cluster(tmp_path) as (address, processes):
        process = start(tmp_path, "--cluster", address)
        wait_for(lambda: len(done(tmp_path)) > ENOUGH)
        (processes[0] if victim == "scheduler" else process).kill()
        _, err = process.communicate(timeout=120)
        assert ENOUGH < len(done(tmp_path)) < TASKS
        if victim == "scheduler":
            assert process.returncode == ExitCode.USAGE, err
            assert "the Dask scheduler was lost" in err
            finish(tmp_path, reference)
        else:
            finish(tmp_path, reference, "--cluster", address)


@pytest.mark.slow
def test_tasks_that_need_a_gpu_go_to_workers_that_offer_one(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(
        'verb = "swept:place"\nlimit = 60\n[grid]\nx = [1, 2, 3, 4]\n[resources]\nGPU = 1\n'
    )
    with cluster(tmp_path) as (address, processes):
        _, err = client(tmp_path, "run", "spec.toml", "--out", "out", "--cluster", address).communicate(timeout=120)
        store = Store(tmp_path / "out")
        table = read_table(store, store.read_spec())
        assert [row["parent"] for row in table.rows] == [processes[2].pid] * 4, err


@pytest.mark.slow
def test_verbs_on_dask_give_the_table_of_this_process(tmp_path: Path) -> None:
    """Random chains and theory to the last digit, and a row of the ledger that a worker of Dask writes."""
    options = {"batch_size": 4, "depth": 30, "measure": "orthogonality_gap"}
    grid = {"width": [16, 64, 200]}
    expected = sounding.sweep("simulate", grid, options=options, seeds=2, cluster="in-process").to_csv()
    (tmp_path / "spec.toml").write_text(
        'verb = "simulate"\nseeds = 2\n[options]\nbatch-size = 4\ndepth = 30\nmeasure = "orthogonality_gap"\n'
        "[grid]\nwidth = [16, 64, 200]\n"
    )
    with cluster(tmp_path) as (address, _):
        _, err = client(tmp_path, "run", "spec.toml", "--out", "out", "--cluster", address).communicate(timeout=120)
        store = Store(tmp_path / "out")
        assert read_table(store, store.read_spec()).to_csv() == expected, err
        command = [sys.executable, "-m", "sounding", "reproduce", "orth2021-lemma4", "--cluster", address]
        done = subprocess.run(command, cwd=tmp_path, env=HERE, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "orth2021-lemma4: holds" in done.stdout


@pytest.mark.slow
def test_a_local_cluster_listens_on_loopback_only(tmp_path: Path, reference: str) -> None:
    process = start(tmp_path, "--cluster", "local:2")
    wait_for(lambda: len(done(tmp_path)) > 5)
    family = {str(process.pid), *map(str, children(process.pid, ""))}
    family |= {str(child) for parent in list(family) for child in children(int(parent), "")}
    owners = {opened for one in family for opened in opened_by(one)}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    listening = [fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in owners]
    assert listening
    assert all(address.startswith("0100007F") for address in listening), listening
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"{TASKS} of {TASKS} tasks done" in out
    finish(tmp_path, reference)


def opened_by(process: str) -> Iterator[str]:
    """What the open files of a process are; a file may be closed, or the process end, while the list is read."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(link)
