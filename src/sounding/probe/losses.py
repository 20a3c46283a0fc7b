"""What is differentiated: the loss a check takes when it is given targets, or none."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sounding.errors import TargetError, UsageError
from sounding.probe.outputs import answer_tensor, leading_tensor, tensors_in
from sounding.probe.parts import is_distributed
from sounding.probe.state import all_modules

Loss = Callable[..., Tensor]
LOSSES = ("cross_entropy", "mse", "random")


def loss_name(loss: str | Loss | None, targets: Any) -> str:
    """The name under which the profile's settings remember the loss."""
    if isinstance(loss, str):
        return loss
    if loss is not None:
        return getattr(loss, "__name__", type(loss).__name__)
    if targets is None:
        return "random"
    return "mse" if isinstance(targets, Tensor) and targets.is_floating_point() else "cross_entropy"


def evaluate_loss(
    output: Any, targets: Any, *, loss: str | Loss | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """The scalar that is differentiated.

    With a callable, loss(output, targets), or loss(output) without targets. Else by the targets: cross-entropy for
    integer classes (binary where the model has one output), mean squared error for floating-point ones. Without
    targets: the output itself if it is a scalar, its `loss` if it has one (as models of the transformers library do),
    else "random": ⟨output, u⟩/N with u standard normal, drawn anew for every repeat. A random direction at the output
    is the gradient the mean field theory sends back; it takes no side between samples.
    """
    if callable(loss):
        return _called(loss, output, targets)
    if loss is not None and loss not in LOSSES:
        raise UsageError(f"expected loss to be one of {', '.join(LOSSES)} or a callable, got {loss!r}")
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and targets is None and isinstance(own, Tensor) and own.numel() == 1 and own.is_floating_point():
        return own.reshape(())
    answer = _differentiable(output)
    name = loss_name(loss, targets)
    if name == "random":
        if answer.numel() == 1 and loss is None:
            return answer.reshape(())
        return _random_direction(answer, generator)
    if not isinstance(targets, Tensor):
        got = "none were given" if targets is None else f"got {type(targets).__name__}"
        raise UsageError(
            f"the loss {name!r} needs targets as a tensor, {got}",
            hint="targets beside the inputs; on the command line --data digits, or FILE.npz with an array targets",
        )
    return _cross_entropy(answer, targets) if name == "cross_entropy" else _mean_square(answer, targets)


def _called(loss: Loss, output: Any, targets: Any) -> Tensor:
    try:
        value = loss(output) if targets is None else loss(output, targets)
    except Exception as error:
        raise TargetError(f"the loss raised {type(error).__name__}: {error}") from error
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        got = f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"expected the loss to return one real number as a tensor, got {got}")
    return value.reshape(())


def _differentiable(output: Any) -> Tensor:
    """The tensor of an output that a default loss can be taken of, or an error that says why there is none."""
    answer = answer_tensor(output)
    if is_distributed(answer):
        whole: Any = answer  # all processes of a check are here, so they may communicate
        answer = whole.full_tensor()
    hint = "loss=lambda output: …, a function that makes one real number of it"
    if answer is None:
        raise UsageError(
            f"the model returned {type(output).__name__}, which holds no tensor to differentiate", hint=hint
        )
    if answer.is_complex():
        raise UsageError(f"the model's output is complex ({answer.dtype}), which no default loss can rank", hint=hint)
    if not answer.is_floating_point():
        raise UsageError(f"the model's output has the type {answer.dtype}, which cannot be differentiated", hint=hint)
    return answer


def _random_direction(answer: Tensor, generator: torch.Generator | None) -> Tensor:
    place = generator.device if generator is not None else answer.device
    # in float32 for every type: a seed gives a model and its copy in half precision one direction
    direction = torch.randn(answer.shape, generator=generator, device=place, dtype=torch.float32)
    direction = direction.to(answer.device, torch.promote_types(answer.dtype, torch.float32))
    return (answer.to(direction.dtype) * direction).sum() / max(len(answer) if answer.dim() else 1, 1)


