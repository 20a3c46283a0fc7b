"""The state of a model, taken and put back bit for bit: the one definition of "the model is as it was".

A snapshot follows everything that hangs on the model: modules, parameters, buffers, tensors and arrays in plain
attributes, dictionaries, lists and sets at any depth, objects such as optimizers and caches, generators of random
numbers, hooks, and the attributes of the classes. Values are copied before anything runs. Waiting for the first write
is not sound: writes through `.data`, numpy views, storages, batch norm and foreign kernels announce themselves nowhere.
"""

from __future__ import annotations

import array
import enum
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sounding.probe.tensors import HeldTensor, Storages

# What cannot change, or belongs to the program and not to the model.
ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type, torch.dtype, torch.device, torch.Size}
    | {types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.CodeType}
)
# Objects of these packages are not entered: data sets, graphs of code, processes and logs are not a model's state, and
# from a logger or a process group everything else could be reached.
CLOSED = (
    "torch.fx.", "torch.export.", "torch._", "torch.jit.", "torch.cuda.", "torch.distributed.", "torch.utils.data.",
    "logging.", "pathlib.", "weakref.", "functools.", "inspect.", "typing.", "sounding.", "lightning.",
    "pytorch_lightning.",
)  # fmt: skip
# An object that holds one of these serves other threads or the outside; it moves on by itself and is left alone.
LIVE = (
    "threading.", "_thread.", "queue.", "_queue.", "multiprocessing.", "concurrent.", "asyncio.", "socket.", "ssl.",
    "io.", "_io.", "subprocess.",
)  # fmt: skip
FAMILIAR = ("torch.", "builtins.", "collections.", "typing.", "abc.")  # packages whose classes hold no model's state
# Objects that are looked at, at most: a module that holds its trainer holds half of the program. A million of them
# take about a second; nearest ones come first, so that the model's own come before what they lead to.
LIMIT = 200_000


