"""How every training goes, of one network or of many: checks, data and record, then steps, looks and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from sounding.errors import DataError, InterruptedRun, UsageError, require_device
from sounding.limits import RESUMED, require_memory, require_time
from sounding.probe.environment import describe_environment
from sounding.train.checkpoint import Checkpoint, Keeper
from sounding.train.evaluate import Scores
from sounding.train.history import History
from sounding.train.journal import TOLD_EVERY, Journal, ProgressCall, deferred_interrupt
from sounding.train.recipe import Recipe, check_steps
from sounding.train.samples import Data, Orders, Stream, Streams, sum_tensors, take_samples

POINT_BYTES = 200  # of a point of a curve
# lower bounds of what a step costs: the calls alone, and the operations per second of the fastest machines there are
LEAST_STEP, FASTEST_CPU, FASTEST_GPU = 2e-5, 1e13, 1e15


class Trainee(Protocol):
    """What the loop asks of one network, or of many that are stacked."""

    def take(self, inputs: Tensor, targets: Tensor, step: int) -> None:
        """Take a step with every run whose loss has been finite so far; `step` is its number, from 1."""

    def diverged(self) -> list[int | None]:
        """The step of each run that failed."""

    def evaluate(self) -> tuple[Scores, Scores | None]:
        """Loss and accuracy on the training part, and on the test part where there is one."""

    def networks(self) -> Iterator[nn.Module]:
        """A network with the present values of each run."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, under names that the loop does not use."""

    def load_state(self, kept: dict[str, Any]) -> None:
        """Continue from `state`."""


class Training:
    """What is checked and laid out before anything is changed, and the loop; it counts the steps that were taken.

    The run has the precision of the first network. `runs` tell each run from the others, `kind` says which function
    asks: a checkpoint of the one is none of the other. `record` has everything needed to repeat the run.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        data: Data,
        *,
        kind: Literal["alone", "together"],
        runs: Sequence[Mapping[str, Any]],
        recipe: Recipe,
        generator: Orders,
        device: torch.device | str | None,
        measure_at: Sequence[int],
        checkpoint: Checkpoint | str | Path | None,
        progress: ProgressCall | None,
    ) -> None:
        asked: Any = recipe
        if not isinstance(asked, Recipe):
            expected = f"expected a Recipe, got {type(asked).__name__}"
            raise UsageError(expected, hint="Recipe(optimizer='sgd', epochs=10)")
        check_orders(generator, runs=None if kind == "alone" else len(networks))
        homes = [check_network(network) for network in networks]
        home, dtype = homes[0]
        self.device = home if device is None else torch.device(require_device(str(device)))
        self.samples = samples = take_samples(data, recipe, device=self.device, dtype=dtype)
        first, about = networks[0], describe_environment(networks[0])
        self.record = {
            "versions": {name: about[name] for name in ("sounding", "torch", "python", "platform")},
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device),
            "threads": about["threads"],
            # both None for torch's default generator, and lists where every run has a generator; the sum differs from
            # that of another run with the same seed if the generator was used before
            "seed": _of_each(generator, torch.Generator.initial_seed),
            "generator": _of_each(generator, lambda one: sum_tensors([one.get_state()])[:16]),
            "recipe": recipe.to_dict(),
            "runs": [dict(entry) for entry in runs],
            "data": samples.describe(),
            "model": {
                "class": type(first).__name__,
                "modules": str(first),
                "parameters": sum(parameter.numel() for parameter in first.parameters()),
                "dtype": str(dtype).removeprefix("torch."),
                "weights": [sketch_tensors(network.state_dict().values()) for network in networks],
            },
            "measure_at": list(check_steps("measure_at", measure_at)),
            "kind": kind,
        }
        self.stream: Stream | Streams
        if generator is None or isinstance(generator, torch.Generator):
            self.stream = Stream(samples, recipe, generator)
        else:
            self.stream = Streams(samples, recipe, generator)
        _require_feasible(networks[0], recipe, self.stream, runs=len(networks), device=self.device)
        self.journal = Journal(recipe, samples, self.stream, settings=runs, measure_at=measure_at, progress=progress)
        self._keeper = Keeper(checkpoint, fingerprint(self.record))
        self._step, self._finished = 0, False

    def run(self, trainee: Trainee) -> History:
        """From the checkpoint or the beginning to the end; errors hold the history so far."""
        try:
            with self._keeper.held():
                self._keeper.resume(lambda kept: self._restore(kept, trainee), lambda: self._state(trainee))
                if not self._finished:
                    self._train(trainee)
        except DataError as error:
            error.partial = self.journal.history(self.record, partial=not self._finished)
            raise
        except KeyboardInterrupt as stop:
            raise InterruptedRun(
                f"interrupted at step {self._step} of {self.stream.steps}; what was done so far is kept",
                partial=self.journal.history(self.record, partial=True),
            ) from stop
        return self.journal.history(self.record)

    def _train(self, trainee: Trainee) -> None:
        with deferred_interrupt() as interrupted:
            if self._step == 0:  # a run that is resumed has looked already
                self._look(trainee)
            while self._step < self.stream.steps:
                if interrupted() or self.journal.stopped:
                    self._keeper.write(self._state(trainee))
                    raise KeyboardInterrupt
                trainee.take(*self.stream.next(), self._step + 1)
                self._step += 1
                self._look(trainee)
                if self._keeper.due():
                    self._keeper.write(self._state(trainee))
        self.journal.diverged = trainee.diverged()
        self._finished = True
        self._keeper.write(self._state(trainee))

    def _look(self, trainee: Trainee) -> None:
        """Evaluate, measure and tell what is due at this step."""
        evaluates, measures = self._step in self.journal.evaluate_at, self._step in self.journal.measure_at
        if evaluates or measures:  # on a GPU asking waits for the steps that are queued
            self.journal.diverged = trainee.diverged()
        if evaluates:
            self.journal.note(self._step, *trainee.evaluate())
        if measures:
            for run, network in enumerate(trainee.networks()):
                self.journal.measure(self._step, run, network)
        if evaluates or self._step % TOLD_EVERY == 0:
            self.journal.tell(self._step)

    def _state(self, trainee: Trainee) -> dict[str, Any]:
        own = {"stream": self.stream.state(), "journal": self.journal.state()}
        return {"step": self._step, "finished": self._finished, **own, **trainee.state()}

    def _restore(self, kept: dict[str, Any], trainee: Trainee) -> None:
        trainee.load_state(kept)  # first, since it refuses what another grouping of the runs has written
        self.stream.load_state(kept["stream"])
        self.journal.load_state(kept["journal"])
        # last, so that a failure leaves the count at 0
        self._step, self._finished = int(kept["step"]), bool(kept["finished"])


def _of_each(generator: Orders, tell: Callable[[torch.Generator], Any]) -> Any:
    if generator is None or isinstance(generator, torch.Generator):
        return None if generator is None else tell(generator)
    return [tell(one) for one in generator]


def sketch_tensors(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Three numbers that tell weights of one seed from those of another, and are the same to rounding.

    They are Σ wᵢ cos(kᵢ·i)/‖w‖ for three frequencies: about 1 apart between two draws, 1e-6 where the same draw was
    factorized with another number of threads.
    """
    sums, square, first = torch.zeros(3, dtype=torch.float64), 0.0, 1
    for tensor in tensors:
        values = tensor.detach().cpu().double().nan_to_num().flatten()  # a NaN would equal nothing, itself included
        places = torch.arange(first, first + len(values), dtype=torch.float64)
        # incommensurable: what one of them misses, another sees
        sums += torch.stack([torch.dot(values, (places * frequency).cos()) for frequency in (1.0, 2**0.5, 3**0.5)])
        square, first = square + float(torch.dot(values, values)), first + len(values)
    return [round(value, 6) for value in (sums / math.sqrt(square or 1.0)).tolist()]


