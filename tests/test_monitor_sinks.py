"""Where measured steps go: memory that thins out, lines that survive a kill, and the trackers themselves, offline."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import logging
import os
import re
import signal
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_monitor import batch, hooks_on, network, numbers, train
from torch import Tensor
from torch.nn.functional import cross_entropy

import sounding
from sounding.errors import MissingExtraError, UsageError
from sounding.profile import Profile, Row
from sounding.train.callbacks import TensorBoard, WeightsAndBiases
from sounding.train.monitor import JsonLines, Memory, Monitor, Snapshot, read_json_lines

ROOT = Path(__file__).parent.parent
VERDICT = sounding.Verdict(True, (), "")


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


def events_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    return found


@pytest.mark.filterwarnings("ignore:.*(pkg_resources|distutils|np\\.|numpy).*:DeprecationWarning")
def test_tensorboard_shows_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    monitor = run(TensorBoard(tmp_path))
    found = events_of(tmp_path)
    for step, profile in monitor.profiles.items():
        for tag, value in Snapshot(step, profile, VERDICT).scalars().items():
            at = {event.step: event.value for event in found.Scalars(f"sounding/{tag}")}
            assert at[step] == pytest.approx(value, rel=1e-6)
    assert "sounding/mean_square/text_summary" in found.Tags()["tensors"]


def test_tensorboard_takes_a_writer_of_yours_and_leaves_it_open(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    run(TensorBoard(writer))
    writer.add_scalar("mine", 1.0, 7)
    writer.close()
    assert {"mine", "sounding/network/gradient_growth"} <= set(events_of(tmp_path).Tags()["scalars"])


def read_wandb(folder: Path) -> list[dict[str, Any]]:
    """The rows of the offline run, from its own file: LevelDB's log format behind a header of 7 bytes.

    Blocks of 32 KiB hold chunks of crc (4 bytes), length (2), type (1: whole, 2: first, 3: middle, 4: last) and data.
    """
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    raw, at, data, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(raw):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", raw[at + 4 : at + 7])
        data += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            data = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of its own, and one of the user's with logging in between; read back from the run's file."""
    wandb = pytest.importorskip("wandb")
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(tmp_path),
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
        "WANDB_DATA_DIR": str(tmp_path / "data"),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_X_DISABLE_STATS": "true",
    }.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        user = wandb.init(project="sounding-test", mode="offline", dir=str(tmp_path))
        sink = WeightsAndBiases(user)
        model = network()
        with Monitor(model, every=2, sinks=sink, limits={"mean_square": (None, 0.0)}) as monitor:
            for step in range(5):
                train(model, monitor, 1)
                user.log({"loss": 1.0 / (step + 1)}, step=step + 10)
        user.log({"after": 1.0})
        user.finish()
        wandb.teardown()  # the process that writes the file ends
    rows = [row for row in read_wandb(tmp_path) if "sounding/step" in row]
    assert [row["sounding/step"] for row in rows] == [0, 2, 4]
    for row in rows:
        profile = monitor.profiles[row["sounding/step"]]
        for tag, value in Snapshot(0, profile, VERDICT).scalars().items():
            assert row[f"sounding/{tag}"] == pytest.approx(value)
    assert "mean square is above 0" in rows[0]["sounding/news"]
    losses = [row["loss"] for row in read_wandb(tmp_path) if "loss" in row]
    assert losses == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])


LIGHTNING_NOISE = (
    "ignore:.*LeafSpec.*:FutureWarning",
    "ignore:.*does not have many workers.*",
    "ignore:.*have no `val_dataloader`.*",
    "ignore:.*number of training batches.*",
    "ignore::DeprecationWarning",
)


def lightning_module(**options: Any) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, items: tuple[Tensor, Tensor], _index: int) -> Tensor:
            return cross_entropy(self.net(items[0]), items[1])

        def validation_step(self, items: tuple[Tensor, Tensor], _index: int) -> None:
            self.net(items[0] * 100)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module(**options)


def trainer(folder: Path, callback: Any, **options: Any) -> Any:
    from lightning.pytorch import Trainer

    return Trainer(
        default_root_dir=folder,
        max_epochs=1,
        accelerator="cpu",
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        **options,
    )


