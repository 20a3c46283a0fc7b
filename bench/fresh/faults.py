"""Mistakes in the networks of ``bodies``: ``build(name, seed)`` gives a faulty model, batch and loss.

Each class below is named after a body, and each of its functions makes one mistake in the
healthy build ``p`` (``p.model``, ``p.x``, ``p.y``, ``p.loss``). ``swap`` gives a module other methods,
as if its class had been written so; it keeps parameters, names and random numbers as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from bench.fresh import bodies as B
from bench.fresh import sequences as S
from bench.fresh.edits import linear_layers, swap, swap_all
from bench.fresh.faults_fields import Denoiser, Graph, Multi, Points, Table, Towers
from torch import nn


class Sandwich:
    def one_block_without_mask(p):
        swap(p.model.blocks[3].attention, weights=lambda self, scores: scores.softmax(dim=-1))

    def mask_hides_the_past(p):
        def weights(self, scores):
            return scores.masked_fill(torch.ones(scores.shape[-2:]).tril(-1) == 1, float("-inf")).softmax(dim=-1)

        swap_all(p.model, S.CausalAttention, weights=weights)

    def mask_with_diagonal(p):
        def weights(self, scores):
            return scores.masked_fill(torch.ones(scores.shape[-2:]).triu() == 1, float("-inf")).softmax(dim=-1)

        swap_all(p.model, S.CausalAttention, weights=weights)

    def targets_not_moved(p):
        p.y = p.x

    def second_norm_forgotten(p):
        def forward(self, x):
            x = x + self.post1(self.attention(self.pre1(x)))
            return x + self.mlp(self.pre2(x))

        swap(p.model.blocks[2], forward=forward)

    def stream_overwritten(p):
        def forward(self, x):
            x = self.post1(self.attention(self.pre1(x)))
            return x + self.post2(self.mlp(self.pre2(x)))

        swap(p.model.blocks[3], forward=forward)

    def list_multiplied(p):
        p.model.blocks = nn.ModuleList([p.model.blocks[0]] * 5)

    def places_as_counts(p):
        del p.model.places
        swap(p.model, embed=lambda self, words: self.tokens(words) + torch.arange(words.shape[1])[:, None])

    def every_vector_zeroed(p):
        for value in p.model.parameters():
            if value.dim() == 1:
                nn.init.zeros_(value)

    def scores_without_gradient(p):
        swap_all(p.model, S.CausalAttention, scores=torch.no_grad()(S.CausalAttention.scores))

    def only_last_block_trains(p):
        p.model.requires_grad_(False)
        p.model.blocks[-1].requires_grad_(True)
        p.model.head.requires_grad_(True)


class Relpos:
    def mask_turned_around(p):
        def weights(self, scores, real):
            return scores.masked_fill(~real[:, None, None, :], -1e4).softmax(dim=-1)

        def pool(self, x, real):
            return (x * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)

        swap(p.model, real=lambda self, words: words == 0, pool=pool)
        swap_all(p.model, S.RelativeAttention, weights=weights)

    def softmax_over_queries(p):
        def weights(self, scores, real):
            return scores.masked_fill(~real[:, None, None, :], -1e4).softmax(dim=2)

        swap_all(p.model, S.RelativeAttention, weights=weights)

    def distances_not_initialized(p):
        for block in p.model.blocks:
            block.attention.distance.reset_parameters()

    def norm_of_the_embedding_over_places(p):
        p.model.embed_norm = nn.LayerNorm(24)
        swap(p.model.embed_norm, forward=lambda self, x: nn.LayerNorm.forward(self, x.transpose(1, 2)).transpose(1, 2))

    def reshape_for_permute(p):
        def forward(self, x, real):
            q, k, v = self.qkv(x).reshape(3, x.shape[0], self.heads, x.shape[1], -1)
            return self.out((self.weights(self.scores(q, k), real) @ v).transpose(1, 2).flatten(2))

        swap_all(p.model, S.RelativeAttention, forward=forward)

    def fresh_trunk_frozen(p):
        for part in (p.model.words, p.model.embed_norm, p.model.blocks):
            part.requires_grad_(False)

    def sorted_by_class(p):
        x, y = (torch.cat(parts) for parts in zip(*(S.majority_data() for _ in range(4)), strict=True))
        order = y.argsort(stable=True)[2:50]
        p.x, p.y = x[order], y[order]


class Convae:
    def sigmoid_before_centred_targets(p):
        p.model.head = nn.Sequential(p.model.head, nn.Sigmoid())

    def skips_detached(p):
        join = B.SkipAutoencoder.join
        swap(p.model, join=lambda self, low, skip: join(self, low, skip.detach()))

    def pixels_in_bytes(p):
        p.x = ((p.x + 2.5) * 51).clamp(0, 255).round()

    def middle_thrown_away(p):
        swap(p.model, bottleneck=lambda self, x: (self.middle(x), x)[1])

    def normal_everywhere(p):
        for value in p.model.parameters():
            nn.init.normal_(value)


class Sepcnn:
    def norms_always_evaluate(p):
        swap_all(p.model, nn.BatchNorm2d, train=lambda self, mode=True: nn.Module.train(self, False))
        p.model.train()

    def zero_start_without_shortcut(p):
        for block in p.model.blocks:
            nn.init.zeros_(block.bn3.weight)

    def sigmoid_in_the_loss(p):
        p.loss = lambda outputs, y: F.cross_entropy(outputs.sigmoid(), y)

    def stem_skips_pixels(p):
        p.model.stem[0] = nn.Conv2d(3, 16, 2, stride=4, bias=False)

    def features_too_large_for_half(p):
        swap(p.model.fc, forward=lambda self, x: nn.Linear.forward(self, (x * 1e5).half().float()))


class Tcn:
    def padded_behind(p):
        swap_all(p.model, S.TemporalBlock, pad=lambda self, x: F.pad(x, (0, self.past)))

    def padded_on_both_sides_once(p):
        swap(p.model.blocks[1], pad=lambda self, x: F.pad(x, (self.past // 2, self.past // 2)))

    def relu_behind_the_forecast(p):
        p.model.head = nn.Sequential(p.model.head, nn.ReLU())

    def input_added_twice(p):
        def forward(self, x):
            h = x + F.relu(self.conv1(self.pad(x)))
            h = h + F.relu(self.conv2(self.pad(h)))
            return x + 2 * h

        swap_all(p.model, S.TemporalBlock, forward=forward)

    def targets_in_raw_units(p):
        p.y = 250.0 * p.y + 1000.0

    def fan_not_inverted(p):
        for block in p.model.blocks:
            for conv in (block.conv1, block.conv2):
                nn.init.normal_(conv.weight, std=math.sqrt(32) / math.sqrt(3))


class Gru:
    def batch_is_not_first(p):
        p.model.gru.batch_first = False

    def softmax_over_one_value(p):
        swap(p.model, weights=lambda self, states: self.attend(states).softmax(dim=-1))

    def first_state_read(p):
        swap(p.model, summary=lambda self, states: states[:, 0])

    def gate_that_never_writes(p):
        for name, value in p.model.gru.named_parameters():
            if "bias" in name:
                value.data[40:80] = 6.0

    def recurrent_weights_of_size_one(p):
        for name, value in p.model.gru.named_parameters():
            if "weight" in name:
                nn.init.normal_(value)

    def sensors_in_raw_units(p):
        p.x = p.x * 80.0 + 400.0

    def tiny_law_for_all(p):
        for value in p.model.parameters():
            nn.init.normal_(value, std=1e-3)


class Linmix:
    def decay_bias_of_wrong_sign(p):
        for block in p.model.blocks:
            nn.init.constant_(block.mixer.decay.bias, -8.0)

    def decay_that_grows(p):
        swap_all(p.model, S.Decay, keep=lambda self, x: torch.exp(self.decay(x)))

    def state_detached(p):
        step = S.Decay.step
        swap_all(p.model, S.Decay, step=lambda self, state, keep, k, v: step(self, state.detach(), keep, k, v))

    def head_tied_to_large_embedding(p):
        p.model.head.weight = p.model.tokens.weight

    def rare_words_dropped(p):
        p.x = p.x.clamp(max=1)

    def output_gate_shut(p):
        def forward(self, x):
            return self.out(self.mix(x) * torch.sigmoid(self.gate(x) - 12.0))

        swap_all(p.model, S.Decay, forward=forward)

    def linear_law_scaled_by_width(p):
        for layer in linear_layers(p.model.blocks[1]):
            layer.weight.data.mul_(math.sqrt(48))


GROUPS = (Sandwich, Relpos, Convae, Sepcnn, Tcn, Table, Graph, Gru, Points, Towers, Multi, Denoiser, Linmix)
FAULTS: dict[str, Callable[[Any], None]] = {
    f"{group.__name__.lower()}_{name}": function
    for group in GROUPS
    for name, function in vars(group).items()
    if not name.startswith("_")
}


def build(name: str, seed: int) -> tuple[nn.Module, Any, Any, Callable[..., torch.Tensor]]:
    """The faulty network of this name with its batch and its loss; its body stands before the first ``_``."""
    model, x, y, loss = B.build(name.split("_")[0], seed)
    p = SimpleNamespace(model=model, x=x, y=y, loss=loss)
    torch.manual_seed(seed + 1000)
    FAULTS[name](p)
    return p.model, p.x, p.y, p.loss
