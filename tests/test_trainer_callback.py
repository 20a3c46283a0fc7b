"""The callback of transformers' Trainer, with the real Trainer: the numbers of a loop written by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.test_monitor import batch, hooks_on, network, numbers
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.functional import cross_entropy

from sounding.train.monitor import JsonLines, Monitor, read_json_lines
from tolerance import TOLERANCE

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


class Classifier(nn.Module):
    """A network that returns its loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class InOrder(torch.utils.data.IterableDataset[Any]):
    """Samples in their own order: the Trainer draws from other data sets at random."""

    def __init__(self, samples: tuple[Tensor, Tensor]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"x": x, "labels": label} for x, label in zip(*self.samples, strict=True))


def make_trainer(folder: Path, model: nn.Module, callback: Any, samples: Any, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), report_to=[], use_cpu=True, max_grad_norm=0.0, disable_tqdm=True,
        per_device_train_batch_size=6, save_strategy="no", logging_strategy="no", remove_unused_columns=False,
        **options,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return transformers.Trainer(
        model,
        arguments,
        train_dataset=samples,
        eval_dataset=samples,
        callbacks=[callback],
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    )


def test_the_trainer_measures_optimizer_steps(tmp_path: Path) -> None:
    """Two micro-batches a step and evaluation in between: the numbers of the loop written by hand."""
    from sounding.train import TrainerMonitor

    inputs, targets = batch(48)
    model = Classifier()
    callback = TrainerMonitor(every=2, sinks=JsonLines(tmp_path / "run.jsonl"))
    options = {"max_steps": 4, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(tmp_path, model, callback, InOrder((inputs, targets)), **options)
    trainer.train()
    assert hooks_on(model) == 0

    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with Monitor(plain, every=2, optimizer=optimizer) as monitor:
        for x, y in zip(inputs.split(12), targets.split(12), strict=True):
            optimizer.zero_grad()
            for part, labels in zip(x.split(6), y.split(6), strict=True):
                (cross_entropy(plain(part), labels) / 2).backward()
            optimizer.step()
    assert callback.monitor is not None
    assert list(callback.monitor.profiles) == list(monitor.profiles) == [0, 2]
    for step, profile in monitor.profiles.items():
        found = {
            (name.removeprefix("net."), measure): value
            for (_, name, measure), value in numbers(callback.monitor.profiles[step]).items()
        }
        for (_, name, measure), value in numbers(profile).items():
            assert found[name, measure] == pytest.approx(
                value, rel=TOLERANCE.four_digits, abs=TOLERANCE.float32_layer
            ), (name, measure)
    assert list(read_json_lines(tmp_path / "run.jsonl").profiles) == [0, 2]
    told = [line for line in trainer.state.log_history if "sounding/network/gradient_growth" in line]
    assert [line["step"] for line in told] == [0, 2]


def test_a_language_model_is_measured(tmp_path: Path) -> None:
    """A model of the library itself; after an error `stop` takes the hooks off, and a next training starts anew."""
    from sounding.train.callbacks.hf import TrainerMonitor

    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(64, (12, 16), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    callback = TrainerMonitor(every=1, log=False)
    trainer = make_trainer(tmp_path, model, callback, samples, max_steps=2)
    training_step = trainer.training_step

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("bad batch")

    trainer.training_step = fail
    with pytest.raises(RuntimeError, match="bad batch"):
        trainer.train()
    assert hooks_on(model) > 0
    callback.stop()
    assert hooks_on(model) == 0
    trainer.training_step = training_step
    trainer.train()
    assert callback.monitor is not None
    assert list(callback.monitor.profiles) == [0, 1]
    assert callback.monitor.report.verdict.status != "not known"
    assert hooks_on(model) == 0


@pytest.mark.parametrize("case", ["deepspeed", "flat"])
def test_what_hides_its_weights_is_told_and_not_measured(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The training goes on: the callback logs why it sees nothing, and says so."""
    from sounding.train.callbacks.hf import TrainerMonitor

    model = network()
    if case == "flat":
        wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
        nn.Module.__init__(wrapper)
        wrapper._fsdp_wrapped_module = model
        model = wrapper
    callback = TrainerMonitor(every=1)
    arguments = SimpleNamespace(deepspeed="zero3.json" if case == "deepspeed" else None)
    state = SimpleNamespace(global_step=0, log_history=[])
    with caplog.at_level(logging.WARNING):
        callback.on_train_begin(arguments, state, None, model=model, optimizer=None)
    callback.on_step_end(arguments, state, None)
    callback.on_train_end(arguments, state, None)
    assert callback.monitor is None
    assert ("DeepSpeed" if case == "deepspeed" else "FullyShardedDataParallel") in callback.refused
    assert "nothing is measured" in caplog.text
