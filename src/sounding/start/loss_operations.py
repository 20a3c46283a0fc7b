"""What happens inside a loss: targets that are broadcast over the samples, and probabilities that pass for logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sounding.probe.inside.storages import key_of
from sounding.probe.parts import is_distributed
from sounding.probe.records import Finding, FindingKind
from sounding.probe.sentences import tell
from sounding.probe.thresholds import THRESHOLDS

NORMALIZING = ("logsumexp", "_log_softmax", "_softmax")
COMPARING = ("sub", "mse_loss", "smooth_l1_loss", "huber_loss")
RATIO = 10.0  # targets over outputs
NEAR_ONE = 1e-4  # how far the sum of probabilities may be from one


class LossOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at the operations of a loss; what it cannot look at it leaves alone.

    Args:
        size: the number of samples in the batch.
        scores: the storage of the outputs, and the stride of the axis of their classes; None where it is not known.
    """

    def __init__(self, size: int, scores: tuple[int, int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._size, self._scores = size, scores
        self.findings: dict[FindingKind, Finding] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", None)
        if packet is not None and args and isinstance(args[0], Tensor):
            try:
                with _disable_current_modes(), torch.no_grad():
                    for finding in self._look(packet.__name__, args):
                        self.findings.setdefault(finding.kind, finding)
            except RuntimeError:  # tensors without memory, or of another library
                pass
        return out

    def _look(self, name: str, args: tuple[Any, ...]) -> Iterator[Finding]:
        """What one operation of a loss tells."""
        second = args[1] if len(args) > 1 else None
        if isinstance(second, Tensor) and self._is_broadcast(args[0], second):
            shapes = f"{tuple(_own_shape(args[0]))} and {tuple(_own_shape(second))}"
            yield tell("broadcast", shapes=shapes, size=self._size)
        elif name in COMPARING and isinstance(second, Tensor) and (size := _size_of_targets(args[0], second)):
            yield tell("large_targets", size=size)
        elif name == "_log_softmax" and self._is_cut_across(args[0], int(args[1])):
            yield tell("cut_across")
        elif name == "_log_softmax" and self._runs_over_samples(args[0], int(args[1])):
            yield tell("softmax_over_samples")
        elif name.startswith("nll_loss") and args[0].requires_grad and args[0].dim() > 1:
            yield from self._look_at_shares(args[0])
        elif name in NORMALIZING and args[0].requires_grad and _are_shares(args[0], args[1]):
            yield tell("probabilities_again")

    def _look_at_shares(self, logarithms: Tensor) -> Iterator[Finding]:
        """What a loss takes for logarithms of shares, and are none of the classes of a sample."""
        rows = logarithms.float().movedim(1, -1)
        # what is no number sums to nothing, whatever made it
        if bool(rows.isnan().any()) or bool((rows.logsumexp(-1).abs() < NEAR_ONE).all()) or _are_shares(rows, -1):
            return
        places = rows.flatten(0, -2)
        if len(places) % self._size == 0:
            places = places.view(self._size, -1, rows.shape[-1])
        over_another = any(bool((places.logsumexp(axis).abs() < NEAR_ONE).all()) for axis in (0, 1))
        yield tell("shares_over_another_axis" if over_another else "no_logarithms")

    def _is_broadcast(self, left: Tensor, right: Tensor) -> bool:
        """Whether one of two vectors, one of them of outputs, is laid along the rows of a table and one along its
        columns; pairs of outputs are compared on purpose."""
        if left.requires_grad == right.requires_grad or not (left.is_floating_point() and right.is_floating_point()):
            return False
        rank = max(left.dim(), right.dim())
        axes = []
        for one in (left, right):
            shape = (*[1] * (rank - one.dim()), *_own_shape(one))
            axes.append([axis for axis, size in enumerate(shape) if size > 1])
            if len(axes[-1]) != 1 or shape[axes[-1][0]] != self._size:
                return False
        return axes[0] != axes[1]

    def _is_cut_across(self, scores: Tensor, axis: int) -> bool:
        """Whether a softmax over the outputs themselves runs along another stride than that of their classes."""
        return self._scores is not None and key_of(scores) == self._scores[0] and scores.stride(axis) != self._scores[1]

    def _runs_over_samples(self, scores: Tensor, axis: int) -> bool:
        """Whether a softmax runs over the first axis and this is that of the samples; of a table of all pairs of
        samples, a contrastive loss takes both axes."""
        sizes = tuple(scores.shape)
        return scores.dim() == 2 and axis % 2 == 0 and sizes[0] == self._size > 1 and 1 < sizes[1] != sizes[0]


def watch_loss(
    size: int | None, evaluate: Callable[[], Tensor], output: Any, targets: Any
) -> tuple[Tensor, tuple[Finding, ...]]:
    """A loss, and what its operations tell; nothing where the number of samples is not known."""
    if size is None or size < 2:
        return evaluate(), ()
    with LossOperations(size, _classes_of(output, targets)) as seen:
        value = evaluate()
    return value, tuple(seen.findings.values())


def _classes_of(output: Any, targets: Any) -> tuple[int, int] | None:
    """The storage of an output and the stride of the axis of its classes, where the targets tell which one it is."""
    known = isinstance(output, Tensor) and isinstance(targets, Tensor) and output.dim() == targets.dim() + 1 > 2
    if not known or targets.is_floating_point() or is_distributed(output):
        return None
    second, last = output.shape[:1] + output.shape[2:] == targets.shape, output.shape[:-1] == targets.shape
    return None if second == last else (key_of(output), output.stride(1 if second else -1))


def _size_of_targets(left: Tensor, right: Tensor) -> float:
    """The root mean square of targets that are subtracted from outputs, or outputs from them; 0 unless it is huge."""
    if left.requires_grad == right.requires_grad or not (left.is_floating_point() and right.is_floating_point()):
        return 0.0
    made, wanted = (float(one.float().square().mean().sqrt())
                    for one in sorted((left, right), key=lambda one: not one.requires_grad))  # fmt: skip
    return wanted if wanted > max(THRESHOLDS.huge_input, RATIO * made) else 0.0


def _own_shape(tensor: Tensor) -> list[int]:
    """The shape of a tensor before it was expanded: along an axis of stride zero it holds one entry."""
    return [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def _are_shares(tensor: Tensor, axes: Any) -> bool:
    """Whether the entries along an axis are at least zero and sum to one everywhere."""
    axis = axes[0] if isinstance(axes, list | tuple) else axes
    if tensor.dim() < 1 or tensor.shape[axis] < 2 or not bool((tensor >= 0).all()):
        return False
    return bool(((tensor.sum(axis) - 1).abs() < NEAR_ONE).all())
