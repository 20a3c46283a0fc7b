"""Choosing a learning rate from a grid, by a rule that the result states in words."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sounding.errors import UsageError
from sounding.train.history import History

By = Literal["train_loss", "train_accuracy", "test_loss", "test_accuracy"]
BY: tuple[By, ...] = get_args(By)


@dataclass(frozen=True)
class Choice:
    """The best learning rate of a group.

    Args:
        group: what its runs have in common.
        learning_rate: the chosen one; None when every run of the group diverged.
        runs: those with that rate; several where a rule averages, over seeds for example.
        value: of the rule's number at that rate, the mean over `runs`.
    """

    group: Hashable
    learning_rate: float | None
    runs: tuple[int, ...]
    value: float

    @property
    def run(self) -> int | None:
        """The first of `runs`, None when there is none."""
        return self.runs[0] if self.runs else None


@dataclass(frozen=True)
class Choices(Mapping[Hashable, Choice]):
    """The best rate of each group, by group, and the rule it was chosen by.

    Args:
        rule: in words.
        choices: in order of appearance of the groups.
    """

    rule: str
    choices: tuple[Choice, ...]

    def __getitem__(self, group: Hashable) -> Choice:
        return {choice.group: choice for choice in self.choices}[group]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(choice.group for choice in self.choices)

    def __len__(self) -> int:
        return len(self.choices)


def choose_rates(
    history: History, groups: Sequence[Hashable] | str | None = None, *, by: By = "train_loss", at: str = "last"
) -> Choices:
    """The best learning rate of every group of runs.

    Within a group, runs with the same rate are averaged; a rate at which any of them diverged is not chosen. The rate
    with the lowest loss or highest accuracy wins, of equal ones the smallest.

    Args:
        history: of runs that differ in learning rate.
        groups: a label for each run, or the names of settings (as "init,depth"): runs that agree in them are one group.
            None takes every setting except the learning rate.
        by: "train_loss", "train_accuracy", "test_loss" or "test_accuracy".
        at: "last", the last evaluation, or "best", each run's best evaluation.

    >>> from sounding.profile import Profile
    >>> from sounding.train.history import Point
    >>> settings = ({"learning_rate": 0.1}, {"learning_rate": 1.0}, {"learning_rate": 10.0})
    >>> curves = [Point(0, 1, 9, 0.5, None, None, None), Point(1, 1, 9, 0.2, None, None, None),
    ...           Point(2, 1, 9, math.nan, None, None, None)]
    >>> chosen = choose_rates(History(tuple(curves), (None, None, 4), Profile(), settings, {}))
    >>> chosen[()].learning_rate
    1.0
    >>> chosen.rule
    'lowest train loss at the last evaluation; rates at which a run diverged are left out, of equal ones the smallest'
    """
    if by not in BY:
        raise UsageError(f"expected by= the name of a curve, got {by!r}", hint=f"one of {', '.join(BY)}")
    if at not in ("last", "best"):
        raise UsageError(f"expected at= an evaluation, got {at!r}", hint="last or best")
    labels = _label(history, groups)
    members: dict[Hashable, dict[float, list[int]]] = {}
    for run, label in enumerate(labels):
        rate = float(history.settings[run]["learning_rate"])
        members.setdefault(label, {}).setdefault(rate, []).append(run)
    chosen = tuple(_choose(history, group, rates, by, at) for group, rates in members.items())
    averaged = any(len(runs) > 1 for rates in members.values() for runs in rates.values())
    what = f"{'lowest' if by.endswith('loss') else 'highest'} {by.replace('_', ' ')}"
    when = "at the last evaluation" if at == "last" else "over all evaluations of a run"
    mean = ", mean over the runs of a rate" if averaged else ""
    caution = "; chosen on the test part, so the chosen value is optimistic" if by.startswith("test") else ""
    ties = "rates at which a run diverged are left out, of equal ones the smallest"
    return Choices(f"{what} {when}{mean}; {ties}{caution}", chosen)


def _label(history: History, groups: Sequence[Hashable] | str | None) -> list[Hashable]:
    """The group of every run: as given, or by the settings that are named."""
    if groups is not None and not isinstance(groups, str):
        if len(groups) != history.runs:
            raise UsageError(f"expected a group for each of {history.runs} runs, got {len(groups)}")
        return list(groups)
    known = [name for name in dict.fromkeys(n for entry in history.settings for n in entry) if name != "learning_rate"]
    names = known if groups is None else [name.strip() for name in groups.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"runs have no setting {name!r}", hint=f"one of {', '.join(known)}" if known else None)
    values = [tuple(entry.get(name) for name in names) for entry in history.settings]
    return [value[0] if len(names) == 1 else value for value in values]  # a single setting is its own label


def _choose(history: History, group: Hashable, rates: dict[float, list[int]], by: By, at: str) -> Choice:
    sign = 1.0 if by.endswith("loss") else -1.0  # losses are minimized, accuracies maximized
    best = Choice(group, None, (), math.nan)
    for rate in sorted(rates):  # ascending: of equal ones the first, that is the smallest, stays
        value = sum(_value(history, run, by, at, sign) for run in rates[rate]) / len(rates[rate])
        # one run that diverged makes the mean NaN
        if math.isfinite(value) and (best.learning_rate is None or sign * value < sign * best.value):
            best = Choice(group, rate, tuple(rates[rate]), value)
    return best


def _value(history: History, run: int, by: By, at: str, sign: float) -> float:
    if history.diverged[run] is not None:
        return math.nan
    points = history.curve(run)
    values = [value for point in points if (value := getattr(point, by)) is not None]
    if not values:
        raise UsageError(f"run {run} has no {by} to choose by", hint="data with a test part, or by='train_loss'")
    if at == "last":
        return float(values[-1])
    finite = [value for value in values if math.isfinite(value)]
    return float(min(finite, key=lambda value: sign * value)) if finite else math.nan
