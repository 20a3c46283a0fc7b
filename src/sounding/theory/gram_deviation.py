"""How far the Gram matrix of a network of finite width strays from its mean field (thesis2024, chapter 3).

Given G_{ℓ−1}, the features of the next layer are independent, so G_ℓ = V(G_{ℓ−1}) + ξ/√d with a ξ of mean 0 whose
covariance is that of φ(x)φ(x)ᵀ. Around G* the deviation δ = G_ℓ − G* obeys δ′ = DV δ + ξ/√d: the mean field map
forgets, each layer adds noise, and the deviation stays of order d^{−1/2} at any depth where V contracts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sounding.activations import Activation, ActivationLike, resolve
from sounding.activations.activation import Array
from sounding.encoding import fields_of
from sounding.errors import UsageError
from sounding.profile import Estimate, Profile
from sounding.theory.batchnorm import batchnorm
from sounding.theory.bounds.bound import check_integer
from sounding.theory.integrals.quadrature import sphere_joint_mean, sphere_mean


@dataclass(frozen=True)
class GramDeviation:
    """The root mean square of ‖G_ℓ − G*‖_F at a width, for a network started at G*.

    Args:
        one_layer: after one layer, √(E‖φφᵀ − G*‖_F²/d), by quadrature.
        stationary: after many layers; infinite where G* does not attract.
        rate_l, rate_m: the forward eigenvalues by which the map forgets the deviation's two kinds.
        theorem_scale: n/√d, the scale of Theorem 3.2 and eq. (3.9) without their constants.
        memory_l, memory_m: E‖·‖_F² that one layer's noise, times d, puts into each kind; `gain_l` is ‖DV·‖²/‖·‖² on the
            first kind, where the map also moves what centring does not see.
    """

    activation: str
    batch_size: int
    width: int
    one_layer: float
    stationary: Estimate
    rate_l: float
    rate_m: float
    theorem_scale: float
    memory_l: float
    memory_m: float
    gain_l: float

    def profile(self, depth: int) -> Profile:
        """`gram_deviation` after 1 … depth layers from G*: each layer's noise and what is left of the earlier ones."""
        deviations, kept = [], 0.0
        for layer in range(1, depth + 1):
            deviations.append(math.sqrt(self.one_layer**2 + kept))
            kept += self.memory_m / self.width * self.rate_m ** (2 * layer)
            kept += self.memory_l / self.width * self.gain_l * self.rate_l ** (2 * (layer - 1))
        return Profile.over_depth({"gram_deviation": deviations}, fields_of(self, "activation width"), first=1)

    def to_dict(self) -> dict[str, Any]:
        """Plain types."""
        return fields_of(self, "activation batch_size width one_layer rate_l rate_m theorem_scale stationary")

    def __str__(self) -> str:
        return (
            f"GramDeviation({self.activation}, batch {self.batch_size}, width {self.width}): "
            f"one layer {self.one_layer:.4g}, at depth {self.stationary}, n/√d {self.theorem_scale:.4g}"
        )


