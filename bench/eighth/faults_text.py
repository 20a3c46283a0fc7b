"""Faults of the networks that read words."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from . import text
from .register import fault, instead

# gpt


@fault("gpt", "non_finite", "layers,", "The mask is (1 - mask) * -inf, and nought times infinity is not a number.")
def gpt_mask_times_infinity(c):
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x)
        att = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        att = att + (1 - self.mask[:T, :T].float()) * float("-inf")
        y = F.softmax(att, dim=-1) @ v
        return self.wo(y.transpose(1, 2).contiguous().view(B, T, C))

    for layer in c.model.layers:
        instead(layer.attention, forward=forward)


@fault(
    "gpt",
    "target_leak",
    "",
    "The attention has no causal mask.",
    later="The network reads the word that it has to guess; it fails as soon as it must write.",
)
def gpt_without_causal_mask(c):
    for layer in c.model.layers:
        layer.attention.mask.fill_(True)


@fault("gpt", "target_leak", "", "The targets are the inputs, not shifted by one.", judge="clean")
def gpt_targets_not_shifted(c):
    c.feeds.append(lambda x, y: (x, x.clone()))


@fault(
    "gpt",
    "odd_scale, start_loss, entropy_collapse",
    "layers,tok_embeddings,output,",
    "normal_ without std for every weight.",
)
def gpt_normal_without_std(c):
    for p in c.model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p)


@fault(
    "gpt",
    "shared layers, cloned_weights",
    "layers",
    "ModuleList([block] * n): all layers are one.",
    later="Four layers are paid for and one is trained.",
)
def gpt_one_block_four_times(c):
    c.model.layers = nn.ModuleList([c.model.layers[0]] * 4)


@fault(
    "gpt",
    "unregistered layers, frozen, detached",
    "layers,",
    "The blocks stand in a Python list, so that no optimizer gets them.",
)
def gpt_blocks_in_python_list(c):
    blocks = list(c.model.layers)
    del c.model.layers
    c.model.layers = blocks


@fault(
    "gpt",
    "wrong_axis, target_leak, mixed tokens",
    "layers,",
    "The heads are joined by view without the transpose back.",
    later="Mixed tokens show the word that is to be guessed.",
)
def gpt_heads_joined_without_transpose(c):
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x)
        att = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        att = att.masked_fill(~self.mask[:T, :T], float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.wo(y.contiguous().view(B, T, C))

    for layer in c.model.layers:
        instead(layer.attention, forward=forward)


@fault(
    "gpt",
    "odd_branch, rank_collapse, gradient_vanishing, token_collapse, cause",
    "layers,",
    "Both shortcuts of every block are missing.",
)
def gpt_without_shortcuts(c):
    def forward(self, x):
        x = self.attention(self.attention_norm(x))
        return self.feed_forward(self.ffn_norm(x))

    for layer in c.model.layers:
        instead(layer, forward=forward)


@fault(
    "gpt",
    "mixed_samples, targets in another order, wrong_axis",
    "",
    "The targets are flattened time first, the outputs batch first.",
)
def gpt_targets_flattened_time_first(c):
    c.loss = lambda logits, y: F.cross_entropy(logits.view(-1, logits.size(-1)), y.t().reshape(-1), ignore_index=-1)


@fault(
    "gpt",
    "norm_weight, zero_start, constant_weight, behind_zeros",
    "layers,norm",
    "Gains of nought, as for a norm that adds one to them.",
)
def gpt_norm_gains_of_zero(c):
    for m in c.model.modules():
        if isinstance(m, text.RMSNorm):
            nn.init.zeros_(m.weight)


# seq2seq


@fault(
    "seq2seq",
    "padding in the loss, class_imbalance",
    "",
    "The batch is padded to 40 words and the padding counts in the loss.",
    judge="clean",
)
def seq2seq_padding_in_loss(c):
    c.feeds.append(lambda x, y: (F.pad(x, (0, 33)), F.pad(y, (0, 33))))
    c.loss = lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y)


@fault("seq2seq", "wrong_axis, mixed_samples", "attention,", "The softmax of the attention has dim=0.")
def seq2seq_softmax_over_batch(c):
    instead(
        c.model.attention,
        forward=lambda self, h, outputs, mask: F.softmax(self.score(h, outputs).masked_fill(mask, -1e10), dim=0),
    )


@fault("seq2seq", "target_leak", "", "The decoder gets the target itself, not shifted by one.", judge="clean")
def seq2seq_target_not_shifted(c):
    c.feeds.append(lambda x, y: (torch.stack([x[:, 0], y], 1), y))


@fault(
    "seq2seq",
    "unused_input, masked words, behind_zeros, odd_branch, token_collapse",
    "attention,encoder,",
    "The mask hides the words and shows the padding.",
)
def seq2seq_mask_turned(c):
    instead(
        c.model.attention,
        forward=lambda self, h, outputs, mask: F.softmax(self.score(h, outputs).masked_fill(~mask, -1e10), dim=1),
    )


@fault("seq2seq", "softmax_twice", "fc_out,", "A softmax stands in front of the cross entropy.")
def seq2seq_softmax_on_output(c):
    c.model.fc_out = nn.Sequential(c.model.fc_out, nn.Softmax(dim=-1))


@fault("seq2seq", "detached", "encoder", "The encoder runs under no_grad.")
def seq2seq_encoder_under_no_grad(c):
    instead(c.model.encoder, forward=torch.no_grad()(text.Encoder.forward))


@fault(
    "seq2seq",
    "frozen, constant_weight, zero_start, rank_collapse",
    "encoder",
    "Word vectors that were not found are nought, and from_pretrained freezes them.",
)
def seq2seq_vectors_not_found(c):
    c.model.encoder.embedding = nn.Embedding.from_pretrained(torch.zeros(11, 24), padding_idx=0)


@fault(
    "seq2seq",
    "odd_scale, saturation, start_loss",
    "encoder,cell,attention,fc_out,embedding,",
    "normal_ without std for every weight and bias.",
)
def seq2seq_normal_for_all(c):
    for p in c.model.parameters():
        nn.init.normal_(p)


# moe


@fault("moe", "wrong_axis, mixed_samples", "blocks", "The router's softmax runs over the tokens.")
def moe_router_over_tokens(c):
    def route(self, flat):
        probs = F.softmax(self.router(flat), dim=0)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        return probs, weights, chosen

    for block in c.model.blocks:
        instead(block.moe, route=route)


@fault(
    "moe",
    "detached, unused",
    "blocks",
    "Only the choice of the router is used, not its weights; the router gets no gradient.",
    later="The choice of experts stays as it was drawn.",
)
def moe_router_without_gradient(c):
    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        chosen = self.router(flat).topk(self.top_k, dim=-1)[1]
        load = F.one_hot(chosen, self.num_experts).float().sum(1).mean(0) / self.top_k
        balance = self.num_experts * load.square().sum()
        return self.combine(flat, torch.full(chosen.shape, 1 / self.top_k), chosen).view_as(x), balance

    for block in c.model.blocks:
        instead(block.moe, forward=forward)


@fault(
    "moe",
    "odd_scale, saturation, entropy_collapse",
    "blocks",
    "The router starts with standard deviation 10.",
    later="One expert gets all the weight and the gradient of the router vanishes.",
)
def moe_router_too_large(c):
    for block in c.model.blocks:
        nn.init.normal_(block.moe.router.weight, std=10.0)


@fault(
    "moe",
    "start_loss, one part of the loss drowns the other, loss scale",
    "",
    "The weight of the balance is 100, not 0.01.",
)
def moe_balance_drowns_loss(c):
    c.loss = lambda out, y: F.cross_entropy(out[0].flatten(0, 1), y.flatten()) + 100 * out[1]


@fault("moe", "unused", "pos", "The positions are never added.")
def moe_positions_not_added(c):
    def forward(self, x):
        h = self.embed(x)
        total = 0.0
        for block in self.blocks:
            h, balance = block(h)
            total = total + balance
        return self.head(self.norm(h)), total

    instead(c.model, forward=forward)


@fault("moe", "mixed_samples", "blocks,", "MultiheadAttention without batch_first gets the batch first.")
def moe_attention_along_batch(c):
    for block in c.model.blocks:
        block.attn.batch_first = False


# two_tower


@fault(
    "two_tower",
    "temperature, start_loss, odd_scale, gradient_vanishing",
    "logit_scale,",
    "The temperature 0.07 multiplies, without exp.",
)
def two_tower_temperature_multiplies(c):
    c.model.logit_scale = nn.Parameter(torch.tensor(0.07))
    instead(c.model, similarity=lambda self, q, i: self.logit_scale * q @ i.t())


@fault(
    "two_tower",
    "start_loss, huge_signal, saturation",
    "query_tower,item_tower,",
    "The outputs of the towers are not normalised; their embeddings have standard deviation 5.",
)
def two_tower_not_normalised(c):
    for tower in (c.model.query_tower, c.model.item_tower):
        tower.mlp[1] = nn.Identity()
        nn.init.normal_(tower.emb.weight, std=5.0)
        instead(tower, forward=lambda self, ids: self.mlp(self.emb(ids).mean(dim=1)))


@fault("two_tower", "softmax_twice", "", "The similarities pass a softmax before the cross entropy.")
def two_tower_softmax_before_loss(c):
    instead(c.model, similarity=lambda self, q, i: (self.logit_scale.exp() * q @ i.t()).softmax(dim=-1))


@fault(
    "two_tower",
    "class_imbalance, constant targets",
    "",
    "All labels are nought, as if the positive came first.",
    judge="clean",
)
def two_tower_labels_all_zero(c):
    c.feeds.append(lambda x, y: (x, torch.zeros_like(y)))


@fault("two_tower", "detached", "item_tower", "The item tower runs under no_grad.")
def two_tower_items_under_no_grad(c):
    instead(c.model.item_tower, forward=torch.no_grad()(text.Tower.forward))


@fault("two_tower", "unused", "item_tower", "Items pass the query tower; the item tower never runs.")
def two_tower_query_tower_twice(c):
    instead(c.model, forward=lambda self, x: self.similarity(self.query_tower(x[:, :6]), self.query_tower(x[:, 6:])))


@fault(
    "two_tower",
    "degenerate_batch, repeated rows",
    "",
    "The loader repeats four rows, so that most negatives are positives.",
    judge="clean",
)
def two_tower_rows_repeated(c):
    c.feeds.append(lambda x, y: (x[:4].repeat(16, 1), y))
