"""Figure 6 and the conjecture of appendix F: random networks with batch norm and other activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from sounding.activations import resolve
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import DRAWN, Number, estimate, ratio_of, slope_of
from sounding.claims.picture import Panel, Picture, Series


def _stationary_chain(
    width: int, samples: int, runs: int, activation: Callable[[torch.Tensor], torch.Tensor], generator: torch.Generator
) -> Callable[[], torch.Tensor]:
    """A function that steps Q ↦ BN(W F(Q)) for `runs` networks and returns QᵀQ/d, (runs, n, n).

    Given F(Q), the columns of WF(Q) are normals times a factor of its Gram matrix: exact in law.
    """
    device = generator.device
    state = torch.randn(runs, samples, width, dtype=torch.float64, device=device, generator=generator)
    jitter = 1e-12 * torch.eye(samples, dtype=torch.float64, device=device)

    def step() -> torch.Tensor:
        nonlocal state
        features = activation(state)
        factor = torch.linalg.cholesky(features @ features.mT / width + jitter)
        noise = torch.randn(state.shape, dtype=torch.float64, device=device, generator=generator)
        mapped = factor @ noise
        state = mapped / mapped.square().mean(1, keepdim=True).sqrt()
        gram: torch.Tensor = state @ state.mT / (width * samples)
        return gram

    return step


def measure_conjecture(values: Mapping[str, Any], context: Context) -> Outcome:
    """L = ‖QᵀQ/d − its stationary mean‖_F, averaged over layers, against the width, for each activation.

    Those `beside` the named ones are shown, and count for nothing that compares curves.
    """
    numbers, series = {}, []
    level: list[Number] = []
    widths = np.array(values["widths"])
    shown = [*values["activations"], *values.get("beside", [])]
    for index, name in enumerate(shown):
        function = resolve(name).torch()
        means, errors = [], []
        for place, width in enumerate(widths):
            generator = context.generator(100 * index + place, device=context.device)
            step = _stationary_chain(int(width), values["batch_size"], values["runs"], function, generator)
            for _ in range(values["burn_in"]):
                step()
            grams = torch.stack([step() for _ in range(values["layers"])])
            if values["gap"]:
                target = torch.eye(values["batch_size"], dtype=torch.float64, device=context.device)
                target = target / values["batch_size"]
            else:
                # the stationary law is exchangeable: one diagonal and one off-diagonal mean, over runs and layers
                target = _exchangeable_mean(grams)
            distance = (grams - target).square().sum((-1, -2)).sqrt().mean(0).cpu().numpy()
            means.append(float(distance.mean()))
            errors.append(float(distance.std(ddof=1)) / math.sqrt(len(distance)))
            context.progress((index + (place + 1) / len(widths)) / len(shown))
        mean, error = np.array(means), np.array(errors)
        key = name.replace(":", "_")
        numbers[f"slope_{key}"] = slope_of(np.log(widths), np.log(mean), stderr=list(error / mean), straight=False)
        wide = widths >= values["wide"]
        x, y = np.log(widths[wide]), np.log(mean[wide])
        numbers[f"slope_{key}_wide"] = slope_of(x, y, stderr=list((error / mean)[wide]), straight=False)
        if name in values["activations"]:
            level.append(estimate(float(mean[-1]), float(error[-1])))
        series.append(Series(name, widths, mean, error=DRAWN * error))
    level.sort(key=lambda number: number.value)
    numbers["largest_over_smallest_curve"] = ratio_of(level[-1], level[0])
    guide = series[0]
    line = np.asarray(guide.y)[0] * (widths / widths[0]) ** -0.5
    series.append(Series("d^(−1/2) (theory)", widths, line, role="theory"))
    label = "orthogonality gap V" if values["gap"] else "L, distance from the stationary mean"
    panel = Panel("width d", f"{label}, mean over layers", series, x_scale="log", y_scale="log")
    apart = numbers["largest_over_smallest_curve"].low > 1.05
    caption = "Every curve falls as d^(−1/2)" + ("; they are parallel, not identical." if apart else ".")
    return Outcome(numbers, Picture((panel,), caption))


def _exchangeable_mean(grams: torch.Tensor) -> torch.Tensor:
    mean = grams.mean((0, 1))
    n = len(mean)
    diagonal = mean.diagonal().mean()
    off = (mean.sum() - mean.diagonal().sum()) / (n * (n - 1))
    return torch.eye(n, dtype=mean.dtype, device=mean.device) * (diagonal - off) + off
