"""What a model of the transformers library is fed with: inputs and targets by its kind."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

from sounding.data import load_batch
from sounding.errors import UsageError
from sounding.probe.state import evaluating

TOKENS = 32  # positions of a text: enough for attention to have something to mix, few enough to be quick
SAMPLES = {"input_ids": 32, "pixel_values": 16}  # 8 of what is larger; a check of the quick size then takes seconds
WAVE = 8000  # half a second at 16 kHz, some 25 frames
FRAMES = 100  # of a spectrogram, a second of speech
IMAGE = 64  # the side of an image for networks that take every size
SENSES = ("image", "audio")
BINS = (
    *("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", "input_size"),
    "feature_projection_input_dim",
)
MASKED = 5  # of 32 tokens, the 15% of BERT
CHARACTERS = 256  # a vocabulary for models that take the numbers of characters
ENTITIES = 4  # that a text mentions, for models that know names
IGNORED = -100  # torch's mark for "no target here"
Arguments = dict[str, Tensor]


@dataclass(frozen=True)
class Sampled:
    """Arguments of a model by name, targets where its kind has some, and where they come from in words.

    `idle` are the senses of a model that reads, "image" or "audio", for which nothing was found that it takes.
    """

    arguments: Arguments
    targets: Tensor | None
    name: str
    idle: tuple[str, ...] = ()


def sample_inputs(model: nn.Module, *, batch_size: int | None, generator: torch.Generator) -> Sampled:
    """A batch for a model of the transformers library.

    Text is random tokens, with the next token as target; masked models are asked for the tokens that a mask hides, and
    for no others. An encoder-decoder has the tokens of the decoder beside them. Images are the embedded digits with
    their labels where the model has as many classes. Sound is noise. Classes are drawn at random. Images and sounds
    have the first shape that the model takes, and further arguments (`_further`) are given where they change what the
    model says or which modules it calls.
    """
    config: Any = getattr(model.config, "get_text_config", lambda: model.config)()
    taken = inspect.signature(model.forward).parameters
    main: Any = getattr(model, "main_input_name", "input_ids")
    main = "input_values" if main == "inputs" and "input_values" in taken else main
    count = batch_size or SAMPLES.get(main, 8)
    kind = type(model).__name__
    classes = int(getattr(model.config, "num_labels", 0) or 0)
    targets: Tensor | None = None
    idle: tuple[str, ...] = ()
    if main == "input_ids":
        vocabulary = int(getattr(config, "vocab_size", None) or CHARACTERS)
        arguments, name = {main: _tokens(count, vocabulary, generator)}, f"tokens:{vocabulary}"
        for sense in SENSES:
            if _maker(model, sense) is not None:
                both = _beside_text(model, sense, arguments, generator)
                arguments, idle = (arguments, (*idle, sense)) if both is None else (both, idle)
        fewer = max(2, 4 * TOKENS * count // arguments[main].shape[1])
        if batch_size is None and fewer < count:  # features of a sound are hundreds of positions
            count, arguments = fewer, {key: value[:fewer] for key, value in arguments.items()}
        if any(word in kind for word in ("CausalLM", "LMHead", "ConditionalGeneration")):
            targets = _following(arguments[main][:, -TOKENS:])
        # XLM and Flaubert are masked unless their config says otherwise
        if "MaskedLM" in kind or ("LMHead" in kind and getattr(config, "causal", True) is False):
            arguments[main], targets = _mask(arguments[main], config, generator)
        forms = iter([arguments])
    elif main == "pixel_values":
        found = load_batch("digits", batch_size=count, generator=generator, shape=_image_shape(model.config))
        forms, name = _images(model.config, found.inputs), "digits"
        targets = found.targets if classes >= 10 and "Classification" in kind else None
    elif main in ("input_values", "input_features"):
        forms, name = _sounds(model.config, main, count, generator), "gaussian"
    else:
        raise UsageError(f"{kind} takes {main!r}, for which no data is made here", hint="--data FILE.npz")
    decoder: Arguments = {}
    first = next(forms)
    if getattr(model.config, "is_encoder_decoder", False) and "Classification" not in kind:
        decoder = {"decoder_input_ids": _tokens(count, int(config.vocab_size), generator)}
        targets = _following(decoder["decoder_input_ids"]) if "Generation" in kind or "LM" in kind else None
    if targets is None and "Classification" in kind and classes > 1:
        targets = torch.randint(classes, (count,), generator=generator)
    arguments = _known(model, first) | decoder
    said = _says(model, arguments)
    for form in forms if said is None else ():
        other = _known(model, form) | decoder
        if (said := _says(model, other)) is not None:
            arguments = other
            break
    for names, make in _further(config, count, arguments, generator) if said is not None else ():
        if names[0] in taken and names[0] not in arguments:
            other = arguments | dict(zip(names, make(), strict=True))
            if (changed := _says(model, other)) is not None and changed != said:
                arguments, said = other, changed
    if targets is not None and targets.ndim > 1 and said is not None and said.positions > targets.shape[1]:
        # an image in front of the text has positions, and no words
        targets = functional.pad(targets, (said.positions - targets.shape[1], 0), value=IGNORED)
    return Sampled(arguments, targets, name, idle)


def _further(
    config: Any, count: int, arguments: Arguments, generator: torch.Generator
) -> Iterator[tuple[tuple[str, ...], Callable[[], tuple[Tensor, ...]]]]:
    """What some architectures take beside their main input: the arguments' names, and a function that draws them."""
    length = next(iter(arguments.values())).shape[1] if "input_ids" in arguments else 0

    def size(field: str) -> int:
        return int(getattr(config, field, None) or 2)

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(most, (count, *shape), generator=generator)

    def noise(width: int) -> Tensor:
        return torch.randn(count, TOKENS, width, generator=generator)

    width = size("hidden_size")
    yield ("bbox",), lambda: (draw(1000, length, 2, 2).sort(2).values.flatten(2),)  # of the words on a page
    yield (  # of characters
        ("input_shape_ids", "input_pronunciation_ids"),
        lambda: (draw(size("shape_vocab_size"), length), draw(size("pronunciation_vocab_size"), length)),
    )
    yield (  # paths in a web page
        ("xpath_tags_seq", "xpath_subs_seq"),
        lambda: (
            draw(size("max_xpath_tag_unit_embeddings"), length, size("max_depth")),
            draw(size("max_xpath_subs_unit_embeddings"), length, size("max_depth")),
        ),
    )
    yield (  # names that the text mentions
        ("entity_ids", "entity_position_ids"),
        lambda: (draw(size("entity_vocab_size"), ENTITIES), draw(TOKENS, ENTITIES, 2)),
    )
    # the first position attends to all others
    yield ("global_attention_mask",), lambda: (functional.one_hot(torch.zeros(count, dtype=torch.long), length),)
    yield ("encoder_hidden_states",), lambda: (noise(int(getattr(config, "cross_attention_hidden_size", 0) or width)),)
    yield ("cross_attention_states",), lambda: (noise(width),)
    if "input_ids" in arguments:
        yield ("pixel_values",), lambda: (torch.randn(count, *_image_shape(config), generator=generator),)


