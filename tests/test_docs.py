"""The documentation is run: every `>>>` block, every page in the index, every picture and local link in place."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from sounding.cli import cli
from sounding.look import TWO_COLUMNS_INCHES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("api/*.md"))]
TUTORIALS = sorted(DOCS.glob("tutorials/*.py"))
EXAMPLES = [ROOT / "README.md", *PAGES]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]+src=\"([^\"]+)\"|^```\{(?:image|figure)\} (\S+)", re.MULTILINE)


def blocks(page: Path) -> str:
    """The fenced blocks that hold a prompt, at their own lines of the page, everything else blank.

    Doctest would otherwise take the closing fence for expected output.
    """
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for match in FENCE.finditer(text):
        if ">>> " in match[2]:
            first = text.count("\n", 0, match.start(2))
            for offset, line in enumerate(match[2].splitlines()):
                lines[first + offset] = line
    return "\n".join(lines)


class Checker(doctest.OutputChecker):
    """Lets a verdict break its lines where the page has room, and differ in what rounding makes of a random draw.

    That is 2% of a number with a point, and a factor of a hundred in a power of ten; whole numbers are exact.
    """

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        if not re.match("(Unh|H)ealthy", want):
            return super().check_output(want, got, optionflags)
        powers, points = re.compile(r"10\^(-?\d+)"), re.compile(r"\d+\.\d+")
        wanted, found = ([float(one) for one in powers.findall(text)] for text in (want, got))
        plain = [points.sub("number", powers.sub("power", " ".join(text.split()))) for text in (want, got)]
        if plain[0] != plain[1] or any(abs(a - b) > 2 for a, b in zip(wanted, found, strict=True)):
            return False
        wanted, found = ([float(one) for one in points.findall(text)] for text in (want, got))
        return all(math.isclose(a, b, rel_tol=0.02) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page is one session, run in a directory of its own."""
    if "to_pandas" in blocks(page):
        pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(blocks(page), {"__name__": "__main__"}, page.name, str(page), 0)
    printed: list[str] = []
    runner = doctest.DocTestRunner(checker=Checker(), optionflags=doctest.ELLIPSIS, verbose=False)
    runner.run(example, out=printed.append)
    assert not printed, "".join(printed)


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_every_prompt_stands_in_a_fenced_block(page: Path) -> None:
    """An example outside a fence would be shown and never run."""
    shown = sum(line.lstrip().startswith(">>> ") for line in page.read_text(encoding="utf-8").splitlines())
    run = sum(line.lstrip().startswith(">>> ") for line in blocks(page).splitlines())
    assert shown == run


# blocks of Python that the tests read and do not run: they need a queue of a cluster, and a test file of the reader's
NOT_RUN = {"sweep.md": "SLURMCluster", "ci.md": "depth_check"}


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_blocks_without_a_prompt_are_few_and_can_be_read(page: Path) -> None:
    for kind, block in FENCE.findall(page.read_text("utf-8")):
        if kind in {"python", "pycon"} and ">>> " not in block:
            assert NOT_RUN[page.name] in block
            ast.parse(block)
        if kind == "toml":
            tomllib.loads(block)


def test_a_broken_example_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs the pages notices a wrong result."""
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\n>>> 1 + 1\n3\n\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="Expected:"):
        test_examples_run(page, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script.stem)
def test_a_tutorial_keeps_its_promise(script: Path, tmp_path: Path) -> None:
    """Each script ends with assertions of what its text says, and stands on the page of tutorials."""
    assert f"tutorials/{script.name}" in (DOCS / "tutorials.md").read_text(encoding="utf-8")
    result = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_every_command_has_a_page() -> None:
    assert {page.stem for page in PAGES} >= set(cli.list_commands(click.Context(cli)))


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = {
        line.strip()
        for body in re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
        for line in body.splitlines()
        if line.strip() and not line.startswith(":")
    }
    assert listed == {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES} - {"index"}


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_every_picture_and_local_link_exists(page: Path) -> None:
    text = FENCE.sub(lambda match: "" if match[1] else match[0], page.read_text(encoding="utf-8"))
    targets = ["".join(groups) for groups in LINK.findall(text)]
    local = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


def test_every_picture_is_shown_and_self_contained() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in EXAMPLES)
    for picture in sorted((DOCS / "pictures").glob("*")):
        assert picture.name in text, f"{picture.name} is on no page"
        if picture.suffix == ".svg":
            assert not re.search(r"(href|src)=\"https?:", picture.read_text(encoding="utf-8")), picture.name


def test_drawn_pictures_are_two_columns_wide() -> None:
    """In a paper they are set as they are, with text of the sizes of `sounding.look`."""
    text = (DOCS / "make_pictures.py").read_text("utf-8")
    drawn = re.findall(r'^    "(\w+)": \1,$', text, re.MULTILINE)
    assert len(drawn) > 8
    for name in drawn:
        width = re.search(r'<svg[^>]* width="([0-9.]+)pt"', (DOCS / "pictures" / f"{name}.svg").read_text("utf-8"))
        assert width is not None
        assert float(width[1]) == pytest.approx(72 * TWO_COLUMNS_INCHES), name


def test_the_table_of_training_is_made_from_its_results() -> None:
    """docs/train.md quotes docs/training.json, which docs/train_real_data.py writes."""
    spec = importlib.util.spec_from_file_location("train_real_data", DOCS / "train_real_data.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    results = json.loads((DOCS / "training.json").read_text("utf-8"))
    assert [result["command"] for result in results["results"]] == list(script.COMMANDS)
    assert script.write_table(results) in (DOCS / "train.md").read_text("utf-8")


# A docstring that begins so speaks of something that its reader has not seen.
RIDDLES = (
    "The same",
    "Those",
    "These",
    "This",
    "It",
    "Its",
    "They",
    "Their",
    "One more",
    "One less",
    "Both",
    "More",
    "There",
    "Of",
)


def test_docstrings_begin_with_a_noun_or_a_verb_that_stands_alone() -> None:
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            # a string that stands alone is a docstring: of a module, class or function, or of the name in front of it
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            if isinstance(text, str):
                opening = " ".join(text.split()[:2]).rstrip(".,:;")
                if any(opening == riddle or opening.startswith(f"{riddle} ") for riddle in RIDDLES):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {opening} …")
    assert not found, "\n".join(found)


def test_every_kind_of_finding_has_a_picture_and_a_public_issue() -> None:
    """Pictures are drawn by docs/make_kind_pictures.py, and what was seen in the wild has a number to look up."""
    from sounding.probe.kinds import pages

    drawn = {path.stem for path in (DOCS / "pictures" / "kinds").glob("*.svg")}
    assert drawn == set(pages())
    for page in pages().values():
        assert f"docs/pictures/kinds/{page.kind}.svg" in page.text
        for part in ("**Means.**", "**Seen.**", "**Do.**", "**Ignore it**"):
            assert part in page.text, page.kind
        assert re.search(r"#\d+", page.text), page.kind
