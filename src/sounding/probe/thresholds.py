"""Where the verdict draws its lines: the numbers of its table of rules, `rules.md`, which docs/verdict.md shows.

Every row of the table has the name of a line, its number, the kind and severity of the finding it decides ("–" for a
line that others build on), when it holds (x is the number), and where the number comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources


def read_lines() -> dict[str, float]:
    """Name → number of every row of the table."""
    rows = resources.files("sounding.probe").joinpath("rules.md").read_text("utf-8").splitlines()[2:]
    cells = ([cell.strip() for cell in row.split("|")[1:3]] for row in rows if row)
    return {name: float(number) for name, number in cells}


LINES = read_lines()


@dataclass(frozen=True)
class Thresholds:
    """The lines between healthy and not; what each means stands in the table of rules (docs/verdict.md)."""

    outside: float = LINES["outside"]
    of_input: float = LINES["of_input"]
    bypassed: float = LINES["bypassed"]
    collapsed_layers: int = int(LINES["collapsed_layers"])
    identical: float = LINES["identical"]
    pooled: float = LINES["pooled"]
    lost: float = LINES["lost"]
    narrow: int = int(LINES["narrow"])
    depth_scales: float = LINES["depth_scales"]
    near: float = LINES["near"]
    broken: float = LINES["broken"]
    aligned: float = LINES["aligned"]
    aligned_alone: float = LINES["aligned_alone"]
    dead: float = LINES["dead"]
    saturated: float = LINES["saturated"]
    flat: float = LINES["flat"]
    paths: float = LINES["paths"]
    parallel: float = LINES["parallel"]
    normal_batch: int = int(LINES["normal_batch"])
    growing_batch: int = int(LINES["growing_batch"])
    condensed: float = LINES["condensed"]
    condensed_warning: float = LINES["condensed_warning"]
    condensed_fatal: float = LINES["condensed_fatal"]
    alike: float = LINES["alike"]
    alike_warning: float = LINES["alike_warning"]
    massive: float = LINES["massive"]
    massive_fatal: float = LINES["massive_fatal"]
    odd: float = LINES["odd"]
    shut: float = LINES["shut"]
    shut_fatal: float = LINES["shut_fatal"]
    favoured: float = LINES["favoured"]
    odd_scale: float = LINES["odd_scale"]
    far_scale: float = LINES["far_scale"]
    tame_norm: float = LINES["tame_norm"]
    drowned: float = LINES["drowned"]
    costly_loss: float = LINES["costly_loss"]
    fatal_loss: float = LINES["fatal_loss"]
    huge_input: float = LINES["huge_input"]
    huge_output: float = LINES["huge_output"]
    beyond: float = LINES["beyond"]
    deviations: float = 1.959964  # standard errors by which an estimate must clear its line: 95%


THRESHOLDS = Thresholds()
