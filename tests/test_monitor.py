"""The monitor in loops people write: the numbers of `sounding.watch`, when asked for, and nothing left behind."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.test_probe_zoo import picture, prepare, without_dropout
from tests.zoo import ZOO
from tests.zoo_modules import CheckpointedTwice
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sounding
from sounding.errors import UsageError
from sounding.probe.inside.rows import INSIDE
from sounding.probe.outputs import tensors_in
from sounding.train.monitor import Monitor
from tolerance import TOLERANCE

GRADIENTS = ("gradient_log_norm", "weight_gradient_log_norm")
CLOSE = {"rel": TOLERANCE.float32_forward, "abs": TOLERANCE.float32_layer}


def network(depth: int = 3, width: int = 16, *, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def batch(samples: int = 48, width: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(samples, width, generator=generator), torch.randint(0, 4, (samples,), generator=generator)


def numbers(profile: sounding.Profile, *measures: str) -> dict[tuple[int, str, str], float]:
    wanted = measures or {*profile.measures} - {"update_ratio", *INSIDE}  # a watch sees neither
    return {(row.layer, row.name, row.measure): row.value for row in profile if row.measure in wanted}


def hooks_on(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    found = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    return found + sum(len(weight._backward_hooks or ()) for weight in model.parameters())


def watched_numbers(model: nn.Module, run: Callable[[], object]) -> dict[tuple[int, str, str], float]:
    with sounding.watch(model) as watched:
        run()
    return numbers(watched.profile)


def train(model: nn.Module, monitor: Monitor, steps: int, *, rate: float = 0.1) -> None:
    inputs, targets = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        monitor.step()


@pytest.mark.parametrize("name", [key for key, animal in ZOO.items() if not animal.options])
def test_numbers_are_those_of_watch(name: str) -> None:
    """Shared, tied, frozen, in place, checkpointed, compiled, scripted, attention: every awkward module."""

    def run(model: nn.Module, inputs: Any) -> None:
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        tensors = [t for _, t in tensors_in(output) if t.is_floating_point()]
        value = sum((t.double() * torch.linspace(-1, 1, t.numel()).view_as(t)).sum() for t in tensors)
        if isinstance(value, Tensor) and value.requires_grad:
            value.backward()

    found, left = [], []
    for way in ("watch", "monitor"):
        model, inputs, _ = prepare(ZOO[name])
        without_dropout(model).zero_grad()
        if "checkpointed" in name:
            inputs.requires_grad_()
        torch.manual_seed(1)
        if way == "watch":
            found.append(watched_numbers(model, lambda m=model, x=inputs: run(m, x)))
        else:
            with Monitor(model) as monitor:
                run(model, inputs)
                monitor.step()
            found.append(numbers(monitor.profile))
        left.append(hooks_on(model))
    assert left[0] == left[1]
    watched, monitored = found
    # Of a block shared by two reentrant checkpoints watch sees parts; the sum in .grad is more than it can give.
    assert watched.keys() <= monitored.keys()
    assert all(key[2] == "weight_gradient_log_norm" for key in monitored.keys() - watched.keys())
    assert {key: monitored[key] for key in watched} == pytest.approx(watched, rel=TOLERANCE.exact, nan_ok=True)


def test_a_shared_checkpoint_gives_the_gradient_of_the_sum() -> None:
    torch.manual_seed(0)
    model, inputs = CheckpointedTwice(), torch.randn(8, 6)
    with Monitor(model) as monitor:
        model(inputs.requires_grad_()).square().sum().backward()
        monitor.step()
    rows = {row.name: row.value for row in monitor.profile.select("weight_gradient_log_norm")}
    for key, weight in model.named_parameters():
        assert rows[key] == pytest.approx(math.log(weight.grad.norm()), rel=TOLERANCE.float32_forward)


def test_steps_are_measured_on_schedule_and_hooked_only_then() -> None:
    """Nothing hangs on the model between measured steps."""
    model = network()
    inputs, targets = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked = []
    with Monitor(model, every=4) as monitor:
        for step in range(10):
            if hooks_on(model):
                hooked.append(step)
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            monitor.step()
    assert hooked == list(monitor.profiles) == [0, 4, 8]
    assert hooks_on(model) == 0
    assert monitor.profile.sources == ("step 0", "step 4", "step 8")
    assert monitor.profiles[4].settings["step"] == 4
    assert monitor.steps == 10


def test_numbers_at_a_later_step_are_those_of_watch() -> None:
    model, twin = network(), network()
    inputs, targets = batch()
    with Monitor(model, schedule=[3]) as monitor:
        train(model, monitor, 5)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        if step == 3:
            expected = watched_numbers(twin, lambda: cross_entropy(twin(inputs), targets).backward())
        else:
            cross_entropy(twin(inputs), targets).backward()
            optimizer.step()
    assert numbers(monitor.profiles[3]) == expected


def test_training_is_the_same_with_and_without() -> None:
    """Same seed, same weights, bit for bit: also random states and gradients are the user's own."""
    with_dropout = [nn.Sequential(network(), nn.Dropout(0.3), nn.BatchNorm1d(4)) for _ in range(2)]
    pictures = []
    for model, every in zip(with_dropout, (1, 1000), strict=True):
        torch.manual_seed(3)
        with Monitor(model, schedule=lambda _step, every=every: every == 1) as monitor:
            train(model, monitor, 5)
        seen = picture(model)
        pictures.append({k: v[1:] if isinstance(v, tuple) and k != "python" else v for k, v in seen.items()})
    assert pictures[0] == pictures[1]


