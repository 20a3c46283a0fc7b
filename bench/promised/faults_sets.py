"""Mistakes in networks for sets and pairs."""

from __future__ import annotations

import torch
from bench.promised.bodies_rows import DeepSet, Siamese
from bench.promised.registry import become, fault, recycled
from torch import Tensor, nn


@fault("deepset_dead_points", "deepset", "dead_units large_bias behind_zeros", "point")
def _(model: DeepSet) -> None:
    """The biases of the first layers start at -20 in front of ReLU."""
    nn.init.constant_(model.point[0].bias, -20.0)
    nn.init.constant_(model.point[2].bias, -20.0)


class Logarithms(DeepSet):
    def forward(self, points: Tensor) -> Tensor:
        return super().forward(torch.log(points))


@fault("deepset_log_of_negatives", "deepset", "non_finite", "")
def _(model: DeepSet) -> None:
    """A logarithm is taken of features that may be negative."""
    become(model, Logarithms)


class OverSets(DeepSet):
    def forward(self, points: Tensor) -> Tensor:
        pooled = self.point(points).mean(0, keepdim=True).mean(1)
        return self.whole(self.norm(pooled.expand(len(points), -1)))


@fault("deepset_mean_over_batch", "deepset", "mixed_samples gradient_alignment rank_collapse", "")
def _(model: DeepSet) -> None:
    """The mean runs over the sets of the batch as well as over the points."""
    become(model, OverSets)


class FirstPoint(DeepSet):
    def forward(self, points: Tensor) -> Tensor:
        return self.whole(self.norm(self.point(points[:, :1]).mean(1)))


@fault("deepset_first_point", "deepset", "unused_input", "")
def _(model: DeepSet) -> None:
    """A slice that was left from debugging keeps the first point of each set."""
    become(model, FirstPoint)


@fault("deepset_linear", "deepset", "activation", "point")
def _(model: DeepSet) -> None:
    """The activations were replaced by identities for an ablation, and the norm was removed."""
    for part in (model.point, model.whole):
        for number, layer in enumerate(part):
            if isinstance(layer, nn.ReLU):
                part[number] = nn.Identity()
    model.norm = nn.Identity()


class Listed(DeepSet):
    def forward(self, points: Tensor) -> Tensor:
        pooled = torch.tensor(self.point(points).mean(1).tolist())
        return self.whole(self.norm(torch.tanh(pooled)).round().detach())


@fault("deepset_through_a_list", "deepset", "detached", "point")
def _(model: DeepSet) -> None:
    """The pooled features pass a Python list and are rounded."""
    become(model, Listed)


@fault("deepset_never_written", "deepset", "never_written parameter_not_finite non_finite", "point.2")
def _(model: DeepSet) -> None:
    """The middle layer on points is torch.empty."""
    recycled(model.point[2].weight)


@fault("deepset_zero_in_front_of_relu", "deepset", "behind_zeros constant_weight", "whole")
def _(model: DeepSet) -> None:
    """Two layers with ReLU between them both start at zero; neither leaves it."""
    for layer in (model.whole[0], model.whole[2]):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


@fault("siamese_sigmoid_twice", "siamese", "softmax_twice", "")
def _(model: Siamese) -> None:
    """The network ends with a sigmoid; the loss takes logits."""
    become(model, SigmoidSiamese)


class SigmoidSiamese(Siamese):
    def forward(self, pairs: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(pairs))


class BothDetached(Siamese):
    def codes(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        first, second = super().codes(pairs)
        return first.detach(), second.detach()


@fault("siamese_both_detached", "siamese", "detached", "encoder")
def _(model: Siamese) -> None:
    """Both codes are detached; one of them was meant."""
    become(model, BothDetached)


class Distance(Siamese):
    def forward(self, pairs: Tensor) -> Tensor:
        first, second = self.codes(pairs)
        first = torch.cat([second[:1], first[1:]])  # the anchor is its own partner
        return self.offset + 3 - (first - second).square().sum(-1).sqrt()


@fault("siamese_root_of_zero", "siamese", "non_finite", "encoder")
def _(model: Siamese) -> None:
    """The root of a squared distance has an infinite slope where a vector is paired with itself."""
    become(model, Distance)


@fault("deepset_loud_layer", "deepset", "odd_scale start_loss", "whole.2")
def _(model: DeepSet) -> None:
    """One layer is drawn with deviation 20."""
    nn.init.normal_(model.whole[2].weight, std=20.0)


@fault("deepset_wide_by_outputs", "deepset", "fans_exchanged start_loss odd_scale", "whole.2")
def _(model: DeepSet) -> None:
    """A wide last layer, 1024 inputs for three outputs, is drawn by the number of its outputs."""
    last = nn.Linear(1024, 3)
    nn.init.normal_(last.weight, std=(2 / last.weight.shape[0]) ** 0.5)  # shape[1] is meant
    model.whole = nn.Sequential(nn.Linear(48, 1024), nn.ReLU(), last)


class ReluSiamese(Siamese):
    def forward(self, pairs: Tensor) -> Tensor:
        return torch.relu(super().forward(pairs))


@fault("siamese_relu_on_logits", "siamese", "activation", "")
def _(model: Siamese) -> None:
    """A ReLU stands between the logit and the loss: no pair can be called different."""
    become(model, ReluSiamese)
