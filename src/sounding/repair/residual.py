"""Cures for residual networks: branches that start at zero, and branches that shrink with the depth of the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.probe.calls import named_modules, named_parameters
from sounding.probe.state import unwrap
from sounding.repair.branches import Branch, find_branches
from sounding.repair.changes import Change, Untouched
from sounding.repair.cure import Steps, cure
from sounding.repair.layers import BATCH_NORMS, FROZEN, NameFilter, left_out, rms, sort_out, width_of
from sounding.repair.passes import Inputs
from sounding.start.laws import name_law
from sounding.start.parameters import take_stock

Rule = Literal["sqrt", "deepnorm", "layerscale", "completep"]
# rule → the factor at the start, by the number of branches, two a block, and the number of blocks of the base
RULES: dict[Rule, Callable[[int, int], float]] = {
    "sqrt": lambda count, _: count**-0.5,
    "deepnorm": lambda count, _: count**-0.25,
    "layerscale": lambda count, _: 0.1 if count <= 36 else 1e-5 if count <= 48 else 1e-6,
    "completep": lambda count, base: min(1.0, 2 * base / count),  # a network shallower than the base stays as it is
}
SCALE = "branch_scale"  # the attribute under which a layer keeps what its output is multiplied by
COMPUTED = ("parametrizations.", "weight_g", "weight_v", "weight_orig")


@cure
def zero_residual_(
    model: nn.Module, inputs: Inputs, *, include: NameFilter = None, exclude: NameFilter = None
) -> Steps:
    """Zero the end of every residual branch, so that each block starts as the identity.

    A branch that ends in an affine batch norm has that norm's scale and shift zeroed (Goyal et al. 2017). Any other has
    its last weight zeroed and, where nothing normalizes inside of it, its other weights multiplied by L^(−1/(2m−2)),
    with L branches of m weight layers (Fixup, Zhang et al. 2019).

    Args:
        inputs: a batch, for the pass that shows where the branches are.
        include, exclude: name filters on the layers that write to the stream.
    """
    held = _Held(model)
    branches, untouched = _choose(held, find_branches(model, inputs), include, exclude)
    for branch in branches:
        normed = branch.behind and isinstance(held.owner(branch.behind[0]), BATCH_NORMS)
        end = branch.behind if normed else branch.writers
        what = "scale of the last norm" if normed else "last weight"
        before = f"rms {rms(held.parameters[end[0]]):.3g}"
        for name in end:
            held.parameters[name].zero_()
        factor = 1.0
        if branch.inner and not branch.normalized:
            factor = len(branches) ** (-1 / (2 * len(branch.inner)))  # L^(−1/(2m−2)): inner are all m but the last
            for name in branch.inner:
                held.parameters[name].mul_(factor)
        yield Change(branch.name, what, before, "0" if factor == 1 else f"0, others ×{factor:.3g}")
    yield from untouched


@cure
def scale_branches_(
    model: nn.Module,
    inputs: Inputs,
    *,
    rule: Rule = "sqrt",
    value: float | None = None,
    base: int = 2,
    include: NameFilter = None,
    exclude: NameFilter = None,
) -> Steps:
    """Make residual branches smaller the more of them there are; N is their number, twice the blocks of a transformer.

    - "sqrt": the weights that write to the stream, times 1/√N (GPT-2). The stream's variance then does not grow with
      the depth. Nothing else changes.
    - "deepnorm": every branch is multiplied by N^(−1/4), and the weights that carry it (values and output of attention,
      both of the perceptron) by (4N)^(−1/4) (Wang et al. 2022). Behind a norm after the sum, x + f/α is their αx + f.
    - "layerscale": a trainable factor for every feature of a branch, at the start 0.1 up to 18 blocks, 1e-5 up to 24,
      1e-6 beyond (Touvron et al. 2021).
    - "completep": every branch is multiplied by base/(N/2), so that one learning rate serves all depths (Dey et al.
      2025, α = 1). `base` is the number of blocks at which the rate was tuned.

    Args:
        inputs: a batch, for the pass that shows where the branches are.
        rule: one of the four.
        value: the factor at the start in place of the rule's own.
        base: of "completep".
        include, exclude: name filters on the layers that write to the stream.
    """
    if rule not in RULES:
        raise UsageError(f"expected rule to be one of {', '.join(RULES)}, got {rule!r}")
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UsageError(f"expected a positive value, got {value}", hint="0.1")
    if base < 1:
        raise UsageError(f"expected base to be a number of blocks, got {base}", hint="2")
    held = _Held(model)
    found = find_branches(model, inputs)
    branches, untouched = _choose(held, found, include, exclude)
    factor = RULES[rule](len(found), base) if value is None else value
    start = take_stock(unwrap(model)) if rule == "sqrt" else None
    laws = {one.name: name_law(one, start) for one in start.parameters} if start is not None else {}
    for branch in branches:
        yield _scale(held, branch, rule, factor, laws, shrunk=(4 * len(found)) ** -0.25)
    yield from untouched
    yield from _notes(rule, len(found), base)
    yield {"rule": rule}


def multiply_output(module: nn.Module, _arguments: Any, output: Any) -> Any:
    """The hook of a scaled branch: what a layer gives out, times its `branch_scale`."""
    scale: Any = getattr(module, SCALE)
    if isinstance(output, tuple):
        return (output[0] * scale, *output[1:])  # attention gives its weights beside its output
    if isinstance(scale, Tensor) and isinstance(module, nn.modules.conv._ConvNd | nn.modules.batchnorm._BatchNorm):
        scale = scale.view(-1, *[1] * (output.dim() - 2))  # axis 1 holds the channels
    return output * scale


class _Held:
    """A model's parameters and modules by name."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(named_parameters(unwrap(model)))
        self.modules = dict(named_modules(unwrap(model)))

    def owner(self, name: str) -> nn.Module | None:
        """The module that holds a parameter."""
        return self.modules.get(name.rpartition(".")[0])

    def scaled_module(self, name: str) -> nn.Module | str:
        """The module whose output is the branch, or why there is none."""
        layer = name.rpartition(".")[0]
        # its output projection is called as a function, so no hook of it runs
        above = self.modules.get(layer.rpartition(".")[0])
        module = above if isinstance(above, nn.MultiheadAttention) else self.modules.get(layer)
        if module is None or (not isinstance(module, nn.MultiheadAttention) and list(module.children())):
            return f"{name} is held by a module that does more than end the branch"
        if hasattr(module, SCALE):
            return "its branch is scaled already"
        return module


