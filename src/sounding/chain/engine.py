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
from typing import TypeVar

import torch

from sounding.chain.inputs import ChainInput
from sounding.chain.law import ChainLaw
from sounding.chain.lean import LeanChain, block_length, is_small
from sounding.chain.normals import Normals, make_normals
from sounding.chain.observe import Observer, StateView, observe
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


@dataclass(frozen=True)
class Task:
    """A batch of chains: some runs of some laws (and which of the plan's they are), and the seed of their generator."""

    laws: tuple[ChainLaw, ...]
    positions: tuple[int, ...]
    runs: int
    seed: int


class Clock:
    """Counts chain-layers for all threads, keeps their set-up apart, reports progress, and tells threads to stop."""

    def __init__(
        self, workers: int = 1, *, total: int = 0, progress: Progress | None = None, began: float | None = None
    ) -> None:
        self.stop = threading.Event()
        self.total = total  # chain-layers in all, for reports of progress
        self._progress = progress
        self._workers = workers  # threads that work at once: each spends its share of the time
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
        setup = sum(self._setup.values()) / self._workers
        return max(time.perf_counter() - self._began - setup, 1e-9), self._early + setup


def run_plan(
    plan: Plan, *, generator: torch.Generator, progress: Progress | None = None
) -> tuple[list[list[Record]], Clock]:
    """Run every task of a plan: the records of each law, and the clock, whose `stop` is set when Ctrl-C came."""
    began = time.perf_counter()
    tasks = make_tasks(plan, generator=generator)
    if plan.device.type == "cpu":
        _rehearse(plan)
        clock = Clock(count_workers(tasks), total=plan.chain_layers, progress=progress, began=began)
        results = _run_chains_on_cores(plan, tasks, clock)
    else:
        from sounding.chain.gpu import run_task_on_gpu

        clock = Clock(total=plan.chain_layers, progress=progress, began=began)
        # one after another, each a large batch; an interrupt is noticed between blocks of layers
        results = [run_task_on_gpu(plan, task, clock) for task in tasks if not clock.stop.is_set()]
    by_law: list[list[Record]] = [[] for _ in plan.laws]
    for task, records in zip(tasks, results, strict=False):
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


def run_task(plan: Plan, task: Task, clock: Clock, *, drawer: ThreadPoolExecutor | None = None) -> list[Record]:
    """Run one task's chains through the whole depth, or until told to stop; a `drawer` draws normals ahead."""
    if is_small(task.laws[0], chains=len(task.laws) * task.runs, route=plan.route):
        return _run_lean(plan, task, clock)
    with clock.setting_up():
        state, generator = draw_input(plan, task)
        normals = make_normals(task.seed, generator=generator, dtype=plan.dtype, kept=2 if drawer else 1)
        laws = [law for law in task.laws for _ in range(task.runs)]
        law = laws[0]
        if drawer is not None:
            normals = _draw_ahead(drawer, normals)
        chains = Chains(laws, state, route=plan.route, generator=generator, normals=normals)
        recorder = Recorder(plan, task)
        if plan.profile:
            recorder.add(0, observe(chains, plan.observer))
    layer = 0
    while layer < plan.depth and not clock.stop.is_set():
        layer += 1
        chains.step(law.gain.at(layer))
        if plan.measures_at(layer):
            recorder.add(layer, observe(chains, plan.observer))
        clock.add(len(laws))
    check_finite(chains.state, layer)
    return recorder.records(layer)


def draw_input(plan: Plan, task: Task) -> tuple[torch.Tensor, torch.Generator]:
    """The input of a task's chains, and the generator that drew it and goes on."""
    generator = torch.Generator(device=plan.device).manual_seed(task.seed)
    law, chains = task.laws[0], len(task.laws) * task.runs
    shape = {"chains": chains, "width": law.width, "batch_size": law.batch_size}
    return plan.input.draw(**shape, generator=generator, dtype=plan.dtype), generator


