"""`sounding explain`: the page of a kind of finding, or of a word of the table."""

from __future__ import annotations

import re

import click

from sounding.cli.options import json_option
from sounding.cli.output import print_json, say


@click.command()
@click.argument("kind", nargs=-1)
@json_option
def explain(kind: tuple[str, ...], as_json: bool) -> None:
    """Print what a KIND of finding means, where it was seen, what to do and when to ignore it.

    A finding is something that `sounding check` or `sounding audit` reports about a network, such as rank_collapse.
    Without KIND all kinds are listed. A word of the table or the headline is explained too, such as depth scale.
    """
    from sounding.probe import kinds

    chosen = [kinds.explain(" ".join(kind))] if kind else list(kinds.pages().values())
    if as_json:
        print_json({"kinds": chosen})
    elif not kind:
        width = max(len(page.kind) for page in chosen)
        say("\n".join(f"{page.kind:<{width}}  {page.title}" for page in chosen))
        say(f"\nWords of the table and the headline: {', '.join(kinds.words())}.".replace("_", " "))
    else:
        page = chosen[0]
        # a terminal shows no pictures: what one shows, and where it lies in the repository
        text = re.sub(r"!\[(.*?)\]\((?:\.\./)*(.*?)\)", r"Picture. \1 (\2).", page.text)
        say(f"{page.kind}: {page.title}\n\n{text.replace('**', '')}")
