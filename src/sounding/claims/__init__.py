"""The ledger: figures, tables, theorems and observations of the papers, how each is checked, and what came out.

A `Claim` states what a paper says and what that requires of measured numbers; `judge` computes the verdict from the
intervals. `sounding.reproduce` runs claims and writes results, `sounding claims table` makes the ledger from them.
"""

from __future__ import annotations

from sounding.claims.claim import (
    KINDS,
    PAPERS,
    SCALES,
    VERDICTS,
    Claim,
    Context,
    Correction,
    Expectation,
    Outcome,
    Setting,
    judge,
)
from sounding.claims.number import Number, estimate, exact, fraction_of, mean_of, ratio_of, slope_of
from sounding.claims.picture import Map, Panel, Picture, Series
from sounding.claims.registry import all_claims, claims_of, find_claim
from sounding.claims.result import Result, largest, read_result, read_results

__all__ = [
    "KINDS", "PAPERS", "SCALES", "VERDICTS", "Claim", "Context", "Correction", "Expectation", "Map", "Number",
    "Outcome", "Panel", "Picture", "Result", "Series", "Setting", "all_claims", "claims_of", "estimate", "exact",
    "find_claim", "fraction_of", "judge", "largest", "mean_of", "ratio_of", "read_result", "read_results",
    "slope_of",
]  # fmt: skip
