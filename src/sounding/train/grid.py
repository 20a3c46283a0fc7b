"""A grid of runs that share an architecture: seeds × learning rates × whatever else differs by numbers or weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from sounding.data.dataset import Dataset
from sounding.errors import UsageError
from sounding.limits import require_memory
from sounding.models import build
from sounding.models.initial import LAYER_BYTES
from sounding.train.loop import check_rates


@dataclass(frozen=True)
class Grid:
    """Runs ready for `train_together_`: `train_together_(data=data, recipe=recipe, **grid.runs)`.

    Args:
        networks: a fresh one for each run.
        learning_rates: one for each.
        settings: for each run what tells it from the others.
    """

    networks: tuple[nn.Module, ...]
    learning_rates: tuple[float, ...]
    settings: tuple[Mapping[str, Any], ...]

    def __len__(self) -> int:
        return len(self.networks)

    @property
    def runs(self) -> dict[str, Any]:
        """The grid as arguments of `train_together_`."""
        return {
            "networks": list(self.networks),
            "learning_rates": list(self.learning_rates),
            "settings": list(self.settings),
        }

    def orders(self, random_seed: int = 0) -> list[torch.Generator]:
        """Generators of the order of the samples, one a seed of the grid: runs of one seed see the same batches.

        >>> grid = make_grid("mlp", learning_rates=[0.1, 1.0], seeds=2, depth=2)
        >>> first, second, third, _ = grid.orders()
        >>> first is second, second is third
        (True, False)
        """
        found = {}
        for seed in {entry["seed"] for entry in self.settings}:
            # neighbouring seeds give unrelated generators; a SeedSequence takes no negative numbers
            mixed = np.random.SeedSequence([random_seed % 2**64, seed % 2**64]).generate_state(1, np.uint64)[0]
            found[seed] = torch.Generator().manual_seed(int(mixed))
        return [found[entry["seed"]] for entry in self.settings]


def make_grid(
    model: str,
    data: Dataset | None = None,
    *,
    learning_rates: Sequence[float],
    seeds: int | Sequence[int] = 1,
    vary: Mapping[str, Sequence[Any]] | None = None,
    **options: Any,
) -> Grid:
    """Networks of `sounding.models` for every combination of a seed, a learning rate and the values in `vary`.

    A network's weights come from a generator seeded with its seed, so that runs that differ in rate, eps, shift or
    scale only start from the same weights.

    Args:
        model: a name of `sounding.models.names()`.
        data: whose shape and number of classes the networks take, unless the options give them.
        learning_rates: of the grid.
        seeds: so many from 0, or the seeds.
        vary: option to values, for example {"init": ["he", "haar"], "eps": [1e-5, 0.1], "residual": [0.1, 1.0]}.
        options: of every network, as `sounding.models.build` takes them.

    >>> grid = make_grid("mlp", learning_rates=[0.1, 1.0], seeds=3, vary={"shift": [0.0, 2.0]}, depth=2, norm="batch")
    >>> len(grid), dict(grid.settings[-1])
    (12, {'shift': 2.0, 'seed': 2})
    """
    rates = check_rates(learning_rates)
    count = seeds if isinstance(seeds, int) else len(seeds)
    runs = count * len(rates) * math.prod(len(values) for values in (vary or {}).values())
    # before anything is built: each network takes at least that
    require_memory(LAYER_BYTES * runs, what=f"a grid of {runs} networks")
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    axes = {name: list(values) for name, values in (vary or {}).items()}
    if any(not -(2**63) <= seed < 2**63 for seed in chosen):  # what torch takes
        raise UsageError(f"seeds must be whole numbers of 64 bits, got {max(chosen, key=abs)}", hint="0, 1, 2")
    if not rates or not chosen or not all(axes.values()):
        raise UsageError("expected at least one seed, one learning rate and one value of each option that varies")
    clash = set(axes) & set(options)
    if clash:
        raise UsageError(f"option {min(clash)!r} is both fixed and varied")
    if data is not None:
        options = {"shape": data.shape, "classes": data.classes, **options}
    networks, kept, settings = [], [], []
    for values in itertools.product(*axes.values()):
        differing = dict(zip(axes, values, strict=True))
        for seed, rate in itertools.product(chosen, rates):
            generator = torch.Generator().manual_seed(seed)  # anew for each: runs of one seed start alike
            networks.append(build(model, generator=generator, **options, **differing))
            if len(networks) == 1:
                size = sum(parameter.nbytes for parameter in networks[0].parameters())
                require_memory(2 * size * runs, what=f"a stack of {runs} networks")  # the networks and their stack
            kept.append(rate)
            settings.append({**differing, "seed": seed})
    return Grid(tuple(networks), tuple(kept), tuple(settings))
