"""How every training begins, of one network or of many: checks, data, the record of the run, and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from sounding.train.checkpoint import Checkpoint, Keeper
from sounding.train.journal import Journal, ProgressCall
from sounding.train.recipe import Recipe
from sounding.train.record import check_device, check_network, check_orders, check_recipe, describe_run, fingerprint
from sounding.train.samples import Data, Orders, Samples, Stream, Streams, take_samples


class Opening(NamedTuple):
    """What a training works with.

    Args:
        samples: the data, where they are trained on.
        stream: the batches, in order.
        journal: what is noted on the way.
        keeper: of the checkpoint.
        record: everything needed to repeat the run.
        device: where it is trained.
    """

    samples: Samples
    stream: Stream | Streams
    journal: Journal
    keeper: Keeper
    record: dict[str, Any]
    device: torch.device


def open_training(
    networks: Sequence[nn.Module],
    data: Data,
    *,
    kind: Literal["alone", "together"],
    runs: Sequence[Mapping[str, Any]],
    recipe: Recipe,
    generator: Orders,
    device: torch.device | str | None,
    measure_at: Sequence[int],
    checkpoint: Checkpoint | str | Path | None,
    progress: ProgressCall | None,
) -> Opening:
    """Check what was given and lay out the run; nothing is changed yet.

    Args:
        networks: what is trained; the device and the precision of the first are those of the run.
        data: as in `train_`.
        kind: which loop; a checkpoint of one is none of the other.
        runs: what tells each run from the others.
        recipe: everything else.
        generator: of the order of the samples, or one a run.
        device: where to train, None is where the first network is.
        measure_at: steps after which a network is measured over depth.
        checkpoint: where to keep the state.
        progress: whom to tell.
    """
    check_recipe(recipe)
    check_orders(generator, runs=None if kind == "alone" else len(networks))
    homes = [check_network(network) for network in networks]
    home, dtype = homes[0]
    place = check_device(device, home)
    samples = take_samples(data, recipe, device=place, dtype=dtype)
    record = describe_run(
        networks,
        samples,
        recipe=recipe,
        settings=runs,
        generator=generator,
        device=place,
        measure_at=measure_at,
    ) | {"kind": kind}
    stream: Stream | Streams
    if generator is None or isinstance(generator, torch.Generator):
        stream = Stream(samples, recipe, generator)
    else:
        stream = Streams(samples, recipe, generator)
    journal = Journal(recipe, samples, stream, settings=runs, measure_at=measure_at, progress=progress)
    return Opening(samples, stream, journal, Keeper(checkpoint, fingerprint(record)), record, place)
