"""Data and records that the networks with planted faults share.

An `Arch` says how to build a network (healthy with fault=None) and how to draw a batch. A `Case` is one planted
fault with the expectation that was written down before the first run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

ANY = ("low", "medium", "high")  # a careful engineer would want to know
WARN = ("medium", "high")  # it stops or plainly hurts a training


@dataclass(frozen=True)
class Arch:
    name: str
    make: Callable[[str | None], nn.Module]  # fault -> network; the seed is set before
    draw: Callable[[torch.Generator, str | None], tuple[Any, Tensor]]  # (inputs, targets)
    loss: Callable[[Any, Tensor], Tensor] | None = None  # None: what sounding.check takes by itself
    metric: str = "accuracy"  # or "r2"
    adam: float = 3e-3
    sgd: float = 0.05
    twin: str = "healthy"  # what the healthy twin is, where it is not obvious


@dataclass(frozen=True)
class Case:
    arch: str
    fault: str
    kind: str  # the kind of fault, over architectures
    names: str  # regular expression: a module, parameter or word that a finding must name
    severities: tuple[str, ...]
    note: str  # what is wrong, in a user's words


_DIGITS = load_digits()
_PIXELS = torch.tensor(_DIGITS.images, dtype=torch.float32)
_PIXELS = (_PIXELS - _PIXELS.mean()) / _PIXELS.std()
_LABELS = torch.tensor(_DIGITS.target)


def digits(generator: torch.Generator, size: int = 64, side: int = 8) -> tuple[Tensor, Tensor]:
    """Images (size, 1, side, side) and labels."""
    chosen = torch.randint(len(_LABELS), (size,), generator=generator)
    images = _PIXELS[chosen][:, None]
    if side != 8:
        images = F.interpolate(images, size=(side, side), mode="bilinear")
    return images, _LABELS[chosen]


def _fixed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


VOCABULARY = 32
_FOLLOWS = torch.randperm(VOCABULARY, generator=_fixed(11))


def chain(generator: torch.Generator, size: int = 32, length: int = 24) -> tuple[Tensor, Tensor]:
    """Tokens of which each follows from the last but one in 8 of 10 cases; targets are the next tokens."""
    tokens = torch.randint(VOCABULARY, (size, length + 1), generator=generator)
    noise = torch.rand(size, length + 1, generator=generator) < 0.2
    for place in range(2, length + 1):
        tokens[:, place] = torch.where(noise[:, place], tokens[:, place], _FOLLOWS[tokens[:, place - 2]])
    return tokens[:, :-1], tokens[:, 1:]


_TOPICS = torch.randn(6, VOCABULARY, generator=_fixed(12)).mul(0.8).softmax(1)


def topics(generator: torch.Generator, size: int = 32, length: int = 24) -> tuple[Tensor, Tensor]:
    """Sequences of words whose frequencies depend on the class."""
    classes = torch.randint(6, (size,), generator=generator)
    return torch.multinomial(_TOPICS[classes], length, replacement=True, generator=generator), classes


def rows(generator: torch.Generator, size: int = 64) -> tuple[Tensor, Tensor]:
    """Digits as sequences of eight rows."""
    images, labels = digits(generator, size)
    return images[:, 0], labels


def recall(generator: torch.Generator, size: int = 64, length: int = 20) -> tuple[Tensor, Tensor]:
    """The first step shows one of 8 symbols, noise follows; the class is that symbol."""
    classes = torch.randint(8, (size,), generator=generator)
    steps = torch.randn(size, length, 8, generator=generator) * 0.3
    steps[:, 0] += 2 * F.one_hot(classes, 8)
    return steps, classes


def translation(generator: torch.Generator, size: int = 32, length: int = 12) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(source, target so far) and the target, which is the source in another alphabet."""
    source = torch.randint(1, VOCABULARY, (size, length), generator=generator)
    target = _FOLLOWS[source]
    shifted = torch.cat([torch.zeros(size, 1, dtype=torch.long), target[:, :-1]], 1)
    return (source, shifted), target


def noised(generator: torch.Generator, size: int = 64) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(noisy digits, time in 0..999) and the noise."""
    images, _ = digits(generator, size)
    time = torch.randint(1000, (size,), generator=generator)
    keep = torch.cos(time / 1000 * math.pi / 2)[:, None, None, None]
    noise = torch.randn(images.shape, generator=generator)
    return (keep * images + (1 - keep**2).sqrt() * noise, time), noise


def blocks_graph(generator: torch.Generator, size: int = 96) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Features and adjacency (0 and 1, with loops) of a graph of four communities; the class is the community."""
    classes = torch.randint(4, (size,), generator=generator)
    same = classes[:, None] == classes[None]
    edges = torch.rand(size, size, generator=generator) < torch.where(same, 0.3, 0.03)
    edges = edges.triu(1)
    adjacency = (edges | edges.T).float() + torch.eye(size)
    features = torch.randn(size, 16, generator=generator)
    features[:, :4] += F.one_hot(classes, 4) * 1.0
    return (features, adjacency), classes


def masks(generator: torch.Generator, size: int = 32) -> tuple[Tensor, Tensor]:
    """Noisy digits of 16×16 and which pixels are ink (0 or 1, as floats)."""
    images, _ = digits(generator, size, 16)
    return images + 0.5 * torch.randn(images.shape, generator=generator), (images > 0.5).float()


def token_loss(output: Any, targets: Tensor) -> Tensor:
    logits = output.logits if hasattr(output, "logits") else output
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def score(output: Any, targets: Tensor, metric: str) -> float:
    """Accuracy, or 1 − error over variance; classes are on the last axis."""
    output = output.logits if hasattr(output, "logits") else output
    output = output.detach()
    if metric == "accuracy":
        return (output.argmax(-1) == targets).float().mean().item()
    if metric == "binary":
        line = 0.5 if output.min() >= 0 and output.max() <= 1 else 0.0  # probabilities, or logits
        return ((output > line) == (targets > 0.5)).float().mean().item()
    return 1 - ((output - targets).square().mean() / targets.var()).item()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
