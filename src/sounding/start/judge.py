"""What a check says of the start: parameters, loss, gradients that do not arrive, and signals beyond all scales."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sounding.probe.batches import Batch
from sounding.probe.calls import Pass, named_modules, named_parameters
from sounding.probe.inside.listen import Inside
from sounding.probe.reading import LayerCall, Reading
from sounding.probe.records import Finding, Severity
from sounding.probe.sentences import tell
from sounding.probe.state import DROPOUT, DropoutAtRest
from sounding.probe.thresholds import THRESHOLDS
from sounding.start.arrivals import find_arrivals
from sounding.start.findings import find_all
from sounding.start.laws import name_law
from sounding.start.loss import StartLoss, judge_loss
from sounding.start.parameters import Parameter, Start, take_stock

USUAL_EPS = 1e-3  # TensorFlow's for batch norm, the largest in use
DRAWN = ("gaussian", "uniform", "orthogonal")
FRESH = 0.9  # of frozen matrices: of a pretrained body hardly one fits a law by chance
SCALE = "for every column of the inputs subtract its mean and divide by its deviation"
HALF = 2.0**14  # a root mean square at which a Gaussian signal has entries beyond the end of float16
RAW = 10.0  # the root mean square of inputs that nobody has scaled: pixels up to 255 have 100


def judge_start(
    root: nn.Module,
    passes: Sequence[Pass],
    reading: Reading,
    loss: StartLoss | None,
    insides: Sequence[Inside],
    *,
    rest: DropoutAtRest,
    batch: Batch | None,
    still: Sequence[str],
) -> tuple[Finding, ...]:
    """Every finding about the start, for the verdict of a check.

    Args:
        root: the network.
        passes: what was called in each pass.
        reading: what was measured.
        loss: the loss at the start.
        insides: what was seen between modules.
        rest: knows the most that a forward method drops, and where.
        batch: the last one.
        still: the batch norms that were in evaluation mode before the check.
    """
    start = take_stock(root)
    parameters = find_all(start)
    practice = [finding for finding in parameters if finding.kind == "zero_start"]
    whole = loss is None or loss.whole
    zeros = [one.name for one in start.parameters if one.low == one.high == 0 and "bias" not in one.kind]
    arrivals = find_arrivals(
        root,
        passes,
        whole=whole,
        practice=practice,
        zeros=zeros,
        untrained=_is_body_random(root, start),
        read=frozenset[int]().union(*(one.read for one in insides)) if insides else None,
    )
    losses = judge_loss(loss)
    if reading.calls:
        last = reading.calls[-1]  # the layer that makes the outputs
        losses = [one if one.kind == "class_imbalance" else replace(one, layer=last.name, depth=last.depth)
                  for one in losses]  # fmt: skip
        if not math.isfinite(last.get("mean_square")):
            losses = [one for one in losses if one.kind != "non_finite"]  # of which the layers tell more
    still = tuple(dict.fromkeys((*still, *find_still(root))))  # some fall asleep only when the network wakes up
    largest = batch.name_largest() if batch is not None else ""
    given, norms = _size(reading.input.get("mean_square")), _norms_of(reading, start)
    if given > RAW and _way_of_inputs(reading, norms):
        losses = [_blame_inputs(one, given) if one.kind == "start_loss" else one for one in losses]
    return (*losses, *_judge_signal(reading, norms, largest, still), *_judge_norms(root, reading, norms),
            *_judge_dropout(root, rest), *_judge_activations(root), *parameters, *arrivals)  # fmt: skip


def find_still(root: nn.Module) -> tuple[str, ...]:
    """The batch norms of a network in training mode that are in evaluation mode, and whose statistics are as fresh as a
    start leaves them; those of a pretrained network may rest."""
    return tuple(
        name for name, one in named_modules(root)
        if root.training and isinstance(one, nn.modules.batchnorm._BatchNorm) and not one.training
        and one.num_batches_tracked is not None and not int(one.num_batches_tracked)
    )  # fmt: skip


def _norms_of(reading: Reading, start: Start) -> list[LayerCall]:
    """The calls of norms: of torch's and others that say so, and of those that act like one."""
    layers = {one.layer for one in start.parameters if one.kind == "norm weight"}
    return [call for call in reading.calls if "Norm" in call.kind or call.name.partition("#")[0] in layers]


