"""The loss before the first step, beside what a network without knowledge has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sounding.probe.losses import class_axis
from sounding.probe.outputs import answer_tensor, tensors_in
from sounding.probe.parts import is_distributed
from sounding.probe.records import Finding, Severity
from sounding.probe.thresholds import THRESHOLDS

IGNORED = -100  # torch's mark for "no target here"
PATIENCE = 100.0  # a mean squared error this many times the best constant's is undone in the first steps at best
UNEVEN = 0.8  # the entropy of the labels over ln C from which on they are even enough
LOOK = 12  # operations from the loss on among which its own are
OF_LOGITS = ("BinaryCrossEntropyWithLogits", "LogSoftmax")
VIEWS = ("View", "Squeeze", "Clone", "ToCopy", "Reshape", "Alias", "Transpose", "Permute", "Slice", "Select", "Index")
ACTIVE = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Relu": "ReLU"}
LABELS = 4  # labels per class from which on their frequencies say something


@dataclass(frozen=True)
class StartLoss:
    """The loss of one batch at the start.

    Args:
        name: "cross_entropy", "binary", "mse", "random", or the name of a loss of the user's.
        value: the loss.
        blind: what a network without knowledge has: ln C, or the variance of the targets; NaN where not known.
        excess: what logits as spread as these cost on average in addition, whatever the labels.
        spread: the standard deviation of the logits within a sample, or of the outputs.
        classes: how many there are, 0 for none.
        entropy: of the labels of the batch, in nats.
        labels: how many labels the batch has.
        most: the share of the most frequent class.
        twice: "softmax", "sigmoid" or "ReLU" where one stands in front of a loss that takes logits.
        asked: whether the user named the loss or it is the only usual one.
        whole: whether the loss sees all that the network returned.
    """

    name: str
    value: float
    blind: float = math.nan
    excess: float = 0.0
    spread: float = math.nan
    classes: int = 0
    entropy: float = math.nan
    labels: int = 0
    most: float = 0.0
    twice: str = ""
    asked: bool = False
    whole: bool = True

    @property
    def sentence(self) -> str:
        """What is printed above every table."""
        if self.name == "random":
            return (
                "No loss at the start: without targets a random direction at the output stands for it (give targets or "
                "a loss to have one)."
            )
        told = f"Loss at the start: {self.name.replace('_', ' ')} {self.value:.4g}"
        if self.classes:
            told += f" for {self.classes} classes; a network without knowledge has ln C = {self.blind:.4g}, and logits "
            return told + f"of standard deviation {self.spread:.2g} cost {self.excess:.2g} more."
        if math.isfinite(self.blind):
            return told + f"; the best constant would have {self.blind:.4g}, the variance of the targets."
        return f"{told}."

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the sentence."""
        kept = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in vars(self).items()}  # fmt: skip
        return {**kept, "sentence": self.sentence}


def measure_loss(
    output: Any, targets: Any, *, loss: str | Callable[..., Tensor] | None, name: str, value: Tensor
) -> StartLoss:
    """The loss of a pass with all that says what it should be."""
    found = _measure(output, targets, loss=loss, name=name, value=value)
    return replace(found, twice=_before_loss(value) or found.twice)


def _measure(
    output: Any, targets: Any, *, loss: str | Callable[..., Tensor] | None, name: str, value: Tensor
) -> StartLoss:
    """The loss at the start beside that of a network without knowledge, where that can be told."""
    number = float(value.detach())
    kind = _known(loss, name)
    answer = answer_tensor(output)
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and targets is None and isinstance(own, Tensor):
        kind = "own"
    returned = [tensor for _, tensor in tensors_in(output) if tensor.is_floating_point() and tensor.dim() > 0]
    whole = callable(loss) or kind == "own" or len(returned) <= 1
    if kind == "random":
        scalar = answer is not None and answer.numel() == 1
        return StartLoss("the output itself" if scalar else "random", number, whole=whole)
    if answer is None or is_distributed(answer) or not answer.is_floating_point():
        return StartLoss(name, number, whole=whole)
    logits = answer.detach().float()
    asked = loss is not None
    if kind == "mse" and isinstance(targets, Tensor):
        values = targets.detach().double()
        # each output may have a mean of its own; what a constant cannot know is the variance around it
        blind = float(values.flatten(1).var(0, unbiased=False).mean() if values.dim() > 1 else values.var(correction=0))
        return StartLoss("mse", number, blind, spread=float(logits.std()), asked=asked, whole=whole)
    if kind == "cross_entropy" and isinstance(targets, Tensor) and not targets.is_floating_point():
        return _of_classes(logits, targets.to(logits.device), number, asked=asked, whole=whole)
    if kind == "own" and logits.dim() >= 2 and logits.shape[-1] > 1:
        blind, excess, spread = _of_logits(logits.flatten(0, -2))
        return StartLoss("of the model's own", number, blind, excess, spread, logits.shape[-1], whole=True)
    return StartLoss("of the model's own" if kind == "own" else name, number, asked=asked, whole=whole)


