"""What a model of the transformers library is fed with: inputs and targets by its kind."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
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
SENSES = ("image", "audio")
BINS = ("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", "input_size")
CHARACTERS = 256  # a vocabulary for models that take the numbers of characters
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
        shape = _frames(model.config, BINS[:3]) or (FRAMES, 80)
        arguments[main], name = torch.randn(count, *shape, generator=generator), "gaussian"
    elif main == "input_ids":
        vocabulary = int(getattr(config, "vocab_size", None) or CHARACTERS)
        arguments[main], name = _tokens(count, vocabulary, generator), f"tokens:{vocabulary}"
        for sense in SENSES:
            arguments = _beside_text(model, sense, arguments, generator) or arguments
        if "bbox" in inspect.signature(model.forward).parameters:  # where a word stands on its page: corners in order
            corners = torch.randint(1000, (count, TOKENS, 2, 2), generator=generator)
            arguments["bbox"] = corners.sort(2).values.flatten(2)
        fewer = max(2, 4 * TOKENS * count // arguments[main].shape[1])
        if batch_size is None and fewer < count:  # features of a sound are hundreds of positions
            arguments = {key: value[:fewer] for key, value in arguments.items()}
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


def _beside_text(
    model: nn.Module, sense: str, arguments: dict[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor] | None:
    """The arguments with an image or a sound in front of each text, for a model that looks or listens; else None.

    Marks for the features stand in front of the text, as many as the model makes of one sample. Who needs more than
    that, as the sizes of patches, is given the text alone.
    """
    config: Any = model.config
    mark = next(
        (m for end in ("_token_id", "_token_index") if (m := getattr(config, sense + end, None)) is not None), None
    )
    make = getattr(model, f"get_{sense}_features", None)
    if mark is None or make is None:
        return None
    for extra in _sensed(config, sense, len(arguments["input_ids"]), generator):
        both = _joined(model, mark, make, arguments, extra)
        if both is not None:
            return both
    return None


def _sensed(config: Any, sense: str, count: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Images, or spectrograms with time last and first, by the names that the library has for them."""
    if sense == "image":
        yield {"pixel_values": torch.randn(count, *_image_shape(config), generator=generator)}
        return
    inner = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    bins = next((int(getattr(inner, field)) for field in BINS if getattr(inner, field, None)), 80)
    length = 2 * int(getattr(inner, "max_source_positions", 0) or 0) or FRAMES
    for shape in ((bins, length), (length, bins)):
        mask = torch.ones(count, length, dtype=torch.long)
        yield {"input_features": torch.randn(count, *shape, generator=generator), "input_features_mask": mask}


def _joined(
    model: nn.Module, mark: int, make: Any, arguments: dict[str, Tensor], extra: dict[str, Tensor]
) -> dict[str, Tensor] | None:
    """The arguments with marks for the features of `extra` in front of the text, if the model takes them."""
    tokens, main, was = arguments["input_ids"], next(iter(extra)), model.training
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.eval()
            known = {main, *inspect.signature(make).parameters}
            found = make(**{key: value[:1] for key, value in extra.items() if key in known})
            found = getattr(found, "pooler_output", found)
            length = sum(part.shape[:-1].numel() for part in ([found] if isinstance(found, Tensor) else found))
            text = torch.where(tokens == mark, (mark + 1) % int(tokens.max()), tokens)
            both = {**arguments, **extra, "input_ids": torch.cat([tokens.new_full((len(text), length), mark), text], 1)}
            both = {key: value for key, value in both.items() if key in inspect.signature(model.forward).parameters}
            model(**{key: value[:2] for key, value in both.items()})
    except Exception:  # whatever a library refuses
        return None
    finally:
        model.train(was)
    return both


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
