"""A measured profile as the verdict reads it: one record per module call, in execution order."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sounding.profile import Estimate, Profile, Row

INPUT = "input"
NETWORK = "network"
WEIGHT_GRADIENT = "weight_gradient_log_norm"
NETWORK_MEASURES = frozenset({"gradient_growth", "gradient_log_rate", "gradient_alignment", "trainable_depth"})
PREDICTED = frozenset({"theory", "redraw"})  # sources that say what such networks do, not what this one did
WEIGHT_KINDS = ("Linear", "Conv", "Bilinear", "Attention", "LSTM", "GRU", "RNN")
NORM_KINDS = ("BatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "RMSNorm", "LocalResponseNorm")


@dataclass(frozen=True)
class Call:
    """One call of a leaf module.

    Args:
        depth: its place in execution order, from 1; 0 is the input.
        name: the module's full name.
        kind: the class of the module, "" when the profile does not say.
        values: measure → value.
        features: the width of its sample matrix, 0 when the profile does not say.
        positions: how many places of a sample share one unit (pixels, tokens).
    """

    depth: int
    name: str
    kind: str
    values: Mapping[str, float]
    features: int = 0
    positions: int = 1

    def get(self, measure: str) -> float:
        """The value, NaN when it was not measured."""
        return self.values.get(measure, math.nan)

    @property
    def weighs(self) -> bool:
        """Whether the call multiplies by weights, so that it counts as one layer of depth."""
        return any(kind in self.kind for kind in WEIGHT_KINDS)

    @property
    def normalizes(self) -> bool:
        """Whether the call is a normalization."""
        return any(kind in self.kind for kind in NORM_KINDS)


@dataclass(frozen=True)
class Reading:
    """What the findings are drawn from.

    Args:
        input: the measures of the input batch (depth 0).
        calls: every leaf call, in execution order.
        network: the network-wide estimates (growth, alignment).
        predicted: the same from theory, where theory was laid beside the measurement.
        settings: the settings of the profile.
    """

    input: Call
    calls: tuple[Call, ...]
    network: Mapping[str, Estimate]
    predicted: Mapping[str, Estimate]
    settings: Mapping[str, Any]

    @property
    def samples(self) -> int:
        """The number of samples in the batch, 0 when the profile does not say."""
        return int(self.settings.get("samples") or self.settings.get("batch_size") or 0)

    @property
    def weight_layers(self) -> tuple[Call, ...]:
        """The calls that count as depth: those the check names, else by kind, else (no kind known) every call."""
        named = self.settings.get("weight_layers")
        if named is not None:
            chosen = frozenset(named)
            return tuple(call for call in self.calls if call.depth in chosen)
        weighing = tuple(call for call in self.calls if call.weighs)
        return weighing or (() if any(call.kind for call in self.calls) else self.calls)

    @property
    def depth(self) -> int:
        """How many weight layers the network has, those that a filter hides included."""
        named = self.settings.get("weight_layers")
        return len(named) if named is not None else len(self.weight_layers)

    @property
    def has_shortcuts(self) -> bool:
        """Whether some way through the network passes fewer than half of its weight layers."""
        shortest = self.settings.get("shortest_depth")
        return shortest is not None and bool(shortest < self.depth / 2)

    def order(self, call: Call) -> int:
        """Which weight layer, counted from 1, the call belongs to."""
        named = self.settings.get("weight_layers")
        depths = named if named is not None else [layer.depth for layer in self.weight_layers]
        return bisect_right(sorted(depths), call.depth)


def read(profile: Profile) -> Reading:
    """Group the measured rows of a profile by call; rows from theory are left out."""
    kinds = profile.settings.get("kinds", {})
    features, positions = profile.settings.get("features", {}), profile.settings.get("positions", {})
    values: dict[int, dict[str, float]] = {}
    names: dict[int, str] = {}
    network: dict[str, Estimate] = {}
    predicted: dict[str, Estimate] = {}
    for layer, name, measure, value, stderr, source in profile.rows:
        if name == NETWORK and measure in NETWORK_MEASURES:
            (predicted if source in PREDICTED else network)[measure] = Estimate(value, stderr)
            continue
        if source in PREDICTED:
            continue
        cells = values.get(layer)
        if cells is None:
            cells = values[layer] = {}
        if measure == WEIGHT_GRADIENT:
            # A call may own several parameters; the one that speaks for the layer is listed first.
            cells.setdefault(measure, value)
            continue
        if layer not in names:
            names[layer] = name
        cells[measure] = value
    calls = [
        Call(
            depth,
            names.get(depth, ""),
            str(kinds.get(str(depth), "")),
            values[depth],
            int(features.get(str(depth), 0)),
            int(positions.get(str(depth), 1)),
        )
        for depth in sorted(values)
    ]
    first = next((call for call in calls if call.depth == 0), Call(0, INPUT, "", {}))
    return Reading(first, tuple(call for call in calls if call.depth > 0), network, predicted, profile.settings)


def count_in_band(profile: Profile) -> tuple[int, int]:
    """How many measured numbers lie in the 95% band of their prediction, and how many have one."""
    measured = {(row.name, row.measure): row.value for row in profile.rows if row.source not in PREDICTED}
    banded = [row for row in profile.rows if row.source in PREDICTED and row.stderr]
    banded = [row for row in banded if (row.name, row.measure) in measured]
    inside = sum(abs(measured[row.name, row.measure] - row.value) <= 2 * (row.stderr or 0.0) for row in banded)
    return inside, len(banded)


def add_theory(reading: Reading, rows: Iterable[Row], settings: Mapping[str, Any]) -> Reading:
    """The reading of a profile that got rows of theory and settings in addition."""
    found = {row.measure: Estimate(row.value, row.stderr) for row in rows if row.measure in NETWORK_MEASURES}
    return replace(reading, predicted={**reading.predicted, **found}, settings=settings)
