"""Mistakes in networks for images."""

from __future__ import annotations

import torch
from bench.promised.bodies_images import (
    ConvNext,
    Double,
    Mixer,
    MixerBlock,
    NextBlock,
    ResidualV1,
    ResidualV2,
    ResNetV1,
    ResNetV2,
    UNet,
    ViT,
    ViTBlock,
)  # fmt: skip
from bench.promised.registry import become, fault, recycled, through_meta, within
from torch import Tensor, nn
from torch.nn import functional as F


class SoftmaxViT(ViT):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).softmax(-1)


@fault("vit_softmax_at_the_end", "vit", "softmax_twice", "")
def _(model: ViT) -> None:
    """The network ends with a softmax; the loss has its own."""
    become(model, SoftmaxViT)


class SoftmaxUNet(UNet):
    def forward(self, images: Tensor) -> Tensor:
        return torch.softmax(super().forward(images), dim=1)


@fault("unet_softmax_of_pixels", "unet", "softmax_twice", "")
def _(model: UNet) -> None:
    """Probabilities of pixels go into a loss for logits."""
    become(model, SoftmaxUNet)


@fault("vit_backbone_frozen", "vit", "frozen", "blocks")
def _(model: ViT) -> None:
    """A backbone of random weights is frozen; the head trains."""
    model.requires_grad_(False)
    model.head.requires_grad_(True)


@fault("resnet1_backbone_frozen", "resnet1", "frozen", "blocks")
def _(model: ResNetV1) -> None:
    """Blocks and stem are frozen for fine-tuning, but no weights were loaded."""
    for part in (model.stem, model.bn, model.blocks):
        part.requires_grad_(False)


@fault(
    "vit_positions_never_written",
    "vit",
    "never_written parameter_not_finite non_finite",
    "positions",
)
def _(model: ViT) -> None:
    """The positions are torch.empty and nobody draws them."""
    recycled(model.positions)


@fault(
    "vit_token_of_thousand",
    "vit",
    "gradient_alignment rank_collapse odd_scale huge_signal",
    "token",
)
def _(model: ViT) -> None:
    """The class token starts at 1000 times its scale and drowns what the image adds: all samples look alike."""
    nn.init.normal_(model.token, std=1000.0)


class MeanViT(ViTBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1, keepdim=True).expand_as(x))


@fault("vit_context_replaces", "vit", "token_collapse rank_collapse", "blocks.0")
def _(model: ViT) -> None:
    """The mean over positions replaces the tokens in front of the first block; it was meant to be added."""
    become(model.blocks[0], MeanViT)


@fault("vit_attention_constant", "vit", "constant_weight", "blocks")
def _(model: ViT) -> None:
    """All matrices of the blocks are filled with 1/fan_in, to begin with an average."""
    for layer in within(model.blocks, nn.Linear):
        nn.init.constant_(layer.weight, 1 / layer.in_features)


@fault("vit_zero_branches", "vit", "behind_zeros constant_weight", "blocks")
def _(model: ViT) -> None:
    """Patches, attention and MLPs all start at zero: only the head learns."""
    for layer in [*within(model.blocks, nn.Linear), model.patch]:
        nn.init.zeros_(layer.weight)


class OverImages(ViTBlock):
    def attend(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, -1).permute(2, 1, 3, 0, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).reshape(n, t, d))


@fault("vit_attention_over_images", "vit", "mixed_samples", "blocks")
def _(model: ViT) -> None:
    """Attention runs over the images of the batch, as with batch_first forgotten; patches never meet."""
    become(model.blocks, OverImages)


class FewBlocks(ViT):
    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for _block in self.blocks:
            pass
        return self.head(self.norm(x[:, :5]).mean(1))


@fault("vit_blocks_not_called", "vit", "unused unused_input", "blocks")
def _(model: ViT) -> None:
    """The call of the blocks was commented out, and only the first tokens are read."""
    become(model, FewBlocks)


@fault("vit_sparse_patches", "vit", "unused_input", "patch")
def _(model: ViT) -> None:
    """The patch convolution has a kernel of 1 and a stride of 4: one pixel of sixteen is read."""
    model.patch = nn.Conv2d(3, 40, 1, stride=4)


@fault("mixer_average_start", "mixer", "constant_weight", "blocks")
def _(model: Mixer) -> None:
    """Every layer starts as an average: all of its weights are equal, and its biases zero."""
    for layer in within(model, nn.Linear, nn.Conv2d):
        nn.init.constant_(layer.weight, 1 / layer.weight[0].numel())
        nn.init.zeros_(layer.bias)


