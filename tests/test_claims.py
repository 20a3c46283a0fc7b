"""The ledger: intervals that cover, verdicts that follow from them, results that survive, tables made from results."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import sounding
from sounding.claims import (
    KINDS,
    PAPERS,
    SCALES,
    VERDICTS,
    Claim,
    Correction,
    Expectation,
    Number,
    Outcome,
    Panel,
    Picture,
    Series,
    Setting,
    all_claims,
    estimate,
    exact,
    fraction_of,
    judge,
    largest,
    mean_of,
    ratio_of,
    read_results,
    slope_of,
)
from sounding.claims.claim import Context, Standing, stand
from sounding.claims.registry import shipped_verdicts
from sounding.claims.result import Result, fingerprint_of
from sounding.cli import cli
from sounding.encoding import to_plain
from sounding.errors import UsageError
from sounding.report.ledger import write_index, write_markdown, write_page, write_totals

ROOT = Path(__file__).parent.parent
COMMITTED = ROOT / "docs" / "claims"
ROWS = {claim.id: claim for claim in all_claims()}
needs_results = pytest.mark.skipif(not COMMITTED.is_dir(), reason="no results are committed")
PICTURE = Picture((Panel("x, layers", "y", (Series("points", [0, 1], [1, 2], error=[0.1, 0.1]),)),), "What to see.")


@functools.cache
def committed_results() -> dict[str, dict[Any, Result]]:
    """Every committed result, read once for all tests."""
    return read_results(COMMITTED)


def made_up(**changes: Any) -> Claim:
    """A claim about a number that needs no measurement."""
    claim = Claim(
        id="rank2020-made-up",
        paper="rank2020",
        place="nowhere",
        kind="observation",
        statement="Two is two.",
        expectations=(Expectation("two", "by counting", low=1.9, high=2.1),),
        settings={"quick": Setting({"value": 2.0}), "standard": Setting({"value": 2.0}, reduction="half as many")},
        measure=lambda values, context: Outcome({"two": exact(values["value"], error=0.01)}, PICTURE),
    )
    return dataclasses.replace(claim, **changes)


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: mean_of(rng.normal(1.0, 2.0, 5)),
        lambda rng: fraction_of(int(rng.binomial(30, 1.0 / 3)), 30),
        lambda rng: slope_of(np.arange(5), np.arange(5) + rng.normal(0, 1, 5)),
        lambda rng: slope_of([0, 1], np.arange(2) + rng.normal(0, 1, 2), stderr=[1.0, 1.0]),
        lambda rng: estimate(1.0 + rng.normal(), 1.0),
        lambda rng: ratio_of(estimate(1 + 0.05 * rng.normal(), 0.05), estimate(1 + 0.05 * rng.normal(), 0.05)),
    ],
    ids=["mean", "fraction", "slope", "slope of two", "estimate", "ratio"],
)
def test_intervals_cover_as_often_as_they_say(make: Any) -> None:
    """99% intervals: of 2000, between 0.5% and 1.8% miss (a binomial's 5 standard errors), fractions fewer."""
    rng = np.random.default_rng(0)
    numbers = [make(rng) for _ in range(2000)]
    truth = 1.0 / 3 if numbers[0].samples == 30 else 1.0
    missed = sum(not number.low <= truth <= number.high for number in numbers)
    assert missed <= 0.01 * 2000 + 5 * math.sqrt(0.01 * 2000)


@given(value=st.floats(-10, 10), half=st.floats(0, 3), low=st.floats(-5, 0), high=st.floats(0, 5))
def test_an_expectation_is_met_violated_or_open(value: float, half: float, low: float, high: float) -> None:
    """met: inside; violated: outside; nothing else decides."""
    number = exact(value, error=half)
    status = Expectation("q", "", low=low, high=high).judge(number)
    points = np.linspace(number.low, number.high, 41)
    inside = (low <= points) & (points <= high)
    assert (status == "met") <= bool(inside.all())
    assert (status == "violated") <= (not inside.any())
    if status == "open":
        assert not (low <= number.low and number.high <= high)


@pytest.mark.parametrize(
    ("printed", "corrected", "verdict"),
    [
        (exact(2), None, "holds"),
        (exact(3), None, "does not hold"),
        (exact(2, error=1), None, "not decided at this scale"),
        (exact(math.nan), None, "not decided at this scale"),
        (exact(3), exact(1), "holds with correction"),
        (exact(3), exact(5), "does not hold"),
        (exact(3), exact(1, error=4), "not decided at this scale"),
        (exact(2, error=1), exact(1), "not decided at this scale"),
    ],
)
def test_the_verdict_follows_from_the_numbers(printed: Number, corrected: Number | None, verdict: str) -> None:
    correction = None
    numbers = {"two": printed}
    if corrected is not None:
        correction = Correction("one is one", (Expectation("one", "", low=0.9, high=1.1),))
        numbers["one"] = corrected
    assert judge(made_up(correction=correction), numbers) == verdict
    standing = stand(made_up().expectations, correction.expectations if correction else None, numbers)
    assert standing.verdict == verdict
    assert (standing.as_printed == "holds") == (verdict == "holds")
    assert (standing.corrected == "none") == (standing.as_printed != "fails" or correction is None)


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([("holds", "none"), ("holds", "none")], ("holds", "none")),
        ([("holds", "none"), ("fails", "holds")], ("fails", "holds")),
        ([("open", "none"), ("fails", "holds")], ("fails", "holds")),
        ([("open", "none"), ("holds", "none")], ("open", "none")),
        ([("fails", "holds"), ("fails", "none")], ("fails", "none")),
        ([("fails", "fails"), ("fails", "holds")], ("fails", "fails")),
    ],
)
def test_a_statement_stands_no_better_than_its_worst_case(parts: list[Any], whole: tuple[Any, Any]) -> None:
    for order in (parts, parts[::-1]):
        assert Standing.worst(Standing(*part) for part in order) == Standing(*whole)


