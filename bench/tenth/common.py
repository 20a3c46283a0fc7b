"""What the files share: the record of a network and the made-up data that more than one of them needs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Network:
    """How to make a model, how to draw a batch of its task, its loss and the learning rates it is trained with."""

    make: Callable
    draw: Callable
    loss: Callable
    lr: float = 2e-3
    sgd_lr: float = 0.05


def token_loss(logits, targets):
    """Mean cross-entropy over all positions; logits (batch, time, vocabulary), targets (batch, time)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


VOCAB = 64
LENGTH = 32


def _grammar(vocab, choices=3):
    fixed = torch.Generator().manual_seed(77)
    return torch.randint(0, vocab, (2, vocab, choices), generator=fixed)


def sentences(generator, batch, length, vocab=VOCAB):
    """Sentences whose next word hangs on the last word and on whether the word before it was odd."""
    table = _grammar(vocab)
    words = torch.randint(0, vocab, (batch, length), generator=generator)
    odds = torch.tensor([0.75, 0.2, 0.05]).expand(batch, 3)
    for t in range(2, length):
        pick = torch.multinomial(odds, 1, generator=generator).squeeze(1)
        words[:, t] = table[words[:, t - 2] % 2, words[:, t - 1], pick]
    return words


def draw_text(generator, batch=16, length=LENGTH):
    words = sentences(generator, batch, length + 1)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


CLASSES = 8


def draw_images(generator, batch=32, size=24, labels=None):
    """Coloured gratings with noise: the class sets the angle, the width of the stripes and a light tint.

    The pictures come normalized, about mean 0 and spread near 1, as after transforms.Normalize.
    """
    if labels is None:
        labels = torch.randint(0, CLASSES, (batch,), generator=generator)
    batch = labels.numel()
    angle = labels.float() * math.pi / CLASSES
    wave = 0.6 + 0.3 * (labels % 3).float()
    axis = torch.arange(size).float()
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    phase = torch.rand(batch, generator=generator) * 2 * math.pi
    along = torch.cos(angle)[:, None, None] * rows + torch.sin(angle)[:, None, None] * columns
    stripes = torch.sin(wave[:, None, None] * along + phase[:, None, None])
    tint = torch.stack([torch.cos(labels * 1.3), torch.sin(labels * 2.1), torch.cos(labels * 0.7 + 1)], 1)
    noise = torch.randn(batch, 3, size, size, generator=generator)
    image = 0.8 * stripes[:, None] + 0.1 * tint[:, :, None, None] + noise
    return image, labels
