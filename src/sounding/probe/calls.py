"""What is remembered of a pass: one small record per module call, never an activation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from sounding.errors import UsageError
from sounding.probe.gathered import class_of, gathered_weights
from sounding.probe.late import read_back
from sounding.probe.moments import Moments, Tier
from sounding.probe.parts import WHOLE, Place
from sounding.probe.state import unwrap
from sounding.probe.units import NON_NEGATIVE, bounds_of, is_activation

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
PARAMETRIZATIONS = "parametrizations"
PACKED = "_packed_params"  # where a quantized layer keeps its weight: a child that is never called
ROOT = "model"  # the name of a model that is itself a leaf


@dataclass(slots=True, eq=False)
class Spec:
    """What is known of a module before it is called."""

    name: str  # its qualified name, without the wrappers of torch.compile and data parallelism
    module: nn.Module
    kind: str  # the name of its class
    leaf: bool  # whether it has no children; other modules are measured when they hold parameters of their own
    shown: bool  # whether the filters let it through
    weighs: bool  # whether it multiplies by a weight (a parameter of two or more axes, no lookup): one layer of depth
    activation: bool
    non_negative: bool
    bounds: tuple[float, float] | None
    axis: int | None
    channels_first: bool
    lazy: bool

    def settle(self) -> None:
        """Once a lazy module has been called it has a class and weights to speak of."""
        self.kind, self.weighs, self.lazy = class_of(self.module).__name__, multiplies(self.module), False


@dataclass(slots=True)
class OpenCall:
    """One call of a module in one pass; `gradient` is ln‖∂L/∂output‖, `same_as` an earlier call of the same output.

    Where other processes hold parts of the output, `place` says which, `gram` holds the inner products of this part
    until the parts are joined, and `notes` say what could not be.
    """

    spec: Spec
    name: str
    values: dict[str, float] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    features: int = 0
    positions: int = 1
    hooked: bool = False
    gradient: float | None = None
    same_as: OpenCall | None = None
    reason: str | None = None
    extras: tuple[str, ...] = ()
    place: Place = WHOLE
    gram: Tensor | None = None
    dtype: torch.dtype = torch.float32
    notes: tuple[str, ...] = ()
    LATE: ClassVar = ("gradient",)

    def spoil(self) -> None:
        """Note that the output turned out not to be finite: nothing else that was read off it counts."""
        self.reason = "its output is not finite"
        for measure in ("dead_fraction", "saturated_fraction", "token_participation_ratio"):
            self.values.pop(measure, None)


@dataclass
class Pass:
    """One forward pass (and its backward pass) of the watched model."""

    tier: Tier
    moments: Moments
    batch_size: int | None = None
    samples: int = 0
    calls: list[OpenCall] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    split: set[str] = field(default_factory=set)
    gaps: dict[str, str] = field(default_factory=dict)
    alignment: float | str | None = None
    last: tuple[weakref.ref[Tensor], int, OpenCall] | None = None
    input: dict[str, float] = field(default_factory=dict)
    input_gradient: float | None = None
    input_reason: str | None = None
    input_features: int = 0
    shortest: int | None = None
    training: bool = True
    entered: dict[str, int] = field(default_factory=dict)
    LATE: ClassVar = ("input_gradient", "alignment")

    def read_back(self) -> None:
        """Ask the device for the numbers that it was told to compute."""
        read_back([self, self.weights, self.input, *self.calls, *(call.values for call in self.calls)])

    def open(self, spec: Spec) -> OpenCall:
        """A new record, named with "#2" for the second call of the same module."""
        count = self.counts[spec.name] = self.counts.get(spec.name, 0) + 1
        call = OpenCall(spec, spec.name if count == 1 else f"{spec.name}#{count}")
        self.calls.append(call)
        return call


def survey(
    root: nn.Module, *, only: str | Sequence[str] | None, types: type[nn.Module] | Sequence[type[nn.Module]] | None
) -> list[Spec]:
    """The modules to hook: leaves, and what holds parameters of its own; no wrappers and no parametrizations."""
    patterns = () if only is None else (only,) if isinstance(only, str) else tuple(only)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise UsageError(f"expected only= a name, a pattern or several, got {only!r}", hint="only='features.*'")
    classes = () if types is None else (types,) if isinstance(types, type) else tuple(types)
    if not all(isinstance(kind, type) for kind in classes):
        raise UsageError(f"expected types= a module class or several, got {types!r}", hint="types=nn.Linear")
    specs: list[Spec] = []
    known: dict[tuple[type[nn.Module], bool, bool], _Traits] = {}
    for full, module in named_modules(root):
        children, held = module._modules, module._parameters
        leaf = not children or is_opaque(module)
        if not (leaf or held or _lists(module)):
            continue
        alike = (type(module), not children, not held)
        traits = known.get(alike)
        if traits is None:
            traits = known[alike] = _traits(module)
        if traits.container:
            continue
        name = full or ROOT
        shown = (not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)) and (
            not classes or isinstance(module, classes)
        )
        specs.append(_spec(name, module, traits, leaf=leaf, shown=shown))
    if (patterns or classes) and not any(spec.shown for spec in specs):
        raise UsageError(
            f"no module of the model matches the filter (only={only!r}, types={types!r})",
            hint=f"a name such as {specs[0].name!r}, or a pattern such as 'features.*'" if specs else None,
        )
    return specs


def is_opaque(module: nn.Module) -> bool:
    """Whether its children, if any, are not called in Python: scripts, layers of a parametrized or packed weight."""
    return isinstance(module, torch.jit.ScriptModule) or list(module._modules) in ([PARAMETRIZATIONS], [PACKED])


def named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module once, with its name as if nothing were compiled, wrapped or parametrized; nothing inside scripts."""
    found: dict[int, tuple[str, nn.Module]] = {}
    stack: list[tuple[str, nn.Module]] = [("", root)]
    while stack:
        name, module = stack.pop()
        if id(module) in found:
            continue
        children = module._modules
        if not children:
            found[id(module)] = (name, module)
            continue
        inner = unwrap(module)
        if inner is not module:
            stack.append((name, inner))
            continue
        found[id(module)] = (name, module)
        if not is_opaque(module):
            prefix = f"{name}." if name else ""
            stack.extend(  # the last child first, so that the first is popped next, as torch orders modules
                (prefix + key, child)
                for key, child in reversed(children.items())
                if child is not None and key != PARAMETRIZATIONS
            )
    return list(found.values())


