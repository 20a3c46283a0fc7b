"""Every parameter of a network with its role, its siblings and the law of its entries."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sounding.probe.calls import named_modules, named_parameters
from sounding.probe.on_device import gather
from sounding.probe.parts import is_distributed
from sounding.reader.laws import survey_law
from sounding.theory.signal.description import Law

# A standard deviation of 16 384 entries is known to 0.6%; more of them would cost time and settle nothing.
SAMPLED = 16_384
SURE = 4.0  # standard errors
SLACK = 0.03  # what a law may be off by rounding of its constant, beside the sampling error
WEIGHTS = ("linear", "convolution", "recurrent", "embedding", "matrix")
TOKENS = re.compile(r"embed|token|pos|cls|query|latent", re.IGNORECASE)
SHIFT = re.compile(r"bias|beta|shift", re.IGNORECASE)
NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")


@dataclass(frozen=True)
class Parameter:
    """A parameter as the audit sees it."""

    name: str  # its full name; a tied one has its first
    layer: str  # the name of the module that holds it
    # "linear", "convolution", "recurrent", "embedding", "matrix", "norm weight", "norm bias", "bias", "token"
    # (positions and class tokens that a module holds itself) or "vector"
    kind: str
    fan_in: int  # how many inputs add up in one output, 0 where the kind has none
    fan_out: int  # how many outputs one input reaches, 0 where the kind has none
    tensor: Tensor = field(repr=False, compare=False)  # its values
    law: Law  # the law of its entries, from at most 16 384 of them
    low: float  # the least entry of all, NaN where one is NaN
    high: float  # the largest entry of all
    entries: int  # how many entries the law was taken from
    # these entries as the model holds them: all samples in float64 would take twice the memory of a small model
    sample: Tensor = field(repr=False, compare=False)
    uses: tuple[str, ...] = ()  # the names of the modules that hold this very parameter
    head: bool = False  # whether a tied embedding is also the network's output
    owner: type = nn.Module  # the class of the module that holds it

    @property
    def group(self) -> str:
        """The name with its numbers left open, which siblings in a repeated structure share."""
        return NUMBER.sub("*", self.name)

    @property
    def finite(self) -> bool:
        """Whether every entry is a number."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def constant(self) -> bool:
        """Whether all entries are equal."""
        return self.low == self.high

    @property
    def scale(self) -> float:
        """The root mean square of the entries."""
        return math.sqrt(self.law.second_moment)

    @property
    def error(self) -> float:
        """The relative standard error of the scale, from the fourth moment."""
        return math.sqrt(max(self.law.kurtosis - 1, 0.1) / (4 * max(self.entries, 1)))

    def fits(self, scale: float) -> bool:
        """Whether the scale is this one, up to chance and rounding."""
        return self.scale > 0 and abs(math.log(self.scale / scale)) < SURE * self.error + SLACK


@dataclass(frozen=True)
class Start:
    """A network's parameters as they stand before the first step, and what its configuration says of them."""

    parameters: tuple[Parameter, ...]
    config: Any = None

    @cached_property
    def groups(self) -> dict[tuple[str, str], list[Parameter]]:
        """Siblings by the name with its numbers left open, and the kind."""
        found: dict[tuple[str, str], list[Parameter]] = {}
        for parameter in self.parameters:
            found.setdefault((parameter.group, parameter.kind), []).append(parameter)
        return found

    def siblings(self, parameter: Parameter) -> list[Parameter]:
        """The other parameters at the same place of a repeated structure."""
        return [other for other in self.groups[parameter.group, parameter.kind] if other is not parameter]

    @cached_property
    def blocks(self) -> int:
        """How often the most repeated structure occurs, at least once."""
        counts = Counter(p.group for p in self.parameters if p.kind in ("linear", "convolution"))
        return max([*counts.values(), 1])

    @cached_property
    def last(self) -> Parameter | None:
        """The last matrix of the network, in the order in which it was written: mostly its output."""
        return next((p for p in reversed(self.parameters) if p.kind in ("linear", "convolution")), None)


def take_stock(root: nn.Module) -> Start:
    """Every floating-point parameter that has values, surveyed."""
    modules = dict(named_modules(root))
    owners: dict[int, dict[str, nn.Module]] = {}
    for name, module in [*modules.items(), *_repeated(modules)]:
        for held in module._parameters.values():
            if held is not None:
                owners.setdefault(id(held), {})[name] = module
    computed = dict(_computed_weights(modules))
    parts = tuple(f"{name.rpartition('.')[0]}.parametrizations.{name.rpartition('.')[2]}." for name in computed)
    named = [(name, tensor) for name, tensor in named_parameters(root) if not name.startswith(parts)]
    found = tuple(_survey_all([*named, *computed.items()] if computed else named, modules, owners))
    configs = (getattr(module, "config", None) for module in modules.values())
    return Start(found, next((config for config in configs if config is not None), None))


