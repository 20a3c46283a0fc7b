"""Multilayer perceptrons as one: a list of steps on (runs, samples, features), every linear map one batched product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.train.group import Stack
from sounding.train.layers import NotReadable, Step, read_steps
from sounding.train.operations import Number, apply_layer, apply_linear
from sounding.train.recipe import Statistics

NORMS = ("batch", "uncentred")
Seen = dict[str, tuple[Tensor, Tensor]]  # a norm's mean and variance over the batch, by the name of its variance


class Products(Stack):
    """A stack of perceptrons. Numbers that differ between the networks (eps, gains, residual strengths) stack too.

    Raises:
        NotReadable: the networks are no perceptrons, or not the same.
    """

    def __init__(self, networks: Sequence[nn.Module], device: torch.device) -> None:
        lists = [read_steps(network) for network in networks]
        if len({len(steps) for steps in lists}) > 1:
            raise NotReadable("the networks differ in their number of steps")
        super().__init__(networks, device)
        dtype = self.parameters[0].dtype
        self._steps: list[tuple[Step, dict[str, Number]]] = []
        for steps in zip(*lists, strict=True):
            first = steps[0]
            if any((step.kind, step.tensors, step.label) != (first.kind, first.tensors, first.label) for step in steps):
                raise NotReadable("the networks differ in a step")
            numbers = {name: _stack([step.numbers[name] for step in steps], device, dtype) for name in first.numbers}
            self._steps.append((first, numbers))
        self._layers = _join_layers(self._steps)
        norms = [(step, numbers) for step, numbers in self._steps if "variance" in step.tensors]
        self._means = [step.tensors["mean"] for step, _ in norms]
        self._variances = [step.tensors["variance"] for step, _ in norms]
        self._centred = [step.kind == "batch" for step, _ in norms]
        # running statistics live in one tensor each, of which the norms' own are views: many small ones move as one
        tracked = [step.tensors["tracked"] for step, _ in norms if "tracked" in step.tensors]
        self._packs = {
            role: self._gather(names)
            for role, names in {"mean": self._means, "variance": self._variances, "tracked": tracked}.items()
            if names
        }
        self._momentum = _pack([numbers["momentum"] for _, numbers in norms], self._sizes(), self.parameters[0])

    def run(self, inputs: Tensor, statistics: Statistics, *, own: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs, and new running statistics."""
        # expanded, not copied: the runs read the same rows
        x = inputs.flatten(2) if own else inputs.flatten(1).expand(self.runs, -1, -1)
        samples = x.shape[1]
        seen: Seen = {}
        branches: list[Tensor] = []
        for step, numbers in self._layers if statistics == "batch" else self._steps:
            match step.kind:
                case "linear":
                    x = apply_linear(x, self.tensors[step.tensors["weight"]], self._find(step, "bias"))
                case "batch" | "uncentred":
                    x = self._batch_norm(step, numbers, x, statistics, seen)
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
        return x, self._remember(seen, samples) if seen else {}

    def _batch_norm(
        self, step: Step, numbers: dict[str, Number], x: Tensor, statistics: Statistics, seen: Seen
    ) -> Tensor:
        """γ (x − m)/√(v + eps) + β of each feature over the samples; "uncentred" has m = 0 and v the mean square.

        With batch statistics a linear map in front and a ReLU behind may be part of the step; `seen` takes m and v.
        """
        names, centred = step.tensors, step.kind == "batch"
        scale, shift = self._find(step, "weight"), self._find(step, "bias")
        if statistics == "running" and "variance" in names:
            # for each feature, so that each value takes one product
            factor = torch.rsqrt(self.tensors[names["variance"]][:, None] + numbers["eps"])
            factor = factor if scale is None else factor * scale[:, None]
            shifted = (x - self.tensors[names["mean"]][:, None] if centred else x) * factor
            return shifted if shift is None else shifted + shift[:, None]
        if x.shape[1] < 2:
            raise UsageError("batch norm needs at least 2 samples to have a variance, got a batch of 1")
        weight, bias = self._find(step, "map"), self._find(step, "map bias")
        relu = step.label == "relu"
        output, mean, variance = apply_layer(
            x, weight, bias, scale=scale, shift=shift, eps=numbers["eps"], centred=centred, relu=relu
        )
        if "variance" in names:
            seen[names["variance"]] = mean, variance
        return output

    @torch.no_grad()
    def _remember(self, seen: Seen, count: int) -> dict[str, Tensor]:
        """Running statistics after this batch, of all norms at once.

        The running variance takes the unbiased estimate as in torch, the running mean square that of the batch.
        """
        found = [seen[name] for name in self._variances]
        # an uncentred norm has no mean
        means = [variance.squeeze(1) * 0 if mean.dim() == 0 else mean.squeeze(1) for mean, variance in found]
        factors = [count / (count - 1) if centred else 1.0 for centred in self._centred]
        variances = torch.cat([variance.squeeze(1) for _, variance in found], dim=1)
        variances = variances * (factors[0] if len(set(factors)) == 1 else _pack(factors, self._sizes(), variances))
        fresh = {}
        for role, new in (("mean", torch.cat(means, dim=1)), ("variance", variances)):
            old = self._packs[role]
            fresh[role] = old + self._momentum * (new - old)
        if "tracked" in self._packs:
            fresh["tracked"] = self._packs["tracked"] + 1
        return fresh

    @torch.no_grad()
    def remember_(self, fresh: dict[str, Tensor], alive: Tensor) -> None:
        """Take over new running statistics, of the runs that are alive."""
        for role, new in fresh.items():
            pack = self._packs[role]
            pack.copy_(torch.where(alive[:, None], new, pack))  # in place: the names are views of the pack

    def _gather(self, names: list[str]) -> Tensor:
        """Buffers of these names side by side, (runs, all values), with the names as views of it."""
        parts = [self.tensors[name] for name in names]
        rows = [part[:, None] if part.dim() == 1 else part for part in parts]  # a count of batches is one number a run
        packed = torch.cat(rows, dim=1)
        for name, part, view in zip(
            names, parts, torch.split(packed, [row.shape[1] for row in rows], dim=1), strict=True
        ):
            self.tensors[name] = view.squeeze(1) if part.dim() == 1 else view
        return packed

    def _row_norm(self, step: Step, numbers: dict[str, Number], x: Tensor) -> Tensor:
        """Layer norm, γ (x − m)/√(v + eps) + β over each sample's features, or RMS norm, which leaves the mean."""
        if step.kind == "layer":
            x = x - x.mean(dim=-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + numbers["eps"])
        if "weight" in step.tensors:
            x = x * self.tensors[step.tensors["weight"]][:, None]
        return x + self.tensors[step.tensors["bias"]][:, None] if "bias" in step.tensors else x

    def _find(self, step: Step, role: str) -> Tensor | None:
        return self.tensors[step.tensors[role]] if role in step.tensors else None

    def _sizes(self) -> list[int]:
        return [self.tensors[name].shape[1] for name in self._variances]


