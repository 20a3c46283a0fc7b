"""Gradients that do not arrive: frozen, detached, unused or behind exact zeros, each told apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator, Sequence

from torch import nn

from sounding.probe.calls import Pass, named_modules, named_parameters
from sounding.probe.inside.storages import key_of
from sounding.probe.outputs import EMPTY
from sounding.probe.records import Finding, FindingKind, Severity
from sounding.probe.sentences import tell
from sounding.start.parameters import NUMBER

MOST = 0.5  # of the numbers in matrices that ask for a gradient: beyond it, training leaves out the network itself
PART = 0.25  # beyond it an encoder or a tower is left out; poolers and spare heads hold less
UNTRAINED = (
    " They are as a start has drawn them: what trains sees random features, and nobody has trained these before."
)


def find_arrivals(
    root: nn.Module,
    passes: Sequence[Pass],
    *,
    whole: bool,
    practice: Sequence[Finding] = (),
    zeros: Sequence[str] = (),
    untrained: bool = False,
    read: Container[int] | None = None,
) -> list[Finding]:
    """A finding for each reason why gradients do not arrive.

    Args:
        root: the network.
        passes: the passes of a check, with the weights that got a gradient.
        whole: whether the loss sees all that the network returned; else some outputs are left out by right.
        practice: findings that name zero-initialized outputs, which explain zero gradients behind them.
        zeros: parameters other than biases that are zero everywhere; where no practice explains zero gradients, those
            of them that get a gradient themselves do.
        untrained: whether what is frozen is as a start has drawn it, and only what stands behind it trains.
        read: the storages that operations have read, None where that is not known.
    """
    if not any(one.weights for one in passes):
        named = [(name, one) for name, one in named_parameters(root) if one.is_floating_point()]
        if named and passes and not any(one.requires_grad for _, one in named):
            return [_finding("frozen", "medium", named, 1.0, practice, zeros)]
        return []  # nothing came back at all, which the verdict says by itself
    lost: dict[FindingKind, list[tuple[str, nn.Parameter]]] = {}
    asked = 0
    modules = dict(named_modules(root))
    for name, parameter in named_parameters(root):
        if not parameter.is_floating_point():
            continue
        asked += _weight(parameter) if parameter.requires_grad else 0
        reason = _reason(name, parameter, passes, modules)
        # a module that ran has read its own; what the network itself holds may never have been read
        if reason == "detached" and "." not in name and read is not None and key_of(parameter) not in read:
            reason = "unused"
        if reason is not None:
            lost.setdefault(reason, []).append((name, parameter))
    frozen = {_place(name, modules) for name, _ in lost.get("frozen", ())}
    trained = {_place(name, modules) for name, parameter in named_parameters(root) if parameter.requires_grad}
    recorded = {call.spec.name for one in passes for call in one.calls if call.hooked}
    moving = [name for name in zeros if any(one.weights.get(name, -math.inf) > -math.inf for one in passes)]
    found = []
    for kind, parameters in _by_part(lost):
        share = sum(_weight(parameter) for _, parameter in parameters) / max(asked, 1)
        severity: Severity = "low"
        if kind == "frozen" and (frozen & trained or untrained):
            severity = "medium"
        elif kind == "detached" and share > MOST:
            # a layer that runs in no_grad says so itself; one that records its gradient in vain does not
            vain = any(name.rpartition(".")[0] in recorded for name, _ in parameters)
            severity = "high" if whole and vain else "medium"
        elif kind == "behind_zeros" and all(norm == -math.inf for one in passes for norm in one.weights.values()):
            severity = "high"  # not one parameter would move
        elif (kind == "detached" and whole and share > PART) or (
            kind == "behind_zeros" and not practice and not moving and share > MOST
        ):
            severity = "medium"
        more = UNTRAINED if kind == "frozen" and untrained else ""
        found.append(_finding(kind, severity, parameters, share, practice, moving or zeros, more))
    without = dict(lost.get("behind_zeros", ()))
    stuck = [name for name in zeros if name in without]
    if len(stuck) > 1 and not moving:
        evidence, layer = {"parameters": float(len(stuck))}, stuck[0].rpartition(".")[0]
        found.append(tell("stuck_zeros", layer=layer, parameter=stuck[0], evidence=evidence, others=len(stuck) - 1))
    return found


def _by_part(
    lost: dict[FindingKind, list[tuple[str, nn.Parameter]]],
) -> Iterator[tuple[FindingKind, list[tuple[str, nn.Parameter]]]]:
    """What is lost, kind by kind; what is not used by the parts of the network, where each has a reason of its own."""
    for kind, parameters in lost.items():
        parts: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in parameters:
            parts.setdefault(name.partition(".")[0] if kind == "unused" else "", []).append((name, parameter))
        yield from ((kind, members) for members in parts.values())


def _largest(parameters: list[tuple[str, nn.Parameter]]) -> str:
    """The first parameter of the part of the network that holds most of these numbers."""
    sizes = Counter[str]()
    for name, parameter in parameters:
        sizes[name.partition(".")[0]] += parameter.numel()
    ((most, _),) = sizes.most_common(1)
    return next(name for name, _ in parameters if name.partition(".")[0] == most)


def _place(name: str, modules: dict[str, nn.Module]) -> tuple[str, type]:
    """The place in a repeated structure: the name with its numbers left open, and the class of the module."""
    return NUMBER.sub("*", name), type(modules.get(name.rpartition(".")[0]))


def _weight(parameter: nn.Parameter) -> int:
    return parameter.numel() if parameter.dim() > 1 else 0  # biases and norms are few, and many places lack them


def _reason(
    name: str, parameter: nn.Parameter, passes: Sequence[Pass], modules: dict[str, nn.Module]
) -> FindingKind | None:
    """Why no gradient reached a parameter, as a kind of finding; None where one did or none was due."""
    if not parameter.requires_grad:
        return "frozen"
    norms = [one.weights[name] for one in passes if name in one.weights]
    if norms:
        return "behind_zeros" if all(norm == -math.inf for norm in norms) else None
    if any(name in one.gaps or name in one.split for one in passes):
        return None  # its gradient is elsewhere: in another process, or inside an optimizer's own buffer
    layer = name.rpartition(".")[0]
    ran = {call.spec.name for one in passes for call in one.calls} | {part for one in passes for part in one.entered}
    empty = {call.spec.name for one in passes for call in one.calls if (call.reason or "").startswith(EMPTY)}
    if any(f"{layer}.".startswith(f"{outer}.") for outer in empty):
        return "unused"  # sequences that are too short to be compressed, say, leave nothing for a loss to see
    above = layer.rpartition(".")[0]
    inside = isinstance(modules.get(above), nn.MultiheadAttention) and above in ran  # it multiplies by its child itself
    return "detached" if layer in ran or layer == "" or inside else "unused"


def _finding(
    kind: FindingKind,
    severity: Severity,
    parameters: list[tuple[str, nn.Parameter]],
    share: float,
    practice: Sequence[Finding],
    zeros: Sequence[str],
    more: str = "",
) -> Finding:
    """One finding about all parameters of a kind that no gradient reaches."""
    name, remedy = _largest(parameters), "look for weights of zero and dead units between it and the loss"
    if kind == "behind_zeros" and practice:
        more = f"; {practice[0].parameter} starts at zero, which is a practice and explains it for the first step"
    elif kind == "behind_zeros" and zeros:
        more = f"; {zeros[0]}{f' and {len(zeros) - 1} more' if len(zeros) > 1 else ''} start at zero everywhere"
        remedy = f"start {zeros[0]} at what its kind has: norms and scales at 1 or a small number, weights at random"
    return tell(
        kind, severity, layer=name.rpartition(".")[0], parameter=name, remedy=remedy, more=more,
        names=name if len(parameters) == 1 else f"{name} and {len(parameters) - 1} more parameters",
        evidence={"parameters": float(len(parameters)), "share": share},
    )  # fmt: skip
