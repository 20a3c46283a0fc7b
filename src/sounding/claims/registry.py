"""All claims, seed by seed; a seed's rows are imported when asked for."""

from __future__ import annotations

import difflib
import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from sounding.claims.claim import SEEDS, Claim
from sounding.errors import UsageError


@cache
def claims_of(seed: str) -> tuple[Claim, ...]:
    """The rows of one seed, in the order of the seed."""
    if seed not in SEEDS:
        raise UsageError(f"no seed {seed!r}", hint=f"one of {', '.join(SEEDS)}")
    rows: tuple[Claim, ...] = importlib.import_module(f"sounding.claims.{seed}").CLAIMS
    return rows


def all_claims() -> tuple[Claim, ...]:
    """Every row of the ledger."""
    return tuple(claim for seed in SEEDS for claim in claims_of(seed))


def find_claim(claim_id: str) -> Claim:
    """The row of that id.

    Raises:
        UsageError: there is none; the closest ids are named.
    """
    known = {claim.id: claim for claim in all_claims()}
    if claim_id not in known:
        close = difflib.get_close_matches(claim_id, known, n=3, cutoff=0.5)
        hint = f"{', '.join(close)}, or sounding claims list" if close else "sounding claims list"
        raise UsageError(f"no claim {claim_id!r}", hint=hint)
    return known[claim_id]


def shipped_verdicts() -> dict[str, dict[str, Any]]:
    """The verdicts of the results that come with the package, by id."""
    path = Path(__file__).parent / "ledger.json"
    return {row["id"]: row for row in json.loads(path.read_text("utf-8"))}
