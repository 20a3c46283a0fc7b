"""A monitor never ends a training: what fails inside it is logged once and named, and the weights come out the same."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any, cast

import pytest
import torch
from tests.hostile import CASES, Made, batch, closures, divergent, jacobian, loop, plain, threads
from tests.test_monitor import hooks_on, numbers
from torch import Tensor, nn

import sounding
from sounding.probe.gradients import log_norm
from sounding.train.monitor import Monitor
from sounding.train.monitor.wall import Wall
from tolerance import TOLERANCE

MEASURES = ("fast", "full")


def run(made: Made, *, steps: int = 3, monitored: bool, **options: Any) -> Monitor:
    model, _optimizer, step = made
    with Monitor(model, every=1 if monitored else 10**9, initial_step=0 if monitored else 1, **options) as monitor:
        for _ in range(steps):
            step()
            monitor.step()
    return monitor


def weights(made: Made) -> list[Tensor]:
    return [weight.detach().clone() for group in made[1].param_groups for weight in group["params"]]


@pytest.mark.parametrize("measures", MEASURES)
@pytest.mark.parametrize("name", CASES)
def test_hostile_trainings_run_as_without_a_monitor(name: str, measures: str, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for monitored in (False, True):
        torch.manual_seed(0)
        made = CASES[name].make()
        monitor = run(made, monitored=monitored, measures=measures)
        found.append(weights(made))
        assert hooks_on(made[0]) == 0
    for before, after in zip(*found, strict=True):
        assert torch.equal(before, after) or before.isnan().any()
    said = [record.getMessage() for record in caplog.records if "failed at step" in record.getMessage()]
    assert len(said) == len(set(said)) <= 4, "the same failure is told once"
    json.dumps([{"name": gap.name, "reason": gap.reason} for gap in monitor.unmeasured])
    if CASES[name].seen:
        assert list(monitor.profiles) == [0, 1, 2], said
    else:
        assert monitor.unmeasured, "what was not measured has a reason"


def test_control_bytes_of_names_do_not_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sounding")
    model = nn.Sequential()
    for at in range(30):  # a collapse whose findings name layers
        model.add_module(f"\x1b[31m{at}", nn.Linear(16, 16))
        model.add_module(f"\x1b[32m{at}", nn.ReLU())
    with Monitor(model) as monitor:
        model(torch.randn(32, 16)).square().mean().backward()
        monitor.step()
    Wall().note_error("\x1b[31m", ValueError("\x07"))
    said = "".join(record.getMessage() for record in caplog.records)
    assert "\u241b[31m" in said
    assert not {"\x1b", "\x07"} & set(said)


def test_a_measured_step_beyond_the_squares_of_float64_has_its_numbers() -> None:
    """Ratios do not depend on the scale, so the numbers are those of the same run a hundred orders smaller."""
    profiles = []
    for scale in (1e40, 1e160):
        torch.manual_seed(0)
        profiles.append(run(divergent(scale)(), monitored=True, steps=1, measures="full").profiles[0])
    small, large = (numbers(profile) for profile in profiles)
    assert small.keys() == large.keys()
    scale_free = ("participation_ratio", "mean_cosine", "numerical_rank", "effective_rank", "isometry_gap")
    for key, value in large.items():
        if key[2] in scale_free:
            assert value == pytest.approx(small[key], rel=TOLERANCE.closed_form), key
    by_scale = math.log(1e160 / 1e40)
    assert large[1, "0", "gradient_log_norm"] == pytest.approx(small[1, "0", "gradient_log_norm"] + by_scale)
    assert large[3, "2", "mean_square"] == math.inf, "a mean square of 1e320 is beyond float64"


@pytest.mark.parametrize("exponent", [-320, -200, 0, 200, 307])
def test_the_logarithm_of_a_norm_knows_no_range(exponent: int) -> None:
    entries = torch.tensor([3.0, 4.0], dtype=torch.float64) * 10.0**exponent
    expected = math.log(math.hypot(*entries.tolist()))
    assert log_norm(entries) == pytest.approx(
        expected, rel=TOLERANCE.float32 if exponent == -320 else TOLERANCE.closed_form
    )
    assert log_norm(torch.zeros(2, dtype=torch.float64)) == -math.inf
    assert log_norm(torch.tensor([1.0, math.inf], dtype=torch.float64)) == math.inf
    assert math.isnan(log_norm(torch.tensor([1.0, math.nan], dtype=torch.float64)))


class Broken:
    """A sink that raises what it is given."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def write(self, snapshot: object) -> None:
        self.calls += 1
        raise self.error

    def close(self) -> None:
        raise self.error


