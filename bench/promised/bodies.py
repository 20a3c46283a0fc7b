"""Healthy networks: `build(name, seed)` gives a model, inputs, targets and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from bench.promised import bodies_images, bodies_rows, bodies_steps, bodies_tokens, tasks
from torch import Tensor, nn
from torch.nn import functional as F

Inputs = Tensor | dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Batch = Callable[[torch.Generator, int], tuple[Inputs, Tensor]]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Classes on the last axis of the outputs."""
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def pixel_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Classes on axis 1, pixels behind it."""
    return F.cross_entropy(outputs, targets)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets)


def binary(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets)


@dataclass(frozen=True)
class Body:
    """A healthy network with its task: how to make it, how to draw a batch, and at which rate it trains."""

    make: Callable[[], nn.Module]
    batch: Batch
    size: int
    loss: Loss
    rate: float
    optimizer: str = "adamw"
    steps: int = 100


BODIES: dict[str, Body] = {
    "rotary": Body(bodies_tokens.Rotary, tasks.next_token, 32, cross_entropy, 4e-3),
    "alibi": Body(bodies_tokens.Alibi, tasks.next_token, 32, cross_entropy, 4e-3),
    "qknorm": Body(bodies_tokens.QKNorm, tasks.next_token, 32, cross_entropy, 4e-3),
    "moe": Body(bodies_tokens.MixtureOfExperts, tasks.next_token, 32, cross_entropy, 5e-3),
    "translator": Body(bodies_tokens.Translator, tasks.translation, 48, cross_entropy, 3e-3, steps=150),
    "vit": Body(bodies_images.ViT, tasks.pictures, 32, cross_entropy, 1e-3),
    "mixer": Body(bodies_images.Mixer, tasks.pictures, 32, cross_entropy, 2e-3),
    "resnet1": Body(bodies_images.ResNetV1, tasks.pictures, 32, cross_entropy, 0.05, "sgd"),
    "resnet2": Body(bodies_images.ResNetV2, tasks.pictures, 32, cross_entropy, 0.05, "sgd"),
    "convnext": Body(bodies_images.ConvNext, tasks.pictures, 32, cross_entropy, 2e-3),
    "unet": Body(bodies_images.UNet, tasks.disks, 16, pixel_cross_entropy, 2e-3),
    "bnmlp": Body(bodies_rows.NormedStack, tasks.table_classes, 64, cross_entropy, 0.05, "sgd"),
    "tanhnet": Body(bodies_rows.Isometric, tasks.table_classes, 64, cross_entropy, 0.02, "sgd"),
    "tabular": Body(bodies_rows.Tabular, tasks.tables, 64, squares, 2e-3),
    "deepset": Body(bodies_rows.DeepSet, tasks.sets, 64, squares, 3e-3, steps=150),
    "autoencoder": Body(bodies_rows.Autoencoder, tasks.vectors, 64, squares, 4e-3, steps=150),
    "siamese": Body(bodies_rows.Siamese, tasks.pairs, 64, binary, 2e-3, steps=120),
    "graph": Body(bodies_rows.GraphNet, tasks.graphs, 32, cross_entropy, 2e-3),
    "lstm": Body(bodies_steps.Memory, tasks.recall, 48, cross_entropy, 4e-3),
    "gated": Body(bodies_steps.GatedStack, tasks.recall, 48, cross_entropy, 4e-3),
    "wavenet": Body(bodies_steps.WaveNet, tasks.waves, 16, cross_entropy, 3e-3),
    "statespace": Body(bodies_steps.StateNet, tasks.recall, 48, cross_entropy, 4e-3),
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, Inputs, Tensor, Loss]:
    """The healthy network of this name, drawn with this seed, and one batch of its task."""
    body = BODIES[name]
    torch.manual_seed(seed)
    model = body.make()
    inputs, targets = body.batch(torch.Generator().manual_seed(seed + 1000), body.size)
    return model, inputs, targets, body.loss


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    """Run a network on a tensor, or on tensors that are named as its arguments."""
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)
