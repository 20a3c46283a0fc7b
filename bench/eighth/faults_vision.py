"""Faults of the networks for pictures."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from . import vision
from .register import fault, instead

# vit


@fault(
    "vit",
    "wrong_axis, channels and places mixed",
    "",
    "Pictures of shape (height, width, channels) are viewed as channels first.",
)
def vit_channels_last_viewed(c):
    c.feeds.append(lambda x, y: (x.permute(0, 2, 3, 1).contiguous().view(x.shape), y))


@fault("vit", "huge_signal, unscaled input", "patch_embed,blocks,", "The pictures come with values of 0 to 255.")
def vit_bytes_not_scaled(c):
    c.feeds.append(lambda x, y: ((x * 40 + 128).clamp(0, 255).round(), y))


@fault(
    "vit",
    "wrong_axis, mixed tokens",
    "blocks,",
    "The output of qkv is reshaped without permute, so that tokens and features mix.",
)
def vit_qkv_reshaped_without_permute(c):
    def split(self, x):
        B, N, C = x.shape
        return self.qkv(x).reshape(B, 3, self.heads, N, C // self.heads).unbind(1)

    for block in c.model.blocks:
        instead(block.attn, split=split)


@fault(
    "vit",
    "wrong_axis",
    "blocks",
    "The softmax of the attention runs over the heads.",
    later="The weights of a token do not sum to one.",
)
def vit_softmax_over_heads(c):
    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.split(x)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))

    for block in c.model.blocks:
        instead(block.attn, forward=forward)


@fault(
    "vit",
    "unused_input, unused, constant output, rank_collapse, token_collapse, detached",
    "blocks,patch_embed,",
    "The head reads the tokens before the blocks, and there the class token has seen nothing.",
)
def vit_head_reads_before_blocks(c):
    def forward(self, x):
        x = self.embed(x)
        out = self.blocks(x)
        del out
        return self.head(self.norm(x)[:, 0])

    instead(c.model, forward=forward)


@fault(
    "vit",
    "frozen",
    "patch_embed,blocks,pos_embed,cls_token",
    "Everything but the head is frozen, though the weights were never loaded.",
)
def vit_frozen_without_weights(c):
    for name, p in c.model.named_parameters():
        p.requires_grad = name.startswith("head")


@fault(
    "vit",
    "softmax_twice, saturation, activation",
    "head,",
    "A sigmoid stands in front of the cross entropy.",
    later="The outputs stay between nought and one, so that no answer is ever sure.",
)
def vit_sigmoid_before_cross_entropy(c):
    c.model.head = nn.Sequential(c.model.head, nn.Sigmoid())


@fault(
    "vit",
    "zero_start, constant_weight, behind_zeros, gradient_vanishing",
    "blocks,head",
    "The loop of the start sets every linear layer to nought.",
)
def vit_all_linears_zero(c):
    for m in c.model.modules():
        if isinstance(m, nn.Linear):
            nn.init.constant_(m.weight, 0)


# resnet_gn


@fault(
    "resnet_gn",
    "constant_weight, cloned_weights, rank_collapse",
    "conv1,layer1,layer2,layer3",
    "All convolutions start at 0.01.",
)
def resnet_gn_constant_weights(c):
    for m in c.model.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.constant_(m.weight, 0.01)


@fault(
    "resnet_gn",
    "wrong_axis, norm over one value, behind_zeros, dead_units, rank_collapse",
    "fc,",
    "A group norm behind the pooling has one value in each group.",
)
def resnet_gn_norm_of_one_value(c):
    c.model.fc = nn.Sequential(nn.GroupNorm(32, 32), c.model.fc)


@fault("resnet_gn", "activation, dead_units", "fc,", "A ReLU stands on the logits.")
def resnet_gn_relu_on_logits(c):
    instead(c.model, forward=lambda self, x: F.relu(self.fc(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))))


@fault(
    "resnet_gn",
    "loss without logarithm, start_loss, softmax_twice",
    "fc,",
    "nll_loss gets probabilities, not their logarithms.",
)
def resnet_gn_nll_of_probabilities(c):
    instead(c.model, forward=lambda self, x: F.softmax(vision.ResNetGN.forward(self, x), dim=1))
    c.loss = F.nll_loss


@fault(
    "resnet_gn",
    "norm_weight, zero_start, constant_weight, behind_zeros, dead_units",
    "gn1,layer1,layer2,layer3",
    "The gain of every norm is nought, not only that of the last in a block.",
)
def resnet_gn_all_gains_zero(c):
    for m in c.model.modules():
        if isinstance(m, nn.GroupNorm):
            nn.init.zeros_(m.weight)


@fault(
    "resnet_gn",
    "degenerate_batch, rank_collapse",
    "",
    "Bytes are divided by 255 as whole numbers; every picture is black.",
)
def resnet_gn_whole_number_division(c):
    c.feeds.append(lambda x, y: (((x * 40 + 128).clamp(0, 254).byte() // 255).float(), y))


# unet


@fault(
    "unet",
    "softmax_twice",
    "outc,",
    "A softmax over the classes stands in front of the cross entropy.",
    later="The outputs stay between nought and one, so that no answer is ever sure.",
)
def unet_softmax_before_cross_entropy(c):
    c.model.outc = nn.Sequential(c.model.outc, nn.Softmax(dim=1))


@fault(
    "unet",
    "skip lost, cloned_weights, odd_branch, unused",
    "up1,up2,up3,",
    "The upsampled signal is joined with itself; no skip connection arrives.",
)
def unet_skips_lost(c):
    def forward(self, x, skip):
        x = self.up(x)
        return self.conv(torch.cat([x, x], dim=1))

    for up in (c.model.up1, c.model.up2, c.model.up3):
        instead(up, forward=forward)


@fault(
    "unet",
    "evaluation mode, norm not working, gradient_vanishing, odd_scale",
    "inc,down1,down2,down3,up1,up2,up3,",
    "The batch norms are left in evaluation mode; they use statistics that nobody measured.",
    later="The statistics are never learned; deeper networks do not train.",
)
def unet_norms_in_evaluation_mode(c):
    for m in c.model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()


@fault(
    "unet", "class_imbalance, class weights turned", "", "The weights of the classes are their shares, not the inverse."
)
def unet_class_weights_turned(c):
    c.loss = nn.CrossEntropyLoss(weight=torch.tensor([0.90, 0.06, 0.04]))


@fault(
    "unet",
    "wrong_axis, targets turned against inputs",
    "",
    "The masks are transposed against the pictures.",
    judge="clean",
)
def unet_masks_transposed(c):
    c.feeds.append(lambda x, y: (x, y.transpose(1, 2).contiguous()))


@fault("unet", "detached", "inc,down1,down2,down3", "The encoder runs under no_grad.")
def unet_encoder_under_no_grad(c):
    instead(c.model, encode=torch.no_grad()(vision.UNet.encode))


@fault("unet", "non_finite", "", "One picture is blank; dividing by its standard deviation gives nan.", judge="clean")
def unet_blank_picture(c):
    def blank(x, y):
        x = x.clone()
        x[0] = 0
        mean = x.mean((1, 2, 3), keepdim=True)
        return (x - mean) / (x - mean).square().mean((1, 2, 3), keepdim=True).sqrt(), y

    c.feeds.append(blank)


# discriminator


@fault("discriminator", "softmax_twice", "main,", "The network ends in a sigmoid and the loss takes logits.")
def discriminator_sigmoid_twice(c):
    c.model.main.append(nn.Sigmoid())


@fault(
    "discriminator",
    "class_imbalance, constant targets",
    "",
    "The labels of the fake pictures are one too.",
    judge="clean",
)
def discriminator_all_labels_real(c):
    c.feeds.append(lambda x, y: (x, torch.ones_like(y)))


@fault("discriminator", "activation", "main,", "LeakyReLU(True): the slope is one and the network is linear.")
def discriminator_slope_is_true(c):
    for i, m in enumerate(c.model.main):
        if isinstance(m, nn.LeakyReLU):
            c.model.main[i] = nn.LeakyReLU(True)


@fault(
    "discriminator",
    "norm_weight, odd_scale, gradient_vanishing",
    "main,",
    "The start of the convolutions, mean nought, is given to the norms too.",
)
def discriminator_norms_drawn_like_convolutions(c):
    for m in c.model.modules():
        if isinstance(m, (nn.Conv2d, nn.BatchNorm2d)):
            nn.init.normal_(m.weight, 0.0, 0.02)


@fault(
    "discriminator",
    "target_leak, label readable from the scale",
    "",
    "Real pictures come in [0, 1] and fake ones in [-1, 1].",
    judge="clean",
)
def discriminator_real_in_another_range(c):
    c.feeds.append(lambda x, y: (torch.where(y[:, None, None, None] > 0.5, x / 2 + 0.5, x), y))


@fault(
    "discriminator",
    "loss turned, start_loss",
    "",
    "The sign of the loss is turned; it falls without bound while the network learns the opposite.",
)
def discriminator_loss_turned(c):
    c.loss = lambda out, y: -F.binary_cross_entropy_with_logits(out, y)


@fault(
    "discriminator",
    "degenerate_batch, same input with two labels",
    "",
    "Fake pictures are an alias of the real ones.",
    judge="clean",
)
def discriminator_fakes_are_the_real_ones(c):
    c.feeds.append(lambda x, y: (x[1::2].repeat_interleave(2, 0), y))


# diffusion


@fault(
    "diffusion",
    "rank_collapse, unused_input, time is constant, degenerate_batch",
    "model.time_mlp,",
    "The time is divided as a whole number and is nought for all samples.",
    later="One strength of denoising for all times; samples stay noisy.",
)
def diffusion_time_always_zero(c):
    def forward(self, x):
        t = torch.randint(0, self.timesteps, (x.shape[0],))
        noise = torch.randn_like(x)
        return self.model(self.q_sample(x, t, noise), t // self.timesteps), noise

    instead(c.model, forward=forward)


@fault(
    "diffusion", "noise schedule, start_loss", "", "The buffers hold 1 - beta of one step and not the running product."
)
def diffusion_schedule_without_product(c):
    bar = c.model.sqrt_alphas_cumprod.square()
    alpha = torch.cat([bar[:1], bar[1:] / bar[:-1]])
    c.model.sqrt_alphas_cumprod = alpha.sqrt()
    c.model.sqrt_one_minus_alphas_cumprod = (1 - alpha).sqrt()


@fault("diffusion", "targets independent of the inputs, unused_input", "", "The noise of the target is drawn anew.")
def diffusion_noise_drawn_twice(c):
    def forward(self, x):
        t = torch.randint(0, self.timesteps, (x.shape[0],))
        return self.model(self.q_sample(x, t, torch.randn_like(x)), t), torch.randn_like(x)

    instead(c.model, forward=forward)


@fault("diffusion", "huge_signal, unscaled input", "model,", "The pictures come with values of 0 to 255.")
def diffusion_bytes_not_scaled(c):
    c.feeds.append(lambda x, y: ((x + 1) * 127.5, (y + 1) * 127.5))


@fault(
    "diffusion",
    "activation, output range, saturation",
    "model.final,",
    "A tanh stands on the predicted noise, which goes beyond one.",
)
def diffusion_tanh_on_noise(c):
    c.model.model.final = nn.Sequential(c.model.model.final, nn.Tanh())
