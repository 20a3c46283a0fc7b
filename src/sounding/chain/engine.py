"""Running batches of chains: tasks over the cores of a CPU, or one large batch on a GPU.

A task is a batch of chains small enough for a core's cache. Each task has its own generator, so results do not depend
on how many threads run them or in which order. A single task on several cores draws its next normals while the products
of the last ones run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

import torch

from sounding.chain.inputs import ChainInput
from sounding.chain.law import ChainLaw
from sounding.chain.lean import OneByOne, is_small
from sounding.chain.normals import Normals, make_normals
from sounding.chain.observe import Observer, observe
from sounding.chain.record import Record, Recorder
from sounding.chain.step import Chains, Route
from sounding.errors import NumericalError

Progress = Callable[[int, int], None]
Result = TypeVar("Result")

TASK_BYTES = 2 << 20  # of state and weights that one task keeps busy: about what a core's cache holds
WORTH_OVERLAPPING = 20_000  # normals per layer, below which a second thread costs more than it brings
POLL_SECONDS = 0.1  # between two reports of progress


@dataclass(frozen=True)
class Plan:
    """Everything a run needs, checked; what `simulate` has under the same name is described there."""

    laws: tuple[ChainLaw, ...]  # one per residual strength; equal otherwise
    runs: int  # independent chains per law
    depth: int
    burn_in: int
    every: int
    profile: bool
    observer: Observer
    input: ChainInput
    route: Route
    dtype: torch.dtype
    device: torch.device

    @property
    def samples(self) -> int:
        """Measured layers past the burn-in."""
        return self.depth // self.every - self.burn_in // self.every

    @property
    def chain_layers(self) -> int:
        """How many layers of chains the plan computes."""
        return len(self.laws) * self.runs * self.depth

    def measures_at(self, layer: int) -> bool:
        """Whether a layer is looked at."""
        return layer % self.every == 0 and (self.profile or layer > self.burn_in)

    def draw_input(self, task: Task) -> tuple[torch.Tensor, torch.Generator]:
        """The input of a task's chains, and the generator that drew it and goes on."""
        generator = torch.Generator(device=self.device).manual_seed(task.seed)
        shape = {"chains": task.chains, "width": task.laws[0].width, "batch_size": task.laws[0].batch_size}
        return self.input.draw(**shape, generator=generator, dtype=self.dtype), generator


@dataclass(frozen=True)
class Task:
    """A batch of chains: some runs of some laws (and which of the plan's they are), and the seed of their generator."""

    laws: tuple[ChainLaw, ...]
    positions: tuple[int, ...]
    runs: int
    seed: int

    @property
    def chains(self) -> int:
        """How many chains run together."""
        return len(self.laws) * self.runs

    @property
    def laws_of_chains(self) -> list[ChainLaw]:
        """The law of every chain, law by law."""
        return [law for law in self.laws for _ in range(self.runs)]


class Clock:
    """Counts chain-layers for all threads, keeps their set-up apart, reports progress, and tells threads to stop."""

    def __init__(
        self, workers: int = 1, *, total: int = 0, progress: Progress | None = None, began: float | None = None
    ) -> None:
        self.stop = threading.Event()
        self.total = total  # chain-layers in all, for reports of progress
        self._progress = progress
        self.workers = workers  # threads that work at once: each spends its share of the time
        self._began = time.perf_counter()
        self._early = 0.0 if began is None else self._began - began  # set-up of the main thread alone
        self._done: dict[int, int] = {}  # by thread, so that none waits for another to count
        self._setup: dict[int, float] = {}

    def add(self, chain_layers: int) -> None:
        thread = threading.get_ident()
        self._done[thread] = self._done.get(thread, 0) + chain_layers

    def report(self) -> None:
        """Tell whoever wants to know how far it is."""
        if self._progress is not None:
            self._progress(self.done, self.total)

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """What happens inside is no layer's work."""
        began = time.perf_counter()
        try:
            yield
        finally:
            thread = threading.get_ident()
            self._setup[thread] = self._setup.get(thread, 0.0) + time.perf_counter() - began

    @property
    def done(self) -> int:
        return sum(list(self._done.values()))

    @cached_property
    def times(self) -> tuple[float, float]:
        """Seconds of work and of set-up, as the wall saw them; the clock stands still from the first reading on."""
        setup = sum(self._setup.values()) / self.workers
        return max(time.perf_counter() - self._began - setup, 1e-9), self._early + setup


