"""What to measure: which modules, by name and type, and which measures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from sounding.errors import UsageError
from sounding.probe.calls import Spec
from sounding.probe.inside.rows import HEADS, INSIDE
from sounding.probe.moments import FAST, FULL, TIERS, Tier
from sounding.train.monitor.moved import UPDATE_RATIO

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


def choose_modules(
    include: Pick | Sequence[Pick] | None = None, exclude: Pick | Sequence[Pick] | None = None
) -> Modules:
    """Names, patterns and classes, one or several."""
    return Modules(_as_picks("include", include), _as_picks("exclude", exclude))


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
    return "full" if SPECTRAL & chosen else "fast", chosen


def _matches(spec: Spec, picks: tuple[Pick, ...]) -> bool:
    return any(
        fnmatchcase(spec.name, pick) if isinstance(pick, str) else isinstance(spec.module, pick) for pick in picks
    )


def _as_picks(argument: str, picks: Any) -> tuple[Pick, ...]:
    """One name, pattern or class, or several, as a tuple; a UsageError for anything else."""
    if picks is None:
        return ()
    several = (picks,) if isinstance(picks, str | type) else picks
    try:
        found = tuple(several)
    except TypeError:
        found = (None,)
    if not all(isinstance(pick, str) or (isinstance(pick, type) and issubclass(pick, nn.Module)) for pick in found):
        raise UsageError(
            f"expected {argument}= names, patterns or module classes, got {picks!r}",
            hint=f"{argument}=('features.*', nn.Linear)",
        )
    return found
