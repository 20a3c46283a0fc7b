"""`sounding audit --zoo hf`: every architecture of a library is checked by its name, as a sweep, and gets a page."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sounding.cli.output import print_json, progress_over, say
from sounding.errors import ExitCode, UsageError
from sounding.files import place
from sounding.sweeping import Call, Progress, Spec, Store, run_sweep

if TYPE_CHECKING:
    from torch import nn

VERB = "sounding.cli.zoo:audit_name"
OUT = "sounding-zoo"
LIMIT = 300.0  # seconds for one architecture: twenty times what most take on one core, so that only a hang meets it


def audit_zoo(
    only: str | None, out: Path, *, jobs: int | None, cluster: str | None, force: bool, pages: bool, **told: bool
) -> int:
    """Check all architectures of the transformers library, or some by name, and write the pages; the exit code.

    `out/sweep` is the sweep that goes on after an interruption; `out/rows` has a file for each architecture, the newest
    result of its name, so that repeating a part leaves the others as they are. With `pages` nothing is checked: the
    pages are written from the rows that are there.
    """
    from sounding.report.zoo import read_outcomes, read_rows, write_pages

    failed: dict[str, str] = {}
    if not pages:
        # nothing can end a task that runs in this very process
        spec = Spec(VERB, {"name": _names(only)}, {"seed": 0, "versions": versions()},
                    limit=None if cluster == "in-process" else LIMIT)  # fmt: skip
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if (held := set(os.listdir(out))) and not held & {"rows", "sweep"}:
                raise UsageError(f"{out} holds something that is no audit", hint="another --out")
        store = Store(out / "sweep")
        if force:
            store.forget(spec.calls())
        with progress_over("architectures", quiet=told["quiet"]) as tell:

            def update(state: Progress) -> None:
                tell("architectures", state.done + state.failed, state.total)

            try:
                run_sweep(spec, store.folder, cluster=cluster, jobs=jobs, progress=update)
            finally:  # after Ctrl-C too: what was measured until then gets its rows
                _keep_rows(spec.calls(), store, out / "rows")
        failed = {str(options["name"]): message for options, message in store.status().failures}
    rows = read_rows(out / "rows")
    if not rows and not failed:
        raise UsageError(f"{out} holds no result of an audit", hint=f"sounding audit --zoo hf --out {out}")
    index = write_pages(rows, out, read_outcomes(out / "outcomes.toml"))
    _tell(rows, failed, index, **told)
    return int(ExitCode.NUMERICAL if failed else ExitCode.HEALTHY)


def _keep_rows(calls: Iterable[Call], store: Store, folder: Path) -> None:
    """Write what the sweep has of these calls as a file for each architecture, in the place of an older one."""
    for call in calls:
        if found := store.read(call):
            folder.mkdir(exist_ok=True)
            row = {"name": call.options["name"], **found[0]}
            # a row of a sweep holds plain values only, so the record came as text
            if "record" in row:
                row["record"] = json.loads(row["record"])
            place(folder / f"{row['name']}.json", json.dumps(row, allow_nan=False, separators=(",", ":")).encode())


def audit_name(name: str, *, seed: int, versions: str) -> dict[str, Any]:
    """What `sounding check hf:NAME` says of one architecture, as a row of a sweep; `record` is the report, shortened.

    An architecture that the library does not build is a row too, with the library's reason. `versions` are those that
    the row was asked for with: a worker that has others refuses.
    """
    from sounding.cli.check import measure
    from sounding.cli.subject import Wanted
    from sounding.cli.target import load_target
    from sounding.probe.reading import count_in_band
    from sounding.report.compact import shorten, unmeasured_weights

    here = globals()["versions"]()
    if versions != here:
        raise UsageError(f"the worker has {here}, the client {versions}", hint="the same versions everywhere")
    target, began = f"hf:{name}", time.perf_counter()
    said = {"versions": here, "date": datetime.now(UTC).date().isoformat(), "command": f"sounding check {target}"}
    built: list[tuple[nn.Module, str]] = []

    def make() -> nn.Module:
        model = load_target(target)
        built.append((model, fingerprint(model)))
        return model

    try:
        report, _ = measure(target, Wanted(seed=seed), lambda text: None, make=make, quiet=True, theory=True)
    except UsageError as error:
        if built:  # the check refused, not the library: that is a failure of the row
            raise
        return {"verdict": "not built", "reason": str(error), **said}
    model, before = built[0]
    theory = report.profile.settings.get("theory", {})
    inside, banded = count_in_band(report.profile)
    missing = unmeasured_weights(report, model)
    counts = Counter(finding.severity for finding in report.verdict.findings)
    return {
        "verdict": report.verdict.status,
        "model": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **{level: counts[level] for level in ("high", "medium", "low")},
        "weight_layers": len(report.profile.settings.get("weight_layers", ())),
        "predicted_layers": theory.get("predicted_layers", 0),
        "banded": banded,
        "in_band": inside,
        "unmeasured": len(missing),
        "unchanged": fingerprint(model) == before,
        "seconds": round(time.perf_counter() - began, 2),
        **said,
        "record": json.dumps(shorten(report, missing), allow_nan=False, separators=(",", ":")),
    }


def versions() -> str:
    """The versions that a result depends on, in words."""
    import torch
    import transformers

    from sounding import __version__

    return f"sounding {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"


def fingerprint(model: nn.Module) -> str:
    """A sum over every bit of parameters and buffers, over modes, gradients, hooks and the names of all attributes."""
    import torch

    total = hashlib.sha256()
    for module_name, module in model.named_modules():
        hooks = [len(getattr(module, kind)) for kind in sorted(vars(module)) if kind.endswith("_hooks")]
        total.update(f"{module_name} {module.training} {hooks} {sorted(vars(module))}".encode())
    # a tensor under two names counts under both: a check could untie them
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        told = f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad} {tensor.grad is None}"
        total.update(told.encode())
        # as bytes, in which NaN equals itself and −0 differs from 0
        total.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()


def _names(only: str | None) -> list[str]:
    """The architectures that were asked for, all without `--only`."""
    from sounding.models.hf import hf_names

    known = hf_names()
    if only is None:
        return list(known)
    asked = [name.strip().removeprefix("hf:").replace("-", "_") for name in only.split(",") if name.strip()]
    by_plain = {name.replace("-", "_"): name for name in known}
    wrong = [name for name in asked if name not in by_plain]
    if wrong or not asked:
        none = f"the transformers library has no architecture {wrong[0]!r} with a task" if wrong else ""
        raise UsageError(none or "--only has no name", hint="sounding models list")
    return list(dict.fromkeys(by_plain[name] for name in asked))


def _tell(
    rows: Sequence[Mapping[str, Any]], failed: dict[str, str], index: Path, *, quiet: bool, as_json: bool
) -> None:
    from sounding.report.zoo import summarize

    if as_json:
        plain = [{name: value for name, value in row.items() if name != "record"} for row in rows]
        print_json({"architectures": plain, "failed": failed, "pages": str(index)})
        return
    if not quiet:
        for row in rows:
            places = f"{row['high']} high, {row['medium']} medium, {row['low']} low" if "high" in row else row["reason"]
            say(f"hf:{row['name']}: {row['verdict']} ({places})")
    say(summarize(rows))
    for name, message in failed.items():
        say(f"hf:{name} failed: {message}", err=True)
    say(f"Pages: {index}")
