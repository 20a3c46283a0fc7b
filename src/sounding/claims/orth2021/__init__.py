"""The rows of orth2021."""

from __future__ import annotations

from sounding.claims.claim import Claim

CLAIMS: tuple[Claim, ...] = ()
