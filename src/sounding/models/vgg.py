"""VGG-19 for CIFAR, as rank2020 and meanfield2019 train it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Unpack

import torch
from torch import nn

from sounding.models.initial import Init, initialize_, make_classifier, make_convolution, require_sizes
from sounding.models.norms import Norm, NormOptions, make_norm

# configuration E: convolutions in a stage, and their channels in units of the first stage's
STAGES = ((2, 1), (2, 2), (4, 4), (4, 8), (4, 8))


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
        for stage, (count, factor) in enumerate(STAGES, start=1):
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
