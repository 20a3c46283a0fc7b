"""Two residual networks of convolutions: activation behind the sum with batch norm, and in front with group norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import Fault, Network, accuracy, digits
from torch import Tensor, nn

POST_FAULTS = (
    Fault(
        "norms_in_eval",
        "batch norm in evaluation mode",
        ("disagreement", "huge_signal", "start_loss", "cause", "gradient_explosion", "odd_branch", "frozen"),
        r".*",
    ),
    Fault("no_shortcut", "shortcut missing in one block", ("odd_branch", "cause"), r"blocks\.3"),
    Fault("relu_on_logits", "activation behind the logits", ("activation",), r".*"),
    Fault(
        "softmax_over_samples", "loss over the wrong axis", ("mixed_samples", "wrong_axis"), r".*", "samples compete"
    ),
    Fault("stem_skips_pixels", "stride that skips most of the input", ("unused_input",), r"stem|input|^$"),
    Fault(
        "raw_pixels",
        "raw inputs",
        ("huge_signal", "degenerate_batch", "start_loss", "odd_branch", "rank_collapse", "cause"),
        r".*",
    ),
)
PRE_FAULTS = (
    Fault(
        "norm_of_one_value",
        "norm over a single value",
        ("wrong_axis", "behind_zeros", "rank_collapse", "dead_units", "gradient_vanishing"),
        r".*",
    ),
    Fault("shortcut_doubled", "shortcut added twice", ("odd_branch", "cause"), r"blocks"),
    Fault("relu_dead", "units dead by their bias", ("dead_units", "large_bias"), r"blocks\.4|norm"),
    Fault("body_frozen", "parts frozen", ("frozen",), r"stem|blocks"),
    Fault(
        "weights_of_std_1",
        "weights drawn by a plain normal law",
        ("odd_scale", "huge_signal", "odd_branch", "start_loss"),
        r".*",
    ),
)


class FrozenStatistics(nn.BatchNorm2d):
    """A batch norm that always uses its running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.training = False

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


def convolution(inputs: int, outputs: int, *, bias: bool = False) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class PostBlock(nn.Module):
    def __init__(self, width: int, norm: type[nn.BatchNorm2d], *, shortcut: bool) -> None:
        super().__init__()
        self.shortcut = shortcut
        self.conv1, self.norm1 = convolution(width, width), norm(width)
        self.conv2, self.norm2 = convolution(width, width), norm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(x + y if self.shortcut else y)


class PostNet(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        norm = FrozenStatistics if fault == "norms_in_eval" else nn.BatchNorm2d
        if fault == "stem_skips_pixels":
            first = nn.Conv2d(1, 24, 1, stride=2, bias=False)
        else:
            first = nn.Conv2d(1, 24, 3, stride=2, padding=1, bias=False)
        # raw pixels meet no norm of the batch: the stem has none, as in networks that expect inputs of size one
        self.stem = (
            nn.Sequential(first, nn.ReLU()) if fault == "raw_pixels" else nn.Sequential(first, norm(24), nn.ReLU())
        )
        self.blocks = nn.Sequential(
            *(PostBlock(24, norm, shortcut=not (fault == "no_shortcut" and i == 3)) for i in range(6))
        )
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        out = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return F.relu(out) if self.fault == "relu_on_logits" else out


class PreBlock(nn.Module):
    def __init__(self, width: int, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.norm1, self.conv1 = nn.GroupNorm(4, width), convolution(width, width, bias=True)
        self.norm2, self.conv2 = nn.GroupNorm(4, width), convolution(width, width, bias=True)
        with torch.no_grad():
            self.conv2.weight.mul_(8**-0.5)  # eight branches add up in the stream

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return x + x + y if self.fault == "shortcut_doubled" else x + y


class PreNet(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.stem = convolution(1, 24, bias=True)
        self.blocks = nn.ModuleList(PreBlock(24, fault) for _ in range(8))
        self.norm = nn.GroupNorm(24 if fault == "norm_of_one_value" else 4, 24)
        self.head = nn.Linear(24, 10)
        self.pool_first = fault == "norm_of_one_value"
        if fault == "relu_dead":
            nn.init.constant_(self.blocks[4].norm2.bias, -6)
        if fault == "body_frozen":
            self.stem.requires_grad_(False)
            self.blocks.requires_grad_(False)
        if fault == "weights_of_std_1":
            for module in self.modules():
                if isinstance(module, nn.Conv2d | nn.Linear):
                    nn.init.normal_(module.weight)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for i, block in enumerate(self.blocks):
            x = F.avg_pool2d(x, 2) if i == 4 else x
            x = block(x)
        if self.pool_first:
            return self.head(F.relu(self.norm(x.mean((2, 3)))))
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


def over_samples(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy whose softmax runs over the samples of the batch."""
    return F.nll_loss(output.log_softmax(0), targets)


def post_batch(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    return digits(generator, 64, size=16, raw=fault == "raw_pixels")


def pre_batch(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    return digits(generator, 64)


LOSSES = {"softmax_over_samples": over_samples}
POST = Network(
    "resnet", PostNet, post_batch, POST_FAULTS, "cross_entropy", accuracy, 0.1, LOSSES, rate=0.05, steps=60, sgd=True
)
PRE = Network("preact", PreNet, pre_batch, PRE_FAULTS, "cross_entropy", accuracy, 0.1, rate=2e-3, steps=60)
