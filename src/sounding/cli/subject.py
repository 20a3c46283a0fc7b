"""The network that a command works on: the options that choose it, how it is made from a seed, and its batch."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from sounding.cli.options import SEED, with_options
from sounding.errors import UsageError, require_device

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sounding.cli.inputs import Choice


in_mode = click.option(
    "--mode", type=click.Choice(["train", "eval", "keep"]), default="train",
    help="Mode in which a network runs. keep leaves each module in its own mode.",
)  # fmt: skip


def parse_shape(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """One sample's shape: `64`, `3,32,32` or `3x32x32`."""
    if value is None:
        return None
    parts = value.replace("×", ",").replace("x", ",").strip("()[] ").rstrip(",").split(",")
    try:
        shape = tuple(int(part) for part in parts)
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise click.BadParameter(f"expected sizes such as 64 or 3,32,32, got {value!r}")
    return shape


@dataclass(frozen=True)
class Wanted:
    """What the options say about the batch of a network, its loss, and where it runs."""

    data: str | None = None
    input_shape: tuple[int, ...] | None = None
    batch_size: int | None = None
    loss: str | None = None
    device: str | None = None
    seed: int = 0

    def load(self, target: str) -> nn.Module:
        """The network that TARGET names, for samples as these options have them."""
        from sounding.cli.target import load_target

        return load_target(target, data=self.data, shape=self.input_shape)


def on_network(*, least: int = 1, usual: int | None = None, without: Collection[str] = ()) -> Callable[[Any], Any]:
    """A decorator that gives a command the options of `Wanted`, but for some, which it gets as one record.

    A batch has at least `least` samples, and `usual` where none are asked for, or as many as the data say.
    """
    size = "" if usual else " [default: 128, or 32 of the digits where they are made larger]"
    options = {
        "data": click.option(
            "--data", metavar="SOURCE",
            help="Source of the batch: digits, mnist, cifar-10, gaussian, tokens:1000 (random tokens of a vocabulary "
            "of 1000), …, or FILE.npz with arrays inputs and targets, or with arrays named as the arguments of "
            "forward."),
        "input_shape": click.option(
            "--input-shape", callback=parse_shape, metavar="SHAPE", help="Shape of one sample, such as 64 or 3,32,32."),
        "batch_size": click.option(
            "--batch-size", type=click.IntRange(min=least), default=usual, metavar="N",
            help=f"Samples in the batch{size}."),
        "loss": click.option(
            "--loss", metavar="NAME",
            help="Loss: cross_entropy, mse, random (the output along a random direction), or file.py:name [default: "
            "what fits the targets]."),
        "device": click.option(
            "--device", metavar="NAME", help="Device: cpu, cuda, cuda:1, mps, ... [default: where the network is]."),
        "seed": click.option("--seed", type=SEED, default=0, help="Seed of the weights and of the batch."),
    }  # fmt: skip
    kept = [field.name for field in fields(Wanted) if field.name not in without]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def gathered(*arguments: Any, **given: Any) -> Any:
            return command(*arguments, wanted=Wanted(**{name: given.pop(name) for name in kept}), **given)

        return with_options(*(options[name] for name in kept))(gathered)

    return decorate


@dataclass(frozen=True)
class Opened:
    """Networks made from one seed, a batch that the first of them takes, the loss, and the generator of the batch."""

    models: list[nn.Module]
    chosen: Choice
    loss: str | Callable[..., torch.Tensor] | None
    generator: torch.Generator

    @property
    def options(self) -> dict[str, Any]:
        """What every measurement of these networks is told beside them and their batch."""
        # axis 0 is the usual place of the samples, which a measurement finds by itself
        return {"loss": self.loss, "batch_axis": self.chosen.axis or None, "generator": self.generator}

    def draw(self) -> tuple[Any, Any]:
        """Inputs and targets of another batch."""
        batch = self.chosen.draw()
        return batch.given, batch.targets

    @property
    def data(self) -> str:
        """The batch in words."""
        from sounding.cli.inputs import describe

        batch, axis = self.chosen.batch, self.chosen.axis
        inferred = ", a shape inferred from the network" if self.chosen.inferred else ""
        return f"{batch.name}, {batch.inputs.shape[axis]} samples of {describe(batch, axis)}{inferred}"


@contextlib.contextmanager
def opened(
    wanted: Wanted, *makes: Callable[[], nn.Module], tell: Callable[[str], None] | None = None
) -> Iterator[Opened]:
    """The networks that these functions make, each from the seed, on their device, with a batch.

    What their code prints while they are open goes to stderr; torch's generator is as before afterwards.
    """
    import torch

    from sounding.cli.inputs import choose_batch
    from sounding.cli.target import calling

    device = None if wanted.device is None else torch.device(require_device(wanted.device))
    with torch.random.fork_rng():
        models = []
        for make in makes:
            # the command line is the edge: here, and nowhere in the library, a seed is set
            torch.manual_seed(wanted.seed)
            model = make()
            with calling(f"moving the network to {device}"):
                models.append(model if device is None else model.to(device))
        # the batch has a generator of its own: what the network drew for its weights does not change it
        loss, generator = choose_loss(wanted.loss), torch.Generator().manual_seed(wanted.seed)
        chosen = choose_batch(models[0], wanted, generator, tell)
        with contextlib.redirect_stdout(sys.stderr):  # a network may print while it runs
            yield Opened(models, chosen, loss, generator)


def choose_loss(name: str | None) -> str | Callable[..., torch.Tensor] | None:
    """A known loss by name, or the function at `file.py:name`."""
    from sounding.cli.target import calling, load_object
    from sounding.probe.losses import LOSSES

    if name is None or name in LOSSES:
        return name
    if ":" not in name:
        raise UsageError(f"unknown loss {name!r}", hint=f"one of {', '.join(LOSSES)}, or file.py:name")
    found = load_object(name)
    if isinstance(found, type):
        with calling(f"making the loss with {name}"):
            found = found()
    if not callable(found):
        raise UsageError(f"expected {name} to be a function of outputs and targets, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]
