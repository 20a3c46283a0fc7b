"""`sounding depth`: what grows as a network gets deeper, and whether its parametrization transfers."""

from __future__ import annotations

import contextlib
import functools
import inspect
from pathlib import Path
from typing import Any

import click

import sounding
from sounding.cli.options import network_argument, presented
from sounding.cli.output import draw, print_json, say, working
from sounding.cli.subject import Wanted, in_mode, on_network, opened
from sounding.errors import ExitCode


@click.command()
@network_argument("target")
@click.option("--to", type=click.IntRange(min=2), required=True, metavar="L", help="Largest depth to look at.")
@click.option("--from", "--start", "start", type=click.IntRange(min=1), metavar="L",
              help="Smallest depth to look at [default: a quarter of the largest].")  # fmt: skip
@on_network(least=2, usual=32, without=("device",))
@in_mode
@presented
@click.pass_context
def depth(
    ctx: click.Context, target: str, to: int, start: int | None, wanted: Wanted, mode: Any, as_json: bool,
    plot: Path | None
) -> None:  # fmt: skip
    """Say how deep a network could go: measure and predict it at depths L, 2L, 4L, and say what grows with depth.

    TARGET is file.py:function, where the function has an argument `depth`, or it is mlp or transformer with options.
    Any other TARGET of `sounding check` is one network: theory repeats the block that it repeats, and depths count
    these blocks.

    \b
    Exit codes: 0 nothing grows or falls faster than depth, so that settings that work at one depth
    work at another; 1 something does; 2 wrong usage; 4 not known.
    """
    # made once, and not before the seed is set
    found = functools.cache(lambda: _choose(target, wanted))

    def example() -> Any:
        # the batch is chosen for the smallest network
        return found()(depth=start or max(1, to // 4)) if inspect.isfunction(found()) else found()

    with working("loading", quiet=as_json) as tell, opened(wanted, example, tell=tell) as at:
        result = sounding.depth(
            found(),
            at.chosen.batch.inputs,
            at.chosen.batch.targets,
            to=to,
            start=start,
            mode=mode,
            progress=lambda at: tell(f"depth {at}"),
            **at.options,
        )
    draw(plot, lambda pictures: pictures.depths(result, title=target))
    if as_json:
        print_json({"target": target, **result.to_dict()})
    else:
        say(str(result))
    codes = {True: ExitCode.HEALTHY, False: ExitCode.UNHEALTHY, None: ExitCode.NOT_KNOWN}
    ctx.exit(codes[result.transfers])


def _choose(target: str, wanted: Wanted) -> Any:
    """What to look at: a function of the depth that makes networks, or one network."""
    from torch import nn

    from sounding.cli.target import load_object, make_network
    from sounding.models import is_spec
    from sounding.models.registry import option_types

    if not is_spec(target):
        found = load_object(target)
        with contextlib.suppress(TypeError, ValueError):  # what is written in C may have no signature
            if not isinstance(found, nn.Module) and "depth" in inspect.signature(found).parameters:
                return lambda depth: make_network(target, found, depth=depth)
        return wanted.load(target)
    name, *words = target.split(",")
    # a name of ours without the option `depth` is one network, as a class or a function without it is
    if "depth" not in option_types(name):
        return wanted.load(target)
    kept = [word for word in words if word.partition("=")[0].strip() != "depth"]
    return lambda depth: wanted.load(",".join([name, *kept, f"depth={depth}"]))
