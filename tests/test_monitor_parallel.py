"""Two processes train one model: the first measures its shard of the batch, and the gradient that both averaged."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tolerance import TOLERANCE

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from sounding.train.monitor import Monitor

torch.set_num_threads(1)
rank, world, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
inputs, targets = torch.randn(24, 8), torch.randint(0, 3, (24,))
x, y = inputs.chunk(world)[rank].chunk(2), targets.chunk(world)[rank].chunk(2)
wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Monitor(model if sys.argv[5:] else wrapped, every=2, optimizer=optimizer) as monitor:
    for step in range(3):
        optimizer.zero_grad()
        with wrapped.no_sync():  # the first micro-batch stays local
            (cross_entropy(wrapped(x[0]), y[0]) / 2).backward()
        (cross_entropy(wrapped(x[1]), y[1]) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
rows = [[row.name, row.measure, row.value] for row in monitor.profiles[0]] if monitor.profiles else []
with open(out, "w", encoding="utf-8") as file:
    json.dump({"steps": list(monitor.profiles), "rows": rows}, file)
dist.barrier()
dist.destroy_process_group()
# the wrapper still holds the group, and gloo's threads now and then abort an interpreter that ends (pytorch#190489)
os._exit(0)
"""


@pytest.mark.parametrize("inner", [(), pytest.param(("inner",), marks=pytest.mark.slow)], ids=["wrapper", "inner"])
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_the_first_process_measures_the_averaged_gradient(world: int, inner: tuple[str, ...], tmp_path: Path) -> None:
    """With micro-batches that are not synchronized, and clipping after it: the gradient of the whole batch.

    Trainers give their callbacks the module inside of the wrapper.
    """
    outputs = [tmp_path / f"{rank}.json" for rank in range(world)]
    commands = [
        [sys.executable, "-c", SCRIPT, str(rank), str(world), str(tmp_path / "store"), str(out), *inner]
        for rank, out in enumerate(outputs)
    ]
    children = [subprocess.Popen(command) for command in commands]
    assert [child.wait(timeout=120) for child in children] == [0] * world
    found = [json.loads(out.read_text("utf-8")) for out in outputs]
    assert [item["steps"] for item in found] == [[0, 2], *([[]] * (world - 1))]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    inputs, targets = torch.randn(24, 8), torch.randint(0, 3, (24,))
    cross_entropy(model(inputs), targets).backward()
    rows = {name: value for name, measure, value in found[0]["rows"] if measure == "weight_gradient_log_norm"}
    expected = {
        name: math.log(weight.grad.norm()) for name, weight in model.named_parameters() if weight.grad is not None
    }
    assert rows == pytest.approx(expected, rel=TOLERANCE.float32_forward, abs=TOLERANCE.float32_layer)