@needs_results
def test_a_failure_as_printed_is_never_green() -> None:
    """Not even of a theorem whose own row holds, once a case of it fails."""
    found = {name: results for name, results in committed_results().items() if "thm5.11" in name}
    page, text = write_page(found, folder="claims"), write_markdown(found, folder="claims")
    row = page[page.index('<tr id="thesis2024-thm5.11"') :]
    row = row[: row.index("</tr>")]
    assert '<span class="badge fails">as printed: fails</span>' in row
    assert 'class="badge holds"' not in row
    assert '<a class="fails" href="#thesis2024-thm5.11">theorem 5.11 ✗</a>' in page
    assert "part of thesis2024-thm5.11: theorem 5.11, case 1" in text
    alone = {"thesis2024-thm5.11": found["thesis2024-thm5.11"]}
    assert "1 holds unreduced" in write_markdown(alone, folder="claims")


def test_the_old_name_of_paper_still_works_with_a_warning(tmp_path: Path) -> None:
    run = CliRunner().invoke
    new, old = (run(cli, ["claims", "list", option, "rank2020v1", "--json"]) for option in ("--paper", "--seed"))
    assert json.loads(old.stdout) == json.loads(new.stdout)
    assert not new.stderr
    assert "--paper rank2020v1" in old.stderr
    out = ["--out", str(tmp_path), "--json"]
    named = run(cli, ["reproduce", "rank2020-lemma1", "--seed", "3", *out])
    assert not named.stderr
    assert read_results(tmp_path)["rank2020-lemma1"]["quick"].random_seed == 3
    both = run(cli, ["reproduce", "rank2020-lemma1", "--seed", "rank2020", *out])
    assert both.exit_code == 2
    assert "--paper rank2020" in both.stderr
    assert run(cli, ["reproduce", "rank2020-lemma1", "--seed", "3", "--random-seed", "4", *out]).exit_code == 2


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["theorem", "5.11"], "thesis2024-thm5.11"),
        (["Thm. 5.11 of thesis2024"], "thesis2024-thm5.11"),
        (["fig", "3a", "rank2020"], "rank2020-fig3a"),
        (["lemma 3"], "rank2020-lemma3-gaussian"),
        (["rank2020-fig3a"], "rank2020-fig3a"),
        (["Table C.1"], "thesis2024-tableC.1"),
    ],
)
def test_rows_are_found_by_the_papers_numbering(words: list[str], first: str) -> None:
    found = json.loads(CliRunner().invoke(cli, ["claims", "find", *words, "--json"]).stdout)
    assert found[0]["id"] == first


def test_a_row_is_shown_by_the_papers_numbering() -> None:
    run = CliRunner().invoke
    shown = json.loads(run(cli, ["claims", "show", "thesis2024", "theorem 5.11", "--json"]).stdout)
    assert shown["id"] == "thesis2024-thm5.11"
    assert [case["id"][-1] for case in shown["cases"]] == list("1234")
    several = run(cli, ["claims", "show", "figure", "1"])
    assert several.exit_code == 2
    assert "rank2020-fig1" in several.stderr
    assert run(cli, ["claims", "find", "theorem 77"]).exit_code == 2


def test_a_number_that_was_not_measured_decides_nothing() -> None:
    assert judge(made_up(), {}) == "not decided at this scale"


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = sounding.reproduce(made_up(expectations=(Expectation("two", "", low=1.0),)), out=tmp_path)
    assert Result.from_json(result.to_json()).numbers == result.numbers
    folder = tmp_path / "rank2020-made-up" / "quick"
    assert {path.name for path in folder.iterdir()} == {
        *("result.json", "numbers.csv", "series.csv", "figure.svg", "figure.png", "SHA256SUMS"),
    }
    assert read_results(tmp_path)["rank2020-made-up"]["quick"].verdict == "holds"
    assert "points,measured,1,2,1.9,2.1" in (folder / "series.csv").read_text()