def _choose(
    held: _Held, branches: tuple[Branch, ...], include: NameFilter, exclude: NameFilter
) -> tuple[list[Branch], list[Untouched]]:
    """The branches that a cure may change, and the others with the reason."""

    def why(_: str, branch: Branch) -> str | None:
        filtered = left_out(branch.name, held.owner(branch.writers[0]) or nn.Identity(), include, exclude)
        if filtered is not None:
            return filtered
        own = [*branch.writers, *branch.behind]
        if any(word in name for name in own for word in COMPUTED):
            return "its weight is computed by a parametrization; remove it first"
        return None if all(held.parameters[name].requires_grad for name in own) else FROZEN

    chosen, untouched = sort_out([(one.name, one) for one in branches], why)
    if not chosen:
        raise UsageError(
            f"expected a residual branch to change, got none of {len(branches)} that may be "
            f"({untouched[0].name}: {untouched[0].reason})",
            hint="another name filter, or unfreezing a layer",
        )
    return [branch for _, branch in chosen], untouched


def _notes(rule: Rule, count: int, base: int) -> tuple[str, ...]:
    if rule != "completep":
        return (f"{count} branches",)
    deeper = max(1.0, count / 2 / base)
    return (f"{count} branches, {deeper:.3g} times the base of {base} blocks",
            f"divide the eps of AdamW by {deeper:.3g} for the blocks; the learning rate stays")  # fmt: skip


def _scale(
    held: _Held, branch: Branch, rule: Rule, factor: float, laws: Mapping[str, str], *, shrunk: float
) -> Change | Untouched:
    """Scale one branch by the rule; returns what changed, or why nothing did."""
    end = branch.end
    size = rms(held.parameters[end[0]])
    if rule == "sqrt":
        law = laws.get(end[0], "")
        # a vector behind the branch that is as small as the factor does the same already
        if law.endswith(("√(2L)", "√L")) or (branch.behind and size <= 1.5 * factor):
            return Untouched(branch.name, f"it is scaled by depth already ({law or f'{end[0]} is {size:.3g}'})")
        for name in end:
            held.parameters[name].mul_(factor)
        return Change(branch.name, "branch", f"rms {size:.3g} of {end[0]}", f"×{factor:.3g}")
    if branch.behind and isinstance(held.scaled_module(end[0]), str):  # a vector of the block itself, a layer scale
        if rule == "layerscale":
            return Untouched(branch.name, f"it has a factor for every feature already ({end[0]})")
        end = branch.writers  # which the vector multiplies
    modules = [held.scaled_module(name) for name in end if "bias" not in name]
    refused = next((module for module in modules if isinstance(module, str)), None)
    if refused is not None:
        return Untouched(branch.name, refused)
    for module in dict.fromkeys(module for module in modules if isinstance(module, nn.Module)):
        scale: Any = factor
        if rule == "layerscale":
            scale = nn.Parameter(held.parameters[end[0]].new_full((width_of(module),), factor))
        setattr(module, SCALE, scale)
        module.register_forward_hook(multiply_output)
    carrying = [*branch.writers[:1], *branch.values] if rule == "deepnorm" else []
    for name in carrying:
        held.parameters[name].mul_(shrunk)
    also = f", {', '.join(carrying)} ×{shrunk:.3g}" if carrying else ""
    return Change(branch.name, "branch", "×1", f"×{factor:.3g}{', trainable' * (rule == 'layerscale')}{also}")
