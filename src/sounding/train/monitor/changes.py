"""What is new since the last measured step: findings that appear, change in severity or go, and limits crossed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from sounding.errors import UsageError
from sounding.probe.inside.precision import HEADROOM
from sounding.probe.reading import Reading
from sounding.probe.records import SEVERITIES, Finding, Severity
from sounding.profile import Row
from sounding.train.monitor.moved import UPDATE_RATIO
from sounding.train.monitor.selection import KNOWN

Change = Literal["appeared", "worsened", "eased", "gone"]
Limits = Mapping[str, tuple[float | None, float | None]]
WHOLE = frozenset({"gradient_explosion", "gradient_vanishing", "gradient_alignment"})  # about no single layer
# Measured steps that must agree before something is said to ease or to go. With two, a number that crosses its line at
# every third step still makes news each time; each more delays the good news by one measured step.
HELD = 3
# A finding is milder only where one of its numbers has moved by more than this share: two batches of one network differ
# by some hundredths, and a severity that has its line in between would ease while the numbers get worse.
MOVED = 0.1
# A step that moves a layer's weights by more than this share of their size is told. Of 22 trainings on digits (SGD and
# Adam, 2 and 10 layers), the loss rose to more than 1.3 times its start in 7 of the 8 whose first step moved a layer by
# more than 0.3, and in none of the others (bench/update_ratio.py).
LARGE_UPDATE = 0.3
# A layer whose numbers have less than one bit left, a factor of two, is told before they overflow or vanish.
LITTLE_ROOM = 1.0
OWN_LIMITS: Limits = {UPDATE_RATIO: (None, LARGE_UPDATE), HEADROOM: (LITTLE_ROOM, None)}


# a finding in a few words, with the numbers of its evidence
PHRASES = {
    "gradient_alignment": "all samples ask for the same update",
    "degenerate_batch": "the samples of the batch are alike",
    "batch_too_small": "the batch is too small for batch normalization",
    "dead_units": "{dead_fraction:.0%} of the units are dead",
    "saturation": "{saturated_fraction:.0%} of the units are saturated",
    "non_finite": "NaN or infinity appears",
    "entropy_collapse": "attention looks at few keys (scores of standard deviation {score_std:.3g})",
    "token_collapse": "tokens become alike ({apart_at_last:.2g} of their signal differs)",
    "massive_activation": "an entry of the stream is {largest_over_median:.3g} times the median",
    "odd_branch": "a branch writes {branch_over_siblings:.3g} times what its siblings write",
    "shut_gates": "gates are shut ({found} open in the mean)",
    "router_collapse": "{dead_expert_fraction:.0%} of the experts get no token",
}


@dataclass(frozen=True)
class Event:
    """One piece of news: at which step, what changed, where, and the sentence that says it.

    Args:
        step: how many steps had been taken before the one that was measured.
        change: "appeared", "worsened", "eased" or "gone".
        kind: the kind of a finding, or the measure whose limit was crossed.
        severity: of the finding now (before it went, for "gone"); "medium" for a limit.
        layer: the name of the module, None when it is about the whole network.
        depth: its place in execution order, the `layer` column of the profile.
        text: one sentence.
        evidence: the numbers behind it.
    """

    step: int
    change: Change
    kind: str
    severity: Severity
    layer: str | None
    depth: int | None
    text: str
    evidence: Mapping[str, float]

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self) | {"evidence": dict(self.evidence)}


class Changes:
    """Compares each measured step with the ones before.

    What is told is the worst of the last `HELD` measured steps: what gets worse is told at once, what eases or goes
    when that many steps in a row have shown it, so that a number at its line does not make news at every step.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = _checked(limits)
        self._seen: deque[dict[str, Finding]] = deque(maxlen=HELD)
        self._firm: dict[str, Finding] = {}
        self._beyond: dict[tuple[str, str], deque[frozenset[int]]] = {key: deque(maxlen=HELD) for key in self._limits}

    def hold(self, findings: Sequence[Finding]) -> list[Finding]:
        """The findings of a step, each as severe as it was while its numbers are what they were."""
        held = []
        for finding in findings:
            old = self._firm.get(finding.kind)
            if (
                old is not None
                and SEVERITIES[old.severity] < SEVERITIES[finding.severity]
                and not _has_moved(old, finding)
            ):
                held.append(replace(finding, severity=old.severity))
            else:
                held.append(finding)
        # a finding that was held leaves the numbers at which its severity was measured
        kept = {one.kind: self._firm[one.kind] for one, now in zip(findings, held, strict=True) if now is not one}
        self._firm = {}
        for finding in reversed(held):
            self._firm[finding.kind] = kept.get(finding.kind, finding)
        return held

    def since(
        self, step: int, findings: Sequence[Finding], reading: Reading, *, rows: Sequence[Row] = ()
    ) -> tuple[Event, ...]:
        """The news of this step, findings first; the step is the new state to compare with.

        `reading` was measured at modules, `rows` between them.
        """
        return (*self._of_findings(step, findings, reading), *self._of_limits(step, reading, rows))

    def _of_findings(self, step: int, findings: Sequence[Finding], reading: Reading) -> Iterator[Event]:
        """The news among the findings of a step, against the worst of the last measured ones."""
        before, first = _worst(self._seen), not self._seen
        shown: dict[str, Finding] = {finding.kind: finding for finding in findings}
        # Nothing can be read behind a NaN, and nothing about gradients where none came back (a step skipped for
        # overflow): that such a step shows no finding says nothing.
        broken, dumb = shown.get("non_finite"), "gradient_log_norm" not in reading
        blind = broken is not None and broken.severity == "high"
        unseen = ((kind, old) for kind, old in before.items() if kind not in shown)
        hidden = {kind: old for kind, old in unseen if blind or (dumb and kind.startswith("gradient"))}
        self._seen.append(hidden | shown)
        now = _worst(self._seen)
        for kind, finding in now.items():
            old = before.get(kind)
            if old is not None and old.severity == finding.severity:
                continue
            change: Change = "appeared"
            if old is not None:
                change = "worsened" if SEVERITIES[finding.severity] < SEVERITIES[old.severity] else "eased"
            said = _phrase(finding, first=first)
            note = "" if change == "appeared" else f" ({change}: {finding.severity} severity)"
            where = (
                "" if finding.kind in WHOLE and "jump" not in finding.evidence else _where(finding.depth, finding.layer)
            )
            yield _event(step, change, finding, f"{said}{where}, step {step}{note}")
        for kind, finding in before.items():
            if kind not in now:
                yield _event(step, "gone", finding, f"{kind} is gone, step {step}")

    def _of_limits(self, step: int, reading: Reading, between: Sequence[Row]) -> Iterator[Event]:
        """The news about limits: layers that crossed one, or that none does any more."""
        for (measure, side), line in self._limits.items():
            inner = (row for row in between if row.measure == measure)
            rows = [row for row in (*reading.rows({measure}), *inner) if not math.isnan(row.value)]
            crossed = [row for row in rows if (row.value < line if side == "below" else row.value > line)]
            held = self._beyond[measure, side]
            before: frozenset[int] = frozenset().union(*held)
            first = not held  # nothing has fallen or risen yet: it is so from the start
            shown = {row.layer for row in rows}
            # layers that this step did not show keep what they had
            hidden = {layer for layer in before if layer not in shown and layer <= len(reading.layers)}
            held.append(frozenset(hidden | {row.layer for row in crossed}))
            fresh = [row for row in crossed if row.layer not in before]
            if fresh:
                yield _crossing(step, fresh, side, line, first=first)
            elif before and not any(held):
                text = f"{_words(measure)} is no longer {side} {line:g}, step {step}"
                yield Event(step, "gone", measure, "medium", None, None, text, {"limit": line})


