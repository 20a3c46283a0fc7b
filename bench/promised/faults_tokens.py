"""Mistakes in the attention, the masks and the streams of transformers for tokens."""

from __future__ import annotations

import math

import torch
from bench.promised.bodies_tokens import (
    Alibi,
    CrossBlock,
    Experts,
    MixtureOfExperts,
    NormedAttention,
    NormedBlock,
    ParallelBlock,
    QKNorm,
    Rotary,
    RotaryAttention,
    RotaryBlock,
    Translator,
    causal,
)  # fmt: skip
from bench.promised.registry import become, fault, within
from torch import Tensor, nn
from torch.nn import functional as F


class TimesRoot(RotaryAttention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) * math.sqrt(self.size)


@fault("rotary_scores_times_root", "rotary", "entropy_collapse cause odd_scale config_law", "blocks")
def _(model: Rotary) -> None:
    """Scores are multiplied by the root of the head size instead of divided; queries and keys start at 0.4."""
    for block in model.blocks:
        nn.init.normal_(block.attention.qkv.weight[: 2 * 40], std=0.4)
        block.attention.__class__ = TimesRoot


@fault("alibi_unit_queries", "alibi", "entropy_collapse odd_scale cause", "blocks")
def _(model: Alibi) -> None:
    """Queries and keys are drawn with standard deviation 1 (torch.randn) and not scaled by their width."""
    for block in model.blocks:
        block.query.weight.data = torch.randn(40, 40)
        block.key.weight.data = torch.randn(40, 40)


class Unscaled(RotaryAttention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2)


@fault("moe_scores_unscaled", "moe", "cause entropy_collapse odd_scale", "blocks")
def _(model: MixtureOfExperts) -> None:
    """Scores are not divided by the root of the head size, and queries and keys start by Xavier's law with gain 6."""
    for attention in within(model, RotaryAttention):
        nn.init.xavier_normal_(attention.qkv.weight[:64], gain=6.0)
    become(within(model, RotaryAttention), Unscaled)


class HotAttention(NormedAttention):
    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (f(x).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=float(q.shape[-1] ** 2))
        return self.out(mixed.transpose(1, 2).reshape(n, t, d))


@fault("qknorm_scale_squared", "qknorm", "entropy_collapse cause", "blocks")
def _(model: QKNorm) -> None:
    """The scale of attention is the head size squared, where its inverse root was meant."""
    become(within(model, NormedAttention), HotAttention)


@fault("translator_cross_gain", "translator", "entropy_collapse odd_scale cause", "decoder")
def _(model: Translator) -> None:
    """The projections of the cross-attention were drawn with gain 20."""
    for block in model.decoder:
        nn.init.xavier_uniform_(block.cross.in_proj_weight[:80], gain=20)


class NoSkips(RotaryBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.norm1(x))
        return self.mlp(self.norm2(x))


@fault(
    "rotary_no_skips",
    "rotary",
    "token_collapse rank_collapse gradient_vanishing",
    "blocks",
)
def _(model: Rotary) -> None:
    """Both shortcuts of every block were forgotten."""
    become(model.blocks, NoSkips)


