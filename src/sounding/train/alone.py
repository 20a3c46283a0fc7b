"""One network, trained in a loop that reads from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from sounding.errors import DataError
from sounding.repair.clipping import AdaptiveClipping
from sounding.train.checkpoint import Checkpoint
from sounding.train.evaluate import Scores, as_values, check_outputs, evaluate_part
from sounding.train.history import History
from sounding.train.journal import TOLD_EVERY, ProgressCall, deferred_interrupt
from sounding.train.opening import open_training
from sounding.train.recipe import Recipe, Statistics
from sounding.train.record import check_rates
from sounding.train.samples import Data, Samples


def train_(
    network: nn.Module,
    data: Data,
    *,
    learning_rate: float,
    recipe: Recipe,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    measure_at: Sequence[int] = (),
    checkpoint: Checkpoint | str | Path | None = None,
    progress: ProgressCall | None = None,
    settings: Mapping[str, Any] | None = None,
) -> History:
    """Train a network in place.

    A step whose loss is not finite is not taken: the run ends there, its weights as they were, and the history says at
    which step. Dropout and other randomness inside the network comes from torch's default generator, whose state a
    checkpoint keeps too.

    Args:
        network: any module that gives (samples, outputs).
        data: a `Dataset`, a pair (inputs, targets), or four tensors with those of a test part.
        learning_rate: constant.
        recipe: everything else.
        generator: of the order of the samples, crops and flips; None is torch's default generator.
        device: where to train; the network moves there. None is where it is.
        measure_at: steps after which ranks, gaps, gradient norms and alignment are measured over depth; 0 is before the
            first.
        checkpoint: a path, or a `Checkpoint`; training continues from it if it is there.
        progress: called with a `Progress` at evaluations and every 100 steps.
        settings: what else to remember about the run in its history.

    Raises:
        UsageError: something does not fit together.
        DataError: the checkpoint is damaged or cannot be written.
        InterruptedRun: Ctrl-C; `partial` is the history so far, and the checkpoint has been written.

    >>> from sounding.data import load_dataset
    >>> from sounding.models import Mlp
    >>> network = Mlp(64, 10, depth=2, width=32, generator=torch.Generator().manual_seed(0))
    >>> history = train_(network, load_dataset("digits"), learning_rate=0.1, recipe=Recipe(epochs=8),
    ...                  generator=torch.Generator().manual_seed(0))
    >>> history.final(0).test_accuracy > 0.8
    True
    """
    (rate,) = check_rates([learning_rate])
    samples, stream, journal, keeper, record, place = open_training(
        [network],
        data,
        kind="alone",
        runs=({"learning_rate": rate, **(settings or {})},),
        recipe=recipe,
        generator=generator,
        device=device,
        measure_at=measure_at,
        checkpoint=checkpoint,
        progress=progress,
    )
    network.to(place)
    training = network.training
    check_outputs(_evaluating(network, samples.prepare(samples.train[0][:2]), recipe.statistics), samples, recipe.loss)
    optimizer = make_optimizer(network, rate, recipe)
    seen = _Seen()
    step, finished = 0, False

    def restore(kept: dict[str, Any]) -> None:
        nonlocal step, finished
        network.load_state_dict(kept["network"])
        optimizer.load_state_dict(kept["optimizer"])
        stream.load_state(kept["stream"])
        journal.load_state(kept["journal"])
        seen.load(kept["seen"])
        torch.set_rng_state(kept["random"])
        step, finished = int(kept["step"]), bool(kept["finished"])

    def state() -> dict[str, Any]:
        return {
            "step": step,
            "finished": finished,
            "network": network.state_dict(),
            "optimizer": optimizer.state_dict(),
            "stream": stream.state(),
            "journal": journal.state(),
            "seen": seen.values(),
            "random": torch.get_rng_state(),
        }

    def look() -> None:
        if journal.evaluates(step):
            train, test = _evaluate(network, samples, recipe, seen)
            journal.note(step, train, test)
        if journal.measures(step):
            journal.measure(step, 0, network)
        if journal.evaluates(step) or step % TOLD_EVERY == 0:
            journal.tell(step)

    try:
        with keeper.held():
            keeper.resume(restore, state)
            with deferred_interrupt() as interrupted:
                if step == 0 and not finished:
                    look()
                network.train()
                while step < stream.steps and not finished:
                    if interrupted() or journal.stopped:
                        keeper.write(state())
                        raise KeyboardInterrupt
                    inputs, targets = stream.next()
                    step += 1
                    if journal.diverged[0] is None:
                        outputs = network(inputs)
                        loss = _mean_loss(outputs, targets, recipe)
                        if bool(torch.isfinite(loss)):
                            optimizer.zero_grad()
                            loss.backward()  # type: ignore[no-untyped-call]
                            optimizer.step()
                            seen.add(loss, outputs, targets)
                        else:
                            journal.diverged[0] = step
                    look()
                    if keeper.due():
                        keeper.write(state())
            if not finished:
                finished = True
                keeper.write(state())
    except DataError as error:
        error.partial = journal.history(record, partial=not finished)
        raise
    except KeyboardInterrupt as stop:
        raise journal.interruption(step, record) from stop
    finally:
        network.train(training)
    return journal.history(record)


def make_optimizer(network: nn.Module, learning_rate: float, recipe: Recipe) -> torch.optim.Optimizer:
    """torch's optimizer of the recipe, clipped where the recipe says so."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    decay = recipe.weight_decay
    optimizer: torch.optim.Optimizer
    if recipe.optimizer == "adam":
        optimizer = torch.optim.Adam(
            parameters, lr=learning_rate, betas=recipe.betas, eps=recipe.eps, weight_decay=decay
        )
    elif recipe.optimizer == "rmsprop":
        optimizer = torch.optim.RMSprop(
            parameters, lr=learning_rate, alpha=recipe.smoothing, eps=recipe.eps, weight_decay=decay
        )
    else:
        momentum = recipe.momentum if recipe.optimizer == "momentum" else 0.0
        optimizer = torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum, weight_decay=decay)
    if recipe.clipping is None:
        return optimizer
    return AdaptiveClipping(optimizer, clipping=recipe.clipping, unitwise=recipe.clipping_by == "unit")


