"""The loss before the first step, beside what a network without knowledge has."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sounding.probe.outputs import answer_tensor, tensors_in
from sounding.probe.parts import is_distributed
from sounding.probe.records import Finding, Severity
from sounding.probe.sentences import tell
from sounding.probe.thresholds import THRESHOLDS

FAR, PATIENCE = 10.0, 100.0  # a mean squared error this many times the best constant's is odd; is undone first at best
UNEVEN = 0.8  # the entropy of the labels over ln C from which on they are even enough
LOOK = 24  # operations from the loss on among which its own are
USUAL = ("NllLoss", "BinaryCrossEntropy", "MseLoss", "SmoothL1Loss", "HuberLoss")
# what may stand between an activation and the loss; of LogSoftmax the loss itself is made
VIEWS = re.compile("LogSoftmax|View|Squeeze|Clone|ToCopy|Reshape|Alias|Transpose|Permute|Slice|Select|Index")
ACTIVE = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Relu": "ReLU", "Tanh": "tanh"}
RANGES = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "ReLU": (0.0, math.inf), "tanh": (-1.0, 1.0)}
FEW, MANY = 0.05, 0.25  # of the targets out of reach: a few may be noise or outliers
HALF = 0.5  # of all tokens
ALL = 8  # labels that are of one class by chance in one batch of 128 at most
LABELS = 4  # labels per class from which on their frequencies say something


@dataclass(frozen=True)
class StartLoss:
    """The loss of one batch at the start."""

    name: str  # "cross_entropy", "binary", "mse", "random", or the name of a loss of the user's
    value: float  # the loss
    # what a network without knowledge has: ln C, or the variance of the targets; NaN where not known
    blind: float = math.nan
    part: float = math.nan  # the cross-entropy or mean squared error that is in the loss; NaN where none is
    excess: float = 0.0  # what logits as spread as these cost on average in addition, whatever the labels
    spread: float = math.nan  # the standard deviation of the logits within a sample, or of the outputs
    classes: int = 0  # how many there are, 0 for none
    entropy: float = math.nan  # of the labels of the batch, in nats
    labels: int = 0  # how many labels the batch has
    most: float = 0.0  # the share of the most frequent class
    twice: str = ""  # "softmax", "sigmoid", "tanh" or "ReLU" where one made what the loss is taken of
    asked: bool = False  # whether the user named the loss or it is the only usual one
    whole: bool = True  # whether the loss sees all that the network returned
    beyond: float = 0.0  # the share of the targets that this activation cannot give
    size: float = math.nan  # the root mean square of the targets of a regression
    two: bool = False  # whether these targets are only 0 and 1
    sequence: bool = False  # whether every step of a sequence has a label, as the next token is

    @property
    def over(self) -> float:
        """How far the loss is above that of a network without knowledge."""
        return self.part - self.blind

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
            told += f"of standard deviation {self.spread:.2g} raise the loss by {self.excess:.2g}."
            if self.sequence and math.isfinite(self.entropy):
                told += f" Who knows only how frequent each token is has {self.entropy:.3g}."
            return told
        if math.isfinite(self.blind):
            told += f"; the best constant would have {self.blind:.4g}, the variance of the targets."
            if self.two and not self.asked:
                told += " The targets are only 0 and 1: given as whole numbers they get binary cross-entropy."
            return told
        return f"{told}."

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the sentence."""
        kept = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in vars(self).items()}  # fmt: skip
        return {**kept, "sentence": self.sentence}


def measure_loss(
    output: Any, targets: Any, *, loss: str | Callable[..., Tensor] | None, name: str, value: Tensor
) -> StartLoss:
    """The loss of a pass with all that says what it should be.

    Which of torch's losses it is made of is read off its graph, whoever wrote it; of several the one that is farthest
    above ignorance speaks.
    """
    number, answer = float(value.detach()), answer_tensor(output)
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    itself = loss is None and targets is None and isinstance(own, Tensor)
    returned = [tensor for _, tensor in tensors_in(output) if tensor.is_floating_point() and tensor.dim() > 0]
    whole = callable(loss) or itself or len(returned) <= 1
    if name == "random" and not itself:
        scalar = answer is not None and answer.numel() == 1
        return StartLoss("the output itself" if scalar else "random", number, whole=whole)
    told = StartLoss("of the model's own" if itself else name, number, asked=loss is not None, whole=whole)
    found = [_measure(node, told, targets) for node in _usual_losses(value)]
    return max(found, key=lambda one: one.over if math.isfinite(one.over) else -math.inf, default=told)


