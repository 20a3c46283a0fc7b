"""`sounding check`: measure a network, print the verdict, write the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from sounding.cli.output import console, despite_a_closed_pipe, print_json, require_writable, working
from sounding.cli.subject import Wanted, in_mode, on_network, opened
from sounding.cli.trial import asked_trial, print_trial, try_training
from sounding.errors import ExitCode, InterruptedRun
from sounding.limits import require_time

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from sounding.cli.inputs import Choice
    from sounding.probe.records import Report
    from sounding.train.trial import Trial

LEAST_REPEAT = 1e-3  # seconds that measuring a batch takes at the least
PATH = click.Path(path_type=Path)
EXAMPLE_INPUT = 64  # the pixels of a digit
EXAMPLE_DEPTH, EXAMPLE_WIDTH = 64, 128  # deep enough for both failures to show, without norm and with; some seconds


@dataclass(frozen=True)
class Subject:
    """A network to check: a name for people, the function that makes it, and its name on the command line if any."""

    name: str
    make: Callable[[], nn.Module]
    target: str | None = None


@click.command()
@click.argument("target", required=False)
@on_network()
@click.option("--repeats", type=click.IntRange(min=1), default=1, help="Number of batches to average over.")
@click.option("--theory/--no-theory", default=True, help="Compare with what theory predicts.")
@click.option(
    "--redraw", type=int, default=0, metavar="N", help="Add error bands from N networks with newly drawn weights."
)
@click.option(
    "--tier",
    type=click.Choice(["full", "fast"]),
    default="full",
    help="What is measured: everything, or fast, without ranks and theory.",
)
@in_mode
@click.option(
    "--dropout", is_flag=True, help="Leave dropout on; its noise makes samples look more different than they are."
)
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Show only modules of this name or pattern, such as 'features.*'; may be repeated.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=2),
    metavar="N",
    help="Measure the forward pass on N samples of the batch only.",
)
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Also train a copy for N steps, and watch it.")
@click.option("--lr", type=float, metavar="RATE", help="Learning rate of the steps [default: 0.001].")
@click.option(
    "--optimizer",
    metavar="NAME",
    help="Optimizer of the steps: sgd, momentum, adam, adamw or rmsprop [default: adamw].",
)
@click.option(
    "--select",
    metavar="KINDS",
    help="Count only these kinds of findings, separated by commas, for example rank_collapse.",
)
@click.option("--ignore", metavar="KINDS", help="Do not count these kinds of findings (sounding explain lists them).")
@click.option("--baseline", type=PATH, metavar="FILE", help="Do not count the findings that FILE lists.")
@click.option("--write-baseline", type=PATH, metavar="FILE", help="Write the findings to FILE and end with 0.")
@click.option("--summary", type=PATH, metavar="FILE", help="Append the verdict to FILE as Markdown, for CI.")
@click.option("--html", type=PATH, metavar="FILE", help="Write an interactive report as one HTML file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout; the text goes to stderr.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the verdict.")
@click.pass_context
def check(
    ctx: click.Context,
    /,
    target: str | None,
    wanted: Wanted,
    repeats: int,
    theory: bool,
    redraw: int,
    steps: int | None,
    lr: float | None,
    optimizer: str | None,
    select: str | None,
    ignore: str | None,
    baseline: Path | None,
    write_baseline: Path | None,
    summary: Path | None,
    html: Path | None,
    as_json: bool,
    quiet: bool,
    **how: Any,
) -> None:
    """Measure a network: does the signal arrive, where is it lost, and why?

    TARGET is file.py:name or package.module:name, a torch.nn.Module or a callable without arguments that makes one; or
    mlp, alexnet, vgg19, resnet50 or transformer with options, for example mlp,depth=50,norm=batch; or an architecture
    of the transformers library, for example hf:gpt2 or hf:llama,layers=8 (sounding models list).
    Without TARGET: the embedded example, a 64-layer ReLU network with and without batch norm, on digits.

    FILE.npz of --data holds an array inputs, or arrays named as the arguments of the network's forward (input_ids, x,
    t, ...), and an array targets where there are targets; each has one row per sample.

    With --steps a copy is trained for a few steps, and the verdict at their end gives the exit code. Findings that
    --select, --ignore or --baseline leave out are printed all the same, but do not change the verdict.

    \b
    Exit codes: 0 healthy, 1 a finding of high severity, 2 wrong usage or a target that fails,
    3 numerical failure, 4 not known (too little could be measured to say),
    130 interrupted (what was measured is kept).
    """
    require_time(LEAST_REPEAT * repeats, what=f"{repeats} repeats")
    require_time(LEAST_REPEAT * redraw, what=f"{redraw} draws")
    require_writable(html, summary, write_baseline)
    from sounding.probe import accepted

    accept = accepted.accepting(select=select, ignore=ignore, baseline=baseline)
    if target is None and wanted.input_shape is None:
        wanted = replace(wanted, input_shape=(EXAMPLE_INPUT,))
    how |= {"only": how["only"] or None, "repeats": repeats, "redraw": redraw}
    how |= {"theory": theory and how["tier"] == "full", "trial": asked_trial(steps, lr, optimizer)}
    prose = console(stderr=as_json, quiet=quiet and as_json)
    trials: dict[str, Trial] = {}
    reports, interrupted = _measure_all(_choose_subjects(target, wanted), wanted, how, trials, quiet=quiet)
    if not reports:
        raise InterruptedRun("interrupted before anything was measured")
    if write_baseline is not None:
        accepted.write_baseline(list(reports.values()), write_baseline)
    reports = {name: accept(report) for name, report in reports.items()}
    trials = {name: replace(trial, report=trial.report and accept(trial.report)) for name, trial in trials.items()}
    with despite_a_closed_pipe():
        if as_json:
            print_json(to_json_object(reports, target=target, trials=trials))
        _print(reports, prose, quiet=quiet)
        for trial in trials.values():
            print_trial(trial, prose, quiet=quiet)
    if summary is not None:
        from sounding.cli.summary import append_summary

        append_summary(reports, summary, trials=trials)
    if html is not None:
        from sounding.report import write_html

        write_html(reports, html)
        if not quiet:
            with despite_a_closed_pipe():
                prose.print(f"\nReport: {html}", markup=False, soft_wrap=True)
    if interrupted:
        raise InterruptedRun("interrupted; what was measured is kept and marked partial")
    if write_baseline is not None:
        ctx.exit(ExitCode.HEALTHY)
    from sounding.probe.records import STATUSES

    states = [trials[name].status if name in trials else report.verdict.status for name, report in reports.items()]
    ctx.exit(ExitCode.of(max(states, key=STATUSES.index)))


def to_json_object(
    reports: dict[str, Report], *, target: str | None, trials: Mapping[str, Trial] = MappingProxyType({})
) -> dict[str, Any]:
    """One object: verdict, findings, profile, unmeasured, environment.

    Of several networks (the embedded example) these are the worst one's, so that the verdict agrees with the exit
    code, and `networks` holds every one by name.
    """
    name, worst = max(reports.items(), key=lambda item: _badness(item[1]))
    partial = any(report.profile.settings.get("partial") for report in reports.values())
    head = {"target": target, "network": name, "partial": bool(partial), **worst.to_dict()}
    if trials:
        head["trial"] = trials[name].to_dict() if name in trials else None
        head["trials"] = {name: trial.to_dict() for name, trial in trials.items()}
    if len(reports) == 1:
        return head
    return {**head, "networks": {name: report.to_dict() for name, report in reports.items()}}


def _badness(report: Report) -> tuple[int, int]:
    from sounding.probe.records import STATUSES

    verdict = report.verdict
    return STATUSES.index(verdict.status), sum(finding.severity == "high" for finding in verdict.findings)


def _choose_subjects(target: str | None, wanted: Wanted) -> list[Subject]:
    """The network that was named, or the two of the demonstration."""
    if target is not None:
        return [Subject(target, lambda: wanted.load(target), target)]

    def make(norm: Any) -> nn.Module:
        from sounding.models import Mlp

        return Mlp(EXAMPLE_INPUT, 10, depth=EXAMPLE_DEPTH, width=EXAMPLE_WIDTH, norm=norm)

    name, same = f"{EXAMPLE_DEPTH}-layer ReLU network", f"mlp,depth={EXAMPLE_DEPTH},width={EXAMPLE_WIDTH}"
    return [
        Subject(name, lambda: make("none"), same),
        Subject(f"{name} with batch norm", lambda: make("batch"), f"{same},norm=batch"),
    ]


def _measure_all(
    subjects: list[Subject], wanted: Wanted, how: Mapping[str, Any], trials: dict[str, Trial], *, quiet: bool
) -> tuple[dict[str, Report], bool]:
    """Reports by name, trials put into `trials`, and whether Ctrl-C came; then the last one may be partial."""
    reports: dict[str, Report] = {}
    with working("loading", quiet=quiet) as tell:
        for subject in subjects:
            tell(f"checking {subject.name}")
            try:
                reports[subject.name], trial = measure(subject, wanted, tell, **how)
                if trial is not None:
                    trials[subject.name] = trial
                    if trial.interrupted:
                        return reports, True
            except InterruptedRun as stop:
                if stop.partial is not None:
                    reports[subject.name] = stop.partial
                return reports, True
            except KeyboardInterrupt:
                return reports, True
    return reports, False


def measure(
    subject: Subject,
    wanted: Wanted,
    tell: Callable[[str], None],
    *,
    repeats: int = 1,
    trial: Mapping[str, Any] | None = None,
    **how: Any,
) -> tuple[Report, Trial | None]:
    """The report of a network on the batch that the options ask for, and the trial where they ask for one.

    The batch is measured as `how` says, which `sounding.check` takes; `trial` has options of `run_trial`.
    """
    from sounding.models.hf import describe_hf
    from sounding.probe.check import check as check_network

    with opened(wanted, subject.make, tell=tell) as at:
        (model,), chosen = at.models, at.chosen
        size = describe_hf(model, subject.name)
        about = {"target": subject.name, **({"model": size} if size else {}), "data": at.data, "seed": wanted.seed}
        inputs, targets = _repeat(chosen, repeats)
        try:
            report = check_network(
                model,
                inputs,
                targets,
                loss=at.loss,
                repeats=repeats,
                batch_axis=chosen.axis or None,
                **how,
                generator=at.generator,
                progress=lambda done, total: tell(f"checking {subject.name}: {done} of {total} batches"),
            )
        except InterruptedRun as stop:
            if stop.partial is not None:
                stop.partial = _describe(stop.partial, about, subject.target)
            raise
        tried = None if trial is None else try_training(at, trial, seed=wanted.seed, tell=tell)
        return _describe(report, about, subject.target), tried


def _repeat(chosen: Choice, repeats: int) -> tuple[Any, Any]:
    """What to check with: the batch, or for several repeats a fresh one each; a file's samples are divided instead."""
    if repeats == 1 or not chosen.endless:
        return chosen.batch.given, chosen.batch.targets
    first = [chosen.batch]

    def fresh() -> tuple[Any, Any]:
        batch = first.pop() if first else chosen.draw()
        return batch.given, batch.targets

    return fresh, None


def _describe(report: Report, about: dict[str, Any], target: str | None) -> Report:
    """The report with what only the command line knows: its environment, and the target in remedies."""
    report = report if target is None else report.for_target(target)
    return replace(report, environment={**report.environment, **about})


def _print(reports: dict[str, Report], prose: Console, *, quiet: bool) -> None:
    from sounding.cli.table import print_report, write_verdict

    for index, (name, report) in enumerate(reports.items()):
        if quiet:
            # a line for each model, however long, so that a script can read it
            prose.print(f"{name}: " if len(reports) > 1 else "", write_verdict(report), sep="", soft_wrap=True)
            continue
        if index:
            prose.print()
        print_report(report, prose, title=name, legend=index == 0)
