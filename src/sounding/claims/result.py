"""A result: what one claim gave at one scale, with everything needed to read and to repeat it."""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sounding
from sounding.claims.claim import SCALES, Claim, Context, Expectation, Outcome, Scale, Standing, Verdict, judge, stand
from sounding.claims.number import Number
from sounding.claims.picture import describe_axes
from sounding.encoding import fields_of, to_plain
from sounding.errors import UsageError
from sounding.files import changed_files

SCHEMA = 2  # of result.json; another one where a field goes or changes its meaning
OLD_NAMES = {"seed": "paper", "paper": "experiment"}  # what schema 1 called them
FILE = "result.json"
AGAIN = "sounding reproduce ID --out DIR, which measures it again"


@dataclass(frozen=True)
class Result:
    """One row of the ledger as it came out; plain fields, the same as in its JSON file.

    `expectations` are those of the statement, then those of the correction, each with its status and its number.
    `axes` are the labels and scales of the panels: with the points of series.csv they make the figure again.
    """

    id: str
    paper: str
    place: str
    kind: str
    statement: str
    scale: Scale
    verdict: Verdict
    correction: str
    reduction: str
    note: str
    remarks: str
    expectations: tuple[Mapping[str, Any], ...]
    numbers: Mapping[str, Number]
    settings: Mapping[str, Any]
    experiment: str
    released: str
    caption: str
    random_seed: int
    device: str
    seconds: float
    date: str
    versions: Mapping[str, str]
    fingerprint: str
    axes: tuple[Mapping[str, Any], ...] = ()

    @property
    def standing(self) -> Standing:
        """How the row stands as printed and corrected, by its numbers and bounds."""
        found: dict[str, list[Expectation]] = {"statement": [], "correction": []}
        for e in self.expectations:
            found[e["of"]].append(Expectation(e["quantity"], e["why"], low=float(e["low"]), high=float(e["high"])))
        return stand(found["statement"], found["correction"] or None, self.numbers)

    @property
    def command(self) -> str:
        """The command that makes it again."""
        device = "" if self.device == "cpu" else " --device cuda"  # a GPU is recorded by its name, asked for as cuda
        seed = "" if self.random_seed == 0 else f" --random-seed {self.random_seed}"
        return f"sounding reproduce {self.id} --scale {self.scale}{device}{seed}"

    def to_json(self) -> str:
        """The text of result.json."""
        fields = {"schema": SCHEMA, **asdict(self), **asdict(self.standing), "command": self.command}
        return json.dumps(to_plain(fields), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "result") -> Result:
        """The record of a result.json.

        Raises:
            UsageError: no JSON, of an unknown schema, or with a verdict that its numbers do not give.
        """
        try:
            fields = json.loads(text)
            schema = fields.pop("schema")
            if schema == 1:
                # results of the first versions are still read
                fields = {OLD_NAMES.get(name, name): value for name, value in fields.items()}
            if schema in (1, SCHEMA):
                # written for readers, computed again from the rest
                for derived in ("command", "as_printed", "corrected"):
                    fields.pop(derived, None)
                numbers = {n: {k: _number(v) for k, v in number.items()} for n, number in fields["numbers"].items()}
                fields["numbers"] = {name: Number(**number) for name, number in numbers.items()}
                fields["expectations"] = tuple(fields["expectations"])
                fields["axes"] = tuple(fields.get("axes", ()))
                result = cls(**fields)
                verdict = result.standing.verdict
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise UsageError(f"{source} is no result of a claim", hint=AGAIN) from None
        if schema not in (1, SCHEMA):
            raise UsageError(f"{source} has schema {schema}, expected {SCHEMA}", hint=AGAIN)
        if verdict != result.verdict:  # a file that was edited by hand, or is from other rules
            raise UsageError(f"{source} says {result.verdict!r}, but its numbers give {verdict!r}", hint=AGAIN)
        return result


def describe_result(
    claim: Claim, scale: Scale, context: Context, outcome: Outcome, *, seconds: float, date: str
) -> Result:
    """What was measured in, the judged row out."""
    import torch

    setting, numbers = claim.settings[scale], outcome.numbers
    versions = {name: importlib.import_module(name).__version__ for name in ("numpy", "scipy", "torch")}
    checked = [("statement", e) for e in claim.expectations]
    checked += [("correction", e) for e in (claim.correction.expectations if claim.correction else ())]
    return Result(
        **fields_of(claim, "id paper place kind statement note experiment released"),
        scale=scale,
        verdict=judge(claim, numbers),
        correction=claim.correction.statement if claim.correction else "",
        reduction=setting.reduction,
        remarks=outcome.remarks,
        expectations=tuple({"of": of, **asdict(e), "status": e.judge(numbers.get(e.quantity))} for of, e in checked),
        numbers=dict(numbers),
        settings=to_plain(setting.values),
        caption=outcome.picture.caption,
        random_seed=context.random_seed,
        device=torch.cuda.get_device_name(context.device) if context.device.startswith("cuda") else context.device,
        seconds=round(seconds, 2),  # more digits would change with every run
        date=date,
        versions={"sounding": sounding.__version__, "python": platform.python_version(), **versions},
        fingerprint=fingerprint_of(claim, scale, context),
        axes=describe_axes(outcome.picture),
    )


def fingerprint_of(claim: Claim, scale: Scale, context: Context) -> str:
    """A sum over what an old result must share with the wanted one: claim, settings, random seed, kind of device."""
    setting = claim.settings[scale]
    # not the notes: a better word is no reason to measure again
    parts = [claim.id, claim.statement, scale, claim.expectations, claim.correction, setting.values]
    text = json.dumps(to_plain([*parts, context.random_seed, context.device.split(":")[0]], other=repr), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]  # 64 bits: no two of a few hundred rows collide


def folder_of(out: Path, claim_id: str, scale: Scale) -> Path:
    """Where a result lies below an output folder."""
    return out / claim_id / scale


def read_result(folder: Path) -> Result | None:
    """The result in a folder, or None where there is none.

    Raises:
        UsageError: what is there is damaged, or no result.
    """
    path = folder / FILE
    return _read(path) if path.is_file() else None


def read_results(out: Path) -> dict[str, dict[Scale, Result]]:
    """Every result below an output folder, by id and scale."""
    found: dict[str, dict[Scale, Result]] = {}
    for path in sorted(out.glob(f"*/*/{FILE}")):  # OUT/ID/SCALE
        result = _read(path)
        found.setdefault(result.id, {})[result.scale] = result
    return found


def largest(results: Mapping[Scale, Result]) -> Result:
    """The result at the largest scale: the one the ledger quotes."""
    return results[max(results, key=SCALES.index)]


def _read(path: Path) -> Result:
    changed = changed_files(path.parent)
    if changed:
        raise UsageError(f"{path.parent} was changed since it was written: {', '.join(changed)}", hint=AGAIN)
    return Result.from_json(path.read_bytes().decode("utf-8", "replace"), source=str(path))


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value  # JSON has no infinity: `to_plain` writes it as text
