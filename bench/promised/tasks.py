"""Synthetic tasks that a small network learns in about a hundred steps, as functions of a generator and a size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

VOCABULARY, LENGTH, RULES = 24, 20, 4
CLASSES = 6
LEVELS = 16


def _fixed(seed: int) -> torch.Generator:
    """A generator for what belongs to the task itself and is the same in every batch."""
    return torch.Generator().manual_seed(seed)


_PERMUTATIONS = torch.stack([torch.randperm(VOCABULARY - RULES, generator=_fixed(r)) for r in range(RULES)])
_CIPHER = torch.randperm(VOCABULARY, generator=_fixed(11))
_COARSE = torch.randn(CLASSES, 3, 5, 5, generator=_fixed(12))
_TEMPLATES = torch.nn.functional.interpolate(_COARSE, size=16, mode="bilinear", align_corners=False)
_TABLE = torch.randn(12, 6, generator=_fixed(13)) / math.sqrt(12)
_TABLE_OUT = torch.randn(6, generator=_fixed(14))
_CENTRES = torch.randn(8, 16, generator=_fixed(15))
_DECODER = torch.randn(6, 32, generator=_fixed(16)) / math.sqrt(6)
_MARKS = torch.randn(CLASSES, 3, 8, generator=_fixed(17))


def sentences(g: torch.Generator, n: int) -> Tensor:
    """(n, LENGTH + 1) tokens: the first names one of four rules, which says what follows what in the rest."""
    rule = torch.randint(RULES, (n,), generator=g)
    columns = [rule, torch.randint(VOCABULARY - RULES, (n,), generator=g) + RULES]
    for _ in range(LENGTH - 1):
        follows = _PERMUTATIONS[rule, columns[-1] - RULES] + RULES
        other = torch.randint(VOCABULARY - RULES, (n,), generator=g) + RULES
        columns.append(torch.where(torch.rand(n, generator=g) < 0.9, follows, other))
    return torch.stack(columns, 1)


def next_token(g: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Tokens (n, 20) and the token behind each (n, 20)."""
    tokens = sentences(g, n)
    return tokens[:, :-1], tokens[:, 1:]


def translation(g: torch.Generator, n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Source and shifted target, both (n, 10); the target is the source in a cipher."""
    source = torch.randint(1, VOCABULARY, (n, 10), generator=g)
    target = _CIPHER[source]
    before = torch.cat([torch.zeros(n, 1, dtype=torch.long), target[:, :-1]], 1)
    return {"source": source, "before": before}, target


def pictures(g: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 16, 16) of six classes: smooth templates, moved by up to two pixels, in noise."""
    labels = torch.randint(CLASSES, (n,), generator=g)
    moves = torch.randint(-2, 3, (n, 2), generator=g).tolist()
    moved = torch.stack([_TEMPLATES[c].roll(tuple(m), (1, 2)) for c, m in zip(labels.tolist(), moves, strict=True)])
    return (moved + torch.randn(n, 3, 16, 16, generator=g)) / 1.2, labels


def disks(g: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 16, 16) with a disk in noise, and for each pixel whether it lies in the disk (n, 16, 16)."""
    axis = torch.arange(16.0)
    centre = torch.rand(n, 2, generator=g) * 8 + 4
    radius = torch.rand(n, generator=g) * 3 + 2
    far = (axis[None, :, None] - centre[:, :1, None]) ** 2 + (axis[None, None] - centre[:, 1:, None]) ** 2
    inside = far < radius[:, None, None] ** 2
    noise = torch.randn(n, 16, 16, generator=g)
    return (inside.float() * 1.5 - 0.3 + noise)[:, None] / 1.2, inside.long()


def waves(g: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Sound in 16 levels (n, 48), and the level that comes next (n, 48)."""
    time = torch.arange(49.0)
    pitch = torch.rand(n, 1, generator=g) * 0.5 + 0.2
    phase = torch.rand(n, 1, generator=g) * 2 * math.pi
    sound = torch.sin(pitch * time + phase) + 0.05 * torch.randn(n, 49, generator=g)
    levels = ((sound + 1.2) / 2.4 * LEVELS).long().clamp(0, LEVELS - 1)
    return levels[:, :-1], levels[:, 1:]


def recall(g: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Sequences (n, 20, 8): one of six marks in the first three steps, then noise; the label names the mark."""
    labels = torch.randint(CLASSES, (n,), generator=g)
    steps = 0.5 * torch.randn(n, 20, 8, generator=g)
    steps[:, :3] += _MARKS[labels]
    return steps, labels


def sets(g: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Sets (n, 16, 4) of points, and three of their statistics (n, 3): a mean, a spread and a correlation."""
    shift = torch.randn(n, 1, generator=g)
    spread = torch.rand(n, 1, generator=g) * 1.6 + 0.2
    tilt = torch.rand(n, 1, generator=g) * 2 - 1
    points = torch.randn(n, 16, 4, generator=g)
    third = tilt * points[..., 2] + (1 - tilt**2).sqrt() * points[..., 3]
    cloud = torch.stack([points[..., 0] + shift, points[..., 1] * spread, points[..., 2], third], -1)
    return cloud, torch.cat([shift, (spread - 1) / 0.46, tilt / 0.577], 1)


def tables(g: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Rows (n, 12) of standardized features and a target (n, 1) of variance near one."""
    rows = torch.randn(n, 12, generator=g)
    hidden = torch.relu(rows @ _TABLE * 2)
    return rows, ((hidden @ _TABLE_OUT)[:, None] + 2.27) / 2.55 + 0.1 * torch.randn(n, 1, generator=g)


def table_classes(g: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Rows (n, 32) near a curved surface, and which of six regions (n,) they come from."""
    labels = torch.randint(CLASSES, (n,), generator=g)
    rows = torch.randn(n, 32, generator=g)
    rows[:, :16] += _CENTRES[labels]
    rows[:, 16:] += torch.tanh(_CENTRES[labels].flip(1))
    return rows / 1.4, labels


def pairs(g: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Pairs (n, 2, 16) of vectors from eight clusters, and whether both are of the same one (n,)."""
    first = torch.randint(8, (n,), generator=g)
    other = (first + torch.randint(1, 8, (n,), generator=g)) % 8
    same = torch.rand(n, generator=g) < 0.5
    both = torch.stack([first, torch.where(same, first, other)], 1)
    return _CENTRES[both] + 0.4 * torch.randn(n, 2, 16, generator=g), same.float()


def vectors(g: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Vectors (n, 32) of six hidden numbers; the target is the vector itself."""
    hidden = torch.randn(n, 6, generator=g)
    rows = torch.tanh(hidden @ _DECODER) * 1.7 + 0.05 * torch.randn(n, 32, generator=g)
    return rows, rows.clone()


def graphs(g: torch.Generator, n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Graphs of 12 nodes: features (n, 12, 8), adjacency (n, 12, 12), and the community of each node (n, 12)."""
    labels = torch.randint(3, (n, 12), generator=g)
    same = labels[:, :, None] == labels[:, None, :]
    chance = torch.where(same, 0.7, 0.08)
    upper = (torch.rand(n, 12, 12, generator=g) < chance).triu(1)
    adjacency = (upper | upper.transpose(1, 2)).float()
    features = torch.randn(n, 12, 8, generator=g)
    features[..., :3] += 1.2 * torch.nn.functional.one_hot(labels, 3)
    return {"features": features, "adjacency": adjacency}, labels
