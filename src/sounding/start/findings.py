"""What is wrong with a parameter before the first step, read from its values alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from statistics import median, median_low
from typing import Any

import torch

from sounding.probe.records import Finding, Severity
from sounding.probe.sentences import tell
from sounding.probe.thresholds import THRESHOLDS
from sounding.start.laws import by_other_fan, configured_scale, fitting_laws, known_laws, name_law
from sounding.start.parameters import NUMBER, SURE, WEIGHTS, Parameter, Start

# A drawn weight has no entry below float32's normal range (1.2e-38): one in 10^36 would. Memory that nobody wrote does.
DENORMAL = 1.2e-38
WILD = 1e6  # the largest entry over the median one: 5 for a Gaussian, 40 for the heaviest law in use
PATCHES = 8  # parts of a weight, whose entries one law gives one scale; a part of its memory may hold anything
MANY = 4  # places off every law from which on it is the network's law that is odd, and not each of them
FANS = 4  # layers that agree on a law before all of them are told to have the wrong fan
FEW = 3  # siblings from which on the middle one says what is usual
RARE = 8  # of so many matrices one may have another law than that of the network
LEAST = 16  # entries below which a law cannot be told from chance
DRAWN = ("gaussian", "uniform", "truncated", "orthogonal")
MATRICES = ("linear", "convolution")
Finder = Callable[[Start], Iterator[Finding]]


def find_all(start: Start) -> tuple[Finding, ...]:
    """Every finding about the parameters; the first kind that explains a parameter is the only one for it."""
    found: list[Finding] = []
    told: set[str] = set()
    for finder in FINDERS:
        found += [finding for finding in finder(start) if finding.parameter not in told]
        told |= {finding.parameter for finding in found if finding.parameter is not None}
    return tuple(found)


def _tell(
    key: str, severity: Severity | None, one: Parameter, *, evidence: Mapping[str, float], **words: Any
) -> Finding:
    """A finding about one parameter."""
    return tell(
        key, severity, layer=one.layer, parameter=one.name, evidence=evidence, mend=_mend(one), scale=one.scale, **words
    )


def find_not_finite(start: Start) -> Iterator[Finding]:
    """Parameters with NaN or infinity; where denormal numbers stand beside them, they were never written."""
    for one in start.parameters:
        if not one.finite:
            share = 1 - float(torch.isfinite(one.tensor).float().mean())
            yield _tell("parameter_not_finite", "high", one, evidence={"share": share})


def find_never_written(start: Start) -> Iterator[Finding]:
    """Memory of `torch.empty`: denormal numbers, or a spread that no law has."""
    for one in start.parameters:
        if one.constant or not one.finite or one.entries < LEAST or one.kind == "vector":
            continue
        sizes, largest = one.sample.abs(), max(abs(one.low), abs(one.high))
        if float(sizes.min()) >= max(DENORMAL, largest / WILD):
            continue  # the rule: no entry is denormal, and none lies far below the others
        sizes = sizes.double()
        tiny = (sizes > 0) & (sizes < DENORMAL)
        denormal = float(tiny.double().mean())
        middle = float(sizes[sizes > 0].median()) if bool((sizes > 0).any()) else 0.0
        wild = largest / middle if middle else 1.0
        patched = bool(tiny.any()) and _is_patched(sizes)
        if denormal > 0.01 or wild > WILD or patched:
            sure = "nearly certain" if denormal > 0.01 and wild > WILD else "very likely"
            severity: Severity = "high" if wild > WILD or denormal > 0.5 else "medium"
            evidence = {"denormal_share": denormal, "largest_over_median": wild}
            yield _tell("never_written", severity, one, evidence=evidence, sure=sure)


def _is_patched(sizes: torch.Tensor) -> bool:
    """Whether parts of a weight have scales that no law gives them together."""
    scales = [float(part.square().mean()) for part in sizes.chunk(PATCHES)]
    return max(scales) > 100 * min(scales)


def find_constant(start: Start) -> Iterator[Finding]:
    """Weights that are all zero or all equal, where siblings or the kind of layer are not."""
    matrices = [one for one in start.parameters if one.kind in MATRICES]
    dead = len(matrices) > 1 and all(one.constant and one.low == 0 for one in matrices)
    # one such layer is outlived (the others differ), a network of them is as wide as one unit: docs/faults.md
    most = 2 * sum(one.constant and one.low != 0 for one in matrices) >= len(matrices)
    for members in start.groups.values():
        flat = [one for one in members if one.kind in WEIGHTS and one.constant and one.tensor.numel() > LEAST]
        zero = [one for one in flat if one.low == 0 and one.kind != "matrix"]
        equal = [one for one in flat if one.low != 0]
        whole = len(zero) == len(members) or zero == [start.last] or _are_all_of_a_place(zero, members)
        if zero and whole and not dead:
            yield _zero_start(zero, start)
        elif zero:
            names = f"{_name(zero)} {'is' if len(zero) == 1 else 'are'}"
            key, others = "zero_network" if dead else "zero_weight", len(members) - len(zero)
            yield _tell(key, None, zero[0], evidence={"parameters": len(zero)}, names=names, others=others)
        if equal:
            severity: Severity = "low" if equal[0].kind == "matrix" else "high" if most else "medium"
            evidence = {"parameters": len(equal), "value": equal[0].low}
            yield _tell("constant_weight", severity, equal[0], evidence=evidence, names=_name(equal))


def _are_all_of_a_place(some: list[Parameter], members: list[Parameter]) -> bool:
    """Whether each of some siblings is so together with all that differ from it in one number of their names, as the
    second layers of all blocks are where the first ones of these blocks are not."""
    names = {one.name for one in some}
    for name in names:
        numbers = [found.span() for found in re.finditer(r"\d+", name)]
        places = (re.compile(re.escape(name[:start]) + r"\d+" + re.escape(name[end:])) for start, end in numbers)
        kin = ({one.name for one in members if place.fullmatch(one.name)} for place in places)
        if not any(len(one) > 1 and one <= names for one in kin):
            return False
    return bool(names)


def _zero_start(zero: list[Parameter], start: Start) -> Finding:
    """The finding about weights that start at zero, with the practice that it looks like."""
    name = zero[0].name.lower()
    if "lora" in name:
        practice = "LoRA starts its second factor at zero, so that the adapted network is the original one"
    elif "ada" in name or "modulation" in name:
        practice = "DiT starts the layers that modulate its norms at zero (adaLN-zero), so that each block is empty"
    elif zero == [start.last]:
        practice = "an output that starts at zero gives every class the same probability"
    else:
        practice = "residual branches that end in zero start as the identity (Fixup, zero-init residual, ControlNet)"
    names = f"{_name(zero)} {'starts' if len(zero) == 1 else 'start'}"
    return _tell("zero_start", None, zero[0], evidence={"parameters": len(zero)}, names=names, practice=practice)


def find_copies(start: Start) -> list[tuple[Parameter, Parameter]]:
    """Random weights that are equal to others, entry by entry, and not tied to them, each with the one it equals."""
    seen: dict[object, list[Parameter]] = {}
    for one in start.parameters:
        # raw matrices may hold a fixed pattern, which every layer has by right: Mamba's rates are ln 1, ln 2, … per row
        pattern = one.kind == "matrix" and (one.law.shape not in DRAWN or torch.equal(one.tensor[0], one.tensor[-1]))
        drawn = one.kind in WEIGHTS and not pattern
        if drawn and not one.constant and one.finite and one.tensor.numel() >= LEAST:
            key = (one.tensor.shape, one.tensor.dtype, one.low, one.high, float(one.sample.double().sum()))
            seen.setdefault(key, []).append(one)
    return [(one, first) for first, *others in seen.values() for one in others if torch.equal(one.tensor, first.tensor)]


def find_clones(start: Start) -> Iterator[Finding]:
    """One finding for all weights that are copies."""
    copies = find_copies(start)
    if copies:
        one, first = copies[0]
        # copies cost a residual network of convolutions a third of its accuracy, a perceptron and a GPT nothing
        severity: Severity = "medium" if any(copy.kind == "convolution" for copy, _ in copies) else "low"
        evidence = {"copies": len(copies), "places": len({copy.group for copy, _ in copies})}
        yield _tell("clones", severity, one, evidence=evidence, first=first.name)


def find_ties(start: Start) -> Iterator[Finding]:
    """One tensor as the weight of several layers; embeddings that are also the output are a practice."""
    tied = [one for one in start.parameters if one.kind in MATRICES and len(one.uses) > 1]
    if tied:
        yield _tell("ties", None, tied[0], evidence={"copies": len(tied)}, others=", ".join(tied[0].uses[1:]))


def find_odd_scales(start: Start) -> Iterator[Finding]:
    """Weights whose scale is far from that of their siblings, of the whole network's law, or from every known law of
    their kind; many places that no law fits are one finding, at the worst of them."""
    by_law: list[tuple[float, Finding]] = []
    own = _law_of_most(start)
    for members in start.groups.values():
        drawn = [one for one in members if one.kind in (*WEIGHTS, "token") and one.scale > 0 and one.entries >= LEAST]
        usual = median(one.scale for one in drawn) if drawn else 0.0
        outliers = [
            (factor, one)
            for one, factor in zip(drawn, _off_siblings(drawn), strict=True)
            if factor >= THRESHOLDS.odd_scale and not (one is start.last and one.scale < usual)
        ]
        if outliers and 3 * len(outliers) <= len(drawn):
            factor, one = max(outliers, key=lambda item: item[0])
            yield _odd(one, factor, usual, f"as its {len(drawn) - 1} siblings have", len(outliers))
            continue
        drawn = [one for one in drawn if one is not start.last or one.scale >= 0.02]  # a head may start small
        worst = max(drawn, key=lambda one: off_laws(one, start), default=None)
        factor = off_laws(worst, start) if worst is not None else 0.0
        if worst is not None and factor >= THRESHOLDS.odd_scale:
            laws = _laws_of(worst, start)
            closest = min(laws, key=lambda name: abs(math.log(worst.scale / laws[name])))
            source = f"which is {closest}, the closest known law"
            by_law.append((factor, _odd(worst, factor, laws[closest], source, len(drawn))))
            continue
        for one in drawn if own else ():
            law = known_laws(one, start)[own] if one.kind in MATRICES and one is not start.last else 0.0
            factor = max(one.scale / law, law / one.scale) if law else 1.0
            if factor >= THRESHOLDS.odd_scale:  # that another law fits it may be chance
                by = name_law(one, start)
                source = f"{own}, as most other layers have" + (f"; it has {by}" if by else "")
                yield _odd(one, factor, law, source, 1, severity="low")  # no training lost to a law that is known
    many = len(by_law) > MANY
    yield from [max(by_law, key=lambda item: item[0])[1]] if many else [finding for _, finding in by_law]


def _law_of_most(start: Start) -> str:
    """The law with fans that most matrices of the network follow, "" where there is none; a head may start small."""
    drawn = [one for one in start.parameters if one.kind in MATRICES and one.entries >= LEAST and one.scale > 0]
    laws = [name for name in known_laws(drawn[0], start) if "0.02" not in name] if drawn else []
    best, off = "", drawn
    for law in laws:
        others = [one for one in drawn if not one.fits(known_laws(one, start)[law]) and one is not start.last]
        best, off = (law, others) if len(others) < len(off) else (best, off)
    return best if len(drawn) >= FEW and len(off) <= max(len(drawn) // RARE, 1) else ""


def _odd(
    one: Parameter, factor: float, usual: float, source: str, count: int, *, severity: Severity | None = None
) -> Finding:
    """The finding about a scale that is too large or too small."""
    large, logits = one.scale > usual, one.scale * one.fan_in**0.5
    tied = f" It is also the output: behind a norm its logits have a standard deviation of {logits:.3g}."
    far = THRESHOLDS.far_scale
    # a recurrent matrix multiplies at every step, and an output makes the loss: less than ten times is too much there
    serious = factor >= far or one.kind == "recurrent" or (one.head and logits > far / 2)
    return _tell(
        "odd_scale", severity or ("medium" if large and serious else "low"), one, usual=usual, source=source,
        evidence={"standard_deviation": one.scale, "factor": factor, "parameters": count},
        size="large" if large else "small", tied=tied if one.head else "",
    )  # fmt: skip


def _off_siblings(drawn: list[Parameter]) -> list[float]:
    """The factor between each scale and its siblings', 1 where their own spread or their fans explain it."""
    factors = [math.inf if len(drawn) >= FEW else 1.0] * len(drawn)
    # laws go with 1/√fan_in, 1/√fan_out or no fan; siblings of other widths may follow any of them
    for power_in, power_out in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5)) if len(drawn) >= FEW else ():
        logs = [
            math.log(one.scale * max(one.fan_in, 1) ** power_in * max(one.fan_out, 1) ** power_out) for one in drawn
        ]
        middle = median(logs)
        spread = 1.5 * median(abs(value - middle) for value in logs)
        for index, (one, value) in enumerate(zip(drawn, logs, strict=True)):
            off = abs(value - middle)
            factors[index] = min(factors[index], math.exp(off) if off > 6 * spread + SURE * one.error else 1.0)
    return factors


