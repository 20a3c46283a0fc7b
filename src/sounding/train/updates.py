"""Optimizers on stacked parameters: one learning rate a run, every formula that of torch.optim."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sounding.repair.clipping import clip_adaptively
from sounding.train.recipe import Recipe

FLOOR = 1e-3  # the least norm a weight counts with in adaptive clipping (Brock et al. 2021)


class Updates:
    """The optimizer of a stack. With g the gradient of a run's loss, clipped, plus λ w:

    sgd       w ← w − η g
    momentum  b ← μ b + g;  w ← w − η b
    adam      m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²;
              w ← w − η/(1 − β₁ᵗ) · m/(√v/√(1 − β₂ᵗ) + ε)
    rmsprop   v ← α v + (1 − α) g²;  w ← w − η g/(√v + ε)

    All state starts at zero and lives on the device, the step count t too, so that a graph can hold it.
    """

    def __init__(self, parameters: Sequence[Tensor], rates: Tensor, recipe: Recipe) -> None:
        self._parameters, self._recipe = list(parameters), recipe
        self._vectors = [index for index, parameter in enumerate(parameters) if parameter.dim() == 2]
        self._others = [index for index, parameter in enumerate(parameters) if parameter.dim() != 2]
        self._sizes = [parameters[index].shape[1] for index in self._vectors]
        self._rates = rates
        kept = {"sgd": 0, "momentum": 1, "adam": 2, "rmsprop": 1}[recipe.optimizer]  # state tensors for each parameter
        self._state = [[torch.zeros_like(parameter) for parameter in parameters] for _ in range(kept)]
        self._count = torch.zeros((), dtype=torch.float64, device=rates.device)

    def tensors(self) -> list[Tensor]:
        """All state, in a fixed order."""
        return [self._count, *(tensor for part in self._state for tensor in part)]

    @torch.no_grad()
    def apply_(self, gradients: Sequence[Tensor], alive: Tensor) -> None:
        """One step of the runs that are alive; the others' parameters stay, whatever their gradients are."""
        directions, factor = self._directions(list(gradients))
        rates = self._rates if factor is None else (self._rates * factor).to(self._rates.dtype)
        # vectors (biases, scales, shifts) are many and small: they move as one
        if self._vectors:
            packed = torch.cat([directions[index] for index in self._vectors], dim=1)
            moves = (rates[:, None] * packed).masked_fill_(~alive[:, None], 0.0)
            torch._foreach_sub_(
                [self._parameters[index] for index in self._vectors], list(torch.split(moves, self._sizes, dim=1))
            )
        # asking is free on a CPU; on a GPU the host must not wait
        whole = self._rates.device.type == "cpu" and bool(alive.all())
        for index in self._others:
            parameter, direction = self._parameters[index], directions[index]
            shape = (-1, *[1] * (parameter.dim() - 1))
            if not whole:  # a product with 0 would turn an infinite direction into NaN
                direction = direction.masked_fill(~alive.view(shape), 0.0)
            parameter.addcmul_(direction, rates.view(shape), value=-1.0)

    def _directions(self, gradients: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """What each parameter goes along, and a factor of the rate."""
        recipe = self._recipe
        if recipe.clipping is not None:
            clipped = []
            for gradient, parameter in zip(gradients, self._parameters, strict=True):
                # axis 0 is the runs, axis 1 the units: rows of a weight, filters; a vector or "parameter" is one unit
                first = 2 if recipe.clipping_by == "unit" and parameter.dim() > 2 else 1
                axes, given = range(first, parameter.dim()), {"clipping": recipe.clipping, "floor": FLOOR}
                clipped.append(clip_adaptively(gradient, parameter, axes, **given))
            gradients = clipped
        if recipe.weight_decay:
            # behind clipping, as a recipe says
            gradients = list(torch._foreach_add(gradients, self._parameters, alpha=recipe.weight_decay))
        if recipe.optimizer == "momentum":
            (velocity,) = self._state
            torch._foreach_mul_(velocity, recipe.momentum)
            torch._foreach_add_(velocity, gradients)
            return velocity, None
        if recipe.optimizer == "rmsprop":
            (square,) = self._state
            _average_squares(square, gradients, recipe.smoothing)
            roots = torch._foreach_sqrt(square)
            torch._foreach_add_(roots, recipe.eps)
            return list(torch._foreach_div(gradients, roots)), None
        if recipe.optimizer == "adam":
            return self._adam(gradients)
        return gradients, None

    def _adam(self, gradients: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        mean, square = self._state
        first, second = self._recipe.betas
        self._count += 1  # first: the corrections are those of step t, from 1
        torch._foreach_lerp_(mean, gradients, 1 - first)
        _average_squares(square, gradients, second)
        roots = torch._foreach_sqrt(square)
        torch._foreach_div_(roots, (1 - second**self._count).sqrt())  # √v̂ = √v/√(1 − β₂ᵗ), and ε is added behind it
        torch._foreach_add_(roots, self._recipe.eps)
        return list(torch._foreach_div(mean, roots)), 1 / (1 - first**self._count)


def _average_squares(square: list[Tensor], gradients: list[Tensor], keep: float) -> None:
    torch._foreach_mul_(square, keep)
    torch._foreach_addcmul_(square, gradients, gradients, 1 - keep)
