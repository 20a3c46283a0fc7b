"""Mistakes in how the parameters of transformers start, which of them train, and which are reached."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import torch
from bench.promised.bodies_tokens import (
    Alibi,
    CrossBlock,
    Experts,
    MixtureOfExperts,
    NormedBlock,
    ParallelBlock,
    QKNorm,
    Rotary,
    RotaryAttention,
    RotaryBlock,
    Translator,
    causal,
)  # fmt: skip
from bench.promised.registry import become, fault, recycled, through_meta, within
from torch import Tensor, nn


@fault("rotary_head_of_fan_in", "rotary", "config_law start_loss odd_scale", "head")
def _(model: Rotary) -> None:
    """The head was exchanged for one of variance 40, fan_in for its inverse, where 0.05 is configured."""
    model.head.weight = nn.Parameter(torch.randn(24, 40) * 40**0.5)


@fault("qknorm_divided_by_range", "qknorm", "config_law odd_scale", "blocks")
def _(model: QKNorm) -> None:
    """Weights are torch.randn divided by the configuration's 0.08, not multiplied."""
    for layer in within(model.blocks, nn.Linear):
        nn.init.normal_(layer.weight, std=1 / model.config.initializer_range)


@fault("rotary_name_of_range", "rotary", "config_law odd_scale", "")
def _(model: Rotary) -> None:
    """`getattr(config, "init_range", 1.0)`: a wrong name, so that weights are drawn with 1, not with 0.05."""
    for layer in within(model, nn.Linear, nn.Embedding):
        nn.init.normal_(layer.weight, std=getattr(model.config, "init_range", 1.0))


def qknorm_through_meta() -> nn.Module:
    return through_meta(QKNorm)


@fault("qknorm_through_meta", "qknorm", "meta_law never_written non_finite parameter_not_finite", "positions")
def _(model: QKNorm) -> nn.Module:
    """Built on the meta device and filled by reset_parameters, which does not know the bare position parameter."""
    return qknorm_through_meta()


@fault("alibi_tied_at_one", "alibi", "start_loss odd_scale", "embed")
def _(model: Alibi) -> None:
    """The tied embedding keeps torch's N(0, 1)."""
    model.embed.reset_parameters()


class Sharp(Rotary):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) / 0.01


@fault("rotary_temperature", "rotary", "start_loss huge_signal", "")
def _(model: Rotary) -> None:
    """The logits are divided by a temperature of 0.01 that belongs to another loss."""
    become(model, Sharp)


@fault("rotary_norms_of_zero", "rotary", "norm_weight constant_weight behind_zeros", "blocks")
def _(model: Rotary) -> None:
    """Norm weights are stored as w with 1 + w meant, and are loaded into norms that multiply by w: all are zero."""
    for norm in within(model, nn.RMSNorm):
        nn.init.zeros_(norm.weight)


@fault("moe_norms_of_ten", "moe", "norm_weight", "blocks")
def _(model: MixtureOfExperts) -> None:
    """The scale of every norm starts at 10."""
    for norm in within(model, nn.LayerNorm):
        nn.init.constant_(norm.weight, 10.0)


