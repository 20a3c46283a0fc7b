"""`sounding repair`: try a cure, show what it changes and what it does, write the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sounding.cli.check import LEAST_REPEAT
from sounding.cli.output import console, print_json, require_writable, working
from sounding.cli.subject import Wanted, on_network, opened
from sounding.cli.weights import require_weights_path, write_weights
from sounding.errors import ExitCode, UsageError
from sounding.limits import require_time

if TYPE_CHECKING:
    import torch

    from sounding.repair.plan import Plan
    from sounding.repair.recommend import Recommendation

AUTO = "auto"


@dataclass(frozen=True)
class Repaired:
    """The plan of a network, and what was recommended if that was asked."""

    plan: Plan
    recommendation: Recommendation | None
    about: dict[str, Any]


class ListsMethods(click.Command):
    """A command whose help ends with the methods, which only the help has to import."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line a method: its name and what it is for."""
        from sounding.repair.methods import METHODS

        with formatter.section("Methods"):
            formatter.write_dl([(name, method.purpose) for name, method in METHODS.items()])


@click.command(cls=ListsMethods)
@click.argument("target")
@click.option(
    "--method",
    "-m",
    required=True,
    metavar="NAME[,NAME…]|auto",
    help="The cure; several are applied in their order; auto tries them on copies and takes the best.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="METHOD.KEY=VALUE",
    help="Option of a cure, such as tune_batchnorm.shift=2.",
)
@click.option("--exclude", metavar="NAME[,NAME…]", help="Cures that auto does not try, such as raise_rank.")
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    help="Steps of training on which auto compares the likeliest cures [default: 20].",
)
@click.option("--dry-run", is_flag=True, help="Show what would change and what it would do; write no weights.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the repaired weights, as .pt or .safetensors."
)
@on_network(least=2)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=1, help="Number of batches to check on, before and after."
)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a report of before and after as one HTML file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout; the text goes to stderr.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the verdict.")
@click.pass_context
def repair(
    ctx: click.Context,
    target: str,
    method: str,
    settings: tuple[str, ...],
    exclude: str | None,
    steps: int | None,
    dry_run: bool,
    out: Path | None,
    wanted: Wanted,
    repeats: int,
    html: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Mend a network: try a cure, show what it changes and whether it helps, write the weights.

    TARGET is file.py:name or package.module:name, a torch.nn.Module or a callable without arguments that makes one.
    The network is checked before and after on a batch that the cure has not seen, and what the cure makes worse is
    told too. --dry-run writes nothing.

    \b
    Exit codes: 0 healthy after the repair, 1 a finding of high severity remains or was caused,
    2 wrong usage or a target that fails, 3 numerical failure, 4 not known (too little could be measured to say),
    130 interrupted.
    """
    if dry_run and out is not None:
        raise UsageError(
            f"expected --out with weights to write, got --out {out} with --dry-run, which changes and writes none",
            hint="one of the two",
        )
    require_time(LEAST_REPEAT * repeats, what=f"{repeats} repeats")
    require_writable(html)
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
        repaired = _repair(target, method, wanted, options, search, repeats, tell)
    plan = repaired.plan
    if not dry_run:
        plan.apply()
    files: dict[str, Path] = {}
    try:
        if out is not None:
            files["Weights"] = write_weights(plan.model, out)
        if html is not None:
            from sounding.report.repair import write_repair_html

            write_repair_html(plan, html)
            files["Report"] = html
    finally:  # a disk that is full must not cost the result, which says what was written
        if as_json:
            print_json(_to_json_object(repaired, target=target, written=files.get("Weights"), dry_run=dry_run))
        _print(repaired, console(stderr=as_json, quiet=quiet and as_json), files=files, quiet=quiet)
    ctx.exit(ExitCode.of(plan.evidence.after.verdict.status))


def parse_options(settings: tuple[str, ...], method: str) -> dict[str, dict[str, Any]]:
    """`METHOD.KEY=VALUE` → {method: {key: value}}; of a single method `KEY=VALUE`; true, false and none are words.

    >>> parse_options(("tune_batchnorm.shift=2", "tune_batchnorm.eps=0.5"), "tune_batchnorm")
    {'tune_batchnorm': {'shift': 2, 'eps': 0.5}}
    """
    from sounding.cli.settings import parse_value

    words = {"true": True, "false": False, "none": None}
    parsed: dict[str, dict[str, Any]] = {}
    for setting in settings:
        left, separator, text = setting.partition("=")
        name, dot, key = left.strip().partition(".")
        if separator and not dot and "," not in method and method != AUTO:
            name, key = method, name
        key = key.replace("-", "_")
        if not separator or not key.isidentifier():
            raise UsageError(f"expected --set METHOD.KEY=VALUE, got {setting!r}", hint="--set tune_batchnorm.shift=2")
        value = words.get(text.strip().lower(), ...)
        parsed.setdefault(name.strip(), {})[key] = parse_value(text.strip()) if value is ... else value
    return parsed


def _repair(
    target: str,
    method: str,
    wanted: Wanted,
    options: Any,
    search: dict[str, Any],
    repeats: int,
    tell: Callable[[str], None],
) -> Repaired:
    """The network with the plan of its cure, which auto looks for among all."""
    from sounding.repair.methods import choose_methods
    from sounding.repair.plan import plan as make_plan
    from sounding.repair.recommend import recommend

    if method != AUTO:
        choose_methods(method, options)
    with opened(wanted, lambda: wanted.load(target)) as at:
        (model,), chosen = at.models, at.chosen
        if chosen.axis:
            raise UsageError(
                "repair takes networks whose first axis is the batch, got one with batch_first=False",
                hint="a module that transposes its input first",
            )
        batch = chosen.batch

        def draw() -> tuple[Any, torch.Tensor | None]:
            drawn = chosen.draw()
            return drawn.given, drawn.targets

        fresh = draw if chosen.endless else None
        evidence: dict[str, Any] = {"loss": at.loss, "repeats": repeats, "fresh": fresh, "generator": at.generator}
        recommendation = None
        methods: Any = method
        if method == AUTO:
            recommendation = recommend(
                model,
                batch.given,
                batch.targets,
                progress=lambda done, total, name: tell(f"trying {name} ({done + 1} of {total})"),
                **evidence,
                **search,
            )
            methods, options = recommendation.best.methods, recommendation.best.options
        tell(f"trying {methods if isinstance(methods, str) else ', '.join(methods)}")
        plan = make_plan(
            model,
            batch.given,
            batch.targets,
            method=methods,
            options=options,
            progress=lambda name, step, value: tell(f"{name}: step {step + 1}, {value:.3g}"),
            **evidence,
        )
        plan.evidence = plan.evidence.for_target(target)
        return Repaired(plan, recommendation, {"target": target, "data": at.data, "seed": wanted.seed})


def _to_json_object(repaired: Repaired, *, target: str, written: Path | None, dry_run: bool) -> dict[str, Any]:
    plan = repaired.plan
    recommended = repaired.recommendation
    return {
        "target": target,
        **plan.to_dict(),
        "status": plan.evidence.after.verdict.status,
        "healthy": plan.evidence.healthy,
        "dry_run": dry_run,
        "weights": None if written is None else str(written),
        "recommendation": None if recommended is None else recommended.to_dict(),
        "environment": repaired.about,
    }


def _print(repaired: Repaired, prose: Any, *, files: dict[str, Path], quiet: bool) -> None:
    """Print the plan with its evidence, in front of it what was recommended, behind it what was written."""
    from sounding.cli.table import write_verdict

    plan = repaired.plan
    if quiet:
        prose.print(write_verdict(plan.evidence.after), soft_wrap=True)
        return

    def say(text: str) -> None:
        prose.print(text, markup=False, soft_wrap=True)

    if repaired.recommendation is not None:
        say(f"{repaired.recommendation}\n")
    say(str(plan))
    recipe = plan.recipe()
    if "Weights" in files:
        say(f"\nWeights: {files['Weights']}")
    elif plan.applied:
        say("\nNo weights were written; --out weights.pt keeps them.")
    if recipe:
        lines = "\n".join(f"  {line}" for line in recipe.splitlines())
        say(f"\nWeights files hold no new modules or settings. On a new network, before load_state_dict, run:\n{lines}")
    if "Report" in files:
        say(f"\nReport: {files['Report']}")
