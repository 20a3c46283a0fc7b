"""Find in a module the plain stack that theory describes: linear map, optional batch norm, activation, repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sounding.activations import Activation, from_callable, resolve
from sounding.errors import SoundingError
from sounding.probe.calls import named_modules, named_parameters
from sounding.probe.parts import is_distributed
from sounding.probe.reading import LayerCall, Reading
from sounding.probe.state import DROPOUT
from sounding.probe.units import is_activation

SHORTEST = 3
TRANSPARENT = ("Identity", "Flatten", "Unflatten")
# what foreign modules compute, by class and settings: looking for the kinks of a function takes some 50 ms
_FUNCTIONS: dict[tuple[type[nn.Module], str], Activation | None] = {}


@dataclass(frozen=True)
class PlainLayer:
    """One layer of theory: the calls of its linear map and activation, and its batch norm if it has one."""

    linear: LayerCall
    weights: nn.Linear
    norm: nn.BatchNorm1d | None
    activation: Activation
    last: LayerCall


@dataclass(frozen=True)
class Stack:
    """Consecutive blocks with one activation and one kind of normalization."""

    blocks: tuple[PlainLayer, ...]

    @property
    def activation(self) -> Activation:
        """The activation of every block."""
        return self.blocks[0].activation

    @property
    def normalized(self) -> bool:
        """Whether every block has a batch norm between linear map and activation."""
        return self.blocks[0].norm is not None

    @property
    def width(self) -> int:
        """The smallest number of units of a block."""
        return min(block.weights.out_features for block in self.blocks)


def find_stack(model: nn.Module, reading: Reading) -> Stack | str:
    """The longest plain stack among the calls, or why there is none that theory describes."""
    if any(is_distributed(weight) for _, weight in named_parameters(model)):
        return "the weights lie in several processes, and theory reads them whole"
    modules: Mapping[str, nn.Module] = dict(named_modules(model))
    layers = reading.depth
    shortest = reading.settings.get("shortest_depth")
    if shortest is not None and shortest < layers:
        return f"there are ways around layers (the shortest passes {shortest} of {layers}); theory is of plain stacks"
    runs = _runs(modules, reading)
    best = max(runs, key=lambda run: len(run.blocks), default=Run((), ""))
    if len(best.blocks) < SHORTEST:
        why = next((run.ended for run in (best, *runs) if run.ended), "")
        return f"no {SHORTEST} consecutive blocks of Linear, BatchNorm1d or none, and one activation{why}"
    if best.blocks[0].activation.name == "identity" and not _sequential(modules, best.blocks):
        return "no activation modules between the linear layers; one applied as a function cannot be seen"
    return Stack(best.blocks)


@dataclass(frozen=True)
class Run:
    """Consecutive blocks that are alike, and in words what ended them; "" at the end of the network."""

    blocks: tuple[PlainLayer, ...]
    ended: str


def find_activation(module: nn.Module) -> Activation | None:
    """What a module computes on every element, None where it is no activation.

    Modules that theory has no name for (Mish, Hardswish, ReLU6, Softsign, one of your own) are taken as functions.

    >>> find_activation(nn.LeakyReLU(0.2)).name, find_activation(nn.ReLU6()).kinks, find_activation(nn.Softmax(-1))
    ('leaky_relu:0.2', (0.0, 6.0), None)
    """
    known = name_activation(module)
    if known is not None:
        return resolve(known)
    if not is_activation(module) or list(module.parameters()) or module._modules:
        return None
    key = (type(module), repr(module))
    if key not in _FUNCTIONS:
        try:
            # called without its hooks; the name tells modules with different settings apart
            _FUNCTIONS[key] = from_callable(module.forward, name=repr(module).removesuffix("()"))
        except SoundingError:
            _FUNCTIONS[key] = None
    return _FUNCTIONS[key]


def name_activation(module: nn.Module) -> str | None:
    """The name under which theory knows a module's activation, None when it does not.

    >>> name_activation(nn.LeakyReLU(0.2)), name_activation(nn.GELU()), name_activation(nn.PReLU())
    ('leaky_relu:0.2', 'gelu', 'leaky_relu:0.25')
    """
    match module:
        case nn.PReLU():
            slopes = module.weight.detach()
            return f"leaky_relu:{float(slopes[0]):g}" if bool((slopes == slopes[0]).all()) else None
        case nn.LeakyReLU():
            return f"leaky_relu:{module.negative_slope:g}"
        case nn.ELU() if not isinstance(module, nn.CELU):
            return f"elu:{module.alpha:g}"
        case nn.GELU():
            return "gelu" if module.approximate == "none" else "gelu_tanh"
        case nn.Softplus() if module.beta != 1:
            return None
        case nn.Hardtanh() if (module.min_val, module.max_val) != (-1.0, 1.0):
            return None
    known: dict[type[nn.Module], str] = {
        nn.ReLU: "relu",
        nn.Tanh: "tanh",
        nn.Sigmoid: "sigmoid",
        nn.Softplus: "softplus",
        nn.SiLU: "silu",
        nn.SELU: "selu",
        nn.Hardtanh: "hardtanh",
    }
    return known.get(type(module))


def _runs(modules: Mapping[str, nn.Module], reading: Reading) -> list[Run]:
    """Maximal runs of alike blocks, each with what ended it."""
    runs: list[Run] = []
    blocks: list[PlainLayer] = []
    calls = [call for call in reading.calls if not _transparent(_module(modules, call), call, reading)]
    index = 0
    while index < len(calls):
        block, length = _block(modules, calls[index:])
        ended = ""
        if block is None:
            # a Linear is stopped by what follows it
            stopped = calls[min(index + length, len(calls)) - 1]
            ended = f" ({stopped.kind or 'an unknown module'} {stopped.name!r} is none of these)"
        elif "#" in block.linear.name:
            ended = (
                f" ({block.linear.name.partition('#')[0]!r} is called again, and theory has new weights in every layer)"
            )
        elif blocks and not _alike(blocks[0], block):
            runs.append(Run(tuple(blocks), f" ({_difference(blocks[0], block)} at {block.linear.name!r})"))
            blocks = []
        if ended:
            runs.append(Run(tuple(blocks), ended))
            blocks = []
        elif block is not None:
            blocks.append(block)
        index += length
    return [*runs, Run(tuple(blocks), "")]


def _difference(one: PlainLayer, other: PlainLayer) -> str:
    """How two blocks that follow each other are not alike."""
    if (one.norm is None) != (other.norm is None):
        return "batch norm begins" if one.norm is None else "batch norm ends"
    return f"the activation changes from {one.activation.name} to {other.activation.name}"


def _block(modules: Mapping[str, nn.Module], calls: list[LayerCall]) -> tuple[PlainLayer | None, int]:
    """The block that starts at the first call and how many calls it takes; or None, up to the call that prevents it."""
    first = calls[0]
    linear = _module(modules, first)
    if not isinstance(linear, nn.Linear) or (first.features and first.features != linear.out_features):
        return None, 1
    if not isinstance(getattr(linear, "weight", None), Tensor):
        return None, 1  # a subclass that keeps what it multiplies by under another name
    following: list[Any] = [_module(modules, call) for call in calls[1:3]] + [None, None]
    norm = following[0] if isinstance(following[0], nn.BatchNorm1d) else None
    taken = 2 if norm is not None else 1
    candidate = following[taken - 1]
    activation = find_activation(candidate) if candidate is not None else None
    if activation is None and (candidate is None or isinstance(candidate, nn.Linear)):
        # A bare linear layer: the last one of a network, or a block of a linear network.
        return PlainLayer(first, linear, norm, resolve("identity"), calls[taken - 1]), taken
    if activation is None:
        return None, taken + 1
    return PlainLayer(first, linear, norm, activation, calls[taken]), taken + 1


def _module(modules: Mapping[str, nn.Module], call: LayerCall) -> nn.Module | None:
    """The module of a call; the second call of a module is named with "#2"."""
    return modules.get(call.name.partition("#")[0])


def _alike(one: PlainLayer, other: PlainLayer) -> bool:
    """Whether two blocks have one activation and both a batch norm or neither."""
    return one.activation.name == other.activation.name and (one.norm is None) == (other.norm is None)


def _transparent(module: nn.Module | None, call: LayerCall, reading: Reading) -> bool:
    """Whether a call passes its input on: a reshaping, or dropout that was off when it was measured."""
    if isinstance(module, DROPOUT):
        on = reading.settings.get("dropout", module.training) and reading.settings.get("mode") != "eval"
        return module.p == 0 or not on
    return call.kind in TRANSPARENT


def _sequential(modules: Mapping[str, nn.Module], blocks: tuple[PlainLayer, ...]) -> bool:
    """Whether every container above the blocks is a Sequential, which applies nothing of its own."""
    parents = {""}
    for block in blocks:
        parts = block.linear.name.split(".")
        parents |= {".".join(parts[:end]) for end in range(len(parts))}
    return all(isinstance(modules.get(parent), nn.Sequential) for parent in parents)
