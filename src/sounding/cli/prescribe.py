"""`sounding prescribe`: which change makes a depth trainable, of batch norm, residual and transformer networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sounding.cli.output import console, print_json, working
from sounding.cli.predict_blocks import attended, blocks, named_gains
from sounding.cli.presentation import activated, as_json, batched, draw, presented, whole
from sounding.look import TERMINAL_BAD

if TYPE_CHECKING:
    from rich.table import Table

    from sounding.theory.prescribe import Prescription

margin = click.option(
    "--margin", type=float, default=3.0, help="Theory must allow this many times the depth; 1 leaves no reserve."
)
HOW_LARGE = "root mean square change of what enters the activation, in its standard deviations; the smallest is first"


class DefaultGroup(click.Group):
    """A group whose first command is meant where none is named: `sounding prescribe -a relu …`."""

    default = "batchnorm"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default command in front of options."""
        named = not args or args[0] in self.commands or args[0] in ("-h", "--help")
        return super().parse_args(ctx, args if named else [self.default, *args])


@click.group(cls=DefaultGroup)
def prescribe() -> None:
    """Say what must change for a network to train at a wanted depth.

    Where no command is named, batchnorm is meant.
    """


@prescribe.command(short_help="Batch norm: eps, shift, scale, gains, weights.")
@activated
@batched
@click.option("--depth", "-d", type=int, required=True, metavar="L", help="Number of layers that should train.")
@margin
@click.option(
    "--weight-std", "-w", type=float, default=1.0, metavar="W",
    help="Weights have variance W²/fan-in; nn.Linear starts with 0.577."
)  # fmt: skip
@presented
def batchnorm(activation: str, batch_size: float, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Which eps, shift, scale, gains or weights make a batch norm network trainable by theory to depth L."""
    from sounding.theory.prescribe import prescribe as solve

    with working("searching the smallest change", quiet=as_json):
        result = solve(activation, batch_size=whole(batch_size), **options)
    if as_json:
        print_json(result)
    else:
        print_prescription(result)
    draw(plot, lambda pictures: pictures.prescription(result))


@prescribe.command(short_help="Residual blocks: branch scale, initialization, norms.")
@activated
@blocks(init="he", expansion=1.0, correlation=0.5)
@margin
@as_json
def residual(given: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Which branch scale, initialization or placement of the norm takes residual blocks to depth L."""
    from sounding.theory.prescribe_blocks import prescribe_residual

    _show(prescribe_residual, given, options, as_json=as_json)


@prescribe.command(short_help="Transformer blocks: branch scale, initialization, norms, scores.")
@activated
@blocks(init="xavier", expansion=4.0, correlation=0.0)
@attended
@margin
@as_json
def transformer(given: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Which branch scale, initialization, placement of the norm or scale of scores takes a transformer to depth L."""
    from sounding.theory.prescribe_blocks import prescribe_transformer

    _show(prescribe_transformer, given, options, as_json=as_json)


def _show(solve: Callable[..., Any], given: tuple[str, ...], options: dict[str, Any], *, as_json: bool) -> None:
    with working("searching the smallest change", quiet=as_json):
        result = solve(options.pop("activation"), gain=named_gains(given), **options)
    if as_json:
        print_json(result)
    else:
        click.echo(str(result))


def print_prescription(result: Prescription) -> None:
    """What the network does now, the options as a table with their basis, what cannot help and why."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    screen = console()
    screen.print(Text(str(result).splitlines()[0], style="bold"))
    screen.print(Text(result.assumption, style="dim"))
    screen.print()
    if not result.options:
        screen.print(Text("Nothing searched reaches this depth.", style=f"bold {TERMINAL_BAD}"))
    else:
        bases = list(dict.fromkeys(option.rests_on for option in result.options))
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
        table.add_column("change")
        for heading in ("growth", "trainable depth", "how large", "basis"):
            table.add_column(heading, justify="right", no_wrap=True)
        for option in result.options:
            deep = "any" if math.isinf(option.trainable_depth) else f"{option.trainable_depth:.0f}"
            basis = Text(f"[{bases.index(option.rests_on) + 1}]")
            table.add_row(Text(option.change), f"×{option.growth:.5g}", deep, f"{option.size:.2f}", basis)
        screen.print(table)
        notes = [(f"[{i}]", basis) for i, basis in enumerate(bases, start=1)]
        screen.print(_notes([*notes, ("how large", HOW_LARGE)]))
    reasons: dict[str, list[str]] = {}
    for failure in result.unreachable:
        reasons.setdefault(failure.why, []).append(failure.kind)
    if reasons:
        screen.print()
        screen.print(_notes([(f"not by {', '.join(kinds)}", why) for why, kinds in reasons.items()]))


def _notes(pairs: list[tuple[str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    notes = Table.grid(padding=(0, 2))
    notes.add_column(max_width=32)
    notes.add_column(style="dim")
    for head, body in pairs:
        notes.add_row(Text(head), Text(body))
    return notes
