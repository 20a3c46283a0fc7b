"""An actor and a critic on one trunk, as in policy gradients: actions, advantages and returns are given."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from common import Fault, Network
from torch import Tensor, nn

SIZE, WIDTH, ACTIONS = 12, 64, 5
Output = tuple[Tensor, Tensor]

FAULTS = (
    Fault("value_broadcast", "loss of shapes that broadcast", ("mixed_samples", "wrong_axis"), r".*", "wrong targets"),
    Fault("value_not_in_loss", "output left out of the loss", ("detached", "unused"), r"value"),
    Fault("raw_observations", "raw inputs", ("huge_signal", "saturation", "degenerate_batch"), r".*"),
    Fault("policy_large", "output too large", ("odd_scale", "start_loss"), r"policy|^$"),
    Fault("softmax_in_policy", "softmax in front of cross-entropy", ("softmax_twice",), r".*"),
    Fault("tanh_twice", "activation applied twice", ("activation",), r".*"),
)


class ActorCritic(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        acts = [nn.Tanh(), nn.Tanh()] if fault == "tanh_twice" else [nn.Tanh()]
        widths = (SIZE, WIDTH, WIDTH, WIDTH)
        layers = [[nn.Linear(a, b), *acts] for a, b in itertools.pairwise(widths)]
        self.trunk = nn.Sequential(*(part for each in layers for part in each))
        self.policy, self.value = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, math.sqrt(2))
                nn.init.zeros_(module.bias)
        nn.init.orthogonal_(self.policy.weight, 100 if fault == "policy_large" else 0.01)
        nn.init.orthogonal_(self.value.weight, 1.0)
        self.softmax = nn.Softmax(-1) if fault == "softmax_in_policy" else nn.Identity()

    def forward(self, seen: Tensor) -> Output:
        x = self.trunk(seen)
        return self.softmax(self.policy(x)), self.value(x)


def objective(output: Output, targets: dict[str, Tensor], value_error: Tensor) -> Tensor:
    law = F.log_softmax(output[0], -1)
    gained = law.gather(-1, targets["actions"][:, None])[:, 0] * targets["advantages"]
    entropy = -(law.exp() * law).sum(-1)
    return value_error - gained.mean() - 0.01 * entropy.mean()


def loss(output: Output, targets: dict[str, Tensor]) -> Tensor:
    return objective(output, targets, (output[1].squeeze(-1) - targets["returns"]).square().mean())


def broadcast(output: Output, targets: dict[str, Tensor]) -> Tensor:
    return objective(output, targets, (output[1] - targets["returns"]).square().mean())


def without_value(output: Output, targets: dict[str, Tensor]) -> Tensor:
    return objective(output, targets, torch.zeros(()))


def batch(generator: torch.Generator, fault: str | None) -> tuple[Tensor, dict[str, Tensor]]:
    plan = torch.randn(SIZE, ACTIONS, generator=torch.Generator().manual_seed(11))
    seen = torch.randn(256, SIZE, generator=generator)
    best = (seen @ plan).argmax(-1)
    actions = torch.randint(ACTIONS, (256,), generator=generator)
    advantages = torch.where(actions == best, 2.0, -0.5)
    targets = {"actions": actions, "advantages": advantages, "returns": (seen @ plan).max(-1).values / 3, "best": best}
    if fault == "raw_observations":
        seen = seen * 10 ** torch.linspace(0, 4, SIZE) + 300
    return seen, targets


def score(output: Output, targets: dict[str, Tensor]) -> float:
    return float((output[0].argmax(-1) == targets["best"]).float().mean())


LOSSES = {"value_broadcast": broadcast, "value_not_in_loss": without_value}
NETWORK = Network("actor", ActorCritic, batch, FAULTS, loss, score, 1 / ACTIONS, LOSSES)
