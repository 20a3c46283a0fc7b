"""Faults in whole groups of parameters: norm weights, biases, another law than said, and heads far too large."""

import torch
from torch import nn

from .planting import fault

NORMS = "norm weights far from 1"
BIASES = "biases far from 0"
LAW = "all weights after another law than the config or docstring says"
HEAD = "tied embedding or head far too large"


@fault(
    "llama", NORMS, [*(f"layers.{i}.{n}" for i in range(4) for n in ("attn_norm", "ffn_norm")), "norm"],
    "a loop drew every parameter with normal_(std=0.02), the norm weights too",
)  # fmt: skip
def llama_norms_drawn(model):
    for name, p in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(p, std=0.02)


@fault(
    "bert", NORMS,
    ["encoder.bert.embeddings.LayerNorm",
     *(f"encoder.bert.encoder.layer.{i}.{n}LayerNorm" for i in range(3) for n in ("attention.output.", "output."))],
    "all parameters were drawn anew with std 0.02, the LayerNorm weights too",
)  # fmt: skip
def bert_norms_drawn(model):
    for name, p in model.named_parameters():
        if "LayerNorm.weight" in name:
            nn.init.normal_(p, std=0.02)


@fault(
    "resnet",
    NORMS,
    [f"layer{i}.{j}.bn2" for i in (1, 2, 3) for j in (0, 1)],
    "bn2 weights were set to 10 by a slip in the exponent",
)
def resnet_norms_ten(model):
    for name, p in model.named_parameters():
        if name.endswith("bn2.weight"):
            nn.init.constant_(p, 1e1)


@fault("convnext", NORMS, ["norm"], "the last norm was loaded from a checkpoint in another unit; its weights are 50")
def convnext_last_norm(model):
    nn.init.constant_(model.norm.weight, 50.0)


@fault(
    "unet", NORMS, ["mid.norm1", "mid.norm2", "up1.norm1", "up1.norm2"],
    "weight and eps were mixed up for some group norms: weights 1e-5",
)  # fmt: skip
def unet_norms_tiny(model):
    for block in (model.mid, model.up1):
        for norm in (block.norm1, block.norm2):
            nn.init.constant_(norm.weight, 1e-5)


@fault("gpt", BIASES, ["h"], "normal_(bias) with its default std 1 for zeros_(bias) in all linear layers")
def gpt_biases_drawn(model):
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias)


@fault("convnext", BIASES, "stages.0.0.dwconv.bias", "the bias of a depthwise layer was drawn from uniform(0, 30)")
def convnext_depthwise_bias(model):
    nn.init.uniform_(model.stages[0][0].dwconv.bias, 0, 30)


@fault("tabular", BIASES, "tower.2.bias", "the output bias was set to the count of positives and not to their log-odds")
def tabular_count_bias(model):
    nn.init.constant_(model.tower[2].bias, 34.0)


@fault("graph", BIASES, "readout.3.bias", "the output bias is the mean of targets that are now standardized")
def graph_mean_bias(model):
    nn.init.constant_(model.readout[3].bias, 21.5)


@fault("vit", BIASES, "head.bias", "log counts of another data set were put into the head: one class gets 9 more")
def vit_head_prior(model):
    with torch.no_grad():
        model.head.bias[2] = 9.0


# ---------------------------------------------------------------------------------------------------------------------


def _redraw(model, std):
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)


@fault("bert", LAW, "", "the weights were drawn with std 0.2 while config.initializer_range says 0.02")
def bert_range_ten_times(model):
    _redraw(model, 0.2)


@fault("bert", LAW, "", "the weights were drawn with std 0.002 while config.initializer_range says 0.02")
def bert_range_tenth(model):
    _redraw(model, 0.002)


@fault("gpt", LAW, "", "the weights were drawn with std 0.2 while the config says 0.02")
def gpt_range_ten_times(model):
    _redraw(model, 0.2)


@fault(
    "llama", LAW, ["layers"], "torch.rand was used where torch.randn was meant: all matrices are positive",
)  # fmt: skip
def llama_rand_for_randn(model):
    for layer in model.layers:
        for p in layer.parameters():
            if p.dim() == 2:
                p.data = torch.rand(p.shape) * p.shape[1] ** -0.5


@fault("vit", LAW, ["blocks", "head"], "std 0.3 for the trunc_normal that the docstring gives as 0.02")
def vit_other_std(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.3)


# ---------------------------------------------------------------------------------------------------------------------


@fault("gpt", HEAD, ["wte", "lm_head"], "the tied embedding kept the N(0, 1) of nn.Embedding, so the logits are huge")
def gpt_tied_unit(model):
    model.wte.reset_parameters()


@fault("seq2seq", HEAD, ["embedding", "generator"], "the tied embedding is N(0, 1) and is still multiplied by sqrt(d)")
def seq2seq_tied_unit(model):
    nn.init.normal_(model.embedding.weight)


@fault("llama", HEAD, "output", "normal_() without a std for the output matrix")
def llama_unit_head(model):
    nn.init.normal_(model.output.weight)


@fault("resnet", HEAD, "fc", "nn.init.normal_(fc.weight) with its default std 1")
def resnet_unit_head(model):
    nn.init.normal_(model.fc.weight)
