"""Find in a module the plain stack that theory describes: linear map, optional batch norm, activation, repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from sounding.probe.calls import named_modules, named_parameters
from sounding.probe.parts import is_distributed
from sounding.probe.reading import Call, Reading

SHORTEST = 3
TRANSPARENT = ("Identity", "Flatten", "Unflatten")


@dataclass(frozen=True)
class Block:
    """One layer of theory: the calls of its linear map and activation, and its batch norm if it has one."""

    linear: Call
    weights: nn.Linear
    norm: nn.BatchNorm1d | None
    activation: str
    last: Call


@dataclass(frozen=True)
class Stack:
    """Consecutive blocks with one activation and one kind of normalization."""

    blocks: tuple[Block, ...]

    @property
    def activation(self) -> str:
        """The name of the activation, as `sounding.activations.resolve` knows it."""
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
    runs, obstacle = _runs(modules, reading)
    best = max(runs, key=len, default=[])
    if len(best) < SHORTEST:
        return f"no {SHORTEST} consecutive blocks of Linear, BatchNorm1d or none, and one activation{obstacle}"
    if best[0].activation == "identity" and not _sequential(modules, best):
        return "no activation modules between the linear layers; one applied as a function cannot be seen"
    return Stack(tuple(best))


def name_activation(module: nn.Module) -> str | None:
    """The name under which theory knows a module's activation, None when it does not.

    >>> name_activation(nn.LeakyReLU(0.2)), name_activation(nn.GELU()), name_activation(nn.PReLU())
    ('leaky_relu:0.2', 'gelu', None)
    """
    match module:
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


def _runs(modules: Mapping[str, nn.Module], reading: Reading) -> tuple[list[list[Block]], str]:
    """Maximal runs of alike blocks, and the first module that theory does not know, for the message."""
    runs: list[list[Block]] = [[]]
    obstacle = ""
    calls = [call for call in reading.calls if not _transparent(_module(modules, call), call)]
    index = 0
    while index < len(calls):
        block, length = _block(modules, calls[index:])
        if block is None or "#" in block.linear.name:  # a second call shares its weights, which theory does not
            kind = calls[index].kind or "an unknown module"
            obstacle = obstacle or f" ({kind} {calls[index].name!r} is none of these)"
            runs.append([])
            index += 1
            continue
        if runs[-1] and not _alike(runs[-1][0], block):
            runs.append([])
        runs[-1].append(block)
        index += length
    return runs, obstacle


def _block(modules: Mapping[str, nn.Module], calls: list[Call]) -> tuple[Block | None, int]:
    """The block that starts at the first call, and how many calls it takes."""
    first = calls[0]
    linear = _module(modules, first)
    if not isinstance(linear, nn.Linear) or (first.features and first.features != linear.out_features):
        return None, 1
    following: list[Any] = [_module(modules, call) for call in calls[1:3]] + [None, None]
    norm = following[0] if isinstance(following[0], nn.BatchNorm1d) else None
    taken = 2 if norm is not None else 1
    candidate = following[taken - 1]
    activation = name_activation(candidate) if candidate is not None else None
    if activation is None and (candidate is None or isinstance(candidate, nn.Linear)):
        # A bare linear layer: the last one of a network, or a block of a linear network.
        return Block(first, linear, norm, "identity", calls[taken - 1]), taken
    if activation is None:
        return None, 1
    return Block(first, linear, norm, activation, calls[taken]), taken + 1


def _module(modules: Mapping[str, nn.Module], call: Call) -> nn.Module | None:
    """The module of a call; the second call of a module is named with "#2"."""
    return modules.get(call.name.partition("#")[0])


def _alike(one: Block, other: Block) -> bool:
    return one.activation == other.activation and (one.norm is None) == (other.norm is None)


def _transparent(module: nn.Module | None, call: Call) -> bool:
    if isinstance(module, nn.Dropout):
        return module.p == 0
    return call.kind in TRANSPARENT


def _sequential(modules: Mapping[str, nn.Module], blocks: list[Block]) -> bool:
    """Whether every container above the blocks is a Sequential, which applies nothing of its own."""
    parents = {""}
    for block in blocks:
        parts = block.linear.name.split(".")
        parents |= {".".join(parts[:end]) for end in range(len(parts))}
    return all(isinstance(modules.get(parent), nn.Sequential) for parent in parents)