def off_laws(one: Parameter, start: Start) -> float:
    """The factor by which a scale lies outside of all known laws of its kind; 1 for raw matrices, which have none."""
    if one.kind == "matrix":
        return 1.0
    laws = _laws_of(one, start).values()
    small = min(laws) / one.scale if one.kind != "token" else 0.0  # tokens may start as small as one likes
    return max(one.scale / max(laws), small) * (1 - SURE * min(one.error, 0.2))


def _laws_of(one: Parameter, start: Start) -> dict[str, float]:
    laws = known_laws(one, start)
    if one.head and getattr(start.config, "initializer_factor", None) is None:
        # it is the output, too, where an embedding's normal law makes logits of √width
        laws = {name: scale for name, scale in laws.items() if not name.startswith("normal")}
    if one is start.last:  # of few outputs, by whose number nobody means to draw a head
        laws.pop("He by fan_out", None)
    return laws


def find_exchanged(start: Start) -> Iterator[Finding]:
    """Scales of 1/√fan_out where the others of the kind have 1/√fan_in, in layers where the two differ."""
    linear = [one for one in start.parameters if one.kind == "linear" and one.scale > 0 and one.entries >= LEAST]
    uneven = [one for one in linear if max(one.fan_in, one.fan_out) >= 2 * min(one.fan_in, one.fan_out)]
    # small heads fit by chance: a scale known to 2% is needed to tell laws apart
    clear = [one for one in uneven if one.error < 0.02]
    both = {one.fan_in > one.fan_out for one in clear} == {True, False}
    for law in ("He", "LeCun", "PyTorch's default"):
        right = [one for one in linear if one.fits(known_laws(one, start)[law])]
        turned = [one for one in uneven if one.fits(by_other_fan(law, one))]
        # all of them, wide ones and narrow ones: one law, by the other fan
        whole = both and len(clear) >= FANS and all(one in turned for one in clear)
        odd = [one for one in turned if one not in right]
        # where all others, or all siblings, have the law by the right fan, another law that fits it fits by chance
        if not (len(odd) + len(right) == len(linear) and len(right) >= FANS * len(odd)):
            kin = {one.name: start.siblings(one) for one in odd}
            odd = [
                one for one in odd if (kin[one.name] and all(other in right for other in kin[one.name]))
                or (one in clear and set(fitting_laws(one, start)) <= {f"{law} by fan_out"})
            ]  # fmt: skip
        wrong, right = (turned, []) if whole else (odd, right)
        if wrong and (whole or len(right) >= (len(wrong) if law == "He" else 1)):
            one = wrong[0]
            yield _tell(
                "fans_exchanged", None, one, names=_name(wrong), law=law, meant=known_laws(one, start)[law],
                others=f", as {len(right)} others have" if right else "", ratio=one.fan_in / one.fan_out,
                evidence={"fan_in": one.fan_in, "fan_out": one.fan_out, "parameters": len(wrong)},
            )  # fmt: skip


