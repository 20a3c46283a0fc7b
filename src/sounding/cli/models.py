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
    from sounding.models.vision import LIBRARIES, vision_names

    missing, refused, vision = list[str](), dict[str, str](), dict[str, list[str]]()
    found: dict[str, str] = {}
    try:
        found = hf_names()
    except UsageError as error:
        missing.append(str(error))
    for library in LIBRARIES:
        try:
            vision[library] = vision_names(library)
        except UsageError as error:
            missing.append(str(error))
    for name in [*found] if attempt else ():
        try:
            build_hf(f"hf:{name}")
        except UsageError as error:
            refused[name] = str(error)
    there = {name: task for name, task in found.items() if name not in refused}
    if as_json:
        print_json({"ours": list(names()), "hf": there, **vision, "refused": refused, "missing": missing})
        return
    screen = console()
    screen.print(f"ours: {', '.join(names())}", markup=False, soft_wrap=True)
    for task in sorted(set(there.values())):
        told = ", ".join(f"hf:{name}" for name, own in there.items() if own == task)
        screen.print(f"\n{task}: {told}", markup=False, soft_wrap=True)
    for library, known in vision.items():
        # timm has more than a thousand: its own list is a better place to search them
        told = ", ".join(f"{library}:{name}" for name in known)
        told = f"any of {len(known)} names of timm.list_models(), as timm:{known[0]}" if library == "timm" else told
        screen.print(f"\n{library}: {told}", markup=False, soft_wrap=True)
    for name, reason in refused.items():
        screen.print(f"\nnot hf:{name}: {reason}", markup=False, soft_wrap=True)
    for sentence in missing:
        screen.print(f"\n{sentence}", markup=False, soft_wrap=True)