def _known(loss: str | Callable[..., Tensor] | None, name: str) -> str:
    """Which of the usual losses a loss is, or its own name."""
    if loss is functional.cross_entropy or isinstance(loss, nn.CrossEntropyLoss | nn.BCEWithLogitsLoss):
        return "cross_entropy"
    if loss is functional.binary_cross_entropy_with_logits:
        return "cross_entropy"
    return "mse" if loss is functional.mse_loss or isinstance(loss, nn.MSELoss) else name


def _of_classes(logits: Tensor, targets: Tensor, value: float, *, asked: bool, whole: bool) -> StartLoss:
    """A cross-entropy at the start: what blind guessing has, what the logits cost, and how labels are spread."""
    labels = targets.flatten()
    labels = labels[labels != IGNORED].long()
    if logits.numel() == targets.numel():
        flat = logits.flatten()
        blind, classes, spread = math.log(2), 2, float(flat.std()) if len(flat) > 1 else 0.0
        # whatever the label: half of ln(1 + e^z) and half of ln(1 + e^-z)
        excess = float((functional.softplus(flat) - flat / 2).mean()) - blind
        twice, name = "", "binary_cross_entropy"
    else:
        axis = class_axis(logits, targets)
        if axis is None:
            return StartLoss("cross_entropy", value, asked=asked, whole=whole)
        rows = logits.movedim(axis, -1).flatten(0, -2)
        classes, name = rows.shape[1], "cross_entropy"
        blind, excess, spread = _of_logits(rows)
        sums = bool((rows >= 0).all()) and bool(((rows.sum(1) - 1).abs() < 1e-2).all())
        twice = "softmax" if sums and classes > 1 else ""
    counts = torch.bincount(labels.cpu(), minlength=classes).double() if len(labels) else torch.zeros(classes)
    shares = counts / max(float(counts.sum()), 1.0)
    entropy = float(-(shares[shares > 0] * shares[shares > 0].log()).sum())
    return StartLoss(
        name, value, blind, excess, spread, classes, entropy, len(labels), float(shares.max()), twice, asked, whole
    )


def _of_logits(rows: Tensor) -> tuple[float, float, float]:
    """ln C, what these logits cost above it for a label drawn at random, and their spread within a row."""
    blind = math.log(rows.shape[1])
    cost = float((rows.logsumexp(1) - rows.mean(1)).double().mean()) - blind
    return blind, cost, float(rows.double().var(1, unbiased=False).mean().sqrt())


def _before_loss(value: Tensor) -> str:
    """What stands between the logits and a loss that takes logits, read off the graph of the loss; "" for nothing."""
    waiting, node = [value.grad_fn], None
    for _ in range(LOOK):
        node = waiting.pop(0) if waiting else None
        if node is None or any(word in node.name() for word in OF_LOGITS):
            break
        waiting += [before for before, _ in node.next_functions if before is not None]
    else:
        return ""
    while node is not None and node.next_functions:
        node = node.next_functions[0][0]
        if node is None or not any(view in node.name() for view in VIEWS):
            break
    name = "" if node is None else node.name()
    return next((word for start, word in ACTIVE.items() if name.startswith(start)), "")


def average(losses: Sequence[StartLoss]) -> StartLoss | None:
    """The loss over several batches: the first one's with the mean of all values."""
    if not losses:
        return None
    means = {key: fmean(getattr(one, key) for one in losses) for key in ("value", "blind", "excess", "spread")}
    return StartLoss(**{**vars(losses[0]), **means})


