"""Checkpoints: resumed runs end in the same bits; a kill, a damaged file, a full disk, other settings lose nothing."""

from __future__ import annotations

import copy
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from runs import make_data, make_mlp, seeded
from sounding.data import Augmentation
from sounding.errors import DataError, InterruptedRun, UsageError
from sounding.train import Checkpoint, Recipe, train_, train_together_
from sounding.train.checkpoint import MAGIC, previous_of, read_checkpoint

RECIPE = Recipe(optimizer="adam", batch_size=16, epochs=3, train_metrics="seen")


def start(kind: str) -> list[nn.Module]:
    count = 1 if kind == "alone" else 3
    networks = [make_mlp(seed, norm="batch") for seed in range(count)]
    if kind == "alone":  # a stack refuses dropout, a run alone continues its random numbers
        networks[0].append(nn.Dropout(0.1))
    return networks


def train(kind: str, networks: list[nn.Module], recipe: Recipe = RECIPE, seed: int = 0, **options):
    torch.manual_seed(7)
    if kind == "alone":
        return train_(networks[0], make_data(), learning_rate=0.01, recipe=recipe, generator=seeded(seed), **options)
    rates = [0.01, 0.02, 0.005]
    return train_together_(
        networks, make_data(), learning_rates=rates, recipe=recipe, generator=seeded(seed), group_size=2, **options
    )


def stop_at(step: int):
    def stop(progress) -> None:
        if progress.step >= step:
            raise KeyboardInterrupt

    return stop


def assert_same_bits(ones: list[nn.Module], others: list[nn.Module]) -> None:
    for one, other in zip(ones, others, strict=True):
        for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "rmsprop"])
@pytest.mark.parametrize("sampling", ["shuffle", "replacement"])
@pytest.mark.parametrize("kind", ["alone", "together"])
def test_a_resumed_run_ends_in_the_same_bits(kind, sampling, optimizer, tmp_path) -> None:
    """Stopped at the end of the first epoch and in the middle of the second, in other processes' shoes."""
    recipe = Recipe(
        optimizer=optimizer, sampling=sampling, batch_size=16, epochs=3, evaluate=(2, 6, 9, 18), train_metrics="seen"
    )
    whole = start(kind)
    expected = train(kind, whole, recipe, measure_at=(2, 9))
    for step in (6, 9):
        with pytest.raises(InterruptedRun) as stopped:
            train(kind, start(kind), recipe, checkpoint=tmp_path / "run", progress=stop_at(step), measure_at=(2, 9))
        assert stopped.value.partial.curves == tuple(p for p in expected.curves if p.step <= step)
    resumed = start(kind)
    assert train(kind, resumed, recipe, checkpoint=tmp_path / "run", measure_at=(2, 9)) == expected
    assert_same_bits(whole, resumed)


@pytest.mark.parametrize("kind", ["alone", "together"])
def test_a_finished_run_is_read_not_repeated(kind, tmp_path) -> None:
    first, second = start(kind), start(kind)
    expected = train(kind, first, checkpoint=tmp_path / "run")
    written = (tmp_path / "run").stat().st_mtime_ns
    calls: list[int] = []
    assert train(kind, second, checkpoint=tmp_path / "run", progress=lambda p: calls.append(p.step)) == expected
    assert_same_bits(first, second)
    assert calls == []
    assert (tmp_path / "run").stat().st_mtime_ns >= written


def test_augmented_runs_resume_too(tmp_path) -> None:
    images = torch.randint(256, (48, 1, 8, 8), generator=seeded()).double()
    labels = torch.randint(3, (48,), generator=seeded())
    recipe = Recipe(batch_size=12, epochs=3, augment=Augmentation(padding=2))

    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).double() for _ in range(2)]

    def run(networks, **options):
        return train_together_(
            networks, (images / 255, labels), learning_rates=[0.1, 0.2], recipe=recipe, generator=seeded(), **options
        )

    whole, resumed = make(), make()
    expected = run(whole)
    with pytest.raises(InterruptedRun):
        run(make(), checkpoint=tmp_path / "run", progress=stop_at(4))
    assert run(resumed, checkpoint=tmp_path / "run") == expected
    assert_same_bits(whole, resumed)


