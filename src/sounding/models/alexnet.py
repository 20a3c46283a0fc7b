"""The deep convolutional networks of orth2021, Table 3: AlexNet for 32×32 images with many layers added."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from sounding.errors import UsageError
from sounding.models.initial import Init, initialize_, make_classifier, make_convolution, require_sizes

FIRST = 4  # convolutions before the repeated ones


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
