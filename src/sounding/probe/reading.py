"""What was measured, call by call: the one record of a layer call, and all records of a network in execution order.

The hooks' measurements end here, the verdict judges these records, and the table, the report and JSON print them. A
`Profile` is the tidy table that is made from them for people and files.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from sounding.profile import Estimate, Profile, Row

INPUT = "input"
NETWORK = "network"
WEIGHT_GRADIENT = "weight_gradient_log_norm"
NETWORK_MEASURES = frozenset({"gradient_growth", "gradient_log_rate", "gradient_alignment", "trainable_depth"})
PREDICTED = frozenset({"theory", "redraw"})  # sources that say what such networks do, not what this one did
# How files from before the setting "weight_layers" tell which calls multiply by weights.
WEIGHT_KINDS = ("Linear", "Conv", "Bilinear", "Attention", "LSTM", "GRU", "RNN")


class WeightGradient(NamedTuple):
    """The log-norm of the loss's gradient with respect to one parameter of a call's module."""

    name: str
    value: float
    stderr: float | None


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a module, with what was measured of it: means over the passes."""

    depth: int  # its place in execution order, from 1; 0 is the input
    name: str  # the module's full name, with "#2" at its second call; "" when a file holds its weights' gradients alone
    values: Mapping[str, float]  # measure → value
    kind: str = ""  # the class of the module, "" when a file does not say
    # measure → standard error, where there were several passes
    errors: Mapping[str, float | None] = field(default_factory=dict)
    # the gradients of the parameters that belong to it; the first speaks for the layer
    weights: Sequence[WeightGradient] = ()
    shape: tuple[int, ...] = ()  # the shape of the module's output, () in what was read from a file
    features: int = 0  # the width of its sample matrix, 0 when nothing was measured or a file does not say
    positions: int = 1  # how many places of a sample share one unit (pixels, tokens)
    weighs: bool = False  # whether it multiplies by a weight, so that it counts as one layer of depth
    predicted: Sequence[Row] = ()  # what theory, or drawing all weights anew, says of this call

    def __contains__(self, measure: str) -> bool:
        return bool(self.weights) if measure == WEIGHT_GRADIENT else measure in self.values

    def get(self, measure: str) -> float:
        """The value, NaN when it was not measured."""
        if measure == WEIGHT_GRADIENT:
            return self.weights[0].value if self.weights else math.nan
        return self.values.get(measure, math.nan)

    def stderr(self, measure: str) -> float | None:
        """The standard error of a value, None where there is none."""
        if measure == WEIGHT_GRADIENT:
            return self.weights[0].stderr if self.weights else None
        return self.errors.get(measure)

    def rows(self, source: str) -> Iterator[Row]:
        """What was measured of the call, as rows of a profile."""
        for measure, value in self.values.items():
            yield Row(self.depth, self.name, measure, value, self.errors.get(measure), source)
        for name, value, stderr in self.weights:
            yield Row(self.depth, name, WEIGHT_GRADIENT, value, stderr, source)


@dataclass(frozen=True)
class Reading:
    """What some passes through a network showed."""

    input: LayerCall  # the measures of the input batch (depth 0)
    # every call in execution order; those that a filter hides or that could not be measured hold no numbers
    layers: tuple[LayerCall, ...]
    network: Mapping[str, Estimate]  # the network-wide estimates (growth, alignment)
    settings: Mapping[str, Any]  # how the numbers came about
    # the network-wide estimates of theory, where theory was laid beside the measurement
    predicted: Mapping[str, Estimate] = field(default_factory=dict)
    source: str = "check"  # the source of the measured rows

    @cached_property
    def calls(self) -> tuple[LayerCall, ...]:
        """The calls of which something was measured."""
        return tuple(call for call in self.layers if call.values or call.weights)

    @cached_property
    def weight_layers(self) -> tuple[LayerCall, ...]:
        """The measured calls that count as depth."""
        return tuple(call for call in self.calls if call.weighs)

    @cached_property
    def _weight_depths(self) -> tuple[int, ...]:
        return tuple(call.depth for call in self.layers if call.weighs)

    @property
    def samples(self) -> int:
        """The number of samples in the batch, 0 when the settings do not say."""
        return int(self.settings.get("samples") or self.settings.get("batch_size") or 0)

    @property
    def depth(self) -> int:
        """How many weight layers the network has, those that a filter hides included."""
        return len(self._weight_depths)

    @property
    def has_shortcuts(self) -> bool:
        """Whether some way through the network passes fewer than half of its weight layers."""
        shortest = self.settings.get("shortest_depth")
        return shortest is not None and bool(shortest < self.depth / 2)

    def order(self, call: LayerCall) -> int:
        """Which weight layer, counted from 1, the call belongs to."""
        return bisect_right(self._weight_depths, call.depth)

    def __contains__(self, measure: str) -> bool:
        return measure in self.network or any(measure in call for call in (self.input, *self.layers))

    def rows(self, chosen: Container[str] | None = None) -> tuple[Row, ...]:
        """The measured rows of the measures chosen, or all."""
        rows = [row for call in (self.input, *self.layers) for row in call.rows(self.source)]
        last = len(self.layers)
        rows += [Row(last, NETWORK, measure, e.value, e.stderr, self.source) for measure, e in self.network.items()]
        return tuple(rows) if chosen is None else tuple(row for row in rows if row.measure in chosen)

    def profile(self, chosen: Container[str] | None = None) -> Profile:
        """The measured rows of the measures chosen, or all, with the settings that `read` needs to undo this."""
        every = (self.input, *self.layers)
        settings = {
            "kinds": {str(call.depth): call.kind for call in self.layers},
            "weight_layers": list(self._weight_depths),
            "features": {str(call.depth): call.features for call in every if call.features},
            "positions": {str(call.depth): call.positions for call in self.layers if call.features},
        }
        return Profile(self.rows(chosen), {**self.settings, **settings})


