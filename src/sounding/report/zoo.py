"""The pages of an audit of many architectures: a table that can be sorted, and a report for each."""

from __future__ import annotations

import fnmatch
import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from sounding.errors import UsageError
from sounding.files import place
from sounding.report.compact import restore
from sounding.report.document import content_policy, plotly_js, read_page_file, render_html
from sounding.report.sections import escape, pairs

Row = Mapping[str, Any]
HEADINGS = ("architecture", "class", "verdict", "findings", "layers predicted", "numbers in the band", "not measured",
            "unchanged", "parameters", "seconds", "run")  # fmt: skip
PAIRS = (("predicted_layers", "weight_layers"), ("in_band", "banded"))
ANSWERS = ("bug of theirs", "known practice", "true of this size only", "mistake of ours, mended",
           "mistake of ours, open")  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What looking into a finding gave."""

    kind: str  # of the finding
    models: tuple[str, ...]  # the architectures it was looked into for, as patterns such as "t5*"
    answer: str  # one of ANSWERS
    words: str  # what was found out
    places: tuple[str, ...] = ("*",)  # patterns of the module or parameter that it is about
    script: str = ""  # lines of Python that show a bug of theirs

    def fits(self, name: str, finding: Mapping[str, Any]) -> bool:
        """Whether this is about a finding in the architecture of that name."""
        where = str(finding.get("parameter") or finding.get("layer") or "")
        return (
            finding["kind"] == self.kind
            and any(fnmatch.fnmatchcase(name, model) for model in self.models)
            and any(fnmatch.fnmatchcase(where, place) for place in self.places)
        )


def read_outcomes(path: Path) -> tuple[Outcome, ...]:
    """The outcomes that a TOML file lists as `[[outcome]]`; none where there is no file."""
    try:
        data = tomllib.loads(path.read_text("utf-8"))
        found = [{**one, **{key: tuple(one[key]) for key in ("models", "places") if key in one}}
                 for one in data.get("outcome", [])]  # fmt: skip
        outcomes = tuple(Outcome(**one) for one in found)
    except FileNotFoundError:
        return ()
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"{path} does not list outcomes: {error}") from error
    wrong = [one.answer for one in outcomes if one.answer not in ANSWERS]
    if wrong:
        raise UsageError(f"{path} has the answer {wrong[0]!r}", hint=f"one of {', '.join(ANSWERS)}")
    return outcomes


def read_rows(folder: Path) -> list[Row]:
    """The rows of an audit, from the files of a folder, by name."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]


def write_pages(rows: Sequence[Row], folder: Path, outcomes: Sequence[Outcome]) -> Path:
    """Write `pages/index.html`, a page for each architecture that was built, and `table.md`; the path of the index."""
    pages = folder / "pages"
    pages.mkdir(parents=True, exist_ok=True)
    # one file beside the pages: each of them would hold a megabyte of it otherwise
    place(pages / "plotly.js", plotly_js().encode())
    for row in rows:
        if "record" in row:
            target = f"hf:{row['name']}"
            report = restore(row["record"], row["verdict"]).for_target(target)
            text = render_html({target: report}, preface=_preface(row, outcomes), plotly="plotly.js")
            place(pages / f"{row['name']}.html", text.encode())
    place(folder / "table.md", _markdown(rows).encode())
    place(pages / "index.html", _index(rows, outcomes).encode())
    return pages / "index.html"


def summarize(rows: Iterable[Row]) -> str:
    """The totals in two sentences."""
    rows = list(rows)
    built = [row for row in rows if "record" in row]
    if not built:
        return f"None of {len(rows)} architectures was built."
    count = {status: sum(row["verdict"] == status for row in built) for status in ("healthy", "unhealthy", "not known")}
    whole, changed = sum(not row["unmeasured"] for row in built), sum(not row["unchanged"] for row in built)
    total = {key: sum(row[key] for row in built) for key in ("weight_layers", "predicted_layers", "banded", "in_band")}
    classes, refused = len({row["model"] for row in built}), len(rows) - len(built)
    layers = f"{_share(total, 'predicted_layers', 'weight_layers')} weight layers"
    shares = [f"{max(_ratio(total, *pair), 0):.0%}" for pair in PAIRS]
    return (
        f"{len(built)} architectures in {classes} classes were checked, {refused} more were not built: "
        f"{count['healthy']} are healthy, {count['unhealthy']} unhealthy, {count['not known']} not known. "
        f"{whole} were measured whole, {changed} were left changed. Theory predicts {layers} ({shares[0]}); "
        f"{_share(total, 'in_band', 'banded')} measured numbers ({shares[1]}) lie in its 95% band."
    )


def list_findings(row: Row, outcomes: Sequence[Outcome]) -> list[tuple[Mapping[str, Any], Outcome | None]]:
    """The findings about an architecture, each with the outcome of looking into it, or None."""
    findings = row["record"]["findings"] if "record" in row else []
    return [(one, next((found for found in outcomes if found.fits(row["name"], one)), None)) for one in findings]


