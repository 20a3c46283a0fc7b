"""What is wrong with a parameter before the first step, read from its values alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import median, median_low

import torch

from sounding.probe.records import Finding, FindingKind, Severity
from sounding.probe.thresholds import THRESHOLDS
from sounding.start.laws import configured_scale, known_laws, name_law
from sounding.start.parameters import NUMBER, SURE, WEIGHTS, Parameter, Start

# A drawn weight has no entry below float32's normal range (1.2e-38): one in 10^36 would. Memory that nobody wrote does.
DENORMAL = 1.2e-38
WILD = 1e6  # the largest entry over the median one: 5 for a Gaussian, 40 for the heaviest law in use
MANY = 4  # places off every law from which on it is the network's law that is odd, and not each of them
FANS = 4  # layers that agree on a law before all of them are told to have the wrong fan
OWN = ("PyTorch's default", "He", "LeCun", "Xavier")  # laws of a network's own, in which fans enter
LEAST = 16  # entries below which a law cannot be told from chance
DRAWN = ("gaussian", "uniform", "truncated", "orthogonal")
Finder = Callable[[Start], Iterator[Finding]]


def find_all(start: Start) -> tuple[Finding, ...]:
    """Every finding about the parameters; the first kind that explains a parameter is the only one for it."""
    found: list[Finding] = []
    told: set[str] = set()
    for finder in FINDERS:
        found += [finding for finding in finder(start) if finding.parameter not in told]
        told |= {finding.parameter for finding in found if finding.parameter is not None}
    return tuple(found)


def make_finding(
    kind: FindingKind,
    severity: Severity,
    parameter: Parameter,
    *,
    expected: str,
    found: str,
    why: str,
    remedies: tuple[str, ...],
    evidence: Mapping[str, float],
) -> Finding:
    """A finding about one parameter."""
    return Finding(
        kind, severity, parameter.layer or None, None, evidence, why, "", remedies,
        parameter=parameter.name, expected=expected, found=found,
    )  # fmt: skip


def find_not_finite(start: Start) -> Iterator[Finding]:
    """Parameters with NaN or infinity; where denormal numbers stand beside them, they were never written."""
    for one in start.parameters:
        if one.finite:
            continue
        share = 1 - float(torch.isfinite(one.tensor).float().mean())
        yield make_finding(
            "parameter_not_finite", "high", one, expected="numbers", found=f"{share:.2%} NaN or infinite",
            why=f"{share:.2%} of the entries of {one.name} are NaN or infinite, so every output that passes it is. "
            "Memory that was reserved and never written often looks like this.",
            remedies=("initialize it; after to_empty call the model's own initialization", _mend(one)),
            evidence={"share": share},
        )  # fmt: skip


def find_never_written(start: Start) -> Iterator[Finding]:
    """Memory of `torch.empty`: denormal numbers, or a spread that no law has."""
    for one in start.parameters:
        if one.constant or not one.finite or one.entries < LEAST or one.kind == "vector":
            continue
        sizes, largest = one.sample.abs(), max(abs(one.low), abs(one.high))
        if float(sizes.min()) >= max(DENORMAL, largest / WILD):
            continue  # the rule: no entry is denormal, and none lies far below the others
        sizes = sizes.double()
        denormal = float(((sizes > 0) & (sizes < DENORMAL)).double().mean())
        middle = float(sizes[sizes > 0].median()) if bool((sizes > 0).any()) else 0.0
        wild = largest / middle if middle else 1.0
        if denormal <= 0.01 and wild <= WILD:
            continue
        sure = "nearly certain" if denormal > 0.01 and wild > WILD else "very likely"
        yield make_finding(
            "never_written", "high" if wild > WILD or denormal > 0.5 else "medium", one,
            expected="entries of one size", found=f"{denormal:.0%} denormal, largest {wild:.0e} times the median",
            why=f"It is {sure} that {one.name} was reserved and never written: {denormal:.0%} of its entries lie below "
            f"the normal range of float32, and the largest is {wild:.0e} times the median. What it holds changes from "
            "run to run.",
            remedies=("initialize it; after to_empty call the model's own initialization", _mend(one),
                      "sounding audit TARGET --compare TARGET: build it through the meta device and compare"),
            evidence={"denormal_share": denormal, "largest_over_median": wild},
        )  # fmt: skip


def find_constant(start: Start) -> Iterator[Finding]:
    """Weights that are all zero or all equal, where siblings or the kind of layer are not."""
    matrices = [one for one in start.parameters if one.kind in ("linear", "convolution")]
    dead = len(matrices) > 1 and all(one.constant and one.low == 0 for one in matrices)
    # one such layer is outlived (the others differ), a network of them is as wide as one unit: docs/audit.md
    most = 2 * sum(one.constant and one.low != 0 for one in matrices) >= len(matrices)
    for members in start.groups.values():
        flat = [one for one in members if one.kind in WEIGHTS and one.constant and one.tensor.numel() > LEAST]
        if not flat:
            continue
        zero = [one for one in flat if one.low == 0 and one.kind != "matrix"]
        equal = [one for one in flat if one.low != 0]
        practice = not dead and (
            len(zero) == len(members) or zero == [start.last] or _are_all_of_a_place(zero, members)
        )
        if zero and practice:
            yield _zero_start(zero, start)
        elif zero:
            yield make_finding(
                "constant_weight", "high" if dead else "medium", zero[0],
                expected="random entries, as its siblings have", found="zero everywhere",
                why=f"{_name(zero)} {'is' if len(zero) == 1 else 'are'} zero everywhere"
                + (", as every matrix of the network is: no signal passes and nothing is learned." if dead else
                   f", where {len(members) - len(zero)} at the same place of other blocks are not."),
                remedies=(_mend(zero[0]),), evidence={"parameters": len(zero)},
            )  # fmt: skip
        if equal:
            yield make_finding(
                "constant_weight", "low" if equal[0].kind == "matrix" else "high" if most else "medium", equal[0],
                expected="random entries", found=f"{equal[0].low:.4g} everywhere",
                why=f"Every entry of {_name(equal)} is the same, so all of its units compute the same thing and get "
                "the same gradient: the layer is as wide as one unit.",
                remedies=(_mend(equal[0]),), evidence={"parameters": len(equal), "value": equal[0].low},
            )  # fmt: skip


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
    return make_finding(
        "zero_start", "low", zero[0], expected="random entries or, by this practice, zero", found="zero everywhere",
        why=f"{_name(zero)} {'starts' if len(zero) == 1 else 'start'} at zero, all of that place: {practice}. What "
        "stands before it gets its first gradient after the first step.",
        remedies=("nothing, if that is meant",), evidence={"parameters": len(zero)},
    )  # fmt: skip


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
    groups = {one.group for one, _ in copies}
    if copies:
        one, first = copies[0]
        # copies cost a residual network of convolutions a third of its accuracy, a perceptron and a GPT nothing
        severity: Severity = "medium" if any(copy.kind == "convolution" for copy, _ in copies) else "low"
        yield make_finding(
            "cloned_weights", severity, one, expected="a draw of its own", found=f"equal to {first.name}",
            why=f"{len(copies)} weights at {len(groups)} places start equal to others, entry by entry, and are not "
            f"tied to them: {one.name} is {first.name}. Layers made by copying one that was initialized do this, "
            "nn.TransformerEncoder among them; theory and common practice expect independent draws.",
            remedies=("sounding repair TARGET --method unclone: every copy drawn anew by its own law",),
            evidence={"copies": len(copies), "places": len(groups)},
        )  # fmt: skip


def find_ties(start: Start) -> Iterator[Finding]:
    """One tensor as the weight of several layers; embeddings that are also the output are a practice."""
    tied = [one for one in start.parameters if one.kind in ("linear", "convolution") and len(one.uses) > 1]
    if tied:
        one = tied[0]
        others = ", ".join(one.uses[1:])
        yield make_finding(
            "cloned_weights", "low", one, expected="a weight of its own", found=f"also the weight of {others}",
            why=f"{len(tied)} weights are one tensor at several layers: {one.name} is also the weight of {others}, so "
            "these layers compute the same and stay equal in training.",
            remedies=("nothing, if they share it on purpose; else make a parameter for each",),
            evidence={"copies": len(tied)},
        )  # fmt: skip


def find_odd_scales(start: Start) -> Iterator[Finding]:
    """Weights whose scale is far from that of their siblings, or from every known law of their kind; many places that
    no law fits are one finding, at the worst of them."""
    by_law: list[tuple[float, Finding]] = []
    for members in start.groups.values():
        drawn = [one for one in members if one.kind in (*WEIGHTS, "token") and one.scale > 0 and one.entries >= LEAST]
        odd = list(zip(drawn, _off_siblings(drawn), strict=True))
        usual = median(one.scale for one in drawn) if drawn else 0.0
        outliers = [
            (one, factor)
            for one, factor in odd
            if factor >= THRESHOLDS.odd_scale and not (one is start.last and one.scale < usual)
        ]
        if outliers and 4 * len(outliers) <= len(drawn):
            one, factor = max(outliers, key=lambda item: item[1])
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
    many = len(by_law) > MANY
    yield from [max(by_law, key=lambda item: item[0])[1]] if many else [finding for _, finding in by_law]


def find_own_law(start: Start) -> Iterator[Finding]:
    """One matrix far from the law that every other one follows, though it may fit another law by chance of its fans."""
    drawn = [one for one in start.parameters if one.kind in ("linear", "convolution") and one.entries >= LEAST]
    drawn = [one for one in drawn if one.scale > 0 and one is not start.last]  # a head may start small
    for law in OWN if len(drawn) > MANY else ():
        off = [one for one in drawn if not one.fits(known_laws(one, start)[law])]
        if len(off) == 1:
            usual = known_laws(off[0], start)[law]
            factor = max(off[0].scale / usual, usual / off[0].scale)
            if factor >= THRESHOLDS.odd_scale:
                by = name_law(off[0], start)
                source = f"{law}, as {len(drawn) - 1} other layers have" + (f"; it has {by}" if by else "")
                found = _odd(off[0], factor, usual, source, 1)
                yield replace(found, severity="low")  # no training lost to a law that is known


def _odd(one: Parameter, factor: float, usual: float, source: str, count: int) -> Finding:
    """The finding about a scale that is too large or too small."""
    large, logits = one.scale > usual, one.scale * one.fan_in**0.5
    tied = f" It is also the output: behind a norm its logits have a standard deviation of {logits:.3g}."
    far = THRESHOLDS.far_scale
    # a recurrent matrix multiplies at every step, and an output makes the loss: less than ten times is too much there
    serious = factor >= far or one.kind == "recurrent" or (one.head and logits > far / 2)
    return make_finding(
        "odd_scale", "medium" if large and serious else "low", one,
        expected=f"a standard deviation of {usual:.3g}, {source}", found=f"{one.scale:.3g}",
        why=f"The standard deviation of {one.name} is {one.scale:.3g}, {factor:.3g} times too "
        f"{'large' if large else 'small'}: expected {usual:.3g}, {source}." + (tied if one.head else ""),
        remedies=(_mend(one),),
        evidence={"standard_deviation": one.scale, "factor": factor, "parameters": count},
    )  # fmt: skip


def _off_siblings(drawn: list[Parameter]) -> list[float]:
    """The factor between each scale and its siblings', 1 where their own spread or their fans explain it."""
    factors = [math.inf if len(drawn) >= 4 else 1.0] * len(drawn)
    # laws go with 1/√fan_in, 1/√fan_out or no fan; siblings of other widths may follow any of them
    for power_in, power_out in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5)) if len(drawn) >= 4 else ():
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
    return laws