def _mean_loss(outputs: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
    if recipe.loss == "cross_entropy":
        return functional.cross_entropy(outputs, targets)
    return functional.mse_loss(outputs, as_values(targets, outputs))


def _evaluate(network: nn.Module, samples: Samples, recipe: Recipe, seen: _Seen) -> tuple[Scores, Scores | None]:
    def forward(inputs: Tensor) -> Tensor:
        return _evaluating(network, inputs, recipe.statistics)

    train = seen.take() if recipe.train_metrics == "seen" else evaluate_part(forward, samples.train, samples, recipe)
    return train, None if samples.test is None else evaluate_part(forward, samples.test, samples, recipe)


def _evaluating(network: nn.Module, inputs: Tensor, statistics: Statistics) -> Tensor:
    """Outputs (1, samples, values) in evaluation mode; the network is left as it was."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.no_grad(), _batch_statistics(network, statistics):
            outputs: Tensor = network(inputs)
            return outputs[None]
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _batch_statistics(network: nn.Module, statistics: Statistics) -> Iterator[None]:
    """Without running statistics, a batch norm in evaluation mode takes those of its batch, and remembers nothing."""
    kept: list[tuple[_BatchNorm, Tensor | None, Tensor | None]] = []
    if statistics == "batch":
        kept = [(m, m.running_mean, m.running_var) for m in network.modules() if isinstance(m, _BatchNorm)]
    try:
        for module, _, _ in kept:
            module.running_mean = module.running_var = None
        yield
    finally:
        for module, mean, variance in kept:
            module.running_mean, module.running_var = mean, variance


class _Seen:
    """Mean loss and accuracy over the training batches since they were last asked for."""

    def __init__(self) -> None:
        self._steps, self._loss, self._samples, self._right = 0, 0.0, 0, 0
        self._classes = True

    def add(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Add the loss and the right answers of one batch."""
        self._steps += 1
        self._loss += float(loss.detach())
        self._samples += len(targets)
        self._classes = not targets.is_floating_point()
        if self._classes:
            self._right += int((outputs.detach().argmax(dim=-1) == targets).sum())

    def take(self) -> Scores:
        """The means since the last call; counting starts anew."""
        if self._steps == 0:
            return Scores([float("nan")], [float("nan")])
        found = Scores([self._loss / self._steps], [self._right / self._samples] if self._classes else None)
        self.__init__()  # type: ignore[misc]
        return found

    def values(self) -> list[Any]:
        """What a checkpoint keeps of the sums."""
        return [self._steps, self._loss, self._samples, self._right, self._classes]

    def load(self, values: list[Any]) -> None:
        """The inverse of `values`."""
        self._steps, self._loss, self._samples, self._right, self._classes = values