def read(profile: Profile) -> Reading:
    """The records that a profile was made of; of files that say less, as much as they tell."""
    settings = profile.settings
    values: dict[int, dict[str, float]] = {}
    errors: dict[int, dict[str, float | None]] = {}
    weights: dict[int, list[WeightGradient]] = {}
    names: dict[int, str] = {}
    beside: dict[int, list[Row]] = {}
    network: dict[str, Estimate] = {}
    predicted: dict[str, Estimate] = {}
    origin = "check"
    for row in profile.rows:
        layer, name, measure, value, stderr, source = row
        if name == NETWORK and measure in NETWORK_MEASURES:
            if source != "redraw":
                (predicted if source == "theory" else network)[measure] = Estimate(value, stderr)
        elif source in PREDICTED:
            beside.setdefault(layer, []).append(row)
        elif measure == WEIGHT_GRADIENT:
            weights.setdefault(layer, []).append(WeightGradient(name, value, stderr))
        else:
            names.setdefault(layer, name)
            values.setdefault(layer, {})[measure] = value
            if stderr is not None:
                errors.setdefault(layer, {})[measure] = stderr
            origin = source
    kinds, features, positions = (settings.get(key, {}) for key in ("kinds", "features", "positions"))
    depths = sorted({0, *values, *weights, *map(int, kinds), *settings.get("weight_layers", ())})
    weighing = _find_weight_layers(settings, depths)
    calls = [
        LayerCall(
            depth,
            names.get(depth, "" if depth else INPUT),
            values.get(depth, {}),
            str(kinds.get(str(depth), "")),
            errors.get(depth, {}),
            tuple(weights.get(depth, ())),
            features=int(features.get(str(depth), 0)),
            positions=int(positions.get(str(depth), 1)),
            weighs=depth in weighing,
            predicted=tuple(beside.get(depth, ())),
        )
        for depth in depths
    ]
    return Reading(calls[0], tuple(calls[1:]), network, settings, predicted, origin)


def count_in_band(profile: Profile) -> tuple[int, int]:
    """How many measured numbers lie in the 95% band of their prediction, and how many have one."""
    measured = {(row.name, row.measure): row.value for row in profile.rows if row.source not in PREDICTED}
    banded = [row for row in profile.rows if row.source in PREDICTED and row.stderr]
    banded = [row for row in banded if (row.name, row.measure) in measured]
    inside = sum(abs(measured[row.name, row.measure] - row.value) <= 2 * (row.stderr or 0.0) for row in banded)
    return inside, len(banded)


def _find_weight_layers(settings: Mapping[str, Any], depths: Sequence[int]) -> frozenset[int]:
    """The calls that multiply by weights: those the settings name, else by kind, else (no kind known) every call."""
    named, kinds = settings.get("weight_layers"), settings.get("kinds", {})
    if named is not None:
        return frozenset(named)
    if any(kinds.values()):
        return frozenset(int(place) for place, kind in kinds.items() if any(word in kind for word in WEIGHT_KINDS))
    return frozenset(depths) - {0}
