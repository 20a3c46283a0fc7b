"""Trains each faulty network and its healthy twin for the same steps; writes harm.json."""

import json
import math
from pathlib import Path

import torch
from bench.later import bodies, faults

STEPS = 60


def train(built: bodies.Built, body: bodies.Body, steps: int = STEPS) -> tuple[float, float]:
    """The loss at the start and behind the last step."""
    model, x, y, loss = built
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = getattr(torch.optim, body.optimizer)(parameters, lr=body.rate)
    losses = []
    for _ in range(steps):
        value = loss(model(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses[0], sum(losses[-5:]) / 5


def main() -> None:
    torch.set_num_threads(1)
    healthy = {name: train(bodies.build(name, 0), body)[1] for name, body in bodies.BODIES.items()}
    lines: dict[str, list[str]] = {}
    for name, fault in faults.FAULTS.items():
        start, end = train(faults.build(name, 0), bodies.BODIES[fault.body])
        twin = healthy[fault.body]
        harmful = not math.isfinite(end) or end > twin + max(0.15 * abs(twin), 0.01)
        row = {"faulty": round(end, 4) if math.isfinite(end) else None, "healthy": round(twin, 4), "harmful": harmful}
        if fault.by_nature:
            row |= {"by_nature": fault.by_nature}
        lines.setdefault(fault.body, []).append(f"{json.dumps(name)}: {json.dumps(row)}")
        print(name, f"{start:.4g}", row)
    rows = ",\n".join(", ".join(line) for line in lines.values())
    Path(__file__).with_name("harm.json").write_text("{\n" + rows + "\n}\n")


if __name__ == "__main__":
    main()
