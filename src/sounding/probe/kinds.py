"""What each kind of finding means: titles and pages, kept in kinds.md beside this file."""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass
from importlib import resources

from sounding.errors import UsageError


@dataclass(frozen=True)
class Page:
    """The page of a kind of finding: its title, and its text in Markdown."""

    kind: str
    title: str
    text: str


@functools.cache
def pages() -> dict[str, Page]:
    """Every kind of finding by its stable id, in the order of the file."""
    source = resources.files("sounding.probe").joinpath("kinds.md").read_text("utf-8")
    found = {}
    for section in source.split("\n# "):
        heading, _, text = section.removeprefix("# ").partition("\n")
        kind, _, title = heading.partition(": ")
        found[kind] = Page(kind, title, text.strip())
    return found


def page_of(kind: str) -> Page:
    """The page of a kind.

    >>> page_of("zero_start").title
    'An output starts at zero'
    """
    known = pages()
    name = kind.strip().lower().replace(" ", "_").replace("-", "_")
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        raise UsageError(f"no kind of finding is called {kind!r}", hint=close[0] if close else ", ".join(known))
    return known[name]
