"""Disagreement: where a measurement leaves the band that a random network of the same description has, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from sounding.probe.calls import named_modules, named_parameters
from sounding.probe.records import Finding, Severity
from sounding.profile import Profile
from sounding.reader.changes import layer_of, leads_to
from sounding.reader.module import Blueprint
from sounding.reader.prediction import Expected, Prediction, predict
from sounding.theory.signal import Node, Normalize

BAND = 2.0  # standard deviations over seeds: the 95% band
SURE = 6.0  # standard deviations from which a weight is not random
# A row without a cause in the weights must be further out: a network has hundreds of rows, and where many layers
# amplify each other the first order of the spread is too small. Sound batch norm over 110 layers was 8.6 out.
ALONE = 15.0
LEAST = 0.1  # relative difference below which a row without a cause matters to nobody, however narrow its band
CERTAIN = 1000.0  # deviations that stand for what no random weights do at all
MASKED = 1 / 16  # the share of units or inputs with weights of exactly zero that is no single padding row
SPECTRUM = 0.8  # a weight with at least this share of a random one's directions acts like a random one
SIGNS, CLEAR = 32, 0.9  # random vectors of the first look at a weight, and the share of directions that is no doubt
FORWARD = ("mean_square", "mean_cosine", "participation_ratio", "orthogonality_gap", "distinct_share")
GRADIENTS = ("gradient_log_norm", "weight_gradient_log_norm")


@dataclass(frozen=True)
class Departure:
    """Something measured and what theory expected of it; `deviations` counts standard deviations over seeds."""

    name: str
    measure: str
    depth: int
    measured: float
    expected: float
    deviations: float

    @property
    def matters(self) -> bool:
        """Whether the two differ by more than a tenth of the larger."""
        return abs(self.measured - self.expected) > LEAST * max(abs(self.measured), abs(self.expected))


@dataclass(frozen=True)
class Cause:
    """What no random network of the description has, and the layer that has it."""

    departure: Departure  # the layer, and what of it was expected and came
    text: str  # the end of a sentence that starts with the layer
    remedy: str  # what to try
    severity: Severity = "medium"  # of the finding, where the signal or the gradient leaves its band as well


def find_disagreement(
    profile: Profile, model: nn.Module, blueprint: Blueprint, prediction: Prediction, *, training: bool
) -> tuple[Finding, ...]:
    """The finding at the first layer that no random network of this description has; at most one.

    Weights are measured too: how alike two of them are, and how many directions one has, each against its own band. A
    weight that leaves it is the cause, and its finding is of low severity as long as signal and gradient stay in their
    bands. Without a cause in the weights a row must be fifteen standard deviations out: first forward measures in
    execution order, then gradients from the output to the input.

    Args:
        profile: the measured rows.
        model: the module that was measured; its parameters show clones and missing ranks.
        blueprint: its description.
        prediction: what theory expects of it.
        training: whether the pass was one of training, in which a batch norm should use the batch.
    """
    meant, running = _with_batch_statistics(blueprint) if training else (blueprint, "")
    if running:
        prediction = predict(meant)
    departures = find_departures(profile, prediction)
    parameters, depths = dict(named_parameters(model)), depths_of(profile)
    cause = (
        _of_running(departures, running, trained=_takes_gradient(model, running))
        or _of_cut(depths, blueprint)
        or _of_zeros(departures, parameters)
        or next(_of_weights(depths, blueprint, parameters), None)
    )
    if cause is not None:
        at = cause.departure.depth
        reached = (item for item in departures if item.measure in GRADIENTS or item.depth >= at)
        return (_explained(cause, next((item for item in reached if item.deviations >= BAND), None)),)
    first = next((item for item in departures if item.deviations >= ALONE and item.matters), None)
    if first is None:
        return ()
    told = f"{_sentence(first)} No cause shows in the weights: the network or its description is not what it seems."
    remedy = "print(sounding.read(model, inputs)) shows what theory takes the network for"
    return (_finding(first, "low", told, remedy),)


def depths_of(profile: Profile) -> dict[str, int]:
    """The place in execution order of every measured call."""
    return {row.name: row.layer for row in profile.rows if row.source == "check"}


def find_departures(profile: Profile, prediction: Prediction) -> list[Departure]:
    """Every predicted row with its measurement: forward ones in execution order, then gradients from the output back.

    A gradient that theory predicts and that was not measured, although others were, is one of exactly zero; but not
    where the layer's own weights got one, as behind an output that is changed in place.
    """
    measured = {(row.name, row.measure): row for row in profile.rows if row.source == "check"}
    depths = depths_of(profile)
    gradients = any(row.measure == "gradient_log_norm" and math.isfinite(row.value) for row in measured.values())
    weights = [row for row in measured.values() if row.measure == "weight_gradient_log_norm"]
    trained = {row.name.rpartition(".")[0] for row in weights if math.isfinite(row.value)}
    found = []
    for row in prediction.rows:
        if row.name not in depths or not row.stderr > 0:
            continue
        seen = measured.get((row.name, row.measure))
        if seen is None and (row.measure != "gradient_log_norm" or not gradients or row.name in trained):
            continue
        value = seen.value if seen is not None else -math.inf
        if not math.isnan(value) and row.measure in (*FORWARD, *GRADIENTS):
            away = _away(row, value)
            found.append(Departure(row.name, row.measure, depths[row.name], value, row.value, away))
    forward = [one for one in found if one.measure in FORWARD]
    backward = [one for one in found if one.measure in GRADIENTS]
    return sorted(forward, key=lambda one: one.depth) + sorted(backward, key=lambda one: -one.depth)


def _away(row: Expected, value: float) -> float:
    """How many standard deviations a measurement is off.

    Mean squares are products of the layers' factors: where they scatter by more than a few percent, their logarithms
    are closer to Gaussian than they are. A plain stack of depthwise convolutions was 15 deviations above its mean and
    is 3 in the logarithm.
    """
    if row.measure != "mean_square" or not (row.value > 0 and value > 0):
        return abs(value - row.value) / row.stderr
    return abs(math.log(value / row.value)) / math.sqrt(math.log1p((row.stderr / row.value) ** 2))


def _of_cut(depths: Mapping[str, int], blueprint: Blueprint) -> Cause | None:
    """The first layer whose input was made with trainable weights and carries no gradient back to them."""
    name = next((name for name in blueprint.cuts if name in depths), None)
    if name is None:
        return None
    return Cause(
        Departure(name, "carried", depths[name], 0.0, 1.0, CERTAIN),
        "takes a signal through which no gradient goes back: the gradient is cut in front of it",
        "look for detach(), no_grad() or .data in front of it; nothing, where the gradient is stopped on purpose",
    )


def _takes_gradient(model: nn.Module, layer: str) -> bool:
    """Whether a layer trains; frozen with its statistics, a norm is part of a body that was trained."""
    module = dict(named_modules(model)).get(layer.partition("#")[0])
    return module is None or any(one.requires_grad for one in module.parameters()) or not any(module.parameters())


def _of_running(departures: Sequence[Departure], layer: str, *, trained: bool) -> Cause | None:
    """A batch norm with running statistics, where they give another signal than the batch's own would."""
    out = next((item for item in departures if item.deviations >= BAND), None)
    if not layer or out is None:
        return None
    at = next((item for item in departures if item.name == layer), out)
    return Cause(  # what the norm does shows at itself, or first behind it
        at if at.deviations >= BAND else replace(out, name=layer),
        "normalizes by running statistics in a training pass, not by the batch's own",
        "put this batch norm into training mode, or let its running statistics see data first",
        "medium" if trained else "low",
    )


