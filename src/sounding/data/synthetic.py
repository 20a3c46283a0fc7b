"""Random inputs of any shape: Gaussian values, Gaussian classes, images of noise, and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from sounding.data.batch import DEFAULT_BATCH_SIZE, Batch, Request, describe_shape
from sounding.data.dataset import Dataset, normalize, split_after
from sounding.errors import UsageError
from sounding.limits import require_memory

DEFAULT_LENGTH = 16  # tokens
DEFAULT_CLASSES = 10  # as the digits, MNIST and CIFAR-10 have
SAMPLES = (8192, 2048)  # to train and to test on: a fifth to test, and 2048 know an accuracy to one percent
SEPARATION = 3.0  # of a class's centre from 0 in standard deviations; `make_gaussian_classes` says what that gives
NOISE_SHAPE = (3, 32, 32)  # CIFAR's
CLASSES_SHAPE = (64,)  # the digits'
NOISE_MEAN = 0.5
NOISE_STD = math.sqrt((256**2 - 1) / 12) / 255  # of the integers 0…255, all alike, divided by 255

GENERATED = {"licence": "generated", "citation": "none"}


def draw_gaussian(request: Request) -> Batch:
    """Independent standard normal values; no targets."""
    if request.shape is None:
        raise UsageError("gaussian data needs the shape of one sample, got none", hint="--input-shape 3,32,32")
    count = request.batch_size or DEFAULT_BATCH_SIZE
    _require_room(count, request.shape)
    values = torch.randn(count, *request.shape, generator=request.generator)
    return Batch(values, None, f"gaussian ({describe_shape(request.shape)})")


def draw_tokens(request: Request) -> Batch:
    """Independent uniform integers below the vocabulary, in sequences of 16 unless a shape is given; no targets."""
    if not request.parameter.isdecimal() or not 1 <= int(request.parameter) < 2**62:
        raise UsageError(
            f"token data needs the size of the vocabulary, got 'tokens:{request.parameter}'", hint="tokens:1000"
        )
    vocabulary = int(request.parameter)
    shape = (DEFAULT_LENGTH,) if request.shape is None else request.shape
    count = request.batch_size or DEFAULT_BATCH_SIZE
    _require_room(count, shape)
    values = torch.randint(vocabulary, (count, *shape), generator=request.generator)
    return Batch(values, None, f"tokens ({vocabulary} words, {describe_shape(shape)})")


def make_gaussian_classes(request: Request, *, samples: tuple[int, int] = SAMPLES) -> Dataset:
    """Class c is N(m_c, I) with m_c ~ N(0, 9/d · I): centres at distance 3 from 0, about 4.2 from each other.

    Two such classes are told apart but for 1.7% of their samples by the best rule, which is linear. Labels are
    uniform. `request.parameter` is the number of classes, 10 unless given.
    """
    classes = _parse_classes("gaussian-classes", request.parameter)
    shape = request.shape or CLASSES_SHAPE
    _require_room(classes + sum(samples), shape)
    generator = request.generator
    centres = torch.randn(classes, *shape, generator=generator) * (SEPARATION / math.sqrt(math.prod(shape)))
    labels = torch.randint(classes, (sum(samples),), generator=generator)
    inputs = centres[labels] + torch.randn(sum(samples), *shape, generator=generator)
    known = {"name": "gaussian-classes", "classes": classes, "mean": (0.0,), "std": (1.0,), **GENERATED}
    return split_after(samples[0], inputs, labels, **known)


def make_noise(request: Request, *, samples: tuple[int, int] = SAMPLES) -> Dataset:
    """Images of independent uniform pixels with labels that have nothing to do with them (rank2020, Figure 10).

    There is nothing to learn but the samples themselves: test accuracy is 1/classes. `request.parameter` is the number
    of classes, 10 unless given.
    """
    classes = _parse_classes("noise", request.parameter)
    shape = request.shape or NOISE_SHAPE
    _require_room(sum(samples), shape)
    pixels = torch.randint(256, (sum(samples), *shape), dtype=torch.uint8, generator=request.generator)
    labels = torch.randint(classes, (sum(samples),), generator=request.generator)
    known = {"name": "noise", "classes": classes, "mean": (NOISE_MEAN,), "std": (NOISE_STD,), **GENERATED}
    return split_after(samples[0], pixels, labels, **known)


# name → what makes its data set, and the shape of a sample where none is given
MADE: dict[str, tuple[Callable[..., Dataset], tuple[int, ...]]] = {
    "gaussian-classes": (make_gaussian_classes, CLASSES_SHAPE),
    "noise": (make_noise, NOISE_SHAPE),
}


def draw_made(make: Callable[..., Dataset], request: Request) -> Batch:
    """Fresh samples of a data set that is generated; classes have fresh centres."""
    made = make(request, samples=(request.batch_size or DEFAULT_BATCH_SIZE, 0))
    name = f"{made.name} ({describe_shape(made.shape)}, {made.classes} classes)"
    return Batch(normalize(made, made.train_inputs), made.train_labels, name, classes=made.classes)


def _require_room(count: int, shape: tuple[int, ...]) -> None:
    require_memory(4 * count * math.prod(shape), what=f"{count} samples of {describe_shape(shape)}")


def _parse_classes(name: str, parameter: str) -> int:
    if not parameter:
        return DEFAULT_CLASSES
    if not parameter.isdecimal() or not 2 <= int(parameter) < 2**62:
        raise UsageError(f"{name} data needs at least 2 classes, got '{name}:{parameter}'", hint=f"{name}:10")
    return int(parameter)
