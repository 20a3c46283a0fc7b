"""Rows are data: every file is listed once, names a function that exists, and is read without the others."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sounding.claims import Panel, Picture, Series, all_claims, exact, find_claim
from sounding.claims import registry as rows
from sounding.claims.claim import Context
from sounding.claims.picture import write_words
from sounding.claims.registry import ROWS, Measurement
from sounding.claims.share import KEPT, share


def test_files_and_order_agree() -> None:
    order = tomllib.loads((ROWS / "order.toml").read_text("utf-8"))
    listed = [f"{paper}/{name}.toml" for paper, names in order.items() for name in names]
    found = [path.relative_to(ROWS).as_posix() for path in ROWS.glob("*/*")]
    assert sorted(listed) == sorted(found)
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("claim", all_claims(), ids=lambda claim: claim.id)
def test_every_row_names_a_measuring_function(claim: rows.Claim) -> None:
    assert isinstance(claim.measure, Measurement)
    module, _, function = claim.measure.name.rpartition(".")
    measure = getattr(importlib.import_module(f"sounding.claims.{module}"), function)
    assert list(inspect.signature(measure).parameters) == ["values", "context"]
    assert measure.__doc__


def test_a_row_is_found_without_the_others() -> None:
    """Neither another row's file is read nor any measuring module imported, let alone torch."""
    program = (
        "import sys, pathlib; read = pathlib.Path.read_text; seen = []\n"
        "pathlib.Path.read_text = lambda self, *rest: (seen.append(self.name), read(self, *rest))[1]\n"
        "from sounding.claims import find_claim; find_claim('thesis2024-thm6.5')\n"
        "print(seen, [m for m in sys.modules if m == 'torch' or m.startswith('sounding.claims.thesis2024')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['order.toml', 'thm6.5.toml'] []"


def test_a_row_takes_from_another_what_it_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings key by key, scale by scale, and the picture; texts and expectations whole."""
    (tmp_path / "orth2021").mkdir()
    first = (
        'place = "lemma 1"\nkind = "theorem"\nstatement = """\nTwo\nlines."""\nexperiment = "none"\nmeasure = "a.b"\n'
        '[expectations]\none = { low = 1, why = "so" }\n'
        '[settings]\nall = { width = 8, runs = 2 }\nquick = { reduction = "less", depth = 3 }\npaper = { depth = 9 }\n'
    )
    first += '[picture]\ncaption = "One."\npanels = [{ x_label = "layer" }]\n'
    second = (
        'like = "orth2021-one"\nplace = "lemma 2"\n[picture]\ncaption = "Two."\n'
        "[settings]\nall = { width = 16 }\npaper = { depth = 10 }\n"
    )
    for name, text in {"one": first, "two": second}.items():
        (tmp_path / "orth2021" / f"{name}.toml").write_text(text, "utf-8")
    monkeypatch.setattr(rows, "ROWS", tmp_path)
    claim = rows._load.__wrapped__("orth2021", "two")
    assert (claim.id, claim.paper, claim.place, claim.statement) == (
        "orth2021-two",
        "orth2021",
        "lemma 2",
        "Two lines.",
    )
    assert claim.settings["quick"] == rows.Setting({"width": 16, "runs": 2, "depth": 3}, "less")
    assert claim.settings["paper"] == rows.Setting({"width": 16, "runs": 2, "depth": 10}, "")
    assert [e.quantity for e in claim.expectations] == ["one"]
    assert claim.measure == Measurement("a.b", {"caption": "Two.", "panels": [{"x_label": "layer"}]})


def test_settings_of_an_unknown_scale_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "orth2021").mkdir()
    source = (ROWS / "orth2021" / "lemma2.toml").read_text("utf-8")
    (tmp_path / "orth2021" / "lemma2.toml").write_text(source + "\n[settings.huge]\nwidth = 1\n", "utf-8")
    monkeypatch.setattr(rows, "ROWS", tmp_path)
    with pytest.raises(ValueError, match="huge"):
        rows._load.__wrapped__("orth2021", "lemma2")


def test_parents_and_quotations_are_well_formed() -> None:
    """A parent is a row of the same paper that is no case itself; a quotation is short."""
    ids = {claim.id: claim for claim in all_claims()}
    assert any(claim.parent for claim in ids.values())
    for claim in ids.values():
        if claim.parent:
            assert ids[claim.parent].paper == claim.paper
            assert not ids[claim.parent].parent
        assert len(claim.quotation) <= 320


def test_an_id_is_found_once_and_kept() -> None:
    assert find_claim("rank2020-lemma1") is find_claim("rank2020-lemma1")


def test_rows_of_one_experiment_share_it() -> None:
    """Settings that the function does not get, or a context's progress, make no difference; all others do."""
    calls: list[dict[str, object]] = []

    @share("shown")
    def measure(values: Mapping[str, Any], context: Context, kind: str) -> int:
        calls.append(dict(values))
        return len(calls)

    first = measure({"width": 3, "rates": [0.1], "shown": "loss"}, Context(), "a")
    assert measure({"width": 3, "rates": (0.1,), "shown": "accuracy"}, Context(progress=print), "a") == first
    assert calls == [{"width": 3, "rates": [0.1]}]
    changed = [
        measure({"width": 3, "rates": [0.2]}, Context(), "a"),
        measure({"width": 3, "rates": [0.1]}, Context(), "b"),
    ]
    changed.append(measure({"width": 3, "rates": [0.1]}, Context(random_seed=1), "a"))
    assert changed == [2, 3, 4]
    for width in range(4, 4 + KEPT):
        measure({"width": width}, Context(), "a")
    assert measure({"width": 3, "rates": [0.1]}, Context(), "a") == 5 + KEPT, "the oldest are let go"


def test_every_row_has_a_quotation_and_every_row_that_trains_its_share() -> None:
    """The share is that of the scale which the ledger quotes; a share of the paper's training is never guessed."""
    shipped = rows.shipped_verdicts()
    for claim in all_claims():
        assert claim.quotation, claim.id
        setting = claim.settings[shipped[claim.id]["scale"]]
        trains = {"steps", "epochs", "evaluate"} & set(setting.values)
        assert (setting.training is not None) == bool(trains), claim.id
        if setting.training is not None and setting.values.get("epochs"):
            assert setting.training.run == setting.values["epochs"], claim.id


def test_a_picture_takes_its_words_from_the_row() -> None:
    """Texts name settings, numbers and the measurement's own words; the last panel's words serve all that follow."""
    texts = {
        "caption": "Width {width}, slope {slope.value:.1f}, {kind}.",
        "panels": [{"x_label": "width d", "ticks": "widths"}, {"y_label": "r(H)", "title": "runs: {runs}"}],
        "labels": {"r": "ratio"},
    }
    panels = (Panel(), Panel(title="kept"), Panel(series=(Series("r", [1], [2]),)))
    known = {"width": 8, "widths": [8, 16], "runs": 3, "slope": exact(0.5), "kind": "linear"}
    picture = write_words(Picture(panels), texts, known)
    assert picture.caption == "Width 8, slope 0.5, linear."
    assert picture.panels[0] == Panel("width d", ticks={8.0: "8", 16.0: "16"})
    assert picture.panels[1] == Panel(y_label="r(H)", title="runs: 3")
    assert picture.panels[2] == Panel(y_label="r(H)", series=(Series("ratio", [1], [2]),), title="runs: 3")
