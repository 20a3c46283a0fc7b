"""Kills at random moments: `python killed.py FOLDER KIND=KILLS ...` works in children, ends them, and looks around.

Every kind of work is done once undisturbed, then started again and again in a fresh child that is ended by SIGKILL or
SIGTERM somewhere between its start and its end, then once more to its end. What lies in the folder is looked at after
each kill. Children are forked from a process that has torch imported and used no thread of it yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import signal
import sys
import tarfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.figure  # noqa: F401, here and once, not in every child
import torch

import sounding.figures
import sounding.plot  # noqa: F401
from runs import make_data, make_mlp, seeded
from sounding.claims import find_claim
from sounding.cli import main
from sounding.cli.repair import write_weights
from sounding.data.catalogue import Stored
from sounding.data.store import file_state, unpack
from sounding.errors import InterruptedRun
from sounding.files import changed_files
from sounding.reproduction import FILES, find_kept, reproduce
from sounding.train import Checkpoint, Recipe, train_together_
from sounding.train.checkpoint import previous_of, read_checkpoint

ROW = "orth2021-lemma10"
BOTH, TERM = (signal.SIGKILL, signal.SIGTERM), (signal.SIGTERM,)


@dataclass(frozen=True)
class Work:
    """What is done in a folder, what must be true of the folder at any time, and what may end it."""

    do: Callable[[Path], Any]
    look: Callable[[Path], None]
    signals: tuple[signal.Signals, ...] = BOTH


def train(folder: Path) -> Any:
    networks = [make_mlp(seed, norm="batch") for seed in range(3)]
    recipe = Recipe(optimizer="adam", batch_size=16, epochs=6)
    options: dict[str, Any] = {"learning_rates": [0.01, 0.02, 0.005], "recipe": recipe, "generator": seeded()}
    history = train_together_(networks, make_data(), checkpoint=Checkpoint(folder / "run", seconds=0), **options)
    weights = [value for network in networks for value in network.state_dict().values()]
    return history.curves, hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights)).hexdigest()


def look_at_checkpoint(folder: Path) -> None:
    for path in (folder / "run", previous_of(folder / "run")):
        if path.exists():
            read_checkpoint(path)


def train_by_command(folder: Path) -> Any:
    arguments = ["--depth", "2", "--width", "8", "--epochs", "40", "--checkpoint", str(folder / "run")]
    return by_command(folder, ["train", *arguments, "--checkpoint-seconds", "0"])["curves"]


def simulate_by_command(folder: Path) -> Any:
    arguments = ["--width", "16", "--batch-size", "4", "--depth", "10000", "--runs", "2", "--seed", "1"]
    return by_command(folder, ["simulate", *arguments])["averages"]


def by_command(folder: Path, arguments: list[str]) -> Any:
    """The JSON that a command prints, kept in a file for `look_at_printed`."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            main([*arguments, "--json"])
    except SystemExit as ended:
        (folder / f"printed.{os.getpid()}").write_text(f"{int(ended.code or 0)}\n{out.getvalue()}")
        if ended.code:
            raise InterruptedRun("ended") from None
    return json.loads(out.getvalue())


def look_at_printed(folder: Path) -> None:
    """SIGTERM ends with its code, and whatever was printed is one whole object that says it is partial."""
    for path in folder.glob("printed.*"):
        code, _, text = path.read_text().partition("\n")
        assert code in ("0", "143"), (code, text)
        found = json.loads(text) if text else {"partial": True}
        assert code == "0" or found.get("partial") or found.get("interrupted") or found["settings"]["partial"]
        path.unlink()


def measure(folder: Path) -> Any:
    return dict(reproduce(ROW, out=folder, force=True).numbers)


def look_at_result(folder: Path) -> None:
    place = folder / ROW / "quick"
    if place.exists():
        assert sorted(entry.name for entry in place.iterdir()) == sorted(FILES)
        assert changed_files(place) == []
        assert find_kept(find_claim(ROW), "quick", out=folder, device="cpu", random_seed=0) is not None


MEMBERS = {f"part/{index}.bin": random.Random(index).randbytes(1 << 20) for index in range(4)}
STORED = [
    Stored(name, hashlib.md5(content, usedforsecurity=False).hexdigest(), len(content))
    for name, content in MEMBERS.items()
]


def take_out(folder: Path) -> Any:
    archive = folder / "archive.tar.gz"
    if not archive.exists():
        with tarfile.open(folder / "making", "w:gz", compresslevel=1) as tar:
            for name, content in MEMBERS.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        os.replace(folder / "making", archive)
    unpack(archive, [file for file in STORED if file_state(file, folder) != "intact"] or STORED, folder)
    return [file_state(file, folder) for file in STORED]


def look_at_files(folder: Path) -> None:
    assert {file_state(file, folder) for file in STORED} <= {"intact", "missing"}


def save_weights(folder: Path) -> Any:
    path = folder / "weights.pt"
    for seed in range(40):
        write_weights(make_mlp(seed, width=200), path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def look_at_weights(folder: Path) -> None:
    if (folder / "weights.pt").exists():
        torch.load(folder / "weights.pt", weights_only=True)


WORKS = {
    "train": Work(train, look_at_checkpoint),
    "train-command": Work(train_by_command, lambda f: (look_at_printed(f), look_at_checkpoint(f))[0], TERM),
    "simulate": Work(simulate_by_command, look_at_printed, TERM),
    "reproduce": Work(measure, look_at_result),
    "unpack": Work(take_out, look_at_files),
    "weights": Work(save_weights, look_at_weights),
}


def start(work: Work, folder: Path, result: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        result.write_bytes(pickle.dumps(work.do(folder)))
        code = 0
    except InterruptedRun:
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def finish(work: Work, folder: Path) -> tuple[Any, float]:
    """What undisturbed work gives, and how long it takes."""
    began, result = time.monotonic(), folder.with_suffix(".result")
    _, status = os.waitpid(start(work, folder, result), 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"{folder.name} failed"
    return pickle.loads(result.read_bytes()), time.monotonic() - began


def kill(name: str, place: Path, kills: int) -> None:
    work, chance = WORKS[name], random.Random(f"{name} {kills}")
    reference, folder = place / f"{name}-whole", place / name
    for made in (reference, folder):
        made.mkdir()
    expected, seconds = finish(work, reference)
    for index in range(kills):
        child = start(work, folder, folder.with_suffix(".result"))
        time.sleep(seconds * chance.random())
        number = work.signals[index % len(work.signals)]
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) != 1, f"{name} failed after {number.name}"
        work.look(folder)
    found, _ = finish(work, folder)
    work.look(folder)
    work.look(reference)
    assert found == expected, f"{name} ends in other numbers"
    left = [path for path in folder.rglob("*") if path.name.startswith(".") or path.suffix in (".part", ".new")]
    assert not left, f"{name} leaves {left}"
    sys.stdout.write(f"{name}: {kills} kills\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for word in sys.argv[2:]:
        kind, _, count = word.partition("=")
        kill(kind, Path(sys.argv[1]), int(count))
