"""Models whose weights lie in parts in several processes: fully_shard, and layers made parallel over a mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sounding.probe.calls import OpenCall, Pass, named_parameters
from sounding.probe.gathered import groups_of, refuse_flat
from sounding.probe.gradients import join_log_norms, log_norm
from sounding.probe.meeting import Meeting
from sounding.probe.moments import no_autocast
from sounding.probe.outputs import sample_matrix, why_unmeasurable
from sounding.probe.parts import WHOLE, Part, Place, is_distributed, local_part
from sounding.probe.state import all_modules
from sounding.probe.units import dead_fraction, saturated_fraction

BATCH = "forward measures and gradients at outputs are of this process's part of the batch"
FEATURES = "outputs that are cut over the mesh are put together from the parts of all processes"
NOT_SAMPLES = "forward measures: this process holds a part of it that is not cut by features"
TOKENS = "token participation ratio: this process holds a part of the positions or features"
UNITS = "dead fraction: this process holds a part of it that is not cut by units"
SHARED_LAYER = "the last weight layer lies in several processes"
HELD = "weight gradient: .grad held a gradient before this pass, to which fully_shard added; set it to None first"
WHOLE_ONLY = (
    "the start of the parameters, attention, residual branches, gates, routers and number formats are looked at only "
    "where one process holds the model whole"
)


@dataclass(frozen=True)
class Shards:
    """What a watch knows of a model whose weights lie in several processes."""

    name: str  # of the model's structure, the same in every process
    ranks: tuple[int, ...]  # the processes that hold a part of it
    # whether fully_shard gathers the weights for a pass, so that their gradients appear in `.grad` alone
    gathered: bool
    parallel: bool  # whether outputs may be parts: layers are cut over a mesh

    def describe(self) -> str:
        """The part of batch and features that the numbers are of, in words."""
        told = [f"weights lie in the processes {', '.join(map(str, self.ranks))} and their gradients are of the whole"]
        if self.gathered:
            told.append(BATCH)
        if self.parallel:
            told.append(FEATURES)
        return "; ".join(told)


def find_shards(root: nn.Module) -> Shards | None:
    """What is sharded in a model, or None; FullyShardedDataParallel is refused, whose weights are freed when read."""
    modules = all_modules(root)
    refuse_flat(modules)
    parameters = named_parameters(root)
    weights = [(name, weight) for name, weight in parameters if is_distributed(weight)]
    if not weights or not torch.distributed.is_initialized():
        return None
    groups = [group for module in modules for group in groups_of(module)]
    plain = {id(held.sharded_param) for group in groups for held in group.fsdp_params if not held.is_dtensor}
    meshes: list[Any] = [weight for _, weight in weights]
    ranks = {rank for weight in meshes for rank in weight.device_mesh.mesh.flatten().tolist()}
    shapes = ";".join(f"{name}:{tuple(weight.shape)}" for name, weight in parameters)
    return Shards(
        hashlib.sha256(shapes.encode()).hexdigest()[:16],
        tuple(sorted(ranks)),
        gathered=bool(groups),
        parallel=any(id(weight) not in plain for _, weight in weights),
    )


def measure_part(one: Pass, call: OpenCall, tensor: Tensor, *, axis: int, limit: int) -> None:
    """What can be read off this process's part of an output: the inner products of its samples, dead and saturated
    units. `join_parts` makes measures of them."""
    spec = call.spec
    if is_distributed(tensor):
        tensor = local_part(tensor)
    call.shape = tuple(tensor.shape)
    call.reason = why_unmeasurable(tensor) if tensor.numel() else None
    first = axis if spec.axis is None else spec.axis
    matrix = sample_matrix(tensor, one.batch_size or 1, first=first, limit=limit) if call.reason is None else None
    if matrix is None or first in call.place.cut:
        call.reason = call.reason or NOT_SAMPLES
        return
    one.samples, call.features = matrix.shape
    with no_autocast(matrix):
        wide = matrix.double()
        call.gram, call.dtype = wide @ wide.mT, matrix.dtype
    features_cut = call.place.cut == (tensor.dim() - 1,)
    if tensor.dim() == 3:
        call.notes += (TOKENS,)
    if spec.activation and not features_cut:
        call.notes += (UNITS,)
    elif spec.activation:
        units = tensor.shape[-1]
        call.values["dead_fraction"] = dead_fraction(matrix, None, units=units, trailing=True) if units else 0.0
    if spec.bounds is not None:
        call.values["saturated_fraction"] = saturated_fraction(matrix, spec.bounds) if call.features else 0.0


@dataclass(frozen=True)
class _Item:
    """Numbers of which each process has its own, what to do with those of all, and what without them."""

    key: str
    place: Place
    value: np.ndarray
    accept: Callable[[Sequence[np.ndarray]], None]
    refuse: Callable[[str], None]


def join_parts(
    meeting: Meeting, passes: Sequence[Pass], sums: dict[str, float] | None = None, *, wait: bool = True
) -> None:
    """Put what every process measured of its parts together, in all of them; what is missing gets its reason.

    All processes ran the same passes. `sums` are weight gradients that belong to no single one. Without `wait`, after a
    pass that failed, the message is left and nobody waited for.
    """
    items = [item for index, one in enumerate(passes) for item in _items(index, one)]
    if sums is not None and passes:
        items += _weights("sum", sums, passes[-1].gaps)
    found = meeting.exchange({item.key: item.value for item in items}, wait=wait)
    for item in items:
        if item.place.reason is not None:
            item.refuse(item.place.reason)
        elif isinstance(found, str):
            item.refuse(found)
        else:
            missing = [rank for rank in item.place.ranks if item.key not in found.get(rank, {})]
            parts = [found[rank][item.key] for rank in item.place.ranks if rank not in missing]
            if missing:
                item.refuse(f"process {missing[0]} did not measure it")
            elif len({part.size for part in parts}) > 1:
                item.refuse("the processes measured different numbers of samples")
            else:
                item.accept(parts)


def _items(index: int, one: Pass) -> Iterator[_Item]:
    yield from _weights(str(index), one.weights, one.gaps)
    for call in one.calls:
        key = f"{index}/{call.name}"
        gradient = call.gradient
        place = gradient.place if isinstance(gradient, Part) else call.place
        if gradient is not None and place is not WHOLE:
            take, lose = partial(setattr, call, "gradient"), partial(_lose_gradient, call)
            yield _gradient_item(f"{key}/gradient", place, gradient, take, lose)
        if call.gram is not None:
            yield _forward_item(key, one, call)


def _weights(key: str, weights: dict[str, float], gaps: dict[str, str]) -> list[_Item]:
    """What must be exchanged for the weight gradients that lie in parts."""

    def lose(name: str, reason: str) -> None:
        weights.pop(name, None)
        gaps[name] = f"weight gradient: {reason}"

    return [
        _gradient_item(
            f"{key}/weight/{name}", part.place, part, partial(weights.__setitem__, name), partial(lose, name)
        )
        for name, part in weights.items()
        if isinstance(part, Part) and part.place is not WHOLE
    ]


def _gradient_item(
    key: str, place: Place, part: float, take: Callable[[float], None], lose: Callable[[str], None]
) -> _Item:
    """Processes send the log-norm of their part of a gradient, or all of a summand; `take` gets that of the whole."""
    summand = getattr(part, "summand", None)

    def accept(found: Sequence[np.ndarray]) -> None:
        if summand is None:
            take(join_log_norms([float(value[0]) for value in found]))
        else:
            take(log_norm(torch.from_numpy(np.sum(found, axis=0))))

    return _Item(key, place, np.array([part]) if summand is None else summand.numpy(), accept, lose)


def _lose_gradient(call: OpenCall, reason: str) -> None:
    call.gradient = None
    call.notes += (f"gradient: {reason}",)


def _forward_item(key: str, one: Pass, call: OpenCall) -> _Item:
    """The Gram matrix adds up over parts of the features; fractions of units are means, weighted by features."""
    gram, dtype, values = call.gram, call.dtype, call.values
    assert gram is not None
    fractions = [name for name in ("dead_fraction", "saturated_fraction") if name in values]
    axis = min(call.place.cut[0], len(call.shape) - 1)
    counts = [call.features, call.shape[axis], *(values[name] for name in fractions)]
    numbers = np.concatenate([counts, gram.cpu().numpy().ravel()])
    call.gram = None

    def accept(found: Sequence[np.ndarray]) -> None:
        features = [float(part[0]) for part in found]
        call.features = int(sum(features))
        # layers of one shape are compared with each other, so that of the whole is needed
        call.shape = (*call.shape[:axis], int(sum(part[1] for part in found)), *call.shape[axis + 1 :])
        for place, name in enumerate(fractions, start=2):
            values[name] = float(np.average([part[place] for part in found], weights=features))
        total = np.sum([part[len(counts) :] for part in found], axis=0).reshape(gram.shape)
        one.moments.add(_factor(total, call.features).to(dtype), values, spoil=call.spoil)

    def refuse(reason: str) -> None:
        call.reason = f"forward measures: {reason}"
        values.clear()

    return _Item(f"{key}/forward", call.place, numbers, accept, refuse)


def _factor(gram: np.ndarray, features: int) -> Tensor:
    """Samples with these inner products and this many features, most of them zero: measures see inner products only.

    A Gram matrix that is not finite gives samples that are not.
    """
    n = gram.shape[0]
    samples = torch.zeros(n, features, dtype=torch.float64)
    if not np.isfinite(gram).all():
        samples[~np.isfinite(gram).all(axis=1)] = torch.nan
        return samples
    values, vectors = np.linalg.eigh(gram)
    kept = min(n, features)
    found = vectors[:, n - kept :] * np.sqrt(np.clip(values[n - kept :], 0, None))
    samples[:, :kept] = torch.from_numpy(np.ascontiguousarray(found))
    return samples