def run_plan(
    plan: Plan, *, generator: torch.Generator, progress: Progress | None = None
) -> tuple[list[list[Record]], Clock]:
    """Run every task of a plan: the records of each law, and the clock, whose `stop` is set when Ctrl-C came."""
    began = time.perf_counter()
    tasks = make_tasks(plan, generator=generator)
    if plan.device.type == "cpu":
        _rehearse(plan)
    clock = Clock(count_workers(plan, tasks), total=plan.chain_layers, progress=progress, began=began)
    ahead = _draws_ahead(plan, tasks)

    def work(task: Task) -> list[Record]:
        with ThreadPoolExecutor(1) as drawer:  # it starts no thread before something is drawn ahead
            return run_task(plan, task, clock, drawer=drawer if ahead else None)

    by_law: list[list[Record]] = [[] for _ in plan.laws]
    for task, records in zip(tasks, run_tasks(work, tasks, clock), strict=False):  # Ctrl-C leaves the last ones out
        for position, record in zip(task.positions, records, strict=True):
            by_law[position].append(record)
    return by_law, clock


def _rehearse(plan: Plan) -> None:
    """One measured layer of a chain of its own, so that libraries start before the clock does."""
    short = replace(plan, laws=plan.laws[:1], runs=1, depth=1, burn_in=0, every=1, profile=False)
    run_task(short, Task(short.laws, (0,), 1, seed=0), Clock())


