"""Watching a model: hooks on every leaf, measured where they fire, gone when the block ends."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from sounding.errors import UsageError
from sounding.probe.alignment import LastLayer, align
from sounding.probe.calls import OpenCall, Pass, Spec, named_parameters, survey
from sounding.probe.forward import measure_output
from sounding.probe.gradients import hook_gradient, log_norm, when_backward_ends
from sounding.probe.hooks import Hooks, Listener, Observer
from sounding.probe.meeting import Meeting
from sounding.probe.moments import TIERS, Tier
from sounding.probe.outputs import guess_axis, leading_tensor, main_tensor, sample_matrix, tensors_in, why_unmeasurable
from sounding.probe.parts import PENDING, WHOLE, Place, Places, is_distributed, local_part
from sounding.probe.pipeline import REPEATS, find_stage, is_rehearsal
from sounding.probe.reading import Reading
from sounding.probe.records import Report, Unmeasured
from sounding.probe.repeats import repeated_fraction
from sounding.probe.sharded import HELD, SHARED_LAYER, Shards, find_shards, join_parts, measure_part
from sounding.probe.shortcut import shortest_depth
from sounding.probe.state import all_modules, plain_execution, unwrap
from sounding.probe.table import collect, list_unmeasured
from sounding.profile import Profile

SAMPLES: dict[Tier, int] = {"fast": 64, "full": 512}
_graph_task = torch._C._current_graph_task_id  # -1 outside a backward pass


class Watched:
    """A model under watch: enter it, run your own forward and backward passes, read `profile`.

    Every forward pass of the model is one repeat; the profile averages over them. Inside the block modules run one by
    one in Python: the fast path of attention is off and compiled modules run eagerly, because neither calls hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tier: Tier = "fast",
        only: str | Sequence[str] | None = None,
        types: type[nn.Module] | Sequence[type[nn.Module]] | None = None,
        samples: int | None = None,
        batch_axis: int | None = None,
        source: str = "watch",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"expected a torch.nn.Module, got {type(model).__name__}")
        if tier not in TIERS:
            raise UsageError(f"expected tier to be one of {', '.join(TIERS)}, got {tier!r}")
        if samples is not None and samples < 2:
            raise UsageError(f"expected samples to be at least 2, got {samples}")
        self._outer, self._root = model, unwrap(model)
        self._tier = tier
        self._samples = SAMPLES[tier] if samples is None else samples
        self._source = source
        self._only, self._types = only, types
        self._axis = guess_axis(self._root) if batch_axis is None else batch_axis
        self._specs: list[Spec] = survey(self._root, only=only, types=types)
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._passes: list[Pass] = []
        self._last: LastLayer | None = None
        self._handles: list[RemovableHandle | Hooks] = []
        self._hooks: Hooks | None = None
        self._plain: Any = None
        self._seeding = False
        self._seeds: list[Tensor] = []
        self._shards = find_shards(self._root)
        self._places = Places() if self._shards is not None and self._shards.parallel else None
        self._meeting: Meeting | None = None
        self._queued = False

    def __enter__(self) -> Watched:
        if self._handles:
            raise UsageError(
                "expected a watch that is not running, got one entered twice", hint="a second sounding.watch"
            )
        self._plain = plain_execution()
        self._plain.__enter__()
        try:
            self._attach()
        except BaseException:
            self._detach()
            raise
        if self._shards is not None:
            self._meeting = Meeting(f"{self._source}/{self._shards.name}", self._shards.ranks)
            self._meeting.come()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            join_parts(meeting, self._passes, wait=error is None)

    @property
    def profile(self) -> Profile:
        """What was measured so far, averaged over the forward passes seen."""
        return self._collect({}).profile()

    @property
    def shards(self) -> Shards | None:
        """What lies in several processes, or None for a model that this one holds whole."""
        return self._shards

    @property
    def unmeasured(self) -> tuple[Unmeasured, ...]:
        """What could not be measured, and why."""
        return list_unmeasured(self._passes, self._root, self._specs)

    @property
    def report(self) -> Report:
        """The profile and the verdict."""
        from sounding.probe.environment import describe_environment
        from sounding.probe.verdict import judge_reading

        reading = self._collect({})
        return Report(reading.profile(), judge_reading(reading), self.unmeasured, describe_environment(self._root))

    def _collect(self, settings: Mapping[str, Any]) -> Reading:
        if self._meeting is not None:
            raise UsageError(
                "expected the block to be over, got a look inside it: processes put their parts together at its end",
                hint="watched.profile after the block",
            )
        if self._shards is not None:
            settings = {**settings, "parallel": self._shards.describe()}
        for one in self._passes:
            one.read_back()
        parameters = self._parameters or named_parameters(self._root)
        tier, source = self._tier, self._source
        return collect(self._passes, parameters, specs=self._specs, tier=tier, source=source, settings=settings)

    def _attach(self) -> None:
        begin, end = Listener(self._begin), Listener(self._end)
        self._handles += [
            nn.Module.register_forward_pre_hook(self._root, begin, with_kwargs=True, prepend=True),
            nn.Module.register_forward_hook(self._root, end),
        ]
        self._attach_parts()

    def _attach_parts(self) -> None:
        hooks = self._listen()
        # A replica of DataParallel shares the attributes of its module, and would run the module's forward method.
        past = not any(isinstance(module, nn.DataParallel) for module in all_modules(self._outer))
        for spec in self._specs:
            observe = partial(self._observe, spec)
            hooks.on_call(spec.module, Observer(observe))
            if past:
                hooks.on_forward(spec.module, observe)
        if past:
            begin_past, end_past = partial(self._begin, self._root), partial(self._end, self._root)
            hooks.on_forward(self._root, end_past, before=begin_past)
        self._hook_weights()

    def _listen(self) -> Hooks:
        """The hooks of this block, which come off with it."""
        if self._hooks is None:
            self._hooks = Hooks()
            self._handles.append(self._hooks)
        return self._hooks

    def _hook_weights(self, spec: Spec | None = None) -> None:
        """Hook every weight, or those of one module; a check reads them off the backward pass that it runs itself."""
        if self._seeding:
            return
        chosen = None if spec is None else {id(weight) for weight in spec.module.parameters()}
        self._parameters = named_parameters(self._root)
        for name, weight in self._parameters:
            if weight.requires_grad and not is_lazy(weight) and (chosen is None or id(weight) in chosen):
                self._listen().on_weight(weight, Listener(partial(self._take_weight_gradient, name, weight)))

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._hooks = self._last = None
        if self._places is not None:
            self._places.forget()
        if self._plain is not None:
            self._plain.__exit__(None, None, None)
            self._plain = None
        for one in self._passes:
            one.moments.release()
            one.read_back()

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pass of the model starts: find the batch size and measure the input."""
        if _graph_task() != -1:
            return
        if self._passes:
            self._passes[-1].moments.finish()
            self._passes[-1].read_back()
        one = self._open_pass()
        self._last = None
        self._note_gaps(one)
        tensors = [tensor for _, tensor in tensors_in((args, kwargs)) if tensor.dim() > 0]
        first = leading_tensor(tensors)
        if first is None:
            one.input_reason = "the model was called without a tensor"
            return
        axis = self._axis if self._axis < first.dim() else 0
        one.batch_size = int(first.shape[axis])
        one.input_reason = why_unmeasurable(first)
        plain = [tensor for tensor in tensors if not is_distributed(tensor)]
        if self._tier == "full" and plain:
            one.input["repeated_fraction"] = repeated_fraction(plain, one.batch_size, first=axis)
        if one.input_reason is None:
            matrix = sample_matrix(first.detach(), one.batch_size, first=axis, limit=self._samples)
            if matrix is not None:
                one.samples, one.input_features = matrix.shape
                one.moments.add(matrix, one.input)
            if first.requires_grad:
                self._handles.append(hook_gradient(first, partial(self._take_input_gradient, one)))

    def _open_pass(self) -> Pass:
        """A new record; a frozen script has no mode, and runs as in evaluation."""
        one = Pass(self._tier, training=getattr(self._root, "training", False))
        self._passes.append(one)
        return one

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """A forward pass of the model ends: its graph tells how many weight layers there is no way around."""
        if self._places is not None:
            self._places.forget()
        if self._passes and _graph_task() == -1:
            if is_rehearsal():
                self._passes.pop().moments.finish()
                return
            self._passes[-1].shortest = shortest_depth(tensor for _, tensor in tensors_in(output))

    def _observe(self, spec: Spec, args: Any, output: Any) -> Any:
        tensor = output if isinstance(output, Tensor) else main_tensor(output)
        if _graph_task() != -1:
            return self._observe_again(spec, tensor, output)
        if not self._passes:
            self._open_pass()
        one = self._passes[-1]
        before = None if tensor is None or one.last is None else _unchanged(one.last, tensor)
        if before is not None and not spec.leaf:
            # A container that returns what its last child returned has nothing of its own to show.
            one.entered[spec.name] = len(one.calls) - 1
            return None
        if spec.lazy:
            spec.settle()
            self._hook_weights(spec)
        call = one.open(spec)
        if tensor is None:
            call.reason = f"it returned {type(output).__name__}, which holds no tensor"
            return None
        call.shape = tuple(tensor.shape)
        seeded = self._seed(tensor, output) if self._seeding and self._places is None else None
        if seeded is not None:
            tensor, before = seeded, None
        if before is not None and (before.features or not spec.shown):
            call.same_as, call.features, call.positions = before.same_as or before, before.features, before.positions
        elif spec.shown or spec.weighs:
            self._measure(one, call, args, output, tensor)
        if not tensor.is_inference():
            one.last = (weakref.ref(tensor), tensor._version, call)
        return seeded

    def _seed(self, tensor: Tensor, output: Any) -> Tensor | None:
        """Let gradients start where nothing before asks for one (a frozen embedding), so that they can be measured."""
        if (
            tensor.requires_grad
            or output is not tensor
            or not torch.is_grad_enabled()
            or not tensor.is_floating_point()
            or tensor.is_inference()
        ):
            return None
        leaf = tensor.detach().requires_grad_()
        self._seeds.append(leaf)
        copy: Tensor = leaf.clone()  # not a leaf: the next module may work in place
        return copy

    def _measure(self, one: Pass, call: OpenCall, args: Any, output: Any, tensor: Tensor) -> None:
        spec = call.spec
        if output is not tensor and not isinstance(output, Tensor):
            call.extras = tuple(path for path, other in tensors_in(output) if other is not tensor)
        if self._places is not None:
            call.place = self._places.of(tensor)
            if call.place.summed:
                call.place = Place(reason=PENDING)
        whole = call.place is WHOLE
        seen = local_part(tensor) if whole and is_distributed(tensor) else tensor.detach()
        call.reason = call.place.reason or (why_unmeasurable(seen) if whole else None)
        if call.reason is not None:
            return
        if spec.shown:
            if one.batch_size is None:
                one.batch_size = int(tensor.shape[0]) if tensor.dim() else 1
            measure = measure_output if whole else measure_part
            # what watches functions (dropout at rest, a default device) would look at each operation of the measures
            with torch._C.DisableTorchFunction() if type(seen) is Tensor else nullcontext():
                measure(one, call, seen, axis=self._axis, limit=self._samples)
        if tensor.requires_grad and not tensor.is_inference():
            call.hooked = True
            if spec.weighs:
                self._last = self._last_layer(one, call, args)
            (self._hooks or self._listen()).on_output(tensor, partial(self._take_gradient, one, call))

    def _last_layer(self, one: Pass, call: OpenCall, args: Any) -> LastLayer | None:
        received = args[0] if args and isinstance(args[0], Tensor) else None
        if call.place is not WHOLE or is_distributed(received):
            one.alignment = SHARED_LAYER
            return None
        if received is None or one.batch_size is None or received.is_inference():
            return None
        spec = call.spec
        axis = self._axis if spec.axis is None else spec.axis
        return LastLayer(call, received, received._version, one.batch_size, axis)

    def _take_gradient(self, one: Pass, call: OpenCall, gradient: Tensor | None) -> None:
        """A gradient came back to what a call returned; None does behind an operation without a derivative.

        The hook goes with the graph it hangs on, so it need not be taken off; after the block it rests.
        """
        if gradient is None or not self._handles:
            return
        self._await_reduction()
        call.gradient = log_norm(gradient)
        last = self._last
        if last is not None and last.call is call:
            one.alignment = align(last, gradient.detach(), limit=self._samples)
            self._last = None

    def _take_input_gradient(self, one: Pass, gradient: Tensor | None) -> None:
        if gradient is not None:
            one.input_gradient = log_norm(gradient)

    def _take_weight_gradient(self, name: str, _weight: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is None or not self._passes:
            return
        one = self._passes[-1]
        if name in one.gaps:
            return
        if name in one.weights or name in one.split:
            one.weights.pop(name, None)  # norms of parts do not add up to the norm of the whole
            one.split.add(name)
        else:
            one.weights[name] = log_norm(gradient)

    def _note_gaps(self, one: Pass) -> None:
        """The weights whose gradients cannot be told apart from those of other passes, and why."""
        if find_stage() is not None:
            one.gaps |= dict.fromkeys((name for name, _ in named_parameters(self._root)), REPEATS)
        elif self._shards is not None and self._shards.gathered and not self._seeding:
            one.gaps |= {name: HELD for name, weight in self._distributed() if weight.grad is not None}

    def _await_reduction(self, weight: nn.Parameter | None = None) -> None:
        """Read gradients in `.grad` when the backward pass is over: fully_shard shows them nowhere else.

        The processes average them in a callback that may have been queued after this one, so it queues another.
        """
        needed = weight is not None or (self._shards is not None and self._shards.gathered and not self._seeding)
        if needed and not self._queued:
            self._queued = True
            when_backward_ends(lambda: when_backward_ends(self._read_reduced))

    def _read_reduced(self) -> None:
        self._queued = False
        for name, weight in self._distributed():
            if weight.grad is not None and self._passes and name not in self._passes[-1].gaps:
                self._passes[-1].weights[name] = log_norm(weight.grad)

    def _distributed(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, weight) for name, weight in named_parameters(self._root) if is_distributed(weight)]

    def _observe_again(self, spec: Spec, tensor: Tensor | None, output: Any) -> Any:
        """A checkpointed block runs again during the backward pass: not another call, but the reentrant kind has its
        gradients only here."""
        if tensor is None or not self._passes:
            return None
        seeded = self._seed(tensor, output) if self._seeding and self._places is None else None
        tensor = tensor if seeded is None else seeded
        one = self._passes[-1]
        waiting = [call for call in one.calls if call.spec is spec and not call.hooked and call.gradient is None]
        if waiting and tensor.requires_grad and tensor.is_floating_point():
            call = waiting[0] if len(waiting) == 1 else self._closest(one, waiting, tensor)
            call.hooked = True
            (self._hooks or self._listen()).on_output(tensor, partial(self._take_gradient, one, call))
        return seeded

    def _closest(self, one: Pass, waiting: list[OpenCall], tensor: Tensor) -> OpenCall:
        """Which call of a shared module is being repeated: the one with the same mean square, the latest of equals."""
        one.moments.reduce()
        held = local_part(tensor) if is_distributed(tensor) else tensor.detach()
        now = float(held.double().square().mean())
        return min(reversed(waiting), key=lambda call: abs(call.values.get("mean_square", math.inf) - now))


def watch(
    model: nn.Module,
    *,
    tier: Tier = "fast",
    only: str | Sequence[str] | None = None,
    types: type[nn.Module] | Sequence[type[nn.Module]] | None = None,
    samples: int | None = None,
    batch_axis: int | None = None,
) -> Watched:
    """Watch a model in a loop of your own: `with sounding.watch(model) as watched: loss(model(x), y).backward()`.

    Nothing is changed but hooks, which come off when the block ends, also by an error: mode, running statistics and
    gradients are yours. `watched.profile` holds, for every leaf module call in execution order, what
    `sounding.check` measures.

    Args:
        model: any module; torch.compile and data-parallel wrappers are looked through.
        tier: "fast" (norms of the Gram matrix, gradient norms) or "full" (spectral measures too).
        only: names or patterns ("features.*") of the modules to show; layer numbers stay those of the whole model.
        types: module classes to show.
        samples: at most this many samples of a batch enter the forward measures, the first ones; by default 64 for
            "fast", whose cost they bound, and 512 for "full". Gradients are always of the whole batch.
        batch_axis: the axis of the inputs that holds the samples; by default 0, or 1 for torch's own recurrent and
            transformer modules with batch_first=False.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> with watch(model) as watched:
    ...     model(torch.eye(4)).sum().backward()
    >>> watched.profile.select("gradient_log_norm").layers
    (1, 2)
    """
    return Watched(model, tier=tier, only=only, types=types, samples=samples, batch_axis=batch_axis)


def _unchanged(last: tuple[weakref.ref[Tensor], int, OpenCall], tensor: Tensor) -> OpenCall | None:
    """The previous call, if what it returned is this tensor, unchanged (identity, dropout at rest)."""
    reference, version, call = last
    if reference() is not tensor or tensor.is_inference() or version != tensor._version:
        return None
    return call
