"""The command line: one command per verb, no mathematics.

Commands live in modules of their own and are imported when called, so `sounding --help` stays light. Prose goes to
stderr, results to stdout; `--json` prints one object on stdout. Every `SoundingError` ends as one sentence on stderr
and its exit code; `--debug`, before or after the command, (or SOUNDING_DEBUG=1) shows the traceback as well.
"""

from __future__ import annotations

import contextlib
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
from sounding.cli.output import say
from sounding.errors import DataError, ExitCode, NumericalError, SoundingError

COMMANDS = {
    "check": ("sounding.cli.check:check", "Measure a network: does the signal arrive, where is it lost, and why?"),
    "audit": ("sounding.cli.audit:audit", "Look at the parameters before the first step, without data."),
    "compare": ("sounding.cli.compare:compare", "Compare two networks: the first layer whose outputs differ."),
    "explain": ("sounding.cli.explain:explain", "Say what a finding means, what to do, and when to ignore it."),
    "repair": ("sounding.cli.repair:repair", "Mend a network: try a cure, show whether it helps, write the weights."),
    "predict": ("sounding.cli.predict:predict", "Say what theory expects of a random network, without drawing one."),
    "prescribe": (
        "sounding.cli.prescribe:prescribe",
        "Say what must change for a network to train at a wanted depth.",
    ),
    "depth": ("sounding.cli.depth:depth", "Say how deep a network could go: what grows with depth and how fast."),
    "explore": ("sounding.cli.explore:explore", "Open a local web page: change settings and see what theory says."),
    "simulate": ("sounding.cli.simulate:simulate", "Draw random networks of any depth and measure every layer."),
    "train": ("sounding.cli.train:train", "Train networks on real data: many runs at once in one process."),
    "sweep": ("sounding.cli.sweep:sweep", "Do many runs of a command on many processes or machines."),
    "reproduce": (
        "sounding.cli.reproduce:reproduce",
        "Measure again what the papers state: figures, tables, theorems.",
    ),
    "claims": ("sounding.cli.claims:claims", "Look up what the papers state, and whether it holds."),
    "models": ("sounding.cli.models:models", "List networks that have a name, ours and the transformers library's."),
    "data": ("sounding.cli.data:data", "List, download and verify real data sets."),
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
                _print_traceback(error)
            say(_sentence(error), err=True)
            raise click.exceptions.Exit(error.exit_code) from error


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(__version__, prog_name="sounding")
def cli() -> None:
    """Sounding: how signal travels through very deep networks, forwards and backwards, and what to change."""


cli.params.append(_debug_option())


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process with the right exit code."""
    terminated = False

    def terminate(number: int, frame: Any) -> None:
        """SIGTERM is Ctrl-C, to whoever handles it at the time; only the exit code differs."""
        nonlocal terminated
        terminated = True
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, terminate) if _in_main_thread() else None
    try:
        code = _run(arguments)
    finally:
        if _in_main_thread():
            signal.signal(signal.SIGTERM, before)
    sys.exit(ExitCode.TERMINATED if terminated and code == ExitCode.INTERRUPTED else code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _run(arguments: list[str] | None) -> int:
    """The exit code of a command; whatever escapes it is told in one sentence."""
    try:
        result: Any = cli.main(args=arguments, prog_name="sounding", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else ExitCode.HEALTHY
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        say(text.getvalue(), err=True, nl=False)
        return ExitCode.USAGE
    except (KeyboardInterrupt, click.Abort):
        click.echo("sounding: interrupted", err=True)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # the reader (head, less) has gone; nothing is wrong
        _close_stdout()
        return ExitCode.HEALTHY
    except Exception as error:
        debug = "--debug" in (sys.argv if arguments is None else arguments) or os.environ.get("SOUNDING_DEBUG")
        if debug:
            _print_traceback(error)
        known = _explain(error)
        if known is not None:
            _close_stdout()
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
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error):
        told = str(error).partition("\n")[0]
        return DataError(f"the memory of this machine does not suffice ({told or 'no more can be had'})",
                         hint="a smaller width, depth or batch")  # fmt: skip
    return None


def _close_stdout() -> None:
    """Print what is still buffered if that can be, and let it not fail once more when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_traceback(error: BaseException) -> None:
    say("".join(traceback.format_exception(error)), err=True, nl=False)


def _sentence(error: SoundingError) -> str:
    """`sounding: what was expected and what came.`, and on the next line what to try."""
    hint = f"\n          Try {error.hint}." if error.hint else ""
    return f"sounding: {error.message}.{hint}"
