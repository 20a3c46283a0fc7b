"""What a model of the transformers library is fed with: inputs and targets by its kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sounding.data import load_batch
from sounding.errors import UsageError

TOKENS = 32  # positions of a text: enough for attention to have something to mix, few enough to be quick
SAMPLES = {"input_ids": 32, "pixel_values": 16}
WAVE = 8000  # half a second at 16 kHz, some 25 frames
FRAMES = 100  # of a spectrogram, a second of speech
IMAGE = 64  # the side of an image for networks that take every size
IGNORED = -100  # torch's mark for "no target here"


@dataclass(frozen=True)
class Sampled:
    """Arguments of a model by name, targets where its kind has some, and where they come from in words."""

    arguments: dict[str, Tensor]
    targets: Tensor | None
    name: str


def sample_inputs(model: nn.Module, *, batch_size: int | None, generator: torch.Generator) -> Sampled:
    """A batch for a model of the transformers library.

    Text is random tokens, with the next token, or for masked models the token itself, as target; an encoder-decoder has
    the tokens of the decoder beside them. Images are the embedded digits with their labels where the model has as many
    classes. Sound is noise. Classes are drawn at random.
    """
    config: Any = getattr(model.config, "get_text_config", lambda: model.config)()
    main: Any = getattr(model, "main_input_name", "input_ids")
    count = batch_size or SAMPLES.get(main, 8)
    kind = type(model).__name__
    classes = int(getattr(model.config, "num_labels", 0) or 0)
    arguments: dict[str, Tensor] = {}
    targets: Tensor | None = None
    if main == "pixel_values":
        found = load_batch("digits", batch_size=count, generator=generator, shape=_image_shape(model.config))
        arguments[main], name = found.inputs, "digits"
        targets = found.targets if classes >= 10 and "Classification" in kind else None
    elif main == "input_values":
        shape = _frames(model.config, ("num_mel_bins",), last=True) or (WAVE,)
        arguments[main], name = torch.randn(count, *shape, generator=generator), "gaussian"
    elif main == "input_features":
        shape = _frames(model.config, ("num_mel_bins", "feature_size", "input_feat_per_channel")) or (FRAMES, 80)
        arguments[main], name = torch.randn(count, *shape, generator=generator), "gaussian"
    elif main == "input_ids":
        vocabulary = int(config.vocab_size)
        arguments[main], name = _tokens(count, vocabulary, generator), f"tokens:{vocabulary}"
        targets = _text_targets(kind, arguments[main])
    else:
        raise UsageError(f"{kind} takes {main!r}, for which no data is made here", hint="--data FILE.npz")
    if getattr(model.config, "is_encoder_decoder", False) and "Classification" not in kind:
        decoder = _tokens(count, int(config.vocab_size), generator)
        arguments["decoder_input_ids"] = decoder
        targets = (
            functional.pad(decoder[:, 1:], (0, 1), value=IGNORED) if "Generation" in kind or "LM" in kind else None
        )
    if targets is None and "Classification" in kind and classes > 1:
        targets = torch.randint(classes, (count,), generator=generator)
    return Sampled(arguments, targets, name)


def _tokens(count: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    return torch.randint(vocabulary, (count, TOKENS), generator=generator)


def _text_targets(kind: str, tokens: Tensor) -> Tensor | None:
    if "MaskedLM" in kind:
        return tokens
    if "CausalLM" in kind or "LMHead" in kind:
        return functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)
    return None


def _image_shape(config: Any) -> tuple[int, int, int]:
    inner = getattr(config, "vision_config", None) or config
    side = getattr(inner, "image_size", None) or IMAGE
    height, width = (side, side) if isinstance(side, int) else tuple(side)[-2:]
    return int(getattr(inner, "num_channels", None) or 3), int(height), int(width)


def _frames(config: Any, fields: tuple[str, ...], *, last: bool = False) -> tuple[int, ...] | None:
    """The shape of a spectrogram where the config has one."""
    bins = next((int(getattr(config, field)) for field in fields if getattr(config, field, None)), None)
    if bins is None:
        return None
    length = (
        int(getattr(config, "max_length", 0) or 0) if last else 2 * int(getattr(config, "max_source_positions", 0) or 0)
    )
    return (length or FRAMES, bins) if last else (bins, length) if length else (FRAMES, bins)
