"""Loss and accuracy of runs, over a batch and over a whole part of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sounding.errors import UsageError
from sounding.train.recipe import Loss, Recipe
from sounding.train.samples import Samples

Forward = Callable[[Tensor], Tensor]  # (samples, ...) to (runs, samples, outputs)


class Scores(NamedTuple):
    """Loss and accuracy of each run, on the CPU; no accuracy for targets that are no classes."""

    loss: list[float]
    accuracy: list[float] | None


class Seen:
    """Sums over the training batches since the last evaluation; they live on the device, so that nobody waits."""

    def __init__(self, runs: int, recipe: Recipe, device: torch.device) -> None:
        self._batch_size = recipe.batch_size
        self._loss = torch.zeros(runs, dtype=torch.float64, device=device)
        self._right = torch.zeros(runs, dtype=torch.int64, device=device)
        self._steps = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, losses: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Add the loss and the right answers of each run on a batch."""
        self._steps += 1
        self._loss += losses.double()
        if not targets.is_floating_point():
            self._right += count_right(outputs, targets)

    def take(self, *, classes: bool) -> Scores:
        """Mean loss and accuracy, NaN where there was no batch; the sums begin anew."""
        steps = int(self._steps) or float("nan")
        loss = (self._loss / steps).tolist()
        right = (self._right.double() / (steps * self._batch_size)).tolist() if classes else None
        for tensor in self.tensors():
            tensor.zero_()
        return Scores(loss, right)

    def tensors(self) -> list[Tensor]:
        """All sums, in a fixed order."""
        return [self._loss, self._right, self._steps]


def sample_losses(outputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """The loss of each run on each sample, (runs, samples), of outputs (runs, samples, values).

    Targets are those of all runs, or have a first axis of runs. Cross-entropy is log Σ_k exp(z_k) − z_y; "mse" is the
    mean over the outputs of (z − t)², with one-hot t for labels.
    """
    if loss == "cross_entropy":
        wanted = targets.expand(outputs.shape[:2])  # cross_entropy knows no axis of runs
        flat = functional.cross_entropy(outputs.flatten(0, 1), wanted.flatten(), reduction="none")
        return flat.view(outputs.shape[:2])
    return (outputs - as_values(targets, outputs)).square().mean(dim=-1)


def as_values(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets as numbers to compare outputs with; labels become one-hot rows."""
    if targets.is_floating_point():
        return targets
    return (targets[..., None] == torch.arange(outputs.shape[-1], device=targets.device)).to(outputs.dtype)


def count_right(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many samples each run classifies correctly, (runs,); labels only."""
    return (outputs.argmax(dim=-1) == targets).sum(dim=-1)


def check_outputs(outputs: Tensor, samples: Samples, loss: Loss) -> None:
    """Refuse outputs (runs, samples, values) and targets that do not fit together."""
    targets = samples.train[1]
    if outputs.dim() != 3:
        raise UsageError(
            f"expected a network that gives (samples, outputs), got the shape {tuple(outputs.shape[1:])}",
            hint="a network with one row of outputs a sample",
        )
    values = outputs.shape[-1]
    if targets.is_floating_point():
        if loss == "cross_entropy":
            raise UsageError("cross_entropy needs integer labels, got floating-point targets", hint="loss='mse'")
        if targets.shape[-1] != values:
            raise UsageError(f"expected targets of {values} values, one an output, got {targets.shape[-1]}")
        return
    for part in (samples.train, samples.test):
        if part is not None and not 0 <= int(part[1].min()) <= int(part[1].max()) < values:
            raise UsageError(
                f"expected labels from 0 to {values - 1}, got {int(part[1].min())} to {int(part[1].max())}",
                hint="a network with as many outputs as there are classes",
            )


@torch.no_grad()
def evaluate_part(
    forward: Forward, part: tuple[Tensor, Tensor], samples: Samples, recipe: Recipe, *, at_most: int | None = None
) -> Scores:
    """Mean loss and accuracy over a part.

    The samples are dealt out like cards to as few hands of at most `evaluated_together` as it takes, so that with batch
    statistics each hand is a fair sample even of sorted data. A hand has `at_most` samples where the recipe leaves that
    open and it changes nothing.
    """
    inputs, targets = part
    together = recipe.evaluated_together
    if at_most is not None and recipe.evaluation_batch is None and recipe.statistics == "running":
        together = min(together, at_most)
    hands = -(-len(inputs) // together)  # rounded up
    losses, right = [], []
    for hand in range(hands):
        wanted = targets[hand::hands]  # every so many-th sample: sorted data is spread over all hands
        outputs = forward(samples.prepare(inputs[hand::hands]))
        # float32 would lose digits over many samples
        losses.append(sample_losses(outputs, wanted, recipe.loss).double().sum(dim=1))
        if not targets.is_floating_point():
            right.append(count_right(outputs, wanted))
    accuracy = (sum(right[1:], right[0]).double() / len(inputs)).tolist() if right else None
    return Scores((sum(losses[1:], losses[0]) / len(inputs)).tolist(), accuracy)
