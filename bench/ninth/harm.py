"""What a short training of each network, its faults and its harmless variants ends with.

`python -m ninth.harm` from the folder above writes harm.json. Each is trained twice by Adam for 50 steps: on the one
batch that `build` gives, and on a new batch in each step. Harmful is what gains, in one of the two, less than 85% of
what the sound twin gains. The gain is measured by the sound loss where the fault leaves the batch as it was, and by
its own loss where it does not.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import bodies, faults, sound

STEPS = 50


def train(build: Callable[[int], Any], rate: float, fresh: bool, measure: Any = None) -> tuple[float, float]:
    """The loss of the first step and the mean of the last eight."""
    model, x, y, loss = build(0)
    torch.manual_seed(1)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)
    seen = []
    for step in range(STEPS):
        if fresh:
            _, x, y, _ = build(step)
        try:
            out = model(*x) if isinstance(x, tuple) else model(x)
            value = loss(out, y)
            with torch.no_grad():
                seen.append(float((measure or loss)(out, y)))
        except ValueError:  # what torch.distributions makes of NaN
            return math.nan, math.nan
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return seen[0], sum(seen[-8:]) / 8


def number(x: float) -> float | None:
    return round(x, 4) if math.isfinite(x) else None


def harm(twin: list, got: list) -> bool:
    return any(
        not math.isfinite(end) or end > t + 0.15 * (start - t) for (start, t), (_, end) in zip(twin, got, strict=True)
    )


def main() -> None:
    only = sys.argv[1:]
    twins, table = {}, {}
    for name, body in bodies.BODIES.items():
        if not only or name in only:
            twins[name] = [train(lambda s, n=name: bodies.build(n, s), body.rate, fresh) for fresh in (False, True)]
            print(name, twins[name], flush=True)
    for name, variant in sound.SOUND.items():
        if variant.body in twins:
            rate = bodies.BODIES[variant.body].rate
            got = [train(lambda s, n=name: sound.build(n, s), rate, fresh) for fresh in (False, True)]
            print(name, harm(twins[variant.body], got), got, flush=True)
    for name, fault in faults.FAULTS.items():
        if fault.body not in twins:
            continue
        body, twin = bodies.BODIES[fault.body], twins[fault.body]
        measure = None if fault.own else body.loss
        got = [train(lambda s, n=name: faults.build(n, s), body.rate, fresh, measure) for fresh in (False, True)]
        table[name] = {
            "harmful": harm(twin, got),
            "one_batch": [number(got[0][1]), number(twin[0][1])],
            "new_batches": [number(got[1][1]), number(twin[1][1])],
        }
        if not table[name]["harmful"] and fault.later:
            table[name]["by_nature"] = fault.later
        print(name, table[name], flush=True)
    if not only:
        rows = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in table.items())
        (Path(__file__).parent / "harm.json").write_text("{\n" + rows + "\n}\n")


if __name__ == "__main__":
    main()
