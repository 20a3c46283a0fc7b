"""Diagnose and repair a network of 100 layers, then train it. Run it: python docs/tutorials/repair_100_layers.py"""

from __future__ import annotations

import copy

import torch
from torch import nn

import sounding

# %% A network as one might write it: 100 layers of 64 units, ReLU, weights by He's rule, no normalization.
torch.manual_seed(0)
layers: list[nn.Module] = []
for _ in range(100):
    linear = nn.Linear(64, 64)
    nn.init.kaiming_normal_(linear.weight)
    nn.init.zeros_(linear.bias)
    layers += [linear, nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(64, 10))
digits = sounding.data.load_batch("digits", batch_size=512, generator=torch.Generator().manual_seed(0), shape=(64,))
batch = digits.inputs[:128], digits.targets[:128]

# %% Diagnose. The verdict is one sentence; the profile is the table over depth behind it.
report = sounding.check(model, *batch)
print(report.verdict.summary)
directions = report.profile.series("participation_ratio", source="check").value
print(f"directions that carry the batch: {directions[0]:.1f} at the input, {directions[-1]:.2f} at the output")

# %% One cure alone may bring another illness: batch norm keeps the samples apart and makes the gradients explode.
plan = sounding.plan(model, *batch, method="add_batchnorm")
print("add_batchnorm alone:", plan.evidence.after.verdict.summary)

# %% So theory chooses the settings of the batch norms for this depth as well.
plan = sounding.plan(model, *batch, method=["add_batchnorm", "tune_batchnorm"])
print("with tune_batchnorm:", plan.evidence.after.verdict.summary)


# %% Train the network as it was and as it is repaired, with the same steps.
def train(network: nn.Module, *, steps: int = 60, rate: float = 0.05) -> float:
    """The loss on all samples after some steps of plain gradient descent."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate)
    for _ in range(steps):
        chosen = torch.randint(len(digits.inputs), (128,), generator=generator)
        loss = nn.functional.cross_entropy(network(digits.inputs[chosen]), digits.targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(network(digits.inputs), digits.targets))


before = train(copy.deepcopy(model))
plan.apply()
after = train(model)
print(f"loss after 60 steps: {before:.2f} as it was, {after:.2f} repaired; guessing has 2.30")

# %% What the lines above promise.
assert report.verdict.status == "unhealthy"
assert plan.evidence.after.verdict.status == "healthy"
assert after < 1.8 < before
