"""`sounding depth`: what grows as a network gets deeper, and whether its parametrization transfers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sounding.cli.check import parse_shape
from sounding.cli.output import SEED, print_json, say, working
from sounding.cli.presentation import draw, presented
from sounding.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from torch import nn


@click.command()
@click.argument("target")
@click.option("--to", type=click.IntRange(min=2), required=True, metavar="L", help="Largest depth.")
@click.option("--from", "start", type=click.IntRange(min=1), metavar="L", help="Smallest depth [default: a quarter].")
@click.option("--data", metavar="SOURCE", help="As for `sounding check`.")
@click.option("--input-shape", callback=parse_shape, metavar="SHAPE", help="Of one sample, for example 64 or 3,32,32.")
@click.option("--batch-size", type=click.IntRange(min=2), default=32, show_default=True, metavar="N", help="Samples.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the weights and the batch.")
@presented
@click.pass_context
def depth(
    ctx: click.Context,
    target: str,
    to: int,
    start: int | None,
    data: str | None,
    input_shape: tuple[int, ...] | None,
    batch_size: int,
    seed: int,
    as_json: bool,
    plot: Path | None,
) -> None:
    """How deep could it go? A network at L, 2L, 4L, measured and predicted, and whether what it does stays bounded.

    TARGET is file.py:function with an argument `depth`, or mlp or transformer with options; any other TARGET of
    `sounding check` is one network, whose repeated block is extended by theory, and depths count its blocks.

    \b
    Exit codes: 0 the parametrization transfers, 1 it does not, 2 wrong usage, 4 not known.
    """
    import torch

    from sounding.cli.inputs import choose_batch
    from sounding.reader.depth import depth as look

    with torch.random.fork_rng(), working("loading", quiet=as_json) as tell:
        # the command line is the edge: here, and nowhere in the library, a seed is set
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        make, example = _choose(target, data=data, shape=input_shape, start=start or max(1, to // 4))
        chosen = choose_batch(
            example, data=data, shape=input_shape, batch_size=batch_size, generator=generator, tell=tell
        )
        result = look(
            make,
            chosen.batch.inputs,
            chosen.batch.targets,
            to=to,
            start=start,
            batch_axis=chosen.axis or None,
            generator=generator,
            progress=lambda at: tell(f"depth {at}"),
        )
    draw(plot, lambda pictures: pictures.depths(result, title=target))
    if as_json:
        print_json({"target": target, **result.to_dict()})
    else:
        say(str(result))
    codes = {True: ExitCode.HEALTHY, False: ExitCode.UNHEALTHY, None: ExitCode.NOT_KNOWN}
    ctx.exit(codes[result.transfers])


def _choose(
    target: str, *, data: str | None, shape: tuple[int, ...] | None, start: int
) -> tuple[nn.Module | Callable[..., nn.Module], nn.Module]:
    """What to look at, a function of the depth or one network, and a network to find inputs for."""
    from sounding.cli.target import calling, load_object, load_target
    from sounding.models import is_spec
    from sounding.models.registry import option_types

    name, *words = target.split(",")
    if is_spec(target) and "depth" in option_types(name):
        kept = [word for word in words if word.partition("=")[0].strip() != "depth"]

        def build(depth: int) -> nn.Module:
            return load_target(",".join([name, *kept, f"depth={depth}"]), data=data, shape=shape)

        return build, build(start)
    found: Any = None if is_spec(target) else load_object(target)
    if not callable(found) or not _takes_depth(found):
        model = load_target(target, data=data, shape=shape)
        return model, model

    def make(depth: int) -> nn.Module:
        from torch import nn

        with calling(f"making the network with {target}"):
            made = found(depth=depth)
        if not isinstance(made, nn.Module):
            raise UsageError(f"expected {target} to make a torch.nn.Module, got {type(made).__name__}")
        return made

    return make, make(start)


def _takes_depth(found: Callable[..., Any]) -> bool:
    from torch import nn

    try:
        return not isinstance(found, nn.Module) and "depth" in inspect.signature(found).parameters
    except (TypeError, ValueError):
        return False
