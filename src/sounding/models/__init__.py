"""The networks of the examples and the papers, written to be read; `build("vgg19", norm="none")` makes one by name."""

from __future__ import annotations

from sounding.models.convolutional import AlexNet, ResNet50, Vgg19
from sounding.models.mlp import Mlp
from sounding.models.norms import NormOptions, UncentredBatchNorm
from sounding.models.registry import build, build_from_spec, is_spec, names
from sounding.models.transformer import Transformer

__all__ = [
    "AlexNet", "Mlp", "NormOptions", "ResNet50", "Transformer", "UncentredBatchNorm", "Vgg19", "build",
    "build_from_spec", "is_spec", "names",
]  # fmt: skip
