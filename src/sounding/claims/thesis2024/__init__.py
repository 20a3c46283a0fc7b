"""The rows of thesis2024."""

from __future__ import annotations

from sounding.claims.claim import Claim
from sounding.claims.thesis2024 import isometry, mean_field

CLAIMS: tuple[Claim, ...] = (*mean_field.CLAIMS, *isometry.CHAPTER_4, *isometry.CHAPTER_6)