class OnlyPast(ParallelBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return super().forward(x)


@fault("alibi_running_mean", "alibi", "token_collapse rank_collapse gradient_vanishing", "blocks")
def _(model: Alibi) -> None:
    """Each block replaces the stream by its running mean over positions, which was meant to be added."""
    become(model.blocks, OnlyPast)


class Pooled(Translator):
    def encode(self, source: Tensor) -> Tensor:
        memory = super().encode(source)
        return memory.mean(1, keepdim=True).expand_as(memory)


@fault("translator_pooled_memory", "translator", "token_collapse", "encoder")
def _(model: Translator) -> None:
    """The encoder gives the mean of its positions at every position, so that the decoder finds no order."""
    become(model, Pooled)


@fault("rotary_row_of_thousands", "rotary", "massive_activation odd_scale", "blocks.1.mlp.down")
def _(model: Rotary) -> None:
    """One row of a weight was restored from int8 without its scale and is a thousand times too large."""
    model.blocks[1].mlp.down.weight.data[7] = torch.randint(-127, 128, (80,)).float() * 10


@fault("alibi_bias_of_500", "alibi", "massive_activation large_bias", "blocks.0.attention_out")
def _(model: Alibi) -> None:
    """One entry of a bias is 500."""
    model.blocks[0].attention_out.bias.data[3] = 500.0


@fault("qknorm_counted_positions", "qknorm", "massive_activation odd_scale", "positions")
def _(model: QKNorm) -> None:
    """The number of the position itself, times 50, stands in one feature of the position embedding."""
    model.positions.data[:, 0] = 50.0 * torch.arange(1, 21)


class OneWithoutSkip(NormedBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.norm1(x))
        return self.mlp(self.norm2(x))


@fault("qknorm_block_without_skip", "qknorm", "odd_branch", "blocks.3")
def _(model: QKNorm) -> None:
    """One block, which was edited by hand, has lost its shortcuts."""
    become(model.blocks[3], OneWithoutSkip)


class Unmasked(RotaryAttention):
    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


@fault("rotary_no_mask", "rotary", "target_leak", "blocks", judge="prefix")
def _(model: Rotary) -> None:
    """The causal mask was forgotten."""
    become(within(model, RotaryAttention), Unmasked)


class OneTooFar(RotaryAttention):
    def weights(self, scores: Tensor) -> Tensor:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(diagonal=1)
        return scores.masked_fill(~mask, float("-inf")).softmax(-1)


@fault("moe_mask_one_too_far", "moe", "target_leak", "blocks", judge="prefix")
def _(model: MixtureOfExperts) -> None:
    """The diagonal of the mask is off by one: each position sees the token it must predict."""
    become(within(model, RotaryAttention), OneTooFar)


class NotCausal(NormedAttention):
    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (f(x).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.out(mixed.transpose(1, 2).reshape(n, t, d))


@fault("qknorm_not_causal", "qknorm", "target_leak", "blocks", judge="prefix")
def _(model: QKNorm) -> None:
    """`is_causal=True` was forgotten."""
    become(within(model, NormedAttention), NotCausal)


@fault("alibi_targets_not_moved", "alibi", "target_leak", "", edits="batch")
def _(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The targets are the tokens themselves, not the next."""
    return tokens, tokens.clone()


@fault("translator_target_as_input", "translator", "target_leak", "", edits="batch")
def _(inputs: dict[str, Tensor], targets: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The decoder gets its target unmoved and copies it."""
    return {"source": inputs["source"], "before": targets.clone()}, targets


FEW = "Experts that learn nothing cost capacity, which a small task does not need in a hundred steps."


class BiasedRouter(Experts):
    def logits(self, x: Tensor) -> Tensor:
        return self.router(x) + torch.tensor([12.0, 11.0, 0.0, 0.0])


@fault("moe_biased_router", "moe", "router_collapse", "blocks", by_nature=FEW)
def _(model: MixtureOfExperts) -> None:
    """A bias for balance was added with the wrong sign and has grown: all tokens go to two experts."""
    become(within(model, Experts), BiasedRouter)


@fault("moe_router_of_zeros", "moe", "router_collapse constant_weight behind_zeros", "blocks", by_nature=FEW)
def _(model: MixtureOfExperts) -> None:
    """The routers start at zero: all ties are broken in the same way for every token."""
    for layer in within(model, Experts):
        nn.init.zeros_(layer.router.weight)


class RouterOfMeans(Experts):
    def logits(self, x: Tensor) -> Tensor:
        return self.router(x.mean((0, 1), keepdim=True)).expand(*x.shape[:2], -1)


@fault(
    "moe_router_of_means", "moe", "router_collapse mixed_samples target_leak", "blocks", judge="prefix", by_nature=FEW
)
def _(model: MixtureOfExperts) -> None:
    """The router looks at the mean of the batch, so that all tokens get the same two experts."""
    become(within(model, Experts), RouterOfMeans)


class EmptyRow(ParallelBlock):
    def attend(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (f(x).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        before = causal(t).tril(-1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(d // self.heads)).masked_fill(~before, float("-inf"))
        return self.attention_out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, d))


@fault("alibi_first_row_masked", "alibi", "non_finite", "blocks")
def _(model: Alibi) -> None:
    """The mask hides each position from itself; the first one sees nothing, and its softmax is NaN."""
    become(model.blocks, EmptyRow)


class PaddedCross(CrossBlock):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=~causal(x.shape[1]), need_weights=False)[0]
        # the mask says which keys to leave out; here it says which ones to keep
        keep = torch.ones(memory.shape[:2], dtype=torch.bool)
        x = x + self.cross(self.norm2(x), memory, memory, key_padding_mask=keep, need_weights=False)[0]
        return x + self.mlp(self.norm3(x))


@fault("translator_padding_inverted", "translator", "unused_input behind_zeros detached", "")
def _(model: Translator) -> None:
    """The padding mask is inverted: without padding all keys are left out, and attention gives zeros."""
    become(model.decoder, PaddedCross)


class OverQueries(RotaryAttention):
    def weights(self, scores: Tensor) -> Tensor:
        mask = causal(scores.shape[-1])
        return scores.masked_fill(~mask, float("-inf")).softmax(-2)


SAME = "Later layers make up for it in a task this small; the weights of a query do not sum to one."


@fault("rotary_softmax_over_queries", "rotary", "wrong_axis target_leak", "blocks", judge="prefix", by_nature=SAME)
def _(model: Rotary) -> None:
    """The softmax runs over the queries."""
    become(within(model, RotaryAttention), OverQueries)


class OverHeads(ParallelBlock):
    def attend(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (f(x).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.heads)
        weights = torch.softmax(scores.masked_fill(~causal(t), -1e9), dim=1)
        return self.attention_out((weights @ v).transpose(1, 2).reshape(n, t, d))


@fault("alibi_softmax_over_heads", "alibi", "wrong_axis target_leak", "blocks", judge="prefix", by_nature=SAME)
def _(model: Alibi) -> None:
    """The softmax runs over the heads; masked keys get the same weight in each of them."""
    become(model.blocks, OverHeads)
