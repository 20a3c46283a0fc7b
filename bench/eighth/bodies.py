"""Fourteen sound networks, each with its batches, its loss, its optimizer and a measure of its errors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from . import other, tasks, text, vision


class Body(NamedTuple):
    make: Callable[[], Any]
    data: Callable[[], tuple]
    loss: Callable[..., Any]
    optimizer: str
    rate: float
    steps: int
    measure: Callable[..., Any]


def wrong(out, y):
    """The share of wrong classes; the classes are in the last axis unless y has the shape of the rest."""
    out = out[0] if isinstance(out, tuple) else out
    out = out if out.shape[:-1] == y.shape else out.movedim(1, -1)
    return (out.argmax(-1) != y)[y >= 0].float().mean()


def wrong_words(out, y):
    return (out.argmax(-1) != y)[y != tasks.PAD].float().mean()


def wrong_order(out, y):
    """The share of pairs of a real and a fake picture in which the fake one has no lower score."""
    real, fake = out[y > 0.5], out[y < 0.5]
    return (real[:, None] <= fake[None]).float().mean()


def unexplained(out, y):
    """Mean square error over the variance of the targets; both are flattened."""
    if isinstance(out, tuple):
        out, y = out
    return F.mse_loss(out.flatten(), y.flatten()) / y.var()


def overlooked(out, y):
    """One minus the mean overlap of the classes that are not background."""
    guess = out.argmax(1)
    shares = [((guess == k) & (y == k)).sum() / ((guess == k) | (y == k)).sum().clamp(min=1) for k in (1, 2)]
    return 1 - sum(shares) / 2


BODIES = {
    "gpt": Body(text.GPT, tasks.counting, tasks.lm_loss, "AdamW", 3e-3, 120, wrong),
    "seq2seq": Body(text.Seq2Seq, tasks.translation, tasks.padded_loss, "Adam", 5e-3, 120, wrong_words),
    "moe": Body(text.MoETagger, tasks.tagging, tasks.moe_loss, "AdamW", 4e-3, 150, wrong),
    "two_tower": Body(text.TwoTower, tasks.pairs, tasks.clip_loss, "Adam", 4e-3, 300, wrong),
    "vit": Body(vision.ViT, lambda: tasks.textures(noise=0.9), F.cross_entropy, "AdamW", 1e-3, 120, wrong),
    "resnet_gn": Body(vision.ResNetGN, tasks.textures, F.cross_entropy, "AdamW", 1.5e-3, 80, wrong),
    "unet": Body(vision.UNet, tasks.scenes, F.cross_entropy, "Adam", 5e-3, 140, overlooked),
    "discriminator": Body(
        vision.Discriminator, tasks.faces, F.binary_cross_entropy_with_logits, "Adam", 2e-4, 100, wrong_order
    ),
    "diffusion": Body(
        lambda: vision.GaussianDiffusion(vision.Denoiser()),
        tasks.spots,
        tasks.noise_loss,
        "Adam",
        2e-3,
        120,
        unexplained,
    ),
    "conformer": Body(other.SpeechEncoder, tasks.speech, tasks.frame_loss, "AdamW", 2e-3, 80, wrong),
    "gcn": Body(other.GCN, tasks.communities, tasks.node_loss, "Adam", 1e-2, 120, wrong),
    "tcn": Body(other.TCN, tasks.waves, F.mse_loss, "Adam", 2e-3, 120, unexplained),
    "pointnet": Body(other.PointNet, tasks.solids, F.cross_entropy, "Adam", 2e-3, 100, wrong),
    "tabular": Body(other.TabularResNet, tasks.prices, F.mse_loss, "AdamW", 2e-3, 150, unexplained),
}


def build(name, seed):
    body = BODIES[name]
    torch.manual_seed(seed)
    model = body.make()
    x, y = body.data()
    return model, x, y, body.loss
