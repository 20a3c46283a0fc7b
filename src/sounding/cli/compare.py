"""`sounding compare`: two networks side by side, and the first layer where they part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

import sounding
from sounding.cli.options import file_option, json_beside, network_argument, quiet_option
from sounding.cli.output import console, despite_a_closed_pipe, new_table, print_json, working
from sounding.cli.subject import Wanted, in_mode, on_network, opened
from sounding.errors import ExitCode
from sounding.look import TERMINAL_BAD, TERMINAL_WARN, write_log_norm, write_number

if TYPE_CHECKING:
    from rich.table import Table

    from sounding.probe.compare import Comparison

ROWS = 24  # lines of the table
NEAR = 3  # lines in front of and behind the first that parts


@click.command()
@network_argument("a")
@network_argument("b")
@on_network()
@in_mode
@click.option("--tolerance", type=click.FloatRange(min=0),
              help="Relative difference that still counts as rounding [default: 3.5e-4 for float32].")  # fmt: skip
@file_option("--html", "Write an interactive report as one HTML file.")
@json_beside
@quiet_option("Print only the answer.")
@click.pass_context
def compare(
    ctx: click.Context, a: str, b: str, wanted: Wanted, mode: str, tolerance: float | None, html: Path | None,
    as_json: bool, quiet: bool
) -> None:  # fmt: skip
    """Compare two networks layer by layer on one batch, and say where their outputs begin to differ.

    Use it before and after a port, a refactoring or a training. A and B are written as TARGET of `sounding check` is,
    and both are made from the same seed. Layers of the same name are compared with each other. Layers without such a
    partner are matched in their order, if their outputs have the same shape and their parameters the same size.

    \b
    Exit codes: 0 equal, to the bit or to rounding; 1 the outputs of a layer differ;
    2 wrong usage or a network that fails; 4 not known (no layer of the one belongs to a layer of
    the other).
    """
    makes = (lambda: wanted.load(a), lambda: wanted.load(b))
    with working(f"comparing {a} and {b}", quiet=quiet) as tell, opened(wanted, *makes, tell=tell) as at:
        result = sounding.compare(
            at.models[0],
            at.models[1],
            at.chosen.batch.given,
            at.chosen.batch.targets,
            mode=mode,  # type: ignore[arg-type]  # the option has these choices
            tolerance=tolerance,
            **at.options,
        )
    result = replace(result, a=result.a.for_target(a), b=result.b.for_target(b))
    prose = console(stderr=as_json, quiet=quiet and as_json)
    with despite_a_closed_pipe():
        if as_json:
            print_json({"targets": [a, b], **result.to_dict()})
        prose.print(result.summary, markup=False, soft_wrap=True, style="bold")
        if not quiet:
            prose.print()
            prose.print(make_table(result))
    if html is not None:
        from sounding.report.compare import write_compare_html

        write_compare_html(result, html, names=(a, b))
    code = {"parted": ExitCode.UNHEALTHY, "not known": ExitCode.NOT_KNOWN}.get(result.status, ExitCode.HEALTHY)
    ctx.exit(code)


def make_table(result: Comparison) -> Table:
    """Pairs downwards, the difference, and both measures; of many pairs those around the parting and some before."""
    from rich.text import Text

    from sounding.cli.table import shorten

    pairs = result.pairs
    # where no pair parts, the rows are spread over the depth alone
    first = next((index for index, pair in enumerate(pairs) if pair.parted), len(pairs))
    spread = {round(index * (len(pairs) - 1) / ROWS) for index in range(ROWS + 1)}  # evenly over the depth
    columns = (("mean_square", write_number), ("participation_ratio", write_number),
               ("gradient_log_norm", write_log_norm))  # fmt: skip
    table = new_table("output", ">difference", ">size", ">directions", ">gradient")
    for index, pair in enumerate(pairs):
        # behind the parting every pair differs, and says no more
        far = index > first and index < len(pairs) - 1
        if abs(index - first) > NEAR and (far or index not in spread):
            continue
        name = shorten(pair.a if pair.a == pair.b else f"{pair.a} = {pair.b}", 44)
        # equal numbers are written once, and a measure that one of the two lacks is left out
        cells = [" → ".join(dict.fromkeys(map(write, pair.measures.get(measure, ())))) for measure, write in columns]
        style = TERMINAL_BAD if index == first else TERMINAL_WARN if pair.parted else ""
        table.add_row(Text(name), Text(write_number(pair.difference), style=style), *cells)
    return table
