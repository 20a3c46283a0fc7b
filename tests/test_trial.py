"""The short trial: the digits of training by hand, a copy, Ctrl-C, and what breaks first."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional

from sounding.cli import cli
from sounding.data import load_batch
from sounding.errors import UsageError
from sounding.models import Mlp, build_from_spec
from sounding.train.monitor import Monitor
from sounding.train.trial import OPTIMIZERS, run_trial


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))


def batches(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        batch = load_batch("digits", batch_size=16, generator=generator, shape=(64,))
        return batch.inputs, batch.targets

    return draw


def by_hand(model: nn.Module, draw, update, steps: int) -> list[float]:
    losses = []
    model.train()
    for _ in range(steps):
        inputs, targets = draw()
        update.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        update.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_losses_are_those_of_training_by_hand_to_the_digit(name):
    with torch.random.fork_rng():
        model = network()
        before = copy.deepcopy(model.state_dict())
        torch.manual_seed(5)
        trial = run_trial(model, batches(), steps=7, lr=1e-2, optimizer=name)
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key])
        assert all(parameter.grad is None for parameter in model.parameters())
        torch.manual_seed(5)
        assert list(trial.losses) == by_hand(model, batches(), OPTIMIZERS[name](model.parameters(), lr=1e-2), 7)


def test_the_command_line_gives_the_same_digits():
    line = ["check", "mlp,depth=2,width=16", "--data", "digits", "--input-shape", "64", "--seed", "3"]
    line += ["--batch-size", "16", "--steps", "5", "--lr", "0.05", "--optimizer", "sgd", "--json"]
    result = CliRunner().invoke(cli, line)
    found = json.loads(result.stdout)["trial"]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = build_from_spec("mlp,depth=2,width=16", shape=(64,))
        assert found["losses"] == by_hand(model, batches(3), torch.optim.SGD(model.parameters(), lr=0.05), 5)
    assert found["steps"] == 5
    assert result.exit_code == {"healthy": 0, "unhealthy": 1, "not known": 4}[found["status"]]


def test_what_breaks_is_told_with_its_step_and_place():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Mlp(64, 10, depth=4, width=32)
        trial = run_trial(model, batches(), steps=20, lr=1e3, optimizer="sgd")
    assert trial.status == "unhealthy"
    assert trial.first is not None
    assert trial.first.step > 0
    assert f"at step {trial.first.step}" in trial.sentence
    assert trial.to_dict()["first"]["text"] == trial.first.text


def test_few_steps_are_measured_and_a_loss_that_doubles_adds_some(monkeypatch):
    measured: list[int] = []
    record = Monitor._record
    monkeypatch.setattr(
        Monitor, "_record", lambda self, window: (measured.append(window.step), record(self, window))[1]
    )
    with torch.random.fork_rng():
        run_trial(network(), batches(), steps=50)
        assert measured == [0, 10, 20, 40, 49]
        measured.clear()
        trial = run_trial(network(), batches(), steps=20, lr=3.0, optimizer="sgd")
    doubled, worst = [], trial.losses[0]
    for step, loss in enumerate(trial.losses[:-1]):
        if loss > 2 * worst:
            doubled, worst = [*doubled, step + 1], loss
    assert doubled
    assert measured == sorted({0, 10, 19, *doubled})


def test_ctrl_c_keeps_what_was_done_and_leaves_no_hook():
    draw, calls = batches(), []

    def interrupted():
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return draw()

    with torch.random.fork_rng():
        model = network()
        trial = run_trial(model, interrupted, steps=20)
    assert trial.interrupted
    assert len(trial.losses) == 3
    assert trial.report is not None
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"optimizer": "adamax2"}, "unknown optimizer 'adamax2'. Try one of sgd"),
        ({"steps": 0}, "at least one step"),
        ({"lr": -1.0}, "a positive learning rate"),
    ],
)
def test_wrong_options_end_in_a_sentence(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        run_trial(nn.Linear(64, 10), batches(), **options)


def test_without_targets_there_is_nothing_to_train_for():
    with pytest.raises(UsageError, match="needs targets or a loss"):
        run_trial(nn.Linear(4, 2), lambda: (torch.ones(3, 4), None))


def test_a_rate_without_steps_is_refused():
    result = CliRunner().invoke(cli, ["check", "mlp,depth=2", "--lr", "0.1"])
    assert result.exit_code == 2
    assert "--steps 20" in result.output
