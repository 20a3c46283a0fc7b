"""Which cure for this model: every applicable one is tried on a copy and ranked by what was measured."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn

from sounding.encoding import fields_of
from sounding.errors import NumericalError, SoundingError, TargetError, UsageError
from sounding.probe.losses import Loss, training_loss
from sounding.probe.records import SEVERITIES, STATUSES, Finding, Status, TheoryKind
from sounding.probe.state import set_mode
from sounding.probe.thresholds import THRESHOLDS
from sounding.reader.blame import blame
from sounding.reader.module import read
from sounding.repair.candidates import Candidate, list_candidates, list_for_cause
from sounding.repair.evidence import Fresh, Vitals, examine
from sounding.repair.mend import MENDS
from sounding.repair.methods import METHODS, choose_methods
from sounding.repair.passes import Inputs
from sounding.repair.plan import check_model, open_batch
from sounding.repair.snapshot import take_snapshot

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
        caused: kinds of findings of high severity that were not there before.
        changed: how many parts of the model it changes.
        trained: the loss that a few steps of training on a copy reach after it; NaN where it was not tried.
        findings: what the check finds then; what theory alone says is not among them, since no cure is a random draw.
    """

    methods: tuple[str, ...]
    options: dict[str, dict[str, Any]]
    vitals: Vitals
    status: Status
    caused: tuple[str, ...]
    changed: int = 0
    trained: float = math.nan
    findings: tuple[Finding, ...] = ()

    @property
    def name(self) -> str:
        """The methods, joined."""
        return " + ".join(self.methods) or AS_IT_IS

    @property
    def score(self) -> float:
        """How much of the signal arrives, forwards and backwards, from 0 to 1; see `score`."""
        return score(self.vitals)

    @property
    def cost(self) -> str:
        """What the cure costs, in words."""
        return "; ".join(dict.fromkeys(METHODS[name].cost for name in self.methods))

    @property
    def side_effects(self) -> str:
        """What the cure does beside, in words."""
        return "; ".join(dict.fromkeys(METHODS[name].side_effects for name in self.methods))

    @property
    def counts(self) -> list[int]:
        """How many findings there are of each severity, the highest first."""
        return [sum(one.severity == severity for one in self.findings) for severity in SEVERITIES]

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
    failed: tuple[tuple[str, str], ...] = ()
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
            left = ", ".join(dict.fromkeys(one.kind for one in best.findings if one.severity != "low"))
            return f"Recommended: {AS_IT_IS}" + (f"; no cure takes away {left} and serves as well" if left else "")
        better = " and trains no worse than it does now" if self.steps else ""
        return (
            f"Recommended: none of these; the network is {best.status}, and no cure that was tried makes it healthy"
            f"{better}"
        )

    def __str__(self) -> str:
        reached = "loss" if self.steps else ""
        head = ("cure", reached, "score", "gradient²/layer", "trainable to", "directions", "spread", "")
        rows = [head, *map(_tell, self.tried)]
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

    A cure is recommended only if it takes away something that the check finds: a finding of high or medium severity,
    or, by mending the one thing that the audit names or theory blames (`sounding.reader.blame`), one of low severity.
    Where there is something to train for, the likeliest also train for a few steps, each on a copy and by the better of
    two learning rates, and a cure must not train worse than the model as it is. What mends goes before what draws the
    network anew; of those that serve alike the one with the fewest methods and the least change comes first.

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
    blamed, cause = _blame(root, shown[0], loss)
    listed = list_candidates(root, batch, before.report.verdict.findings)
    listed += [cure for cure in blamed if cure not in listed]
    candidates = [one for one in listed if not left_out & set(one[0])]
    known = {finding.kind for finding in before.report.verdict.findings}
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
            verdict = after.report.verdict
            caused = tuple(one.kind for one in verdict.findings if one.severity == "high" and one.kind not in known)
            found = tuple(one for one in verdict.findings if one.kind not in get_args(TheoryKind))
            tried.append(Tried(*cure, after.vitals, verdict.status, caused, changed, findings=found))
        except (UsageError, NumericalError, TargetError) as error:
            failed.append((name, error.message))
        finally:
            start.restore()
    choice = _Choice(tuple(tried), blamed)
    if steps and choice.helping:
        trained = {}
        for item in choice.likeliest():
            if progress is not None:
                progress(len(candidates), len(candidates), f"training with {item.name}")
            try:
                _change(root, batch, (item.methods, item.options), generator)
                trained[id(item)] = _train(root, shown, loss, steps)
            finally:
                start.restore()
        if not all(math.isnan(value) for value in trained.values()):
            again = tuple(replace(item, trained=trained.get(id(item), math.nan)) for item in tried)
            choice = _Choice(again, blamed, steps)
    return Recommendation(choice.ranked(), tuple(failed), cause, choice.steps, choice.why())


