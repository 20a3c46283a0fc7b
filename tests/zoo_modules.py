"""The animals of the zoo: modules that are awkward to measure, each in its own way."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Reused(nn.Module):
    """One linear layer and one activation, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(6, 6), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.act(self.linear(x))
        return x


class Shared(nn.Module):
    """The same module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = self.first
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.relu(self.first(x))))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


class Boxed(nn.Module):
    """Returns what `wrap` makes of its hidden layer and answer."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.head, self.wrap = nn.Linear(6, 5), nn.Linear(5, 3), wrap

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        return self.wrap(hidden, self.head(hidden))


@dataclass
class Answer:
    """A dataclass output."""

    hidden: Tensor
    logits: Tensor
    note: str = "not a tensor"


class Pair(NamedTuple):
    """A named tuple output."""

    logits: Tensor
    hidden: Tensor


class InPlace(nn.Module):
    """In-place activations after every layer, the first right on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.ELU(inplace=True)
        self.a, self.norm, self.relu = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)
        self.b, self.leaky = nn.Linear(6, 4), nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.leaky(self.b(self.relu(self.norm(self.a(self.start(x))))))


class Checkpointed(nn.Module):
    """Two blocks whose activations are computed again during the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.two = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.head, self.reentrant = nn.Linear(6, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.one, self.two):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedTwice(nn.Module):
    """A shared block inside two reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.head(x)


class Autocast(nn.Module):
    """Runs its body in bfloat16 by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 6), nn.GELU()), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.body(x)
        return self.head(hidden.float())


class Complex(nn.Module):
    """A Fourier layer in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.fourier, self.head = Fourier(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fourier(x).abs())


class Fourier(nn.Module):
    """Complex output."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x)


class Bare(nn.Module):
    """Parameters of its own and functional operations, with a child besides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 6**0.5)
        self.child = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.child(x)) @ self.weight


class Around(nn.Module):
    """A container with a parameter (as a vision transformer's positions) that returns what its head returned."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.shift)


class Hollow(nn.Module):
    """A leaf that returns None, called for its effect."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> None:
        self.seen += 1


class WithHollow(nn.Module):
    """Calls a module that returns None, and owns one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.spy, self.linear, self.idle = Hollow(), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.spy(x)
        return self.linear(x)


class FrozenTrunk(nn.Module):
    """Its trunk runs under no_grad (or inference mode) inside."""

    def __init__(self, guard: Callable[[], Any]) -> None:
        super().__init__()
        self.trunk, self.head, self.guard = nn.Linear(6, 6), nn.Linear(6, 3), guard

    def forward(self, x: Tensor) -> Tensor:
        with self.guard():
            hidden = self.trunk(x)
        return self.head(hidden.clone())


class Recurrent(nn.Module):
    """A recurrent layer over (N, T, D), read at the last step."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True, **options)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x)
        return self.head(output[:, -1])


class TimeFirst(nn.Module):
    """A recurrent layer over (T, N, D) inside a model that takes (N, T, D), with T = N."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x.transpose(0, 1))
        return self.head(output[-1])


class Stepwise(nn.Module):
    """A recurrent cell called once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        state: tuple[Tensor, Tensor] | None = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return state[0]


class Attention(nn.Module):
    """Multi-head attention with dropout, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0])


class Positions(nn.Module):
    """Adds a learned position embedding, whose output knows no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(11, 6), nn.Embedding(5, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.tokens(tokens) + self.places(torch.arange(5)))


class Slices(nn.Module):
    """Leaves whose outputs are views: a chunk that is then changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.part, self.head = nn.Linear(6, 6), Half(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        left = self.part(self.body(x))
        left += 1
        return self.head(left)


class Half(nn.Module):
    """The first half of the features, as a view."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3]


class Keywords(nn.Module):
    """Takes two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
        return self.left(left) * self.right(right)


class Stateful(nn.Module):
    """Keeps a counter, a cache, a replaced buffer and draws from three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.cache = nn.Linear(6, 3), 0, None
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        import numpy

        self.calls += 1
        noise = random.random() + float(numpy.random.rand()) + torch.rand(())  # noqa: NPY002
        self.cache = self.linear(x) + 0 * noise
        self.total = self.total + self.cache.detach().sum(0)
        return self.cache


class Losing(nn.Module):
    """Returns its own loss beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.linear(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Residual(nn.Module):
    """x + f(x) with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def frozen() -> nn.Module:
    """The first layers frozen, as for fine-tuning."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    for parameter in model[:2].parameters():
        parameter.requires_grad_(False)
    return model


def frozen_embedding() -> nn.Module:
    """Nothing before the head asks for a gradient, and an in-place activation follows the frozen embedding."""
    model = nn.Sequential(nn.Embedding(11, 6), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(30, 3))
    model[0].weight.requires_grad_(False)
    return model


def normed(kind: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A parametrized layer between plain ones."""
    return nn.Sequential(nn.Linear(6, 6), kind(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 3))


def transformer(**options: Any) -> nn.Module:
    """Torch's own encoder; in eval mode and without gradients it would take its fast path past every hook."""
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.1, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def compiled() -> nn.Module:
    """A compiled part inside a plain model."""
    return nn.Sequential(nn.Linear(6, 6), torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), backend="eager"))


def scripted(module: nn.Module) -> nn.Module:
    """torch.jit.script, which newer versions call deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)
