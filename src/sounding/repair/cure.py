"""The one shape of a cure: a generator that changes a model and tells each step, run wholly or not at all."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec

import torch
from torch import nn

from sounding.repair.changes import Change, Changes, Untouched
from sounding.repair.snapshot import all_or_nothing

P = ParamSpec("P")
# What a cure yields: what it changed, what it left alone, a sentence worth saying, or the options that it chose itself.
Steps = Iterator[Change | Untouched | str | Mapping[str, Any]]


def cure(steps: Callable[Concatenate[nn.Module, P], Steps]) -> Callable[Concatenate[nn.Module, P], Changes]:
    """The function that runs these steps on a model and returns what they told; where one raises, nothing changes."""
    method = steps.__name__.removesuffix("_")

    @functools.wraps(steps)
    def run(model: nn.Module, *args: P.args, **options: P.kwargs) -> Changes:
        with all_or_nothing(model), torch.no_grad():
            told = list(steps(model, *args, **options))
        return Changes(
            method,
            tuple(one for one in told if isinstance(one, Change)),
            tuple(one for one in told if isinstance(one, Untouched)),
            tuple(one for one in told if isinstance(one, str)),
            {key: value for one in told if isinstance(one, Mapping) for key, value in one.items()},
        )

    run.__signature__ = inspect.signature(steps).replace(return_annotation="Changes")  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]  # the model may be given by its name, too


def on_copy(cure: Callable[Concatenate[nn.Module, P], Changes]) -> Callable[Concatenate[nn.Module, P], nn.Module]:
    """The cure as a function that changes and returns a copy of the model, and leaves the model alone."""

    @functools.wraps(cure)
    def cured(model: nn.Module, *args: P.args, **options: P.kwargs) -> nn.Module:
        changed = copy.deepcopy(model)
        cure(changed, *args, **options)
        return changed

    cured.__name__ = cure.__name__.removesuffix("_")
    cured.__doc__ = f"A changed copy of the model; see `{cure.__name__}`.\n\n{cure.__doc__}"
    return cured  # type: ignore[return-value]  # the model may be given by its name, too
