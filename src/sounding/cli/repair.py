"""`sounding repair`: try a cure, show what it changes and what it does, write the weights."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import sounding
from sounding.cli.check import LEAST_REPEAT
from sounding.cli.options import file_option, json_beside, network_argument, quiet_option
from sounding.cli.output import console, print_json, say, working
from sounding.cli.subject import Wanted, on_network, opened
from sounding.errors import ExitCode, UsageError
from sounding.files import place
from sounding.limits import require_time

if TYPE_CHECKING:
    from torch import nn

    from sounding.repair.plan import Plan
    from sounding.repair.recommend import Recommendation

AUTO = "auto"
TORCH_ENDINGS = (".pt", ".pth", ".bin")
SAFETENSORS = ".safetensors"


class ListsMethods(click.Command):
    """A command whose help ends with the methods, which only the help has to import."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line a method: its name and what it is for."""
        from sounding.repair.methods import METHODS

        with formatter.section("Methods"):
            formatter.write_dl([(name, method.purpose) for name, method in METHODS.items()])


@click.command(cls=ListsMethods)
@network_argument("target")
@click.option("--method", "-m", required=True, metavar="NAME[,NAME…]|auto",
              help="The cure. Several are applied in order. auto tries them on copies and takes the best.")  # fmt: skip
@click.option("--set", "settings", multiple=True, metavar="METHOD.KEY=VALUE",
              help="Option of a cure, such as tune_batchnorm.shift=2.")  # fmt: skip
@click.option("--exclude", metavar="NAME[,NAME…]", help="Cures that auto does not try, such as raise_rank.")
@click.option("--steps", type=click.IntRange(min=0), metavar="N",
              help="Train for N steps to compare the cures that auto finds most likely [default: 20].")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would change and what it would do; write no weights.")
@click.option("--force", is_flag=True, help="Write the weights also where the cure makes the network worse.")
@file_option("--out", "Write the repaired weights, as .pt or .safetensors.")
@on_network(least=2)
@click.option("--repeats", type=click.IntRange(min=1), default=1,
              help="Number of batches to check on, before the cure and after it.")  # fmt: skip
@file_option("--html", "Write a report of before and after as one HTML file.")
@json_beside
@quiet_option("Print only the verdict.")
@click.pass_context
def repair(
    ctx: click.Context, target: str, method: str, settings: tuple[str, ...], exclude: str | None, steps: int | None,
    dry_run: bool, force: bool, out: Path | None, wanted: Wanted, repeats: int, html: Path | None, as_json: bool,
    quiet: bool
) -> None:  # fmt: skip
    """Mend a network: try a cure, show what it changes and whether it helps, write the weights.

    A cure is one of the methods that are listed below. TARGET is written as for `sounding check`. The network is
    checked before and after on a batch that the cure has not seen, and what the cure makes worse is told too. Where it
    has more findings of high severity after the cure than before, no weights are written without --force.

    \b
    Exit codes: 0 healthy after the repair, 1 a finding of high severity remains or was caused,
    2 wrong usage or a target that fails, 3 numerical failure,
    4 not known (too little could be measured to say), 130 interrupted.
    """
    if dry_run and out is not None:
        told = f"expected --out or --dry-run, which writes no weights, got both (--out {out})"
        raise UsageError(told, hint="one of the two")
    require_time(LEAST_REPEAT * repeats, what=f"{repeats} repeats")
    if out is not None:
        require_weights_path(out)
    options = parse_options(settings, method)
    longest = max((int(given["steps"]) for given in options.values() if isinstance(given.get("steps"), int)), default=0)
    require_time(LEAST_REPEAT * longest, what=f"a cure of {longest} steps")
    search = {name: value for name, value in {"exclude": exclude, "steps": steps}.items() if value is not None}
    if search and method != AUTO:
        raise UsageError(f"--exclude and --steps belong to --method auto, got --method {method}", hint="--method auto")
    require_time(LEAST_REPEAT * (steps or 0), what=f"trials of {steps} steps")
    with working("loading", quiet=quiet) as tell:
        plan, recommendation, about = _repair(target, method, wanted, options, search, repeats, tell)
    refused = plan.evidence.worse and not force
    if not dry_run and not refused:
        plan.apply()
    files: dict[str, Path] = {}
    try:
        if out is not None and not refused:
            write_weights(plan.model, out)
            files["Weights"] = out
        if html is not None:
            from sounding.report.repair import write_repair_html

            write_repair_html(plan, html)
            files["Report"] = html
    finally:  # a disk that is full must not cost the result, which says what was written
        if as_json:
            print_json({
                "target": target,
                **plan.to_dict(),
                "status": plan.evidence.after.verdict.status,
                "healthy": plan.evidence.healthy,
                "dry_run": dry_run,
                "weights": str(out) if "Weights" in files else None,
                "recommendation": recommendation,
                "environment": about,
            })  # fmt: skip
        _print(plan, recommendation, console(stderr=as_json, quiet=quiet and as_json), files=files, quiet=quiet)
        if refused and not dry_run:
            say("No weights were written, for the cure makes this network worse; --force writes them.", err=True)
    ctx.exit(ExitCode.of(plan.evidence.after.verdict.status))


