"""Any architecture as one: torch.func's functional call under vmap, with buffers and differing numbers stacked."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from sounding.errors import SoundingError, UsageError
from sounding.probe.state import DROPOUT
from sounding.train.group import Stack
from sounding.train.layers import HOOKS
from sounding.train.recipe import Statistics

# Channels from which a convolution of a stack is faster as a product than in groups (bench/convolutions.py): a step of
# 48 networks of up to 256 channels takes 50 ms in place of 75 on an H200, one of 12 of up to 128 channels 25 for 14.
WIDE = 192
COMPARED = (bool, int, float, str, tuple, type(None))


class Vmapped(Stack):
    """A stack of modules of one architecture whose forward pass vmap understands.

    Plain numbers that differ between the networks' modules (a norm's eps, a residual strength, a gain) become one value
    a run. Refused: dropout (runs would need random numbers of their own), batch norm that averages over all batches
    (momentum=None), hooks that differ.
    """

    def __init__(self, networks: Sequence[nn.Module], device: torch.device) -> None:
        _refuse(networks[0])
        super().__init__(networks, device)
        differing = _differences(networks)
        self._skeleton = _empty_copy(networks[0])
        modules = dict(self._skeleton.named_modules())
        dtype = self.parameters[0].dtype
        self._varying: dict[str, Tensor] = {}
        self._places: dict[str, tuple[nn.Module, str]] = {}
        if device.type == "cuda":
            for module in modules.values():
                multiply_patches_(module)
        for (name, attribute), values in differing.items():
            key = f"{name}.{attribute}"
            self._varying[key] = torch.tensor(values, device=device, dtype=dtype)
            self._places[key] = (modules[name], attribute)
            if attribute in ("eps", "momentum"):  # the built-in norms take numbers there, and no tensors
                modules[name].__class__ = OPENED.get(type(modules[name]), type(modules[name]))

    def run(self, inputs: Tensor, statistics: Statistics, *, own: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs, and new buffers."""
        kept = {name: getattr(module, attribute) for name, (module, attribute) in self._places.items()}
        fixed = {name: tensor for name, tensor in self.tensors.items() if name not in self.tracked}
        buffers = {name: self.tensors[name] for name in self.tracked}
        self._skeleton.train(statistics == "batch")

        def one(
            parameters: dict[str, Tensor], buffers: dict[str, Tensor], numbers: dict[str, Tensor], rows: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            for name, value in numbers.items():
                module, attribute = self._places[name]
                setattr(module, attribute, value)
            # vmap must not write into what it is given
            fresh = {name: buffer.clone() for name, buffer in buffers.items()}
            outputs: Tensor = functional_call(self._skeleton, {**parameters, **fresh}, (rows,))
            return outputs, fresh

        try:
            with warnings.catch_warnings():
                # torch tells that an operation has no batching rule and runs once a run: slower, not wrong
                warnings.filterwarnings("ignore", message="There is a performance drop")
                every = vmap(one, in_dims=(0, 0, 0, 0 if own else None), randomness="error")
                outputs, fresh = every(fixed, buffers, self._varying, inputs)
        except SoundingError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):  # its sentence is that of `train_together_`
                raise
            raise UsageError(
                f"{type(self._skeleton).__name__} cannot be trained as a stack: {str(error).splitlines()[0]}",
                hint="train_, one network after the other",
            ) from error
        finally:
            for name, (module, attribute) in self._places.items():
                setattr(module, attribute, kept[name])
        return outputs, {name: tensor.detach() for name, tensor in fresh.items()}


