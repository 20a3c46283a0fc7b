"""`sounding check --summary FILE`: verdict, findings and layers in Markdown, as the pages of CI services show it."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sounding.cli.table import COLUMNS, group_calls
from sounding.errors import clean
from sounding.files import cannot_write

if TYPE_CHECKING:
    from sounding.probe.records import Report
    from sounding.train.trial import Trial

MARKS = {"healthy": "✅", "not known": "❔", "unhealthy": "❌"}


def append_summary(reports: Mapping[str, Report], path: Path, *, trials: Mapping[str, Trial]) -> None:
    """Write the summary behind what the file has: several checks of one CI step make one page."""
    text = "".join(write_summary(name, report, trials.get(name)) for name, report in reports.items())
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise cannot_write(path, error) from error


def write_summary(name: str, report: Report, trial: Trial | None = None) -> str:
    """One network in Markdown: the verdict, a table of its findings, what to try, and a table over depth.

    >>> from sounding.probe.records import Report, Verdict
    >>> from sounding.profile import Profile
    >>> print(write_summary("net", Report(Profile(), Verdict("not known", (), "nothing was measured."))))
    ## ❔ net
    <BLANKLINE>
    **Not known: nothing was measured.**
    <BLANKLINE>
    """
    verdict = report.verdict
    parts = [f"## {MARKS[verdict.status]} {_escape_markdown(name)}", f"**{_escape_markdown(verdict.summary)}**"]
    if "data" in report.environment:
        parts.append(_escape_markdown(f"On {report.environment['data']}."))
    if trial is not None:
        parts.append(_escape_markdown(trial.sentence))
    if verdict.findings:
        rows, tries = [], []
        for one in verdict.findings:
            where, why = _escape_markdown(one.parameter or one.layer or ""), _escape_markdown(one.why)
            rows.append((f"`{one.kind}`", one.severity, where, why))
            if one.remedies:
                tries.append(f"- `{one.kind}`: {_escape_markdown('; '.join(one.remedies))}")
        parts.append(_table(("finding", "severity", "where", "why"), rows))
        parts.append(_fold("What to try", "\n".join(tries)))
    reading = report.reading
    if reading.calls:
        groups, _ = group_calls(reading)
        cells = [(group.place, _escape_markdown(group.write_name(60)),
                  *(column.write(group.value(column.measure)) for column in COLUMNS)) for group in groups]  # fmt: skip
        parts.append(_fold("Layers", _table(("call", "module", *(column.heading for column in COLUMNS)), cells)))
    return "\n\n".join(parts) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    # GitHub shows rows as a table only below a line of dashes
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _fold(title: str, body: str) -> str:
    # the empty lines let Markdown inside of HTML be read as Markdown
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _escape_markdown(text: str) -> str:
    """Text as it stands: a stranger's names must not make markup, cells or lines of their own."""
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", html.escape(clean(" ".join(text.split())), quote=False))