def _run_lean(plan: Plan, task: Task, clock: Clock) -> list[Record]:
    """The records of a task of few small chains: one by one within a block of layers, measured block by block."""
    law = task.laws[0]
    with clock.setting_up():
        state, generator = draw_input(plan, task)
        normals = make_normals(task.seed, generator=generator, dtype=plan.dtype)
        chains = [LeanChain(law, one, route=plan.route) for one in state]
        recorder = Recorder(plan, task)
        if plan.profile:
            scales = torch.tensor([chain.log_scale for chain in chains], dtype=torch.float64)
            first = torch.stack([torch.from_numpy(chain.state) for chain in chains])
            recorder.add(0, observe(StateView(first, scales, plan.route), plan.observer))
    block = block_length(law, chains=len(chains), route=plan.route)
    layer = 0
    while layer < plan.depth and not clock.stop.is_set():
        layers = range(layer + 1, min(layer + block, plan.depth) + 1)
        gains = [law.gain.at(l) for l in layers]
        shape = (len(chains), len(layers), law.batch_size if plan.route == "gram" else law.width, law.width)
        if plan.route == "gram" or law.weights.invariance == "gaussian":
            draws = normals(shape)
        else:
            draws = law.weights.draw(shape, generator=generator, dtype=plan.dtype, device="cpu")
        looked = [index for index, l in enumerate(layers) if plan.measures_at(l)]
        rows = []
        for chain, draw in zip(chains, draws.numpy(), strict=True):
            states, logs = chain.advance(draw, gains)
            if looked:
                scales = torch.tensor([logs[index] for index in looked], dtype=torch.float64)
                seen = torch.from_numpy(states[looked])
                rows.append(observe(StateView(seen, scales, plan.route), plan.observer))
        values = torch.stack(rows, dim=1) if rows else torch.empty(0)
        for position, index in enumerate(looked):
            recorder.add(layers[index], values[position])
        layer = layers[-1]
        clock.add(len(chains) * len(layers))
    for chain in chains:
        check_finite(torch.from_numpy(chain.state), layer)
    return recorder.records(layer)


def check_finite(state: torch.Tensor, layer: int) -> None:
    """Raise when a chain has left the numbers."""
    if not bool(torch.isfinite(state).all()):
        raise NumericalError(
            f"the signal became infinite or NaN before layer {layer}",
            hint="--dtype float64, a normalization, or a smaller gain",
            state=state,
        )


def count_workers(tasks: Sequence[Task]) -> int:
    """Threads that share the tasks."""
    return max(1, min(torch.get_num_threads(), len(tasks)))


def run_on_cores(work: Callable[[Task], Result], tasks: Sequence[Task], clock: Clock) -> list[Result]:
    """Each task's result; Ctrl-C sets the clock's `stop`. Torch releases the interpreter lock inside its operations."""
    cores = torch.get_num_threads()

    def work_alone(task: Task) -> Result:
        torch.set_num_threads(1)
        return work(task)

    with ThreadPoolExecutor(count_workers(tasks)) as pool:
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
            if not isinstance(error, KeyboardInterrupt):
                raise
        finally:
            wait(futures)
            torch.set_num_threads(cores)  # a thread's own setting is also what threads born later inherit
    return [future.result() for future in futures]


def _run_chains_on_cores(plan: Plan, tasks: Sequence[Task], clock: Clock) -> list[list[Record]]:
    """The records of all tasks, on the CPU; a single large task draws its next normals in a second thread."""
    law = plan.laws[0]
    drawn = law.width * (law.batch_size if plan.route == "gram" else law.width) * tasks[0].runs
    single = len(tasks) == 1 and torch.get_num_threads() > 1 and law.weights.invariance == "gaussian"
    ahead = single and drawn >= WORTH_OVERLAPPING

    def work(task: Task) -> list[Record]:
        with ThreadPoolExecutor(1) as drawer:  # it starts no thread before something is drawn ahead
            return run_task(plan, task, clock, drawer=drawer if ahead else None)

    return run_on_cores(work, tasks, clock)


def _draw_ahead(drawer: ThreadPoolExecutor, normals: Normals) -> Normals:
    """Normals drawn one call ahead in another thread; the sequence is the same."""
    pending: list[Future[torch.Tensor]] = []

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        now = pending.pop().result() if pending else normals(shape)
        pending.append(drawer.submit(normals, shape))
        return now

    return draw
