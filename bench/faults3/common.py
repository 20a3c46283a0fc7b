"""What the networks of this set share: the record of a fault, of a network, and the data they learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Fault:
    """One planted fault and what an honest reader would accept as a right answer to it.

    Args:
        name: what `make` takes.
        sort: the sort of mistake, in words; networks share sorts.
        kinds: the kinds of finding that count as right.
        place: a regular expression; it is searched for in the module or the parameter that the finding names.
        harm: in words, the harm that the score of a short training cannot show; "" where the score decides.
    """

    name: str
    sort: str
    kinds: tuple[str, ...]
    place: str
    harm: str = ""


@dataclass(frozen=True)
class Network:
    """An architecture with its data, its loss and its faults.

    Args:
        name: how the runner calls it.
        build: the model with a fault, or None for the sound one.
        batch: inputs and targets with a fault, drawn from a generator.
        faults: what can be planted.
        loss: what the check and the training get; a fault may have a loss of its own in `losses`.
        score: how good an output is, one at best.
        chance: the score of a network that has learned nothing.
        rate, steps, sgd: the short training, with Adam, or with momentum where `sgd`.
    """

    name: str
    build: Callable[[str | None], nn.Module]
    batch: Callable[[torch.Generator, str | None], tuple[Any, Any]]
    faults: tuple[Fault, ...]
    loss: Loss | str
    score: Callable[[Any, Any], float]
    chance: float
    losses: dict[str, Loss] | None = None
    rate: float = 3e-3
    steps: int = 80
    sgd: bool = False

    def make(self, seed: int, fault: str | None = None) -> tuple[nn.Module, Any, Any, Loss | str]:
        """The model, one batch of inputs and targets, and the loss."""
        if fault is not None and fault not in {each.name for each in self.faults}:
            raise ValueError(f"{self.name} has no fault {fault!r}; try one of {[each.name for each in self.faults]}")
        torch.manual_seed(seed)
        model = self.build(fault)
        inputs, targets = self.batch(torch.Generator().manual_seed(seed + 1000), fault)
        return model, inputs, targets, (self.losses or {}).get(fault or "", self.loss)


def called(model: nn.Module, inputs: Any) -> Any:
    """The output for a tensor, a tuple of arguments or a mapping of named ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def logits(output: Any) -> Tensor:
    """The logits of a model of the transformers library, or the output itself."""
    return output.logits if hasattr(output, "logits") else output


def class_loss(output: Any, targets: Tensor) -> Tensor:
    """Cross-entropy over the last axis, whatever stands in front of it."""
    scores = logits(output)
    return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.reshape(-1))


def accuracy(output: Any, targets: Tensor) -> float:
    """The share of targets that have the largest logit."""
    return float((logits(output).argmax(-1) == targets).float().mean())


def explained(output: Tensor, targets: Tensor) -> float:
    """The share of the variance of the targets that the output explains, at least −1."""
    error = (output.reshape(targets.shape) - targets).square().mean() / targets.var()
    return max(-1.0, 1.0 - float(error)) if error.isfinite() else -1.0


@cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None], torch.tensor(data.target)


def digits(generator: torch.Generator, count: int, *, size: int = 8, raw: bool = False) -> tuple[Tensor, Tensor]:
    """Images of digits and their classes; of mean zero and variance one, or raw from 0 to 255."""
    images, classes = _digits()
    chosen = torch.randint(len(images), (count,), generator=generator)
    pixels = images[chosen] * (255 / 16) if raw else (images[chosen] - 4.884) / 6.016
    return F.interpolate(pixels, size=size) if size != 8 else pixels, classes[chosen]


def text(generator: torch.Generator, count: int, length: int, words: int) -> Tensor:
    """Sequences in which a word mostly follows from the last but one by a fixed permutation."""
    follows = torch.randperm(words, generator=torch.Generator().manual_seed(7))
    out = torch.randint(words, (count, length), generator=generator)
    noise = torch.rand(count, length, generator=generator) < 0.1
    for step in range(2, length):
        out[:, step] = torch.where(noise[:, step], out[:, step], follows[out[:, step - 2]])
    return out


def draw(model: nn.Module, *, std: float | None = None) -> None:
    """Draw all linear and embedding weights: a given deviation, or 1/√fan_in for linear maps and 1 for embeddings."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std or module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std or 1.0)
