"""Findings that do not count: kinds that were not selected or are ignored, and what a baseline has already."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sounding.errors import UsageError
from sounding.files import place
from sounding.probe.kinds import page_of
from sounding.probe.records import SEVERITIES, Finding, Report
from sounding.probe.verdict import conclude

Kinds = str | Sequence[str] | None
KEPT = ("kind", "severity", "layer", "parameter")  # what a baseline holds of a finding


@dataclass(frozen=True)
class Accepted:
    """Which findings of a report do not count.

    Args:
        select: the kinds that count; all of them where it is empty.
        ignore: kinds that do not.
        known: kind, parameter and severity of what was found before.
    """

    select: frozenset[str] = frozenset()
    ignore: frozenset[str] = frozenset()
    known: tuple[tuple[str, str | None, str], ...] = ()

    def __call__(self, report: Report) -> Report:
        """The report judged by the findings that count; the others stand in `verdict.set_aside`."""
        room = Counter(self.known)
        counted: list[Finding] = []
        aside: list[Finding] = []
        for finding in report.verdict.findings:
            wanted = finding.kind not in self.ignore and (not self.select or finding.kind in self.select)
            (counted if wanted and not _take(room, finding) else aside).append(finding)
        if not aside:
            return report
        verdict = conclude(report.reading, counted)
        kinds = ", ".join(dict.fromkeys(finding.kind for finding in aside))
        told = f"{verdict.sentence} Set aside: {kinds}."
        if verdict.healthy and all(finding.severity == "low" for finding in counted):
            told = f"all that was found is set aside: {kinds}."  # not that signal survives, which nobody knows then
        return replace(report, verdict=replace(verdict, sentence=told, set_aside=tuple(aside)))


def accepting(*, select: Kinds = None, ignore: Kinds = None, baseline: str | Path | Report | None = None) -> Accepted:
    """What to set aside, read and checked before any work.

    A finding about a parameter is known by its kind and the parameter. Any other is known by its kind, as often as the
    baseline has it, since the layer where it shows first may differ by a few between machines. One that is more severe
    than in the baseline counts.

    Args:
        select: kinds of findings that count, a list or names with commas; all by default.
        ignore: kinds that do not count.
        baseline: a report of before, or a file that `write_baseline` or `sounding check --json` wrote.

    >>> accepting(ignore="rank_collapse, dead_units").ignore == {"rank_collapse", "dead_units"}
    True
    """
    known: list[dict[str, Any]] = []
    if isinstance(baseline, Report):
        known = [finding.to_dict() for finding in (*baseline.verdict.findings, *baseline.verdict.set_aside)]
    elif baseline is not None:
        known = _read(Path(baseline))
    keys = tuple((str(one["kind"]), one.get("parameter"), str(one["severity"])) for one in known)
    return Accepted(_kinds(select), _kinds(ignore), keys)


def write_baseline(reports: Sequence[Report], path: str | Path) -> None:
    """Write the findings of some reports to a file that `baseline` takes: kind, severity and place, no numbers."""
    found = [one.to_dict() for report in reports for one in (*report.verdict.findings, *report.verdict.set_aside)]
    kept = sorted(({key: one[key] for key in KEPT} for one in found), key=lambda one: str(list(one.values())))
    place(Path(path), (json.dumps({"findings": kept}, indent=1) + "\n").encode())


def _kinds(names: Kinds) -> frozenset[str]:
    parts = names.split(",") if isinstance(names, str) else names or ()
    return frozenset(page_of(part).kind for part in parts if part.strip())


def _take(room: Counter[tuple[str, str | None, str]], finding: Finding) -> bool:
    """Whether the baseline has room for the finding: the same kind and parameter, and no less severe; it is used up."""
    for severity, rank in reversed(SEVERITIES.items()):
        key = finding.kind, finding.parameter, severity
        if rank <= SEVERITIES[finding.severity] and room[key] > 0:
            room[key] -= 1
            return True
    return False


def _read(path: Path) -> list[dict[str, Any]]:
    """The findings of a baseline file, those that were set aside among them."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the baseline {path}: {error.strerror}", hint="--write-baseline FILE") from error
    except ValueError as error:
        raise UsageError(f"expected JSON in the baseline {path}, got {error}", hint="--write-baseline FILE") from error
    found = content.get("findings") if isinstance(content, dict) else None
    if not isinstance(found, list) or not all(
        isinstance(one, dict) and isinstance(one.get("kind"), str) and one.get("severity") in SEVERITIES
        for one in found
    ):
        raise UsageError(f"expected findings in the baseline {path}, got none", hint="--write-baseline FILE")
    return [*found, *(content.get("verdict") or {}).get("set_aside", [])]
