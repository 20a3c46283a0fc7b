"""Networks of one architecture as one: their parameters and buffers stacked along a first axis of runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.train.recipe import Statistics


class Stack(ABC):
    """What the training of many networks needs of them.

    Args:
        networks: of one architecture and precision; they are copied, and stay as they are until `write_back_`.
        device: where the stack lives.
    """

    def __init__(self, networks: Sequence[nn.Module], device: torch.device) -> None:
        self.runs = len(networks)
        self.tensors: dict[str, Tensor] = {}
        self.trained: list[str] = []
        self.tracked: list[str] = []
        states = [state_of(network) for network in networks]
        for name, first in states[0].items():
            parts = [state[name].detach() for state in states]
            stacked = torch.stack([part.to(device) for part in parts]).contiguous()
            if isinstance(first, nn.Parameter) and first.requires_grad:
                self.trained.append(name)
                stacked.requires_grad_()
            elif not isinstance(first, nn.Parameter):
                self.tracked.append(name)
            self.tensors[name] = stacked

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that are trained, (runs, ...) each."""
        return [self.tensors[name] for name in self.trained]

    @property
    def buffers(self) -> list[Tensor]:
        """Running statistics and the like, (runs, ...) each."""
        return [self.tensors[name] for name in self.tracked]

    @abstractmethod
    def run(self, inputs: Tensor, statistics: Statistics, *, own: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs (runs, samples, values), and what buffers become in training, by name; nothing is changed.

        Args:
            inputs: (samples, ...), the same for all runs, or (runs, samples, ...).
            statistics: of batch norm: "batch", as in training, or "running".
            own: every run has inputs of its own.
        """

    @torch.no_grad()
    def remember_(self, fresh: dict[str, Tensor], alive: Tensor) -> None:
        """Take over new buffers, of the runs that are alive."""
        old = [self.tensors[name] for name in fresh]
        shapes = [(-1, *[1] * (tensor.dim() - 1)) for tensor in old]
        if alive.device.type == "cpu" and bool(alive.all()):
            torch._foreach_copy_(old, list(fresh.values()))
            return
        kept = [
            torch.where(alive.view(shape), new, tensor)
            for new, tensor, shape in zip(fresh.values(), old, shapes, strict=True)
        ]
        torch._foreach_copy_(old, kept)

    @torch.no_grad()
    def write_back_(self, networks: Sequence[nn.Module]) -> None:
        """Put each run's values into its network."""
        for run, network in enumerate(networks):
            for name, tensor in state_of(network).items():
                tensor.copy_(self.tensors[name][run])


def state_of(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once."""
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def check_alike(networks: Sequence[nn.Module]) -> None:
    """Refuse networks whose parameters and buffers do not stack."""
    first = _shapes(networks[0])
    for index, network in enumerate(networks[1:], start=1):
        shapes = _shapes(network)
        for name in dict.fromkeys([*first, *shapes]):
            if first.get(name) != shapes.get(name):
                raise UsageError(
                    f"networks that are trained together must have one architecture, but {name!r} is "
                    f"{_told(first.get(name))} in run 0 and {_told(shapes.get(name))} in run {index}",
                    hint="one call for each architecture",
                )
    if len({id(parameter) for network in networks for parameter in network.parameters()}) != sum(
        len(list(network.parameters())) for network in networks
    ):
        raise UsageError("networks that are trained together must not share weights", hint="copy.deepcopy(network)")


def _shapes(network: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype, bool]]:
    state = state_of(network)
    return {name: (tuple(value.shape), value.dtype, value.requires_grad) for name, value in state.items()}


def _told(found: tuple[tuple[int, ...], torch.dtype, bool] | None) -> str:
    if found is None:
        return "missing"
    shape, dtype, trained = found
    kind = str(dtype).removeprefix("torch.")
    return f"{'×'.join(map(str, shape)) or 'a number'} of {kind}{'' if trained else ', not trained'}"
