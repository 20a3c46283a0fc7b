"""Random inputs of any shape: Gaussian values, and tokens for networks that begin with an embedding."""

from __future__ import annotations

import torch

from sounding.data.batch import Batch, Request, describe_shape
from sounding.data.sources import DEFAULT_BATCH_SIZE
from sounding.errors import UsageError

DEFAULT_LENGTH = 16


def draw_gaussian(request: Request) -> Batch:
    """Independent standard normal values; no targets."""
    if request.shape is None:
        raise UsageError("gaussian data needs the shape of one sample, got none", hint="--input-shape 3,32,32")
    count = request.batch_size or DEFAULT_BATCH_SIZE
    values = torch.randn(count, *request.shape, generator=request.generator)
    return Batch(values, None, f"gaussian ({describe_shape(request.shape)})")


def draw_tokens(request: Request) -> Batch:
    """Independent uniform integers below the vocabulary, in sequences of 16 unless a shape is given; no targets."""
    if not request.parameter.isdecimal() or int(request.parameter) < 1:
        raise UsageError(
            f"token data needs the size of the vocabulary, got 'tokens:{request.parameter}'", hint="tokens:1000"
        )
    vocabulary = int(request.parameter)
    shape = (DEFAULT_LENGTH,) if request.shape is None else request.shape
    count = request.batch_size or DEFAULT_BATCH_SIZE
    values = torch.randint(vocabulary, (count, *shape), generator=request.generator)
    return Batch(values, None, f"tokens ({vocabulary} words, {describe_shape(shape)})")
