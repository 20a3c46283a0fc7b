"""`sounding check --steps`: the short trial's options, its run with the chosen batch, and its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sounding.cli.output import new_table
from sounding.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from sounding.cli.subject import Opened
    from sounding.train.trial import Trial

ROWS = 12  # steps in the table


def asked_trial(steps: int | None, lr: float | None, optimizer: str | None) -> dict[str, Any] | None:
    """The options of a trial that were given, or None where no trial is asked for."""
    given = {name: value for name, value in {"lr": lr, "optimizer": optimizer or None}.items() if value is not None}
    if given and steps is None:
        raise UsageError("--lr and --optimizer belong to a trial, got no --steps", hint="--steps 20")
    return None if steps is None else {"steps": steps, **given}


def try_training(at: Opened, asked: Mapping[str, Any], *, seed: int, tell: Callable[[str], None]) -> Trial:
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
        loss=at.loss,
        batch_axis=at.chosen.axis or None,
        progress=lambda done, total: tell(f"training: {done} of {total} steps"),
        **asked,
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