class PlainMixer(MixerBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = self.places(x.transpose(1, 2)).transpose(1, 2)
        return self.channels(x)


@fault(
    "mixer_no_skips_no_norms", "mixer", "rank_collapse gradient_vanishing gradient_alignment token_collapse", "blocks"
)
def _(model: Mixer) -> None:
    """Neither shortcuts nor norms; PyTorch's default weights shrink what is left."""
    become(model.blocks, PlainMixer)


class OverPlaces(MixerBlock):
    def forward(self, x: Tensor) -> Tensor:
        h = F.layer_norm(x[..., None], (1,)).squeeze(-1)
        x = x + self.places(h.transpose(1, 2)).transpose(1, 2)
        return x + self.channels(F.layer_norm(x[..., None], (1,)).squeeze(-1))


@fault("mixer_norm_of_single_values", "mixer", "wrong_axis", "blocks")
def _(model: Mixer) -> None:
    """An axis was added and the norms run over it: over one value each, which gives zero."""
    become(model.blocks, OverPlaces)


class Unshortened(ResidualV2):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.conv1(x))
        h = self.act(self.conv2(h))
        return self.act(self.conv3(h))


@fault("resnet2_plain_default", "resnet2", "rank_collapse gradient_vanishing gradient_alignment", "blocks")
def _(model: ResNetV2) -> None:
    """Shortcuts and norms were removed for speed, and the convolutions start by PyTorch's default."""
    for conv in within(model.blocks, nn.Conv2d):
        conv.reset_parameters()
    become(model.blocks, Unshortened)


class Normless(ResidualV2):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.conv1(self.act(x)))
        return x + self.conv3(self.act(self.conv2(h)))


@fault("resnet2_normless_residual", "resnet2", "gradient_explosion huge_signal odd_branch", "blocks")
def _(model: ResNetV2) -> None:
    """Norms were removed and gains raised to 1.6 times He's: every branch multiplies the stream."""
    for conv in within(model.blocks, nn.Conv2d):
        nn.init.kaiming_normal_(conv.weight, a=0, nonlinearity="relu")
        conv.weight.data *= 1.6
    become(model.blocks, Normless)


@fault("resnet2_blocks_shared", "resnet2", "cloned_weights disagreement", "blocks")
def _(model: ResNetV2) -> None:
    """`[ResidualV2()] * 9`: one block nine times."""
    model.blocks = nn.ModuleList([model.blocks[0]] * 9)


@fault("resnet2_zero_times_zero", "resnet2", "behind_zeros constant_weight norm_weight", "blocks")
def _(model: ResNetV2) -> None:
    """The last norm and the last convolution of each branch start at zero, both."""
    for block in model.blocks:
        nn.init.zeros_(block.bn3.weight)
        nn.init.zeros_(block.conv3.weight)


class Stored(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> Stored:
        super().train(False)
        return self


@fault(
    "resnet1_stored_statistics",
    "resnet1",
    "huge_signal disagreement gradient_explosion",
    "blocks",
)
def _(model: ResNetV1) -> None:
    """Batch norms never leave evaluation mode, in a network that was not pretrained and starts at 0.3."""
    for norm in within(model, nn.BatchNorm2d):
        norm.__class__ = Stored
        norm.eval()
    for conv in within(model.blocks, nn.Conv2d):
        nn.init.normal_(conv.weight, std=0.3)


class DeadBlock(ResidualV1):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(-F.relu(self.bn2(self.conv2(h)) + self.short(x)))


@fault(
    "resnet1_relu_of_minus_relu",
    "resnet1",
    "dead_units gradient_vanishing behind_zeros",
    "blocks.3",
)
def _(model: ResNetV1) -> None:
    """A sign is wrong: ReLU of minus ReLU is always zero."""
    become(model.blocks[3], DeadBlock)


class HalfBlock(ResidualV1):
    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x) * 1e3
        h = (h.half() * 200).float()
        return F.relu(self.bn2(self.conv2(F.relu(h))) + self.short(x))


@fault("resnet1_half_overflow", "resnet1", "non_finite huge_signal", "blocks.2")
def _(model: ResNetV1) -> None:
    """A scale of 2e5 that was meant for the loss stands at a convolution in half precision, which overflows."""
    become(model.blocks[2], HalfBlock)


