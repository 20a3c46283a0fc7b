"""What the theorems measure, in numpy: spectra of batches, rank notions, isometry, the orthogonality gap.

The torch measures of the same names serve networks; these serve theorems, on one float64 matrix with samples as rows.
"""

from __future__ import annotations

import math

import numpy as np

from sounding.activations.activation import Array


def second_moment(features: Array) -> Array:
    """M = XᵀX/N over the N rows (samples): features × features (rank2020 writes HHᵀ/N)."""
    return np.asarray(features.T @ features / features.shape[0])


def participation_ratio(moment: Array) -> float:
    """(Tr M)²/‖M‖_F², r(H) of rank2020 eq. (4); 0 for M = 0."""
    norm = float(np.sum(moment**2))
    return float(np.trace(moment)) ** 2 / norm if norm > 0 else 0.0


def isometry(gram: Array) -> float:
    """det(G)^{1/n}/(Tr G/n) (thesis2024 eq. 4.2) from the eigenvalues; 0 for a degenerate G."""
    eigenvalues = np.linalg.eigvalsh(gram)
    mean = float(eigenvalues.mean())
    # what an eigenvalue routine leaves of a zero is n·eps of the largest
    if mean <= 0 or eigenvalues[0] <= len(eigenvalues) * np.finfo(np.float64).eps * eigenvalues[-1]:
        return 0.0
    return math.exp(float(np.mean(np.log(eigenvalues / mean))))


def orthogonality_gap(singular_values: Array) -> float:
    """‖HᵀH/‖H‖_F² − I/n‖_F (orth2021 eq. 2) from the n singular values of H."""
    shares = singular_values**2 / np.sum(singular_values**2)
    return float(np.linalg.norm(shares - 1.0 / len(shares)))


def normalize_features(features: Array) -> Array:
    """Batch norm without centring at norm 1 per feature (thesis2024 eq. 6.4): each column divided by its length."""
    return np.asarray(features / np.linalg.norm(features, axis=0, keepdims=True))
