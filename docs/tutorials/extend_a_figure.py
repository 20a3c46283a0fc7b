"""Reproduce a figure of a paper, then ask a question that the paper does not.

Run it: python docs/tutorials/extend_a_figure.py. It writes tutorial-figure.svg into the current folder.
"""

from __future__ import annotations

import numpy as np
import torch

import sounding
from sounding import plot, simulate

# %% Reproduce: the row of the ledger, measured again at its quick scale. Its verdict is computed from the numbers.
result = sounding.reproduce("orth2021-lemma4")
print(f"{result.id}: {result.verdict} ({result.scale})")
for name, number in list(result.numbers.items())[:3]:
    print(f"  {name} = {number.value:.4g}")

# %% Extend: orth2021 shows that the orthogonality gap of a linear network with batch norm settles at order 1/√width.
# Does it also with the weights that people use against exploding gradients, orthogonal ones?
widths = (16, 32, 64, 128)
gaps: dict[str, list[float]] = {}
for weights in ("gaussian", "orthogonal"):
    gaps[weights] = []
    for width in widths:
        chains = simulate(
            width=width,
            batch_size=8,
            depth=200,
            burn_in=100,
            runs=8,
            weights=weights,
            centring=False,
            measures=["orthogonality_gap"],
            generator=torch.Generator().manual_seed(width),
        )
        gaps[weights].append(chains.averages["orthogonality_gap"].value)
    slope = np.polyfit(np.log(widths), np.log(gaps[weights]), 1)[0]
    print(f"{weights:10}: gap ~ width^{slope:.2f}")

# %% Draw it as the other pictures are drawn.
axes = plot.plot_lines(
    {name: (widths, values) for name, values in gaps.items()}, xlabel="width", ylabel="orthogonality gap", log=True
)
axes.set_xscale("log", base=2)
plot.save(axes.figure, "tutorial-figure.svg")

# %% What the lines above promise.
assert result.verdict == "holds"
assert abs(np.polyfit(np.log(widths), np.log(gaps["gaussian"]), 1)[0] + 0.5) < 0.15
