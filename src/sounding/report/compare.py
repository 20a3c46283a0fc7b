"""The report of a comparison: both networks in every chart, and a table of the layers that belong together."""

from __future__ import annotations

from pathlib import Path

from sounding.probe.compare import Comparison
from sounding.report.document import write_html
from sounding.report.sections import escape


def write_compare_html(
    comparison: Comparison, path: str | Path, *, names: tuple[str, str] = ("first", "second")
) -> Path:
    """Write a comparison as one self-contained HTML file; see `sounding.write_html`."""
    # a network compared with itself has one name for two entries of the mapping
    titles = names if names[0] != names[1] else (f"{names[0]} (first)", f"{names[1]} (second)")
    reports = {titles[0]: comparison.a, titles[1]: comparison.b}
    return write_html(reports, path, preface=write_preface(comparison))


def write_preface(comparison: Comparison) -> str:
    """The comparison as HTML: its sentences, the pairs with their differences, and what belongs to nothing."""
    rows, first = "", comparison.first
    for pair in comparison.pairs:
        difference, weights = f"{pair.difference:.3g}", "" if pair.weights is None else f"{pair.weights:.3g}"
        told = f"<strong>{difference}</strong> (first)" if pair is first else difference
        cells = f"<td>{escape(pair.b)}</td><td>{told}</td><td>{weights}</td>"
        rows += f"<tr><th scope=row>{escape(pair.a)}</th>{cells}</tr>"
    only = "".join(
        f"<p>Only in the {which}: {', '.join(f'<code>{escape(name)}</code>' for name in names)}</p>"
        for which, names in (("first", comparison.only_a), ("second", comparison.only_b))
        if names
    )
    return (
        '<section id="comparison" aria-labelledby="comparison-title">'
        f'<h2 id="comparison-title">Side by side</h2><p>{escape(comparison.summary)}</p>'
        f"<details open><summary>{len(comparison.pairs)} outputs that belong together</summary>"
        '<div class="scroll" tabindex="0"><table><thead><tr><th scope=col>first</th><th scope=col>second</th>'
        "<th scope=col>difference</th><th scope=col>of weights</th></tr></thead>"
        f"{rows}</table></div></details>{only}</section>"
    )
