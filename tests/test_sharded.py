"""Models that lie in several processes: the numbers of one process on the whole batch, or a sentence."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sharded_models import Again, make_batch, make_halves, make_stack, make_stages, make_tokens, rows_of
from torch import nn
from torch.nn.functional import cross_entropy

import sounding
from sounding.train.monitor import Monitor
from tolerance import TOLERANCE

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
ROOT = Path(__file__).parent.parent
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]
SCENES = {
    2: "fully_sharded_check fully_sharded_watch fully_sharded_monitor tensor_parallel_check tensor_parallel_watch "
    "tensor_parallel_monitor transformer pipeline loose_stages lonely flat",
    4: "fully_sharded_check fully_sharded_monitor tensor_parallel_check tensor_parallel_monitor transformer two_ways "
    "variants pipeline",
}
PATIENCE = 240.0  # seconds for all scenes: a bound on hanging, generous for a machine that computes something else too
_found: dict[int, list[dict[str, Any]]] = {}


@pytest.fixture
def scenes(world: int, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found in all scenes; processes are started once, which takes longer than the scenes."""
    if world not in _found:
        _found[world] = run_processes(world, SCENES[world].split(), tmp_path_factory.mktemp("processes"))
    return _found[world]


def run_processes(world: int, scenes: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    outputs = [folder / f"{rank}.json" for rank in range(world)]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes", str(rank), str(world), str(folder / "store"), str(out), *scenes],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths},
        )
        for rank, out in enumerate(outputs)
    ]
    end = time.monotonic() + PATIENCE
    try:
        while any(child.poll() is None for child in children):
            assert not any(child.poll() for child in children), "one process failed, the others would wait for it"
            assert time.monotonic() < end, "the processes wait for each other"
            time.sleep(0.05)
        assert [child.returncode for child in children] == [0] * world
    finally:
        for child in children:
            child.kill()
    return [json.loads(out.read_text("utf-8")) for out in outputs]


def same_rows(found: dict[str, Any], expected: dict[str, Any], *, only: str = "") -> None:
    """Every expected number is there, to rounding, and no other."""
    chosen = {key: value for key, value in expected["rows"].items() if key.endswith(only)}
    rows = {key: value for key, value in found["rows"].items() if key.endswith(only)}
    assert chosen
    assert rows == pytest.approx(chosen, rel=TOLERANCE.float32_forward, abs=TOLERANCE.float32_forward, nan_ok=True)


def one_step(model: nn.Module, pieces: int = 1) -> dict[str, Any]:
    """One step of one process under a monitor, with as many micro-batches."""
    inputs, targets = (tensor.chunk(pieces) for tensor in make_batch())
    with Monitor(model) as monitor:
        for x, y in zip(inputs, targets, strict=True):
            (cross_entropy(model(x), y) / pieces).backward()
        monitor.step()
    return rows_of(monitor.report)


def by_name(found: dict[str, Any]) -> dict[str, float]:
    """The numbers of layers and weights by "name measure": stages count their layers from 1, each of them."""
    rows = {key.partition(" ")[2]: value for key, value in found["rows"].items()}
    return {key: value for key, value in rows.items() if key.partition(" ")[0] not in ("input", "network")}


@pytest.mark.parametrize("world", WORLDS)
def test_a_check_of_fully_sharded_weights(world: int, scenes: list[dict[str, Any]]) -> None:
    """On the whole batch every process reports what one alone does, and the model stays as it was."""
    expected = rows_of(sounding.check(make_stack(), *make_batch()))
    for rank, scene in enumerate(item["fully_sharded_check"] for item in scenes):
        same_rows(scene["whole"], expected)
        assert scene["whole"]["unmeasured"] == expected["unmeasured"]
        assert scene["whole"]["apart"]
        assert not expected["apart"]
        same_rows(scene["part"], expected, only="weight_gradient_log_norm")
        part = [tensor.chunk(world)[rank] for tensor in make_batch()]
        alone = rows_of(sounding.check(make_stack(), *part, tier="fast"))
        same_rows(scene["part"], alone, only=" gradient_log_norm")
        same_rows(scene["part"], alone, only="participation_ratio")
        assert "this process's part of the batch" in scene["part"]["parallel"]
        assert scene["kept"]


