"""What to measure and when: which modules, by name and type, which measures, and at which steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from sounding.errors import UsageError, require_whole
from sounding.probe.calls import Spec
from sounding.probe.inside.rows import HEADS, INSIDE
from sounding.probe.moments import FAST, FULL, TIERS, Tier
from sounding.train.monitor.moved import UPDATE_RATIO

Schedule = Callable[[int], bool]
Pick = str | type[nn.Module]
ALWAYS = ("gradient_log_norm", "weight_gradient_log_norm")
OTHERS = (
    "dead_fraction",
    "saturated_fraction",
    "token_participation_ratio",
    "non_finite_fraction",
    "repeated_fraction",
    "gradient_growth",
    "gradient_log_rate",
    "gradient_alignment",
    UPDATE_RATIO,
)
# rows of single heads are too many to watch
KNOWN = (*FAST, *FULL, *ALWAYS, *OTHERS, *sorted(INSIDE - frozenset(HEADS)))
SPECTRAL = frozenset({*FULL, "repeated_fraction"})


@dataclass(frozen=True)
class Modules:
    """The modules to show: named or typed by `include` (all when it is empty), less those of `exclude`."""

    include: tuple[Pick, ...] = ()
    exclude: tuple[Pick, ...] = ()

    def mark_(self, specs: Sequence[Spec]) -> None:
        """Set `shown` of every record; an error when nothing is left."""
        if not self.include and not self.exclude:
            return
        for spec in specs:
            spec.shown = (not self.include or _matches(spec, self.include)) and not _matches(spec, self.exclude)
        if specs and not any(spec.shown for spec in specs):
            raise UsageError(
                f"no module of the model passes the filters (include={self.include!r}, exclude={self.exclude!r})",
                hint=f"a name such as {specs[0].name!r}, a pattern such as 'features.*', or a class such as nn.Linear",
            )


def choose_measures(measures: str | Sequence[str]) -> tuple[Tier, frozenset[str] | None]:
    """The tier that is needed and the measures to keep, None for all of the tier.

    >>> choose_measures("full"), choose_measures(["numerical_rank"])[0]
    (('full', None), 'full')
    """
    if isinstance(measures, str) and measures in TIERS:
        return measures, None
    names: tuple[object, ...] = (measures,)
    if not isinstance(measures, str) and isinstance(measures, Iterable):
        names = tuple(measures)
    unknown = [name for name in names if name not in KNOWN]
    if unknown or not names:
        raise UsageError(
            f"expected measures= 'fast', 'full' or names of measures, got {measures!r}",
            hint=f"some of {', '.join(KNOWN)}",
        )
    chosen = frozenset(map(str, names))
    return "full" if SPECTRAL & chosen else "fast", chosen  # only these need eigenvalues


def _matches(spec: Spec, picks: tuple[Pick, ...]) -> bool:
    return any(
        fnmatchcase(spec.name, pick) if isinstance(pick, str) else isinstance(spec.module, pick) for pick in picks
    )


def as_picks(argument: str, picks: Any) -> tuple[Pick, ...]:
    """One name, pattern or class, or several, as a tuple; a UsageError for anything else."""
    if picks is None:
        return ()
    several = (picks,) if isinstance(picks, str | type) else picks
    try:
        found = tuple(several)
    except TypeError:
        found = (None,)  # is no pick, so that the error below tells
    if not all(isinstance(pick, str) or (isinstance(pick, type) and issubclass(pick, nn.Module)) for pick in found):
        raise UsageError(
            f"expected {argument}= names, patterns or module classes, got {picks!r}",
            hint=f"{argument}=('features.*', nn.Linear)",
        )
    return found


@dataclass(frozen=True)
class Logarithmic:
    """Step 0, then 10^(k/n) rounded for k = 0, 1, …: n measurements per factor of ten, dense where much changes.

    >>> [step for step in range(101) if Logarithmic(4)(step)]
    [0, 1, 2, 3, 6, 10, 18, 32, 56, 100]
    """

    per_decade: int = 10

    def __post_init__(self) -> None:
        require_whole("per_decade", self.per_decade)

    def __call__(self, step: int) -> bool:
        if step <= 0:
            return step == 0
        nearest = round(self.per_decade * math.log10(step))  # rounding may have moved the step to a neighbouring k
        return any(round(10 ** (k / self.per_decade)) == step for k in range(nearest - 1, nearest + 2))


def as_schedule(every: int | None, schedule: Schedule | Iterable[int] | Literal["log"] | None) -> Schedule:
    """The schedule that was asked for, by one of the two; every hundredth step where neither was given.

    >>> as_schedule(None, [0, 5])(5), as_schedule(None, None)(5), as_schedule(None, "log")(5)
    (True, False, True)
    """
    if schedule is None:
        apart = 100 if every is None else every
        require_whole("every", apart)
        return lambda step: step % apart == 0
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
        steps = frozenset({-1})  # is no step, so that the error below tells
    if not all(isinstance(step, int) and not isinstance(step, bool) and step >= 0 for step in steps):
        raise UsageError(
            f"expected schedule= steps from 0 on or a function of the step, got {schedule!r}",
            hint="schedule=[0, 10, 100], or schedule=lambda step: step < 10",
        )
    return steps.__contains__
