"""A multilayer perceptron read off its modules as a list of steps, so that many can be run by batched products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sounding.models.initial import Elementwise
from sounding.models.mlp import Gain, Mlp, ResidualLayer
from sounding.models.norms import UncentredBatchNorm
from sounding.repair.norm_layers import ChannelBatchNorm, ChannelRMSNorm, NormalizedLinear
from sounding.repair.shaping import PreGain

ACTIVATIONS = (
    nn.ReLU, nn.Tanh, nn.Identity, nn.Sigmoid, nn.GELU, nn.SiLU, nn.SELU, nn.ELU, nn.Softplus, nn.LeakyReLU, nn.Mish,
    nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.Softsign, nn.LogSigmoid, Elementwise,
)  # fmt: skip
BATCH_NORMS = (nn.BatchNorm1d, ChannelBatchNorm, UncentredBatchNorm)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Residual(nn.Module):
    """x + branch(x): a block that training many networks as one can read."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        """The input plus what the branch makes of it."""
        total: Tensor = x + self.branch(x)
        return total


class NotReadable(Exception):
    """A module that is not one of the steps; the network can still be stacked, by vmap."""


@dataclass(frozen=True)
class Step:
    """One step of the forward pass; its numbers may differ between the networks of a stack."""

    kind: str  # linear, batch, uncentred, layer, rms, activation, scale, open or close
    tensors: dict[str, str] = field(default_factory=dict)  # weight, bias, mean, variance, tracked: names in the state
    numbers: dict[str, float] = field(default_factory=dict)  # eps, momentum, gain, strength, value
    function: Callable[[Tensor], Tensor] | None = None  # of an activation
    label: str = ""  # tells activations apart


def read_steps(network: nn.Module) -> list[Step]:
    """The forward pass of a network of nested Sequentials over rows of features.

    Raises:
        NotReadable: it has a module, a hook or a shared weight that is none of the steps.
    """
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    if len(names) != len(list(network.parameters())):  # the latter lists a shared one once
        raise NotReadable("a weight is used twice")
    return list(_read(network, ""))


def _read(module: nn.Module, name: str) -> Iterator[Step]:
    """The layers of a module as steps that batched products can take; raises NotReadable where there is another."""
    for hooks in HOOKS:
        if getattr(module, hooks) and not (hooks == "_forward_pre_hooks" and isinstance(module, ACTIVATIONS)):
            raise NotReadable(f"{name or type(module).__name__} has hooks")
    kind = type(module)
    if kind in (nn.Sequential, Mlp):
        for child, part in module.named_children():
            yield from _read(part, _join(name, child))
    elif kind is ResidualLayer:
        (child, first), *rest = module.named_children()
        yield Step("open")
        yield from _read(first, _join(name, child))
        yield Step("close", numbers={"strength": float(module.strength)})  # type: ignore[arg-type]
        for child, part in rest:
            yield from _read(part, _join(name, child))
    elif isinstance(module, Residual):
        yield Step("open")
        yield from _read(module.branch, _join(name, "branch"))
        yield Step("close", numbers={"strength": 1.0})
    elif kind in (nn.Linear, NormalizedLinear):
        yield Step("linear", _tensors(module, name, weight="weight", bias="bias"))
        if kind is NormalizedLinear:
            norm = module.norm
            assert isinstance(norm, nn.Module)
            yield from _read(norm, _join(name, "norm"))
    elif kind is Gain:
        yield Step("scale", numbers={"value": float(module.value)})  # type: ignore[arg-type]
    elif kind is nn.Flatten:
        if name not in ("0", "flatten"):
            raise NotReadable("only the input can be flattened")
    elif kind in ACTIVATIONS:
        yield _read_activation(module, name)
    else:
        yield _read_norm(module, name)


def _read_norm(module: nn.Module, name: str) -> Step:
    """The step of a normalization layer."""
    kind = type(module)
    if isinstance(module, BATCH_NORMS) and kind in BATCH_NORMS and module.momentum is not None:
        roles = {"mean": "running_mean", "variance": "running_var", "tracked": "num_batches_tracked"}
        tensors = _tensors(module, name, weight="weight", bias="bias", **roles)
        numbers = {"eps": module.eps, "momentum": module.momentum}
        return Step("uncentred" if kind is UncentredBatchNorm else "batch", tensors, numbers)
    found: Any = module
    rows = kind in (nn.LayerNorm, nn.RMSNorm) and len(found.normalized_shape) == 1
    if (kind is nn.LayerNorm and rows) or (kind is nn.GroupNorm and found.num_groups == 1):
        return Step("layer", _tensors(module, name, weight="weight", bias="bias"), {"eps": float(found.eps)})
    if (kind is nn.RMSNorm and rows) or kind is ChannelRMSNorm:
        dtype = next((weight.dtype for weight in module.parameters()), torch.get_default_dtype())
        eps = torch.finfo(dtype).eps if found.eps is None else found.eps  # torch's own choice, where none was made
        return Step("rms", _tensors(module, name, weight="weight"), {"eps": float(eps)})
    raise NotReadable(f"{name or kind.__name__} is a {kind.__name__}")


def _read_activation(module: nn.Module, name: str) -> Step:
    gain = 1.0
    for hook in module._forward_pre_hooks.values():
        if not isinstance(hook, PreGain):
            raise NotReadable(f"{name} has hooks")
        gain *= hook.gain  # several multiply
    # a hooked module would apply its gain once more, so its own forward method is what is called
    return Step("activation", numbers={"gain": gain}, function=module.forward, label=repr(module))


def _tensors(module: nn.Module, name: str, **roles: str) -> dict[str, str]:
    return {
        role: _join(name, attribute)
        for role, attribute in roles.items()
        if getattr(module, attribute, None) is not None
    }


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
