"""The ledger as Markdown and HTML: one table per paper, made from results and nothing else."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sounding.claims.claim import KINDS, PAPERS, Claim, Scale, Standing, Training
from sounding.claims.number import LEVEL
from sounding.claims.registry import all_claims, cases_of
from sounding.claims.result import Result, folder_of, largest
from sounding.figures import write_range
from sounding.report.document import read_page_file

SHOWN = 4  # numbers in a cell of the ledger
SORTS = (  # of rows: one, and several
    ("holds unreduced", "hold unreduced"),
    ("holds on a smaller run", "hold on smaller runs"),
    ("fails as printed and holds once corrected", "fail as printed and hold once corrected"),
    ("fails", "fail"),
    ("fails as printed with an open correction", "fail as printed with open corrections"),
    ("open", "open"),
)
MARKS = {"holds": "", "fails": " ✗", "open": " ?"}  # in the index, where colour alone would not do
HEADINGS = ("place", "statement", "verdict", "evidence", "scale", "more")
INTRODUCTION = (
    f"Each row is a statement of a paper, in our words, and what measuring it gave. A number stands with its "
    f"{LEVEL:.0%} interval; a verdict follows from where that interval lies against bounds written from the statement. "
    f"A statement that fails as printed may hold once corrected; one with cases stands no better than the worst of "
    f"them. Where a row was run at several scales, the largest is quoted. Rows whose bounds or settings changed after "
    f"trial runs are listed in docs/claims.md of the repository. Rows that share a computation have its time once, in "
    f"the row that came first; the others have 0 s."
)
FILTERS: dict[str, tuple[str, dict[str, str]]] = {
    "paper": ("every paper", {paper: paper for paper in PAPERS}),
    "printed": ("as printed", {"holds": "holds", "fails": "fails", "open": "open"}),
    "corrected": ("corrected", {"holds": "holds", "fails": "fails", "open": "open", "none": "none"}),
    "kind": ("every kind", {kind: kind for kind in KINDS}),
    "reduced": ("reduced or not", {"no": "as large as the paper's", "yes": "smaller than the paper's"}),
}


@dataclass(frozen=True)
class Line:
    """One row of the printed ledger: its result, how it stands with its cases, and how its cases stand."""

    result: Result
    standing: Standing
    cases: Mapping[str, Standing]
    claim: Claim
    links: Mapping[str, str]

    @property
    def training(self) -> Training | None:
        """How much of the paper's training the quoted result has run, None where none is."""
        return self.claim.settings[self.result.scale].training


def stand_with_cases(results: Iterable[Result]) -> dict[str, Standing]:
    """How each row stands: a statement with cases no better than the worst of those that are among `results`."""
    own = {result.id: result.standing for result in results}
    # results know their own row only; which row they are a part of stands in the registry
    parents = {claim.id: claim.parent for claim in all_claims()}
    return {
        name: Standing.worst([standing, *(own[case] for case in own if parents.get(case) == name)])
        for name, standing in own.items()
    }


def write_totals(results: Iterable[Result]) -> str:
    """The totals in one sentence."""
    found = list(results)
    standings = stand_with_cases(found)
    return sum_up((standings[result.id], bool(result.reduction)) for result in found)


def sum_up(rows: Iterable[tuple[Standing, bool]]) -> str:
    """How many rows stand how, in one sentence; each comes with whether its run was smaller than the paper's."""
    found = list(rows)
    counted = Counter(_sort_of(standing, reduced) for standing, reduced in found)
    smaller = sum(reduced and _sort_of(standing, reduced) == SORTS[2] for standing, reduced in found)
    notes = {SORTS[2]: f" ({smaller} on smaller runs)" if smaller else ""}
    parts = [f"{counted[sort]} {sort[counted[sort] > 1]}{notes.get(sort, '')}" for sort in SORTS if counted[sort]]
    total = sum(counted.values())
    return f"{total} statement{'' if total == 1 else 's'}: {', '.join(parts)}."


def _sort_of(standing: Standing, reduced: bool) -> tuple[str, str]:
    if standing.as_printed == "holds":
        return SORTS[1] if reduced else SORTS[0]
    if standing.as_printed == "open":
        return SORTS[5]
    return {"holds": SORTS[2], "open": SORTS[4]}.get(standing.corrected, SORTS[3])


