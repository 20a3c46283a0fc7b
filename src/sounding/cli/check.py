"""`sounding check`: measure a network, print the verdict, write the report."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from sounding.cli.output import SEED, console, despite_a_closed_pipe, print_json, require_writable, working
from sounding.cli.trial import Asked, asked_trial, print_trial, try_training
from sounding.errors import ExitCode, InterruptedRun, UsageError, require_device
from sounding.limits import require_time

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from torch import nn

    from sounding.cli.inputs import Choice
    from sounding.probe.records import Report
    from sounding.train.trial import Trial

LEAST_REPEAT = 1e-3  # seconds that measuring a batch takes at the least
PATH = click.Path(path_type=Path)
EXAMPLE_INPUT = 64
EXAMPLE_DEPTH = 64
EXAMPLE_WIDTH = 128


def parse_shape(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """One sample's shape: `64`, `3,32,32` or `3x32x32`."""
    if value is None:
        return None
    parts = value.replace("×", ",").replace("x", ",").strip("()[] ").rstrip(",").split(",")
    try:
        shape = tuple(int(part) for part in parts)
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise click.BadParameter(f"expected sizes such as 64 or 3,32,32, got {value!r}")
    return shape


@dataclass(frozen=True)
class Settings:
    """What the options say, apart from where results go."""

    data: str | None
    shape: tuple[int, ...] | None
    batch_size: int | None
    loss: str | None
    repeats: int
    theory: bool
    redraw: int
    device: str | None
    seed: int
    trial: Asked | None


@dataclass(frozen=True)
class Subject:
    """A network to check: a name for people, the function that makes it, and its name on the command line if any."""

    name: str
    make: Callable[[], nn.Module]
    target: str | None = None


@click.command()
@click.argument("target", required=False)
@click.option("--data", metavar="SOURCE", help="digits, mnist, cifar-10, gaussian, tokens:VOCABULARY, …, or FILE.npz.")
@click.option("--input-shape", callback=parse_shape, metavar="SHAPE", help="Of one sample, for example 64 or 3,32,32.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Samples in the batch [default: 128; 32 of resized digits].",
)
@click.option("--loss", metavar="NAME", help="cross_entropy, mse, random, or file.py:name [default: by the targets].")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Batches to average over.")
@click.option("--theory/--no-theory", default=True, show_default=True, help="Lay prediction beside measurement.")
@click.option("--redraw", type=int, default=0, metavar="N", help="Bands from N networks with these laws, measured: 16.")
@click.option("--device", metavar="NAME", help="cpu, cuda, cuda:1, mps, ... [default: where the network is].")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the weights a callable draws, and the batch.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Also train a copy for N steps, and watch it.")
@click.option("--lr", type=float, metavar="RATE", help="Learning rate of the steps [default: 0.001].")
@click.option("--optimizer", metavar="NAME", help="sgd, momentum, adam, adamw or rmsprop [default: adamw].")
@click.option("--select", metavar="KINDS", help="Only these kinds of findings count, for example rank_collapse.")
@click.option("--ignore", metavar="KINDS", help="These kinds do not count; names with commas (sounding explain).")
@click.option("--baseline", type=PATH, metavar="FILE", help="What this file has found before does not count.")
@click.option("--write-baseline", type=PATH, metavar="FILE", help="Write what is found to FILE and end with 0.")
@click.option("--summary", type=PATH, metavar="FILE", help="Append the verdict in Markdown, as CI shows it.")
@click.option("--html", type=PATH, metavar="FILE", help="Write an interactive report, one file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; prose goes to stderr.")
@click.option("--quiet", "-q", is_flag=True, help="Only the verdict.")
@click.pass_context
def check(
    ctx: click.Context,
    target: str | None,
    data: str | None,
    input_shape: tuple[int, ...] | None,
    batch_size: int | None,
    loss: str | None,
    repeats: int,
    theory: bool,
    redraw: int,
    device: str | None,
    seed: int,
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
) -> None:
    """Measure a network: does signal survive its depth, where does it die, and why?

    TARGET is file.py:name or package.module:name, a torch.nn.Module or a callable without arguments that makes one; or
    mlp, alexnet, vgg19, resnet50 or transformer with options, for example mlp,depth=50,norm=batch; or an architecture
    of the transformers library, for example hf:gpt2 or hf:llama,layers=8 (sounding models list).
    Without TARGET: the embedded example, a 64-layer ReLU network with and without batch norm, on digits.

    With --steps a copy is trained for a few steps, and the verdict at their end gives the exit code. Findings that were
    ignored, not selected, or in the baseline are set aside: they are told and do not count.

    \b
    Exit codes: 0 healthy, 1 a finding of high severity, 2 wrong usage or a target that fails,
    3 numerical failure, 4 not known (too little could be measured to say),
    130 interrupted (what was measured is kept).
    """
    require_time(LEAST_REPEAT * repeats, what=f"{repeats} repeats")
    require_time(LEAST_REPEAT * redraw, what=f"{redraw} draws")
    for file in (html, summary, write_baseline):
        if file is not None:
            require_writable(file)
    from sounding.probe import accepted

    accept = accepted.accepting(select=select, ignore=ignore, baseline=baseline)
    if target is None and input_shape is None:
        input_shape = (EXAMPLE_INPUT,)
    settings = Settings(
        data, input_shape, batch_size, loss, repeats, theory, redraw, device, seed, asked_trial(steps, lr, optimizer)
    )
    prose = console(stderr=as_json, quiet=quiet and as_json)
    trials: dict[str, Trial] = {}
    reports, interrupted = _measure_all(_choose_subjects(target, settings), settings, trials, quiet=quiet)
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


