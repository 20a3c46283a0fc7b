"""Multilayer perceptrons as one: a list of steps on (runs, samples, features), every linear map one batched product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.train.layers import NotReadable, Step, read_steps
from sounding.train.recipe import Statistics
from sounding.train.stack import Stack

Number = float | Tensor


class Products(Stack):
    """A stack of perceptrons. Numbers that differ between the networks (eps, gains, residual strengths) stack too.

    Raises:
        NotReadable: the networks are no perceptrons, or not the same.
    """

    def __init__(self, networks: Sequence[nn.Module], device: torch.device) -> None:
        lists = [read_steps(network) for network in networks]
        super().__init__(networks, device)
        dtype = self.parameters[0].dtype
        self._steps: list[tuple[Step, dict[str, Number]]] = []
        for steps in zip(*lists, strict=True):
            first = steps[0]
            if any((step.kind, step.tensors, step.label) != (first.kind, first.tensors, first.label) for step in steps):
                raise NotReadable("the networks differ in a step")
            numbers = {name: _stack([step.numbers[name] for step in steps], device, dtype) for name in first.numbers}
            self._steps.append((first, numbers))

    def run(self, inputs: Tensor, statistics: Statistics) -> tuple[Tensor, list[Tensor]]:
        """Outputs, and new running statistics."""
        rows = inputs.flatten(start_dim=1)
        x = rows.expand(self.runs, *rows.shape)
        fresh: dict[str, Tensor] = {}
        branches: list[Tensor] = []
        for step, numbers in self._steps:
            match step.kind:
                case "linear":
                    x = self._linear(step, x)
                case "batch" | "uncentred":
                    x = self._batch_norm(step, numbers, x, statistics, fresh)
                case "layer" | "rms":
                    x = self._row_norm(step, numbers, x)
                case "activation":
                    assert step.function is not None
                    x = step.function(_times(x, numbers["gain"]))
                case "scale":
                    x = _times(x, numbers["value"])
                case "open":
                    branches.append(x)
                case _:
                    x = branches.pop() + _times(x, numbers["strength"])
        return x, [fresh.get(name, self.tensors[name]) for name in self.tracked]

    def _linear(self, step: Step, x: Tensor) -> Tensor:
        """x Wᵀ + b of every run."""
        weight = self.tensors[step.tensors["weight"]]
        if "bias" not in step.tensors:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(self.tensors[step.tensors["bias"]][:, None], x, weight.mT)

    def _batch_norm(
        self, step: Step, numbers: dict[str, Number], x: Tensor, statistics: Statistics, fresh: dict[str, Tensor]
    ) -> Tensor:
        """γ (x − m)/√(v + eps) + β of each feature over the samples; "uncentred" has m = 0 and v the mean square.

        The running variance takes the unbiased estimate as in torch, the running mean square that of the batch.
        """
        names, centred = step.tensors, step.kind == "batch"
        remembers = "variance" in names
        if statistics == "running" and remembers:
            mean, variance = self.tensors[names["mean"]][:, None], self.tensors[names["variance"]][:, None]
        else:
            count = x.shape[1]
            if count < 2 and centred:
                raise UsageError("batch norm needs at least 2 samples to have a variance, got a batch of 1")
            if centred:
                variance, mean = torch.var_mean(x, dim=1, keepdim=True, correction=0)
            else:
                variance, mean = x.square().mean(dim=1, keepdim=True), x.new_zeros(())
            if remembers:
                self._remember(names, numbers["momentum"], mean, variance, count, centred, fresh)
        scale = torch.rsqrt(variance + numbers["eps"])
        if "weight" in names:
            scale = scale * self.tensors[names["weight"]][:, None]
        shifted = (x - mean) * scale if centred else x * scale
        return shifted + self.tensors[names["bias"]][:, None] if "bias" in names else shifted

    @torch.no_grad()
    def _remember(
        self,
        names: dict[str, str],
        momentum: Number,
        mean: Tensor,
        variance: Tensor,
        count: int,
        centred: bool,
        fresh: dict[str, Tensor],
    ) -> None:
        """Running statistics after this batch."""
        weight = momentum.flatten(1) if isinstance(momentum, Tensor) else momentum
        unbiased = variance * (count / (count - 1)) if centred else variance
        for role, value in (("mean", mean), ("variance", unbiased)):
            if role == "variance" or centred:
                old = self.tensors[names[role]]
                fresh[names[role]] = old + weight * (value.detach().squeeze(1) - old)
        if "tracked" in names:
            fresh[names["tracked"]] = self.tensors[names["tracked"]] + 1

    def _row_norm(self, step: Step, numbers: dict[str, Number], x: Tensor) -> Tensor:
        """Layer norm, γ (x − m)/√(v + eps) + β over each sample's features, or RMS norm, which leaves the mean."""
        if step.kind == "layer":
            x = x - x.mean(dim=-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + numbers["eps"])
        if "weight" in step.tensors:
            x = x * self.tensors[step.tensors["weight"]][:, None]
        return x + self.tensors[step.tensors["bias"]][:, None] if "bias" in step.tensors else x


def _stack(values: list[float], device: torch.device, dtype: torch.dtype) -> Number:
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, device=device, dtype=dtype).view(-1, 1, 1)


def _times(x: Tensor, factor: Number) -> Tensor:
    return x if isinstance(factor, float) and factor == 1.0 else x * factor