def _preface(row: Row, outcomes: Sequence[Outcome]) -> str:
    """How the row came about, what became of its findings, and the way back to the table."""
    theory = row["record"]["settings"].get("theory", {})
    instead = [theory["reading"]] if theory.get("reading") else theory.get("measured_instead", [])
    told = {
        "command": row["command"],
        "versions": _run_of(row),
        "prediction": f"{_share(row, 'predicted_layers', 'weight_layers')} weight layers are predicted; "
        f"{_share(row, 'in_band', 'banded')} measured numbers lie in the 95% band"
        + (f". Measured instead: {'; '.join(instead)}" if instead else ""),
        "time": f"{row['seconds']} s on one core, building included",
        "state": "every bit as before" if row["unchanged"] else "CHANGED by the check",
    }
    looked = [
        (f"{escape(finding['kind'].replace('_', ' '))} ({finding['severity']})", _answer(outcome))
        for finding, outcome in list_findings(row, outcomes)
        if outcome is not None or finding["severity"] != "low"
    ]
    section = f"<section><h2>What looking into it gave</h2>{pairs(looked)}</section>" if looked else ""
    about = pairs((escape(key), escape(value)) for key, value in told.items())
    return f'<p><a href="index.html">All architectures</a></p><section>{about}</section>{section}'


def _answer(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not looked into"
    script = f"<pre>{escape(outcome.script.strip())}</pre>" if outcome.script else ""
    return f"<b>{escape(outcome.answer)}</b>: {escape(' '.join(outcome.words.split()))}{script}"


def _index(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> str:
    """The page with the table of all architectures."""
    head = "".join(f'<th scope="col" aria-sort="none"><button>{name}</button></th>' for name in HEADINGS)
    runs, told = _runs(rows)
    body = "".join(_line(row, outcomes, runs.index(_run_of(row)) + 1) for row in rows if "record" in row)
    refused = [(f"<code>hf:{escape(row['name'])}</code>", escape(row["reason"])) for row in rows if "record" not in row]
    script = read_page_file("zoo.js")
    return Template(read_page_file("zoo.html")).substitute(
        policy=content_policy(script),
        style="".join(read_page_file(f"{name}.css") for name in ("palette", "report", "zoo")),
        summary=escape(summarize(rows)),
        runs=escape(told),
        head=head,
        body=body,
        refused=pairs(refused) if refused else "<p>All of them were built.</p>",
        script=script,
    )


def _run_of(row: Row) -> str:
    return f"{row['versions']}, {row['date']}"


def _runs(rows: Sequence[Row]) -> tuple[list[str], str]:
    """Versions and date of each run that the rows come from, the one of most rows first; and all of them in words."""
    counts = Counter(map(_run_of, rows)).most_common()
    told = (f"run {place} ({count}): {run}" for place, (run, count) in enumerate(counts, start=1))
    return [run for run, _ in counts], "; ".join(told)


def _line(row: Row, outcomes: Sequence[Outcome], run: int) -> str:
    """The row of one architecture; its cells hold what they are sorted by."""
    order = {"unhealthy": 2, "not known": 1, "healthy": 0}
    told = "".join(
        f'<li class="{finding["severity"]}">{escape(finding["kind"].replace("_", " "))} ({finding["severity"]})'
        + (f": {escape(outcome.answer)}" if outcome else "")
        + "</li>"
        for finding, outcome in list_findings(row, outcomes)
    )
    cells: list[tuple[Any, str]] = [
        (row["name"], f'<a href="{escape(row["name"])}.html">{escape(row["name"])}</a>'),
        (row["model"], escape(row["model"])),
        (order[row["verdict"]], escape(row["verdict"])),
        # sorted by the worst severity first
        (10000 * row["high"] + 100 * row["medium"] + row["low"], f"<ul>{told}</ul>" if told else "–"),
        *((_ratio(row, *pair), _share(row, *pair)) for pair in PAIRS),
        (row["unmeasured"], str(row["unmeasured"] or "–")),
        (int(row["unchanged"]), "yes" if row["unchanged"] else "no"),
        (row["parameters"], f"{row['parameters'] / 1e6:.3g} M"),
        (row["seconds"], f"{row['seconds']:.1f}"),
        (run, str(run)),
    ]  # fmt: skip
    return "<tr>" + "".join(f'<td data-value="{escape(str(key))}">{text}</td>' for key, text in cells) + "</tr>\n"


def _ratio(row: Row, part: str, whole: str) -> float:
    return row[part] / row[whole] if row[whole] else -1.0  # sorted below every share where there is nothing to share


def _share(row: Row, part: str, whole: str) -> str:
    return f"{row[part]} of {row[whole]}"


def _markdown(rows: Sequence[Row]) -> str:
    """Totals and table for a reader without a browser: what was found, by architecture, and what was not built."""
    heads = (*HEADINGS[:5], "in the band", "not measured", "s", "run")  # as many as a page of text has room for
    runs, sources = _runs(rows)
    lines = [f"**{summarize(rows)}** {sources}.\n", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        if "record" not in row:
            continue
        kinds = [f"{one['kind']} ({one['severity']})" for one, _ in list_findings(row, ())]
        told = ", ".join(dict.fromkeys(kinds)) or "–"
        cells = [f"`{row['name']}`", row["model"], row["verdict"], told, *(_share(row, *pair) for pair in PAIRS),
                 str(row["unmeasured"] or "–"), f"{row['seconds']:.1f}", str(runs.index(_run_of(row)) + 1)]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    refused = [f"- `{row['name']}`: {row['reason']}" for row in rows if "record" not in row]
    return "\n".join([*lines, *(["\nNot built:\n", *refused] if refused else [])]) + "\n"
