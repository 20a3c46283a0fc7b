"""The ledger for other readers: a page a row, a report a paper, one JSON of everything, and an RO-Crate around it."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sounding
from sounding.claims.claim import PAPERS, Scale
from sounding.claims.registry import left_out
from sounding.claims.result import Result, folder_of
from sounding.encoding import fields_of, to_plain
from sounding.figures import write_range
from sounding.report.ledger import Line, describe_evidence, lines_of, write_totals

Found = Mapping[str, Mapping[Scale, Result]]
CATALOGUE, CRATE = "claims.json", "ro-crate-metadata.json"
QUICK = 60.0  # seconds up to which a row counts as easy: what `make claims` asks of each on two cores


def write_pages(found: Found, folder: Path) -> dict[str, str]:
    """The text of every file by its path below the folder of results, whose points make the tables of its pages."""
    files = {}
    for paper, lines in lines_of(found, "..").items():
        for line in lines:
            files[f"{line.result.id}/README.md"] = write_row(line, found[line.result.id], folder)
        files[f"report-{paper}.md"] = write_report(paper, lines)
    entries = write_catalogue(found)
    files[CATALOGUE] = json.dumps(entries, indent=1, ensure_ascii=False) + "\n"
    files[CRATE] = json.dumps(write_crate(entries), indent=1, ensure_ascii=False) + "\n"
    return files


def write_row(line: Line, results: Mapping[Scale, Result], folder: Path) -> str:
    """One row as a Markdown page: statement, badges, figure, every expectation beside its number, provenance.

    A table of the paper is a table here too, from the points below `folder`.
    """
    claim, result = line.claim, line.result
    parts = [
        f"# {claim.paper}, {claim.place}",
        claim.statement,
        f"> {claim.quotation}" if claim.quotation else "",
        f"**As printed: {line.standing.as_printed}.** Corrected: {line.standing.corrected}. Scale: {result.scale}.",
        f"Reduced: {result.reduction}." if result.reduction else "",
        f"Trained: {line.training.told}." if line.training else "",
        f"Corrected statement: {result.correction}" if result.correction else "",
        f"A part of [{claim.parent}](../{claim.parent}/README.md)." if claim.parent else "",
    ]
    parts += [f"Its part [{name}](../{name}/README.md): {case.verdict}." for name, case in line.cases.items()]
    parts.append(f"![figure]({result.scale}/figure.svg)\n\n{result.caption}")
    if claim.kind == "table":
        parts += _tabulate(folder_of(folder, claim.id, result.scale) / "series.csv")
    rows = ["| of | quantity | measured | 99% interval | expected | status | why |", "|---|---|---|---|---|---|---|"]
    for e in result.expectations:
        number = result.numbers.get(e["quantity"])
        # a number that the run could not measure keeps its row, without a value
        told = ("", "") if number is None else (f"{number.value:.4g}", f"{number.low:.4g} to {number.high:.4g}")
        cells = (e["of"], e["quantity"], *told, write_range(e), e["status"], e["why"])
        rows.append(f"| {' | '.join(cells)} |".replace(" inf |", " ∞ |"))
    parts.append("\n".join(rows))
    texts = {"The paper's experiment": claim.experiment, "Released program": claim.released, "Note": claim.note,
             "Remarks": result.remarks}  # fmt: skip
    parts += [f"{name}: {text}" for name, text in texts.items() if text]
    for scale, run in results.items():
        made = f"{run.date}, {run.device}, {run.seconds:.0f} s, random seed {run.random_seed}"
        links = f"[numbers]({scale}/numbers.csv) · [all]({scale}/result.json)"
        parts.append(f"{scale}: {run.verdict}; {made}. `{run.command}` · {links}")
    return "\n\n".join(filter(None, parts)) + "\n"


def _tabulate(path: Path) -> list[str]:
    """A Markdown table for each panel: its places down, its series across, measured and as the paper prints them."""
    with path.open(encoding="utf-8", newline="") as file:
        points = list(csv.DictReader(file))
    tables = []
    for panel in dict.fromkeys(point["panel"] for point in points):
        inside = [point for point in points if point["panel"] == panel]
        cells = {(point["x"], point["series"]): point["y"] for point in inside}
        names = list(dict.fromkeys(point["series"] for point in inside))
        # a place at which a series has no point leaves its cell empty
        rows = [f"| {panel} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        rows += [
            f"| {place} | {' | '.join(cells.get((place, name), '') for name in names)} |"
            for place in dict.fromkeys(point["x"] for point in inside)
        ]
        tables.append("\n".join(rows))
    return tables


def write_report(paper: str, lines: Sequence[Line]) -> str:
    """A report on one paper in the form of the reproducibility challenge, from its rows and nothing else."""
    stands = {state: [one for one in lines if one.standing.as_printed == state] for state in ("holds", "fails", "open")}
    slow = sorted((line for line in lines if line.result.seconds > QUICK), key=lambda line: -line.result.seconds)
    reduced = [line for line in lines if line.result.reduction]
    seconds = sum(line.result.seconds for line in lines)
    devices = ", ".join(sorted({line.result.device for line in lines}))
    whole = [line for line in stands["holds"] if not line.result.reduction]
    smaller = [line for line in stands["holds"] if line.result.reduction]
    # a smaller run says nothing about how easy the paper's own would be
    easy = [line for line in whole if line.result.seconds <= QUICK]
    trained = [
        f"[{one.result.place}]({one.result.id}/README.md): {one.training.told}." for one in lines if one.training
    ]
    sections = {
        "Scope of reproducibility": [
            f"{PAPERS[paper]}. {len(lines)} of its statements are rows of the ledger; the others are listed last.",
            write_totals(line.result for line in lines),
        ],
        "Methodology": [
            "Each statement is written as bounds on measured numbers; a verdict follows from where the 99% intervals "
            "lie. Bounds and settings were fixed in a commit before the run; those that were changed after an earlier "
            f"run are told in docs/claims.md. Programs are our own. Devices: {devices}. Time in all: {seconds:.0f} s."
        ],
        "What held": [_name(line) for line in whole],
        "What held on smaller runs": [f"{_name(line)} Reduced: {line.result.reduction}." for line in smaller],
        "What did not hold as printed": [f"{_name(line)} {_tell_failure(line)}" for line in stands["fails"]],
        "What is open": [f"{_name(line)} {describe_evidence(line.result)[0]}." for line in stands["open"]],
        "What was easy": [f"{len(easy)} rows hold unreduced and take no more than {QUICK:.0f} s each."],
        "What was difficult": [
            f"{_name(line)} {line.result.seconds:.0f} s on {line.result.device}." for line in slow[:8]
        ]
        + [f"Rows that are smaller than the paper's: {len(reduced)}."],
        "How much of the paper's training was run": trained,
        "What was not tried": [f"{item}: {reason}." for item, reason in left_out(paper).items()],
    }
    parts = [f"# Reproducibility report: {paper}"]
    for heading, items in sections.items():
        parts.append(f"## {heading}\n\n" + ("\n".join(f"- {item}" for item in items) or "Nothing."))
    return "\n\n".join(parts) + "\n"


def _tell_failure(line: Line) -> str:
    """Why a statement fails as printed, and how it should read: by its own numbers, or by those of its parts."""
    if line.result.standing.as_printed != "fails":
        parts = ", ".join(
            f"[{name}]({name}/README.md)" for name, part in line.cases.items() if part.as_printed == "fails"
        )
        return f"It fails by its parts: {parts}."
    words = {"holds": "Corrected:", "open": "Corrected, which is open:", "fails": "Corrected, which fails, too:"}
    told = {**words, "none": "No correction."}[line.standing.corrected]
    # a statement without a correction leaves two blanks behind one another
    return f"{told} {line.result.correction} Evidence: {describe_evidence(line.result)[0]}.".replace("  ", " ")


def _name(line: Line) -> str:
    return f"[{line.result.place}]({line.result.id}/README.md): {line.result.statement}"


def write_catalogue(found: Found) -> list[dict[str, Any]]:
    """Every row with its statement, quotation, reduction, verdicts, numbers and provenance, as plain data."""
    entries = []
    for lines in lines_of(found, ".").values():
        for line in lines:
            claim, result = line.claim, line.result
            entry = {
                **fields_of(claim, "id paper"), "citation": PAPERS[claim.paper],
                **fields_of(claim, "place kind statement"), "quotation": claim.quotation or None,
                "parent": claim.parent or None, **fields_of(line.standing, "as_printed corrected"),
                "correction": result.correction or None, "scale": result.scale, "reduction": result.reduction or None,
                "training": line.training.told if line.training else None,
                "training_share": line.training.share if line.training else None,
                **fields_of(result, "expectations numbers"),
                "provenance": {
                    **fields_of(result, "command date device seconds random_seed versions fingerprint"),
                    "folder": f"{claim.id}/{result.scale}",
                },
            }  # fmt: skip
            entries.append(to_plain(entry))
    return entries


def write_crate(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """RO-Crate 1.1 metadata: the results as a data set, the catalogue, and a part for each row."""
    # a crate has to describe itself, its root, and every part by an @id
    parts: list[dict[str, Any]] = [
        {"@id": CATALOGUE, "@type": "File", "name": "every row of the ledger", "encodingFormat": "application/json"}
    ]
    for entry in entries:
        made = entry["provenance"]
        parts.append({
            "@id": f"{made['folder']}/", "@type": "Dataset", "name": f"{entry['paper']}, {entry['place']}",
            "description": f"{entry['statement']} As printed: {entry['as_printed']}; corrected: {entry['corrected']}.",
            "datePublished": made["date"], "citation": entry["citation"],
        })  # fmt: skip
    root = {
        "@id": "./", "@type": "Dataset", "name": "Sounding: the ledger", "version": sounding.__version__,
        "description": "Statements of five papers on signals in deep networks, and what measuring them gave.",
        "license": {"@id": "https://spdx.org/licenses/MIT"},
        "datePublished": max(entry["provenance"]["date"] for entry in entries),  # of the newest result
        "hasPart": [{"@id": part["@id"]} for part in parts],
    }  # fmt: skip
    about = {
        "@id": CRATE, "@type": "CreativeWork", "about": {"@id": "./"},
        "conformsTo": {"@id": "https://w3id.org/ro/crate/1.1"},
    }  # fmt: skip
    return {"@context": "https://w3id.org/ro/crate/1.1/context", "@graph": [about, root, *parts]}


def write_files(found: Found, folder: Path) -> int:
    """Write every page below the folder of results; the number of files."""
    files = write_pages(found, folder)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return len(files)