@pytest.mark.parametrize("zeroed", [True, False])
def test_accumulated_micro_batches_read_as_one_batch(zeroed: bool) -> None:
    """k backward passes of loss/k: gradients, their growth and the weights' are those of the whole batch at once."""
    model, whole = network(), network()
    inputs, targets = batch()
    expected = watched_numbers(whole, lambda: cross_entropy(whole(inputs), targets).backward())
    if zeroed:  # set_to_none=False leaves zeros to add to
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
    with Monitor(model) as monitor:
        for part, labels in zip(inputs.split(12), targets.split(12), strict=True):
            (cross_entropy(model(part), labels) / 4).backward()
        monitor.step()
    found = numbers(monitor.profile)
    assert found.keys() == expected.keys()
    for key in expected:
        if key[2] in (*GRADIENTS, "gradient_log_rate", "gradient_growth"):
            assert found[key] == pytest.approx(expected[key], **CLOSE), key
    assert monitor.profile.settings["repeats"] == 4
    errors = [row.stderr for row in monitor.profile.select("mean_square")]
    assert all(error is not None and error > 0 for error in errors)


def test_more_micro_batches_than_are_held_still_sum_the_weights() -> None:
    model, whole = network(), network()
    inputs, targets = batch(150)
    expected = watched_numbers(whole, lambda: cross_entropy(whole(inputs), targets).backward())
    with Monitor(model) as monitor:
        for part, labels in zip(inputs.split(2), targets.split(2), strict=True):
            (cross_entropy(model(part), labels) / 75).backward()
        monitor.step()
    assert monitor.profile.settings["repeats"] == 64
    for key, value in numbers(monitor.profile, "weight_gradient_log_norm").items():
        assert value == pytest.approx(expected[key], **CLOSE)