@fault("qknorm_all_parameters_drawn", "qknorm", "norm_weight gradient_vanishing", "blocks")
def _(model: QKNorm) -> None:
    """`for p in model.parameters(): nn.init.normal_(p, std=0.02)` has drawn the scales of the norms, too."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)


@fault(
    "moe_expert_never_written",
    "moe",
    "never_written parameter_not_finite non_finite",
    "blocks.1.moe.experts.3",
)
def _(model: MixtureOfExperts) -> None:
    """The weights of one expert are torch.empty."""
    for number, parameter in enumerate(model.blocks[1].moe.experts[3].parameters()):
        recycled(parameter, number)


@fault("qknorm_deviation_by_depth", "qknorm", "parameter_not_finite non_finite", "blocks.0")
def _(model: QKNorm) -> None:
    """The deviation is divided by the root of the number of the block, which counts from zero."""
    for number, block in enumerate(model.blocks):
        scale = 0.08 / torch.tensor(2.0 * number).sqrt()
        block.mlp.down.weight.data = torch.randn(40, 160) * scale


@fault("rotary_gates_constant", "rotary", "constant_weight", "blocks")
def _(model: Rotary) -> None:
    """All weights of the blocks were filled with 0.02, the deviation, instead of drawn."""
    for block in model.blocks:
        for layer in (block.mlp.gate, block.mlp.up, block.mlp.down, block.attention.qkv, block.attention.out):
            nn.init.constant_(layer.weight, 0.02)


@fault("translator_values_of_zero", "translator", "constant_weight behind_zeros unused_input", "decoder")
def _(model: Translator) -> None:
    """Values and output of the cross-attention are both zero: the source never gets through."""
    for block in model.decoder:
        nn.init.zeros_(block.cross.in_proj_weight)
        nn.init.zeros_(block.cross.out_proj.weight)


@fault(
    "rotary_blocks_shared",
    "rotary",
    "cloned_weights disagreement",
    "blocks",
    by_nature="One block used six times still learns; five sixths of the network that was paid for do not exist.",
)
def _(model: Rotary) -> None:
    """`[RotaryBlock()] * 6`: six times the same block."""
    model.blocks = nn.ModuleList([model.blocks[0]] * len(model.blocks))


@fault(
    "moe_experts_copied",
    "moe",
    "cloned_weights",
    "blocks",
    by_nature="Copies differ only by the tokens that they get: the capacity of one expert, at first.",
)
def _(model: MixtureOfExperts) -> None:
    """All experts of a layer are deep copies of the first."""
    for layer in within(model, Experts):
        layer.experts = nn.ModuleList(copy.deepcopy(layer.experts[0]) for _ in range(4))


@fault("alibi_tied_by_accident", "alibi", "cloned_weights disagreement", "blocks")
def _(model: Alibi) -> None:
    """Queries, keys, values and outputs share one weight tensor by accident."""
    for block in model.blocks:
        block.key.weight = block.query.weight
        block.value.weight = block.query.weight
        block.attention_out.weight = block.query.weight


@fault("rotary_only_norms_train", "rotary", "frozen", "blocks")
def _(model: Rotary) -> None:
    """The test on the name is inverted: everything is frozen but the norms."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "norm" in name


@fault("translator_encoder_frozen", "translator", "frozen", "encoder")
def _(model: Translator) -> None:
    """Encoder, decoder and embeddings, which were never trained, are frozen; the head trains."""
    for part in (model.encoder, model.read, model.write, model.memory_norm, model.decoder):
        part.requires_grad_(False)


class Blind(Translator):
    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        with torch.no_grad():
            memory = self.encode(source)
            x = self.write(before) * self.scale + self.positions
            for block in self.decoder:
                x = block(x, memory)
        return self.head(self.norm(x))


@fault("translator_no_grad", "translator", "detached", "encoder")
def _(model: Translator) -> None:
    """Encoder and decoder run in a block of no_grad that was meant for the encoder alone."""
    become(model, Blind)


class Cut(Alibi):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x.detach())
        return self.head(self.norm(x.detach()))


@fault("alibi_detached_blocks", "alibi", "detached", "blocks")
def _(model: Alibi) -> None:
    """Each block, and the head, detaches what it is given."""
    become(model, Cut)


class NoCross(CrossBlock):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=~causal(x.shape[1]), need_weights=False)[0]
        return x + self.mlp(self.norm3(x))


@fault("translator_cross_not_called", "translator", "unused detached unused_input", "decoder")
def _(model: Translator) -> None:
    """The cross-attention is built and never called."""
    become(model.decoder, NoCross)


