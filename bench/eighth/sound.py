"""Sound networks that look unusual; nothing in them may be called a fault."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from . import bodies, faults
from .register import instead


class Variant(NamedTuple):
    body: str
    change: Callable[[Any], None]
    why: str


SOUND: dict[str, Variant] = {}


def sound(body, why):
    def register(change):
        SOUND[change.__name__] = Variant(body, change, why)
        return change

    return register


@sound("vit", "The last layer of every branch starts at nought and gets a gradient at once.")
def sound_vit_zero_last_layers(c):
    for block in c.model.blocks:
        nn.init.zeros_(block.attn.proj.weight)
        nn.init.zeros_(block.mlp[2].weight)


@sound(
    "unet", "A trained encoder is frozen on purpose, its norms run on trained statistics, and only the decoder learns."
)
def sound_unet_trained_encoder_frozen(c):
    """The encoder is trained here for a few steps and then frozen, as after loading a checkpoint."""
    state = torch.get_rng_state()
    body = bodies.BODIES["unet"]
    optimizer = torch.optim.Adam(c.model.parameters(), lr=body.rate)
    for _ in range(60):
        x, y = body.data()
        optimizer.zero_grad()
        c.loss(c.model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    frozen = (c.model.inc, c.model.down1, c.model.down2, c.model.down3)
    for part in frozen:
        part.requires_grad_(False)
        part.eval()
    for part in (c.model.up1, c.model.up2, c.model.up3, c.model.outc):
        for m in part.modules():
            if hasattr(m, "reset_parameters"):
                m.reset_parameters()

    def train(self, mode=True):
        nn.Module.train(self, mode)
        for name in ("inc", "down1", "down2", "down3"):
            getattr(self, name).eval()
        return self

    instead(c.model, train=train)
    torch.set_rng_state(state)


@sound("tabular", "Snake and softplus take the place of ReLU.")
def sound_tabular_unusual_activations(c):
    def forward(self, x):
        h = self.first(self.normalization(x))
        return x + self.second(self.dropout(h + torch.sin(h).square()))

    for block in c.model.blocks:
        instead(block, forward=forward)
    instead(
        c.model,
        backbone=lambda self, x: F.softplus(self.last_normalization(self.blocks(self.first_layer(self.join(x))))),
    )


@sound("gpt", "The weights of the words and of the output are one tensor on purpose.")
def sound_gpt_tied_words(c):
    c.model.output.weight = c.model.tok_embeddings.weight


@sound("resnet_gn", "A batch of two pictures; group norm does not need more.")
def sound_resnet_gn_tiny_batch(c):
    c.feeds.append(lambda x, y: (x[:2], y[:2]))


@sound("two_tower", "Both sides share one tower on purpose and the other is gone; the vocabularies are made the same.")
def sound_two_tower_siamese(c):
    c.model.item_tower = c.model.query_tower

    def same_words(x, y):
        inverse = torch.empty(60, dtype=torch.long)
        inverse[torch.arange(60) * 7 % 60] = torch.arange(60)
        return torch.cat([x[:, :6], inverse[x[:, 6:]]], 1), y

    c.feeds.append(same_words)


def case(name, seed):
    chosen = SOUND[name]
    planted = faults.sound_case(chosen.body, seed)
    chosen.change(planted)
    return planted


def build(name, seed):
    planted = case(name, seed)
    x, y = planted.feed(*planted.batch)
    return planted.model, x, y, planted.loss
