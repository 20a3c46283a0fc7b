"""The table of a sweep: its options and what came out, a row for every combination, in the order of the grid."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sounding.files import place
from sounding.lazy import import_extra
from sounding.sweeping.spec import Spec
from sounding.sweeping.store import Store

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Table:
    """Rows of a sweep, options first; `missing` tasks have no result, because they failed or were not done yet."""

    rows: tuple[Mapping[str, Any], ...]
    missing: int = 0
    failures: tuple[tuple[Mapping[str, Any], str], ...] = ()

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in the order in which rows bring them."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def to_csv(self, path: str | Path | None = None) -> str:
        """The table as CSV, numbers with all their digits; also written to `path`, whole or not at all."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in self.rows)
        if path is not None:
            place(Path(path), text.getvalue().encode())
        return text.getvalue()

    def to_parquet(self, path: str | Path) -> None:
        """Write the table as a Parquet file; a column of numbers and texts becomes texts."""
        wanted = {"extra": "parquet", "needed_for": "a Parquet file"}
        arrow, parquet = (import_extra(module, **wanted) for module in ("pyarrow", "pyarrow.parquet"))
        sink = io.BytesIO()
        columns = {name: _column([row.get(name) for row in self.rows]) for name in self.columns}
        parquet.write_table(arrow.table(columns), sink)
        place(Path(path), sink.getvalue())

    def to_pandas(self) -> pandas.DataFrame:
        """The table as a data frame."""
        frames = import_extra("pandas", extra="pandas", needed_for="Table.to_pandas")
        frame: pandas.DataFrame = frames.DataFrame([dict(row) for row in self.rows], columns=self.columns)
        return frame


def read_table(store: Store, spec: Spec) -> Table:
    """All results of a sweep that are in its directory."""
    missing = 0
    rows: list[Mapping[str, Any]] = []
    for call in spec.calls():
        found = store.read(call)
        missing += found is None
        if found:
            pairs = zip(spec.rows_of(call), found, strict=True)
            # what was asked for stands first, and a result that repeats it does not replace it
            rows += [{**asked, **row, **asked} for asked, row in pairs]
    return Table(tuple(rows), missing, store.status().failures if missing else ())


def _cell(value: Any) -> Any:
    # true and false, as JSON and most programs write them
    return "" if value is None else str(value).lower() if isinstance(value, bool) else value


def _column(values: Sequence[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}  # a column of Parquet has one type
    if kinds <= {int, float}:
        return [None if value is None else float(value) for value in values] if float in kinds else list(values)
    return list(values) if len(kinds) == 1 else [None if value is None else str(value) for value in values]
