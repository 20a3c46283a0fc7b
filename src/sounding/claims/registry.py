"""The rows of the ledger: one file of data each, read when its id is asked for.

`rows/PAPER/NAME.toml` is the row PAPER-NAME, `rows/order.toml` lists the names in the order of the paper. A row that
says `like = ID` takes from that row what it does not say itself: settings and picture key by key, everything else
whole, but never `parent` and `quotation`.
"""

from __future__ import annotations

import difflib
import importlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from sounding.claims.claim import PAPERS, SCALES, Claim, Context, Correction, Expectation, Outcome, Setting, Training
from sounding.claims.picture import write_words
from sounding.errors import UsageError

FOLDER = Path(__file__).parent
ROWS = FOLDER / "rows"


@dataclass(frozen=True)
class Measurement:
    """A measuring function by its name below `sounding.claims`, and the words of the picture that it draws.

    Its module is imported when it is first called.
    """

    name: str
    words: Mapping[str, Any]

    def __call__(self, values: Mapping[str, Any], context: Context) -> Outcome:
        module, _, function = self.name.rpartition(".")
        outcome: Outcome = getattr(importlib.import_module(f"sounding.claims.{module}"), function)(values, context)
        known = {**values, **outcome.numbers, **outcome.words}
        return replace(outcome, picture=write_words(outcome.picture, self.words, known))


@cache
def claims_of(paper: str) -> tuple[Claim, ...]:
    """The rows of one paper, in the order of the paper."""
    if paper not in PAPERS:
        raise UsageError(f"no paper {paper!r}", hint=f"one of {', '.join(PAPERS)}")
    return tuple(_load(paper, name) for name in _order()[paper])


def all_claims() -> tuple[Claim, ...]:
    """Every row of the ledger."""
    return tuple(claim for paper in PAPERS for claim in claims_of(paper))


def find_claim(claim_id: str) -> Claim:
    """The row of that id; no other row is built.

    Raises:
        UsageError: there is none; the closest ids are named.
    """
    paper, _, name = claim_id.partition("-")
    if name in _order().get(paper, ()):
        return _load(paper, name)
    known = [f"{paper}-{name}" for paper, names in _order().items() for name in names]
    close = difflib.get_close_matches(claim_id, known, n=3, cutoff=0.5)  # ids are short: half of the letters is close
    hint = f"{', '.join(close)}, or sounding claims list" if close else "sounding claims list"
    raise UsageError(f"no claim {claim_id!r}", hint=hint)


def cases_of(claim_id: str) -> tuple[Claim, ...]:
    """The rows that are cases or parts of a row's statement, in the order of the paper."""
    return tuple(claim for claim in claims_of(find_claim(claim_id).paper) if claim.parent == claim_id)


def shipped_verdicts() -> dict[str, dict[str, Any]]:
    """The verdicts of the results that come with the package, by id."""
    return {row["id"]: row for row in json.loads((FOLDER / "ledger.json").read_text("utf-8"))}


@cache
def left_out(paper: str) -> dict[str, str]:
    """The numbered items of a paper that are no rows, each with the row that covers it or the reason."""
    found: dict[str, dict[str, str]] = tomllib.loads((ROWS / "left-out.toml").read_text("utf-8"))
    return found.get(paper, {})


@cache
def _order() -> dict[str, list[str]]:
    return tomllib.loads((ROWS / "order.toml").read_text("utf-8"))


@cache
def _load(paper: str, name: str) -> Claim:
    """The row that a file describes."""
    fields = _read(f"{paper}-{name}")
    expectations = _expectations(fields.pop("expectations"))
    if correction := fields.pop("correction", None):
        correction = Correction(_flow(correction["statement"]), _expectations(correction["expectations"]))
    picture = fields.pop("picture", {})
    picture["caption"] = _flow(picture.get("caption", "{caption}"))  # some rows have it among their settings
    settings = fields.pop("settings")
    shared = settings.pop("all", {})  # what all scales have
    if not set(settings) <= set(SCALES):  # a misspelt scale would be lost in silence
        raise ValueError(f"{paper}-{name} has settings for {', '.join(settings)}, expected {', '.join(SCALES)}, all")
    chosen = {}
    for scale in sorted(settings, key=SCALES.index):  # quick first, whatever the order in the file
        reduction, training = (settings[scale].pop(key, None) for key in ("reduction", "training"))
        values = {**shared, **settings[scale]}  # a scale overrides what all have
        chosen[scale] = Setting(values, _flow(reduction or ""), Training(**training) if training else None)
    return Claim(
        id=f"{paper}-{name}",
        paper=paper,
        expectations=expectations,
        correction=correction,
        settings=chosen,
        measure=Measurement(fields.pop("measure"), picture),
        kind=fields.pop("kind"),
        # what is left are texts; an unknown key is refused by Claim
        **{key: _flow(text) for key, text in fields.items()},
    )


def _read(claim_id: str) -> dict[str, Any]:
    """The fields of a row's file, together with those of the row that it is like."""
    paper, _, name = claim_id.partition("-")
    fields = tomllib.loads((ROWS / paper / f"{name}.toml").read_text("utf-8"))
    model = fields.pop("like", None)
    if model is None:
        return fields
    # a model may have a model of its own
    base = {key: value for key, value in _read(model).items() if key not in ("parent", "quotation")}
    own = fields.pop("settings", {})
    settings = {scale: base["settings"].get(scale, {}) | own.get(scale, {}) for scale in {**base["settings"], **own}}
    picture = base.get("picture", {}) | fields.get("picture", {})
    return {**base, **fields, "settings": settings, "picture": picture}


def _expectations(table: Mapping[str, Mapping[str, Any]]) -> tuple[Expectation, ...]:
    return tuple(Expectation(quantity, **bounds) for quantity, bounds in table.items())


def _flow(text: str) -> str:
    """The text as one line: a file breaks lines where they are full."""
    return " ".join(text.split())
