"""From the calls of passes to the records of a network, and to the list of what was not measured."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.probe.calls import ROOT, OpenCall, Pass, Spec, named_parameters
from sounding.probe.growth import Growth, can_fit, fit_growth
from sounding.probe.moments import FAST, FULL, Tier
from sounding.probe.reading import INPUT, NETWORK, LayerCall, Reading, WeightGradient
from sounding.probe.records import Unmeasured
from sounding.profile import Estimate

Parameters = Sequence[tuple[str, nn.Parameter]]
ORDER = (*FAST, *FULL)
SHARED = frozenset({*FAST, *FULL, "token_participation_ratio", "non_finite_fraction"})
WEIGHT_UNIT = "one call of a module that multiplies by a weight (linear, convolution, attention, recurrent)"
LEAF_UNIT = "one call of a leaf module: fewer than 3 modules multiply by a weight"
LOST = "none came back to its output, which is unused, detached, or a view changed in place"


def collect(
    passes: Sequence[Pass],
    parameters: Parameters,
    *,
    specs: Sequence[Spec],
    tier: Tier,
    source: str,
    settings: Mapping[str, Any],
) -> Reading:
    """The records of some passes over a model with these parameters and modules."""
    for one in passes:
        one.moments.reduce()
    found = _by_name(passes)
    weights = _weight_norms(passes, parameters, {name: index for index, name in enumerate(found, start=1)})
    layers = [_record(depth, calls, weights.get(depth, ())) for depth, calls in enumerate(found.values(), start=1)]
    chosen, curves, unit = _fitted(passes, found)
    growth = fit_growth(curves, [(call.spec.kind, call.shape) for call in chosen]) if curves else None
    own = _settings(passes, parameters, growth, unit, tier)
    idle = [spec.name for spec in _never_called(passes, specs) if spec.weighs]
    if idle:
        own["never_called"] = idle
    arrived = [{} if one.input_gradient is None else {"gradient_log_norm": one.input_gradient} for one in passes]
    values, errors = _means([one.input | gradient for one, gradient in zip(passes, arrived, strict=True)])
    width = next((one.input_features for one in passes if one.input_features), 0)
    network: dict[str, Estimate] = {}
    if growth is not None:
        network["gradient_growth"] = Estimate(growth.growth, growth.growth_stderr)
        network["gradient_log_rate"] = Estimate(growth.log_rate, growth.log_rate_stderr)
    aligned = [one.alignment for one in passes if isinstance(one.alignment, float)]
    if aligned:
        network["gradient_alignment"] = Estimate(*_mean(aligned))
    given = LayerCall(0, INPUT, values, errors=errors, features=width)
    return Reading(given, tuple(layers), network, {**own, **settings}, source=source)


def merge_order(passes: Sequence[Pass]) -> list[str]:
    """The names of all calls in execution order; what only a later pass called stands after what it followed there."""
    order: list[str] = []
    seen: set[str] = set()
    for one in passes:
        if [call.name for call in one.calls] == order:
            continue
        place = 0
        for call in one.calls:
            if call.name in seen:
                place = order.index(call.name) + 1
                continue
            order.insert(place, call.name)
            seen.add(call.name)
            place += 1
    return order


def _fitted(
    passes: Sequence[Pass], found: Mapping[str, Sequence[OpenCall]]
) -> tuple[list[OpenCall], list[list[float]], str]:
    """The layers that a growth is fitted over, ln‖gradient‖ there in the passes that have any, and what they are.

    Weight layers; leaf calls where there are too few of those; none where there are too few of either.
    """
    firsts = [calls[0] for calls in found.values()]
    for unit, chosen in (
        (WEIGHT_UNIT, [call for call in firsts if call.spec.weighs]),
        (LEAF_UNIT, [call for call in firsts if call.spec.leaf and call.same_as is None]),
    ):
        if len(chosen) >= 3:
            tables = [
                {call.name: norm for call in one.calls if (norm := _gradient(call)) is not None} for one in passes
            ]
            curves = [[table.get(call.name, math.nan) for call in chosen] for table in tables]
            return chosen, [curve for curve in curves if any(map(math.isfinite, curve))], unit
    return [], [], WEIGHT_UNIT


def list_unmeasured(passes: Sequence[Pass], root: nn.Module, specs: Sequence[Spec]) -> tuple[Unmeasured, ...]:
    """What a pass could not measure, each with its reason; the same reason once."""
    for one in passes:
        one.moments.reduce()
    found = [
        *(gap for one in passes for gap in _gaps(one)),
        *((spec.name, "it was never called in the forward pass") for spec in _never_called(passes, specs)),
        *_weight_gaps(passes, root, specs),
    ]
    _, curves, _ = _fitted(passes, _by_name(passes))
    if passes and not (curves and can_fit(curves)):
        found.append((NETWORK, "gradient growth needs finite gradients at 3 or more layers in a row"))
    return tuple(Unmeasured(name, reason) for name, reason in dict.fromkeys(found))


def _gaps(one: Pass) -> Iterator[tuple[str, str]]:
    """What of a pass was not measured: the name, and the reason in words."""
    if one.input_reason is not None:
        yield INPUT, one.input_reason.replace("its output", "the input")
    backward = any(call.gradient is not None for call in one.calls)
    for call in one.calls:
        if not call.spec.shown:
            continue
        if isinstance(call.spec.module, torch.jit.ScriptModule):
            yield call.name, "it is scripted: modules inside it do not run in Python and are measured as one"
        if call.reason is not None:
            yield call.name, call.reason
        if call.extras:
            yield call.name, f"it returns more than one tensor: measured without {', '.join(call.extras)}"
        gradient = _gradient(call)
        for note in call.notes:
            yield call.name, note
        told = any(note.startswith("gradient") for note in call.notes)
        if gradient is None and call.reason is None and backward and not told:
            yield call.name, f"gradient: {LOST if call.hooked else 'its output does not ask for a gradient'}"
    if not isinstance(one.alignment, float) and one.calls:
        weighs = any(call.spec.weighs for call in one.calls)
        absent = "no gradient came back to the last weight layer" if weighs else "no layer multiplies by a weight"
        yield NETWORK, f"gradient alignment: {one.alignment or absent}"
    if not backward and one.calls:
        yield NETWORK, "gradients: no backward pass reached a measured output"


def _never_called(passes: Sequence[Pass], specs: Sequence[Spec]) -> Iterator[Spec]:
    called = {call.spec.name for one in passes for call in one.calls} | {name for one in passes for name in one.entered}
    attention = any(spec.name == ROOT and isinstance(spec.module, nn.MultiheadAttention) for spec in specs)
    whole = called if attention else called - {ROOT}  # attention multiplies by its child's weight without calling it
    for spec in specs:
        if spec.shown and spec.name not in called and owner_of(spec.name, whole) is None:
            yield spec


def _weight_gaps(passes: Sequence[Pass], root: nn.Module, specs: Sequence[Spec]) -> Iterator[tuple[str, str]]:
    """The parameters without a measured gradient, each with the reason in words."""
    hidden = {spec.name for spec in specs if not spec.shown}
    measured = {name for one in passes for name in one.weights}
    split = {name for one in passes for name in one.split}
    gaps = {name: reason for one in passes for name, reason in one.gaps.items()}
    backward = any(call.gradient is not None for one in passes for call in one.calls)
    for name, parameter in named_parameters(root):
        if name in measured or owner_of(name, hidden) is not None:
            continue
        if name in gaps:
            yield name, gaps[name]
        elif name in split:
            yield name, "weight gradient: it came in parts (a shared reentrant checkpoint, or two backward passes)"
        elif not parameter.requires_grad:
            yield name, "weight gradient: it is frozen (requires_grad=False)"
        elif backward:
            yield name, "weight gradient: the loss does not depend on it"


def owner_of(name: str, candidates: Container[str]) -> str | None:
    """The nearest module around a parameter or a module, among the candidates."""
    outer = name.rpartition(".")[0]
    while outer:
        if outer in candidates:
            return outer
        outer = outer.rpartition(".")[0]
    return ROOT if ROOT in candidates else None


def _by_name(passes: Sequence[Pass]) -> dict[str, list[OpenCall]]:
    """The calls of all passes that are one row of the profile, in execution order."""
    found: dict[str, list[OpenCall]] = {name: [] for name in merge_order(passes)}
    for one in passes:
        for call in one.calls:
            found[call.name].append(call)
    return found


def _values(call: OpenCall) -> dict[str, float]:
    source = call.same_as
    values = {k: v for k, v in source.values.items() if k in SHARED} if source is not None else dict(call.values)
    if next(iter(values), None) not in (None, FAST[0]):  # what the hook counted came before what the block reduced
        values = {name: values[name] for name in (*ORDER, *values) if name in values}
    gradient = _gradient(call)
    if gradient is not None:
        values["gradient_log_norm"] = gradient
    return values


def _gradient(call: OpenCall) -> float | None:
    return call.gradient if call.same_as is None else call.same_as.gradient


def _record(depth: int, calls: Sequence[OpenCall], weights: Sequence[WeightGradient]) -> LayerCall:
    """The record of one call of a model, from that call in every pass; a hidden one holds no numbers."""
    first, spec = calls[0], calls[0].spec
    values, errors = _means([_values(call) for call in calls]) if spec.shown else ({}, {})
    return LayerCall(
        depth,
        first.name,
        values,
        spec.kind,
        errors,
        weights if spec.shown else (),
        first.shape,
        first.features,
        first.positions,
        spec.weighs,
    )


def _means(found: Sequence[dict[str, float]]) -> tuple[dict[str, float], dict[str, float | None]]:
    """Measures averaged over passes, and their standard errors where there are several passes."""
    if len(found) == 1:
        return found[0], {}
    means: dict[str, float] = {}
    errors: dict[str, float | None] = {}
    for measure in dict.fromkeys(key for values in found for key in values):
        means[measure], errors[measure] = _mean([values[measure] for values in found if measure in values])
    return means, errors


def _mean(column: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error over repeats; an infinite value stays what it is."""
    if len(column) == 1 or len(set(column)) == 1:
        return column[0], None if len(column) == 1 else 0.0
    if not all(math.isfinite(value) for value in column):
        return float(np.mean(column)) if not any(math.isnan(v) for v in column) else math.nan, None
    return float(np.mean(column)), float(np.std(column, ddof=1)) / math.sqrt(len(column))


