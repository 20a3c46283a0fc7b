"""Many networks trained as one program: stacked parameters, a learning rate each, one order of the samples or many."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from sounding.errors import UsageError, require_known, require_whole
from sounding.train.checkpoint import Checkpoint
from sounding.train.evaluate import Scores, check_outputs, evaluate_part
from sounding.train.group import Group, Stack, check_alike
from sounding.train.history import History
from sounding.train.journal import ProgressCall
from sounding.train.layers import NotReadable
from sounding.train.loop import Training, check_rates
from sounding.train.products import Products
from sounding.train.recipe import Recipe
from sounding.train.samples import Data, Orders, Samples, Streams
from sounding.train.vmapped import Vmapped

Route = Literal["auto", "products", "vmap"]
CACHED_VALUES = 1 << 17  # of one layer: on a CPU, groups of runs whose activations of a layer fit a core's cache


def train_together_(
    networks: Sequence[nn.Module],
    data: Data,
    *,
    learning_rates: Sequence[float],
    recipe: Recipe,
    generator: Orders = None,
    device: torch.device | str | None = None,
    measure_at: Sequence[int] = (),
    checkpoint: Checkpoint | str | Path | None = None,
    progress: ProgressCall | None = None,
    settings: Sequence[Mapping[str, Any]] | None = None,
    route: Route = "auto",
    group_size: int | None = None,
) -> History:
    """Train networks of one architecture in place, run i being networks[i] with learning_rates[i].

    Every run goes the way it would go alone in `train_`, to rounding. A run whose loss is not finite is masked: that
    step is not taken, its weights stay, no other run notices. Parameters are stacked: perceptrons run as batched
    products, other architectures by `torch.func.vmap`. On a GPU the whole step is captured as a graph.

    With one generator all runs see the same batches. They then differ by their networks and rates alone, and an
    interval over seeds leaves out what the order of the samples does. With a generator for each it is in.

    Args:
        networks: they may differ in weights and in numbers such as a norm's eps or a residual strength. They stay
            where they are and have their new values at the end, also when training is interrupted.
        learning_rates: one a network, constant.
        data, recipe, checkpoint, progress: as for `train_`.
        generator: of the order of the samples, crops and flips; None is torch's default generator. A list has one a
            run, and runs that are given the same generator see the same batches.
        device: where to train; None is where the first network is.
        measure_at: steps after which every run is measured over depth, one after the other.
        settings: what else tells each run from the others, for the history and for `choose_rates`.
        route: "products", "vmap", or "auto", which takes products where it can.
        group_size: runs stacked together. By default all on a GPU, and on a CPU as many as have one layer's activations
            in a core's cache.

    Raises:
        UsageError: something does not fit together; the networks do not stack.
        DataError: the checkpoint is damaged or cannot be written.
        InterruptedRun: Ctrl-C; `partial` is the history so far, and the checkpoint has been written.

    >>> from sounding.data import load_dataset
    >>> from sounding.models import Mlp
    >>> networks = [Mlp(64, 10, depth=2, width=32, generator=torch.Generator().manual_seed(0)) for _ in range(3)]
    >>> history = train_together_(networks, load_dataset("digits"), learning_rates=[0.01, 0.1, 1e9],
    ...                           recipe=Recipe(epochs=2), generator=torch.Generator().manual_seed(0))
    >>> [step is None for step in history.diverged]
    [True, True, False]
    >>> history.final(0).train_loss > history.final(1).train_loss
    True
    """
    networks, rates = list(networks), check_rates(learning_rates)
    if not networks:
        raise UsageError("expected at least one network, got none")
    extra = [{}] * len(networks) if settings is None else [dict(entry) for entry in settings]
    for what, given in (("learning rates", rates), ("settings", extra)):
        if len(given) != len(networks):
            raise UsageError(f"expected one entry of {what} for each of {len(networks)} networks, got {len(given)}")
    entries = tuple({**entry, "learning_rate": rate} for entry, rate in zip(extra, rates, strict=True))
    training = Training(
        networks, data, kind="together", runs=entries,
        recipe=recipe, generator=generator, device=device, measure_at=measure_at,
        checkpoint=checkpoint, progress=progress,
    )  # fmt: skip
    samples, place = training.samples, training.device
    check_alike(networks)
    size = group_size
    if size is None and place.type == "cuda":
        size = len(networks)  # a graph has all runs at once
    elif size is None:
        # a layer gives out as many values as its weight has rows
        weights = (parameter.shape[0] for parameter in networks[0].parameters() if parameter.dim() > 1)
        values = recipe.batch_size * max(max(weights, default=1), samples.train[0][0].numel())
        size = max(1, CACHED_VALUES // values)
    require_whole("group_size", size)
    own = isinstance(training.stream, Streams)
    groups = []
    for start in range(0, len(networks), size):
        stack = _make_stack(networks[start : start + size], place, route)
        groups.append(Group(stack, rates[start : start + size], recipe, place, own=own))
    check_outputs(groups[0].outputs(samples.prepare(samples.train[0][:2])), samples, recipe.loss)
    together = _Together(networks, groups, samples, recipe, own=own)
    try:
        return training.run(together)
    except torch.cuda.OutOfMemoryError as error:
        raise UsageError(
            f"a stack of {min(size, len(networks))} networks does not fit the memory of {place}",
            hint=f"group_size={max(1, min(size, len(networks)) // 2)}",
        ) from error
    finally:
        for group, runs in together.parts():
            group.stack.write_back_(networks[runs])


class _Together:
    """The groups of runs as the loop of a training takes them; with `own` every run has batches of its own."""

    def __init__(
        self, networks: list[nn.Module], groups: list[Group], samples: Samples, recipe: Recipe, *, own: bool
    ) -> None:
        self._networks, self._groups = networks, groups
        self._samples, self._recipe, self._own = samples, recipe, own

    def parts(self) -> Iterator[tuple[Group, slice]]:
        """Each group, and which of the runs it has."""
        first = 0
        for group in self._groups:
            yield group, slice(first, first + group.stack.runs)
            first += group.stack.runs

    def take(self, inputs: Tensor, targets: Tensor, step: int) -> None:
        for group, runs in self.parts():
            group.step(*((inputs[runs], targets[runs]) if self._own else (inputs, targets)))

    def diverged(self) -> list[int | None]:
        return [step for group in self._groups for step in group.diverged()]

    def evaluate(self) -> tuple[Scores, Scores | None]:
        test = None if self._samples.test is None else self._evaluate(self._samples.test)
        if self._recipe.train_metrics == "evaluated":
            return self._evaluate(self._samples.train), test
        classes = not self._samples.train[1].is_floating_point()
        return _join([group.seen.take(classes=classes) for group in self._groups]), test

    def _evaluate(self, part: tuple[Tensor, Tensor]) -> Scores:
        # what a training step holds in memory, an evaluation of as many images can hold
        most = self._recipe.batch_size if self._samples.train[0].dim() > 2 else None
        given = part, self._samples, self._recipe
        return _join([evaluate_part(group.outputs, *given, at_most=most) for group in self._groups])

    def networks(self) -> Iterator[nn.Module]:
        for group, runs in self.parts():
            copies = [copy.deepcopy(network) for network in self._networks[runs]]
            group.stack.write_back_(copies)
            for network in copies:
                yield network.to(self._samples.train[0].device)

    def state(self) -> dict[str, Any]:
        return {"groups": [[tensor.detach().cpu() for tensor in group.tensors()] for group in self._groups]}

    def load_state(self, kept: dict[str, Any]) -> None:
        if [len(tensors[0]) for tensors in kept["groups"]] != [group.stack.runs for group in self._groups]:
            raise UsageError("the checkpoint was written with other groups of runs", hint="the same group_size")
        for group, tensors in zip(self._groups, kept["groups"], strict=True):
            group.load_tensors(tensors)


def _join(parts: list[Scores]) -> Scores:
    accuracy = [value for part in parts for value in part.accuracy or []]
    loss = [value for part in parts for value in part.loss]
    return Scores(loss, accuracy if parts[0].accuracy is not None else None)


def _make_stack(networks: list[nn.Module], device: torch.device, route: Route) -> Stack:
    """The networks as one stack: batched products where their layers are known, else vmap."""
    require_known("route", route, get_args(Route))
    if route != "vmap":
        try:
            return Products(networks, device)
        except NotReadable as reason:
            if route == "products":
                raise UsageError(
                    f"batched products take perceptrons of known layers, but {reason}", hint="route='vmap'"
                ) from None
    return Vmapped(networks, device)