@pytest.mark.parametrize("world", [2])
def test_a_watch_of_fully_sharded_weights(world: int, scenes: list[dict[str, Any]]) -> None:
    """After an evaluation that left weights gathered; gradients that were added to others are left out."""
    expected = rows_of(sounding.check(make_stack(), *make_batch()))
    for scene in (item["fully_sharded_watch"] for item in scenes):
        same_rows(scene["once"], expected, only="weight_gradient_log_norm")
        same_rows(scene["twice"], expected, only="weight_gradient_log_norm")
        assert "set it to None first" in scene["added"]["unmeasured"]["0.weight"]


@pytest.mark.parametrize("world", WORLDS)
def test_a_monitor_of_fully_sharded_weights(world: int, scenes: list[dict[str, Any]]) -> None:
    """With a micro-batch that is not synchronized, clipping, and an evaluation between steps."""
    model = make_stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        expected = one_step(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    first, *others = (item["fully_sharded_monitor"] for item in scenes)
    assert first["steps"] == [0, 2]
    assert all(other["steps"] == [] for other in others)
    same_rows(first["rows"], expected, only="weight_gradient_log_norm")
    assert not any("weight" in name for name in first["rows"]["unmeasured"])


@pytest.mark.parametrize("world", WORLDS)
def test_a_check_of_tensor_parallel_layers(world: int, scenes: list[dict[str, Any]]) -> None:
    """Every measure, those of outputs of which a process holds some features included."""
    expected = rows_of(sounding.check(make_halves(), *make_batch()))
    for scene in (item["tensor_parallel_check"]["rows"] for item in scenes):
        same_rows(scene, expected)
        assert scene["unmeasured"] == expected["unmeasured"]
        assert scene["apart"]
        assert "put together" in scene["parallel"]


@pytest.mark.parametrize("world", WORLDS)
def test_a_transformer_cut_by_heads_and_positions(world: int, scenes: list[dict[str, Any]]) -> None:
    """Attention, norms whose gradients are summands, tokens, logits that are a DTensor; what is missing is named."""
    model, tokens, targets = make_tokens()
    expected = rows_of(sounding.check(model, tokens, targets))
    # the softmax does not see the bias of the keys: its gradient is rounding, in whichever order it is summed
    absent = ("token_participation_ratio", "gradient_alignment", "key.bias weight_gradient_log_norm")
    expected["rows"] = {key: value for key, value in expected["rows"].items() if not key.endswith(absent)}
    for scene in (item["transformer"] for item in scenes):
        for found in (scene["check"], scene["whole"]):
            found["rows"] = {key: value for key, value in found["rows"].items() if not key.endswith(absent)}
            same_rows(found, expected)
        assert "token participation ratio" in scene["check"]["unmeasured"]["act"]
        assert "alignment" in scene["check"]["unmeasured"]["network"]
    random = [item["transformer"]["random"]["rows"] for item in scenes]
    assert all(rows == pytest.approx(random[0], nan_ok=True) for rows in random)


@pytest.mark.parametrize("world", [2])
def test_a_watch_of_tensor_parallel_layers(world: int, scenes: list[dict[str, Any]]) -> None:
    model = make_halves()
    inputs, targets = make_batch()
    with sounding.watch(model) as watched:
        cross_entropy(model(inputs), targets).backward()
    for scene in (item["tensor_parallel_watch"] for item in scenes):
        same_rows(scene["rows"], rows_of(watched.report))
        assert "autograd graph" in scene["blind"]["unmeasured"]["blocks.0.act"]
        assert not any(".act " in key for key in scene["blind"]["rows"])


@pytest.mark.parametrize("world", WORLDS)
def test_a_monitor_of_tensor_parallel_layers(world: int, scenes: list[dict[str, Any]]) -> None:
    first, *others = (item["tensor_parallel_monitor"]["rows"] for item in scenes)
    same_rows(first, one_step(make_halves(), 2))
    assert others == [None] * (world - 1)


@pytest.mark.parametrize("world", [pytest.param(4, marks=pytest.mark.slow)])
def test_weights_cut_and_sharded(world: int, scenes: list[dict[str, Any]]) -> None:
    expected = rows_of(sounding.check(make_halves(), *make_batch()))
    for scene in (item["two_ways"] for item in scenes):
        same_rows(scene["check"], expected)
    same_rows(scenes[0]["two_ways"]["monitor"], one_step(make_halves()), only="weight_gradient_log_norm")


@pytest.mark.parametrize("world", [pytest.param(4, marks=pytest.mark.slow)])
def test_weights_replicated_kept_gathered_run_twice_and_after_an_error(
    world: int, scenes: list[dict[str, Any]]
) -> None:
    plain = rows_of(sounding.check(make_stack(), *make_batch()))
    again = rows_of(sounding.check(Again(make_stack()), *make_batch()))
    for scene in (item["variants"] for item in scenes):
        for name in ("replicated", "kept", "broken"):
            same_rows(scene[name], plain)
        same_rows(scene["again"], again)
        assert "the hook fails" in scene["refusal"]


@pytest.mark.parametrize("world", WORLDS)
def test_stages_of_a_pipeline(world: int, scenes: list[dict[str, Any]]) -> None:
    """Each process reports its stage after the schedule has scaled the gradients: those of the whole batch."""
    expected = by_name(one_step(nn.Sequential(*(layer for stage in make_stages(world) for layer in stage)), 4))
    for rank, scene in enumerate(item["pipeline"] for item in scenes):
        for kind, found in scene.items():
            mine = by_name(found["monitor"])
            shift = 0.0 if kind.endswith("True") else math.log(4)
            wanted = {key: expected[key] + (shift if "gradient" in key else 0.0) for key in mine}
            assert len({key.partition(" ")[0] for key in mine}) == (16 + 16) // world  # calls, weights and biases
            assert mine == pytest.approx(wanted, rel=TOLERANCE.float32_forward, abs=TOLERANCE.float32_forward)
            assert f"stage {rank} of a pipeline of {world}" in found["monitor"]["unmeasured"]["network"]
            assert "use a Monitor" in found["watch"]["unmeasured"][f"{rank * 16 // world}.weight"]
            assert not any("weight_gradient" in key for key in found["watch"]["rows"])
            assert not found["left"]


@pytest.mark.parametrize("world", [2])
def test_several_stages_under_one_monitor(world: int, scenes: list[dict[str, Any]]) -> None:
    """Nothing is recorded for them together; a monitor of one stage's module is right."""
    expected = by_name(one_step(nn.Sequential(*(layer for stage in make_stages(4) for layer in stage)), 4))
    for scene in (item["loose_stages"] for item in scenes):
        for kind in ("interleaved", "zero bubble"):
            assert scene[kind]["steps"] == []
            mine = by_name(scene[kind]["first"])
            wanted = {key: expected[key] for key in mine}
            assert mine == pytest.approx(wanted, rel=TOLERANCE.float32_forward, abs=TOLERANCE.float32_forward)
            assert len([key for key in mine if "weight_gradient" in key]) == 4
            assert len([key for key in mine if " gradient" in key]) == 4


@pytest.mark.parametrize("world", [2])
def test_one_process_alone_neither_waits_nor_guesses(world: int, scenes: list[dict[str, Any]]) -> None:
    first, other = (item["lonely"] for item in scenes)
    assert "expected all processes [0, 1]" in first["check"]
    for scene in (first["watch"], first["monitor"]):
        assert "did not measure at the same time" in scene["unmeasured"]["0.weight"]
        assert not any("weight_gradient" in key for key in scene["rows"])
    assert "did not measure at the same time" in first["parallel"]["unmeasured"]["blocks.0.act"]
    assert not any(".act " in key for key in first["parallel"]["rows"])
    assert any("head.weight " in key for key in first["parallel"]["rows"])
    expected = rows_of(sounding.check(make_stack(), *make_batch(), tier="fast"))
    for scene in (first["after"], other["after"]):
        same_rows(scene, expected)


@pytest.mark.parametrize("world", [2])
def test_flat_weights_are_refused(world: int, scenes: list[dict[str, Any]]) -> None:
    for scene in scenes:
        assert all("FSDP1) is not supported" in refusal for refusal in scene["flat"]["refusals"])
        assert len(scene["flat"]["refusals"]) == 3
