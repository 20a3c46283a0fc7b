"""`sounding audit`: the parameters of a network before its first step, without data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import sounding
from sounding.cli.options import SEED, json_beside, network_argument, quiet_option
from sounding.cli.output import console, despite_a_closed_pipe, new_table, print_json, working
from sounding.cli.sweep import FOLDER, engine
from sounding.cli.zoo import OUT, audit_zoo
from sounding.errors import ExitCode, UsageError
from sounding.look import write_number

if TYPE_CHECKING:
    from rich.console import Console

    from sounding.start import Audit


@click.command()
@network_argument("target", required=False)
@click.option("--compare", metavar="FACTORY",
              help="Build FACTORY directly and through the meta device, and compare how the weights are "
              "drawn.")  # fmt: skip
@click.option("--seed", type=SEED, default=0, help="Seed of the weights.")
@click.option("--zoo", type=click.Choice(["hf"]),
              help="Check every architecture of the transformers library instead of TARGET.")  # fmt: skip
@click.option("--only", metavar="NAMES", help="With --zoo: check only these architectures, for example gpt2,llama.")
@click.option("--out", type=FOLDER, metavar="DIR", help=f"With --zoo: folder of results and pages [default: {OUT}].")
@click.option("--force", is_flag=True, help="With --zoo: check again what has a result.")
@click.option("--pages", is_flag=True, help="With --zoo: check nothing, write the pages of the results.")
@engine
@json_beside
@quiet_option("Print only the verdict.")
@click.pass_context
def audit(
    ctx: click.Context, /, target: str | None, compare: str | None, seed: int, zoo: str | None,
    as_json: bool, quiet: bool, **options: Any
) -> None:  # fmt: skip
    """Look at every parameter of a network before its first step, without data, and say what is wrong.

    The table says how each parameter was drawn and how large it is. Parameters of the same kind are compared with each
    other. TARGET is written as for `sounding check`.

    FACTORY of --compare is a function without arguments that makes a network; often it is TARGET itself. The network is
    built a second time on torch's meta device, as large models are, and then initialized by its own code. Weights that
    are drawn differently that way are told.

    With --zoo hf every architecture of the transformers library is checked as `sounding check hf:NAME` does. If it is
    interrupted, the same command goes on with the rest. DIR/pages/index.html lists the architectures and links to a
    page about each. The options --only, --out, --force, --pages, --cluster and --jobs are for --zoo alone.

    \b
    Exit codes: 0 nothing of high severity, 1 a finding of high severity,
    2 wrong usage or a target that fails; with --zoo 0 all were checked, whatever was found,
    3 a check failed, 130 interrupted.
    """
    if zoo is not None:
        if target is not None or compare is not None:
            raise UsageError("expected either TARGET or --zoo, got both", hint="sounding audit --zoo hf --only gpt2")
        options["out"] = options["out"] or Path(OUT)
        ctx.exit(audit_zoo(quiet=quiet, as_json=as_json, **options))
    given = [name for name, value in options.items() if value]
    if given:
        raise UsageError(f"expected --zoo with --{given[0]}, got --{given[0]} alone", hint="sounding audit --zoo hf")
    if target is None:
        raise UsageError("expected a TARGET or --zoo, got none", hint="sounding audit --zoo hf")
    results = {target: _audit(target, seed, quiet=quiet)}
    if compare is not None:
        results[f"{compare} through the meta device"] = _compare(compare, seed)
    # the exit code tells the worse of the two ways of building
    worst = next((one for one in results.values() if one.status == "unhealthy"), results[target])
    with despite_a_closed_pipe():
        if as_json:
            print_json({"target": target, **worst.to_dict(), "audits": results})
        prose = console(stderr=as_json, quiet=quiet and as_json)
        for name, one in results.items():
            _print(one, prose, title=name, quiet=quiet)
    ctx.exit(ExitCode.of(worst.status))


def _audit(target: str, seed: int, *, quiet: bool) -> Audit:
    import torch

    from sounding.cli.target import load_target

    with working(f"looking at {target}", quiet=quiet), torch.random.fork_rng():
        # the command line is the edge: here, and nowhere in the library, a seed is set
        torch.manual_seed(seed)
        found = sounding.audit(load_target(target))
        return replace(found, findings=tuple(finding.for_target(target) for finding in found.findings))


def _compare(factory: str, seed: int) -> Audit:
    """The audit of a network that is built on the meta device, beside the eager one."""
    import torch
    from torch import nn

    from sounding.cli.target import load_object, load_target
    from sounding.models import is_spec
    from sounding.start.compare import compare_paths

    if not is_spec(factory) and isinstance(load_object(factory), nn.Module):
        raise UsageError(f"expected {factory} to be a callable that makes a network, got a network")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return compare_paths(lambda: load_target(factory))


def _print(result: Audit, prose: Console, *, title: str, quiet: bool) -> None:
    from rich.text import Text

    from sounding.cli.table import COLORS, STATES, shorten, write_finding

    color, mark = STATES[result.status]
    color = COLORS[result.findings[0].severity] if result.findings else color  # the worst stands first
    if not quiet:
        prose.print(Text(title, style="bold underline"))
    prose.print(Text.assemble((f"{mark} ", color), (result.summary, "bold")))
    if quiet:
        return
    table = new_table("parameters", "kind", ">how many", ">size", ">scale", "law")
    for place in result.places:
        low, high = (write_number(value) for value in place.scale)
        scale = low if low == high else f"{low} … {high}"
        table.add_row(Text(shorten(place.name, 40)), place.kind, str(place.count), str(place.size), scale, place.law)
    prose.print()
    prose.print(table)
    prose.print(Text("scale: root mean square of the entries; law: the known law that it fits.", style="dim"))
    for index, finding in enumerate(result.findings, start=1):
        prose.print()
        prose.print(write_finding(finding, index))
