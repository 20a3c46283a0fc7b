"""`sounding claims`: what the papers say, and what came out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sounding.cli.output import console, new_table, print_json, require_writable, say
from sounding.encoding import fields_of
from sounding.errors import UsageError

if TYPE_CHECKING:
    from sounding.claims import Claim, Result
    from sounding.claims.claim import Scale

NOT_RUN = "not run"
WORDS = ("label", "caption")
results_option = click.option(
    "--results",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Take the verdicts from DIR of sounding reproduce --out DIR.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def claims() -> None:
    """The ledger: what the five papers state in figures, tables, theorems and text, and whether it holds.

    A row of the ledger is one statement, and has an ID.

    Verdicts shown are those of the results that come with the package, or of --results DIR.
    """


@claims.command(name="list")
@click.option("--paper", metavar="KEY", help="Show the rows of one paper: rank2020, rank2020v1, orth2021, ...")
@click.option("--seed", metavar="KEY", hidden=True, help="The old name of --paper.")
@results_option
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout.")
def list_(paper: str | None, seed: str | None, results: Path | None, as_json: bool) -> None:
    """List every row with its verdict; --json adds its paper, place and statement."""
    from sounding.claims import all_claims, claims_of

    if seed is not None:
        paper = warn_of_seed(seed)
    known = _known(results)
    rows = [_row(claim, known) for claim in (claims_of(paper) if paper else all_claims())]
    if as_json:
        print_json(rows)
    else:
        _print_rows(rows)


@claims.command()
@click.argument("words", nargs=-1, required=True)
@results_option
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout.")
def find(words: tuple[str, ...], results: Path | None, as_json: bool) -> None:
    """Find rows by the paper's own numbering or by what they say, such as "theorem 5.11" or soft rank.

    Exit codes: 0 something was found; 2 nothing was.
    """
    from sounding.claims.search import search_claims

    known = _known(results)
    found = [_row(claim, known) for claim in search_claims(" ".join(words))]
    if not found:
        raise UsageError(f"no row has {' '.join(words)!r}", hint="fewer words, or sounding claims list")
    if as_json:
        print_json(found)
    else:
        _print_rows(found)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    """A table with a badge a column, and the totals below."""
    table = new_table("id", "kind", "as printed", "corrected", "scale", "reduced")
    for row in rows:
        name = f"└ {row['id']}" if row["parent"] else row["id"]
        corrected = "" if row["corrected"] in (None, "none") else row["corrected"]
        reduced = "reduced" if row["reduction"] else ""
        table.add_row(name, row["kind"], row["as_printed"] or NOT_RUN, corrected, row["scale"] or "", reduced)
    screen = console()
    screen.print(table)
    screen.print(f"\n{_totals(rows)} Try sounding claims show ID, sounding reproduce ID.", markup=False)


@claims.command()
@click.argument("words", nargs=-1, required=True, metavar="ID")
@results_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def show(words: tuple[str, ...], results: Path | None, as_json: bool) -> None:
    """Show one row: what the paper says, the settings, what is expected, and what came out.

    ID may be the paper's own numbering, such as "thesis2024 theorem 5.11".
    """
    claim = _choose(" ".join(words))
    known = _known(results)
    row = _row(claim, known) | _details(claim, known)
    if as_json:
        print_json(row)
        return
    screen = console()
    screen.print(f"{claim.id}  {claim.paper}, {claim.place} ({claim.kind})\n", markup=False, style="bold")
    screen.print(claim.statement, markup=False)
    lines = {
        "in the paper's words": claim.quotation,
        "the paper's experiment": claim.experiment,
        "released program": claim.released,
        "note": claim.note,
    }
    lines["correction"] = claim.correction.statement if claim.correction else ""
    for name, text in lines.items():
        if text:
            screen.print(f"\n{name}: {text}", markup=False)
    screen.print("\nexpected:", markup=False)
    for expectation in row["expectations"]:
        origin = " (correction)" if expectation["of"] == "correction" else ""
        screen.print(f"  {expectation['quantity']} in [{expectation['low']:g}, {expectation['high']:g}]{origin}: "
                     f"{expectation['why']}", markup=False)  # fmt: skip
    screen.print("\nscales:", markup=False)
    for scale, setting in claim.settings.items():
        # words for the figure are no settings
        values = ", ".join(f"{name} {value}" for name, value in setting.values.items() if name not in WORDS)
        reduced = f" (reduced: {setting.reduction})" if setting.reduction else ""
        trained = f" (trained: {setting.training.told})" if setting.training else ""
        screen.print(f"  {scale}: {values}{reduced}{trained}", markup=False)
    scale_of = f" at {row['scale']} scale" if row["scale"] else ""
    badges = f" (as printed: {row['as_printed']}, corrected: {row['corrected']})" if row["as_printed"] else ""
    screen.print(f"\nverdict{scale_of}: {row['verdict']}{badges}", markup=False, style="bold")
    for case in row["cases"]:
        screen.print(f"  its part {case['id']}: {case['verdict']}", markup=False)
    if row["parent"]:
        screen.print(f"  a part of {row['parent']}", markup=False)
    if row["evidence"]:
        screen.print(row["evidence"], markup=False)


@claims.command()
@click.option("--results", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder of the results.")
@click.option("--markdown", type=click.Path(path_type=Path), metavar="FILE", help="Write the ledger as Markdown.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write the ledger as an HTML page.")
@click.option("--index", type=click.Path(path_type=Path), metavar="FILE", help="Write the verdicts as JSON.")
@click.option(
    "--pages",
    is_flag=True,
    help="Write a page for each row, a report for each paper, claims.json and an RO-Crate into DIR.",
)
@click.option("--figures", is_flag=True, help="Draw the figures in DIR again, from the points that are kept there.")
def table(
    results: Path, markdown: Path | None, html: Path | None, index: Path | None, pages: bool, figures: bool
) -> None:
    """Write the ledger of results as Markdown or HTML; without an option, print Markdown."""
    from sounding.report import ledger
    from sounding.report.catalogue import write_files

    found = _read(results)
    require_writable(markdown, html, index)
    if markdown is not None:
        markdown.write_text(ledger.write_markdown(found, folder=ledger.relative(results, markdown)), "utf-8")
    if html is not None:
        html.write_text(ledger.write_page(found, folder=ledger.relative(results, html)), "utf-8")
    if index is not None:
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in ledger.write_index(found))
        index.write_text(f"[\n{lines}\n]\n", "utf-8")
    made = write_files(found, results) if pages else 0
    if figures:
        from sounding.reproduction import draw_figures

        made += draw_figures(found, results)
    if markdown is None and html is None and index is None and not made:
        say(ledger.write_markdown(found, folder=results.as_posix()), nl=False)
    else:
        written = ", ".join(str(path) for path in (markdown, html, index) if path is not None)
        written = ", ".join(filter(None, (written, f"{made} files in {results}" if made else "")))
        say(f"wrote {written}: {len(found)} rows", err=True)


def warn_of_seed(key: str) -> str:
    """The key of a paper that was given under the old name of the option, after a warning."""
    click.echo(f"sounding: --seed {key} is now --paper {key}; a seed is a random seed", err=True)
    return key


def _read(results: Path) -> dict[str, dict[Scale, Result]]:
    from sounding.claims import read_results

    found = read_results(results)
    if not found:
        raise UsageError(f"no results in {results}", hint=f"sounding reproduce --all --out {results}")
    return found


def _known(results: Path | None) -> dict[str, dict[str, Any]]:
    """Verdicts by id: of a folder of results, or those that come with the package."""
    if results is not None:
        from sounding.report.ledger import write_index

        return {row["id"]: row for row in write_index(_read(results))}
    from sounding.claims.registry import shipped_verdicts

    return shipped_verdicts()


def _row(claim: Claim, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A row of the list; `reduction` is that of the scale whose verdict is shown, None where nothing is smaller."""
    found = known.get(claim.id, {"verdict": NOT_RUN, "scale": None, "evidence": ""})
    scale = found["scale"]
    setting = claim.settings.get(scale)
    training = setting.training if setting else None
    return {
        "id": claim.id,
        "paper": claim.paper,
        "place": claim.place,
        "kind": claim.kind,
        "statement": claim.statement,
        "quotation": claim.quotation or None,
        "parent": claim.parent or None,
        "verdict": found["verdict"],
        "as_printed": found.get("as_printed"),
        "corrected": found.get("corrected"),
        "scale": scale,
        "reduction": (setting.reduction or None) if setting else None,
        "training": training.told if training else None,
        "training_share": training.share if training else None,
        "evidence": found["evidence"],
    }


