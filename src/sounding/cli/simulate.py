"""`sounding simulate`: random networks as Markov chains."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import sounding
from sounding.cli.options import SEED, json_option, quiet_option
from sounding.cli.output import console, new_table, print_json, progress_over, say
from sounding.cli.settings import parse_numbers, take_old_names
from sounding.cli.target import make_importable
from sounding.errors import ExitCode, InterruptedRun, UsageError

if TYPE_CHECKING:
    from sounding.chain import Simulation


def _list_measures(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from sounding.chain import measure_names

        say("\n".join(measure_names()))
        ctx.exit()


@click.command()
@click.option("--width", required=True, metavar="D", help="Features of each layer. Several are written 8,16,32.")
@click.option("--batch-size", required=True, metavar="N",
              help="Number of samples. The word width means as many as there are features.")  # fmt: skip
@click.option("--depth", required=True, type=int, metavar="L", help="Number of layers.")
@click.option("--runs", type=int, default=1, metavar="R", help="Number of independent networks.")
@click.option("--burn-in", type=int, default=0, metavar="K", help="Leave the first K layers out of the averages.")
@click.option("--every", type=int, default=1, metavar="K", help="Measure after every K layers.")
@click.option("--measure", "--measures", "measures", metavar="A,B",
              help="Measures, separated by commas. --list-measures names them.")  # fmt: skip
@click.option("--profile", is_flag=True,
              help="Also print every measured layer, averaged over runs. Layer 0 is the input.")  # fmt: skip
@click.option("--weights", default="gaussian", help="Law of the weights: gaussian, uniform, orthogonal or one-sided.")
@click.option("--activation", default="identity", help="Activation function: relu, tanh, …, or module:function.")
@click.option("--gain", default="1", metavar="G|power:K",
              help="Factor in front of activations: G in every layer, or ℓ^(-K) in layer ℓ.")  # fmt: skip
@click.option("--norm", default="batch", help="Normalization: none, batch, layer or rms.")
@click.option("--centring/--no-centring", default=True, help="Whether batch norm subtracts the mean.")
@click.option("--center/--no-center", default=None, hidden=True, help="The old name of --centring.")
@click.option("--placement", default="before", help="Whether the norm stands before or after the activation.")
@click.option("--position", hidden=True, help="The old name of --placement.")
@click.option("--eps", type=float, default=0.0, help="Number that the norm adds to the variance.")
@click.option("--residual", default="inf", metavar="G|inf",
              help="Factor γ of the layer beside its skip connection, as in H + γ H W'. "
              "inf stands for no skip connection.")  # fmt: skip
@click.option("--input", default="gaussian",
              help="Input batch: gaussian, orthogonal, near-orthogonal:EPS, collinear:EPS (one sample plus EPS times "
              "noise), repeated:K (K different samples), a data set such as digits, or FILE.npz.")  # fmt: skip
@click.option("--explicit-weights", is_flag=True,
              help="Draw every weight matrix, instead of only the products between samples.")  # fmt: skip
@click.option("--backward", is_flag=True, help="Also send gradients back through the same networks.")
@click.option("--error", type=float, metavar="E", help="Say how many layers an average needs for the standard error E.")
@click.option("--dtype", default="float32", help="Precision: float32 or float64.")
@click.option("--device", default="cpu", help="Device: cpu, cuda or cuda:1.")
@click.option("--seed", type=SEED, metavar="S",
              help="Seed of the random numbers. Equal seeds give equal numbers on the same device.")  # fmt: skip
@click.option("--list-measures", is_flag=True, is_eager=True, expose_value=False,
              callback=_list_measures, help="Print the names of the measures and stop.")  # fmt: skip
@json_option
@quiet_option()
def simulate(
    width: str, batch_size: str, residual: str, measures: str | None, error: float | None, seed: int | None,
    as_json: bool, quiet: bool, **options: Any
) -> int:  # fmt: skip
    """Draw random networks of any depth and measure how their samples stay apart, layer by layer.

    A layer takes the batch H, a row per sample, to act(gain * norm(H W')). With a skip connection the norm takes
    H + γ H W' instead. Weight matrices are made only with --explicit-weights: how the next layer is distributed depends
    on the products between samples alone, so only these are drawn. Averages are taken over runs and over the layers
    after --burn-in. Their standard errors take into account that neighbouring layers are alike.

    \b
    Exit codes: 0 done, 2 wrong usage, 3 numerical failure,
    130 interrupted (what was measured is printed).
    """
    options = take_old_names(options, center="centring", position="placement")
    widths = parse_numbers("--width", width, kind=int)
    residuals = parse_numbers("--residual", residual, kind=float)
    sizes = list(widths) if batch_size == "width" else parse_numbers("--batch-size", batch_size, kind=int)
    if error is not None and not error > 0:
        raise UsageError(f"--error must be positive, got {error}")
    if measures is not None:
        options["measures"] = tuple(name.strip() for name in measures.split(",") if name.strip())
    # module:function may be of the folder in which the command is typed
    if ":" in options["activation"]:
        make_importable(Path.cwd())
    many = len(widths) > 1 or len(residuals) > 1
    # for several networks it is taken out even where it is not set: simulate_many has no such argument
    if many and options.pop("backward"):
        raise UsageError("--backward takes one width and one residual strength, got several")
    with progress_over("chain-layers", quiet=quiet) as tell:
        options["progress"] = functools.partial(tell, "chain-layers")
        code = ExitCode.HEALTHY
        try:
            found = _run(widths, sizes, residuals, many=many, seed=seed, **options)
        except InterruptedRun as stop:
            if not stop.partial:
                raise
            found = stop.partial if isinstance(stop.partial, tuple) else (stop.partial,)
            code = ExitCode.INTERRUPTED
    if as_json:
        objects = [simulation.to_dict(error=error) for simulation in found]
        print_json({"simulations": objects} if many else objects[0])
    for simulation in () if as_json else found:
        _print_table(simulation, error=error)
    return int(code)


def _run(
    widths: list[int], sizes: list[int], residuals: list[float], *, many: bool, seed: int | None, **options: Any
) -> tuple[Simulation, ...]:
    """The simulations, one for each law where several were asked for."""
    import torch

    generator = torch.Generator()
    generator.manual_seed(generator.seed() if seed is None else seed)  # seed() takes one from the machine
    options["generator"] = generator
    if many:
        batch_sizes = sizes[0] if len(sizes) == 1 else sizes
        return sounding.chain.simulate_many(widths=widths, batch_sizes=batch_sizes, residuals=residuals, **options)
    if len(sizes) != 1:
        raise UsageError(f"expected one batch size per width, got {len(sizes)} for one width")
    return (sounding.simulate(width=widths[0], batch_size=sizes[0], residual=residuals[0], **options),)


def _print_table(simulation: Simulation, *, error: float | None) -> None:
    s = simulation.settings
    out = console()
    skip = "no skip connection" if s["residual"] == "inf" else f"γ = {s['residual']:g}"
    centred = " centred" if s["centring"] and s["norm"] == "batch" else ""
    partial = " (interrupted: partial)" if simulation.partial else ""
    out.print(
        f"width {s['width']}, batch size {s['batch_size']}, depth {s['depth']}, runs {s['runs']}{partial}: "
        f"{s['weights']} weights, {s['activation']}, norm {s['norm']}{centred}, {skip}"
    )
    table = new_table("measure", ">mean", *([] if error is None else [f">depth for ± {error:g}"]))
    for name, estimate in {**simulation.averages, **simulation.gradients}.items():
        needed = ""
        if error is not None and name in simulation.averages and estimate.stderr is not None:
            needed = str(simulation.needed_depth(name, error=error)) if math.isfinite(estimate.value) else ""
        table.add_row(name, str(estimate), *([] if error is None else [needed]))
    out.print(table)
    for row in simulation.profile:
        out.print(f"layer {row.layer:>6}  {row.measure:<28}{row.value:.6g}", highlight=False)
    out.print(
        f"{simulation.chain_layers_per_second:,.0f} chain-layers per second, {simulation.seconds:.3g} s after "
        f"{simulation.setup_seconds:.3g} s of set-up, route {s['route']}",
        style="dim",
    )