@dataclass(frozen=True)
class _Said:
    """What a model gave for two samples: its first output, of so many positions, and the modules that it called."""

    digits: bytes
    positions: int
    called: frozenset[int]


def _says(model: nn.Module, arguments: Arguments) -> _Said | None:
    """What a model gives for the first two samples in evaluation, without a trace of the pass; None if it refuses."""
    called: set[int] = set()
    hook = register_module_forward_pre_hook(lambda module, _: called.add(id(module)))
    try:
        with _quietly(model), torch.random.fork_rng(devices=()):
            torch.manual_seed(0)  # attention over hashed or random blocks: two passes are compared, with equal draws
            found = model(**{key: value[:2] for key, value in arguments.items()})
            values = found.values() if hasattr(found, "values") else found if isinstance(found, tuple) else (found,)
            first = next(value for value in values if isinstance(value, Tensor) and value.ndim > 1)
            return _Said(first.double().cpu().numpy().tobytes(), first.shape[1], frozenset(called))
    except Exception:  # whatever a library refuses
        return None
    finally:
        hook.remove()


@contextlib.contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """A model in evaluation, without gradients and warnings."""
    with evaluating(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _known(model: nn.Module, arguments: Arguments) -> Arguments:
    taken = inspect.signature(model.forward).parameters
    return {key: value for key, value in arguments.items() if key in taken}


def _maker(model: nn.Module, sense: str) -> Any:
    """The method that makes features of an image or a sound, in a model that reads them between its words."""
    name = f"get_{sense}_features"
    return getattr(model, name, None) or getattr(getattr(model, "base_model", None), name, None)


def _beside_text(model: nn.Module, sense: str, arguments: Arguments, generator: torch.Generator) -> Arguments | None:
    """The arguments with an image or a sound in front of each text, or None where the model takes none that we make."""
    config: Any = model.config
    ends = ("_token_id", "_token_index")
    mark = next((m for end in ends if (m := getattr(config, sense + end, None)) is not None), None)
    if mark is None:
        return None
    count = len(arguments["input_ids"])
    if sense == "image":
        forms = _images(config, torch.randn(count, *_image_shape(config), generator=generator))
    else:
        forms = _sounds(config, "input_features", count, generator)
    for extra in forms:
        length = _count_features(model, _maker(model, sense), extra)
        if length:
            tokens = arguments["input_ids"]
            text = torch.where(tokens == mark, (mark + 1) % int(tokens.max()), tokens)
            marks = tokens.new_full((count, length), mark)  # as many as the model makes features of one sample
            both = _known(model, {**arguments, **extra, "input_ids": torch.cat([marks, text], 1)})
            decoder = {"decoder_input_ids": tokens} if getattr(config, "is_encoder_decoder", False) else {}
            if _says(model, both | decoder) is not None:
                return both
    return None


def _count_features(model: nn.Module, make: Any, extra: Arguments) -> int | None:
    """How many positions of a text the features of one sample fill; None where the model makes none of them."""
    main = next(iter(extra))
    known = {main, *inspect.signature(make).parameters}
    for names in (known, extra.keys()):
        try:
            with _quietly(model):
                found = make(**{key: value[:1] for key, value in extra.items() if key in names})
                pooled = getattr(found, "pooler_output", None)
                found = getattr(found, "last_hidden_state", found) if pooled is None else pooled
                return sum(part.shape[:-1].numel() for part in ([found] if isinstance(found, Tensor) else found))
        except Exception:  # whatever a library refuses
            continue
    return None


def _images(config: Any, pixels: Tensor) -> Iterator[Arguments]:
    """Images as they are, as the only one of several per sample, and cut into patches."""
    inner = getattr(config, "vision_config", None) or config
    patch = getattr(inner, "patch_size", None)
    yield {"pixel_values": pixels}
    yield {"pixel_values": pixels[:, None]}
    if isinstance(patch, int):
        rows, columns = (side // patch for side in pixels.shape[-2:])
        pieces = functional.unfold(pixels, patch, stride=patch).mT
        yield {
            "pixel_values": pieces,
            "pixel_attention_mask": torch.ones(pieces.shape[:2], dtype=torch.long),
            "spatial_shapes": torch.tensor([[rows, columns]] * len(pieces)),
        }


def _sounds(config: Any, main: str, count: int, generator: torch.Generator) -> Iterator[Arguments]:
    """Noise as spectrograms with time last and first, of the usual lengths and numbers of bins, or as waves."""
    config = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    bins = [int(value) for field in BINS if isinstance(value := getattr(config, field, None), int) and value > 1]
    longest = int(getattr(config, "max_length", 0) or 0) if main == "input_values" else 0
    positions = 2 * int(getattr(config, "max_source_positions", 0) or 0)
    lengths = [longest or FRAMES, 2 * FRAMES, *([positions] if positions else [])]
    if main == "input_values":
        yield from ({main: torch.randn(count, lengths[0], size, generator=generator)} for size in bins[:1])
        yield {main: torch.randn(count, WAVE, generator=generator)}
        return
    for size in dict.fromkeys([*bins, 80]):
        for length in lengths:
            mask = torch.ones(count, length, dtype=torch.long)
            masks = dict.fromkeys(("input_features_mask", "feature_attention_mask", "padding_mask"), mask)
            for shape in ((size, length), (length, size)):
                yield {main: torch.randn(count, *shape, generator=generator), **masks}


def _tokens(count: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    return torch.randint(vocabulary, (count, TOKENS), generator=generator)


def _mask(tokens: Tensor, config: Any, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The tokens with some of each text hidden behind one that stands nowhere else, and the hidden ones as targets."""
    mark = getattr(config, "mask_token_id", None)
    mark = int(tokens.max()) if mark is None else int(mark)
    text = torch.where(tokens == mark, tokens - 1 if mark else tokens + 1, tokens)
    hidden = torch.rand(text.shape, generator=generator)
    hidden[:, :-TOKENS] = 1  # what stands in front of the text is marks for an image or a sound
    hidden = hidden.argsort(1).argsort(1) < MASKED
    return text.masked_fill(hidden, mark), text.masked_fill(~hidden, IGNORED)[:, -TOKENS:]


def _following(tokens: Tensor) -> Tensor:
    """The next token of each, and none behind the last."""
    return functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)


def _image_shape(config: Any) -> tuple[int, int, int]:
    inner = getattr(config, "vision_config", None) or config
    side = getattr(inner, "image_size", None) or IMAGE
    height, width = (side, side) if isinstance(side, int) else tuple(side)[-2:]
    return int(getattr(inner, "num_channels", None) or 3), int(height), int(width)
