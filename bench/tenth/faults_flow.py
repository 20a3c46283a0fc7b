"""Faults in the forward pass: attention, masks, mixed samples, gates, routers."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from . import bodies_other, bodies_seq, bodies_text
from .planting import Planted, become, fault, prefixes

UNSCALED = "attention without 1 / sqrt(d)"
MASK = "causal mask missing or inverted"
MIXED = "samples of a batch are mixed"
GATES = "recurrent gates shut or saturated"
ROUTER = "router sends all to one expert, or an expert is dead"


@fault("seq2seq", UNSCALED, ["encoder", "decoder"], "the energies are not divided by sqrt(d_head)")
def seq2seq_unscaled(model):
    class MultiHead(bodies_seq.MultiHead):
        def forward(self, query, memory, mask=None):
            q, k, v = self.heads(self.w_q(query)), self.heads(self.w_k(memory)), self.heads(self.w_v(memory))
            energy = torch.matmul(q, k.transpose(2, 3))
            if mask is not None:
                energy = energy.masked_fill(mask == 0, -1e9)
            context = torch.matmul(F.softmax(energy, dim=-1), v).permute(0, 2, 1, 3).flatten(2)
            return self.w_o(context)

    for module in model.modules():
        if isinstance(module, bodies_seq.MultiHead):
            become(module, MultiHead)


def _llama_attention(scale, mask):
    class LlamaLayer(bodies_text.LlamaLayer):
        def attend(self, x, cos, sin):
            b, t, _ = x.shape
            q = bodies_text.rotate(F.linear(x, self.wq).view(b, t, self.heads, -1), cos, sin)
            k = bodies_text.rotate(F.linear(x, self.wk).view(b, t, self.kv_heads, -1), cos, sin)
            v = F.linear(x, self.wv).view(b, t, self.kv_heads, -1)
            q = q.view(b, t, self.kv_heads, self.heads // self.kv_heads, -1)
            scores = torch.einsum("btkgd,bskd->bkgts", q, k) * scale
            weights = scores.masked_fill(mask(t), float("-inf")).softmax(dim=-1)
            return F.linear(torch.einsum("bkgts,bskd->btkgd", weights, v).reshape(b, t, -1), self.wo)

    return LlamaLayer


@fault("llama", UNSCALED, "layers", "the scores are multiplied by sqrt(d_head) and not divided")
def llama_scale_upside_down(model):
    cls = _llama_attention(4.0, lambda t: torch.ones(t, t, dtype=torch.bool).triu(1))
    for layer in model.layers:
        become(layer, cls)


def _moe_attention(model, scaled, masked):
    class Attention(bodies_text.Attention):
        def forward(self, x):
            q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
            scores = q @ k.transpose(-2, -1)
            if scaled:
                scores = scores / math.sqrt(q.size(-1))
            hidden = scores.masked_fill(~self.mask[: x.size(1), : x.size(1)], float("-inf"))
            if masked:
                scores = hidden
            return self.out((torch.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2))

    for layer in model.layers:
        become(layer.attention, Attention)


@fault(
    "moe", UNSCALED, [f"layers.{i}.attention" for i in range(3)], "the scores are not divided by sqrt(d)", hurts=False
)
def moe_unscaled(model):
    _moe_attention(model, scaled=False, masked=True)


# ---------------------------------------------------------------------------------------------------------------------


@fault("gpt", MASK, [f"h.{i}.attn" for i in range(4)], "is_causal was not passed on, so each word sees the next one")
def gpt_no_mask(model):
    class CausalSelfAttention(bodies_text.CausalSelfAttention):
        def forward(self, x):
            b, t, c = x.shape
            q, k, v = self.c_attn(x).split(c, dim=2)
            q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v)
            return self.c_proj(y.transpose(1, 2).reshape(b, t, c))

    for block in model.h:
        become(block.attn, CausalSelfAttention)
    return Planted(model, score=prefixes)


@fault("llama", MASK, "layers", "the mask is the wrong way round: each word sees itself and what follows")
def llama_inverted_mask(model):
    cls = _llama_attention(0.25, lambda t: torch.ones(t, t, dtype=torch.bool).tril(-1))
    for layer in model.layers:
        become(layer, cls)
    return Planted(model, score=prefixes)


@fault("moe", MASK, [f"layers.{i}.attention" for i in range(3)], "the result of masked_fill is not used (not in place)")
def moe_mask_dropped(model):
    _moe_attention(model, scaled=True, masked=False)
    return Planted(model, score=prefixes)


@fault("seq2seq", MASK, "decoder", "the decoder layers get the mask but do not give it to their attention")
def seq2seq_no_mask(model):
    class DecoderLayer(bodies_seq.DecoderLayer):
        def forward(self, x, memory, mask):
            x = self.norm1(x + self.self_attn(x, x))
            x = self.norm2(x + self.cross_attn(x, memory))
            return self.norm3(x + self.ff(x))

    for layer in model.decoder:
        become(layer, DecoderLayer)
    return Planted(model, score=prefixes)


# ---------------------------------------------------------------------------------------------------------------------


@fault("vit", MIXED, [f"blocks.{i}.attn" for i in range(4)], "MultiheadAttention without batch_first gets batch first")
def vit_batch_second(model):
    for block in model.blocks:
        block.attn.batch_first = False


@fault("lstm", MIXED, "rnn", "batch_first was left out: the recurrence runs over the samples and not over the words")
def lstm_batch_second(model):
    model.rnn.batch_first = False


@fault("tabular", MIXED, "gate", "softmax over dim 0: the shares sum to one over the batch, not over the experts")
def tabular_softmax_over_batch(model):
    class TableExperts(bodies_other.TableExperts):
        def mix(self, x):
            share = F.softmax(self.gate(x), dim=0)
            outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
            return torch.einsum("be,beh->bh", share, outputs)

    return become(model, TableExperts)


@fault("seq2seq", MIXED, ["encoder.0.self_attn", "encoder.1.self_attn"], "softmax over dim 0, the batch")
def seq2seq_softmax_over_batch(model):
    class MultiHead(bodies_seq.MultiHead):
        def forward(self, query, memory, mask=None):
            q, k, v = self.heads(self.w_q(query)), self.heads(self.w_k(memory)), self.heads(self.w_v(memory))
            energy = torch.matmul(q, k.transpose(2, 3)) / self.d_head**0.5
            context = torch.matmul(F.softmax(energy, dim=0), v)
            return self.w_o(context.permute(0, 2, 1, 3).flatten(2))

    for layer in model.encoder:
        become(layer.self_attn, MultiHead)


@fault("gpt", MIXED, "ln_f", "the last norm was swapped for one over the batch and all positions", hurts=False)
def gpt_norm_over_batch(model):
    class LayerNorm(nn.LayerNorm):
        def forward(self, x):
            mean, var = x.mean((0, 1), keepdim=True), x.var((0, 1), keepdim=True)
            return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias

    become(model.ln_f, LayerNorm)


# ---------------------------------------------------------------------------------------------------------------------


@fault("lstm", GATES, "rnn", "input-gate biases were set to -8 (the slice for the forget gate was one block off)")
def lstm_input_shut(model):
    for layer in (0, 1):
        with torch.no_grad():
            getattr(model.rnn, f"bias_ih_l{layer}")[:96] = -8.0


@fault("lstm", GATES, "rnn", "embedding and all recurrent matrices are plain randn, so nearly all gates are saturated")
def lstm_saturated(model):
    model.encoder.reset_parameters()
    for name, p in model.rnn.named_parameters():
        if "weight" in name:
            nn.init.normal_(p)


@fault("lstm", GATES, "rnn", "output-gate biases at -10 in the second layer: nothing comes out")
def lstm_output_shut(model):
    with torch.no_grad():
        model.rnn.bias_ih_l1[3 * 96 :] = -10.0


@fault("graph", GATES, ["updates.0", "updates.1", "updates.2"],
       "update-gate biases at +10: in torch that keeps the old state, so no message comes in")  # fmt: skip
def graph_update_shut(model):
    for cell in model.updates:
        with torch.no_grad():
            cell.bias_ih[48:96] = 10.0


# ---------------------------------------------------------------------------------------------------------------------


@fault("moe", ROUTER, "layers.1.moe.router", "the router bias of expert 0 came from a collapsed run: +12", hurts=False)
def moe_collapsed_router(model):
    with torch.no_grad():
        model.layers[1].moe.router.bias[0] = 12.0


@fault("moe", ROUTER, ["layers.0.moe.router", "layers.0.moe.experts.3"], "expert 3 was masked out with a bias of -1e4",
       hurts=False)  # fmt: skip
def moe_dead_expert(model):
    with torch.no_grad():
        model.layers[0].moe.router.bias[3] = -1e4


@fault("tabular", ROUTER, "gate", "gate bias (0, 0, 30, 0): one expert gets all customers", hurts=False)
def tabular_one_expert(model):
    with torch.no_grad():
        model.gate.bias[2] = 30.0


@fault("tabular", ROUTER, ["gate", "experts.1"], "expert 1 has the gate bias -1e4 and never gets a share", hurts=False)
def tabular_dead_expert(model):
    with torch.no_grad():
        model.gate.bias[1] = -1e4
