"""Options that several commands have, each said in the same words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from sounding.cli.output import require_writable


def integer(value: Any) -> int:
    """A whole number that a generator of torch takes; its range of 64 bits is told when it is left, not in the help."""
    return click.IntRange(-(2**63), 2**63 - 1)(value)  # type: ignore[no-any-return]


SEED = integer
FILE = click.Path(path_type=Path)
Command = TypeVar("Command", bound=Callable[..., Any])


def with_options(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """A decorator that gives a command several options, in the order in which its help shows them."""

    def decorate(command: Command) -> Command:
        # the decorator that is applied last gives the option that the help shows first
        return functools.reduce(lambda made, option: option(made), reversed(options), command)

    return decorate


def network_argument(name: str, *, required: bool = True) -> Callable[[Command], Command]:
    """An argument that names a network; a shell completes it with files, where most networks are."""

    def complete(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        return [CompletionItem(begun, type="file")]

    return click.argument(name, required=required, shell_complete=complete)


def _check_written(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        require_writable(path)
    return path


def file_option(name: str, help: str) -> Callable[[Command], Command]:
    """An option that takes the name of a file to write; that it cannot be written is told before the work."""
    return click.option(name, type=FILE, callback=_check_written, metavar="FILE", help=help)


def quiet_option(help: str = "Show no progress.") -> Callable[[Command], Command]:
    """The option --quiet, with what it leaves out."""
    return click.option("--quiet", "-q", is_flag=True, help=help)


def _json(told: str) -> Callable[[Command], Command]:
    return click.option("--json", "as_json", is_flag=True, help=f"Print one JSON object {told}")


json_option = _json("on stdout and no other text.")
json_beside = _json("on stdout; the text goes to stderr.")  # where the text is worth reading beside the JSON
as_json = _json("instead of a table.")


def _check_picture(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        from sounding.plot import require_picture

        require_picture(path)  # an ending that cannot be drawn
    return _check_written(context, parameter, path)


def picture_option(help: str) -> Callable[[Command], Command]:
    """The option --plot, which takes the name of a picture to write."""
    return click.option("--plot", type=FILE, callback=_check_picture, metavar="FILE", help=help)


presented = with_options(picture_option("Also draw a picture: .svg, .png or .pdf."), as_json)
activated = click.option("--activation", "-a", required=True, metavar="A",
                         help="Activation function: relu, tanh, leaky_relu:0.1, …, or module:function.")  # fmt: skip
# 64.0 is told as 64; everything else is for the theory to judge
batched = click.option("--batch-size", "-b", type=float, required=True, metavar="B",
                       callback=lambda context, parameter, size: int(size) if size.is_integer() else size,
                       help="Samples per batch: at least 4, or inf.")  # fmt: skip