def find_exchanged(start: Start) -> Iterator[Finding]:
    """Scales of 1/√fan_out where the others of the kind have 1/√fan_in, in layers where the two differ."""
    gains = {"He": 2.0, "LeCun": 1.0, "PyTorch's default": 1 / 3}
    linear = [one for one in start.parameters if one.kind == "linear" and one.scale > 0 and one.entries >= LEAST]
    # small heads fit by chance: a scale known to 2% is needed to tell laws apart
    known = [one for one in linear if one.error < 0.02]
    clear = [one for one in known if max(one.fan_in, one.fan_out) >= 2 * min(one.fan_in, one.fan_out)]
    for name, gain in gains.items():
        right = [one for one in linear if one.fits(math.sqrt(gain / one.fan_in))]
        wrong = [
            one for one in clear if one.fits(math.sqrt(gain / one.fan_out))
            and name_law(one, start) in ("", "He by fan_out" if name == "He" else "")
        ]  # fmt: skip
        by_fan_out = [one for one in clear if one.fits(math.sqrt(gain / one.fan_out))]
        both = {one.fan_in > one.fan_out for one in clear} == {True, False}
        whole = both and len(clear) >= FANS and len(by_fan_out) == len(clear)
        if whole:
            wrong, right = by_fan_out, []  # all of them, wide ones and narrow ones: one law, by the other fan
        if wrong and (whole or len(right) >= (len(wrong) if name == "He" else 1)):
            one = wrong[0]
            yield make_finding(
                "fans_exchanged", "low", one,
                expected=f"{math.sqrt(gain / one.fan_in):.3g} by its fan_in of {one.fan_in} ({name})"
                + (f", as {len(right)} others have" if right else ""),
                found=f"{one.scale:.3g}, which is {name} by its fan_out of {one.fan_out}",
                why=f"{_name(wrong)} has the scale of its transpose: {one.scale:.3g} belongs to a fan_in of "
                f"{one.fan_out}, and its fan_in is {one.fan_in}, so its outputs are {one.fan_in / one.fan_out:.3g} "
                "times as large (variance) as the law means.",
                remedies=("a linear layer holds its weight as (outputs, inputs): draw it with mode='fan_in'",),
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
            yield make_finding(
                "norm_weight", "medium" if far else "low", one, expected="1", found=f"{one.scale:.4g}",
                why=f"The scale of the norm {one.layer!r} has a root mean square of {one.scale:.4g} where 1 is usual: "
                f"what leaves it is {one.scale**2:.3g} times as large (mean square), "
                f"{'one' if len(odd) == 1 else len(odd)} of {len(norms)} norms at this place.",
                remedies=(f"{_mend(one)}, unless that is meant",),
                evidence={"scale": one.scale, "parameters": len(odd)},
            )  # fmt: skip


def find_biases(start: Start) -> Iterator[Finding]:
    """Biases, and shifts of norms, that are a large part of what their layer gives out."""
    by_layer = {one.layer: one for one in start.parameters if one.kind in ("linear", "convolution", "norm weight")}
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
        if worst is not None:
            # where all siblings have it, it is meant: Mamba's step sizes are biases of 5
            alone = len(shares) == 1 or median_low(shares) < THRESHOLDS.drowned
            if worst.kind == "norm bias" and not alone:
                continue  # shifts of all norms are a choice that theory makes too (`tune_batchnorm`)
            yield make_finding(
                "large_bias", "medium" if most > 0.9 and alone else "low", worst,
                expected="0, or PyTorch's 1/√fan_in at most" if worst.kind == "bias" else "0",
                found=f"a root mean square of {worst.scale:.3g}",
                why=f"For inputs of size one, {most:.0%} of the mean square that {worst.layer!r} gives out is its bias "
                f"({worst.scale:.3g}): it is the same for every sample, so samples look more alike behind it.",
                remedies=(f"{_mend(worst)}, unless it encodes something (class frequencies, gates)",),
                evidence={"share": most, "bias": worst.scale},
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
            if one.kind in ("linear", "embedding", "convolution") and one.scale > 0 and one.entries >= 256
            and min(abs(math.log(one.scale / value)) for value in asked) > SURE * one.error + 0.15
        ]  # fmt: skip
        if off:
            one = off[0]
            named = name_law(one, start)
            yield make_finding(
                "config_law", "low", one, expected=f"{scale:.3g}, the configuration's", found=f"{one.scale:.3g}"
                + (f" ({named})" if named else ""),
                why=f"The configuration asks for a standard deviation of {scale:.3g}; {_name(off)} has {one.scale:.3g}"
                + (f", which is {named}." if named else "."),
                remedies=("look whether the library's initialization reaches this layer",),
                evidence={"configured": scale, "standard_deviation": one.scale, "parameters": len(off)},
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
    find_own_law, find_norm_weights, find_biases, find_config_law,
)  # fmt: skip