def make_tasks(plan: Plan, *, generator: torch.Generator) -> list[Task]:
    """Split the runs into tasks; the split depends on the plan alone, never on the machine's cores."""
    law = plan.laws[0]
    entries = law.batch_size * law.width + (law.width**2 if plan.route == "explicit" else 0)
    size = entries * torch.finfo(plan.dtype).bits // 8  # bytes of a chain
    if plan.device.type == "cpu":
        groups: list[tuple[int, ...]] = [(position,) for position in range(len(plan.laws))]
        limit, least = TASK_BYTES // size, min(2, plan.runs)  # two at the least, for machines of two cores
    else:
        groups = [tuple(range(len(plan.laws)))]
        free = torch.cuda.mem_get_info(plan.device)[0] if plan.device.type == "cuda" else 1 << 34
        limit, least = free // (16 * size * len(plan.laws)), 1  # of which normals, products and factors need a part
    pieces = max(least, -(-plan.runs // max(1, limit)))
    tasks = []
    for positions in groups:
        for piece in range(pieces):
            runs = plan.runs * (piece + 1) // pieces - plan.runs * piece // pieces
            seed = torch.randint(0, 2**63 - 1, (), generator=generator, device=generator.device)
            tasks.append(Task(tuple(plan.laws[i] for i in positions), positions, runs, int(seed)))
    return tasks


class Way(Protocol):
    """One of the ways of running the chains of a task; it has taken them to their input when it has been made."""

    block: int  # the layers that it takes at once

    @property
    def state(self) -> torch.Tensor:
        """The chains' states, or their Gram matrices where no state is formed."""

    def look(self) -> torch.Tensor:
        """The numbers of the plan's observer, (chains, columns)."""

    def advance(self, layers: range) -> Sequence[tuple[int, torch.Tensor]]:
        """Take the chains through these layers: those that the plan measures, with their numbers."""


class Together:
    """All chains of a task in one tensor, layer by layer."""

    block = 1

    def __init__(self, plan: Plan, task: Task, drawer: ThreadPoolExecutor | None) -> None:
        state, generator = plan.draw_input(task)
        normals = make_normals(task.seed, generator=generator, dtype=plan.dtype, kept=2 if drawer else 1)
        if drawer is not None:
            normals = _draw_ahead(drawer, normals)
        self.plan = plan
        self.chains = Chains(task.laws_of_chains, state, route=plan.route, generator=generator, normals=normals)

    @property
    def state(self) -> torch.Tensor:
        return self.chains.state

    def look(self) -> torch.Tensor:
        return observe(self.chains, self.plan.observer)

    def advance(self, layers: range) -> list[tuple[int, torch.Tensor]]:
        layer = layers[-1]
        self.chains.step(self.chains.law.gain.at(layer))
        return [(layer, self.look())] if self.plan.measures_at(layer) else []


def run_task(plan: Plan, task: Task, clock: Clock, *, drawer: ThreadPoolExecutor | None = None) -> list[Record]:
    """Run one task's chains through the whole depth, or until told to stop; a `drawer` draws normals ahead."""
    with clock.setting_up():
        way = _find_way(plan, task, drawer)
        recorder = Recorder(plan, task)
        if plan.profile:
            recorder.add(0, way.look())
    layer = 0
    while layer < plan.depth and not clock.stop.is_set():
        layers = range(layer + 1, min(layer + way.block, plan.depth) + 1)
        for measured, values in way.advance(layers):
            recorder.add(measured, values)
        layer = layers[-1]
        clock.add(task.chains * len(layers))
    check_finite(way.state, layer)
    return recorder.records(layer)


def _find_way(plan: Plan, task: Task, drawer: ThreadPoolExecutor | None) -> Way:
    """The fastest way to run a task."""
    if plan.device.type != "cpu":
        from sounding.chain.gpu import Graphed, Stream, can_stream

        return Stream(plan, task) if can_stream(plan) else Graphed(plan, task)
    if is_small(task.laws[0], chains=task.chains, route=plan.route):
        return OneByOne(plan, task)
    return Together(plan, task, drawer)


def check_finite(state: torch.Tensor, layer: int) -> None:
    """Raise when a chain has left the numbers."""
    if not bool(torch.isfinite(state).all()):
        raise NumericalError(
            f"the signal became infinite or NaN before layer {layer}",
            hint="--dtype float64, a normalization, or a smaller gain",
            state=state,
        )


def count_workers(plan: Plan, tasks: Sequence[Task]) -> int:
    """Threads that share the tasks: those of the CPU, or one, which gives a GPU one large batch after the other."""
    return max(1, min(torch.get_num_threads(), len(tasks))) if plan.device.type == "cpu" else 1


def run_tasks(work: Callable[[Task], Result], tasks: Sequence[Task], clock: Clock) -> list[Result]:
    """Each task's result. Ctrl-C sets the clock's `stop`, and those that had not begun are left out."""
    cores = torch.get_num_threads()

    def work_alone(task: Task) -> Result:
        torch.set_num_threads(1)
        return work(task)

    with ThreadPoolExecutor(clock.workers) as pool:  # torch releases the interpreter lock inside its operations
        futures = [pool.submit(work_alone, task) for task in tasks]
        waiting = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()  # raises what the task raised
                clock.report()
        except BaseException as error:
            clock.stop.set()
            for future in futures:
                future.cancel()
            if not isinstance(error, KeyboardInterrupt):
                raise
        finally:
            wait(futures)
            torch.set_num_threads(cores)  # a thread's own setting is also what threads born later inherit
    return [future.result() for future in futures if not future.cancelled()]


def _draws_ahead(plan: Plan, tasks: Sequence[Task]) -> bool:
    """Whether a second thread draws the next normals: for a single large task on a CPU that has a core to spare."""
    law = plan.laws[0]
    drawn = law.width * (law.batch_size if plan.route == "gram" else law.width) * tasks[0].runs
    single = len(tasks) == 1 and plan.device.type == "cpu" and torch.get_num_threads() > 1
    return single and law.weights.invariance == "gaussian" and drawn >= WORTH_OVERLAPPING


def _draw_ahead(drawer: ThreadPoolExecutor, normals: Normals) -> Normals:
    """Normals drawn one call ahead in another thread; the sequence is the same."""
    pending: list[Future[torch.Tensor]] = []

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        now = pending.pop().result() if pending else normals(shape)
        pending.append(drawer.submit(normals, shape))
        return now

    return draw