class Unspeakable(Exception):
    """An error that cannot even be told."""

    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize("error", [OSError("disk full"), MemoryError(), RecursionError(), Unspeakable()])
def test_a_sink_that_fails_is_left_out(error: Exception) -> None:
    sink = Broken(error)
    model, inputs = plain(), batch()
    made = loop(model, lambda: model(inputs).square().mean())
    monitor = run(made, monitored=True, sinks=sink)
    assert sink.calls == 1
    assert list(monitor.profiles) == [0, 1, 2]


PLACES = {
    "a call": "sounding.probe.tap.measure_output",
    "the input": "sounding.probe.tap.sample_matrix",
    "a gradient": "sounding.probe.tap.log_norm",
    "a weight": "sounding.train.monitor.window.log_norm",
    "the graph": "sounding.probe.tap.shortest_depth",
    "the alignment": "sounding.probe.tap.align",
    "a block": "sounding.probe.moments.summarize_rows",
    "the reduction": "sounding.probe.moments.reduce_fast",
    "the table": "sounding.probe.tap.collect",
    "the verdict": "sounding.train.monitor.monitor.judge_reading",
    "the hooks": "sounding.probe.hooks.Hooks.on_call",
    "the removal": "sounding.probe.hooks.Hooks.remove",
    "the structure": "sounding.train.monitor.structure.Structure.is_same",
    "the news": "sounding.train.monitor.changes.Changes.since",
}


def put(patch: pytest.MonkeyPatch, place: str, act: Callable[..., Any]) -> None:
    """Set a function in its module."""
    path = PLACES[place].split(".")
    home = max(size for size in range(1, len(path)) if ".".join(path[:size]) in sys.modules)
    owner = reduce(getattr, path[home:-1], cast(Any, sys.modules[".".join(path[:home])]))
    patch.setattr(owner, path[-1], act)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("no memory"), AssertionError("a bug of ours")])