def gram_deviation(
    activation: ActivationLike, *, batch_size: int, width: int, generator: np.random.Generator, samples: int = 20_000
) -> GramDeviation:
    """The deviation at a finite width, to leading order in 1/√width.

    E‖δ‖² = (1/d)·[E‖ξ‖² + T_M λ_M²/(1 − λ_M²) + T_L g_L/(1 − λ_L²)]. V depends on the centred Gram matrix alone, whose
    deviations split by permutation symmetry into a multiple of I − 11ᵀ/n, which one layer forgets, one kind (L) per
    sample and one (M) per pair (meanfield2019, section 3); T_L and T_M are the noise of one layer in each. E‖ξ‖² = n E
    φ⁴ + n(n−1) E φ_1²φ_2² − ‖G*‖_F² and DV on L are quadratures; T_L and T_M correlate four samples and are sampled.

    For the identity E‖δ‖² = n(n−2)(n+1)²/(4(n−1)d): n^{3/2}/(2√d), which is why measured slopes against the batch size
    exceed the 1 of eq. (3.9).

    Args:
        activation: name, record or callable.
        batch_size, width: n ≥ 4 and d.
        generator, samples: for the four-sample moments.

    >>> found = gram_deviation("identity", batch_size=6, width=1000, generator=np.random.default_rng(0))
    >>> round(found.stationary.value, 6), round(math.sqrt(6 * 4 * 49 / (4 * 5 * 1000)), 6)
    (0.242487, 0.242487)
    """
    phi = resolve(activation)
    d, samples = check_integer(width, name="width", least=1), check_integer(samples, name="samples", least=100)
    found = batchnorm(phi, batch_size=batch_size)
    if math.isinf(found.batch_size):
        raise UsageError("the deviation of a Gram matrix needs a finite batch size, got inf")
    n, point, forward = int(found.batch_size), found.fixed_point, found.forward_eigenvalues
    fourth = sphere_mean(lambda x: phi(x) ** 4, n, **phi.outline).value
    both = sphere_joint_mean(lambda x, y: phi(x) ** 2 * phi(y) ** 2, n, **phi.pair_outline).value
    fixed = point.variance**2 * n * (1 + (n - 1) * point.correlation**2)  # ‖G*‖_F²
    noise = n * fourth + n * (n - 1) * both - fixed
    t_l, t_m, error = _sampled_noise(phi, n, generator, samples)
    gain = _gain(phi, n, point.mu)
    stationary = Estimate(math.inf)
    if point.attracting:
        kept_l, kept_m = gain / (1 - forward.L**2), forward.M**2 / (1 - forward.M**2)
        square = (noise + t_l * kept_l + t_m * kept_m) / d
        slack = math.sqrt((error[0] * kept_l) ** 2 + (error[1] * kept_m) ** 2) / d
        stationary = Estimate(math.sqrt(square), slack / (2 * math.sqrt(square)))
    return GramDeviation(
        phi.name, n, d, math.sqrt(noise / d), stationary, forward.L, forward.M, n / math.sqrt(d),
        t_l, t_m, gain,
    )  # fmt: skip


def _gain(phi: Activation, n: int, mu: float) -> float:
    """‖DV η‖²/‖η‖² on η = M diag(a) M, Σa = 0."""
    # DV η = ((n−1)/(2μn))·E[φφᵀ·xᵀηx] has the diagonal A·a_i and off it B·(a_i + a_j), with A = E φ_1²(x_1² − x_2²) and
    # B = E φ_1φ_2(x_1² − x_3²), where Σx² = n removes the third sample; ‖η‖² = (1 − 2/n)Σa²
    square = sphere_joint_mean(lambda x, y: phi(x) ** 2 * (x**2 - y**2), n, **phi.pair_outline).value
    product = sphere_joint_mean(lambda x, y: phi(x) * phi(y), n, **phi.pair_outline).value
    weighted = sphere_joint_mean(lambda x, y: phi(x) * phi(y) * x**2, n, **phi.pair_outline).value
    off = weighted - (n * product - 2 * weighted) / (n - 2)
    scale = (n - 1) / (2 * mu * n)
    # Σ_{i≠j}(a_i + a_j)² = 2(n − 2)Σa²
    return scale**2 * (square**2 + 2 * (n - 2) * off**2) * n / (n - 2)


def _sampled_noise(
    phi: Activation, n: int, generator: np.random.Generator, samples: int
) -> tuple[float, float, tuple[float, float]]:
    """T_L, T_M and their standard errors from batches on the sphere."""
    draws = generator.standard_normal((samples, n))
    draws -= draws.mean(axis=1, keepdims=True)
    x: Array = draws * math.sqrt(n) / np.linalg.norm(draws, axis=1, keepdims=True)
    centred = phi(x)
    centred -= centred.mean(axis=1, keepdims=True)
    lengths = (centred**2).sum(axis=1)
    kind_l = n / (n - 2) * ((centred**2 - lengths[:, None] / n) ** 2).sum(axis=1)
    # what is left of ‖φ̃φ̃ᵀ‖² = |φ̃|⁴ after its multiple of I − 11ᵀ/n, of norm |φ̃|⁴/(n − 1), and its part L
    kind_m = lengths**2 * (n - 2) / (n - 1) - kind_l
    root = math.sqrt(samples)
    return (
        float(kind_l.mean()),
        float(kind_m.mean()),
        (float(kind_l.std(ddof=1)) / root, float(kind_m.std(ddof=1)) / root),
    )
