"""What the README promises runs: its commands here, its Python examples in test_docs.py."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
COMMANDS = [
    line.removeprefix("$ ").strip()
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]


def test_the_readme_has_commands() -> None:
    assert {"make demo", "make test"} <= set(COMMANDS)
    assert len([command for command in COMMANDS if command.startswith("sounding ")]) >= 5


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("sounding ")])
def test_a_command_of_the_readme_runs(command: str, tmp_path: Path) -> None:
    """Exit code 0, or 1 where an unhealthy network is what there is to find; never a traceback."""
    arguments = command.split()[1:]
    result = subprocess.run(
        [sys.executable, "-m", "sounding", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    allowed = {0, 1} if arguments[0] in {"check", "repair", "compare"} else {0}
    assert result.returncode in allowed, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_a_make_command_of_the_readme_is_a_target(command: str) -> None:
    """`make -n` resolves the target and all it needs without running it; this very test runs inside `make test`."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    result = subprocess.run([make, "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_link_of_the_readme_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing
