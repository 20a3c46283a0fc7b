"""Activation shaping: per-layer gains that pull activations towards linear as depth grows (thesis2024, 6.4 and C.5)."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.repair.changes import Change, Changes, Untouched
from sounding.repair.layers import BATCH_NORMS, NameFilter, matches
from sounding.repair.passes import Inputs, call_model, check_inputs, hooked
from sounding.repair.snapshot import all_or_nothing, undisturbed

# thesis2024 figure 6.5 and the released program
PUBLISHED_EXPONENT = 0.4
SHAPABLE = (
    nn.Tanh, nn.Hardtanh, nn.Softsign, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Softplus,
    nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Hardswish, nn.Tanhshrink,
)  # fmt: skip
HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.PReLU)
AFFINE_NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm)


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
    exponent: float = PUBLISHED_EXPONENT,
    how: Literal["wrap", "fold"] = "wrap",
    include: NameFilter = None,
    exclude: NameFilter = None,
) -> Changes:
    """Replace σ(x) by σ(α_ℓ x) with α_ℓ = ℓ^(−exponent), ℓ counting activations in the order in which they run.

    With batch norm and Haar weights the gradient's growth over layer ℓ is about c₁ α_ℓ^c₂; an exponent above 1/c₂ makes
    the sum over layers finite, so that gradients stay bounded at any depth (thesis2024, C.5). `explosion_law` measures
    c₁ and c₂. "wrap" multiplies the activation's input; "fold" multiplies scale and shift of the affine norm that feeds
    the activation, which computes the same function. Neither adds or renames an entry of the state_dict. A positively
    homogeneous activation (ReLU) is only rescaled by a gain, which the next norm undoes: it is left alone.

    Args:
        model: changed in place.
        inputs: a batch, for one forward pass that tells the order.
        exponent: of the gains; 0.4 in thesis2024 figure 6.5.
        how: "wrap" or "fold".
        include, exclude: name filters on the activations.
    """
    check_inputs(inputs)
    if not (math.isfinite(exponent) and exponent >= 0):
        raise UsageError(f"exponent must be finite and not negative, got {exponent}", hint=f"{PUBLISHED_EXPONENT}")
    if how not in {"wrap", "fold"}:
        raise UsageError(f"how must be 'wrap' or 'fold', got {how!r}")
    names = {id(module): name for name, module in model.named_modules()}
    calls = _activation_calls(model, inputs)
    if not calls:
        raise UsageError(
            f"found no activation module in {type(model).__name__}: functional ones cannot be shaped from outside",
            hint="torch.nn.Tanh() in place of torch.tanh",
        )
    counts: dict[int, int] = {}
    for activation, _ in calls:
        counts[id(activation)] = counts.get(id(activation), 0) + 1
    changed: list[Change] = []
    untouched: list[Untouched] = []
    with all_or_nothing(model), torch.no_grad():
        for (activation, norm), gain in zip(calls, gains(len(calls), exponent), strict=True):
            name = names[id(activation)]
            reason = _why_not(name, activation, norm, counts, how, include, exclude)
            if reason is not None:
                untouched.append(Untouched(name, reason))
            elif how == "fold" and norm is not None:
                norm.weight.mul_(gain)  # type: ignore[operator]
                if isinstance(norm.bias, Tensor):
                    norm.bias.mul_(gain)
                changed.append(Change(names[id(norm)], "scale and shift", "×1", f"×{gain:.4g}"))
            else:
                activation.register_forward_pre_hook(PreGain(gain))
                changed.append(Change(name, "gain", "1", f"{gain:.4g}"))
    return Changes("shape_activations", tuple(changed), tuple(untouched))


def shape_activations(
    model: nn.Module,
    inputs: Inputs,
    *,
    exponent: float = PUBLISHED_EXPONENT,
    how: Literal["wrap", "fold"] = "wrap",
    include: NameFilter = None,
    exclude: NameFilter = None,
) -> nn.Module:
    """A copy of the model with shaped activations; see `shape_activations_`."""
    changed = copy.deepcopy(model)
    shape_activations_(changed, inputs, exponent=exponent, how=how, include=include, exclude=exclude)
    return changed


def _activation_calls(model: nn.Module, inputs: Inputs) -> list[tuple[nn.Module, nn.Module | None]]:
    """Activation calls in order, each with the affine norm whose output it takes directly, if any."""
    calls: list[tuple[nn.Module, nn.Module | None]] = []
    outputs: dict[int, nn.Module] = {}
    kept: list[Tensor] = []  # holds the outputs, so that an id is never reused within the pass

    def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        calls.append((module, outputs.get(id(arguments[0])) if arguments else None))

    def after(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[id(output)] = module
            kept.append(output)

    handles = [m.register_forward_pre_hook(before) for m in model.modules() if isinstance(m, SHAPABLE)]
    handles += [m.register_forward_hook(after) for m in model.modules() if isinstance(m, AFFINE_NORMS)]
    with hooked(handles), undisturbed(model), torch.no_grad():
        call_model(model, inputs)
    return calls


def _why_not(
    name: str,
    activation: nn.Module,
    norm: nn.Module | None,
    counts: dict[int, int],
    how: str,
    include: NameFilter,
    exclude: NameFilter,
) -> str | None:
    if (include is not None and not matches(name, activation, include)) or matches(name, activation, exclude):
        return "left out by the name filter"
    if isinstance(activation, HOMOGENEOUS):
        return "it is positively homogeneous: a gain changes its scale, not its shape"
    if how == "fold":
        if norm is None or getattr(norm, "weight", None) is None:
            return "no affine norm feeds it directly, so the gain cannot be folded"
        return None
    if counts[id(activation)] > 1:
        return f"one module serves {counts[id(activation)]} layers, so it cannot have a gain for each; how='fold' can"
    return None
