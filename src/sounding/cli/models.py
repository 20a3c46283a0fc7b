"""`sounding models`: which networks can be named as a TARGET."""

from __future__ import annotations

import click

from sounding.cli.output import console, print_json
from sounding.errors import UsageError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def models() -> None:
    """Networks that have a name: give it where a command takes TARGET."""


@models.command(name="list")
@click.option(
    "--try", "attempt", is_flag=True, help="Build each network of the transformers library, which takes minutes."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
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
        found, missing = {}, str(error)
    for name in [*found] if attempt else ():
        try:
            build_hf(f"hf:{name}")
        except UsageError as error:
            refused[name] = str(error)
    there = {name: task for name, task in found.items() if name not in refused}
    if as_json:
        print_json({"ours": list(names()), "hf": there, "refused": refused, "missing": missing})
        return
    screen = console()
    screen.print(f"ours: {', '.join(names())}", markup=False, soft_wrap=True)
    for task in sorted(set(there.values())):
        told = ", ".join(f"hf:{name}" for name, own in there.items() if own == task)
        screen.print(f"\n{task}: {told}", markup=False, soft_wrap=True)
    for name, reason in refused.items():
        screen.print(f"\nnot hf:{name}: {reason}", markup=False, soft_wrap=True)
    if missing:
        screen.print(f"\n{missing}", markup=False, soft_wrap=True)