def _usual_losses(value: Tensor) -> Iterator[Any]:
    """The nodes of torch's own losses near the end of a graph."""
    waiting = [value.grad_fn]
    for _ in range(LOOK):
        if not waiting or (node := waiting.pop(0)) is None:
            return
        if node.name().startswith(USUAL):
            yield node
        else:
            waiting += [before for before, _ in node.next_functions if before is not None]


def _measure(node: Any, told: StartLoss, targets: Any) -> StartLoss:
    """What one of torch's losses, which holds what it was given, says of its inputs."""
    name, given, wanted = node.name(), node._saved_self, node._saved_target
    if is_distributed(given):
        return told
    given, wanted = given.detach().float(), wanted.detach()
    if name != "BinaryCrossEntropyBackward0":  # that one takes probabilities
        told = replace(told, twice=_activation_before(node))
    users = isinstance(targets, Tensor) and targets.numel() == wanted.numel()
    if name.startswith("NllLoss"):
        # torch lays the steps of a sequence along the last of four axes
        told = replace(told, sequence=given.dim() == 4 and given.shape[2] == 1)
        return _of_classes(given.movedim(1, -1).flatten(0, -2), wanted.flatten(), told, users=users)
    if name.startswith("BinaryCrossEntropy"):
        return _of_two(given if "Logits" in name else given.logit(1e-6), wanted, told, users=users)
    values = wanted.double()
    low, high = RANGES.get(told.twice, (-math.inf, math.inf))
    margin = 0.05 * (high - low) if math.isfinite(high) else 1e-6
    told = replace(told, beyond=float(((values < low - margin) | (values > high + margin)).double().mean()))
    if not users or not torch.equal(targets.detach().to(wanted).flatten(), wanted.flatten()):
        return told  # what a network makes for itself, as codes and teachers do, need not have a spread
    # each output may have a mean of its own; what a constant cannot know is the variance around it
    blind = float(values.flatten(1).var(0, unbiased=False).mean() if values.dim() > 1 else values.var(correction=0))
    part = told.value if name.startswith("MseLoss") and told.name == "mse" else float((given - values).square().mean())
    size = float(values.square().mean().sqrt())
    two = bool(((values == 0) | (values == 1)).all()) and given.numel() == given.shape[0] > 1
    return replace(told, blind=blind, part=part, spread=float(given.std()), size=size, two=two)


def _of_classes(rows: Tensor, labels: Tensor, told: StartLoss, *, users: bool) -> StartLoss:
    """Cross-entropy of logits, or of their logarithms of shares: one row and one label each."""
    classes, blind = rows.shape[1], math.log(rows.shape[1])
    # what these logits cost above ln C for a label that is drawn at random
    excess = float((rows.logsumexp(1) - rows.mean(1)).double().mean()) - blind
    spread = float(rows.double().var(1, unbiased=False).mean().sqrt())
    kept = (labels >= 0) & (labels < classes)  # others are ignored: -100 is torch's own mark
    part = -float(rows.log_softmax(1)[kept].gather(1, labels[kept, None].long()).double().mean())
    told = replace(told, blind=blind, part=part, excess=excess, spread=spread, classes=classes)
    return _with_labels(told, labels[kept]) if users else told


def _of_two(logits: Tensor, wanted: Tensor, told: StartLoss, *, users: bool) -> StartLoss:
    """Binary cross-entropy: what logits cost whatever the label is half of ln(1 + e^z) and half of ln(1 + e^-z)."""
    flat, blind = logits.flatten(), math.log(2)
    excess = float((functional.softplus(flat) - flat / 2).mean()) - blind
    part = float(functional.binary_cross_entropy_with_logits(flat, wanted.flatten().to(flat)))
    name = "binary_cross_entropy" if told.name == "cross_entropy" else told.name
    spread = float(flat.std()) if len(flat) > 1 else 0.0
    told = replace(told, name=name, blind=blind, part=part, excess=excess, spread=spread, classes=2)
    alone = len(flat) == len(logits)  # several outputs of a sample are questions of their own, each uneven by right
    return _with_labels(told, wanted.flatten() > 0.5) if users and alone else told


def _with_labels(told: StartLoss, labels: Tensor) -> StartLoss:
    """How even the labels of the batch are."""
    shares = torch.bincount(labels.long().cpu(), minlength=told.classes).double() / max(len(labels), 1)
    entropy = float(-(shares[shares > 0] * shares[shares > 0].log()).sum())
    return replace(told, entropy=entropy, labels=len(labels), most=float(shares.max()))


