"""Activation shaping: per-layer gains that pull activations towards linear as depth grows (thesis2024, 6.4 and C.5)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.probe.state import unwrap
from sounding.probe.units import is_activation, name_activation
from sounding.repair.changes import Change, Changes, Untouched
from sounding.repair.explosion import ExplosionLaw, explosion_law, is_homogeneous
from sounding.repair.layers import BATCH_NORMS, NameFilter, left_out
from sounding.repair.passes import Inputs, call_model, check_inputs, hooked
from sounding.repair.snapshot import all_or_nothing, on_copy, undisturbed

AFFINE_NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm)
MARGIN = 1.1  # k > 1 makes the sum over layers finite; closer to 1 activations stay less linear and the sum is larger


@dataclass(frozen=True)
class PreGain:
    """A forward pre-hook that multiplies a module's input: no parameter, no new name, and it pickles."""

    gain: float

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (arguments[0] * self.gain, *arguments[1:])


def gains(depth: int, exponent: float) -> list[float]:
    """α_ℓ = ℓ^(−exponent) for ℓ = 1 … depth (thesis2024, C.5).

    >>> gains(3, 1.0)
    [1.0, 0.5, 0.3333333333333333]
    """
    return [layer**-exponent for layer in range(1, depth + 1)]


def shape_activations_(
    model: nn.Module,
    inputs: Inputs,
    *,
    exponent: float | None = None,
    law: ExplosionLaw | None = None,
    margin: float = MARGIN,
    how: Literal["wrap", "fold"] = "wrap",
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Changes:
    """Replace σ(x) by σ(α_ℓ x) with α_ℓ = ℓ^(−exponent), ℓ counting activations in the order in which they run.

    With batch norm and Haar weights the gradient's growth over layer ℓ is about c₁ α_ℓ^c₂; an exponent above 1/c₂ makes
    the sum over layers finite, so that gradients stay bounded at any depth (thesis2024, C.5). By default c₂ is measured
    (`explosion_law`, a second or two) and the exponent is margin/c₂: for tanh about 0.4, as in thesis2024 figure 6.5.
    "wrap" multiplies the activation's input; "fold" multiplies scale and shift of the affine norm that feeds the
    activation, which computes the same function. Neither adds or renames an entry of the state_dict. A positively
    homogeneous activation (ReLU) is only rescaled by a gain, which the next norm undoes: it is left alone. A module of
    your own counts as an activation when it has no parameters and works value by value.

    Args:
        model: changed in place.
        inputs: a batch, for one forward pass that tells the order.
        exponent: of the gains, instead of a measured one.
        law: an explosion law measured before, instead of measuring it now.
        margin: k > 1 in the exponent k/c₂.
        how: "wrap" or "fold".
        include, exclude: name filters on the activations.
        generator: source of randomness of the measured law.
    """
    check_inputs(inputs)
    if exponent is not None and not (math.isfinite(exponent) and exponent >= 0):
        raise UsageError(f"exponent must be finite and not negative, got {exponent}", hint="0.4")
    if how not in {"wrap", "fold"}:
        raise UsageError(f"how must be 'wrap' or 'fold', got {how!r}")
    names = {id(module): name for name, module in unwrap(model).named_modules()}
    calls = _activation_calls(model, inputs)
    counts = Counter(id(activation) for activation, _ in calls)
    reasons = [
        _why_not(names[id(activation)], activation, norm, counts[id(activation)], how, include, exclude)
        for activation, norm in calls
    ]
    shaped = [activation for (activation, _), reason in zip(calls, reasons, strict=True) if reason is None]
    if not shaped:
        why = reasons[0] if reasons else "functional ones cannot be shaped from outside"
        raise UsageError(
            f"found no activation module to shape in {type(model).__name__}: {why}",
            hint="torch.nn.Tanh() in place of torch.tanh" if not reasons else "tune_batchnorm, or another name filter",
        )
    notes: list[str] = []
    if exponent is None:
        exponent, note = _choose_exponent(shaped, law, margin, generator)
        notes.append(note)
    changed: list[Change] = []
    with all_or_nothing(model), torch.no_grad():
        for (activation, norm), reason, gain in zip(calls, reasons, gains(len(calls), exponent), strict=True):
            if reason is None:
                changed.append(_shape(activation, norm if how == "fold" else None, gain, names))
    left = {names[id(call[0])]: reason for call, reason in zip(calls, reasons, strict=True) if reason is not None}
    untouched = tuple(Untouched(name, reason) for name, reason in left.items())
    return Changes("shape_activations", tuple(changed), untouched, tuple(notes), {"exponent": exponent})


shape_activations = on_copy(shape_activations_)


def _choose_exponent(
    activations: list[nn.Module], law: ExplosionLaw | None, margin: float, generator: torch.Generator | None
) -> tuple[float, str]:
    """margin/c₂ of the given law, or of the measured law of each kind of activation, the largest."""
    if law is not None:
        return law.exponent(margin), f"given law: {law}"
    kinds: dict[str, str | nn.Module] = {}
    for activation in activations:
        known = name_activation(activation)
        kinds.setdefault(known or repr(activation), known or activation)
    laws = {kind: explosion_law(function, generator=generator) for kind, function in kinds.items()}
    slowest = min(laws, key=lambda kind: laws[kind].c2)
    chosen = laws[slowest].exponent(margin)
    return chosen, f"exponent {chosen:.3g} = {margin:g}/c₂ from the law measured for {slowest}: {laws[slowest]}"


def _shape(activation: nn.Module, norm: nn.Module | None, gain: float, names: dict[int, str]) -> Change:
    """Give one activation its gain, through the norm that feeds it where one is given."""
    if norm is None:
        activation.register_forward_pre_hook(PreGain(gain))
        return Change(names[id(activation)], "gain", "1", f"{gain:.4g}")
    for part in (norm.weight, norm.bias):
        if isinstance(part, Tensor):
            part.mul_(gain)
    return Change(names[id(norm)], "scale and shift", "×1", f"×{gain:.4g}")


def _activation_calls(model: nn.Module, inputs: Inputs) -> list[tuple[nn.Module, nn.Module | None]]:
    """Activation calls in order, each with the affine norm whose output it takes directly, if any."""
    calls: list[tuple[nn.Module, nn.Module | None]] = []
    outputs: dict[int, nn.Module] = {}
    kept: list[Tensor] = []  # holds the outputs, so that an id is never reused within the pass

    def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if len(arguments) == 1 and isinstance(arguments[0], Tensor) and arguments[0].is_floating_point():
            calls.append((module, outputs.get(id(arguments[0]))))

    def after(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[id(output)] = module
            kept.append(output)

    handles = [m.register_forward_pre_hook(before) for m in model.modules() if is_activation(m)]
    handles += [m.register_forward_hook(after) for m in model.modules() if isinstance(m, AFFINE_NORMS)]
    with hooked(handles), undisturbed(model), torch.no_grad():
        call_model(model, inputs)
    with undisturbed(model):
        elementwise = {id(m) for m in {id(m): m for m, _ in calls}.values() if _is_elementwise(m)}
    return [(module, norm) for module, norm in calls if id(module) in elementwise]


def _is_elementwise(module: nn.Module) -> bool:
    """Whether a module maps value by value: torch's activations do, others are tried."""
    if type(module).__module__ == nn.ReLU.__module__:
        return True
    values = torch.linspace(-3.0, 3.0, 64).view(8, 8)
    try:
        with torch.no_grad():
            straight, turned = module(values.clone()), module(values.flip(0, 1))
    except Exception:  # whatever a module of the user's raises on another shape, it is then no activation
        return False
    return isinstance(straight, Tensor) and straight.shape == values.shape and torch.equal(straight.flip(0, 1), turned)


def _why_not(
    name: str,
    activation: nn.Module,
    norm: nn.Module | None,
    count: int,
    how: str,
    include: NameFilter,
    exclude: NameFilter,
) -> str | None:
    """Why an activation cannot be shaped, None where it can."""
    if left_out(name, activation, include, exclude):
        return "left out by the name filter"
    if isinstance(activation, nn.PReLU | nn.RReLU) or is_homogeneous(activation):
        return "it is positively homogeneous: a gain changes its scale, not its shape"
    if how == "wrap" and count > 1:
        return f"one module serves {count} layers, so it cannot have a gain for each; how='fold' can"
    if how == "fold":
        if norm is None or getattr(norm, "weight", None) is None:
            return "no affine norm feeds it directly, so the gain cannot be folded"
        if not all(part.requires_grad for part in norm.parameters(recurse=False)):
            return "the norm that feeds it is frozen (requires_grad is False)"
    return None
