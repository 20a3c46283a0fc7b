"""The HTML report: whole, self-contained, escaped, and saying what the report says."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from html.parser import HTMLParser

import pytest

from reports import EVIL, make_finding, make_report
from sounding.errors import UsageError
from sounding.probe.kinds import page_of, pages
from sounding.probe.reading import read
from sounding.report import render_html, write_html
from sounding.report.charts import fit_line, to_columns
from sounding.report.words import CHARTS, PAPERS
from tolerance import TOLERANCE


class Reader(HTMLParser):
    """Tags, attributes and text outside scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self.scripts, self._inside = [], [], [], None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = (tag, dict(attrs)) if tag in ("script", "style") else self._inside

    def handle_endtag(self, tag):
        if self._inside and tag == self._inside[0]:
            self._inside = None

    def handle_data(self, data):
        if self._inside is None:
            self.texts.append(data)
        elif self._inside[0] == "script":
            self.scripts.append((self._inside[1], data))

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def embedded(self):
        return json.loads("".join(data for attributes, data in self.scripts if attributes.get("id") == "data"))


def test_the_verdict_comes_first_then_findings_with_evidence_and_what_to_try():
    finding = make_finding(evidence={"share_outside": 0.0123, "weight_layers": 64.0})
    text = Reader(render_html(make_report(findings=[finding]))).text
    order = [
        "Unhealthy",
        "Representations collapse.",
        page_of("rank_collapse").title,
        "Products of random layers collapse.",
        "sounding repair TARGET --method add_batchnorm",
        "make it shallower",
        "0.0123",
        "Not measured",
        "Environment",
        "How to cite",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "Advances in Neural Information Processing Systems 33" in text


def test_a_healthy_report_says_so():
    text = Reader(render_html(make_report())).text
    assert "Healthy" in text
    assert "Unhealthy" not in text
    assert "Nothing to report." in text
    warned = make_report(findings=[make_finding("dead_units", severity="medium")])
    assert "Healthy, with a warning" in Reader(render_html(warned)).text


def test_no_network_reference():
    page = render_html({"a": make_report(), "b": make_report(findings=[make_finding()])})
    addresses = set(re.findall(r"(?:https?:)?//[a-zA-Z0-9-]+\.[a-zA-Z]{2,}[^\s\"'`<>)]*", page))
    # names of XML namespaces are never fetched
    assert {address for address in addresses if re.match(r"https?://", address)} <= {
        f"http://www.w3.org/{name}"
        for name in ("2000/svg", "1999/xlink", "2000/xmlns/", "1999/xhtml", "XML/1998/namespace")
    }
    for tag, attributes in Reader(page).tags:
        assert tag not in ("iframe", "object", "embed", "base")
        for key in ("src", "href", "action", "data", "srcset", "poster"):
            assert attributes.get(key, "#").startswith(("#", "data:")), (tag, attributes)
    assert "@import" not in page.partition("<script")[0]
    assert "url(" not in page.partition("<script")[0]


def test_the_policy_allows_these_scripts_and_nothing_else():
    reader = Reader(render_html(make_report()))
    (policy,) = [a["content"] for tag, a in reader.tags if tag == "meta" and a.get("http-equiv")]
    runnable = [data for attributes, data in reader.scripts if attributes.get("type") != "application/json"]
    assert len(runnable) == 2
    for script in runnable:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy


def test_names_are_escaped_everywhere():
    finding = make_finding(
        layer=EVIL, why=EVIL, remedies=(EVIL, f"sounding {EVIL}: {EVIL}"), evidence={EVIL: 1.0}, paper=EVIL
    )
    names = [EVIL] * 8
    report = make_report(names=names, findings=[finding], unmeasured=[(EVIL, EVIL)], environment={EVIL: EVIL})
    page = render_html({EVIL: report, "plain": make_report()})
    assert EVIL not in page
    reader = Reader(page)
    assert sum(tag == "script" for tag, _ in reader.tags) == 3
    assert not any(tag == "img" for tag, _ in reader.tags)
    data = reader.embedded()
    assert data["networks"][0]["name"] == EVIL
    assert EVIL in data["networks"][0]["names"]
    assert reader.text.count("onerror=alert(1)") >= 8  # shown as text


def test_the_page_draws_the_profile_and_nothing_twice():
    report = make_report(6, findings=[make_finding(depth=3)])
    columns = to_columns(report, "name")
    assert columns["depth"] == list(range(13))
    assert columns["weighs"] == [0] + [1, 0] * 6
    measured = {row.layer: row.value for row in report.profile.select("participation_ratio", source="check")}
    for depth, value in zip(columns["depth"], columns["measures"]["participation_ratio"], strict=True):
        assert value == pytest.approx(measured[depth], rel=TOLERANCE.finite_difference)
    assert columns["theory"]["gradient_log_norm"]["depth"] == [1, 3, 5, 7, 9, 11]
    assert columns["findings"] == [{"kind": "rank_collapse", "severity": "high", "depth": 3}]
    assert set(columns["measures"]) <= {measure for chart in CHARTS for measure in chart.measures}


def test_values_that_are_not_finite_are_told_in_words_and_absent_ones_are_null():
    report = make_report(1)
    rows = [
        row._replace(value=math.inf) if row.measure == "mean_square" and row.layer == 1 else row
        for row in report.profile
    ]
    broken = type(report)(type(report.profile)(rows, report.profile.settings), report.verdict)
    columns = to_columns(broken, "")
    assert columns["measures"]["mean_square"] == [None, "infinite", 1]
    render_html(broken)


def test_the_fitted_line_is_least_squares_on_an_exact_slope():
    """On points that lie on a line the drawn fit is that line."""
    reading = read(make_report(9).profile)
    line = fit_line(reading, reading.network)
    measured = [call.get("gradient_log_norm") for call in reading.weight_layers]
    assert line["value"] == pytest.approx(measured, abs=TOLERANCE.finite_difference)
    assert line["growth"] == "1.50 ± 0.01"


def test_a_thousand_layers_stay_small():
    page = render_html(make_report(500))
    assert len(page) < 6_000_000
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert len(data) < 200_000


def test_every_finding_and_paper_has_words():
    from typing import get_args

    from sounding.probe.records import FindingKind

    assert set(pages()) == set(get_args(FindingKind))
    assert set(PAPERS) == {"rank2020", "rank2020v1", "orth2021", "meanfield2019", "thesis2024"}


def test_an_empty_report_is_a_page():
    from sounding.probe.records import Report, Verdict
    from sounding.profile import Profile

    text = Reader(render_html(Report(Profile(), Verdict("not known", (), "nothing was measured.")))).text
    assert "Nothing was measured" in text


def test_writing_is_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("before")
    assert write_html(make_report(), path) == path
    assert path.read_text("utf-8").endswith("</html>\n")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match="cannot write"):
        write_html(make_report(), tmp_path / "no" / "report.html")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no regular file"):
        write_html(make_report(), tmp_path / "pipe")
    with pytest.raises(UsageError, match="expected a Report"):
        write_html("text", path)
    with pytest.raises(UsageError, match="expected a Report"):
        write_html({}, path)
