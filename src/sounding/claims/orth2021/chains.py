"""Figures 1, 2 and 6 and the conjecture of appendix F: random networks with batch norm at initialization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import numpy as np
import torch

from sounding.activations import resolve
from sounding.activations.activation import Array
from sounding.chain import Simulation, simulate
from sounding.claims.claim import Context, Outcome, Values, pick, present
from sounding.claims.number import DRAWN, Number, estimate, jackknife, ratio_of, slope_of, student
from sounding.claims.picture import Series, level
from sounding.claims.walk import draw_normals
from sounding.theory.bounds import orth2021 as bounds


def linear_chain(context: Context, offset: int, **options: Any) -> Simulation:
    """Random linear networks with batch norm without centring, and their profile."""
    return simulate(centring=False, profile=True, device=context.device, generator=context.generator(offset), **options)


def _nearly_rank_one(width: int, samples: int, spread: float) -> torch.Tensor:
    """Samples diag(1, ε, …, ε) as the released program starts, (samples, width)."""
    start = torch.zeros(samples, width, dtype=torch.float64)
    start[range(samples), range(samples)] = spread
    start[0, 0] = 1.0  # after the others, for it is one of the diagonal
    return start * math.sqrt(width)  # so that the first sample has unit mean square


def measure_figure1(values: Values, context: Context) -> Outcome:
    """|cos| between two samples over depth: with batch norm from nearly equal samples, without from orthogonal ones."""
    width, eps = values["width"], values["eps"]
    correlated = torch.zeros(2, width, dtype=torch.float64)
    correlated[0, 0], correlated[1, 0], correlated[1, 1] = 1.0, 1 - eps, eps
    shape = {**pick(values, "width depth runs"), "batch_size": 2}
    kinds: dict[str, dict[str, Any]] = {
        "batch norm": {"input": correlated * math.sqrt(width)},  # √d: features of unit mean square
        "vanilla": {"input": "orthogonal", "norm": "none"},
    }
    numbers, drawn = {}, []
    for offset, (name, start) in enumerate(kinds.items()):
        run = linear_chain(context, offset, measures=("mean_absolute_cosine",), **start, **shape)
        curve = run.profile.series("mean_absolute_cosine")
        stderr = np.nan_to_num(curve.stderr)  # NaN at the input, which is the same in all runs
        for place, index in (("first", 0), ("half", values["depth"] // 2), ("last", values["depth"])):
            number = estimate(float(curve.value[index]), float(stderr[index]), samples=values["runs"])
            numbers[f"{name.replace(' ', '_')}_{place}"] = number
        drawn.append(Series(name, curve.layer, curve.value, error=DRAWN * stderr))
    first, half = numbers["vanilla_half"], numbers["vanilla_last"]
    numbers["vanilla_rise_second_half"] = estimate(
        half.value - first.value, math.hypot(first.high - first.value, half.high - half.value) / DRAWN
    )
    # E|u₁| of a uniform unit vector u in d dimensions
    chance = math.gamma(width / 2) / math.gamma((width + 1) / 2) / math.sqrt(math.pi)
    return present(numbers, [*drawn, level("independent directions (theory)", [0, values["depth"]], chance, "theory")])


def _mean_field(samples: int, spread: float, depth: int) -> Array:
    """The gap along the infinitely wide chain."""
    sigma = np.append(1.0, np.full(samples - 1, spread))
    path = []
    for _ in range(depth + 1):
        eigenvalues = sigma**2 / np.sum(sigma**2)
        path.append(float(np.linalg.norm(eigenvalues - 1 / samples)))
        sigma = np.sqrt(bounds.expected_spectrum(sigma))  # the next layer of the infinitely wide chain
    return np.array(path)


def predict_floor(samples: int, width: int) -> float:
    """E V at the floor, to leading order in 1/d.

    HᵀH is a mean of d independent projections on a direction, so E‖HᵀH − I/n‖² after a layer is r²V² + (1 − 1/n)/d
    with r = n/(n + 2) near orthogonality. The fixed point is V² = (1 − 1/n)/(d(1 − r²)), spread evenly over the
    k = (n − 1)(n + 2)/2 directions of a symmetric matrix without trace: E V = V·√(2/k)·Γ((k + 1)/2)/Γ(k/2).
    """
    ratio, k = samples / (samples + 2), (samples - 1) * (samples + 2) / 2
    size = math.sqrt((1 - 1 / samples) / (width * (1 - ratio**2)))
    return size * math.sqrt(2 / k) * math.gamma((k + 1) / 2) / math.gamma(k / 2)


def over_groups(curves: Array, function: Callable[[Array], float]) -> Number:
    """A function of the mean curves (widths, layers) of (widths, groups, layers).

    The groups are independent, the layers of a chain are not: the interval is over groups.
    """
    return jackknife(lambda groups: function(groups.mean(0)), np.moveaxis(curves, 1, 0))


def _slope(gaps: Array, first: int, last: int) -> float:
    """The slope of ln V over the layers from first to last."""
    return float(np.polyfit(np.arange(first, last + 1), np.log(gaps[first : last + 1]), 1)[0])


def _share(gaps: Array, first: int, last: int) -> float:
    """How fast ln V falls from first to last, over how fast it falls from layer 1 to 20: 1 on a straight line."""
    # per layer; 19 layers lie between 1 and 20
    return float(np.log(gaps[first] / gaps[last]) / (last - first) / (np.log(gaps[1] / gaps[20]) / 19))


def describe_gaps(curves: Array, *, samples: int, width: int, spread: float) -> dict[str, Number]:
    """What V does along (narrow and wide, groups, layers); `width` is the wide one's."""
    depth = curves.shape[2] - 1
    half, theory, floor = depth // 2, _mean_field(samples, spread, depth), predict_floor(samples, width)
    numbers: dict[str, Number] = {}
    told: dict[str, Callable[[Array], float]] = {
        "slope_first_20": lambda gaps: _slope(gaps[0], 1, 20),
        "early_rate": lambda gaps: _share(gaps[0], 1, 5),
        "late_rate": lambda gaps: _share(gaps[0], 15, 20),
        # R² of a straight line through ln V of layers 1 to 20
        "straightness_first_20": lambda gaps: float(np.corrcoef(np.arange(20), np.log(gaps[0, 1:21]))[0, 1] ** 2),
        "drift_after_half": lambda gaps: _slope(gaps[0], half, depth),
        "plateau": lambda gaps: float(gaps[0, 3] / theory[3]),  # V leaves its start only after layer 3
    }
    narrow, wide = curves[:1], curves[1:]
    for name, chosen in (("narrow", narrow), ("wide", wide)):
        numbers |= {f"{key}_{name}": over_groups(chosen, function) for key, function in told.items()}
    return numbers | {
        "floor_ratio": over_groups(curves, lambda gaps: float(gaps[0, half:].mean() / gaps[1, half:].mean())),
        "slope_6_to_12": over_groups(wide, lambda gaps: _slope(gaps[0], 6, 12)),
        "bend_at_9": over_groups(wide, lambda gaps: _slope(gaps[0], 9, 12) / _slope(gaps[0], 6, 9)),
        "layers_17_to_20": over_groups(wide, lambda gaps: float(gaps[0, 17:21].mean() / gaps[0, half:].mean())),
        "floor_over_theory": over_groups(wide, lambda gaps: float(gaps[0, half:].mean() / floor)),
    }


