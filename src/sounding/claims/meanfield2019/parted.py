"""Perceptrons whose batch norm takes its statistics over parts of the batch that a step is computed on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sounding.train.layers import Step
from sounding.train.operations import Number, apply_linear, normalize_batch
from sounding.train.products import Products, Seen


class Parted(Products):
    """A stack of perceptrons with batch norm behind each linear map, normalized in parts of the batch.

    Args:
        networks: without scale, shift and running statistics, which are left out.
        device: where they are trained.
        statistics_over: samples that are normalized together, consecutive ones of the batch. Samples that are no
            multiple of it are one part.
    """

    def __init__(self, networks: Sequence[nn.Module], device: torch.device, *, statistics_over: int) -> None:
        super().__init__(networks, device)
        self._part = statistics_over

    def _whole_layer(self, step: Step, numbers: dict[str, Number], x: Tensor, seen: Seen) -> Tensor:
        inner = apply_linear(x, self.tensors[step.tensors["weight"]], None)
        part = self._part if inner.shape[1] % self._part == 0 else inner.shape[1]
        # a part of the batch is to batch norm what a run is
        parts = inner.reshape(-1, part, inner.shape[2])
        normal, _, _ = normalize_batch(parts, None, None, eps=numbers["eps"], centred=True)
        return torch.relu(normal.view_as(inner)) if step.label.endswith("relu") else normal.view_as(inner)