def test_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    """Unless its bounds, settings or seed changed, or by force."""
    calls: list[int] = []

    def count(values: Any, context: Any) -> Outcome:
        calls.append(context.random_seed)
        return Outcome({"two": exact(2)}, PICTURE)

    claim = made_up(measure=count)
    for options in ({}, {}, {"force": True}, {"random_seed": 1}):
        sounding.reproduce(claim, out=tmp_path, **options)
    assert calls == [0, 0, 1]
    sounding.reproduce(dataclasses.replace(claim, statement="Two is not three."), out=tmp_path, random_seed=1)
    assert len(calls) == 4


def test_a_row_that_fails_half_way_leaves_the_old_result(tmp_path: Path) -> None:
    sounding.reproduce(made_up(), out=tmp_path)
    before = (tmp_path / "rank2020-made-up" / "quick" / "result.json").read_bytes()

    def fail(values: Any, context: Any) -> Outcome:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sounding.reproduce(made_up(measure=fail), out=tmp_path, force=True)
    assert (tmp_path / "rank2020-made-up" / "quick" / "result.json").read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot write"):
        sounding.reproduce(made_up(), out=tmp_path / "new")


def test_an_out_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        sounding.reproduce(made_up(), out=tmp_path / "file")


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    sounding.reproduce(made_up(), out=tmp_path)
    (tmp_path / "rank2020-made-up" / "quick" / "result.json").write_text('{"schema"')
    with pytest.raises(UsageError, match=r"was changed since it was written: result\.json"):
        read_results(tmp_path)


def test_a_missing_scale_takes_the_next_smaller() -> None:
    assert sounding.reproduce(made_up(), scale="paper").scale == "standard"
    with pytest.raises(UsageError, match="no scale"):
        sounding.reproduce(made_up(), scale="huge")  # type: ignore[arg-type]


def test_reduction_and_correction_reach_the_ledger() -> None:
    """In both forms, escaped."""
    correction = Correction("3 is <three> | so", (Expectation("two", "", low=1.0),))
    claim = made_up(
        id="rank2020-lemma1", expectations=(Expectation("two", "", low=5.0),), correction=correction, note="a_b"
    )
    found = {claim.id: {"standard": sounding.reproduce(claim, scale="standard")}}
    text, page = write_markdown(found, folder="claims"), write_page(found, folder="claims")
    assert "holds with correction: 3 is \\<three> \\| so" in text
    assert "half as many" in text
    assert "&lt;three&gt;" in page
    assert "claims/rank2020-lemma1/standard/figure.svg" in page


def test_every_row_is_well_formed() -> None:
    ids = [claim.id for claim in all_claims()]
    assert len(set(ids)) == len(ids)
    for claim in all_claims():
        assert claim.paper in PAPERS
        assert claim.id.startswith(f"{claim.paper}-")
        assert claim.kind in KINDS
        assert "quick" in claim.settings
        assert set(claim.settings) <= set(SCALES)
        assert claim.expectations
        assert claim.experiment, claim.id
        assert claim.statement.endswith("."), claim.id
        for expectation in (*claim.expectations, *(claim.correction.expectations if claim.correction else ())):
            assert expectation.why, claim.id
            assert math.isfinite(expectation.low) or math.isfinite(expectation.high), claim.id
            assert expectation.low <= expectation.high


