"""Pages, reports, one JSON and an RO-Crate of the ledger in step with the results, and its search in a browser."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from browser import find_browser, open_browser
from sounding.chain import simulate
from sounding.claims import PAPERS, Expectation, Number, all_claims, largest, mean_of, read_results
from sounding.claims.meanfield2019.operators import deviation, eigenvalues_on, multiplicities, symmetric_basis
from sounding.claims.meanfield2019.trainable import last_trainable
from sounding.claims.number import unfinished
from sounding.claims.registry import left_out
from sounding.report.catalogue import CATALOGUE, CRATE, write_pages
from tolerance import TOLERANCE

DOCS = Path(__file__).parent.parent / "docs"
COMMITTED = DOCS / "claims"
BROWSER = find_browser()
needs_results = pytest.mark.skipif(not COMMITTED.is_dir(), reason="the committed results are part of the repository")


@needs_results
def test_pages_reports_and_catalogue_are_those_of_the_committed_results() -> None:
    files = write_pages(read_results(COMMITTED), COMMITTED)
    for name, text in files.items():
        assert (COMMITTED / name).read_text("utf-8") == text, f"{name} is old; make ledger"
    assert {f"report-{paper}.md" for paper in PAPERS} <= set(files)


@needs_results
def test_the_catalogue_and_the_crate_name_every_row() -> None:
    entries = json.loads((COMMITTED / CATALOGUE).read_text("utf-8"))
    assert [entry["id"] for entry in entries] == [claim.id for claim in all_claims()]
    for entry in entries:
        assert {"statement", "quotation", "reduction", "as_printed", "corrected", "provenance"} <= set(entry)
        assert (COMMITTED / entry["provenance"]["folder"] / "result.json").is_file()
    crate = json.loads((COMMITTED / CRATE).read_text("utf-8"))
    parts = {part["@id"]: part for part in crate["@graph"]}
    assert parts[CRATE]["about"] == {"@id": "./"}
    assert all((COMMITTED / part["@id"]).exists() for part in parts["./"]["hasPart"])


def test_what_is_left_out_points_at_rows_that_are_there() -> None:
    ids = {claim.id for claim in all_claims()}
    for paper in PAPERS:
        for item, reason in left_out(paper).items():
            named = re.findall(r"\b(?:rank2020v1|rank2020|orth2021|meanfield2019|thesis2024)-[\w.-]*\w", reason)
            assert set(named) <= ids, (item, set(named) - ids)
            assert named or len(reason) > 12


NUMBER = r"(−?[\d.]*\d)"


@needs_results
def test_figures_on_the_page_on_claims_are_those_of_the_committed_results() -> None:
    """Of the third reading on, whose results stand: value and interval, to the digits in which they are printed."""
    text = (DOCS / "claims.md").read_text("utf-8").partition("A third reading")[2].partition("Before the first of")[0]
    known = [number for results in read_results(COMMITTED).values() for number in largest(results).numbers.values()]

    def shows(printed: str, value: float) -> bool:
        places = len(printed.partition(".")[2])
        return abs(float(printed.replace("−", "-")) - value) <= 0.51 * 10.0**-places

    quoted = re.findall(rf"{NUMBER}ξ? \[{NUMBER}, {NUMBER}\]", text)
    assert len(quoted) >= 5
    for value, low, high in quoted:
        found = [n for n in known if shows(value, n.value) and shows(low, n.low) and shows(high, n.high)]
        assert found, f"{value} [{low}, {high}] is in no committed result"
    committed = read_results(COMMITTED)
    for panel, low, high in re.findall(rf"(2[a-d]): {NUMBER} to {NUMBER}", text):
        numbers = largest(committed[f"meanfield2019-fig{panel}"]).numbers
        assert shows(low, numbers["smallest_k"].value), panel
        assert shows(high, numbers["largest_k"].value), panel


@needs_results
def test_reports_count_and_list_the_same_rows() -> None:
    """A failure by a part names the part; a bound is written in the digits that tell it from the number."""
    for paper in PAPERS:
        text = (COMMITTED / f"report-{paper}.md").read_text("utf-8")
        sections = {part.partition("\n")[0]: part.count("\n- ") for part in text.split("\n## ")[1:]}
        found = re.findall(r"(\d+) ((?:hold|fail|open)[^,.(]*)", text.split("## M")[0])
        counted = {words.strip(): int(number) for number, words in found}
        held = sum(n for words, n in counted.items() if words.startswith("hold"))
        failed = sum(n for words, n in counted.items() if words.startswith("fail"))
        assert sections["What held"] + sections["What held on smaller runs"] == held
        assert sections["What did not hold as printed"] == failed
        assert sections["What is open"] == counted.get("open", 0)
        assert ": met" not in text.partition("## What did not")[2].partition("## What is open")[0]


def test_an_unfinished_training_refutes_nothing_that_lies_ahead() -> None:
    much = Expectation("ratio", "much", low=1.5)
    assert much.judge(Number(1.2, 1.1, 1.3)) == "violated"
    assert much.judge(unfinished(Number(1.2, 1.1, 1.3), towards=math.inf)) == "open"
    assert much.judge(unfinished(Number(1.8, 1.7, 1.9), towards=math.inf)) == "met"
    assert unfinished(Number(0.1, 0.05, 0.2), towards=0.0) == Number(0.1, 0.0, 0.2)


def test_an_interval_of_three_looks_is_wider() -> None:
    samples = [1.0, 2.0, 4.0, 3.0]
    one, three = mean_of(samples), mean_of(samples, looks=3)
    assert one.value == three.value
    assert three.low < one.low < one.high < three.high


def test_a_rank_is_counted_at_the_tolerance_that_is_asked_for() -> None:
    shares = ("1e-12", "1e-5", "0.5")
    found = simulate(
        width=8, batch_size=8, depth=40, runs=4, centring=False, input="collinear:1e-4", dtype="float64", residual=0.01,
        measures=[f"numerical_rank:{share}" for share in shares], generator=torch.Generator().manual_seed(3),
    ).averages  # fmt: skip
    ranks = [found[f"numerical_rank:{share}"].value for share in shares]
    assert ranks[0] == 8.0
    assert ranks[0] > ranks[1] >= ranks[2] == 1.0 or ranks[0] >= ranks[1] > ranks[2] == 1.0


def test_the_last_depth_that_trains_is_read_between_depths() -> None:
    """Accuracy 0.9, 0.7, 0.3, 0.1 over depths 10, 20, 40, 80: half of best minus chance, 0.5, lies at 20·√2."""
    accuracy = np.array([[0.9, 0.1], [0.7, 0.1], [0.3, 0.1], [0.1, 0.1]])
    alone = last_trainable(accuracy[:, :1], [10, 20, 40, 80], chance=0.1)
    assert alone[0] == pytest.approx(20 * np.sqrt(2))
    assert last_trainable(accuracy[:, 1:], [10, 20, 40, 80], chance=0.1)[0] == pytest.approx(10)
    assert last_trainable(np.full((4, 1), 0.9), [10, 20, 40, 80], chance=0.1)[0] == pytest.approx(80)


def test_eigenvalues_of_an_operator_on_symmetric_matrices() -> None:
    """The trace part times 3, the rest times 2."""
    found = eigenvalues_on(lambda m: 2 * m + np.trace(m) / 4 * np.eye(4), symmetric_basis(4))
    assert multiplicities(found) == [1, 9]
    assert deviation(found, [(3.0, 1), (2.0, 9)]) < TOLERANCE.exact
    assert deviation(found, [(3.5, 1), (2.0, 9)]) > 0.1


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH (apt-get install chromium)")
def test_a_row_is_found_in_the_browser() -> None:
    assert BROWSER is not None
    shown = "[...document.querySelectorAll('tr[id]')].filter(r => !r.hidden).map(r => r.id)"
    total = len(all_claims())
    with open_browser(BROWSER) as page:
        page.open(DOCS / "ledger.html", ready="document.getElementById('n').textContent.endsWith('rows')")
        assert page.complaints() == []
        assert len(page.evaluate(shown)) == total
        type_in = "(t => {const q = document.getElementById('q'); q.value = t; q.dispatchEvent(new Event('input'))})"
        page.evaluate(f"{type_in}('theorem 5.11')")
        found = page.evaluate(shown)
        assert "thesis2024-thm5.11" in found
        assert len(found) < 10
        page.evaluate(f"{type_in}('')")
        choose = "((i, v) => {const s = document.getElementById(i); s.value = v; s.dispatchEvent(new Event('change'))})"
        page.evaluate(f"{choose}('printed', 'fails')")
        failing = page.evaluate(shown)
        assert 0 < len(failing) < total
        page.evaluate(f"{choose}('paper', 'orth2021')")
        assert {name.split("-")[0] for name in page.evaluate(shown)} == {"orth2021"}
        hidden = page.evaluate("[...document.querySelectorAll('section')].filter(s => !s.hidden).length")
        assert hidden == 1
        assert page.evaluate("document.querySelectorAll('details[open]').length") == 0
