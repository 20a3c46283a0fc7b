"""The tap on a model: hooks on every leaf, what they measured, and to whom they report."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

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
from sounding.probe.moments import TIERS, Moments, Tier
from sounding.probe.outputs import guess_axis, leading_tensor, main_tensor, sample_matrix, tensors_in, why_unmeasurable
from sounding.probe.parts import PENDING, WHOLE, Place, Places, is_distributed, local_part
from sounding.probe.pipeline import REPEATS, find_stage, is_rehearsal
from sounding.probe.reading import Reading
from sounding.probe.records import Unmeasured
from sounding.probe.repeats import repeated_fraction
from sounding.probe.sharded import HELD, SHARED_LAYER, Shards, find_shards, measure_part
from sounding.probe.shortcut import shortest_depth
from sounding.probe.state import all_modules, unwrap
from sounding.probe.table import collect, list_unmeasured

# A Gram matrix of a whole batch costs as much as the forward pass of a square layer; 64 samples keep "fast" cheap.
SAMPLES: dict[Tier, int] = {"fast": 64, "full": 512}
Parameters = list[tuple[str, nn.Parameter]]
_graph_task = torch._C._current_graph_task_id  # -1 outside a backward pass


@dataclass(frozen=True)
class Watchable:
    """What is known of a model before it runs."""

    outer: nn.Module  # the model as it was given, `root` the module inside of its wrappers
    root: nn.Module
    tier: Tier
    samples: int  # at most this many samples of a batch enter the forward measures
    axis: int  # the axis of the inputs that holds the samples
    specs: list[Spec]  # the modules to hook
    shards: Shards | None  # what lies in several processes, or None for a model that this one holds whole


def survey_model(
    model: nn.Module,
    *,
    tier: Tier = "fast",
    only: str | Sequence[str] | None = None,
    types: type[nn.Module] | Sequence[type[nn.Module]] | None = None,
    samples: int | None = None,
    batch_axis: int | None = None,
) -> Watchable:
    """Look a model through; the arguments are those of `sounding.watch`."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if tier not in TIERS:
        raise UsageError(f"expected tier to be one of {', '.join(TIERS)}, got {tier!r}")
    if samples is not None and samples < 2:
        raise UsageError(f"expected samples to be at least 2, got {samples}")
    root = unwrap(model)
    return Watchable(
        model,
        root,
        tier,
        samples=SAMPLES[tier] if samples is None else samples,
        axis=guess_axis(root) if batch_axis is None else batch_axis,
        specs=survey(root, only=only, types=types),
        shards=find_shards(root),
    )


class Ear(Protocol):
    """Whoever the hooks report to: a tap, which measures, or one that decides first what counts and then tells a tap.

    A module's `observe` may return a tensor that stands for what the module returned.
    """

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> None: ...
    def note_gaps(self, one: Pass, /) -> None: ...
    def observe(self, spec: Spec, args: Any, output: Any, /) -> Any: ...
    def end(self, module: nn.Module, args: Any, output: Any, /) -> None: ...
    def take_gradient(self, one: Pass, call: OpenCall, gradient: Tensor | None, /) -> None: ...
    def take_input_gradient(self, one: Pass, gradient: Tensor | None, /) -> None: ...
    def take_weight_gradient(self, name: str, weight: nn.Parameter, gradient: Tensor | None, /) -> None: ...
    def read_reduced(self) -> None: ...