def _is_body_random(root: nn.Module, start: Start) -> bool:
    """Whether layers are frozen as a start has drawn them: every matrix before those that train is frozen and has the
    shape of a law, and the scale of a known one or of its siblings, which trained ones do not. Adapters stand between
    what is frozen."""
    matrices = [one for one in start.parameters if one.kind in ("linear", "convolution", "recurrent", "embedding")]
    asked = {name for name, one in named_parameters(root) if one.requires_grad}
    trained = [one.name in asked for one in matrices]
    body = matrices[: trained.index(True)] if True in trained else []
    # a fresh one has the scale of a known law, or that of its siblings
    fresh = [one for one in body if one.law.shape in DRAWN and (name_law(one, start) or _is_of_siblings(one, start))]
    return bool(body) and all(trained[len(body) :]) and len(fresh) >= FRESH * len(body)


def _is_of_siblings(one: Parameter, start: Start) -> bool:
    others = start.siblings(one)
    return len(others) > 1 and all(one.fits(other.scale) for other in others)


def _blame_inputs(finding: Finding, given: float) -> Finding:
    """A loss that is too high, with the likely cause that the inputs are too large."""
    why = f"{finding.why} The inputs have a root mean square of {given:.3g}, and outputs grow with them."
    return replace(finding, why=why, remedies=(SCALE, *finding.remedies))


def _judge_signal(reading: Reading, norms: list[LayerCall], largest: str, still: Sequence[str]) -> list[Finding]:
    """Inputs that no norm brings back, and outputs that are huge; each at its place."""
    given, calls = _size(reading.input.get("mean_square")), reading.calls
    found: list[Finding] = []
    severity: Severity
    way = _way_of_inputs(reading, norms)
    first = next(iter(reading.weight_layers), None)
    arrives = first is None or not _size(first.get("mean_square")) <= RAW  # sines of a large number are no large signal
    if given > THRESHOLDS.huge_input and way and arrives:
        # with norms inside of branches a third of its accuracy was left, and not none: docs/faults.md
        severity = "high" if given > THRESHOLDS.beyond and not norms else "medium"
        evidence = {"root_mean_square": given}
        found.append(tell("huge_inputs", severity, layer=reading.input.name, depth=0, evidence=evidence, way=way,
                          largest=f"; {largest}" if largest else ""))  # fmt: skip
    last = _largest_end(reading)
    made = _size(last.get("mean_square")) if last is not None else 0.0
    if last is not None and made > THRESHOLDS.huge_output and made > 10 * given:
        first = next(call for call in calls if _size(call.get("mean_square")) > THRESHOLDS.huge_output)
        found.append(tell(
            "still_norms_pass_it" if still else "huge_outputs", "high" if made > THRESHOLDS.beyond else "medium",
            layer=last.name, depth=last.depth,
            evidence={"root_mean_square": made},
            behind="nothing behind it brings it back" if last is calls[-1] else "what stands behind it is flat there",
            since="" if first is last else f" Signals are that large from {first.name!r} on.",
            place=f"the weights of {last.name!r}, and at the norm before it" if first is last else
            f"what {first.name!r} is given, and at its weights",
        ))  # fmt: skip
    elif still:
        found.append(tell("still_norms", layer=still[0], evidence={"norms": float(len(still))}))
    large = next((call for call in calls if HALF < _size(call.get("mean_square")) < math.inf), None)
    if large is not None and not any(one.severity != "low" for one in found):
        evidence = {"root_mean_square": _size(large.get("mean_square"))}
        found.append(tell("overflow", layer=large.name, depth=large.depth, evidence=evidence))
    return found


def _largest_end(reading: Reading) -> LayerCall | None:
    """The call that makes the outputs; where it is a bounded activation that is flat, the weight layer before it."""
    if not reading.calls:
        return None
    last = reading.calls[-1]
    flat = last.get("saturated_fraction") >= THRESHOLDS.flat and reading.weight_layers
    return reading.weight_layers[-1] if flat else last