def _choose_subjects(target: str | None, settings: Settings) -> list[Subject]:
    if target is not None:
        from sounding.cli.target import load_target

        return [Subject(target, lambda: load_target(target, data=settings.data, shape=settings.shape), target)]

    def make(norm: Any) -> nn.Module:
        from sounding.models import Mlp

        return Mlp(EXAMPLE_INPUT, 10, depth=EXAMPLE_DEPTH, width=EXAMPLE_WIDTH, norm=norm)

    name, same = f"{EXAMPLE_DEPTH}-layer ReLU network", f"mlp,depth={EXAMPLE_DEPTH},width={EXAMPLE_WIDTH}"
    return [
        Subject(name, lambda: make("none"), same),
        Subject(f"{name} with batch norm", lambda: make("batch"), f"{same},norm=batch"),
    ]


def _measure_all(
    subjects: list[Subject], settings: Settings, trials: dict[str, Trial], *, quiet: bool
) -> tuple[dict[str, Report], bool]:
    """Reports by name, trials put into `trials`, and whether Ctrl-C came; then the last one may be partial."""
    reports: dict[str, Report] = {}
    with working("loading", quiet=quiet) as tell:
        for subject in subjects:
            tell(f"checking {subject.name}")
            try:
                reports[subject.name], trial = measure(subject, settings, tell)
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


def measure(subject: Subject, settings: Settings, tell: Callable[[str], None]) -> tuple[Report, Trial | None]:
    """The report of a network on the batch that the settings ask for, and the trial where they ask for one."""
    import torch

    from sounding.cli.inputs import choose_batch, describe
    from sounding.cli.target import calling
    from sounding.models.hf import describe_hf
    from sounding.probe.check import check as check_network

    device = choose_device(settings.device)
    with torch.random.fork_rng():
        # the command line is the edge: here, and nowhere in the library, a seed is set
        torch.manual_seed(settings.seed)
        generator = torch.Generator().manual_seed(settings.seed)
        model = subject.make()
        if device is not None:
            with calling(f"moving the network to {device}"):
                model = model.to(device)
        loss = choose_loss(settings.loss)
        chosen = choose_batch(
            model,
            data=settings.data,
            shape=settings.shape,
            batch_size=settings.batch_size,
            generator=generator,
            tell=tell,
        )
        batch = chosen.batch
        about = {
            "target": subject.name,
            **({"model": size} if (size := describe_hf(model, subject.name)) else {}),
            "data": f"{batch.name}, {batch.inputs.shape[chosen.axis]} samples of {describe(batch, chosen.axis)}"
            + (", inferred" if chosen.inferred else ""),
            "seed": settings.seed,
        }
        inputs, targets = _repeat(chosen, settings.repeats)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                report = check_network(
                    model,
                    inputs,
                    targets,
                    loss=loss,
                    repeats=settings.repeats,
                    redraw=settings.redraw,
                    batch_axis=chosen.axis or None,
                    theory=settings.theory,
                    generator=generator,
                    progress=lambda done, total: tell(f"checking {subject.name}: {done} of {total} batches"),
                )
        except InterruptedRun as stop:
            if stop.partial is not None:
                stop.partial = _describe(stop.partial, about, subject.target)
            raise
        trial = None
        if settings.trial is not None:
            with contextlib.redirect_stdout(sys.stderr):
                trial = try_training(
                    model, chosen, settings.trial, loss=loss, generator=generator, seed=settings.seed, tell=tell
                )
        return _describe(report, about, subject.target), trial


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


def choose_device(name: str | None) -> torch.device | None:
    """The device of that name, tried; None for None."""
    import torch

    return None if name is None else torch.device(require_device(name))


def choose_loss(name: str | None) -> str | Callable[..., torch.Tensor] | None:
    """A known loss by name, or the function at `file.py:name`."""
    from sounding.cli.target import calling, load_object
    from sounding.probe.losses import LOSSES

    if name is None or name in LOSSES:
        return name
    if ":" not in name:
        raise UsageError(f"unknown loss {name!r}", hint=f"one of {', '.join(LOSSES)}, or file.py:name")
    found = load_object(name)
    if isinstance(found, type):
        with calling(f"making the loss with {name}"):
            found = found()
    if not callable(found):
        raise UsageError(f"expected {name} to be a function of outputs and targets, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _print(reports: dict[str, Report], prose: Console, *, quiet: bool) -> None:
    from sounding.cli.table import print_report, write_verdict

    for index, (name, report) in enumerate(reports.items()):
        if quiet:
            prose.print(f"{name}: " if len(reports) > 1 else "", write_verdict(report), sep="")
            continue
        if index:
            prose.print()
        print_report(report, prose, title=name, legend=index == 0)
