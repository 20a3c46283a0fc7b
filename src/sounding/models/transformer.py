"""A small transformer encoder with the norm before or after each branch."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sounding.errors import UsageError, require_known
from sounding.models.initial import (
    ActivationLike,
    Init,
    initialize_,
    make_activation,
    make_convolution,
    make_linear,
    require_sizes,
)
from sounding.models.norms import Norm, make_norm

Placement = Literal["pre", "post"]
POSITION_STD = 0.02  # as GPT-2 and BERT draw them


class Transformer(nn.Module):
    """Embedding, `depth` blocks of attention and a two-layer perceptron, the mean over tokens, a linear readout.

    "pre" is h + branch(norm(h)) with one more norm before the readout, "post" is norm(h + branch(h)). Images are cut
    into square patches, sequences of vectors are mapped linearly, tokens are looked up; a learned vector for each
    position is added.

    Args:
        shape: of one sample: (channels, height, width), (length, features), or (length,) of tokens.
        classes: values of the readout.
        depth: number of blocks.
        width: values of a token.
        heads: of the attention; they divide the width.
        placement: "pre" or "post".
        norm: "layer", "rms" or "none".
        activation: of the perceptron, whose inner layer is four times as wide.
        patch: side of a patch of an image.
        vocabulary: number of tokens, where samples are tokens.
        init: as for `Mlp`. Token vectors start as N(0, 1), positions as N(0, 0.02²).
        generator: where the weights come from; None is torch's default generator.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int = 10,
        *,
        depth: int = 6,
        width: int = 64,
        heads: int = 4,
        placement: Placement = "pre",
        norm: Norm = "layer",
        activation: ActivationLike = "gelu",
        patch: int = 4,
        vocabulary: int | None = None,
        init: Init = "xavier",
        generator: torch.Generator | None = None,
    ) -> None:
        require_sizes(classes=classes, depth=depth, width=width, heads=heads, patch=patch)
        if width % heads:
            raise UsageError(f"heads must divide the width of {width}, got {heads}")
        require_known("placement", placement, get_args(Placement))
        if norm == "batch":
            raise UsageError("batch norm has no place in this transformer", hint="layer, rms or none")
        super().__init__()
        self.embedding, tokens = _make_embedding(shape, width, patch, vocabulary)
        self.positions = nn.Parameter(torch.empty(tokens, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, placement, norm, activation) for _ in range(depth))
        )
        last = make_norm(norm, width, images=False, options={}) if placement == "pre" else None
        self.norm = last or nn.Identity()
        self.readout = make_linear(width, classes)
        if isinstance(self.embedding, nn.Embedding):
            nn.init.normal_(self.embedding.weight, generator=generator)
        nn.init.normal_(self.positions, std=POSITION_STD, generator=generator)
        initialize_(self, init, generator)

    def forward(self, input: Tensor) -> Tensor:
        """Logits of a batch of images, sequences or tokens; sequences may be shorter than `shape` says."""
        hidden = self.embedding(input)
        if input.dim() == 4:
            hidden = hidden.flatten(start_dim=2).transpose(1, 2)
        if hidden.shape[1] > len(self.positions):
            raise UsageError(f"expected at most {len(self.positions)} tokens, got {hidden.shape[1]}")
        hidden = self.blocks(hidden + self.positions[: hidden.shape[1]])
        output: Tensor = self.readout(self.norm(hidden).mean(dim=1))
        return output


class TransformerBlock(nn.Module):
    """Attention and perceptron, each beside a skip connection."""

    def __init__(self, width: int, heads: int, placement: Placement, norm: Norm, activation: ActivationLike) -> None:
        super().__init__()
        self.placement = placement
        self.attention = Attention(width, heads)
        self.perceptron = nn.Sequential(
            make_linear(width, 4 * width), make_activation(activation), make_linear(4 * width, width)
        )
        self.norm1 = make_norm(norm, width, images=False, options={}) or nn.Identity()
        self.norm2 = make_norm(norm, width, images=False, options={}) or nn.Identity()

    def forward(self, input: Tensor) -> Tensor:
        """(samples, tokens, width) in and out."""
        hidden = input
        for norm, branch in ((self.norm1, self.attention), (self.norm2, self.perceptron)):
            hidden = hidden + branch(norm(hidden)) if self.placement == "pre" else norm(hidden + branch(hidden))
        return hidden


class Attention(nn.Module):
    """softmax(QKᵀ/√d) V for each head, and a linear map of all heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (make_linear(width, width) for _ in range(4))

    def forward(self, input: Tensor) -> Tensor:
        """(samples, tokens, width) in and out."""
        query, key, value = (
            layer(input).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(start_dim=2))
        return output


def _make_embedding(shape: tuple[int, ...], width: int, patch: int, vocabulary: int | None) -> tuple[nn.Module, int]:
    """The module that makes tokens of a sample, and how many."""
    match shape:
        case (length,) if vocabulary is not None:
            require_sizes(vocabulary=vocabulary, width=width)
            embedding = nn.utils.skip_init(nn.Embedding, vocabulary, width)  # type: ignore[no-untyped-call]
            assert isinstance(embedding, nn.Embedding)
            return embedding, length
        case (length, features) if vocabulary is None:
            return make_linear(features, width), length
        case (channels, height, side) if vocabulary is None:
            if height % patch or side % patch:
                raise UsageError(f"patches of {patch} do not divide images of {height}×{side}", hint="another patch")
            cut = make_convolution(channels, width, kernel=patch, stride=patch, padding=0)
            return cut, math.prod((height // patch, side // patch))
    kind = "" if vocabulary is None else f" and a vocabulary of {vocabulary}"
    raise UsageError(
        f"expected images (channels, height, width), sequences (length, features) or tokens (length,) with a "
        f"vocabulary, got the shape {tuple(shape)}{kind}"
    )
