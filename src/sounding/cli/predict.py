"""`sounding predict`: what theory says about a random network; each command a table, `--json` or a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import sounding
from sounding.cli.options import FILE, activated, batched, presented, with_options
from sounding.cli.output import draw, present, print_json
from sounding.errors import UsageError
from sounding.limits import require_memory, require_time

NORMS = ("none", "pre-rms", "post-rms", "pre-ln", "post-ln")
# the same words as in `sounding.theory.blocks`, which would load numpy for `--help`
PLACEMENTS = ("pre", "post", "branch", "deepnorm", "none")
INITS = ("lecun", "he", "xavier", "torch", "gpt2")
LEAST_LAYER, FASTEST = 5e-5, 1e11  # seconds of a layer, and entries per second, at the very least


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
                     help="Fan-in times variance of one weight matrix, for example down=0.1. The matrices are up and "
                     "down, and in transformers also query, key, value and output."),
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


@click.group()
def predict() -> None:
    """Say what theory expects of a random network, without drawing one.

    A random network is one whose weights have just been drawn. The answers hold for wide networks. Keys such as
    meanfield2019 and thesis2024 name the papers that they come from; `sounding claims list` shows what these papers
    state.
    """


@predict.command(short_help="Networks with batch norm: gradient growth, trainable depth.")
@activated
@batched
@click.option("--eps", type=float, default=0.0, help="Number that the norm adds to the variance.")
@click.option("--scale", type=float, default=1.0, help="Scale γ of the norm, which gives γx + β to the activation.")
@click.option("--shift", type=float, default=0.0, help="Shift β of the norm.")
@click.option("--weight-std", "-w", type=float, default=1.0, metavar="W",
              help="Weights have variance W²/fan-in. Without --eps it changes nothing.")  # fmt: skip
@click.option("--tolerance", type=float, default=1e-12, help="Largest error that the integrals may have.")
@presented
def batchnorm(activation: str, as_json: bool, plot: Path | None, **options: float) -> None:
    """Say how signal and gradients travel through a random network with batch norm (meanfield2019).

    The answer has the correlation that samples end at (the fixed point), the factor by which gradients grow per layer,
    and the depth to which such a network trains.
    """
    result = sounding.predict.batchnorm(activation, **options)
    present(result, as_json, plot, lambda pictures: pictures.batchnorm(result))


@predict.command(short_help="Two samples: where their correlation goes, and how fast.")
@activated
@click.option("--norm", type=click.Choice(NORMS), default="none",
              help="Normalization before or after the activation: by root mean square, or layer norm.")  # fmt: skip
@presented
def kernel(activation: str, norm: str, as_json: bool, plot: Path | None) -> None:
    """Say where the correlation of two samples goes, layer by layer, and how fast (thesis2024, chapter 5).

    The kernel map takes the correlation of two samples in front of a layer to the one behind it. Its fixed point is
    the correlation that they end at.
    """
    result = sounding.predict.kernel(activation, norm)  # type: ignore[arg-type]
    present(result, as_json, plot, lambda pictures: pictures.kernel(activation, result))


@predict.command(short_help="Networks without norms: phase, fixed points, depth scales.")
@activated
@click.option("--weight-std", "-w", type=float, required=True, metavar="W", help="Weights have variance W²/fan-in.")
@click.option("--bias-std", "-s", type=float, default=0.0, metavar="S", help="Standard deviation of the biases.")
@click.option("--start", type=float, default=1.0, metavar="Q", help="Variance of the input.")
@presented
def vanilla(activation: str, start: float, as_json: bool, plot: Path | None, **stds: float) -> None:
    """Say how signal and gradients travel through a random network without norms (meanfield2019).

    In the ordered phase samples become alike and gradients vanish; in the chaotic phase samples part and gradients
    explode. A depth scale is the number of layers over which a difference changes by the factor e.
    """
    result = sounding.predict.vanilla(activation, start=start, **stds)
    present(result, as_json, plot, lambda pictures: pictures.vanilla(activation, **stds))


@predict.command(short_help="The weights with which gradients neither vanish nor explode.")
@activated
@click.option("--bias-std", "-s", type=float, default=0.0, metavar="S", help="Standard deviation of the biases.")
@presented
def critical(activation: str, bias_std: float, as_json: bool, plot: Path | None) -> None:
    """Find the weights between vanishing and exploding gradients (the edge of chaos), for biases of a given size."""
    result = sounding.predict.critical(activation, bias_std=bias_std)
    present(result, as_json, plot, lambda pictures: pictures.edge(activation, result))


@predict.command(short_help="Residual blocks: growth of signal and gradients.")
@activated
@blocks(init="he", expansion=1.0, correlation=0.5)
@presented
def residual(activation: str, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Say how signal and gradients grow through residual blocks, and how deep such networks train.

    Each block is a perceptron with one hidden layer. The stream is what runs between the blocks, to which every block
    adds.
    """
    _show(sounding.predict.residual(activation, **options), as_json, plot)