def _of_zeros(departures: Sequence[Departure], parameters: Mapping[str, Tensor]) -> Cause | None:
    """A signal of zero or infinity in half precision, or a gradient of exactly zero, where theory has a finite one."""
    half = any(one.dtype == torch.float16 for one in parameters.values())
    for item in departures:
        if item.measure == "weight_gradient_log_norm":
            continue
        ended = not math.isfinite(item.measured) or (item.measure == "mean_square" and item.measured == 0.0)
        if ended and half:
            sinks = item.measured in (0.0, -math.inf)
            return Cause(
                item,
                f"leaves the range of float16: its {'values sink to zero' if sinks else 'values overflow'}",
                "keep this layer in float32 or bfloat16, or scale the loss (torch.amp.GradScaler)",
            )
        if item.measure == "gradient_log_norm" and item.measured == -math.inf:
            return Cause(
                item,
                "gets a gradient of exactly zero, or none, though its signal passes on: the gradient is cut behind it",
                "look for detach(), no_grad(), .data, a constant scale of zero or a backward of your own behind it",
            )
    return None


def _of_weights(depths: Mapping[str, int], blueprint: Blueprint, parameters: Mapping[str, Tensor]) -> Iterator[Cause]:
    """Weights that are used twice in a row, equal to an earlier one, or without the directions of random ones."""
    nodes = blueprint.description.nodes
    seen: dict[str, int] = {}
    kinds: dict[tuple[torch.Size, float], list[tuple[str, Tensor]]] = {}
    for index, node in enumerate(nodes):
        weight, name = parameters.get(node.weight), _called(nodes, index)
        if weight is None or weight.dim() < 2 or name not in depths:
            continue
        alike = Departure(name, "cosine", depths[name], 1.0, 0.0, math.sqrt(weight.numel()))
        if node.weight in seen:
            if leads_to(blueprint.description, seen[node.weight], index):
                earlier = _called(nodes, seen[node.weight])
                text = f"multiplies by {node.weight!r} again, which {earlier!r} has used already"
                remedy = "nothing, where the weights are shared on purpose; else give this layer its own"
                yield Cause(alike, text, remedy, "low")
            continue
        seen[node.weight] = index
        weight = weight.detach()
        peers = kinds.setdefault((weight.shape, float(weight.flatten()[0])), [])
        twin = next((other for other, held in peers if torch.equal(held, weight)), None)
        peers.append((name, weight))
        if twin is not None and bool(weight.std() > 0):
            text = f"has a weight that is an exact copy of that of {twin!r}"
            remedy = "draw the weights of every layer anew (copy.deepcopy and nn.TransformerEncoder copy them)"
            yield Cause(alike, text, remedy, "low")  # copies cost no training: docs/faults.md
            continue
        if (cause := _of_spectrum(name, depths[name], weight)) is not None:
            yield cause