def find_norm_weights(start: Start) -> Iterator[Finding]:
    """Scales of norms that are not one, and how much that matters."""
    scaled = {one.owner for one in start.parameters if one.kind == "norm weight" and one.scale > 0}
    for members in start.groups.values():
        # a class of its own whose norms all start at zero multiplies by 1 + weight (Gemma)
        norms = [
            one for one in members if one.kind == "norm weight" and one.finite
            and (one.owner in scaled or one.owner.__module__.startswith("torch."))
        ]  # fmt: skip
        zero = [one for one in norms if one.scale == 0]
        alone = len(norms) == 1 and not NUMBER.search(norms[0].name)  # no end of a branch: nothing passes it
        if zero and len(zero) == len(norms) and not alone:
            yield _zero_start(zero, start)
            continue
        odd = [one for one in norms if abs(one.scale - 1) > 0.1]
        if odd:
            one = max(odd, key=lambda item: abs(math.log(max(item.scale, 1e-6))))
            far = not 1 / THRESHOLDS.tame_norm < one.scale < THRESHOLDS.tame_norm
            yield _tell(
                "norm_scale", "medium" if far else "low", one, evidence={"scale": one.scale, "parameters": len(odd)},
                squared=one.scale**2, count="one" if len(odd) == 1 else len(odd), norms=len(norms),
            )  # fmt: skip