def test_the_command_line_lists_shows_and_reproduces(tmp_path: Path) -> None:
    run = CliRunner().invoke
    listed = json.loads(run(cli, ["claims", "list", "--json"]).stdout)
    assert [row["id"] for row in listed] == list(ROWS)
    assert {"id", "paper", "kind", "statement", "verdict", "scale"} <= set(listed[0])
    assert {"as_printed", "corrected", "reduction", "quotation", "parent"} <= set(listed[0])
    by_id = {row["id"]: row for row in listed}
    assert by_id["thesis2024-thm5.11-case1"]["parent"] == "thesis2024-thm5.11"
    assert by_id["thesis2024-thm5.11"]["as_printed"] == "fails"
    assert by_id["rank2020-lemma1"]["reduction"] is None
    assert "75" in by_id["rank2020-fig1"]["reduction"]
    shown = json.loads(run(cli, ["claims", "show", "rank2020-lemma1", "--json"]).stdout)
    assert shown["expectations"][0]["of"] == "statement"
    assert run(cli, ["claims", "show", "rank2020-lemma1"]).exit_code == 0
    out = str(tmp_path / "out")
    done = json.loads(run(cli, ["reproduce", "rank2020-lemma1", "--out", out, "--json"]).stdout)
    assert done["results"][0]["verdict"] == "holds"
    ledger = tmp_path / "ledger.md"
    assert run(cli, ["claims", "table", "--results", out, "--markdown", str(ledger)]).exit_code == 0
    assert "rank2020-lemma1" in ledger.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reproduce"], "expected an ID"),
        (["reproduce", "rank2020-lema1"], "rank2020-lemma1"),
        (["reproduce", "--paper", "rank2019"], "no paper"),
        (["reproduce", "rank2020-lemma1", "--scale", "big"], "no scale"),
        (["reproduce", "rank2020-lemma1", "--device", "cuda:9"], "no device"),
        (["reproduce", "rank2020-lemma1", "--jobs", "0"], "at least 1"),
        (["claims", "table", "--results", "nowhere"], "no results"),
    ],
)
def test_wrong_usage_is_a_sentence(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert words in result.stderr


@needs_results
def test_the_ledger_is_made_from_the_committed_results() -> None:
    """docs/ledger.md and the verdicts in the package are what `sounding claims table` writes."""
    found = committed_results()
    assert set(found) == set(ROWS), "every row has a committed result"
    assert (ROOT / "docs" / "ledger.md").read_text("utf-8") == write_markdown(found, folder="claims")
    assert (ROOT / "docs" / "ledger.html").read_text("utf-8") == write_page(found, folder="claims")
    assert write_totals(largest(results) for results in found.values()) in (ROOT / "README.md").read_text("utf-8")
    index = json.loads(json.dumps(write_index(found)))
    assert list(shipped_verdicts().values()) == index


@needs_results
@pytest.mark.parametrize("claim_id", ROWS)
def test_committed_verdicts_follow_from_committed_numbers(claim_id: str) -> None:
    """Against the bounds in the code: neither a verdict nor a bound was changed after the run."""
    for scale, result in committed_results()[claim_id].items():
        assert judge(ROWS[claim_id], result.numbers) == result.verdict
        assert result.statement == ROWS[claim_id].statement
        assert result.verdict in VERDICTS
        assert to_plain(ROWS[claim_id].settings[scale].values) == dict(result.settings)
        context = Context(device="cpu" if result.device == "cpu" else "cuda", random_seed=result.random_seed)
        assert fingerprint_of(ROWS[claim_id], scale, context) == result.fingerprint


@needs_results
@pytest.mark.parametrize("claim_id", ROWS)
def test_committed_figures_name_their_place(claim_id: str) -> None:
    """A verdict is judged again with the bounds, or is that of a case: it stands on the page, not in the figure."""
    for scale, result in committed_results()[claim_id].items():
        drawn = COMMITTED / claim_id / scale / "figure.svg"
        if drawn.exists():
            words = " ".join(re.sub(r"<[^>]*>", " ", drawn.read_text(encoding="utf-8")).split())
            assert f"{result.paper}, {result.place}" in words.replace("&apos;", "'")


@needs_results
@pytest.mark.parametrize("claim_id", ROWS)
def test_the_opposite_statement_does_not_hold(claim_id: str) -> None:
    """Of every row that holds: bounds moved to the other side of its interval are violated by the same numbers."""
    for result in committed_results()[claim_id].values():
        if result.verdict != "holds":
            continue
        claim = ROWS[claim_id]
        for wrong in claim.expectations:
            number = result.numbers[wrong.quantity]
            beyond = max(abs(number.value), 1e-6)
            opposite = dataclasses.replace(wrong, low=number.high + beyond, high=math.inf)
            if math.isinf(number.high):  # of a training that is not over: see `unfinished`
                opposite = dataclasses.replace(wrong, low=-math.inf, high=number.low - beyond)
            changed = dataclasses.replace(claim, expectations=(opposite,), correction=None)
            assert judge(changed, result.numbers) == "does not hold"


@pytest.mark.slow
@needs_results
@pytest.mark.parametrize("claim_id", ROWS)
def test_every_row_gives_its_committed_verdict(claim_id: str, tmp_path: Path) -> None:
    """At quick scale; a verdict may differ only where the interval of the deciding number reaches the committed one."""
    committed = committed_results()[claim_id]["quick"]
    result = sounding.reproduce(claim_id, out=tmp_path)
    if result.verdict == committed.verdict:
        return
    before = {(e["of"], e["quantity"]): e["status"] for e in committed.expectations}
    for expectation in result.expectations:
        if before[expectation["of"], expectation["quantity"]] == expectation["status"]:
            continue
        now, then = result.numbers[expectation["quantity"]], committed.numbers[expectation["quantity"]]
        assert now.low <= then.high, f"{result.verdict}, committed {committed.verdict}: {expectation}"
        assert then.low <= now.high, f"{result.verdict}, committed {committed.verdict}: {expectation}"