def test_whatever_fails_inside_a_measure_does_not_reach_the_loop(
    place: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    torch.manual_seed(0)
    model, inputs = plain(), batch()
    made = loop(model, lambda: model(inputs).square().mean())
    with Monitor(model, every=1) as monitor:
        with monkeypatch.context() as patch:
            put(patch, place, fail)
            made[2]()
            monitor.step()
            made[2]()
            monitor.step()
        reasons = {gap.reason for gap in monitor.unmeasured}
        told = [record for record in caplog.records if str(error) in record.getMessage()]
        assert len(told) == 1, "it is logged once"
        assert place == "the removal" or any(str(error) in reason for reason in reasons)
        made[2]()
        monitor.step()
        made[2]()
        monitor.step()
    assert 3 in monitor.profiles, "when it no longer fails it is measured again"
    torch.manual_seed(0)
    fresh = plain()
    again = loop(fresh, lambda: fresh(inputs).square().mean())
    for _ in range(4):
        again[2]()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_is_never_swallowed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    model, inputs = plain(), batch()
    made = loop(model, lambda: model(inputs).square().mean())
    put(monkeypatch, place, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(made, monitored=True)


class Stop(Exception):
    """Raised by the user's own code."""


def test_errors_of_the_user_pass_untouched() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise Stop("forward")

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise Stop("backward")

    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Backward.apply(x)  # type: ignore[no-any-return]

    for module in (Failing(), Late()):
        model = nn.Sequential(nn.Linear(8, 8), module, nn.Linear(8, 2))
        with pytest.raises(Stop), Monitor(model, every=1):
            model(batch()).sum().backward()
        assert hooks_on(model) == 0

    def stop(*_: object) -> None:
        raise Stop("hook")

    model, inputs = plain(), batch()
    _, optimizer, step = loop(model, lambda: model(inputs).sum())
    optimizer.register_step_post_hook(stop)
    with pytest.raises(Stop), Monitor(model, every=1, optimizer=optimizer):
        step()
    collapsing = nn.Sequential(*(part for _ in range(40) for part in (nn.Linear(8, 8), nn.ReLU())))
    with Monitor(collapsing, on_finding=stop) as monitor:
        collapsing(inputs).sum().backward()
        with pytest.raises(Stop):
            monitor.step()
    assert monitor.steps == 1
    assert hooks_on(collapsing) == 0


def test_a_schedule_that_fails_measures_nothing_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = plain(), batch()
    _, optimizer, step = loop(model, lambda: model(inputs).sum())
    with Monitor(model, schedule=lambda number: 1 // (number % 2) > 0, optimizer=optimizer) as monitor:
        for _ in range(4):
            step()
    assert list(monitor.profiles) == [1, 3]
    assert sum("ZeroDivisionError" in record.getMessage() for record in caplog.records) == 1


def test_a_check_inside_a_measured_step_does_not_disturb_it() -> None:
    found = []
    for checked in (False, True):
        torch.manual_seed(0)
        model, inputs = plain(), batch()
        look: Callable[[], object] = (lambda m=model: sounding.check(m, torch.randn(9, 8))) if checked else lambda: None
        with Monitor(model, every=1) as monitor:
            look()
            first = model(inputs[:6]).square().mean()
            look()
            first.backward()
            look()
            sounding.check(model[:3], torch.randn(5, 8)) if checked else None  # type: ignore[arg-type]
            model(inputs[6:]).square().mean().backward()
            look()
            monitor.step()
        found.append(numbers(monitor.profile))
        assert hooks_on(model) == 0
    assert found[0] == found[1]


def test_a_layer_exchanged_just_before_is_measured() -> None:
    torch.manual_seed(0)
    model, inputs = plain(), batch()
    with Monitor(model, every=1) as monitor:
        model(inputs).sum().backward()
        monitor.step()
        model[2] = nn.Linear(8, 8)
        model[4].weight = nn.Parameter(model[4].weight.detach() * 2)  # type: ignore[union-attr]
        model.zero_grad()
        model(inputs).sum().backward()
        expected = {f"{name}": math.log(weight.grad.norm()) for name, weight in model.named_parameters()}
        monitor.step()
    rows = {row.name: row.value for row in monitor.profiles[1].select("weight_gradient_log_norm")}
    assert rows == pytest.approx(expected, rel=TOLERANCE.float32_forward)
    assert numbers(monitor.profiles[1], "participation_ratio").keys() >= {(3, "2", "participation_ratio")}
    assert hooks_on(model) == 0


def test_parts_of_a_transformed_step_that_are_plain_have_right_numbers() -> None:
    """The Jacobian of the step is no pass; the pass beside it is measured as if it were alone."""
    torch.manual_seed(0)
    made = jacobian()
    model, inputs = made[0], batch()
    with sounding.watch(model) as watched:
        model(inputs).square().mean().backward()
    monitor = run(made, monitored=True, steps=1)
    expected = numbers(watched.profile, "participation_ratio", "mean_square")
    assert numbers(monitor.profiles[0], "participation_ratio", "mean_square") == expected
    assert any("torch.func" in gap.reason for gap in monitor.unmeasured)


def test_a_second_thread_is_named() -> None:
    torch.manual_seed(0)
    monitor = run(threads(), monitored=True, steps=1)
    assert any("thread" in gap.reason for gap in monitor.unmeasured)
    assert monitor.profiles[0].settings["batch_size"] == 12
    assert monitor.profiles[0].settings["repeats"] == 1


def test_a_closure_is_measured_as_it_was_last_called() -> None:
    """LBFGS evaluates several times in a step, on other weights each time; norms of evaluations do not add up."""
    torch.manual_seed(0)
    made = closures()
    model = made[0]
    last: dict[tuple[int, str, str], float] = {}

    def evaluate() -> Tensor:
        made[1].zero_grad()
        with sounding.watch(model) as watched:
            loss = model(batch()).square().mean()
            loss.backward()
        last.update(numbers(watched.profile))
        return loss

    with Monitor(model, every=1) as monitor:
        made[1].step(evaluate)
        monitor.step()
    found = numbers(monitor.profiles[0])
    assert monitor.profiles[0].settings["repeats"] == 1
    assert found == pytest.approx(last, rel=TOLERANCE.exact)


def test_a_sharded_tensor_of_one_process_does_not_end_it() -> None:
    import torch.distributed as processes
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    processes.init_process_group("gloo", store=processes.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def shard(_name: str, module: nn.Module, mesh: Any) -> None:
            for name, weight in list(module._parameters.items()):
                if weight is not None:
                    module.register_parameter(name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))

        found = []
        for monitored in (False, True):
            torch.manual_seed(0)
            model = distribute_module(plain(), mesh, shard)
            inputs = distribute_tensor(batch(), mesh, [Shard(0)])
            made = loop(model, lambda model=model, inputs=inputs: model(inputs).square().mean())
            run(made, monitored=monitored, steps=2)
            found.append([cast(Any, weight).to_local().detach().clone() for weight in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    finally:
        processes.destroy_process_group()


def test_a_quiet_log_does_not_end_it_either() -> None:
    def refuse(record: logging.LogRecord) -> bool:
        raise ValueError("a filter that fails")

    logger = logging.getLogger("sounding.monitor")
    logger.addFilter(refuse)
    try:
        model, inputs = plain(), batch()
        monitor = run(loop(model, lambda: model(inputs).sum()), monitored=True, sinks=Broken(OSError()))
    finally:
        logger.removeFilter(refuse)
    assert monitor.steps == 3
