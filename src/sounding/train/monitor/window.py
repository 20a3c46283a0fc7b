"""One measured step: hooks from its beginning to its end, however many passes it takes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from sounding.probe.calls import OpenCall, Pass, Spec, survey
from sounding.probe.eager import eager_execution
from sounding.probe.gradients import log_norm
from sounding.probe.hooks import is_claimed
from sounding.probe.late import read_back
from sounding.probe.meeting import Meeting
from sounding.probe.moments import Tier
from sounding.probe.parts import is_distributed
from sounding.probe.pipeline import find_stage, is_rehearsal
from sounding.probe.reading import Reading
from sounding.probe.records import Finding, Unmeasured
from sounding.probe.sharded import Shards, join_parts
from sounding.probe.tap import Tap, survey_model
from sounding.probe.units import bounds_of
from sounding.profile import Row
from sounding.train.monitor.between import Between
from sounding.train.monitor.micro_batches import gradients_of, join_gradients_
from sounding.train.monitor.moved import APART, Moved
from sounding.train.monitor.selection import Modules
from sounding.train.monitor.structure import KeptMoments, Structure
from sounding.train.monitor.wall import Wall, walled

PASSES = 64  # forward passes of one step that are measured; more micro-batches than that add nothing but memory
PARTS = "gradient: it came back in several backward passes through one forward pass, whose norms do not add up"
STAGE = "this process holds stage {index} of a pipeline of {count}: the others are measured in their own processes"
LOOSE = "a pipeline calls parts of this model as its stages, one by one: use a monitor for the module of each stage"
SCALES = ("scale_grads", "perform_reduce_grad")  # what a schedule calls on its stage when a step's gradients are there
TRANSFORMED = (
    "calls inside a transform of torch.func (vmap, grad, jacrev), a trace or a dispatch mode (fake tensors, selective "
    "checkpointing), where values are not tensors of their own or what measures them would be recorded"
)
THREAD = "the passes of a second thread, which ran the model at the same time"
OVERFLOW = "gradients: they overflowed under the loss scale {scale:g}, so the step was not taken"


class Scaler(Protocol):
    """What scales the loss: torch.amp.GradScaler."""

    def get_scale(self) -> float: ...


@dataclass(frozen=True)
class MonitorOptions:
    """What a monitor measures, and what it must know of the loop."""

    tier: Tier
    modules: Modules  # to show
    samples: int | None
    batch_axis: int | None
    scaler: Scaler | None
    reduced: bool  # whether several processes may average gradients, which `.grad` then holds at the end
    inside: bool | Literal["always"] = True  # whether to look between modules, in some measured steps or in all
    number: int = 0  # which of the monitors of a model that lies in several processes this is


class Vantage:
    """What the measured steps of a run have in common: the model as it is built, and the memory that measures it."""

    def __init__(self, model: nn.Module, options: MonitorOptions) -> None:
        self.options = options
        self.known = survey_model(model, tier=options.tier, samples=options.samples, batch_axis=options.batch_axis)
        options.modules.mark_(self.known.specs)
        self.structure, self.moments = Structure(model), KeptMoments(options.tier)
        wanted = bool(options.inside) and self.known.shards is None
        self.between = Between(wanted=wanted, always=options.inside == "always")
        # whose bounds a module may set anew while it trains
        self.movable = [spec for spec in self.known.specs if isinstance(spec.module, nn.Hardtanh)]


class Window:
    """A tap over one step of the optimizer, which tells it what belongs to the step.

    It differs from `sounding.watch` in what it takes for one measurement. Passes without gradients (evaluation in
    between) are left alone. Weight gradients are of the accumulated sum, as the optimizer will see it before clipping.
    Output gradients of micro-batches are joined as if the step had been one batch, ‖∂L/∂H‖² = Σ ‖∂L/∂H_i‖²; forward
    measures are means over them. The loss scale is divided out.
    """

    def __init__(self, vantage: Vantage, wall: Wall) -> None:
        self._vantage, self.wall, self._options = vantage, wall, vantage.options
        for spec in vantage.movable:
            spec.bounds = bounds_of(spec.module)
        self._structure = vantage.structure
        self._between = vantage.between
        self._unseen: tuple[Unmeasured, ...] = ()
        self._tap = Tap(
            vantage.known,
            ear=self,
            moments=vantage.moments,
            look_up=lambda: self._structure.parameters,
            around=lambda: self._look() or nullcontext(),
        )
        self._opener: int | None = None
        self._thread: int | None = None
        self._closed = False
        self.overflowed = False
        self.stage: Any = None
        self._loose = False  # stages of a pipeline that were called one by one
        self._micro_batches = 1
        self._scale: float | None = None
        self._sums: dict[str, float] = {}  # ln‖gradient‖ of each weight, over all passes
        self._coming: list[Pass] = []  # the passes that the present backward pass is of
        self._parts: set[int] = set()  # ids of calls whose gradient came back more than once
        self._in_parts: dict[str, None] = {}
        self._inside = self._resting = self._returned = False
        self._moved = Moved(())
        self._touched: dict[str, nn.Parameter] = {}  # read again when all processes have averaged
        self._meeting: Meeting | None = None

    def __enter__(self) -> Window:
        # Attention's fast path, which a watch turns off, runs without gradients only, where a window rests.
        self._opener = threading.get_ident()
        self._between.clear()
        eager_execution.hold()
        try:
            self._moved = Moved(self._structure.parameters)
            self._tap.__enter__()
        except BaseException:
            self.__exit__()
            raise
        shards = self.shards
        if shards is not None:
            name = f"monitor/{self._options.number}/{shards.name}"
            self._meeting = Meeting(name, shards.ranks, step=self.step)
            self._meeting.come()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        try:
            self._tap.__exit__()
        finally:
            for name in SCALES if self.stage is not None else ():
                vars(self.stage).pop(name, None)  # the methods of its class show again
            eager_execution.release()

    @property
    def shards(self) -> Shards | None:
        """What lies in several processes, or None for a model that this one holds whole."""
        return self._vantage.known.shards

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.wall.step

    @property
    def reading(self) -> Reading:
        """What the step showed; its source is the step."""
        settings: dict[str, Any] = {"step": self.step}
        if self._scale is not None:
            settings["loss_scale"] = self._scale
        return self._tap.collect(settings, source=f"step {self.step}")

    @property
    def unmeasured(self) -> tuple[Unmeasured, ...]:
        """What could not be measured, and why."""
        failed = {**dict.fromkeys(self._in_parts, PARTS), **self.wall.failed}
        found = [item for item in self._tap.unmeasured if item.name not in failed]
        found += [Unmeasured(name, reason) for name, reason in failed.items()]
        if self.overflowed:
            found.append(Unmeasured("network", OVERFLOW.format(scale=self._scale)))
        if self.stage is not None:
            index, count = self.stage.stage_index, self.stage.num_stages
            found.append(Unmeasured("network", STAGE.format(index=index, count=count)))
        if self._loose:
            found.append(Unmeasured("network", LOOSE))
        if self._moved.apart:
            found.append(Unmeasured("network", APART))
        return (*found, *self._unseen)

    def settle(self) -> bool:
        """After the block: join the passes of the step into one measurement. False when nothing was seen."""
        read_back([self._sums])  # norms that are still on their way from a GPU
        with_gradient = [one for one in self._tap.passes if gradients_of(one)]
        self._tap.passes = with_gradient or self._tap.passes  # evaluation in between has none
        self._in_parts = {call.name: None for one in self._tap.passes for call in one.calls if id(call) in self._parts}
        if self._meeting is not None:
            join_parts(self._meeting, self._tap.passes, self._sums)
            self._meeting = None
        # a step that the scaler will skip leaves no gradients, and is no finding: scalers grow until they overflow
        self.overflowed = self._options.scaler is not None and any(map(_broken, self._sums.values()))
        if self.overflowed:
            self._sums = {}
            for one in self._tap.passes:
                one.input_gradient = one.alignment = None
                for call in one.calls:
                    call.gradient = None
        join_gradients_(self._tap.passes, shift=math.log((self._scale or 1.0) * self._micro_batches))
        for one in self._tap.passes:
            one.weights, one.split = {}, set()  # the sums hold all passes, and stand at the last
        if self._tap.passes:
            shift = math.log(self._scale) if self._scale else 0.0
            self._tap.passes[-1].weights = {name: value - shift for name, value in self._sums.items()}
            if not self.overflowed:
                self._moved.note_ratios(self._tap.passes[-1])
        return any(one.calls for one in self._tap.passes)

    @walled
    def look_between(self) -> tuple[tuple[Row, ...], tuple[Finding, ...]]:
        """What the step showed between modules, and what is wrong there."""
        rows, findings, self._unseen = self._between.judge(self._tap.passes, source=f"step {self.step}")
        return rows, findings

    def abandon(self) -> None:
        """The step will not be recorded: the other processes need not wait for this one's parts."""
        if self._meeting is not None:
            join_parts(self._meeting, (), wait=False)
            self._meeting = None

    def _refresh(self) -> None:
        """Hook the model anew if a layer or a weight was exchanged after the step was opened."""
        if self._structure.is_same():
            return
        known = self._vantage.known
        specs = survey(known.root, only=None, types=None)
        self._options.modules.mark_(specs)
        self._structure = Structure(known.outer)
        self._tap.attach_again(specs)

    def _fail(self, place: str, error: Exception, arguments: tuple[Any, ...]) -> None:
        """Name what was not measured: the call or the weight that a hook was about, else the input or the network."""
        subject = {"begin": "input", "take_input_gradient": "input"}.get(place, "network")
        for argument in arguments:
            if type(argument) in (Spec, OpenCall, str):  # what a module returned may refuse even isinstance
                subject = argument if type(argument) is str else argument.name
                break
        reason = self.wall.note_error(subject, error)
        last = self._tap.passes[-1].calls[-1:] if self._tap.passes else []
        for call in last:
            if place == "observe" and call.spec is arguments[0]:
                call.reason = call.reason or reason
        if place == "take_gradient" and arguments[1].gradient is not None:
            arguments[0].alignment = reason  # the norm was taken, what failed came behind it

    @walled
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1 or not self._is_ours(module):
            return
        self._inside = True
        rests = not torch.is_grad_enabled() or not self._has_room() or is_rehearsal()
        self._resting = rests or self._is_transformed()
        if not self._resting:
            self._returned = False
            self._refresh()
            self._tap.begin(module, args, kwargs)

    @walled
    def _look(self) -> AbstractContextManager[None] | None:
        """A context for the model's forward method, if its operations are to be looked at."""
        if not self._inside or self._resting or torch._C._current_graph_task_id() != -1:
            return None
        if self._thread != threading.get_ident() or self.stage is not None:
            return None
        known = self._vantage.known
        return self._between.listen(known.root, self._tap.passes, axis=known.axis)

    def _is_ours(self, module: nn.Module) -> bool:
        """Whether a call belongs to the training: no check runs on the module, and no other thread called it."""
        if self._closed or is_claimed(module):
            return False
        now = threading.get_ident()
        if self._thread is None:
            self._thread = now
        if self._thread == now:
            return True
        self.wall.note("network", THREAD)
        if now != self._opener:
            return False
        # The one that opens steps trains: what another ran before it is dropped.
        self._thread, self._tap.passes = now, []
        self._inside = self._resting = self._returned = False
        return True

    def _is_transformed(self) -> bool:
        core = torch._C
        modes = core._len_torch_dispatch_stack() > self._between.modes or core._get_tracing_state() is not None
        if not modes and core._functorch.peek_interpreter_stack() is None:
            return False
        self.wall.note("network", TRANSFORMED)
        return True

    def note_gaps(self, one: Pass) -> None:
        """Weight gradients are of the sum over passes; a pipeline scales it when all its micro-batches are through."""
        stage = find_stage() if self.stage is None else None
        if stage is not None:
            self.stage = stage
            for name in SCALES:
                setattr(stage, name, partial(self._read_scaled, getattr(stage, name)))

    def _read_scaled(self, scale: Callable[..., None], *arguments: int, **keywords: int) -> None:
        """What the schedule calls in place of its stage's own methods, with the scale: scale, then read."""
        scale(*arguments, **keywords)
        self._read_all(next(iter((*arguments, *keywords.values())), 1))

    @walled
    def _read_all(self, factor: int) -> None:
        self._micro_batches = factor
        for name, weight in self._structure.parameters:
            if weight.grad is not None:
                self._sums[name] = log_norm(weight.grad)

    def _has_room(self) -> bool:
        """Passes that nothing came back to (an evaluation that forgot no_grad) make room for those that count."""
        if len(self._tap.passes) >= PASSES:
            self._tap.passes = [one for one in self._tap.passes if gradients_of(one)]
        return len(self._tap.passes) < PASSES

    @walled
    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1 or not self._is_ours(module):
            return
        resting, self._inside, self._resting = self._resting, False, False
        if not resting:
            self._tap.end(module, args, output)

    @walled
    def observe(self, spec: Spec, args: Any, output: Any) -> Any:
        if torch._C._current_graph_task_id() == -1 and not (self._is_ours(spec.module) and self._listens()):
            return None
        if self._is_transformed():
            return None
        return self._between.observe(spec, args, output, partial(self._tap.observe, spec, args, output))

    def _listens(self) -> bool:
        """Whether a call belongs to a pass that counts; modules may be called without the model around them."""
        if self._inside:
            return not self._resting
        if not torch.is_grad_enabled():
            return False
        if find_stage() is not None:
            self._loose = True
            return False
        if not self._tap.passes:
            self._refresh()
        if self._returned:  # the last pass is over: its backward pass has begun
            if not self._has_room():
                return False
            self._tap.open_pass()
            self._returned = False
        return True

    @walled
    def take_gradient(self, one: Pass, call: OpenCall, gradient: Tensor | None) -> None:
        if gradient is None or not self._tap.attached:
            return
        self._note_backward()
        self._tap.await_reduction()
        if self.stage is not None and call.gradient is not None:
            return  # schedules without bubbles send it back once for the inputs and once more for the weights
        if call.gradient is None and id(call) not in self._parts:
            self._tap.take_gradient(one, call, gradient)
        else:
            call.gradient = None
            self._parts.add(id(call))

    @walled
    def take_input_gradient(self, one: Pass, gradient: Tensor | None) -> None:
        self._tap.take_input_gradient(one, gradient)

    @walled
    def take_weight_gradient(self, name: str, weight: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is None or not self._tap.attached or is_claimed(weight):
            return
        self._note_backward()
        late = self._options.reduced or is_distributed(weight)
        if not is_distributed(weight):  # to add DTensors that are cut in different ways would communicate
            if weight.grad is None and name in self._sums:
                # Zeroed inside the step (a closure called again): what came before is no part of the sum.
                self._tap.passes[:], self._sums = self._coming, {}
            self._sums[name] = log_norm(_plus(weight.grad, gradient))
        if late:
            self._touched[name] = weight
            self._tap.await_reduction(weight)

    @walled
    def read_reduced(self) -> None:
        gathered = self._tap.distributed() if self.shards is not None and self.shards.gathered else ()
        for name, weight in [*self._touched.items(), *gathered]:
            if weight.grad is not None:
                self._sums[name] = log_norm(weight.grad.detach())
        self._touched = {}

    def _note_backward(self) -> None:
        """Note that a backward pass has begun, and at which loss scale."""
        if self._returned:
            return
        self._returned = True
        self._coming = [one for one in self._tap.passes if not gradients_of(one)]
        if self._options.scaler is None:
            return
        scale = float(self._options.scaler.get_scale())
        if self._scale not in (None, scale):
            # The scale changes between steps only: what came before overflowed, was skipped, and is not of this step.
            self._tap.passes, self._sums = self._tap.passes[-1:], {}
        self._scale = scale


def _plus(held: Tensor | None, gradient: Tensor) -> Tensor:
    """What `.grad` will hold; a sparse tensor can be added to a dense one, not the other way round."""
    if held is None:
        return gradient
    held = held.detach()
    return gradient + held if held.is_sparse else held + gradient


def _broken(value: float) -> bool:
    """Whether a number is NaN or infinite; minus infinity is the logarithm of a gradient of zero."""
    return math.isnan(value) or value == math.inf