def write_markdown(found: Mapping[str, Mapping[Scale, Result]], *, folder: str) -> str:
    """The whole ledger; `folder` is where the results lie, seen from the page."""
    quoted = [largest(results) for results in found.values()]
    # rows are told by their largest scale, and counted so
    parts = ["# The ledger", INTRODUCTION, f"**{write_totals(quoted)}**"]
    for paper, lines in lines_of(found, folder).items():
        parts.append(f"## {paper}\n\n{PAPERS[paper]}. {write_totals(line.result for line in lines)}")
        rows = [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
        for line in lines:
            links = " · ".join(f"[{name}]({target})" for name, target in line.links.items())
            rows.append(f"| {' | '.join(_cell(text) for text in _texts(line))} | {links} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def write_page(found: Mapping[str, Mapping[Scale, Result]], *, folder: str) -> str:
    """The whole ledger as one HTML page with an index, search and filters; evidence is folded, cases are nested."""
    quoted = [largest(results) for results in found.values()]
    introduction = html.escape(INTRODUCTION)
    totals = html.escape(write_totals(quoted))
    choices = "".join(
        f'<select id="{name}" aria-label="{told}"><option value="">{told}</option>'
        + "".join(f'<option value="{value}">{word}</option>' for value, word in options.items())
        + "</select>"
        for name, (told, options) in FILTERS.items()
    )
    field = '<input id="q" type="search" placeholder="theorem 5.11, soft rank, …" aria-label="search">'
    search = f'<p>{field} {choices} <span id="n"></span></p>'
    parts = [f"<h1>The ledger</h1><p>{introduction}</p><p><b>{totals}</b></p>{search}"]
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    for paper, lines in lines_of(found, folder).items():
        totals = write_totals(line.result for line in lines)
        index = " · ".join(
            f'<a class="{line.standing.as_printed}" href="#{line.result.id}">{html.escape(line.result.place)}'
            f"{MARKS[line.standing.as_printed]}</a>"
            for line in lines
        )
        rows = "".join(_row(line, folder) for line in lines)
        parts.append(
            f"<section><h2>{paper}</h2><p>{html.escape(PAPERS[paper])}. {html.escape(totals)}</p><p>{index}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section>"
        )
    body, style = "\n".join(parts), read_page_file("palette.css") + read_page_file("ledger.css")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>Sounding: the ledger</title><style>{style}</style></head>'
        f"<body>{body}<script>{read_page_file('ledger.js')}</script></body></html>\n"
    )


def _row(line: Line, folder: str) -> str:
    """A row of the page; `data-` attributes are what the search and the filters look at."""
    place, statement, _, evidence, scale = (html.escape(text) for text in _texts(line))
    remarks = _remarks(line)
    remarks = f"Corrected{remarks}" if remarks.startswith(":") else remarks  # behind badges a colon has no word
    result, standing = line.result, line.standing
    words = html.escape(f"{result.id} {result.place} {result.statement}".lower())
    reduced = "yes" if result.reduction else "no"
    page = html.escape(quote(f"{folder}/{result.id}/README.md", safe="/:."))
    picture = html.escape(line.links["figure"])
    links = " · ".join(f'<a href="{html.escape(t)}">{name}</a>' for name, t in line.links.items())
    return (
        f'<tr id="{result.id}" class="{"case" if line.claim.parent else "whole"}" data-words="{words}" '
        f'data-paper="{result.paper}" data-printed="{standing.as_printed}" data-corrected="{standing.corrected}" '
        f'data-kind="{result.kind}" data-reduced="{reduced}"><td><a href="{page}">{place}</a></td><td>{statement}</td>'
        f"<td>{_badges(line)}<br>{html.escape(remarks)}</td><td><details><summary>evidence</summary>{evidence}</details></td>"
        f'<td>{scale}</td><td><a href="{picture}"><img loading="lazy" alt="" src="{picture}"></a>{links}</td></tr>'
    )


def write_index(found: Mapping[str, Mapping[Scale, Result]]) -> list[dict[str, Any]]:
    """What `sounding claims list` shows of the results that come with the package."""
    index = []
    standings = stand_with_cases(largest(results) for results in found.values())
    for results in found.values():
        quoted = largest(results)
        standing = standings[quoted.id]
        index.append({
            "id": quoted.id, "verdict": standing.verdict, **asdict(standing), "scale": quoted.scale,
            "evidence": "; ".join(describe_evidence(quoted)),
            "verdicts": {scale: result.verdict for scale, result in results.items()},
            "date": quoted.date, "device": quoted.device,
        })  # fmt: skip
    return index


def relative(folder: Path, page: Path) -> str:
    """The folder of results as a link from a page."""
    return Path(os.path.relpath(folder, page.parent)).as_posix()


def lines_of(found: Mapping[str, Mapping[Scale, Result]], folder: str) -> dict[str, list[Line]]:
    """Rows by paper, in the order of the registry."""
    quoted = {name: largest(results) for name, results in found.items()}
    standings = stand_with_cases(quoted.values())
    lines: dict[str, list[Line]] = {}
    for claim in all_claims():
        if claim.id not in quoted:
            continue
        result = quoted[claim.id]
        place = folder_of(Path(folder), result.id, result.scale).as_posix()
        files = {"figure": "figure.svg", "numbers": "numbers.csv", "all": "result.json"}
        links = {name: quote(f"{place}/{file}", safe="/:.") for name, file in files.items()}
        cases = {case.id: standings[case.id] for case in cases_of(claim.id) if case.id in standings}
        lines.setdefault(claim.paper, []).append(Line(result, standings[claim.id], cases, claim, links))
    return lines


def _texts(line: Line) -> list[str]:
    result = line.result
    nested = f"part of {line.claim.parent}: " if line.claim.parent else ""
    quoted = f" The paper: “{line.claim.quotation}”" if line.claim.quotation else ""
    scale = f"{result.scale}, {result.date}, {result.device}, {result.seconds:.0f} s"
    if result.reduction:
        scale += f"; reduced: {result.reduction}"
    if line.training:
        scale += f"; trained: {line.training.told}"
    place, statement = f"{nested}{result.place} ({result.id})", f"{result.statement}{quoted}"
    evidence = describe_evidence(result)
    if len(evidence) > SHOWN:  # as much as a cell can hold: what decides comes first
        evidence[SHOWN:] = [f"and {len(evidence) - SHOWN} more: see all"]
    verdict: str = line.standing.verdict
    if line.standing.as_printed == "fails":
        verdict = f"fails as printed{f', {verdict}' if result.correction or line.cases else ''}"
    return [place, statement, f"{verdict}{_remarks(line)}", "; ".join(evidence), scale]


def _remarks(line: Line) -> str:
    """What follows a verdict: the correction, the note where the row does not simply hold, and its parts."""
    result, standing = line.result, line.standing
    text = f": {result.correction}" if standing.as_printed == "fails" and result.correction else ""
    if result.note and standing.as_printed != "holds":
        text += f" ({result.note})"
    if line.cases:
        parts = {result.id: result.standing, **line.cases}
        text += f" [{'; '.join(f'{name}: {part.verdict}' for name, part in parts.items())}]"
    return text


def _badges(line: Line) -> str:
    """As printed, corrected, and whether the run was smaller than the paper's; a correction that holds has no green."""
    printed, corrected = line.standing.as_printed, line.standing.corrected
    found: list[tuple[str, str]] = [(printed, f"as printed: {printed}")]
    if corrected != "none":
        found.append(("corrected" if corrected == "holds" else corrected, f"corrected: {corrected}"))
    if line.result.reduction:
        found.append(("reduced", "smaller run"))
    return "".join(f'<span class="badge {kind}">{words}</span>' for kind, words in found)


def describe_evidence(result: Result) -> list[str]:
    """The numbers that decide, each with its interval and what was expected: those violated first."""
    order = {"violated": 0, "open": 1, "met": 2}  # what fails is read first
    decisive = sorted(result.expectations, key=lambda e: (e["of"] != "statement", order[e["status"]]))
    if result.verdict == "holds":
        decisive = [e for e in decisive if e["of"] == "statement"]
    return [_write_expectation(e, result) for e in decisive]


def _write_expectation(expectation: Mapping[str, Any], result: Result) -> str:
    name = expectation["quantity"].replace("_", " ")
    number, wanted = result.numbers.get(expectation["quantity"]), write_range(expectation)
    origin = "corrected, " if expectation["of"] == "correction" else ""
    if number is None:
        return f"{name} not measured ({origin}expected {wanted})"
    wide = number.high - number.low > 1e-6 * abs(number.value)  # an exact number has no interval to show
    interval = f" [{number.low:.4g}, {number.high:.4g}]".replace("inf]", "∞)") if wide else ""
    return f"{name} {number.value:.4g}{interval} ({origin}expected {wanted}: {expectation['status']})"


def _cell(text: str) -> str:
    """Text inside a Markdown table: bars and stars would end a cell or start emphasis."""
    for sign in "|*<$":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ").replace("_", "\\_")
