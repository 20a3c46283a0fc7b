"""Read theory off a transformer: what a network of this description does at infinite width, beside what this one does.

Run it: python docs/tutorials/theory_of_a_transformer.py
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import sounding

# %% A pre-norm encoder of six blocks. PyTorch copies one block six times, so every block is drawn anew first.
torch.manual_seed(0)
block = nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
model = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
sounding.repair.unclone_(model, generator=torch.Generator().manual_seed(0))
tokens = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(1))

# %% What theory reads in it: one line for every operation, with the law of its weights.
blueprint = sounding.read(model, tokens)
print("\n".join(str(blueprint).splitlines()[:15]), "\n…")

# %% A check lays the prediction beside the measurement, each with its own source.
report = sounding.check(model, tokens, theory=True)
profile = report.profile
measured = {(row.layer, row.measure): row.value for row in profile.where(lambda row: row.source == "check")}
shares = [
    abs(measured[row.layer, row.measure] - row.value) < 1.96 * row.stderr
    for row in profile.where(lambda row: row.source == "theory")
    if row.stderr is not None and (row.layer, row.measure) in measured
]
print(f"{np.mean(shares):.0%} of {len(shares)} measured numbers lie in theory's 95% band")

# %% The size of the stream: every block adds to it, so that late blocks change it less and less.
stream = profile.series("stream_mean_square", source="check").value
print("mean square of the stream after each addition:", " ".join(f"{value:.2f}" for value in stream))

# %% What would happen at other depths, without drawing a weight.
for depth in (6, 24, 96):
    for placement in ("pre", "post"):
        found = sounding.predict.transformer("gelu", depth=depth, tokens=16, placement=placement, head_size=16)
        print(f"{depth:3d} blocks, norm {placement:4}: tokens end with a cosine of {found.correlation[-1]:.3f}")

# %% What the lines above promise.
assert len(shares) > 50
assert np.mean(shares) > 0.8
assert stream[-1] > stream[0]