def find_biases(start: Start) -> Iterator[Finding]:
    """Biases, and shifts of norms, that are a large part of what their layer gives out."""
    by_layer = {one.layer: one for one in start.parameters if one.kind in (*MATRICES, "norm weight")}
    for members in start.groups.values():
        worst, most, shares = None, 0.0, []
        for one in members:
            weight = by_layer.get(one.layer)
            if "bias" not in one.kind or weight is None or not one.finite or not weight.finite or weight.scale == 0:
                continue
            fan_in = max(weight.fan_in, 1)  # a norm has none: what it multiplies has size one
            shares.append(share := one.scale**2 / (one.scale**2 + fan_in * weight.scale**2))
            # PyTorch's default ends there
            usual = one.kind == "bias" and max(abs(one.low), abs(one.high)) <= 1.001 * fan_in**-0.5
            if share > max(most, THRESHOLDS.drowned) and not usual:
                worst, most = one, share
        if worst is None:
            continue
        # where all siblings have it, it is meant: Mamba's step sizes are biases of 5
        alone = len(shares) == 1 or median_low(shares) < THRESHOLDS.drowned
        if worst.kind == "bias" or alone:  # shifts of all norms are a choice that theory makes too (`tune_batchnorm`)
            yield _tell(
                "large_bias", "medium" if most > 0.9 and alone else "low", worst,
                evidence={"share": most, "bias": worst.scale},
                usual="0, or PyTorch's 1/√fan_in at most" if worst.kind == "bias" else "0",
            )  # fmt: skip


