"""`sounding claims`: what the papers say, and what came out."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from sounding.claims import Claim, Result, all_claims, claims_of, find_claim, read_results
from sounding.claims.claim import Scale, Standing
from sounding.claims.registry import cases_of, shipped_verdicts
from sounding.claims.search import search_claims
from sounding.cli.options import FILE, file_option, json_option
from sounding.cli.output import console, new_table, print_json, say
from sounding.encoding import fields_of
from sounding.errors import UsageError

NOT_RUN = "not run"
WORDS = ("label", "caption")
results_option = click.option("--results", type=FILE, metavar="DIR",
                              help="Show the verdicts of the results in DIR, from sounding reproduce.")  # fmt: skip


@click.group()
def claims() -> None:
    """Look up what the papers state in figures, tables, theorems and text, and whether it holds.

    The ledger is the list of these statements. One statement is one row of it, and has an ID. The verdict of a row says
    whether the statement holds as the paper prints it, and whether a corrected statement holds.

    The verdicts are those of the results that come with the package, or of --results DIR.
    """


@claims.command(name="list", short_help="List every row with its verdict.")
@click.option("--paper", metavar="KEY", help="Show the rows of one paper: rank2020, rank2020v1, orth2021, ...")
@click.option("--seed", metavar="KEY", hidden=True, help="The old name of --paper.")
@results_option
@json_option
def list_(paper: str | None, seed: str | None, results: Path | None, as_json: bool) -> None:
    """List every row with its verdict; --json adds its paper, place and statement."""
    if seed is not None:
        paper = warn_of_seed(seed)
    _show_rows(claims_of(paper) if paper else all_claims(), results, as_json=as_json)


@claims.command()
@click.argument("words", nargs=-1, required=True)
@results_option
@json_option
def find(words: tuple[str, ...], results: Path | None, as_json: bool) -> None:
    """Find rows by number or by words.

    WORDS may be the paper's own numbering, such as "theorem 5.11", or words of the statement, such as soft rank.

    Exit codes: 0 something was found; 2 nothing was.
    """
    found = search_claims(" ".join(words))
    if not found:
        raise UsageError(f"no row has {' '.join(words)!r}", hint="fewer words, or sounding claims list")
    _show_rows(found, results, as_json=as_json)


def _show_rows(found: Iterable[Claim], results: Path | None, *, as_json: bool) -> None:
    """JSON, or a table with a badge a column and the totals below."""
    known = _known(results)
    rows = [_row(claim, known) for claim in found]
    if as_json:
        print_json(rows)
        return
    from sounding.report.ledger import sum_up

    table = new_table("id", "kind", "as printed", "corrected", "scale", "reduced")
    for row in rows:
        # a part of a statement stands below it
        name = f"└ {row['id']}" if row["parent"] else row["id"]
        corrected = "" if row["corrected"] in (None, "none") else row["corrected"]
        reduced = "reduced" if row["reduction"] else ""
        table.add_row(name, row["kind"], row["as_printed"] or NOT_RUN, corrected, row["scale"] or "", reduced)
    run = [row for row in rows if row["as_printed"]]
    totals = sum_up((Standing(row["as_printed"], row["corrected"]), bool(row["reduction"])) for row in run)
    left = f"{len(rows) - len(run)} of {len(rows)} rows not run. " if len(run) < len(rows) else ""
    screen = console()
    screen.print(table)
    screen.print(f"\n{left}{totals} Try sounding claims show ID, sounding reproduce ID.", markup=False)


@claims.command(short_help="Show one row: what the paper says, and what came out.")
@click.argument("words", nargs=-1, required=True, metavar="ID")
@results_option
@json_option
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
    tell = functools.partial(screen.print, markup=False)
    tell(f"{claim.id}  {claim.paper}, {claim.place} ({claim.kind})\n", style="bold")
    tell(claim.statement)
    lines = {"in the paper's words": claim.quotation, "the paper's experiment": claim.experiment,
             "released program": claim.released, "note": claim.note, "correction": row["correction"]}  # fmt: skip
    for name, text in lines.items():
        if text:
            tell(f"\n{name}: {text}")
    tell("\nexpected:")
    for expected in row["expectations"]:
        origin = " (correction)" if expected["of"] == "correction" else ""
        bounds = f"[{expected['low']:g}, {expected['high']:g}]"
        tell(f"  {expected['quantity']} in {bounds}{origin}: {expected['why']}")
    tell("\nscales:")
    for scale, setting in claim.settings.items():
        # words for the figure are no settings
        values = ", ".join(f"{name} {value}" for name, value in setting.values.items() if name not in WORDS)
        reduced = f" (reduced: {setting.reduction})" if setting.reduction else ""
        trained = f" (trained: {setting.training.told})" if setting.training else ""
        tell(f"  {scale}: {values}{reduced}{trained}")
    scale_of = f" at {row['scale']} scale" if row["scale"] else ""
    badges = f" (as printed: {row['as_printed']}, corrected: {row['corrected']})" if row["as_printed"] else ""
    tell(f"\nverdict{scale_of}: {row['verdict']}{badges}", style="bold")
    for case in row["cases"]:
        tell(f"  its part {case['id']}: {case['verdict']}")
    if row["parent"]:
        tell(f"  a part of {row['parent']}")
    if row["evidence"]:
        tell(row["evidence"])


@claims.command(short_help="Write the ledger as Markdown or HTML, or print it.")
@click.option("--results", type=FILE, required=True, metavar="DIR", help="Folder of the results.")
@file_option("--markdown", "Write the ledger as Markdown.")
@file_option("--html", "Write the ledger as an HTML page.")
@file_option("--index", "Write the verdicts as JSON.")
@click.option("--pages", is_flag=True,
              help="Write pages about rows and papers, claims.json and an RO-Crate (metadata) into DIR.")  # fmt: skip
@click.option("--figures", is_flag=True, help="Draw the figures in DIR again, from the points that are kept there.")
def table(
    results: Path, markdown: Path | None, html: Path | None, index: Path | None, pages: bool, figures: bool
) -> None:
    """Write the ledger of results as Markdown or HTML; without an option, print Markdown."""
    from sounding.report import ledger
    from sounding.report.catalogue import write_files

    found = _read(results)
    for path, write in ((markdown, ledger.write_markdown), (html, ledger.write_page)):
        if path is not None:
            path.write_text(write(found, folder=ledger.relative(results, path)), "utf-8")
    if index is not None:
        # a line for each row, so that a change of one row changes one line of the file
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in ledger.write_index(found))
        index.write_text(f"[\n{lines}\n]\n", "utf-8")
    made = write_files(found, results) if pages else 0
    if figures:
        from sounding.reproduction import draw_figures

        made += draw_figures(found, results)
    written = [str(path) for path in (markdown, html, index) if path is not None]
    written += [f"{made} files in {results}"] if made else []
    if written:
        say(f"wrote {', '.join(written)}: {len(found)} rows", err=True)
    else:
        say(ledger.write_markdown(found, folder=results.as_posix()), nl=False)


def warn_of_seed(key: str) -> str:
    """The key of a paper that was given under the old name of the option, after a warning."""
    click.echo(f"sounding: --seed {key} is now --paper {key}; a seed is a random seed", err=True)
    return key


def _read(results: Path) -> dict[str, dict[Scale, Result]]:
    found = read_results(results)
    if not found:
        raise UsageError(f"no results in {results}", hint=f"sounding reproduce --all --out {results}")
    return found


def _known(results: Path | None) -> dict[str, dict[str, Any]]:
    """Verdicts by id: of a folder of results, or those that come with the package."""
    if results is not None:
        from sounding.report.ledger import write_index

        return {row["id"]: row for row in write_index(_read(results))}
    return shipped_verdicts()


def _row(claim: Claim, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A row of the list; `reduction` is that of the scale whose verdict is shown, None where nothing is smaller."""
    # rows that were not run have no scale and no verdicts
    found = known.get(claim.id, {"verdict": NOT_RUN, "scale": None, "evidence": ""})
    setting = claim.settings.get(found["scale"])
    training = setting.training if setting else None
    return {
        **fields_of(claim, "id paper place kind statement"),
        "quotation": claim.quotation or None,
        "parent": claim.parent or None,
        **{name: found.get(name) for name in ("verdict", "as_printed", "corrected", "scale")},
        "reduction": (setting.reduction or None) if setting else None,
        "training": training.told if training else None,
        "training_share": training.share if training else None,
        "evidence": found["evidence"],
    }


def _details(claim: Claim, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What `claims show` tells of a row beyond its line in the list."""
    cases = [_row(case, known) for case in cases_of(claim.id)]
    corrected = claim.correction.expectations if claim.correction else ()
    return {
        **fields_of(claim, "experiment released note"),
        "correction": claim.correction.statement if claim.correction else "",
        "cases": [{"id": case["id"], "verdict": case["verdict"]} for case in cases],
        "expectations": [{"of": "statement", **asdict(one)} for one in claim.expectations]
        + [{"of": "correction", **asdict(one)} for one in corrected],
        "settings": {scale: asdict(setting) for scale, setting in claim.settings.items()},
    }


def _choose(words: str) -> Claim:
    """The row of that id or of that place in a paper."""
    if " " not in words:  # an id, which must be exact
        return find_claim(words)
    found = search_claims(words)
    # a statement and its cases are asked for as one
    found = [claim for claim in found if claim.parent not in {other.id for other in found}]
    if len(found) != 1:
        names = ", ".join(claim.id for claim in found[:6])
        raise UsageError(f"{len(found)} rows have {words!r}", hint=names or "sounding claims find WORDS")
    return found[0]
