"""A short trial: a few steps of training on a copy, watched by the monitor, for what the start cannot show."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sounding.encoding import fields_of
from sounding.errors import TargetError, UsageError, require_known
from sounding.probe.losses import Loss, training_loss
from sounding.probe.records import Report
from sounding.train.monitor import Event, Monitor

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
# The first step after the start that is measured; the next are at each doubling, and the last. What breaks in training
# shows by then, and of 20 steps 3 are measured, of 100 6: a measured step costs as much as one to five others.
EARLIEST = 10


@dataclass(frozen=True)
class Trial:
    """What a few steps of training gave.

    Args:
        losses: of each step, before its update.
        events: what appeared, changed and went, in order.
        report: the last measured step with its verdict; None where none was measured.
        settings: steps asked for, learning rate, optimizer.
        interrupted: whether Ctrl-C came in between.
    """

    losses: tuple[float, ...]
    events: tuple[Event, ...]
    report: Report | None
    settings: Mapping[str, Any]
    interrupted: bool = False

    @property
    def first(self) -> Event | None:
        """What broke first: the first finding of high severity that was not there at step 0."""
        return next((e for e in self.events if e.step and e.severity == "high" and e.change != "gone"), None)

    @property
    def status(self) -> str:
        """The status of the verdict at the end; a loss that is not finite is unhealthy whatever was measured before."""
        if self.losses and not math.isfinite(self.losses[-1]):
            return "unhealthy"
        return "not known" if self.report is None else self.report.verdict.status

    @property
    def sentence(self) -> str:
        """The trial in words."""
        if not self.losses:
            return "Trial: interrupted before the first step."
        told = f"Trial: loss {self.losses[0]:.4g} → {self.losses[-1]:.4g} in {len(self.losses)} steps"
        told += f" of {self.settings['optimizer']} at a learning rate of {self.settings['lr']:g}"
        if self.first is not None:
            return f"{told}. The first to break, at step {self.first.step}: {self.first.text}"
        return f"{told}; the loss is not finite." if not math.isfinite(self.losses[-1]) else f"{told}; nothing broke."

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        losses = [value if math.isfinite(value) else None for value in self.losses]
        told = fields_of(self, "status sentence first events interrupted report")
        return {**self.settings, **told, "losses": losses}


def run_trial(
    model: nn.Module,
    draw: Callable[[], tuple[Any, Any]],
    *,
    steps: int = 20,
    lr: float = 1e-3,  # torch's own default for AdamW
    optimizer: str = "adamw",
    loss: str | Loss | None = None,
    batch_axis: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trial:
    """A few steps of training on a copy of the model, the model itself untouched; Ctrl-C keeps what was done.

    Each step is what a plain loop does: a batch, the loss, its gradient, one step of torch's optimizer with its own
    defaults. Dropout is on, from torch's default generator. It ends early at a loss that is not finite.

    Args:
        model: any module that can be copied.
        draw: gives (inputs, targets) of a step, as `sounding.check` takes them.
        steps: how many.
        lr: the learning rate.
        optimizer: one of `OPTIMIZERS`.
        loss: as in `sounding.check`; targets or a loss are needed, except by language models and models that return
            their own.
        batch_axis: as in `sounding.check`.
        progress: called with (steps done, steps).

    Raises:
        UsageError: an unknown optimizer, or nothing to train for.
        TargetError: the model cannot be copied, or raised.
    """
    require_known("optimizer", optimizer, OPTIMIZERS)
    if steps < 1 or not (lr > 0 and math.isfinite(lr)):
        raise UsageError(f"expected at least one step and a positive learning rate, got {steps} and {lr}")
    try:
        trained = copy.deepcopy(model).train()
    except Exception as error:
        raise TargetError(f"copying the network for a trial raised {type(error).__name__}: {error}") from error
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError("a trial needs a network with parameters to train, got none")
    update = OPTIMIZERS[optimizer](parameters, lr=lr)
    losses: list[float] = []
    chosen = {0, steps - 1, *(EARLIEST << k for k in range(steps.bit_length()))}
    interrupted, worst = False, math.inf

    def due(step: int) -> bool:
        nonlocal worst
        # a loss that has doubled is on its way out: the step after it is measured whatever its number
        doubled = bool(losses) and not losses[-1] <= 2 * worst
        if doubled or step == 1:
            worst = losses[-1]
        return doubled or step in chosen

    with Monitor(trained, schedule=due, optimizer=update, batch_axis=batch_axis) as monitor:
        try:
            for step in range(steps):
                inputs, targets = draw()
                update.zero_grad()
                value = training_loss(trained, inputs, targets, loss=loss)
                losses.append(float(value.detach()))
                value.backward()  # type: ignore[no-untyped-call]
                update.step()
                if progress is not None:
                    progress(step + 1, steps)
                if not math.isfinite(losses[-1]):
                    break
        except KeyboardInterrupt:
            interrupted = True
    report = monitor.report if monitor.profiles else None
    return Trial(
        tuple(losses), monitor.findings, report, {"steps": steps, "lr": lr, "optimizer": optimizer}, interrupted
    )