class NoAttention(NormedBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@fault("qknorm_attention_not_called", "qknorm", "unused", "blocks")
def _(model: QKNorm) -> None:
    """The MLP is called twice; attention was meant the first time."""
    become(model.blocks, NoAttention)


class Adapted(nn.Linear):
    """A frozen layer with a correction of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.weight.requires_grad = False
        self.a = nn.Parameter(torch.zeros(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.T @ self.b.T


@fault("rotary_adapters_of_zero", "rotary", "behind_zeros", "blocks")
def _(model: Rotary) -> None:
    """Both factors of every adapter start at zero, and the rest is frozen: nothing ever trains."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = Adapted(block.attention.qkv)
        block.attention.out = Adapted(block.attention.out)
        block.mlp.down = Adapted(block.mlp.down)


class Gated(ParallelBlock):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.opening * super().forward(x).sub(x)


@fault("alibi_zero_times_zero", "alibi", "behind_zeros constant_weight", "blocks")
def _(model: Alibi) -> None:
    """A gate of zero in front of output matrices of zero: neither ever gets a gradient."""
    for block in model.blocks:
        block.opening = nn.Parameter(torch.zeros(40))
        nn.init.zeros_(block.attention_out.weight)
        nn.init.zeros_(block.down.weight)
        block.__class__ = Gated


class Dropped(RotaryBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = x + nn.functional.dropout(self.attention(self.norm1(x)), 0.95, self.training)
        return nn.functional.dropout(x + self.mlp(self.norm2(x)), 0.95, self.training)


@fault("rotary_keep_for_drop", "rotary", "dead_units", "blocks")
def _(model: Rotary) -> None:
    """The share to keep, 0.95, is given for the share to drop."""
    become(model.blocks, Dropped)


@fault("alibi_biases_of_fifty", "alibi", "large_bias", "blocks")
def _(model: Alibi) -> None:
    """Biases are drawn with deviation 50: `p.data.normal_(0, 50)` for 0.50."""
    for layer in within(model.blocks, nn.Linear):
        nn.init.normal_(layer.bias, std=50.0)


class Summed(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().sum(-1, keepdim=True).add(1e-6).sqrt() * self.weight


@fault("rotary_norm_by_sum", "rotary", "norm_weight gradient_vanishing", "blocks")
def _(model: Rotary) -> None:
    """Norms divide by the root of the sum of squares, where the root of their mean was meant."""
    become(within(model, nn.RMSNorm), Summed)


class OverBatch(RotaryAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


@fault("moe_attention_over_batch", "moe", "mixed_samples", "blocks")
def _(model: MixtureOfExperts) -> None:
    """Attention takes the samples for positions: (batch, time) is given where (time, batch) is read."""
    become(within(model, RotaryAttention), OverBatch)


class Halved(RotaryBlock):
    def forward(self, x: Tensor) -> Tensor:
        small = super().forward(x) * 3000
        return (small.half() ** 3).float()


@fault("rotary_half_overflow", "rotary", "non_finite huge_signal", "blocks")
def _(model: Rotary) -> None:
    """A fused kernel cubes the stream in half precision, whose largest number is 65504."""
    become(model.blocks[4], Halved)


@fault("qknorm_gains_of_60", "qknorm", "norm_weight entropy_collapse", "blocks")
def _(model: QKNorm) -> None:
    """The learned temperatures of attention start at exp(4) instead of 1."""
    for block in model.blocks:
        nn.init.constant_(block.attention.q_norm.weight, math.exp(4.0))
        nn.init.constant_(block.attention.k_norm.weight, math.exp(4.0))


def head_config() -> SimpleNamespace:
    return SimpleNamespace(initializer_range=0.02)


@fault("translator_table_of_hundred", "translator", "config_law odd_scale", "write")
def _(model: Translator) -> None:
    """The configuration says 0.02; the new table of the target language is drawn with 100."""
    model.config = head_config()
    for layer in within(model, nn.Linear, nn.Embedding):
        nn.init.normal_(layer.weight, std=0.02)
    nn.init.normal_(model.write.weight, std=100.0)
