"""Whose fixed point attracts, and what two batches that share a network know of each other (appendices D to F)."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from sounding.activations import resolve
from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values
from sounding.claims.meanfield2019.figure1 import follow_states
from sounding.claims.number import exact, farthest_ratio, fraction_of, jackknife, mean_of
from sounding.claims.picture import Panel, Picture, Series, level, mean_over, points_of
from sounding.claims.share import share
from sounding.claims.walk import batch_norm, draw_normals, walk
from sounding.predict import batchnorm

# in ln s the integrand falls as s to the left and as s^(−(B−1)/2) to the right, and is analytic in a strip: the cut
# ends and the step leave some 1e-7
LOWEST, STEP = -16.0, 0.5


def map_relu(covariances: torch.Tensor) -> torch.Tensor:
    """V(Σ) of each of (starts, B, B), float64: Theorem 2 at α = 1, the trapezoid rule in ln s.

    B ∫ ds V_φ(S(I + 2sS)⁻¹)/√det(I + 2sS), S = GΣG, V_φ the Gaussian map of ReLU with the kernel
    (√(1 − c²) + (π − arccos c)c)/(2π). `theory.covariance_map` has the same for one
    covariance, of full or low rank, to rounding.
    """
    size = covariances.shape[-1]
    rows = covariances.mean(-1, keepdim=True)
    values, vectors = torch.linalg.eigh(covariances - rows - rows.mT + rows.mean(-2, keepdim=True))
    # the constant vector has no variance; what rounding leaves of it must not become negative
    values = (values / values.mean(-1, keepdim=True)).clamp_min(1e-14)
    highest = 32.0 / (size - 1) - math.log(float(values[:, 1:].min()))
    total = torch.zeros_like(covariances)
    for log in np.arange(LOWEST - math.log(size * float(values.max())), highest, STEP):
        shrunk = values / (1 + 2 * math.exp(log) * values)
        weight = torch.exp(log - 0.5 * torch.log1p(2 * math.exp(log) * values).sum(-1))
        gaussian = (vectors * shrunk[:, None]) @ vectors.mT
        std = torch.diagonal(gaussian, dim1=-2, dim2=-1).sqrt()
        outer = std[:, :, None] * std[:, None, :]
        c = (gaussian / outer).clamp(-1.0, 1.0)
        kernel = torch.sqrt(1 - c * c) + (math.pi - torch.acos(c)) * c
        total += weight[:, None, None] * outer * kernel
    return total * (STEP * size / (2 * math.pi))


def spread_paths(size: int, *, sigma: float, starts: int, layers: int, context: Context, offset: int) -> Array:
    """Standard deviation over mean of the samples' variances, (starts, layers + 1).

    A start has uncorrelated samples whose variances are log-normal, exp(σ·normal).
    """
    normals = draw_normals(context.generator(offset), starts, size)
    covariances = torch.diag_embed(torch.exp(sigma * normals)).to(context.device)
    path = []
    for layer in range(layers + 1):
        own = torch.diagonal(covariances, dim1=-2, dim2=-1)
        path.append(own.std(-1) / own.mean(-1))
        if layer < layers:
            covariances = map_relu(covariances)
    return np.asarray(torch.stack(path, dim=1).cpu().numpy())


NAMED = ["relu", "leaky_relu:0.1", "tanh", "sigmoid"]
COTANGENTS = 4  # random ones of a network, averaged: drawing the network costs more than pulling one back
OTHERS = ["gelu", "silu", "softplus", "elu", "selu", "erf"]


def measure_scope(values: Values, context: Context) -> Outcome:
    """The largest forward eigenvalue over batch sizes, and how unequal the samples of wide deep networks become."""
    sizes = values["batch_sizes"]
    largest = {}
    for name in NAMED + OTHERS:
        found = [batchnorm(name, batch_size=size).forward_eigenvalues for size in sizes]
        largest[name] = [max(eigenvalues.L, eigenvalues.M) for eigenvalues in found]
    crossing = next(size for size in range(4, 200) if batchnorm("gelu", batch_size=size).forward_eigenvalues.L > 1)
    small, large = values["small"], values["large"]
    cases = (("relu", small), ("relu", large), ("gelu", small), ("gelu", large))
    uneven: dict[tuple[str, int], Array] = {}  # standard deviation over mean of the samples' variances, (runs, layers)
    for name, size in cases:
        own = [state.square().mean(-1) for state in follow_states(name, size, values, context, offset=size)]
        ratios = torch.stack([layer.std(-1) / layer.mean(-1) for layer in own], dim=1)
        uneven[name, size] = ratios.double().cpu().numpy()
    far, near, starts = values["field_sigma_far"], values["field_sigma_near"], values["field_starts"]
    field, kinds = {}, ((small, far, starts), (large, far, starts), (large, near, starts // 2))
    for place, (size, sigma, count) in enumerate(kinds):
        shape: dict[str, Any] = {"starts": count, "layers": values["field_layers"], "offset": 1000 + place}
        field[size, sigma] = spread_paths(size, sigma=sigma, context=context, **shape)
    left = {case: paths[:, -1] / paths[:, 0] for case, paths in field.items()}
    numbers = {
        "largest_eigenvalue_used_in_practice": exact(max(max(rows) for rows in largest.values()), error=1e-6),
        "largest_eigenvalue_named": exact(max(max(largest[name]) for name in NAMED), error=1e-6),
        "gelu_repels_from_batch_size": exact(crossing),
        "field_spread_left_relu_small_batch": mean_of(left[small, far]),
        "field_spread_left_relu_large_batch": mean_of(left[large, far]),
        "field_spread_left_relu_near": mean_of(left[large, near]),
        "share_of_starts_that_leave": fraction_of(int((left[large, far] > 1).sum()), starts),
        "field_spread_relu_large_batch": mean_of(field[large, far][:, -1]),
    }
    for name, size in cases:
        which = "small" if size == small else "large"
        numbers[f"spread_{name}_{which}_batch"] = mean_of(uneven[name, size][:, -values["depth"] // 5 :].mean(1))
    lines = [Series(name, sizes, rows, role="theory") for name, rows in largest.items() if name in NAMED + OTHERS[:3]]
    layers = np.arange(1, values["depth"] + 1)
    shown = layers % max(1, values["depth"] // 15) == 0
    paths = [mean_over(f"{name}, B = {size}", layers[shown], path[:, shown]) for (name, size), path in uneven.items()]
    reached = np.arange(0, values["field_layers"] + 1, max(1, values["field_layers"] // 20))
    paths += [
        Series(f"relu, B = {size} (infinite width, from {sigma:g})", reached, path.mean(0)[reached], role="theory")
        for (size, sigma), path in field.items()
    ]
    panels = (
        Panel("batch size B", "largest forward eigenvalue", (*lines, level("1", sizes, 1)), x_scale="log"),
        Panel("layer", "spread of the samples' variances\n(standard deviation / mean)", paths, y_scale="log"),
    )
    caption = (
        "Left: above 1 the symmetric fixed point repels; GELU, SiLU and softplus cross as the batch grows. Right: in "
        f"networks of width {values['width']} the samples of a large batch drift apart, of GELU and of ReLU, whose "
        "fixed point attracts only what is close to it: the exact map (mean over starts with log-normal variances) "
        "returns from a small spread, not from a larger one."
    )
    return Outcome(numbers, Picture(panels, caption))


@share("activations", "batch_sizes", "window")
def pair_of_batches(
    values: Values, context: Context, name: str, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two batches through the same random networks, each normalized by itself; sample a of one is like a of the other.

    Per run and layer: the mean covariance of samples of different batches; how much larger it is for the alike ones;
    and the same of the gradients, pulled back from equal cotangents, layer 1 first.
    """
    phi = resolve(name).torch()
    width, depth, runs, overlap = (values[key] for key in ("width", "depth", "runs", "overlap"))
    found: list[list[torch.Tensor]] = [[], [], []]
    for run in range(runs):
        place = context.place(run)
        first, other = torch.randn(2, size, width, **place)
        start = torch.stack([first, overlap * first + math.sqrt(1 - overlap**2) * other]).requires_grad_()
        inner, covariance, alike = list[torch.Tensor](), [], []
        weights = (torch.randn(width, width, **place) / math.sqrt(width) for _ in range(depth))
        for state in walk(start, weights, norm=batch_norm, activation=phi, products=inner):
            block = (state[0] @ state[1].T / width).detach().double()
            covariance.append(block.mean())
            alike.append((block.trace() - block.sum() / size) / (size - 1))  # diagonal minus off-diagonal mean
        pulled = torch.zeros(depth, dtype=torch.float64, device=context.device)
        for _ in range(COTANGENTS):
            cotangent = torch.randn(size, width, **place).expand(2, size, width)
            gradients = torch.autograd.grad(state, inner, cotangent, retain_graph=True)
            # between the batches, tr Π; rows of a gradient before batch norm sum to 0
            pulled += torch.stack([(g[0].double() * g[1].double()).sum() for g in gradients])
        for rows, row in zip(found, (torch.stack(covariance), torch.stack(alike), pulled), strict=True):
            rows.append(row)
    covariances, likeness, gradient = (torch.stack(rows).cpu().numpy() for rows in found)
    return covariances, likeness, gradient


