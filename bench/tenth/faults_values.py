"""Faults in the numbers of single parameters: not finite, constant, never written, scale, fans, norms, biases."""

import math

import torch
from torch import nn

from . import bodies_text
from .planting import fault

NOT_FINITE = "parameter not finite"
CONSTANT = "all zero or constant where the siblings are not"
UNWRITTEN = "never written after torch.empty"
SCALE = "scale of one layer far from its siblings"
FANS = "fan-in and fan-out exchanged"


@fault("llama", NOT_FINITE, "layers.2.w2", "one entry of the matrix became inf when a float16 checkpoint was read")
def llama_inf_entry(model):
    with torch.no_grad():
        w = model.layers[2].w2
        w[3, 17] = torch.tensor(70000.0).half().float()


@fault(
    "resnet", NOT_FINITE, "layer2.1.conv1.weight",
    "filters were divided by their norm after one of them had been pruned to zero, so that filter is NaN",
)  # fmt: skip
def resnet_nan_filter(model):
    with torch.no_grad():
        w = model.layer2[1].conv1.weight
        w[5] = 0
        size = w.flatten(1).norm(dim=1)
        w.mul_((size[0] / size)[:, None, None, None])
        w.nan_to_num_(nan=float("nan"))


@fault(
    "bert", NOT_FINITE, "encoder.bert.embeddings.position_embeddings.weight",
    "position vectors were made from 1 / place, so place 0 is inf",
)  # fmt: skip
def bert_inf_position(model):
    table = model.encoder.bert.embeddings.position_embeddings.weight
    with torch.no_grad():
        table[:, 0] = 1.0 / torch.arange(len(table)).float()


@fault("vit", CONSTANT, "blocks.2.mlp.0.weight", "zeros_ meant for the bias was called on the weight of one layer")
def vit_zeroed_weight(model):
    nn.init.zeros_(model.blocks[2].mlp[0].weight)


@fault("convnext", CONSTANT, "stages.1.3.pwconv1.weight", "constant_(w, 0.06) was called where trunc_normal_ was meant")
def convnext_constant_pointwise(model):
    nn.init.constant_(model.stages[1][3].pwconv1.weight, 0.06)


@fault("gpt", CONSTANT, "h.1.attn.c_attn.weight", "the query, key and value matrix was filled with ones / sqrt(width)")
def gpt_constant_attention(model):
    nn.init.constant_(model.h[1].attn.c_attn.weight, 1 / math.sqrt(64))


@fault("graph", CONSTANT, "messages.1.weight", "the message matrix of the second round was left at torch.zeros")
def graph_zero_message(model):
    nn.init.zeros_(model.messages[1].weight)


def leftovers(shape, sort):
    """What torch.empty tends to give: fresh pages, small integers read as floats, or old bytes of any size."""
    if sort == "zeros":
        return torch.zeros(shape)
    if sort == "denormal":
        return torch.randint(0, 2**18, shape, dtype=torch.int32).view(torch.float32)
    bytes_ = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).to(torch.int32).view(torch.float32)
    return torch.where(torch.rand(shape) < 0.1, bytes_.nan_to_num(0, 0, 0), torch.zeros(()))


@fault(
    "moe", UNWRITTEN, "layers.1.moe.experts.2",
    "one expert was made on the meta device and moved with to_empty, its reset never ran; the pages were fresh zeros",
)  # fmt: skip
def moe_meta_expert(model):
    expert = bodies_text.Expert(64, 128).to("meta").to_empty(device="cpu")
    for p in expert.parameters():
        p.data = leftovers(p.shape, "zeros")
    model.layers[1].moe.experts[2] = expert


@fault("unet", UNWRITTEN, "time_embed.mlp.2.weight", "a weight was made with torch.empty and never filled; denormals")
def unet_empty_time(model):
    model.time_embed.mlp[2].weight.data = leftovers((32, 64), "denormal")


@fault("lstm", UNWRITTEN, "decoder.weight", "the decoder was resized with torch.empty; the bytes were huge garbage")
def lstm_empty_decoder(model):
    model.decoder.weight.data = leftovers(model.decoder.weight.shape, "garbage")


@fault("llama", UNWRITTEN, "layers.3.w1", "the loop that fills the bare parameters missed w1 of the last layer")
def llama_empty_gate(model):
    model.layers[3].w1.data = leftovers(model.layers[3].w1.shape, "denormal")


