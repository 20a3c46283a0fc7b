"""What users build on: names, commands, exit codes, the schema, the kinds of findings. To change one is a decision."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import sounding
from sounding.cli import COMMANDS
from sounding.errors import ExitCode
from sounding.profile import SCHEMA

ROOT = Path(__file__).parent.parent
NAMES = [
    "Estimate",
    "Finding",
    "Monitor",
    "Profile",
    "Report",
    "Row",
    "Verdict",
    "__version__",
    "activations",
    "audit",
    "chain",
    "check",
    "claims",
    "compare",
    "data",
    "depth",
    "errors",
    "measures",
    "models",
    "plan",
    "predict",
    "prescribe",
    "read",
    "recommend",
    "repair",
    "reproduce",
    "simulate",
    "sweep",
    "theory",
    "train",
    "watch",
    "weights",
    "write_html",
]
VERBS = [
    "check",
    "audit",
    "explain",
    "repair",
    "predict",
    "prescribe",
    "depth",
    "simulate",
    "train",
    "sweep",
    "reproduce",
    "claims",
    "models",
    "data",
    "explore",
    "compare",
    "completion",
]


def test_public_names_stay() -> None:
    assert set(NAMES) <= set(sounding.__all__)
    for name in NAMES:
        assert getattr(sounding, name) is not None


def test_commands_stay() -> None:
    assert set(VERBS) <= set(COMMANDS)


def test_exit_codes_stay() -> None:
    found = {code.name: int(code) for code in ExitCode}
    expected = {"HEALTHY": 0, "UNHEALTHY": 1, "USAGE": 2, "NUMERICAL": 3, "NOT_KNOWN": 4, "INTERRUPTED": 130}
    assert found == expected | {"TERMINATED": 143}


def test_the_schema_stays() -> None:
    assert SCHEMA == "sounding.profile/1"
    found = sounding.Profile([sounding.Row(1, "a", "mean_square", 2.0, 0.5, "check")]).to_dict()
    assert found["columns"] == ["layer", "name", "measure", "value", "stderr", "source"]
    assert found["rows"] == [[1, "a", "mean_square", 2.0, 0.5, "check"]]


def test_the_version_stands_in_one_place() -> None:
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text("utf-8")
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert cited is not None
    assert cited[1] == sounding.__version__
    assert f"## {sounding.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_shell_completes_commands() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", "from sounding.cli import main; main()"],
        env=os.environ | {"_SOUNDING_COMPLETE": "bash_complete", "COMP_WORDS": "sounding pre", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "predict" in answer.stdout
    assert "prescribe" in answer.stdout
