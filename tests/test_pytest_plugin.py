"""The pytest plugin in real runs of pytest: the fixture fails, passes and explains; options, workers, registration."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from sounding.pytest import read_options

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent

NETWORKS = """
import pytest
import torch
from torch import nn

def deep(gain):
    torch.manual_seed(0)
    layers = []
    for _ in range(30):
        layers += [nn.Linear(32, 32, bias=False), nn.ReLU()]
        nn.init.normal_(layers[-2].weight, std=(gain / 32) ** 0.5)
    return nn.Sequential(*layers, nn.Linear(32, 4))

X, Y = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 4
"""

TESTS = """
def test_sick(depth_check):
    depth_check(deep(0.5), X, Y)

def test_sound(depth_check):
    report = depth_check(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)), X, Y, tier="fast")
    assert report.verdict.healthy and report.profile.settings["tier"] == "fast"

def test_unsure(depth_check):
    assert depth_check(nn.Sequential(nn.ReLU()), X).verdict.status == "not known"
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder where Sounding's entry points, as pyproject.toml states them, are installed."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]["pytest11"]
    lines = ["[pytest11]", *(f"{name} = {module}" for name, module in points.items())]
    installed = pytester.mkdir("sounding-0.dist-info")
    (installed / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (installed / "METADATA").write_text("Name: sounding\nVersion: 0\n")
    pytester.makepyfile(test_it=NETWORKS + TESTS)
    return pytester


@pytest.mark.parametrize("arguments", [(), ("-p", "sounding.pytest", "-n", "2")], ids=["installed", "-p -n"])
def test_the_fixture_fails_passes_and_warns(project: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    """Installed alone, asked for as well, and in workers: one failure whose message is the finding."""
    result = project.runpytest_subprocess(*arguments)
    result.assert_outcomes(failed=1, passed=2, warnings=1)
    result.stdout.fnmatch_lines(["Unhealthy: gradients shrink*", "gradient_vanishing at 0: *", "  try: *"])
    result.stdout.fnmatch_lines(["*NotKnownWarning: Not known:*"])
    result.stdout.no_fnmatch_line("*sounding/p*.py*")  # no line of ours in a traceback


@pytest.mark.slow
def test_without_entry_points_the_option_is_enough(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_it=NETWORKS + TESTS)
    pytester.makeconftest('pytest_plugins = ["sounding.pytest"]')
    pytester.runpytest_subprocess("-p", "sounding.pytest").assert_outcomes(failed=1, passed=2, warnings=1)


UNSURE = """
def test_fails(depth_check):
    depth_check(nn.Sequential(nn.ReLU()), X)

def test_skips(depth_check):
    depth_check(nn.Sequential(nn.ReLU()), X, not_known="skip")

def test_refused(depth_check):
    depth_check(nn.Linear(32, 4), X, mode="sideways")
"""


def test_options_come_from_pyproject_and_a_call_wins(project: pytest.Pytester) -> None:
    """The nearest pyproject.toml counts, also above a folder with a pytest.ini of its own."""
    project.makepyprojecttoml('[tool.sounding]\nnot_known = "fail"\ntheory = false\n')
    inner = project.mkdir("inner")
    (inner / "pytest.ini").write_text("[pytest]\n")
    (inner / "test_inner.py").write_text(NETWORKS + UNSURE)
    result = project.runpytest_subprocess(inner)
    result.assert_outcomes(failed=2, skipped=1)
    result.stdout.fnmatch_lines(["E*UsageError: expected mode to be one of train, eval, keep, got 'sideways'*"])
    result.stdout.no_fnmatch_line("*sounding/p*.py*")


def test_a_baseline_lies_beside_its_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.sounding]\nbaseline = "known.json"\n')
    assert read_options(tmp_path / "tests")["baseline"] == tmp_path / "known.json"


@pytest.mark.parametrize("text", ["teir = 'fast'", "types = ['Linear']", "not toml"])
def test_options_that_cannot_be_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.sounding]\n{text}\n")
    with pytest.raises(pytest.UsageError, match=r"has no option '(teir|types)'; it has .*tier|cannot read .*pyproject"):
        read_options(tmp_path)


def test_a_run_that_asks_for_no_check_imports_no_torch(project: pytest.Pytester) -> None:
    """The plugin is loaded in every run of pytest on the machine."""
    project.makepyfile(test_it="import sys\ndef test_light():\n    assert 'torch' not in sys.modules")
    project.runpytest_subprocess("-p", "no:hypothesispytest").assert_outcomes(passed=1)
