"""The audit of many architectures: rows of a sweep that resume, records that become pages, state that is left alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from browser import find_browser, open_browser
from reports import make_finding, make_report
from sounding.cli import cli
from sounding.cli.zoo import fingerprint
from sounding.errors import UsageError
from sounding.probe import check
from sounding.report.charts import to_columns
from sounding.report.compact import restore, shorten, unmeasured_weights
from sounding.report.zoo import list_findings, read_outcomes, read_rows, summarize, write_pages
from tolerance import TOLERANCE

BROWSER = find_browser()
ROOT = Path(__file__).parent.parent
OUTCOME = """
[[outcome]]
kind = "rank_collapse"
models = ["fir*"]
answer = "known practice"
words = "It is meant & told."
"""


def run(*arguments: str):
    return CliRunner().invoke(cli, ["audit", *arguments])


def row(name: str, **changes):
    """A row as the sweep keeps it, of a report with one finding."""
    report = make_report(40, findings=[make_finding(depth=9)])
    fields = {
        "name": name, "verdict": "unhealthy", "model": "Net", "parameters": 1000, "high": 1, "medium": 0, "low": 0,
        "weight_layers": 4, "predicted_layers": 3, "banded": 10, "in_band": 9, "unmeasured": 0, "unchanged": True,
        "seconds": 1.5, "versions": "sounding 0", "date": "2026-11-16", "command": f"sounding check hf:{name}",
        "record": json.loads(json.dumps(shorten(report, ()))),
    }  # fmt: skip
    return {**fields, **changes}


def test_a_record_is_small_and_gives_the_report_back():
    report = make_report(64, findings=[make_finding(depth=9), make_finding("dead_units", severity="low", depth=8)])
    record = json.loads(json.dumps(shorten(report, report.unmeasured), allow_nan=False))
    assert len(json.dumps(record)) < 6000
    again = restore(record, report.verdict.status)
    assert [(f.kind, f.severity, f.depth, f.remedies) for f in again.verdict.findings] == [
        (f.kind, f.severity, f.depth, f.remedies) for f in report.verdict.findings
    ]
    before, after = to_columns(report, ""), to_columns(again, "")
    for place, depth in enumerate(after["depth"]):
        index = before["depth"].index(depth)
        for measure, values in after["measures"].items():
            assert values[place] == pytest.approx(before["measures"][measure][index], rel=TOLERANCE.percent)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.data.view(torch.int32)[0, 0].bitwise_xor_(1),
        lambda model: model[1].running_mean.add_(1),
        lambda model: model.eval(),
        lambda model: model[0].register_forward_hook(lambda *_: None),
        lambda model: model[0].requires_grad_(False),
        lambda model: setattr(model[0].weight, "grad", torch.zeros(3, 3)),
        lambda model: setattr(model[1], "cache", 1),
    ],
)
def test_a_fingerprint_sees_one_bit_and_a_check_leaves_it(change):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    before = fingerprint(model)
    check(model, torch.randn(8, 3), theory=False)
    assert fingerprint(model) == before
    change(model)
    assert fingerprint(model) != before


class Idle(nn.Module):
    """A network with a layer and a dropout that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_weights_that_were_not_measured_matter_and_dropout_does_not():
    model = Idle()
    report = check(model, torch.randn(8, 4), theory=False)
    assert {item.name for item in report.unmeasured} >= {"idle", "drop"}
    assert {item.name for item in unmeasured_weights(report, model)} == {"idle", "network"}


def test_pages_tell_findings_with_their_outcomes(tmp_path):
    (tmp_path / "outcomes.toml").write_text(OUTCOME)
    rows = [row("first"), row("second"), {**row("third"), "verdict": "not built", "reason": "no <reason>"}]
    del rows[2]["record"]
    write_pages(rows, tmp_path, read_outcomes(tmp_path / "outcomes.toml"))
    index, first, second = ((tmp_path / "pages" / f"{name}.html").read_text() for name in ("index", "first", "second"))
    assert index.count("known practice") == 1
    assert "It is meant &amp; told." in first
    assert "not looked into" in second
    assert "<code>sounding repair hf:second --method" in second
    assert "no &lt;reason&gt;" in index
    assert not re.search(r"(src|href)=\"?https?:", index + first)
    assert (
        "| `first` | Net | unhealthy | rank_collapse (high) | 3 of 4 | 9 of 10 |" in (tmp_path / "table.md").read_text()
    )
    assert summarize(rows).startswith("2 architectures in 1 classes were checked, 1 more were not built")


def test_outcomes_that_are_none_are_refused(tmp_path):
    assert read_outcomes(tmp_path / "none.toml") == ()
    for text, words in (
        (OUTCOME.replace("known", "odd"), "odd"),
        ("[[outcome]]\nkin = 1", "kin"),
        ("[", "does not list outcomes"),
    ):
        (tmp_path / "outcomes.toml").write_text(text)
        with pytest.raises(UsageError, match=words):
            read_outcomes(tmp_path / "outcomes.toml")


