"""Where batch symmetry breaks: the transition from BSB1 to BSB2 for max(x, 0)^α, and the broken state itself.

Above a degree α(B) the symmetric fixed point loses stability in the direction L: a few samples of the batch take most
of the variance and the rest is left with little (meanfield2019, section 3.1.1 and appendix B; the text gives no number
for the transition, only a label in its figure 1c).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from sounding.activations import ActivationLike, resolve
from sounding.activations.activation import Array
from sounding.errors import UsageError
from sounding.profile import Profile
from sounding.theory.covariance_map import check_covariance, laplace_covariance_map
from sounding.theory.homogeneous import homogeneous_batchnorm
from sounding.theory.integrals.quadrature import check_batch_size

_WINNER_RATIO = 1.2  # a smaller gap between neighbouring variances parts no winners from losers


@dataclass(frozen=True)
class BrokenState:
    """Where the covariance of a batch settles, and who takes the variance."""

    covariance: Array  # (B, B), the last one
    variances: Array  # its diagonal, descending
    winners: int  # how many samples lie above the largest ratio of neighbouring variances; 0 when all are alike
    winner_share: float  # their part of the total variance; 0 without winners
    layers: int  # how many were taken
    converged: bool  # whether the last layer changed the covariance by less than the tolerance
    history: Array  # the variances layer by layer, (layers + 1, B), in the batch's order

    @property
    def symmetric(self) -> bool:
        """Whether all samples kept the same variance (BSB1)."""
        return self.winners == 0

    def profile(self) -> Profile:
        """Largest, smallest and mean variance over depth."""
        rows = self.history
        columns = {"variance_max": rows.max(1), "variance_min": rows.min(1), "variance": rows.mean(1)}
        return Profile.over_depth(columns, {"theory": "broken symmetry", "winners": self.winners})


def bsb2_transition(batch_size: float) -> float:
    """The degree α at which max(x, 0)^α loses its symmetric fixed point: forward λ_L(B, α) = 1, B ≥ 4.

    From the closed form of λ_L (meanfield2019, Theorem B.68). It tends to 1 as B → ∞: ReLU is the limit case. At B = 4
    it is infinite: λ_L stays below 1 at every degree.

    >>> round(bsb2_transition(10), 6)
    1.400726
    """
    size = check_batch_size(batch_size)
    if math.isinf(size):
        return 1.0  # where λ_L is α itself

    def excess(alpha: float) -> float:
        return homogeneous_batchnorm(resolve(f"relu_power:{alpha!r}"), size).forward.L - 1.0

    high = 2.0
    while excess(high) < 0:
        high *= 1.5
        if high > 60:
            return math.inf
    return float(brentq(excess, 0.8, high, xtol=1e-13))


def simulate_broken_state(
    activation: ActivationLike,
    covariance: Array | None = None,
    *,
    batch_size: int | None = None,
    layers: int = 400,
    eps: float = 0.0,
    perturbation: float = 0.1,
    tolerance: float = 1e-8,
    generator: np.random.Generator | None = None,
) -> BrokenState:
    """Iterate the exact covariance map of a positively homogeneous activation until it settles.

    From `covariance`, or from the identity of `batch_size` samples with each variance multiplied by
    exp(perturbation·z). Near the transition the relaxation is slow and the end can depend on the start.
    """
    phi = resolve(activation)
    if covariance is None:
        if batch_size is None or batch_size < 3 or generator is None:
            raise UsageError(
                "expected a covariance, or a batch size of at least 3 and a generator to perturb the identity",
                hint="batch_size=10, generator=numpy.random.default_rng(0)",
            )
        sigma = np.diag(np.exp(perturbation * generator.standard_normal(batch_size)))
    else:
        sigma = check_covariance(covariance)
    if layers < 1:
        raise UsageError(f"layers must be at least 1, got {layers}")
    history = [np.diag(sigma).copy()]
    change = math.inf
    for _ in range(layers):
        mapped = laplace_covariance_map(phi, sigma, eps=eps, tolerance=0.1 * tolerance).covariance
        change = float(np.abs(mapped - sigma).max() / max(np.abs(mapped).max(), 1e-300))
        sigma = mapped
        history.append(np.diag(sigma).copy())
        if change < tolerance:
            break
    variances = np.sort(np.diag(sigma))[::-1]
    ratios = variances[:-1] / np.maximum(variances[1:], 1e-300)
    gap = int(ratios.argmax())  # the largest gap between sorted variances parts winners from losers, if it is wide
    winners = gap + 1 if ratios[gap] >= _WINNER_RATIO else 0
    share = float(variances[:winners].sum() / variances.sum()) if winners else 0.0
    return BrokenState(sigma, variances, winners, share, len(history) - 1, change < tolerance, np.array(history))
