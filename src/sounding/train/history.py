"""What came out of training: curves, where runs diverged, what was measured, and what is needed to repeat it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from sounding.encoding import JsonRecord, to_plain
from sounding.errors import UsageError
from sounding.lazy import import_extra
from sounding.profile import Profile, Series

if TYPE_CHECKING:
    import pandas

SCHEMA = "sounding.history/1"


class Point(NamedTuple):
    """One evaluation of one run; None where there is nothing to evaluate on, NaN once a run has diverged."""

    run: int
    epoch: float
    step: int
    train_loss: float
    train_accuracy: float | None
    test_loss: float | None
    test_accuracy: float | None


@dataclass(frozen=True)
class History(JsonRecord):
    """The training of one run or of many.

    Args:
        curves: tidy rows, by step, then by run.
        diverged: for each run the step whose loss was not finite, or None. The step was not taken.
        profile: measurements during training; `at` and `trace` read it. The source of a row is "run R step S".
        settings: for each run its learning rate and whatever else tells it from the others.
        record: what is needed to repeat: versions, seed, recipe, device, checksum of the data, the model.

    >>> history = History((Point(0, 1.0, 10, 0.5, 0.9, None, None),), (None,), Profile(), ({"learning_rate": 0.1},), {})
    >>> history.final(0).train_loss
    0.5
    """

    noun = "history"

    curves: tuple[Point, ...]
    diverged: tuple[int | None, ...]
    profile: Profile
    settings: tuple[Mapping[str, Any], ...]
    record: Mapping[str, Any] = field(hash=False)

    def __post_init__(self) -> None:
        # Python's own NaN for every NaN, so that a history with NaN equals its copy
        rows = ((math.nan if isinstance(v, float) and math.isnan(v) else v for v in point) for point in self.curves)
        object.__setattr__(self, "curves", tuple(Point(*row) for row in rows))  # type: ignore[arg-type]
        object.__setattr__(self, "settings", tuple(MappingProxyType(dict(entry)) for entry in self.settings))
        object.__setattr__(self, "record", MappingProxyType(dict(self.record)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Histories cross process boundaries; read-only mappings can't by themselves."""
        plain = tuple(dict(entry) for entry in self.settings)
        return History, (self.curves, self.diverged, self.profile, plain, dict(self.record))

    @property
    def runs(self) -> int:
        """How many runs were trained."""
        return len(self.settings)

    def curve(self, run: int) -> tuple[Point, ...]:
        """One run's points, by step."""
        self._check_run(run)
        return tuple(point for point in self.curves if point.run == run)

    def final(self, run: int) -> Point:
        """The last point of a run."""
        curve = self.curve(run)
        if not curve:
            raise UsageError(f"run {run} was not evaluated yet")
        return curve[-1]

    def at(self, *, run: int, step: int) -> Profile:
        """What was measured of one run at one step, over depth."""
        self._check_run(run)
        found = self.profile.select(source=source_of(run, step))
        if not found.rows:
            steps = sorted({read_source(source)[1] for source in self.profile.sources})
            raise UsageError(f"nothing was measured at step {step} of run {run}", hint=f"measured steps: {steps}")
        return found

    def trace(self, measure: str, *, run: int, layer: int = -1) -> Series:
        """One measure of one layer over the steps; `layer` of the series is the step.

        A negative `layer` counts from the last that has the measure, as in `Profile.value`.
        """
        self._check_run(run)
        steps = [step for source in self.profile.sources for found, step in [read_source(source)] if found == run]
        rows = []
        for step in steps:
            part = self.at(run=run, step=step)
            value = part.value(measure, layer=layer)
            first = part.select(measure).rows[0]  # gives the columns that all steps share
            rows.append(first._replace(layer=step, value=value.value, stderr=value.stderr, source="trace"))
        return Profile(tuple(rows)).series(measure)

    def _check_run(self, run: int) -> None:
        if not 0 <= run < self.runs:
            raise UsageError(f"run must be between 0 and {self.runs - 1}, got {run}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, columns by name; non-finite values become the strings "nan", "inf", "-inf"."""
        return {
            "schema": SCHEMA,
            "columns": list(Point._fields),
            "curves": to_plain(self.curves),
            "diverged": list(self.diverged),
            "settings": to_plain(self.settings),
            "profile": self.profile.to_dict(),
            "record": to_plain(self.record),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> History:
        """The inverse of `to_dict`."""
        schema = data.get("schema") if isinstance(data, Mapping) else None
        if schema != SCHEMA:
            raise UsageError(f"expected a history with schema {SCHEMA!r}, got {schema!r}")
        try:
            if list(data["columns"]) != list(Point._fields):
                raise UsageError(f"expected the columns {list(Point._fields)}, got {data['columns']!r}")
            return cls(
                tuple(_as_point(point) for point in data["curves"]),
                tuple(data["diverged"]),
                Profile.from_dict(data["profile"]),
                tuple(data["settings"]),
                data["record"],
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, UsageError):  # which is a ValueError too
                raise
            raise UsageError(f"expected a history as to_json writes it, got one without {error}") from error

    def to_pandas(self) -> pandas.DataFrame:
        """The curves as a pandas DataFrame, the runs' settings as columns beside them."""
        frames = import_extra("pandas", extra="pandas", needed_for="History.to_pandas")
        rows = [{**self.settings[point.run], **point._asdict()} for point in self.curves]
        # the fields first, then settings as they come
        columns = dict.fromkeys([*Point._fields, *(name for row in rows for name in row)])
        frame: pandas.DataFrame = frames.DataFrame(rows, columns=list(columns))
        return frame

    def __str__(self) -> str:
        failed = sum(step is not None for step in self.diverged)
        steps = max((point.step for point in self.curves), default=0)
        lines = [f"History({self.runs} runs, {steps} steps, {failed} diverged)"]
        lines += [self._line(run) for run in range(min(self.runs, 20))]
        return "\n".join([*lines, f"  … {self.runs - 20} more runs"] if self.runs > 20 else lines)

    __repr__ = __str__

    def _line(self, run: int) -> str:
        told = " ".join(f"{name}={value}" for name, value in self.settings[run].items())
        if (step := self.diverged[run]) is not None:
            return f"  run {run}: {told}: diverged at step {step}"
        curve = self.curve(run)
        shown = [
            f"{name.replace('_', ' ')} {value:.4g}"
            for name, value in (curve[-1]._asdict().items() if curve else [])
            if name not in ("run", "epoch", "step") and value is not None
        ]
        return f"  run {run}: {told}: {', '.join(shown)}"


def source_of(run: int, step: int) -> str:
    """Under which source a profile holds the measurements of a run at a step."""
    return f"run {run} step {step}"


def read_source(source: str) -> tuple[int, int]:
    """The inverse of `source_of`."""
    _, run, _, step = source.split()
    return int(run), int(step)


def _as_point(values: list[Any]) -> Point:
    run, epoch, step, *rest = values
    return Point(int(run), float(epoch), int(step), *(None if value is None else float(value) for value in rest))  # type: ignore[arg-type]
