"""`sounding predict`: what theory says about a random network; each command a table, `--json` or a picture."""

from __future__ import annotations

from pathlib import Path

import click

from sounding.cli.output import print_json
from sounding.cli.predict_blocks import residual, transformer
from sounding.cli.presentation import activated, draw, present, presented, whole
from sounding.cli.result import print_bound, print_bound_list, print_gram
from sounding.errors import UsageError
from sounding.limits import require_memory, require_time

NORMS = ("none", "pre-rms", "post-rms", "pre-ln", "post-ln")
LEAST_LAYER, FASTEST = 5e-5, 1e11  # seconds of a layer, and entries per second, at the very least


@click.group()
def predict() -> None:
    """What theory says about a random network, without drawing a weight."""


predict.add_command(residual)
predict.add_command(transformer)


@predict.command(short_help="Batch norm: fixed point, gradient growth, trainable depth.")
@activated
@click.option(
    "--batch-size", "-b", type=float, required=True, metavar="B", help="Samples per batch, at least 4; or inf."
)
@click.option("--eps", type=float, default=0.0, show_default=True, help="Added to the variance.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="γ: φ(γx + β) after normalization.")
@click.option("--shift", type=float, default=0.0, show_default=True, help="β.")
@click.option(
    "--weight-std", "-w", type=float, default=1.0, show_default=True, metavar="W",
    help="σ_w: weights have variance W²/fan-in; matters with eps.",
)  # fmt: skip
@click.option("--tolerance", type=float, default=1e-12, show_default=True, help="Of the integrals.")
@presented
def batchnorm(
    activation: str,
    batch_size: float,
    eps: float,
    scale: float,
    shift: float,
    weight_std: float,
    tolerance: float,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Batch normalization: fixed point, eigenvalues, gradient growth, trainable depth (meanfield2019)."""
    from sounding import predict as theory

    result = theory.batchnorm(
        activation,
        batch_size=whole(batch_size),
        eps=eps,
        scale=scale,
        shift=shift,
        weight_std=weight_std,
        tolerance=tolerance,
    )
    present(result, as_json=as_json)
    draw(plot, lambda pictures: pictures.batchnorm(result))


@predict.command(short_help="Kernel map: where correlations go, and how fast.")
@activated
@click.option("--norm", type=click.Choice(NORMS), default="none", show_default=True, help="Normalization layer.")
@presented
def kernel(activation: str, norm: str, as_json: bool, plot: Path | None) -> None:
    """The kernel map: Hermite coefficients, fixed point, case and rate (thesis2024 chapter 5)."""
    from sounding import predict as theory

    result = theory.kernel(activation, norm)  # type: ignore[arg-type]
    present(result, as_json=as_json)
    draw(plot, lambda pictures: pictures.kernel(activation, result))


@predict.command(short_help="A plain network: fixed points, depth scales, phase.")
@activated
@click.option(
    "--weight-std", "-w", type=float, required=True, metavar="W", help="σ_w: weights have variance W²/fan-in."
)
@click.option("--bias-std", "-s", type=float, default=0.0, show_default=True, metavar="S", help="σ_b.")
@click.option("--start", type=float, default=1.0, show_default=True, metavar="Q", help="Variance of the input.")
@presented
def vanilla(
    activation: str, weight_std: float, bias_std: float, start: float, as_json: bool, plot: Path | None
) -> None:
    """A plain network: variance and correlation fixed points, χ, depth scales, phase (meanfield2019)."""
    from sounding import predict as theory

    result = theory.vanilla(activation, weight_std=weight_std, bias_std=bias_std, start=start)
    present(result, as_json=as_json)
    draw(plot, lambda pictures: pictures.vanilla(activation, weight_std=weight_std, bias_std=bias_std))


@predict.command(short_help="The weights at the edge of chaos.")
@activated
@click.option("--bias-std", "-s", type=float, default=0.0, show_default=True, metavar="S", help="σ_b.")
@presented
def critical(activation: str, bias_std: float, as_json: bool, plot: Path | None) -> None:
    """The weight standard deviation at the edge of chaos for a bias standard deviation."""
    from sounding import predict as theory

    result = theory.critical(activation, bias_std=bias_std)
    present(result, as_json=as_json)
    draw(plot, lambda pictures: pictures.edge(activation, result))


@predict.command(short_help="The Gram matrix of a whole batch over depth.")
@activated
@click.option("--depth", "-d", type=int, default=20, show_default=True, metavar="L", help="Layers.")
@click.option("--batch-size", "-b", type=click.IntRange(min=2), metavar="B", help="Samples, with --correlation.")
@click.option("--correlation", "-c", type=float, metavar="C", help="Of every two input samples.")
@click.option("--decaying", is_flag=True, help="Samples k apart correlate by C^k instead.")
@click.option("--gram", "file", type=click.Path(path_type=Path), metavar="FILE", help="Or a Gram matrix, .npy or .npz.")
@click.option("--eps", type=float, default=0.0, show_default=True, help="Of the batch norm.")
@click.option("--width", type=int, metavar="W", help="Also the deviation of a network of this width.")
@click.option(
    "--method",
    type=click.Choice(["auto", "quadrature", "sampled"]),
    default="auto",
    show_default=True,
    help="Where no quick method applies: double integrals (auto: up to 300 of them, 75 with eps), or Monte Carlo.",
)
@click.option("--samples", type=int, default=200_000, show_default=True, help="Batches that a sampled step draws.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Where an expectation is sampled."
)
@presented
def gram(
    activation: str,
    depth: int,
    batch_size: int | None,
    correlation: float | None,
    decaying: bool,
    file: Path | None,
    eps: float,
    width: int | None,
    method: str,
    samples: int,
    seed: int,
    as_json: bool,
    plot: Path | None,
) -> None:
    """The Gram matrix of a batch through batch norm layers, and where it ends (thesis2024 chapter 3)."""
    import numpy as np

    from sounding import predict as theory
    from sounding.cli.settings import input_gram

    start = input_gram(file, batch_size=batch_size, correlation=correlation, decaying=decaying)
    generator = np.random.default_rng(seed)
    told = f"{depth} layers of {len(start)} samples"
    require_memory(8.0 * depth * len(start) ** 2, what=told)
    require_time(depth * (LEAST_LAYER + len(start) ** 2 / FASTEST), what=told)
    result = theory.gram(
        activation,
        start,
        depth=depth,
        eps=eps,
        method=method,  # type: ignore[arg-type]
        samples=samples,
        generator=generator,
    )
    data = result.to_dict()
    if width is not None:
        deviation = theory.gram_deviation(activation, batch_size=len(start), width=width, generator=generator)
        known = ("activation", "batch_size")
        data["deviation"] = {key: value for key, value in deviation.to_dict().items() if key not in known}
    if as_json:
        print_json(data)
    else:
        print_gram(result, data)
    draw(plot, lambda pictures: pictures.profile(result.profile(), "mean_cosine", title=result.activation))


@predict.command(short_help="The theorems of the papers, evaluated.")
@click.argument("name", required=False)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A parameter; @FILE.npy for a matrix.")
@click.option("--version", type=click.Choice(["corrected", "printed"]), help="Of the statement [default: corrected].")
@click.option("--activation", "-a", metavar="A", help="Fill in the kernel map's numbers of an activation.")
@click.option("--norm", type=click.Choice(NORMS), default="none", show_default=True, help="With --activation.")
@presented
def bounds(
    name: str | None,
    settings: tuple[str, ...],
    version: str | None,
    activation: str | None,
    norm: str,
    as_json: bool,
    plot: Path | None,
) -> None:
    """The theorems: list them, or evaluate one: `bounds rank2020-theorem2 --set width=64 --set regularity=0.5`."""
    from sounding.cli.settings import parse_settings
    from sounding.theory.bounds import THEOREMS, evaluate, kernel_numbers, parameters

    if name is None:
        if settings or version or activation or plot:
            raise UsageError(
                "expected the name of a theorem with these options, got none", hint="sounding predict bounds"
            )
        if as_json:
            print_json({"bounds": {known: list(parameters(known)) for known in THEOREMS}})
        else:
            print_bound_list()
        return
    arguments = parse_settings(settings)
    if version:
        arguments["version"] = version
    if activation:
        arguments = {**kernel_numbers(name, activation, norm=norm), **arguments}  # type: ignore[arg-type]
    bound = evaluate(name, **arguments)
    if as_json:
        data = bound.to_dict()
        if bound.profile is not None:
            data["profile"] = bound.profile.to_dict()
        print_json(data)
    else:
        print_bound(bound)
    draw(plot, lambda pictures: pictures.bound(bound))
