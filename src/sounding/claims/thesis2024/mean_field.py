"""Chapter 3: the Gram matrix of a batch norm network of finite width stays near its mean field.

The chain is h′ = Wφ(BN(h)) with centring, G_ℓ = φ(BN(h_ℓ))φ(BN(h_ℓ))ᵀ/d (samples as rows), G* the mean field's fixed
point. Without batch norm the linear chain h′ = Wh has G* = G_0, for its mean field map is the identity. In theorem 3.2
1 − α is the square of the mean field's slowest rate λ, κ the condition of G*.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.number import Number, highest, mean_of, mean_slope_of, scaled
from sounding.claims.picture import Panel, Series, points_over, thin
from sounding.claims.walk import walk_in_law
from sounding.theory.batchnorm import batchnorm
from sounding.theory.bounds.thesis2024 import theorem_3_2
from sounding.theory.gram import gram
from sounding.theory.gram_deviation import gram_deviation


def walk_grams(
    activation: str,
    start: Array,
    *,
    width: int,
    depth: int,
    runs: int,
    context: Context,
    offset: int,
    norm: str = "batch",
) -> torch.Tensor:
    """G_1 … G_depth of independent networks whose input has the Gram matrix `start`: (runs, depth, n, n)."""
    size = len(start)
    factor = torch.as_tensor(np.linalg.cholesky(start) * math.sqrt(width), dtype=torch.float32)
    rows = torch.zeros(size, width, dtype=torch.float32)
    rows[:, :size] = factor  # d features, of which n hold the Gram matrix: the next layer sees no more
    generator = context.generator(offset, device=context.device)
    state = rows.to(context.device).expand(runs, size, width).clone()
    grams = []
    for chains in walk_in_law(state, depth=depth, generator=generator, activation=activation, norm=norm):
        # without a norm the chain keeps its size apart, in logarithms
        scale = (2 * chains.log_scale).exp() if norm == "none" else torch.ones_like(chains.log_scale)
        grams.append(chains.gram() * scale.view(-1, 1, 1) / width)
    return torch.stack(grams[1:], dim=1)


def distances(activation: str, start: Array, **options: Any) -> Array:
    """‖G_ℓ − G*‖_F of each run and layer, (runs, depth)."""
    target = start if options.get("norm") == "none" else fixed_gram(activation, len(start))
    grams = walk_grams(activation, start, **options)
    return np.asarray(torch.linalg.matrix_norm(grams - torch.as_tensor(target).to(grams)).cpu().numpy())


def fixed_gram(activation: str, size: int) -> Array:
    """G* = q((1 − c)I + c11ᵀ) of the mean field."""
    point = batchnorm(activation, batch_size=size).fixed_point
    return np.asarray(point.variance * ((1 - point.correlation) * np.eye(size) + point.correlation))


STARTS = ("stretched", "one sample apart", "two halves")


def start_gram(size: int, kind: str = "stretched") -> Array:
    """A Gram matrix far from every G*: one direction that parts the samples, and a little of each sample's own."""
    place = {
        "stretched": np.linspace(-1.5, 1.5, size),
        "one sample apart": np.array([size - 1.0] + [-1.0] * (size - 1)) / math.sqrt(size),
        "two halves": np.where(np.arange(size) < size // 2, -1.0, 1.0),
    }[kind]
    own = 1e-3 if kind == "one sample apart" else 0.05  # the others lie almost together
    return np.asarray(np.outer(place, place) + own * np.eye(size))


def slowest_rate(activation: str, size: int) -> float:
    """The larger of the mean field's |λ_L| and |λ_M|, by which G_ℓ comes to G* per layer."""
    forward = batchnorm(activation, batch_size=size).forward_eigenvalues  # G is a direction that batch norm removes
    return max(abs(forward.L), abs(forward.M))


def bound_line(activation: str, size: int, *, width: int, depth: int) -> Array:
    """Theorem 3.2 as printed with C = 1, layers 1 … depth; 1 − α is the square of the mean field's slowest rate."""
    alpha = 1 - slowest_rate(activation, size) ** 2
    found = theorem_3_2(fixed_gram(activation, size), width=width, depth=depth, mixing=alpha, version="printed")
    return found.curve[1:]


def deviation_line(activation: str, size: int, *, width: int, depth: int, context: Context) -> Array:
    """The root mean square of ‖G_ℓ − G*‖_F from G*, to leading order in 1/√d, layers 1 … depth."""
    generator = np.random.default_rng(context.random_seed)
    found = gram_deviation(activation, batch_size=size, width=width, generator=generator)
    return np.array([row.value for row in found.profile(depth)])


def measure_observation(values: Values, context: Context) -> Outcome:
    """Figure 3.1: the distance to G* with and without batch norm over depth."""
    size, depth, early = values["batch_size"], values["depth"], values["early"]
    options = {"width": values["width"], "depth": depth, "runs": values["runs"], "context": context}
    start = start_gram(size)
    plain = distances("identity", start, offset=0, norm="none", **options)
    normed = distances(values["activation"], start, offset=1, **options)
    layers = np.arange(1, depth + 1)
    settled, late = slice(depth // 4, depth // 2), slice(depth // 2, depth)  # the second quarter and the second half
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
    return present(numbers, series)


def measure_linear_fixed_point(values: Values, context: Context) -> Outcome:
    """The time-averaged Gram matrix of a linear batch norm network against the identity and against G*."""
    size, depth, burn = values["batch_size"], values["depth"], values["burn_in"]
    options = {"width": values["width"], "depth": depth, "runs": values["runs"], "context": context, "offset": 0}
    mean = walk_grams("identity", start_gram(size), **options)[:, burn:].mean(dim=1).cpu()
    target = torch.as_tensor(fixed_gram("identity", size))
    eigenvalues = torch.linalg.eigvalsh(mean.mean(0)).numpy()
    to_identity = torch.linalg.matrix_norm(mean - torch.eye(size, dtype=mean.dtype)).numpy()
    numbers = {
        "distance_to_identity": mean_of(to_identity),
        "distance_to_centred": mean_of(torch.linalg.matrix_norm(mean - target).numpy()),
        "smallest_eigenvalue": mean_of(torch.linalg.eigvalsh(mean)[:, 0].numpy()),
    }
    order = np.arange(1, size + 1)
    claimed = [0.0] + [size / (size - 1)] * (size - 1)  # centring takes one direction and shares its variance
    series = (
        Series("measured", order, eigenvalues),
        Series("measured (theory)", order, claimed, role="theory"),
        Series("identity, as the paper says", order, np.ones(size), role="paper"),
    )
    return present(numbers, series)


def measure_depth(values: Values, context: Context) -> Outcome:
    """Figure 3.2: the distance over depth, from a stretched batch."""
    size, width, depth = values["batch_size"], values["width"], values["depth"]
    layers = np.arange(1, depth + 1)
    numbers: dict[str, Number] = {}
    panels = []
    for index, name in enumerate(values["activations"]):
        found = distances(
            name, start_gram(size), width=width, depth=depth, runs=values["runs"], context=context, offset=index
        )
        limit = bound_line(name, size, width=width, depth=depth)
        early = slice(0, values["early"])
        numbers[f"{name}_early_slope"] = mean_slope_of(layers[early], np.log(found[:, early]))
        worst = int(np.argmax(found.mean(0) / limit))  # the layer that decides
        numbers[f"{name}_largest_over_bound"] = mean_of(found[:, worst] / limit[worst])
        generator = np.random.default_rng(context.random_seed)
        path = gram(name, start_gram(size), depth=depth, samples=values["samples"], generator=generator).distances[1:]
        noise = deviation_line(name, size, width=width, depth=depth, context=context)
        numbers[f"{name}_square_over_floor"] = mean_of(found[:, -1] ** 2 / noise[-1] ** 2)
        series = (
            points_over(name, layers, found),
            Series(f"{name} (mean field and noise)", layers, np.hypot(path, noise), role="theory"),
            Series("Theorem 3.2, C = 1", layers, limit, role="bound"),
        )
        panels.append(Panel(series=series, title=name))
    return present(numbers, *panels)


def measure_scaling(values: Values, context: Context) -> Outcome:
    """Figures 3.3 and 3.4: the distance at one depth against the width or the batch size."""
    over, depth = values["over"], values["depth"]
    x = np.array(values[over])
    numbers: dict[str, Number] = {}
    series = []
    for name in values["activations"]:
        means, errors, theory, limits, logs = [], [], [], [], []
        for index, value in enumerate(values[over]):
            size, width = (value, values["width"]) if over == "batch_sizes" else (values["batch_size"], value)
            shape = {"width": width, "depth": depth}
            options = {**shape, "runs": values["runs"], "context": context, "offset": index}
            found = distances(name, np.eye(size), **options)[:, -1]
            logs.append(np.log(found))
            square = mean_of(found**2)
            means.append(math.sqrt(square.value))
            errors.append((square.high - square.value) / (2 * math.sqrt(square.value)))  # d√s = ds/(2√s)
            theory.append(deviation_line(name, size, **shape, context=context)[-1])
            limits.append(bound_line(name, size, **shape)[-1])
        numbers[f"{name}_exponent"] = mean_slope_of(np.log(x), np.array(logs).T)
        numbers[f"{name}_over_theory"] = _spread(np.array(means) / theory, np.array(errors) / theory)
        series += [Series(name, x, means, error=errors), Series(f"{name} (theory)", x, theory, role="theory")]
        if np.all(np.isfinite(limits)):
            series.append(Series(f"{name} (Theorem 3.2, C = 1)", x, limits, role="bound"))
    power = -0.5 if over == "widths" else 1.0
    guide = values["guide"] * (x / x[0]) ** power  # the order of (3.9), which has no constant
    return present(numbers, [*series, Series(f"slope {power:g}, eq. (3.9)", x, guide, role="paper")])


def _spread(ratios: Array, errors: Array) -> Number:
    """The ratio farthest from 1; the interval holds those of all."""
    value = float(ratios[np.argmax(np.abs(ratios - 1))])
    return Number(value, float(np.min(ratios - errors)), float(np.max(ratios + errors)), len(ratios))


EARLY = 5  # layers in which the transient must peak; a later peak is told by a number of its own
ABOVE_FLOOR = 10.0  # times the noise of a finite width: below, the noise would enter the ratio by a tenth and more


def transient(found: Array, rate: float, noise: float) -> Array:
    """‖G_ℓ − G*‖_F/λ^ℓ of each run at the layers whose mean distance is well above the noise of a finite width."""
    mean = found.mean(0)
    below = np.flatnonzero(mean < ABOVE_FLOOR * noise)
    kept = int(below[0]) if len(below) else len(mean)
    return np.asarray(found[:, :kept] / rate ** np.arange(1, kept + 1))


def measure_concentration(values: Values, context: Context) -> Outcome:
    """The needed constant over widths, batch sizes, starts and layers, and what of it grows."""
    numbers: dict[str, Number] = {}
    trends, by_run, series = [], [], []
    largest, late, above = list[Number](), list[Number](), list[Number]()
    offset = 0
    shape: dict[str, Any] = {"runs": values["runs"], "context": context}
    wide: dict[str, Any] = {"width": values["wide"], "depth": values["short"], "runs": values["wide_runs"]}
    for name in values["activations"]:
        first, own = list[Array](), list[Array]()
        for size in values["batch_sizes"]:
            rate, condition = slowest_rate(name, size), float(np.linalg.cond(fixed_gram(name, size)))
            layers = np.arange(1, values["depth"] + 1)
            tails = []
            finite: dict[str, list[Array]] = {kind: [] for kind in STARTS}
            for width in values["widths"]:
                bound = bound_line(name, size, width=width, depth=values["depth"])
                for kind in STARTS:
                    depth = values["depth"] if kind == "stretched" else values["short"]
                    found = distances(name, start_gram(size, kind), width=width, depth=depth, offset=offset, **shape)
                    offset += 1
                    finite[kind].append(found / bound[:depth])
                    if kind == "stretched":
                        tail = np.log(found[:, values["burn_in"] :])
                        later = layers[values["burn_in"] :]
                        # the least-squares slope of each run
                        trends.append(tail @ (later - later.mean()) / np.var(later) / len(later))
                        tails.append(found[:, values["burn_in"] :].mean(1))
            by_run.append(np.log(np.array(tails)).T)
            # the floor of a finite width falls as 1/√d
            noise = float(tails[-1].mean()) * math.sqrt(values["widths"][-1] / values["wide"])
            limits, constants = [], []
            for kind in STARTS:
                found = distances(name, start_gram(size, kind), context=context, offset=offset, **wide)
                offset += 1
                ratio = transient(found, rate, noise)
                peak = int(np.argmax(ratio.mean(0)[:EARLY]))
                if ratio.shape[1] > EARLY:
                    beyond = EARLY + int(np.argmax(ratio.mean(0)[EARLY:]))
                    late.append(mean_of(ratio[:, beyond] / ratio[:, peak]))
                limit = float(ratio.mean(0).max()) / condition
                limits.append(found[:, 0] / condition)
                constants.append(ratio[:, peak] / ratio[:, 0])
                for needed in finite[kind]:
                    top = mean_of(needed[:, int(np.argmax(needed.mean(0)))])
                    largest.append(top)
                    above.append(scaled(top, 1 / limit))
                if size == values["batch_sizes"][0]:
                    shown = np.arange(1, ratio.shape[1] + 1)
                    series.append(points_over(f"{name}, {kind}", shown, ratio / condition))
            first.append(np.max(limits, axis=0))
            own.append(np.max(constants, axis=0))
        sizes = np.log(values["batch_sizes"])
        numbers[f"{name}_batch_exponent"] = mean_slope_of(sizes, np.log(first).T)
        numbers[f"{name}_corrected_batch_exponent"] = mean_slope_of(sizes, np.log(own).T)
    # the exponent with which the needed constant grows as two samples approach one another
    name, size = values["activations"][0], values["batch_sizes"][0]
    rate, torn = slowest_rate(name, size), []
    for index, distance in enumerate(values["pairs"]):
        start = np.eye(size)  # independent samples, but for two with the cosine 1 − distance
        start[0, 1] = start[1, 0] = 1 - distance
        found = distances(name, start, offset=offset + index, context=context, **{**wide, "depth": 20})
        ratio = found / rate ** np.arange(1, 21)
        # as long as the pair is still being torn apart
        settled = int(np.argmax(found.mean(0) < found.mean(0)[0] / 3)) or 20
        torn.append(np.log(ratio[:, :settled].max(1) / ratio[:, 0]))
    numbers |= {
        "needed_constant": highest(largest),
        "needed_over_wide_limit": highest(above),
        "late_over_early": highest(late),
        "log_growth_per_layer": mean_of(np.concatenate(trends)),
        "width_exponent": mean_slope_of(np.log(values["widths"]), np.concatenate(by_run)),
        "near_pair_exponent": mean_slope_of(-np.log(values["pairs"]), np.array(torn).T),
    }
    return present(numbers, series)
