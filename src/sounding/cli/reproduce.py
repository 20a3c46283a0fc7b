"""`sounding reproduce`: run claims, write their results, say what holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import click

import sounding
from sounding.claims import Claim, Result, all_claims, claims_of, find_claim
from sounding.claims.claim import Scale
from sounding.claims.registry import cases_of
from sounding.claims.result import folder_of
from sounding.cli.claims import warn_of_seed
from sounding.cli.options import json_option, quiet_option
from sounding.cli.output import console, print_json, progress_over, say
from sounding.encoding import fields_of
from sounding.errors import ExitCode, InterruptedRun, SoundingError, UsageError
from sounding.reproduction import find_kept, require_run
from sounding.sweeping import Call, complete, open_executor
from sounding.sweeping.executors import HERE
from sounding.sweeping.hand import KILLED

OUT = "sounding-claims"
MEASURE = "sounding.cli.reproduce:measure_row"


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--paper", "papers", multiple=True, metavar="KEY",
              help="Measure all rows of a paper: rank2020, orth2021, ...")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Measure all rows.")
@click.option("--scale", default="quick",
              help="How large the runs are: quick, standard or paper. A row without this scale takes the next smaller "
              "one that it has.")  # fmt: skip
@click.option("--device", default="cpu", help="Device: cpu, cuda or cuda:1.")
@click.option("--out", type=click.Path(), default=OUT, metavar="DIR",
              help="Folder of the results. A row with a result of these options is not measured again.")  # fmt: skip
@click.option("--seed", "--random-seed", "seeds", multiple=True, metavar="S",
              help="Seed of the random numbers [default: 0].")  # fmt: skip
@click.option("--jobs", type=int, default=1, metavar="J", help="Number of rows measured at a time, on the cpu.")
@click.option("--cluster", metavar="C", help="Which machines work: local:4 or tcp://HOST:8786, as in sounding sweep.")
@click.option("--force", is_flag=True, help="Measure also the rows that have a result.")
@json_option
@quiet_option()
def reproduce(
    ids: tuple[str, ...], papers: tuple[str, ...], everything: bool, scale: Scale, device: str, out: str,
    seeds: tuple[str, ...], jobs: int, cluster: str | None, force: bool, as_json: bool, quiet: bool
) -> int:  # fmt: skip
    """Measure again what the papers state: figures, tables and theorems, by ID, by paper, or all of them.

    One statement of a paper is called a row, and has an ID; `sounding claims list` shows them.

    Each result is a folder DIR/ID/SCALE with result.json, numbers.csv, series.csv, figure.svg, figure.png and
    SHA256SUMS. If the command is interrupted, the results that are finished stay, and the same command goes on with the
    rest.

    \b
    Exit codes: 0 all rows were measured, whatever their verdicts; 2 wrong usage;
    3 a row failed (the others are kept); 130 interrupted.
    """
    numbers = [int(seed) for seed in seeds if seed.lstrip("+-").isdecimal()]
    if len(numbers) > 1:
        raise UsageError(f"expected one random seed, got {len(numbers)}", hint=f"--seed {numbers[0]}")
    # --seed took the keys of papers before --paper did
    old = [warn_of_seed(seed) for seed in seeds if not seed.lstrip("+-").isdecimal()]
    rows = _choose(ids, (*papers, *old), everything)
    if jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {jobs}")
    if cluster and jobs > 1:
        raise UsageError("expected either --jobs or --cluster, got both", hint="--cluster local:4")
    place: dict[str, Any] = {"out": out, "device": device, "random_seed": numbers[0] if numbers else 0}
    require_run(scale=scale, **(place | {"device": "cpu"} if cluster else place))  # a cluster has its own devices
    kept = set() if force else {row.id for row in rows if find_kept(row, scale, **place)}
    options = {"scale": scale, "force": force, **place}
    found: list[Result] = []
    failed: dict[str, str] = {}
    with progress_over("rows", quiet=quiet) as tell:
        for count, (row, result) in enumerate(_run(rows, jobs, cluster, options), start=1):
            if isinstance(result, SoundingError):
                failed[row.id] = str(result)
                say(f"sounding: {row.id} failed: {result}", err=True)
            else:
                found.append(result)
            tell(row.id, count, len(rows))
    if as_json:
        objects = [{
            **fields_of(result, "id paper kind statement verdict"),
            "seed": result.paper,  # the name of "paper" up to version 0.1
            **fields_of(result.standing, "as_printed corrected"),
            **fields_of(result, "scale correction reduction numbers expectations device seconds"),
            "kept": result.id in kept,  # whether the number is from an earlier run
            "folder": str(folder_of(Path(out), result.id, result.scale)),
        } for result in found]  # fmt: skip
        print_json({"results": objects, "failed": failed})
    else:
        _print(found, out, kept)
    return int(ExitCode.NUMERICAL) if failed else int(ExitCode.HEALTHY)


def _choose(ids: tuple[str, ...], papers: tuple[str, ...], everything: bool) -> list[Claim]:
    if not (ids or papers or everything):
        raise UsageError("expected an ID, --paper KEY or --all, got none", hint="sounding claims list")
    if bool(ids) + bool(papers) + everything > 1:
        raise UsageError("expected IDs, --paper KEY or --all, got more than one of them", hint="one at a time")
    if everything:
        return list(all_claims())
    chosen = [find_claim(name) for name in ids] + [claim for paper in papers for claim in claims_of(paper)]
    return list({claim.id: claim for claim in chosen}.values())


def _run(
    rows: list[Claim], jobs: int, cluster: str | None, options: dict[str, Any]
) -> Iterator[tuple[Claim, Result | SoundingError]]:
    """Each row with its result or error, in the order they finish; Ctrl-C ends all of them."""
    import torch

    by_id = {row.id: row for row in rows}
    workers = min(jobs, len(rows))
    engine: dict[str, Any] = {"cluster": cluster or HERE} if cluster or workers == 1 else {"jobs": workers}
    threads = 1 if cluster else max(1, torch.get_num_threads() // workers)  # workers share the cores
    resources = {"GPU": 1} if cluster and options["device"].startswith("cuda") else None
    options = {**options, "out": str(Path(options["out"]).resolve())}  # a worker may stand in another folder
    place = {name: options[name] for name in ("out", "device", "random_seed")}
    calls = (Call(MEASURE, {"claim_id": row.id, "options": options}) for row in rows)
    try:
        with open_executor(**engine, threads=threads, resources=resources) as executor:
            for call, outcome in complete(executor, calls):
                row = by_id[call.options["claim_id"]]
                if outcome.error is not None:
                    hint = "the same command with fewer --jobs" if outcome.error == KILLED else None
                    yield row, SoundingError(outcome.error, hint=hint)
                    continue
                found = find_kept(row, options["scale"], **place)
                lost = SoundingError(f"no result came into {options['out']}", hint="workers that share this disk")
                yield row, found or lost
    except KeyboardInterrupt:
        told = f"interrupted; finished rows are in {options['out']}, the same command goes on with the rest"
        raise InterruptedRun(told) from None


def measure_row(claim_id: str, options: dict[str, Any]) -> dict[str, str]:
    """The verdict of a row, measured by a worker; its result is in the folder of results."""
    return {"verdict": sounding.reproduce(claim_id, **options).verdict}


def _print(found: list[Result], out: str, kept: Collection[str]) -> None:
    """Print each result with its evidence, and the totals."""
    from sounding.report.ledger import describe_evidence, write_totals

    screen = console()
    for result in found:
        made = f"kept from {result.date}" if result.id in kept else f"{result.seconds:.1f} s"
        screen.print(f"{result.id}: {result.verdict} ({result.scale}, {made})", markup=False, style="bold")
        told = [result.statement, *describe_evidence(result)]
        told += [f"correction: {result.correction}"] if result.verdict == "holds with correction" else []
        told += [f"reduced: {result.reduction}"] if result.reduction else []
        if parts := ", ".join(case.id for case in cases_of(result.id)):
            told.append(f"its parts are rows of their own, and it stands no better than they: {parts}")
        screen.print("\n".join(f"  {text}" for text in told), markup=False)
    if found:
        screen.print(f"\n{write_totals(found)} Results in {out}.", markup=False, soft_wrap=True)
