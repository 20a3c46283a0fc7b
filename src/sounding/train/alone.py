"""One network, trained alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from sounding.probe.state import evaluating
from sounding.repair.clipping import AdaptiveClipping
from sounding.train.checkpoint import Checkpoint
from sounding.train.evaluate import Scores, Seen, as_values, check_outputs, evaluate_part
from sounding.train.history import History
from sounding.train.journal import Journal, ProgressCall
from sounding.train.loop import Training, check_rates
from sounding.train.recipe import Recipe, Statistics
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
    training = Training(
        [network], data, kind="alone", runs=({"learning_rate": rate, **(settings or {})},),
        recipe=recipe, generator=generator, device=device, measure_at=measure_at,
        checkpoint=checkpoint, progress=progress,
    )  # fmt: skip
    network.to(training.device)
    samples, mode = training.samples, network.training
    # two samples suffice, and fail before the first step does
    check_outputs(_evaluating(network, samples.prepare(samples.train[0][:2]), recipe.statistics), samples, recipe.loss)
    try:
        return training.run(_Alone(network, make_optimizer(network, rate, recipe), recipe, samples, training.journal))
    finally:
        network.train(mode)


class _Alone:
    """The network and its optimizer as the loop of a training takes them; the journal knows where it diverged."""

    def __init__(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, samples: Samples, journal: Journal
    ) -> None:
        self._network, self._optimizer = network.train(), optimizer
        self._recipe, self._samples, self._journal = recipe, samples, journal
        self._seen = Seen(1, recipe, samples.train[0].device)

    def take(self, inputs: Tensor, targets: Tensor, step: int) -> None:
        if self._journal.diverged[0] is not None:
            return
        outputs = self._network(inputs)
        if self._recipe.loss == "cross_entropy":
            loss = functional.cross_entropy(outputs, targets)
        else:
            loss = functional.mse_loss(outputs, as_values(targets, outputs))
        if not bool(torch.isfinite(loss)):  # before the update, so that the weights stay finite
            self._journal.diverged[0] = step
            return
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._seen.add(loss[None], outputs[None], targets)

    def diverged(self) -> list[int | None]:
        return self._journal.diverged

    def evaluate(self) -> tuple[Scores, Scores | None]:
        if self._recipe.train_metrics == "seen":
            train = self._seen.take(classes=not self._samples.train[1].is_floating_point())
        else:
            train = self._evaluate(self._samples.train)
        return train, None if self._samples.test is None else self._evaluate(self._samples.test)

    def _evaluate(self, part: tuple[Tensor, Tensor]) -> Scores:
        def forward(inputs: Tensor) -> Tensor:
            return _evaluating(self._network, inputs, self._recipe.statistics)

        return evaluate_part(forward, part, self._samples, self._recipe)

    def networks(self) -> Iterator[nn.Module]:
        yield self._network

    def state(self) -> dict[str, Any]:
        (loss,), (right,), steps = (tensor.tolist() for tensor in self._seen.tensors())
        return {
            "network": self._network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            # the samples and whether there are classes follow from the run, and stand here since version 1.0.0
            "seen": [steps, loss, steps * self._recipe.batch_size, right, True],
            "random": torch.get_rng_state(),  # of dropout
        }

    def load_state(self, kept: dict[str, Any]) -> None:
        self._network.load_state_dict(kept["network"])
        self._optimizer.load_state_dict(kept["optimizer"])
        steps, loss, _, right, _ = kept["seen"]
        for tensor, value in zip(self._seen.tensors(), (loss, right, steps), strict=True):
            tensor.fill_(value)
        torch.set_rng_state(kept["random"])


def make_optimizer(network: nn.Module, learning_rate: float, recipe: Recipe) -> torch.optim.Optimizer:
    """torch's optimizer of the recipe, clipped where the recipe says so."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    shared: dict[str, Any] = {"lr": learning_rate, "weight_decay": recipe.weight_decay}
    optimizer: torch.optim.Optimizer
    if recipe.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters, betas=recipe.betas, eps=recipe.eps, **shared)
    elif recipe.optimizer == "rmsprop":
        optimizer = torch.optim.RMSprop(parameters, alpha=recipe.smoothing, eps=recipe.eps, **shared)
    else:
        momentum = recipe.momentum if recipe.optimizer == "momentum" else 0.0  # torch counts no momentum as 0
        optimizer = torch.optim.SGD(parameters, momentum=momentum, **shared)
    if recipe.clipping is None:
        return optimizer
    return AdaptiveClipping(optimizer, clipping=recipe.clipping, unitwise=recipe.clipping_by == "unit")


def _evaluating(network: nn.Module, inputs: Tensor, statistics: Statistics) -> Tensor:
    """Outputs (1, samples, values) in evaluation mode; the network is left as it was."""
    # PyTorch takes the statistics of the batch where there are no running ones, and remembers nothing
    norms = [m for m in network.modules() if isinstance(m, _BatchNorm)] if statistics == "batch" else []
    kept = [(norm, norm.running_mean, norm.running_var) for norm in norms]
    try:
        for norm in norms:
            norm.running_mean = norm.running_var = None
        with evaluating(network):
            outputs: Tensor = network(inputs)
            return outputs[None]  # as those of a stack of one run
    finally:
        for norm, mean, variance in kept:
            norm.running_mean, norm.running_var = mean, variance
