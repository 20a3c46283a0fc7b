"""ResNet-50 for CIFAR: bottleneck blocks behind a 3×3 convolution instead of 7×7 and a pool."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from sounding.models.initial import Init, initialize_, make_convolution, make_linear, require_sizes
from sounding.models.norms import Norm, NormOptions, make_norm

STAGES = (3, 4, 6, 3)  # blocks in each, as in ResNet-50
EXPANSION = 4  # of a bottleneck’s last convolution


class ResNet50(nn.Module):
    """1 + 3·(3 + 4 + 6 + 3) convolutions and a readout; norm behind every convolution, ReLU after the sum.

    The stages are called `stage1` … `stage4`. With batch norm and 10 classes there are 23 520 842 parameters. Without
    a norm the convolutions have biases instead.

    Args:
        in_channels: of the images; 32×32 arrive at 4×4, which are averaged.
        classes: values of the readout.
        norm: "batch" or "none".
        width: channels of the first convolution.
        init: as for `Mlp`; "torch" is what rank2020 uses.
        generator: where the weights come from; None is torch's default generator.
        options: centring, eps, momentum, scale, shift, affine, running of the norm; see `NormOptions`.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        *,
        norm: Norm = "batch",
        width: int = 64,
        init: Init = "torch",
        generator: torch.Generator | None = None,
        **options: Unpack[NormOptions],
    ) -> None:
        require_sizes(in_channels=in_channels, classes=classes, width=width)
        super().__init__()
        self.conv = make_convolution(in_channels, width, bias=norm == "none")
        self.norm = make_norm(norm, width, images=True, options=options) or nn.Identity()
        self.relu = nn.ReLU()
        channels = width
        for stage, count in enumerate(STAGES, start=1):
            inner = width * 2 ** (stage - 1)
            blocks: list[nn.Module] = []
            for index in range(count):
                stride = 2 if stage > 1 and index == 0 else 1
                blocks.append(Bottleneck(channels, inner, stride=stride, norm=norm, options=options))
                channels = EXPANSION * inner
            self.add_module(f"stage{stage}", nn.Sequential(*blocks))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.readout = make_linear(channels, classes)
        initialize_(self, init, generator)

    def forward(self, input: Tensor) -> Tensor:
        """Logits of a batch of images."""
        hidden = self.relu(self.norm(self.conv(input)))
        for stage in range(1, len(STAGES) + 1):
            hidden = self.get_submodule(f"stage{stage}")(hidden)
        output: Tensor = self.readout(self.pool(hidden).flatten(start_dim=1))
        return output


class Bottleneck(nn.Module):
    """relu(shortcut(x) + branch(x)): 1×1 to `inner` channels, 3×3, 1×1 to four times as many."""

    def __init__(self, channels: int, inner: int, *, stride: int, norm: Norm, options: NormOptions) -> None:
        super().__init__()

        def block(*sizes: int, kernel: int, stride: int = 1) -> list[nn.Module]:
            convolution = make_convolution(*sizes, kernel=kernel, stride=stride, bias=norm == "none")
            layer = make_norm(norm, sizes[1], images=True, options=options)
            return [convolution] if layer is None else [convolution, layer]

        outer = EXPANSION * inner
        self.branch = nn.Sequential(
            *block(channels, inner, kernel=1),
            nn.ReLU(),
            *block(inner, inner, kernel=3, stride=stride),
            nn.ReLU(),
            *block(inner, outer, kernel=1),
        )
        same = stride == 1 and channels == outer
        self.shortcut = nn.Identity() if same else nn.Sequential(*block(channels, outer, kernel=1, stride=stride))
        self.relu = nn.ReLU()

    def forward(self, input: Tensor) -> Tensor:
        """The sum of both ways, rectified."""
        output: Tensor = self.relu(self.shortcut(input) + self.branch(input))
        return output
