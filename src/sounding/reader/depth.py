"""How deep could it go: a network at L, 2L, 4L, measured and predicted, and whether what it does stays bounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from sounding.errors import UsageError
from sounding.probe.check import check
from sounding.probe.losses import Loss
from sounding.probe.state import Mode
from sounding.profile import Profile
from sounding.reader.extend import Blocks, extend, find_blocks
from sounding.reader.module import Blueprint, read
from sounding.reader.prediction import WIDER, Prediction, predict
from sounding.theory.signal import Convolution, Linear, measures

QUANTITIES = {
    "stream": "mean square behind the last block over that behind the first",
    "distance": "1 − mean cosine between samples in the last block",
    "tokens": "1 − mean cosine between the tokens of a sample behind the last block",
    "gradient": "gradient norm at the first layer over that at the last",
}
SHORT = {
    "stream": "the size of the stream",
    "distance": "how far samples are apart (distance)",
    "tokens": "how far tokens are apart",
    "gradient": "the gradient norm",
}
# The power of depth up to which growth counts as bounded: a stream that adds up independent blocks grows as depth,
# which one norm or a factor of 1/√L takes back. What compounds doubles its power with every doubling of the depth.
# Of the networks of `bench/depths.py` those that transfer reach 1.03, those that do not begin at
# 1.38; what compounds by less than ×1.04 a layer is not seen at 32 layers.
MOST = 1.25
STEADY = 0.1  # powers below are called steady: a factor of 1.07 for twice the depth
FAR = 4.0  # standard deviations from the prediction at which a measurement is mentioned
COLLAPSED = 1e-6  # of 1 − cosine, where float32 passes see their rounding


@dataclass(frozen=True)
class Point:
    """One quantity at one depth: logarithms, None where it was not measured or not predicted."""

    depth: int  # in the unit of the factory's argument, or in blocks
    quantity: str  # one of QUANTITIES
    measured: float | None  # ln of the quantity of the network itself
    predicted: float | None  # ln of what theory expects
    stderr: float  # the standard deviation of the logarithm over seeds
    unsure: float = 0.0  # how far the prediction moves when every law moves by its own standard error


@dataclass(frozen=True)
class Trend:
    """What a quantity does over the last doubling: it goes as depth^power."""

    quantity: str  # one of QUANTITIES
    power: float  # of the depth; infinite where the quantity left its range
    stderr: float  # its standard deviation: over seeds where it is measured, by how well laws are known where predicted
    source: str  # "predicted", or "measured" where theory has no value
    # whether the power is at most 1.25 in size; None where 1.25 lies within two standard deviations of it
    bounded: bool | None

    def __str__(self) -> str:
        """One line for people."""
        power = f"depth^{self.power:.2f} ± {self.stderr:.2f}"
        how = (
            "leaves the range of numbers: it overflows, or falls to zero"
            if math.isinf(self.power)
            else f"goes as {power}"
        )
        if self.bounded and abs(self.power) <= STEADY:
            how = f"is steady ({power})"
        return f"{QUANTITIES[self.quantity]}: {how}, {self.source}"


@dataclass(frozen=True)
class Depths:
    """The result of `sounding.depth`: points over depth, a trend for each quantity, and what could not be followed."""

    unit: str
    depths: tuple[int, ...]
    points: tuple[Point, ...]
    trends: tuple[Trend, ...]
    notes: tuple[str, ...] = ()

    @property
    def transfers(self) -> bool | None:
        """Whether everything that could be followed stays bounded as the depth doubles; None where it is not known."""
        known = [trend.bounded for trend in self.trends]
        return False if False in known else None if None in known or not known else True

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        span = f"from {self.depths[-2]} to {self.depths[-1]} {self.unit}"
        if not self.trends:
            return f"Not known {span}: nothing could be followed."
        if self.transfers:
            return f"The parametrization transfers {span}: nothing grows or falls faster than depth."
        worst = " and ".join(SHORT[trend.quantity] for trend in self.trends if trend.bounded is self.transfers)
        if self.transfers is None:
            return f"Not known {span}: what {worst} does is too uncertain."
        return f"The parametrization does not transfer {span}: {worst} changes faster than depth."

    def __str__(self) -> str:
        """The verdict and a line for each quantity, with the factor of one layer where it is no power of the depth."""
        steps = self.depths[-1] - self.depths[-2]
        unit = self.unit.removesuffix("s")

        def tell(trend: Trend) -> str:
            if not MOST < abs(trend.power) < math.inf:
                return f"- {trend}"
            factor = self.depths[-1] / self.depths[-2]
            return f"- {trend}; that is ×{factor ** (trend.power / steps):.3g} for each {unit}"

        return "\n".join([self.summary, *map(tell, self.trends), *(f"  ({n})" for n in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"transfers": self.transfers, "summary": self.summary, **asdict(self)}


def depth(
    target: nn.Module | Callable[..., nn.Module],
    inputs: Any,
    targets: Any = None,
    *,
    to: int,
    start: int | None = None,
    loss: str | Loss | None = None,
    mode: Mode = "train",
    batch_axis: int | None = None,
    generator: torch.Generator | None = None,
    progress: Callable[[int], None] | None = None,
) -> Depths:
    """Whether a way to build networks transfers over depth: what grows at L, 2L, 4L, measured and predicted.

    Args:
        target: a function with an argument `depth` that makes a network; or a network, whose repeated block is then
            extended by theory.
        inputs: as for `check`.
        targets: as for `check`.
        to: the largest depth, in the unit of the function's argument, or in blocks of the network.
        start: the smallest; by default a quarter of `to`, or the blocks that the network has.
        loss: as for `check`.
        mode: as for `check`.
        batch_axis: as for `check`.
        generator: where the random direction comes from that stands for a loss; None is torch's default generator.
        progress: called with each depth before it is looked at.

    >>> from sounding.models import Mlp
    >>> torch.manual_seed(0) and None
    >>> found = depth(lambda depth: Mlp(8, 4, depth=depth, width=64, init="he"), torch.randn(16, 8), to=16)
    >>> found.depths
    (4, 8, 16)
    """
    source = generator or torch.default_generator
    state = source.get_state()
    options: dict[str, Any] = {"loss": loss, "mode": mode, "batch_axis": batch_axis}

    def again() -> torch.Generator:
        one = torch.Generator(source.device)
        one.set_state(state)
        return one

    def look(model: nn.Module) -> tuple[Profile, Blueprint]:
        report = check(model, inputs, targets, tier="fast", theory=False, generator=again(), **options)
        return report.profile, read(model, inputs, targets, generator=again(), **options)

    points: list[Point] = []
    notes: dict[str, None] = {}
    first = 0  # the blocks of a network that is given, which is measured at that depth alone
    if isinstance(target, nn.Module):
        profile, blueprint = look(target)
        blocks = find_blocks(blueprint.description)
        first = blocks.count if blocks is not None else len(blueprint.description.nodes)
        depths, unit = _doublings(first if start is None else max(start, first), to), "blocks"
    else:
        depths, unit = _doublings(max(1, to // 4) if start is None else start, to), "layers"
    for at in depths:
        if progress is not None:
            progress(at)
        if first:
            points += _points(at, extend(blueprint, at), profile if at == first else None, notes, own=first)
            continue
        with torch.random.fork_rng(devices=[]):
            model = target(depth=at)
        if not isinstance(model, nn.Module):
            raise UsageError(f"expected a function that makes a torch.nn.Module, got {type(model).__name__}")
        profile, blueprint = look(model)
        points += _points(at, blueprint, profile, notes, own=at)
    trends = tuple(trend for name in QUANTITIES if (trend := _trend(name, points, depths[-2:])) is not None)
    return Depths(unit, depths, tuple(points), trends, tuple(notes))


def _doublings(first: int, to: int) -> tuple[int, ...]:
    if isinstance(to, bool) or not isinstance(to, int) or first < 1 or to < 2 * first:
        raise UsageError(f"expected a depth of at least {2 * max(first, 1)}, twice the first, got {to!r}")
    found = [first]
    while 2 * found[-1] <= to:
        found.append(2 * found[-1])
    return tuple(found)


def _points(at: int, blueprint: Blueprint, profile: Profile | None, notes: dict[str, None], *, own: int) -> list[Point]:
    """Every quantity that theory or measurement has at this depth; `own` blocks have laws of their own."""
    blocks = find_blocks(blueprint.description)
    if blocks is None:
        raise UsageError(
            "expected a network with a block that repeats, got one in which theory sees none",
            hint="more than one block, or a network whose blocks theory can read",
        )
    rows = [] if profile is None else [row for row in profile.rows if row.source != "theory"]
    measured = {(row.name, row.measure): row.value for row in rows}

    def quantities(one: Blueprint) -> list[Point]:
        prediction = predict(one)
        notes.update(dict.fromkeys(prediction.notes))
        return [
            *_stream(at, one, prediction, blocks, measured),
            *_distance(at, one, prediction, blocks, measured),
            *_gradient(at, prediction, measured),
        ]

    found = []
    for one, other in zip(quantities(blueprint), quantities(_nudged(blueprint, min(own, at))), strict=True):
        moved = 0.0 if one.predicted is None or other.predicted is None else abs(other.predicted - one.predicted)
        found.append(replace(one, unsure=moved if math.isfinite(moved) else 0.0))
        gap = 0.0 if one.measured is None or one.predicted is None else abs(one.measured - one.predicted)
        if math.isfinite(gap) and gap > FAR * math.hypot(one.stderr, moved) > 0:
            factor = f"{math.exp(gap):.3g}"
            notes[f"measured {one.quantity} at depth {at} is off its prediction by a factor of {factor}"] = None
    return found


def _nudged(blueprint: Blueprint, own: int) -> Blueprint:
    """The blueprint with every law's variance one standard error larger, as if blocks erred together.

    The errors of `own` blocks are independent, those of their copies are not: over equal blocks they add up to the sum
    of 1/√own of each.
    """
    nodes = []
    for node in blueprint.description.nodes:
        rule = node.rule
        if isinstance(rule, Linear | Convolution):
            kernel = (*rule.kernel, 1 / rule.groups) if isinstance(rule, Convolution) else ()
            entries = node.features * math.prod(kernel) * blueprint.description.nodes[node.inputs[0]].features
            error = math.sqrt((rule.weight.kurtosis - 1) / max(entries, 2) / own)
            rule = replace(rule, weight=replace(rule.weight, variance=rule.weight.variance * (1 + error)))
        nodes.append(replace(node, rule=rule))
    return replace(blueprint, description=replace(blueprint.description, nodes=tuple(nodes)))


def _stream(
    at: int, blueprint: Blueprint, prediction: Prediction, blocks: Blocks, measured: dict[tuple[str, str], float]
) -> list[Point]:
    """How far the stream has grown between the first and the last block, measured and predicted."""
    nodes = blueprint.description.nodes
    fed = [item for node in nodes[blocks.stop :] for item in node.inputs if item < blocks.stop]
    last = max([*fed, *(item for item in blueprint.description.outputs if item < blocks.stop)], default=blocks.stop - 1)
    first = last - blocks.period * (blocks.count - 1)
    signals = [prediction.propagation.forward[index] for index in (first, last)]
    if signals[0] is None or signals[1] is None or first < 0:
        return []
    before, after = (measures(one, 1, finite_width=False, spectrum=False) for one in signals if one is not None)
    seen = [measured.get((nodes[index].name, "mean_square")) for index in (first, last)]
    expected = _log_ratio(after["mean_square"], before["mean_square"])
    # both scatter with what stands before the first block: only what comes in between counts
    sd = WIDER * math.sqrt(max(prediction.spread.size[last] ** 2 - prediction.spread.size[first] ** 2, 0.0))
    found = [Point(at, "stream", _log_ratio(seen[1], seen[0]), expected, sd)]
    if "token_cosine" in after:
        found.append(Point(at, "tokens", None, _away(after["token_cosine"]), 0.0))
    return found


def _distance(
    at: int, blueprint: Blueprint, prediction: Prediction, blocks: Blocks, measured: dict[tuple[str, str], float]
) -> list[Point]:
    """How far samples are apart behind the last block, measured and predicted."""
    names = {node.name: at for at, node in enumerate(blueprint.description.nodes[: blocks.stop]) if node.name}
    rows = [row for row in prediction.rows if row.measure == "mean_cosine" and row.name in names]
    if not rows:
        return []
    row = rows[-1]
    seen = measured.get((row.name, "mean_cosine"))
    # A correlation scatters by 1 − c² over the root of its directions, so its distance from 1 by a share. The band of
    # the row has a floor besides, which says nothing of samples that are nearly one: with He weights at width 128 the
    # logarithm scatters by 0.7, 1.2, 1.2 over 24 seeds at 32, 64, 128 layers, and is expected to by 0.8, 1.2, 1.7.
    sd = (1 + row.value) / math.sqrt(prediction.spread.directions[names[row.name]])
    return [Point(at, "distance", None if seen is None else _away(seen), _away(row.value), sd)]


def _gradient(at: int, prediction: Prediction, measured: dict[tuple[str, str], float]) -> list[Point]:
    rows = [row for row in prediction.rows if row.measure == "gradient_log_norm"]
    if len(rows) < 2:
        return []
    seen = [measured.get((row.name, row.measure)) for row in (rows[0], rows[-1])]
    whole = None if seen[0] is None or seen[1] is None else seen[0] - seen[1]
    return [Point(at, "gradient", whole, rows[0].value - rows[-1].value, rows[0].stderr)]


def _log_ratio(value: float | None, over: float | None) -> float | None:
    if value is None or over is None:
        return None
    return math.log(value / over) if value > 0 and over > 0 and math.isfinite(value / over) else math.inf


def _away(cosine: float) -> float:
    return math.log(1 - cosine) if 1 - cosine > COLLAPSED else -math.inf


def _trend(quantity: str, points: list[Point], depths: tuple[int, ...]) -> Trend | None:
    """The power of depth between the last two depths, by theory where it has both values.

    One network of each depth scatters by its seed; theory's mean does not, and is known as well as the laws are.
    """
    pair = [one for at in depths for one in points if one.depth == at and one.quantity == quantity]
    if len(pair) < 2:
        return None
    for source, error in (("predicted", "unsure"), ("measured", "stderr")):
        before, after = (getattr(one, source) for one in pair)
        if before is None or after is None:
            continue
        doubling = math.log(depths[1] / depths[0])
        if not math.isfinite(after) or not math.isfinite(before):
            return Trend(quantity, math.inf if after > 0 else -math.inf, 0.0, source, bounded=False)
        power = (after - before) / doubling
        sd = math.hypot(*(getattr(one, error) for one in pair)) / doubling
        bounded = None if abs(abs(power) - MOST) < 2 * sd else bool(abs(power) < MOST)
        return Trend(quantity, power, sd, source, bounded=bounded)
    return None
