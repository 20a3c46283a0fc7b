"""Rank against depth and width: figures 2 and 3, Corollary 15 and its assumption, Lemma 3 and Proposition 19."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from sounding.activations import resolve
from sounding.chain import simulate
from sounding.claims.claim import Context, Outcome, Values, pick, present
from sounding.claims.number import DRAWN, Number, estimate, exact, highest, lowest, mean_of, over_runs, ratio_of, scaled
from sounding.claims.picture import Series, level, points_of, points_over
from sounding.claims.rank2020.invariant import averages_of, follow, log_slope, measured, number_of
from sounding.claims.walk import draw_normals, measure_at, unit_features, unit_matrix, walk
from sounding.measures import gradient_alignment, numerical_rank
from sounding.profile import Estimate, Profile
from sounding.weights import draw_uniform
from sounding.weights import resolve as resolve_law


def measure_fig2(values: Values, context: Context) -> Outcome:
    """The numerical rank against depth of H ↦ φ(BN(HWᵀ)), and of φ(HWᵀ) over its Frobenius norm.

    Weights are uniform of unit variance, inputs Gaussian, as many samples as features.
    """
    function, device = resolve(values["activation"]).torch(), context.device
    shape = (values["runs"], values["width"], values["width"])
    layers = [0, *range(values["every"], values["depth"] + 1, values["every"])]
    numbers: dict[str, Number] = {}
    series = []
    kinds = (("batch", "batch norm", "with"), ("none", "no norm", "without"))
    for index, (norm, label, key) in enumerate(kinds):
        seed = torch.randint(2**31, (), generator=context.generator(index))
        on = torch.Generator(device).manual_seed(int(seed))  # drawn on the device, but seeded as everything else
        start = torch.randn(shape, generator=on, device=device)
        draw = partial(draw_uniform, shape, generator=on, dtype=start.dtype, device=device)
        weights = (draw() for _ in range(values["depth"]))
        if norm == "batch":
            states = walk(start, weights, norm=partial(unit_features, centring=True), activation=function)
        else:
            # the released program divides by the norm at each layer: tanh then acts as if it were linear
            states = walk(start, weights, activation=lambda product: unit_matrix(function(product)))
        # a walk begins with layer 1; the input's rank stands in front
        found = torch.cat([numerical_rank(start)[None], measure_at(states, layers[1:], numerical_rank)])
        ranks = found.cpu().numpy()
        late = 3 * len(layers) // 4  # the last quarter, where the rank has settled
        numbers[f"rank_{key}_batch_norm"] = over_runs(ranks[late:].mean(axis=0))
        series.append(points_over(label, layers, ranks.T))
    ends = [0, values["depth"]]
    floor = level("√d (the paper's floor)", ends, math.sqrt(values["width"]), "paper")
    return present(numbers, [*series, floor, level("1: collapse", ends, 1.0)])


def measure_cor15(values: Values, context: Context) -> Outcome:
    """The rank at every layer, from orthogonal inputs, over widths."""
    smallest, over, series = [], [], []
    shape = pick(values, "depth runs residual every")
    shape |= {"weights": "uniform", "input": "orthogonal", "measures": ["numerical_rank"]}
    for index, (width, alpha) in context.each(zip(values["widths"], values["regularities"], strict=True)):
        profile = follow(context.generator(index), width=width, **shape)
        ranks = [profile.value("numerical_rank", layer=layer) for layer in profile.layers if layer]
        smallest.append(_of_runs(min(ranks, key=lambda rank: rank.value), values["runs"]))
        over.append(scaled(smallest[-1], 1 / math.sqrt((1 - alpha) * width)))
        series.append(_curve(f"d = {width}", profile, "numerical_rank"))
    plain = follow(context.generator(99), width=width, norm="none", **shape)  # at the widest
    last = plain.value("numerical_rank", layer=values["depth"])
    growth = ratio_of(smallest[-1], smallest[0])
    stretch = math.log(values["widths"][-1] / values["widths"][0])
    value, low, high = (math.log(end) / stretch for end in (growth.value, growth.low, growth.high))
    numbers = {
        "smallest_rank_over_bound": lowest(over),
        "exponent_of_rank": Number(value, low, high, values["runs"]),
        "rank_without_norm_over_bound": scaled(_of_runs(last, values["runs"]), 1 / math.sqrt((1 - alpha) * width)),
    }
    series.append(_curve(f"d = {width}, no norm", plain, "numerical_rank"))
    widths = np.array(values["widths"])
    bounds = np.sqrt((1 - np.array(values["regularities"])) * widths)
    least = (points_of("measured", widths, smallest), Series("√((1 − α)d)", widths, bounds, role="bound"))
    return present(numbers, series, least)


def measure_soft_rank(values: Values, context: Context) -> Outcome:
    """Rank and soft rank at every layer from nearly collinear inputs, which are of full rank."""
    width, tau = values["width"], values["threshold"]
    name = f"soft_rank:{tau}"
    shape = pick(values, "width depth runs residual every")
    start = {"weights": "uniform", "input": values["collinear"], "measures": ["numerical_rank", name]}
    near = follow(context.generator(), **start, **shape)
    layers = [layer for layer in near.layers if layer]
    rank, soft = ([near.value(measure, layer=layer) for layer in layers] for measure in ("numerical_rank", name))
    floor = math.sqrt((1 - values["regularity"]) * width)
    bound, runs = (1 - tau) ** 2 * floor, values["runs"]
    # one run's average over layers has no larger spread than the largest of a layer
    spread = max(e.stderr or 0.0 for e in soft)
    average = float(np.mean([e.value for e in soft]))
    error = math.hypot(*(e.stderr or 0.0 for e in (soft[0], soft[-1])))
    numbers = {
        "increase_of_soft_rank": _of_runs(Estimate(soft[-1].value - soft[0].value, error), runs),
        "smallest_soft_rank_over_bound": min((_of_runs(e, runs, unit=bound) for e in soft), key=lambda n: n.value),
        "average_soft_rank_over_bound": _of_runs(Estimate(average, spread), runs, unit=bound),
        "smallest_rank_over_bound": lowest(_of_runs(e, runs, unit=floor) for e in rank),
    }
    label, ends = "nearly collinear input", [1, layers[-1]]
    softs = (_curve(label, near, name), level("(1 − τ)²√((1 − α)d)", ends, bound, "paper"))
    ranks = (_curve(label, near, "numerical_rank"), level("√((1 − α)d)", ends, floor))
    return present(numbers, softs, ranks)


def _curve(label: str, profile: Profile, name: str) -> Series:
    """A measure at a dozen layers."""
    known = np.array([layer for layer in profile.layers if layer])  # a logarithmic axis has no layer 0
    wanted = np.geomspace(known[0], known[-1], 12)
    picked = sorted({int(known[np.argmin(np.abs(known - layer))]) for layer in wanted})
    points = [profile.value(name, layer=layer) for layer in picked]
    return Series(label, picked, [p.value for p in points], error=[DRAWN * (p.stderr or 0.0) for p in points])


def _of_runs(mean: Estimate, runs: int, *, unit: float = 1.0) -> Number:
    """Student's interval of a mean over runs, in some unit; all runs alike is exact."""
    value, stderr = mean.value / unit, (mean.stderr or 0.0) / unit
    return exact(value) if stderr == 0 else estimate(value, stderr, samples=runs)