@predict.command(short_help="Transformer blocks: growth of signal and gradients, attention.")
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


@predict.command(short_help="A whole batch: how alike its samples become (Gram matrix).")
@activated
@click.option("--depth", "-d", type=int, default=20, metavar="L", help="Number of layers.")
@click.option("--batch-size", "-b", type=click.IntRange(min=2), metavar="B",
              help="Number of samples, with --correlation.")  # fmt: skip
@click.option("--correlation", "-c", type=float, metavar="C", help="Correlation of every two input samples.")
@click.option("--decaying", is_flag=True, help="Input samples k places apart have correlation C^k instead.")
@click.option("--gram", "file", type=FILE, metavar="FILE",
              help="Gram matrix of the input samples, as .npy or .npz, instead of --correlation.")  # fmt: skip
@click.option("--eps", type=float, default=0.0, help="Number that batch norm adds to the variance.")
@click.option("--width", type=int, metavar="W", help="Also say how far a network of this width strays from theory.")
@click.option("--method", type=click.Choice(["auto", "quadrature", "sampled"]), default="auto",
              help="How means are found that have no formula: by quadrature (double integrals), or sampled (Monte "
              "Carlo). auto takes up to 300 integrals, 75 with --eps, and samples where more are needed.")  # fmt: skip
@click.option("--samples", type=int, default=200_000, help="Batches that each sampled layer draws.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the sampling.")
@presented
def gram(
    activation: str, depth: int, batch_size: int | None, correlation: float | None, decaying: bool, file: Path | None,
    width: int | None, seed: int, as_json: bool, plot: Path | None, **options: Any
) -> None:  # fmt: skip
    """Follow the Gram matrix of a batch through batch norm layers (thesis2024, chapter 3).

    The Gram matrix holds the inner products between the samples of a batch. The answer says where it ends, and how
    fast it gets there. Give --batch-size and --correlation, or --gram.
    """
    import numpy as np

    from sounding.cli.result import print_gram
    from sounding.cli.settings import input_gram

    start = input_gram(file, batch_size=batch_size, correlation=correlation, decaying=decaying)
    generator = np.random.default_rng(seed)
    told = f"{depth} layers of {len(start)} samples"
    require_memory(8.0 * depth * len(start) ** 2, what=told)  # 8 bytes for each entry of every layer's matrix
    require_time(depth * (LEAST_LAYER + len(start) ** 2 / FASTEST), what=told)
    result = sounding.predict.gram(activation, start, depth=depth, generator=generator, **options)
    data = result.to_dict()
    if width is not None:
        deviation = sounding.predict.gram_deviation(activation, batch_size=len(start), width=width, generator=generator)
        known = ("activation", "batch_size")  # which the prediction has told already
        data["deviation"] = {key: value for key, value in deviation.to_dict().items() if key not in known}
    if as_json:
        print_json(data)
    else:
        print_gram(result, data)
    draw(plot, lambda pictures: pictures.profile(result.profile(), "mean_cosine", title=result.activation))


@predict.command(short_help="The theorems of the papers, evaluated.")
@click.argument("name", required=False)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
              help="Value of a parameter of the theorem. @FILE.npy stands for a matrix.")  # fmt: skip
@click.option("--version", type=click.Choice(["corrected", "printed"]),
              help="Take the theorem as the paper prints it, or as corrected [default: corrected].")  # fmt: skip
@click.option("--activation", "-a", metavar="A",
              help="Compute the numbers that the theorem takes from an activation for this one.")  # fmt: skip
@click.option("--norm", type=click.Choice(NORMS), default="none", help="Normalization beside --activation.")
@presented
def bounds(
    name: str | None, settings: tuple[str, ...], version: str | None, activation: str | None, norm: str, as_json: bool,
    plot: Path | None
) -> None:  # fmt: skip
    """List the theorems of the papers, or evaluate the theorem NAME for numbers of yours.

    A theorem bounds a quantity from above or below, under assumptions that the answer lists.

    Example: sounding predict bounds rank2020-theorem2 --set width=64 --set regularity=0.5
    """
    from sounding.cli.result import print_bound, print_bound_list
    from sounding.cli.settings import parse_settings
    from sounding.theory.bounds import THEOREMS, evaluate, kernel_numbers, parameters

    if name is None:
        if settings or version or activation or plot:
            told = "expected the name of a theorem with these options, got none"
            raise UsageError(told, hint="sounding predict bounds")
        if as_json:
            print_json({"bounds": {known: list(parameters(known)) for known in THEOREMS}})
        else:
            print_bound_list()
        return
    arguments = parse_settings(settings)
    if version:
        arguments["version"] = version
    if activation:
        # what --set says goes before what follows from the activation
        arguments = {**kernel_numbers(name, activation, norm=norm), **arguments}  # type: ignore[arg-type]
    bound = evaluate(name, **arguments)
    if as_json:
        print_json(bound.to_dict() | ({} if bound.profile is None else {"profile": bound.profile}))
    else:
        print_bound(bound)
    draw(plot, lambda pictures: pictures.bound(bound))
