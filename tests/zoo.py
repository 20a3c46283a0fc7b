"""A zoo of awkward modules: each with inputs, targets, and the calls a check must show for it, in execution order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.zoo_modules import (
    Answer,
    Around,
    Attention,
    Autocast,
    Bare,
    Boxed,
    Checkpointed,
    CheckpointedTwice,
    Complex,
    FrozenTrunk,
    InPlace,
    Keywords,
    Losing,
    Pair,
    Positions,
    Recurrent,
    Residual,
    Reused,
    Shared,
    Slices,
    Stateful,
    Stepwise,
    Tied,
    TimeFirst,
    WithHollow,
    compiled,
    frozen,
    frozen_embedding,
    normed,
    scripted,
    transformer,
)
from torch import Tensor, nn

SAMPLES = 8


@dataclass(frozen=True)
class Animal:
    """One awkward module.

    Args:
        build: makes the module.
        names: the calls of the profile, in execution order.
        inputs: makes what `sounding.check` takes.
        targets: makes the targets, None for none.
        options: further arguments of the check.
        unmeasured: names that must be listed as not measured, with a word of the reason.
        gradients: names of calls that have no gradient.
    """

    build: Callable[[], nn.Module]
    names: tuple[str, ...]
    inputs: Callable[[], Any] = lambda: torch.randn(SAMPLES, 6)
    targets: Callable[[], Any] = lambda: None
    options: dict[str, Any] = field(default_factory=dict)
    unmeasured: tuple[tuple[str, str], ...] = ()
    no_gradient: tuple[str, ...] = ()


def classes() -> Tensor:
    return torch.randint(0, 3, (SAMPLES,))


def tokens() -> Tensor:
    return torch.randint(0, 11, (SAMPLES, 5))


def images() -> Tensor:
    return torch.randn(SAMPLES, 3, 8, 8)


def sequences() -> Tensor:
    return torch.randn(SAMPLES, 5, 4)


LAYER = ("self_attn", "dropout1", "norm1", "linear1", "dropout", "linear2", "dropout2", "norm2")
ENCODER = tuple(f"layers.{index}.{name}" for index in range(2) for name in LAYER)
MORE = "more than one tensor"

ZOO: dict[str, Animal] = {
    "plain": Animal(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
        ("0", "1", "2", "3"),
        targets=classes,
    ),
    "single leaf": Animal(lambda: nn.Linear(6, 3), ("model",), unmeasured=(("network", "growth"),)),
    "reused": Animal(Reused, ("linear", "act", "linear#2", "act#2", "linear#3", "act#3")),
    "shared under two names": Animal(Shared, ("first", "first#2", "head")),
    "tied weights": Animal(Tied, ("embedding", "body", "head"), tokens, tokens),
    "frozen": Animal(frozen, ("0", "1", "2", "3"), targets=classes, unmeasured=(("0.weight", "frozen"),)),
    "frozen embedding": Animal(frozen_embedding, ("0", "1", "2", "3"), tokens, unmeasured=(("0.weight", "frozen"),)),
    "dict output": Animal(lambda: Boxed(lambda h, y: {"hidden": h, "logits": y}), ("body", "head"), targets=classes),
    "tuple output": Animal(lambda: Boxed(lambda h, y: (y, [h])), ("body", "head"), targets=classes),
    "dataclass output": Animal(lambda: Boxed(Answer), ("body", "head"), targets=classes),
    "named tuple output": Animal(lambda: Boxed(lambda h, y: Pair(y, h)), ("body", "head"), targets=classes),
    "own loss": Animal(Losing, ("linear",), lambda: {"x": torch.randn(SAMPLES, 6), "labels": classes()}),
    "embedding bag": Animal(lambda: nn.Sequential(nn.EmbeddingBag(11, 6), nn.Linear(6, 3)), ("0", "1"), tokens),
    "in place": Animal(InPlace, ("start", "a", "norm", "relu", "b", "leaky")),
    "checkpointed": Animal(
        lambda: Checkpointed(reentrant=False), ("one.0", "one.1", "two.0", "two.1", "two.2", "head"), targets=classes
    ),
    "checkpointed, reentrant": Animal(
        lambda: Checkpointed(reentrant=True), ("one.0", "one.1", "two.0", "two.1", "two.2", "head"), targets=classes
    ),
    "checkpointed, shared": Animal(
        CheckpointedTwice, ("block.0", "block.1", "block.0#2", "block.1#2", "head"), targets=classes
    ),
    "autocast inside": Animal(Autocast, ("body.0", "body.1", "head"), targets=classes),
    "bfloat16": Animal(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 3)).bfloat16(),
        ("0", "1", "2", "3"),
        lambda: torch.randn(SAMPLES, 6).bfloat16(),
        classes,
    ),
    "float64": Animal(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 3)).double(),
        ("0", "1", "2"),
        lambda: torch.randn(SAMPLES, 6).double(),
        lambda: torch.randn(SAMPLES, 3).double(),
    ),
    "complex inside": Animal(Complex, ("head",), unmeasured=(("fourier", "complex"),)),
    "compiled inside": Animal(compiled, ("0", "1.0", "1.1")),
    "parameterless": Animal(lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), ("0", "1")),
    "empty": Animal(nn.Sequential, ("model",)),
    "identity and dropout": Animal(
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Identity(), nn.Dropout(0.5), nn.Linear(4, 3)), ("0", "1", "2", "3")
    ),
    "lstm": Animal(lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.5), ("rnn", "head"), sequences, classes,
                   unmeasured=(("rnn", MORE),)),
    "gru, bidirectional root": Animal(
        lambda: nn.GRU(4, 5, bidirectional=True), ("model",), lambda: torch.randn(7, SAMPLES, 4),
        unmeasured=(("model", MORE),),
    ),
    "time first inside": Animal(TimeFirst, ("rnn", "head"), lambda: torch.randn(SAMPLES, SAMPLES, 4), classes,
                                unmeasured=(("rnn", MORE),)),
    "cell by cell": Animal(Stepwise, ("cell", *(f"cell#{k}" for k in range(2, 6))), sequences,
                           unmeasured=(("cell", MORE),)),
    "attention": Animal(Attention, ("attention", "head"), lambda: torch.randn(SAMPLES, 5, 8),
                        unmeasured=(("attention", MORE),)),
    "transformer": Animal(lambda: transformer(batch_first=True), ENCODER, lambda: torch.randn(SAMPLES, 5, 8)),
    "transformer, time first": Animal(transformer, ENCODER, lambda: torch.randn(5, SAMPLES, 8)),
    "transformer, eval": Animal(
        lambda: transformer(batch_first=True).requires_grad_(False), ENCODER, lambda: torch.randn(SAMPLES, 5, 8),
        options={"mode": "eval"}, unmeasured=(("layers.0.linear1.weight", "frozen"),),
    ),
    "scripted": Animal(
        lambda: nn.Sequential(nn.Linear(6, 6), scripted(nn.Sequential(nn.Linear(6, 6), nn.ReLU())), nn.Linear(6, 3)),
        ("0", "1", "2"), unmeasured=(("1", "scripted"),),
    ),
    "own parameters": Animal(Bare, ("child", "model")),
    "own parameters around": Animal(Around, ("head",)),
    "returns none": Animal(WithHollow, ("linear",), unmeasured=(("spy", "NoneType"), ("idle", "never called"))),
    "lazy": Animal(lambda: nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3)),
                   ("0", "1", "2", "3"), targets=classes),
    "no_grad inside": Animal(lambda: FrozenTrunk(torch.no_grad), ("trunk", "head"),
                             unmeasured=(("trunk", "does not ask for a gradient"),), no_gradient=("trunk",)),
    "inference mode inside": Animal(lambda: FrozenTrunk(torch.inference_mode), ("trunk", "head"),
                                    unmeasured=(("trunk", "does not ask for a gradient"),), no_gradient=("trunk",)),
    "views": Animal(
        Slices,
        ("body", "part", "head"),
        unmeasured=(("part", "view changed in place"),),
        no_gradient=("part",),
    ),
    "keyword inputs": Animal(Keywords, ("left", "right"),
                             lambda: {"left": torch.randn(SAMPLES, 6), "right": torch.randn(SAMPLES, 3)}),
    "positions without batch": Animal(Positions, ("tokens", "places", "head"), tokens,
                                      unmeasured=(("places", "no axis of the batch size"),)),
    "convolutions": Animal(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64, 3),
        ),
        ("0", "1", "2", "3", "4", "5"), images, classes,
    ),
    "channels last": Animal(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).to(
            memory_format=torch.channels_last
        ),
        ("0", "1", "2", "3", "4"), lambda: images().to(memory_format=torch.channels_last), classes,
    ),
    "one-dimensional convolutions": Animal(
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)),
        ("0", "1", "2", "3", "4"), lambda: torch.randn(SAMPLES, 4, 5), classes,
    ),
    "residual": Animal(lambda: nn.Sequential(*(Residual() for _ in range(3))),
                       tuple(f"{i}.f.{j}" for i in range(3) for j in range(3))),
    "weight norm": Animal(lambda: normed(nn.utils.parametrizations.weight_norm), ("0", "1", "2", "3")),
    "spectral norm": Animal(lambda: normed(nn.utils.parametrizations.spectral_norm), ("0", "1", "2", "3")),
    "stateful": Animal(Stateful, ("linear",)),
    "saturated": Animal(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Hardtanh(), nn.ReLU6()), tuple("0123")),
}  # fmt: skip
