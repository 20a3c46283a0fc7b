"""The report's prose as HTML: every name, number and sentence escaped."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping

from sounding import __version__
from sounding.errors import clean
from sounding.look import write_evidence, write_share
from sounding.probe.findings.collapse import share_outside
from sounding.probe.kinds import page_of
from sounding.probe.reading import Reading
from sounding.probe.records import Finding, Report
from sounding.report.words import EVIDENCE, PAPERS

Reports = Mapping[str, Report]
STATES = {"healthy": "good", "unhealthy": "bad", "not known": "unknown"}  # of a verdict: the class of its card


def escape(text: str) -> str:
    """Text that is neither markup nor steers a terminal that shows the page: names of modules are a stranger's.

    >>> escape("<b>\\x1b")
    '&lt;b&gt;␛'
    """
    return html.escape(clean(text))


def pairs(items: Iterable[tuple[str, str]]) -> str:
    """A list of terms and what they stand for, both of them HTML."""
    return f'<dl class="pairs">{"".join(f"<dt>{term}</dt><dd>{body}</dd>" for term, body in items)}</dl>'


def row(head: str, *cells: str) -> str:
    """A row of a table: its heading and its cells as text."""
    return f"<tr><th scope=row>{escape(head)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def write_title(reports: Reports) -> str:
    """The page's title as text."""
    names = [name for name in reports if name]
    return escape("Depth check" + (f": {' · '.join(names)}" if names else ""))


def write_verdicts(reports: Reports) -> str:
    """A card per network: healthy, unhealthy or not known, in words, then the few numbers that say it."""
    return "".join(_write_verdict(name, report) for name, report in reports.items())


def _write_verdict(name: str, report: Report) -> str:
    verdict = report.verdict
    warned = verdict.status == "healthy" and verdict.findings
    state = "warn" if warned else STATES[verdict.status]
    sentence = verdict.sentence[:1].upper() + verdict.sentence[1:]
    partial = '<p class="partial" role="note">Interrupted: this is what was measured until then.</p>'
    data, start = str(report.environment.get("data", "")), report.profile.settings.get("start")
    lines = (("network", name), ("data", data and f"Data: {data}"), ("data", str(start["sentence"]) if start else ""))
    heading = "".join(f'<p class="{kind}">{escape(text)}</p>' for kind, text in lines if text)
    figures = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in _figures(report.reading)
    )
    return (
        f'<article class="verdict {state}">{heading}'
        f'<h2><span class="mark" aria-hidden="true"></span>{escape(verdict.head)}</h2>'
        f'<p class="summary">{escape(sentence)}</p>{partial if report.profile.settings.get("partial") else ""}'
        f'<dl class="figures">{figures}</dl></article>'
    )


def _figures(reading: Reading) -> Iterable[tuple[str, str]]:
    """The few numbers of a card, with their names."""
    if not reading.calls:
        return
    layers = reading.weight_layers or reading.calls
    yield "weight layers", f"{len(reading.weight_layers)}"
    # the input has none where it is tokens
    first, last = reading.input.get("participation_ratio"), layers[-1].get("participation_ratio")
    if math.isfinite(last):
        start = [first] if math.isfinite(first) else []
        yield "directions", " → ".join(f"{value:#.3g}" for value in [*start, last])
        yield "spread", " → ".join(write_share(share_outside(value)) for value in [*start, last])
    growth = reading.network.get("gradient_growth")
    if growth is not None and math.isfinite(growth.value):
        yield "gradient growth", f"×{growth}"


def write_findings(reports: Reports) -> str:
    """Findings by network, worst first, or a sentence that there is none."""
    text = ""
    for name, report in reports.items():
        findings = "".join(_write_finding(finding) for finding in report.verdict.findings)
        text += f"<div>{_heading(name, reports)}{findings or '<p class=quiet>Nothing to report.</p>'}</div>"
    return text


def _heading(name: str, reports: Reports) -> str:
    return f"<h3>{escape(name)}</h3>" if len(reports) > 1 else ""


