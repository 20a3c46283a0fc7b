"""Where the verdict draws its lines: the numbers of its table of rules, `rules.md`, which docs/verdict.md shows.

Every row of the table has the name of a line, its number, the kind and severity of the finding it decides ("–" for a
line that others build on), when it holds (x is the number), and where the number comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Thresholds:
    """The lines between healthy and not; what each means stands in the table of rules (docs/verdict.md)."""

    outside: float
    of_input: float
    bypassed: float
    collapsed_layers: int
    identical: float
    pooled: float
    lost: float
    narrow: int
    depth_scales: float
    near: float
    broken: float
    aligned: float
    aligned_alone: float
    dead: float
    saturated: float
    flat: float
    paths: float
    parallel: float
    normal_batch: int
    growing_batch: int
    condensed: float
    condensed_warning: float
    condensed_fatal: float
    alike: float
    alike_warning: float
    massive: float
    massive_fatal: float
    odd: float
    shut: float
    shut_fatal: float
    favoured: float
    odd_scale: float
    far_scale: float
    tame_norm: float
    drowned: float
    costly_loss: float
    fatal_loss: float
    huge_input: float
    huge_output: float
    beyond: float
    deviations: float = 1.959964  # standard errors by which an estimate must clear its line: 95%


def read_lines() -> dict[str, Any]:
    """Name → number of every row of the table, an int where the field above is one."""
    rows = resources.files("sounding.probe").joinpath("rules.md").read_text("utf-8").splitlines()[2:]
    cells = ([cell.strip() for cell in row.split("|")[1:3]] for row in rows if row)
    counts = {field.name for field in fields(Thresholds) if field.type == "int"}
    return {name: int(number) if name in counts else float(number) for name, number in cells}


THRESHOLDS = Thresholds(**read_lines())
