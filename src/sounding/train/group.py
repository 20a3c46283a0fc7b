"""Runs that train in step: a stack, its optimizer, who is still alive; on a GPU the whole step is one graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sounding.train.evaluate import Scores, count_right, sample_losses
from sounding.train.recipe import Recipe
from sounding.train.stack import Stack
from sounding.train.updates import Updates

WARM_UPS = 2  # steps before a capture, in which libraries take their workspaces


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
        self._diverged = torch.full((count,), -1, dtype=torch.int64, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._seen_loss = torch.zeros(count, dtype=torch.float64, device=device)
        self._seen_right = torch.zeros(count, dtype=torch.int64, device=device)
        self._seen_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._batch: tuple[Tensor, Tensor] | None = None
        self._replay: Callable[[], None] | None = None

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """One step on a batch."""
        if self._device.type != "cuda":
            self._take(inputs, targets)
            return
        if self._replay is None:
            self._batch = (inputs.clone(), targets.clone())
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
            self._seen_steps += 1
            self._seen_loss += torch.where(self._alive, losses.double(), 0.0)
            if not targets.is_floating_point():
                self._seen_right += count_right(outputs, targets)

    def _capture(self) -> Callable[[], None]:
        """The step as a CUDA graph; the steps that warm it up are taken back."""
        assert self._batch is not None
        kept = [tensor.detach().clone() for tensor in self.tensors()]
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._take(*self._batch)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._take(*self._batch)
        self.load_tensors(kept)
        return graph.replay

    def outputs(self, inputs: Tensor) -> Tensor:
        """In evaluation, with the statistics that the recipe names."""
        return self.stack.run(inputs, self._recipe.statistics)[0]

    def diverged(self) -> list[int | None]:
        """The step of each run that failed."""
        return [None if step < 0 else step for step in self._diverged.tolist()]

    def seen(self, *, classes: bool) -> Scores:
        """Mean loss and accuracy over the batches since this was last asked."""
        steps = int(self._seen_steps)
        samples = steps * self._recipe.batch_size
        divisor = steps or float("nan")
        loss = (self._seen_loss / divisor).tolist()
        right = (self._seen_right.double() / (samples or float("nan"))).tolist() if classes else None
        for tensor in (self._seen_loss, self._seen_right, self._seen_steps):
            tensor.zero_()
        return Scores(loss, right)

    def tensors(self) -> list[Tensor]:
        """All that a step changes, in a fixed order."""
        mine = [self._alive, self._diverged, self._step, self._seen_loss, self._seen_right, self._seen_steps]
        return [*self.stack.parameters, *self.stack.buffers, *self._updates.tensors(), *mine]

    @torch.no_grad()
    def load_tensors(self, values: list[Tensor]) -> None:
        """Set all that a step changes."""
        for tensor, value in zip(self.tensors(), values, strict=True):
            tensor.copy_(value)