def _worst(steps: Iterable[Mapping[str, Finding]]) -> dict[str, Finding]:
    """Each kind of finding as the step showed it where it was worst, the latest of several."""
    found: dict[str, Finding] = {}
    for shown in steps:
        for kind, finding in shown.items():
            if kind not in found or SEVERITIES[finding.severity] <= SEVERITIES[found[kind].severity]:
                found[kind] = finding
    return found


def _has_moved(old: Finding, new: Finding) -> bool:
    """Whether a number of a finding is another one: one that its phrase tells, where it tells any."""
    shared = old.evidence.keys() & new.evidence.keys()
    told = {key for key in shared if f"{{{key}:" in PHRASES.get(new.kind, "")} or shared
    return not told or any(abs(new.evidence[key] - old.evidence[key]) > MOVED * abs(old.evidence[key]) for key in told)


def _event(step: int, change: Change, finding: Finding, text: str) -> Event:
    layer, depth = finding.layer, finding.depth
    return Event(step, change, finding.kind, finding.severity, layer, depth, text, finding.evidence)


def _crossing(step: int, fresh: Sequence[Row], side: str, line: float, *, first: bool) -> Event:
    row = fresh[0]
    verb = "is" if first else "fell" if side == "below" else "rose"
    more = f" and {len(fresh) - 1} more" if len(fresh) > 1 else ""
    text = f"{_words(row.measure)} {verb} {side} {line:g}{_where(row.layer, row.name)}{more}, step {step}"
    evidence = {"value": row.value, "limit": line, "layers": float(len(fresh))}
    # JSON has no number for the others
    finite = {key: value for key, value in evidence.items() if math.isfinite(value)}
    return Event(step, "appeared", row.measure, "medium", row.name, row.layer, text, finite)