def parse_options(settings: tuple[str, ...], method: str) -> dict[str, dict[str, Any]]:
    """`METHOD.KEY=VALUE` → {method: {key: value}}; of a single method `KEY=VALUE`; true, false and none are words.

    >>> parse_options(("tune_batchnorm.shift=2", "tune_batchnorm.eps=0.5"), "tune_batchnorm")
    {'tune_batchnorm': {'shift': 2, 'eps': 0.5}}
    """
    from sounding.cli.settings import parse_value

    words = {"true": True, "false": False, "none": None}  # spelled in any case
    parsed: dict[str, dict[str, Any]] = {}
    for setting in settings:
        left, separator, text = setting.partition("=")
        name, dot, key = left.strip().partition(".")
        if separator and not dot and "," not in method and method != AUTO:  # one method: it need not be named
            name, key = method, name
        key = key.replace("-", "_")
        if not separator or not key.isidentifier():
            raise UsageError(f"expected --set METHOD.KEY=VALUE, got {setting!r}", hint="--set tune_batchnorm.shift=2")
        text = text.strip()
        parsed.setdefault(name.strip(), {})[key] = words[text.lower()] if text.lower() in words else parse_value(text)
    return parsed


def _repair(
    target: str, method: str, wanted: Wanted, options: Any, search: dict[str, Any], repeats: int,
    tell: Callable[[str], None]
) -> tuple[Plan, Recommendation | None, dict[str, Any]]:  # fmt: skip
    """The plan of a network's cure, what was recommended if auto looked for it among all, and what it was tried on."""
    from sounding.repair.methods import choose_methods

    if method != AUTO:
        choose_methods(method, options)  # refuses a name or an option that is wrong before the network is made
    with opened(wanted, lambda: wanted.load(target)) as at:
        (model,), chosen = at.models, at.chosen
        if chosen.axis:
            raise UsageError(
                "repair takes networks whose first axis is the batch, got one with batch_first=False",
                hint="a module that transposes its input first",
            )
        batch = chosen.batch
        fresh = at.draw if chosen.endless else None  # a file has no samples that the cure has not seen
        evidence: dict[str, Any] = {"loss": at.loss, "repeats": repeats, "fresh": fresh, "generator": at.generator}
        recommendation = None
        methods: Any = method
        if method == AUTO:
            recommendation = sounding.recommend(
                model,
                batch.given,
                batch.targets,
                progress=lambda done, total, name: tell(f"trying {name} ({done + 1} of {total})"),
                **evidence,
                **search,
            )
            methods, options = recommendation.best.methods, recommendation.best.options
        tell(f"trying {methods if isinstance(methods, str) else ', '.join(methods)}")
        plan = sounding.plan(
            model,
            batch.given,
            batch.targets,
            method=methods,
            options=options,
            progress=lambda name, step, value: tell(f"{name}: step {step + 1}, {value:.3g}"),
            **evidence,
        )
        plan.evidence = plan.evidence.for_target(target)
        return plan, recommendation, {"target": target, "data": at.data, "seed": wanted.seed}


def _print(
    plan: Plan, recommendation: Recommendation | None, prose: Any, *, files: dict[str, Path], quiet: bool
) -> None:
    from sounding.cli.table import write_verdict

    if quiet:
        prose.print(write_verdict(plan.evidence.after), soft_wrap=True)
        return

    tell = functools.partial(prose.print, markup=False, soft_wrap=True)
    if recommendation is not None:
        tell(f"{_wrap(str(recommendation), prose.width)}\n")
    tell(_wrap(str(plan), prose.width))
    recipe = plan.recipe()
    if "Weights" in files:
        tell(f"\nWeights: {files['Weights']}")
    elif plan.applied:
        tell("\nNo weights were written; --out weights.pt keeps them.")
    if recipe:
        lines = "\n".join(f"  {line}" for line in recipe.splitlines())
        tell(
            f"\nWeights files hold no new modules or settings. On a new network, before load_state_dict, run:\n{lines}"
        )
    if "Report" in files:
        tell(f"\nReport: {files['Report']}")


def _wrap(text: str, width: int) -> str:
    """Each line folded to a width, its rest indented below it."""
    lines = []
    for line in text.splitlines():
        below = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(line, width, subsequent_indent=below, break_long_words=False) or [""]
    return "\n".join(lines)


def require_weights_path(path: Path) -> None:
    """Find out before the work that weights cannot be written in the format of this ending."""
    if path.suffix not in (*TORCH_ENDINGS, SAFETENSORS):
        told = f"expected a weights file ending in .pt or {SAFETENSORS}, got {str(path)!r}"
        raise UsageError(told, hint=f"{path.with_suffix('.pt')}")
    if path.suffix == SAFETENSORS and importlib.util.find_spec("safetensors") is None:
        raise UsageError(
            f"{path} needs the package 'safetensors', which is not installed",
            hint=f"pip install safetensors, or {path.with_suffix('.pt')}, which torch loads with weights_only=True",
        )


def write_weights(model: nn.Module, path: Path) -> None:
    """The state_dict of a model: `torch.load(path, weights_only=True)` or safetensors' `load_file` reads it."""
    import torch

    # values on the CPU, each tensor by itself: a view would drag its whole storage into the file
    values = {name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
              for name, value in model.state_dict().items()}  # fmt: skip
    if path.suffix == SAFETENSORS:
        # the library refuses tensors that are not contiguous
        tensors = {name: value.contiguous() for name, value in values.items() if isinstance(value, torch.Tensor)}
        data: bytes = importlib.import_module("safetensors.torch").save(tensors)
    else:
        buffer = io.BytesIO()
        torch.save(values, buffer)
        data = buffer.getvalue()
    place(path, data)
