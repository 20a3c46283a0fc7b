"""How a network is trained, as one frozen record: optimizer, loss, batches, when to look."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from sounding.data.dataset import Augmentation
from sounding.errors import UsageError, require_known, require_whole

Optimizer = Literal["sgd", "momentum", "adam", "rmsprop"]
Loss = Literal["cross_entropy", "mse"]
Sampling = Literal["shuffle", "replacement", "fixed"]
Statistics = Literal["running", "batch"]
TrainMetrics = Literal["evaluated", "seen"]
ClippingBy = Literal["unit", "parameter"]

CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": get_args(Optimizer),
    "loss": get_args(Loss),
    "sampling": get_args(Sampling),
    "statistics": get_args(Statistics),
    "train_metrics": get_args(TrainMetrics),
    "clipping_by": get_args(ClippingBy),
}
DEFAULT_EPOCHS = 10  # for a first look at a grid


@dataclass(frozen=True)
class Recipe:
    """Everything about training but the network, the data and the learning rate.

    Args:
        optimizer: "sgd", "momentum" (heavy ball), "adam" or "rmsprop"; formulas in the documentation of training.
        momentum: μ of "momentum"; the others do not use it.
        loss: "cross_entropy" of integer labels, or "mse", the mean of (output − target)² over samples and outputs; for
            "mse" integer labels become one-hot rows.
        batch_size: samples of a step.
        epochs: passes over the training part; 10 when neither is given.
        steps: instead of epochs.
        weight_decay: λ of the L2 penalty whose gradient λw is added to each gradient (after clipping).
        clipping: λ of adaptive gradient clipping (Brock et al. 2021); None for none.
        clipping_by: "unit", each row of a weight or filter of a convolution, or "parameter", the whole tensor
            (thesis2024, A.5).
        augment: random crops and flips of training images; None for none.
        evaluate: "epoch" (at the end of each and of the run), "end", or the steps at which to evaluate; 0 is before
            the first.
        sampling: "shuffle" goes through the samples in epochs, each in a random order of its own, a smaller last batch
            left out; "replacement" draws every batch anew; "fixed" takes the samples in their own order.
        statistics: of batch norm when evaluating: "running", what PyTorch's evaluation mode uses, or "batch", those of
            the samples evaluated together.
        evaluation_batch: samples evaluated together. By default 1000 with running statistics, where it changes
            nothing, and `batch_size` with batch statistics, where it does.
        train_metrics: loss and accuracy on the training part: "evaluated" there like on the test part, or "seen", the
            mean over the training batches since the last evaluation, at no cost.
        betas: of Adam.
        smoothing: α of RMSProp.
        eps: added to the root in Adam and RMSProp.

    >>> Recipe(optimizer="adam", steps=100).epochs is None
    True
    """

    optimizer: Optimizer = "sgd"
    momentum: float = 0.9
    loss: Loss = "cross_entropy"
    batch_size: int = 128
    epochs: int | None = None
    steps: int | None = None
    weight_decay: float = 0.0
    clipping: float | None = None
    clipping_by: ClippingBy = "unit"
    augment: Augmentation | None = None
    evaluate: Literal["epoch", "end"] | tuple[int, ...] = "epoch"
    sampling: Sampling = "shuffle"
    statistics: Statistics = "running"
    evaluation_batch: int | None = None
    train_metrics: TrainMetrics = "evaluated"
    betas: tuple[float, float] = (0.9, 0.999)
    smoothing: float = 0.99
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if str(self.loss) == "cross-entropy":  # as files up to version 0.1 spell it
            object.__setattr__(self, "loss", "cross_entropy")
        for name, known in CHOICES.items():
            require_known(name, getattr(self, name), known)
        if self.epochs is not None and self.steps is not None:
            raise UsageError(f"expected epochs or steps, got both, {self.epochs} and {self.steps}")
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", DEFAULT_EPOCHS)
        for name in ("batch_size", "epochs", "steps", "evaluation_batch"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name))
        object.__setattr__(self, "betas", tuple(self.betas))  # from a list of JSON
        if len(self.betas) != 2:
            raise UsageError(f"expected two betas, got {self.betas!r}")
        for name, below in (("momentum", 1.0), ("smoothing", 1.0), ("weight_decay", math.inf), ("eps", math.inf)):
            _require_number(name, getattr(self, name), below=below)
        for beta in self.betas:
            _require_number("betas", beta, below=1.0)
        if self.clipping is not None and not (_is_number(self.clipping) and self.clipping > 0):
            raise UsageError(f"clipping must be positive, got {self.clipping!r}", hint="0.1, or None for none")
        if self.augment is not None and not isinstance(self.augment, Augmentation):
            raise UsageError(f"expected an Augmentation or None, got {self.augment!r}", hint="data.Augmentation()")
        if not isinstance(self.evaluate, str):
            object.__setattr__(self, "evaluate", check_steps("evaluate", self.evaluate))
        elif self.evaluate not in ("epoch", "end"):
            raise UsageError(f"unknown evaluate {self.evaluate!r}", hint="epoch, end, or a list of steps")

    @property
    def evaluated_together(self) -> int:
        """Samples of one forward pass of an evaluation."""
        if self.evaluation_batch is not None:
            return self.evaluation_batch
        # with batch statistics the number changes the result
        return 1000 if self.statistics == "running" else self.batch_size

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        found = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """The inverse of `to_dict`."""
        fields = dict(data)
        unknown = set(fields) - set(cls.__dataclass_fields__)
        if unknown:
            raise UsageError(f"a recipe has no field {min(unknown)!r}")
        if fields.get("augment") is not None:
            fields["augment"] = Augmentation(**fields["augment"])
        for name in ("evaluate", "betas"):
            if isinstance(fields.get(name), list):
                fields[name] = tuple(fields[name])
        return cls(**fields)


def check_steps(name: str, steps: Any) -> tuple[int, ...]:
    """Ascending whole numbers from 0, each once."""
    try:
        found = tuple(steps)
    except TypeError:
        raise UsageError(
            f"expected {name} to be a list of steps, got {steps!r}", hint=f"{name}=(0, 100, 200)"
        ) from None
    if any(isinstance(step, bool) or not isinstance(step, int) or step < 0 for step in found):
        raise UsageError(f"expected {name} to be whole numbers of steps from 0, got {steps!r}")
    return tuple(sorted(set(found)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require_number(name: str, value: Any, *, below: float = math.inf) -> None:
    if not (_is_number(value) and 0 <= value < below):
        limit = "" if below == math.inf else f" and below {below:g}"
        raise UsageError(f"{name} must be at least 0{limit}, got {value!r}")