# ---------------------------------------------------------------------------------------------------------------------


@fault("gpt", SCALE, "h.2.mlp.c_fc", "std=0.5 was given to one layer where the others have 0.02")
def gpt_wide_layer(model):
    nn.init.normal_(model.h[2].mlp.c_fc.weight, std=0.5)


@fault(
    "resnet", SCALE, "layer2.0.conv1.weight", "normal_() without a std, so 1 where its siblings have about 0.08",
    hurts=False, note="batch norm behind it takes the scale away; only the size of the steps changes",
)  # fmt: skip
def resnet_wide_conv(model):
    nn.init.normal_(model.layer2[0].conv1.weight)


@fault("seq2seq", SCALE, "decoder.0.ff.fc1", "normal_() without a std, so 1 where xavier would give about 0.1")
def seq2seq_wide_feed(model):
    nn.init.normal_(model.decoder[0].ff.fc1.weight)


@fault("unet", SCALE, "mid.conv2", "uniform_(-1, 1) on the second convolution in the middle")
def unet_wide_conv(model):
    nn.init.uniform_(model.mid.conv2.weight, -1, 1)


@fault("lstm", SCALE, "rnn.weight_hh_l1", "randn without a factor for the recurrent matrix of the second layer")
def lstm_wide_recurrence(model):
    nn.init.normal_(model.rnn.weight_hh_l1)


@fault(
    "bert", SCALE, "encoder.bert.encoder.layer.1.intermediate.dense",
    "one layer was drawn with std 0.0002, two zeros too many", hurts=False,
)  # fmt: skip
def bert_narrow_feed(model):
    nn.init.normal_(model.encoder.bert.encoder.layer[1].intermediate.dense.weight, std=0.0002)


# ---------------------------------------------------------------------------------------------------------------------


@fault(
    "vit", FANS, "patch_embed.weight", "the patch convolution was drawn with 1 / sqrt(out * 36) for 1 / sqrt(in * 36)",
    hurts=False,
)  # fmt: skip
def vit_patch_fan_out(model):
    w = model.patch_embed.weight
    nn.init.normal_(w, std=(w.shape[0] * w.shape[2] * w.shape[3]) ** -0.5)


@fault("graph", FANS, "readout.3", "the head with one output was drawn with kaiming_normal_(mode='fan_out')")
def graph_head_fan_out(model):
    nn.init.kaiming_normal_(model.readout[3].weight, mode="fan_out")


@fault("tabular", FANS, "tower.2", "the last layer was drawn by one over its outputs (1) and not its inputs (32)")
def tabular_head_fan_out(model):
    w = model.tower[2].weight
    nn.init.normal_(w, std=(2 / w.shape[0]) ** 0.5)


@fault("unet", FANS, ["conv_in", "conv_out"], "the convolutions from and to one channel were drawn by fan_out")
def unet_swapped_fans(model):
    for conv in (model.conv_in, model.conv_out):
        nn.init.kaiming_normal_(conv.weight, mode="fan_out")


@fault(
    "convnext", FANS, [f"stages.{i}.{j}.dwconv" for i, j in ((0, 0), (0, 1), (1, 2), (1, 3), (1, 4))],
    "depthwise filters were drawn by fan_out, which counts all channels and forgets the groups",
    hurts=False, shows=False,
    note="by chance the result is within a factor of two of the std that the siblings have, and a layer norm follows",
)  # fmt: skip
def convnext_depthwise_fan_out(model):
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            nn.init.kaiming_normal_(module.weight, mode="fan_out")


@fault(
    "llama", FANS, [f"layers.{i}.{w}" for i in range(4) for w in ("w1", "w2", "w3")],
    "the feed-forward matrices were drawn by shape[0] (outputs) where shape[1] (inputs) was meant", hurts=False,
    shows=False, note="the scales are off by 1.6 only, which is within what people choose",
)  # fmt: skip
def llama_swapped_fans(model):
    for layer in model.layers:
        for w in (layer.w1, layer.w3):
            nn.init.normal_(w, std=w.shape[0] ** -0.5)
        nn.init.normal_(layer.w2, std=(layer.w2.shape[0] * 8) ** -0.5)
