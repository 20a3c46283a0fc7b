"""Train each faulty network and its healthy twin alike, and write what the mistake costs to ``harm.json``.

Run ``python -m bench.fresh.harm [NAME ...]`` in the root of the repository. Losses are means over two
seeds. ``by_nature`` is written by hand, where no loss of a short training shows why the mistake is one.
"""

from __future__ import annotations

import json
import math
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from bench.fresh import bodies, faults

STEPS, SEEDS, FILE = 80, (0, 1), Path(__file__).with_name("harm.json")
# Their batch or loss is the mistake, so what they learned is judged on the healthy twin's batch and loss.
TRUE = [
    "relpos_sorted_by_class",
    "sepcnn_sigmoid_in_the_loss",
    "table_targets_without_last_axis",
    "points_batch_of_two",
    "towers_sampler_repeats_itself",
    "multi_head_left_out_of_the_loss",
    "graph_loss_over_nodes",
    "sandwich_targets_not_moved",
]


def value(model: Any, x: Any, y: Any, loss: Any) -> torch.Tensor:
    return loss(model(*x) if isinstance(x, tuple) else model(x), y)


def train(name: str, build: Any, seed: int) -> float:
    """The loss of the network of this name after the steps."""
    body, (model, x, y, loss) = bodies.BODIES[name.split("_")[0]], build(name, seed)
    model.train()
    parameters = [q for q in model.parameters() if q.requires_grad]
    adam = body.optimizer == "adam"
    optimizer = torch.optim.Adam(parameters, body.rate) if adam else torch.optim.SGD(parameters, body.rate, 0.9)
    torch.manual_seed(seed)
    for _ in range(STEPS):
        optimizer.zero_grad()
        value(model, x, y, loss).backward()
        optimizer.step()
    if name in TRUE:
        _, x, y, loss = bodies.build(name.split("_")[0], seed)
    with torch.no_grad():
        return sum(value(model, x, y, loss).item() for _ in range(5)) / 5


def main(names: list[str]) -> None:
    entries = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names or faults.FAULTS:
        twin = sum(train(name.split("_")[0], bodies.build, seed) for seed in SEEDS) / len(SEEDS)
        loss = sum(train(name, faults.build, seed) for seed in SEEDS) / len(SEEDS)
        harmful = not math.isfinite(loss) or loss > 1.2 * twin + 0.001
        entry = {"healthy": round(twin, 4), "faulty": float(f"{loss:.4g}") if math.isfinite(loss) else "not finite"}
        kept = {} if harmful else {"by_nature": entries.get(name, {}).get("by_nature", "")}
        entries[name] = {**entry, "harmful": harmful, **kept}
    lines = []
    for _, group in groupby((name for name in faults.FAULTS if name in entries), lambda name: name.split("_")[0]):
        lines.append(", ".join(f'"{name}": {json.dumps(entries[name])}' for name in group))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
