"""The trackers themselves, offline: TensorBoard, Weights & Biases and Lightning show what the monitor measured."""

from __future__ import annotations

import ast
import importlib
import json
import logging
import re
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.test_monitor import batch, hooks_on, network, numbers, train
from tests.test_monitor_sinks import VERDICT, run
from torch import Tensor
from torch.nn.functional import cross_entropy

from sounding.errors import MissingExtraError
from sounding.train import TensorBoard, WeightsAndBiases
from sounding.train.monitor import JsonLines, Monitor, Snapshot, read_json_lines
from sounding.train.monitor.sinks import TRACKED
from tolerance import TOLERANCE

ROOT = Path(__file__).parent.parent


def events_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    return found


@pytest.mark.parametrize("measures", [TRACKED, None, ("mean_square",)])
def test_tensorboard_shows_the_numbers_that_were_asked_for(measures: tuple[str, ...] | None, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    monitor = run(TensorBoard(tmp_path, measures=measures))
    found = events_of(tmp_path)
    for step, profile in monitor.profiles.items():
        told = Snapshot(step, profile, VERDICT).scalars(measures)
        if measures is None:
            assert len(told) == len({(row.layer, row.name, row.measure) for row in profile.rows})
        else:
            layers = len(profile.settings["weight_layers"])
            assert len([tag for tag in told if not tag.startswith("network/")]) <= len(measures) * layers
            assert len([tag for tag in told if tag.startswith("mean_square/")]) == layers
        assert {tag for tag in found.Tags()["scalars"] if tag.startswith("sounding/")} == {
            f"sounding/{t}" for t in told
        }
        for tag, value in told.items():
            at = {event.step: event.value for event in found.Scalars(f"sounding/{tag}")}
            assert at[step] == pytest.approx(value, rel=TOLERANCE.float32)
    assert "sounding/mean_square/text_summary" in found.Tags()["tensors"]


def test_tensorboard_takes_a_writer_of_yours_and_leaves_it_open(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    run(TensorBoard(writer))
    writer.add_scalar("mine", 1.0, 7)
    writer.close()
    assert {"mine", "sounding/network/gradient_growth"} <= set(events_of(tmp_path).Tags()["scalars"])


def test_tensorboard_takes_a_writer_that_is_not_torch_s() -> None:
    """tensorboardX and others share the methods, not the records."""
    pytest.importorskip("tensorboard")
    added: dict[tuple[str, int], float] = {}

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            added[tag, step] = value

        def add_text(self, tag: str, text: str, step: int) -> None: ...

        def flush(self) -> None: ...

    monitor = run(TensorBoard(Writer()))
    for step, profile in monitor.profiles.items():
        for tag, value in Snapshot(step, profile, VERDICT).scalars().items():
            assert added[f"sounding/{tag}", step] == value


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

    from sounding.train import MonitorCallback

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
                assert found[name, measure] == pytest.approx(
                    value, rel=TOLERANCE.four_digits, abs=TOLERANCE.float32_layer
                ), (name, measure)
    assert list(read_json_lines(tmp_path / "run.jsonl").profiles) == [0, 2]
    (table,) = tmp_path.rglob("metrics.csv")
    assert "sounding/network/gradient_growth" in table.read_text().splitlines()[0]


@pytest.mark.usefixtures("quiet_lightning")
@pytest.mark.filterwarnings(*LIGHTNING_NOISE)
def test_lightning_takes_hooks_off_when_training_fails(tmp_path: Path) -> None:
    from sounding.train import MonitorCallback

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


@pytest.mark.usefixtures("quiet_lightning")
def test_lightning_s_scaler_is_found() -> None:
    """16-bit training on a GPU keeps its scaler in the precision plugin; a trainer in outline is enough to see it."""
    from sounding.train import MonitorCallback

    module, scaler = lightning_module(), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    plugin, strategy = SimpleNamespace(scaler=scaler), SimpleNamespace(model=module)
    outline = SimpleNamespace(precision_plugin=plugin, strategy=strategy, global_step=40, loggers=[])
    callback = MonitorCallback(every=40)
    callback.on_train_start(outline, module)
    scaler.scale(module.training_step(batch(6), 0)).backward()
    outline.global_step += 1
    callback.on_train_batch_end(outline, module, None, None, 0)
    callback.on_train_end(outline, module)
    assert callback.monitor is not None
    assert callback.monitor.profiles[40].settings["loss_scale"] == 2.0**8
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
