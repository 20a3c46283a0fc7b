"""What the monitor measures, when, and what it says: schedules, filters, findings, limits, bad options."""

from __future__ import annotations

import copy
import gc
import logging
import math
import tracemalloc
from typing import Any

import pytest
import torch
from tests.test_monitor import batch, hooks_on, network, train
from torch import nn
from torch.nn.functional import cross_entropy

import sounding
from sounding.errors import UsageError
from sounding.probe.reading import LayerCall, Reading
from sounding.probe.records import Finding, Severity
from sounding.train.monitor import Event, Logarithmic, Monitor
from sounding.train.monitor.changes import Changes


def test_filters_by_name_and_class() -> None:
    model = network()
    shown = []
    for options in (
        {"include": nn.Linear, "exclude": "6"},
        {"include": ["0", "1"]},
        {"include": ("2", nn.ReLU), "exclude": ["5"]},
        {"exclude": [nn.Linear]},
    ):
        with Monitor(model, **options) as monitor:  # type: ignore[arg-type]
            train(model, monitor, 1)
        shown.append([row.name for row in monitor.profile.select("mean_square") if row.layer])
    assert shown == [["0", "2", "4"], ["0", "1"], ["1", "2", "3"], ["1", "3", "5"]]


def test_measures_by_tier_and_by_name() -> None:
    model = network()
    found = {}
    for measures in ("fast", "full", ("numerical_rank", "gradient_growth"), "mean_cosine"):
        with Monitor(model, measures=measures) as monitor:
            train(model, monitor, 1)
        found[measures] = monitor.profile.measures
    assert "numerical_rank" not in found["fast"]
    assert {"numerical_rank", "mean_cosine"} <= set(found["full"])
    assert set(found["numerical_rank", "gradient_growth"]) == {"numerical_rank", "gradient_growth"}
    assert found["mean_cosine"] == ("mean_cosine",)


def test_schedules() -> None:
    steps = range(1000)
    assert [s for s in steps if Logarithmic(1)(s)] == [0, 1, 10, 100]
    ten = [s for s in steps if Logarithmic()(s)]
    assert ten[:6] == [0, 1, 2, 3, 4, 5]
    assert all(s in ten for s in (1, 10, 100))
    assert len([s for s in ten if 10 <= s < 100]) == 10
    model = network()
    for schedule, expected in (
        ("log", [0, 1, 2, 3, 4, 5, 6]),
        ((1, 5), [1, 5]),
        (lambda step: step % 3 == 2, [2, 5]),
        ({4}, [4]),
    ):
        with Monitor(model, schedule=schedule) as monitor:  # type: ignore[arg-type]
            train(model, monitor, 7)
        assert list(monitor.profiles) == expected


