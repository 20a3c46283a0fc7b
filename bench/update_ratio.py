"""Does a large update warn of a loss that rises? Trainings on digits: the first step's largest update ratio, the loss.

    python bench/update_ratio.py

SGD and Adam, 2 and 10 ReLU layers of width 64, learning rates up to where training fails, 4 epochs of batch 128.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from sounding import Monitor
from sounding.data import batches, load_dataset
from sounding.train.monitor.changes import LARGE_UPDATE

RATES = {torch.optim.Adam: (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1), torch.optim.SGD: (0.01, 0.1, 0.3, 1.0, 3.0)}
SPIKE = 1.3  # the worst loss over the first one


def train(kind: type[torch.optim.Optimizer], rate: float, depth: int) -> tuple[float, float, float]:
    """The largest update ratio of the first step, the worst loss over the first, and the mean of the last five."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(depth):
        layers += [nn.Linear(64, 64), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = kind(model.parameters(), lr=rate)  # type: ignore[call-arg]
    generator, losses = torch.Generator().manual_seed(0), []
    with Monitor(model, schedule=[0], optimizer=optimizer) as monitor:
        for _ in range(4):
            for inputs, labels in batches(load_dataset("digits"), 128, generator=generator):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    ratio = max(row.value for row in monitor.profile.rows if row.measure == "update_ratio")
    worst = max((loss if loss == loss else float("inf")) for loss in losses)
    return ratio, worst / losses[0], sum(losses[-5:]) / 5


def main() -> None:
    """Print a row for each training, then how often a large update and a rise of the loss came together."""
    logging.getLogger("sounding.monitor").setLevel(logging.ERROR)
    counts = {(large, spiked): 0 for large in (False, True) for spiked in (False, True)}
    print("optimizer  layers   rate  update ratio  worst loss  last loss")
    for kind, rates in RATES.items():
        for depth in (2, 10):
            for rate in rates:
                ratio, worst, last = train(kind, rate, depth)
                counts[ratio > LARGE_UPDATE, worst > SPIKE] += 1
                print(f"{kind.__name__:9}  {depth:6}  {rate:5g}  {ratio:12.3g}  {worst:10.3g}  {last:9.3g}", flush=True)
    for large, words in ((True, "above"), (False, "below")):
        spiked, quiet = counts[large, True], counts[large, False]
        print(f"update ratio {words} {LARGE_UPDATE}: the loss rose in {spiked} of {spiked + quiet}")


if __name__ == "__main__":
    main()