def _phrase(finding: Finding, *, first: bool) -> str:
    """What a finding says in a few words; the place and the step follow."""
    evidence, kind = finding.evidence, finding.kind
    if kind == "rank_collapse":
        # share_outside(r) = 1 − r^(−1/2) is below its line where the participation ratio r is below 1 + excess
        excess = math.expm1(-2 * math.log1p(-evidence["line"])) if "line" in evidence else 1.0
        if excess >= 0.01:
            return f"rank {'is' if first else 'fell'} below {1 + excess:.3g}"
        return f"rank {'is' if first else 'fell to'} 1 within {excess:.1g}"  # no rank is below 1
    if kind in ("gradient_explosion", "gradient_vanishing"):
        if "jump" in evidence:
            return f"gradients jump by ×{evidence['jump']:.3g} (squared norm)"
        if "growth" in evidence:
            verb = "grow" if kind == "gradient_explosion" else "shrink"
            return f"gradients {verb} by ×{evidence['growth']:.3g} per weight layer (squared norm)"
        return "no gradient reaches any weight"
    # findings about the start, which a check has and a monitor does not, are told as they were found
    return PHRASES.get(kind, "{found}").format(found=finding.found, **evidence)


def _where(depth: int | None, layer: str | None) -> str:
    if depth is None:
        return ""
    return f" at layer {depth} ({layer!r})" if layer else f" at layer {depth}"


def _words(measure: str) -> str:
    return measure.replace("_", " ")


def _checked(limits: Limits | None) -> dict[tuple[str, str], float]:
    """One entry per line: (measure, "below" or "above") → value."""
    found: dict[tuple[str, str], float] = {}
    for measure, pair in {**OWN_LIMITS, **(limits or {})}.items():  # a line of the user replaces ours
        ends = pair if isinstance(pair, tuple) and len(pair) == 2 else None
        if measure not in KNOWN or ends is None or not all(end is None or isinstance(end, int | float) for end in ends):
            raise UsageError(
                f"expected limits= measures with a pair (lowest, highest), got {measure!r}: {pair!r}",
                hint="limits={'participation_ratio': (2, None)}",
            )
        for side, end in zip(("below", "above"), ends, strict=True):
            if end is not None:
                found[measure, side] = float(end)
    return found
