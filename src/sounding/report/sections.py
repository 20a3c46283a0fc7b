"""The report's prose as HTML: every name, number and sentence escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from sounding import __version__
from sounding.probe.findings.collapse import share_outside
from sounding.probe.kinds import page_of
from sounding.probe.reading import Reading
from sounding.probe.records import Finding, Report
from sounding.profile import Estimate
from sounding.report.text import escape
from sounding.report.words import EVIDENCE, PAPERS

Reports = Mapping[str, Report]


def write_title(reports: Reports) -> str:
    """The page's title as text."""
    names = [name for name in reports if name]
    return escape("Depth check" + (f": {' · '.join(names)}" if names else ""))


def write_verdicts(reports: Reports) -> str:
    """A card per network: healthy, unhealthy or not known, in words, then the few numbers that say it."""
    return "".join(_write_verdict(name, report) for name, report in reports.items())


def _write_verdict(name: str, report: Report) -> str:
    """The card of one network: its state in a word, the sentence, and the few numbers."""
    verdict = report.verdict
    state = {"unhealthy": "bad", "not known": "unknown", "healthy": "warn" if verdict.findings else "good"}[
        verdict.status
    ]
    word = {"bad": "Unhealthy", "unknown": "Not known", "warn": "Healthy, with warnings", "good": "Healthy"}[state]
    sentence = verdict.sentence[:1].upper() + verdict.sentence[1:]
    partial = (
        '<p class="partial" role="note">Interrupted: this is what was measured until then.</p>'
        if report.profile.settings.get("partial")
        else ""
    )
    data = str(report.environment.get("data", ""))
    heading = f'<p class="network">{escape(name)}</p>' if name else ""
    heading += f'<p class="data">Data: {escape(data)}</p>' if data else ""
    start = report.profile.settings.get("start")
    heading += f'<p class="data">{escape(str(start["sentence"]))}</p>' if start else ""
    figures = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in _figures(report.reading)
    )
    return (
        f'<article class="verdict {state}">{heading}'
        f'<h2><span class="mark" aria-hidden="true"></span>{escape(word)}</h2>'
        f'<p class="summary">{escape(sentence)}</p>{partial}<dl class="figures">{figures}</dl></article>'
    )


def _figures(reading: Reading) -> Iterable[tuple[str, str]]:
    """The few numbers of a card, with their names."""
    if not reading.calls:
        return
    layers = reading.weight_layers or reading.calls
    yield "weight layers", f"{len(reading.weight_layers)}"
    first, last = reading.input.get("participation_ratio"), layers[-1].get("participation_ratio")
    if math.isfinite(last):
        start = [first] if math.isfinite(first) else []
        yield "directions", " → ".join(f"{value:#.3g}" for value in [*start, last])
        yield "spread", " → ".join(write_percent(share_outside(value)) for value in [*start, last])
    growth = reading.network.get("gradient_growth")
    if growth is not None and math.isfinite(growth.value):
        yield "gradient growth", f"×{growth}"


def write_findings(reports: Reports) -> str:
    """Findings by network, worst first, or a sentence that there is none."""
    columns = []
    for name, report in reports.items():
        heading = f"<h3>{escape(name)}</h3>" if len(reports) > 1 else ""
        findings = "".join(_write_finding(finding) for finding in report.verdict.findings)
        columns.append(f"<div>{heading}{findings or '<p class=quiet>Nothing to report.</p>'}</div>")
    return "".join(columns)


def _write_finding(finding: Finding) -> str:
    """One finding: title, place, reason, evidence in numbers, and what to try."""
    place = ""
    where = finding.parameter or finding.layer
    if where is not None:
        call = "" if finding.depth is None else f" · call {finding.depth}"
        place = f'<p class="place">at <code>{escape(where)}</code>{call}</p>'
    rows = "".join(
        f"<tr><th scope=row>{escape(EVIDENCE.get(key, key.replace('_', ' ')))}</th>"
        f"<td>{escape(write_number(value))}</td></tr>"
        for key, value in finding.evidence.items()
    )
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
        heading = f"<h3>{escape(name)}</h3>" if len(reports) > 1 else ""
        items = [f"<dt><code>{escape(i.name)}</code></dt><dd>{escape(i.reason)}</dd>" for i in report.unmeasured]
        body = f'<dl class="pairs">{"".join(items[:10])}</dl>'
        if len(items) > 10:
            body += (
                f"<details><summary>{len(items) - 10} more</summary>"
                f'<dl class="pairs">{"".join(items[10:])}</dl></details>'
            )
        parts.append(heading + body)
    return "".join(parts) or "<p class=quiet>Everything was measured.</p>"


def write_environment(reports: Reports) -> str:
    """Where and how it ran; settings that all networks share are told once."""
    merged: dict[str, list[str]] = {}
    for report in reports.values():
        for key, value in report.environment.items():
            text = _write_setting(value)
            if text not in merged.setdefault(str(key), []):
                merged[str(key)].append(text)
    pairs = "".join(
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(' / '.join(values))}</dd>"
        for key, values in merged.items()
    )
    return f'<dl class="pairs">{pairs}</dl>' if pairs else "<p class=quiet>Not recorded.</p>"


def write_citation(reports: Reports) -> str:
    """How to cite the tool, and the papers the findings of this report rest on."""
    keys = [key for key in PAPERS if any(f.paper == key for r in reports.values() for f in r.verdict.findings)]
    papers = "".join(
        f'<li><span class="key">{escape(key)}</span> {escape(str(PAPERS[key]))}</li>' for key in keys or list(PAPERS)
    )
    rest = "The findings above rest on" if keys else "The measures rest on"
    bibtex = (
        "@software{sounding,\n  title   = {Sounding: how signal travels through very deep networks},\n"
        f"  version = {{{__version__}}},\n  year    = {{2026}}\n}}"
    )
    return f'<pre>{escape(bibtex)}</pre><p>{rest}</p><ul class="papers">{papers}</ul>'


def write_number(value: float) -> str:
    """A number for a reader: whole ones whole, otherwise three digits.

    >>> [write_number(v) for v in (65.0, 0.04886, 1.48, 2.5e-9, float("nan"))]
    ['65', '0.0489', '1.48', '2.5×10⁻⁹', '–']
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{value:.0f}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}×10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def write_percent(value: float) -> str:
    """A share in percent.

    >>> write_percent(0.514), write_percent(0.00491), write_percent(3e-9)
    ('51%', '0.49%', '3.0×10⁻⁷%')
    """
    percent = 100 * value
    return f"{percent:.0f}%" if percent >= 10 else f"{write_number(float(f'{percent:.2g}'))}%"


def _write_setting(value: Any) -> str:
    if isinstance(value, Estimate):
        return str(value)
    if isinstance(value, list | tuple):
        return " × ".join(str(item) for item in value)
    return "–" if value is None else str(value)
