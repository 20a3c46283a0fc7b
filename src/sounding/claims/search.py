"""Rows found by the paper's own numbering or by a few words."""

from __future__ import annotations

import re

from sounding.claims.claim import Claim
from sounding.claims.registry import all_claims
from sounding.errors import UsageError

SHORT = {"thm": "theorem", "fig": "figure", "cor": "corollary", "prop": "proposition", "sec": "section"}
SHORT |= {"app": "appendix", "eq": "equation", "obs": "observation", "lem": "lemma"}
IGNORED = {"of", "the", "in", "a", "an", "and"}


def search_claims(words: str) -> list[Claim]:
    """The rows that a few words name, best first: their place in the paper before what they say.

    Short forms count (thm, fig, cor, prop, sec, app, eq); numbers are looked for in the place alone.

    >>> [claim.id for claim in search_claims("Theorem 6.5 of thesis2024")]
    ['thesis2024-thm6.5']
    """
    wanted = _words(words)
    if not wanted:
        raise UsageError("expected words to look for, got none", hint='sounding claims find "theorem 5.11"')
    by_place, by_statement = [], []
    for claim in all_claims():
        place = _words(f"{claim.id} {claim.paper} {claim.place} {claim.kind}")
        # the panels of a figure have its number: figure 2 finds 2a
        place |= {number[0] for word in place if (number := re.match(r"\d+(?=[a-z]$)", word))}
        left = wanted - place
        if not left:
            by_place.append(claim)
        elif not re.search(r"\d", " ".join(left)) and left <= _words(f"{claim.statement} {claim.quotation}"):
            by_statement.append(claim)
    return by_place + by_statement


def _words(text: str) -> set[str]:
    """The words of a text in lower case, short forms written out and parted from the number they touch."""
    forms = "|".join([*SHORT, *SHORT.values(), "table"])
    spaced = re.sub(rf"\b({forms})s?\.?(?=\d|[a-z]\.\d)", r"\1 ", text.lower())
    found = (word.strip(".") for word in re.findall(r"[\w.′]+", spaced))
    return {SHORT.get(word, word) for word in found} - IGNORED - {""}
