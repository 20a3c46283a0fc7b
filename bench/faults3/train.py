"""Short trainings of every network with and without each fault; writes what each fault costs to harm.json.

python bench/faults3/train.py [--only PATTERN]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from pathlib import Path

import torch
from common import Network, called

from networks import NETWORKS

HARM = Path(__file__).with_name("harm.json")
SEEDS = (0, 1)
LAST = 10
# a fault does visible harm where a quarter of what the sound network learns is lost, at the end or on the way there
VISIBLE = 0.25
SCORES = ("score", "score_over_all")


def trained(network: Network, seed: int, fault: str | None) -> tuple[float, float, float, float]:
    """The loss at the first step, the mean loss over the last steps, and the mean scores over the last and over all."""
    model, _, _, chosen = network.make(seed, fault)
    loss = {"cross_entropy": torch.nn.functional.cross_entropy, "mse": torch.nn.functional.mse_loss}.get(chosen, chosen)
    asked = [each for each in model.parameters() if each.requires_grad]
    optimizer = (
        torch.optim.SGD(asked, network.rate, momentum=0.9) if network.sgd else torch.optim.Adam(asked, network.rate)
    )
    generator = torch.Generator().manual_seed(seed)
    losses, scores = [], []
    for _ in range(network.steps):
        inputs, targets = network.batch(generator, fault)
        output = called(model, inputs)
        value = loss(output, targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
        with torch.no_grad():
            scores.append(network.score(output, targets))
    return losses[0], sum(losses[-LAST:]) / LAST, sum(scores[-LAST:]) / LAST, sum(scores) / len(scores)


def measured(network: Network, fault: str | None) -> dict[str, float]:
    """Means over the seeds, rounded; a loss that is not a number is written as −1."""
    runs = [trained(network, seed, fault) for seed in SEEDS]
    first, last, score, over_all = (sum(each) / len(SEEDS) for each in zip(*runs, strict=True))
    return {
        "first_loss": round(first, 3) if math.isfinite(first) else -1,
        "last_loss": round(last, 3) if math.isfinite(last) else -1,
        "score": round(score, 3),
        "score_over_all": round(over_all, 3),
    }


def lost(sound: dict[str, float], faulty: dict[str, float], chance: float, key: str) -> float:
    """The share of what the sound network has learned that is missing with the fault."""
    return (sound[key] - faulty[key]) / (sound[key] - chance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression for network:fault")
    only = parser.parse_args().only
    record = json.loads(HARM.read_text()) if HARM.exists() else {}
    for network in NETWORKS:
        sound = f"{network.name}:sound"
        names = [
            f"{network.name}:{fault.name}"
            for fault in network.faults
            if re.search(only, f"{network.name}:{fault.name}")
        ]
        if re.search(only, sound) or (names and sound not in record):
            names = [sound, *names]
        for name in names:
            begun = time.process_time()
            fault = next((each for each in network.faults if name == f"{network.name}:{each.name}"), None)
            row = measured(network, fault and fault.name)
            if fault:
                row["lost"] = round(max(lost(record[sound], row, network.chance, key) for key in SCORES), 3)
                row["severity"] = "medium" if fault.harm or row["lost"] >= VISIBLE else "low"
            record[name] = row
            print(f"{name:34s} {json.dumps(row)} ({time.process_time() - begun:.0f} s)", flush=True)
        HARM.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
