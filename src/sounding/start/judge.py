"""What a check says of the start: parameters, loss, gradients that do not arrive, and signals beyond all scales."""

from __future__ import annotations

import copy
import math
from collections.abc import Container, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sounding.probe.calls import Pass, named_modules, named_parameters
from sounding.probe.reading import LayerCall, Reading
from sounding.probe.records import Finding, FindingKind, Severity
from sounding.probe.state import DROPOUT
from sounding.probe.thresholds import THRESHOLDS
from sounding.start.arrivals import find_arrivals
from sounding.start.findings import find_all
from sounding.start.laws import name_law
from sounding.start.loss import StartLoss, judge_loss
from sounding.start.parameters import Parameter, Start, take_stock

USUAL_EPS = 1e-3  # TensorFlow's for batch norm, the largest in use
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)  # whatever a class that is made from one is called
DRAWN = ("gaussian", "uniform", "orthogonal")
FRESH = 0.9  # of frozen matrices: of a pretrained body hardly one fits a law by chance
SCALE = "for every column of the inputs subtract its mean and divide by its deviation"
RAW = 10.0  # the root mean square of inputs that nobody has scaled: pixels up to 255 have 100


def judge_start(
    root: nn.Module,
    passes: Sequence[Pass],
    reading: Reading,
    loss: StartLoss | None,
    *,
    dropped: tuple[float, str] = (0.0, ""),
    largest: str = "",
    read: Container[int] | None = None,
) -> tuple[Finding, ...]:
    """Every finding about the start, for the verdict of a check.

    `dropped` is the most that a forward method drops, and where; `largest` says which of the inputs are the largest;
    `read` holds the storages that the operations of the passes have read.
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
        read=read,
    )
    losses = judge_loss(loss)
    if reading.calls:
        last = reading.calls[-1]  # the layer that makes the outputs
        losses = [one if one.kind == "class_imbalance" else replace(one, layer=last.name, depth=last.depth)
                  for one in losses]  # fmt: skip
        if not math.isfinite(last.get("mean_square")):
            losses = [one for one in losses if one.kind != "non_finite"]  # of which the layers tell more
    given = _size(reading.input.get("mean_square"))
    if given > RAW and _way_of_inputs(reading):
        losses = [_blame_inputs(one, given) if one.kind == "start_loss" else one for one in losses]
    return (*losses, *_judge_signal(root, reading, largest), *_judge_norms(root, reading),
            *_judge_dropout(root, dropped), *_judge_activations(root), *parameters, *arrivals)  # fmt: skip


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


def _judge_signal(root: nn.Module, reading: Reading, largest: str) -> list[Finding]:
    """Inputs that no norm brings back, and outputs that are huge; each at its place."""
    given, calls = _size(reading.input.get("mean_square")), reading.calls
    found: list[Finding] = []
    severity: Severity
    way, first = _way_of_inputs(reading), next(iter(reading.weight_layers), None)
    arrives = first is None or not _size(first.get("mean_square")) <= RAW  # sines of a large number are no large signal
    if given > THRESHOLDS.huge_input and way and arrives:
        # with norms inside of branches a third of its accuracy was left, and not none: docs/audit.md
        normed = any("Norm" in call.kind for call in calls)
        severity = "high" if given > THRESHOLDS.beyond and not normed else "medium"
        which = f"; {largest}" if largest else ""
        why = f"The inputs have a root mean square of {given:.3g}, and {way}{which}."
        found.append(_finding(severity, reading.input.name, 0, given, why, (SCALE,)))
    last = _largest_end(reading)
    made = _size(last.get("mean_square")) if last is not None else 0.0
    if last is not None and made > THRESHOLDS.huge_output and made > 10 * given:
        still = [part for part in root.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)
                 and not part.training and part.track_running_stats]  # fmt: skip
        behind = "nothing behind it brings it back" if last is calls[-1] else "what stands behind it is flat there"
        why = f"The last layer gives out a root mean square of {made:.3g}, and {behind}."
        remedies = (f"look at the weights of {last.name!r}, and at the norm before it", "sounding audit TARGET")
        first = next(call for call in calls if _size(call.get("mean_square")) > THRESHOLDS.huge_output)
        if first is not last:
            why += f" Signals are that large from {first.name!r} on."
            remedies = (f"look at what {first.name!r} is given, and at its weights", *remedies[1:])
        if still:
            why += (" Its batch norms are in evaluation mode, where they divide by running statistics that nobody has "
                    "estimated yet.")  # fmt: skip
            repair = "sounding repair TARGET --method batch_statistics: let them normalize by the batch"
            remedies = ("put batch norms into training mode", repair)
        severity = "high" if made > THRESHOLDS.beyond else "medium"
        found.append(_finding(severity, last.name, last.depth, made, why, remedies))
    return found


def _largest_end(reading: Reading) -> LayerCall | None:
    """The call that makes the outputs; where it is a bounded activation that is flat, the weight layer before it."""
    if not reading.calls:
        return None
    last = reading.calls[-1]
    flat = last.get("saturated_fraction") >= THRESHOLDS.flat and reading.weight_layers
    return reading.weight_layers[-1] if flat else last


def _judge_norms(root: nn.Module, reading: Reading) -> list[Finding]:
    """Norms of the user's own, or with an eps of their own, that do not give out what their scale says.

    That is a root mean square of one for scales of one. The worst of them is named. Scales may also be meant as
    1 + weight, and so that the whole gives one. What torch's own give is right, and small only where what they are
    given is small beside their eps. One of the user's own is wrong if it makes noise of unit size too small or too
    large as well: else its eps or a gate decides, or it is called a norm and none is meant.
    """
    modules, worst, most, count = dict(named_modules(root)), None, THRESHOLDS.tame_norm, 0
    for call in reading.calls:
        made, norm = _size(call.get("mean_square")), modules.get(call.name.partition("#")[0])
        if norm is None or not ("Norm" in call.kind or isinstance(norm, NORMS)):
            continue
        if not 0 < made < math.inf or not norm.training:  # by running statistics any size may be right
            continue
        scales = [one.detach().float() for one in norm.parameters(recurse=False) if one.dim() == 1][:1]
        own = type(norm).__module__.startswith("torch.nn")
        if (getattr(norm, "eps", None) or 0) <= USUAL_EPS if own else not scales:
            continue
        meant = [1.0, *(float(one.square().mean().sqrt()) for scale in scales for one in (scale, 1 + scale))]
        off = _factor_off(made, meant)
        if not own and off > THRESHOLDS.tame_norm:
            off = min(off, _factor_off(_size_alone(norm, call.shape, scales[0]), meant))
        count += off > THRESHOLDS.tame_norm
        if off > most:
            worst, most = call, off
    if worst is None:
        return []
    made = _size(worst.get("mean_square"))
    more = f", and of {count - 1} more" if count > 1 else ""
    return [_finding(
        "medium", worst.name, worst.depth, made,
        f"What leaves the norm {worst.name!r}{more} has a root mean square of {made:.3g}, {most:.3g} times off "
        "what its scale says: it divides by something else than the size of what it is given.",
        ("divide by the root of the mean square, and not of the sum", "look at its eps, and over which axes it runs"),
        "norm_weight",
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


def _judge_dropout(root: nn.Module, dropped: tuple[float, str]) -> list[Finding]:
    """Dropout that leaves out nearly everything: it rests during a check, and does not in training."""
    named = [(part.p, name) for name, part in named_modules(root) if isinstance(part, DROPOUT)]
    share, name = max([*named, dropped], key=lambda one: one[0])
    if share < THRESHOLDS.dead:
        return []
    return [Finding(
        "dead_units", "medium", name or None, None, {"dropped": share},
        f"Dropout sets {share:.0%} of the units to zero in each step of training"
        + (f" at {name!r}" if name else "") + "; a check lets dropout rest, so that nothing else here shows it.", "",
        ("its number is the share that is dropped, and not the one that is kept: 0.1 to 0.5 are usual",),
        expected="dropout of 0.1 to 0.5", found=f"{share:.3g}",
    )]  # fmt: skip


def _judge_activations(root: nn.Module) -> list[Finding]:
    """Activation modules that are straight lines, such as a leaky ReLU of slope 1."""
    straight = [name for name, part in named_modules(root)
                if type(part).__module__ == "torch.nn.modules.activation" and _is_straight(part)]  # fmt: skip
    if not straight:
        return []
    more = f" and {len(straight) - 1} more" if len(straight) > 1 else ""
    return [Finding(
        "activation", "medium", straight[0], None, {"activations": float(len(straight))},
        f"The activation {straight[0]!r}{more} gives back what it is given: layers around it compute what one linear "
        "layer could.", "", ("look at its arguments: LeakyReLU(True) has the slope 1",),
        expected="an activation that bends", found="a straight line",
    )]  # fmt: skip


def _is_straight(part: nn.Module) -> bool:
    x = torch.linspace(-2, 2, 9)
    try:
        with torch.no_grad():
            y = copy.deepcopy(part).cpu().float()(x.clone())  # it may write over what it is given
    except Exception:  # attention and gated units take more, or other shapes
        return False
    return isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y, y[-1] / 2 * x) and bool(y.any())


def _way_of_inputs(reading: Reading) -> str:
    """On which way inputs reach the outputs as large as they come, "" where a norm stands on all of them.

    A norm counts as one of the stream where it stands before the first weight layer or beside it in the same module;
    norms inside of residual branches leave the way around them as it is.
    """
    norms = [call for call in reading.calls if "Norm" in call.kind]
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


def _finding(
    severity: Severity, layer: str, depth: int, size: float, why: str, remedies: tuple[str, ...],
    kind: FindingKind = "huge_signal",
) -> Finding:  # fmt: skip
    return Finding(
        kind, severity, layer, depth, {"root_mean_square": size}, why, "", remedies,
        expected="a root mean square around 1", found=f"{size:.3g}",
    )  # fmt: skip
