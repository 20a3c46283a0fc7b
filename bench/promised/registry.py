"""What a fault is, and the list into which the files of faults write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from bench.promised.bodies import Inputs, Loss
from torch import Tensor, nn

Edit = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """One mistake in one network.

    kinds: the findings that name the mistake rightly, the one that was aimed at first; place: the name with which the
    faulty modules begin ("" where it lies in the batch, the loss or the whole network); judge: what the trained network
    is judged on, "clean" batches of the task, its "own" batches, or "prefix", where it does not see what it predicts.
    """

    body: str
    kinds: tuple[str, ...]
    place: str
    text: str
    model: Edit | None = None
    batch: Edit | None = None
    loss: Loss | None = None
    optimizer: Edit | None = None
    size: int | None = None
    judge: str = "clean"
    by_nature: str | None = None
    promised: bool = True


FAULTS: dict[str, Fault] = {}


def fault(name: str, body: str, kinds: str, place: str, edits: str = "model", **more: Any) -> Edit:
    """Register the function below as the change of the model (or of the batch, or as the optimizer).

    Its docstring is the sentence that says what was done.
    """

    def keep(function: Edit) -> Edit:
        add(name, body, kinds, place, " ".join((function.__doc__ or "").split()), **{edits: function}, **more)
        return function

    return keep


def add(name: str, body: str, kinds: str, place: str, text: str, **more: Any) -> None:
    if name in FAULTS:
        raise ValueError(f"two faults are called {name}")
    FAULTS[name] = Fault(body, tuple(kinds.split()), place, text, **more)


def become(modules: nn.Module | Iterable[nn.Module], kind: type[nn.Module]) -> None:
    """Let modules run the code of another class with the parameters that they have."""
    many = isinstance(modules, nn.ModuleList | nn.Sequential) or not isinstance(modules, nn.Module)
    for module in list(modules) if many else [modules]:
        module.__class__ = kind


def within(model: nn.Module, *kinds: type[nn.Module]) -> list[nn.Module]:
    """All modules of these classes, in order."""
    return [module for module in model.modules() if isinstance(module, kinds)]


def change_inputs(function: Callable[[Tensor], Tensor]) -> Callable[[Inputs, Tensor], tuple[Inputs, Tensor]]:
    """A change of a batch that touches the inputs only."""

    def change(inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor]:
        assert isinstance(inputs, Tensor)
        return function(inputs), targets

    return change


def recycled(parameter: Tensor, seed: int = 0) -> None:
    """Fill a parameter as `torch.empty` does where memory was used before: with addresses and small whole numbers.

    Written by hand, so that the same network comes out in every run.
    """
    g = torch.Generator().manual_seed(seed)
    size = parameter.numel()
    low = torch.randint(-(2**31), 2**31, (size,), generator=g)
    words = torch.where(torch.arange(size) % 2 == 0, low & ~0xF, torch.tensor(0x7F3A))
    counts = torch.where(torch.arange(size) % 2 == 0, torch.randint(0, 4096, (size,), generator=g), 0)
    first_half = torch.arange(size) < size // 2
    bits = torch.where(first_half, words, counts).to(torch.int32)
    parameter.data.copy_(bits.view(torch.float32).view_as(parameter))


def through_meta(cls: type[nn.Module]) -> nn.Module:
    """What a loader makes that builds on the meta device and then only calls `reset_parameters`."""
    with torch.device("meta"):
        model = cls()
    model.to_empty(device="cpu")
    for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
        recycled(tensor, number)  # what to_empty gives is whatever lay in memory
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def lines(rows: Mapping[str, Any]) -> str:
    """JSON with one line for each name."""
    return (
        "{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(row, allow_nan=False)}" for name, row in rows.items())
        + "\n}"
    )