def _write_finding(finding: Finding) -> str:
    """One finding: title, place, reason, evidence in numbers, and what to try."""
    where = finding.parameter or finding.layer
    call = "" if finding.depth is None else f" · call {finding.depth}"
    place = "" if where is None else f'<p class="place">at <code>{escape(where)}</code>{call}</p>'
    told = finding.evidence.items()
    rows = "".join(row(EVIDENCE.get(key, key.replace("_", " ")), write_evidence(value)) for key, value in told)
    numbers = f"<details><summary>Evidence in numbers</summary><table>{rows}</table></details>" if rows else ""
    remedies = "".join(f"<li>{_write_remedy(remedy)}</li>" for remedy in finding.remedies)
    title = page_of(finding.kind).title
    return (
        f'<article class="finding {finding.severity}"><header><h4>{escape(title)}</h4>'
        f'<span class="severity">{finding.severity} severity</span></header>{place}'
        f"<p>{escape(finding.why)}</p>"
        + (f'<p class="try">What to try</p><ol>{remedies}</ol>' if remedies else "")
        + f"{numbers}</article>"
    )


def _write_remedy(remedy: str) -> str:
    """A command to type looks like one.

    >>> _write_remedy("sounding repair TARGET --method haar: orthogonal weights")
    '<code>sounding repair TARGET --method haar</code><br>orthogonal weights'
    >>> _write_remedy("sounding repair net.py:make --method haar,lsuv")
    '<code>sounding repair net.py:make --method haar,lsuv</code>'
    """
    word = r" (?:'[^']*'|[^\s'-][^\s']*?)(?=:?\s|:?$)"  # up to the colon that a reason follows
    command = re.match(rf"sounding (?:audit|check|repair)(?:{word})?(?: --[a-z-]+{word})*", remedy)
    if command is None:
        return escape(remedy)
    rest = remedy[command.end() :]
    after = f"<br>{escape(rest[2:])}" if rest.startswith(": ") else escape(rest)
    return f"<code>{escape(command[0])}</code>{after}"


def write_theory(reports: Reports) -> str:
    """What the dashed lines are, or why there are none."""
    notes = []
    for name, report in reports.items():
        theory = report.profile.settings.get("theory")
        if isinstance(theory, Mapping) and theory.get("note"):
            does = "dashed lines are theory" if theory.get("applied") else "no theory is drawn"
            start = f"{name}: {does}" if len(reports) > 1 else does.capitalize()
            notes.append(f'<p class="note">{escape(start)}, {escape(str(theory["note"]))}.</p>')
    return "".join(notes)


def write_unmeasured(reports: Reports) -> str:
    """What could not be measured, with the reason; all of it, folded where long."""
    parts = []
    for name, report in reports.items():
        if not report.unmeasured:
            continue
        items = [(f"<code>{escape(item.name)}</code>", escape(item.reason)) for item in report.unmeasured]
        body = pairs(items[:10])
        if rest := items[10:]:
            body += f"<details><summary>{len(rest)} more</summary>{pairs(rest)}</details>"
        parts.append(_heading(name, reports) + body)
    return "".join(parts) or "<p class=quiet>Everything was measured.</p>"


def write_environment(reports: Reports) -> str:
    """Where and how it ran; settings that all networks share are told once."""
    merged: dict[str, dict[str, None]] = {}  # a mapping keeps the order and holds each text once
    for report in reports.values():
        for key, value in report.environment.items():
            parts = value if isinstance(value, list | tuple) else ["–" if value is None else value]
            merged.setdefault(str(key), {})[" × ".join(map(str, parts))] = None
    items = [(escape(key.replace("_", " ")), escape(" / ".join(values))) for key, values in merged.items()]
    return pairs(items) if items else "<p class=quiet>Not recorded.</p>"


def write_citation(reports: Reports) -> str:
    """How to cite the tool, and the papers the findings of this report rest on."""
    # in the order of the list, not of the findings; without findings all of them
    keys = [key for key in PAPERS if any(f.paper == key for r in reports.values() for f in r.verdict.findings)]
    papers = "".join(
        f'<li><span class="key">{escape(key)}</span> {escape(PAPERS[key])}</li>' for key in keys or list(PAPERS)
    )
    rest = "The findings above rest on" if keys else "The measures rest on"
    bibtex = (
        "@software{sounding,\n  title   = {Sounding: how signal travels through very deep networks},\n"
        f"  version = {{{__version__}}},\n  year    = {{2026}}\n}}"
    )
    return f'<pre>{escape(bibtex)}</pre><p>{rest}</p><ul class="papers">{papers}</ul>'
