"""The proof of a repair: the check before and after, the numbers that decide, what was cured and what was caused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sounding.encoding import fields_of
from sounding.measures import of_gram
from sounding.probe.batches import make_batch
from sounding.probe.check import check
from sounding.probe.findings.collapse import share_outside
from sounding.probe.losses import Loss
from sounding.probe.records import SEVERITIES, Finding, Report
from sounding.probe.state import unwrap
from sounding.probe.thresholds import THRESHOLDS
from sounding.profile import Estimate
from sounding.repair.layers import BATCH_NORMS, WEIGHT_LAYERS
from sounding.repair.passes import call_layers, hooked

GROUPS = 16  # left out in turn: the jackknife’s error is then itself known to a fifth, 1/√(2·15)
SAMPLES = 256  # whose inner products are taken; their cost grows with the square
TINY = 1e-12  # a share of 0 counts as this in a mean of logarithms
LEGEND = (
    "A depth scale is a change of the squared gradient by the factor e, and training fails at about "
    f"{THRESHOLDS.depth_scales:g}. Directions: in how many independent ways samples differ; a cosine of 1: all look "
    "alike; spread: the share of the signal in which they differ."
)
Fresh = Callable[[], tuple[Any, Any]]


@dataclass(frozen=True)
class Vitals:
    """The few numbers by which a repair is judged.

    Args:
        depth: weight layers.
        growth: factor per weight layer of the squared gradient norm towards the input.
        growth_interval: its 95% interval.
        depth_scales: |ln growth| · (depth − 1): from 16 on a network does not train (meanfield2019, figure 2).
        trainable_depth: 16/|ln growth| layers, and its interval.
        participation_ratio: directions that carry the batch in what the last weight layer receives; jackknife error.
        mean_cosine: between samples, there.
        alignment: mean |cosine| between the samples' gradients of the last layer.
        spread: share of the signal in which samples differ along more than one direction, geometric mean over the
            weight layers' inputs; a mean that a batch norm takes away right after the layer does not count.
    """

    depth: int
    growth: Estimate
    growth_interval: tuple[float, float]
    depth_scales: float
    trainable_depth: float
    trainable_interval: tuple[float, float]
    participation_ratio: Estimate
    mean_cosine: Estimate
    alignment: Estimate
    spread: float

    @property
    def share_outside(self) -> float:
        """The share of the last hidden signal outside one direction."""
        return share_outside(self.participation_ratio.value)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; estimates as value, low, high."""

        def told(value: float, interval: tuple[float, float]) -> dict[str, float]:
            return {"value": value, "low": interval[0], "high": interval[1]}

        return {
            "weight_layers": self.depth,
            "growth": told(self.growth.value, self.growth_interval),
            "depth_scales": self.depth_scales,
            "trainable_depth": told(self.trainable_depth, self.trainable_interval),
            "participation_ratio": told(self.participation_ratio.value, self.participation_ratio.interval()),
            "mean_cosine": told(self.mean_cosine.value, self.mean_cosine.interval()),
            "gradient_alignment": told(self.alignment.value, self.alignment.interval()),
            "spread": self.spread,
        }


@dataclass(frozen=True)
class State:
    """A model as it was found: the whole report, and the vitals."""

    report: Report
    vitals: Vitals


