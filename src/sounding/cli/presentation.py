"""What the commands of theory share: `--activation`, `--json`, `--plot FILE`, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sounding.cli.output import print_json, require_writable, with_options
from sounding.cli.result import print_result
from sounding.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = (".svg", ".png", ".pdf")


def _check_picture(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        if path.suffix.lower() not in PICTURES:
            raise UsageError(f"expected a picture named .svg, .png or .pdf, got {str(path)!r}", hint=f"{path.stem}.svg")
        require_writable(path)
    return path


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
presented = with_options(
    click.option("--plot", type=click.Path(path_type=Path), callback=_check_picture, metavar="FILE",
                 help="Also draw a picture: .svg, .png or .pdf."),
    as_json,
)  # fmt: skip
activated = click.option("--activation", "-a", required=True, metavar="A",
                         help="Activation function: relu, tanh, leaky_relu:0.1, …, or module:function.")  # fmt: skip
batched = click.option(
    "--batch-size", "-b", type=float, required=True, metavar="B", help="Samples per batch, at least 4; or inf."
)


def draw(path: Path | None, make: Callable[[Any], Axes]) -> None:
    """Make the picture with the module `sounding.cli.pictures` and write it, if one was asked for.

    A command prints its result first: a disk that is full must not cost it.
    """
    if path is None:
        return
    from sounding.cli import pictures
    from sounding.plot import save

    save(make(pictures).figure, path)


def present(result: Any, *, as_json: bool) -> None:
    """A result as JSON or as a table."""
    if as_json:
        print_json(result.to_dict())
    else:
        print_result(result)


def whole(number: float) -> float:
    """64.0 as 64; everything else as it is, for the theory to judge."""
    return int(number) if float(number).is_integer() else number
