"""Which deep batch-normalized networks train: grids of accuracies beside 16ξ, the depth that the mean field allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sounding.claims.claim import Context, Expectation
from sounding.claims.meanfield2019.sampled import Array
from sounding.claims.number import Number, fraction_of, mean_of
from sounding.claims.picture import Map, Panel, Series

CLEARLY_DEEPER = 1.5
"""Between 16ξ and so many times 16ξ a network is neither called inside nor outside: the boundary is not sharp."""

EXPECTED = (
    Expectation("share_on_right_side", "networks train if they are not deeper than 16ξ, and only then", low=0.7),
    Expectation("gap_across_boundary", "accuracy falls across 16ξ, by at least 0.4 of best minus chance", low=0.4),
    Expectation("score_beyond", "beyond 1.5 × 16ξ next to nothing is learned: 0.35 of best minus chance", high=0.35),
)


def train_cells(
    norms: Sequence[Mapping[str, float]], values: Mapping[str, Any], context: Context, *, batch_size: int, offset: int
) -> Array:
    """Test accuracies (depths, norms, seeds): networks of one depth, one for each norm and seed, trained as one.

    `norms` are eps, scale and shift of every batch norm of a network, all constant. The learning rate is
    `rate` × batch size, or `learning_rate`.
    """
    import torch

    from sounding.data import load_dataset
    from sounding.models import Mlp
    from sounding.train import Recipe, train_together_

    data = load_dataset(values["data"], device=context.device)
    recipe = Recipe(
        optimizer=values.get("optimizer", "sgd"),
        batch_size=batch_size,
        epochs=values.get("epochs"),
        steps=values.get("steps"),
        evaluate="end",
        statistics="batch",
        train_metrics="seen",
    )
    rate = values.get("learning_rate") or values["rate"] * batch_size
    found = []
    for place, depth in enumerate(values["depths"]):
        networks: list[torch.nn.Module] = []
        for seed in range(values["seeds"]):
            for norm in norms:
                made = Mlp(
                    math.prod(data.shape),
                    data.classes,
                    depth=depth,
                    width=values["width"],
                    activation=values["activation"],
                    norm="batch",
                    bias=False,
                    init="lecun",
                    generator=context.generator(1000 * offset + 100 * place + seed),
                    **norm,  # type: ignore[arg-type]
                )
                networks.append(hold_norms(split_batches(made, values.get("statistics_over"))))
        history = train_together_(
            networks,
            data,
            learning_rates=[rate] * len(networks),
            recipe=recipe,
            generator=context.generator(offset),
            device=context.device,
        )
        final = [history.final(run).test_accuracy for run in range(len(networks))]
        # a run that left the finite numbers has learned nothing
        filled = [1 / data.classes if a is None or math.isnan(a) else a for a in final]
        found.append(np.array(filled).reshape(values["seeds"], len(norms)).T)
    return np.array(found)


def hold_norms(network: Any) -> Any:
    """The network with the scale and shift of its batch norms held constant."""
    import torch

    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            for parameter in module.parameters():
                parameter.requires_grad = False
    return network


def split_batches(network: Any, size: int | None) -> Any:
    """The network with batch statistics over sub-batches of `size` samples; unchanged for None."""
    if size is None:
        return network
    import torch

    from sounding.claims.meanfield2019.subbatches import SubBatchNorm

    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.BatchNorm1d):
                setattr(module, name, SubBatchNorm(size, eps=child.eps))
    return network


def judge_cells(
    accuracy: Array, depths: Sequence[int], allowed: Sequence[float], *, chance: float
) -> dict[str, Number]:
    """Share of cells on the right side of 16ξ, the fall across it, what is left beyond, in units of best − chance.

    Args:
        accuracy: (depths, columns, seeds).
        allowed: 16ξ of each column.
    """
    best = float(accuracy.mean(2).max())
    score = (accuracy - chance) / max(best - chance, 1e-9)
    depth = np.array(depths, dtype=np.float64)[:, None, None] + 0 * score
    limit = np.array(allowed, dtype=np.float64)[None, :, None] + 0 * score
    right = (score > 0.5) == (depth <= limit)
    inside, beyond = depth <= limit, depth >= CLEARLY_DEEPER * limit
    seeds = range(score.shape[2])
    within, left = ([_mean(score[..., s][side[..., s]]) for s in seeds] for side in (inside, beyond))
    return {
        "share_on_right_side": fraction_of(int(right.sum()), right.size),
        "gap_across_boundary": mean_of(np.array(within) - np.array(left)),
        "score_beyond": mean_of(left),
        "best_accuracy": mean_of(accuracy.max((0, 1))),
    }


def _mean(values: Array) -> float:
    """NaN where a grid has no cell on that side: the verdict is then left open."""
    return float(values.mean()) if values.size else math.nan


def draw_cells(
    accuracy: Array, depths: Sequence[int], columns: Sequence[float], allowed: Sequence[float], *, label: str
) -> Panel:
    """The grid with 16ξ over it, cells side by side; the line lies between depths in proportion to ln depth."""
    places = np.arange(len(depths), dtype=np.float64)
    logs = np.log(np.array(depths, dtype=np.float64))
    wanted = np.log(np.minimum(np.array(allowed, dtype=np.float64), 1e9))
    line = np.interp(wanted, logs, places)
    outer = (logs[-1] - logs[0]) / max(len(logs) - 1, 1)
    line = np.where(wanted > logs[-1], np.minimum(places[-1] + (wanted - logs[-1]) / outer, places[-1] + 0.5), line)
    across = [float(index) for index in range(len(columns))]
    return Panel(
        label,
        "depth [layers]",
        (Series("16ξ", across, line, role="paper"),),
        map=Map("test accuracy", across, list(places), accuracy.mean(2)),
        ticks={index: f"{column:g}" for index, column in zip(across, columns, strict=True)},
        y_ticks={float(place): str(depth) for place, depth in zip(places, depths, strict=True)},
    )
