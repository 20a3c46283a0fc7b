"""A U-Net without norms that says of each pixel whether it belongs to a blob."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import Fault, Network
from torch import Tensor, nn

FAULTS = (
    Fault("skip_detached", "part cut off from the gradient", ("detached",), r".*"),
    Fault("double_sigmoid", "sigmoid twice", ("softmax_twice",), r".*"),
    Fault("samples_and_channels", "reshape that mixes samples", ("mixed_samples",), r".*", "images are mixed"),
    Fault(
        "up_zero", "weights of zero where they are not meant", ("constant_weight", "zero_start", "behind_zeros"), r"up1"
    ),
    Fault(
        "bottom_large",
        "weights too large in one part",
        ("odd_scale", "start_loss", "huge_signal", "gradient_explosion"),
        r"bottom|head|out|up|^$",
    ),
)


def pair(inputs: int, outputs: int) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU()]
    for layer in layers[::2]:
        nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.down1, self.down2, self.bottom = pair(1, 16), pair(16, 32), pair(32, 64)
        self.up2, self.join2 = nn.ConvTranspose2d(64, 32, 2, stride=2), pair(64, 32)
        self.up1, self.join1 = nn.ConvTranspose2d(32, 16, 2, stride=2), pair(32, 16)
        self.out = nn.Conv2d(16, 1, 1)
        if fault == "up_zero":
            nn.init.zeros_(self.up1.weight)
            nn.init.zeros_(self.up1.bias)
        if fault == "bottom_large":
            nn.init.normal_(self.bottom[0].weight, std=1)
            nn.init.normal_(self.bottom[2].weight, std=1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down1(images)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.bottom(F.max_pool2d(second, 2))
        if self.fault == "samples_and_channels":
            x = x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)
        if self.fault == "skip_detached":
            first, second = first.detach(), second.detach()
        x = self.join2(torch.cat((self.up2(x), second), 1))
        x = self.out(self.join1(torch.cat((self.up1(x), first), 1)))
        return x.sigmoid() if self.fault == "double_sigmoid" else x


def batch(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    field = F.interpolate(torch.randn(24, 1, 4, 4, generator=generator), size=16, mode="bilinear")
    noisy = field + torch.randn(field.shape, generator=generator)
    return (noisy - noisy.mean()) / noisy.std(), (field > 0.3).float()


def score(output: Tensor, targets: Tensor) -> float:
    """Intersection over union, with a threshold that also fits a probability in place of a logit."""
    line = 0.5 if bool((output >= 0).all()) and bool((output <= 1).all()) else 0.0
    said = output > line
    return float((said & (targets > 0)).sum() / (said | (targets > 0)).sum().clamp(min=1))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, targets)


NETWORK = Network("unet", UNet, batch, FAULTS, loss, score, 0.2, rate=2e-3)
