"""The registry of sources: one function per name, each imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import torch

from sounding.data.batch import Batch, Request
from sounding.errors import UsageError

DEFAULT_BATCH_SIZE = 128

# name, or name:PARAMETER, → the function that makes the batch
SOURCES = {
    "digits": "sounding.data.digits:load_digits",
    "gaussian": "sounding.data.synthetic:draw_gaussian",
    "tokens": "sounding.data.synthetic:draw_tokens",
}
FILES = {".npz": "sounding.data.npz:load_npz"}
PARAMETERS = {"tokens": "VOCABULARY"}


def names() -> tuple[str, ...]:
    """What `load_batch` accepts.

    >>> names()
    ('digits', 'gaussian', 'tokens:VOCABULARY', 'FILE.npz')
    """
    return (
        *(f"{name}:{PARAMETERS[name]}" if name in PARAMETERS else name for name in SOURCES),
        *(f"FILE{suffix}" for suffix in FILES),
    )


def load_batch(
    spec: str | Path,
    *,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    shape: Sequence[int] | None = None,
) -> Batch:
    """A batch of different samples in random order.

    Args:
        spec: a name of `names()` or the path of a file with `inputs` and perhaps `targets`.
        batch_size: how many samples; by default 128, or all there are if a source has fewer.
        generator: where the randomness comes from; None is torch's default generator.
        shape: of one sample, without the batch axis. Needed by "gaussian"; "digits" resizes its images to
            (channels, height, width); a file's samples are reshaped.

    Raises:
        UsageError: unknown name, unreadable file, impossible shape, too few samples, NaN or infinity.

    >>> batch = load_batch("digits", batch_size=5, generator=torch.Generator().manual_seed(0))
    >>> tuple(batch.inputs.shape), tuple(batch.targets.shape)
    ((5, 64), (5,))
    """
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch size must be at least 1, got {batch_size}")
    if shape is not None and any(size < 1 for size in shape):
        raise UsageError(f"input shape must have positive sizes, got {tuple(shape)}")
    address, parameter = _find(spec)
    module, _, function = address.partition(":")
    request = Request(parameter, batch_size, generator, None if shape is None else tuple(shape))
    batch = getattr(importlib.import_module(module), function)(request)
    assert isinstance(batch, Batch)
    return batch


def _find(spec: str | Path) -> tuple[str, str]:
    """The address of the function for a spec, and its parameter."""
    name, _, parameter = str(spec).partition(":")
    if isinstance(spec, str) and name in SOURCES:
        if parameter and name not in PARAMETERS:
            raise UsageError(f"data {name!r} takes no parameter, got {spec!r}", hint=name)
        return SOURCES[name], parameter
    suffix = Path(spec).suffix.lower()
    if suffix in FILES:
        return FILES[suffix], str(spec)
    raise UsageError(f"unknown data {str(spec)!r}", hint=f"one of {', '.join(names())}")
