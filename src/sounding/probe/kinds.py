"""What each kind of finding, and each word of a table, means: titles and pages, kept in Markdown beside this file."""

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
    return _read("kinds.md")


@functools.cache
def words() -> dict[str, Page]:
    """The words of the table and the headline that are no kinds of findings."""
    return _read("words.md")


def _read(name: str) -> dict[str, Page]:
    source = resources.files("sounding.probe").joinpath(name).read_text("utf-8")
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
    return _look_up(kind, pages())


def explain(word: str) -> Page:
    """The page of a kind, or of a word of the table or the headline.

    >>> explain("depth scales").title
    'A change of the squared gradient by the factor 2.7'
    """
    return _look_up(word, pages() | words())


def _look_up(word: str, known: dict[str, Page]) -> Page:
    name = word.strip().lower().replace(" ", "_").replace("-", "_")
    name = name.removesuffix("s") if name not in known else name
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        raise UsageError(f"no kind of finding is called {word!r}", hint=close[0] if close else ", ".join(known))
    return known[name]
