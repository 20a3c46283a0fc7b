"""Which cure for this model: every applicable one is tried on a copy and ranked by what was measured."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from sounding.encoding import fields_of
from sounding.errors import NumericalError, SoundingError, TargetError, UsageError
from sounding.probe.losses import Loss, training_loss
from sounding.probe.records import STATUSES, Status
from sounding.probe.state import set_mode
from sounding.probe.thresholds import THRESHOLDS
from sounding.reader.blame import blame
from sounding.reader.module import read
from sounding.repair.candidates import Candidate, list_candidates, list_for_cause
from sounding.repair.evidence import Fresh, State, Vitals, examine
from sounding.repair.mend import MENDS
from sounding.repair.methods import METHODS, choose_methods
from sounding.repair.passes import Inputs
from sounding.repair.plan import check_model, open_batch
from sounding.repair.snapshot import take_snapshot
from sounding.repair.tune import MARGIN

LEGEND = (
    "Score: how much of the signal arrives, from 0 to 1. Directions: in how many independent ways samples differ "
    "behind the last hidden layer. Spread: the share of the signal in which they differ, over all layers."
)
# depth scales that cost nothing: rounding, and the noise of a fit over tens of layers
FREE_SCALES = 1.0
LIMIT = THRESHOLDS.depth_scales
CLOSE = 0.05  # scores this close to the best count as equal, so that the fewest methods win
AS_IT_IS = "as it is"
# A trial takes this many steps of Adam at each of the rates, with at most so many cures of each sort: enough to tell a
# network that learns from one that does not, and a few hundred passes in all.
STEPS, RATES, OF_EACH = 20, (1e-3, 1e-2), 3
# Two losses within a twentieth are alike: seeds of one network differ by that after 20 steps. TINY is for losses of 0.
SHOWN, TINY = 0.05, 0.01


@dataclass(frozen=True)
class Tried:
    """One cure, or several together, as it did on a copy.

    Args:
        methods: in their order; () is the model as it is.
        options: to pass to `sounding.plan` with the methods.
        vitals: what was measured after it.
        status: what the check says of the network: "healthy", "unhealthy" or "not known".
        score: how much of the signal arrives, forwards and backwards, from 0 to 1; see `score`.
        cost: of the cure, in words.
        side_effects: of the cure, in words.
        caused: kinds of findings that were not there before.
        changed: how many parts of the model it changes.
        trained: the loss that a few steps of training on a copy reach after it; NaN where it was not tried.
    """

    methods: tuple[str, ...]
    options: dict[str, dict[str, Any]]
    vitals: Vitals
    status: Status
    score: float
    cost: str
    side_effects: str
    caused: tuple[str, ...]
    changed: int = 0
    trained: float = math.nan

    @property
    def name(self) -> str:
        """The methods, joined."""
        return " + ".join(self.methods) or AS_IT_IS

    @property
    def _cure(self) -> Candidate:
        """As candidates are listed."""
        return self.methods, self.options

    @property
    def healthy(self) -> bool:
        """Whether the network is known to be healthy."""
        return self.status == "healthy"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        told = fields_of(self, "methods options score status healthy vitals cost side_effects caused changed")
        return {**told, "trained": None if math.isnan(self.trained) else self.trained}


@dataclass(frozen=True)
class Recommendation:
    """Every cure that was tried, the best first, and those that could not be, with the reason.

    Args:
        tried: the best first.
        failed: name and reason of those that could not be tried.
        cause: what theory blames and what heals it in the network's description, a sentence; "" where there is none.
        steps: how many steps of training the likeliest were tried with, 0 where there was nothing to train for.
        reason: why the best is the best, the end of a sentence; "" where it is the model as it is.
    """

    tried: tuple[Tried, ...]
    failed: tuple[tuple[str, str], ...] = field(default=())
    cause: str = ""
    steps: int = 0
    reason: str = ""

    @property
    def best(self) -> Tried:
        """The first; with no methods when the model is best left alone."""
        return self.tried[0]

    @property
    def sentence(self) -> str:
        """What to do, in words."""
        best = self.best
        if best.methods:
            tried = "" if self.steps or not math.isnan(best.trained) else "; not tried in training: no targets"
            because = f", because {self.reason}" if self.reason else ""
            return f"Recommended: {best.name} ({best.cost}; {best.side_effects}{tried}){because}"
        if best.healthy:
            return f"Recommended: {AS_IT_IS}"
        better = " and trains no worse than it does now" if self.steps else ""
        return (
            f"Recommended: none of these; the network is {best.status}, and no cure that was tried makes it healthy"
            f"{better}"
        )

    def __str__(self) -> str:
        reached = "loss" if self.steps else ""
        rows = [("cure", reached, "score", "gradient²/layer", "trainable to", "directions", "spread", "")]
        for item in self.tried:
            vitals = item.vitals
            reach = (
                "any depth" if vitals.trainable_depth > 1e5 else _number(vitals.trainable_depth, ".0f", after=" layers")
            )
            rows.append(
                (
                    item.name,
                    "" if math.isnan(item.trained) else f"{item.trained:.4g}",
                    f"{item.score:.3f}",
                    _number(vitals.growth.value, ".4g", before="×"),
                    reach,
                    _number(vitals.participation_ratio.value, ".3g"),
                    _number(vitals.spread, ".3g"),
                    "" if item.healthy else item.status + (f", causes {', '.join(item.caused)}" if item.caused else ""),
                )
            )
        widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip()
            for row in rows
        ]
        heart = f" Loss: the loss after {self.steps} steps on these samples alone, which may be learned by heart."
        lines += [
            LEGEND + (heart if self.steps else ""),
            *(f"not possible: {name}: {why}" for name, why in self.failed),
        ]
        lines += [self.cause] if self.cause else []
        return "\n".join([*lines, self.sentence])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        failed = [{"methods": name, "reason": why} for name, why in self.failed]
        return {**fields_of(self, "best tried"), "failed": failed, **fields_of(self, "cause steps sentence")}


def recommend(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    loss: str | Loss | None = None,
    repeats: int = 1,
    fresh: Fresh | None = None,
    exclude: Sequence[str] = (),
    steps: int = STEPS,
    generator: torch.Generator | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Recommendation:
    """Try every applicable cure, and sensible combinations, on a copy; rank them. The model itself is never touched.

    Where theory can blame one thing for what is wrong (`sounding.reader.blame`), the cure of that alone is tried too.
    Where there is something to train for, the likeliest also train for a few steps, each on a copy and by the better of
    two learning rates. A cure is recommended only if that shows it: a healthy model must train better by a twentieth
    with it, an unhealthy one no worse. What mends the findings of the audit goes before what draws the network anew; of
    those that train alike the one that changes the least comes first.

    Args:
        model: any module that can be copied.
        inputs, targets, loss, repeats, fresh: as for `sounding.plan`.
        exclude: methods not to try, such as the slow "raise_rank", or "add_batchnorm" where structure must stay.
        steps: of training for each of the likeliest; 0 leaves it out.
        generator: source of randomness of the cures.
        progress: called with (tried so far, how many there are, the name of the next).

    Raises:
        UsageError: the inputs do not fit, or the model cannot be copied.

    >>> from sounding.models import Mlp
    >>> network = Mlp(16, 4, depth=3, width=16)
    >>> recommend(network, torch.randn(32, 16)).best.name
    'as it is'
    """
    root = check_model(model)
    try:
        root = copy.deepcopy(root)
    except Exception as error:
        raise UsageError(
            f"recommend works on a copy, and copying the model raised {type(error).__name__}: {error}",
            hint="sounding.plan(model, inputs, method=...), which needs no copy",
        ) from error
    batch, shown = open_batch(inputs, targets, fresh, repeats)
    start = take_snapshot(root)
    before = examine(root, shown, loss=loss, repeats=repeats, generator=generator)
    left_out = {method.name for method, _ in choose_methods(exclude)}  # unknown names are refused here
    blamed, told = _blame(root, shown[0], loss)
    listed = list_candidates(root, batch, before.report.verdict.findings)
    listed += [cure for cure in blamed if cure not in listed]
    candidates = [one for one in listed if not left_out & set(one[0])]
    tried: list[Tried] = []
    failed: list[tuple[str, str]] = []
    for done, cure in enumerate(candidates):
        name = " + ".join(cure[0]) or AS_IT_IS
        if progress is not None:
            progress(done, len(candidates), name)
        try:
            changed, after = 0, before
            if cure[0]:
                changed = _change(root, batch, cure, generator)
                after = examine(root, shown, loss=loss, repeats=repeats, generator=generator)
            tried.append(_tell(cure, before, after, changed))
        except (UsageError, NumericalError, TargetError) as error:
            failed.append((name, error.message))
        finally:
            start.restore()
    # nothing was found, and gradients would cross four times the depth: such a model needs no cure
    sound = not before.report.verdict.findings and _crosses(before.vitals)
    ranked = _rank(tried, sound=sound, special=blamed)
    untrained = Recommendation(ranked, tuple(failed), told, reason=_tell_why(ranked, blamed, 0))
    if sound or not steps:
        return untrained
    trained = {}
    for item in _likeliest(ranked, blamed):
        if progress is not None:
            progress(len(candidates), len(candidates), f"training with {item.name}")
        try:
            _change(root, batch, item._cure, generator)
            trained[id(item)] = _train(root, shown, loss, steps)
        finally:
            start.restore()
    if all(math.isnan(value) for value in trained.values()):
        return untrained
    known = [replace(item, trained=trained.get(id(item), math.nan)) for item in ranked]
    ranked = _rank_trained(known, blamed)
    return Recommendation(ranked, tuple(failed), told, steps, _tell_why(ranked, blamed, steps))


def _blame(model: nn.Module, batch: tuple[Any, Any], loss: str | Loss | None) -> tuple[list[Candidate], str]:
    """The cure for what theory blames, and a sentence about it; nothing where it blames nothing."""
    try:
        found = blame(read(model, *batch, loss=loss))
    except (SoundingError, RuntimeError, ValueError, ArithmeticError):
        return [], ""  # what theory cannot read is cured by measurement alone
    if found is None:
        return [], ""
    change, before, after = found
    healed = f"the worst of its numbers would fall from {before.worst:.3g} to {after.worst:.3g}"
    line = "where 1 is the line at which a verdict calls a network unhealthy"
    told = f"Theory blames one thing: {change.text}. Built {change.cure}, {healed}, {line}."
    return list_for_cause(change.kind, change.layer), told


def _change(model: nn.Module, batch: Inputs, cure: Candidate, generator: torch.Generator | None) -> int:
    """Apply cures and say how many parts they changed; one that changes nothing is refused."""
    count = 0
    for one, values in choose_methods(*cure):
        changes = one.run(model, batch, options=values, generator=generator)
        if not changes.changed:
            raise UsageError(f"{one.name} changes nothing here")
        count += len(changes.changed)
    return count


def _likeliest(ranked: Sequence[Tried], special: Sequence[Candidate]) -> list[Tried]:
    """The model as it is, what mends the audit's findings or what theory blames, and the best of the others."""
    mends = [item for item in ranked if _mends(item, special)]
    others = [item for item in ranked if item.methods and item not in mends]
    return [item for item in ranked if not item.methods] + mends[:OF_EACH] + others[:OF_EACH]


