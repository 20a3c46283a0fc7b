"""Networks for pictures: a vision transformer, a residual network, a ConvNeXt and a U-Net that takes noise away."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .common import CLASSES, Network, draw_images


class EncoderBlock(nn.Module):
    def __init__(self, dim, heads, ratio=2, drop=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, ratio * dim), nn.GELU(), nn.Linear(ratio * dim, dim), nn.Dropout(drop))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Vision transformer; linear layers trunc_normal(std=0.02) but for the attention inputs, which stay xavier."""

    def __init__(self, size=24, patch=6, dim=64, depth=4, heads=4, classes=CLASSES):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, dim))
        self.blocks = nn.ModuleList([EncoderBlock(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.trunc_normal_(m.weight, std=0.02)
                nn.init.zeros_(m.bias)

    def features(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]

    def forward(self, images):
        return self.head(self.features(images))


# ---------------------------------------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers=(2, 2, 2), width=16, classes=CLASSES):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.inplanes = width
        self.layer1 = self._make_layer(width, layers[0], 1)
        self.layer2 = self._make_layer(2 * width, layers[1], 2)
        self.layer3 = self._make_layer(4 * width, layers[2], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(m, nn.BatchNorm2d):
                nn.init.constant_(m.weight, 1)
                nn.init.constant_(m.bias, 0)

    def _make_layer(self, planes, blocks, stride):
        layers = [BasicBlock(self.inplanes, planes, stride)]
        self.inplanes = planes
        layers += [BasicBlock(planes, planes) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def features(self, x):
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return torch.flatten(self.avgpool(x), 1)

    def forward(self, x):
        return self.fc(self.features(x))


# ---------------------------------------------------------------------------------------------------------------------


class NeXtBlock(nn.Module):
    def __init__(self, dim, kernel=5, scale=0.1):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(scale * torch.ones(dim))

    def forward(self, x):
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(self.act(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of pictures (batch, channel, height, width)."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, dims=(32, 64), depths=(2, 3), classes=CLASSES):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, dims[0], 3, 3), ChannelNorm(dims[0]))
        self.stages = nn.ModuleList()
        for i, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
            stage = [] if i == 0 else [ChannelNorm(dims[i - 1]), nn.Conv2d(dims[i - 1], dim, 2, 2)]
            self.stages.append(nn.Sequential(*stage, *[NeXtBlock(dim) for _ in range(depth)]))
        self.norm = nn.LayerNorm(dims[-1])
        self.head = nn.Linear(dims[-1], classes)
        self.apply(self._init)

    @staticmethod
    def _init(m):
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            nn.init.trunc_normal_(m.weight, std=0.06)
            nn.init.zeros_(m.bias)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x.mean((-2, -1))))


# ---------------------------------------------------------------------------------------------------------------------


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, t):
        freq = torch.exp(-math.log(1000.0) * torch.arange(self.dim // 2, device=t.device) / (self.dim // 2))
        angle = 1000.0 * t[:, None] * freq
        return self.mlp(torch.cat([angle.sin(), angle.cos()], dim=1))


class ResBlock(nn.Module):
    def __init__(self, cin, cout, temb):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, cin)
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.time = nn.Linear(temb, cout)
        self.norm2 = nn.GroupNorm(4, cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, temb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(temb))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return h + self.skip(x)


class UNet(nn.Module):
    """Tells the noise in a picture; torch's own start for all layers."""

    def __init__(self, channels=16, temb=32):
        super().__init__()
        self.time_embed = TimeEmbedding(temb)
        self.conv_in = nn.Conv2d(1, channels, 3, padding=1)
        self.down1 = ResBlock(channels, channels, temb)
        self.pool = nn.Conv2d(channels, channels, 3, 2, 1)
        self.down2 = ResBlock(channels, 2 * channels, temb)
        self.mid = ResBlock(2 * channels, 2 * channels, temb)
        self.up2 = ResBlock(4 * channels, 2 * channels, temb)
        self.up1 = ResBlock(3 * channels, channels, temb)
        self.norm_out = nn.GroupNorm(4, channels)
        self.conv_out = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, x, t):
        temb = self.time_embed(t)
        h1 = self.down1(self.conv_in(x), temb)
        h2 = self.down2(self.pool(h1), temb)
        h = self.mid(h2, temb)
        h = self.up2(torch.cat([h, h2], dim=1), temb)
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        h = self.up1(torch.cat([h, h1], dim=1), temb)
        return self.conv_out(F.silu(self.norm_out(h)))


def draw_noisy(generator, batch=16, size=16):
    """Soft discs with noise after a cosine plan; inputs (noisy picture, time in 0..1), target the noise."""
    axis = torch.arange(size).float()
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    middle = 4 + 8 * torch.rand(batch, 2, 1, 1, generator=generator)
    radius = 2 + 3 * torch.rand(batch, 1, 1, generator=generator)
    far = ((rows - middle[:, 0]) ** 2 + (columns - middle[:, 1]) ** 2).sqrt()
    clean = 2 * torch.sigmoid(2 * (radius - far))[:, None] - 1
    t = torch.rand(batch, generator=generator)
    noise = torch.randn(batch, 1, size, size, generator=generator)
    turn = (t * math.pi / 2)[:, None, None, None]
    return (clean * turn.cos() + noise * turn.sin(), t), noise


NETWORKS = {
    "vit": Network(ViT, draw_images, F.cross_entropy, lr=1e-3, sgd_lr=0.02),
    "resnet": Network(ResNet, draw_images, F.cross_entropy, lr=1e-3, sgd_lr=0.02),
    "convnext": Network(ConvNeXt, draw_images, F.cross_entropy, lr=1e-3, sgd_lr=0.02),
    "unet": Network(UNet, draw_noisy, F.mse_loss, lr=2e-3, sgd_lr=0.01),
}