@fault("resnet1_scaled_by_spread", "resnet1", "parameter_not_finite non_finite", "blocks.1.conv1")
def _(model: ResNetV1) -> None:
    """Filters are divided by their own deviation, which is zero for a pruned one."""
    weight = model.blocks[1].conv1.weight.data
    weight[4] = 0.0
    weight /= weight.std((1, 2, 3), keepdim=True)


class OneRow(ResNetV1):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images[:, :, :1])


@fault("resnet1_top_row", "resnet1", "unused_input", "")
def _(model: ResNetV1) -> None:
    """A slice keeps one row of sixteen."""
    become(model, OneRow)


class Mean0(ResNetV1):
    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(images))))
        return self.fc(x.mean((2, 3)).mean(0, keepdim=True).expand(len(x), -1))


@fault("resnet1_mean_over_batch", "resnet1", "mixed_samples gradient_alignment rank_collapse", "fc")
def _(model: ResNetV1) -> None:
    """The pooling averages the batch as well, so that all images get one answer."""
    become(model, Mean0)


@fault("convnext_norms_tiny", "convnext", "norm_weight gradient_vanishing", "first")
def _(model: ConvNext) -> None:
    """All norms start at 0.001."""
    for norm in within(model, nn.LayerNorm, nn.GroupNorm):
        nn.init.constant_(norm.weight, 0.001)


class Width(NextBlock):
    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(x)
        h = F.layer_norm(h, h.shape[-2:]).permute(0, 2, 3, 1)
        return x + (self.gamma * self.down(F.gelu(self.up(h)))).permute(0, 3, 1, 2)


@fault(
    "convnext_norm_over_places",
    "convnext",
    "wrong_axis",
    "",
    by_nature="A norm of each channel over its places trains as well on small images; it is not the one meant.",
)
def _(model: ConvNext) -> None:
    """The norms run over the places of each channel, not over channels."""
    become(within(model, NextBlock), Width)


@fault("convnext_zero_times_zero", "convnext", "behind_zeros constant_weight", "")
def _(model: ConvNext) -> None:
    """Layer scale and second layer are both zero: no branch ever learns."""
    for block in within(model, NextBlock):
        nn.init.zeros_(block.gamma)
        nn.init.zeros_(block.down.weight)


class CutUNet(UNet):
    def forward(self, images: Tensor) -> Tensor:
        a = self.down1(images).detach()
        b = self.down2(F.avg_pool2d(a, 2)).detach()
        c = self.middle(F.avg_pool2d(b, 2)).detach()
        b = self.up2(torch.cat([b, F.interpolate(self.lift2(c), scale_factor=2)], 1))
        a = self.up1(torch.cat([a, F.interpolate(self.lift1(b.detach()), scale_factor=2)], 1))
        return self.out(a.detach())


@fault("unet_detached_everywhere", "unet", "detached", "down1")
def _(model: UNet) -> None:
    """Features are detached where they were to be logged; only the last layer learns."""
    become(model, CutUNet)


class DroppedDouble(Double):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout2d(super().forward(x), 0.95, self.training)


@fault("unet_keep_for_drop", "unet", "dead_units", "")
def _(model: UNet) -> None:
    """Dropout of whole channels with 0.95, the share to keep."""
    become(within(model, Double), DroppedDouble)


@fault("unet_biases_of_hundred", "unet", "large_bias", "")
def _(model: UNet) -> None:
    """Group norms start with biases of deviation 100: what the image says is lost beside it."""
    for norm in within(model, nn.GroupNorm):
        nn.init.normal_(norm.bias, std=100.0)


@fault("mixer_head_of_hundred", "mixer", "start_loss odd_scale", "head")
def _(model: Mixer) -> None:
    """The head is drawn with deviation 100: the point in 1.00 was lost."""
    nn.init.normal_(model.head.weight, std=100.0)


def vit_through_meta() -> nn.Module:
    return through_meta(ViT)


@fault("vit_through_meta", "vit", "meta_law never_written parameter_not_finite non_finite", "positions")
def _(model: ViT) -> nn.Module:
    """Built on the meta device and filled by reset_parameters, which knows neither class token nor positions."""
    return vit_through_meta()


@fault("vit_loud_attention", "vit", "odd_branch odd_scale token_collapse", "blocks.0")
def _(model: ViT) -> None:
    """The output of the first attention is 1000 times its siblings', and the mean of the patches drowns each patch."""
    model.blocks[0].out.weight.data *= 1000
