"""A training in the terminal: the newest numbers while it runs; results, chosen rates and curves at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sounding.cli.output import console, new_table

if TYPE_CHECKING:
    from rich.table import Table

    from sounding.train import Choices, History, Point

ROWS = 16  # runs that the live table shows, the best first
BARS = "▁▂▃▄▅▆▇█"
CURVE = 24  # characters of a curve in a cell


def table_of_points(points: Sequence[Point], settings: Sequence[Mapping[str, Any]]) -> Table:
    """The newest point of each run; of many runs those with the lowest training loss."""
    table = _table(settings[0])
    order = sorted(points, key=lambda point: (math.isnan(point.train_loss), point.train_loss))
    for point in order[:ROWS]:
        table.add_row(*_cells(point, settings[point.run]))
    if len(points) > ROWS:
        table.add_row(f"… and {len(points) - ROWS} more")
    return table


def print_history(history: History, choices: Choices | None, *, names: Sequence[str]) -> None:
    """Every run's last numbers and its curve, and the best rate of each group."""
    screen = console()
    if not history.curves:
        screen.print("nothing was evaluated yet")
        return
    table = _table(history.settings[0])
    table.add_column("training loss over time", no_wrap=True)
    for run in range(history.runs):
        curve = [point.train_loss for point in history.curve(run)]
        diverged = history.diverged[run]
        drawn = draw_curve(curve) if diverged is None else f"diverged at step {diverged}"
        table.add_row(*_cells(history.final(run), history.settings[run]), drawn)
    screen.print(table)
    if choices is None:
        return
    screen.print(f"\nbest learning rate ({choices.rule}):", markup=False)
    for choice in choices.choices:
        group = choice.group if isinstance(choice.group, tuple) else (choice.group,)
        label = ", ".join(f"{name} {value}" for name, value in zip(names, group, strict=False)) or "all runs"
        if choice.learning_rate is None:
            screen.print(f"  {label}: none, every run diverged", markup=False)
        else:
            screen.print(f"  {label}: {choice.learning_rate:g} ({choice.value:.4g})", markup=False)


def draw_curve(values: Sequence[float]) -> str:
    """A curve in one line of text; gaps where a value is not finite.

    >>> draw_curve([3.0, 2.0, 1.0, float("nan")])
    '█▅▁ '
    """
    if len(values) > CURVE:
        values = [values[round(i * (len(values) - 1) / (CURVE - 1))] for i in range(CURVE)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "not finite"
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    steps = [round((value - low) / span * (len(BARS) - 1)) if math.isfinite(value) else -1 for value in values]
    return "".join(BARS[step] if step >= 0 else " " for step in steps)


def curves_of(history: History) -> dict[str, tuple[list[float], list[float]]]:
    """Training loss over epochs by name of the run."""
    found = {}
    for run, settings in enumerate(history.settings):
        name = ", ".join(f"{key.replace('learning_rate', 'rate')} {_word(value)}" for key, value in settings.items())
        points = history.curve(run)
        found[name] = [point.epoch for point in points], [point.train_loss for point in points]
    return found


def _table(settings: Mapping[str, Any]) -> Table:
    names = [f">{name.replace('learning_rate', 'rate')}" for name in settings]
    return new_table(*names, ">epoch", ">loss", ">accuracy", ">test loss", ">test acc.")


def _cells(point: Point, settings: Mapping[str, Any]) -> list[str]:
    numbers = [point.train_loss, point.train_accuracy, point.test_loss, point.test_accuracy]
    words = [
        "" if number is None else "–" if math.isnan(number) else f"{number:{form}}"
        for number, form in zip(numbers, (".4g", ".1%", ".4g", ".1%"), strict=True)
    ]
    return [*(_word(value) for value in settings.values()), f"{point.epoch:.3g}", *words]


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
