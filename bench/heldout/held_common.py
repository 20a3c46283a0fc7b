"""Records and data of the held-out faults: every expectation here was committed before the first check was run."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "strangers"))

from nets_common import ANY, WARN, digits

__all__ = ["ANY", "WARN", "Planted", "clicks", "moons", "pairs", "points", "rays", "scale_all", "spotted"]


@dataclass(frozen=True)
class Planted:
    """One planted fault; `kinds` are the names of findings that would be right, `module` is a regular expression."""

    arch: str
    fault: str
    sort: str  # the sort of mistake, over architectures
    kinds: tuple[str, ...]
    module: str
    severities: tuple[str, ...]
    note: str  # what is wrong, in a user's words


def scale_all(network: nn.Module, std: float) -> None:
    """Every linear map and convolution is drawn with one standard deviation."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            nn.init.normal_(module.weight, std=std)


def points(generator: torch.Generator, size: int = 48, length: int = 20) -> tuple[Tensor, Tensor]:
    """Sets of points in the plane on an ellipse, whose ratio of axes and tilt make six classes."""
    classes = torch.randint(6, (size,), generator=generator)
    angle = torch.rand(size, length, generator=generator) * 2 * math.pi
    ratio = torch.where(classes < 3, 1.0, 0.3)[:, None]
    tilt = (classes % 3 * math.pi / 3)[:, None]
    flat, tall = torch.cos(angle), ratio * torch.sin(angle)
    found = torch.stack([flat * tilt.cos() - tall * tilt.sin(), flat * tilt.sin() + tall * tilt.cos()], -1)
    found = found * torch.where(classes < 3, 1 + 0.4 * (classes % 3), 1.3)[:, None, None]
    return found + 0.05 * torch.randn(found.shape, generator=generator), classes


def pairs(generator: torch.Generator, size: int = 64) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Two digits each, and whether they are of one class; half of the pairs are."""
    images, labels = digits(generator, 6 * size)
    partners = torch.randperm(len(labels), generator=generator)
    same = labels == labels[partners]
    chosen = torch.cat([same.nonzero()[:, 0][: size // 2], (~same).nonzero()[:, 0][: size // 2]])
    return (images[chosen], images[partners[chosen]]), same[chosen].float()[:, None]


def spotted(generator: torch.Generator, size: int = 64) -> tuple[Tensor, Tensor]:
    """Real digits, and digits whose rows were shuffled; the target says which are real."""
    images, _ = digits(generator, size, 16)
    false = images[size // 2 :, :, torch.randperm(16, generator=generator)]
    return torch.cat([images[: size // 2], false]), (torch.arange(size) < size // 2).float()[:, None]


def moons(generator: torch.Generator, size: int = 128) -> tuple[Tensor, Tensor]:
    """Eight correlated numbers along a bent curve; the targets are not used by the likelihood."""
    angle = torch.rand(size, 1, generator=generator) * 2 * math.pi
    turns = torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 1.0, 2.0])
    phases = torch.tensor([0.0, 1.57, 0.0, 1.57, 0.0, 1.57, 0.8, 0.8])
    return 1.4 * torch.sin(angle * turns + phases) + 0.2 * torch.randn(size, 8, generator=generator), torch.zeros(size)


def rays(generator: torch.Generator, size: int = 128) -> tuple[Tensor, Tensor]:
    """Places of a square and the colours that a picture has there."""
    places = torch.rand(size, 2, generator=generator) * 2 - 1
    waves = torch.tensor([[3.0, 1.0], [-2.0, 4.0], [5.0, -3.0]])
    return places, 0.5 + 0.45 * torch.sin(places @ waves.T)


def clicks(generator: torch.Generator, size: int = 128) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Six categories of 12 values and four numbers; the target is a click."""
    fields = torch.randint(12, (size, 6), generator=generator)
    dense = torch.randn(size, 4, generator=generator)
    worth = torch.sin(fields.float() * 1.7).sum(1) + dense[:, 0] - dense[:, 1] * dense[:, 2]
    return (fields, dense), (worth > 0).float()[:, None]