def _mends(item: Tried, special: Sequence[Candidate]) -> bool:
    """Whether cures only mend what the audit named or theory blames: they leave the rest as the network was made."""
    named = bool(item.methods) and set(item.methods) <= {"batch_statistics", *MENDS}
    return named or item._cure in special


def _train(model: nn.Module, shown: list[tuple[Any, Any]], loss: str | Loss | None, steps: int) -> float:
    """The loss after some steps of Adam by the better of two rates: infinite where it leaves the numbers, else NaN.

    It is the mean over the last quarter of the steps, on the batches of the evidence in turn, without dropout.
    """
    reached = []
    for rate in RATES:
        trained = copy.deepcopy(model)
        set_mode(trained, "train", dropout=False)  # dropout is noise in a comparison
        weights = [weight for weight in trained.parameters() if weight.requires_grad]
        if not weights:
            return math.nan
        optimizer = torch.optim.Adam(weights, rate)
        losses: list[float] = []
        for step in range(steps):
            inputs, targets = shown[step % len(shown)]
            try:
                value = training_loss(trained, inputs, targets, loss=loss)
            except UsageError:
                return math.nan
            losses.append(float(value.detach()))
            if not math.isfinite(losses[-1]):
                break
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        last = losses[-max(1, steps // 4) :]
        reached.append(sum(last) / len(last) if math.isfinite(losses[-1]) else math.inf)
    return min(reached)


def _rank_trained(ranked: Sequence[Tried], special: Sequence[Candidate]) -> tuple[Tried, ...]:
    """The cure that shows itself in training first: mending before starting anew, and of those the least change."""
    was = next(item for item in ranked if not item.methods)
    tried = [item for item in ranked if not math.isnan(item.trained)]
    best = min((STATUSES.index(item.status) for item in tried), default=0)
    pool = [item for item in tried if item.methods and STATUSES.index(item.status) == best]
    better = STATUSES.index(was.status) > best  # a cure that makes it healthy need not train faster as well
    line = was.trained * (1 + SHOWN if better else 1 - SHOWN)
    pool = [item for item in pool if item.trained <= line and math.isfinite(item.trained)]
    pool = [item for item in pool if _mends(item, special)] or pool  # what keeps the rest as it was made goes first
    first = was
    if pool:
        top = min(item.trained for item in pool)
        alike = [item for item in pool if item.trained <= top * (1 + SHOWN) + TINY]
        first = min(alike, key=lambda item: (item.changed, -item.score))
    return (first, *(item for item in ranked if item is not first))


def _tell_why(ranked: Sequence[Tried], special: Sequence[Candidate], steps: int) -> str:
    """Why the first cure is the first, as the end of a sentence."""
    first, was = ranked[0], next((item for item in ranked if not item.methods), None)
    if not first.methods:
        return ""
    only = "it changes only what the audit names or theory blames" if _mends(first, special) else ""
    if was is None or math.isnan(first.trained):
        highest = max(item.score for item in ranked if item.status == first.status)
        best = (
            "its score is the highest" if first.score == highest else "it needs the fewest cures of nearly that score"
        )
        return only or best
    losses = f"the loss after {steps} steps is {first.trained:.3g} with it and {was.trained:.3g} without"
    if only:
        return f"{only}, and {losses}; what draws the other weights anew comes after it"
    lowest = min(item.trained for item in ranked if not math.isnan(item.trained))
    return losses + ("" if first.trained == lowest else ", and it changes the least of those that train alike")


def score(vitals: Vitals) -> float:
    r"""How much of the signal arrives: what survives backwards times what survives forwards, from 0 to 1.

    Backwards $1 - s/16$, cut to [0, 1], with $s = |\ln g|\,(L - 1)$ the depth scales the network spans: one of more
    than 16 does not train (meanfield2019, figure 2), and training suffers long before. Up to 1 is free: such a rate is
    the noise of a fit. Forwards `Vitals.spread`, the share of the signal in which samples differ.
    """
    backwards = min(1.0, max(0.0, (LIMIT - vitals.depth_scales) / (LIMIT - FREE_SCALES)))
    found = backwards * vitals.spread
    return found if math.isfinite(found) else 0.0  # a network that gives no numbers lets no signal through


def _crosses(vitals: Vitals) -> bool:
    """Whether gradients would cross four times the depth."""
    return vitals.depth_scales <= LIMIT / MARGIN


def _rank(tried: list[Tried], *, sound: bool, special: Sequence[Candidate]) -> tuple[Tried, ...]:
    """Healthy ones first, by score; the first of all is the simplest among those that come close to the best.

    The cure of what theory blames (`special`) comes first where it makes the network sound: it leaves the rest alone.

    A sound model itself comes before every cure.
    """
    # Python sorts stably: of equals the one listed first stays first
    ordered = sorted(tried, key=lambda item: (STATUSES.index(item.status), -item.score, len(item.methods)))
    top = ordered[0]
    close = [item for item in ordered if item.status == top.status and item.score >= top.score - CLOSE]
    close += [item for item in ordered if sound and not item.methods]
    close += [item for item in ordered if item._cure in special and item.healthy and _crosses(item.vitals)]
    first = min(close, key=lambda item: (len(item.methods), item._cure not in special, -item.score))
    return (first, *(item for item in ordered if item is not first))


def _tell(cure: Candidate, before: State, after: State, changed: int) -> Tried:
    """The record of a cure that was tried: its score, its status and what it caused."""
    methods, options = cure
    old = {finding.kind for finding in before.report.verdict.findings}
    return Tried(
        methods=methods,
        options=options,
        vitals=after.vitals,
        status=after.report.verdict.status,
        score=score(after.vitals),
        cost="; ".join(dict.fromkeys(METHODS[name].cost for name in methods)),
        side_effects="; ".join(dict.fromkeys(METHODS[name].side_effects for name in methods)),
        caused=tuple(f.kind for f in after.report.verdict.findings if f.severity == "high" and f.kind not in old),
        changed=changed,
    )


def _number(value: float, form: str, *, before: str = "", after: str = "") -> str:
    """A number as a table shows it, a dash where there is none."""
    return f"{before}{value:{form}}{after}" if not math.isnan(value) else "–"