def _activation_before(node: Any) -> str:
    """The activation that made what a loss was given; "" for none."""
    node = node.next_functions[0][0]
    while node is not None and node.next_functions and VIEWS.search(node.name()):
        node = node.next_functions[0][0]
    return "" if node is None else next((word for start, word in ACTIVE.items() if node.name().startswith(start)), "")


def average(losses: Sequence[StartLoss]) -> StartLoss | None:
    """The loss over several batches: the first one's with the mean of all values."""
    if not losses:
        return None
    means = {key: fmean(getattr(one, key) for one in losses) for key in ("value", "blind", "part", "excess", "spread")}
    return StartLoss(**{**vars(losses[0]), **means})


def judge_loss(loss: StartLoss | None) -> list[Finding]:
    """Findings about the loss at the start."""
    if loss is None:
        return []
    if not math.isfinite(loss.value):
        return [tell("loss_not_finite", value=loss.value)]
    return [*(_judge_activation(loss) if loss.classes else ()), *(_judge_reach(loss) or _judge_height(loss)),
            *_judge_labels(loss)]  # fmt: skip


def _judge_activation(loss: StartLoss) -> list[Finding]:
    """What an activation does in front of a loss that takes logits."""
    evidence = {"loss": loss.value}
    if loss.twice in ("softmax", "sigmoid"):
        # the least cross-entropy of probabilities that are taken for logits: the right one is 1, all others are 0
        least = math.log(1 + (loss.classes - 1 if loss.twice == "softmax" else 1) / math.e)
        return [tell("softmax_twice", "high" if loss.asked else "medium", evidence=evidence, twice=loss.twice,
                     classes=loss.classes, least=least)]  # fmt: skip
    if not loss.twice:
        return []
    cuts = loss.twice == "ReLU"
    cut = "a logit below zero is cut off and gets no gradient" if cuts else "no logit can leave −1 to 1"
    return [tell("cut_logits", "medium" if cuts else "low", evidence=evidence, twice=loss.twice, cut=cut)]


def _judge_reach(loss: StartLoss) -> list[Finding]:
    """Targets that the last activation cannot give."""
    if loss.beyond < FEW:
        return []
    low, high = RANGES[loss.twice]
    evidence = {"share_outside_range": loss.beyond, "loss": loss.value}
    return [tell("targets_out_of_reach", "medium" if loss.beyond > MANY else "low", evidence=evidence, low=low,
                 high=high, twice=loss.twice)]  # fmt: skip


def _judge_height(loss: StartLoss) -> list[Finding]:
    """The finding about a loss that starts far above that of a network without knowledge."""
    kind = "cross-entropy" if loss.classes else "mean squared error"
    height = f"The {kind} in the loss is {loss.part:.4g} at the start"
    if math.isclose(loss.part, loss.value, rel_tol=1e-3):
        height = f"The loss at the start is {loss.part:.4g}"
    evidence = {"loss": loss.part, "without_knowledge": loss.blind, "spread": loss.spread}
    if loss.classes and loss.over > THRESHOLDS.costly_loss and loss.excess > THRESHOLDS.costly_loss / 2:
        severity: Severity = "high" if loss.over > THRESHOLDS.fatal_loss else "medium"
        if severity == "medium" and loss.labels == loss.classes and math.isclose(loss.entropy, loss.blind):
            severity = "low"  # every label once: a table of all pairs of a contrastive loss, sharp by its temperature
        return [tell("sharp_logits", severity, evidence=evidence, height=height, classes=loss.classes,
                     excess=loss.excess)]  # fmt: skip
    if not loss.classes and loss.blind > 0 and loss.part > FAR * loss.blind:
        severity = "medium" if loss.part > PATIENCE * loss.blind else "low"
        return [tell("far_from_targets", severity, evidence=evidence, height=height)]
    return []


def _judge_labels(loss: StartLoss) -> list[Finding]:
    if loss.sequence and loss.most < HALF:  # words are never equally frequent; padding is more than all of them
        return []
    if loss.most == 1 and loss.labels >= ALL:
        return [tell("one_class", evidence={"labels": float(loss.labels), "most_frequent": 1.0})]
    if loss.classes < 2 or loss.labels < LABELS * loss.classes or loss.entropy >= UNEVEN * loss.blind:
        return []
    evidence = {"entropy": loss.entropy, "uniform": loss.blind, "most_frequent": loss.most}
    return [tell("class_imbalance", evidence=evidence)]
