"""The rows of meanfield2019."""

from __future__ import annotations

from sounding.claims.claim import Claim

CLAIMS: tuple[Claim, ...] = ()
