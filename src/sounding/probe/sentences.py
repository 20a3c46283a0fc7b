"""What is said of each finding: the sentences of `sentences.toml`, filled in with what was measured."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from sounding.probe.records import Finding, FindingKind, Severity


@dataclass(frozen=True)
class Sentence:
    """What is said of one thing that can be wrong; every text may name numbers and words in braces.

    Args:
        kind: the kind of the finding.
        why: one or two sentences.
        remedies: what to try, called "try" in the file; one that is empty once it is filled in is left out.
        severity: how bad it is, where that does not depend on numbers.
        expected: what a sound start has there.
        found: what is there instead.
        paper: the key of the paper it comes from.
        reason: what stands in `why` in the place of its name.
    """

    kind: FindingKind
    why: str
    remedies: tuple[str, ...] = ()
    severity: Severity = "low"
    expected: str = ""
    found: str = ""
    paper: str = ""
    reason: str = ""


@functools.cache
def sentences() -> dict[str, Sentence]:
    """All of them by their keys; a key is the kind of its finding where the file names no other."""
    text = resources.files("sounding.probe").joinpath("sentences.toml").read_text("utf-8")
    rows: dict[str, dict[str, Any]] = tomllib.loads(text)

    def whole(key: str) -> dict[str, Any]:
        row = rows[key]
        return {"kind": key} | row if "like" not in row else whole(row["like"]) | row

    fields = {key: whole(key) for key in rows}
    return {
        key: Sentence(**{name: row[name] for name in row if name not in ("try", "like")}, remedies=tuple(row["try"]))
        for key, row in fields.items()
    }


def tell(
    key: str,
    severity: Severity | None = None,
    *,
    layer: str | None = None,
    depth: int | None = None,
    parameter: str | None = None,
    evidence: Mapping[str, float] | None = None,
    **words: object,
) -> Finding:
    """The finding of a key, its sentences filled in with its place, its evidence and further words.

    >>> tell("clones", layer="2", parameter="2.weight", copies=1, places=1, first="0.weight").found
    'equal to 0.weight'
    """
    said, numbers = sentences()[key], evidence or {}
    known = {"layer": layer, "parameter": parameter, **numbers, **words}
    known = {"reason": said.reason.format(**known)} | known
    why, expected, found, *remedies = (
        text.format(**known) for text in (said.why, said.expected, said.found, *said.remedies)
    )
    return Finding(
        said.kind, severity or said.severity, layer or None, depth, dict(numbers), why, said.paper,
        tuple(text for text in remedies if text), parameter=parameter, expected=expected, found=found,
    )  # fmt: skip
