"""The backward recursion of batch normalization from a given layer, and the gradients of the weights.

Π = E[g gᵀ] is the covariance over the batch of the gradient g = ∂E/∂h at the pre-activations of a layer
(meanfield2019, section C; its appendix G calls it ∂E/∂x). The batch norm that h enters makes its rows sum to 0. One
layer down, each of the parts G, L and M of Π is multiplied by its backward eigenvalue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sounding.activations.activation import Array
from sounding.errors import UsageError
from sounding.profile import Profile
from sounding.theory.batchnorm import BatchNormPrediction
from sounding.theory.covariance_map import center, check_covariance


@dataclass(frozen=True)
class CovarianceParts:
    """A centred covariance split under permutations of the batch; the three parts are orthogonal and add up to it."""

    G: Array
    L: Array
    M: Array


def split_covariance(covariance: Array) -> CovarianceParts:
    """The parts G (multiple of I − 11ᵀ/B), L (G·diag(w)·G with Σw = 0) and M (zero diagonal) of a centred covariance.

    >>> parts = split_covariance(np.diag([3.0, 1.0, 1.0, 1.0]))
    >>> print(abs(np.diag(parts.M)).max() < 1e-15, round(float(parts.G.trace()), 12))
    True 4.5
    """
    centred = center(check_covariance(covariance))
    size = centred.shape[0]
    if size < 4:
        raise UsageError(f"expected a batch of at least 4, got {size}")
    whole = np.trace(centred) / (size - 1) * center(np.eye(size))
    # G·diag(w)·G has the diagonal (1 − 2/B)w for Σw = 0: the factor in front makes it that of the covariance
    weights = size / (size - 2.0) * (np.diag(centred) - np.trace(centred) / size)
    single = center(np.diag(weights))
    return CovarianceParts(whole, single, centred - whole - single)


def gradient_covariance(prediction: BatchNormPrediction, covariance: Array, *, layers: int) -> Array:
    """Π `layers` layers closer to the input, from Π at a given layer: λ_G^k Π_G + λ_L^k Π_L + λ_M^k Π_M."""
    parts = _parts(prediction, covariance, layers)
    rates = prediction.backward_eigenvalues
    return np.asarray(rates.G**layers * parts.G + rates.L**layers * parts.L + rates.M**layers * parts.M)


def backward_profile(prediction: BatchNormPrediction, covariance: Array, *, depth: int) -> Profile:
    """Gradient norms of layers depth, depth − 1, …, 1, from Π at layer `depth`, in logarithms.

    `gradient_log_norm` is ½ ln tr Π, and `weight_gradient_log_norm` is ½ ln(μ tr Π): E[(∂E/∂w)²] = ⟨Σ, Π⟩ = μ tr Π
    (meanfield2019, appendix G, with the indices of w and x put right). Both grow by the same factor: only the part G
    has a trace. `uneven_gradient` is |Π_L + Π_M|/|Π_G|, how far Π is from batch symmetry; it decays.
    """
    parts = _parts(prediction, covariance, depth)
    rates = prediction.backward_eigenvalues
    trace = float(np.trace(parts.G))
    if trace <= 0:
        raise UsageError("expected a gradient covariance with a positive trace")
    norms = [float(np.linalg.norm(part)) for part in (parts.G, parts.L, parts.M)]
    mu = prediction.fixed_point.mu
    log_rate, log_mu = (math.log(value) if value > 0 else -math.inf for value in (rates.G, mu))
    log_norms, uneven = [], []
    for steps in reversed(range(depth)):
        log_norms.append(0.5 * (math.log(trace) + (steps * log_rate if steps else 0.0)))  # 0 · −∞ would be NaN
        ratios = [(rate / rates.G) ** steps if rates.G > 0 else 0.0 for rate in (rates.L, rates.M)]
        uneven.append(math.hypot(norms[1] * ratios[0], norms[2] * ratios[1]) / norms[0])
    columns = {
        "gradient_log_norm": log_norms,
        "weight_gradient_log_norm": [log_norm + 0.5 * log_mu for log_norm in log_norms],
        "uneven_gradient": uneven,
    }
    return Profile.over_depth(columns, {"theory": "batchnorm backward", "activation": prediction.activation}, first=1)


def _parts(prediction: BatchNormPrediction, covariance: Array, layers: int) -> CovarianceParts:
    """The parts of a covariance, after checks of its size and of the number of layers."""
    if layers < 0:
        raise UsageError(f"expected a number of layers of at least 0, got {layers}")
    size = np.shape(covariance)[0] if np.ndim(covariance) else 0
    if size != prediction.batch_size:
        raise UsageError(f"expected a covariance of {prediction.batch_size:g} samples, got {size}")
    return split_covariance(covariance)
