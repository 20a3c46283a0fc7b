"""The rate of gradient explosion: Theorems 7, 8 and 9, and the gradients of the weights (appendix G)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

from sounding.activations import resolve
from sounding.claims.claim import Context, Outcome, Values, pick, present
from sounding.claims.meanfield2019.batches import pull_gradients
from sounding.claims.meanfield2019.fixed_point import NODES, pieces, relu_correlation, spherical_integrals
from sounding.claims.number import DRAWN, Number, estimate, exact, farthest_ratio, mean_of
from sounding.claims.picture import Series, level, points_of
from sounding.claims.walk import batch_norm, walk
from sounding.predict import batchnorm
from sounding.theory.gegenbauer import gegenbauer_batchnorm

_SMOOTH = ["tanh", "sigmoid", "erf", "sin", "gelu", "silu", "softplus", "identity"]
_NONLINEAR = ["relu", "leaky_relu:0.9", "relu_power:2", "tanh", "erf", "sin", "sigmoid", "softplus", "gelu", "silu",
              "elu", "selu", "hardtanh", "hermite:2", "hermite:3", "exp"]  # fmt: skip


def explosion_rate(activation: str, size: int) -> float:
    """Theorem 7 as it stands: the integral (24) over the ellipse Z > 0, with q(1 − c) from theorem 4.

    Cut at the kinks of φ in z₁ and in z₂, and in z₁ where a kink of z₂ reaches the end of the ellipse.
    """
    phi = resolve(activation)
    q, qc = spherical_integrals(activation, size)
    cuts = [-1.0, 1.0]
    for kink in phi.kinks:
        # where a kink in z₂ reaches the end of the ellipse
        inside = kink**2 + (size - 1) * (size * (size - 2) - (size - 1) * kink**2)
        ends = [(sign * math.sqrt(inside) - kink) / (size - 1) for sign in (-1, 1)] if inside > 0 else []
        cuts += [z / math.sqrt(size - 1) for z in (kink, *ends)]
    angle, weight = pieces(np.arcsin(np.unique(np.clip(cuts, -1.0, 1.0))), nodes=NODES)
    z1 = math.sqrt(size - 1) * np.sin(angle)
    half = np.sqrt(size * (size - 2) / (size - 1) * (1 - z1**2 / (size - 1)))
    # kinks in z₂ at this z₁
    edges = [np.arcsin(np.clip((kink + z1 / (size - 1)) / half, -1.0, 1.0)) for kink in phi.kinks]
    right = 0.5 * math.pi + 0 * angle
    second, share = pieces(np.sort([-right, *edges, right], axis=0), nodes=NODES)
    z2 = -z1 / (size - 1) + half * np.sin(second)
    big = size * (size - 2) - size * (z1**2 + z2**2) + (z1 - z2) ** 2
    slope = phi.derivative(z1)
    integrand = (size - 1 - z1**2) * slope**2 + (1 + z1 * z2) * slope * phi.derivative(z2)
    # (B(B−2))^{2−B/2} Z^{(B−5)/2} = Z^{−1/2} (Z/(B(B−2)))^{B/2−2}, and Z^{−1/2} times the Jacobian is cos(angle)
    density = np.cos(angle) * (np.maximum(big, 0.0) / (size * (size - 2))) ** (size / 2 - 2)
    return float((integrand * density * share).sum(axis=0) @ weight) / (2 * math.pi * (q - qc))


def relu_rate(size: float) -> float:
    """Theorem 8, eq. 25 at α = 1 with J(1) = 1 and J′ the derivative of J."""
    c = -1 / (size - 1)
    slope = 1 - math.acos(c) / math.pi
    return (size - 1) * (slope + size - 1) / ((size - 3) * (size - 1) * (1 - relu_correlation(size))) - 1 / (size - 3)


def attracting_sizes(activation: str, sizes: list[int]) -> list[int]:
    """The batch sizes at which no forward eigenvalue of the fixed point reaches 1: the premise of theorem 7."""
    found = {size: batchnorm(activation, batch_size=size).forward_eigenvalues for size in sizes}
    return [size for size, eigenvalues in found.items() if max(eigenvalues.L, eigenvalues.M) < 1]


def measure_any_activation(values: Values, context: Context) -> Outcome:
    """The integral of theorem 7 beside random networks, at the batch sizes whose fixed point attracts."""
    numbers, series = {}, []
    for place, name in enumerate(values["activations"]):
        sizes = attracting_sizes(name, values["batch_sizes"])
        theory = [explosion_rate(name, size) for size in sizes]
        growth = [_growth(name, size, values, context, 100 * place) for size in sizes]
        numbers[f"growth_over_theory_{name}"] = farthest_ratio(growth, theory)
        numbers[f"batch_sizes_{name}"] = exact(len(sizes))
        series.append(points_of(name, sizes, growth))
        series.append(Series(f"{name} (Theorem 7)", sizes, theory, role="theory"))
    return present(numbers, series)


def measure_relu_rate(values: Values, context: Context) -> Outcome:
    """Eq. 25 and (B − 2)/(B − 3) beside random networks; the fall of eq. 25 with the batch size."""
    sizes = values["batch_sizes"]
    grid = np.unique(np.geomspace(4, 4096, 120).round())  # at B = 3 both rates are infinite
    curve = np.array([relu_rate(float(size)) for size in grid])
    numbers = {
        "largest_step_with_batch_size": exact(float(np.diff(curve).max()), error=1e-12),
        "limit_minus_claim": exact(relu_rate(1e8) - math.pi / (math.pi - 1), error=1e-7),
    }
    series = []
    for place, (name, rate) in enumerate((("relu", relu_rate), ("identity", lambda size: (size - 2) / (size - 3)))):
        growth = [_growth(name, size, values, context, 100 * place) for size in sizes]
        numbers[f"growth_over_theory_{name}"] = farthest_ratio(growth, [float(rate(size)) for size in sizes])
        shown = grid[(grid >= min(sizes)) & (grid <= max(sizes))]
        series.append(points_of(name, sizes, growth))
        series.append(Series(f"{name} (Theorem 8)", shown, [rate(size) for size in shown], role="theory"))
    limit = math.pi / (math.pi - 1)
    return present(numbers, [*series, level("π/(π − 1)", [min(sizes), max(sizes)], limit, "paper")])


def measure_series(values: Values, context: Context) -> Outcome:
    """The Gegenbauer series beside the integral, the sign of its coefficients, and who comes closest to growth 1."""
    sizes = values["batch_sizes"]
    apart = max(
        abs(gegenbauer_batchnorm(name, batch_size=size).growth / batchnorm(name, batch_size=size).gradient_growth - 1)
        for name in _SMOOTH
        for size in sizes
    )
    coefficients = np.array([[series_coefficient(k, size) for k in range(1, values["terms"])] for size in sizes])
    excess = {
        name: [batchnorm(name, batch_size=size).gradient_growth - (size - 2) / (size - 3) for size in sizes]
        for name in _NONLINEAR
    }
    linear = max(abs(batchnorm("identity", batch_size=s).gradient_growth - (s - 2) / (s - 3)) for s in sizes)
    scales = [1.0, 0.5, 0.25, 0.125]
    # 14/13 is (B − 2)/(B − 3) at this B
    nearly = [batchnorm("tanh", batch_size=16, scale=scale).gradient_growth - 14 / 13 for scale in scales]
    numbers = {
        "largest_difference_of_series": exact(apart, error=1e-9),
        "smallest_coefficient": exact(float(coefficients.min()), error=1e-9),
        "smallest_excess_over_linear": exact(min(map(min, excess.values())), error=1e-9),
        "largest_excess_of_linear": exact(linear, error=1e-10),
        "excess_of_tanh_at_scale_0.125": exact(nearly[-1], error=1e-9),
    }
    # a logarithmic axis takes no 0
    series = [Series(name, sizes, np.array(rows) + 1e-300, role="theory") for name, rows in excess.items()][:8]
    return present(numbers, series, [Series("tanh", scales, nearly, role="theory")])


def series_coefficient(degree: int, size: int) -> float:
    """c_k = 1 − (−1)^k ₂F₁(−k, B − 3 + k; B/2 − 1; (B − 2)/(2(B − 1))), the finite sum term by term."""
    x, total, term = Fraction(size - 2, 2 * (size - 1)), Fraction(0), Fraction(1)
    for j in range(degree + 1):
        total += term
        term *= Fraction((j - degree) * (size - 3 + degree + j), 1) / ((Fraction(size, 2) - 1 + j) * (j + 1)) * x
    return float(1 - (-1) ** degree * total)


def measure_weight_gradients(values: Values, context: Context) -> Outcome:
    """Squared weight gradients of random ReLU networks beside μ tr Π, Π of ∂E/∂h and, as printed, of ∂E/∂x."""
    size, depth, margin = values["batch_size"], values["depth"], values["margin"]
    theory = batchnorm("relu", batch_size=size)
    width, drawn = values["width"], []
    for run in range(values["runs"]):
        place = context.place(run)
        state = torch.randn(size, width, **place)
        weights = [(torch.randn(width, width, **place) / math.sqrt(width)).requires_grad_() for _ in range(depth)]
        inner: list[torch.Tensor] = []
        outer = list(walk(state, weights, norm=batch_norm, activation=torch.relu, products=inner))
        cotangent = torch.randn(size, width, **place) * 1e-6  # small, so that an explosion stays in float32
        gradients = torch.autograd.grad(outer[-1], [*weights, *inner, *outer], cotangent)
        drawn.append(torch.stack([g.double().square().sum() for g in gradients]).cpu().numpy() / width)
    # (runs, depth) each: mean square of ∂E/∂w, and tr Π of ∂E/∂h and of ∂E/∂x, Π averaged over neurons
    squares, at_h, at_x = np.split(np.array(drawn), 3, axis=1)
    squares = squares / width
    logs = np.log(squares)
    before, after = (np.log(theory.fixed_point.mu * part / squares) for part in (at_h, at_x))
    bulk = slice(margin, depth - margin)
    growth = np.exp((logs[:, bulk][:, 0] - logs[:, bulk][:, -1]) / (depth - 2 * margin - 1))
    numbers = {
        "weight_gradient_over_claim_x": mean_of(1 / np.exp(after[:, bulk].mean(1))),
        "weight_gradient_over_claim_h": mean_of(1 / np.exp(before[:, bulk].mean(1))),
        "growth_over_theory": mean_of(growth / theory.gradient_growth),
    }
    layers, mean = np.arange(1, depth + 1), logs.mean(0) - logs.mean(0)[-1]
    line = (depth - 1 - np.arange(depth)) * math.log(theory.gradient_growth)  # relative to the last layer
    series = (
        Series("weight gradients", layers, mean, error=DRAWN * logs.std(0) / math.sqrt(len(logs))),
        Series("weight gradients (λ_G per layer)", layers, line, role="theory"),
    )
    ratios = (
        Series("Π of ∂E/∂h", layers, 1 / np.exp(before.mean(0))),
        Series("Π of ∂E/∂x, as printed", layers, 1 / np.exp(after.mean(0))),
        level("claim", [1, depth], 1, "paper"),
    )
    return present(numbers, series, ratios)


def _growth(name: str, size: int, values: Values, context: Context, offset: int) -> Number:
    growth = pull_gradients(pick(values, "width depth runs"), context, name, size, offset + size).gradients["growth"]
    return estimate(growth.value, growth.stderr or 0.0, samples=values["runs"])
