"""Networks of one architecture as one, stacked along a first axis of runs, and groups of them that train in step.

On a GPU the whole step of a group is one graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.repair.clipping import clip_adaptively
from sounding.train.evaluate import Seen, sample_losses
from sounding.train.recipe import Recipe, Statistics

WARM_UPS = 2  # steps before a capture, in which libraries take their workspaces


class Stack(ABC):
    """Copies of networks of one architecture and precision; the networks stay as they are until `write_back_`."""

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

        Inputs are (samples, ...), the same for all runs, or with `own` (runs, samples, ...); statistics are those of
        batch norm: "batch", as in training, or "running".
        """

    @torch.no_grad()
    def remember_(self, fresh: dict[str, Tensor], alive: Tensor) -> None:
        """Take over new buffers, of the runs that are alive."""
        old, kept = [self.tensors[name] for name in fresh], list(fresh.values())
        if alive.device.type != "cpu" or not bool(alive.all()):  # on a GPU asking would wait
            pairs = zip(kept, old, strict=True)
            kept = [torch.where(alive.view(-1, *[1] * (own.dim() - 1)), new, own) for new, own in pairs]
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
    every = [id(parameter) for network in networks for parameter in network.parameters()]
    if len(set(every)) < len(every):
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


FLOOR = 1e-3  # the least norm a weight counts with in adaptive clipping (Brock et al. 2021)


