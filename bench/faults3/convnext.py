"""A network in the manner of ConvNeXt: depthwise convolutions, layer norms over channels, layer scale."""

from __future__ import annotations

import torch
from common import Fault, Network, accuracy, digits
from torch import Tensor, nn

FAULTS = (
    Fault("norm_over_width", "norm over the wrong axis", ("wrong_axis",), r"norm|stages"),
    Fault(
        "pointwise_zero",
        "weights of zero where they are not meant",
        ("constant_weight", "zero_start", "behind_zeros"),
        r"stages\.0\.1",
    ),
    Fault("softmax_at_end", "softmax in front of cross-entropy", ("softmax_twice",), r".*"),
    Fault("list_multiplied", "one module used several times", ("cloned_weights", "disagreement"), r"stages\.1"),
    Fault("temperature", "wrong temperature", ("start_loss", "huge_signal", "cause"), r".*"),
    Fault(
        "layer_scale_large",
        "layer scale too large in one block",
        ("odd_branch", "odd_scale", "norm_weight", "cause"),
        r"stages\.1\.1|scale",
    ),
)


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the channels of (samples, channels, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, width: int, places: int, fault: str | None) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(places) if fault == "norm_over_width" else ChannelNorm(width)
        self.wide, self.act, self.narrow = nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.narrow(self.act(self.wide(self.norm(self.depthwise(x)))))


class ConvNeXt(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 2, stride=2), ChannelNorm(32))
        self.down = nn.Sequential(ChannelNorm(32), nn.Conv2d(32, 64, 2, stride=2))
        first = [Block(32, 8, fault) for _ in range(3)]
        second = [Block(64, 4, fault)] * 3 if fault == "list_multiplied" else [Block(64, 4, fault) for _ in range(3)]
        self.stages = nn.ModuleList((nn.Sequential(*first), nn.Sequential(*second)))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.head.weight, std=0.02)
        if fault == "pointwise_zero":
            nn.init.zeros_(self.stages[0][1].wide.weight)
        if fault == "layer_scale_large":
            nn.init.constant_(self.stages[1][1].scale, 50)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stages[1](self.down(self.stages[0](self.stem(images))))
        out = self.head(self.norm(x.mean((2, 3))))
        if self.fault == "softmax_at_end":
            return out.softmax(1)
        return out / 0.002 if self.fault == "temperature" else out


def batch(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    return digits(generator, 64, size=16)


NETWORK = Network("convnext", ConvNeXt, batch, FAULTS, "cross_entropy", accuracy, 0.1, rate=2e-3, steps=70)
