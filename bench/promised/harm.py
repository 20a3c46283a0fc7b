"""Train each faulty network and its healthy twin for the same few steps, and write both losses to harm.json.

    $ python -m bench.promised.harm [NAME ...]

With names only these faults are trained, and the other entries of the file stay as they are. A loss is that of the
task, on batches that were not trained on, in evaluation mode, relative to the variance of the targets where it is a
squared error. It is the mean over seeds; `null` stands for NaN or infinity.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from bench.promised import bodies, faults
from bench.promised.registry import FAULTS, Fault, lines
from torch import Tensor, nn

FILE = Path(__file__).parent / "harm.json"
SEEDS = (0, 1)
HELD_OUT = 4
LEAST = 0.1  # of what the healthy network learns, lost by the faulty one


def train(model: nn.Module, body: str, fault: Fault | None, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """As many steps as the body's recipe says, each on a fresh batch."""
    recipe = bodies.BODIES[body]
    g = torch.Generator().manual_seed(seed + 2000)
    loss = fault.loss if fault is not None and fault.loss is not None else recipe.loss
    model.train()
    for _ in range(recipe.steps):
        inputs, targets = faults.drawn(fault, g) if fault is not None else recipe.batch(g, recipe.size)
        value = loss(bodies.call(model, inputs), targets)
        optimizer.zero_grad()
        if value.requires_grad:
            value.backward()
        optimizer.step()


@torch.no_grad()
def judge(model: nn.Module, body: str, fault: Fault | None, how: str) -> float:
    """The loss of the task on batches that nobody trained on."""
    recipe = bodies.BODIES[body]
    g = torch.Generator().manual_seed(9000)
    model.eval()
    values = []
    for _ in range(HELD_OUT):
        inputs, targets = recipe.batch(g, max(recipe.size, 32))
        if how == "own" and fault is not None and fault.batch is not None:
            inputs, targets = fault.batch(inputs, targets)
        if how == "prefix":
            values.append(prefix_loss(model, inputs, targets))
            continue
        value = recipe.loss(bodies.call(model, inputs), targets).item()
        values.append(value / targets.var().item() if recipe.loss is bodies.squares else value)
    return sum(values) / len(values)


def prefix_loss(model: nn.Module, inputs: bodies.Inputs, targets: Tensor) -> float:
    """The loss at positions behind which the network gets nothing: what it would say when it is used."""
    assert isinstance(inputs, Tensor)
    lengths = range(4, inputs.shape[1] + 1, 4)
    parts = [bodies.cross_entropy(model(inputs[:, :n])[:, -1], targets[:, n - 1]).item() for n in lengths]
    return sum(parts) / len(parts)


def healthy(body: str, how: str) -> tuple[float, list[float]]:
    """The loss before the first step, and after training with each seed."""
    before, after = 0.0, []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = bodies.BODIES[body].make()
        before = judge(model, body, None, how)
        train(model, body, None, faults.healthy_optimizer(body, model.parameters()), seed)
        after.append(judge(model, body, None, how))
    return before, after


def faulty(name: str) -> float:
    """The loss after training with the fault."""
    fault = FAULTS[name]
    after = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = faults.made(fault)
        train(model, fault.body, fault, faults.optimizer(name, model), seed)
        after.append(judge(model, fault.body, fault, fault.judge))
    return sum(after) / len(after)


def entry(name: str, known: dict[tuple[str, str], tuple[float, list[float]]]) -> dict[str, Any]:
    fault = FAULTS[name]
    key = (fault.body, "prefix" if fault.judge == "prefix" else "clean")
    if key not in known:
        known[key] = healthy(*key)
    before, after = known[key]
    sound, ill = sum(after) / len(after), faulty(name)
    lost = (ill - sound) / (before - sound)
    harmful = not math.isfinite(ill) or (lost >= LEAST and ill - sound > 3 * (max(after) - min(after)))
    row: dict[str, Any] = {
        "body": fault.body,
        "steps": bodies.BODIES[fault.body].steps,
        "judge": fault.judge,
        "loss_at_start": round(before, 4),
        "healthy_loss": round(sound, 4),
        "faulty_loss": round(ill, 4) if math.isfinite(ill) else None,
        "harmful": harmful,
    }
    if fault.by_nature is not None and not harmful:
        row["by_nature"] = fault.by_nature
    return row


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    rows = json.loads(FILE.read_text()) if names and FILE.exists() else {}
    known: dict[tuple[str, str], tuple[float, list[float]]] = {}
    for name in names or FAULTS:
        rows[name] = entry(name, known)
        print(name, rows[name]["healthy_loss"], rows[name]["faulty_loss"], rows[name]["harmful"], flush=True)
    ordered = {name: rows[name] for name in FAULTS if name in rows}
    FILE.write_text(lines(ordered) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
