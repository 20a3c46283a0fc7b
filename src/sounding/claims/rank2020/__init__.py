"""The rows of rank2020."""

from __future__ import annotations

from sounding.claims.claim import Claim
from sounding.claims.rank2020 import depth, invariant, lemmas, pretraining, training

CLAIMS: tuple[Claim, ...] = (*lemmas.CLAIMS, *depth.CLAIMS, *invariant.CLAIMS, *training.CLAIMS, *pretraining.CLAIMS)
