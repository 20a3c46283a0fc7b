"""`sounding train`: a grid of networks on real data, trained as one, with progress and checkpoints."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import sounding
from sounding.cli.options import FILE, SEED, file_option, json_option, picture_option, quiet_option
from sounding.cli.output import console, new_table, print_json, progress_over, say
from sounding.cli.settings import parse_numbers
from sounding.encoding import fields_of
from sounding.errors import DataError, ExitCode, InterruptedRun, UsageError, require_device

if TYPE_CHECKING:
    from sounding.train import Choices, Grid, History, Point, Recipe
    from sounding.train.journal import Progress

FOLDER = Path("sounding-runs")
# options of the network; the others are those of its training
GRID_OPTIONS = ("depth", "width", "activation", "norm", "init", "eps", "shift", "scale", "residual", "gain_exponent")
HEADINGS = (">epoch", ">loss", ">accuracy", ">test loss", ">test acc.")
CURVES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
BARS = "▁▂▃▄▅▆▇█"
CURVE = 24  # characters of a curve in a cell
ONE_VALUE = ("depth", "width", "activation", "norm", "gain_exponent")


@click.command()
@click.option("--model", default="mlp", help="Network: mlp, alexnet, vgg19, resnet50 or transformer.")
@click.option("--data", "dataset", default="digits",
              help="Data set (sounding data list names them), or FILE.npz with arrays inputs and targets.")  # fmt: skip
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
@click.option("--seeds", default="1", metavar="N",
              help="How many seeds, or a list of seeds such as 3,5,8; a list of one ends with a comma.")  # fmt: skip
@click.option("--optimizer", default="sgd", help="Optimizer: sgd, momentum, adam or rmsprop.")
@click.option("--momentum", type=float, default=0.9, help="Momentum, with --optimizer momentum.")
@click.option("--loss", default="cross_entropy", help="Loss: cross_entropy or mse.")
@click.option("--batch-size", type=int, default=128, help="Samples in a step.")
@click.option("--epochs", type=int, help="Passes over the data [default: 10 without --steps].")
@click.option("--steps", type=int, help="Steps of the optimizer, instead of --epochs.")
@click.option("--weight-decay", type=float, default=0.0, help="Weight decay.")
@click.option("--clipping", type=float, metavar="λ",
              help="Clip gradients at λ times the norm of the weights that they belong to.")  # fmt: skip
@click.option("--clipping-by", default="unit",
              help="Whether each unit or each parameter is clipped: unit or parameter.")  # fmt: skip
@click.option("--augment", is_flag=True, help="Crop and flip the images at random.")
@click.option("--statistics", default="running",
              help="Mean and variance of batch norm at evaluation: running or batch.")  # fmt: skip
@click.option("--evaluate", default="epoch", metavar="WHEN",
              help="When to evaluate: epoch, end, or steps such as 0,10,100.")  # fmt: skip
@click.option("--evaluation-batch", type=int, metavar="N", help="Samples evaluated together [default: 1000].")
@click.option("--train-metrics", default="evaluated",
              help="Training loss and accuracy: evaluated on the training data, as on the test data, or seen, a mean "
              "over the batches since the last evaluation.")  # fmt: skip
@click.option("--sampling", default="shuffle", help="How batches are drawn: shuffle, replacement or fixed.")
@click.option("--betas", default="0.9,0.999", metavar="A,B", help="Decay of the two means, with --optimizer adam.")
@click.option("--smoothing", type=float, default=0.99, help="Decay of the mean, with --optimizer rmsprop.")
@click.option("--optimizer-eps", type=float, default=1e-8, help="Number added to the root in adam and rmsprop.")
@click.option("--measure-at", metavar="S,..", help="Steps after which every run is measured over depth.")
@click.option("--choose-by", default="train_loss",
              help="What chooses the best rate: train_loss, train_accuracy, test_loss or test_accuracy.")  # fmt: skip
@click.option("--data-seed", type=SEED, default=0, help="Seed of the order of the samples.")
@click.option("--own-orders", is_flag=True, help="Each seed sees the samples in an order of its own.")
@click.option("--device", default="cpu", help="Device: cpu, cuda or cuda:1.")
@click.option("--checkpoint", type=FILE, metavar="FILE",
              help="File of the checkpoint; by default one in sounding-runs/.")  # fmt: skip
@click.option("--checkpoint-seconds", type=float, default=60.0, help="Seconds between checkpoints.")
@click.option("--fresh", is_flag=True, help="Start anew although a checkpoint is there.")
@file_option("--out", "Write the history as JSON.")
@picture_option("Write the curves as svg, png or pdf.")
@json_option
@quiet_option()
def train(model: str, dataset: str, **options: Any) -> int:
    """Train networks on real data: seeds times learning rates times initializations, as one program.

    Options that take several values, such as --init he,haar or --lr 0.01,0.1, make a grid: every combination is one
    run. All runs see the same batches; with --own-orders only runs of the same seed do. A run that diverges is recorded
    and does not disturb the others. Ctrl-C keeps a checkpoint, and the same command goes on from it.

    \b
    Example: sounding train --depth 50 --norm batch --init haar --lr 0.01,0.1 --seeds 5
    Exit codes: 0 done, 2 wrong usage, 130 interrupted and 143 terminated (what was trained is
    printed and kept).
    """
    from sounding.train.checkpoint import previous_of

    if options["choose_by"] not in CURVES:  # found out before the training, not after it
        raise UsageError(f"no curve {options['choose_by']!r} to choose by", hint=f"one of {', '.join(CURVES)}")
    recipe = _recipe(options)
    fixed, vary = _grid_options(model, options)
    device = require_device(options["device"])
    data = sounding.data.load_dataset(dataset, device=device)
    grid = _grid(model, data, options, fixed, vary)
    path = options["checkpoint"] or _default_checkpoint(model, dataset, options)
    if options["fresh"]:
        for left in (path, previous_of(path)):  # the one before would be taken up instead
            left.unlink(missing_ok=True)
    resumed = path.exists()
    if resumed:
        say(f"sounding: going on from {path} (--fresh starts anew)", err=True)
    interrupted = False
    try:
        history = _run(grid, data, recipe, path, options)
    except InterruptedRun as stop:
        if stop.partial is None:
            raise
        history, interrupted = stop.partial, True
    except DataError as error:
        # what was computed is worth more than the disk that does not take it
        if error.partial is not None and error.partial.curves:
            _report(error.partial, recipe, path, options, interrupted=False)
        raise
    _report(history, recipe, path, options, interrupted=interrupted)
    return int(ExitCode.INTERRUPTED if interrupted else ExitCode.HEALTHY)


def _recipe(options: Mapping[str, Any]) -> Recipe:
    evaluate = options["evaluate"]
    if evaluate not in ("epoch", "end"):
        if not evaluate.replace(",", "").replace(" ", "").isdecimal():
            raise UsageError(f"--evaluate takes epoch, end, or steps such as 0,10,100, got {evaluate!r}")
        evaluate = tuple(parse_numbers("--evaluate", evaluate, kind=int))
    typed = {
        "augment": sounding.data.Augmentation() if options["augment"] else None,
        "evaluate": evaluate,
        "betas": tuple(parse_numbers("--betas", options["betas"], kind=float)),
        "eps": options["optimizer_eps"],  # --eps is the norm's
    }
    # options are called as the fields of a recipe are, but for those that are typed above
    known: dict[str, Any] = {field.name: options.get(field.name) for field in fields(sounding.train.Recipe)}
    return sounding.train.Recipe(**known | typed)


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
    rates = parse_numbers("--lr", options["rates"], kind=float)
    seeds = parse_numbers("--seeds", options["seeds"].removesuffix(","), kind=int)
    many = len(seeds) == 1 and not options["seeds"].endswith(",")  # "3" are three seeds, "3," is the seed 3
    chosen: Any = seeds[0] if many else seeds
    if many and seeds[0] < 1:
        raise UsageError(f"--seeds must be at least 1, got {seeds[0]}")
    return sounding.train.make_grid(model, data, learning_rates=rates, seeds=chosen, vary=vary, **fixed)


def _default_checkpoint(model: str, dataset: str, options: Mapping[str, Any]) -> Path:
    """A name of its own for every set of options that changes the numbers."""
    # options that only say what is shown, or where it is kept
    shown = ("out", "plot", "as_json", "quiet", "checkpoint", "checkpoint_seconds", "fresh", "choose_by")
    told = {name: value for name, value in options.items() if name not in shown}
    text = json.dumps([model, dataset, told], sort_keys=True, default=str)
    try:
        FOLDER.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {FOLDER}: {error.strerror or error}", hint="--checkpoint FILE") from error
    return FOLDER / f"{model}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.ckpt"


def _run(grid: Grid, data: Any, recipe: Recipe, path: Path, options: Mapping[str, Any]) -> History:
    import torch

    steps = parse_numbers("--measure-at", options["measure_at"], kind=int) if options["measure_at"] else []
    seed = options["data_seed"]
    with progress_over("steps", quiet=options["quiet"]) as tell:

        def update(state: Progress) -> None:
            losses = [point.train_loss for point in state.points if math.isfinite(point.train_loss)]
            told = f"steps, lowest training loss {min(losses):.4g}" if losses else "steps"
            tell(told, state.step, state.steps)

        return sounding.train.train_together_(
            data=data,
            recipe=recipe,
            generator=grid.orders(seed) if options["own_orders"] else torch.Generator().manual_seed(seed),
            device=options["device"],
            measure_at=steps,
            checkpoint=sounding.train.Checkpoint(path, seconds=options["checkpoint_seconds"]),
            progress=update,
            **grid.runs,
        )


def _report(history: History, recipe: Recipe, path: Path, options: Mapping[str, Any], *, interrupted: bool) -> None:
    groups = sorted({name for entry in history.settings for name in entry} - {"learning_rate", "seed"})
    choices = None
    if history.curves:
        labels = ",".join(groups) if groups else [()] * history.runs
        choices = sounding.train.choose_rates(history, labels, by=options["choose_by"])
    if options["as_json"]:
        chosen = [fields_of(choice, "group learning_rate runs value") for choice in choices.choices] if choices else []
        told = {"recipe": recipe, "rule": getattr(choices, "rule", None), "choices": chosen, "interrupted": interrupted}
        print_json({**history.to_dict(), **told, "checkpoint": str(path)})
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


def print_history(history: History, choices: Choices | None, *, names: Sequence[str]) -> None:
    """Every run's last numbers and its curve, and the best rate of each group."""
    screen = console()
    if not history.curves:
        screen.print("nothing was evaluated yet")
        return
    names_of_settings = (f">{name}".replace("learning_rate", "rate") for name in history.settings[0])
    table = new_table(*names_of_settings, *HEADINGS, "training loss over time")
    for run in range(history.runs):
        curve = [point.train_loss for point in history.curve(run)]
        diverged = history.diverged[run]
        drawn = draw_curve(curve) if diverged is None else f"diverged at step {diverged}"
        table.add_row(*_cells(history.final(run), history.settings[run]), drawn)
    screen.print(table)
    if choices is None:
        return
    screen.print(f"\nbest learning rate ({choices.rule}):", markup=False)
    for choice in choices.choices:
        group = choice.group if isinstance(choice.group, tuple) else (choice.group,)
        label = ", ".join(f"{name} {value}" for name, value in zip(names, group, strict=False)) or "all runs"
        diverged = choice.learning_rate is None
        best = "none, every run diverged" if diverged else f"{choice.learning_rate:g} ({choice.value:.4g})"
        screen.print(f"  {label}: {best}", markup=False)


