"""Cures for what the audit of the start names: weights drawn anew, copies told apart, biases and norms put back."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import median_low

import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.probe.records import FindingKind
from sounding.probe.state import unwrap
from sounding.probe.thresholds import THRESHOLDS
from sounding.reader.redraw import draw
from sounding.repair.changes import Change, Untouched
from sounding.repair.cure import Steps, cure
from sounding.repair.layers import FROZEN, NameFilter, left_out, rms, sort_out
from sounding.start.findings import find_all, find_copies, off_laws
from sounding.start.laws import configured_scale, known_laws, name_law
from sounding.start.parameters import WEIGHTS, Parameter, Start, take_stock
from sounding.theory.signal.description import Law

# which findings of the audit each cure mends
MENDS: dict[str, tuple[FindingKind, ...]] = {
    "redraw": ("parameter_not_finite", "never_written", "constant_weight", "odd_scale", "fans_exchanged"),
    "unclone": ("cloned_weights",),
    "zero_biases": ("large_bias", "parameter_not_finite", "never_written"),
    "reset_norms": ("norm_weight", "large_bias", "parameter_not_finite", "never_written"),
    "scale_embeddings": ("odd_scale",),
}
CONFIGURED = "the configuration's"  # the name of its law among the known ones
DEPTH_LAWS = ("√(2L)", "√L", "DeepNorm")  # how the names of laws end that shrink with the depth of the network
Mend = Callable[[nn.Module, Parameter, Start], str]


@cure
def redraw_(
    model: nn.Module,
    *,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Steps:
    """Draw weights anew by the law of their siblings, or of their kind where siblings do not tell.

    The law of siblings is that of the one in the middle by scale, of those that follow a known law at all. The law of a
    kind is the configuration's standard deviation, or the one that most others of the kind in this network follow; a
    network that has neither gets PyTorch's default.

    Args:
        include: layers to draw anew; by default those whose weights the audit names: not finite, never written,
            constant, of an odd scale, or with fans exchanged.
        exclude: layers to leave alone.
    """
    source = _generator(generator)

    def mend(_: nn.Module, one: Parameter, start: Start) -> str:
        law, origin = law_for(one, start)
        one.tensor.copy_(draw(_filled(model, one), law, generator=source))
        return f"rms {rms(one.tensor):.3g}, {origin}"

    return _mend("redraw", model, (*WEIGHTS, "vector"), mend, include, exclude)


@cure
def unclone_(
    model: nn.Module,
    *,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Steps:
    """Draw anew, each by its own law, every weight that starts as the copy of another; the first one stays.

    Args:
        include, exclude: name filters on the layers that hold copies.
    """
    root = unwrap(model)
    chosen, untouched = _allowed(root, [one for one, _ in find_copies(take_stock(root))], include, exclude)
    if not chosen:
        raise UsageError("expected weights that are copies of others, got none", hint="sounding.audit(model)")
    source = _generator(generator)
    for one in chosen:
        one.tensor.copy_(draw(one.tensor, replace(one.law, mean=0.0), generator=source))
        yield Change(one.name, "weight", "a copy", f"rms {rms(one.tensor):.3g}, a draw of its own")
    yield from untouched


@cure
def zero_biases_(model: nn.Module, *, include: NameFilter = None, exclude: NameFilter = None) -> Steps:
    """Set biases to zero.

    Args:
        include: layers whose biases become zero, "*" for all; by default those whose bias the audit names, because it
            drowns what the layer is given or is not finite.
        exclude: layers to leave alone, such as gates and an output that starts at the classes' frequencies.
    """

    def mend(_: nn.Module, one: Parameter, __: Start) -> str:
        one.tensor.zero_()
        return "0"

    return _mend("zero_biases", model, ("bias",), mend, include, exclude)


@cure
def reset_norms_(model: nn.Module, *, include: NameFilter = None, exclude: NameFilter = None) -> Steps:
    """Set scales of norms to one and their shifts to zero; a norm that multiplies by 1 + weight gets a weight of zero.

    Args:
        include: norms to reset, "*" for all; by default those whose scale or shift the audit names.
        exclude: norms to leave alone.
    """

    def mend(module: nn.Module, one: Parameter, _: Start) -> str:
        value = 0.0 if one.kind == "norm bias" or _adds_one(module) else 1.0
        one.tensor.fill_(value)
        return f"{value:g}"

    return _mend("reset_norms", model, ("norm weight", "norm bias"), mend, include, exclude)


@cure
def scale_embeddings_(
    model: nn.Module, *, std: float | None = None, include: NameFilter = None, exclude: NameFilter = None
) -> Steps:
    """Multiply embeddings so that their standard deviation is the usual one of their place.

    Usual is what the configuration says; else 1/√width where the embedding is also the output, so that logits behind a
    norm are of the order of 1, and where it is not, the known law that is closest.

    Args:
        std: the standard deviation to give them instead.
        include: embeddings to scale; by default those whose scale the audit names.
        exclude: embeddings to leave alone.
    """
    if std is not None and not (math.isfinite(std) and std > 0):
        raise UsageError(f"expected a positive standard deviation, got {std}", hint="0.02")

    def mend(_: nn.Module, one: Parameter, start: Start) -> str:
        usual = std if std is not None else _usual_embedding(one, start)
        one.tensor.mul_(usual / one.scale)
        return f"rms {usual:.3g}"

    return _mend("scale_embeddings", model, ("embedding",), mend, include, exclude)


def law_for(one: Parameter, start: Start) -> tuple[Law, str]:
    """The law that a weight should be drawn by, and where it comes from in words."""
    siblings = [
        other
        for other in start.siblings(one)
        # a sibling that no law fits has the same fault
        if other.finite
        and not other.constant
        and other.tensor.shape == one.tensor.shape
        and not is_lawless(other, start)
    ]
    if siblings and one.kind != "vector":
        middle = median_low([other.scale for other in siblings])  # a value that one of them has
        model = next(other for other in siblings if other.scale == middle)
        if not (one.finite and one.fits(middle)):  # siblings with the very same scale share the fault
            law = model.law if model.law.shape != "other" else Law(model.law.second_moment)
            return replace(law, mean=0.0, variance=law.second_moment), f"the law of {model.name}"
    if one.kind == "vector":
        return Law(0.02**2), "0.02"  # a vector has no fan to scale by; as transformers draw theirs
    if one.kind == "embedding":
        return Law(_usual_embedding(one, start) ** 2), "the usual law of an embedding"
    laws = known_laws(one, start)
    names = Counter(
        name
        for other in start.parameters
        if other.kind == one.kind and other.group != one.group and (name := name_law(other, start)) in laws
        and not name.endswith(DEPTH_LAWS)  # which are for the ends of branches alone
    )  # fmt: skip
    common = names.most_common(1)[0][0] if names else "PyTorch's default"
    usual = CONFIGURED if CONFIGURED in laws else common
    # as the initializers of that name draw
    shape = "uniform" if usual in ("PyTorch's default", "Xavier") else "gaussian"
    return Law(laws[usual] ** 2, shape=shape), usual


def is_lawless(one: Parameter, start: Start) -> bool:
    """Whether the scale of a drawn weight is far from every known law of its kind."""
    return one.kind in WEIGHTS and one.scale > 0 and off_laws(one, start) >= THRESHOLDS.odd_scale


def _usual_embedding(one: Parameter, start: Start) -> float:
    asked = configured_scale(start.config)
    if asked is not None:
        return asked
    laws = known_laws(one, start)
    if one.head or not one.finite or one.scale == 0:
        return laws["1/√width"]
    return min(laws.values(), key=lambda scale: abs(math.log(one.scale / scale)))  # scales are compared as ratios


def _mend(
    method: str, model: nn.Module, kinds: tuple[str, ...], mend: Mend, include: NameFilter, exclude: NameFilter
) -> Steps:
    """Mend the parameters that a filter takes or else those that the audit names, until it names no more."""
    root = unwrap(model)
    modules = dict(root.named_modules())
    changed: set[str] = set()
    untouched: dict[str, Untouched] = {}
    while True:  # what is mended may let the audit see what it hid
        start = take_stock(root)
        told = {finding.parameter for finding in find_all(start) if finding.kind in MENDS[method]}
        # the audit names one parameter for all siblings that no law fits
        places = {one.group for one in start.parameters if one.name in told and is_lawless(one, start)}
        told |= {one.name for one in start.parameters if one.group in places and is_lawless(one, start)}
        wanted = [
            one for one in start.parameters
            if one.kind in kinds and one.name not in changed and (include is not None or one.name in told)
            and not (method == "redraw" and one.kind == "embedding" and one.finite and not one.constant)
        ]  # fmt: skip
        chosen, left = _allowed(root, wanted, include, exclude)
        untouched |= {one.name: one for one in left}
        for one in chosen:
            before = f"rms {one.scale:.3g}" if one.finite else "not finite"
            yield Change(one.name, one.kind, before, mend(modules[one.layer], one, start))
        changed.update(one.name for one in chosen)
        if include is not None or not chosen:
            break
    if not changed:
        why = next(iter(untouched.values()), None)
        raise UsageError(
            f"{method} finds nothing to mend: {'the audit names' if include is None else 'the filter takes'} no "
            f"{' or '.join(kinds)}" + (f" that may be changed ({why.name}: {why.reason})" if why else ""),
            hint="include='*', which takes them all" if include is None else "another name filter",
        )
    yield from untouched.values()


def _allowed(
    root: nn.Module, wanted: list[Parameter], include: NameFilter, exclude: NameFilter
) -> tuple[list[Parameter], list[Untouched]]:
    """The parameters whose values may be set, and the others with the reason."""
    modules, held = dict(root.named_modules()), dict(root.named_parameters())

    def why(name: str, one: Parameter) -> str | None:
        filtered = left_out(one.layer, modules.get(one.layer, root), include, exclude)
        if filtered is not None:
            return filtered
        if name not in held or one.layer not in modules:
            return "it is computed by a parametrization, or held by a wrapper"
        return None if held[name].requires_grad else FROZEN

    chosen, untouched = sort_out([(one.name, one) for one in wanted], why)
    return [one for _, one in chosen], untouched


def _filled(model: nn.Module, one: Parameter) -> Tensor:
    """Ones in the shape of a weight, with zeros where an embedding keeps its padding."""
    ones = torch.ones_like(one.tensor)
    padding = getattr(dict(unwrap(model).named_modules()).get(one.layer), "padding_idx", None)
    if isinstance(padding, int):
        ones[padding] = 0
    return ones


def _adds_one(module: nn.Module) -> bool:
    """Whether a norm multiplies by 1 + weight: with a weight of zero it still lets something pass."""
    trial = copy.deepcopy(module).eval()
    with torch.no_grad():
        for parameter in trial.parameters():
            parameter.zero_()
        width = next(trial.parameters()).numel()
        some = torch.linspace(-1.0, 1.0, 2 * width).view(2, width).to(next(trial.parameters()))
        try:
            return bool(trial(some).any())
        except Exception:  # it wants more axes, as norms of images do; those multiply by their weight
            return False


def _generator(generator: torch.Generator | None) -> torch.Generator:
    """The generator given, or one on the processor, where laws are drawn, that is seeded by it or by torch's own."""
    if generator is not None and generator.device.type == "cpu":
        return generator
    device = "cpu" if generator is None else generator.device
    return torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator, device=device).item()))
