"""Python and the command line take the same options, under the same names and with the same defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click
import pytest

import sounding
from sounding import predict
from sounding.cli import cli
from sounding.start import compare_paths
from sounding.sweeping import Spec
from sounding.theory.prescribe_blocks import prescribe_residual, prescribe_transformer
from sounding.train import Recipe, make_grid, train_together_
from sounding.train.trial import run_trial

SHOWN = {"json", "quiet", "debug", "plot", "html", "out", "summary", "write_baseline"}  # what is printed and written
NETWORK = {"target", "data", "input_shape", "batch_size", "device", "seed"}  # a network and its batch, in words
GIVEN = {"model", "inputs", "targets", "batch_axis", "generator", "progress"}  # a network and its batch, in Python
ZOO = {"zoo", "only", "force", "pages", "cluster", "jobs"}  # an audit of every architecture, which is a command alone

# command → functions, what only Python has, what only the command line has; two names of one thing stand in both
PAIRS: dict[str, tuple[tuple[Callable[..., Any], ...], set[str], set[str]]] = {
    "check": ((sounding.check, run_trial), GIVEN | {"types", "draw"}, NETWORK),
    "audit": ((sounding.audit, compare_paths), {"model", "factory"}, {"target", "compare", "seed"} | ZOO),
    "compare": ((sounding.compare,), GIVEN, NETWORK),
    "repair": (
        (sounding.plan, sounding.recommend),
        GIVEN | {"options", "fresh"},
        NETWORK | {"set", "dry_run", "force"},
    ),
    "depth": ((sounding.depth,), GIVEN, NETWORK - {"device"}),
    "simulate": (
        (sounding.simulate,),
        {"generator", "progress"},
        {"seed", "error", "list_measures", "no_center", "position"},  # the last two are old names
    ),
    "reproduce": ((sounding.reproduce,), {"claim", "progress"}, {"ids", "paper", "all", "jobs", "cluster"}),
    "predict batchnorm": ((predict.batchnorm,), set(), set()),
    "predict kernel": ((predict.kernel,), set(), set()),
    "predict vanilla": ((predict.vanilla,), set(), set()),
    "predict critical": ((predict.critical,), set(), set()),
    "predict residual": ((predict.residual,), set(), set()),
    "predict transformer": ((predict.transformer,), set(), set()),
    "predict gram": (
        (predict.gram,),
        {"gram_matrix", "generator"},
        {"gram", "batch_size", "correlation", "decaying", "seed", "width"},
    ),
    "prescribe batchnorm": ((sounding.prescribe,), set(), set()),
    "prescribe residual": ((prescribe_residual, predict.residual), {"options"}, set()),
    "prescribe transformer": ((prescribe_transformer, predict.transformer), {"options"}, set()),
    "train": (
        (Recipe, train_together_, make_grid),
        # networks are made of words, `generator` is a seed, `vary` a list of values; routes are for benchmarks
        {"networks", "generator", "progress", "settings", "recipe", "route", "group_size", "vary", "options"},
        {"model", "depth", "width", "activation", "norm", "init", "shift", "scale", "residual", "gain_exponent", "set"}
        | {"optimizer_eps", "choose_by", "data_seed", "own_orders", "checkpoint_seconds", "fresh"},
    ),
}


def find(words: str) -> click.Command:
    command: Any = cli
    for word in words.split():
        command = command.get_command(click.Context(cli), word)
    assert isinstance(command, click.Command)
    return command


def names(option: click.Parameter) -> set[str]:
    """What an option may be called; a flag that says no, and an option that is repeated, as Python calls them."""
    spelled = [text.lstrip("-").replace("-", "_") for text in (*option.opts, *option.secondary_opts) if len(text) > 2]
    return {name if name == "no_center" else name.removeprefix("no_") for name in spelled} | (
        {f"{name}s" for name in spelled} if option.multiple else set()
    )


@pytest.mark.parametrize("words", PAIRS)
def test_python_and_command_line_take_the_same_options(words: str) -> None:
    functions, only_python, only_typed = PAIRS[words]
    known = {key: one for function in functions for key, one in inspect.signature(function).parameters.items()}
    typed = {name: option for option in find(words).params for name in names(option) | {option.name or ""}}
    missing = set(known) - set(typed) - only_python
    assert not missing, f"sounding {words} has no option for {missing}"
    for option in find(words).params:
        mine = names(option) or {option.name or ""}
        assert mine & (set(known) | only_typed | SHOWN), f"Python has nothing that is called {mine}"
    unused = (only_python - set(known) - GIVEN) | (only_typed - set(typed) - NETWORK)
    assert not unused, f"exceptions for nothing: {unused}"


@pytest.mark.parametrize("words", [words for words in PAIRS if words.split()[0] in ("predict", "prescribe")])
def test_defaults_are_the_same(words: str) -> None:
    """But for gram's method: from Python a generator alone asks for sampling; the command line always has a seed."""
    functions, _, only_typed = PAIRS[words]
    known = {key: one for function in functions[::-1] for key, one in inspect.signature(function).parameters.items()}
    for option in find(words).params:
        for name in names(option) & set(known) - only_typed:
            default = known[name].default
            if default in (None, False, inspect.Parameter.empty) or (words, name) == ("predict gram", "method"):
                continue
            assert option.default == default, name


def test_the_file_of_a_sweep_has_the_names_of_python() -> None:
    """A file cannot hold a function: it names a verb. The rest says how the sweep is done, and is typed."""
    known = set(inspect.signature(sounding.sweep).parameters)
    typed = {name for option in find("sweep run").params for name in names(option)}
    written = {field.name for field in fields(Spec)}
    assert known - {"function", "progress"} <= written | typed
    assert typed - SHOWN - {"spec"} <= known