def judge_loss(loss: StartLoss | None) -> list[Finding]:
    """Findings about the loss at the start."""
    if loss is None or not math.isfinite(loss.value):
        return []
    found = [*_judge_height(loss), *_judge_labels(loss)]
    if loss.twice == "ReLU":
        found.insert(0, _finding(
            "activation", "low",
            "The outputs go through a ReLU before the loss takes them for logits: a logit below zero is cut off and "
            "gets no gradient.",
            ("remove the activation behind the last layer",), "logits of both signs", "outputs of a ReLU",
            {"loss": loss.value},
        ))  # fmt: skip
    elif loss.twice:
        floor = f" With {loss.classes} classes it cannot fall below {_floor(loss):.3g}." if loss.classes else ""
        found.insert(0, _finding(
            "softmax_twice", "high" if loss.asked else "medium",
            f"The outputs are probabilities already ({loss.twice}), and cross-entropy takes them for logits: the loss "
            f"starts at {loss.value:.3g}.{floor}",
            ("remove the softmax or sigmoid from the model", "take the loss of their logarithm (nll_loss), and give it "
             "with --loss"),
            "logits", f"outputs of a {loss.twice}", {"loss": loss.value},
        ))  # fmt: skip
    return found


def _floor(loss: StartLoss) -> float:
    """The least cross-entropy of probabilities that are taken for logits: the right one is 1 and all others are 0."""
    return math.log(1 + (loss.classes - 1 if loss.twice == "softmax" else 1) / math.e)


def _judge_height(loss: StartLoss) -> list[Finding]:
    """The finding about a loss that starts far above that of a network without knowledge."""
    over = loss.value - loss.blind
    if loss.classes and over > THRESHOLDS.costly_loss and loss.excess > THRESHOLDS.costly_loss / 2:
        severity: Severity = "high" if over > THRESHOLDS.fatal_loss else "medium"
        why = (
            f"The loss at the start is {loss.value:.4g}, and a network without knowledge has ln {loss.classes} = "
            f"{loss.blind:.4g}: its logits have a standard deviation of {loss.spread:.3g}, which costs "
            f"{loss.excess:.3g} on average; the first steps only undo them."
        )
    elif not loss.classes and loss.blind > 0 and loss.value > PATIENCE * loss.blind:
        severity = "medium"
        why = (
            f"The loss at the start is {loss.value:.4g}; the best constant would have {loss.blind:.4g}: the outputs "
            f"(standard deviation {loss.spread:.3g}) or the mean of the targets are far larger than their differences."
        )
    else:
        return []
    remedies: tuple[str, ...] = (
        "scale the last layer, or the embedding it is tied to, down",
        "look at what stands before it: a norm?",
    )
    if not loss.classes:
        remedies = ("subtract the mean of the targets and divide by their deviation", *remedies)
    evidence = {"loss": loss.value, "without_knowledge": loss.blind, "spread": loss.spread}
    return [_finding("start_loss", severity, why, remedies, f"a loss of {loss.blind:.4g}",
                     f"a loss of {loss.value:.4g} at the start", evidence)]  # fmt: skip


def _judge_labels(loss: StartLoss) -> list[Finding]:
    if loss.classes < 2 or loss.labels < LABELS * loss.classes or loss.entropy >= UNEVEN * loss.blind:
        return []
    return [_finding(
        "class_imbalance", "low",
        f"The labels of the batch have an entropy of {loss.entropy:.3g}, less than ln C = {loss.blind:.3g}: "
        f"{loss.most:.0%} are of one class. A network that knows only that has a loss of {loss.entropy:.3g}, and the "
        "first steps learn no more than that.",
        ("start the bias of the output at the logarithms of the frequencies",),
        f"an entropy of {loss.blind:.3g}", f"labels of an entropy of {loss.entropy:.3g}",
        {"entropy": loss.entropy, "uniform": loss.blind, "most_frequent": loss.most},
    )]  # fmt: skip


def _finding(
    kind: Any, severity: Severity, why: str, remedies: tuple[str, ...], expected: str, found: str,
    evidence: dict[str, float],
) -> Finding:  # fmt: skip
    return Finding(kind, severity, None, None, evidence, why, "", remedies, expected=expected, found=found)
