"""Profile, the one noun of Sounding: what theory predicts, a chain simulates and a probe measures, layer by layer.

A Profile is a tidy, frozen table with the columns layer, name, measure, value, stderr, source. Laying a prediction over
a measurement is the concatenation `predicted + measured`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sounding.encoding import JsonRecord, to_plain
from sounding.errors import UsageError
from sounding.lazy import import_extra

if TYPE_CHECKING:
    import pandas

SCHEMA = "sounding.profile/1"


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error, printed to the digits it deserves.

    >>> print(Estimate(1.0431874, 0.0062))
    1.043 ± 0.006
    >>> print(Estimate(0.5))
    0.5
    >>> print(Estimate(5432.1, 870))
    5400 ± 900
    """

    value: float
    stderr: float | None = None

    def __str__(self) -> str:
        if self.stderr is None or math.isnan(self.stderr) or not math.isfinite(self.value):
            return f"{self.value:.6g}"
        if self.stderr <= 0 or math.isinf(self.stderr):
            return f"{self.value:.6g} ± {self.stderr:.6g}"
        # the digit that counts is that of the rounded error: 0.0996 is 0.1, not 0.10
        rounded = float(f"{self.stderr:.0e}")
        decimals = -math.floor(math.log10(rounded))
        if -4 <= decimals <= 8:
            value = round(self.value, decimals) + 0.0  # + 0.0 turns −0 into 0
            return f"{value:.{max(decimals, 0)}f} ± {rounded:.{max(decimals, 0)}f}"
        # a number that large or small is written with an exponent, to the last digit that its error leaves
        order = math.floor(math.log10(abs(self.value))) if self.value else -decimals
        digits = min(max(order + decimals + 1, 1), 15)
        return f"{self.value:.{digits}g} ± {rounded:.1g}"

    def interval(self, z: float = 1.959964) -> tuple[float, float]:
        """The normal confidence interval, 95% by default; a point when there is no standard error."""
        half = z * (self.stderr or 0.0)
        return self.value - half, self.value + half


class Row(NamedTuple):
    """One number of a profile: where (layer, name), what (measure), how much (value, stderr), whence (source)."""

    layer: int
    name: str
    measure: str
    value: float
    stderr: float | None
    source: str


class Series(NamedTuple):
    """One measure over depth, as arrays; `stderr` is NaN where a row has none."""

    layer: np.ndarray
    value: np.ndarray
    stderr: np.ndarray


