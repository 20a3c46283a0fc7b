"""What a check returns: findings, a verdict, a report. Frozen records of plain fields; methods only convert."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from sounding.encoding import fields_of
from sounding.probe.reading import Reading, read
from sounding.profile import Profile

Severity = Literal["low", "medium", "high"]
SEVERITIES: dict[str, int] = {"high": 0, "medium": 1, "low": 2}  # places in a list, the worst first
Status = Literal["healthy", "not known", "unhealthy"]
STATUSES: tuple[Status, ...] = ("healthy", "not known", "unhealthy")  # from best to worst
MeasuredKind = Literal[
    "rank_collapse",
    "gradient_explosion",
    "gradient_vanishing",
    "gradient_alignment",
    "degenerate_batch",
    "batch_too_small",
    "dead_units",
    "saturation",
    "non_finite",
]
StartKind = Literal[
    "parameter_not_finite",
    "never_written",
    "constant_weight",
    "zero_start",
    "cloned_weights",
    "odd_scale",
    "fans_exchanged",
    "norm_weight",
    "large_bias",
    "config_law",
    "meta_law",
    "start_loss",
    "class_imbalance",
    "softmax_twice",
    "huge_signal",
    "frozen",
    "detached",
    "unused",
    "behind_zeros",
]
TheoryKind = Literal["disagreement", "cause"]
InsideKind = Literal[
    "entropy_collapse", "token_collapse", "massive_activation", "odd_branch", "shut_gates", "router_collapse",
    "mixed_samples", "target_leak", "unused_input", "wrong_axis", "activation",
]  # fmt: skip
FindingKind = Literal[MeasuredKind, StartKind, TheoryKind, InsideKind]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: what, how bad, where, in numbers, why, and what to try.

    Args:
        kind: one of the kinds that `sounding explain` describes.
        severity: "high" makes a network unhealthy; "medium" and "low" are warnings.
        layer: the name of the module where it shows first, or None when it is about the whole network.
        depth: that module's place in execution order (the `layer` column of the profile), or None.
        evidence: the numbers behind it.
        why: one sentence, with what the theory says.
        paper: the key of the paper it comes from.
        remedies: what to try, the likeliest first.
        parameter: the name of the parameter it is about, or None.
        expected: what a sound start has there, in words, "" where the reason says it.
        found: what is there instead.
    """

    kind: FindingKind
    severity: Severity
    layer: str | None
    depth: int | None
    evidence: Mapping[str, float]
    why: str
    paper: str
    remedies: tuple[str, ...]
    parameter: str | None = None
    expected: str = ""
    found: str = ""

    @property
    def seed(self) -> str:
        """The old name of `paper`."""
        warnings.warn("Finding.seed is now Finding.paper", DeprecationWarning, stacklevel=2)
        return self.paper

    def for_target(self, target: str) -> Finding:
        """The finding with commands that name this target of the command line in place of TARGET."""
        word = shlex.quote(target)
        return replace(self, remedies=tuple(re.sub(r"\bTARGET\b", lambda _: word, one) for one in self.remedies))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; the remedies are called "try"."""
        told = fields_of(self, "kind severity layer depth parameter expected found evidence why paper")
        # "seed" was the name of "paper" up to version 0.1
        return {**told, "seed": self.paper, "try": list(self.remedies)}


@dataclass(frozen=True)
class Verdict:
    """Healthy, unhealthy or not known, and the findings, worst first.

    Args:
        status: "unhealthy" with a finding of high severity; without one "healthy", or "not known" where too little was
            measured to say so.
        findings: what is wrong, worst first.
        sentence: why, in one or two sentences that begin in lower case.
        not_judged: what was not looked at, a phrase each.
        warnings: how many findings warn; the others of a healthy network are notes.
        set_aside: findings that do not count, since they were ignored, not selected, or in the baseline.
    """

    status: Status
    findings: tuple[Finding, ...]
    sentence: str
    not_judged: tuple[str, ...] = ()
    warnings: int = 0
    set_aside: tuple[Finding, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether the network is known to be healthy; False as well where that is not known."""
        return self.status == "healthy"

    @property
    def head(self) -> str:
        """The status in words, with the number of warnings."""
        warned = "a warning" if self.warnings == 1 else f"{self.warnings} warnings"
        return f"{self.status.capitalize()}{f', with {warned}' if self.warnings else ''}"

    @property
    def summary(self) -> str:
        """The status and why, in one or two sentences."""
        return f"{self.head}: {self.sentence}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return fields_of(self, "status healthy summary not_judged set_aside findings")


@dataclass(frozen=True)
class Unmeasured:
    """A module or quantity that could not be measured, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The result of `sounding.check`: the profile, the verdict, what was not measured, and where it ran."""

    profile: Profile
    verdict: Verdict
    unmeasured: tuple[Unmeasured, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)

    def for_target(self, target: str) -> Report:
        """The report with remedies that name this target of the command line in place of TARGET."""
        findings = tuple(finding.for_target(target) for finding in self.verdict.findings)
        return replace(self, verdict=replace(self.verdict, findings=findings))

    @cached_property
    def reading(self) -> Reading:
        """The profile as records, one per layer call."""
        return read(self.profile)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: verdict, findings, profile, unmeasured, environment."""
        verdict = self.verdict.to_dict()
        findings = verdict.pop("findings")
        return {"verdict": verdict, "findings": findings, **fields_of(self, "profile unmeasured environment")}