def test_findings_appear_change_and_go(caplog: pytest.LogCaptureFixture) -> None:
    """Twenty layers of rank one at step 2 collapse the network; restored, the finding goes. Both are told at once."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(40):
        layers += [nn.Linear(32, 32, bias=False), nn.Tanh()]
        nn.init.orthogonal_(layers[-2].weight)  # type: ignore[arg-type]
    model = nn.Sequential(*layers)
    inputs = torch.randn(64, 32) * 0.05
    kept = copy.deepcopy(model.state_dict())
    told: list[Event] = []
    with caplog.at_level(logging.INFO, "sounding.monitor"), Monitor(model, every=1, on_finding=told.append) as monitor:
        for step in range(7):
            if step == 2:
                with torch.no_grad():
                    for layer in layers[20::2]:
                        layer.weight.copy_(torch.ones(32, 32) / 32 + 0.01 * layer.weight)
            if step == 4:
                model.load_state_dict(kept)
            model.zero_grad()
            model(inputs).square().sum().backward()
            monitor.step()
    assert tuple(told) == monitor.findings
    collapse = [event for event in told if event.kind == "rank_collapse"]
    assert [(event.step, event.change) for event in collapse] == [(2, "appeared"), (6, "gone")]
    assert collapse[0].depth is not None
    assert collapse[0].depth > 19
    assert f"at layer {collapse[0].depth} ('{collapse[0].layer}'), step 2" in str(collapse[0])
    assert str(collapse[0]).startswith("rank fell below")
    messages = [record.message for record in caplog.records]
    assert messages == [event.text for event in told]
    levels = {record.message: record.levelno for record in caplog.records}
    assert [levels[event.text] for event in collapse] == [logging.WARNING, logging.INFO]
    assert monitor.report.verdict.healthy


def test_what_a_nan_hides_is_not_gone() -> None:
    """A collapsed network that breaks has not recovered; when it is mended, everything is told again."""
    model = network(depth=40, width=32)
    inputs, targets = batch(width=32)
    bias = model[2].bias
    with Monitor(model, every=1) as monitor:
        for step in range(5):
            with torch.no_grad():
                bias.fill_(math.nan if step == 1 else 0.0)
            model.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            monitor.step()
    told = [(event.step, event.kind, event.change) for event in monitor.findings]
    assert (0, "rank_collapse", "appeared") in told
    assert [item for item in told if item[0] > 0] == [(1, "non_finite", "appeared"), (4, "non_finite", "gone")]


def test_limits_of_your_own() -> None:
    """ "participation ratio fell below 2 at layer 3": told once per layer that crosses, and when none is left."""
    model = network(width=32)
    inputs, _ = batch(width=32)
    weight = model[2].weight
    kept = weight.detach().clone()
    with Monitor(model, every=1, include=["0", "1", "2"], limits={"participation_ratio": (2, None)}) as monitor:
        for step in range(6):
            with torch.no_grad():
                weight.copy_(torch.ones_like(kept) if step in (1, 2) else kept)
            model(inputs).square().sum().backward()
            monitor.step()
    told = [event for event in monitor.findings if event.kind == "participation_ratio"]
    assert [(event.step, event.change) for event in told] == [(1, "appeared"), (5, "gone")]
    assert str(told[0]) == "participation ratio fell below 2 at layer 3 ('2'), step 1"
    assert told[0].evidence["value"] < 2


def test_on_finding_may_end_the_loop() -> None:
    class Stop(Exception):
        pass

    def stop(event: Event) -> None:
        raise Stop(event.text)

    model = network()
    with pytest.raises(Stop), Monitor(model, limits={"mean_square": (None, 0.0)}, on_finding=stop) as monitor:
        train(model, monitor, 1)
    assert hooks_on(model) == 0
    assert monitor.steps == 1


def test_nothing_seen_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with Monitor(network(), every=1) as monitor:
        for _ in range(3):
            monitor.step()
    assert [record.message for record in caplog.records] == [
        "step 0: no forward pass of the model was seen, so nothing was measured"
    ]
    with pytest.raises(UsageError, match="none so far"):
        _ = monitor.report


def test_gradients_are_a_measurement_of_the_reported_step(tmp_path: Any) -> None:
    """`report` is a Report like any other: it becomes a page."""
    model = network()
    with Monitor(model) as monitor:
        train(model, monitor, 1)
    page = tmp_path / "page.html"
    sounding.write_html(monitor.report, page)
    assert page.stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every"),
        ({"every": True}, "every"),
        ({"schedule": "weekly"}, "schedule"),
        ({"every": 3, "schedule": [1]}, "every= or schedule="),
        ({"schedule": [1.5]}, "schedule"),
        ({"schedule": 7}, "schedule"),
        ({"measures": "rank"}, "measures"),
        ({"measures": []}, "measures"),
        ({"measures": 3}, "measures"),
        ({"include": 3}, "include"),
        ({"include": "nowhere"}, "no module"),
        ({"exclude": nn.Module}, "no module"),
        ({"exclude": [dict]}, "exclude"),
        ({"samples": 1}, "samples"),
        ({"optimizer": "adam"}, "Optimizer"),
        ({"scaler": 1024}, "GradScaler"),
        ({"sinks": [3]}, "sinks"),
        ({"keep": 1}, "keep"),
        ({"limits": {"participation_ratio": 2}}, "limits"),
        ({"limits": {"rank": (2, None)}}, "limits"),
    ],
)
def test_bad_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Monitor(network(), **options)


def test_a_model_is_expected() -> None:
    with pytest.raises(UsageError, match="Module"):
        Monitor("model")  # type: ignore[arg-type]


def test_start_and_stop_continue_where_they_left_off() -> None:
    model = network()
    monitor = Monitor(model, every=2, initial_step=10)
    for _ in range(2):
        monitor.start()
        train(model, monitor, 3)
        monitor.stop()
        monitor.stop()
    assert list(monitor.profiles) == [10, 12, 14]
    assert monitor.steps == 16
    with pytest.raises(UsageError, match="started twice"):
        monitor.start().start()
    monitor.stop()
    assert hooks_on(model) == 0


def test_memory_stands_still() -> None:
    """Every step measured: what is held after 128 of them is what was held after 32."""
    model = network(depth=1, width=4)
    inputs, targets = batch(8, 4)
    sizes = []
    with Monitor(model, every=1, keep=8) as monitor:
        tracemalloc.start()
        for step in range(128):
            model.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            monitor.step()
            if step in (31, 63, 127):  # the eight places are all taken
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert len(monitor.profiles) <= 9
    per_step = (sizes[2] - sizes[0]) / 96
    assert per_step < 200, sizes  # bytes; one number of a profile takes as much


def test_a_layer_that_breaks_is_named() -> None:
    """One layer of the wrong scale among others that keep the gradient: it is the place, and its factor the size."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64, bias=False) for _ in range(12)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    model = nn.Sequential(*layers)
    with Monitor(model, every=1) as monitor:
        for step in range(2):
            if step:
                layers[7].weight.data.mul_(1e5)
            (model(torch.randn(32, 64)) * torch.randn(32, 64)).mean().backward()
            monitor.step()
    (event,) = [event for event in monitor.findings if event.kind.startswith("gradient_e")]
    assert event.text.startswith("gradients jump by ×")
    assert event.text.endswith(" (squared norm) at layer 8 ('7'), step 1")


def test_no_rank_is_said_to_fall_below_one() -> None:
    """Behind shortcuts a layer is collapsed with a share of 1e-4 left, and a rank of 1.0002 would be told as 1."""
    for line, words in (
        (0.1, "rank is below 1.23"),
        (1e-4, "rank is 1 within 0.0002"),
        (1e-17, "rank is 1 within 2e-17"),
    ):
        rank = Finding("rank_collapse", "high", "a", 3, {"line": line}, "", "rank2020", ())
        (event,) = Changes().since(0, [rank], Reading(LayerCall(0, "input", {}), (), {}, {}))
        assert event.text.startswith(words)
        assert "below 1 " not in event.text


def test_a_severity_eases_only_with_its_numbers() -> None:
    """A line between 27.7 and 27.6 does not ease what has not become better; half of it does."""

    def collapse(severity: Severity, std: float) -> Finding:
        return Finding("entropy_collapse", severity, "attn", 3, {"score_std": std, "score_max": std**2}, "", "", ())

    changes = Changes()
    assert [one.severity for one in changes.hold([collapse("high", 27.7)])] == ["high"]
    for std in (27.9, 27.2, 26.0):
        assert [one.severity for one in changes.hold([collapse("medium", std)])] == ["high"]
    assert [one.severity for one in changes.hold([collapse("medium", 14.0)])] == ["medium"]
    assert [one.severity for one in changes.hold([collapse("high", 14.1)])] == ["high"]