@pytest.mark.parametrize("by_optimizer", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_scale_is_divided_out(dtype: torch.dtype, by_optimizer: bool) -> None:
    """Autocast and a scaler: the gradients of the loss itself, to the precision of 16 bits."""
    model, plain = network(), network()
    inputs, targets = batch()

    def forward(of: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype):
            return cross_entropy(of(inputs), targets)

    expected = watched_numbers(plain, lambda: forward(plain).backward())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    options: dict[str, Any] = {"optimizer": optimizer} if by_optimizer else {}
    with Monitor(model, scaler=scaler, **options) as monitor:
        scaler.scale(forward(model)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        if not by_optimizer:
            monitor.step()
    found = numbers(monitor.profile, *GRADIENTS)
    assert monitor.profile.settings["loss_scale"] == 2.0**10
    for key, value in found.items():
        assert value == pytest.approx(expected[key], abs=TOLERANCE.bfloat16_forward), key


@pytest.mark.parametrize("by_optimizer", [True, False])
def test_a_step_the_scaler_skips_is_no_finding(by_optimizer: bool) -> None:
    """The scale overflows, the scaler skips the step and halves: the next step that is taken is measured."""
    model, plain = network(), network()
    inputs, targets = batch()
    expected = watched_numbers(plain, lambda: (64 * cross_entropy(plain(inputs), targets)).backward())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    options: dict[str, Any] = {"optimizer": optimizer} if by_optimizer else {}
    with Monitor(model, schedule=[0], scaler=scaler, **options) as monitor:
        for turn in range(3):
            optimizer.zero_grad()
            scaler.scale(64 * cross_entropy(model(inputs), targets)).backward()
            scaler.step(optimizer)
            scaler.update()
            if not by_optimizer:
                monitor.step()
                assert turn or any("overflowed" in item.reason for item in monitor.unmeasured)
    assert not any(event.kind == "non_finite" for event in monitor.findings)
    assert list(monitor.profiles) == ([0] if by_optimizer else [0, 1])
    last = monitor.profiles[max(monitor.profiles)]
    assert last.settings["loss_scale"] == 2.0**27
    assert last.settings["repeats"] == 1
    assert numbers(last) == pytest.approx(expected, rel=TOLERANCE.float32_forward)


def test_evaluation_in_between_is_not_counted() -> None:
    model, plain = network(), network()
    inputs, targets = batch()
    expected = watched_numbers(plain, lambda: cross_entropy(plain(inputs), targets).backward())
    with Monitor(model) as monitor:
        model.eval()
        with torch.no_grad():
            model(inputs * 3)
        with torch.inference_mode():
            model(inputs * 5)
        for _ in range(70):
            model(inputs * 7)  # somebody forgot no_grad; nothing comes back to it
        model.train()
        cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            model(inputs * 9)
        monitor.step()
    assert numbers(monitor.profile) == expected


def test_modules_called_without_the_model_around_them() -> None:
    """`model.forward(x)`, or parts of it: the root's own hooks never fire, yet micro-batches are told apart."""
    model, whole = network(), network()
    inputs, targets = batch()
    expected = watched_numbers(whole, lambda: cross_entropy(whole(inputs), targets).backward())
    with Monitor(model) as monitor:
        with torch.no_grad():
            model.forward(inputs)
        for part, labels in zip(inputs.split(24), targets.split(24), strict=True):
            (cross_entropy(model.forward(part), labels) / 2).backward()
        monitor.step()
    found = numbers(monitor.profile, *GRADIENTS)
    assert found
    assert found == pytest.approx({key: expected[key] for key in found}, **CLOSE)


def test_two_backward_passes_through_one_forward_pass() -> None:
    """Weights hold the sum; norms of outputs' gradients do not add up, and are listed instead of half told."""
    model, both = network(), network()
    inputs, targets = batch()
    expected = watched_numbers(both, lambda: (cross_entropy(both(inputs), targets) * 3).backward())
    with Monitor(model) as monitor:
        loss = cross_entropy(model(inputs), targets)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        monitor.step()
    found = numbers(monitor.profile)
    assert not numbers(monitor.profile, "gradient_log_norm")
    for key, value in numbers(monitor.profile, "weight_gradient_log_norm").items():
        assert value == pytest.approx(expected[key], rel=TOLERANCE.float32_forward)
    assert (7, "6", "mean_square") in found
    assert any(item.name == "0" and "several backward passes" in item.reason for item in monitor.unmeasured)


def test_an_exception_in_the_body_passes_and_leaves_no_trace() -> None:
    model = network()
    before = picture(model)
    error = RuntimeError("out of data")
    monitor = Monitor(model)

    def body() -> None:
        with monitor:
            assert hooks_on(model)
            raise error

    with pytest.raises(RuntimeError) as caught:
        body()
    assert caught.value is error
    assert picture(model) == before
    assert hooks_on(model) == 0
    assert not monitor.profiles
    with pytest.raises(UsageError, match="running"):
        monitor.step()


def test_a_forward_pass_that_raised_is_not_part_of_the_step() -> None:
    model, plain = network(), network()
    inputs, targets = batch()
    expected = watched_numbers(plain, lambda: cross_entropy(plain(inputs), targets).backward())
    with Monitor(model) as monitor:
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
        cross_entropy(model(inputs), targets).backward()
        monitor.step()
    assert numbers(monitor.profile) == expected


def test_copies_made_during_a_measured_step_report_nothing() -> None:
    """An average of weights by deepcopy, a model saved whole: their hooks are asleep."""
    model, plain = network(), network()
    inputs, targets = batch()
    expected = watched_numbers(plain, lambda: cross_entropy(plain(inputs), targets).backward())
    with Monitor(model) as monitor:
        average = copy.deepcopy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        for other in (average, torch.load(saved, weights_only=False)):
            other(inputs).sum().backward()
        cross_entropy(model(inputs), targets).backward()
        monitor.step()
    assert numbers(monitor.profile) == expected


@pytest.mark.parametrize("way", ["wrapped", "in place", "function"])
def test_compiled_models_are_measured_and_not_compiled_again(way: str) -> None:
    """In a measured step everything runs eagerly; the compiled graph waits and is used again afterwards."""
    model, plain = network(), network()
    inputs, targets = batch()
    expected = watched_numbers(plain, lambda: cross_entropy(plain(inputs), targets).backward())
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(1)
        return graph.forward

    outer: nn.Module = model
    if way == "wrapped":
        outer = torch.compile(model, backend=backend)  # type: ignore[assignment]
    elif way == "in place":
        model.compile(backend=backend)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(outer(x), y)

    run = torch.compile(loss, backend=backend) if way == "function" else loss
    run(inputs, targets).backward()
    before = len(compiled)
    with Monitor(outer, schedule=[1, 3]) as monitor:
        for _ in range(5):
            model.zero_grad()
            run(inputs, targets).backward()
            monitor.step()
    assert list(monitor.profiles) == [1, 3]
    assert numbers(monitor.profiles[1]) == expected
    assert len(compiled) == before
    assert before or way == "in place"
    torch._dynamo.reset()


def test_monitors_of_several_models_may_overlap() -> None:
    """A generator and its critic: steps open and close crosswise, and process-wide switches are as before."""
    first, second = network(seed=1), network(seed=2)
    inputs, targets = batch()
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        return lambda *arguments: (calls.append(1), graph.forward(*arguments))[1]

    compiled = torch.compile(first, backend=backend)
    fast = torch.backends.mha.get_fastpath_enabled()
    with Monitor(first, every=2) as one, Monitor(second, every=3) as two:
        for _ in range(4):
            for model, run, monitor in ((first, compiled, one), (second, second, two)):
                model.zero_grad()
                cross_entropy(run(inputs), targets).backward()
                monitor.step()
        one.stop()
        one.start()
    assert (list(one.profiles), list(two.profiles)) == ([0, 2], [0, 3])
    assert torch.backends.mha.get_fastpath_enabled() == fast
    before = len(calls)
    compiled(inputs)
    assert len(calls) == before + 1
    torch._dynamo.reset()


def test_a_gradient_penalty_warns_of_nothing() -> None:
    """A backward pass that builds a graph: hooks stay out of it, weights hold the gradient of the whole loss."""
    model = network()
    inputs, targets = batch()
    inputs.requires_grad_()
    with Monitor(model) as monitor:
        output = model(inputs)
        (slope,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        (cross_entropy(output, targets) + slope.square().mean()).backward()
        monitor.step()
    rows = {row.name: row.value for row in monitor.profile.select("weight_gradient_log_norm")}
    for name, weight in model.named_parameters():
        assert rows[name] == pytest.approx(math.log(weight.grad.norm()), rel=TOLERANCE.float32_forward)


def test_the_optimizer_counts_steps() -> None:
    model = network()
    inputs, targets = batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = Monitor(model, every=2, optimizer=optimizer)
    with monitor:
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        with pytest.raises(UsageError, match="optimizer's steps"):
            monitor.step()
    assert list(monitor.profiles) == [0, 2]
    assert not optimizer._optimizer_step_post_hooks