def measure_cross_limit(values: Values, context: Context) -> Outcome:
    """The covariance of samples of different batches deep in the network, beside (E φ(x₁))²."""
    numbers, series = {}, []
    for name in values["activations"]:
        measured, theory = [], []
        for size in values["batch_sizes"]:
            covariances, _, _ = pair_of_batches(values, context, name, size)
            measured.append(mean_of(covariances[:, values["depth"] // 2 :].mean(1)))
            theory.append(batchnorm(name, batch_size=size).cross_batch.covariance)
        numbers[f"covariance_over_theory_{name}"] = farthest_ratio(measured, theory)
        series.append(points_of(name, values["batch_sizes"], measured))
        series.append(Series(f"{name} (E φ)²", values["batch_sizes"], theory, role="theory"))
    sizes = values["batch_sizes"]
    apart = max(abs(_relu_cross(size) - batchnorm("relu", batch_size=size).cross_batch.covariance) for size in sizes)
    numbers["closed_form_minus_theory"] = exact(apart, error=1e-10)
    numbers["limit_minus_claim"] = exact(_relu_cross(10**7) - 1 / (2 * math.pi), error=1e-8)
    panel = Panel("batch size B", "covariance of samples of two batches", series, x_scale="log")
    caption = f"Networks of width {values['width']}: deep down, samples of different batches share only their mean."
    return Outcome(numbers, Picture((panel,), caption))


def _relu_cross(size: float) -> float:
    """(B − 1)/(4π)·[Γ((B−1)/2)/Γ(B/2)]²."""
    return (size - 1) / (4 * math.pi) * math.exp(2 * (math.lgamma((size - 1) / 2) - math.lgamma(size / 2)))


def measure_cross_rate(values: Values, context: Context) -> Outcome:
    """How fast likeness of two batches is lost either way, beside the eigenvalue of theorem F.1."""
    numbers, panels = {}, []
    pairs = product(NAMED + OTHERS, (5, 8, 16, 64, 256))
    largest = max(batchnorm(name, batch_size=size).cross_batch.eigenvalue for name, size in pairs)
    numbers["largest_eigenvalue"] = exact(largest, error=1e-6)
    for name in values["activations"]:
        size = values["batch_sizes"][-1]
        _, likeness, pulled = pair_of_batches(values, context, name, size)
        eigenvalue = batchnorm(name, batch_size=size).cross_batch.eigenvalue
        depth, (skip, count) = values["depth"], values["window"]
        forward = likeness[:, skip : skip + count]
        backward = pulled[:, ::-1][:, skip : skip + count]
        for way, rows in (("forward", forward), ("backward", backward)):
            rate = partial(_rate_over, unit=eigenvalue, steps=count - 1)
            numbers[f"{way}_rate_over_theory_{name}"] = jackknife(rate, rows)
        layers = np.arange(1, depth + 1)
        line = eigenvalue ** (layers - 1.0)
        panels.append(Panel("layers travelled", f"likeness of two batches, {name}", (
            Series("activations", layers, np.abs(likeness.mean(0) / likeness.mean(0)[0])),
            Series("gradients", layers, np.abs(pulled.mean(0)[::-1] / pulled.mean(0)[-1])),
            Series(f"activations (eigenvalue {eigenvalue:.3f})", layers, line, role="theory"),
        ), y_scale="log"))  # fmt: skip
    caption = f"B = {size}: what two batches have in common beyond the mean is lost at one rate forwards and backwards."
    return Outcome(numbers, Picture(panels, caption))


def _rate_over(rows: np.ndarray, *, unit: float, steps: int) -> float:
    """The rate (mean last/mean first)^(1/steps) over runs, in units of `unit`."""
    ratio = float(rows[:, -1].mean() / rows[:, 0].mean())
    return math.copysign(abs(ratio) ** (1 / steps), ratio) / unit
