"""What each of several processes does in tests/test_sharded.py: a program that leaves its numbers in a file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.sharded_models import Again, Halves, make_batch, make_halves, make_stack, make_stages, make_tokens, rows_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.functional import cross_entropy

import sounding
from sounding.errors import SoundingError, UsageError
from sounding.probe import meeting
from sounding.train.monitor import Monitor

Found = dict[str, Any]


def shard(model: nn.Sequential, **options: Any) -> nn.Module:
    """The model as most users shard it: every second layer, then the rest."""
    for layer in model[::2]:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def cut(model: Halves, mesh: Any = None) -> nn.Module:
    """The two halves of every block over a mesh, the outputs between them left in parts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def mine(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of the batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def fully_sharded_check() -> Found:
    model = shard(make_stack())
    inputs, targets = make_batch()
    before = [weight.to_local().clone() for weight in model.parameters()]
    whole = sounding.check(model, inputs, targets)
    part = sounding.check(model, mine(inputs), mine(targets), tier="fast")
    kept = all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))
    kept = kept and all(weight.grad is None for weight in model.parameters())
    return {"whole": rows_of(whole), "part": rows_of(part), "kept": kept}


def fully_sharded_watch() -> Found:
    model = shard(make_stack())
    inputs, targets = make_batch()
    with torch.no_grad():
        model(mine(inputs))  # an evaluation leaves the weights of the root gathered
    with sounding.watch(model) as watched:
        cross_entropy(model(mine(inputs)), mine(targets)).backward()
        model.zero_grad()
    with sounding.watch(model) as again:
        for _ in range(2):
            cross_entropy(model(mine(inputs)), mine(targets)).backward()
    with sounding.watch(model) as added:
        cross_entropy(model(mine(inputs)), mine(targets)).backward()
    return {"once": rows_of(watched.report), "twice": rows_of(again.report), "added": rows_of(added.report)}


