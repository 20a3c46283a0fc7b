"""Harmless unusual variants: nothing in them is to be accused."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import bodies
from .change import Case, instead


class Sound(NamedTuple):
    body: str
    change: Callable[[Case], None]
    why: str


def decoder_branches_start_at_zero(c: Case) -> None:
    for layer in c.model.layers:
        nn.init.zeros_(layer.attention.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)


def decoder_groups_in_turn(c: Case) -> None:
    for layer in c.model.layers:
        instead(layer.attention, spread=lambda m, x: x.repeat(1, m.heads // m.groups, 1, 1))


def tagger_slow_gates(c: Case) -> None:
    for name, p in c.model.rnn.named_parameters():
        if name.startswith("bias_ih"):
            p.data[48:96] = 0.3 + 0.7 * torch.rand(48)


def actor_with_target_copy(c: Case) -> None:
    c.model.critic_target = copy.deepcopy(nn.Sequential(c.model.critic_body, c.model.critic)).requires_grad_(False)

    def value(m: nn.Module, features: Tensor) -> Tensor:
        with torch.no_grad():
            m.bootstrap = m.critic_target(features).squeeze(-1)
        return m.critic(m.critic_body(features)).squeeze(-1)

    instead(c.model, value=value)


SOUND = {
    "decoder_branches_start_at_zero": Sound(
        "decoder", decoder_branches_start_at_zero, "Branches that start at zero leave the residual stream as it is."
    ),
    "decoder_groups_in_turn": Sound(
        "decoder", decoder_groups_in_turn, "Which queries share which keys does not matter for a fresh network."
    ),
    "tagger_slow_gates": Sound(
        "tagger",
        tagger_slow_gates,
        "Positive biases of the update gate let the units remember a little longer at first.",
    ),
    "actor_with_target_copy": Sound(
        "actor", actor_with_target_copy, "A frozen copy of the critic serves as its slow target."
    ),
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, Any, Tensor, Callable[[Any, Tensor], Tensor]]:
    variant = SOUND[name]
    case = Case(*bodies.build(variant.body, seed))
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1000)
        variant.change(case)
    return case.model, case.x, case.y, case.loss
