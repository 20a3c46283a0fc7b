"""The remedies that a finding names, taken one by one: each must work on the network it is named for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sounding
from sounding.probe.findings.remedies import METHODS as COMMAND


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def perceptron(*, norm: bool = False, layers: int = 8, width: int = 32) -> nn.Sequential:
    """A network by He's law, with or without batch norm."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        linear = nn.Linear(width, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        parts += [linear, *([nn.BatchNorm1d(width)] if norm else []), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    for part in model.layers:
        for parameter in part.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
    return model


def linears(model: nn.Module) -> list[nn.Linear]:
    return [part for part in model.modules() if isinstance(part, nn.Linear)]


def multiply(weights: list[Tensor], factor: float) -> None:
    for weight in weights:
        weight.data.mul_(factor)


# name → a network of that kind, and what spoils it
FAULTS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "NaN in a weight": (perceptron, lambda m: m[6].weight.data[0, :3].fill_(math.nan)),
    "NaN in a bias": (perceptron, lambda m: m[6].bias.data.fill_(math.nan)),
    "a constant weight": (perceptron, lambda m: m[6].weight.data.fill_(0.1)),
    "a weight of zero": (perceptron, lambda m: m[6].weight.data.zero_()),
    "a weight of zero before a batch norm": (lambda: perceptron(norm=True), lambda m: m[6].weight.data.zero_()),
    "a large weight": (perceptron, lambda m: m[6].weight.data.mul_(100)),
    "a large bias": (perceptron, lambda m: m[6].bias.data.fill_(100)),
    "all weights sixfold": (perceptron, lambda m: multiply([one.weight for one in linears(m)], 6)),
    "queries and keys times 40 in every layer": (
        encoder, lambda m: multiply([layer.self_attn.in_proj_weight[:64] for layer in m.layers], 40)
    ),
    "NaN in a weight of an encoder": (encoder, lambda m: m.layers[1].linear1.weight.data.fill_(math.nan)),
    "one weight of an encoder of zero": (encoder, lambda m: m.layers[1].linear1.weight.data.zero_()),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_repair_that_a_finding_names_cures_it(fault: str) -> None:
    make, spoil = FAULTS[fault]
    model = make()
    spoil(model)
    inputs = torch.randn(128, *((6,) if make is encoder else ()), 32, generator=draw())
    targets = None if make is encoder else torch.arange(128) % 10
    report = sounding.check(model, inputs, targets, generator=draw())
    named = [(one, found.group(1)) for one in report.verdict.findings for text in one.remedies
             if (found := COMMAND.search(text))]  # fmt: skip
    assert named
    for finding, method in named:
        evidence = sounding.plan(model, inputs, targets, method=method, generator=draw()).evidence
        assert finding.kind in {one.kind for one in evidence.cured}, (finding.kind, method)


def test_the_loss_of_outputs_that_are_no_numbers_is_not_called_one_without_log_softmax() -> None:
    model = perceptron()
    model[6].weight.data.fill_(math.nan)
    report = sounding.check(model, torch.randn(64, 32, generator=draw()), torch.arange(64) % 10)
    assert {finding.kind for finding in report.verdict.findings} == {"non_finite", "parameter_not_finite"}