@dataclass(frozen=True)
class _Choice:
    """How the cures that were tried compare, by their losses after some steps or, without these, by their scores."""

    tried: tuple[Tried, ...]
    blamed: list[Candidate]  # the cures of what theory blames
    steps: int = 0

    @property
    def was(self) -> Tried:
        """The model as it is."""
        return next(item for item in self.tried if not item.methods)

    @property
    def helping(self) -> list[Tried]:
        """The cures that take away what the check finds, the best first.

        Those that mend may heal a note, too; the others must leave less than mending does.
        """
        mends = [item for item in self.tried if self._mends(item)]
        least = min(map(self._weight, [self.was, *mends]))
        mending = [item for item in mends if self._heals(item) or item.counts < self.was.counts]
        return [item for item in self._ordered() if item in mending or self._weight(item) < least]

    def likeliest(self) -> list[Tried]:
        """What is worth training: the model as it is, some cures that mend, and some of the others."""
        mends = [item for item in self.helping if self._mends(item)]
        others = [item for item in self.helping if item not in mends]
        return [self.was, *mends[:OF_EACH], *others[:OF_EACH]]

    def ranked(self) -> tuple[Tried, ...]:
        """All of them, the one to take first, the others by what the check says and by score."""
        first = self._first()
        return (first, *(item for item in self._ordered() if item is not first))

    def why(self) -> str:
        """Why the first is the first, as the end of a sentence."""
        first = self._first()
        if not first.methods:
            return ""
        losses = f"the loss after {self.steps} steps is {first.trained:.3g} with it and {self.was.trained:.3g} without"
        if self._mends(first):
            only = "it changes only what the audit names or theory blames"
            return f"{only}, and {losses}; what draws the other weights anew comes after it" if self.steps else only
        lowest = self._loss(first) <= min(self._loss(item) for item in self._serving())
        if self.steps:
            return losses + ("" if lowest else ", and it is the simplest of those that train alike")
        return "its score is the highest" if lowest else "it needs the fewest cures of nearly that score"

    def _first(self) -> Tried:
        serving = self._serving()
        if not serving:
            return self.was
        line = min(map(self._loss, serving))
        line = line * (1 + SHOWN) + TINY if self.steps else line + CLOSE
        alike = [item for item in serving if self._loss(item) <= line]
        return min(alike, key=lambda one: (len(one.methods), one.changed, not self._is_blamed(one), self._loss(one)))

    def _serving(self) -> list[Tried]:
        """The cures to choose among: those of the best status that do no harm, and of them those that mend."""
        serving = [item for item in self.helping if self._serves(item)]
        best = min((STATUSES.index(item.status) for item in serving), default=0)
        serving = [item for item in serving if STATUSES.index(item.status) == best]
        return [item for item in serving if self._mends(item)] or serving

    def _serves(self, item: Tried) -> bool:
        """Whether the model does as well with the cure, and clearly better where only a note is healed."""
        if not self.steps:
            return item.status != self.was.status or item.score >= self.was.score - CLOSE
        line = self.was.trained * (1 + SHOWN if self._heals(item) else 1 - SHOWN) + TINY
        return item.trained <= line and math.isfinite(item.trained)

    def _heals(self, item: Tried) -> bool:
        return self._weight(item) < self._weight(self.was)

    def _weight(self, item: Tried) -> tuple[int, list[int]]:
        """How ill the network is: its status, and then how many findings of high and of medium severity it has."""
        return STATUSES.index(item.status), item.counts[:2]

    def _mends(self, item: Tried) -> bool:
        """Whether cures mend only what the audit named or theory blames, and leave the rest as it was made."""
        named = bool(item.methods) and set(item.methods) <= {"batch_statistics", *MENDS}
        return named or self._is_blamed(item)

    def _is_blamed(self, item: Tried) -> bool:
        return (item.methods, item.options) in self.blamed

    def _loss(self, item: Tried) -> float:
        return item.trained if self.steps else 1 - item.score

    def _ordered(self) -> list[Tried]:
        # Python sorts stably: of equals the one listed first stays first
        return sorted(self.tried, key=lambda item: (STATUSES.index(item.status), -item.score, len(item.methods)))


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
            raise UsageError(changes.why_nothing)
        count += len(changes.changed)
    return count


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


def score(vitals: Vitals) -> float:
    r"""How much of the signal arrives: what survives backwards times what survives forwards, from 0 to 1.

    Backwards $1 - s/16$, cut to [0, 1], with $s = |\ln g|\,(L - 1)$ the depth scales the network spans: one of more
    than 16 does not train (meanfield2019, figure 2), and training suffers long before. Up to 1 is free: such a rate is
    the noise of a fit. Forwards `Vitals.spread`, the share of the signal in which samples differ.
    """
    backwards = min(1.0, max(0.0, (LIMIT - vitals.depth_scales) / (LIMIT - FREE_SCALES)))
    found = backwards * vitals.spread
    return found if math.isfinite(found) else 0.0  # a network that gives no numbers lets no signal through


def _tell(item: Tried) -> tuple[str, ...]:
    """A cure as a row of the table, a dash where a number is not there."""

    def number(value: float, form: str, empty: str = "–") -> str:
        return empty if math.isnan(value) else form.format(value)

    vitals = item.vitals
    return (
        item.name,
        number(item.trained, "{:.4g}", ""),
        f"{item.score:.3f}",
        number(vitals.growth.value, "×{:.4g}"),
        "any depth" if vitals.trainable_depth > 1e5 else number(vitals.trainable_depth, "{:.0f} layers"),
        number(vitals.participation_ratio.value, "{:.3g}"),
        number(vitals.spread, "{:.3g}"),
        "" if item.healthy else item.status + (f", causes {', '.join(item.caused)}" if item.caused else ""),
    )
