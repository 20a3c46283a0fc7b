"""Many networks trained as one: the same architecture, other weights and learning rates, stacked along one axis.

A network is read off its modules as a list of steps (linear map, normalization, activation with its gain, residual
branch); the weights of n networks become tensors of n matrices, and one batched product does what n would. On a GPU a
training step is captured once as a graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from sounding.repair.norm_layers import ChannelRMSNorm
from sounding.repair.shaping import PreGain

ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.ReLU: functional.relu,
    nn.Tanh: torch.tanh,
    nn.Identity: lambda x: x,
}


class Residual(nn.Module):
    """x + branch(x)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        total: Tensor = x + self.branch(x)
        return total


@dataclass
class Step:
    """One step of the forward pass: what it does, its parameters (networks, …) and its numbers."""

    kind: str
    parameters: list[Tensor] = field(default_factory=list)
    number: float | Tensor = 0.0
    function: Callable[[Tensor], Tensor] | None = None


def read_steps(model: nn.Module) -> list[Step]:
    """The forward pass of one network of nested Sequentials, in order.

    Raises:
        TypeError: a module it does not know.
    """
    steps: list[Step] = []
    for module in model.children():
        if isinstance(module, nn.Linear):
            bias = module.bias if module.bias is not None else torch.zeros(module.out_features)
            steps.append(Step("linear", [module.weight.detach(), bias.detach()]))
            if "norm" in module._modules:
                steps += read_steps(nn.Sequential(module.norm))
        elif isinstance(module, nn.BatchNorm1d):
            steps.append(Step("batch", [module.weight.detach(), module.bias.detach()], module.eps))
        elif isinstance(module, nn.LayerNorm) or (isinstance(module, nn.GroupNorm) and module.num_groups == 1):
            steps.append(Step("layer", [module.weight.detach(), module.bias.detach()], module.eps))
        elif isinstance(module, nn.RMSNorm | ChannelRMSNorm):
            steps.append(Step("rms", [module.weight.detach()], module.eps or torch.finfo(torch.float32).eps))
        elif type(module) in ACTIVATIONS:
            gain = 1.0
            for hook in module._forward_pre_hooks.values():
                if not isinstance(hook, PreGain):
                    raise TypeError(f"cannot stack the hook {hook}")
                gain *= hook.gain
            steps.append(Step("activation", number=gain, function=ACTIVATIONS[type(module)]))
        elif isinstance(module, Residual):
            steps += [Step("open"), *read_steps(nn.Sequential(module.branch)), Step("close")]
        elif isinstance(module, nn.Sequential):
            steps += read_steps(module)
        else:
            raise TypeError(f"cannot stack a {type(module).__name__}")
    return steps


def stack_steps(networks: Sequence[list[Step]], copies: int, device: torch.device) -> list[Step]:
    """Every network `copies` times in a row, as one list of steps with stacked parameters."""
    stacked = []
    for parts in zip(*networks, strict=True):
        first = parts[0]
        if any(part.kind != first.kind or part.function is not first.function for part in parts):
            raise TypeError("networks that are trained together must have the same steps")
        number = first.number
        if any(part.number != number for part in parts):  # a measured gain or eps may differ from network to network
            number = torch.tensor([float(part.number) for part in parts], device=device).repeat_interleave(copies)
            number = number.view(-1, 1, 1)
        tensors = [
            torch.stack([part.parameters[index] for part in parts])
            .repeat_interleave(copies, 0)
            .to(device, torch.float32)
            .contiguous()
            .requires_grad_()
            for index in range(len(first.parameters))
        ]
        stacked.append(Step(first.kind, tensors, number, first.function))
    return stacked


