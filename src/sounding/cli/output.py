"""What every command shares: JSON on stdout, tables, progress on a terminal, and output files tried beforehand."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sounding.encoding import to_plain
from sounding.errors import UsageError, clean
from sounding.files import require_place

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text that may hold a stranger's names; every command prints by this, a console or `print_json`."""
    click.echo(clean(text), err=err, nl=nl)


def print_json(value: Any) -> None:
    """One strict JSON object on stdout; everything but ASCII is escaped."""
    click.echo(json.dumps(to_plain(value), indent=2, allow_nan=False))  # allow_nan=False: browsers and jq refuse NaN


def draw(path: Path | None, make: Callable[[Any], Axes]) -> None:
    """Make the picture with the module `sounding.cli.pictures` and write it, if one was asked for.

    A command prints its result first: a disk that is full must not cost it.
    """
    if path is None:
        return
    from sounding.cli import pictures
    from sounding.plot import save

    save(make(pictures).figure, path)


def present(result: Any, as_json: bool, plot: Path | None, make: Callable[[Any], Axes]) -> None:
    """A result as JSON or as a table, and its picture, if one was asked for."""
    if as_json:
        print_json(result.to_dict())
    else:
        from sounding.cli.result import print_result  # not for --help, which needs no tables

        print_result(result)
    draw(plot, make)


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A rich console at most 100 columns wide; NO_COLOR and non-terminals get plain text."""
    from rich.console import Console
    from rich.segment import Segment

    stream = sys.stderr if stderr else sys.stdout
    if "utf" not in (stream.encoding or "").lower() and isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal without ✓ gets ? instead of a UnicodeEncodeError

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            """Rich would end the process with 1, which here says that a network is unhealthy."""
            raise BrokenPipeError

        def render(self, *arguments: Any, **options: Any) -> Iterator[Segment]:
            """Rich lets escape sequences inside of text pass."""
            for segment in super().render(*arguments, **options):
                yield segment if segment.control else Segment(clean(segment.text), segment.style)

    # rich falls back to 80 columns where there is no terminal; tables are laid out for 100
    width = min(Console(file=stream).width, 100) if stream.isatty() else 100
    return Ours(file=stream, width=width, quiet=quiet, no_color="NO_COLOR" in os.environ or None, highlight=False)


def new_table(*headings: str) -> Table:
    """A table with a line below its headings; a heading that begins with > stands at the right, as its column does."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading.lstrip(">"), justify="right" if heading.startswith(">") else "left", no_wrap=True)
    return table


@contextlib.contextmanager
def despite_a_closed_pipe() -> Iterator[None]:
    """Print, and go on when the reader (head, less) has gone: the exit code still tells the verdict."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        close_stdout()


def close_stdout() -> None:
    """Print what is still buffered if that can be, and let it not fail once more when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more when it ends


@contextlib.contextmanager
def working(message: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner with `message` on stderr while the body works; nothing where stderr is no terminal.

    The body gets a function that changes the message.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    with console(stderr=True).status(message) as status:
        yield lambda text: status.update(text)


def telling_download(tell: Callable[[str], None]) -> Callable[[str, int, int | None], None]:
    """The progress of a download of (file, bytes so far, bytes in all if known), told in words."""
    return lambda name, done, total: tell(
        f"downloading {name}: {done / 1e6:.0f}{f' of {total / 1e6:.0f}' if total else ''} MB"
    )


@contextlib.contextmanager
def progress_over(what: str, *, quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A bar with the time left on a terminal's stderr, moved by (what, done, total); nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda text, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)  # the total is known with the first news
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)


def require_writable(path: Path) -> None:
    """Find out before the work, not after it, that a result cannot be written."""
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder", hint=f"{path / 'report.html'}")
    require_place(path)
    try:
        # permissions do not tell everything: a disk may be mounted read-only, or have no room
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}", hint="a folder of your own") from error
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"cannot write {path}: the file is read-only", hint="another name")
