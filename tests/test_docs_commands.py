"""Commands shown on the pages: those without a file of the reader's own run, all others are read with their options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sounding.cli import cli

DOCS = Path(__file__).parent.parent / "docs"
SHOWN = sorted(
    {
        line.removeprefix("$ ").split("  #")[0].strip()
        for page in DOCS.glob("*.md")
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if line.startswith("$ sounding ")
    }
)
# why a command is not run by the tests, by what stands in it
NOT_RUN = {
    r"\.py:|package\.|\.np[yz]|\.toml|results|sweep (status|collect)": "names a file of the reader's",
    r"fashion-mnist|cifar|data get|data verify": "needs data that are downloaded",
    r"--zoo|--paper|size=default|^sounding train": "takes minutes",
    r"^sounding explore": "serves a page until it is stopped",
}
SLOW = re.compile(
    r"^sounding (check$|prescribe (transformer|residual)|depth|simulate)|hf:|--steps"
)  # two to ten seconds each


def reason_not_to_run(command: str) -> str | None:
    """Why the tests do not run a command, None where they do."""
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, command)), None)


def test_commands_stand_in_blocks_that_are_looked_at() -> None:
    """A command in a block of another kind would be shown and never tried."""
    for page in DOCS.glob("*.md"):
        for kind, block in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            hidden = [line for line in block.splitlines() if re.match(r"(\$ )?sounding ", line)]
            assert kind == "console" or ">>> " in block or not hidden, f"{page.name}: {hidden}"
            assert kind != "console" or not any(line.startswith("sounding ") for line in block.splitlines()), page.name


def test_pages_show_commands_of_every_kind() -> None:
    assert len(SHOWN) > 40
    assert {reason_not_to_run(command) for command in SHOWN} == {None, *NOT_RUN.values()}


@pytest.mark.parametrize("command", SHOWN)
def test_a_shown_command_has_its_options(command: str) -> None:
    """The parser of the command takes every word, which needs neither the file nor the time of a run."""
    found: click.Command = cli
    words = shlex.split(command)[1:]
    while isinstance(found, click.Group):
        context = click.Context(found)
        if found.get_command(context, words[0]) is None and hasattr(found, "default"):
            words = [found.default, *words]  # `sounding prescribe -a relu` is `sounding prescribe batchnorm -a relu`
        following = found.get_command(context, words[0])
        if following is None:
            break
        found, words = following, words[1:]
    found.make_parser(click.Context(found)).parse_args(words)
    assert not isinstance(found, click.Group) or getattr(found, "invoke_without_command", False)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if SLOW.search(command) else [])
        for command in SHOWN
        if reason_not_to_run(command) is None
    ],
)
def test_a_shown_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 0, or 1 where something unhealthy is what there is to find."""
    if "hf:" in command or "models list" in command:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code in ({0, 1} if words[0] in {"check", "depth"} else {0}), result.output
    assert result.output.strip()
