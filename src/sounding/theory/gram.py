"""Mean field Gram dynamics of a batch-normalized network from any input Gram matrix (thesis2024, chapter 3).

The chain is h_{ℓ+1} = W_ℓ φ(BN(h_ℓ)) with weights of variance 1/width. The Gram matrix is taken after the activation,
G_ℓ = φ(BN(h_ℓ)) φ(BN(h_ℓ))ᵀ/d with samples as rows, n × n. (3.2) as printed, with samples as columns, is d × d: its
transpose is on the wrong factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sounding.activations import Activation, ActivationLike, resolve
from sounding.activations.activation import Array
from sounding.encoding import fields_of
from sounding.errors import UsageError
from sounding.profile import Profile
from sounding.theory.batchnorm import batchnorm
from sounding.theory.bounds.bound import check_integer
from sounding.theory.covariance_map import MappedCovariance, center, check_covariance, covariance_map
from sounding.theory.integrals.panels import Adapted, integrate, interval
from sounding.theory.signal.measures import mean_cosine

GramMethod = Literal["auto", "quadrature", "sampled"]
# of some 50 ms each: what one waits for without being asked; with eps they take four times as long
MOST_INTEGRALS = 300


@dataclass(frozen=True)
class GramPrediction:
    """The mean field trajectory of a batch's Gram matrix and where it ends.

    Args:
        activation, eps: what it belongs to.
        matrices: Ḡ_0 … Ḡ_depth, (depth + 1, n, n); Ḡ_0 is the input.
        fixed_point: G* = q((1 − c)I + c11ᵀ), n × n.
        attracting: whether nearby Gram matrices approach G*.
        rate: the factor per layer of the distance to G* in the end: the largest forward eigenvalue.
        condition_number: of G*, the κ(G*) of Theorem 3.2; infinite for a linear activation, whose G* is singular.
        errors: for each layer the largest error of an entry made in that step: a bound, or a standard error if sampled.
        method: how the steps were computed.
    """

    activation: str
    eps: float
    matrices: Array
    fixed_point: Array
    attracting: bool
    rate: float
    condition_number: float
    errors: tuple[float, ...]
    method: str

    @property
    def batch_size(self) -> int:
        """The number of samples, n."""
        return len(self.fixed_point)

    @property
    def error(self) -> float:
        """The largest error of a step."""
        return max(self.errors)

    @property
    def distances(self) -> Array:
        """‖Ḡ_ℓ − G*‖_F, layer by layer."""
        return np.asarray(np.linalg.norm(self.matrices - self.fixed_point, axis=(1, 2)))

    def profile(self) -> Profile:
        """`gram_distance` to G*, `mean_square` and `mean_cosine` of the batch over depth."""
        columns: dict[str, Iterable[float]] = {
            "gram_distance": self.distances,
            "mean_square": [matrix.trace() / len(matrix) for matrix in self.matrices],
            # of a sample that is 0 the cosine is not defined
            "mean_cosine": [mean_cosine(m) if (np.diag(m) > 0).all() else math.nan for m in self.matrices],
        }
        return Profile.over_depth(columns, fields_of(self, "activation batch_size eps method error"))

    def to_dict(self) -> dict[str, Any]:
        """Plain types under the names of `sounding predict gram --json`."""
        start = fields_of(self, "activation batch_size eps fixed_point attracting rate condition_number")
        ends = {"gram": self.matrices[-1].tolist(), **fields_of(self, "distances error method")}
        return {**start, **ends, "profile": self.profile().to_dict()}

    def __str__(self) -> str:
        size, depth = len(self.fixed_point), len(self.matrices) - 1
        variance = self.fixed_point[0, 0]
        return (
            f"Gram({self.activation}, batch {size}): distance to the fixed point {self.distances[0]:.4g} → "
            f"{self.distances[-1]:.4g} after {depth} layers, ×{self.rate:.4g} per layer in the end\n"
            f"  fixed point  variance {variance:.6g}  correlation {self.fixed_point[0, 1] / variance:.6g}  "
            f"condition number {self.condition_number:.4g}"
        )


def gram(
    activation: ActivationLike,
    gram_matrix: Array,
    *,
    depth: int,
    eps: float = 0.0,
    method: GramMethod | None = None,
    samples: int = 200_000,
    generator: np.random.Generator | None = None,
) -> GramPrediction:
    """Ḡ_{ℓ+1} = E[φ(√n Mh/|Mh|)^⊗2], h ~ N(0, Ḡ_ℓ), M = I − 11ᵀ/n, for `depth` layers (thesis2024, eq. 3.3).

    Quick where the activation is positively homogeneous, the batch permutation-symmetric, or one or two directions are
    left after centring; else see `covariance_map`. For a linear activation G* = (n/(n−1))·(I − 11ᵀ/n): singular, and
    not the identity the seed names, so that its Theorem 3.2 says nothing there.

    Args:
        activation: name, record or callable.
        gram_matrix: the input's Gram matrix, n × n with n ≥ 2, symmetric and positive semidefinite.
        depth: layers.
        eps: of the batch norm, inside the root.
        method: of steps that have no quick one: "quadrature", "sampled", or "auto", which samples where more than 300
            double integrals would be needed, 75 with eps. By default they are sampled where a generator is given.
        samples, generator: how many batches a sampled step draws, and from which.

    >>> found = gram("relu", np.diag([1.0, 2.0, 3.0, 4.0]), depth=30)
    >>> bool(found.distances[-1] < 1e-6), round(float(found.fixed_point[0, 0]), 12)
    (True, 0.5)
    """
    phi = resolve(activation)
    current = check_covariance(gram_matrix)
    layers, size = check_integer(depth, name="depth", least=0), len(current)
    if method not in (None, "auto", "quadrature", "sampled"):
        raise UsageError(f"method must be auto, quadrature or sampled, got {method!r}")
    if method in ("auto", "sampled") and generator is None:
        raise UsageError(f"method {method!r} needs a generator", hint="generator=numpy.random.default_rng(0)")
    few = layers * size * (size - 1) // 2 <= (MOST_INTEGRALS if eps == 0 else MOST_INTEGRALS // 4)
    drawn = None if method == "quadrature" or (method == "auto" and few) else generator
    matrices, errors, methods = [current], [0.0], []
    for _ in range(layers):
        step = gram_map(phi, current, eps=eps, samples=samples, generator=drawn)
        current = step.covariance
        matrices.append(current)
        errors.append(float(step.error.max()))
        methods.append(step.method)
    fixed, rate, attracting = _end(phi, size, eps)
    spectrum = np.linalg.eigvalsh(fixed)
    regular = spectrum[0] > 1e-12 * spectrum[-1]  # below, the smallest eigenvalue is rounding
    return GramPrediction(
        activation=phi.name,
        eps=float(eps),
        matrices=np.array(matrices),
        fixed_point=fixed,
        attracting=attracting,
        rate=rate,
        condition_number=float(spectrum[-1] / spectrum[0]) if regular else math.inf,
        errors=tuple(errors),
        method=next((name for name in ("sampled", "quadrature") if name in methods), methods[0] if methods else "none"),
    )


def even_gram(size: int, correlation: float, *, variance: float = 1.0) -> Array:
    """The Gram matrix of samples of one variance, every two of which have one correlation.

    >>> even_gram(2, 0.5)
    array([[1. , 0.5],
           [0.5, 1. ]])
    """
    return np.asarray(variance * ((1 - correlation) * np.eye(size) + correlation))


def decaying_gram(size: int, correlation: float) -> Array:
    """The Gram matrix of unit samples, of which those k apart have the correlation to the power k."""
    places = np.arange(size)
    return np.asarray(np.power(correlation, np.abs(places[:, None] - places)))


def gram_map(
    activation: Activation,
    matrix: Array,
    *,
    eps: float = 0.0,
    samples: int = 200_000,
    generator: np.random.Generator | None = None,
) -> MappedCovariance:
    """One step of eq. (3.3), by the quick method that applies, else by double integrals, or sampled."""
    if eps == 0 and np.linalg.matrix_rank(center(matrix), tol=1e-12 * max(float(matrix.trace()), 1e-300)) in (1, 2):
        return planar_map(activation, matrix)
    return covariance_map(activation, matrix, eps=eps, samples=samples, generator=generator)


def planar_map(activation: ActivationLike, matrix: Array) -> MappedCovariance:
    """E[φ(√n u)φ(√n u)ᵀ] for u = Mh/|Mh|, h ~ N(0, matrix), when MΣM has rank 1 or 2; any activation.

    In the eigenbasis of MΣM with eigenvalues λ₁, λ₂, u = cos θ e₁ + sin θ e₂ has the density
    √(λ₁λ₂)/(2π(λ₂cos²θ + λ₁sin²θ)) of a projected Gaussian, so one integral over the angle remains. With rank 1,
    u = ±e₁ with equal chances.
    """
    phi = resolve(activation)
    sigma = check_covariance(matrix)
    size = len(sigma)
    values, vectors = np.linalg.eigh(center(sigma))
    kept = values > 1e-12 * max(float(sigma.trace()), 1e-300)  # relative to Σ: centring leaves rounding of that size
    if kept.sum() not in (1, 2):
        raise UsageError(f"expected a batch with 1 or 2 directions after centring, got {int(kept.sum())}")
    values, basis = values[kept], math.sqrt(size) * vectors[:, kept]
    if len(values) == 1:
        plus, minus = phi(basis[:, 0]), phi(-basis[:, 0])
        mapped = 0.5 * (np.outer(plus, plus) + np.outer(minus, minus))
        return MappedCovariance(mapped, 1e-15 * np.abs(mapped), "symmetric")
    rows, columns = np.triu_indices(size)

    def integrand(angle: Array) -> Array:
        cosine, sine = np.cos(angle), np.sin(angle)
        density = math.sqrt(values[0] * values[1]) / (2 * math.pi * (values[1] * cosine**2 + values[0] * sine**2))
        features = phi(basis[:, :1] * cosine + basis[:, 1:] * sine)
        return np.asarray(features[rows] * features[columns] * density)

    found = _around(integrand, phi, basis)
    mapped, error = np.zeros((size, size)), np.zeros((size, size))
    mapped[rows, columns] = mapped[columns, rows] = found.values
    error[rows, columns] = error[columns, rows] = found.errors
    return MappedCovariance(mapped, error, "symmetric")


def _around(f: Callable[[Array], Array], phi: Activation, basis: Array) -> Adapted:
    """∫ f(θ) dθ over the circle, cut where a coordinate cos θ b₁ + sin θ b₂ = r cos(θ − t) meets a kink of φ."""
    angles = []
    for first, second in basis:
        radius, turn = math.hypot(first, second), math.atan2(second, first)
        for kink in phi.kinks:
            if abs(kink) < radius:
                half = math.acos(kink / radius)
                angles += [math.remainder(turn + sign * half, 2 * math.pi) for sign in (1, -1)]
    panels = interval(-math.pi, math.pi, kinks=angles, edges=np.linspace(-math.pi, math.pi, 33))
    return integrate(f, panels, tolerance=1e-12, what=f"activation {phi.name!r}")


def _end(phi: Activation, size: int, eps: float) -> tuple[Array, float, bool]:
    """G*, the asymptotic rate and whether it attracts."""
    if size < 4:
        if eps != 0:
            raise UsageError(f"the fixed point with eps > 0 needs a batch of at least 4, got {size}")
        # any permutation-symmetric Gram matrix maps to G* in one step
        fixed = gram_map(phi, np.eye(size)).covariance
        rate = 0.0 if size == 2 else _rate_of_three(phi, fixed)
        return fixed, rate, rate < 1
    found = batchnorm(phi, batch_size=size, eps=eps)
    point, forward = found.fixed_point, found.forward_eigenvalues
    fixed = even_gram(size, point.correlation, variance=point.variance)
    return fixed, max(abs(forward.G), abs(forward.L), abs(forward.M)), point.attracting


def _rate_of_three(phi: Activation, fixed: Array) -> float:
    """λ_L = n/(2μ(n−2))·E[φ̃_1²(x_1² − 1)], φ̃ = φ − mean, at n = 3, where the batch lies on a circle."""
    # a batch of two is ±(1, −1) and has nothing to converge; from 4 on `batchnorm` has the eigenvalues, whose backward
    # ones are infinite below
    places = np.arange(3)[:, None] * 2 * math.pi / 3

    def integrand(angle: Array) -> Array:
        x = math.sqrt(2) * np.cos(angle - places)
        features = phi(x)
        return np.asarray((features[0] - features.mean(axis=0)) ** 2 * (x[0] ** 2 - 1) / (2 * math.pi))

    basis = math.sqrt(2) * np.concatenate([np.cos(places), np.sin(places)], axis=1)
    mean = float(_around(integrand, phi, basis).values[0])
    return abs(1.5 * mean / float(fixed[0, 0] - fixed[0, 1]))
