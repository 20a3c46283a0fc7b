"""Eight sound networks, each with a batch, a loss and the step rate at which it learns."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import signals, text


def classifier_batch(n: int = 16, length: int = 24) -> tuple[Any, Tensor]:
    """Four topics, each with 40 words of its own; a third of the words belong to the topic."""
    y = torch.randint(0, 4, (n,))
    own = 40 + 40 * y[:, None] + torch.randint(0, 40, (n, length))
    tokens = torch.where(torch.rand(n, length) < 0.4, own, torch.randint(2, 200, (n, length)))
    tokens[:, 0] = 1
    mask = (torch.arange(length) < torch.randint(8, length + 1, (n, 1))).long()
    return (tokens * mask, mask), y


def decoder_batch(n: int = 8, length: int = 32) -> tuple[Tensor, Tensor]:
    """Each token mostly follows from the two before it."""
    tokens = torch.randint(0, 96, (n, length + 1))
    for t in range(2, length + 1):
        follow = (tokens[:, t - 1] * 5 + tokens[:, t - 2] // 48 + 7) % 96
        tokens[:, t] = torch.where(torch.rand(n) < 0.9, follow, tokens[:, t])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def vgg_batch(n: int = 24) -> tuple[Tensor, Tensor]:
    y = torch.randint(0, 10, (n,))
    classes = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    own = F.interpolate(classes, size=32, mode="bilinear")[y]
    x = own + 0.7 * torch.randn(n, 3, 32, 32)
    return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True), y


def wavenet_batch(n: int = 4, length: int = 192) -> tuple[Tensor, Tensor]:
    time = torch.arange(length + 1) / 16000
    pitch = 150 + 350 * torch.rand(n, 3, 1)
    wave = (torch.sin(2 * torch.pi * (pitch * time + torch.rand(n, 3, 1))) / 3).sum(1)
    wave = (0.8 * wave + 0.02 * torch.randn(n, length + 1)).clamp(-1, 1)
    return wave[:, None, :-1].contiguous(), ((wave[:, 1:] + 1) * 15.99).long()


def tagger_batch(n: int = 16, length: int = 20) -> tuple[Any, Tensor]:
    """The tag follows from the word and the next word; padding has the tag -100."""
    lengths = torch.randint(5, length + 1, (n,))
    lengths[0] = length
    real = torch.arange(length) < lengths[:, None]
    tokens = torch.randint(1, 150, (n, length)) * real
    tags = (tokens % 3) + 3 * (tokens.roll(-1, 1) % 2)
    return (tokens, lengths), tags.masked_fill(~real, -100)


def graph_batch(n: int = 80) -> tuple[Any, Tensor]:
    """Four groups, with more edges inside than between; half of the nodes have no label."""
    group = torch.randint(0, 4, (n,))
    same = group[:, None] == group
    half = torch.rand(n, n) < torch.where(same, 0.12, 0.01)
    adjacency = (half | half.T) & ~torch.eye(n, dtype=torch.bool)
    words = (torch.rand(n, 24) < torch.where(torch.arange(24) // 6 == group[:, None], 0.35, 0.2)).float()
    features = words / words.sum(1, keepdim=True).clamp(min=1) * 5
    return (features, adjacency), group.masked_fill(torch.rand(n) < 0.5, -1)


def vqvae_batch(n: int = 16) -> tuple[Tensor, Tensor]:
    x = torch.tanh(1.5 * F.interpolate(torch.randn(n, 3, 5, 5), size=32, mode="bicubic"))
    return x, x.clone()


def actor_batch(n: int = 64) -> tuple[Tensor, Tensor]:
    """Columns of the target: action, advantage and return."""
    x = torch.randn(n, 12)
    action = torch.randint(0, 5, (n,))
    good = x[:, :5].argmax(1) == action
    gain = torch.where(good, 2.0, -0.5) + 0.3 * torch.randn(n)
    gain = (gain - gain.mean()) / gain.std()
    value = x[:, 5] - x[:, 6] + 0.5 * x[:, 7] * x[:, 8] + 0.1 * torch.randn(n)
    return x, torch.stack((action.float(), gain, value), 1)


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def token_loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1), ignore_index=-100)


def node_loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, ignore_index=-1)


def picture_loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.mse_loss(out[0], y) + out[1]


def actor_loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    logits, value = out
    action, gain, goal = y.unbind(1)
    choice = torch.distributions.Categorical(logits=logits)
    policy = -(choice.log_prob(action) * gain).mean()
    return policy + 0.5 * F.mse_loss(value, goal) - 0.01 * choice.entropy().mean()


class Body(NamedTuple):
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]
    rate: float


BODIES = {
    "classifier": Body(text.Classifier, classifier_batch, cross_entropy, 1e-3),
    "decoder": Body(text.Decoder, decoder_batch, token_loss, 3e-3),
    "vgg": Body(signals.VGG, vgg_batch, cross_entropy, 1e-3),
    "wavenet": Body(signals.WaveNet, wavenet_batch, cross_entropy, 4e-3),
    "tagger": Body(text.Tagger, tagger_batch, token_loss, 5e-3),
    "graph": Body(signals.GAT, graph_batch, node_loss, 1e-2),
    "vqvae": Body(signals.VQVAE, vqvae_batch, picture_loss, 3e-3),
    "actor": Body(signals.ActorCritic, actor_batch, actor_loss, 3e-3),
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, Any, Tensor, Callable[[Any, Tensor], Tensor]]:
    body = BODIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = body.model()
        x, y = body.batch()
    return model, x, y, body.loss