def _cross_entropy(answer: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of classes, of probabilities, or of yes and no where there is one output for each target."""
    if targets.is_floating_point():
        return functional.cross_entropy(_wide(answer), targets.to(answer.device))
    targets = targets.to(answer.device)
    if answer.numel() == targets.numel():
        _check_classes(targets, 2)
        flat = _wide(answer).reshape(targets.shape)
        return functional.binary_cross_entropy_with_logits(flat, targets.to(flat.dtype))
    axis = class_axis(answer, targets)
    if axis is None:
        raise UsageError(
            f"expected class targets for an output of shape {tuple(answer.shape)}, got the shape "
            f"{tuple(targets.shape)}",
            hint=f"one integer per {'sample' if answer.ndim == 2 else 'position'}, or loss=… of your own",
        )
    _check_classes(targets, answer.shape[axis])
    return functional.cross_entropy(_wide(answer).movedim(axis, 1), targets.long())


def class_axis(answer: Tensor, targets: Tensor) -> int | None:
    """The axis of an output that holds the classes: 1 as torch has it, or the last as language models do; else None."""
    if answer.dim() >= 2 and answer.shape[:1] + answer.shape[2:] == targets.shape:
        return 1
    return answer.dim() - 1 if answer.dim() >= 2 and answer.shape[:-1] == targets.shape else None


def training_loss(model: nn.Module, inputs: Any, targets: Any, *, loss: str | Loss | None) -> Tensor:
    """The loss of a step of training: as a check takes it, but never a random direction, which is nothing to train for.

    Raises:
        TargetError: the model raised.
        UsageError: there are neither targets nor a loss, and the model gives none of its own.
    """
    try:
        output = (
            model(**inputs)
            if isinstance(inputs, Mapping)
            else model(*inputs)
            if isinstance(inputs, tuple)
            else model(inputs)
        )
    except Exception as error:
        raise TargetError(f"the network raised {type(error).__name__}: {error}") from error
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if targets is None and loss is None and own is None:
        targets = implied_targets(
            output, None, loss=None, inputs=[tensor for _, tensor in tensors_in(inputs)], root=model
        )
        if targets is None:
            raise UsageError(
                "a trial needs targets or a loss: a random direction is nothing to train for",
                hint="--data with targets, or --loss file.py:name",
            )
    return evaluate_loss(output, targets, loss=loss)


def implied_targets(
    output: Any, targets: Any, *, loss: str | Loss | None, inputs: Iterable[Tensor], root: nn.Module
) -> Any:
    """The targets that a loss is taken with: those given, or the next tokens of a language model without any."""
    if targets is not None or loss is not None or getattr(output, "loss", None) is not None:
        return targets
    vocabularies = {part.num_embeddings for part in all_modules(root) if isinstance(part, nn.Embedding)}
    return next_tokens(output, inputs, vocabularies)


def next_tokens(output: Any, inputs: Iterable[Tensor], vocabularies: Container[int]) -> Tensor | None:
    """The targets of a language model that was given none: at each position the token that follows; None for others.

    A language model answers whole tokens of shape (samples, positions) by logits over a vocabulary that one of its
    embeddings has. The last position has nothing to predict, marked as torch's losses ignore it.
    """
    answer, tokens = answer_tensor(output), leading_tensor(inputs)
    if tokens is None or answer is None or is_distributed(answer) or tokens.dtype not in (torch.int64, torch.int32):
        return None
    fits = tokens.dim() == 2 and tokens.shape[1] > 1 and answer.dim() == 3 and answer.shape[:2] == tokens.shape
    if not fits or not answer.is_floating_point() or answer.shape[2] not in vocabularies:
        return None
    if answer.shape[1] == answer.shape[2] or int(tokens.max()) >= answer.shape[2] or int(tokens.min()) < 0:
        return None
    return functional.pad(tokens[:, 1:].long(), (0, 1), value=-100)


def _check_classes(targets: Tensor, classes: int) -> None:
    valid = targets[targets != -100]  # torch's mark for "ignore"
    if valid.numel() and not 0 <= int(valid.min()) <= int(valid.max()) < classes:
        raise UsageError(
            f"expected class targets from 0 to {classes - 1}, got {int(valid.min())} to {int(valid.max())}",
            hint="a model with as many outputs as there are classes",
        )


def _mean_square(answer: Tensor, targets: Tensor) -> Tensor:
    if answer.numel() != targets.numel():
        raise UsageError(
            f"expected targets of the output's shape {tuple(answer.shape)}, got {tuple(targets.shape)}",
            hint="loss=… of your own",
        )
    wide = _wide(answer)
    return functional.mse_loss(wide, targets.to(wide.device, wide.dtype).reshape(wide.shape))


def _wide(answer: Tensor) -> Tensor:
    """Half precision would round the loss itself."""
    return answer.float() if torch.finfo(answer.dtype).bits < 32 else answer
