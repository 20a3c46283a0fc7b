"""`sounding check`: measure a network, print the verdict, write the report."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

import sounding
from sounding.cli.options import FILE, file_option, json_beside, network_argument, quiet_option
from sounding.cli.output import console, despite_a_closed_pipe, new_table, print_json, say, working
from sounding.cli.subject import Wanted, in_mode, on_network, opened
from sounding.errors import ExitCode, InterruptedRun, UsageError
from sounding.limits import require_time
from sounding.look import write_number

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from sounding.cli.subject import Opened
    from sounding.probe.records import Report
    from sounding.train.trial import Trial

ROWS = 12  # steps in the table of a trial
PATIENCE = 20.0  # seconds that theory may take without being asked for
SILENCE = 5.0  # seconds behind the measurement after which a line says what takes so long
LEAST_REPEAT = 1e-3  # seconds that measuring a batch takes at the least
EXAMPLE_INPUT = 64  # the pixels of a digit
# deep enough for both failures to show, without norm and with; some seconds
EXAMPLES = {
    "64-layer ReLU network": "mlp,depth=64,width=128",
    "64-layer ReLU network with batch norm": "mlp,depth=64,width=128,norm=batch",
}


@click.command()
@network_argument("target", required=False)
@on_network()
@click.option("--repeats", type=click.IntRange(min=1), default=1, help="Number of batches to average over.")
@click.option("--theory/--no-theory", default=None,
              help="Compare with what theory predicts; by default where it takes less than 20 seconds.")  # fmt: skip
@click.option("--redraw", type=int, default=0, metavar="N",
              help="Draw the weights of N copies anew, and tell how much each number varies among them.")  # fmt: skip
@click.option("--tier", type=click.Choice(["full", "fast"]), default="full",
              help="How much is measured: full is everything, fast leaves out ranks and theory.")  # fmt: skip
@in_mode
@click.option("--dropout", is_flag=True,
              help="Leave dropout on. Its noise makes samples look more different than they are.")  # fmt: skip
@click.option("--only", multiple=True, metavar="NAME",
              help="Show only modules of this name or pattern, such as 'features.*'. May be repeated.")  # fmt: skip
@click.option("--samples", type=click.IntRange(min=2), metavar="N",
              help="Measure the forward pass on N samples of the batch only.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Also train a copy for N steps, and watch it.")
@click.option("--lr", type=float, metavar="RATE", help="Learning rate for --steps [default: 0.001].")
@click.option("--optimizer", metavar="NAME",
              help="Optimizer for --steps: sgd, momentum, adam, adamw or rmsprop [default: adamw].")  # fmt: skip
@click.option("--select", metavar="KINDS",
              help="Count only these kinds of findings, separated by commas, for example rank_collapse.")  # fmt: skip
@click.option("--ignore", metavar="KINDS", help="Do not count these kinds of findings (sounding explain lists them).")
@click.option("--baseline", type=FILE, metavar="FILE", help="Do not count the findings that FILE lists.")
@file_option("--write-baseline", "Write the findings to FILE, for --baseline, and end with exit code 0.")
@file_option("--summary", "Append the verdict to FILE as Markdown, for CI.")
@file_option("--html", "Write an interactive report as one HTML file.")
@json_beside
@quiet_option("Print only the verdict.")
@click.pass_context
def check(
    ctx: click.Context, /, target: str | None, wanted: Wanted, repeats: int, theory: bool | None, redraw: int,
    steps: int | None, lr: float | None, optimizer: str | None, select: str | None, ignore: str | None,
    baseline: Path | None, write_baseline: Path | None, summary: Path | None, html: Path | None,
    as_json: bool, quiet: bool, **how: Any
) -> None:  # fmt: skip
    """Measure a network: does the signal arrive, where is it lost, and why?

    The signal is what the layers give out for a batch; backwards, it is the gradient. It is lost where the samples
    become alike, or where the gradient becomes very small or very large.

    TARGET says which network. It may be file.py:name or package.module:name, where the name is a torch.nn.Module or a
    function without arguments that makes one. It may be mlp, alexnet, vgg19, resnet50 or transformer with options, for
    example mlp,depth=50,norm=batch. Or it is an architecture of the transformers library, for example hf:gpt2 or
    hf:llama,layers=8; `sounding models list` names them all. Without TARGET an example is measured: a network of 64
    layers with ReLU, with and without batch norm, on digits.

    A FILE.npz for --data holds an array inputs, or arrays named as the arguments of the network's forward, such as
    input_ids. Where there are targets it holds an array targets. Each array has one row per sample.

    With --steps a copy is trained for a few steps, and the verdict at their end gives the exit code. Findings that
    --select, --ignore or --baseline leave out are still printed, but they do not change the verdict.

    \b
    Exit codes: 0 healthy, 1 a finding of high severity, 2 wrong usage or a target that fails,
    3 numerical failure, 4 not known (too little could be measured to say),
    130 interrupted (what was measured is kept).
    """
    require_time(LEAST_REPEAT * repeats, what=f"{repeats} repeats")
    require_time(LEAST_REPEAT * redraw, what=f"{redraw} draws")
    from sounding.probe import accepted

    accept = accepted.accepting(select=select, ignore=ignore, baseline=baseline)
    if target is None and wanted.input_shape is None:
        wanted = replace(wanted, input_shape=(EXAMPLE_INPUT,))
    asked = {name: value for name, value in {"lr": lr, "optimizer": optimizer or None}.items() if value is not None}
    if asked and steps is None:
        raise UsageError("--lr and --optimizer belong to a trial, got no --steps", hint="--steps 20")
    # click gives () where nothing was named, which would show no module
    how |= {"only": how["only"] or None, "repeats": repeats, "redraw": redraw}
    # the fast tier has no theory
    asked_for = PATIENCE if theory is None else theory
    how |= {"theory": asked_for if how["tier"] == "full" else False}
    how |= {"trial": {"steps": steps, **asked} if steps else None}
    prose = console(stderr=as_json, quiet=quiet and as_json)
    trials: dict[str, Trial] = {}
    reports, interrupted = _measure_all({target: target} if target else EXAMPLES, wanted, how, trials, quiet=quiet)
    if not reports:
        raise InterruptedRun("interrupted before anything was measured")
    if write_baseline is not None:
        accepted.write_baseline(list(reports.values()), write_baseline)
    # behind the baseline, which keeps every finding
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
        sounding.write_html(reports, html)
        if not quiet:
            with despite_a_closed_pipe():
                prose.print(f"\nReport: {html}", markup=False, soft_wrap=True)
    if interrupted:
        raise InterruptedRun("interrupted; what was measured is kept and marked partial")
    if write_baseline is not None:
        ctx.exit(ExitCode.HEALTHY)
    from sounding.probe.records import STATUSES

    states = [trials[name].status if name in trials else report.verdict.status for name, report in reports.items()]
    ctx.exit(ExitCode.of(max(states, key=STATUSES.index)))  # of several networks the worst tells


def to_json_object(
    reports: dict[str, Report], *, target: str | None, trials: Mapping[str, Trial] = MappingProxyType({})
) -> dict[str, Any]:
    """One object: verdict, findings, profile, unmeasured, environment.

    Of several networks (the embedded example) these are the worst one's, so that the verdict agrees with the exit
    code, and `networks` holds every one by name.
    """
    from sounding.probe.records import STATUSES

    def badness(name: str) -> tuple[int, int]:
        verdict = reports[name].verdict
        return STATUSES.index(verdict.status), sum(finding.severity == "high" for finding in verdict.findings)

    name = max(reports, key=badness)
    partial = any(report.profile.settings.get("partial") for report in reports.values())
    head = {"target": target, "network": name, "partial": bool(partial), **reports[name].to_dict()}
    if trials:
        # an interruption may have left this network without its trial
        head["trial"] = trials[name].to_dict() if name in trials else None
        head["trials"] = {name: trial.to_dict() for name, trial in trials.items()}
    if len(reports) == 1:
        return head
    return {**head, "networks": {name: report.to_dict() for name, report in reports.items()}}


def _measure_all(
    targets: Mapping[str, str], wanted: Wanted, how: Mapping[str, Any], trials: dict[str, Trial], *, quiet: bool
) -> tuple[dict[str, Report], bool]:
    """Reports by name, trials put into `trials`, and whether Ctrl-C came; then the last one may be partial."""
    reports: dict[str, Report] = {}
    with working("loading", quiet=quiet) as tell:
        for name, target in targets.items():
            tell(f"checking {name}")
            try:
                reports[name], trial = measure(target, wanted, tell, name=name, quiet=quiet, **how)
            except KeyboardInterrupt as stop:  # an InterruptedRun, which may hold a part, is one too
                if (partial := getattr(stop, "partial", None)) is not None:
                    reports[name] = partial
                return reports, True
            if trial is not None:
                trials[name] = trial
                if trial.interrupted:
                    return reports, True
    return reports, False


def measure(
    target: str,
    wanted: Wanted,
    tell: Callable[[str], None],
    *,
    name: str = "",
    make: Callable[[], nn.Module] | None = None,
    repeats: int = 1,
    trial: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **how: Any,
) -> tuple[Report, Trial | None]:
    """The report of a network on the batch that the options ask for, and the trial where they ask for one.

    The batch is measured as `how` says, which `sounding.check` takes; `trial` has options of `run_trial`. Unless
    `quiet`, a line on stderr says that theory is running when it takes long. `name` is what people call the network, by
    default its target; `make` makes it, by default as the target says.
    """
    from sounding.models.hf import describe_hf

    name = name or target
    with opened(wanted, make or (lambda: wanted.load(target)), tell=tell) as at:
        (model,) = at.models
        size = describe_hf(model, name)
        about = {"target": name, **({"model": size} if size else {}), "data": at.data, "seed": wanted.seed}
        inputs, targets = _repeat(at, repeats)
        told = f"Theory for {name} is still being computed; Ctrl-C keeps what was measured, --no-theory leaves it out."
        clock = threading.Timer(SILENCE, say, [told], {"err": True})
        clock.daemon = True  # an interrupted check must not wait for it

        def progress(done: int, total: int) -> None:
            tell(f"checking {name}: {done} of {total} batches")
            if done == total and how.get("theory") and not quiet:
                clock.start()

        try:
            report = sounding.check(model, inputs, targets, repeats=repeats, **how, **at.options, progress=progress)
        except InterruptedRun as stop:
            if stop.partial is not None:
                stop.partial = _describe(stop.partial, about, target)
            raise
        finally:
            clock.cancel()
        tried = None if trial is None else try_training(at, trial, seed=wanted.seed, tell=tell)
        return _describe(report, about, target), tried


def _repeat(at: Opened, repeats: int) -> tuple[Any, Any]:
    """What to check with: the batch, or for several repeats a fresh one each; a file's samples are divided instead."""
    first = at.chosen.batch.given, at.chosen.batch.targets
    if repeats == 1 or not at.chosen.endless:  # a few samples of a file would come again in every draw
        return first
    batches = itertools.chain([first], iter(at.draw, None))  # the chosen batch, then others without end
    return functools.partial(next, batches), None


