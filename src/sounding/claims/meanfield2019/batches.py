"""Whose fixed point attracts, and what two batches that share a network know of each other (appendices D to F)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from sounding.activations import resolve
from sounding.claims.claim import Context, Outcome
from sounding.claims.meanfield2019.field import spread_paths
from sounding.claims.meanfield2019.networks import settle
from sounding.claims.number import DRAWN, exact, farthest_ratio, fraction_of, jackknife, mean_of
from sounding.claims.picture import Panel, Picture, Series, points_of
from sounding.claims.share import share
from sounding.claims.walk import batch_norm, walk
from sounding.predict import batchnorm

NAMED = ["relu", "leaky_relu:0.1", "tanh", "sigmoid"]
COTANGENTS = 4  # random ones of a network, averaged: drawing the network costs more than pulling one back
OTHERS = ["gelu", "silu", "softplus", "elu", "selu", "erf"]


def measure_scope(values: Mapping[str, Any], context: Context) -> Outcome:
    """The largest forward eigenvalue over batch sizes, and how unequal the samples of wide deep networks become."""
    sizes = values["batch_sizes"]
    largest = {}
    for name in NAMED + OTHERS:
        found = [batchnorm(name, batch_size=size).forward_eigenvalues for size in sizes]
        largest[name] = [max(eigenvalues.L, eigenvalues.M) for eigenvalues in found]
    crossing = next(size for size in range(4, 200) if batchnorm("gelu", batch_size=size).forward_eigenvalues.L > 1)
    small, large = values["small"], values["large"]
    cases = (("relu", small), ("relu", large), ("gelu", small), ("gelu", large))
    uneven = {case: _unevenness(*case, values, context) for case in cases}
    far, near, starts = values["field_sigma_far"], values["field_sigma_near"], values["field_starts"]
    field = {
        (size, sigma): spread_paths(size, sigma=sigma, starts=count, layers=values["field_layers"], context=context,
                                    offset=1000 + place)
        for place, (size, sigma, count) in enumerate(((small, far, starts), (large, far, starts),
                                                      (large, near, starts // 2)))
    }  # fmt: skip
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
    paths = [
        Series(f"{name}, B = {size}", layers[shown], path.mean(0)[shown],
               error=DRAWN * path.std(0)[shown] / math.sqrt(len(path)))
        for (name, size), path in uneven.items()
    ]  # fmt: skip
    limit = Series("1", [sizes[0], sizes[-1]], [1, 1], role="bound")
    panels = (
        Panel("batch size B", "largest forward eigenvalue", (*lines, limit), x_scale="log"),
        Panel("layer", "spread of the samples' variances\n(standard deviation / mean)", paths, y_scale="log"),
    )  # fmt: skip
    reached = np.arange(0, values["field_layers"] + 1, max(1, values["field_layers"] // 20))
    paths += [
        Series(f"relu, B = {size} (infinite width, from {sigma:g})", reached, path.mean(0)[reached], role="theory")
        for (size, sigma), path in field.items()
    ]
    caption = (
        "Left: above 1 the symmetric fixed point repels; GELU, SiLU and softplus cross as the batch grows. Right: in "
        f"networks of width {values['width']} the samples of a large batch drift apart, of GELU and of ReLU, whose "
        "fixed point "
        "attracts only what is close to it: the exact map (mean over starts with log-normal variances) returns from a "
        "small spread, not from a larger one."
    )
    return Outcome(numbers, Picture(panels, caption))


def _unevenness(name: str, size: int, values: Mapping[str, Any], context: Context) -> np.ndarray:
    """Standard deviation over mean of the samples' variances, (runs, layers)."""
    rows: list[torch.Tensor] = []

    def watch(layer: int, state: torch.Tensor) -> None:
        own = state.square().mean(-1)
        rows.append(own.std(-1) / own.mean(-1))

    settle(name, values["width"], size, depth=values["depth"], runs=values["runs"], context=context, offset=size,
           watch=watch)  # fmt: skip
    return torch.stack(rows, dim=1).double().cpu().numpy()


@share("activations", "batch_sizes", "window")
def pair_of_batches(
    values: Mapping[str, Any], context: Context, name: str, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two batches through the same random networks, each normalized by itself; sample a of one is like a of the other.

    Per run and layer: the mean covariance of samples of different batches; how much larger it is for the alike ones;
    and the same of the gradients, pulled back from equal cotangents, layer 1 first.
    """
    phi = resolve(name).torch()
    width, depth, runs, overlap = (values[key] for key in ("width", "depth", "runs", "overlap"))
    found: list[list[torch.Tensor]] = [[], [], []]
    for run in range(runs):
        place: dict[str, Any] = {"device": context.device, "generator": context.generator(run, device=context.device)}
        first, other = torch.randn(2, size, width, **place)
        start = torch.stack([first, overlap * first + math.sqrt(1 - overlap**2) * other]).requires_grad_()
        inner, covariance, alike = list[torch.Tensor](), [], []
        weights = (torch.randn(width, width, **place) / math.sqrt(width) for _ in range(depth))
        for state in walk(start, weights, norm=batch_norm, activation=phi, products=inner):
            block = (state[0] @ state[1].T / width).detach().double()
            covariance.append(block.mean())
            alike.append((block.trace() - block.sum() / size) / (size - 1))
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


def measure_cross_limit(values: Mapping[str, Any], context: Context) -> Outcome:
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


def measure_cross_rate(values: Mapping[str, Any], context: Context) -> Outcome:
    """How fast likeness of two batches is lost either way, beside the eigenvalue of theorem F.1."""
    numbers, panels = {}, []
    largest = max(
        batchnorm(name, batch_size=size).cross_batch.eigenvalue
        for name in NAMED + OTHERS
        for size in (5, 8, 16, 64, 256)
    )
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