def run_steps(steps: Sequence[Step], inputs: Tensor) -> Tensor:
    """Logits (networks, samples, classes) of inputs (samples, features) or (networks, samples, features)."""
    count = next(step.parameters[0].shape[0] for step in steps if step.parameters)
    x = inputs.expand(count, *inputs.shape[-2:])
    branches: list[Tensor] = []
    for step in steps:
        if step.kind == "linear":
            weight, bias = step.parameters
            x = torch.baddbmm(bias[:, None], x, weight.mT)
        elif step.kind == "batch":
            variance, mean = torch.var_mean(x, dim=1, keepdim=True, correction=0)
            scale = torch.rsqrt(variance + step.number) * step.parameters[0][:, None]
            x = (x - mean) * scale + step.parameters[1][:, None]
        elif step.kind in {"layer", "rms"}:
            centred = x - x.mean(-1, keepdim=True) if step.kind == "layer" else x
            x = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + step.number)
            x = x * step.parameters[0][:, None]
            x = x + step.parameters[1][:, None] if step.kind == "layer" else x
        elif step.kind == "activation":
            assert step.function is not None
            x = step.function(x if isinstance(step.number, float) and step.number == 1.0 else x * step.number)
        elif step.kind == "open":
            branches.append(x)
        else:
            x = x + branches.pop()
    return x


def train_together(
    networks: Sequence[nn.Module],
    rates: Sequence[float],
    inputs: Tensor,
    targets: Tensor,
    *,
    steps: int = 300,
    batch_size: int = 128,
    clipping: float | None = None,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Training accuracy (networks, rates) after plain SGD on cross-entropy, each network once with each rate.

    Batches go through the data in epochs, each in a random order of its own, the same for all; the accuracy is over all
    samples at once, with the statistics of that batch where there is batch norm. A network whose weights are no longer
    finite has accuracy 0.

    Args:
        clipping: of adaptive gradient clipping (Brock et al. 2021), unit by unit; None for none.
        generator: of the order of the samples.
    """
    device = torch.device(device)
    inputs, targets = inputs.to(device, torch.float32), targets.to(device)
    stack = stack_steps([read_steps(network) for network in networks], len(rates), device)
    parameters = [parameter for step in stack for parameter in step.parameters]
    rate = torch.tensor(list(rates), device=device).repeat(len(networks))
    chosen = _orders(len(inputs), steps, batch_size, generator).to(device)
    current = torch.zeros_like(chosen[0])

    def step() -> None:
        with torch.enable_grad():
            logits = run_steps(stack, inputs[current])
            wanted = targets[current].expand(len(rate), -1)
            loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / batch_size
            gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if clipping is not None:
                    gradient = _clip(gradient, parameter, clipping)
                parameter.sub_(gradient * rate.view(-1, *[1] * (parameter.dim() - 1)))

    run = _captured(step, parameters) if device.type == "cuda" else step
    for order in chosen:
        current.copy_(order)
        run()
    with torch.no_grad():
        logits = run_steps(stack, inputs)
        finite = torch.isfinite(logits).flatten(1).all(1)
        right = (logits.argmax(-1) == targets).double().mean(-1)
    return torch.where(finite, right, 0.0).view(len(networks), len(rates)).cpu()


def _orders(samples: int, steps: int, batch_size: int, generator: torch.Generator) -> Tensor:
    """(steps, batch) indices: whole batches of one random order of the samples after the other."""
    each = samples // batch_size
    epochs = [torch.randperm(samples, generator=generator)[: each * batch_size] for _ in range(-(-steps // each))]
    return torch.cat(epochs).view(-1, batch_size)[:steps]


def _clip(gradient: Tensor, parameter: Tensor, clipping: float) -> Tensor:
    """λ · max(‖w‖, 10⁻³)/‖g‖ where the gradient of a unit (a row) is longer than that."""
    size = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    limit = clipping * torch.linalg.vector_norm(parameter, dim=-1, keepdim=True).clamp_min(1e-3)
    return gradient * (limit / size.clamp_min(1e-30)).clamp_max(1.0)


def _captured(step: Callable[[], None], parameters: Sequence[Tensor]) -> Callable[[], None]:
    """The step as a CUDA graph; the steps that warm it up are taken back."""
    kept = [parameter.detach().clone() for parameter in parameters]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return graph.replay
