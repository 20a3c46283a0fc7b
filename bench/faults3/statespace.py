"""Gated linear recurrences (a small state space model) that sort sequences of numbers into classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import Fault, Network, accuracy, digits
from torch import Tensor, nn

WIDTH, BLOCKS = 40, 4

FAULTS = (
    Fault("memory_shut", "gates shut", ("shut_gates", "saturation", "large_bias"), r"blocks|decay|forget"),
    Fault(
        "state_grows",
        "recurrence that grows",
        ("gradient_explosion", "huge_signal", "non_finite", "odd_branch", "massive_activation", "start_loss"),
        r".*",
    ),
    Fault("first_step_read", "wrong index", ("unused_input",), r".*"),
    Fault("state_detached", "part cut off from the gradient", ("detached", "behind_zeros"), r"blocks|decay|forget|^$"),
    Fault("output_gate_shut", "gates shut", ("shut_gates", "dead_units", "large_bias", "odd_branch"), r"blocks|gate"),
    Fault("scan_over_samples", "samples taken for steps", ("mixed_samples",), r".*", "samples are mixed"),
)


class Scan(nn.Module):
    """h ← a(x) h + (1 − a(x)) v(x), with a = sigmoid, feature by feature."""

    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.forget, self.value, self.gate = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.forget.bias, -12 if fault == "memory_shut" else 2)
        if fault == "output_gate_shut":
            nn.init.constant_(self.gate.bias, -15)

    def forward(self, x: Tensor) -> Tensor:
        keep, value = torch.sigmoid(self.forget(x)), self.value(x)
        new = (1 - keep) * value
        if self.fault == "state_grows":
            keep = 1 + keep
        axis = 0 if self.fault == "scan_over_samples" else 1
        state, states = torch.zeros_like(value.select(axis, 0)), []
        for step in range(x.shape[axis]):
            before = state.detach() if self.fault == "state_detached" else state
            state = keep.select(axis, step) * before + new.select(axis, step)
            states.append(state)
        return self.out(torch.stack(states, axis) * F.silu(self.gate(x)))


class StateSpace(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.embed = nn.Linear(8, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(BLOCKS))
        self.blocks = nn.ModuleList(Scan(fault) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embed(rows)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(self.norm(x)[:, 0 if self.fault == "first_step_read" else -1])


def batch(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    """Digits of sixteen by sixteen pixels, every second column left out: sixteen steps of eight numbers."""
    images, classes = digits(generator, 64, size=16)
    return images[:, 0, :, ::2], classes


NETWORK = Network("statespace", StateSpace, batch, FAULTS, "cross_entropy", accuracy, 0.1, rate=5e-3)
