"""`sounding reproduce`: run claims, write their results, say what holds."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sounding.cli.output import console, print_json, say
from sounding.errors import ExitCode, InterruptedRun, SoundingError, UsageError

if TYPE_CHECKING:
    from sounding.claims import Claim, Result
    from sounding.claims.claim import Scale

OUT = "sounding-claims"
KILLED = "a worker process was killed before this row was measured, often because memory ran out"


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--paper", "papers", multiple=True, metavar="KEY", help="All rows of a paper: rank2020, orth2021, ...")
@click.option("--all", "everything", is_flag=True, help="All rows.")
@click.option("--scale", default="quick", show_default=True, help="quick, standard or paper; a row takes its nearest.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1.")
@click.option("--out", type=click.Path(), default=OUT, show_default=True, metavar="DIR",
              help="A folder per row and scale; what is there and fits is not run again.")  # fmt: skip
@click.option(
    "--seed", "--random-seed", "seeds", multiple=True, metavar="S", help="Of the random numbers. [default: 0]"
)
@click.option("--jobs", type=int, default=1, show_default=True, metavar="J", help="Rows measured at a time (cpu).")
@click.option("--force", is_flag=True, help="Measure again what is there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
def reproduce(
    ids: tuple[str, ...],
    papers: tuple[str, ...],
    everything: bool,
    scale: Scale,
    device: str,
    out: str,
    seeds: tuple[str, ...],
    jobs: int,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Redo figures, tables and theorems of the papers, by ID, by paper, or all of them.

    Each result is a folder DIR/ID/SCALE: result.json, numbers.csv, series.csv, figure.svg, figure.png, and
    their SHA256SUMS. Interrupted, the finished ones stay, and the same command goes on with the rest.

    \b
    Exit codes: 0 all rows were measured, whatever their verdicts; 2 wrong usage; 3 a row failed (the others are kept);
    130 interrupted.
    """
    from sounding.reproduction import find_kept, require_run

    random_seed, old = _part_seeds(seeds)
    rows = _choose(ids, (*papers, *old), everything)
    if jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {jobs}")
    place: dict[str, Any] = {"out": out, "device": device, "random_seed": random_seed}
    require_run(scale=scale, **place)
    kept = set() if force else {row.id for row in rows if find_kept(row, scale, **place)}
    options = {"scale": scale, "force": force, **place}
    found: list[Result] = []
    failed: dict[str, str] = {}
    with _progress(len(rows), quiet=quiet) as tell:
        for row, result in _run(rows, jobs, options):
            if isinstance(result, SoundingError):
                failed[row.id] = str(result)
                say(f"sounding: {row.id} failed: {result}", err=True)
            else:
                found.append(result)
            tell(row.id)
    if as_json:
        print_json({"results": [_object(result, out, kept) for result in found], "failed": failed})
    else:
        _print(found, out, kept)
    return int(ExitCode.NUMERICAL) if failed else int(ExitCode.HEALTHY)


def _part_seeds(seeds: tuple[str, ...]) -> tuple[int, list[str]]:
    """The random seed, and the keys of papers, which --seed took before --paper did."""
    from sounding.cli.claims import warn_of_seed

    numbers = [int(seed) for seed in seeds if seed.lstrip("+-").isdecimal()]
    if len(numbers) > 1:
        raise UsageError(f"expected one random seed, got {len(numbers)}", hint=f"--seed {numbers[0]}")
    return numbers[0] if numbers else 0, [warn_of_seed(s) for s in seeds if not s.lstrip("+-").isdecimal()]


def _choose(ids: tuple[str, ...], papers: tuple[str, ...], everything: bool) -> list[Claim]:
    from sounding.claims import all_claims, claims_of, find_claim

    if not (ids or papers or everything):
        raise UsageError("expected an ID, --paper KEY or --all, got none", hint="sounding claims list")
    if bool(ids) + bool(papers) + everything > 1:
        raise UsageError("expected IDs, --paper KEY or --all, got more than one of them", hint="one at a time")
    if everything:
        return list(all_claims())
    chosen = [find_claim(name) for name in ids] + [claim for paper in papers for claim in claims_of(paper)]
    return list({claim.id: claim for claim in chosen}.values())


