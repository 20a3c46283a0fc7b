"""Shell completion: a script for each shell, and what it completes where the shell is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sounding.cli import cli

ASKED = {
    "bash": "source script; COMP_WORDS=(sounding {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
    'compopt() {{ :; }}; _sounding_completion sounding; printf "%s\\n" "${{COMPREPLY[@]}}"',
    # zsh completes in its line editor only, so the functions that would show the answers print them
    "zsh": "compdef() {{ :; }}; compadd() {{ print -l $completions }}; "
    "_describe() {{ print -l ${{completions_with_descriptions%%:*}} }}; source script; "
    "words=(sounding {words}); CURRENT=$#words; _sounding_completion",
    "fish": 'source script; complete -C "sounding {words}" | string split -f 1 \\t',
}


@pytest.fixture
def program(tmp_path: Path) -> dict[str, str]:
    """An environment whose path has a `sounding` that runs this source."""
    command = tmp_path / "sounding"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sounding "$@"\n', "utf-8")
    command.chmod(0o755)
    source = str(Path(__file__).parent.parent / "src")
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    return os.environ | home | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": source}


@pytest.mark.parametrize("shell", list(ASKED))
def test_a_script_is_printed_for_each_shell(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell], prog_name="sounding")
    assert result.exit_code == 0
    assert f"_SOUNDING_COMPLETE={shell}_complete" in result.output


def test_an_unknown_shell_is_refused_with_those_that_are_known() -> None:
    result = CliRunner().invoke(cli, ["completion", "tcsh"])
    assert result.exit_code == 2
    assert all(shell in result.output for shell in ASKED)


@pytest.mark.parametrize("shell", list(ASKED))
@pytest.mark.parametrize(
    ("words", "expected"),
    [("pre", {"predict", "prescribe"}), ("predict ker", {"kernel"}), ("check --tier f", {"full", "fast"})],
)
def test_the_shell_completes_a_command_its_parts_and_values(
    shell: str, words: str, expected: set[str], program: dict[str, str], tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(CliRunner().invoke(cli, ["completion", shell]).output, "utf-8")
    code = ASKED[shell].format(words=words)
    answer = subprocess.run(
        [shell, "-c", code], cwd=tmp_path, env=program, capture_output=True, text=True, check=False, timeout=120
    )
    assert set(answer.stdout.split()) == expected, answer.stderr


def test_files_are_offered_for_a_network(program: dict[str, str]) -> None:
    asked = {"_SOUNDING_COMPLETE": "bash_complete", "COMP_WORDS": "sounding check net", "COMP_CWORD": "2"}
    answer = subprocess.run(["sounding"], env=program | asked, capture_output=True, text=True, check=False, timeout=120)
    assert answer.stdout == "file,net\n"