def _describe(report: Report, about: dict[str, Any], target: str) -> Report:
    """The report with what only the command line knows: its environment, and the target in remedies."""
    return replace(report.for_target(target), environment={**report.environment, **about})


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


def try_training(at: Opened, asked: Mapping[str, Any], *, seed: int, tell: Callable[[str], None]) -> Trial:
    """The trial on batches drawn as the check's are, both generators begun anew from the seed."""
    import torch

    from sounding.train.trial import run_trial

    torch.manual_seed(seed)  # the caller puts the generator's state back
    at.generator.manual_seed(seed)
    return run_trial(
        at.models[0],
        at.draw,
        loss=at.loss,
        batch_axis=at.chosen.axis or None,
        progress=lambda done, total: tell(f"training: {done} of {total} steps"),
        **asked,
    )


def print_trial(trial: Trial, prose: Console, *, quiet: bool) -> None:
    """The sentence, and a table of steps with their loss and news."""
    prose.print(f"\n{trial.sentence}" if not quiet else trial.sentence, markup=False, soft_wrap=True)
    if quiet or not trial.losses:
        return
    table = new_table(">step", ">loss")
    table.add_column("news")
    count = len(trial.losses)
    news = {event.step for event in trial.events}
    for step in range(count):
        if step in news or step == count - 1 or step % -(-count // ROWS) == 0:  # -(-a // b) rounds up
            told = "; ".join(f"{event.kind} {event.change}" for event in trial.events if event.step == step)
            table.add_row(str(step), write_number(trial.losses[step]), told)
    prose.print(table)