@dataclass(frozen=True)
class Profile(JsonRecord):
    """A tidy, frozen table over depth.

    Args:
        rows: the numbers, in execution order; numpy and torch scalars become Python's.
        settings: how they came about (JSON types only); `{"partial": True}` marks an interrupted run.

    >>> measured = Profile([Row(1, "fc1", "mean_cosine", 0.5, 0.1, "check")])
    >>> predicted = Profile([Row(1, "", "mean_cosine", 0.48, None, "theory")])
    >>> len(predicted + measured), (predicted + measured).sources
    (2, ('theory', 'check'))
    """

    noun = "profile"

    rows: tuple[Row, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def over_depth(
        cls,
        columns: Mapping[str, Iterable[float]],
        settings: Mapping[str, Any],
        *,
        first: int = 0,
        name: str = "",
        source: str = "theory",
    ) -> Profile:
        """The profile of measures that have a value at every layer from `first` on, layer after layer.

        >>> print(Profile.over_depth({"mean_cosine": [0.5, 0.25]}, {}).rows[1])
        Row(layer=1, name='', measure='mean_cosine', value=0.25, stderr=None, source='theory')
        """
        layers = enumerate(zip(*columns.values(), strict=True), start=first)
        rows = (Row(layer, name, measure, value, None, source)
                for layer, values in layers for measure, value in zip(columns, values, strict=True))  # fmt: skip
        return cls(tuple(rows), settings)

    def __post_init__(self) -> None:
        # the only way to set what a frozen record holds
        object.__setattr__(self, "rows", tuple(map(_as_row, self.rows)))
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Profiles cross process boundaries; a read-only mapping can't by itself."""
        return Profile, (self.rows, dict(self.settings))  # MappingProxyType cannot be pickled

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __add__(self, other: Profile) -> Profile:
        if not isinstance(other, Profile):
            return NotImplemented
        return Profile(self.rows + other.rows, {**self.settings, **other.settings})

    @property
    def measures(self) -> tuple[str, ...]:
        """The measures present, in order of appearance."""
        return tuple(dict.fromkeys(row.measure for row in self.rows))

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources present, in order of appearance."""
        return tuple(dict.fromkeys(row.source for row in self.rows))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers present, ascending."""
        return tuple(sorted({row.layer for row in self.rows}))

    def where(self, keep: Callable[[Row], bool]) -> Profile:
        """The rows for which `keep` is true, with the same settings."""
        return Profile(tuple(row for row in self.rows if keep(row)), self.settings)

    def select(
        self,
        measure: str | Iterable[str] | None = None,
        *,
        source: str | None = None,
        layer: int | None = None,
        name: str | None = None,
    ) -> Profile:
        """The rows that match everything given."""
        wanted = {measure} if isinstance(measure, str) else None if measure is None else set(measure)
        return self.where(
            lambda row: (
                (wanted is None or row.measure in wanted)
                and (source is None or row.source == source)
                and (layer is None or row.layer == layer)
                and (name is None or row.name == name)
            )
        )

    def series(self, measure: str, *, source: str | None = None) -> Series:
        """One measure over depth as arrays, in row order; `source` is needed where several have it."""
        rows = self._rows_of(measure, source)
        errors = [math.nan if row.stderr is None else row.stderr for row in rows]
        values = np.array([row.value for row in rows], dtype=np.float64)
        return Series(np.array([row.layer for row in rows], dtype=np.int64), values, np.array(errors, dtype=np.float64))

    def value(self, measure: str, *, layer: int | None = None, source: str | None = None) -> Estimate:
        """The value of a measure at a layer (negative counts from the last), or its last row when none is given.

        `source` is needed where several have the measure: a prediction must not pass for a measurement.
        """
        rows = self._rows_of(measure, source)
        layers = sorted({row.layer for row in rows})
        if not rows:
            origin = "" if source is None else f" from {source!r}"
            known = ", ".join(self.measures)
            raise UsageError(f"profile has no {measure!r}{origin}", hint=f"one of {known}" if known else None)
        if layer is not None:
            # negative: counted from the last layer that has the measure
            at = layers[layer] if -len(layers) <= layer < 0 else layer
            rows = tuple(row for row in rows if row.layer == at)
        if not rows:
            told = f"profile has no {measure!r} at layer {layer}"
            raise UsageError(told, hint=f"a layer from {layers[0]} to {layers[-1]}")
        return Estimate(rows[-1].value, rows[-1].stderr)

    def _rows_of(self, measure: str, source: str | None) -> tuple[Row, ...]:
        chosen = self.select(measure, source=source)
        if len(chosen.sources) > 1:
            told = f"expected a source, got none for {measure!r}, which is from {', '.join(chosen.sources)}"
            raise UsageError(told, hint=f"source={chosen.sources[0]!r}")
        return chosen.rows

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, columns by name; non-finite values become the strings "nan", "inf", "-inf"."""
        return {
            "schema": SCHEMA,
            "settings": to_plain(self.settings, other=_refuse),
            "columns": list(Row._fields),
            "rows": [to_plain(tuple(row)) for row in self.rows],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """The inverse of `to_dict`."""
        schema = data.get("schema") if isinstance(data, Mapping) else None
        if schema != SCHEMA:
            raise UsageError(f"expected a profile with schema {SCHEMA!r}, got {schema!r}")
        if list(data.get("columns", [])) != list(Row._fields):
            raise UsageError(f"expected the columns {list(Row._fields)}, got {data.get('columns')!r}")
        try:
            return cls(tuple(Row(*row) for row in data["rows"]), data.get("settings", {}))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"expected rows of {len(Row._fields)} entries, got one that is none ({error})") from error

    def to_pandas(self) -> pandas.DataFrame:
        """The table as a pandas DataFrame (needs the extra `pandas`); a missing standard error is NaN."""
        frames = import_extra("pandas", extra="pandas", needed_for="Profile.to_pandas")
        frame = frames.DataFrame([row._asdict() for row in self.rows], columns=list(Row._fields))
        return frame.astype({"layer": "int64", "value": "float64", "stderr": "float64"})

    def __str__(self) -> str:
        if not self.rows:
            return "Profile(empty)"
        layers = self.layers
        lines = [f"Profile({len(self.rows)} rows, layers {layers[0]}–{layers[-1]}, from {', '.join(self.sources)})"]
        for source in self.sources:
            for measure in self.select(source=source).measures:
                rows = self.select(measure, source=source).rows
                first, last = (str(Estimate(row.value, row.stderr)) for row in (rows[0], rows[-1]))
                lines.append(f"  {measure:<24}{first:>16} → {last:<16} {source}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """A notebook view: a row per layer and name, a column per measure and source; a long one folded."""
        columns = list(dict.fromkeys((row.measure, row.source) for row in self.rows))
        cells: dict[tuple[int, str], dict[tuple[str, str], str]] = {}
        for row in self.rows:
            place = cells.setdefault((row.layer, row.name), {})
            place[(row.measure, row.source)] = str(Estimate(row.value, row.stderr))
        many = len(self.sources) > 1
        head = "".join(f"<th>{html.escape(m)}{f' ({html.escape(s)})' if many else ''}</th>" for m, s in columns)
        body = []
        for (layer, name), found in cells.items():
            values = "".join(f"<td>{html.escape(found.get(column, ''))}</td>" for column in columns)
            body.append(f"<tr><td>{layer}</td><td>{html.escape(name)}</td>{values}</tr>")
        if len(body) > 40:  # a notebook shows the whole of it at once
            body[20:-20] = [f"<tr><td colspan={len(columns) + 2}>… {len(body) - 40} more layers …</td></tr>"]
        return f"<table><thead><tr><th>layer</th><th>name</th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _as_row(row: Iterable[Any]) -> Row:
    """Plain Python numbers, and one NaN for all, so that a profile with NaN equals its copy."""
    layer, name, measure, value, stderr, source = row
    if type(row) is Row and type(layer) is int and type(value) is float and value == value and stderr is None:
        return row  # most rows are plain already, and every selection of a long profile comes by here
    return Row(int(layer), name, measure, _as_float(value), None if stderr is None else _as_float(stderr), source)


def _as_float(value: Any) -> float:
    number = float(value)
    return math.nan if math.isnan(number) else number


def _refuse(value: Any) -> Any:
    raise UsageError(f"expected JSON types in a profile, got {type(value).__name__}", hint="str(value)")
