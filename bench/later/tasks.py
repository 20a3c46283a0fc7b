"""The batches and the losses of the networks in bodies.py."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def token_loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.transpose(1, 2), y, ignore_index=-100)


def sentences() -> tuple[Tensor, Tensor]:
    """Two sentences, each of one word repeated with the next word in turn; a fifth of it is masked."""
    first, second = torch.randint(3, 23, (48, 1)), torch.randint(3, 23, (48, 1))
    turn = torch.arange(11) % 2
    end = torch.full((48, 1), 2)
    text = torch.cat([first + turn, end, second + turn, end, torch.zeros(48, 2, dtype=torch.long)], 1)
    hide = (torch.rand(text.shape) < 0.2) & (text > 2)
    return text.masked_fill(hide, 1), text.masked_fill(~hide, -100)


def gratings(channels: int) -> tuple[Tensor, Tensor]:
    y = torch.randint(4, (32,))
    angle, phase = y * math.pi / 4, torch.rand(32, 1, 1) * 6.3
    row, column = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    wave = (row * angle.cos()[:, None, None] + column * angle.sin()[:, None, None]) * 1.2 + phase
    return wave.sin()[:, None] + 0.7 * torch.randn(32, channels, 16, 16), y


def table(features: int, rows: int = 96) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, features)
    teacher = torch.randn(features, 4) / math.sqrt(features)
    return x, x @ teacher + torch.sin(2 * x[:, :4]) * 0.5


def colours() -> tuple[Tensor, Tensor]:
    x = torch.rand(192, 3) * 2 - 1
    return x, 0.5 + 0.5 * torch.sin(4 * x + 3 * x.roll(1, 1).cos())


def facts() -> tuple[Tensor, Tensor]:
    keys = torch.rand(96, 5).argsort(1)
    values = torch.randint(6, (96, 5))
    asked = torch.randint(5, (96, 1))
    rows = torch.stack([keys, values + 6], -1)
    question = torch.cat([keys.gather(1, asked), torch.full((96, 1), 5)], 1)
    return torch.cat([rows, question[:, None]], 1), values.gather(1, asked)[:, 0]


def value_loss(out: Tensor, y: Tensor) -> Tensor:
    """Each row of y is an action and the return that it had."""
    return F.smooth_l1_loss(out.gather(1, y[:, :1].long())[:, 0], y[:, 1])


def returns() -> tuple[Tensor, Tensor]:
    x, quality = table(12, 128)
    action = torch.randint(4, (128, 1))
    return x, torch.cat([action, quality.gather(1, action)], 1)


def bound(out: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
    picture, mean, logvar = out
    likely = F.binary_cross_entropy_with_logits(picture, y)
    return likely + 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum(1).mean() / 256


def boxes() -> tuple[Tensor, Tensor]:
    place, size = torch.randint(1, 8, (48, 2)), torch.randint(3, 8, (48, 2))
    line = torch.arange(16)
    inside = (line >= place[..., None]) & (line < (place + size)[..., None])
    x = (inside[:, 0, :, None] & inside[:, 1, None, :]).float()[:, None]
    return x, x.clone()


def marks() -> tuple[Tensor, Tensor]:
    """The tag of a place is the last mark (words 0 to 3) at it or before it."""
    x = torch.randint(12, (48, 14))
    x[:, 0] = torch.randint(4, (48,))
    y = x.clone()
    for step in range(1, 14):
        y[:, step] = torch.where(x[:, step] < 4, x[:, step], y[:, step - 1])
    return x, y


def classes(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return rows[0], rows[1].argmax(1)


def total(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return rows[0], rows[1].sum(1) / 2