@dataclass(frozen=True)
class Evidence:
    """A model before and after a repair.

    Args:
        before, after: the reports of `sounding.check`.
        vitals_before, vitals_after: the numbers that decide, with intervals.
        cured: findings that are gone or milder.
        caused: findings that were not there, or not so bad: one cure can cause the other illness.
        remaining: the findings after the repair that were there before, as bad.
    """

    before: Report
    after: Report
    vitals_before: Vitals
    vitals_after: Vitals
    cured: tuple[Finding, ...]
    caused: tuple[Finding, ...]
    remaining: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether the repaired model is healthy."""
        return self.after.verdict.healthy

    @property
    def worse(self) -> bool:
        """Whether the repaired model has more findings of high severity than the model had."""
        was, now = (
            sum(one.severity == "high" for one in report.verdict.findings) for report in (self.before, self.after)
        )
        return now > was

    def for_target(self, target: str) -> Evidence:
        """The evidence with remedies that name this target of the command line in place of TARGET."""
        cured, caused, remaining = (
            tuple(finding.for_target(target) for finding in group)
            for group in (self.cured, self.caused, self.remaining)
        )
        before, after = self.before.for_target(target), self.after.for_target(target)
        return replace(self, before=before, after=after, cured=cured, caused=caused, remaining=remaining)

    def __str__(self) -> str:
        rows = list(zip(tell(self.vitals_before), tell(self.vitals_after), strict=True))
        name_width = max(len(name) for (name, _), _ in rows)
        width = max(len(value) for (_, value), _ in rows)
        lines = [f"{'':{name_width}}  {'before':{width}}  after"]
        lines += [f"{name:{name_width}}  {old:{width}}  {new}" for (name, old), (_, new) in rows]
        lines += [LEGEND]
        lines += [f"cured      {one.kind} ({one.severity})" for one in self.cured]
        lines += [f"remains    {one.kind} ({one.severity})" for one in self.remaining]
        lines += [f"CAUSED     {one.kind} ({one.severity}): {one.why}" for one in self.caused]
        return "\n".join([*lines, self.after.verdict.summary])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "before": {**self.before.to_dict(), "vitals": self.vitals_before.to_dict()},
            "after": {**self.after.to_dict(), "vitals": self.vitals_after.to_dict()},
            **fields_of(self, "cured caused remaining"),
        }


def tell(vitals: Vitals) -> list[tuple[str, str]]:
    """The vitals in words, one row each, with 95% intervals."""
    layers = "any number of" if vitals.trainable_depth > 1e5 else f"{vitals.trainable_depth:.0f}"
    return [
        ("gradient² per layer", f"×{vitals.growth.value:.4g} {_span(vitals.growth_interval)}"),
        ("depth scales spanned", f"{vitals.depth_scales:.3g}, fatal from {THRESHOLDS.depth_scales:g}"),
        ("trainable to", f"{layers} layers {_span(vitals.trainable_interval)}"),
        ("directions, last hidden", f"{vitals.participation_ratio.value:.3g} {_of(vitals.participation_ratio)}"),
        ("mean cosine, last hidden", f"{vitals.mean_cosine.value:.3g} {_of(vitals.mean_cosine)}"),
        ("gradient alignment", f"{vitals.alignment.value:.3g}"),
        ("spread over all layers", f"{vitals.spread:.3g}"),
    ]


def examine(
    model: nn.Module,
    batches: Sequence[tuple[Any, Any]],
    *,
    loss: str | Loss | None = None,
    repeats: int = 1,
    generator: torch.Generator | None = None,
) -> State:
    """Check a model and take its vitals; the generator is where it was afterwards, so that a second look sees the same.

    Batches are pairs of inputs and targets; a single one is cut into `repeats` parts. The generator draws the random
    direction that stands for a loss where there are no targets.
    """
    state = generator.get_state() if generator is not None else None
    inputs, targets = batches[0] if len(batches) == 1 else (iter(batches), None)
    count = repeats if len(batches) == 1 else len(batches)
    try:
        report = check(model, inputs, targets, loss=loss, repeats=count, generator=generator)
    finally:
        if generator is not None and state is not None:
            generator.set_state(state)  # the model before and after meet the same random direction
    return State(report, take_vitals(report, model, batches[0][0]))


def compare(before: State, after: State) -> Evidence:
    """What a repair did to a model."""
    # reversed: of several of a kind the first stays
    old = {finding.kind: finding for finding in reversed(before.report.verdict.findings)}
    new = {finding.kind: finding for finding in reversed(after.report.verdict.findings)}

    def worse(one: Finding, other: Finding | None) -> bool:
        return other is None or SEVERITIES[one.severity] < SEVERITIES[other.severity]

    return Evidence(
        before=before.report,
        after=after.report,
        vitals_before=before.vitals,
        vitals_after=after.vitals,
        cured=tuple(finding for kind, finding in old.items() if worse(finding, new.get(kind))),
        # a cure is no random draw, which is all that theory knows: that it disagrees with the cure is no illness
        caused=tuple(
            finding
            for kind, finding in new.items()
            if worse(finding, old.get(kind)) and (kind, finding.severity) != ("disagreement", "low")
        ),
        remaining=tuple(finding for kind, finding in new.items() if not worse(finding, old.get(kind))),
    )


def take_vitals(report: Report, model: nn.Module, inputs: Any) -> Vitals:
    """The vitals from a report and one more pass, for the last hidden representation."""
    reading = report.reading
    depth = len(reading.weight_layers)
    growth = reading.network.get("gradient_growth", Estimate(math.nan))
    low, high = report.profile.settings.get("growth_interval") or growth.interval()
    # shrinking is as bad as growing
    rate = abs(math.log(growth.value)) if 0 < growth.value < math.inf else math.inf if growth.value > 0 else math.nan
    ratio, cosine, spread = _look_inside(model, inputs)
    ends = sorted((_reach(low), _reach(high)))  # both ends of an interval that holds 1 have a finite reach
    return Vitals(
        depth=depth,
        growth=growth,
        growth_interval=(low, high),
        depth_scales=rate * max(depth - 1, 0),
        trainable_depth=_reach(growth.value),
        trainable_interval=(ends[0], math.inf if low <= 1 <= high else ends[1]),
        participation_ratio=ratio,
        mean_cosine=cosine,
        alignment=reading.network.get("gradient_alignment", Estimate(math.nan)),
        spread=spread,
    )


def _reach(growth: float) -> float:
    """16/|ln growth|, the depth to which such a network trains."""
    if not 0 < growth < math.inf:
        return 0.0 if growth > 0 else math.nan
    return THRESHOLDS.depth_scales / abs(math.log(growth)) if growth != 1.0 else math.inf


def _look_inside(model: nn.Module, inputs: Any) -> tuple[Estimate, Estimate, float]:
    """Participation ratio and mean cosine of what the last weight layer receives, and the spread over all of them."""
    batch = make_batch(inputs, None)
    call = batch.arguments if batch.arguments else dict(batch.keywords)
    grams: list[Tensor | None] = []
    handles = [
        module.register_forward_pre_hook(lambda _, arguments: grams.append(_gram(arguments[0])))
        for module in unwrap(model).modules()
        if isinstance(module, WEIGHT_LAYERS)
    ]
    with hooked(handles):
        order = [one.module for one in call_layers(model, call)]
    centred = [
        isinstance(following, BATCH_NORMS)  # whether the norm takes the mean away
        for module, following in zip(order, [*order[1:], None], strict=True)
        if isinstance(module, WEIGHT_LAYERS)
    ]
    if not grams or grams[-1] is None:
        return Estimate(math.nan), Estimate(math.nan), math.nan
    shares = [_share(gram, alone=free) for gram, free in zip(grams, centred, strict=True) if gram is not None]
    spread = math.exp(sum(math.log(max(share, TINY)) for share in shares) / len(shares))
    last = grams[-1]
    return jackknife(last, of_gram.participation_ratio), jackknife(last, of_gram.mean_cosine), spread


def _gram(features: Any) -> Tensor | None:
    """The inner products of the samples, scaled to a largest entry of 1 in the features; None where they are no use."""
    if not isinstance(features, Tensor) or features.dim() < 2 or not bool(torch.isfinite(features).all()):
        return None
    rows = features[:SAMPLES].flatten(1).double()
    # squares of large entries would overflow
    rows = rows / rows.abs().amax().clamp_min(torch.finfo(torch.float64).tiny)
    return rows @ rows.T


def _share(gram: Tensor, *, alone: bool) -> float:
    """The share of a batch in which its samples differ along more than one direction.

    With H = mean + C: the share of C outside its dominant direction, times the share of C in
    H, ‖C‖²/‖H‖², unless a batch norm follows, which takes the mean away before it does harm (`alone`).
    """
    mean = gram.mean(0, keepdim=True)
    centred = gram - mean - mean.T + gram.mean()  # the inner products of the rows less their mean
    size, whole = float(centred.trace()), float(gram.trace())
    if size <= 0 or whole <= 0:
        return 0.0
    share = share_outside(float(of_gram.participation_ratio(centred)))
    return share if alone else share * size / whole


def jackknife(gram: Tensor, measure: Callable[[Tensor], Tensor]) -> Estimate:
    r"""A measure of a Gram matrix with its delete-a-group jackknife error.

    $\sigma^2 = \frac{g-1}{g} \sum_k (\theta_{(k)} - \bar\theta)^2$ over $g$ = 16 groups of samples left out in turn.
    """
    value = float(measure(gram))
    groups = min(GROUPS, len(gram))
    if groups < 3:  # two groups would tell nothing of the scatter
        return Estimate(value)
    # every sixteenth sample is left out together: neighbours in a file may be alike
    member = torch.arange(len(gram)) % groups
    left = [gram[member != group][:, member != group] for group in range(groups)]
    values = torch.tensor([float(measure(part)) for part in left], dtype=torch.float64)
    error = math.sqrt((groups - 1) / groups * float((values - values.mean()).square().sum()))
    return Estimate(value, error)


def _span(interval: tuple[float, float]) -> str:
    return f"({_end(interval[0])} to {_end(interval[1])})"


def _end(value: float) -> str:
    return "any" if value > 1e5 else f"{value:.4g}"


def _of(estimate: Estimate) -> str:
    low, high = estimate.interval()
    return f"({low:.3g} to {high:.3g})" if estimate.stderr is not None else ""