class ModelState:
    """What was there, and the way back.

    Args:
        roots: (name, value) pairs: the model under the name "", and what else the passes may change.
        objects: follow objects that are neither modules nor containers, such as optimizers and caches, and classes.
        parameters: keep the values of the parameters too. Without them a snapshot serves passes in the middle of a
            change to the weights.
    """

    def __init__(self, *roots: tuple[str, Any], objects: bool = True, parameters: bool = True) -> None:
        self.modules: list[tuple[nn.Module, type[nn.Module]]] = []
        self.tensors: list[HeldTensor] = []
        self._objects, self._parameters = objects, parameters
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._empty: dict[int, dict[Any, Any]] = {}
        self._ways_back: list[tuple[str, Callable[[], Any]]] = []
        self._storages = Storages()
        self._seen: dict[int, Any] = {}
        self._left: dict[tuple[str, str], None] = {}
        self._walk(deque(roots))
        self._left |= dict.fromkeys(self._storages.copy())

    @property
    def left(self) -> tuple[tuple[str, str], ...]:
        """Name and reason of what could not be copied, or be put back by `restore`."""
        return tuple(self._left)

    def restore(self, *, versions: bool = True) -> None:
        """Put everything back.

        Args:
            versions: set version counters back as well, so that a graph that was open before runs backward. Not right
                where graphs were opened since that are still of use.
        """
        ways: Iterator[tuple[str, Callable[[], Any]]] = chain(
            (
                ("", partial(setattr, module, "__class__", kind))
                for module, kind in self.modules
                if type(module) is not kind
            ),
            (("", partial(refill, store, {})) for store in self._empty.values() if store),
            (("", partial(refill, container, before)) for container, before in self._contents.values()),
            ((held.name, held.restore) for held in self.tensors),
            self._storages.ways_back(),
            ((held.name, held.rewind) for held in self.tensors if versions),
            self._ways_back,
        )
        for name, way in ways:
            try:
                if way() is False:
                    self._left[name, "it was changed, and cannot be put back"] = None
            except Exception as error:  # one thing that resists must not keep the others from coming back
                self._left[name, f"it cannot be put back ({type(error).__name__}: {error})"] = None

    def release(self) -> None:
        """Let go of all copies: an error that is kept keeps the frames it came through, and these hold the snapshot."""
        self.modules, self.tensors, self._ways_back = [], [], []
        self._contents, self._empty, self._seen, self._storages = {}, {}, {}, Storages()

    def set_gradients_aside(self) -> None:
        """Let every `.grad` be None until `restore`, so that nothing is added to what the user has accumulated."""
        for held in self.tensors:
            if held.gradient is not None:
                held.tensor.grad = None

    def content(self, container: Any) -> Any:
        """What a dictionary, list or set held; None for what was not there or is none."""
        found = self._contents.get(id(container))
        return found[1] if found is not None else {} if id(container) in self._empty else None

    def value(self, held: HeldTensor) -> Tensor:
        """What a tensor held, as a tensor that shares the copy's memory."""
        return self._storages.value(held.alias)

    def _walk(self, queue: deque[tuple[str, Any]]) -> None:
        """Take everything that is reached from the queue, the nearest first."""
        while queue:
            name, value = queue.popleft()
            if id(value) in self._seen or type(value) in ATOMS:
                continue
            if len(self._seen) > LIMIT:
                self._left["", f"more than {LIMIT} objects hang on it; the farther ones are not put back"] = None
                return
            self._seen[id(value)] = value  # held, so that its id is not given to another object
            for key, item in self._take(name, value):
                if type(item) not in ATOMS:
                    queue.append((_join(name, key), item))

    def _take(self, name: str, value: Any) -> Iterator[tuple[Any, Any]]:
        """Note how to put one value back, and what it leads to."""
        if isinstance(value, Tensor):
            yield from self._take_tensor(name, value)
        elif isinstance(value, nn.Module):
            yield from self._take_module(name, value)
        elif isinstance(value, dict):
            if value:
                self._contents[id(value)] = (value, dict(value))
                yield from value.items()
            else:
                self._empty[id(value)] = value
            yield from self._take_object(value)
        elif isinstance(value, list | deque | set):
            self._contents[id(value)] = (value, value.copy())
            yield from enumerate(value)
            yield from self._take_object(value)
        elif isinstance(value, tuple | frozenset):
            yield from enumerate(value)
        elif isinstance(value, np.ndarray | bytearray | array.array):
            self._ways_back.append((name, _array(value)))
            if isinstance(value, np.ndarray) and value.dtype == object:
                yield from enumerate(value.flat)
        elif (way := _generator(value)) is not None:
            self._ways_back.append((name, way))
        elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            before = _position(value)
            self._ways_back.append((name, lambda: before is not None and _position(value) == before))
        elif self._objects and not isinstance(value, enum.Enum) and not _is_from(type(value), CLOSED + LIVE):
            if any(_is_from(type(held), LIVE) for held in (_attributes(value) or {}).values()):
                self._left[name, "it holds a lock, a thread or a file; what it changes is not put back"] = None
            else:
                yield from self._take_object(value)

    def _take_tensor(self, name: str, tensor: Tensor) -> Iterator[tuple[Any, Any]]:
        """Hold a tensor with its memory; yields its attributes, which are walked next."""
        if is_lazy(tensor) or (not self._parameters and isinstance(tensor, nn.Parameter)):
            return
        try:
            held = HeldTensor(name, tensor)
            self._storages.add(name, tensor)
        except Exception as error:
            self._left[name, f"its values cannot be copied, nor put back ({type(error).__name__}: {error})"] = None
            return
        self.tensors.append(held)
        if vars(tensor):
            yield "", vars(tensor)
        else:  # most have none: an empty dictionary needs no copy
            self._empty[id(vars(tensor))] = vars(tensor)

    def _take_module(self, name: str, module: nn.Module) -> Iterator[tuple[Any, Any]]:
        """Hold the attributes and hooks of a module; yields what they hold, which is walked next."""
        self.modules.append((module, type(module)))
        attributes = vars(module)
        self._contents[id(attributes)] = (attributes, attributes.copy())
        for key, value in attributes.items():
            if type(value) in ATOMS:
                continue
            if isinstance(value, dict) and not value:
                self._empty[id(value)] = value
            elif key.endswith("_hooks"):  # what hooks keep for themselves is theirs, which hooks there are is not
                self._contents[id(value)] = (value, value.copy())
            else:
                yield "" if key in ("_modules", "_parameters", "_buffers") else key, value
        if isinstance(module, torch.jit.ScriptModule):
            yield "", [*module._parameters.values(), *module._buffers.values(), *module._modules.values()]
            self._ways_back.append((name, _script(module)))
        yield from self._take_class(type(module))

    def _take_object(self, value: Any) -> Iterator[tuple[Any, Any]]:
        """The attributes of an object that is no module: those in its dictionary, and those in slots."""
        kind = type(value)
        if kind in (dict, list, set, deque, OrderedDict):
            return
        attributes = _attributes(value)
        if attributes is not None:
            yield "", attributes
        slots = _slots(kind)
        held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        if held:
            self._ways_back.append(("", partial(_set_slots, value, slots, held)))
            yield from held.items()
        yield from self._take_class(kind)

    def _take_class(self, kind: type) -> Iterator[tuple[Any, Any]]:
        """Counters and caches that the user's classes share."""
        if not self._objects:
            return
        for base in kind.__mro__:
            if id(base) in self._seen or _is_from(base, FAMILIAR):
                continue
            self._seen[id(base)] = base
            held = {k: v for k, v in vars(base).items() if not k.startswith("__") and not _is_code(v)}
            if held:
                self._ways_back.append((base.__name__, partial(_set_class, base, held)))
                yield from held.items()


