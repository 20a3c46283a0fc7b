"""`sounding prescribe`: which change makes a depth trainable, of batch norm, residual and transformer networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import sounding
from sounding.cli.options import activated, as_json, batched, presented
from sounding.cli.output import console, draw, new_table, print_json, working
from sounding.cli.predict import attended, blocks
from sounding.look import TERMINAL_BAD

if TYPE_CHECKING:
    from rich.table import Table

margin = click.option("--margin", type=float, default=3.0,
                      help="Theory must allow this many times the depth. 1 leaves no reserve.")  # fmt: skip
HOW_LARGE = "root mean square change of what enters the activation, in its standard deviations; the smallest is first"


class DefaultGroup(click.Group):
    """A group whose first command is meant where none is named: `sounding prescribe -a relu …`."""

    default = "batchnorm"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default command in front of options."""
        # the help of the group lists its commands, so --help alone is meant for it
        named = not args or not args[0].startswith("-") or args[0] in ("-h", "--help")
        return super().parse_args(ctx, args if named else [self.default, *args])


@click.group(cls=DefaultGroup)
def prescribe() -> None:
    """Say what must change for a network to train at a wanted depth.

    Theory says to which depth a random network trains. Where that is not deep enough, each answer is a change that
    makes it so, the smallest first. Where no command is named, batchnorm is meant.
    """


@prescribe.command(short_help="Batch norm: eps, shift, scale, gains, weights.")
@activated
@batched
@click.option("--depth", "-d", type=int, required=True, metavar="L", help="Number of layers that should train.")
@margin
@click.option("--weight-std", "-w", type=float, default=1.0, metavar="W",
              help="Weights have variance W²/fan-in. nn.Linear starts with 0.577.")  # fmt: skip
@presented
def batchnorm(activation: str, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Say which eps, shift, scale, gains or weights make a batch norm network trainable to depth L, by theory.

    Shift and scale are the β and γ of the norm. Gains are factors in front of the activations that fall from layer to
    layer.
    """
    result = _show(lambda: sounding.prescribe(activation, **options), print_prescription, as_json)
    draw(plot, lambda pictures: pictures.prescription(result))


@prescribe.command(short_help="Residual blocks: branch scale, initialization, norms.")
@activated
@blocks(init="he", expansion=1.0, correlation=0.5)
@margin
@as_json
def residual(activation: str, as_json: bool, **options: Any) -> None:
    """Say which branch scale, initialization or placement of the norm makes residual blocks trainable to depth L."""
    _show(lambda: sounding.predict.prescribe_residual(activation, **options), click.echo, as_json)


@prescribe.command(short_help="Transformer blocks: branch scale, initialization, norms, scores.")
@activated
@blocks(init="xavier", expansion=4.0, correlation=0.0)
@attended
@margin
@as_json
def transformer(activation: str, as_json: bool, **options: Any) -> None:
    """Say which change makes a transformer trainable to depth L.

    Changes are the branch scale, the initialization, the placement of the norm and the scale of the attention scores.
    """
    _show(lambda: sounding.predict.prescribe_transformer(activation, **options), click.echo, as_json)


def _show(solve: Callable[[], Any], show: Callable[[Any], None], as_json: bool) -> Any:
    with working("searching the smallest change", quiet=as_json):
        result = solve()
    (print_json if as_json else show)(result)
    return result


def print_prescription(result: sounding.predict.Prescription) -> None:
    """What the network does now, the options as a table with their basis, what cannot help and why."""
    from rich.text import Text

    screen = console()
    screen.print(Text(str(result).splitlines()[0], style="bold"))
    screen.print(Text(result.assumption, style="dim"))
    screen.print()
    if result.options:
        bases = list(dict.fromkeys(option.rests_on for option in result.options))
        table = new_table("change", ">growth", ">trainable depth", ">how large", ">basis")
        # a change in words may be longer than the screen is wide
        table.columns[0].no_wrap = False
        for option in result.options:
            deep = "any" if math.isinf(option.trainable_depth) else f"{option.trainable_depth:.0f}"
            basis = Text(f"[{bases.index(option.rests_on) + 1}]")
            table.add_row(Text(option.change), f"×{option.growth:.5g}", deep, f"{option.size:.2f}", basis)
        screen.print(table)
        # changes that rest on the same result of theory share its note
        notes = [(f"[{i}]", basis) for i, basis in enumerate(bases, start=1)]
        screen.print(_notes([*notes, ("how large", HOW_LARGE)]))
    else:
        screen.print(Text("Nothing searched reaches this depth.", style=f"bold {TERMINAL_BAD}"))
    if result.unreachable:
        reasons = dict.fromkeys(failure.why for failure in result.unreachable)  # what fails alike is told once
        kinds = {why: ", ".join(one.kind for one in result.unreachable if one.why == why) for why in reasons}
        screen.print()
        screen.print(_notes([(f"not by {kinds[why]}", why) for why in reasons]))


def _notes(pairs: list[tuple[str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    notes = Table.grid(padding=(0, 2))
    notes.add_column(max_width=32)
    notes.add_column(style="dim")
    for head, body in pairs:
        notes.add_row(Text(head), Text(body))
    return notes
