"""Leave no trace: what a check touches in a model and around it is put back, bit for bit, whatever happens."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from sounding.probe.eager import eager_execution, slow_attention
from sounding.probe.snapshot import ModelState

Mode = Literal["train", "eval", "keep"]
MODES: tuple[Mode, ...] = ("train", "eval", "keep")
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
FUNCTIONAL_DROPOUT = frozenset(
    getattr(nn.functional, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")
)
_cudnn: Any = torch.backends.cudnn
GLOBAL_HOOKS = [
    held for name, held in vars(nn.modules.module).items() if name.startswith("_global_") and isinstance(held, dict)
]
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@contextmanager
def preserve(model: nn.Module) -> Iterator[ModelState]:
    """On leaving, the model, all that hangs on it, random states and settings of torch are as before.

    `.grad` is None meanwhile.

    The snapshot that is given names in `left`, after the block, what could not be put back.
    """
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002 - the global one is what models use
    started = cast(Any, torch.cuda).is_initialized()  # asking an idle GPU for its state would start it
    devices = range(torch.cuda.device_count()) if started else []
    settings = [read() for read, _ in SETTINGS]
    with torch.random.fork_rng(devices=list(devices)):
        try:
            with untouched([("", model)]) as snapshot:
                snapshot.set_gradients_aside()
                yield snapshot
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)
            for (read, write), value in zip(SETTINGS, settings, strict=True):
                if read() != value:  # to set what is the same would, for one, show warnings again that were shown
                    write(value)


@contextmanager
def untouched(values: Iterable[tuple[str, Any]]) -> Iterator[ModelState]:
    """On leaving, the named values and all that hangs on them are as before."""
    snapshot = ModelState(*values)
    try:
        yield snapshot
    finally:
        snapshot.restore()
        snapshot.release()


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Every module once, wrappers and what is inside scripts included; `model.modules()` at a fraction of its time."""
    found: dict[int, nn.Module] = {}
    stack = [model]
    while stack:
        module = stack.pop()
        if id(module) not in found:
            found[id(module)] = module
            if module._modules:
                stack.extend(child for child in module._modules.values() if child is not None)
    return list(found.values())


def all_tensors(modules: Iterable[nn.Module]) -> tuple[list[nn.Parameter], list[Tensor]]:
    """The parameters and the buffers that modules hold, each once."""
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    for module in modules:
        parameters |= {id(held): held for held in module._parameters.values() if held is not None}
        buffers |= {id(held): held for held in module._buffers.values() if held is not None}
    return list(parameters.values()), list(buffers.values())


def set_mode(model: nn.Module, mode: Mode, *, dropout: bool) -> None:
    """Put the model in the mode to be measured; dropout off unless asked for, so that only samples differ by their own.

    Attention and recurrent layers drop out by a number of their own, which is set to zero. Dropout called as a function
    inside a forward method follows the module's mode and cannot be reached.
    """
    if mode != "keep":
        try:
            model.train(mode == "train")
        except NotImplementedError:  # modules of torch.export run in the mode they were exported in, and say so
            for module in all_modules(model):
                module.training = mode == "train"
    if dropout or mode == "keep":
        return
    for module in all_modules(model):
        if isinstance(module, DROPOUT):
            module.training = False
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode, without gradients; afterwards every module has its own mode again."""
    # not `model.train(mode)` at the end: parts may be frozen on their own
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def plain_execution() -> Iterator[None]:
    """Run every module in Python, where hooks see it: no attention fast path, no compiled graphs."""
    eager_execution.hold()
    slow_attention.hold()
    try:
        yield
    finally:
        slow_attention.release()
        eager_execution.release()


class DropoutAtRest(TorchFunctionMode):
    """Inside, dropout that a forward method calls as a function does nothing, nor does that of fused attention.

    `most` is the largest share that would have been dropped, `place` the module before it, which `where` tells.
    """

    most, place = 0.0, ""

    def __init__(self, where: Callable[[], str] | None = None) -> None:
        super().__init__()
        self._where = where

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in FUNCTIONAL_DROPOUT:
            if kwargs.get("training", args[2] if len(args) > 2 else True):
                share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
                if share > self.most:
                    self.most, self.place = share, self._where() if self._where is not None else ""
            kwargs["training"], args = False, (*args[:2], *args[3:])
        elif func is nn.functional.scaled_dot_product_attention:
            kwargs["dropout_p"], args = 0.0, (*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:])
            if len(args) > 4:
                del kwargs["dropout_p"]
        return func(*args, **kwargs)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile, DataParallel and DistributedDataParallel, however nested."""
    while True:
        children = model._modules
        if len(children) != 1 or isinstance(model, torch.jit.ScriptModule):
            return model
        inner = children.get("_orig_mod") or (children.get("module") if isinstance(model, PARALLEL) else None)
        if inner is None:
            return model
        model = inner


def thaw(model: nn.Module) -> None:
    """Put ordinary copies in the place of tensors made in inference mode, which no graph may save.

    Only inside `preserve`, which puts the originals back.
    """
    copies: dict[int, Tensor] = {}

    def copy_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            plain = tensor.clone()
            trainable = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(plain, tensor.requires_grad) if trainable else plain
        return copies[id(tensor)]

    for module in all_modules(model):
        stores: tuple[dict[str, Any], ...] = (cast(Any, module._parameters), cast(Any, module._buffers), vars(module))
        for store in stores:
            for name, value in list(store.items()):
                if isinstance(value, Tensor) and not is_lazy(value) and value.is_inference():
                    store[name] = copy_of(value)


def materializable(model: nn.Module) -> nn.Module:
    """The model, or a copy of it where parameters have no shape yet: a check would leave it initialized.

    The copy draws the weights that the model will draw, since the random state is put back.
    """
    parameters, buffers = all_tensors(all_modules(model))
    lazy = [tensor for tensor in [*parameters, *buffers] if is_lazy(tensor)]
    if not lazy:
        return model
    memo = {id(old): cast(Any, type(old))(old.requires_grad, old.device, old.dtype) for old in lazy}
    return copy.deepcopy(model, memo)


def _default_device() -> torch.device | None:
    context: Any = getattr(cast(Any, torch)._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _set_filters(filters: list[Any]) -> None:
    cast(Any, warnings).filters[:] = filters
    cast(Any, warnings)._filters_mutated()


def _set_global_hooks(kept: list[dict[int, Any]]) -> None:
    for store, held in zip(GLOBAL_HOOKS, kept, strict=True):
        store.clear()
        store.update(held)


# What a forward method may change for the whole process and a few lines put back: how to read it, how to set it.
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (lambda: _cudnn.deterministic, lambda value: setattr(_cudnn, "deterministic", value)),
    (lambda: _cudnn.benchmark, lambda value: setattr(_cudnn, "benchmark", value)),
    (lambda: list(warnings.filters), _set_filters),
    (lambda: [dict(held) for held in GLOBAL_HOOKS], _set_global_hooks),
)
