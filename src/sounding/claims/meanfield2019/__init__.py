"""The rows of meanfield2019."""

from __future__ import annotations

from sounding.claims.claim import Claim
from sounding.claims.meanfield2019 import (
    batches,
    crossbatch,
    explosion,
    figure1,
    figure2,
    figure3,
    figure4,
    figure5,
    fixed_point,
    linear,
    transforms,
)

CLAIMS: tuple[Claim, ...] = (
    *transforms.CLAIMS,
    *fixed_point.CLAIMS,
    *explosion.CLAIMS,
    *figure1.CLAIMS,
    *figure2.CLAIMS,
    *figure3.CLAIMS,
    *figure4.CLAIMS,
    *figure5.CLAIMS,
    *linear.CLAIMS,
    *batches.CLAIMS,
    *crossbatch.CLAIMS,
)
