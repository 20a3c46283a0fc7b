"""`sounding predict residual` and `sounding predict transformer`: blocks with skip connections in closed form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import sounding
from sounding.cli.options import activated, presented, with_options
from sounding.cli.output import present
from sounding.errors import UsageError

# the same words as in `sounding.theory.blocks`, which would load numpy for `--help`
PLACEMENTS = ("pre", "post", "branch", "deepnorm", "none")
INITS = ("lecun", "he", "xavier", "torch", "gpt2")


def _name_gains(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, float]:
    """Gains as `--gain NAME=G` gives them."""
    found = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            raise UsageError(f"expected a gain like down=0.1, got {text!r}") from None
    return found


def blocks(*, init: str, expansion: float, correlation: float) -> Callable[[Any], Any]:
    """The options that residual networks and transformers share, with their own defaults."""
    return with_options(
        click.option("--depth", "-d", type=int, required=True, metavar="L", help="Number of blocks."),
        click.option("--placement", type=click.Choice(PLACEMENTS), default="pre",
                     help="Where the norm stands, with x the input of a block and f its branch. pre: x + f(norm(x)). "
                     "post: norm(x + f(x)). branch: x + norm(f(x)), as in OLMo 2. deepnorm: post with a scaled skip "
                     "connection. none: x + f(x)."),
        click.option("--branch-scale", type=float, default=1.0,
                     help="Factor c in front of a branch, x + c·f(x), as in LayerScale and ReZero."),
        click.option("--init", type=click.Choice(INITS), default=init, help="Initialization of the weights."),
        click.option("--gain", multiple=True, metavar="NAME=G", callback=_name_gains,
                     help="Fan-in times variance of one weight matrix, for example down=0.1."),
        click.option("--width", type=click.IntRange(min=1), metavar="D",
                     help="Features between blocks. --init gpt2 needs it."),
        click.option("--expansion", type=float, default=expansion,
                     help="Hidden features of a block, as a multiple of the features between blocks."),
        click.option("--mean-square", type=float,
                     help="Mean square of the input [default: 1; with --init gpt2 that of its embeddings]."),
        click.option("--correlation", "-c", type=float, default=correlation,
                     help="Correlation of two inputs or tokens."),
    )  # fmt: skip


attended = with_options(
    click.option("--tokens", "-n", type=int, required=True, metavar="N",
                 help="Number of tokens, which all see each other."),
    click.option("--head-size", type=int, default=64, help="Features of one head."),
    click.option("--score-scale", type=float, metavar="S",
                 help="Factor of the attention scores [default: 1/√(head size)]."),
    click.option("--query-norm", is_flag=True, help="Normalize the queries and keys of each head (QK-norm)."),
)  # fmt: skip


@click.command(short_help="Residual blocks: growth of stream and gradients.")
@activated
@blocks(init="he", expansion=1.0, correlation=0.5)
@presented
def residual(activation: str, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Say how signal and gradients grow through residual blocks, and how deep such networks train.

    Each block is a perceptron with one hidden layer. The stream is what runs between the blocks, to which every block
    adds.
    """
    _show(sounding.predict.residual(activation, **options), as_json, plot)


@click.command(short_help="Transformer blocks: stream, tokens, scores, gradients.")
@activated
@blocks(init="xavier", expansion=4.0, correlation=0.0)
@attended
@presented
def transformer(activation: str, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Say how signal and gradients grow through transformer blocks.

    The answer also says whether tokens become alike, and whether attention looks at few tokens only. The stream is what
    runs between the blocks, to which every block adds.
    """
    _show(sounding.predict.transformer(activation, **options), as_json, plot)


def _show(result: Any, as_json: bool, plot: Path | None) -> None:
    title = str(result).split(":", 1)[0]
    present(result, as_json, plot, lambda it: it.profile(result.profile(), "gradient_log_norm", title=title))