def measure_figure2a(values: Values, context: Context) -> Outcome:
    """ln V over depth at two widths, from a nearly rank-one batch, for groups of independent chains."""
    n, depth, groups = values["batch_size"], values["depth"], values["groups"]
    found = []
    shape = {"batch_size": n, "depth": depth, "runs": values["runs"] // groups, "dtype": "float64"}
    for _, ((index, width), group) in context.each(product(enumerate(values["widths"]), range(groups))):
        start = _nearly_rank_one(width, n, values["eps"])
        run = linear_chain(
            context, 1000 * index + group, input=start, width=width, measures=("orthogonality_gap",), **shape
        )
        found.append(run.profile.series("orthogonality_gap").value)
    curves = np.array(found).reshape(2, groups, depth + 1)
    numbers = describe_gaps(curves, samples=n, width=values["widths"][1], spread=values["eps"])
    layers = np.arange(depth + 1)
    mean, error = curves.mean(1), student(groups - 1) * curves.std(1, ddof=1) / math.sqrt(groups)
    theory = _mean_field(n, values["eps"], depth)
    seen = theory > mean.min() / 2  # the infinitely wide chain has no floor and would fall out of the picture
    drawn = [Series(f"d = {width}", layers, mean[i], error=error[i]) for i, width in enumerate(values["widths"])]
    drawn.append(Series("infinite width (theory)", layers[seen], theory[seen], role="theory"))
    for width in values["widths"]:
        floor = predict_floor(n, width)
        drawn.append(level(f"floor, d = {width} (theory)", [depth // 2, depth], floor, "theory"))
    drawn.append(Series("straight over 20 layers, as stated", [1, 20], mean[1, [1, 20]], role="paper"))
    return present(numbers, drawn)


def measure_figure2b(values: Values, context: Context) -> Outcome:
    """The average gap over a window of layers against the width, on logarithmic axes."""
    n, widths = values["batch_size"], np.array(values["widths"])
    first, last = values["window"]
    found = []
    for index, width in enumerate(widths):
        shape = {**pick(values, "batch_size runs"), "width": int(width), "depth": last, "burn_in": first}
        start = _nearly_rank_one(int(width), n, values["eps"])
        run = linear_chain(context, index, input=start, measures=("orthogonality_gap",), **shape)
        average = run.averages["orthogonality_gap"]
        found.append((average.value, average.stderr or 0.0))
    mean, error = np.array(found).T
    slope = slope_of(np.log(widths), np.log(mean), stderr=list(error / mean), straight=False)
    series = (
        Series("measured", widths, mean, error=DRAWN * error),
        Series("d^(−1/2) (theory)", widths, mean[-1] * (widths / widths[-1]) ** -0.5, role="theory"),
        Series("slope −0.46, as printed", widths, mean[-1] * (widths / widths[-1]) ** -0.46, role="paper"),
    )
    return present({"slope": slope}, series)


def _stationary_grams(
    width: int, samples: int, runs: int, activation: Callable[[torch.Tensor], torch.Tensor], generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """QᵀQ/d of `runs` networks, (runs, n, n), after each of endlessly many layers Q ↦ BN(W F(Q)).

    Given F(Q), the columns of WF(Q) are normals times a factor of its Gram matrix: exact in law.
    """
    state = draw_normals(generator, runs, samples, width)
    # Cholesky needs a positive matrix: ReLU can make two samples alike
    jitter = 1e-12 * torch.eye(samples, dtype=torch.float64, device=generator.device)
    while True:
        features = activation(state)
        factor = torch.linalg.cholesky(features @ features.mT / width + jitter)
        # in law F(Q)Wᵀ: its columns are independent normals, the Gram matrix their covariance
        mapped = factor @ draw_normals(generator, *state.shape)
        state = mapped / mapped.square().mean(1, keepdim=True).sqrt()  # batch norm without centring, over the samples
        yield state @ state.mT / (width * samples)


def measure_conjecture(values: Values, context: Context) -> Outcome:
    """L = ‖QᵀQ/d − its stationary mean‖_F, averaged over layers, against the width, for each activation.

    Those `beside` the named ones are shown, and count for nothing that compares curves.
    """
    numbers, series = {}, []
    curves: list[Number] = []  # each curve by its height at the widest
    widths = np.array(values["widths"])
    shown = [*values["activations"], *values.get("beside", [])]
    for index, name in enumerate(shown):
        function = resolve(name).torch()
        means, errors = [], []
        for place, width in enumerate(widths):
            generator = context.generator(100 * index + place, device=context.device)
            layers = _stationary_grams(int(width), values["batch_size"], values["runs"], function, generator)
            late = islice(layers, values["burn_in"], values["burn_in"] + values["layers"])
            grams = torch.stack([*late])  # (layers, runs, n, n)
            unit = torch.eye(values["batch_size"], dtype=torch.float64, device=context.device)
            target = unit / values["batch_size"] if values["gap"] else _exchangeable_mean(grams)
            distance = (grams - target).square().sum((-1, -2)).sqrt().mean(0).cpu().numpy()
            means.append(float(distance.mean()))
            errors.append(float(distance.std(ddof=1)) / math.sqrt(len(distance)))
            context.progress((index + (place + 1) / len(widths)) / len(shown))
        mean, error = np.array(means), np.array(errors)
        key = name.replace(":", "_")
        # of all widths, and of those where the law is that of wide networks
        for part, least in (("", 0), ("_wide", values["wide"])):
            x, y, spread = (row[widths >= least] for row in (np.log(widths), np.log(mean), error / mean))
            numbers[f"slope_{key}{part}"] = slope_of(x, y, stderr=list(spread), straight=False)
        if name in values["activations"]:  # those beside are shown, and compared with nothing
            curves.append(estimate(float(mean[-1]), float(error[-1])))
        series.append(Series(name, widths, mean, error=DRAWN * error))
    curves.sort(key=lambda number: number.value)
    numbers["largest_over_smallest_curve"] = ratio_of(curves[-1], curves[0])
    line = np.asarray(series[0].y)[0] * (widths / widths[0]) ** -0.5
    series.append(Series("d^(−1/2) (theory)", widths, line, role="theory"))
    apart = numbers["largest_over_smallest_curve"].low > 1.05  # five percent, which a reader sees
    return present(numbers, series, but="; they are parallel, not identical" if apart else "")


def _exchangeable_mean(grams: torch.Tensor) -> torch.Tensor:
    """The stationary law is exchangeable: one diagonal and one off-diagonal mean, over runs and layers."""
    mean = grams.mean((0, 1))
    n = len(mean)
    diagonal = mean.diagonal().mean()
    off = (mean.sum() - mean.diagonal().sum()) / (n * (n - 1))  # over the n(n − 1) entries off the diagonal
    return torch.eye(n, dtype=mean.dtype, device=mean.device) * (diagonal - off) + off
