"""Batch normalization without activation: convergence from any input covariance (meanfield2019, B.11 and B.12).

For φ = id the map keeps the eigenvectors of GΣG and moves its C nonzero eigenvalues towards each other; the limit is
(B/C) times the projector on their span, whatever the input, and the spread shrinks by C/(C + 2) per layer in the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sounding.activations.activation import Array
from sounding.errors import UsageError
from sounding.profile import Profile
from sounding.theory.bounds.bound import check_integer
from sounding.theory.bounds.orth2021 import expected_spectrum
from sounding.theory.covariance_map import center, check_covariance


@dataclass(frozen=True)
class IdentityConvergence:
    """Where a linear batch-normalized network takes a batch, and how fast."""

    rank: int  # C, the rank of GΣG
    limit: Array  # (B/C) times the projector on its range, (B, B)
    rate: float  # C/(C + 2), the factor per layer of the eigenvalue spread near the limit
    eigenvalues: Array  # (depth + 1, C), the nonzero eigenvalues of GΣG layer by layer, descending; row 0 is the input

    @property
    def spreads(self) -> Array:
        """The largest minus the smallest nonzero eigenvalue, layer by layer."""
        return np.asarray(self.eigenvalues[:, 0] - self.eigenvalues[:, -1])

    def profile(self) -> Profile:
        """Largest and smallest eigenvalue and their spread over depth."""
        largest, smallest = self.eigenvalues[:, 0], self.eigenvalues[:, -1]
        columns = {"eigenvalue_max": largest, "eigenvalue_min": smallest, "eigenvalue_spread": self.spreads}
        return Profile.over_depth(columns, {"theory": "identity", "rank": self.rank})


def identity_convergence(covariance: Array, *, depth: int) -> IdentityConvergence:
    """The exact eigenvalue dynamics of Σ ↦ B·E[(Gh/|Gh|)^⊗2] for `depth` layers from any covariance.

    meanfield2019, Theorem B.11 and Corollary B.12: for GΣG of rank C the limit is (B/C)·projector, and the spread
    λ₁ − λ_C is O((1 − 2/(C+2))^ℓ). A step is B times `expected_spectrum`: what one
    coordinate takes of |Gh|².

    >>> found = identity_convergence(np.diag([1.0, 2.0, 4.0, 8.0]), depth=40)
    >>> found.rank, round(found.rate, 3), bool(abs(found.eigenvalues[-1] - 4 / 3).max() < 1e-6)
    (3, 0.6, True)
    """
    sigma = check_covariance(covariance)
    size = sigma.shape[0]
    values, vectors = np.linalg.eigh(center(sigma))
    kept = values > 1e-12 * max(float(values[-1]), 1e-300)
    rank = int(kept.sum())
    if rank == 0 or values[-1] <= 0:
        raise UsageError("all samples of the batch are equal: batch normalization divides 0 by 0")
    basis, trajectory = vectors[:, kept], [values[kept][::-1]]
    # the eigenvectors of GΣG stay, so that its eigenvalues, whose roots are singular values of a batch, say all
    for _ in range(check_integer(depth, name="depth", least=0)):
        trajectory.append(size * expected_spectrum(np.sqrt(trajectory[-1])))
    return IdentityConvergence(rank, size / rank * basis @ basis.T, rank / (rank + 2.0), np.array(trajectory))