def test_the_committed_zoo_keeps_what_its_page_says(tmp_path):
    """Many classes, most measured whole, none changed, every warning looked into, no false alarm."""
    folder = ROOT / "docs" / "zoo"
    rows = read_rows(folder / "rows")
    built, outcomes = [one for one in rows if "record" in one], read_outcomes(folder / "outcomes.toml")
    assert len({one["model"] for one in built}) >= 100
    assert sum(not one["unmeasured"] for one in built) >= 0.9 * len(built)
    assert all(one["unchanged"] for one in built)
    looked = [
        (one["name"], finding["kind"], finding["severity"], outcome)
        for one in built
        for finding, outcome in list_findings(one, outcomes)
        if finding["severity"] != "low"
    ]
    assert [line[:3] for line in looked if line[3] is None] == []
    assert [line[:2] for line in looked if line[2] == "high" and line[3].answer.startswith("mistake")] == []
    write_pages(rows, tmp_path, outcomes)
    assert (tmp_path / "table.md").read_text() == (folder / "table.md").read_text()
    for one in built[:: len(built) // 4]:
        page = (tmp_path / "pages" / f"{one['name']}.html").read_text()
        assert f"{one['versions']}, {one['date']}" in page


def test_counts_that_are_told_are_those_of_the_files():
    built = [one for one in read_rows(ROOT / "docs" / "zoo" / "rows") if "record" in one]
    whole = sum(not one["unmeasured"] for one in built) / len(built)
    counted = (str(len(built)), str(len({one["model"] for one in built})))
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    told = [match for page in pages for match in re.finditer(r"(\d+) architectures in (\d+) classes", page.read_text())]
    assert {match.groups() for match in told} == {counted}
    assert f"{whole:.0%} are measured whole" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.filterwarnings("ignore")
def test_the_zoo_resumes_repeats_and_writes_pages(tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "zoo"
    other = out / "rows" / "bert.json"
    other.parent.mkdir(parents=True)
    other.write_text(json.dumps(row("bert")))
    first = run("--zoo", "hf", "--only", "gpt2", "--out", str(out), "--cluster", "in-process", "--json")
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    bert, gpt2 = found["architectures"]
    assert {**bert, "record": row("bert")["record"]} == json.loads(other.read_text()) == row("bert")
    assert (gpt2["model"], gpt2["unchanged"], gpt2["unmeasured"]) == ("GPT2LMHeadModel", True, 0)
    assert gpt2["predicted_layers"] == gpt2["weight_layers"] == 25
    assert gpt2["command"] == "sounding check hf:gpt2"
    assert "transformers" in gpt2["versions"]
    (result,) = out.glob("sweep/results/*/*.json")
    assert result.stat().st_size < 6000
    before = result.stat().st_mtime_ns
    assert "2 architectures" in run("--zoo", "hf", "--only", "gpt2", "--out", str(out), "-q").output
    assert result.stat().st_mtime_ns == before
    (out / "pages" / "gpt2.html").unlink()
    assert run("--zoo", "hf", "--pages", "--out", str(out)).exit_code == 0
    assert "GPT2LMHeadModel" in (out / "pages" / "gpt2.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--zoo", "hf", "--only", "gpt22"), "no architecture 'gpt22'"),
        (("--zoo", "hf", "--only", ","), "--only has no name"),
        (("--zoo", "hf", "mlp"), "either TARGET or --zoo"),
        (("--zoo", "hf", "--pages"), "holds no result"),
        (("mlp", "--only", "gpt2"), "got --only"),
        ((), "expected a TARGET or --zoo"),
        (("--zoo", "hf", "--only", "gpt2", "--out", "."), "holds something that is no audit"),
    ],
)
def test_what_is_wrong_ends_in_a_sentence(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    pytest.importorskip("transformers")
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH")
def test_the_table_sorts_and_a_page_draws(tmp_path: Path):
    names = ("beta", "alpha", "gamma")
    index = write_pages([row(name, seconds=place) for place, name in enumerate(names)], tmp_path, ())
    first = "document.querySelector('#zoo tbody a').textContent"
    with open_browser(BROWSER) as page:
        page.open(index, ready="document.querySelectorAll('#zoo tbody tr').length == 3")
        page.evaluate("document.querySelectorAll('#zoo th button')[0].click()")
        assert page.evaluate(first) == "alpha"
        page.evaluate("document.querySelectorAll('#zoo th button')[9].click()")
        page.evaluate("document.querySelectorAll('#zoo th button')[9].click()")
        assert page.evaluate(first) == "gamma"
        assert page.complaints() == []
        page.open(index.with_name("beta.html"), ready="document.querySelectorAll('.trace path.js-line').length > 0")
        assert page.complaints() == []
