"""The palette: told apart by the colour-blind, and the same in pictures, report, ledger, explorer and terminal."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from sounding.look import ACCENT, ACCENT_ON_DARK, BAD, GOOD, INK, LINE, MUTED, SERIES, SERIES_ON_DARK, WARN

PAGES = Path(__file__).parent.parent / "src" / "sounding"
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
SIGHTS = {
    "full": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
APART = 15  # CIE76; a difference of 2.3 is just noticeable, thin lines need several times that


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = matrix @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("colours", [SERIES, SERIES_ON_DARK], ids=["light", "dark"])
def test_series_stay_apart_for_every_sight(colours: tuple[str, ...], sight: str) -> None:
    seen = [lab(np.asarray(SIGHTS[sight]) @ linear(colour)) for colour in colours]
    for (i, one), (j, other) in itertools.combinations(enumerate(seen), 2):
        assert np.linalg.norm(one - other) > APART, (colours[i], colours[j])


@pytest.mark.parametrize("colour", [GOOD, WARN, BAD, MUTED])
def test_words_are_legible_on_white(colour: str) -> None:
    luminance = float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour))
    assert 1.05 / (luminance + 0.05) > 4.5  # WCAG 2.2, level AA


def named_colours(sheet: str) -> list[dict[str, str]]:
    """The colours that a style sheet names, on light ground and on dark."""
    parts = (PAGES / sheet).read_text("utf-8").split("prefers-color-scheme: dark", 1)
    return [{name: value.upper() for name, value in re.findall(r"--([\w-]+): (#\w+)", part)} for part in parts]


def test_the_style_sheet_of_report_and_ledger_holds_the_palette() -> None:
    light, dark = named_colours("report/page/palette.css")
    for found, colours in ((light, SERIES[:4]), (dark, SERIES_ON_DARK)):
        assert tuple(found[f"series-{i}"] for i in (1, 2, 3, 4)) == colours
    assert (light["accent"], dark["accent"]) == (ACCENT, ACCENT_ON_DARK)
    assert [light[name] for name in ("good", "warn", "bad", "ink", "muted", "line")] == [
        GOOD, WARN, BAD, INK, MUTED, LINE,
    ]  # fmt: skip


def test_the_explorer_has_the_colours_of_the_report() -> None:
    for found, palette in zip(
        named_colours("explore/page/explore.css"), named_colours("report/page/palette.css"), strict=True
    ):
        assert found
        assert found.items() <= palette.items()


def test_no_page_and_no_command_has_a_colour_of_its_own() -> None:
    """White is the paper under pictures."""
    hexes = re.compile(r"#[0-9a-fA-F]{3,8}\b")
    for path in (PAGES / "report" / "ledger.py", *(PAGES / "report" / "page").glob("*.css")):
        own = set(hexes.findall(path.read_text("utf-8"))) - {"#fff", "#ffffff"}
        assert path.name == "palette.css" or not own, (path.name, own)
    words = re.compile(r"[\"'](?:bold )?(?:bright_)?(?:red|green|yellow|cyan|blue|magenta)[\"']")
    for path in (PAGES / "cli").glob("*.py"):
        assert not words.findall(path.read_text("utf-8")), path.name