@pytest.fixture
def quiet_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.mark.usefixtures("quiet_lightning")
@pytest.mark.filterwarnings(*LIGHTNING_NOISE)
def test_lightning_measures_optimizer_steps(tmp_path: Path) -> None:
    """Two micro-batches a step, validation in between, a CSV logger: the numbers of the loop written by hand."""
    from lightning.pytorch.loggers import CSVLogger

    from sounding.train.callbacks import MonitorCallback

    inputs, targets = batch(48)
    items = list(zip(inputs.split(6), targets.split(6), strict=True))
    loader = torch.utils.data.DataLoader(items, batch_size=None)  # type: ignore[arg-type]
    callback = MonitorCallback(every=2, sinks=JsonLines(tmp_path / "run.jsonl"))
    module = lightning_module()
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer(tmp_path, callback, logger=logger, accumulate_grad_batches=2, val_check_interval=2).fit(
        module, loader, loader
    )
    assert hooks_on(module) == 0

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, every=2, optimizer=optimizer) as monitor:
        for step in range(4):
            optimizer.zero_grad()
            for part, labels in items[2 * step : 2 * step + 2]:
                (cross_entropy(model(part), labels) / 2).backward()
            optimizer.step()
    assert list(callback.monitor.profiles) == list(monitor.profiles) == [0, 2]
    for step, profile in monitor.profiles.items():
        found = {
            (name.removeprefix("net."), measure): value
            for (_, name, measure), value in numbers(callback.monitor.profiles[step]).items()
        }
        for (_, name, measure), value in numbers(profile).items():
            if name != "input":  # the module is called by its parts, so that Lightning's step has no input of its own
                assert found[name, measure] == pytest.approx(value, rel=1e-4, abs=1e-5), (name, measure)
    assert list(read_json_lines(tmp_path / "run.jsonl").profiles) == [0, 2]
    (table,) = tmp_path.rglob("metrics.csv")
    assert "sounding/network/gradient_growth" in table.read_text().splitlines()[0]


@pytest.mark.usefixtures("quiet_lightning")
@pytest.mark.filterwarnings(*LIGHTNING_NOISE)
def test_lightning_takes_hooks_off_when_training_fails(tmp_path: Path) -> None:
    from sounding.train.callbacks import MonitorCallback

    module = lightning_module()
    callback = MonitorCallback(every=1)
    error = RuntimeError("bad batch")

    def fail(*_: Any) -> Tensor:
        raise error

    module.training_step = fail
    items = [batch(6)]
    loader = torch.utils.data.DataLoader(items, batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as caught:
        trainer(tmp_path, callback, logger=False).fit(module, loader)
    assert caught.value is error
    assert hooks_on(module) == 0


@pytest.mark.parametrize(
    ("package", "use", "extra"),
    [
        ("tensorboard", lambda: TensorBoard("unused"), "tensorboard"),
        ("wandb", lambda: WeightsAndBiases(), "wandb"),
        ("lightning", lambda: importlib.import_module("sounding.train.callbacks.lightning"), "lightning"),
    ],
)
def test_a_missing_package_says_what_to_install(
    package: str, use: Any, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(sys.modules):
        if name.split(".")[0] == package or name.startswith(("torch.utils.tensorboard", "sounding.train.callbacks.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=re.escape(f"pip install 'sounding[{extra}]'")):
        use()


def test_only_the_callbacks_know_a_tracker() -> None:
    """Design: one folder knows TensorBoard, Weights & Biases and Lightning; importing the monitor loads none."""
    trackers = {"tensorboard", "wandb", "lightning", "pytorch_lightning"}
    for path in (ROOT / "src" / "sounding").rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
        known = {name for name in names if trackers & set(name.split(".")) and not name.startswith("sounding.")}
        assert not known or "callbacks" in path.parts, (path, known)
    code = "import sys, sounding; sounding.Monitor; import sounding.train.callbacks; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not trackers & {name.split(".")[0] for name in loaded.split()}


def test_a_sink_that_fails_leaves_the_others(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    class Broken:
        def write(self, snapshot: Snapshot) -> None:
            raise ConnectionError("tracker is down")

        def close(self) -> None: ...

    lines = JsonLines(tmp_path / "run.jsonl")
    monitor = run([Broken(), lines])
    assert read_json_lines(lines.path).profiles.keys() == monitor.profiles.keys()
    assert sum("tracker is down" in record.message for record in caplog.records) == 1
