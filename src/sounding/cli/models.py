"""`sounding models`: which networks can be named as a TARGET."""

from __future__ import annotations

import click

from sounding.cli.options import json_option
from sounding.cli.output import print_json, say
from sounding.errors import UsageError


@click.group()
def models() -> None:
    """List networks that have a name, which can be given where a command takes TARGET."""


@models.command(name="list")
@click.option("--try", "attempt", is_flag=True,
              help="Build each network of the transformers library, which takes minutes.")  # fmt: skip
@json_option
def list_(attempt: bool, as_json: bool) -> None:
    """List the names, sorted by what the networks do.

    With --try the list has only networks that can be built here, and says why the others cannot.
    """
    from sounding.models import names
    from sounding.models.hf import build_hf, hf_names

    missing, refused = None, dict[str, str]()
    try:
        found = hf_names()
    except UsageError as error:
        found, missing = {}, str(error)  # without the transformers library ours are listed all the same
    for name in [*found] if attempt else ():
        try:
            build_hf(f"hf:{name}")
        except UsageError as error:
            refused[name] = str(error)
    there = {name: task for name, task in found.items() if name not in refused}
    if as_json:
        print_json({"ours": list(names()), "hf": there, "refused": refused, "missing": missing})
        return
    by_task = {task: [f"hf:{name}" for name in there if there[name] == task] for task in sorted(set(there.values()))}
    lines = [f"{kind}: {', '.join(known)}" for kind, known in {"ours": names(), **by_task}.items()]
    lines += [f"not hf:{name}: {reason}" for name, reason in refused.items()]
    say("\n\n".join(filter(None, [*lines, missing])))