def named_parameters(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter once (a tied one under its first name), named like its module in `named_modules`."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    modules = named_modules(root)
    sharded = gathered_weights([module for _, module in modules])
    for prefix, module in modules:
        if not module._parameters and not module._modules:
            continue
        scripted = isinstance(module, torch.jit.ScriptModule)
        held = list(module.named_parameters()) if scripted else list(module._parameters.items())
        if not scripted and PARAMETRIZATIONS in module._modules:
            prefixed = module.get_submodule(PARAMETRIZATIONS).named_parameters(prefix=PARAMETRIZATIONS)
            held.extend(prefixed)
        for key, parameter in held:
            if parameter is not None:
                parameter = sharded.get(id(parameter), parameter)
                found.setdefault(id(parameter), (f"{prefix}.{key}" if prefix else key, parameter))
    return list(found.values())


class _Traits(NamedTuple):
    """What the class of a module decides, and whether it holds children and parameters."""

    container: bool
    kind: str
    scripted: bool
    activation: bool
    non_negative: bool
    bounded: bool
    batch_first: bool | None
    channels_first: bool
    lazy: bool


def _traits(module: nn.Module) -> _Traits:
    """What all modules of a class have in common."""
    kind = class_of(module).__name__
    return _Traits(
        container=isinstance(module, CONTAINERS),
        kind=kind,
        scripted=isinstance(module, torch.jit.ScriptModule),
        activation=is_activation(module),
        non_negative=isinstance(module, NON_NEGATIVE),
        bounded=bounds_of(module) is not None,
        batch_first=getattr(type(module), "batch_first", None),
        channels_first="1d" in kind,
        lazy=isinstance(module, LazyModuleMixin),
    )


def _spec(name: str, module: nn.Module, traits: _Traits, *, leaf: bool, shown: bool) -> Spec:
    """The record of one module: what its class says, and what is its own."""
    _, kind, scripted, activation, non_negative, bounded, batch_first, channels_first, lazy = traits
    batch_first = module.__dict__.get("batch_first", batch_first)
    return Spec(
        name,
        module,
        getattr(module, "original_name", kind) if scripted else kind,
        leaf,
        shown,
        multiplies(module),
        activation,
        non_negative,
        bounds_of(module) if bounded else None,
        None if batch_first is None else int(not batch_first),
        channels_first,
        lazy,
    )


def multiplies(module: nn.Module) -> bool:
    """Whether it multiplies by a weight: it holds a parameter of two or more axes and does not just look it up.

    A parameter of one row, such as a class token or a bias for experts, is a vector unless a linear map or a
    convolution holds it.
    """
    if not module._modules:
        for weight in module._parameters.values():
            if weight is not None and not is_lazy(weight) and _is_matrix(weight, module):
                return not isinstance(module, LOOKUPS)
        return False
    if PACKED in module._modules:
        return True
    return not isinstance(module, LOOKUPS) and any(_is_matrix(weight, module) for weight in _own_parameters(module))


def _is_matrix(weight: nn.Parameter, module: nn.Module) -> bool:
    if weight.dim() < 2 or isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.Bilinear):
        return weight.dim() > 1
    return sum(size > 1 for size in weight.shape) > 1


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters held directly, in a list, by a parametrization, or by children that are never called (scripts)."""
    opaque = is_opaque(module) or isinstance(module, nn.MultiheadAttention)
    listed = [weight for child in _lists(module) for weight in child.parameters()]
    return [weight for weight in (*module.parameters(recurse=opaque), *listed) if not is_lazy(weight)]


def _lists(module: nn.Module) -> list[nn.Module]:
    """Children that only hold parameters for it, and are never called."""
    return [child for child in module._modules.values() if isinstance(child, nn.ParameterList | nn.ParameterDict)]
