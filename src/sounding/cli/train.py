"""`sounding train`: a grid of networks on real data, trained as one, with a live display and checkpoints."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sounding.cli.output import SEED, console, print_json, require_writable, say
from sounding.cli.settings import parse_numbers
from sounding.cli.training import curves_of, print_history
from sounding.errors import DataError, ExitCode, InterruptedRun, UsageError, require_device

if TYPE_CHECKING:
    from sounding.train import Grid, History, Recipe
    from sounding.train.journal import Progress

FOLDER = Path("sounding-runs")
GRID_OPTIONS = ("depth", "width", "activation", "norm", "init", "eps", "shift", "scale", "residual", "gain_exponent")
ONE_VALUE = ("depth", "width", "activation", "norm", "gain_exponent")


@click.command()
@click.option("--model", default="mlp", help="Network: mlp, alexnet, vgg19, resnet50 or transformer.")
@click.option(
    "--data",
    "dataset",
    default="digits",
    help="Data set (sounding data list names them), or FILE.npz with arrays inputs and targets.",
)
@click.option("--depth", metavar="L", help="Number of hidden layers.")
@click.option("--width", metavar="D", help="Number of units of a layer.")
@click.option("--activation", metavar="A", help="Activation function: relu, tanh, ...")
@click.option("--norm", metavar="N", help="Normalization: none, batch, layer or rms.")
@click.option("--init", metavar="I,..", help="Initialization: he, xavier, lecun, haar or torch; several make a grid.")
@click.option("--eps", metavar="E,..", help="Number that the norm adds to the variance.")
@click.option("--shift", metavar="B,..", help="Shift β that the norm starts with.")
@click.option("--scale", metavar="G,..", help="Scale γ that the norm starts with.")
@click.option("--residual", metavar="G,..", help="Factor of a branch beside its skip connection.")
@click.option("--gain-exponent", metavar="K", help="Multiply by ℓ^(-K) in front of the activation of layer ℓ.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set any other option of the network.")
@click.option("--lr", "--learning-rates", "rates", default="0.1", metavar="R,..", help="Learning rates.")
@click.option(
    "--seeds", default="1", metavar="N", help="How many seeds, or a list such as 3,5,8; the one seed 3 is written 3,"
)
@click.option("--optimizer", default="sgd", help="Optimizer: sgd, momentum, adam or rmsprop.")
@click.option("--momentum", type=float, default=0.9, help="Momentum, with --optimizer momentum.")
@click.option("--loss", default="cross_entropy", help="Loss: cross_entropy or mse.")
@click.option("--batch-size", type=int, default=128, help="Samples in a step.")
@click.option("--epochs", type=int, help="Passes over the data [default: 10 without --steps].")
@click.option("--steps", type=int, help="Steps of the optimizer, instead of --epochs.")
@click.option("--weight-decay", type=float, default=0.0, help="Weight decay.")
@click.option(
    "--clipping", type=float, metavar="λ", help="Adaptive gradient clipping, at λ times the norm of a unit's weights."
)
@click.option("--clipping-by", default="unit", help="What is clipped by itself: unit or parameter.")
@click.option("--augment", is_flag=True, help="Crop and flip the images at random.")
@click.option("--statistics", default="running", help="Statistics of batch norm at evaluation: running or batch.")
@click.option("--evaluate", default="epoch", metavar="WHEN", help="When to evaluate: epoch, end, or steps: 0,10,100.")
@click.option("--evaluation-batch", type=int, metavar="N", help="Samples evaluated together [default: 1000].")
@click.option(
    "--train-metrics", default="evaluated", help="Numbers of the training part: evaluated, or seen in its batches."
)
@click.option("--sampling", default="shuffle", help="How batches are drawn: shuffle, replacement or fixed.")
@click.option("--betas", default="0.9,0.999", metavar="A,B", help="Decay of the two means, with --optimizer adam.")
@click.option("--smoothing", type=float, default=0.99, help="Decay of the mean, with --optimizer rmsprop.")
@click.option("--optimizer-eps", type=float, default=1e-8, help="Number added to the root in adam and rmsprop.")
@click.option("--measure-at", metavar="S,..", help="Steps after which every run is measured over depth.")
@click.option(
    "--choose-by",
    default="train_loss",
    help="How the best rate is chosen: by train_loss, train_accuracy, test_loss or test_accuracy.",
)
@click.option("--data-seed", type=SEED, default=0, help="Seed of the order of the samples.")
@click.option("--own-orders", is_flag=True, help="Each seed sees the samples in an order of its own.")
@click.option("--device", default="cpu", help="Device: cpu, cuda or cuda:1.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File of the checkpoint; by default one in sounding-runs/.",
)
@click.option("--checkpoint-seconds", type=float, default=60.0, help="Seconds between checkpoints.")
@click.option("--fresh", is_flag=True, help="Start anew although a checkpoint is there.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the history as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Write the curves as svg, png or pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--quiet", "-q", is_flag=True, help="Show no progress.")
def train(model: str, dataset: str, **options: Any) -> int:
    """Train networks on real data: seeds times learning rates times initializations, as one program.

    Options that take several values (--init he,haar --eps 1e-5,0.1 --lr 0.01,0.1) make a grid. All runs see the same
    batches, or with --own-orders those of one seed do; one that diverges is recorded and disturbs no other. Ctrl-C
    keeps a checkpoint, and the same command goes on from it.

    \b
    Example: sounding train --depth 50 --norm batch --init haar --data fashion-mnist --lr 0.01,0.1 --seeds 5
    Exit codes: 0 done, 2 wrong usage, 130 interrupted and 143 terminated (what was trained is printed and
    kept).
    """
    from sounding.data import load_dataset
    from sounding.train.checkpoint import previous_of

    require_writable(options["out"], options["plot"])
    recipe = _recipe(options)
    fixed, vary = _grid_options(model, options)
    device = require_device(options["device"])
    data = load_dataset(dataset, device=device)
    grid = _grid(model, data, options, fixed, vary)
    path = options["checkpoint"] or _default_checkpoint(model, dataset, options)
    if options["fresh"]:
        for left in (path, previous_of(path)):
            left.unlink(missing_ok=True)
    resumed = path.exists()
    if resumed:
        say(f"sounding: going on from {path} (--fresh starts anew)", err=True)
    try:
        history = _run(grid, data, recipe, path, options)
    except InterruptedRun as stop:
        if stop.partial is None:
            raise
        _report(stop.partial, recipe, path, options, interrupted=True)
        return int(ExitCode.INTERRUPTED)
    except DataError as error:
        # what was computed is worth more than the disk that does not take it
        if error.partial is not None and error.partial.curves:
            _report(error.partial, recipe, path, options, interrupted=False)
        raise
    _report(history, recipe, path, options, interrupted=False)
    return int(ExitCode.HEALTHY)


def _recipe(options: Mapping[str, Any]) -> Recipe:
    """The recipe that the options describe, field by field."""
    from sounding.data import Augmentation
    from sounding.train import Recipe

    evaluate = options["evaluate"]
    typed = {
        "augment": Augmentation() if options["augment"] else None,
        "evaluate": evaluate
        if evaluate in ("epoch", "end")
        else tuple(parse_numbers("--evaluate", evaluate, kind=int)),
        "betas": tuple(parse_numbers("--betas", options["betas"], kind=float)),
        "eps": options["optimizer_eps"],  # --eps is the norm's
    }
    known: dict[str, Any] = {field.name: options.get(field.name) for field in fields(Recipe)}
    return Recipe(**known | typed)


def _grid_options(model: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """What every network has, and what varies between runs."""
    from sounding.models.registry import parse_option

    given = {name: options[name] for name in GRID_OPTIONS if options[name] is not None}
    for setting in options["settings"]:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"expected --set KEY=VALUE, got {setting!r}", hint="--set centring=False")
        given[key.strip().replace("-", "_")] = text
    fixed: dict[str, Any] = {}
    vary: dict[str, list[Any]] = {}
    for name, text in given.items():
        values = [parse_option(model, name, part.strip()) for part in str(text).split(",") if part.strip()]
        if len(values) == 1:
            fixed[name] = values[0]
        elif name in ONE_VALUE or not values:
            raise UsageError(
                f"--{name.replace('_', '-')} takes one value, got {text!r}: runs of one command share an architecture",
                hint="one command for each",
            )
        else:
            vary[name] = values
    return fixed, vary


def _grid(model: str, data: Any, options: Mapping[str, Any], fixed: dict[str, Any], vary: dict[str, list[Any]]) -> Grid:
    from sounding.train import make_grid

    rates = parse_numbers("--lr", options["rates"], kind=float)
    seeds = parse_numbers("--seeds", options["seeds"].removesuffix(","), kind=int)
    many = len(seeds) == 1 and not options["seeds"].endswith(",")  # "3" are three seeds, "3," is the seed 3
    chosen: Any = seeds[0] if many else seeds
    if many and seeds[0] < 1:
        raise UsageError(f"--seeds must be at least 1, got {seeds[0]}")
    return make_grid(model, data, learning_rates=rates, seeds=chosen, vary=vary, **fixed)


def _default_checkpoint(model: str, dataset: str, options: Mapping[str, Any]) -> Path:
    """A name of its own for every set of options that changes the numbers."""
    shown = ("out", "plot", "as_json", "quiet", "checkpoint", "checkpoint_seconds", "fresh", "choose_by")
    told = {name: value for name, value in options.items() if name not in shown}
    text = json.dumps([model, dataset, told], sort_keys=True, default=str)
    try:
        FOLDER.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {FOLDER}: {error.strerror or error}", hint="--checkpoint FILE") from error
    return FOLDER / f"{model}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.ckpt"


def _run(grid: Grid, data: Any, recipe: Recipe, path: Path, options: Mapping[str, Any]) -> History:
    """Train the grid as the options say, with its progress on the terminal."""
    import torch

    from sounding.train import Checkpoint, train_together_

    steps = parse_numbers("--measure-at", options["measure_at"], kind=int) if options["measure_at"] else []
    seed = options["data_seed"]
    with _display(grid, quiet=options["quiet"]) as progress:
        return train_together_(
            data=data,
            recipe=recipe,
            generator=grid.orders(seed) if options["own_orders"] else torch.Generator().manual_seed(seed),
            device=options["device"],
            measure_at=steps,
            checkpoint=Checkpoint(path, seconds=options["checkpoint_seconds"]),
            progress=progress,
            **grid.runs,
        )


@contextmanager
def _display(grid: Grid, *, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A bar and the newest loss and accuracy of the runs, on a terminal's stderr."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from sounding.cli.training import table_of_points

    bar = Bar(TextColumn("step"), BarColumn(), MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn())
    task = bar.add_task("train", total=None)
    rates = [{**entry, "learning_rate": rate} for entry, rate in zip(grid.settings, grid.learning_rates, strict=True)]
    with Live(bar, console=console(stderr=True), transient=True, refresh_per_second=4) as live:

        def update(state: Progress) -> None:
            bar.update(task, completed=state.step, total=state.steps)
            if state.points:
                live.update(Group(bar, table_of_points(state.points, rates)))

        yield update


def _report(history: History, recipe: Recipe, path: Path, options: Mapping[str, Any], *, interrupted: bool) -> None:
    """Print the history with the chosen rates, and write the files that were asked for."""
    from sounding.train import choose_rates

    groups = sorted({name for entry in history.settings for name in entry} - {"learning_rate", "seed"})
    choices = None
    if history.curves:
        choices = choose_rates(history, ",".join(groups) if groups else [()] * history.runs, by=options["choose_by"])
    if options["as_json"]:
        chosen = [] if choices is None else [
            {"group": choice.group, "learning_rate": choice.learning_rate, "runs": choice.runs, "value": choice.value}
            for choice in choices.choices
        ]  # fmt: skip
        rule = None if choices is None else choices.rule
        fields = {"recipe": recipe.to_dict(), "rule": rule, "choices": chosen, "interrupted": interrupted}
        print_json({**history.to_dict(), **fields, "checkpoint": str(path)})
    else:
        print_history(history, choices, names=groups)
    if interrupted:
        say(f"sounding: interrupted; the same command goes on from {path}", err=True)
    if options["out"] is not None:
        history.to_json(options["out"])
    if options["plot"] is not None:
        from sounding.plot import plot_lines, save

        axes = plot_lines(curves_of(history), xlabel="epoch", ylabel="training loss", log=True)
        save(axes.figure, options["plot"])