def fully_sharded_monitor() -> Found:
    model = shard(make_stack())
    inputs, targets = (mine(tensor).chunk(2) for tensor in make_batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, every=2, optimizer=optimizer) as monitor:
        for _ in range(3):
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                (cross_entropy(model(inputs[last]), targets[last]) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(inputs[0])
    return {"steps": list(monitor.profiles), "rows": rows_of(monitor.report) if monitor.profiles else None}


def tensor_parallel_check() -> Found:
    return {"rows": rows_of(sounding.check(cut(make_halves()), *make_batch()))}


def transformer() -> Found:
    """Heads and positions cut over the processes, the embedding by rows, logits that stay a DTensor, cut or whole."""
    _, tokens, targets = make_tokens()
    checked = sounding.check(_cut_tokens(Shard(-1)), tokens, targets)
    whole = sounding.check(_cut_tokens(Replicate()), tokens, targets)
    torch.manual_seed(dist.get_rank())  # the processes must agree on a random direction all the same
    random = sounding.check(_cut_tokens(Shard(-1)), tokens, tier="fast")
    return {"check": rows_of(checked), "whole": rows_of(whole), "random": rows_of(random)}


def _cut_tokens(logits: Any) -> nn.Module:
    model, _, _ = make_tokens()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut_in, cut_out = {"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}
    plan = {name: ColwiseParallel(**cut_in) for name in ("query", "key", "value", "up")}
    plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    plan |= {name: RowwiseParallel(**cut_out) for name in ("join", "down")}
    plan |= {"table": RowwiseParallel(input_layouts=Replicate(), **cut_out)}
    plan |= {"out": ColwiseParallel(**cut_in, output_layouts=logits, use_local_output=False)}
    return parallelize_module(model, mesh, plan)


def tensor_parallel_watch() -> Found:
    model = cut(make_halves())
    inputs, targets = make_batch()
    with sounding.watch(model) as watched:
        cross_entropy(model(inputs), targets).backward()
    with torch.no_grad(), sounding.watch(model) as blind:
        model(inputs)
    return {"rows": rows_of(watched.report), "blind": rows_of(blind.report)}


def tensor_parallel_monitor() -> Found:
    model = cut(make_halves())
    inputs, targets = (tensor.chunk(2) for tensor in make_batch())
    with Monitor(model) as monitor:
        for x, y in zip(inputs, targets, strict=True):
            (cross_entropy(model(x), y) / 2).backward()
        monitor.step()
    return {"rows": rows_of(monitor.report) if monitor.profiles else None}


def two_ways() -> Found:
    """Layers cut over one axis of a mesh, fully sharded over the other."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    model = cut(make_halves(), mesh["tensor"])
    fully_shard(model, mesh=mesh["data"])
    whole = sounding.check(model, *make_batch())
    with Monitor(model) as monitor:
        part = [tensor.chunk(2)[mesh["data"].get_local_rank()] for tensor in make_batch()]
        cross_entropy(model(part[0]), part[1]).backward()
        monitor.step()
    return {"check": rows_of(whole), "monitor": rows_of(monitor.report) if monitor.profiles else None}


def variants() -> Found:
    """Weights also replicated, weights that stay gathered, blocks that run twice, a pass that fails."""
    inputs, targets = make_batch()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    kept = shard(make_stack())
    kept.set_reshard_after_backward(False)
    cross_entropy(kept(inputs), targets).backward()
    again = Again(make_stack())
    shard(again.body)
    broken = shard(make_stack())
    handle = broken[2].register_forward_hook(_break)
    refusal = _refusal(lambda: sounding.check(broken, inputs, targets))
    handle.remove()
    models = {"replicated": shard(make_stack(), mesh=mesh), "kept": kept, "again": fully_shard(again), "broken": broken}
    return {name: rows_of(sounding.check(model, inputs, targets)) for name, model in models.items()} | {
        "refusal": refusal
    }


def _break(*_: Any) -> None:
    raise ValueError("the hook fails")


def pipeline() -> Found:
    """A schedule with four micro-batches; every process holds a stage and measures it."""
    found: Found = {}
    for name, schedule in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        for scaled in (True, False):
            model = make_stages(dist.get_world_size())[dist.get_rank()]
            stage = PipelineStage(model, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
            runner = schedule(stage, 4, loss_fn=cross_entropy, scale_grads=scaled)
            with Monitor(model) as monitor, sounding.watch(model) as watched:
                _run(runner, stage)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                monitor.step()
            left = "scale_grads" in vars(stage)
            found[f"{name} {scaled}"] = {
                "monitor": rows_of(monitor.report),
                "watch": rows_of(watched.report),
                "left": left,
            }
    return found


def _run(runner: Any, stage: PipelineStage) -> None:
    inputs, targets = make_batch()
    if stage.is_first:
        runner.step(inputs)
    else:
        runner.step(target=targets) if stage.is_last else runner.step()


def loose_stages() -> Found:
    """Two stages in one process, under one monitor: what they call is not one pass of a model."""
    return {
        "interleaved": _run_loose(ScheduleInterleaved1F1B),
        "zero bubble": _run_loose(ScheduleInterleavedZeroBubble),  # gradients of inputs and weights in passes apart
    }


def _run_loose(schedule: Any) -> Found:
    world, rank = dist.get_world_size(), dist.get_rank()
    model = nn.ModuleList(make_stages(2 * world)[rank::world])
    stages = [PipelineStage(part, rank + world * i, 2 * world, torch.device("cpu")) for i, part in enumerate(model)]
    runner = schedule(stages, 4, loss_fn=cross_entropy)
    inputs, targets = make_batch()
    with Monitor(model) as monitor, Monitor(model[0]) as first:
        runner.step(*((inputs,) if rank == 0 else ()), **({"target": targets} if rank == world - 1 else {}))
        monitor.step()
        first.step()
    return {"steps": list(monitor.profiles), "first": rows_of(first.report)}


def lonely() -> Found:
    """Only the first process measures: it says what it lacks, and nobody waits for ever."""
    meeting.ARRIVAL = 1.0
    model, halves = shard(make_stack()), cut(make_halves())
    inputs, targets = make_batch()
    found: Found = {}
    if dist.get_rank() == 0:
        try:
            sounding.check(model, inputs, targets)
        except UsageError as error:
            found["check"] = str(error)
        with sounding.watch(model) as watched, Monitor(model) as monitor:
            cross_entropy(model(inputs), targets).backward()
            monitor.step()
        found |= {"watch": rows_of(watched.report), "monitor": rows_of(monitor.report)}
        with Monitor(halves) as parallel:
            cross_entropy(halves(inputs), targets).backward()
            parallel.step()
        found["parallel"] = rows_of(parallel.report)
    else:
        cross_entropy(model(inputs), targets).backward()
        cross_entropy(halves(inputs), targets).backward()
    meeting.ARRIVAL = 60.0
    found["after"] = rows_of(sounding.check(model, inputs, targets, tier="fast"))
    return found


def on_gpu() -> Found:
    """Two processes on one GPU, which NCCL refuses: gloo moves what it can through the memory of the machine."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    inputs, targets = (tensor.to(device) for tensor in make_batch())
    model = make_stack().to(device)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with Monitor(wrapped) as monitor:
        cross_entropy(wrapped(mine(inputs)), mine(targets)).backward()
        monitor.step()
    found: Found = {"data parallel": rows_of(monitor.report) if monitor.profiles else None}
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    makers = {
        "fully sharded": lambda: shard(make_stack().to(device), mesh=mesh),
        "tensor parallel": lambda: cut(make_halves().to(device), mesh),
    }
    for name, make in makers.items():
        try:  # whether torch itself can run it
            cross_entropy(make()(inputs), targets).backward()
        except RuntimeError as error:
            found[name] = f"torch cannot: {error}"
            continue
        found[name] = rows_of(sounding.check(make(), inputs, targets))
    return found


def flat() -> Found:
    """FSDP1 is refused, by all three."""
    model = FullyShardedDataParallel(make_stack(), device_id=torch.device("cpu"))
    attempts = [lambda: sounding.check(model, *make_batch()), lambda: sounding.watch(model), lambda: Monitor(model)]
    return {"refusals": [_refusal(attempt) for attempt in attempts]}


def _refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except SoundingError as error:
        return str(error)
    return ""


SCENES = {
    scene.__name__: scene
    for scene in (
        fully_sharded_check,
        fully_sharded_watch,
        fully_sharded_monitor,
        tensor_parallel_check,
        transformer,
        tensor_parallel_watch,
        tensor_parallel_monitor,
        two_ways,
        variants,
        pipeline,
        loose_stages,
        lonely,
        on_gpu,
        flat,
    )
}


def main() -> None:
    rank, world, store, out, *chosen = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    found = {name: SCENES[name]() for name in chosen}
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # gloo's threads now and then abort an interpreter that ends (pytorch#190489)
    os._exit(0)


if __name__ == "__main__":
    main()
