"""How the gradient changes over a network, in depth scales: a rate per layer, a layer that breaks it, or the ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from sounding.probe.findings.unseen import unseen_products
from sounding.probe.growth import find_breaks, student_quantile
from sounding.probe.reading import WEIGHT_GRADIENT, LayerCall, Reading
from sounding.probe.thresholds import Thresholds
from sounding.profile import Estimate


@dataclass(frozen=True)
class Change:
    """How the squared gradient norm changes towards the input, in logarithms.

    Args:
        rate: per weight layer, with the ends of its interval at 95%.
        slowest: the end of the interval at 99% that is nearer to no change.
        steps: how many weight layers it is multiplied through.
        seen: the most that was seen between the last layers and the first.
        layers: how many there are.
        jump: what one layer alone changes beyond the rate, in the direction of the change; 0 without such a layer.
        broken: that layer.
    """

    rate: float
    low: float
    high: float
    slowest: float
    steps: int
    seen: float
    layers: int
    jump: float = 0.0
    broken: LayerCall | None = None

    @property
    def explodes(self) -> bool:
        return (self.rate if self.broken is None else self.jump) > 0

    @property
    def spread(self) -> float:
        """Depth scales of the rate alone, none where it points the other way."""
        along = self.rate if self.explodes else -self.rate
        return min(max(along, 0.0) * self.steps, self.seen)

    @property
    def scales(self) -> float:
        """Depth scales spanned, the jump included, and not more than was seen."""
        return min(self.spread + abs(self.jump), self.seen)

    @property
    def surely(self) -> float:
        """Depth scales spanned at 99% confidence of the rate, the jump included, and not more than was seen."""
        along = self.slowest if self.explodes else -self.slowest
        return min(max(along, 0.0) * self.steps + abs(self.jump), self.seen)


def measure_change(reading: Reading, thresholds: Thresholds) -> Change | None:
    """The fitted rate, and the layer that breaks it if there is one."""
    growth = reading.network.get("gradient_growth")
    steps = reading.depth - 1
    if growth is None and reading.calls and unseen_products(reading):
        return _measure_ends(reading)
    if growth is None or steps < 1 or not math.isfinite(growth.value) or growth.value <= 0:
        return None
    rate = math.log(growth.value)
    low, high = _interval(reading, growth, thresholds)
    jump, broken = _largest_break(reading, rate)
    explodes = jump > 0 if broken is not None else rate > 0
    slowest = rate + _widening(reading) * ((low if explodes else high) - rate)
    seen = _seen_change(reading, explodes=explodes)
    if not explodes:
        # of a layer that a loop calls again and again the last call has a gradient: what fades is time and not depth
        steps = len({call.name.partition("#")[0] for call in reading.layers if call.weighs}) - 1
    return Change(rate, low, high, slowest, steps, seen, reading.depth, jump, broken)


def _measure_ends(reading: Reading) -> Change | None:
    """Where no layers in between can be seen: from the gradient at the output and at the input, as one rate."""
    products = unseen_products(reading) + reading.depth
    total = 2 * (reading.input.get("gradient_log_norm") - reading.calls[-1].get("gradient_log_norm"))
    if not math.isfinite(total) or total == 0:
        return None
    rate = total / products
    return Change(rate, rate, rate, rate, products, abs(total), products)


def _largest_break(reading: Reading, rate: float) -> tuple[float, LayerCall | None]:
    """The single layer that changes the squared norm most, beyond the rate, and by how much, in logarithms.

    The gradient of the weights has to show it as well: a batch norm behind inputs in raw units divides the gradient by
    their scale, and the weights in front of it, which multiply those inputs, get it back. The head may start as small
    as one likes, and in a residual network so may the end of every branch.
    """
    layers = reading.weight_layers
    if reading.has_shortcuts or len(layers) < reading.depth:
        return 0.0, None
    norms = [2 * call.get("gradient_log_norm") for call in layers]
    if len(norms) < 5 or not all(math.isfinite(norm) for norm in norms):
        return 0.0, None
    steps = [before - after for before, after in pairwise(norms)]
    best: tuple[float, LayerCall | None] = (0.0, None)
    for index in find_breaks([step / 2 for step in steps]):
        before, after = (2 * layers[at].get(WEIGHT_GRADIENT) for at in (index, index + 1))
        shown = before - after if math.isfinite(before - after) else steps[index]
        if steps[index] * shown <= 0 or (steps[index] < 0 and index == len(steps) - 1):
            continue
        jump = math.copysign(min(abs(steps[index] - rate), abs(shown)), steps[index])
        best = max(best, (jump, layers[index + 1]), key=lambda found: abs(found[0]))
    return best


def _interval(reading: Reading, growth: Estimate, thresholds: Thresholds) -> tuple[float, float]:
    """The 95% interval of ln growth: Student's where the fit gives one, else from the standard error."""
    given = reading.settings.get("growth_interval")
    if given is not None and all(isinstance(end, int | float) and 0 < end < math.inf for end in given):
        return math.log(given[0]), math.log(given[1])
    half = thresholds.deviations * (growth.stderr or 0.0) / growth.value
    return math.log(growth.value) - half, math.log(growth.value) + half


def _widening(reading: Reading) -> float:
    """How much wider the interval is at 99% than at 95%, for the fit's degrees of freedom."""
    degrees = reading.settings.get("growth_degrees_of_freedom") or math.inf
    return student_quantile(0.995, degrees) / student_quantile(0.975, degrees)


def _seen_change(reading: Reading, *, explodes: bool) -> float:
    """The largest change of the squared norm from the last quarter of the weight layers to the first, in logarithms.

    A fit within stages of a network extrapolates over the jumps between them; this does not. In a network with
    shortcuts the largest gradient of each quarter is the stream's: branches that start at 10⁻⁵, and queries where
    attention is uniform, have smaller ones and say nothing about it. These two stand three quarters of the depth apart.
    A layer to which no gradient comes back, since nothing reads what it gives, lies on no way to the loss.
    Infinite where gradients left the range of the format, or where a filter hides layers.
    """
    asked = [call for call in reading.weight_layers if "gradient_log_norm" in call]
    known = [call.get("gradient_log_norm") for call in asked]
    if len(reading.weight_layers) < reading.depth or not known or any(map(math.isnan, known)):
        return math.inf
    quarter = max(1, len(known) // 4)
    first, last = known[:quarter], known[-quarter:]
    if reading.has_shortcuts and math.isfinite(max(first)) and math.isfinite(max(last)):
        change = 2 * (max(first) - max(last)) * 4 / 3
        return max(change if explodes else -change, 0.0)
    if any(math.isinf(value) for value in known):
        return math.inf
    return 2 * (max(first) - min(last)) if explodes else 2 * (max(last) - min(first))
