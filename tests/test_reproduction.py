"""`sounding reproduce` at its edges: Ctrl-C, damaged and incomplete results, bad folders, contradictory selections."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sounding.claims import Result, find_claim, read_results
from sounding.cli import cli, main
from sounding.errors import InterruptedRun, UsageError
from sounding.files import SUMS
from sounding.report.ledger import write_index, write_markdown
from sounding.reproduction import FILES, reproduce

ROW = "orth2021-lemma4"
PLACE = Path(ROW) / "quick"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one row's result."""
    out = tmp_path_factory.mktemp("results")
    reproduce(ROW, out=out)
    return out


@pytest.fixture
def results(measured: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    folder = tmp_path / "results" / PLACE
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_bytes((measured / PLACE / name).read_bytes())
    return tmp_path / "results"


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), InterruptedRun("interrupted; what was measured is partial")])
def test_ctrl_c_ends_the_run_and_not_a_row(
    stop: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def measure(claim_id: str, **options: Any) -> Result:
        asked.append(claim_id)
        raise stop

    monkeypatch.setattr("sounding.reproduction.reproduce", measure)
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", ROW, "orth2021-lemma10", "--out", str(tmp_path)])
    assert ended.value.code == 130
    assert asked == [ROW]
    assert "the same command goes on with the rest" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [b"{", b"\xff\xfe", b'{"schema": 1}', b'{"schema": 9}', b"[]"])
def test_what_is_damaged_is_named_and_measured_again(damage: bytes, results: Path) -> None:
    path = results / PLACE / "result.json"
    path.write_bytes(damage)
    with pytest.raises(UsageError, match=r"result\.json"):
        read_results(results)
    shown = CliRunner().invoke(cli, ["claims", "list", "--results", str(results)])
    assert shown.exit_code == 2
    assert "measures it again" in shown.output
    assert reproduce(ROW, out=results).verdict == "holds"
    assert read_results(results)


def test_a_verdict_that_the_numbers_do_not_give_is_refused(results: Path) -> None:
    path = results / PLACE / "result.json"
    (results / PLACE / SUMS).unlink()  # by hand, or before there were sums
    fields = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(fields | {"verdict": "does not hold"}), "utf-8")
    with pytest.raises(UsageError, match="its numbers give 'holds'"):
        read_results(results)
    fields["numbers"]["largest_share_of_bound"] |= {"value": "x"}
    path.write_text(json.dumps(fields), "utf-8")
    with pytest.raises(UsageError, match="no result of a claim"):
        read_results(results)


@pytest.mark.parametrize("missing", FILES)
def test_an_incomplete_folder_is_made_whole(missing: str, results: Path) -> None:
    (results / PLACE / missing).unlink()
    reproduce(ROW, out=results)
    assert sorted(path.name for path in (results / PLACE).iterdir()) == sorted(FILES)


def test_what_was_kept_says_so(results: Path) -> None:
    run = CliRunner().invoke
    arguments = ["reproduce", ROW, "--out", str(results)]
    assert "kept from" in run(cli, arguments).output
    kept, fresh = (json.loads(run(cli, [*arguments, "--json", *more]).output) for more in ([], ["--force"]))
    assert [found["results"][0]["kept"] for found in (kept, fresh)] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--all", "--paper", "orth2021"], "got more than one of them"),
        ([ROW, "--paper", "rank2020"], "got more than one of them"),
        ([ROW, "--all"], "got more than one of them"),
        ([ROW, "--random-seed", "-3"], "at least 0, got -3"),
        ([ROW, "--out", ""], "empty name"),
        ([ROW, "--device", "tpu"], "no device 'tpu'"),
    ],
)
def test_wrong_usage_is_found_before_the_work(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(cli, ["reproduce", *arguments])
    assert found.exit_code == 2
    assert words in found.output


def test_a_folder_that_is_a_file_is_found_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def measure(values: Any, context: Any) -> Any:
        raise AssertionError("measured first")

    row = dataclasses.replace(find_claim(ROW), measure=measure)
    with pytest.raises(UsageError, match="cannot write into"):
        reproduce(row, out=tmp_path / "file")
    with pytest.raises(UsageError, match="no device"):
        reproduce(row, device="tpu")


def test_links_survive_spaces_and_no_evidence_is_dropped_silently(results: Path) -> None:
    found = read_results(results)
    page = write_markdown(found, folder="sp ace")
    assert f"(sp%20ace/{ROW}/quick/figure.svg)" in page
    result = found[ROW]["quick"]
    many = dataclasses.replace(result, expectations=result.expectations * 3)
    rows = {ROW: {"quick": many}}
    assert "and 2 more: see all" in write_markdown(rows, folder="x")  # type: ignore[arg-type]
    assert write_index(rows)[0]["evidence"].count("expected") == 6  # type: ignore[arg-type]
