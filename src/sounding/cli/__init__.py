"""The command line: one command per verb, no mathematics.

Commands live in modules of their own and are imported when called, so `sounding --help` stays light. Prose goes to
stderr, results to stdout; `--json` prints one object on stdout. Every `SoundingError` ends as one sentence on stderr
and its exit code; `--debug`, before or after the command, (or SOUNDING_DEBUG=1) shows the traceback as well.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

import click

from sounding import __version__
from sounding.errors import ExitCode, SoundingError

COMMANDS = {
    "check": ("sounding.cli.check:check", "Measure a network: does signal survive its depth, where does it die, why?"),
    "repair": ("sounding.cli.repair:repair", "Mend a network: try a cure, show whether it helps, write the weights."),
    "predict": ("sounding.cli.predict:predict", "What theory says about a random network, without drawing a weight."),
    "prescribe": ("sounding.cli.prescribe:prescribe", "Which eps, shift, scale, gain or weights reach a wanted depth."),
    "simulate": ("sounding.cli.simulate:simulate", "Random networks as Markov chains, exact in law, any depth."),
    "train": ("sounding.cli.train:train", "Train networks on real data: a grid of runs as one program."),
    "reproduce": ("sounding.cli.reproduce:reproduce", "Redo the papers: figures, tables, theorems, and what holds."),
    "claims": ("sounding.cli.claims:claims", "The ledger of the papers' claims: list, show, table."),
    "data": ("sounding.cli.data:data", "Real data sets: list, get, verify."),
}


DEBUG = "sounding.debug"
INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h


def _remember_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[DEBUG] = True


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        callback=_remember_debug,
        help="Show the full traceback of an error.",
    )


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
        if not any("--debug" in parameter.opts for parameter in command.params):
            command.params.append(_debug_option())
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of ours ends as its sentence and exit code."""
        try:
            return super().invoke(ctx)
        except SoundingError as error:
            if ctx.meta.get(DEBUG) or os.environ.get("SOUNDING_DEBUG"):
                traceback.print_exception(error)
            click.echo(_sentence(error), err=True)
            raise click.exceptions.Exit(error.exit_code) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="sounding")
def cli() -> None:
    """Sounding: how signal travels through very deep networks, forwards and backwards, and what to change."""


cli.params.append(_debug_option())


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process with the right exit code."""
    try:
        result: Any = cli.main(args=arguments, prog_name="sounding", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else ExitCode.HEALTHY)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    except (KeyboardInterrupt, click.Abort):
        click.echo("sounding: interrupted", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # the reader (head, less) has gone; nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.HEALTHY)
    except Exception as error:
        # a defect of ours must not end with 1, which says that a network is unhealthy
        if "--debug" in (sys.argv if arguments is None else arguments) or os.environ.get("SOUNDING_DEBUG"):
            traceback.print_exception(error)
        click.echo(
            f"sounding: internal error, {type(error).__name__}: {error}. Try --debug, and please report it.", err=True
        )
        sys.exit(INTERNAL_ERROR)


def _sentence(error: SoundingError) -> str:
    """`sounding: what was expected and what came.`, and on the next line what to try."""
    hint = f"\n          Try {error.hint}." if error.hint else ""
    return f"sounding: {error.message}.{hint}"