def draw_curve(values: Sequence[float]) -> str:
    """A curve in one line of text; gaps where a value is not finite.

    >>> draw_curve([3.0, 2.0, 1.0, float("nan")])
    '█▅▁ '
    """
    if len(values) > CURVE:
        values = [values[round(i * (len(values) - 1) / (CURVE - 1))] for i in range(CURVE)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "not finite"
    # a flat curve has no span to divide by
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    steps = [round((value - low) / span * (len(BARS) - 1)) if math.isfinite(value) else -1 for value in values]
    return "".join(BARS[step] if step >= 0 else " " for step in steps)


def curves_of(history: History) -> dict[str, tuple[list[float], list[float]]]:
    """Training loss over epochs by name of the run."""
    found = {}
    for run, settings in enumerate(history.settings):
        name = ", ".join(f"{key.replace('learning_rate', 'rate')} {_word(value)}" for key, value in settings.items())
        points = history.curve(run)
        found[name] = [point.epoch for point in points], [point.train_loss for point in points]
    return found


def _cells(point: Point, settings: Mapping[str, Any]) -> list[str]:
    numbers = [point.train_loss, point.train_accuracy, point.test_loss, point.test_accuracy]
    words = [
        "" if number is None else "–" if math.isnan(number) else f"{number:{form}}"
        for number, form in zip(numbers, (".4g", ".1%", ".4g", ".1%"), strict=True)
    ]
    return [*(_word(value) for value in settings.values()), f"{point.epoch:.3g}", *words]


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
