"""The registry of sources: one function per name, each of which makes a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from sounding.data.batch import Batch, Request
from sounding.data.catalogue import CATALOGUE
from sounding.data.dataset import Dataset
from sounding.data.digits import load_digits
from sounding.data.load import draw_from, draw_from_catalogue
from sounding.data.npz import SUFFIX, load_npz
from sounding.data.synthetic import MADE, draw_gaussian, draw_made, draw_tokens
from sounding.errors import UsageError

# name, or name:PARAMETER, → the function that makes the batch
SOURCES: dict[str, Callable[[Request], Batch]] = {
    "digits": load_digits,
    "gaussian": draw_gaussian,
    "tokens": draw_tokens,
    **{name: partial(draw_made, make) for name, (make, _) in MADE.items()},
    **dict.fromkeys(CATALOGUE, draw_from_catalogue),
}
NEEDED = {"tokens": "VOCABULARY"}  # parameters


def names() -> tuple[str, ...]:
    """What `load_batch` accepts.

    >>> names()
    ('digits', 'gaussian', 'tokens:VOCABULARY', 'gaussian-classes', 'noise', 'mnist', 'fashion-mnist', 'cifar-10', \
'cifar-100', 'FILE.npz')
    """
    return (*(f"{name}:{NEEDED[name]}" if name in NEEDED else name for name in SOURCES), f"FILE{SUFFIX}")


def load_batch(
    spec: str | Path | Dataset,
    *,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    shape: Sequence[int] | None = None,
) -> Batch:
    """A batch of different samples in random order.

    Args:
        spec: a name of `names()`, the path of a file with `inputs` and perhaps `targets`, or a data set in memory, of
            which the training part is drawn from. "gaussian-classes" and "noise" take a number of classes, "noise:100".
        batch_size: how many samples; by default 128, or all there are if a source has fewer.
        generator: where the randomness comes from; None is torch's default generator.
        shape: of one sample, without the batch axis. Needed by "gaussian"; images are resized to (channels, height,
            width); a file's samples are reshaped.

    Raises:
        DataError: a data set of the catalogue is not there and cannot be downloaded.
        UsageError: unknown name, unreadable file, impossible shape, too few samples, NaN or infinity.

    >>> batch = load_batch("digits", batch_size=5, generator=torch.Generator().manual_seed(0))
    >>> tuple(batch.inputs.shape), tuple(batch.targets.shape)
    ((5, 64), (5,))
    """
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch size must be at least 1, got {batch_size}")
    if shape is not None and any(size < 1 for size in shape):
        raise UsageError(f"input shape must have positive sizes, got {tuple(shape)}")
    wanted = None if shape is None else tuple(shape)
    if isinstance(spec, Dataset):
        return draw_from(spec, Request("", batch_size, generator, wanted))
    name, _, parameter = str(spec).partition(":")
    if isinstance(spec, str) and name in SOURCES:
        if parameter and name not in NEEDED and name not in MADE:
            raise UsageError(f"data {name!r} takes no parameter, got {spec!r}", hint=name)
        make, parameter = SOURCES[name], name if name in CATALOGUE else parameter
    elif Path(spec).suffix.lower() == SUFFIX:
        make, parameter = load_npz, str(spec)
    else:
        raise UsageError(f"unknown data {str(spec)!r}", hint=f"one of {', '.join(names())}")
    return make(Request(parameter, batch_size, generator, wanted))
