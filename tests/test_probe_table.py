"""The table of some passes: the verdict reads it as it reads the profile that is made of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.test_probe_zoo import prepare
from tests.zoo import ZOO
from torch import Tensor, nn

import sounding
from sounding.probe.calls import named_parameters
from sounding.probe.outputs import tensors_in
from sounding.probe.reading import Reading, read
from sounding.probe.table import Table, collect
from sounding.probe.verdict import judge, judge_reading
from sounding.probe.watch import Watched


def run(model: nn.Module, inputs: Any) -> None:
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    value = sum(t.double().square().sum() for _, t in tensors_in(output) if t.is_floating_point())
    if isinstance(value, Tensor) and value.requires_grad:
        value.backward()


def table_of(watched: Watched, model: nn.Module) -> Table:
    root = watched._root
    assert root is model or root in model.modules()
    return collect(
        watched._passes, named_parameters(root), specs=watched._specs, tier="fast", source="watch", settings={}
    )


def text(reading: Reading) -> str:
    """By text, since NaN differs from NaN; measures in any order."""
    calls = [(replace(call, values={}), sorted(call.values.items())) for call in (reading.input, *reading.calls)]
    return repr((calls, dict(reading.network), dict(reading.predicted), dict(reading.settings)))


def check(table: Table, profile: sounding.Profile) -> None:
    assert text(read(profile)) == text(table.reading())
    assert judge(profile) == judge_reading(table.reading())
    for measure in profile.measures:
        assert measure in table
        assert repr(table.profile({measure}).rows) == repr(profile.select(measure).rows)
    assert "no measure" not in table


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", [key for key, animal in ZOO.items() if not animal.options])
def test_a_table_reads_like_its_profile(name: str, passes: int) -> None:
    model, inputs, _ = prepare(ZOO[name])
    if "checkpointed" in name:
        inputs.requires_grad_()
    with sounding.watch(model) as watched:
        for _ in range(passes):
            run(model, inputs)
    table = table_of(watched, model)
    assert repr(table.profile().rows) == repr(watched.profile.rows)
    check(table, watched.profile)


@pytest.mark.parametrize("only", ["0", "1", "2", "[24]", "*"])
def test_hidden_calls_and_broken_ones(only: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 2))
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    with sounding.watch(model, only=only) as watched:
        run(model, torch.randn(8, 6))
    check(table_of(watched, model), watched.profile)


def test_nothing_was_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with sounding.watch(model) as watched:
        pass
    check(table_of(watched, model), watched.profile)
