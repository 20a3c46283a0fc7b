"""Unsupervised rank-raising pre-training (rank2020, Algorithm 1 and appendix G)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sounding.errors import NumericalError, UsageError
from sounding.measures import participation_ratio
from sounding.probe.state import unwrap
from sounding.repair.changes import Change, Untouched
from sounding.repair.cure import Steps, cure
from sounding.repair.layers import FROZEN, WEIGHT_LAYERS, NameFilter, left_out, sort_out
from sounding.repair.passes import Inputs, call_layers, call_model, check_inputs, hooked, map_tensors, sample_count
from sounding.repair.snapshot import undisturbed

Progress = Callable[[str, int, float], None]
TIMES = 6.0  # the default target: this many times the participation ratio at the start
AHEAD = 1.44  # steps aim beyond the target by this factor, so that fresh minibatches pass it
LARGEST_STEP = 2.5e-3  # of the parameters' norm; four times that overshoots on every draw
SCALE_WEIGHT = 0.03  # of the penalty that keeps each representation's root mean square
PLACES = 10  # representations raised together by default
FALL = 0.8  # below this fraction of the start, minibatches no longer explain a lower participation ratio
# Below this r − 1 at the last layer descent does not start: over networks of 64 units it ended at r = 1 from 4e-5 and
# 3e-3 on, and reached its target from 8e-3 on. In between it is tried.
COLLAPSED = 1e-3
STREAK = 3  # fresh minibatches in a row that must pass the target


class _ReachedError(Exception):
    """Ends a forward pass at the layer of interest: what comes after it need not be computed."""


@dataclass(frozen=True)
class _Place:
    """A representation: what a module receives ("input") or gives ("output")."""

    name: str
    module: nn.Module
    side: str


@cure
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
    force: bool = False,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Steps:
    """Gradient steps on the participation ratio r(H) of hidden representations, over minibatches, without labels.

    rank2020 proves rank(H) ≥ r(H) (eq. 4) and raises r by gradient descent on the loss of the released program,
    1/√r = ‖HHᵀ‖_F/tr(HHᵀ), of the last hidden layer (Algorithm 1) or layer by layer (figure 6). By default ten layers,
    evenly spaced and the last among them, are raised together and held near their root mean squares s_ℓ(0):

        f = mean_ℓ [1/√r(H_ℓ) + 0.03 ln²(s_ℓ/s_ℓ(0))],   θ ← θ − min((f − 1/√(1.44 t))/‖∇f‖², 0.0025 ‖θ‖/‖∇f‖) ∇f

    Polyak's step, as long as the way to the target t, until the last layer's r reaches t on three fresh minibatches in
    a row. With the last layer's r alone, the descent cancels the samples' common part in the last few layers, which
    leaves features a hundredth of their size; and a fixed step ends anywhere from 2.5 to 23 by its random draw.

    Args:
        model: changed in place; passed through in training mode, running statistics untouched.
        inputs: samples to draw minibatches from, at most half of them at once.
        target: r to reach, below the minibatch's samples and H's features; by default 6 times r at the start r₀, or
            √(r₀ · largest possible r) if that is less. With a fixed `rate` and no target all minibatches are used.
        layers: names of modules whose outputs are raised instead, one after the other.
        rate: a fixed step on 1/√r alone, by default of the last hidden layer: `rate=1e-3, batch_size=64, batches=1000,
            steps=40` is the released program.
        batch_size: samples in a minibatch.
        batches: minibatches at most.
        steps: on each minibatch.
        force: try also where the batch is collapsed at the start, which ends near 1.
        include, exclude: name filters on the parameters' modules; the others stay as they are.
        generator: draws the minibatches.
        progress: called with layer name, minibatch number and r.

    Raises:
        UsageError: an impossible target; nothing trainable before H; bad inputs. The model is as it was.
        NumericalError: r is too near 1 to be raised, which is said before the work; or the descent diverged or lowered
            r. The model is as it was.
    """
    check_inputs(inputs)
    size = min(batch_size, max(2, sample_count(inputs) // 2))  # two minibatches must be able to differ
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"rate must be positive, got {rate}", hint="1e-3")
    if min(batches, steps) < 1 or batch_size < 2:
        raise UsageError(
            f"expected at least 1 minibatch of 2 samples and 1 step, got {batches} minibatches of {batch_size} "
            f"samples and {steps} steps"
        )
    if target is not None and not 1 <= target < size:
        raise UsageError(
            f"the participation ratio of {size} samples lies from 1 to {size}, got the target {target:g}",
            hint="a smaller target, or more samples and a larger batch_size",
        )
    parameters, untouched = _trainable(model, include, exclude)
    with undisturbed(model):
        for places in _groups(model, inputs, layers, together=rate is None):
            place = places[-1]
            drawn = (_draw(inputs, size, generator) for _ in range(batches))
            aim, ratios = _raise_at(model, drawn, places, parameters, target, rate, steps, force, progress)
            first, last = sum(ratios[:STREAK]) / len(ratios[:STREAK]), sum(ratios[-STREAK:]) / len(ratios[-STREAK:])
            reached = aim is not None and min(ratios[-STREAK:]) >= aim
            if last < FALL * first and not reached:
                raise NumericalError(
                    f"the participation ratio at {place.name!r} fell from {first:.3g} to {last:.3g} instead of rising",
                    hint="more samples, a larger batch_size, or another method",
                )
            after = f"{last:.3g} after {len(ratios)} minibatches"
            yield Change(place.name, "participation ratio", f"{ratios[0]:.3g}", after)
            if aim is not None:
                yield f"{place.name}: target {aim:.3g} {'reached' if reached else 'not reached'}"
    yield from untouched


def _groups(
    model: nn.Module, inputs: Inputs, layers: str | Sequence[str] | None, *, together: bool
) -> list[list[_Place]]:
    """Which representations to raise: the groups one after the other, those within a group together."""
    if layers is not None:
        modules = dict(unwrap(model).named_modules())
        wanted = [layers] if isinstance(layers, str) else list(layers)
        missing = [name for name in wanted if name not in modules]
        if missing:
            raise UsageError(
                f"the model has no module called {missing[0]!r}", hint=f"one of {', '.join(list(modules)[1:9])}"
            )
        return [[_Place(name, modules[name], "output")] for name in wanted]
    weighted = [one for one in call_layers(model, inputs) if isinstance(one.module, WEIGHT_LAYERS)]
    if len(weighted) < 2:
        raise UsageError(
            f"expected a network with a hidden layer, got {type(model).__name__} with {len(weighted)} weight layers"
        )
    # backwards from the last, which is always among them; the first layer is given the inputs themselves
    stride = math.ceil((len(weighted) - 1) / PLACES) if together else len(weighted)
    return [[_Place(f"input of {one.name}", one.module, "input") for one in weighted[:0:-stride][::-1]]]


def _trainable(
    model: nn.Module, include: NameFilter, exclude: NameFilter
) -> tuple[list[nn.Parameter], list[Untouched]]:
    """The parameters that are trained, and the layers that are left out with the reason."""

    def why(name: str, module: nn.Module) -> str | None:
        frozen = not any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        return left_out(name, module, include, exclude) or (FROZEN if frozen else None)

    holders = [(n, m) for n, m in unwrap(model).named_modules() if list(m.parameters(recurse=False))]
    modules, untouched = sort_out(holders, why)
    chosen = [one for _, module in modules for one in module.parameters(recurse=False) if one.requires_grad]
    if not chosen:
        raise UsageError(
            f"expected trainable parameters, got {type(model).__name__} with none",
            hint="unfreezing a layer, or another name filter",
        )
    return chosen, untouched


def _draw(inputs: Inputs, size: int, generator: torch.Generator | None) -> Inputs:
    """A minibatch without replacement; every tensor argument is indexed alike."""
    samples = sample_count(inputs)
    device = generator.device if generator is not None else None
    chosen = torch.randperm(samples, generator=generator, device=device)[:size]  # drawn where the generator lives

    return map_tensors(inputs, lambda value: value[chosen.to(value.device)] if len(value) == samples else value)


def _raise_at(
    model: nn.Module,
    batches: Iterable[Inputs],
    places: list[_Place],
    parameters: list[nn.Parameter],
    aim: float | None,
    rate: float | None,
    steps: int,
    force: bool,
    progress: Progress | None,
) -> tuple[float | None, list[float]]:
    """Descend until the last place reaches the target; it, and the participation ratio each minibatch came with."""
    scales, ratios = None, list[float]()
    for number, batch in enumerate(batches):
        for step in range(steps):
            with torch.enable_grad():
                features = [found.flatten(1) for found in _representations(model, batch, places)]
                measured = [participation_ratio(matrix) for matrix in features]
                logs = [matrix.double().square().mean().log() / 2 for matrix in features]  # ln of the root mean square
            values = [_check_ratio(*found) for found in zip(measured, features, places, strict=True)]
            _check_aim(features[-1], places[-1], aim)
            if number == step == 0 and rate is None and not force and values[-1] - 1 < COLLAPSED:
                raise NumericalError(
                    f"the batch is collapsed at {places[-1].name!r}: its participation ratio is 1 + "
                    f"{max(values[-1] - 1, 0.0):.1g}, too near 1 for gradient steps to raise it",
                    hint="he or haar first, which keep the rank over depth: --method he,raise_rank",
                )
            if step == 0:
                if aim is None and rate is None:
                    aim = min(TIMES * values[-1], math.sqrt(values[-1] * min(features[-1].shape)))
                ratios.append(values[-1])
                if progress is not None:
                    progress(places[-1].name, number, values[-1])
                if aim is not None and len(ratios) >= STREAK and min(ratios[-STREAK:]) >= aim:
                    return aim, ratios
            scales = [log.detach() for log in logs] if scales is None else scales
            with torch.enable_grad():
                # behind frozen layers alone there is nothing to raise
                loss = torch.stack([ratio.rsqrt() for ratio in measured if ratio.requires_grad]).mean()
                if rate is None:
                    moved = [
                        (log - scale).square() for log, scale in zip(logs, scales, strict=True) if log.requires_grad
                    ]
                    loss = loss + SCALE_WEIGHT * torch.stack(moved).mean()
            _step(loss, parameters, rate, aim)
    return aim, ratios


def _check_ratio(ratio: Tensor, features: Tensor, place: _Place) -> float:
    """The ratio as a number, if it is one."""
    value = float(ratio.detach())
    if not math.isfinite(value) or not bool(torch.isfinite(features.detach()).all()):
        raise NumericalError(f"the representation at {place.name!r} is not finite", hint="a smaller rate")
    if value == 0:
        raise NumericalError(f"no signal reaches {place.name!r}: the batch is zero there", hint="he or haar first")
    return value


def _check_aim(features: Tensor, place: _Place, target: float | None) -> None:
    """Whether the ratio can be raised, and as far as wanted."""
    samples, width = features.shape
    if target is not None and target >= min(samples, width):
        raise UsageError(
            f"{place.name!r} has {width} features and the minibatch {samples} samples: its participation ratio stays "
            f"below {min(samples, width)}, got the target {target:g}",
            hint="a smaller target",
        )
    if not features.requires_grad:
        raise UsageError(f"no trainable parameter stands before {place.name!r}", hint="unfreezing a layer before it")


def _step(loss: Tensor, parameters: list[nn.Parameter], rate: float | None, aim: float | None) -> None:
    """One step of fixed size, or Polyak's, no longer than a fraction of the parameters' norm."""
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = [(weight, gradient) for weight, gradient in zip(parameters, found, strict=True) if gradient is not None]
    if not pairs:
        raise UsageError("no trainable parameter stands before the representation to raise", hint="another name filter")
    if rate is None:
        assert aim is not None
        slope = math.sqrt(sum(float(gradient.double().square().sum()) for _, gradient in pairs))
        size = math.sqrt(sum(float(weight.detach().double().square().sum()) for weight, _ in pairs))
        # r = 1/f², so that 1/√(1.44 t) is where the loss should be
        way = max(0.0, float(loss.detach()) - 1 / math.sqrt(AHEAD * aim))
        rate = min(way / slope**2, LARGEST_STEP * size / slope) if slope > 0 else 0.0
    with torch.no_grad():
        for weight, gradient in pairs:
            weight.sub_(gradient, alpha=rate)


def _representations(model: nn.Module, batch: Inputs, places: list[_Place]) -> list[Tensor]:
    """What modules receive or give when first called; the pass ends at the last of them."""
    found: dict[int, Any] = {}

    def keep(index: int, value: Any) -> None:
        found.setdefault(index, value[0] if isinstance(value, tuple) else value)
        if len(found) == len(places):
            raise _ReachedError

    def watch(index: int, place: _Place) -> torch.utils.hooks.RemovableHandle:
        if place.side == "input":
            return place.module.register_forward_pre_hook(lambda _, arguments: keep(index, arguments))
        return place.module.register_forward_hook(lambda _, __, output: keep(index, output))

    with hooked([watch(index, place) for index, place in enumerate(places)]):
        try:
            call_model(model, batch)
        except Exception as error:
            # call_model wraps what a pass raises, and so this end of it
            if not isinstance(error, _ReachedError) and not isinstance(error.__cause__, _ReachedError):
                raise
    missing = [place.name for index, place in enumerate(places) if not isinstance(found.get(index), Tensor)]
    if missing:
        raise UsageError(f"the forward pass does not reach {missing[0]!r}, or there is no tensor there")
    return [found[index] for index in range(len(places))]