def _details(claim: Claim, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What `claims show` tells of a row beyond its line in the list."""
    from dataclasses import asdict

    from sounding.claims.registry import cases_of

    cases = [_row(case, known) for case in cases_of(claim.id)]
    checked = [("statement", e) for e in claim.expectations]
    checked += [("correction", e) for e in (claim.correction.expectations if claim.correction else ())]
    return {
        **fields_of(claim, "experiment released note"),
        "correction": claim.correction.statement if claim.correction else "",
        "cases": [{"id": case["id"], "verdict": case["verdict"]} for case in cases],
        "expectations": [{"of": of, **asdict(expectation)} for of, expectation in checked],
        "settings": {scale: asdict(setting) for scale, setting in claim.settings.items()},
    }


def _choose(words: str) -> Claim:
    """The row of that id or of that place in a paper.

    Raises:
        UsageError: there is none, or there are several.
    """
    from sounding.claims import find_claim
    from sounding.claims.search import search_claims

    if " " not in words:
        return find_claim(words)
    found = search_claims(words)
    # a statement and its cases are asked for as one
    found = [claim for claim in found if claim.parent not in {other.id for other in found}]
    if len(found) != 1:
        names = ", ".join(claim.id for claim in found[:6])
        raise UsageError(f"{len(found)} rows have {words!r}", hint=names or "sounding claims find WORDS")
    return found[0]


def _totals(rows: list[dict[str, Any]]) -> str:
    from sounding.claims.claim import Standing
    from sounding.report.ledger import sum_up

    run = [row for row in rows if row["as_printed"]]
    told = sum_up((Standing(row["as_printed"], row["corrected"]), bool(row["reduction"])) for row in run)
    return told if len(run) == len(rows) else f"{len(rows) - len(run)} of {len(rows)} rows not run. {told}"
