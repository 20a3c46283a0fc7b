"""Unsupervised rank-raising pre-training (rank2020, Algorithm 1 and appendix G)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sounding.errors import NumericalError, UsageError
from sounding.measures import participation_ratio
from sounding.repair.changes import Change, Changes, Untouched
from sounding.repair.layers import WEIGHT_LAYERS, NameFilter, matches
from sounding.repair.passes import Inputs, call_model, call_order, check_inputs, hooked, sample_count
from sounding.repair.snapshot import all_or_nothing, undisturbed

Progress = Callable[[str, int, float], None]
TIMES = 8.0  # the default target: this many times the participation ratio at the start
AHEAD = 1.44  # steps aim beyond the target by this factor, so that fresh minibatches pass it
LARGEST_STEP = 1e-3  # of the parameters' norm; three times that overshoots on some draws, ten times on all
STREAK = 3  # fresh minibatches in a row that must pass the target


class _ReachedError(Exception):
    """Ends a forward pass at the layer of interest: what comes after it need not be computed."""


@dataclass(frozen=True)
class _Place:
    """A representation: what a module receives ("input") or gives ("output")."""

    name: str
    module: nn.Module
    side: str


@dataclass(frozen=True)
class _Schedule:
    """How to descend; `rate` None is a step towards the target, measured by the loss itself."""

    target: float | None
    rate: float | None
    batch_size: int
    batches: int
    steps: int


def raise_rank_(
    model: nn.Module,
    inputs: Inputs,
    *,
    target: float | None = None,
    layers: str | Sequence[str] | None = None,
    rate: float | None = None,
    batch_size: int = 128,
    batches: int = 400,
    steps: int = 1,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Changes:
    """Gradient steps on the participation ratio r(H) of a hidden representation, over minibatches, without labels.

    rank2020 proves rank(H) ≥ r(H) (eq. 4) and maximizes r by gradient descent on the loss of the released program,
    f = 1/√r = ‖HHᵀ‖_F/tr(HHᵀ), over minibatches (Algorithm 1). H is what the last weight layer receives, or the output
    of each of `layers` in turn, as in figure 6. By default a step is Polyak's, as long as the way to the target t:

        θ ← θ − min((f − 1/√(1.44 t))/‖∇f‖², 10⁻³ ‖θ‖/‖∇f‖) ∇f

    and the descent ends when r on three fresh minibatches in a row has reached t. A fixed step, as published, reaches
    participation ratios from 2.5 to 23 on the same network by its random draw alone, or diverges.

    Args:
        model: changed in place; passed through in training mode, running statistics untouched.
        inputs: samples to draw minibatches from, at most half of them at once.
        target: r to reach, below the minibatch's samples and H's features; by default 8 times r at the start r₀, or
            √(r₀ · largest possible r) if that is less. With a fixed `rate` and no target all minibatches are used.
        layers: names of modules whose outputs are raised, in order.
        rate: a fixed step instead: `rate=1e-3, batch_size=64, batches=1000, steps=40` is the released program.
        batch_size: samples in a minibatch.
        batches: minibatches at most.
        steps: on each minibatch.
        include, exclude: name filters on the parameters' modules; the others stay as they are.
        generator: draws the minibatches.
        progress: called with layer name, minibatch number and r.

    Raises:
        UsageError: an impossible target; nothing trainable before H; bad inputs. The model is as it was.
        NumericalError: the descent diverged or lowered r; the model is as it was.
    """
    check_inputs(inputs)
    size = min(batch_size, max(2, sample_count(inputs) // 2))
    schedule = _Schedule(target, rate, size, batches, steps)
    _check_schedule(schedule, batch_size)
    parameters, untouched = _trainable(model, include, exclude)
    changed, notes = [], []
    with all_or_nothing(model), undisturbed(model):
        for place in _places(model, inputs, layers):
            aim, ratios = _raise_at(model, inputs, place, parameters, schedule, generator, progress)
            first, last = sum(ratios[:STREAK]) / len(ratios[:STREAK]), sum(ratios[-STREAK:]) / len(ratios[-STREAK:])
            reached = aim is not None and min(ratios[-STREAK:]) >= aim
            if last < first and not reached:
                raise NumericalError(
                    f"the participation ratio at {place.name!r} fell from {first:.3g} to {last:.3g} instead of rising",
                    hint="more samples, a larger batch_size, or another method",
                )
            after = f"{last:.3g} after {len(ratios)} minibatches"
            changed.append(Change(place.name, "participation ratio", f"{ratios[0]:.3g}", after))
            if aim is not None:
                notes.append(f"{place.name}: target {aim:.3g} {'reached' if reached else 'not reached'}")
    return Changes("raise_rank", tuple(changed), tuple(untouched), tuple(notes))


def _check_schedule(schedule: _Schedule, asked: int) -> None:
    rate, target, size = schedule.rate, schedule.target, schedule.batch_size
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"rate must be positive, got {rate}", hint="1e-3")
    if min(schedule.batches, schedule.steps) < 1 or asked < 2:
        raise UsageError(
            f"expected at least 1 minibatch of 2 samples and 1 step, got {schedule.batches} minibatches of {asked} "
            f"samples and {schedule.steps} steps"
        )
    if target is not None and not 1 <= target < size:
        raise UsageError(
            f"the participation ratio of {size} samples lies from 1 to {size}, got the target {target:g}",
            hint="a smaller target, or more samples and a larger batch_size",
        )


def _places(model: nn.Module, inputs: Inputs, layers: str | Sequence[str] | None) -> list[_Place]:
    """Which representations to raise."""
    if layers is not None:
        modules = dict(model.named_modules())
        wanted = [layers] if isinstance(layers, str) else list(layers)
        missing = [name for name in wanted if name not in modules]
        if missing:
            raise UsageError(
                f"the model has no module called {missing[0]!r}", hint=f"one of {', '.join(list(modules)[1:9])}"
            )
        return [_Place(name, modules[name], "output") for name in wanted]
    order = call_order(model, inputs)
    weighted = [(name, module) for name, module in order if isinstance(module, WEIGHT_LAYERS)]
    if len(weighted) < 2:
        raise UsageError(
            f"expected a network with a hidden layer, got {type(model).__name__} with {len(weighted)} weight layers"
        )
    return [_Place(f"input of {weighted[-1][0]}", weighted[-1][1], "input")]


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


def _raise_at(
    model: nn.Module,
    inputs: Inputs,
    place: _Place,
    parameters: list[nn.Parameter],
    schedule: _Schedule,
    generator: torch.Generator | None,
    progress: Progress | None,
) -> tuple[float | None, list[float]]:
    """Descend until the target is reached; it, and the participation ratio each minibatch came with."""
    aim, ratios = schedule.target, []
    for number in range(schedule.batches):
        batch = _draw(inputs, schedule.batch_size, generator)
        for step in range(schedule.steps):
            with torch.enable_grad():
                features = _representation(model, batch, place).flatten(1)
                ratio = participation_ratio(features)
            value = _check_ratio(ratio, features, place, aim)
            if step == 0:
                if aim is None and schedule.rate is None:
                    aim = min(TIMES * value, math.sqrt(value * min(features.shape)))
                ratios.append(value)
                if progress is not None:
                    progress(place.name, number, value)
                if aim is not None and len(ratios) >= STREAK and min(ratios[-STREAK:]) >= aim:
                    return aim, ratios
            _step(ratio, parameters, schedule.rate, aim)
    return aim, ratios


def _check_ratio(ratio: Tensor, features: Tensor, place: _Place, target: float | None) -> float:
    """The ratio as a number, if it is one and can be raised."""
    value = float(ratio.detach())
    if not math.isfinite(value) or not bool(torch.isfinite(features.detach()).all()):
        raise NumericalError(f"the representation at {place.name!r} is not finite", hint="a smaller rate")
    if value == 0:
        raise NumericalError(f"no signal reaches {place.name!r}: the batch is zero there", hint="he or haar first")
    samples, width = features.shape
    if target is not None and target >= min(samples, width):
        raise UsageError(
            f"{place.name!r} has {width} features and the minibatch {samples} samples: its participation ratio stays "
            f"below {min(samples, width)}, got the target {target:g}",
            hint="a smaller target",
        )
    if not features.requires_grad:
        raise UsageError(f"no trainable parameter stands before {place.name!r}", hint="unfreezing a layer before it")
    return value


def _step(ratio: Tensor, parameters: list[nn.Parameter], rate: float | None, aim: float | None) -> None:
    """One step on 1/√r: of fixed size, or Polyak's, no longer than a fraction of the parameters' norm."""
    loss = ratio.rsqrt()
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = [(weight, gradient) for weight, gradient in zip(parameters, found, strict=True) if gradient is not None]
    if rate is None:
        assert aim is not None
        slope = math.sqrt(sum(float(gradient.double().square().sum()) for _, gradient in pairs))
        size = math.sqrt(sum(float(weight.detach().double().square().sum()) for weight, _ in pairs))
        way = max(0.0, float(loss.detach()) - 1 / math.sqrt(AHEAD * aim))
        rate = min(way / slope**2, LARGEST_STEP * size / slope) if slope > 0 else 0.0
    with torch.no_grad():
        for weight, gradient in pairs:
            weight.sub_(gradient, alpha=rate)


def _representation(model: nn.Module, batch: Inputs, place: _Place) -> Tensor:
    """What a module receives or gives; the pass ends there."""
    found: list[Any] = []

    def before(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.append(arguments[0])
        raise _ReachedError

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)
        raise _ReachedError

    module = place.module
    handle = module.register_forward_pre_hook(before) if place.side == "input" else module.register_forward_hook(after)
    with hooked([handle]):
        try:
            call_model(model, batch)
        except Exception as error:
            if not isinstance(error, _ReachedError) and not isinstance(error.__cause__, _ReachedError):
                raise
    if not found or not isinstance(found[0], Tensor):
        raise UsageError("the forward pass does not reach the layer whose rank is to be raised, or it gives no tensor")
    return found[0]
