"""A theory's result in the terminal: its sentence, then its numbers in a table."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from sounding.cli.output import console, new_table
from sounding.encoding import to_plain
from sounding.look import TERMINAL_NOTE

if TYPE_CHECKING:
    from sounding.theory.bounds import Bound

LONG = 12  # characters of a number, entries of a list and layers of a trajectory that a table shows
WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def print_result(result: Any) -> None:
    """The first line of the result's own words, then every number under its JSON name."""
    head, *_ = str(result).splitlines()  # the lines below say the same numbers as the table
    console().print(Text(head, style="bold"))
    _print_numbers(result.to_dict())


def _print_numbers(data: dict[str, Any]) -> None:
    """Every number under its JSON name with what it means, then what is too long to stand beside a meaning."""
    rows = [(name, write(value)) for name, value in flatten(to_plain(data))]
    meanings = WORDS["meanings"] | (WORDS["blocks"] if "stream growth" in dict(rows) else {})
    short = [(name, value, Text(meanings.get(name, ""), style="dim")) for name, value in rows if len(value) <= LONG]
    for part in (short, [row for row in rows if len(row[1]) > LONG]):
        if part:
            console().print(_plain_table(part))


def flatten(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested numbers as lines: "fixed point · variance"; long lists and profiles are cut or left out.

    >>> list(flatten({"fixed_point": {"variance": 0.5}, "profile": {}, "case": 1}))
    [('fixed point · variance', 0.5), ('case', 1)]
    """
    for key, value in data.items():
        name = prefix + key.replace("_", " ")
        if key in ("profile", "settings", "rows") or value == "":
            continue
        if isinstance(value, dict):
            yield from flatten(value, f"{name} · ")
        else:
            yield name, value


def write(value: Any) -> str:
    """A value for people: six digits, yes and no, lists cut at twelve.

    >>> [write(v) for v in (1.23456789, True, None, [1.0, 2.0], "inf")]
    ['1.23457', 'yes', '–', '1, 2', '∞']
    """
    if value is None or value == "nan":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    if isinstance(value, list):
        shown = ", ".join(write(item) for item in value[:LONG])
        return shown + (f", … ({len(value)} in all)" if len(value) > LONG else "")
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {write(item)}" for key, item in value.items())
    return {"inf": "∞", "-inf": "-∞"}.get(str(value), str(value))


def print_gram(result: Any, data: dict[str, Any]) -> None:
    """A Gram prediction: its sentence, scalars, and the trajectory over depth in a few rows; matrices go to JSON."""
    screen = console()
    for line in str(result).splitlines():
        screen.print(Text(line, style="bold" if not line.startswith(" ") else ""))
    profile = result.profile()
    trajectory = new_table(">layer", *(f">{measure.replace('_', ' ')}" for measure in profile.measures))
    layers = profile.layers
    # evenly over the depth, both ends among them
    for layer in sorted({layers[round(i * (len(layers) - 1) / (LONG - 1))] for i in range(LONG)}):
        values = (write(profile.value(measure, layer=layer).value) for measure in profile.measures)
        trajectory.add_row(str(layer), *values)
    screen.print(trajectory)
    _print_numbers({name: value for name, value in data.items() if name not in ("fixed_point", "gram", "distances")})


def print_bound(bound: Bound) -> None:
    """One theorem: the inequality, its numbers, each assumption with its mark."""
    sign = {"upper": "≤", "lower": "≥", "equal": "="}[bound.sense]
    # None: an assumption is open that numbers cannot decide
    applies = {True: "yes", False: "no", None: "if you can vouch for the open assumptions"}[bound.holds_for_input]
    rows = [("source", f"{bound.source} ({bound.version})"), ("statement", bound.statement)]
    if bound.erratum:
        rows.append(("erratum", bound.erratum))
    if bound.actual is not None:
        rows.append(("actual", f"{bound.actual:.6g}, {'within' if bound.respected else 'outside'} the bound"))
    rows += [(name.replace("_", " "), write(value)) for name, value in bound.values.items()]
    rows.append(("applies", applies))
    for one in bound.assumptions:
        mark = {True: "✓", False: "✗", None: "?"}[one.holds]
        rows.append((f"  {mark}", one.text + (f" ({one.detail})" if one.detail else "")))
    screen = console()
    screen.print(Text(f"{bound.quantity} {sign} {bound.value:.6g}", style="bold"))
    screen.print(_plain_table(rows))


def print_bound_list() -> None:
    """Every theorem with its parameters and the first line of what it says."""
    from sounding.theory.bounds import THEOREMS, parameters

    table = Table("theorem", "parameters", box=None, pad_edge=False, header_style="bold")
    for name, theorem in THEOREMS.items():
        said = (theorem.__doc__ or "").strip().splitlines()[0]
        known = parameters(name)
        words = [key if p.default is p.empty else f"[{key}]" for key, p in known.items()]
        table.add_row(Text(name, style=TERMINAL_NOTE, no_wrap=True), Text(", ".join(words)))
        table.add_row("", Text(said, style="dim"))
    console().print(table)


def _plain_table(rows: Iterable[tuple[str | Text, ...]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
