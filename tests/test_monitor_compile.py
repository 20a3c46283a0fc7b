"""The monitor on compiled models: the compiler's own backends, micro-batches, and graphs that stay as they were."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_monitor import batch, network, numbers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sounding
from sounding.train.monitor import Monitor
from tolerance import TOLERANCE

STEPS, EVERY = 7, 3
WAYS = ("wrapped", "in place", "child", "function")


class Body(nn.Module):
    """A class of one's own: torch does not compile a Sequential in place."""

    def __init__(self) -> None:
        super().__init__()
        self.features = network()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.features(inputs).mul(2.0)


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_(model: Body, way: str, backend: Any) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """What the monitor is given, and the loss."""
    outer: nn.Module = model
    if way == "wrapped":
        outer = torch.compile(model, backend=backend)  # type: ignore[assignment]
    elif way == "in place":
        model.compile(backend=backend)
    elif way == "child":
        model.features = torch.compile(model.features, backend=backend)  # type: ignore[assignment]

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outer(inputs), targets)

    return outer, torch.compile(loss, backend=backend) if way == "function" else loss


def train(way: str | None, backend: Any, *, micro_batches: int = 1) -> tuple[Monitor, list[Tensor]]:
    model = Body()
    outer, loss = compile_(model, way, backend) if way else (model, lambda x, y: cross_entropy(model(x), y))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = batch()
    with Monitor(outer, every=EVERY, optimizer=optimizer) as monitor:
        for _ in range(STEPS):
            optimizer.zero_grad()
            for part, labels in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
                (loss(part, labels) / micro_batches).backward()
            optimizer.step()
    return monitor, [weight.detach().clone() for weight in model.parameters()]


def assert_same(one: Monitor, other: Monitor, *, rel: float) -> None:
    assert list(one.profiles) == list(other.profiles) == list(range(0, STEPS, EVERY))
    for step, profile in one.profiles.items():
        assert numbers(profile) == pytest.approx(numbers(other.profiles[step]), rel=rel, abs=rel)
    assert [event.text for event in one.findings] == [event.text for event in other.findings]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_numbers_and_training_are_those_of_the_model_as_it_is(way: str, micro_batches: int) -> None:
    """Forward and backward pass both traced, one batch per step or several: as if nothing were compiled."""
    plain, expected = train(None, None, micro_batches=micro_batches)
    monitor, weights = train(way, "aot_eager", micro_batches=micro_batches)
    assert_same(monitor, plain, rel=TOLERANCE.exact)
    torch.testing.assert_close(weights, expected, rtol=TOLERANCE.exact, atol=TOLERANCE.exact)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_graphs_run_in_the_steps_between_and_are_not_made_again(way: str, micro_batches: int) -> None:
    made: list[int] = []
    ran: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        made.append(1)
        return lambda *arguments: (ran.append(1), graph.forward(*arguments))[1]

    monitor, _ = train(way, backend, micro_batches=micro_batches)
    assert len(made) == 1
    assert len(ran) == (STEPS - len(monitor.profiles)) * micro_batches


def has_compiler() -> bool:
    return any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++"))))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.skipif(not has_compiler(), reason="inductor compiles C++ on a CPU, and there is no C++ compiler")
@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_generated_code_gives_way_to_the_modules(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default backend: fused kernels between measured steps, the modules themselves in them."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for micro_batches in (1, 3):
        plain, expected = train(None, None, micro_batches=micro_batches)
        monitor, weights = train(way, "inductor", micro_batches=micro_batches)
        assert_same(monitor, plain, rel=TOLERANCE.float32_forward)
        torch.testing.assert_close(weights, expected, rtol=TOLERANCE.float32_forward, atol=TOLERANCE.float32_forward)
    assert any(tmp_path.rglob("*.so")) or any(tmp_path.rglob("*.cpp"))
    assert isinstance(monitor.report, sounding.Report)
