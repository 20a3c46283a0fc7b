"""The page: template, style and script from package files, contents escaped, everything inlined."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from sounding.errors import UsageError
from sounding.files import place
from sounding.probe.records import Report
from sounding.report import sections
from sounding.report.charts import to_columns
from sounding.report.words import CHARTS

NAMESPACES = "www.w3.org/"


def write_html(report: Report | Mapping[str, Report], path: str | Path, *, preface: str = "") -> Path:
    """Write a report, or several networks side by side, as one self-contained HTML file.

    The file appears whole or not at all: it is written beside its place and then renamed.

    Args:
        report: what `sounding.check` returned; or a mapping from a network's name to its report.
        path: where to; an existing file is replaced.
        preface: HTML, escaped by whoever wrote it, to stand between the verdict and the findings.
    """
    text = render_html(report, preface=preface)
    place(Path(path), text.encode("utf-8"))
    return Path(path)


def render_html(report: Report | Mapping[str, Report], *, preface: str = "", plotly: str | None = None) -> str:
    """The page as text; see `write_html`. With `plotly`, the name of a file beside the page that holds `plotly_js`."""
    reports = {"": report} if isinstance(report, Report) else report
    if not isinstance(reports, Mapping) or not reports or not all(isinstance(r, Report) for r in reports.values()):
        raise UsageError(
            f"expected a Report or a mapping from names to Reports, got {type(report).__name__}",
            hint="what sounding.check returned",
        )
    data = {
        "charts": [asdict(chart) for chart in CHARTS],
        "networks": [to_columns(item, name) for name, item in reports.items()],
    }
    script = read_page_file("report.js")
    library = plotly_js() if plotly is None else ""
    return Template(read_page_file("report.html")).substitute(
        policy=content_policy(*([library] if library else []), script, beside=plotly is not None),
        title=sections.write_title(reports),
        style=read_page_file("palette.css") + read_page_file("report.css"),
        columns="two" if len(reports) > 1 else "one",
        verdicts=sections.write_verdicts(reports),
        preface=preface,
        findings=sections.write_findings(reports),
        theory=sections.write_theory(reports),
        unmeasured=sections.write_unmeasured(reports),
        environment=sections.write_environment(reports),
        citation=sections.write_citation(reports),
        date=datetime.now(UTC).strftime("%d %B %Y").lstrip("0"),  # a day below ten without its zero
        data=to_script_json(data),
        plotly=f"<script>{library}</script>" if library else f'<script src="{plotly}"></script>',
        script=script,
    )


def to_script_json(value: Any) -> str:
    """JSON that is safe inside a script element: no `<` can end it or open a comment.

    >>> to_script_json({"name": "</script><!--"})
    '{"name":"\\\\u003c/script\\\\u003e\\\\u003c!--"}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":  # a line separator ends a line of a script, not of JSON
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def read_page_file(name: str) -> str:
    """The text of a file that pages are made of."""
    return resources.files("sounding.report").joinpath("page", name).read_text("utf-8")


@functools.cache
def plotly_js() -> str:
    """plotly.js without the addresses of the sites it mentions; XML namespaces stay, they are names.

    The package holds the basic bundle, which draws lines and points in a quarter of the bytes of the whole library.
    """
    packed = resources.files("sounding.report").joinpath("page", "plotly.js.gz").read_bytes()
    source = gzip.decompress(packed).decode("utf-8")
    # the policy hashes this text, and a closing tag inside of it would end the script
    return re.sub(rf"https?://(?!{re.escape(NAMESPACES)})", "", source).replace("</script", "<\\/script")


def content_policy(*scripts: str, beside: bool = False) -> str:
    """A content security policy: these scripts by their hash, files beside the page if told, and nothing else."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    hashes += " 'self' file:" if beside else ""  # a page opened from a disk has no origin of its own
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
