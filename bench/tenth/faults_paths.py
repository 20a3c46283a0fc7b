"""Faults on the way of signal and gradient: zeros in a row, loud branches, shortcuts, activations, dropout."""

import torch
import torch.nn.functional as F
from torch import nn

from . import bodies_image, bodies_text
from .planting import become, fault

ZEROS = "exact zeros behind which no gradient arrives"
LOUD = "one residual branch writes far more than its siblings"
SHORTCUT = "missing shortcut"
ACTIVATION = "activation forgotten or applied twice"
DROPOUT = "dropout probability is the share to keep"


@fault("convnext", ZEROS, ["stages"], "gamma and pwconv2 (weight, bias) are both zero in every block")
def convnext_double_zero(model):
    for module in model.modules():
        if isinstance(module, bodies_image.NeXtBlock):
            for p in (module.gamma, module.pwconv2.weight, module.pwconv2.bias):
                nn.init.zeros_(p)


@fault("llama", ZEROS, [f"layers.{i}.{w}" for i in range(4) for w in ("w1", "w2", "w3")],
       "both the output matrix and one factor of SwiGLU start at zero, so no part ever moves", hurts=False)  # fmt: skip
def llama_double_zero(model):
    for layer in model.layers:
        nn.init.zeros_(layer.w2)
        nn.init.zeros_(layer.w3)


@fault("tabular", ZEROS, [f"experts.{i}.3" for i in range(4)], "biases of -40 in front of the second ReLU: all dead")
def tabular_dead_relu(model):
    for expert in model.experts:
        nn.init.constant_(expert[3].bias, -40.0)


@fault("graph", ZEROS, "messages", "message biases of -5 in front of ReLU: no message is ever sent")
def graph_dead_messages(model):
    for message in model.messages:
        nn.init.constant_(message.bias, -5.0)


@fault("resnet", ZEROS, ["layer3.1"], "bn1 weight 0 and bias 0 as well as bn2 weight 0: the branch can never start",
       hurts=False)  # fmt: skip
def resnet_double_zero_norm(model):
    block = model.layer3[1]
    for p in (block.bn1.weight, block.bn1.bias, block.bn2.weight):
        nn.init.zeros_(p)


# ---------------------------------------------------------------------------------------------------------------------


@fault("llama", LOUD, "layers.1.wo", "one output matrix was drawn with std 1 and not 1 / sqrt(fan_in * 8)")
def llama_loud_attention(model):
    nn.init.normal_(model.layers[1].wo)


@fault("vit", LOUD, "blocks.2.mlp.2", "the second linear of one block was drawn with std 2 for 0.02")
def vit_loud_mlp(model):
    nn.init.normal_(model.blocks[2].mlp[2].weight, std=2.0)


@fault("convnext", LOUD, "stages.1.2.gamma", "layer scale 100 in one block where the others have 0.1")
def convnext_loud_block(model):
    nn.init.constant_(model.stages[1][2].gamma, 100.0)


@fault("gpt", LOUD, "h.0.mlp.c_proj", "the first block was skipped by the residual scaling and drawn with std 1")
def gpt_loud_mlp(model):
    nn.init.normal_(model.h[0].mlp.c_proj.weight)


# ---------------------------------------------------------------------------------------------------------------------


@fault("resnet", SHORTCUT, ["layer1", "layer2", "layer3"], "out += identity is missing in every block", hurts=False)
def resnet_no_shortcut(model):
    class BasicBlock(bodies_image.BasicBlock):
        def forward(self, x):
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            return self.relu(out)

    for module in model.modules():
        if isinstance(module, bodies_image.BasicBlock):
            become(module, BasicBlock)


@fault("vit", SHORTCUT, "blocks", "x = mlp(norm(x)) in every block: the sum is missing")
def vit_no_shortcut(model):
    class EncoderBlock(bodies_image.EncoderBlock):
        def forward(self, x):
            y = self.norm1(x)
            x = x + self.attn(y, y, y, need_weights=False)[0]
            return self.mlp(self.norm2(x))

    for block in model.blocks:
        become(block, EncoderBlock)


@fault("unet", SHORTCUT, ["up1", "up2"], "the maps of the way down are put in as zeros of the right shape")
def unet_skips_lost(model):
    class UNet(bodies_image.UNet):
        def forward(self, x, t):
            temb = self.time_embed(t)
            h1 = self.down1(self.conv_in(x), temb)
            h2 = self.down2(self.pool(h1), temb)
            h = self.mid(h2, temb)
            h = self.up2(torch.cat([h, torch.zeros_like(h2)], dim=1), temb)
            h = F.interpolate(h, scale_factor=2.0, mode="nearest")
            h = self.up1(torch.cat([h, torch.zeros_like(h1)], dim=1), temb)
            return self.conv_out(F.silu(self.norm_out(h)))

    return become(model, UNet)


@fault("gpt", SHORTCUT, ["h.1", "h.2"], "two blocks give back the attention branch alone, without adding x")
def gpt_no_shortcut(model):
    class Block(bodies_text.Block):
        def forward(self, x):
            x = self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    for block in model.h[1:3]:
        become(block, Block)


# ---------------------------------------------------------------------------------------------------------------------


@fault("gpt", ACTIVATION, [f"h.{i}.mlp" for i in range(4)], "no GELU between the two linear layers", hurts=False)
def gpt_no_gelu(model):
    for block in model.h:
        block.mlp.gelu = nn.Identity()


@fault("resnet", ACTIVATION, ["layer1", "layer2", "layer3"], "the ReLUs were left out of all blocks", hurts=False)
def resnet_no_relu(model):
    for module in model.modules():
        if isinstance(module, bodies_image.BasicBlock):
            module.relu = nn.Identity()


@fault("tabular", ACTIVATION, "experts", "two linear layers in a row in each expert, the first ReLU is missing",
       hurts=False)  # fmt: skip
def tabular_no_relu(model):
    for expert in model.experts:
        expert[2] = nn.Identity()


@fault(
    "vit", ACTIVATION, [f"blocks.{i}.mlp" for i in range(4)], "GELU again behind the second linear layer", hurts=False
)
def vit_gelu_twice(model):
    for block in model.blocks:
        block.mlp.append(nn.GELU())


@fault("unet", ACTIVATION, "conv_out", "ReLU behind the last layer of a network that must give noise of both signs")
def unet_relu_output(model):
    model.conv_out = nn.Sequential(model.conv_out, nn.ReLU())


# ---------------------------------------------------------------------------------------------------------------------


@fault("vit", DROPOUT, [f"blocks.{i}.mlp.3" for i in range(4)], "Dropout(0.9) where 0.9 was to be kept", hurts=False)
def vit_dropout_keep(model):
    for block in model.blocks:
        block.mlp[3].p = 0.9


@fault("bert", DROPOUT, "encoder.bert", "hidden_dropout_prob 0.9 where 0.9 was to be kept")
def bert_dropout_keep(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            module.p = 0.9