def _called(nodes: Sequence[Node], index: int) -> str:
    """The name of a weight's node, or of what reads it (the sum with its bias), or of its module."""
    readers = (node.name for node in nodes if index in node.inputs and not node.weight)
    return nodes[index].name or next(readers, "") or layer_of(nodes[index])


def _of_spectrum(name: str, depth: int, weight: Tensor) -> Cause | None:
    r"""A weight that has fewer directions than a random one: rows of zeros, a low rank, large singular values.

    Rows or columns of exact zeros are no chance, however many directions are left.

    For an m × n matrix of independent centred entries with variance v and kurtosis κ, E tr (W Wᵀ)² =
    v² m n (m + n + κ − 2), so that the number of directions (tr W Wᵀ)² / tr (W Wᵀ)² is m n / (m + n + κ − 2) with a
    relative standard deviation of 2/(m + n): 0.060 at 16 × 16, 0.0075 at 128 × 128, measured.
    """
    raw = weight.flatten(1)
    if _looks_random(raw):
        return None
    raw = raw.double()
    matrix = raw - raw.mean()
    rows, columns = matrix.shape
    square = matrix.square()
    trace = float(square.sum())
    if not (trace > 0 and math.isfinite(trace)):
        return None
    units, inputs = (int((raw.abs().amax(axis) == 0).sum()) for axis in (1, 0))
    if units >= MASKED * rows or inputs >= MASKED * columns:
        what = f"{units} of {rows} units" if units >= MASKED * rows else f"{inputs} of {columns} inputs"
        live = Departure(name, "live", depth, float(rows * columns - units * columns - inputs * (rows - units)),
                         float(rows * columns), CERTAIN)  # fmt: skip
        # of queries, keys and values in one matrix a whole part may start at zero, as muP's queries do
        part = rows in (2 * units, 3 * units) and any(not one.any() for one in torch.split(raw, units))
        remedy = "look for a mask or a pruning that hides what this layer should see"
        return Cause(live, f"has weights of exactly zero for {what}", remedy, "low" if part else "medium")
    small = matrix if rows <= columns else matrix.T
    gram = small @ small.T
    kurtosis = float(square.square().mean()) / (trace / matrix.numel()) ** 2
    expected = rows * columns / (rows + columns + kurtosis - 2)
    directions = trace**2 / float(gram.square().sum())
    away = (1 - directions / expected) * (rows + columns) / 2
    if away < SURE or directions > SPECTRUM * expected:
        return None
    departure = Departure(name, "directions", depth, directions, expected, away)
    rank = int(torch.linalg.matrix_rank(raw, rtol=1e-5))  # weights are float32
    if rank < 0.9 * len(gram):
        text = f"has a weight of rank {rank}, where {len(gram)} is possible"
        return Cause(departure, text, "draw a weight of full rank", "low")
    text = "has a weight whose singular values are not those of independent entries, as trained weights have"
    remedy = "nothing, where the weights are trained: the theory is one of random starts"
    return Cause(departure, text, remedy, "low")


