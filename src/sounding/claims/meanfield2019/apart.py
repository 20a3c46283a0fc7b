"""Perceptrons trained as one stack, every seed on batches of its own: runs that share an order are not independent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sounding.train.evaluate import count_right
from sounding.train.group import Group
from sounding.train.layers import Step
from sounding.train.operations import Number, apply_linear, normalize_batch
from sounding.train.products import Products, Seen
from sounding.train.recipe import Recipe


class OwnBatches(Products):
    """A stack whose inputs may be (runs, samples, features); (samples, features) are the same for all runs.

    Args:
        networks: ReLU or other perceptrons with batch norm behind each linear map.
        device: where they are trained.
        statistics_over: samples that are normalized together, consecutive ones of the batch; None is the whole batch.
            Samples that are no multiple of it are one group. Scale, shift and running statistics are left out then.
    """

    def __init__(self, networks: Sequence[nn.Module], device: torch.device, *, statistics_over: int | None) -> None:
        super().__init__(networks, device)
        self._part = statistics_over

    def _rows(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.dim() == 3 else super()._rows(inputs)

    def _whole_layer(self, step: Step, numbers: dict[str, Number], x: Tensor, seen: Seen) -> Tensor:
        if self._part is None:
            return super()._whole_layer(step, numbers, x, seen)
        inner = apply_linear(x, self.tensors[step.tensors["weight"]], None)
        part = self._part if inner.shape[1] % self._part == 0 else inner.shape[1]
        # a group of samples is to batch norm what a run is
        groups = inner.reshape(-1, part, inner.shape[2])
        normal, _, _ = normalize_batch(groups, None, None, eps=numbers["eps"], centred=True)
        return torch.relu(normal.view_as(inner)) if step.label.endswith("relu") else normal.view_as(inner)


class OwnOrders:
    """Batches (runs, samples, features) and labels (runs, samples) of some seeds, each in a random order of its own.

    Args:
        inputs: (samples, features).
        labels: (samples,).
        batch_size: of each seed.
        generators: one a seed.
        copies: runs of each seed, next to each other, which see the same.
    """

    def __init__(
        self, inputs: Tensor, labels: Tensor, *, batch_size: int, generators: Sequence[torch.Generator], copies: int
    ) -> None:
        self._inputs, self._labels, self._size = inputs, labels, batch_size
        self._generators, self._copies = list(generators), copies
        self.per_epoch, self._at = len(labels) // batch_size, 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Of the next step; every epoch has a new order."""
        inside = self._at % self.per_epoch
        if inside == 0:
            orders = [torch.randperm(len(self._labels), generator=generator) for generator in self._generators]
            self._order = torch.stack(orders).to(self._labels.device)
        chosen = self._order[:, inside * self._size : (inside + 1) * self._size]
        chosen = chosen.repeat_interleave(self._copies, dim=0)
        self._at += 1
        return self._inputs[chosen], self._labels[chosen]


def train_apart(
    stack: OwnBatches, stream: OwnOrders, *, learning_rate: float, steps: int, recipe: Recipe, device: torch.device
) -> Group:
    """The stack after so many steps; the recipe names the optimizer and the loss."""
    group = Group(stack, [learning_rate] * stack.runs, recipe, device)
    for _ in range(steps):
        group.step(*stream.next())
    return group


@torch.no_grad()
def find_accuracies(group: Group, inputs: Tensor, labels: Tensor, *, batch_size: int) -> list[float]:
    """Of each run, with the statistics of test batches of that size, dealt out like cards; NaN where it diverged."""
    hands = -(-len(labels) // batch_size)
    right = torch.zeros(group.stack.runs, dtype=torch.int64, device=labels.device)
    for hand in range(hands):
        right += count_right(group.outputs(inputs[hand::hands]), labels[hand::hands])
    shares = (right.double() / len(labels)).tolist()
    return [share if gone is None else float("nan") for share, gone in zip(shares, group.diverged(), strict=True)]
