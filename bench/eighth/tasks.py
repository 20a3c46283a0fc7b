"""Batches and losses of the networks in bodies.py; every call draws a fresh batch."""

import math

import torch
import torch.nn.functional as F


def counting(batch=24, steps=20, words=11):
    """Each sequence counts with a step of its own; two earlier words tell the next one."""
    start, step = torch.randint(words, (batch, 1)), torch.randint(1, 5, (batch, 1))
    text = (start + step * torch.arange(steps + 1)) % words
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def lm_loss(logits, y):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1)


PAD, BOS, EOS = 0, 1, 2


def translation(batch=48, longest=6, words=8):
    """Source of varying length, the same symbols in order with another alphabet as target."""
    length = torch.randint(3, longest + 1, (batch, 1))
    place = torch.arange(longest + 1)
    source = torch.randint(3, 3 + words, (batch, longest + 1)).masked_fill(place >= length, PAD)
    other = torch.cat([torch.arange(3), 3 + (torch.arange(words) * 3 + 2) % words])
    target = other[source].masked_fill(place == length, EOS)
    before = torch.cat([torch.full((batch, 1), BOS), target[:, :-1]], 1)
    return torch.stack([source, before], 1), target


def padded_loss(logits, y):
    return F.cross_entropy(logits.transpose(1, 2), y, ignore_index=PAD)