def _run(rows: list[Claim], jobs: int, options: dict[str, Any]) -> Iterator[tuple[Claim, Result | SoundingError]]:
    """Each row with its result or error, in the order they finish."""
    if jobs == 1 or len(rows) == 1:
        for row in rows:
            yield row, _measure(row.id, options)
        return
    import concurrent.futures
    import multiprocessing

    by_id = {row.id: row for row in rows}
    others = set(multiprocessing.active_children())
    workers = min(jobs, len(rows))
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(workers,)
    )
    try:
        futures = {pool.submit(_measure, row.id, options): row.id for row in rows}
        for future in concurrent.futures.as_completed(futures):
            try:
                yield by_id[futures[future]], future.result()
            except concurrent.futures.process.BrokenProcessPool:
                yield by_id[futures[future]], SoundingError(KILLED, hint="the same command with fewer --jobs")
    except BaseException as stop:
        # a signal to this process alone reaches no worker, and one that goes on would be waited for
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        if isinstance(stop, KeyboardInterrupt):
            raise _interruption(options) from None
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _measure(claim_id: str, options: dict[str, Any]) -> Result | SoundingError:
    """The result; a row that fails must not end the others, Ctrl-C must."""
    from sounding.reproduction import reproduce as run

    try:
        return run(claim_id, **options)
    except KeyboardInterrupt:
        raise _interruption(options) from None
    except SoundingError as error:
        return error
    except Exception as error:  # a defect of one row is told with its name
        return SoundingError(f"{type(error).__name__}: {error}")


def _interruption(options: dict[str, Any]) -> InterruptedRun:
    return InterruptedRun(f"interrupted; finished rows are in {options['out']}, the same command goes on with the rest")


def _start_worker(workers: int) -> None:
    """Share the cores, and do not outlive a parent that was killed."""
    import multiprocessing.connection
    import threading

    import torch

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            multiprocessing.connection.wait([parent.sentinel])
            os._exit(1)

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _progress(rows: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar over rows with the time left on a terminal; nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=rows)
        yield lambda name: bar.update(task, advance=1, description=name)


def _object(result: Result, out: str, kept: Collection[str]) -> dict[str, Any]:
    from dataclasses import asdict

    from sounding.claims.result import folder_of

    return {
        "id": result.id,
        "paper": result.paper,
        "seed": result.paper,  # the name of "paper" up to version 0.1
        "kind": result.kind,
        "statement": result.statement,
        "verdict": result.verdict,
        **asdict(result.standing),
        "scale": result.scale,
        "correction": result.correction,
        "reduction": result.reduction,
        "numbers": {name: number.to_dict() for name, number in result.numbers.items()},
        "expectations": result.expectations,
        "device": result.device,
        "seconds": result.seconds,
        "kept": result.id in kept,
        "folder": str(folder_of(Path(out), result.id, result.scale)),
    }


def _print(found: list[Result], out: str, kept: Collection[str]) -> None:
    from sounding.claims.registry import cases_of
    from sounding.report.ledger import describe_evidence, write_totals

    screen = console()
    for result in found:
        made = f"kept from {result.date}" if result.id in kept else f"{result.seconds:.1f} s"
        screen.print(f"{result.id}: {result.verdict} ({result.scale}, {made})", markup=False, style="bold")
        screen.print(f"  {result.statement}", markup=False)
        for text in describe_evidence(result):
            screen.print(f"  {text}", markup=False)
        if result.verdict == "holds with correction":
            screen.print(f"  correction: {result.correction}", markup=False)
        if result.reduction:
            screen.print(f"  reduced: {result.reduction}", markup=False)
        if cases := cases_of(result.id):
            names = ", ".join(case.id for case in cases)
            screen.print(f"  its parts are rows of their own, and it stands no better than they: {names}", markup=False)
    if found:
        screen.print(f"\n{write_totals(found)} Results in {out}.", markup=False, soft_wrap=True)