def _judge_norms(root: nn.Module, reading: Reading, norms: list[LayerCall]) -> list[Finding]:
    """Norms of the user's own, or with an eps of their own, that do not give out what their scale says.

    That is a root mean square of one for scales of one. The worst of them is named. Scales may also be meant as
    1 + weight, and so that the whole gives one. What torch's own give is right, and small only where what they are
    given is small beside their eps. One of the user's own is wrong if it makes noise of unit size too small or too
    large as well: else its eps or a gate decides, or it is called a norm and none is meant.
    """
    modules, off = dict(named_modules(root)), list[tuple[float, LayerCall]]()
    for call in norms:
        made, norm = _size(call.get("mean_square")), modules.get(call.name.partition("#")[0])
        if norm is None or not 0 < made < math.inf or not norm.training:  # by running statistics any size may be right
            continue
        if not any("Norm" in kind.__name__ for kind in type(norm).__mro__):  # a scale on a sphere may be meant
            continue
        scales = [one.detach().float() for one in norm.parameters(recurse=False) if one.dim() == 1][:1]
        own = type(norm).__module__.startswith("torch.nn")
        if (getattr(norm, "eps", None) or 0) <= USUAL_EPS if own else not scales:
            continue
        meant = [1.0, *(float(one.square().mean().sqrt()) for scale in scales for one in (scale, 1 + scale))]
        factor = _factor_off(made, meant)
        if not own and factor > THRESHOLDS.tame_norm:
            factor = min(factor, _factor_off(_size_alone(norm, call.shape, scales[0]), meant))
        if factor > THRESHOLDS.tame_norm:
            off.append((factor, call))
    if not off:
        return []
    most, worst = max(off, key=lambda item: item[0])
    return [tell(
        "odd_norm", layer=worst.name, depth=worst.depth, most=most,
        evidence={"root_mean_square": _size(worst.get("mean_square"))},
        more=f", and of {len(off) - 1} more" if len(off) > 1 else "",
    )]  # fmt: skip


def _factor_off(made: float, meant: Sequence[float]) -> float:
    """By which factor a size misses the nearest of those that may be meant; 1 where it is not known."""
    return min(max(made / one, one / made) for one in meant if one > 0) if 0 < made < math.inf else 1.0


def _size_alone(norm: nn.Module, shape: Sequence[int], like: Tensor) -> float:
    """The root mean square of what a copy of a norm makes of noise of unit size, NaN where it takes more than that."""
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(like)
    try:
        with torch.no_grad():
            return float(type(norm).forward(copy.deepcopy(norm), noise).double().square().mean().sqrt())
    except Exception:  # whatever a module of the user's refuses
        return math.nan


def _judge_dropout(root: nn.Module, rest: DropoutAtRest) -> list[Finding]:
    """Dropout that leaves out nearly everything: it rests during a check, and does not in training."""
    named = [(part.p, name) for name, part in named_modules(root) if isinstance(part, DROPOUT)]
    share, name = max([*named, (rest.most, rest.place)], key=lambda one: one[0])
    if share < THRESHOLDS.dead:
        return []
    return [tell("dropped", layer=name, evidence={"dropped": share}, where=f" at {name!r}" if name else "")]


def _judge_activations(root: nn.Module) -> list[Finding]:
    """Activation modules that are straight lines, such as a leaky ReLU of slope 1."""
    straight = [name for name, part in named_modules(root)
                if type(part).__module__ == "torch.nn.modules.activation" and _is_straight(part)]  # fmt: skip
    if not straight:
        return []
    more = f" and {len(straight) - 1} more" if len(straight) > 1 else ""
    return [tell("straight_activation", layer=straight[0], evidence={"activations": float(len(straight))}, more=more)]


def _is_straight(part: nn.Module) -> bool:
    x = torch.linspace(-2, 2, 9)
    try:
        with torch.no_grad():
            y = copy.deepcopy(part).cpu().float()(x.clone())  # it may write over what it is given
    except Exception:  # attention and gated units take more, or other shapes
        return False
    return isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y, y[-1] / 2 * x) and bool(y.any())


def _way_of_inputs(reading: Reading, norms: list[LayerCall]) -> str:
    """On which way inputs reach the outputs as large as they come, "" where a norm stands on all of them.

    A norm counts as one of the stream where it stands before the first weight layer or beside it in the same module;
    norms inside of residual branches leave the way around them as it is.
    """
    if not norms:
        return "no normalization brings them back"
    first = next(iter(reading.weight_layers), None)
    shortest = reading.settings.get("shortest_depth")
    if first is None or shortest is None or shortest >= reading.depth:
        return ""
    early = norms[0].depth < first.depth or norms[0].name.rpartition(".")[0] == first.name.rpartition(".")[0]
    return "" if early else "the stream goes around the norms, which stand inside of the branches: it stays as large"


def _size(mean_square: float) -> float:
    return math.sqrt(mean_square) if mean_square >= 0 else 0.0