# shares of the largest singular value above which a direction is counted: the released programs have 1e-9 and what
# float32 resolves, about 1e-5 at width 256; float64 resolves directions down to 1e-13
TOLERANCES = ("1e-5", "1e-7", "1e-9", "1e-12")


def measure_fig3a(values: Values, context: Context) -> Outcome:
    """The rank averaged over depth against the width, for each residual strength, and at each tolerance if it has one.

    Both rows of the figure share the chains, so both have all measures taken.
    """
    widths, counted = values["widths"], [f"numerical_rank:{share}" for share in TOLERANCES]
    by_gamma = averages_of(values, context, measures=("soft_rank", *counted))
    shown = counted if values["measure"] == "numerical_rank" else ["soft_rank"]
    numbers: dict[str, Number] = {}
    exponents: dict[str, list[Number]] = {measure: [] for measure in shown}  # one for each strength
    series = []
    for gamma, found in by_gamma.items():
        for measure in shown:
            exponents[measure].append(log_slope(widths, [average[measure] for average in found]))
        numbers[f"exponent_at_gamma_{gamma:g}"] = lowest(e[-1] for e in exponents.values())
        drawn = [average[shown[len(shown) // 2]] for average in found]
        label = "no skip connection" if math.isinf(gamma) else f"γ = {gamma:g}"
        series.append(measured(label, widths, drawn))
    every = [number for found in exponents.values() for number in found]
    numbers |= {"smallest_exponent": lowest(every), "largest_exponent": highest(every)}
    over = [(found[place][m], d) for found in by_gamma.values() for place, d in enumerate(widths) for m in shown]
    shares = [number_of(rank, scale=1 / math.sqrt(d)) for rank, d in over]
    numbers["smallest_rank_over_sqrt_width"] = lowest(shares)
    if len(shown) > 1:
        weakest = by_gamma[min(by_gamma)]  # the smallest γ leaves the rank longest on its way
        for measure, share in zip(shown, TOLERANCES, strict=True):
            numbers[f"smallest_exponent_at_tolerance_{share}"] = lowest(exponents[measure])
            for place in (0, -1):
                numbers[f"rank_at_width_{widths[place]}_tolerance_{share}"] = number_of(weakest[place][measure])
    order = Series("√d (the paper's order)", widths, np.sqrt(widths), role="paper")
    return present(numbers, [*series, order, Series("d (full rank)", widths, widths, role="bound")])


def measure_fig3b(values: Values, context: Context) -> Outcome:
    """The ten largest eigenvalues of nearly collinear inputs on their way through batch norm."""
    last = values["depth"]
    layers = [layer for layer in range(1, last + 1) if (layer < 20 and layer % 2) or layer % max(last // 20, 1) == 0]
    # eigenvalues that grow at random spread over orders of magnitude: their logarithms are averaged, run by run
    start: dict[str, Any] = {"input": f"collinear:{values['noise']}", "measures": ["top_eigenvalues:10"]}
    tops = []
    for run in range(values["runs"]):
        found = follow(context.generator(run), runs=1, **start, **pick(values, "width depth residual"))
        tops.append([[found.value(f"eigenvalue_{k}", layer=at).value for k in range(1, 11)] for at in layers])
    logs = np.log10(tops)  # (runs, layers, 10)
    changes = [mean_of(change) for change in (logs[:, -1] - logs[:, 0]).T]
    numbers = {"change_of_largest": changes[0], "smallest_growth_of_others": lowest(changes[1:])}
    typical = np.sqrt(values["width"] * 10 ** logs.mean(axis=0))
    return present(numbers, [Series(f"σ{k}", layers, row) for k, row in enumerate(typical.T, start=1)])


ROUNDING = 1e-12  # of r − 1 in float64, where a collapse is complete and no two runs differ


def lyapunov_gap(
    strength: float, width: int, *, depth: int, runs: int, weights: str, generator: torch.Generator
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """ln σ₂/σ₁ per layer of the product of I + γW, by QR of two vectors; and what one layer does to their direction.

    Returns the gap (runs,) and 1 − |cos| between the direction after the last layer and the one before it (runs,).
    """
    law = resolve_law(weights)
    shape = (runs, width, width)
    frame = torch.linalg.qr(draw_normals(generator, runs, width, 2))[0]
    logs = torch.zeros(runs, 2, dtype=torch.float64)
    before = frame
    for _ in range(depth):
        before = frame
        drawn = law.draw(shape, generator=generator, dtype=torch.float64, device=torch.device("cpu"))
        # QR keeps two vectors apart that would align; R holds their growth
        frame, triangle = torch.linalg.qr(frame + strength * (drawn @ frame))
        # the sum over layers is ln of both singular values
        logs += torch.diagonal(triangle, dim1=-2, dim2=-1).abs().log()
    turned = 1 - (frame[..., 0] * before[..., 0]).sum(-1).abs()  # 0 where the one direction that is left stays
    return ((logs[:, 1] - logs[:, 0]) / depth).numpy(), turned.numpy()


def measure_lemma3(values: Values, context: Context) -> Outcome:
    """Products of I + γW: the second singular value falls behind exponentially, at every γ."""
    width, depth, strengths = values["width"], values["depth"], values["strengths"]
    gaps, turns, left, series = [], [], [], []
    for index, gamma in enumerate(strengths):
        shape = {**pick(values, "runs weights"), "depth": values["exponent_depth"]}
        gap, turned = lyapunov_gap(gamma, width, generator=context.generator(2 * index), **shape)
        gaps.append(mean_of(gap))
        turns.append(mean_of(turned))
        profile = simulate(
            **pick(values, "width depth runs weights"), batch_size=width, every=depth // 20, norm="none",
            residual=gamma, measures=["participation_ratio", "orthogonality_gap"], profile=True, dtype="float64",
            generator=context.generator(2 * index + 1),
        ).profile  # fmt: skip
        layers = profile.layers[1:]
        found = [profile.value("participation_ratio", layer=layer) for layer in layers]
        left.append(_distance(found[-1], values["runs"]))
        # a logarithmic axis takes no 0
        series.append(Series(f"γ = {gamma:g}", layers, np.maximum([ratio.value - 1 for ratio in found], 1e-16)))
    numbers = {
        "largest_exponent_gap": highest(gaps),
        "largest_r_minus_1": highest(left),
        "smallest_turn_per_layer": lowest(turns),
    }
    exponents = (points_of("measured", strengths, gaps), level("0: no collapse", strengths, 0.0))
    return present(numbers, series, exponents)


def _distance(ratio: Estimate, runs: int) -> Number:
    """r − 1 over runs; where they agree, to rounding."""
    number = estimate(ratio.value - 1, ratio.stderr or 0.0, samples=runs)
    return number if number.high - number.value > ROUNDING else exact(number.value, error=ROUNDING)


def measure_prop19(values: Values, context: Context) -> Outcome:
    """Per-sample gradients of each neuron's weights in the last layer, from hidden features of rank 1, 2, …"""
    generator, ranks = context.generator(), values["ranks"]
    samples, width, classes = values["samples"], values["width"], values["classes"]
    aligned: dict[str, list[Number]] = {"cross-entropy": [], "squared error": []}
    for rank in ranks:
        found: dict[str, list[float]] = {loss: [] for loss in aligned}
        for _ in range(values["trials"]):
            hidden = draw_normals(generator, samples, rank) @ draw_normals(generator, rank, width)
            readout = draw_normals(generator, classes, width)
            labels = torch.randint(classes, (samples,), generator=generator)
            for loss in aligned:
                # the class whose gradients are least aligned
                found[loss].append(float(gradient_alignment(_row_gradients(hidden, readout, labels, loss)).min()))
        for loss, row in found.items():
            aligned[loss].append(mean_of(row))
    numbers = {
        "alignment_at_rank_1": lowest(row[0] for row in aligned.values()),
        "alignment_at_largest_rank": highest(row[-1] for row in aligned.values()),
    }
    series = [points_of(loss, ranks, row) for loss, row in aligned.items()]
    return present(numbers, [*series, level("1: all collinear (proposition)", ranks, 1.0, "paper")])


def _row_gradients(hidden: torch.Tensor, readout: torch.Tensor, labels: torch.Tensor, loss: str) -> torch.Tensor:
    """(classes, samples, width): the gradient of each sample's loss in each row of the readout, by autograd."""

    def of_one(weight: torch.Tensor, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits = features @ weight.mT
        if loss == "cross-entropy":
            return torch.nn.functional.cross_entropy(logits, label)
        return (logits - (torch.arange(len(weight)) == label).double()).square().sum()  # the one-hot target

    gradients: torch.Tensor = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0))(readout, hidden, labels)
    return gradients.transpose(0, 1)  # vmap has samples first
