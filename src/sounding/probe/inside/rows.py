"""From what was seen between modules to places in the table and rows of the profile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from torch import nn

from sounding.probe.calls import ROOT, OpenCall, Pass
from sounding.probe.inside.attention import MEASURES, Attention
from sounding.probe.inside.gates import MEASURES as GATE_MEASURES
from sounding.probe.inside.gates import Gates
from sounding.probe.inside.listen import Inside
from sounding.probe.inside.oddities import Note
from sounding.probe.inside.precision import MEASURES as RANGE_MEASURES
from sounding.probe.inside.precision import own_headroom, sizes_of
from sounding.probe.inside.router import MEASURES as ROUTER_MEASURES
from sounding.probe.inside.router import Router
from sounding.probe.inside.stream import MEASURES as STREAM_MEASURES
from sounding.probe.inside.stream import Addition
from sounding.probe.late import read_back
from sounding.probe.table import merge_order
from sounding.probe.thresholds import THRESHOLDS
from sounding.profile import Row

Kind = TypeVar("Kind")
GRADIENTS = tuple(f"{name}_gradient_log_norm" for name in ("query", "key", "value"))
HEADS = tuple(f"head_{name}" for name in MEASURES)
SAME = 0.01  # up to which a side input is no larger than the main one, of which another rule speaks
INSIDE = frozenset({*MEASURES, *HEADS, *GRADIENTS, *STREAM_MEASURES, *GATE_MEASURES, *ROUTER_MEASURES, *RANGE_MEASURES})


@dataclass(frozen=True)
class Seen:
    """Something between modules at its place.

    Args:
        layer: the place in execution order of the call it belongs to.
        name: the module that attends, recurs or routes, or the last layer of the branch that is added.
        values: measure → value.
        heads: measure → value of each head, for attention.
        about: what it is: an attention, a residual addition, the gates of a recurrent layer, a router, a block that
            differs from its siblings, or a note; None for the range of a call's numbers.
    """

    layer: int
    name: str
    values: Mapping[str, float]
    heads: Mapping[str, Sequence[float]] = field(default_factory=dict)
    about: object = None


def of_kind(seen: Sequence[Seen], kind: type[Kind]) -> Iterator[tuple[Seen, Kind]]:
    """Everything of a kind, each with what it is about."""
    yield from ((one, one.about) for one in seen if isinstance(one.about, kind))


def see(one: Pass, inside: Inside, places: Mapping[str, int]) -> list[Seen]:
    """All that was seen in a pass, in execution order."""
    read_back([attention.gradients for attention in inside.attentions])
    calls = one.calls
    found = [_see_attention(calls, attention, places) for attention in inside.attentions]
    found += [_see_addition(calls, addition, places) for addition in inside.additions]
    found += [_see_gates(calls, gates, places) for gates in inside.gates]
    found += [_see_router(calls, router, places) for router in inside.routers]
    sizes = sizes_of(inside.ranges, [_weights(calls[sizes.at]) for sizes in inside.ranges])
    for span, found_sizes in zip(inside.ranges, sizes, strict=True):
        name = calls[span.at].name
        found.append(Seen(places[name], name, found_sizes | own_headroom(found_sizes, span.kind)))
    by_hand = inside.written.measures()
    for name, values in by_hand.items():
        found.append(Seen(places.get(name, 0), name, values | _rate_through_time(calls, name), about=inside.written))
    largest = max(THRESHOLDS.huge_input**2, (1 + SAME) * one.input.get("mean_square", 0.0))
    sides = ((at, f"{math.sqrt(size):.3g}") for at, size in inside.given.items() if size > largest)
    notes = [*inside.oddities.told(), *(Note(at, "huge_side_input", (size,)) for at, size in sides)]
    names = [call.name for call in calls]
    for note in dict.fromkeys(notes) if names else ():
        if note.key != "shut_gate" or not by_hand:  # the gates of a loop are known by their roles: a reset may be shut
            # a call is noted before it ends, and what comes behind the last one belongs to it
            ends = [
                names[max(min(it, len(names) - 1), 0)] if isinstance(it, int) else it for it in (note.at, *note.words)
            ]
            found.append(Seen(places[ends[0]], ends[0], {}, about=note._replace(words=tuple(ends[1:]))))
    for odd in inside.trail.odd_blocks() if calls else ():
        found.append(Seen(places[calls[max(odd.at - 1, 0)].name], odd.block, {}, about=odd))
    return sorted(found, key=lambda seen: seen.layer)


def rows_of(passes: Sequence[tuple[Pass, Inside]], *, source: str) -> tuple[tuple[Row, ...], list[Seen]]:
    """The rows of all that was seen, means over passes with standard errors, and what the last pass saw."""
    order = merge_order([one for one, _ in passes])
    places = {name: index for index, name in enumerate(order, start=1)}
    cells: dict[tuple[int, str, str], list[float]] = {}
    seen: list[Seen] = []
    for one, inside in passes:
        seen = see(one, inside, places)
        for item in seen:
            for measure, value in item.values.items():
                cells.setdefault((item.layer, item.name, measure), []).append(value)
            for measure, values in item.heads.items():
                for head, value in enumerate(values):
                    cells.setdefault((item.layer, f"{item.name} head {head}", f"head_{measure}"), []).append(value)
    return tuple(Row(*key, *_mean(values), source) for key, values in cells.items()), seen


def _mean(values: list[float]) -> tuple[float, float | None]:
    if len(values) == 1:
        return values[0], None
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


def _see_attention(calls: Sequence[OpenCall], attention: Attention, places: Mapping[str, int]) -> Seen:
    measured = attention.heads.double().cpu().numpy()
    heads = {name: [float(value) for value in row] for name, row in zip(MEASURES, measured, strict=True)}
    known = {name: [value for value in row if math.isfinite(value)] for name, row in heads.items()}
    values = {name: max(row) if name == "score_max" else float(np.mean(row)) for name, row in known.items() if row}
    values |= {f"{name}_gradient_log_norm": norm for name, norm in attention.gradients.items()}
    call, name = _place(calls, attention.at)
    kept = {measure: row for measure, row in heads.items() if len(row) > 1 and known[measure] == row}
    return Seen(places.get(call.name, 0) if call else 0, name, values, kept, attention)


def _see_addition(calls: Sequence[OpenCall], addition: Addition, places: Mapping[str, int]) -> Seen:
    """Where a branch ends: at the last call before the sum that multiplies by a weight, or at the last call."""
    before = calls[: addition.at]
    last = next((call for call in reversed(before) if call.spec.weighs), before[-1] if before else None)
    name = last.name if last else ROOT
    return Seen(places.get(name, 0), name, addition.values(), about=addition)


def _see_gates(calls: Sequence[OpenCall], gates: Gates, places: Mapping[str, int]) -> Seen:
    call = calls[gates.at]
    stacked = getattr(call.spec.module, "num_layers", 1) > 1
    name = f"{call.name} layer {gates.layer}" if stacked else call.name
    name += " backward" * gates.backward
    values = {measure: float(value) for measure, value in gates.means.items()} | gates.rate
    return Seen(places[call.name], name, values, about=gates)


def _rate_through_time(calls: Sequence[OpenCall], name: str) -> dict[str, float]:
    """ln of the gradient's norm per step towards the start, over the calls of a module in a loop."""
    norms = [call.gradient for call in calls if call.name.partition("#")[0] == name]
    known = [(step, norm) for step, norm in enumerate(norms) if norm is not None and math.isfinite(norm)]
    if len(known) < 2:
        return {}
    (first, start), (last, end) = known[0], known[-1]
    return {"time_gradient_log_rate": (start - end) / (last - first)}


