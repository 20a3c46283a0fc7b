"""`sounding sweep`: a grid of runs on many processes or machines, and a directory that keeps what they found."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from sounding.cli.options import FILE, file_option, json_option, picture_option, quiet_option, with_options
from sounding.cli.output import print_json, progress_over, say
from sounding.encoding import fields_of
from sounding.errors import ExitCode, UsageError
from sounding.limits import in_time
from sounding.sweeping import Progress, Spec, Status, Store, read_spec, run_sweep

FOLDER = click.Path(path_type=Path, file_okay=False)


@click.group()
def sweep() -> None:
    """Do a grid of runs on many processes or machines.

    A grid has a run for every combination of the values in a file SPEC.toml; `sounding sweep run --help` shows one.
    Every result is kept in a folder, so that a sweep that was interrupted goes on where it stopped.
    """


engine = with_options(
    click.option("--cluster", metavar="C",
                 help="Which machines work: in-process, local:4 (four processes of Dask here), or the address of a "
                 "Dask scheduler, tcp://HOST:8786."),
    click.option("--jobs", type=int, metavar="N", help="Number of local processes [default: one for each core]."),
)  # fmt: skip
_spoken = with_options(json_option, quiet_option(), engine)


@sweep.command(short_help="Do a sweep, or what is left of it.")
@click.argument("spec", type=FILE)
@click.option("--out", type=FOLDER, required=True, metavar="DIR",
              help="Folder of the results. A task that has a result there is not run again.")  # fmt: skip
@click.option("--limit", type=float, metavar="S", help="Seconds that a task may take.")
@_spoken
def run(spec: Path, out: Path, limit: float | None, **options: Any) -> int:
    """Do the sweep that SPEC.toml describes. A task is one run of the grid.

    \b
    verb = "predict batchnorm"     # or module:function
    [options]
    activation = "relu"
    [grid]
    batch-size = [8, 16, 32]

    \b
    Exit codes: 0 all tasks are done, 2 wrong usage,
    3 a task failed (resume tries it again), 130 interrupted.
    """
    from sounding.cli.verbs import prepare

    found = prepare(read_spec(spec))
    return _run(found if limit is None else dataclasses.replace(found, limit=limit), out, **options)


@sweep.command(short_help="Do the tasks that a sweep has left, and those that failed again.")
@click.argument("folder", type=FOLDER, metavar="DIR")
@_spoken
def resume(folder: Path, **options: Any) -> int:
    """Do the tasks of a sweep that have no result in DIR; those that failed are tried again."""
    return _run(Store(folder).read_spec(), folder, **options)


@sweep.command(short_help="How far a sweep is.")
@click.argument("folder", type=FOLDER, metavar="DIR")
@json_option
def status(folder: Path, as_json: bool) -> None:
    """Say how many tasks of a sweep are done, and which failed and why. It can be asked while the sweep runs."""
    _tell(Store(folder).status(), folder, as_json=as_json)


@sweep.command(short_help="The table of a sweep, and its picture.")
@click.argument("folder", type=FOLDER, metavar="DIR")
@file_option("--csv", "Write the table as CSV [default: to stdout].")
@file_option("--parquet", "Write the table as Parquet (extra `parquet`).")
@picture_option("Draw its picture: .svg, .png or .pdf.")
@click.option("--x", metavar="AXIS", help="Horizontal axis of the picture [default: as the sweep says].")
@click.option("--y", metavar="AXIS", help="Vertical axis. With it the picture is a heat map.")
@click.option("--curves", metavar="AXIS", help="Draw a curve for each value of this axis.")
@click.option("--value", metavar="COLUMN", help="Column that is drawn.")
def collect(folder: Path, csv: Path | None, parquet: Path | None, plot: Path | None, **picture: Any) -> None:
    """Write all results in DIR as one table, a row for each task in the order of the grid, and draw it."""
    from sounding.sweeping.table import read_table

    if any(picture.values()) and plot is None:
        raise UsageError("expected --plot FILE with the options of a picture, got none", hint="--plot picture.svg")
    store = Store(folder)
    spec = store.read_spec()
    table = read_table(store, spec)
    if table.missing:
        missing = f"{table.missing} of {len(spec)} tasks have no result yet"
        say(f"sounding: {missing}; sounding sweep resume {folder}", err=True)
    if csv is not None:
        table.to_csv(csv)
    elif parquet is None and plot is None:
        say(table.to_csv(), nl=False)
    if parquet is not None:
        table.to_parquet(parquet)
    if plot is not None:
        from sounding.figures import draw_picture
        from sounding.plot import save
        from sounding.sweeping.pictures import make_picture

        line = spec.line_spec()  # a small sweep of its own, drawn as the line of theory
        drawn = make_picture(spec, table, None if line is None else read_table(store, line), **picture)
        save(draw_picture(drawn, title=str(spec.picture.get("title", spec.verb))), plot)


def _run(spec: Spec, out: Path, *, cluster: str | None, jobs: int | None, quiet: bool, as_json: bool) -> int:
    """The exit code of a sweep that was run, or taken up again, and told."""
    with progress_over("tasks", quiet=quiet) as tell:

        def update(state: Progress) -> None:
            failed = f"tasks ({state.failed} failed)" if state.failed else "tasks"
            tell(failed, state.done + state.failed, state.total)

        run_sweep(spec, out, cluster=cluster, jobs=jobs, progress=update)
    found = Store(out).status()
    _tell(found, out, as_json=as_json)
    return int(ExitCode.NUMERICAL if found.left else ExitCode.HEALTHY)


def _tell(status: Status, folder: Path, *, as_json: bool) -> None:
    if as_json:
        failures = [{"options": options, "message": message} for options, message in status.failures]
        told = {**fields_of(status, "total done failed"), "failures": failures, "seconds_left": status.seconds_left}
        print_json({"folder": str(folder), **told})
        return
    left = status.left - status.failed  # failed tasks have no result either, and are told by themselves
    time_left = f", {in_time(status.seconds_left)} at the pace of the last run" if left and status.seconds_left else ""
    say(f"{folder}: {status.done} of {status.total} tasks done, {status.failed} failed, {left} left{time_left}")
    for options, message in status.failures:
        say(f"  {', '.join(f'{name}={value}' for name, value in options.items())}: {message}")
    if status.failed > len(status.failures):
        say(f"  and {status.failed - len(status.failures)} more: see {folder / 'failures'}")