class _BatchNormOfTensors(_BatchNorm):
    """Batch norm whose eps and momentum may be tensors; the built-in one takes numbers only."""

    def forward(self, input: Tensor) -> Tensor:
        axes = [0, *range(2, input.dim())]
        view = (1, -1, *[1] * (input.dim() - 2))
        if self.training or self.running_var is None:
            variance, mean = torch.var_mean(input, dim=axes, correction=0)
            if self.running_var is not None and self.running_mean is not None and self.momentum is not None:
                count = input.numel() // input.shape[1]
                unbiased = variance.detach() * (count / (count - 1))  # what torch keeps, unlike what it divides by
                self.running_mean.copy_(self.running_mean + self.momentum * (mean.detach() - self.running_mean))
                self.running_var.copy_(self.running_var + self.momentum * (unbiased - self.running_var))
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        else:
            variance, mean = self.running_var, self.running_mean  # type: ignore[assignment]
        scale = torch.rsqrt(variance + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        output = (input - mean.view(view)) * scale.view(view)
        return output if self.bias is None else output + self.bias.view(view)


class _LayerNormOfTensors(nn.LayerNorm):
    """Layer norm whose eps may be a tensor."""

    def forward(self, input: Tensor) -> Tensor:
        axes = tuple(range(-len(self.normalized_shape), 0))
        variance, mean = torch.var_mean(input, dim=axes, correction=0, keepdim=True)
        output = (input - mean) * torch.rsqrt(variance + self.eps)
        output = output if self.weight is None else output * self.weight
        return output if self.bias is None else output + self.bias


class _RMSNormOfTensors(nn.RMSNorm):
    """RMS norm whose eps may be a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        axes = tuple(range(-len(self.normalized_shape), 0))
        output = x * torch.rsqrt(x.square().mean(dim=axes, keepdim=True) + self.eps)  # type: ignore[operator]
        return output if self.weight is None else output * self.weight


class _ConvolutionOfPatches(nn.Conv2d):
    """A convolution as one product of patches and weights, (samples · positions, inputs) by (inputs, channels).

    Under vmap it is one batched product; the built-in one becomes a convolution in groups. Patches are gathered with
    channels last, so that whole rows of memory are copied. Where no gradient is wanted, batches are large, nine times
    their memory is not to be had, and it is the built-in one.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(input)
        (high, wide), (down, right) = self.kernel_size, self.dilation
        assert not isinstance(self.padding, str)
        rows, columns = self.padding
        padded = nn.functional.pad(input.permute(0, 2, 3, 1), (0, 0, columns, columns, rows, rows))
        patches = padded.unfold(1, down * (high - 1) + 1, self.stride[0])[..., ::down]  # every tap of a dilated kernel
        patches = patches.unfold(2, right * (wide - 1) + 1, self.stride[1])[..., ::right]
        # (samples, height, width, channels, *kernel) → (samples, height, width, *kernel, channels)
        patches = patches.permute(0, 1, 2, 4, 5, 3)
        weight = self.weight.permute(2, 3, 1, 0).flatten(0, 2)
        outputs = patches.flatten(0, 2).flatten(1) @ weight
        outputs = outputs if self.bias is None else outputs + self.bias
        return outputs.view(*patches.shape[:3], -1).permute(0, 3, 1, 2)


def multiply_patches_(module: nn.Module) -> None:
    """Turn a wide, plain convolution into one of patches, in place; other modules stay as they are."""
    if type(module) is not nn.Conv2d or isinstance(module.padding, str):
        return
    if module.groups == 1 and module.padding_mode == "zeros" and module.out_channels >= WIDE:
        module.__class__ = _ConvolutionOfPatches


OPENED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: _BatchNormOfTensors,
    nn.BatchNorm2d: _BatchNormOfTensors,
    nn.BatchNorm3d: _BatchNormOfTensors,
    nn.LayerNorm: _LayerNormOfTensors,
    nn.RMSNorm: _RMSNormOfTensors,
}


def _empty_copy(network: nn.Module) -> nn.Module:
    """The modules without values; functional_call puts in those of the stack."""
    memo: dict[int, Any] = {}
    for tensor in [*network.parameters(), *network.buffers()]:
        empty = torch.empty_like(tensor, device="meta")  # takes no memory
        memo[id(tensor)] = (
            nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        )
    return copy.deepcopy(network, memo)


def _refuse(network: nn.Module) -> None:
    """Refuse what a stack cannot train as its networks would be trained alone."""
    for name, module in network.named_modules():
        amount = module.p if isinstance(module, DROPOUT) else 0.0
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            amount = module.dropout
        if amount:
            raise UsageError(
                f"dropout cannot be trained as a stack, {name!r} has it: runs would need random numbers of their own",
                hint="networks built with dropout=0, or train_ for one after the other",
            )
        if isinstance(module, _BatchNorm) and module.momentum is None and module.track_running_stats:
            raise UsageError(
                f"{name!r} averages its statistics over all batches (momentum=None), which cannot be stacked",
                hint="momentum=0.1",
            )


def _differences(networks: Sequence[nn.Module]) -> dict[tuple[str, str], list[float]]:
    """Plain numbers of the modules that are not the same in all networks, by module and attribute."""
    found: dict[tuple[str, str], list[float]] = {}
    first = dict(networks[0].named_modules())
    others = [dict(network.named_modules()) for network in networks[1:]]
    for index, modules in enumerate(others, start=1):
        if {name: type(module) for name, module in modules.items()} != {n: type(m) for n, m in first.items()}:
            raise UsageError(f"networks that are trained together must have the same modules, run {index} has others")
    for name, module in first.items():
        alike = [modules[name] for modules in others]
        for hooks in HOOKS:
            if any(list(getattr(m, hooks).values()) != list(getattr(module, hooks).values()) for m in alike):
                raise UsageError(
                    f"networks that are trained together must have the same hooks, those of {name!r} differ"
                )
        for attribute, value in vars(module).items():
            # neither is a setting of the module
            if attribute.startswith("_") or attribute == "training" or not isinstance(value, COMPARED):
                continue
            values = [value, *(vars(each).get(attribute) for each in alike)]
            if all(each == value for each in values):
                continue
            if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
                raise UsageError(
                    f"networks that are trained together must agree in {name}.{attribute}, got "
                    f"{', '.join(map(repr, dict.fromkeys(map(str, values))))}"
                )
            found[name, attribute] = [float(each) for each in values]
    return found
