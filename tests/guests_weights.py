"""Foreign modules that change their own weights and buffers while they run, written as third-party code writes them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 6


class Host(nn.Module):
    """Two linear layers; what a guest does on the way stands in `act`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.act(hidden)
        result: Tensor = self.second(hidden)
        return result

    def act(self, hidden: Tensor) -> None:
        """Nothing here."""


# --- parameters ------------------------------------------------------------------------------------------------------


class MaxNormEmbedding(nn.Module):
    """`Embedding(max_norm=…)` renormalizes its weight in place, and the head is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, max_norm=0.3)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.embedding(tokens).clone())
        return result


class MaxNormBag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, WIDTH, max_norm=0.2)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.bag(tokens))
        return result


class LoraLinear(nn.Linear):
    """loralib's layer: the product of the factors is merged into the weight on eval() and taken out on train()."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__(width, width)
        self.lora_A = nn.Parameter(torch.randn(rank, width))
        self.lora_B = nn.Parameter(torch.randn(width, rank))
        self.scaling, self.merged = 0.3, False

    def train(self, mode: bool = True) -> LoraLinear:
        super().train(mode)
        if mode and self.merged:
            self.weight.data -= (self.lora_B @ self.lora_A) * self.scaling
            self.merged = False
        elif not mode and not self.merged:
            self.weight.data += (self.lora_B @ self.lora_A) * self.scaling
            self.merged = True
        return self

    def forward(self, x: Tensor) -> Tensor:
        plain = functional.linear(x, self.weight, self.bias)
        return plain if self.merged else plain + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def merged_lora() -> nn.Module:
    return nn.Sequential(LoraLinear(WIDTH), nn.ReLU(), LoraLinear(WIDTH)).eval()


class ClampedByData(Host):
    """The critic of a Wasserstein GAN that clips its weights in forward."""

    def act(self, hidden: Tensor) -> None:
        for weight in self.parameters():
            weight.data.clamp_(-0.05, 0.05)


class ClampedInPlace(Host):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


class ClampedThroughNumpy(Host):
    """A view that numpy holds since the construction: no version counter moves."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = self.second.weight.detach().numpy()

    def act(self, hidden: Tensor) -> None:
        np.clip(self.raw, -0.05, 0.05, out=self.raw)


class UnitRows(Host):
    """Weights normalized by assignment to `.data`, as in cosine classifiers."""

    def forward(self, x: Tensor) -> Tensor:
        self.second.weight.data = functional.normalize(self.second.weight.data, dim=1)
        return super().forward(x)


class WrittenStorage(Host):
    def act(self, hidden: Tensor) -> None:
        self.second.bias.untyped_storage().fill_(0)


class NewParameter(Host):
    """A layer that replaces its own parameter object."""

    def forward(self, x: Tensor) -> Tensor:
        self.second.weight = nn.Parameter(self.second.weight.detach() * 0.5)
        return super().forward(x)


class InnerOptimizer(Host):
    """Test-time training: a gradient step on an inner loss inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.Adam(self.inner.parameters(), lr=0.1)

    def act(self, hidden: Tensor) -> None:
        with torch.enable_grad():
            loss = (self.inner(hidden.detach()) - hidden.detach()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()


class MomentumInside(InnerOptimizer):
    """An optimizer whose momentum exists before the check, and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.act(torch.ones(2, WIDTH))

    def act(self, hidden: Tensor) -> None:
        super().act(hidden)
        self.scheduler.step()


class MomentumTeacher(Host):
    """An exponential average of the weights, kept as another module and moved in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def act(self, hidden: Tensor) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


class Hebbian(Host):
    def act(self, hidden: Tensor) -> None:
        with torch.no_grad():
            self.second.weight.addmm_(hidden.T, hidden, alpha=0.01)


class FlatWeights(nn.Module):
    """All weights are views of one flat parameter's memory, as in flattened optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(2 * WIDTH * WIDTH) * 0.3)
        self.left = nn.Parameter(self.flat.data[: WIDTH * WIDTH].view(WIDTH, WIDTH))
        self.right = nn.Parameter(self.flat.data[WIDTH * WIDTH :].view(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.flat.data.mul_(0.9)
        return torch.tanh(x @ self.left) @ self.right


class FrozenOnTheFly(Host):
    def act(self, hidden: Tensor) -> None:
        self.second.weight.requires_grad_(False)
        self.second.bias.requires_grad = not self.second.bias.requires_grad


class InnerBackward(Host):
    """A penalty whose gradient is left in `.grad` by forward."""

    def act(self, hidden: Tensor) -> None:
        with torch.enable_grad():
            self.first.weight.square().sum().backward()


class Taught(Host):
    """A parameter that carries attributes and hooks of its own."""

    def act(self, hidden: Tensor) -> None:
        self.second.weight.seen = getattr(self.second.weight, "seen", 0) + 1  # type: ignore[attr-defined]
        self.second.weight.register_hook(lambda gradient: gradient * 2)
        self.first.weight.register_post_accumulate_grad_hook(lambda _: None)


class Half(Host):
    """A module that casts its own layer and casts it back with less precision."""

    def act(self, hidden: Tensor) -> None:
        self.second.bfloat16().float()


# --- buffers and tensors in plain attributes -------------------------------------------------------------------------


class ExpandedBuffer(Host):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1).expand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class InferenceBuffer(Host):
    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.register_buffer("scale", torch.full((WIDTH,), 2.0))
            self.offset = torch.full((WIDTH,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.offset * x


def inference_weights() -> nn.Module:
    """A model that was loaded under inference_mode."""
    with torch.inference_mode():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


class SparseBuffer(Host):
    """A graph's adjacency, whose values decay and whose entries grow."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(WIDTH).to_sparse())
        self.compressed = torch.eye(WIDTH).to_sparse_csr()

    def act(self, hidden: Tensor) -> None:
        self.adjacency.mul_(0.5)
        self.adjacency.add_(torch.ones(WIDTH, WIDTH).to_sparse())
        self.compressed.values().mul_(0.5)


class QuantizedBuffer(Host):
    def __init__(self) -> None:
        super().__init__()
        self.codes = torch.quantize_per_tensor(torch.linspace(-1, 1, WIDTH), 0.05, 0, torch.qint8)

    def act(self, hidden: Tensor) -> None:
        self.codes.copy_(torch.quantize_per_tensor(torch.zeros(WIDTH), 0.05, 0, torch.qint8))


class QueueBuffer(Host):
    """MoCo's queue: written in place at a pointer that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long), persistent=False)

    def act(self, hidden: Tensor) -> None:
        at = int(self.pointer)
        self.queue[at : at + 2] = hidden[:2].detach()
        self.pointer[0] = (at + 2) % 16


class GraphBuffer(Host):
    """A memory that is written with what still hangs on the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(WIDTH)

    def act(self, hidden: Tensor) -> None:
        self.memory.copy_(hidden.mean(0))


class GrowingBuffer(Host):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(2))

    def act(self, hidden: Tensor) -> None:
        self.history.resize_(5).zero_()
        self.register_buffer("late", hidden.detach().mean(0))


class PlainTensors(Host):
    """A running mean that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.held = torch.zeros(WIDTH), {"square": [torch.zeros(WIDTH)]}

    def act(self, hidden: Tensor) -> None:
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        self.held["square"][0].add_(hidden.detach().square().mean(0))


class DelayedNorm(nn.Module):
    """Weight and spectral norm in torch's old style, with a buffer of power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.b = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x))
        return result