def tagging(batch=32, steps=12, words=16):
    """The tag of a word depends on the word and on whether the one before it is odd."""
    x = torch.randint(words, (batch, steps))
    before = torch.cat([torch.zeros(batch, 1, dtype=torch.long), x[:, :-1]], 1)
    return x, (x * 7 % words // 4 + before % 2) % 5


def moe_loss(out, y):
    logits, balance = out
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.01 * balance


def pairs(batch=64, words=60, topics=12):
    """Query words and item words of the same topic, in one row; the two vocabularies differ."""
    topic = torch.rand(batch, topics).argsort(1)[:, :2]
    pick = topic.gather(1, torch.randint(2, (batch, 12)))
    query = pick[:, :6] * 5 + torch.randint(5, (batch, 6))
    item = (pick[:, 6:] * 5 + torch.randint(5, (batch, 6))) * 7 % words
    return torch.cat([query, item], 1), torch.arange(batch)


def clip_loss(logits, y):
    return (F.cross_entropy(logits, y) + F.cross_entropy(logits.t(), y)) / 2


def textures(batch=32, side=16, noise=0.4):
    """Six kinds of stripes and checks with random phase, tint and noise."""
    y = torch.randint(6, (batch,))
    row, column = torch.meshgrid(torch.arange(side).float(), torch.arange(side).float(), indexing="ij")
    phase = torch.rand(batch, 2, 1, 1) * 2 * math.pi
    a, b = (1.3 * row + phase[:, 0]).sin(), (1.3 * column + phase[:, 1]).sin()
    c = (0.9 * (row + column) + phase[:, 0]).sin()
    kinds = torch.stack([a, b, a * b * 1.4, c, (a + b) / 1.4, (a * c) * 1.4], 1)
    gray = kinds[torch.arange(batch), y]
    tint = 0.6 + 0.4 * torch.rand(batch, 3, 1, 1)
    return gray[:, None] * tint + noise * torch.randn(batch, 3, side, side), y


def scenes(batch=12, side=32):
    """A disc and a square on a noisy ground; the mask names them 1 and 2."""
    row, column = torch.meshgrid(torch.arange(side).float(), torch.arange(side).float(), indexing="ij")
    middle = 5 + torch.rand(batch, 4, 1, 1) * (side - 10)
    size = 3 + torch.rand(batch, 2, 1, 1) * 3
    disc = (row - middle[:, 0]).square() + (column - middle[:, 1]).square() < (size[:, 0] + 1).square()
    square = torch.maximum((row - middle[:, 2]).abs(), (column - middle[:, 3]).abs()) < size[:, 1]
    mask = torch.zeros(batch, side, side, dtype=torch.long)
    mask[disc], mask[square] = 1, 2
    shade = 0.4 * torch.randn(batch, 1, 1) + mask * (0.6 + 0.3 * torch.rand(batch, 1, 1))
    return (shade + 0.3 * torch.randn(batch, side, side))[:, None], mask


def blobs(batch, side):
    """Two soft spots on black, in [-1, 1]."""
    line = torch.arange(side).float()
    middle = side * (0.25 + 0.5 * torch.rand(batch, 2, 2, 1))
    width = side * (0.08 + 0.08 * torch.rand(batch, 2, 1))
    bells = (-((line - middle) / width[:, :, None]).square()).exp()
    spots = torch.einsum("bki,bkj->bkij", bells[:, :, 0], bells[:, :, 1]).amax(1)
    return (2 * spots - 1)[:, None]


def faces(batch=32, side=32):
    """Real pictures are soft spots in colour; fake ones are rougher and of slightly wrong contrast."""
    y = torch.arange(batch).remainder(2).float()
    gray = blobs(batch, side)
    rough = F.avg_pool2d(F.pad(torch.randn(batch, 3, side, side), (2, 2, 2, 2)), 5, 1)
    fake = (1 - y)[:, None, None, None]
    x = gray * torch.tensor([1.0, 0.8, 0.6])[:, None, None] + rough * (0.4 + 0.5 * fake)
    return x.clamp(-1, 1), y


def spots(batch=24, side=16):
    x = blobs(batch, side)
    return x, x.clone()


def noise_loss(out, y):
    predicted, noise = out
    return F.mse_loss(predicted, noise)


TEMPLATES = torch.randn(6, 40, generator=torch.Generator().manual_seed(11))


def speech(batch=8, frames=40):
    """Log-mel frames (zero mean, unit variance); phones of 4 to 8 frames, labels at half rate, -100 in the padding."""
    x, y = torch.zeros(batch, frames, 40), torch.full((batch, frames // 2), -100)
    for i in range(batch):
        length = int(torch.randint(frames // 2, frames + 1, ())) // 2 * 2
        phones = torch.randint(6, (frames,)).repeat_interleave(int(torch.randint(4, 9, ())))[:length]
        x[i, :length] = 0.5 * TEMPLATES[phones] + 0.9 * torch.randn(length, 40)
        y[i, : length // 2] = phones[::2]
    return x, y


def frame_loss(logits, y):
    return F.cross_entropy(logits.transpose(1, 2), y, ignore_index=-100)


def communities(batch=16, nodes=18):
    """Graphs of three communities; each row has 8 noisy features of its node and its row of the adjacency matrix."""
    y = torch.randint(3, (batch, nodes))
    same = y[:, :, None] == y[:, None, :]
    link = torch.rand(batch, nodes, nodes).triu(1) > torch.where(same, 0.45, 0.92)
    link = link & torch.ones(nodes, nodes).triu(1).bool()
    adjacency = (link | link.transpose(1, 2)).float()
    features = torch.randn(batch, nodes, 8) + 0.9 * F.one_hot(y, 8)
    return torch.cat([features, adjacency], -1), y


def node_loss(logits, y):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


def waves(batch=24, steps=48):
    """The next value of two sines and a little noise."""
    t = torch.arange(steps + 1).float()
    speed, phase = 0.3 + 0.9 * torch.rand(batch, 2, 1), torch.rand(batch, 2, 1) * 6.3
    series = (speed * t + phase).sin().sum(1) + 0.05 * torch.randn(batch, steps + 1)
    return series[:, None, :-1].contiguous(), series[:, None, 1:].contiguous()


def solids(batch=32, points=128):
    """Points on a ball, a cube, a cylinder and a cone, turned about the upright axis, in the unit ball."""
    y = torch.randint(4, (batch,))
    u = torch.randn(batch, points, 3)
    ball = F.normalize(u, dim=-1)
    cube = u / u.abs().amax(-1, keepdim=True) / 1.4
    ring = F.normalize(u[..., :2], dim=-1)
    high = torch.rand(batch, points, 1) * 2 - 1
    cylinder = torch.cat([ring * 0.7, high * 0.7], -1)
    cone = torch.cat([ring * (1 - high) / 2, high * 0.8], -1)
    x = torch.stack([ball, cube, cylinder, cone], 1)[torch.arange(batch), y]
    angle = torch.rand(batch) * 6.3
    turn = torch.zeros(batch, 3, 3)
    turn[:, 0, 0], turn[:, 0, 1], turn[:, 1, 0], turn[:, 1, 1] = angle.cos(), -angle.sin(), angle.sin(), angle.cos()
    turn[:, 2, 2] = 1
    return x @ turn * (0.8 + 0.2 * torch.rand(batch, 1, 1)) + 0.02 * torch.randn(batch, points, 3), y


def prices(batch=128):
    """Eight standardised numbers and three categories; the target is standardised too."""
    numbers = torch.randn(batch, 8)
    area, kind, year = (torch.randint(n, (batch,)) for n in (12, 5, 4))
    effect = torch.sin(torch.arange(12) * 2.1)[area] + torch.tensor([-0.8, 0.1, 0.9, -0.3, 0.5])[kind]
    y = 0.6 * numbers[:, 0] * numbers[:, 1] + numbers[:, 2].relu() - 0.5 * numbers[:, 3] + effect + 0.3 * year - 0.9
    x = torch.cat([numbers, area[:, None], kind[:, None], year[:, None]], 1)
    return x, y / 1.4 + 0.1 * torch.randn(batch)