def _see_router(calls: Sequence[OpenCall], router: Router, places: Mapping[str, int]) -> Seen:
    call, name = (calls[router.at - 1], calls[router.at - 1].name) if router.at else (None, ROOT)
    return Seen(places[call.name] if call else 0, name, router.values(), about=router)


def _weights(call: OpenCall) -> list[nn.Parameter]:
    """What a call multiplies by and adds."""
    held = call.spec.module.parameters(recurse=False) if call.spec.weighs else ()
    return [weight for weight in held if weight.numel() and not weight.is_meta]


def _place(calls: Sequence[OpenCall], at: int) -> tuple[OpenCall | None, str]:
    """The call that an attention belongs to, and the module it happens in.

    A module that computes attention itself ends behind it. Otherwise attention lies between two calls (the projection
    of the values and that of the outputs), and the module that holds both is the one that attends.
    """
    before = calls[at - 1] if 0 < at <= len(calls) else None
    behind = calls[at] if at < len(calls) else None
    if behind is not None and _attends_itself(behind.spec.module):
        return behind, behind.name
    if before is None or behind is None:
        near = before or behind
        return near, (near.name.rpartition(".")[0] or near.name) if near is not None else ROOT
    paths = zip(before.name.split(".")[:-1], behind.name.split(".")[:-1], strict=False)
    shared = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], paths)]
    return before, ".".join(shared) or before.name


def _attends_itself(module: nn.Module) -> bool:
    """Whether a module holds attention in its own code: torch's attention, or a class of another library that holds the
    two matrices which attention takes at least, or none and says so by its name."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    if type(module).__module__.startswith("torch.nn"):
        return False
    matrices = sum(weight.dim() > 1 for weight in module.parameters(recurse=False))
    return matrices > 1 or (matrices == 0 and "attention" in type(module).__name__.lower())
