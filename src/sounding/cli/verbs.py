"""Verbs of the command line as functions of options, for sweeps: what `--json` prints, as rows of a table."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from sounding.errors import ExitCode, UsageError
from sounding.sweeping.spec import SEED, Spec

VERBS = ("predict", "prescribe", "simulate", "train", "check")
# written or printed elsewhere
OURS = {"json", "quiet", "plot", "out", "html", "summary", "write_baseline", "checkpoint", "fresh", "debug", "help"}
STACKED = ("lr", SEED, "init", "eps", "shift", "scale", "residual")  # what runs of one stack of `train` differ in
# what a result holds beside what was found; the table of a sweep has no columns for it
CIRCUMSTANCES = ("settings", "environment", "profile", "method")
RATE = {"lr": "learning_rate"}  # as a history calls it


def prepare(spec: Spec) -> Spec:
    """The sweep with all that a verb adds to it; UsageError where a task would not be understood.

    Every value of the grid is read by the verb's own parser once, so that a typing error is found before the work.
    """
    if ":" in spec.verb:
        return spec
    if spec.verb == "train" and not spec.stack:
        spec = dataclasses.replace(spec, stack=tuple(name for name in spec.axes if name in STACKED))
    elif spec.stack:
        if spec.verb != "train":
            told = f"only runs of train stack (train together in one process), got {spec.verb!r}"
            raise UsageError(told, hint="no stack")
        wrong = [name for name in spec.stack if name not in STACKED]
        if wrong:
            raise UsageError(f"runs that differ in {wrong[0]!r} do not stack", hint=f"of {', '.join(STACKED)}")
    first = {name: values[0] for name, values in spec.axes.items()}
    for name, values in {"": [None], **spec.axes}.items():
        for value in values:
            options = {**spec.options, **first, **({name: value} if name else {})}
            command = _find(spec.verb)
            given = _defaults(command, spec.verb, options)
            with _told(spec.verb), command.make_context(f"sounding {spec.verb}", [], default_map=given):
                pass
    for line in spec.parts()[1:]:
        prepare(line)
    return spec


def run_verb(verb: str, options: Mapping[str, Any], stack: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows that a verb gives: one, or for a stack of trainings one for each run."""
    printed = io.StringIO()
    command = _find(verb)
    with tempfile.TemporaryDirectory() as scratch:
        given = _defaults(command, verb, options)
        if verb == "train":
            given["checkpoint"] = str(Path(scratch) / "run")  # two tasks of the same options must not share one
        # remarks of a task would come from many tasks at once
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()), _told(verb):
            code = command.main(["--json"], prog_name=f"sounding {verb}", standalone_mode=False, default_map=given)
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt  # what was printed is a part of the result
    found = json.loads(printed.getvalue())
    return _runs(found, options, stack) if verb == "train" else [_results(found)]


def _find(verb: str) -> click.Command:
    from sounding.cli import load_command

    name, *rest = verb.split()
    hint = f"one of {', '.join(VERBS)}, or module:function"
    if name in VERBS:
        command = load_command(name)
        if not isinstance(command, click.Group) and not rest:
            return command
        below = command.commands if isinstance(command, click.Group) else {}
        part = " ".join(rest) or getattr(command, "default", "")
        if part in below:
            return below[part]
        hint = f"one of {', '.join(f'{name} {known}' for known in below)}" if below else name
    raise UsageError(f"no verb {verb!r} that a sweep can run", hint=hint)


@contextlib.contextmanager
def _told(verb: str) -> Any:
    try:
        yield
    except click.ClickException as error:
        raise UsageError(f"{verb}: {error.format_message()}") from error


def _defaults(command: click.Command, verb: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options under the names by which click knows them; lists with commas, or repeated, as they are typed."""
    known = {text.lstrip("-").replace("-", "_"): option for option in command.params for text in option.opts}
    found: dict[str, Any] = {}
    for name, value in options.items():
        values = [str(part) for part in value] if isinstance(value, list) else [str(value)]
        if verb == "train" and name == SEED:
            found["seeds"] = f"{','.join(values)},"  # the comma: these seeds, not so many
            continue
        option = known.get(name)
        if option is None or option.name is None or name in OURS:
            names = sorted(one for one in set(known) - OURS if len(one) > 1)
            raise UsageError(f"{verb} has no option {name!r} in a sweep", hint=f"one of {', '.join(names)}")
        several = option.nargs != 1 or option.multiple
        flag = isinstance(option, click.Option) and option.is_flag
        found[option.name] = bool(value) if flag else values if several else ",".join(values)
    return found


def _runs(found: Mapping[str, Any], options: Mapping[str, Any], stack: Sequence[str]) -> list[dict[str, Any]]:
    """The last point of every run of a training, in the order of the stack's axes."""
    points = {point[0]: dict(zip(found["columns"], point, strict=True)) for point in found["curves"]}
    rows = []
    for values in itertools.product(*(options[name] for name in stack)):
        wanted = {RATE.get(name, name): value for name, value in zip(stack, values, strict=True)}
        run = next(index for index, entry in enumerate(found["settings"])
                   if all(entry.get(name, value) == value for name, value in wanted.items()))  # fmt: skip
        point = {name: value for name, value in points[run].items() if name != "run"}
        rows.append({**point, "diverged": found["diverged"][run]})
    return rows


def _results(found: Any) -> Any:
    """What came out, without times, which differ from run to run, and without what only says how it was run."""
    if not isinstance(found, Mapping):
        return found
    kept = {name: value for name, value in found.items() if not name.endswith(("seconds", "per_second"))}
    return {name: _results(value) for name, value in kept.items() if name not in CIRCUMSTANCES}
