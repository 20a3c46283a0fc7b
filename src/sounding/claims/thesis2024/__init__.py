"""The rows of thesis2024."""

from __future__ import annotations

from sounding.claims.claim import Claim
from sounding.claims.thesis2024 import (
    appendix_data,
    appendix_explosion,
    appendix_nonlinearity,
    centred,
    concentration,
    convergence,
    first_gradients,
    isometry,
    kernel_figures,
    mean_field,
    orthogonalization,
    training_accuracy,
    training_orthogonality,
)

CLAIMS: tuple[Claim, ...] = (
    *mean_field.CLAIMS,
    *concentration.CLAIMS,
    *isometry.CHAPTER_4,
    *centred.CLAIMS,
    *convergence.CLAIMS,
    *kernel_figures.CLAIMS,
    *orthogonalization.CLAIMS,
    *isometry.CHAPTER_6,
    *first_gradients.CLAIMS,
    *appendix_data.CLAIMS,
    *appendix_explosion.CLAIMS,
    *appendix_nonlinearity.CLAIMS,
    *training_accuracy.CLAIMS,
    *training_orthogonality.CLAIMS,
)
