"""The command line: one command per verb, no mathematics.

Commands live in modules of their own and are imported when called, so `sounding --help` stays light. Prose goes to
stderr, results to stdout; `--json` prints one object on stdout. Every `SoundingError` ends as one sentence on stderr
and its exit code; `--debug` (or SOUNDING_DEBUG=1) shows the traceback instead.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from sounding import __version__
from sounding.errors import ExitCode, SoundingError

COMMANDS = {
    "check": ("sounding.cli.check:check", "Measure a network: does signal survive its depth, where does it die, why?"),
    "predict": ("sounding.cli.predict:predict", "What theory says about a random network, without drawing a weight."),
    "prescribe": ("sounding.cli.prescribe:prescribe", "Which eps, shift, scale, gain or weights reach a wanted depth."),
    "simulate": ("sounding.cli.simulate:simulate", "Random networks as Markov chains, exact in law, any depth."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and one-line helps, and imports a command only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="sounding")
@click.option("--debug", is_flag=True, help="Show the full traceback of an error.")
def cli(debug: bool) -> None:
    """Sounding: how signal travels through very deep networks, forwards and backwards, and what to change."""
    if debug:
        os.environ["SOUNDING_DEBUG"] = "1"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process with the right exit code."""
    try:
        result: Any = cli.main(args=arguments, prog_name="sounding", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else ExitCode.HEALTHY)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    except SoundingError as error:
        if os.environ.get("SOUNDING_DEBUG"):
            raise
        click.echo(_sentence(error), err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("sounding: interrupted", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # the reader (head, less) has gone; nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.HEALTHY)


def _sentence(error: SoundingError) -> str:
    """`sounding: what was expected and what came.`, and on the next line what to try."""
    hint = f"\n          Try {error.hint}." if error.hint else ""
    return f"sounding: {error.message}.{hint}"
