"""Networks by name: `build("vgg19", norm="none")`, and the same in one word for the command line."""

from __future__ import annotations

import difflib
import inspect
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from sounding.errors import UsageError, require_known
from sounding.models.convolutional import AlexNet, ResNet50, Vgg19
from sounding.models.mlp import Mlp
from sounding.models.norms import NormOptions
from sounding.models.transformer import Transformer


@dataclass(frozen=True)
class Model:
    """A network of the registry."""

    network: type[nn.Module]
    takes: Literal["values", "channels", "shape"]  # what the class's first argument is
    shape: tuple[int, ...]  # of a sample, where none is given
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of options for which the class has none


MODELS = {
    "mlp": Model(Mlp, "values", (64,), {"depth": 64, "width": 128}),
    "alexnet": Model(AlexNet, "channels", (3, 32, 32)),
    "vgg19": Model(Vgg19, "channels", (3, 32, 32)),
    "resnet50": Model(ResNet50, "channels", (3, 32, 32)),
    "transformer": Model(Transformer, "shape", (3, 32, 32)),
}
TOKENS_SHAPE = (16,)  # as `sounding check` draws them
YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def names() -> tuple[str, ...]:
    """What `build` knows.

    >>> names()
    ('mlp', 'alexnet', 'vgg19', 'resnet50', 'transformer')
    """
    return tuple(MODELS)


def build(
    name: str,
    *,
    shape: Sequence[int] | int | None = None,
    classes: int = 10,
    generator: torch.Generator | None = None,
    **options: Any,
) -> nn.Module:
    """A network by name.

    Args:
        name: one of `names()`.
        shape: of one sample: values for "mlp", (channels, height, width) for images. Defaults: 64 values for "mlp",
            3×32×32 for the others, 16 tokens for a transformer with a vocabulary.
        classes: values of the readout.
        generator: where the weights come from; None is torch's default generator.
        options: those of the class, for example depth=50, norm="batch", centring=False.

    Raises:
        UsageError: unknown name or option, or a value out of its range.

    >>> network = build("mlp", depth=50, norm="batch", shape=(1, 28, 28))
    >>> sum(weights.numel() for weights in network.parameters())
    923658
    """
    model = find_model(name)
    known = option_types(name)
    for option in options:
        _require_option(name, option, known)
    if shape is None:
        shape = TOKENS_SHAPE if options.get("vocabulary") is not None else model.shape
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes or min(sizes) < 1:
        raise UsageError(f"shape must have positive sizes, got {sizes}")
    if model.takes == "channels" and len(sizes) != 3:
        raise UsageError(f"{name} takes images (channels, height, width), got the shape {sizes}", hint="3x32x32")
    first: Any = {"values": math.prod(sizes), "channels": sizes[0], "shape": sizes}[model.takes]
    return model.network(first, classes, generator=generator, **{**model.defaults, **options})


def build_from_spec(spec: str, *, shape: Sequence[int] | None = None, classes: int | None = None) -> nn.Module:
    """A network from one word: `name,option=value,…`, for example `mlp,depth=50,norm=batch`.

    Args:
        spec: the name and options; `shape=3x32x32` and `classes=100` among them.
        shape: used unless the spec gives one; None is the model's own.
        classes: likewise.

    >>> build_from_spec("mlp,depth=1,width=3,activation=tanh,shape=5")
    Mlp(
      (1): Sequential(
        (linear): Linear(in_features=5, out_features=3, bias=True)
        (activation): Tanh()
      )
      (readout): Linear(in_features=3, out_features=10, bias=True)
    )
    """
    name = spec.partition(",")[0]
    given: dict[str, Any] = {}
    hints = option_types(name) | {"shape": tuple[int, ...], "classes": int}
    example = "norm=none" if name in ("vgg19", "resnet50") else "depth=20"
    for option, text in split_options(spec, after=repr(name), example=f"{name},{example}"):
        given[option] = _parse(name, option, text, hints)
    if shape is not None and ("vocabulary" not in given or len(shape) == 1):  # tokens have one axis
        given.setdefault("shape", tuple(shape))
    if classes is not None:
        given.setdefault("classes", classes)
    return build(name, **given)


def split_options(spec: str, *, after: str, example: str) -> Iterator[tuple[str, str]]:
    """Each option and its text behind the name in `name,option=value,…`; refuses other words, and an option twice."""
    seen = set()
    for word in spec.split(",")[1:]:
        option, equals, text = (part.strip() for part in word.partition("="))
        if not equals or not option or not text:
            raise UsageError(f"expected option=value after {after}, got {word!r}", hint=example)
        if option in seen:
            raise UsageError(f"option {option!r} is given twice in {spec!r}")
        seen.add(option)
        yield option, text


def is_spec(text: str) -> bool:
    """Whether a word names a network of ours.

    >>> is_spec("vgg19,norm=none"), is_spec("nets.py:vgg19")
    (True, False)
    """
    return text.partition(",")[0] in MODELS


def find_model(name: str) -> Model:
    """The registry's entry of that name."""
    require_known("model", name, MODELS)
    return MODELS[name]


def option_types(name: str) -> dict[str, Any]:
    """The options of a network and their types; those of its norm included."""
    constructor = find_model(name).network.__init__
    hints = typing.get_type_hints(constructor)
    found: dict[str, Any] = {}
    for parameter in inspect.signature(constructor).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= typing.get_type_hints(NormOptions)
        elif parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "generator":
            found[parameter.name] = hints[parameter.name]
    return found


def parse_option(name: str, option: str, text: str) -> Any:
    """The value of an option of a network, from its text.

    >>> parse_option("mlp", "depth", "50")
    50
    """
    return _parse(name, option, text, option_types(name))


def _parse(name: str, option: str, text: str, hints: Mapping[str, Any]) -> Any:
    """A value of the type that the option has."""
    _require_option(name, option, hints)
    hint = hints[option]
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = typing.get_args(hint) if union else (hint,)
    if type(None) in kinds and text.lower() == "none":
        return None
    try:
        if hint == tuple[int, ...]:
            return tuple(int(part) for part in text.replace("×", "x").split("x"))
        if bool in kinds:
            return {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False)}[text.lower()]
        if str in kinds or any(typing.get_origin(kind) is Literal for kind in kinds):
            return text
        number = next(kind for kind in kinds if kind in (int, float))
        return number(text)
    except (ValueError, KeyError) as error:
        words = {tuple[int, ...]: "a shape such as 3x32x32", bool: "true or false"}.get(hint)
        expected = words or ("a whole number" if int in kinds else "a number")
        raise UsageError(f"expected {expected} for {option!r}, got {text!r}") from error


def _require_option(name: str, option: str, known: Mapping[str, Any]) -> None:
    if option not in known:
        close = difflib.get_close_matches(option, known, n=1)
        hint = f"{close[0]}=…" if close else f"one of {', '.join(known)}"
        raise UsageError(f"{name} has no option {option!r}", hint=hint)
