"""How every training begins, of one network or of many: checks, data, the record of the run, and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from sounding.errors import require_device
from sounding.limits import RESUMED, require_memory, require_time
from sounding.train.checkpoint import Checkpoint, Keeper
from sounding.train.journal import Journal, ProgressCall
from sounding.train.recipe import Recipe
from sounding.train.record import check_network, check_orders, check_recipe, describe_run, fingerprint
from sounding.train.samples import Data, Orders, Samples, Stream, Streams, take_samples

POINT_BYTES = 200  # of a point of a curve
# lower bounds of what a step costs: the calls alone, and the operations per second of the fastest machines there are
LEAST_STEP, FASTEST_CPU, FASTEST_GPU = 2e-5, 1e13, 1e15


class Opening(NamedTuple):
    """What a training works with; the record has everything needed to repeat the run."""

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
    """Check what was given to `train_` or `train_together_` and lay out the run; nothing is changed yet.

    The run has the precision of the first network. `runs` tell each run from the others, `kind` says which loop asks:
    a checkpoint of the one is none of the other.
    """
    check_recipe(recipe)
    check_orders(generator, runs=None if kind == "alone" else len(networks))
    homes = [check_network(network) for network in networks]
    home, dtype = homes[0]
    place = home if device is None else torch.device(require_device(str(device)))
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
    _require_feasible(networks[0], recipe, stream, runs=len(networks), device=place)
    journal = Journal(recipe, samples, stream, settings=runs, measure_at=measure_at, progress=progress)
    return Opening(samples, stream, journal, Keeper(checkpoint, fingerprint(record)), record, place)


def _require_feasible(
    network: nn.Module, recipe: Recipe, stream: Stream | Streams, *, runs: int, device: torch.device
) -> None:
    """Refuse a training whose curves do not fit the memory or that takes months, whatever the machine."""
    told = f"a training of {stream.steps} steps"
    evaluations = stream.steps // stream.per_epoch if recipe.evaluate == "epoch" else 0
    require_memory(POINT_BYTES * evaluations * runs, what=told, hint="fewer epochs")
    # every weight meets every sample three times: forwards, and twice backwards
    operations = 6.0 * runs * recipe.batch_size * sum(parameter.numel() for parameter in network.parameters())
    step = max(LEAST_STEP, operations / (FASTEST_GPU if device.type == "cuda" else FASTEST_CPU))
    require_time(stream.steps * step, what=told, most=RESUMED)