class Updates:
    """The optimizer of a stack. With g the gradient of a run's loss, clipped, plus λ w:

    sgd       w ← w − η g
    momentum  b ← μ b + g;  w ← w − η b
    adam      m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²;
              w ← w − η/(1 − β₁ᵗ) · m/(√v/√(1 − β₂ᵗ) + ε)
    rmsprop   v ← α v + (1 − α) g²;  w ← w − η g/(√v + ε)

    All state starts at zero and lives on the device, the step count t too, so that a graph can hold it.
    """

    def __init__(self, parameters: Sequence[Tensor], rates: Tensor, recipe: Recipe) -> None:
        self._parameters, self._recipe = list(parameters), recipe
        self._vectors = [index for index, parameter in enumerate(parameters) if parameter.dim() == 2]
        self._others = [index for index, parameter in enumerate(parameters) if parameter.dim() != 2]
        self._sizes = [parameters[index].shape[1] for index in self._vectors]
        self._rates = rates
        kept = {"sgd": 0, "momentum": 1, "adam": 2, "rmsprop": 1}[recipe.optimizer]  # state tensors for each parameter
        self._state = [[torch.zeros_like(parameter) for parameter in parameters] for _ in range(kept)]
        self._count = torch.zeros((), dtype=torch.float64, device=rates.device)

    def tensors(self) -> list[Tensor]:
        """All state, in a fixed order."""
        return [self._count, *(tensor for part in self._state for tensor in part)]

    @torch.no_grad()
    def apply_(self, gradients: Sequence[Tensor], alive: Tensor) -> None:
        """One step of the runs that are alive; the others' parameters stay, whatever their gradients are."""
        directions, factor = self._directions(list(gradients))
        rates = self._rates if factor is None else (self._rates * factor).to(self._rates.dtype)
        # vectors (biases, scales, shifts) are many and small: they move as one
        if self._vectors:
            packed = torch.cat([directions[index] for index in self._vectors], dim=1)
            moves = (rates[:, None] * packed).masked_fill_(~alive[:, None], 0.0)
            torch._foreach_sub_(
                [self._parameters[index] for index in self._vectors], list(torch.split(moves, self._sizes, dim=1))
            )
        # asking is free on a CPU; on a GPU the host must not wait
        whole = self._rates.device.type == "cpu" and bool(alive.all())
        for index in self._others:
            parameter, direction = self._parameters[index], directions[index]
            shape = (-1, *[1] * (parameter.dim() - 1))
            if not whole:  # a product with 0 would turn an infinite direction into NaN
                direction = direction.masked_fill(~alive.view(shape), 0.0)
            parameter.addcmul_(direction, rates.view(shape), value=-1.0)

    def _directions(self, gradients: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """What each parameter goes along, and a factor of the rate."""
        recipe = self._recipe
        if recipe.clipping is not None:
            clipped = []
            for gradient, parameter in zip(gradients, self._parameters, strict=True):
                # axis 0 is the runs, axis 1 the units: rows of a weight, filters; a vector or "parameter" is one unit
                first = 2 if recipe.clipping_by == "unit" and parameter.dim() > 2 else 1
                axes, given = range(first, parameter.dim()), {"clipping": recipe.clipping, "floor": FLOOR}
                clipped.append(clip_adaptively(gradient, parameter, axes, **given))
            gradients = clipped
        if recipe.weight_decay:
            # behind clipping, as a recipe says
            gradients = list(torch._foreach_add(gradients, self._parameters, alpha=recipe.weight_decay))
        if recipe.optimizer == "momentum":
            (velocity,) = self._state
            torch._foreach_mul_(velocity, recipe.momentum)
            torch._foreach_add_(velocity, gradients)
            return velocity, None
        if recipe.optimizer == "rmsprop":
            (square,) = self._state
            _average_squares(square, gradients, recipe.smoothing)
            roots = torch._foreach_sqrt(square)
            torch._foreach_add_(roots, recipe.eps)
            return list(torch._foreach_div(gradients, roots)), None
        if recipe.optimizer == "adam":
            return self._adam(gradients)
        return gradients, None

    def _adam(self, gradients: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        mean, square = self._state
        first, second = self._recipe.betas
        self._count += 1  # first: the corrections are those of step t, from 1
        torch._foreach_lerp_(mean, gradients, 1 - first)
        _average_squares(square, gradients, second)
        roots = torch._foreach_sqrt(square)
        torch._foreach_div_(roots, (1 - second**self._count).sqrt())  # √v̂ = √v/√(1 − β₂ᵗ), and ε is added behind it
        torch._foreach_add_(roots, self._recipe.eps)
        return list(torch._foreach_div(mean, roots)), 1 / (1 - first**self._count)


def _average_squares(square: list[Tensor], gradients: list[Tensor], keep: float) -> None:
    torch._foreach_mul_(square, keep)
    torch._foreach_addcmul_(square, gradients, gradients, 1 - keep)


class Group:
    """Some runs of a training, stacked. All that changes is a tensor on the device; the host only queues steps.

    A run whose loss is not finite is masked from that step on: neither that step nor a later one changes its
    parameters, and as every operation is per run, no other run notices. With `own` every run has batches of its own,
    (runs, samples, ...).
    """

    def __init__(
        self, stack: Stack, rates: list[float], recipe: Recipe, device: torch.device, *, own: bool = False
    ) -> None:
        self.stack, self._recipe, self._device, self._own = stack, recipe, device, own
        count = stack.runs
        dtype = stack.parameters[0].dtype
        self._updates = Updates(stack.parameters, torch.tensor(rates, dtype=dtype, device=device), recipe)
        self._alive = torch.ones(count, dtype=torch.bool, device=device)
        # -1 for not yet: a tensor holds no None
        self._diverged = torch.full((count,), -1, dtype=torch.int64, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self.seen = Seen(count, recipe, device)
        self._batch: tuple[Tensor, Tensor] | None = None
        self._replay: Callable[[], None] | None = None

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """One step on a batch."""
        if self._device.type != "cuda":  # elsewhere there are no graphs, and queueing costs nothing
            self._take(inputs, targets)
            return
        if self._replay is None:
            self._batch = (inputs.clone(), targets.clone())  # a graph reads from where it was captured
            self._replay = self._capture()
        assert self._batch is not None
        self._batch[0].copy_(inputs)
        self._batch[1].copy_(targets)
        self._replay()

    def _take(self, inputs: Tensor, targets: Tensor) -> None:
        """One step of all runs of the group; one whose loss is not finite takes no further step."""
        stack = self.stack
        with torch.enable_grad():
            outputs, buffers = stack.run(inputs, "batch", own=self._own)
            losses = sample_losses(outputs, targets, self._recipe.loss).mean(dim=1)
            # runs share nothing: the sum has the gradient of each
            gradients = torch.autograd.grad(losses.sum(), stack.parameters)
        with torch.no_grad():
            # a run alone remembers the statistics of the batch on which it fails, so it does here
            if buffers:
                stack.remember_(buffers, self._alive)
            self._step += 1
            finite = torch.isfinite(losses)
            self._diverged.copy_(torch.where(self._alive & ~finite, self._step, self._diverged))
            self._alive &= finite
            self._updates.apply_(gradients, self._alive)
            self.seen.add(torch.where(self._alive, losses, 0.0), outputs, targets)

    def _capture(self) -> Callable[[], None]:
        """The step as a CUDA graph; the steps that warm it up are taken back."""
        assert self._batch is not None
        kept = [tensor.detach().clone() for tensor in self.tensors()]
        # torch wants warm-ups on another stream than the one that it captures
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._take(*self._batch)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._take(*self._batch)
        self.load_tensors(kept)  # capturing ran no step, but the warm-up did
        return graph.replay

    def outputs(self, inputs: Tensor) -> Tensor:
        """In evaluation, with the statistics that the recipe names."""
        return self.stack.run(inputs, self._recipe.statistics)[0]

    def diverged(self) -> list[int | None]:
        """The step of each run that failed."""
        return [None if step < 0 else step for step in self._diverged.tolist()]

    def tensors(self) -> list[Tensor]:
        """All that a step changes, in a fixed order."""
        mine = [self._alive, self._diverged, self._step, *self.seen.tensors()]
        return [*self.stack.parameters, *self.stack.buffers, *self._updates.tensors(), *mine]

    @torch.no_grad()
    def load_tensors(self, values: list[Tensor]) -> None:
        """Set all that a step changes."""
        for tensor, value in zip(self.tensors(), values, strict=True):
            tensor.copy_(value)
