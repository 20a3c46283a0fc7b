"""The rows of thesis2024."""

from __future__ import annotations

from sounding.claims.claim import Claim

CLAIMS: tuple[Claim, ...] = ()
