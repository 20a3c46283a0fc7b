"""Models that several processes share, and their numbers: the same in one process and in many."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from sounding.probe.inside.rows import INSIDE
from sounding.probe.records import Report
from sounding.probe.sharded import WHOLE_ONLY
from sounding.train.monitor.moved import APART, UPDATE_RATIO


class Half(nn.Module):
    """A residual block whose two maps can be cut over processes, with an activation between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Halves(nn.Module):
    """Three such blocks between layers that every process holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Half(8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tokens(nn.Module):
    """A transformer block: tokens, attention by heads, norms whose positions can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.query, self.key, self.value, self.join = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        return self.join(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.attend(self.norm1(x))
        return self.out(x + self.down(self.act(self.up(self.norm2(x)))))


def make_tokens() -> tuple[Tokens, Tensor, Tensor]:
    """The model, tokens of 6 samples at 4 positions, and the tokens that follow."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, 12, (6, 4), generator=generator) for _ in range(2))
    return Tokens(), tokens, targets


class Again(nn.Module):
    """A body whose activations are computed again in the backward pass."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=True)


def make_halves() -> Halves:
    torch.manual_seed(0)
    return Halves()


def make_stack() -> nn.Sequential:
    """Widths that four processes do not divide: shards are uneven, and some are empty."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 7), nn.Linear(7, 3))


def make_stages(count: int) -> list[nn.Sequential]:
    """A network of eight layers in so many pieces, with names that go on from piece to piece."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) if index % 2 == 0 else nn.Tanh() for index in range(16)]
    size = len(layers) // count
    return [
        nn.Sequential(OrderedDict((str(index), layers[index]) for index in range(start, start + size)))
        for start in range(0, len(layers), size)
    ]


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 8, generator=generator), torch.randint(0, 3, (24,), generator=generator)


def rows_of(report: Report) -> dict[str, Any]:
    """Every number by "layer name measure", what was not measured, and what the settings say of processes.

    What is measured only where one process holds the model whole is left out; `apart` tells whether that was said.
    """
    rows = {
        f"{row.layer} {row.name} {row.measure}": row.value
        for row in report.profile
        if row.source != "theory" and row.measure not in INSIDE | {UPDATE_RATIO}
    }
    said = [item for item in report.unmeasured if item.reason in (WHOLE_ONLY, APART)]
    gaps = {item.name: item.reason for item in report.unmeasured if item not in said}
    parallel = report.profile.settings.get("parallel")
    return {"rows": rows, "unmeasured": gaps, "parallel": parallel, "apart": len(said) > 0}
