"""Networks for images: attention, mixing and convolutions."""

from __future__ import annotations

import torch
from bench.promised.tasks import CLASSES
from torch import Tensor, nn
from torch.nn import functional as F


class ViTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, d))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches of 4 × 4, a class token, learned positions."""

    def __init__(self, width: int = 40, blocks: int = 6) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 17, width))
        self.blocks = nn.ModuleList(ViTBlock(width, 4) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)
        nn.init.trunc_normal_(self.token, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class MixerBlock(nn.Module):
    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = nn.Sequential(nn.Linear(places, 32), nn.GELU(), nn.Linear(32, places))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """Mixes places and channels in turn; no attention."""

    def __init__(self, width: int = 40, blocks: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(MixerBlock(16, width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class ResidualV1(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.short = nn.Identity()
        if inside != outside or stride != 1:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.short(x))


def he_convolutions(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class ResNetV1(nn.Module):
    """Six blocks, norms in the branches and on the shortcuts that change the size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(12)
        sizes = [(12, 12, 1), (12, 12, 1), (12, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1)]
        self.blocks = nn.Sequential(*(ResidualV1(*size) for size in sizes))
        self.fc = nn.Linear(32, CLASSES)
        he_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(images))))
        return self.fc(x.mean((2, 3)))


class ResidualV2(nn.Module):
    """Norm and activation in front of each convolution; narrow in the middle."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(width), nn.BatchNorm2d(middle), nn.BatchNorm2d(middle)
        self.conv1 = nn.Conv2d(width, middle, 1, bias=False)
        self.conv2 = nn.Conv2d(middle, middle, 3, 1, 1, bias=False)
        self.conv3 = nn.Conv2d(middle, width, 1, bias=False)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.act(self.bn1(x)))
        h = self.conv2(self.act(self.bn2(h)))
        return x + self.conv3(self.act(self.bn3(h)))


class ResNetV2(nn.Module):
    """Nine blocks at half the size of the image."""

    def __init__(self, width: int = 24, blocks: int = 9) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        self.blocks = nn.ModuleList(ResidualV2(width, 12) for _ in range(blocks))
        self.bn = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, CLASSES)
        he_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.fc(F.relu(self.bn(x)).mean((2, 3)))


class NextBlock(nn.Module):
    """A large depthwise convolution, a norm over channels, and an MLP at each place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.gamma * self.down(F.gelu(self.up(h)))
        return x + h.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """A stem of patches and eight blocks at two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 2, 2)
        self.first = nn.Sequential(*(NextBlock(16) for _ in range(4)))
        self.shrink_norm = nn.GroupNorm(1, 16)
        self.shrink = nn.Conv2d(16, 32, 2, 2)
        self.second = nn.Sequential(*(NextBlock(32) for _ in range(4)))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_normal_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.stem(images))
        x = self.second(self.shrink(self.shrink_norm(x)))
        return self.head(self.norm(x.mean((2, 3))))


class Double(nn.Module):
    """Two convolutions with group norm and SiLU."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(inside, outside, 3, 1, 1), nn.Conv2d(outside, outside, 3, 1, 1)
        self.norm1, self.norm2 = nn.GroupNorm(4, outside), nn.GroupNorm(4, outside)
        for conv in (self.conv1, self.conv2):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            nn.init.zeros_(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Down twice, up twice, with skips; two logits for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = Double(1, 8), Double(8, 16), Double(16, 24)
        self.lift2, self.lift1 = nn.Conv2d(24, 16, 1), nn.Conv2d(16, 8, 1)
        self.up2, self.up1 = Double(32, 16), Double(16, 8)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        a = self.down1(images)
        b = self.down2(F.avg_pool2d(a, 2))
        c = self.middle(F.avg_pool2d(b, 2))
        b = self.up2(torch.cat([b, F.interpolate(self.lift2(c), scale_factor=2)], 1))
        a = self.up1(torch.cat([a, F.interpolate(self.lift1(b), scale_factor=2)], 1))
        return self.out(a)
