"""The rows of rank2020v1."""

from __future__ import annotations

from sounding.claims.claim import Claim

CLAIMS: tuple[Claim, ...] = ()
