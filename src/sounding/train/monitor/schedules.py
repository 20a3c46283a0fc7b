"""When to measure: a schedule is any function of the step number; the common ones are here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from sounding.errors import UsageError

Schedule = Callable[[int], bool]


@dataclass(frozen=True)
class Every:
    """Steps 0, n, 2n, …

    >>> [step for step in range(250) if Every(100)(step)]
    [0, 100, 200]
    """

    n: int

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise UsageError(f"expected every= a positive whole number of steps, got {self.n!r}")

    def __call__(self, step: int) -> bool:
        return step % self.n == 0


@dataclass(frozen=True)
class Steps:
    """The steps named, and no other."""

    steps: frozenset[int]

    def __call__(self, step: int) -> bool:
        return step in self.steps


@dataclass(frozen=True)
class Logarithmic:
    """Step 0, then 10^(k/n) rounded for k = 0, 1, …: n measurements per factor of ten, dense where much changes.

    >>> [step for step in range(101) if Logarithmic(4)(step)]
    [0, 1, 2, 3, 6, 10, 18, 32, 56, 100]
    """

    per_decade: int = 10

    def __post_init__(self) -> None:
        if isinstance(self.per_decade, bool) or not isinstance(self.per_decade, int) or self.per_decade < 1:
            raise UsageError(f"expected a positive whole number per decade, got {self.per_decade!r}")

    def __call__(self, step: int) -> bool:
        if step <= 0:
            return step == 0
        nearest = round(self.per_decade * math.log10(step))
        return any(round(10 ** (k / self.per_decade)) == step for k in range(nearest - 1, nearest + 2))


def as_schedule(every: int | None, schedule: Schedule | Iterable[int] | Literal["log"] | None) -> Schedule:
    """The schedule that was asked for, by one of the two; every hundredth step where neither was given.

    >>> as_schedule(None, [0, 5])(5), as_schedule(None, None)(5), as_schedule(None, "log")(5)
    (True, False, True)
    """
    if schedule is None:
        return Every(100 if every is None else every)
    if every is not None:
        got = f"both (every={every!r}, schedule={schedule!r})"
        raise UsageError(f"expected every= or schedule=, got {got}", hint="one of the two")
    if isinstance(schedule, str):
        if schedule != "log":
            raise UsageError(f"expected schedule= 'log', steps or a function of the step, got {schedule!r}")
        return Logarithmic()
    if callable(schedule):
        return schedule
    try:
        steps = frozenset(schedule)
    except TypeError:
        steps = frozenset({-1})
    if not all(isinstance(step, int) and not isinstance(step, bool) and step >= 0 for step in steps):
        raise UsageError(
            f"expected schedule= steps from 0 on or a function of the step, got {schedule!r}",
            hint="schedule=[0, 10, 100], or schedule=lambda step: step < 10",
        )
    return Steps(steps)
