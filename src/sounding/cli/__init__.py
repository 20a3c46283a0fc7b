"""The command line: one command per verb, no mathematics.

Commands live in modules of their own and are imported when called, so `sounding --help` stays light. Prose goes to
stderr, results to stdout; `--json` prints one object on stdout. Every `SoundingError` ends as one sentence on stderr
and its exit code; `--debug`, before or after the command, (or SOUNDING_DEBUG=1) shows the traceback as well.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from typing import Any

import click

from sounding import __version__
from sounding.cli.output import close_stdout, say
from sounding.errors import DataError, ExitCode, NumericalError, SoundingError

COMMANDS = {
    "check": "Measure a network: does the signal arrive, where is it lost, and why?",
    "audit": "Look at the parameters before the first step, without data.",
    "compare": "Compare two networks: which is the first layer whose outputs differ?",
    "explain": "Say what a finding means, what to do, and when to ignore it.",
    "repair": "Mend a network: try a cure, show whether it helps, write the weights.",
    "predict": "Say what theory expects of a random network, without drawing one.",
    "prescribe": "Say what must change for a network to train at a wanted depth.",
    "depth": "Say how deep a network could go: what grows with depth and how fast.",
    "explore": "Open a local web page: change settings and see what theory says.",
    "simulate": "Draw random networks of any depth and measure every layer.",
    "train": "Train networks on real data: many runs at once in one process.",
    "sweep": "Do many runs of a command on many processes or machines.",
    "reproduce": "Measure again what the papers state: figures, tables, theorems.",
    "claims": "Look up what the papers state, and whether it holds.",
    "models": "List networks that have a name, ours and the transformers library's.",
    "data": "List, download and verify real data sets.",
    "completion": "Print a script that completes commands in bash, zsh or fish.",
}
DEBUG = "sounding.debug"
INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h


def load_command(name: str) -> click.Command:
    """The command of that name, which is alone in a module of the same name."""
    command = getattr(importlib.import_module(f"sounding.cli.{name}"), name)
    assert isinstance(command, click.Command)
    return command


def _give_debug(command: click.Command) -> None:
    """Add --debug to a command and to those below it, so that it may stand anywhere."""

    def remember(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        ctx.meta[DEBUG] = value or ctx.meta.get(DEBUG, False)  # a command must not take back what its group said

    # a command is asked for more than once, by its help and by completion
    if not any("--debug" in parameter.opts for parameter in command.params):
        command.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, callback=remember,
                                           help="Show the full traceback of an error."))  # fmt: skip
    for below in command.commands.values() if isinstance(command, click.Group) else ():
        _give_debug(below)


# what people look for among the commands, and where it is
LIBRARY = {"read": "read", "recommend": "recommend", "monitor": "Monitor", "plan": "plan"}


class LazyGroup(click.Group):
    """A group that knows its commands' names and one-line helps, and imports a command only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = load_command(cmd_name)
        _give_debug(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is called; a name that is almost right is told."""
        if args[0] in LIBRARY:
            ctx.fail(f"sounding.{LIBRARY[args[0]]} belongs to the Python library; help(sounding) says how to call it.")
        close = difflib.get_close_matches(args[0], COMMANDS, n=1)
        if close and args[0] not in COMMANDS:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {close[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            # click would import every command to ask for its help
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of ours ends as its sentence and exit code."""
        try:
            return super().invoke(ctx)
        except SoundingError as error:
            if ctx.meta.get(DEBUG) or os.environ.get("SOUNDING_DEBUG"):
                _print_traceback(error)
            say(_sentence(error), err=True)
            raise click.exceptions.Exit(error.exit_code) from error


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(__version__, prog_name="sounding")
def cli() -> None:
    """Sounding says how signal travels through very deep networks, forwards and backwards, and what to change.

    Begin with `sounding check`, which measures an example, and `sounding check file.py:name` for a network of yours.
    `sounding COMMAND --help` explains a command and its options.
    """


_give_debug(cli)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process with the right exit code."""
    terminated = False

    def terminate(number: int, frame: Any) -> None:
        """SIGTERM is Ctrl-C, to whoever handles it at the time; only the exit code differs."""
        nonlocal terminated
        terminated = True
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    in_main_thread = threading.current_thread() is threading.main_thread()  # Python lets only this one set handlers
    before = signal.signal(signal.SIGTERM, terminate) if in_main_thread else None
    try:
        code = _run(arguments)
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)
    # a command that came to its end in spite of the signal keeps its own code
    sys.exit(ExitCode.TERMINATED if terminated and code == ExitCode.INTERRUPTED else code)


def _run(arguments: list[str] | None) -> int:
    """The exit code of a command; whatever escapes it is told in one sentence."""
    try:
        # not standalone: errors come to the lines below, not to an exit of click
        result: Any = cli.main(args=arguments, prog_name="sounding", standalone_mode=False)
        # a reader that has gone, or a full disk, is met here and not while Python ends
        sys.stdout.flush()
        return result if isinstance(result, int) else ExitCode.HEALTHY  # commands that end by a return give their code
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        say(text.getvalue(), err=True, nl=False)
        return ExitCode.USAGE
    except (KeyboardInterrupt, click.Abort):
        click.echo("sounding: interrupted", err=True)  # what was measured has been told by the command
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # the reader (head, less) has gone; nothing is wrong
        close_stdout()
        return ExitCode.HEALTHY
    except Exception as error:
        if "--debug" in (sys.argv if arguments is None else arguments) or os.environ.get("SOUNDING_DEBUG"):
            _print_traceback(error)
        if known := _explain(error):
            close_stdout()
            say(_sentence(known), err=True)
            return known.exit_code
        # a defect of ours must not end with 1, which says that a network is unhealthy
        told = f"sounding: internal error, {type(error).__name__}: {error}. Try --debug, and please report it."
        say(told, err=True)
        return INTERNAL_ERROR


def _explain(error: Exception) -> SoundingError | None:
    """What the machine refused, as an error of ours: memory, the disk, a process; None for a defect."""
    if isinstance(error, OSError):
        from sounding.files import NO_ROOM

        where = f" ({error.filename})" if error.filename else ""
        hint = "making room on the disk, then the same command again" if error.errno in NO_ROOM else None
        return DataError(f"the system refused: {error.strerror or error}{where}", hint=hint)
    if isinstance(error, OverflowError):
        return NumericalError(f"a number left the range of float64 ({error})", hint="less extreme values")
    # torch says it in a RuntimeError of either wording
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error):
        told = str(error).partition("\n")[0]
        return DataError(f"the memory of this machine does not suffice ({told or 'no more can be had'})",
                         hint="a smaller width, depth or batch")  # fmt: skip
    return None


def _print_traceback(error: BaseException) -> None:
    say("".join(traceback.format_exception(error)), err=True, nl=False)


def _sentence(error: SoundingError) -> str:
    """`sounding: what was expected and what came.`, and on the next line what to try."""
    hint = f"\n          Try {error.hint}." if error.hint else ""
    return f"sounding: {error.message}.{hint}"
