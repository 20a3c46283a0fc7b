"""The convolutional networks of the papers: AlexNet with added layers, VGG-19 and ResNet-50, all for 32×32 images."""

from __future__ import annotations

from collections import OrderedDict
from typing import Unpack

import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.models.initial import (
    Init,
    initialize_,
    make_classifier,
    make_convolution,
    make_linear,
    require_sizes,
)
from sounding.models.norms import Norm, NormOptions, make_norm

FIRST = 4  # convolutions of AlexNet before the repeated ones
# VGG's configuration E: convolutions in a stage, and their channels in units of the first stage's
VGG_STAGES = ((2, 1), (2, 2), (4, 4), (4, 8), (4, 8))
RESNET_STAGES = (3, 4, 6, 3)  # blocks in each
EXPANSION = 4  # of a bottleneck’s last convolution


class AlexNet(nn.Sequential):
    """`depth` convolutions of 3×3 and three linear layers, ReLU, no normalization (orth2021, Table 3; 20 or 80 there).

    Conv(c, 64)-pool-ReLU, Conv(64, 192)-pool-ReLU, Conv(192, 256), Conv(256, 256)-ReLU, {Conv(256, 256)-ReLU} ×
    (depth − 4), pool-ReLU, then dropout, 4096, ReLU, dropout, 4096, ReLU, classes. As printed there is no ReLU between
    the third and the fourth convolution. The table does not give strides; its 1024 = 256·2·2 features in front of the
    first linear layer need a stride of 2 in the first convolution, as AlexNet for CIFAR has it.

    Args:
        in_channels: of the images, which are 32×32.
        classes: values of the readout.
        depth: number of convolutions, at least 4.
        width: channels of the first convolution; the others are 3 and 4 times as wide, the linear layers 64 times.
        dropout: probability in front of the first two linear layers.
        init: as for `Mlp`; orth2021 compares with Xavier.
        generator: where the weights come from; None is torch's default generator.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        *,
        depth: int = 20,
        width: int = 64,
        dropout: float = 0.5,
        init: Init = "xavier",
        generator: torch.Generator | None = None,
    ) -> None:
        require_sizes(in_channels=in_channels, classes=classes, depth=max(depth, 1), width=width)
        if depth < FIRST:
            raise UsageError(f"depth must be at least {FIRST}, got {depth}", hint="20 or 80, as in the paper")
        wide, hidden = 4 * width, 64 * width
        features: OrderedDict[str, nn.Module] = OrderedDict()
        features["conv1"] = make_convolution(in_channels, width, stride=2)
        features["pool1"], features["relu1"] = nn.MaxPool2d(2), nn.ReLU()
        features["conv2"] = make_convolution(width, 3 * width)
        features["pool2"], features["relu2"] = nn.MaxPool2d(2), nn.ReLU()
        features["conv3"] = make_convolution(3 * width, wide)
        for index in range(FIRST, depth + 1):
            features[f"conv{index}"] = make_convolution(wide, wide)
            features[f"relu{index}"] = nn.ReLU()
        features["pool"], features["relu"] = nn.MaxPool2d(2), nn.ReLU()
        classifier = make_classifier(wide * 2 * 2, hidden, classes, dropout=dropout)
        super().__init__(OrderedDict(features=nn.Sequential(features), classifier=classifier))
        initialize_(self, init, generator)


class Vgg19(nn.Sequential):
    """16 convolutions of 3×3 in five stages, a pool after each, and three linear layers: conv, norm, ReLU.

    Images of 32×32 arrive at 1×1×512; the classifier is dropout, 512, ReLU, dropout, 512, ReLU, classes. Without a
    norm and with 10 classes there are 20 554 826 parameters, with batch norm 11 008 more.

    Args:
        in_channels: of the images.
        classes: values of the readout.
        norm: "batch" or "none".
        width: channels of the first stage.
        dropout: probability in front of the first two linear layers.
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
        dropout: float = 0.5,
        init: Init = "torch",
        generator: torch.Generator | None = None,
        **options: Unpack[NormOptions],
    ) -> None:
        require_sizes(in_channels=in_channels, classes=classes, width=width)
        features: OrderedDict[str, nn.Module] = OrderedDict()
        channels = in_channels
        for stage, (count, factor) in enumerate(VGG_STAGES, start=1):
            for index in range(1, count + 1):
                filters = factor * width
                features[f"conv{stage}_{index}"] = make_convolution(channels, filters)
                layer = make_norm(norm, filters, images=True, options=options)
                if layer is not None:
                    features[f"norm{stage}_{index}"] = layer
                features[f"relu{stage}_{index}"] = nn.ReLU()
                channels = filters
            features[f"pool{stage}"] = nn.MaxPool2d(2)
        classifier = make_classifier(channels, channels, classes, dropout=dropout)
        super().__init__(OrderedDict(features=nn.Sequential(features), classifier=classifier))
        initialize_(self, init, generator)


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
        for stage, count in enumerate(RESNET_STAGES, start=1):
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
        for stage in range(1, len(RESNET_STAGES) + 1):
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