KILLED = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_train_checkpoint import start, train
from sounding.train import Checkpoint, Recipe
recipe = Recipe(optimizer="adam", batch_size=16, epochs=60, evaluate="end")
networks = start("together")
train("together", networks, recipe, checkpoint=Checkpoint({path!r}, seconds=0))
"""


def test_a_killed_process_loses_nothing_but_the_last_step(tmp_path) -> None:
    """kill -9 while every step is being written; what is there continues to the same end."""
    path = tmp_path / "run"
    script = KILLED.format(tests=str(Path(__file__).parent), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while not previous_of(path).exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = read_checkpoint(path if path.exists() else previous_of(path))
    assert 0 < kept["step"] < 360
    # the same run, but shorter, is another run: the rest is done by the recipe it was started with
    recipe = Recipe(optimizer="adam", batch_size=16, epochs=60, evaluate="end")
    whole, resumed = start("together"), start("together")
    expected = train("together", whole, recipe)
    assert train("together", resumed, recipe, checkpoint=Checkpoint(path, seconds=1e9)) == expected
    assert_same_bits(whole, resumed)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "foreign"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_kept(damage, tmp_path) -> None:
    path = tmp_path / "run"
    networks = start("together")
    expected = train("together", networks, checkpoint=Checkpoint(path, seconds=0))
    before = previous_of(path).read_bytes()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    damaged = {"flip": bytes(data), "truncate": bytes(data[: len(data) // 3]), "empty": b"", "foreign": b"PK" + data}
    path.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"no checkpoint|damaged"):
        train("together", start("together"), checkpoint=path)
    assert previous_of(path).read_bytes() == before
    path.unlink()
    resumed = start("together")
    assert train("together", resumed, checkpoint=path) == expected
    assert_same_bits(networks, resumed)


def test_a_full_disk_is_said_and_loses_nothing(tmp_path, monkeypatch) -> None:
    path = tmp_path / "run"
    with pytest.raises(InterruptedRun):
        train("together", start("together"), checkpoint=path, progress=stop_at(6))
    kept = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    networks = start("together")
    before = copy.deepcopy(networks)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(DataError, match="No space left"):
            train("together", networks, checkpoint=Checkpoint(path, seconds=0))
    assert path.read_bytes() == kept
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "run.previous"]
    assert not torch.equal(networks[0].readout.weight, before[0].readout.weight)  # what was trained is in the networks
    train("together", start("together"), checkpoint=path)


def test_a_read_only_folder_is_said(tmp_path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="Permission denied"):
        train("together", start("together"), checkpoint=tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: train("together", start("together"), Recipe(optimizer="sgd", batch_size=16, epochs=3)), "recipe"),
        (lambda: train("together", start("together"), seed=1), "seed"),
        (lambda: train("together", [make_mlp(9, norm="batch") for _ in range(3)]), "model"),
        (lambda: train("together", start("together"), measure_at=(1,)), "measure_at"),
        (lambda: train("alone", start("alone")), "runs|model|kind"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(change, says, tmp_path, monkeypatch) -> None:
    path = tmp_path / "run"
    train("together", start("together"), checkpoint=path)
    kept = path.read_bytes()
    genuine = {"train_": train_, "train_together_": train_together_}
    for name, function in genuine.items():
        monkeypatch.setitem(
            globals(), name, lambda *args, _f=function, **options: _f(*args, **{**options, "checkpoint": path})
        )
    with pytest.raises(UsageError, match=f"belongs to another run: its ({says})"):
        change()
    assert path.read_bytes() == kept


def test_other_data_are_refused(tmp_path) -> None:
    path = tmp_path / "run"
    for seed, fails in ((0, False), (1, True)):
        options = {"learning_rate": 0.1, "recipe": RECIPE, "generator": seeded(), "checkpoint": path}
        if fails:
            with pytest.raises(UsageError, match="its data is"):
                train_(make_mlp(0), make_data(seed=seed), **options)
        else:
            train_(make_mlp(0), make_data(seed=seed), **options)


def test_places_that_cannot_hold_a_checkpoint_are_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        train("alone", start("alone"), checkpoint=tmp_path / "missing" / "run")
    with pytest.raises(UsageError, match="the folder"):
        train("alone", start("alone"), checkpoint=tmp_path)
    with pytest.raises(UsageError, match="path of a checkpoint"):
        train("alone", start("alone"), checkpoint=7)
    with pytest.raises(UsageError, match="negative"):
        Checkpoint(tmp_path / "run", seconds=-1)


def test_a_pickle_in_a_checkpoint_is_never_run(tmp_path) -> None:
    """A file with the right sum but with code in it: torch refuses to load it."""
    import hashlib
    import io

    class Trap:
        def __reduce__(self):
            return (Path(tmp_path / "sprung").touch, ())

    buffer = io.BytesIO()
    torch.save({"settings": Trap()}, buffer)
    payload = buffer.getvalue()
    (tmp_path / "run").write_bytes(MAGIC + hashlib.sha256(payload).digest() + payload)
    with pytest.raises(DataError, match=r"damaged|holds"):
        train("alone", start("alone"), checkpoint=tmp_path / "run")
    assert not (tmp_path / "sprung").exists()


INTERRUPTED = """
import sys
sys.path.insert(0, {tests!r})
from test_train_checkpoint import start, train
from sounding.errors import InterruptedRun
from sounding.train import Recipe
recipe = Recipe(optimizer="adam", batch_size=16, epochs=100000, evaluate=(1,))
try:
    train({kind!r}, start({kind!r}), recipe, checkpoint={path!r}, progress=lambda p: print("step", p.step, flush=True))
except InterruptedRun as stop:
    print(stop.partial.record["partial"], flush=True)
"""


@pytest.mark.parametrize("kind", ["alone", "together"])
def test_ctrl_c_finishes_the_step_and_keeps_it(kind, tmp_path) -> None:
    path = tmp_path / "run"
    script = INTERRUPTED.format(tests=str(Path(__file__).parent), path=str(path), kind=kind)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "step 0\n"
    assert process.stdout.readline() == "step 1\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert out.splitlines()[-1] == "True"
    assert read_checkpoint(path)["step"] > 0
