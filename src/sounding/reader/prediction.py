"""From a blueprint to predicted rows: the measures of a check, as theory expects them, with their spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sounding.reader.module import Blueprint
from sounding.theory.signal import Description, Given, Points, Propagation, Signal, propagate
from sounding.theory.signal.description import Array
from sounding.theory.signal.spread import Spread, spread

# Points of which all pairs are followed at most. Time grows as the square: 1024 points take half a second for a block.
MOST_POINTS = 1024
DRAWN = 12  # Gram matrices drawn for the mean and spread of a measure: the spread is known to a fifth
# What theory itself may be off by beyond the scatter over seeds, as a share of the noise's own first order: terms of
# the next order in 1/width. Chosen on MLPs, a convolutional network and transformers of width 64 to 256.
NEXT_ORDER = 0.5
ROUNDING = 2e-4  # of float32 passes
# Terms of order 1/width that are not followed at all, per direction: the lengths of samples scatter too.
FLOORS = {"mean_cosine": 0.3, "distinct_share": 0.3, "participation_ratio": 0.3, "orthogonality_gap": 0.1}


@dataclass(frozen=True)
class Expected:
    """What theory expects of one measure of one call."""

    name: str
    measure: str
    value: float
    stderr: float


@dataclass(frozen=True)
class Prediction:
    """What theory expects of a network.

    Args:
        rows: measures of calls and of weights.
        propagation: the signals behind them.
        spread: the scatter over seeds at every node.
        samples: how many samples of the batch were followed, the first ones.
        notes: what was left out and why.
    """

    rows: tuple[Expected, ...]
    propagation: Propagation
    spread: Spread
    samples: int
    notes: tuple[str, ...]


def predict(blueprint: Blueprint, *, generator: np.random.Generator | None = None) -> Prediction:
    """What theory expects a check to measure at every call that it describes."""
    generator = generator or np.random.default_rng(0)
    description, samples = _thinned(blueprint.description)
    given = {at: _signal(array, description, at, samples) for at, array in blueprint.given.items()}
    gradients = {
        at: _signal(array, description, at, samples, gradient=True) for at, array in blueprint.gradients.items()
    }
    found = propagate(description, given=given, gradients=gradients, generator=generator)
    scatter = spread(description, found)
    whole = next((len(array) for array in blueprint.given.values()), samples)
    missing = _left_out(blueprint.gradients, samples)
    rows = tuple(_rows(blueprint, description, found, scatter, generator, complete=samples == whole, missing=missing))
    notes = [*description.notes]
    if samples < whole:
        notes.append(f"theory follows the first {samples} of {whole} samples")
    return Prediction(rows, found, scatter, samples, tuple(notes))


def _thinned(description: Description) -> tuple[Description, int]:
    """The description over as many samples as theory can follow in full."""
    samples = max(node.points.samples for node in description.nodes)
    positions = max(node.points.positions for node in description.nodes)
    kept = min(samples, max(2, MOST_POINTS // positions))
    if kept == samples:
        return description, samples
    import dataclasses

    nodes = tuple(dataclasses.replace(node, points=Points(kept, node.points.grid)) for node in description.nodes)
    return dataclasses.replace(description, nodes=nodes), kept


def _signal(array: Tensor, description: Description, at: int, samples: int, *, gradient: bool = False) -> Signal:
    points = description.nodes[at].points
    values = array[:samples].detach().double().cpu().numpy()
    return Signal.of_features(values.reshape(points.samples, *points.grid, -1), reduce="sum" if gradient else "mean")


def _left_out(gradients: Mapping[int, Tensor], samples: int) -> float:
    """By how much the squared gradient of the whole batch exceeds that of the samples that are followed."""
    ratios = [float(one.double().square().sum() / one[:samples].double().square().sum()) for one in gradients.values()]
    return max(ratios, default=1.0)


def _rows(
    blueprint: Blueprint,
    description: Description,
    found: Propagation,
    scatter: Spread,
    generator: np.random.Generator,
    *,
    complete: bool,
    missing: float,
) -> Iterator[Expected]:
    names = {index: [node.name] for index, node in enumerate(description.nodes) if node.name}
    for name, index in blueprint.aliases.items():
        names.setdefault(index, []).append(name)
    for index, called in names.items():
        node = description.nodes[index]
        if isinstance(node.rule, Given):
            continue
        signal, gradient = found.forward[index], found.backward[index]
        expected: dict[str, tuple[float, float]] = {}
        if signal is not None:
            expected |= _measures(signal, scatter.size[index], scatter.directions[index], generator, complete=complete)
        if gradient is not None and gradient.total > 0:
            expected["gradient_log_norm"] = _log_norm(gradient.total * missing, scatter.gradient[index])
        for name in called:
            yield from (Expected(name, measure, *pair) for measure, pair in expected.items())
        square = found.weight_gradients[index]
        if square is not None and square > 0 and node.weight:
            pair = _log_norm(square * missing, scatter.weight_gradient[index])
            yield Expected(node.weight, "weight_gradient_log_norm", *pair)


def _log_norm(square: float, scatter: float) -> tuple[float, float]:
    """ln of a norm whose square has this mean; the mean of a logarithm lies below the logarithm of the mean."""
    return 0.5 * math.log(square) - scatter**2 / 4, 0.5 * math.hypot(scatter, NEXT_ORDER * scatter**2, ROUNDING)


def _measures(
    signal: Signal, size: float, directions: float, generator: np.random.Generator, *, complete: bool
) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation over seeds of the forward measures, from Gram matrices drawn at this width."""
    gram = signal.sample_gram
    square = float(np.mean(np.diag(gram)))
    if not (math.isfinite(square) and square > 0):
        return {}
    relative = math.hypot(size, NEXT_ORDER * size**2, ROUNDING)
    found = {"mean_square": (square, square * relative)}
    if len(gram) < 2:
        return found
    common = _common(signal)
    drawn = draw_grams(gram, common, directions, DRAWN, generator)
    values, exact = _shape_measures(drawn), _shape_measures(gram[None])
    for measure, numbers in values.items():
        if not np.isfinite(numbers).all() or not (complete or measure == "mean_cosine"):
            continue
        mean, scatter = float(np.mean(numbers)), float(np.std(numbers, ddof=1)) * math.sqrt(1 + 1 / DRAWN)
        # what the finite width adds to a mean is known to its first order only
        unsure = NEXT_ORDER / 2 * abs(mean - float(exact[measure][0]))
        found[measure] = mean, math.hypot(scatter, unsure, FLOORS[measure] / directions, ROUNDING * abs(mean))
    return found


