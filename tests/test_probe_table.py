"""The records of some passes: the verdict judges them as it judges the profile that is made of them."""

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
from sounding.probe.table import collect
from sounding.probe.verdict import judge, judge_reading
from sounding.probe.watch import Watched


def run(model: nn.Module, inputs: Any) -> None:
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    value = sum(t.double().square().sum() for _, t in tensors_in(output) if t.is_floating_point())
    if isinstance(value, Tensor) and value.requires_grad:
        value.backward()


def records_of(watched: Watched, model: nn.Module) -> Reading:
    root = watched._tap.root
    assert root is model or root in model.modules()
    return collect(
        watched._tap.passes, named_parameters(root), specs=watched._tap.specs, tier="fast", source="watch", settings={}
    )


def text(reading: Reading) -> str:
    """By text, since NaN differs from NaN; measures in any order, without shapes, which a profile does not hold."""
    calls = []
    for call in (reading.input, *reading.layers):
        name = call.name if call.values else ""  # a profile names calls by their measures
        errors = {key: value for key, value in call.errors.items() if value is not None}
        plain = replace(call, name=name, values={}, errors={}, shape=(), weights=())
        calls.append((plain, sorted(call.values.items()), sorted(errors.items()), list(call.weights)))
    return repr((calls, dict(reading.network), dict(reading.predicted)))


def check(reading: Reading, profile: sounding.Profile) -> None:
    again = read(profile)
    assert text(again) == text(reading)
    assert judge(profile) == judge_reading(reading)
    assert again.profile().to_json() == profile.to_json()
    for measure in profile.measures:
        assert measure in reading
        assert repr(reading.profile({measure}).rows) == repr(profile.select(measure).rows)
    assert "no measure" not in reading


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", [key for key, animal in ZOO.items() if not animal.options])
def test_records_and_their_profile_say_one_thing(name: str, passes: int) -> None:
    model, inputs, _ = prepare(ZOO[name])
    if "checkpointed" in name:
        inputs.requires_grad_()
    with sounding.watch(model) as watched:
        for _ in range(passes):
            run(model, inputs)
    reading = records_of(watched, model)
    assert repr(reading.profile().rows) == repr(watched.profile.rows)
    check(reading, watched.profile)


@pytest.mark.parametrize("only", ["0", "1", "2", "[24]", "*"])
def test_hidden_calls_and_broken_ones(only: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 2))
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    with sounding.watch(model, only=only) as watched:
        run(model, torch.randn(8, 6))
    check(records_of(watched, model), watched.profile)


def test_nothing_was_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with sounding.watch(model) as watched:
        pass
    check(records_of(watched, model), watched.profile)
