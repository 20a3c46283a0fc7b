"""How long the audit takes on one core for a transformer of 100 million parameters: `python bench/audit_cost.py`."""

from __future__ import annotations

import time

import torch
from torch import nn

from sounding.start import audit


def main() -> None:
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    model = nn.ModuleDict({"embed": nn.Embedding(30_000, 768), "blocks": nn.TransformerEncoder(layer, 12)})
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.02)
    torch.set_num_threads(1)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        result = audit(model)
        times.append(time.perf_counter() - begin)
    print(f"{result.parameters / 1e6:.0f} million parameters: {min(times):.2f} s, the best of three")


if __name__ == "__main__":
    main()