def _join_layers(steps: list[tuple[Step, dict[str, Number]]]) -> list[tuple[Step, dict[str, Number]]]:
    """A batch norm takes in the linear map before it, as `map` and `map bias`, and a ReLU behind it, as its label."""
    joined: list[tuple[Step, dict[str, Number]]] = []
    for step, numbers in steps:
        last, given = joined[-1] if joined else (Step("open"), {})
        if last.kind == "linear" and step.kind in NORMS:
            mapped = {f"map {role}".removesuffix(" weight"): name for role, name in last.tensors.items()}
            joined[-1] = (replace(step, tensors=mapped | step.tensors), numbers)
        elif last.kind in NORMS and not last.label and step.label == "ReLU()" and numbers["gain"] == 1.0:
            joined[-1] = (replace(last, label="relu"), given)
        else:
            joined.append((step, numbers))
    return joined


def _stack(values: list[float], device: torch.device, dtype: torch.dtype) -> Number:
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, device=device, dtype=dtype).view(-1, 1, 1)


def _pack(numbers: Sequence[Number], sizes: list[int], like: Tensor) -> Number:
    """One number for all, or one a feature, repeated over each norm's features: (runs or 1, all features)."""
    first = numbers[0] if numbers else 0.0
    if all(not isinstance(number, Tensor) and number == first for number in numbers):
        return first
    runs = max(len(number) if isinstance(number, Tensor) else 1 for number in numbers)
    parts = [
        (number.view(-1, 1) if isinstance(number, Tensor) else like.new_full((runs, 1), number)).expand(-1, size)
        for number, size in zip(numbers, sizes, strict=True)
    ]
    return torch.cat(parts, dim=1).detach()


def _times(x: Tensor, factor: Number) -> Tensor:
    return x if isinstance(factor, float) and factor == 1.0 else x * factor