def find_config_law(start: Start) -> Iterator[Finding]:
    """Weights whose scale is not the one that the network's configuration says."""
    scale = configured_scale(start.config)
    if scale is None:
        return
    depth = math.sqrt(2 * start.blocks)
    asked = (scale, scale / depth, scale / math.sqrt(start.blocks))
    for members in start.groups.values():
        off = [
            one for one in members
            if one.kind in (*MATRICES, "embedding") and one.scale > 0 and one.entries >= 256
            and min(abs(math.log(one.scale / value)) for value in asked) > SURE * one.error + 0.15
        ]  # fmt: skip
        if off:
            law = name_law(off[0], start)
            evidence = {"configured": scale, "standard_deviation": off[0].scale, "parameters": len(off)}
            yield _tell(
                "config_law", None, off[0], evidence=evidence, names=_name(off), law=f" ({law})" if law else "",
                which=f", which is {law}" if law else "",
            )  # fmt: skip


def _mend(one: Parameter) -> str:
    """The cure for a parameter of this kind."""
    if one.kind == "bias":
        cure = "zero_biases: set it to zero"
    elif one.kind.startswith("norm"):
        cure = "reset_norms: scales of one and shifts of zero"
    elif one.kind == "embedding" and one.finite and not one.constant:
        cure = "scale_embeddings: bring it to the usual scale"
    else:
        cure = "redraw: draw it by the law of its siblings or of its kind"
    return f"sounding repair TARGET --method {cure}"


def _name(parameters: list[Parameter]) -> str:
    more = f" and {len(parameters) - 1} more at the same place" if len(parameters) > 1 else ""
    return f"{parameters[0].name}{more}"


FINDERS: tuple[Finder, ...] = (
    find_not_finite, find_never_written, find_constant, find_clones, find_ties, find_exchanged, find_odd_scales,
    find_norm_weights, find_biases, find_config_law,
)  # fmt: skip