def _common(signal: Signal) -> Array:
    """The part of the sample Gram matrix that all features share: the product of the feature means, over positions."""
    samples = signal.points.samples
    means = signal.mean.reshape(len(signal.mean), samples, -1)
    return np.asarray(np.einsum("bsp,btp->st", means, means) / signal.points.positions)


def draw_grams(gram: Array, common: Array, directions: float, count: int, generator: np.random.Generator) -> Array:
    """Gram matrices of `directions` Gaussian features with this second moment, (count, samples, samples).

    The part `common`, which every feature has (the mean of rectified values), does not scatter as the rest does.
    """
    values, vectors = np.linalg.eigh(gram - common)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    features = int(min(max(round(directions), 1), 10**9))
    samples = len(gram)
    if features > 4 * samples:
        # Beyond a few times the number of samples a Wishart matrix is its mean plus symmetric Gaussian noise.
        noise = generator.standard_normal((count, samples, samples)) / math.sqrt(2 * features)
        inner = np.eye(samples) + noise + np.swapaxes(noise, 1, 2)
    else:
        normals = generator.standard_normal((count, samples, features))
        inner = normals @ np.swapaxes(normals, 1, 2) / features
    level = np.sqrt(np.maximum(np.diag(common), 0.0))
    crossed = root @ generator.standard_normal((count, samples, 1)) / math.sqrt(features) * level
    return np.asarray(root @ inner @ root.T + common + crossed + np.swapaxes(crossed, 1, 2))


def _mean_cosines(drawn: Array) -> Array:
    diagonal = np.maximum(np.diagonal(drawn, axis1=1, axis2=2), 1e-300)
    root = np.sqrt(diagonal)
    cosines = drawn / (root[:, :, None] * root[:, None, :])
    samples = drawn.shape[1]
    return np.asarray((cosines.sum(axis=(1, 2)) - samples) / (samples * (samples - 1)))


def _shape_measures(drawn: Array) -> dict[str, Array]:
    samples = drawn.shape[1]
    trace = np.einsum("bii->b", drawn)
    squares = np.sum(drawn**2, axis=(1, 2))
    return {
        "mean_cosine": _mean_cosines(drawn),
        "participation_ratio": trace**2 / squares,
        "orthogonality_gap": np.sqrt(np.maximum(squares / trace**2 - 1 / samples, 0.0)),
        "distinct_share": 1 - drawn.sum(axis=(1, 2)) / samples / trace,
    }
