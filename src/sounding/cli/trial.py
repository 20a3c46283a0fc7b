"""`sounding check --steps`: the short trial's options, its run with the chosen batch, and its table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sounding.cli.output import new_table
from sounding.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from sounding.cli.subject import Opened
    from sounding.train.trial import Trial

LEARNING_RATE, OPTIMIZER = 1e-3, "adamw"  # torch's own default rate for AdamW
ROWS = 12  # steps in the table


@dataclass(frozen=True)
class Asked:
    """The trial that the options ask for."""

    steps: int
    lr: float
    optimizer: str


def asked_trial(steps: int | None, lr: float | None, optimizer: str | None) -> Asked | None:
    """The trial, or None where none is asked for."""
    if steps is not None:
        return Asked(steps, LEARNING_RATE if lr is None else lr, optimizer or OPTIMIZER)
    if lr is not None or optimizer is not None:
        raise UsageError("--lr and --optimizer belong to a trial, got no --steps", hint="--steps 20")
    return None


def try_training(at: Opened, asked: Asked, *, seed: int, tell: Callable[[str], None]) -> Trial:
    """The trial on batches drawn as the check's are, both generators begun anew from the seed."""
    import torch

    from sounding.train.trial import run_trial

    def draw() -> tuple[Any, Any]:
        batch = at.chosen.draw()
        return batch.given, batch.targets

    torch.manual_seed(seed)  # the caller puts the generator's state back
    at.generator.manual_seed(seed)
    return run_trial(
        at.models[0],
        draw,
        steps=asked.steps,
        lr=asked.lr,
        optimizer=asked.optimizer,
        loss=at.loss,
        batch_axis=at.chosen.axis or None,
        progress=lambda done, total: tell(f"training: {done} of {total} steps"),
    )


def print_trial(trial: Trial, prose: Console, *, quiet: bool) -> None:
    """The sentence, and a table of steps with their loss and news."""
    from sounding.cli.numbers import write_number

    prose.print(f"\n{trial.sentence}" if not quiet else trial.sentence, markup=False, soft_wrap=True)
    if quiet or not trial.losses:
        return
    table = new_table(">step", ">loss")
    table.add_column("news")
    count = len(trial.losses)
    news = {event.step for event in trial.events}
    for step in range(count):
        if step in news or step == count - 1 or step % -(-count // ROWS) == 0:
            told = "; ".join(f"{event.kind} {event.change}" for event in trial.events if event.step == step)
            table.add_row(str(step), write_number(trial.losses[step]), told)
    prose.print(table)
