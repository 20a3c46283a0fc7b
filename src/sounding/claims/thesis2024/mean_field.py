"""Chapter 3: the Gram matrix of a batch norm network of finite width stays near its mean field.

The chain is h′ = Wφ(BN(h)) with centring, G_ℓ = φ(BN(h_ℓ))φ(BN(h_ℓ))ᵀ/d (samples as rows), G* the mean field's fixed
point. Without batch norm the linear chain h′ = Wh has G* = G_0, for its mean field map is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome
from sounding.claims.number import Number, mean_of, mean_slope_of
from sounding.claims.picture import Panel, Picture, Series, points_over
from sounding.claims.thesis2024.gram_paths import (
    bound_line,
    deviation_line,
    distances,
    fixed_gram,
    stretched,
    thin,
    walk_grams,
)
from sounding.theory.gram import gram


def measure_observation(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure 3.1: the distance to G* with and without batch norm over depth."""
    size, depth, early = values["batch_size"], values["depth"], values["early"]
    options = {"width": values["width"], "depth": depth, "runs": values["runs"], "context": context}
    start = stretched(size)
    plain = distances("identity", start, offset=0, norm="none", **options)
    normed = distances(values["activation"], start, offset=1, **options)
    layers = np.arange(1, depth + 1)
    settled, late = slice(depth // 4, depth // 2), slice(depth // 2, depth)
    numbers = {
        "plain_log_growth": mean_of(np.log(plain[:, -1] / plain[:, early - 1])),
        "batch_norm_log_growth": mean_of(np.log(normed[:, -1] / normed[:, 0])),
        "batch_norm_late_growth": mean_of(np.log(normed[:, late].mean(1) / normed[:, settled].mean(1))),
        "plain_late_growth": mean_of(np.log(plain[:, late].mean(1) / plain[:, settled].mean(1))),
        "log_ratio_at_the_end": mean_of(np.log(plain[:, -1] / normed[:, -1])),
    }
    # G_ℓ of the linear chain is a martingale whose steps have E‖·‖² = (‖G‖² + (Tr G)²)/d
    walk = np.sqrt(layers * (np.sum(start**2) + np.trace(start) ** 2) / values["width"])
    floor = deviation_line(values["activation"], size, width=values["width"], depth=depth, context=context)
    shown = thin(depth, 18)
    series = (
        points_over("no norm, linear", layers[shown], plain[:, shown]),
        Series("no norm, linear (theory, root mean square)", layers, walk, role="theory"),
        points_over("batch norm", layers[shown], normed[:, shown]),
        Series("batch norm (theory, from G*)", layers, floor, role="theory"),
    )
    panel = Panel("layer ℓ", "‖G_ℓ − G*‖_F", series, y_scale="log")
    caption = (
        f"Width {values['width']}, batch {size}. Without batch norm the distance to the mean field grows with depth; "
        f"with it ({values['activation']}) the distance falls to a floor and stays there."
    )
    return Outcome(numbers, Picture((panel,), caption))


def measure_linear_fixed_point(values: Mapping[str, Any], context: Context) -> Outcome:
    """The time-averaged Gram matrix of a linear batch norm network against the identity and against G*."""
    size, depth, burn = values["batch_size"], values["depth"], values["burn_in"]
    options = {"width": values["width"], "depth": depth, "runs": values["runs"], "context": context, "offset": 0}
    mean = walk_grams("identity", stretched(size), **options)[:, burn:].mean(dim=1).cpu()
    target = torch.as_tensor(fixed_gram("identity", size))
    eigenvalues = torch.linalg.eigvalsh(mean.mean(0)).numpy()
    to_identity = torch.linalg.matrix_norm(mean - torch.eye(size, dtype=mean.dtype)).numpy()
    numbers = {
        "distance_to_identity": mean_of(to_identity),
        "distance_to_centred": mean_of(torch.linalg.matrix_norm(mean - target).numpy()),
        "smallest_eigenvalue": mean_of(torch.linalg.eigvalsh(mean)[:, 0].numpy()),
    }
    order = np.arange(1, size + 1)
    claimed = [0.0] + [size / (size - 1)] * (size - 1)
    series = (
        Series("measured", order, eigenvalues),
        Series("measured (theory)", order, claimed, role="theory"),
        Series("identity, as the paper says", order, np.ones(size), role="paper"),
    )
    panel = Panel("index of the eigenvalue", "eigenvalue of the mean Gram matrix", series)
    caption = "Centring leaves one eigenvalue at 0 and the others at n/(n − 1): G* is not the identity."
    return Outcome(numbers, Picture((panel,), caption))


def measure_depth(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figure 3.2: the distance over depth, from a stretched batch."""
    size, width, depth = values["batch_size"], values["width"], values["depth"]
    layers = np.arange(1, depth + 1)
    numbers: dict[str, Number] = {}
    panels = []
    for index, name in enumerate(values["activations"]):
        found = distances(
            name, stretched(size), width=width, depth=depth, runs=values["runs"], context=context, offset=index
        )
        limit = bound_line(name, size, width=width, depth=depth)
        early = slice(0, values["early"])
        numbers[f"{name}_early_slope"] = mean_slope_of(layers[early], np.log(found[:, early]))
        worst = int(np.argmax(found.mean(0) / limit))
        numbers[f"{name}_largest_over_bound"] = mean_of(found[:, worst] / limit[worst])
        generator = np.random.default_rng(context.random_seed)
        path = gram(name, stretched(size), depth=depth, samples=values["samples"], generator=generator).distances[1:]
        noise = deviation_line(name, size, width=width, depth=depth, context=context)
        numbers[f"{name}_square_over_floor"] = mean_of(found[:, -1] ** 2 / noise[-1] ** 2)
        series = (
            points_over(name, layers, found),
            Series(f"{name} (mean field and noise)", layers, np.hypot(path, noise), role="theory"),
            Series("Theorem 3.2, C = 1", layers, limit, role="bound"),
        )
        panels.append(Panel("layer ℓ", "‖G_ℓ − G*‖_F", series, y_scale="log", title=name))
    caption = (
        f"Width {width}, batch {size}. The distance falls geometrically, then stays at the floor of a finite width; "
        "the bound's constant is not given and set to 1."
    )
    return Outcome(numbers, Picture(panels, caption))


def measure_scaling(values: Mapping[str, Any], context: Context) -> Outcome:
    """Figures 3.3 and 3.4: the distance at one depth against the width or the batch size."""
    over, depth = values["over"], values["depth"]
    x = np.array(values[over])
    numbers: dict[str, Number] = {}
    series = []
    for name in values["activations"]:
        means, errors, theory, limits, logs = [], [], [], [], []
        for index, value in enumerate(values[over]):
            size, width = (value, values["width"]) if over == "batch_sizes" else (values["batch_size"], value)
            found = distances(
                name, np.eye(size), width=width, depth=depth, runs=values["runs"], context=context, offset=index
            )[:, -1]
            logs.append(np.log(found))
            square = mean_of(found**2)
            means.append(math.sqrt(square.value))
            errors.append((square.high - square.value) / (2 * math.sqrt(square.value)))
            theory.append(deviation_line(name, size, width=width, depth=depth, context=context)[-1])
            limits.append(bound_line(name, size, width=width, depth=depth)[-1])
        numbers[f"{name}_exponent"] = mean_slope_of(np.log(x), np.array(logs).T)
        numbers[f"{name}_over_theory"] = _spread(np.array(means) / theory, np.array(errors) / theory)
        series += [
            Series(name, x, means, error=errors),
            Series(f"{name} (theory)", x, theory, role="theory"),
        ]
        if np.all(np.isfinite(limits)):
            series.append(Series(f"{name} (Theorem 3.2, C = 1)", x, limits, role="bound"))
    power = -0.5 if over == "widths" else 1.0
    guide = values["guide"] * (x / x[0]) ** power
    series.append(Series(f"slope {power:g}, eq. (3.9)", x, guide, role="paper"))
    label = "width d" if over == "widths" else "batch size n"
    panel = Panel(
        label,
        f"√E‖G_ℓ − G*‖_F² at ℓ = {depth}",
        series,
        x_scale="log",
        y_scale="log",
        ticks={float(value): str(value) for value in values[over]},
    )
    fixed = f"batch {values['batch_size']}" if over == "widths" else f"width {values['width']}"
    caption = f"Layer {depth}, {fixed}. Points: networks; lines: the theory to leading order in 1/√d; dashed: (3.9)."
    return Outcome(numbers, Picture((panel,), caption))


def _spread(ratios: Array, errors: Array) -> Number:
    """The ratio farthest from 1; the interval holds those of all."""
    value = float(ratios[np.argmax(np.abs(ratios - 1))])
    return Number(value, float(np.min(ratios - errors)), float(np.max(ratios + errors)), len(ratios))
