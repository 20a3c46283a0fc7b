"""Does a network train? Some steps on drawn batches, and how many answers are right at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import networks


def accuracy_of(
    model: nn.Module,
    draw: Callable[[], tuple[Tensor, Tensor]],
    rate: float,
    *,
    adam: bool,
    steps: int,
    last: int,
    clip: float | None = None,
    seed: int = 2,
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
) -> float:
    """The accuracy over the last steps; 0 where the loss leaves the numbers.

    Args:
        model: trained in place.
        draw: gives inputs and labels, from torch's default generator.
        rate: the learning rate.
        adam: Adam instead of SGD with momentum.
        steps, last: how many there are, and how many count.
        clip: norm to which gradients are clipped.
        seed: of the batches.
        loss: of logits and labels.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(weights, rate) if adam else torch.optim.SGD(weights, rate, momentum=0.9)
    )
    right: list[float] = []
    with networks.drawn_from(seed):
        for _ in range(steps):
            inputs, labels = draw()
            logits = model(inputs)
            value = loss(logits, labels)
            if not torch.isfinite(value):
                return 0.0
            optimizer.zero_grad()
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(weights, clip)
            optimizer.step()
            right.append(float((logits.argmax(1) == labels).float().mean()))
    return sum(right[-last:]) / last
