"""From a blueprint to predicted rows: the measures of a check, as theory expects them, with their spread over seeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sounding.reader.followed import plan_of, thinned
from sounding.reader.module import Blueprint
from sounding.reader.scatter import FLOORS, NEXT_ORDER, ROUNDING, Grams, cosines, of_positions, of_samples
from sounding.theory.signal import Description, Given, Points, Propagation, Signal, propagate
from sounding.theory.signal.description import Array, Attention
from sounding.theory.signal.measures import participation, spread_of_spectrum
from sounding.theory.signal.spread import Spread, spread

MOST_PRODUCTS = 2**28  # of gradients of all samples: a fifth of a second; outputs at more positions have pairs enough
MOST_TOGETHER = 2**31  # of products of gradients, pair by pair of points: a fifth of a second
TRIALS = 256  # sets of samples among which the one most like the whole batch is followed
TOGETHER = 2**16  # entries of the Gram matrices whose measures are taken at once: they stay in the cache of a core
MOST_SPECTRUM = 32  # samples whose spectra are drawn: their time grows as the cube, and has to stay below that of rules
# measured on one core: 12 blocks of a transformer over 1024 points 9 s, 20 layers over 100 points 0.2 s
NODE_SECONDS, PAIR_SECONDS = 4e-3, 5e-8
# The first order leaves out what heads of attention, positions and batch norm add: on the networks of `bench/bands.py`,
# seeds 0 to 11, sizes and gradients scatter up to 1.2 and correlations between samples up to 1.7 times as far.
WIDER, WIDER_SHAPE = 1.5, 1.8
# The smallest eigenvalues, which no other measure sees, scatter half as far again: chosen on the networks CHOSEN of
# `bench/architecture_networks.py`, seeds 0 and 1, judged on HELD_OUT.
WIDENED = {
    **dict.fromkeys([*FLOORS, "token_participation_ratio"], WIDER_SHAPE),
    **dict.fromkeys(("effective_rank", "isometry_gap"), 1.5 * WIDER_SHAPE),
}


@dataclass(frozen=True)
class Expected:
    """What theory expects of one measure of one call."""

    name: str
    measure: str
    value: float
    stderr: float


@dataclass(frozen=True)
class Prediction:
    """What theory expects of a network."""

    rows: tuple[Expected, ...]  # measures of calls and of weights
    propagation: Propagation  # the signals behind them
    spread: Spread  # the scatter over seeds at every node
    samples: int  # how many samples of the batch were followed
    notes: tuple[str, ...]  # what was left out and why


def predict(blueprint: Blueprint, *, generator: np.random.Generator | None = None) -> Prediction:
    """What theory expects a check to measure at every call that it describes."""
    generator = generator or np.random.default_rng(0)
    description, given, gradients = start_of(blueprint)
    samples = max(node.points.samples for node in description.nodes)
    whole = next((len(array) for array in blueprint.given.values()), samples)
    with np.errstate(all="ignore"):  # a dead layer has cosines of 0/0, which end as rows that are left out
        found = propagate(description, given=given, gradients=gradients, generator=generator, samples=whole)
        scatter = spread(description, found)
        rows = tuple(_rows(blueprint, description, found, scatter, whole=whole))
    notes = [*description.notes]
    if samples < whole:
        notes.append(f"theory follows {samples} of {whole} samples, those that are most like all of them at the input")
    return Prediction(rows, found, scatter, samples, tuple(notes))


def start_of(
    blueprint: Blueprint, *, most: int | None = None
) -> tuple[Description, dict[int, Signal], dict[int, Signal]]:
    """What a prediction starts from: the description over the samples that are followed, its measured signals, and the
    gradients at its outputs; at most so many samples where no batch norm needs them all."""
    description, samples = thinned(blueprint.description, most=most)
    kept, spacing = _typical(blueprint, samples), plan_of(description)
    description = _with_masks_of(description, kept)

    def signals(arrays: Mapping[int, Tensor], *, gradient: bool = False) -> dict[int, Signal]:
        return {
            at: _signal(array, description.nodes[at].points, kept, step, gradient=gradient)
            for at, array in arrays.items()
            if (step := spacing[at]) is not None
        }

    return description, signals(blueprint.given), signals(blueprint.gradients, gradient=True)


def _with_masks_of(description: Description, kept: NDArray[np.int64]) -> Description:
    """The description with the masks of attention that differ between samples cut down to the samples kept."""
    for at, node in enumerate(description.nodes):
        rule = node.rule
        if isinstance(rule, Attention) and rule.mask is not None and rule.mask.ndim == 3:
            windows, masks = len(rule.windows or (1,)), len(rule.mask)
            if masks % windows == 0 and masks > windows and len(kept) * windows < masks:
                each = rule.mask.reshape(-1, windows, *rule.mask.shape[1:])[kept]
                shorter = dataclasses.replace(rule, mask=each.reshape(-1, *each.shape[2:]))
                description = description.replace(at, rule=shorter)
    return description


def _typical(blueprint: Blueprint, count: int) -> NDArray[np.int64]:
    """The numbers of so many samples that are most like the whole batch at the inputs and with the gradients there."""
    rules = [(blueprint.description.nodes[at].rule, array) for at, array in blueprint.given.items()]
    arrays = [array for rule, array in rules if isinstance(rule, Given) and not rule.constant]
    whole = len(arrays[0]) if arrays else count
    if count >= whole:
        return np.arange(count, dtype=np.int64)
    generator = np.random.default_rng(0)
    sets = np.array([np.sort(generator.permutation(whole)[:count]) for _ in range(TRIALS)])
    away = np.zeros(len(sets))
    grams = [flat @ flat.T for flat in (array.detach().flatten(1).double().cpu().numpy() for array in arrays)]
    for gram in (*grams, *_together(arrays, list(blueprint.gradients.values()))):
        inner = gram[sets[:, :, None], sets[:, None, :]]
        for one, all_of_them in zip(_outline(inner), _outline(gram[None]), strict=True):
            away += ((one - all_of_them) / max(abs(float(all_of_them[0])), 1e-300)) ** 2
    return np.asarray(sets[int(np.argmin(away))], dtype=np.int64)


def _together(inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Iterator[Array]:
    """Σ_pq D[sp, tq] K[sp, tq] of every pair of samples s, t: what the squared gradient of a weight is made of.

    K and D are means over the inputs and the gradients of one grid of points, each divided by its trace: a mixture of
    experts has dozens of either, and a matrix for every pair of them would cost more than the prediction.
    """
    grids = {tuple(one.shape[:2]) for one in gradients} & {tuple(one.shape[:2]) for one in inputs}
    for samples, positions in sorted(grids):
        k, d = (
            _mean_gram([one for one in all_ if one.shape[:2] == (samples, positions)]) for all_ in (inputs, gradients)
        )
        if k is not None and d is not None:
            yield (k * d).reshape(samples, positions, samples, positions).sum(axis=(1, 3))


def _mean_gram(arrays: Sequence[Tensor]) -> Array | None:
    """The mean Gram matrix of all points, each of trace one; None where it would cost too much."""
    total: Array | None = None
    for array in arrays:
        samples, positions, features = array.shape
        if (samples * positions) ** 2 * features > MOST_TOGETHER:
            return None
        rows = array.detach().flatten(0, 1).double().cpu().numpy()
        gram = rows @ rows.T / max(float(np.vdot(rows, rows)), 1e-300)
        total = gram if total is None else total + gram
    return total


def _outline(grams: Array) -> tuple[Array, Array]:
    """The mean square of each of several Gram matrices, and that plus its mean over different samples."""
    size = grams.shape[-1]
    squares = np.einsum("sii->s", grams) / size
    return squares, squares + (grams.sum((1, 2)) / size - squares) / max(size - 1, 1)


def estimate_seconds(blueprint: Blueprint, *, most: int | None = None) -> float:
    """Roughly how long theory will take: so much for a node, and so much for each pair of points that is followed."""
    description, _ = thinned(blueprint.description, most=most)
    pairs = sum(
        node.points.samples**2 * node.points.positions**2 / math.prod(step)
        for node, step in zip(description.nodes, plan_of(description), strict=True)
        if step is not None
    )
    return NODE_SECONDS * len(description.nodes) + PAIR_SECONDS * pairs


def _signal(
    array: Tensor, points: Points, kept: NDArray[np.int64], spacing: tuple[int, ...], *, gradient: bool
) -> Signal:
    """What was measured of a tensor as a signal; a gradient over some samples is scaled to the whole batch."""
    values = array.detach()[kept].double().cpu().numpy()
    found = Signal.of_features(values, points=points, spacing=spacing, reduce="sum" if gradient else "mean")
    if not gradient or len(kept) == len(array) or not found.total > 0:
        return found
    left_out = float(array.double().square().sum()) / found.total  # the whole batch beside what is followed of it
    return _with_mean_pairs(found.like(left_out * found.matrix, math.sqrt(left_out) * found.mean), array.detach())


def _with_mean_pairs(gradient: Signal, array: Tensor) -> Signal:
    """A gradient over some samples whose products between different ones have the mean over all pairs of the batch.

    Two samples of one class, or of two, tell little of the rest, and sums over all pairs decide gradients of weights.
    How products differ from their mean stays: equal words have equal values, and often gradients that are alike.
    """
    samples, positions, features = array.shape
    if not gradient.is_full or samples * positions**2 * features > MOST_PRODUCTS:
        return gradient
    wide = array.double().cpu().numpy()
    summed, kept = wide.sum(axis=0), gradient.points.samples
    rows = wide.transpose(1, 0, 2).reshape(positions, -1)
    scale = gradient.total / max(float(np.vdot(wide, wide)), 1e-300) * samples / kept
    apart = scale * (summed @ summed.T - rows @ rows.T) / (samples * (samples - 1))
    matrix = gradient.matrix.reshape(kept, positions, kept, positions).copy()
    others = [(one, other) for one, other in product(range(kept), repeat=2) if one != other]
    found = sum(matrix[one, :, other] for one, other in others) / len(others)
    for one, other in others:  # deviations from a mean of n are smaller by 1 − 1/n
        matrix[one, :, other] = apart + (matrix[one, :, other] - found) / (1 - 1 / len(others))
    return gradient.like(matrix.reshape(gradient.matrix.shape), gradient.mean)


def _rows(
    blueprint: Blueprint, description: Description, found: Propagation, scatter: Spread, *, whole: int
) -> Iterator[Expected]:
    """The rows of a profile that theory predicts."""
    names = {index: [node.name] for index, node in enumerate(description.nodes) if node.name}
    for name, index in blueprint.aliases.items():
        names.setdefault(index, []).append(name)
    names = {at: called for at, called in names.items() if not isinstance(description.nodes[at].rule, Given)}
    forward = _forward(description, found, scatter, list(names), whole=whole)
    for index, called in names.items():
        node, gradient, expected = description.nodes[index], found.backward[index], forward.get(index, {})
        given = index in blueprint.gradients and index not in description.outputs  # measured, if a rule lost it
        if gradient is not None and gradient.total > 0 and not given:
            expected["gradient_log_norm"] = _log_norm(gradient.total, scatter.gradient[index])
        for name in called:
            for measure, (value, sd) in expected.items():
                if math.isfinite(value) and math.isfinite(sd):
                    yield Expected(name, measure, value, WIDENED.get(measure, WIDER) * sd)
        square = found.weight_gradients[index]
        if square is not None and square > 0 and node.weight and node.weight not in blueprint.shared:
            value, sd = _log_norm(square, scatter.weight_gradient[index])
            yield Expected(node.weight, "weight_gradient_log_norm", value, WIDER * sd)


def _log_norm(square: float, scatter: float) -> tuple[float, float]:
    """ln of a norm whose square has this mean; the mean of a logarithm lies below the logarithm of the mean."""
    return 0.5 * math.log(square) - scatter**2 / 4, 0.5 * math.hypot(scatter, NEXT_ORDER * scatter**2, ROUNDING)


def _forward(
    description: Description, found: Propagation, scatter: Spread, indices: Sequence[int], *, whole: int
) -> dict[int, dict[str, tuple[float, float]]]:
    """Mean and standard deviation over seeds of every forward measure at these nodes.

    Measures of samples are taken of several nodes at once; those that compare a sample with the rest of the batch need
    all of its `whole` samples.
    """
    known = {at: one for at in indices if (one := found.forward[at]) is not None and 0 < one.mean_square < math.inf}
    samples = max(node.points.samples for node in description.nodes)
    measured: dict[int, dict[str, tuple[float, float]]] = {}
    for at, signal in known.items():
        square, size = signal.mean_square, float(scatter.size[at])
        measured[at] = {"mean_square": (square, square * math.hypot(size, NEXT_ORDER * size**2, ROUNDING))}
    order, some = list(known), max(1, TOGETHER // samples**2)
    for start in range(0, len(order), some) if samples > 1 else ():
        part = order[start : start + some]
        shared = [_common(known[at]) for at in part]
        grams = _grams([known[at].sample_gram for at in part], shared, scatter.directions[part])
        lengths = np.minimum(scatter.lengths[part], math.log(samples))  # a sample is no longer than all together
        moments = of_samples(grams, lengths) if samples == whole else {"mean_cosine": cosines(grams)}
        for place, at in enumerate(part):
            measured[at] |= {name: (float(mean[place]), float(sd[place])) for name, (mean, sd) in moments.items()}
    for at, signal in known.items():
        directions = scatter.directions[at]
        # of sub-grids, pairs of neighbours stand for pairs that are farther apart: too few directions, too low a rank
        if 1 < samples <= MOST_SPECTRUM and samples == whole and directions >= 1 and signal.is_full:
            features = description.nodes[at].features * signal.points.positions
            drawn = spread_of_spectrum(signal.sample_gram, _common(signal), width=directions, features=features)
            for name, (mean, sd) in drawn.items():
                measured[at][name] = mean, math.hypot(sd, NEXT_ORDER / 2 * sd, ROUNDING * abs(mean))
        measured[at] |= _tokens(signal, scatter.tokens[at], whole=whole)
    return measured


def _tokens(signal: Signal, count: float, *, whole: int) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of the participation ratio across a sample's positions, of so many directions.

    In the mean over samples: those that are alike err alike, and those that are not followed differ from the followed
    ones as these do from each other.
    """
    if len(signal.points.grid) != 1 or signal.points.positions < 2 or not signal.is_full or not count >= 1:
        return {}
    own, means = np.stack(list(signal.tokens())), signal.mean.reshape(-1, signal.points.positions)
    squares = np.einsum("kij,kij->k", own, own)
    if not (np.isfinite(squares) & (squares > 0)).all():
        return {}
    ratios, deviations = of_positions(_grams(own, means[:, :, None] * means[:, None, :], np.full(len(own), count)))
    followed, alike = len(ratios), min(1.0, 1 / participation(signal.sample_gram))
    unlike = float(np.std(ratios, ddof=1)) if followed > 1 else 0.0
    chosen = unlike * math.sqrt(max(1 / followed - 1 / whole, 0.0))
    average = float(np.mean(ratios))
    sd = math.hypot(float(np.mean(deviations)) * math.sqrt(alike), chosen, ROUNDING * average)
    return {"token_participation_ratio": (average, sd)}


def _grams(whole: Any, common: Any, directions: Array) -> Grams:
    """Gram matrices, each with the part of it that all features share."""
    together, shared = np.asarray(whole), np.asarray(common)
    return Grams(together, together - shared, np.sqrt(np.maximum(np.einsum("kii->ki", shared), 0.0)), directions)


def _common(signal: Signal) -> Array:
    """The part of the sample Gram matrix that all features share: the product of the feature means, over positions."""
    means = signal.mean.reshape(len(signal.mean), signal.points.samples, -1)
    if signal.points.positions == 1:
        return np.outer(means[0], means[0])
    return np.asarray(np.einsum("bsp,btp->st", means, means) / signal.points.positions)
