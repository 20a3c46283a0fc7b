"""The rows of rank2020v1."""

from __future__ import annotations

from sounding.claims.claim import Claim
from sounding.claims.rank2020v1 import centring, odd

CLAIMS: tuple[Claim, ...] = (*odd.CLAIMS, *centring.CLAIMS)
