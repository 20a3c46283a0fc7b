"""One trunk and three heads: the class of a row of measurements, two numbers, and several labels at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import Fault, Network
from torch import Tensor, nn

SIZE, WIDTH, CLASSES, LABELS = 16, 64, 4, 4
Values = dict[str, Tensor]

FAULTS = (
    Fault("head_left_out", "output left out of the loss", ("detached", "unused"), r"labels"),
    Fault(
        "numbers_not_scaled",
        "raw targets",
        ("start_loss", "huge_signal"),
        r".*",
    ),
    Fault("heads_shared", "one module used several times", ("cloned_weights",), r"kind|labels"),
    Fault("half_overflows", "half precision overflows", ("non_finite", "huge_signal"), r".*"),
    Fault("first_no_grad", "part cut off from the gradient", ("detached", "frozen"), r"first|trunk"),
    Fault("bias_large", "bias too large", ("large_bias", "dead_units", "rank_collapse"), r"trunk\.2"),
    Fault("sigmoid_in_labels", "sigmoid twice", ("softmax_twice",), r".*"),
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        nn.init.kaiming_normal_(self.linear.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.norm(self.linear(x)), 0.1)


class MultiTask(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.first = nn.Linear(SIZE, WIDTH)
        self.trunk = nn.Sequential(*(Layer() for _ in range(4)))
        self.kind, self.numbers, self.labels = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, LABELS)
        if fault == "heads_shared":
            self.labels = self.kind
        if fault == "bias_large":
            nn.init.constant_(self.trunk[2].norm.bias, 60)

    def forward(self, rows: Tensor) -> Values:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.fault != "first_no_grad"):
            x = torch.tanh(self.first(rows))
            x = self.trunk[:2](x)
        x = self.trunk[2:](x)
        labels = self.labels(x)
        if self.fault == "sigmoid_in_labels":
            labels = labels.sigmoid()
        numbers = self.numbers(x)
        if self.fault == "half_overflows":
            numbers = (numbers * 300).half()
        return {"kind": self.kind(x), "numbers": numbers, "labels": labels}


def loss(output: Values, targets: Values) -> Tensor:
    kind = F.cross_entropy(output["kind"], targets["kind"])
    numbers = (output["numbers"] - targets["numbers"]).square().mean()
    return kind + numbers + F.binary_cross_entropy_with_logits(output["labels"], targets["labels"])


def without_labels(output: Values, targets: Values) -> Tensor:
    return F.cross_entropy(output["kind"], targets["kind"]) + (output["numbers"] - targets["numbers"]).square().mean()


def in_half(output: Values, targets: Values) -> Tensor:
    """The squares of numbers in the hundreds do not fit into half precision."""
    kind = F.cross_entropy(output["kind"], targets["kind"])
    error = output["numbers"] - (300 * targets["numbers"]).half()
    return kind + error.square().mean() + F.binary_cross_entropy_with_logits(output["labels"], targets["labels"])


def batch(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Values]:
    fixed = torch.Generator().manual_seed(5)
    plans = [torch.randn(SIZE, size, generator=fixed) / 4 for size in (CLASSES, 2, LABELS)]
    rows = torch.randn(128, SIZE, generator=generator)
    numbers = torch.tanh(rows @ plans[1]) + 0.3 * rows[:, :2]
    if fault == "numbers_not_scaled":
        numbers = 4000 + 2000 * numbers
    targets = {"kind": (rows @ plans[0]).argmax(-1), "numbers": numbers, "labels": (rows @ plans[2] > 0).float()}
    return rows, targets


def score(output: Values, targets: Values) -> float:
    """The mean of the shares of right classes and right labels; labels by their median, so that sigmoids count too."""
    kind = (output["kind"].argmax(-1) == targets["kind"]).float().mean()
    middle = 0.5 if bool(((output["labels"] >= 0) & (output["labels"] <= 1)).all()) else 0.0
    return float(kind + ((output["labels"] > middle) == (targets["labels"] > 0)).float().mean()) / 2


LOSSES = {"head_left_out": without_labels, "half_overflows": in_half}
NETWORK = Network("multitask", MultiTask, batch, FAULTS, loss, score, 0.375, LOSSES)