def _looks_random(raw: Tensor) -> bool:
    """Whether a weight clearly has the directions of independent entries, by a look that costs little.

    Over random signs z the mean of |W Wᵀz|² is tr (W Wᵀ)², which few of them tell to some percent. What lies nearer to
    the line, what has zeros, and small matrices, whose whole product costs no more, are looked at in full.
    """
    rows, columns = raw.shape
    if min(rows, columns) < 2 * SIGNS or int(raw.count_nonzero()) < raw.numel():
        return False
    matrix = raw.float() - raw.float().mean()
    seen = matrix @ (matrix.T @ _signs(rows).to(matrix.device))
    directions = float(torch.linalg.vector_norm(matrix)) ** 4 / float(seen.square().sum()) * SIGNS
    return directions * (rows + columns - 1) > CLEAR * rows * columns  # the least that independent entries have


@lru_cache(maxsize=16)
def _signs(rows: int) -> Tensor:
    return torch.randint(2, (rows, SIGNS), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0


def _with_batch_statistics(blueprint: Blueprint) -> tuple[Blueprint, str]:
    """The blueprint with batch norms that use the batch, and the name of the first one that did not."""
    description, first = blueprint.description, ""
    for index, node in enumerate(description.nodes):
        if isinstance(node.rule, Normalize) and node.rule.running is not None:
            description = description.replace(index, rule=replace(node.rule, running=None))
            first = first or node.name
    return replace(blueprint, description=description), first


def _explained(cause: Cause, out: Departure | None) -> Finding:
    at = cause.departure
    told = f"{at.name!r} {cause.text}. {_sentence(at)}"
    if out is None:
        told += " Signal and gradient stay in their bands all the same."
    elif (out.name, out.measure) != (at.name, at.measure):
        told += f" {_sentence(out)}"
    return _finding(at, "low" if out is None else cause.severity, told, cause.remedy)


def _finding(at: Departure, severity: Severity, why: str, remedy: str) -> Finding:
    evidence = {"expected": float(at.expected), "measured": float(at.measured), "deviations": float(at.deviations)}
    words, _, expected = _sentence(at).partition(" where theory expects ")
    place = None, expected.rstrip("."), words[0].lower() + words[1:]
    return Finding("disagreement", severity, at.name, at.depth, evidence, why, "meanfield2019", (remedy,), *place)


WORDS = {
    "gradient_log_norm": "The logarithm of the gradient norm",
    "weight_gradient_log_norm": "The logarithm of the weight gradient norm",
    "mean_square": "The mean square",
    "mean_cosine": "The mean cosine",
    "participation_ratio": "The participation ratio",
    "orthogonality_gap": "The orthogonality gap",
    "distinct_share": "The share in which samples differ",
    "cosine": "The cosine of the two weights",
    "directions": "The number of directions of the weight",
    "live": "The number of weights in rows and columns that are not all zero",
    "carried": "The number of inputs that carry a gradient back",
}


def _sentence(item: Departure) -> str:
    """What was expected, what came, and how often a Gaussian is so far out."""
    came = f"{item.measured:.3g}" if math.isfinite(item.measured) else "−∞" if item.measured < 0 else "∞"
    if item.deviations < 37:  # beyond it a double holds no probability
        chance = f"{item.deviations:.1f} standard deviations, by chance {math.erfc(item.deviations / math.sqrt(2)):.1g}"
    else:
        chance = "practically impossible by chance"
    return f"{WORDS[item.measure]} at {item.name!r} is {came} where theory expects {item.expected:.3g} ({chance})."
