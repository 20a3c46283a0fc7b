"""The rows of orth2021, and of thesis2024 chapter 2, which repeats it."""

from __future__ import annotations

from sounding.claims.claim import Claim
from sounding.claims.orth2021 import chains, conjecture, experiments, theorems

CLAIMS: tuple[Claim, ...] = chains.CLAIMS + conjecture.CLAIMS + experiments.CLAIMS + theorems.CLAIMS
