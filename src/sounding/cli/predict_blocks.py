"""`sounding predict residual` and `sounding predict transformer`: blocks with skip connections in closed form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sounding.cli.presentation import activated, draw, present, presented
from sounding.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])

# the same words as in `sounding.theory.blocks`, which would load numpy for `--help`
PLACEMENTS = ("pre", "post", "branch", "deepnorm", "none")
INITS = ("lecun", "he", "xavier", "torch", "gpt2")


def blocks(*, init: str, expansion: float, correlation: float) -> Callable[[Command], Command]:
    """The options that residual networks and transformers share, with their own defaults."""
    options = [
        click.option("--depth", "-d", type=int, required=True, metavar="L", help="Blocks."),
        click.option(
            "--placement",
            type=click.Choice(PLACEMENTS),
            default="pre",
            show_default=True,
            help="Where the norm stands: x + f(norm x), norm(x + f(x)), x + norm(f(x)) as OLMo 2, DeepNorm, nowhere.",
        ),
        click.option(
            "--branch-scale", type=float, default=1.0, show_default=True, help="c of x + c·f(x): LayerScale, ReZero."
        ),
        click.option("--init", type=click.Choice(INITS), default=init, show_default=True, help="Law of the weights."),
        click.option(
            "--gain", "given", multiple=True, metavar="NAME=G", help="Fan-in × variance of one matrix: --gain down=0.1."
        ),
        click.option("--width", type=click.IntRange(min=1), metavar="D", help="Features of the stream; gpt2 needs it."),
        click.option(
            "--expansion", type=float, default=expansion, show_default=True, help="Hidden features over the stream's."
        ),
        click.option("--mean-square", type=float, help="Of the input [default: 1; for gpt2 that of its embeddings]."),
        click.option(
            "--correlation", "-c", type=float, default=correlation, show_default=True, help="Of two inputs or tokens."
        ),
    ]

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def attended(command: Command) -> Command:
    """The options of attention."""
    options = [
        click.option("--tokens", "-n", type=int, required=True, metavar="N", help="Tokens that all see each other."),
        click.option("--head-size", type=int, default=64, show_default=True, help="Features of one head."),
        click.option("--score-scale", type=float, metavar="S", help="Of the scores [default: head size^(-1/2)]."),
        click.option("--query-norm", is_flag=True, help="Queries and keys of each head are normed (QK-norm)."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command(short_help="Residual blocks: growth of stream and gradients.")
@activated
@blocks(init="he", expansion=1.0, correlation=0.5)
@presented
def residual(given: tuple[str, ...], as_json: bool, plot: Path | None, **options: Any) -> None:
    """Residual perceptron blocks: growth of the stream and of gradients with depth, correlation, trainable depth."""
    from sounding import predict as theory

    _show(theory.residual(options.pop("activation"), gain=named_gains(given), **options), as_json=as_json, plot=plot)


@click.command(short_help="Transformer blocks: stream, tokens, scores, gradients.")
@activated
@blocks(init="xavier", expansion=4.0, correlation=0.0)
@attended
@presented
def transformer(given: tuple[str, ...], as_json: bool, plot: Path | None, **options: Any) -> None:
    """Transformer blocks: growth of stream and gradients, token correlation, scores and entropy collapse."""
    from sounding import predict as theory

    _show(theory.transformer(options.pop("activation"), gain=named_gains(given), **options), as_json=as_json, plot=plot)


def named_gains(given: tuple[str, ...]) -> dict[str, float]:
    """Gains as `--gain NAME=G` gives them."""
    found = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            raise UsageError(f"expected a gain like down=0.1, got {text!r}") from None
    return found


def _show(result: Any, *, as_json: bool, plot: Path | None) -> None:
    title = str(result).split(":", 1)[0]
    present(result, as_json=as_json)
    draw(plot, lambda pictures: pictures.profile(result.profile(), "gradient_log_norm", title=title))
