"""Foreign modules that a check must not refuse: what they ask of their inputs, and layers called by `.forward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6


class Saliency(nn.Module):
    """Sets `requires_grad` on its input and differentiates with respect to it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad = True
        energy = self.body(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


class ReadsGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(False)
        result: Tensor = self.body(x)
        return result


class CallsNumpy(nn.Module):
    """Preprocessing in numpy, as in audio models."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(torch.from_numpy(x.numpy() * 2.0))
        return result


class FrozenNumpy(nn.Module):
    """A frozen trunk whose features go through numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.from_numpy(self.trunk(x).numpy()))
        return result


class Masked(nn.Module):
    """Attention that takes its mask as an argument, with −inf where it must not look."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.head(self.attention(x, x, x, attn_mask=mask)[0][:, -1])
        return result


class MaskedTokens(nn.Module):
    """Tokens, and a mask that is the only floating-point input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = Masked()

    def forward(self, mask: Tensor, tokens: Tensor) -> Tensor:
        result: Tensor = self.body(self.embedding(tokens), mask)
        return result


def causal(size: int) -> Tensor:
    return torch.full((size, size), float("-inf")).triu(1)


class SparseInput(nn.Module):
    """A graph convolution: sparse adjacency times features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        hidden = torch.relu(torch.sparse.mm(adjacency, self.first(x)))
        result: Tensor = torch.sparse.mm(adjacency, self.second(hidden))
        return result


class BagOfWords(nn.Module):
    """The only input is a sparse matrix of counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, counts: Tensor) -> Tensor:
        result: Tensor = self.head(counts @ self.weight)
        return result


class ByForward(nn.Module):
    """Layers that are called by `.forward`, as in much code that was ported from elsewhere."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act.forward(layer.forward(x))
        return x


class HalfByForward(nn.Module):
    """Blocks that are called by `.forward`, whose children are called as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.two = ByForward(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two.forward(self.one.forward(x))


class Patched(nn.Module):
    """A layer whose forward was replaced on the instance, as offloading libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        plain = self.body.forward
        self.body.forward = lambda x: plain(x) * 2  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x))
        return result


def exported() -> nn.Module:
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    program: Any = torch.export.export(inner, (torch.randn(8, WIDTH),))
    module: nn.Module = program.module()
    return module


def exported_inside() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), exported(), nn.Linear(3, 3))
