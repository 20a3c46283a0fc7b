"""Unsupervised rank-raising pre-training (rank2020, Algorithm 1 and appendix G)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sounding.errors import NumericalError, UsageError
from sounding.measures import participation_ratio
from sounding.repair.changes import Change, Changes, Untouched
from sounding.repair.layers import WEIGHT_LAYERS, NameFilter, matches
from sounding.repair.passes import Inputs, call_model, call_order, check_inputs, hooked
from sounding.repair.snapshot import all_or_nothing, undisturbed

Progress = Callable[[str, int, float], None]


class _ReachedError(Exception):
    """Ends a forward pass at the layer of interest: what comes after it need not be computed."""


def raise_rank_(
    model: nn.Module,
    inputs: Inputs,
    *,
    target: float | None = None,
    layers: str | Sequence[str] | None = None,
    rate: float = 1e-3,
    batch_size: int = 64,
    batches: int = 100,
    steps: int = 10,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Changes:
    """Gradient steps on the participation ratio r(H) of a hidden representation, over minibatches, without labels.

    rank2020 proves rank(H) ≥ r(H) (eq. 4) and maximizes r by plain gradient descent on 1/√r = ‖HHᵀ‖_F/tr(HHᵀ), the
    loss of the released program: for each of `batches` minibatches, `steps` steps of size `rate` on every parameter
    before H. H is what the last weight layer receives, or the output of each of `layers` in turn, as in figure 6.

    Args:
        model: changed in place; passed through in training mode, running statistics untouched.
        inputs: samples to draw minibatches from.
        target: stop a layer as soon as r on a fresh minibatch exceeds it; it cannot exceed the batch size or the width.
        layers: names of modules whose outputs are raised, in order.
        rate, batch_size, batches, steps: of the gradient descent.
        include, exclude: name filters on the parameters' modules; the others stay as they are.
        generator: draws the minibatches.
        progress: called with layer name, minibatch number and r.

    Raises:
        NumericalError: the descent diverged; the model is as it was.
    """
    check_inputs(inputs)
    _check_schedule(target, rate, batch_size, batches, steps)
    places = _places(model, inputs, layers)
    parameters, untouched = _trainable(model, include, exclude)
    changed = []
    with all_or_nothing(model), undisturbed(model):
        for name, module, side in places:
            first = last = None
            for number in range(batches):
                batch = _draw(inputs, batch_size, generator)
                ratio = _descend(model, batch, module, side, parameters, rate, steps, target, name)
                first = ratio if first is None else first
                last = ratio
                if progress is not None:
                    progress(name, number, ratio)
                if target is not None and ratio > target:
                    break
            changed.append(
                Change(name, "participation ratio", f"{first:.3g}", f"{last:.3g} after {number + 1} minibatches")
            )
    return Changes("raise_rank", tuple(changed), tuple(untouched))


def _check_schedule(target: float | None, rate: float, batch_size: int, batches: int, steps: int) -> None:
    if not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"rate must be positive, got {rate}", hint="1e-3")
    if min(batches, steps) < 1 or batch_size < 2:
        raise UsageError(
            f"expected at least 1 minibatch of 2 samples and 1 step, got {batches} minibatches of {batch_size} samples "
            f"and {steps} steps"
        )
    if target is not None and not 1 <= target < batch_size:
        raise UsageError(
            f"the participation ratio of {batch_size} samples lies from 1 to {batch_size}, got the target {target:g}",
            hint="a smaller target or a larger batch_size",
        )


def _places(model: nn.Module, inputs: Inputs, layers: str | Sequence[str] | None) -> list[tuple[str, nn.Module, str]]:
    """Which representation to raise: (name, module, whether its input or its output)."""
    if layers is not None:
        modules = dict(model.named_modules())
        wanted = [layers] if isinstance(layers, str) else list(layers)
        missing = [name for name in wanted if name not in modules]
        if missing:
            raise UsageError(
                f"the model has no module called {missing[0]!r}", hint=f"one of {', '.join(list(modules)[1:9])}"
            )
        return [(name, modules[name], "output") for name in wanted]
    with undisturbed(model):
        order = call_order(model, _draw(inputs, 2, torch.Generator().manual_seed(0)))
    weighted = [(name, module) for name, module in order if isinstance(module, WEIGHT_LAYERS)]
    if len(weighted) < 2:
        raise UsageError(
            f"expected a network with a hidden layer, got {type(model).__name__} with {len(weighted)} weight layers"
        )
    return [(f"input of {weighted[-1][0]}", weighted[-1][1], "input")]


def _trainable(
    model: nn.Module, include: NameFilter, exclude: NameFilter
) -> tuple[list[nn.Parameter], list[Untouched]]:
    chosen: list[nn.Parameter] = []
    untouched: list[Untouched] = []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        if (include is not None and not matches(name, module, include)) or matches(name, module, exclude):
            untouched.append(Untouched(name, "left out by the name filter"))
        elif not any(parameter.requires_grad for parameter in own):
            untouched.append(Untouched(name, "it is frozen (requires_grad is False)"))
        else:
            chosen += [parameter for parameter in own if parameter.requires_grad]
    if not chosen:
        raise UsageError(
            f"expected trainable parameters, got {type(model).__name__} with none",
            hint="unfreezing a layer, or another name filter",
        )
    return chosen, untouched


def _draw(inputs: Inputs, size: int, generator: torch.Generator | None) -> Inputs:
    """A minibatch without replacement; every tensor argument is indexed alike."""
    tensors = (
        [inputs] if isinstance(inputs, Tensor) else list(inputs.values() if isinstance(inputs, Mapping) else inputs)
    )
    samples = next(len(t) for t in tensors if isinstance(t, Tensor))
    device = generator.device if generator is not None else None
    chosen = torch.randperm(samples, generator=generator, device=device)[:size]

    def take(value: Any) -> Any:
        return value[chosen.to(value.device)] if isinstance(value, Tensor) and len(value) == samples else value

    if isinstance(inputs, Tensor):
        return take(inputs)  # type: ignore[no-any-return]
    if isinstance(inputs, Mapping):
        return {key: take(value) for key, value in inputs.items()}
    return tuple(take(value) for value in inputs)


def _descend(
    model: nn.Module,
    batch: Inputs,
    module: nn.Module,
    side: str,
    parameters: list[nn.Parameter],
    rate: float,
    steps: int,
    target: float | None,
    name: str,
) -> float:
    """`steps` steps on one minibatch; the participation ratio it came with."""
    first = math.nan
    for step in range(steps):
        with torch.enable_grad():
            features = _representation(model, batch, module, side).flatten(1)
            ratio = participation_ratio(features)
            value = float(ratio.detach())
            if not math.isfinite(value) or not bool(torch.isfinite(features.detach()).all()):
                raise NumericalError(f"raising the rank at {name!r} diverged", hint=f"rate={rate / 10:g}")
            if step == 0:
                first = value
                possible = min(len(features), features.shape[1])
                if target is not None and target >= possible:
                    raise UsageError(
                        f"{name!r} has {features.shape[1]} features and the minibatch {len(features)} samples, so its "
                        f"participation ratio stays below {possible}, got the target {target:g}"
                    )
                if target is not None and first > target:
                    break
            if not features.requires_grad:
                raise UsageError(f"no trainable parameter stands before {name!r}")
            gradients = torch.autograd.grad(ratio.rsqrt(), parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(gradient, alpha=rate)
    return first


def _representation(model: nn.Module, batch: Inputs, module: nn.Module, side: str) -> Tensor:
    """What a module receives or gives; the pass ends there."""
    found: list[Any] = []

    def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append(arguments[0])
        raise _ReachedError

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)
        raise _ReachedError

    handle = module.register_forward_pre_hook(before) if side == "input" else module.register_forward_hook(after)
    with hooked([handle]):
        try:
            call_model(model, batch)
        except Exception as error:
            if not isinstance(error, _ReachedError) and not isinstance(error.__cause__, _ReachedError):
                raise
    if not found or not isinstance(found[0], Tensor):
        raise UsageError("the forward pass does not reach the layer whose rank is to be raised, or it gives no tensor")
    return found[0]