def _repeated(modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """A module that a list consists of, as in `[block] * 6`, and its parts, by the names of its further places."""
    for name, module in modules.items():
        members = list(module._modules.items()) if isinstance(module, nn.ModuleList | nn.Sequential) else []
        for key, member in members[1:] if len({id(member) for _, member in members}) == 1 else ():
            if member is not None:
                yield from member.named_modules(prefix=f"{name}.{key}" if name else key)


def _computed_weights(modules: dict[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Weights that a parametrization makes of others, as weight norm does; one that keeps a state (spectral norm, whose
    vectors move at every look) is left alone."""
    for layer, module in modules.items():
        held = getattr(module, "parametrizations", None) if isinstance(module, nn.Module) else None
        for key, part in held.items() if isinstance(held, nn.ModuleDict) else ():
            if not any(True for _ in part.buffers()) and not any(one.is_meta for one in part.parameters()):
                with torch.no_grad():
                    yield f"{layer}.{key}" if layer else key, getattr(module, key).detach()


def _survey_all(
    named: Sequence[tuple[str, Tensor]], modules: dict[str, nn.Module], owners: dict[int, dict[str, nn.Module]]
) -> Iterator[Parameter]:
    """Every parameter with values, with its role, fans, law and range."""
    held = [(name, parameter, tensor) for name, parameter in named if (tensor := _values(parameter)) is not None]
    norms = {type(module): module for module in modules.values() if _is_simple(module)}
    classes = {kind for kind, module in norms.items() if "Norm" in kind.__name__ or acts_as_norm(module)}
    entries = gather([sample_entries(tensor) for *_, tensor in held])
    ends = gather([end.reshape(1) for *_, tensor in held for end in torch.aminmax(tensor)])
    for index, (name, parameter, tensor) in enumerate(held):
        layer, _, key = name.rpartition(".")
        holders = owners.get(id(parameter), {})
        owner = modules.get(layer) or next(iter(holders.values()), None)
        kind = _kind(owner, key, tensor, normalizes=type(owner) in classes)
        fan_in, fan_out = _fans(owner, kind, tensor)
        low, high = (end.item() for end in ends[2 * index : 2 * index + 2])
        sample = entries[index]
        law = survey_law(tensor, entries=sample)
        head = kind == "embedding" and any(_is_linear(holder) for holder in holders.values())
        yield Parameter(
            name, layer, kind, fan_in, fan_out, tensor, law, low, high, sample.numel(), sample,
            uses=tuple(holders), head=head, owner=type(owner),
        )  # fmt: skip


def _values(parameter: Tensor) -> Tensor | None:
    """The entries of a parameter, of a distributed one those of this process; None where there are none to look at."""
    if is_lazy(parameter) or parameter.is_meta or not parameter.is_floating_point():
        return None
    tensor = parameter.detach()
    if is_distributed(tensor):
        whole: Any = tensor
        tensor = whole.to_local()  # one process looks at its own part, which has the same law
    return tensor if tensor.numel() and tensor.layout is torch.strided and tensor.element_size() > 1 else None


def sample_entries(tensor: Tensor) -> Tensor:
    """At most about 16 384 entries, spread over all rows and columns."""
    flat = tensor.reshape(-1)
    step = max(flat.numel() // SAMPLED, 1)
    row = tensor.shape[-1] if tensor.dim() else 1
    while step > 1 and math.gcd(step, row) != 1:  # else some columns would never be seen
        step += 1
    return flat[::step]


def _is_simple(module: nn.Module) -> bool:
    """Whether a module holds nothing but vectors, as norms do."""
    held = [one for one in module._parameters.values() if one is not None]
    return bool(held) and not module._modules and all(_is_vector(one) and not is_lazy(one) for one in held)


def _is_vector(tensor: Tensor) -> bool:
    return sum(size > 1 for size in tensor.shape) <= 1  # an embedding with a norm inside may be called by it


@torch.no_grad()
def acts_as_norm(module: nn.Module) -> bool:
    """Whether a module gives the same for three times what it is given, with scales of one and shifts of zero.

    That is what a norm is, whatever its class is called; features may stand on the last axis or on the second.
    """
    if type(module).__module__.startswith("torch.nn"):
        return False
    size = max(one.numel() for one in module._parameters.values() if one is not None)
    noise = torch.Generator().manual_seed(0)
    for shape in ((4, size), (4, 3, size), (4, size, 3, 3)) if size > 1 else ():
        given = torch.randn(shape, generator=noise)
        try:
            one = copy.deepcopy(module).float().cpu()
            for key, held in one._parameters.items():
                if held is not None:
                    held.fill_(0.0 if SHIFT.search(key) else 1.0)
            plain, tripled = (type(module).forward(one, factor * given) for factor in (1, 3))
            if plain.shape == given.shape and bool(plain.any()) and torch.allclose(plain, tripled, rtol=0.01):
                return True
        except Exception:  # whatever a module of the user's refuses: another shape may do
            continue
    return False


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) or hasattr(module, "out_features") or _is_transposed(module)


def _is_transposed(module: nn.Module | None) -> bool:
    """Whether a linear layer holds its weight as (inputs, outputs), as the Conv1D of GPT-2 does."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _kind(owner: nn.Module | None, key: str, tensor: Tensor, *, normalizes: bool) -> str:
    """The role of a parameter in its layer, in one word or two."""
    if normalizes:
        return "norm bias" if SHIFT.search(key) else "norm weight"
    if "bias" in key.lower():
        return "bias"
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if isinstance(owner, nn.RNNBase | nn.RNNCellBase):
        return "recurrent"
    if isinstance(owner, nn.modules.conv._ConvNd) and tensor.dim() > 2:
        return "convolution"
    if tensor.dim() == 2 and (_is_linear(owner) or isinstance(owner, nn.MultiheadAttention)):
        return "linear"
    if tensor.dim() > 1 and TOKENS.search(key):
        return "token"
    return "vector" if _is_vector(tensor) else "matrix"


def _fans(owner: nn.Module | None, kind: str, tensor: Tensor) -> tuple[int, int]:
    if kind in ("linear", "recurrent", "matrix") and tensor.dim() >= 2:
        outputs, inputs = tensor.shape[-2:]
        return (outputs, inputs) if _is_transposed(owner) else (inputs, outputs)
    if kind == "convolution":
        size = math.prod(tensor.shape[2:])
        groups = int(getattr(owner, "groups", 1))
        return tensor.shape[1] * size, tensor.shape[0] * size // max(groups, 1)
    return (tensor.shape[-1], tensor.shape[0]) if kind in ("embedding", "token") else (0, 0)