def _weight_norms(
    passes: Sequence[Pass], parameters: Parameters, places: Mapping[str, int]
) -> dict[int, list[WeightGradient]]:
    """Weight gradients, at the layer of the last call of the module that holds the weight.

    The first of a layer speaks for it: a matrix before a bias, and one with a gradient before one whose gradient is
    exactly zero, as beside a factor that starts at zero (LoRA).
    """
    layers: dict[str, int] = {}
    for one in passes:
        for call in one.calls:
            layers[call.spec.name] = max(layers.get(call.spec.name, 0), places[call.name])
        for name, index in one.entered.items():
            layers[name] = places[one.calls[index].name]
    norms: dict[int, list[WeightGradient]] = {}
    owners = set(layers)
    vectors = {name for name, weight in parameters if weight.dim() < 2}
    for name, _ in parameters:
        column = [one.weights[name] for one in passes if name in one.weights]
        owner = owner_of(name, owners) if column else None
        if owner is not None:
            norms.setdefault(layers[owner], []).append(WeightGradient(name, *_mean(column)))
    for found in norms.values():
        if len(found) > 1:
            found.sort(key=lambda weight: (weight.name in vectors, weight.value == -math.inf))
    return norms


def _settings(
    passes: Sequence[Pass], parameters: Parameters, growth: Growth | None, unit: str, tier: Tier
) -> dict[str, Any]:
    """The settings of a profile: batch, mode, size of the model, and the fit of the growth."""
    batch_size = next((one.batch_size for one in passes if one.batch_size is not None), None)
    inner = next((one.samples for one in passes if one.samples), batch_size)
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "samples": inner,
        "repeats": len(passes),
        "mode": "train" if passes and passes[0].training else "eval",
        "tier": tier,
        "shortest_depth": next((one.shortest for one in passes if one.shortest is not None), None),
        "parameters": sum(parameter.numel() for _, parameter in parameters),
        "layer_unit": unit,
        "partial": False,
    }
    if growth is not None:
        settings["growth_interval"] = list(growth.interval)
        settings["growth_depth"] = growth.depth
        settings["growth_degrees_of_freedom"] = growth.degrees
        settings["growth_grouped"] = growth.grouped
    return settings