class Tap:
    """The hooks on a model and the passes that they measured.

    Args:
        known: what is known of the model.
        ear: whom the hooks report to; by default the tap itself.
        moments: what reduces the samples of all passes; by default each pass has its own.
        look_up: gives the parameters of the model with their names, each time it is hooked.
        around: gives a context for the model's forward method to run in.
        seeding: whether gradients start also where nothing trainable comes before. The weights then get no hooks: who
            runs the backward pass, a check, reads them off it.
    """

    def __init__(
        self,
        known: Watchable,
        *,
        ear: Ear | None = None,
        moments: Moments | None = None,
        look_up: Callable[[], Parameters] | None = None,
        around: Callable[[], AbstractContextManager[Any]] | None = None,
        seeding: bool = False,
    ) -> None:
        self.known, self.root, self.specs = known, known.root, known.specs
        self.passes: list[Pass] = []
        self.seeds: list[Tensor] = []
        self.seeding = seeding
        self._other_ear = ear
        self._moments, self._around = moments, around
        self._look_up = partial(named_parameters, known.root) if look_up is None else look_up
        self._parameters: Parameters = []
        self._last: LastLayer | None = None
        self._handles: list[RemovableHandle] = []
        self._hooks = Hooks()
        self._reads_weights = not seeding
        self._gathered = self._reads_weights and known.shards is not None and known.shards.gathered
        self._places = Places() if known.shards is not None and known.shards.parallel else None
        self._queued = False

    @property
    def _ear(self) -> Ear:
        # held as an attribute, a tap that is its own ear would wait for the garbage collector, with all it has recorded
        return self if self._other_ear is None else self._other_ear

    @property
    def attached(self) -> bool:
        """Whether the hooks are on the model."""
        return bool(self._handles)

    @property
    def unmeasured(self) -> tuple[Unmeasured, ...]:
        """What could not be measured, and why."""
        return list_unmeasured(self.passes, self.root, self.specs)

    def collect(self, settings: Mapping[str, Any], *, source: str) -> Reading:
        """The records of the passes seen, averaged over them."""
        if self.known.shards is not None:
            settings = {**settings, "parallel": self.known.shards.describe()}
        for one in self.passes if self.attached else ():
            one.read_back()
        parameters, tier = self._parameters or self._look_up(), self.known.tier
        return collect(self.passes, parameters, specs=self.specs, tier=tier, source=source, settings=settings)

    def __enter__(self) -> Tap:
        begin, end = Listener(self._ear.begin), Listener(self._ear.end)
        try:
            self._handles += [
                nn.Module.register_forward_pre_hook(self.root, begin, with_kwargs=True, prepend=True),
                nn.Module.register_forward_hook(self.root, end),
            ]
            self._attach_parts()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._hooks.remove()
        self._handles, self._last = [], None
        if self._places is not None:
            self._places.forget()
        for one in self.passes:
            one.moments.release()
            one.read_back()

    def attach_again(self, specs: list[Spec]) -> None:
        """Hook these modules, and the weights there are now, in place of those hooked before."""
        self._hooks.remove()
        self.specs = specs
        self._attach_parts()

    def _attach_parts(self) -> None:
        """Hook all modules, their forward methods and, where they are read, the weights."""
        hooks = self._hooks
        # A replica of DataParallel shares the attributes of its module, and would run the module's forward method.
        past = not any(isinstance(module, nn.DataParallel) for module in all_modules(self.known.outer))
        if past and self._around is not None:
            hooks.around(self.root, self._around)  # inside of the hooks that say where a pass begins
        for spec in self.specs:
            observe = partial(self._ear.observe, spec)
            hooks.on_call(spec.module, Observer(observe))
            if past:
                hooks.on_forward(spec.module, observe)
        if past:
            begin_past, end_past = partial(self._ear.begin, self.root), partial(self._ear.end, self.root)
            hooks.on_forward(self.root, end_past, before=begin_past)
        if self._reads_weights:
            self._parameters = self._look_up()
            self._hook_weights(self._parameters)

    def _hook_weights(self, parameters: Parameters) -> None:
        for name, weight in parameters:
            if weight.requires_grad and not is_lazy(weight):
                self._hooks.on_weight(weight, Listener(partial(self._ear.take_weight_gradient, name, weight)))

    def begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pass of the model starts: find the batch size and measure the input."""
        if _graph_task() != -1:
            return  # a checkpoint around the whole model runs it again
        if self.passes:
            self.passes[-1].moments.finish()  # a block may see a thousand passes, and holds the matrices of one
            self.passes[-1].read_back()
        one = self.open_pass()
        self._last = None
        self._ear.note_gaps(one)
        tensors = [tensor for _, tensor in tensors_in((args, kwargs)) if tensor.dim() > 0]
        first = leading_tensor(tensors)
        if first is None:
            one.input_reason = "the model was called without a tensor"
            return
        axis = self.known.axis if self.known.axis < first.dim() else 0  # a vector has one axis
        one.batch_size = int(first.shape[axis])
        one.input_reason = why_unmeasurable(first)
        plain = [tensor for tensor in tensors if not is_distributed(tensor)]
        if self.known.tier == "full" and plain:
            one.input["repeated_fraction"] = repeated_fraction(plain, one.batch_size, first=axis)
        if one.input_reason is None:
            matrix = sample_matrix(first.detach(), one.batch_size, first=axis, limit=self.known.samples)
            if matrix is not None:
                one.samples, one.input_features = matrix.shape
                one.moments.add(matrix, one.input)
            if first.requires_grad:
                self._handles.append(hook_gradient(first, partial(self._ear.take_input_gradient, one)))

    def open_pass(self) -> Pass:
        """A new record; a frozen script has no mode, and runs as in evaluation."""
        training = getattr(self.root, "training", False)
        one = Pass(self.known.tier, self._moments or Moments(self.known.tier), training=training)
        self.passes.append(one)
        return one

    def end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """A forward pass of the model ends: its graph tells how many weight layers there is no way around."""
        if self._places is not None:
            self._places.forget()
        if self.passes and _graph_task() == -1:
            if is_rehearsal():
                self.passes.pop().moments.finish()
                return
            self.passes[-1].shortest = shortest_depth(tensor for _, tensor in tensors_in(output))

    def observe(self, spec: Spec, args: Any, output: Any) -> Any:
        """A module was called: measure what it returned."""
        tensor = output if isinstance(output, Tensor) else main_tensor(output)
        if _graph_task() != -1:
            return self._observe_again(spec, tensor, output)
        if not self.passes:
            self.open_pass()
        one = self.passes[-1]
        before = None if tensor is None or one.last is None else _unchanged(one.last, tensor)
        if before is not None and not spec.leaf:
            # A container that returns what its last child returned has nothing of its own to show.
            one.entered[spec.name] = len(one.calls) - 1
            return None
        if spec.lazy:  # its weights were made by this call
            spec.settle()
            if self._reads_weights:
                own = {id(weight) for weight in spec.module.parameters()}
                self._hook_weights([pair for pair in named_parameters(self.root) if id(pair[1]) in own])
        call = one.open(spec)
        if tensor is None:
            call.reason = f"it returned {type(output).__name__}, which holds no tensor"
            return None
        call.shape = tuple(tensor.shape)
        seeded = self._seed(tensor, output) if self.seeding and self._places is None else None
        if seeded is not None:
            tensor, before = seeded, None
        if before is not None and (before.features or not spec.shown):
            call.same_as, call.features, call.positions = before.same_as or before, before.features, before.positions
        elif spec.shown or spec.weighs:
            self.measure(one, call, args, output, tensor)
        if not tensor.is_inference():  # those have no version
            one.last = (weakref.ref(tensor), tensor._version, call)  # weak, so that no activation outlives its use
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
        self.seeds.append(leaf)
        copy: Tensor = leaf.clone()  # not a leaf: the next module may work in place
        return copy

    def measure(self, one: Pass, call: OpenCall, args: Any, output: Any, tensor: Tensor) -> None:
        """Take what the output of a call shows, and hook its gradient."""
        spec = call.spec
        if output is not tensor and not isinstance(output, Tensor):
            call.extras = tuple(path for path, other in tensors_in(output) if other is not tensor)
        if self._places is not None:
            call.place = self._places.of(tensor)
            if call.place.summed:  # no measure of a sum follows from those of its summands
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
                measure(one, call, seen, axis=self.known.axis, limit=self.known.samples)
        if tensor.requires_grad and not tensor.is_inference():
            call.hooked = True
            if spec.weighs:
                self._last = self._last_layer(one, call, args)
            self._hooks.on_output(tensor, partial(self._ear.take_gradient, one, call))

    def _last_layer(self, one: Pass, call: OpenCall, args: Any) -> LastLayer | None:
        received = args[0] if args and isinstance(args[0], Tensor) else None
        if call.place is not WHOLE or is_distributed(received):
            one.alignment = SHARED_LAYER
            return None
        if received is None or one.batch_size is None or received.is_inference():
            return None
        spec = call.spec
        axis = self.known.axis if spec.axis is None else spec.axis
        return LastLayer(call, received, received._version, one.batch_size, axis)

    def take_gradient(self, one: Pass, call: OpenCall, gradient: Tensor | None) -> None:
        """A gradient came back to what a call returned; None does behind an operation without a derivative.

        The hook goes with the graph it hangs on, so it need not be taken off; after the block it rests.
        """
        if gradient is None or not self._handles:
            return
        self.await_reduction()
        call.gradient = log_norm(gradient, kept=True)  # torch forbids hooks to change it
        last = self._last
        if last is not None and last.call is call:
            one.alignment = align(last, gradient.detach(), limit=self.known.samples)
            self._last = None

    def take_input_gradient(self, one: Pass, gradient: Tensor | None) -> None:
        """A gradient came back to the input of the model."""
        if gradient is not None:
            one.input_gradient = log_norm(gradient)

    def take_weight_gradient(self, name: str, _weight: nn.Parameter, gradient: Tensor | None) -> None:
        """The gradient of a weight arrived."""
        if gradient is None or not self.passes:
            return
        one = self.passes[-1]
        if name in one.gaps:
            return
        if name in one.weights or name in one.split:
            one.weights.pop(name, None)  # norms of parts do not add up to the norm of the whole
            one.split.add(name)
        else:
            one.weights[name] = log_norm(gradient, kept=True)  # torch copies what somebody holds before it is .grad

    def note_gaps(self, one: Pass) -> None:
        """Note the weights whose gradients cannot be told apart from those of other passes, and why."""
        if find_stage() is not None:
            one.gaps |= dict.fromkeys((name for name, _ in named_parameters(self.root)), REPEATS)
        elif self._gathered:
            one.gaps |= {name: HELD for name, weight in self.distributed() if weight.grad is not None}

    def await_reduction(self, weight: nn.Parameter | None = None) -> None:
        """Read gradients in `.grad` when the backward pass is over: fully_shard shows them nowhere else.

        The processes average them in a callback that may have been queued after this one, so it queues another.
        """
        needed = weight is not None or self._gathered
        if needed and not self._queued:
            self._queued = True

            def tell() -> None:
                self._queued = False
                self._ear.read_reduced()

            when_backward_ends(lambda: when_backward_ends(tell))

    def read_reduced(self) -> None:
        """The backward pass is over, and `.grad` holds what the processes have averaged."""
        for name, weight in self.distributed():
            if weight.grad is not None and self.passes and name not in self.passes[-1].gaps:
                self.passes[-1].weights[name] = log_norm(weight.grad)

    def distributed(self) -> Parameters:
        """The parameters of which this process holds a part."""
        return [(name, weight) for name, weight in named_parameters(self.root) if is_distributed(weight)]

    def _observe_again(self, spec: Spec, tensor: Tensor | None, output: Any) -> Any:
        """A checkpointed block runs again during the backward pass: not another call, but the reentrant kind has its
        gradients only here."""
        if tensor is None or not self.passes:
            return None
        seeded = self._seed(tensor, output) if self.seeding and self._places is None else None
        tensor = tensor if seeded is None else seeded
        one = self.passes[-1]
        waiting = [call for call in one.calls if call.spec is spec and not call.hooked and call.gradient is None]
        if waiting and tensor.requires_grad and tensor.is_floating_point():
            call = waiting[0] if len(waiting) == 1 else self._closest(one, waiting, tensor)
            call.hooked = True
            self._hooks.on_output(tensor, partial(self._ear.take_gradient, one, call))
        return seeded

    def _closest(self, one: Pass, waiting: list[OpenCall], tensor: Tensor) -> OpenCall:
        """Which call of a shared module is being repeated: the one with the same mean square, the latest of equals."""
        one.moments.reduce()
        held = local_part(tensor) if is_distributed(tensor) else tensor.detach()
        now = float(held.double().square().mean())
        return min(reversed(waiting), key=lambda call: abs(call.values.get("mean_square", math.inf) - now))


def _unchanged(last: tuple[weakref.ref[Tensor], int, OpenCall], tensor: Tensor) -> OpenCall | None:
    """The previous call, if what it returned is this tensor, unchanged (identity, dropout at rest)."""
    reference, version, call = last
    if reference() is not tensor or tensor.is_inference() or version != tensor._version:
        return None
    return call