def _join(name: str, key: Any) -> str:
    """The name of what hangs on something under a key."""
    last = str(key) if isinstance(key, str | int) else type(key).__name__
    return f"{name}.{last}" if name and last else name or last


def refill(container: Any, before: Any) -> None:
    """Give a container its old content, if it has another now; the very same container, since handles point at it."""
    if isinstance(container, dict):
        same = len(container) == len(before) and all(map(is_, container, before))
        if same and all(map(is_, container.values(), before.values())):
            return
        # a subclass may do more than store in methods of its own
        base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        base.update(container, before)
    elif len(container) == len(before) and (
        container == before if isinstance(container, set) else all(map(is_, container, before))
    ):
        return
    else:
        container.clear()
        container.update(before) if isinstance(container, set) else container.extend(before)


def _array(values: Any) -> Callable[[], None]:
    before = values[:] if isinstance(values, array.array) else values.copy()

    def back() -> None:
        if not isinstance(values, np.ndarray):
            values[:] = before
        elif values.tobytes() != before.tobytes():  # a NaN does not equal itself
            np.copyto(values, before)

    return back


def _generator(value: Any) -> Callable[[], Any] | None:
    """How to set a generator of random numbers back; None for anything else."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    source = value.bit_generator if isinstance(value, np.random.Generator) else value
    return partial(setattr, source, "state", source.state) if isinstance(source, np.random.BitGenerator) else None


def _position(iterator: Any) -> Any:
    """Where an iterator stands, in words; None where it does not tell, as a generator function's."""
    try:
        return repr(iterator.__reduce__())
    except TypeError:
        return None


def _script(module: torch.jit.ScriptModule) -> Callable[[], None]:
    """The numbers, flags and words that a scripted class keeps outside Python."""
    inner: Any = module._c
    try:
        names = list(cast(Any, module)._concrete_type.get_attributes())
    except (AttributeError, RuntimeError):  # traced and loaded modules do not list theirs
        names = []
    held = {name: inner.getattr(name) for name in names}
    plain = {name: value for name, value in held.items() if not isinstance(value, Tensor | nn.Module)}

    def back() -> None:
        for name, value in plain.items():
            if inner.getattr(name) != value:
                inner.setattr(name, value)

    return back


def _is_from(kind: type, packages: tuple[str, ...]) -> bool:
    return f"{kind.__module__}.".startswith(packages)


def _attributes(value: Any) -> dict[str, Any] | None:
    """The dictionary of an object's attributes, past any `__getattr__` of its own; None where there is none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _slots(kind: type) -> list[str]:
    """The names under which objects of a class hold attributes outside their dictionary."""
    found = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _set_slots(value: Any, slots: list[str], before: dict[str, Any]) -> None:
    for name in slots:
        if name in before:
            object.__setattr__(value, name, before[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)


def _set_class(kind: type, before: dict[str, Any]) -> None:
    now = vars(kind)
    for name, value in before.items():
        if now.get(name, now) is not value:
            setattr(kind, name, value)
    for name in [name for name, value in now.items() if name not in before and not _is_code(value)]:
        if not name.startswith("__"):
            delattr(kind, name)


def _is_code(value: Any) -> bool:
    """Methods, properties and slots of a class: no state."""
    return callable(value) or hasattr(type(value), "__get__")
