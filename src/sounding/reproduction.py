"""Redo the papers: run claims and write each result as a small folder that explains itself.

A folder OUT/ID/SCALE holds result.json (statement, verdict, numbers, settings, versions, random seed, time, device),
numbers.csv, series.csv (every point of the picture), figure.svg and figure.png, and SHA256SUMS, the sums of them all.
It appears under its name only when it is complete, so an interrupted run is taken up where it stopped.
"""

from __future__ import annotations

import csv
import datetime
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sounding.claims import Claim, Outcome, Picture, find_claim
from sounding.claims.claim import SCALES, Context, Scale
from sounding.claims.picture import rebuild_picture
from sounding.claims.result import FILE, Result, describe_result, fingerprint_of, folder_of, largest, read_result
from sounding.errors import UsageError, require_device
from sounding.files import SUMS, changed_files, locked, write_sums

DIGITS = 8  # in the tables: more than any interval knows
FILES = (FILE, "numbers.csv", "series.csv", "figure.svg", "figure.png", SUMS)


def reproduce(
    claim: str | Claim,
    scale: Scale = "quick",
    *,
    out: str | Path | None = None,
    device: str = "cpu",
    random_seed: int = 0,
    force: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Result:
    """Measure one claim and judge it; with `out`, write the result there, or read it if it is there already.

    Args:
        claim: an id such as "rank2020-fig3a", or a Claim of your own.
        scale: a claim without that scale is run at its next smaller one.
        force: measure again although a complete result of the same settings is there.

    >>> reproduce("rank2020-lemma1").verdict
    'holds'
    """
    require_run(scale=scale, out=out, device=device, random_seed=random_seed)
    row = find_claim(claim) if isinstance(claim, str) else claim
    kept = None if force else find_kept(row, scale, out=out, device=device, random_seed=random_seed)
    if kept is not None:
        return kept
    used = row.scale_or_below(scale)  # a claim may have no run of this size
    context = Context(device=device, random_seed=random_seed, progress=progress or (lambda done: None))
    started = time.perf_counter()
    outcome = row.measure(row.settings[used].values, context)
    seconds, today = time.perf_counter() - started, datetime.datetime.now(datetime.UTC).date().isoformat()
    result = describe_result(row, used, context, outcome, seconds=seconds, date=today)
    if out is not None:
        write_result(result, outcome, folder_of(Path(out), row.id, used))
    return result


def require_run(*, scale: Scale, out: str | Path | None, device: str, random_seed: int) -> None:
    """UsageError unless such a run can be made and written; found out before the work."""
    if scale not in SCALES:
        raise UsageError(f"no scale {scale!r}", hint=f"one of {', '.join(SCALES)}")
    if random_seed < 0:
        raise UsageError(f"expected a random seed of at least 0, got {random_seed}")
    require_device(device)
    if out is None:
        return
    if not str(out):
        raise UsageError("expected a folder for the results, got an empty name", hint="--out results")
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UsageError(f"cannot write into {out}: {error.strerror or error}", hint="another --out") from error


def find_kept(claim: Claim, scale: Scale, *, out: str | Path | None, device: str, random_seed: int) -> Result | None:
    """The result of such a run that is there already; None where it is missing, damaged, incomplete or another's."""
    used = claim.scale_or_below(scale)
    if out is None:
        return None
    folder = folder_of(Path(out), claim.id, used)
    if not all((folder / name).is_file() for name in FILES) or changed_files(folder):
        return None
    try:
        kept = read_result(folder)
    except UsageError:
        return None
    wanted = fingerprint_of(claim, used, Context(device=device, random_seed=random_seed))
    return kept if kept is not None and kept.fingerprint == wanted else None


def write_result(result: Result, outcome: Outcome, folder: Path) -> None:
    """The folder of a result, placed whole: written beside its place and renamed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent / f"{folder.name}-new", wait=True):
            for left in folder.parent.glob(f".{folder.name}-*/"):  # of a run that was killed
                shutil.rmtree(left, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            old = work.with_name(f"{work.name}-old")
            try:
                (work / FILE).write_text(result.to_json(), "utf-8")
                # of exact numbers the samples are None, which becomes an empty cell
                numbers = ((name, *map(_round, (one.value, one.low, one.high)), one.samples)
                           for name, one in result.numbers.items())  # fmt: skip
                _write_table(work / "numbers.csv", "quantity value low high samples", numbers)
                _write_series(outcome.picture, work / "series.csv")
                draw_again(result, work, endings=("svg", "png"))
                write_sums(work)
                work.chmod(0o755)  # mkdtemp gives a folder that only its owner can read
                if folder.exists():  # renamed first: a kill while it is removed would leave half of it
                    os.replace(folder, old)
                os.replace(work, folder)
            finally:
                for left in (work, old):
                    shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}", hint="another --out") from error


def draw_again(result: Result, folder: Path, *, endings: Sequence[str] = ("svg",)) -> None:
    """Draw the figure of a result from the points and axes that its folder keeps; nothing is measured."""
    from sounding.figures import draw_picture
    from sounding.plot import save

    with (folder / "series.csv").open(encoding="utf-8", newline="") as file:
        picture = rebuild_picture(result.axes, csv.DictReader(file), result.caption)
    # of a number that statement and correction both name, the statement's range comes first
    expected = {e["quantity"].replace("_", " "): e for e in reversed(result.expectations)}
    figure = draw_picture(picture, title=f"{result.paper}, {result.place}", expected=expected)
    for ending in endings:
        save(figure, folder / f"figure.{ending}")


def draw_figures(found: Mapping[str, Mapping[Scale, Result]], out: Path) -> int:
    """Draw the figure of every row below `out` again, at its largest scale; the number of files written."""
    for results in found.values():
        result = largest(results)
        folder = folder_of(out, result.id, result.scale)
        endings = ("svg", "png") if (folder / "figure.png").exists() else ("svg",)
        draw_again(result, folder, endings=endings)
        if (folder / SUMS).exists():
            write_sums(folder)
    return len(found)


def _write_table(path: Path, headings: str, rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([headings.split(), *rows])


def _write_series(picture: Picture, path: Path) -> None:
    _write_table(path, "panel series role x y low high", _series_rows(picture))


def _series_rows(picture: Picture) -> Iterator[Sequence[Any]]:
    """Every point that is drawn, with its interval."""
    for index, panel in enumerate(picture.panels):
        name = panel.title or f"panel {index + 1}"
        if panel.map is not None:
            for height, row in zip(panel.map.y, np.asarray(panel.map.values), strict=True):
                label = f"{panel.map.label} at y={_round(height)}"
                yield from ((name, label, "map", *map(_round, cell)) for cell in zip(panel.map.x, row, strict=True))
        for series in panel.series:
            x, y = np.asarray(series.x, dtype=np.float64), np.asarray(series.y, dtype=np.float64)
            error = np.asarray(0.0 if series.error is None else series.error, dtype=np.float64)
            # below and above, or the same on both sides
            low, high = np.broadcast_to(error, (2, len(y)))
            for point in zip(x, y, y - low, y + high, strict=True):
                yield name, series.label, series.role, *map(_round, point)


def _round(value: float) -> str:
    return f"{float(value):.{DIGITS}g}"