def fingerprint(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that a checkpoint must share to be continued; versions and threads may differ."""
    kept = ("recipe", "runs", "data", "model", "seed", "generator", "device", "measure_at", "kind")
    return {name: record[name] for name in kept if name in record}


def check_rates(rates: Sequence[Any]) -> list[float]:
    """Finite learning rates from 0."""
    for rate in rates:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
            raise UsageError(f"learning rates must be finite and not negative, got {rate!r}", hint="0.1")
    return [float(rate) for rate in rates]


def check_network(network: Any) -> tuple[torch.device, torch.dtype]:
    """Where a network lives and its precision, once it is one that can be trained."""
    if not isinstance(network, nn.Module):
        raise UsageError(f"expected a torch.nn.Module, got {type(network).__name__}")
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError(f"{type(network).__name__} has no parameter to train", hint="requires_grad_(True)")
    if any(parameter.device.type == "meta" for parameter in network.parameters()):
        raise UsageError("the network lives on the meta device and has no values", hint="to_empty and an init")
    return trained[0].device, trained[0].dtype


def check_orders(generator: Any, *, runs: int | None) -> None:
    """A generator or None, or, where there are several runs, a list of as many generators."""
    if generator is None or isinstance(generator, torch.Generator):
        return
    several = runs is not None and isinstance(generator, Sequence)
    if not several or not all(isinstance(one, torch.Generator) for one in generator):
        expected = "a torch.Generator" if runs is None else "a torch.Generator, or a list of one for each network"
        raise UsageError(
            f"expected {expected}, got {type(generator).__name__}", hint="torch.Generator().manual_seed(0)"
        )
    if len(generator) != runs:
        raise UsageError(f"expected one generator for each of {runs} networks, got {len(generator)}")


def _require_feasible(
    network: nn.Module, recipe: Recipe, stream: Stream | Streams, *, runs: int, device: torch.device
) -> None:
    """Refuse a training whose curves do not fit the memory or that takes months, whatever the machine."""
    told = f"a training of {stream.steps} steps"
    evaluations = stream.steps // stream.per_epoch if recipe.evaluate == "epoch" else 0
    require_memory(POINT_BYTES * evaluations * runs, what=told, hint="fewer epochs")
    # every weight meets every sample three times: forwards, and twice backwards; a product and a sum each
    operations = 6.0 * runs * recipe.batch_size * sum(parameter.numel() for parameter in network.parameters())
    step = max(LEAST_STEP, operations / (FASTEST_GPU if device.type == "cuda" else FASTEST_CPU))
    require_time(stream.steps * step, what=told, most=RESUMED)
