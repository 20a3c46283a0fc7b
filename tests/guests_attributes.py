"""Foreign modules that change what hangs on them while they run: attributes, generators, hooks, caches passed in."""

from __future__ import annotations

import array
import itertools
import queue
import random
import threading
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tests.guests_weights import WIDTH, Host
from torch import Tensor, nn

# --- attributes ------------------------------------------------------------------------------------------------------


class Counters(Host):
    steps_of_all = 0
    table: dict[str, int] = {}  # noqa: RUF012 - a class that shares its cache, as many do

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.log, self.seen = 0, [1.0], {"a"}

    def act(self, hidden: Tensor) -> None:
        self.steps += 1
        self.log.append(float(hidden.sum()))
        self.seen.add(str(self.steps))
        Counters.steps_of_all += 1
        Counters.table["calls"] = self.steps


class Nested(Host):
    def __init__(self) -> None:
        super().__init__()
        self.stats: Any = {"layers": [{"count": 0}, deque([1, 2], maxlen=2)], "by": defaultdict(list)}
        self.order = OrderedDict(a=1, b=2)

    def act(self, hidden: Tensor) -> None:
        self.stats["layers"][0]["count"] += 1
        self.stats["layers"][1].append(7)
        self.stats["by"]["x"].append(1)
        self.order.move_to_end("a")
        self.new_attribute = hidden


class Arrays(Host):
    def __init__(self) -> None:
        super().__init__()
        self.histogram, self.bytes = np.zeros(8), bytearray(b"ab")
        self.numbers = array.array("d", [1.0])
        self.objects = np.array([[1], [2]], dtype=object)

    def act(self, hidden: Tensor) -> None:
        self.histogram += np.histogram(hidden.detach().numpy(), bins=8)[0]
        self.bytes.extend(b"c")
        self.numbers.append(2.0)
        self.objects[0, 0] = 5


@dataclass
class Meter:
    """The average meter of a thousand training scripts."""

    total: float = 0.0
    values: list[float] = field(default_factory=list)

    def update(self, value: float) -> None:
        self.total += value
        self.values.append(value)


class Slotted:
    __slots__ = ("__hidden", "count", "late", "peak")

    def __init__(self) -> None:
        self.count, self.peak, self.__hidden = 0, torch.zeros(1), 0

    def advance(self) -> None:
        self.count += 1
        self.__hidden += 1
        self.late = True


class Blank:
    """An object that gets its first attribute late."""


class Metered(Host):
    def __init__(self) -> None:
        super().__init__()
        self.meter, self.slotted, self.blank = Meter(), Slotted(), Blank()

    def act(self, hidden: Tensor) -> None:
        self.meter.update(float(hidden.mean()))
        self.slotted.advance()
        self.blank.seen = True  # type: ignore[attr-defined]
        self.slotted.peak.copy_(hidden.detach().amax())


class DropsAttribute(Host):
    def __init__(self) -> None:
        super().__init__()
        self.hint: str | None = "once"
        self.register_buffer("ready", torch.zeros(1))

    def act(self, hidden: Tensor) -> None:
        if hasattr(self, "hint"):
            del self.hint
        self.register_buffer("ready", torch.ones(1))


class NewLayers(Host):
    """A network that grows while it runs, and a layer that changes its class."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def act(self, hidden: Tensor) -> None:
        self.bank.append(nn.Linear(WIDTH, WIDTH))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.bank[0].__class__ = nn.Bilinear


class Switches(Host):
    """A module that turns its children to evaluation in the middle of a pass."""

    def act(self, hidden: Tensor) -> None:
        self.eval()
        self.second.train()


# --- generators ------------------------------------------------------------------------------------------------------


class OwnGenerators(Host):
    def __init__(self) -> None:
        super().__init__()
        self.torch_generator = torch.Generator().manual_seed(3)
        self.numpy_generator = np.random.default_rng(3)
        self.legacy = np.random.RandomState(3)
        self.python = random.Random(3)
        self.sobol = torch.quasirandom.SobolEngine(2, scramble=True, seed=1)

    def act(self, hidden: Tensor) -> None:
        torch.rand(2, generator=self.torch_generator)
        self.numpy_generator.random(2)
        self.legacy.normal(size=3)
        self.python.gauss(0, 1)
        self.sobol.draw(2)


class GlobalGenerators(Host):
    def act(self, hidden: Tensor) -> None:
        torch.rand(3)
        np.random.random(3)  # noqa: NPY002
        random.random()


class Reseeds(Host):
    """A module that seeds everything, so that its noise is reproducible."""

    def act(self, hidden: Tensor) -> None:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)


class SharedGenerator(Host):
    def __init__(self) -> None:
        super().__init__()
        self.noise = [{"generator": torch.Generator().manual_seed(1)}]

    def act(self, hidden: Tensor) -> None:
        torch.randn(4, generator=self.noise[0]["generator"])


class Iterating(Host):
    """Iterators cannot be wound back: they are named."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = itertools.count()

    def act(self, hidden: Tensor) -> None:
        next(self.counter)


class Background:
    """A logger with a thread of its own, which goes on while a check looks at the model."""

    def __init__(self) -> None:
        self.lock, self.waiting = threading.Lock(), queue.Queue[float]()
        self.sent = 0

    def send(self, value: float) -> None:
        with self.lock:
            self.waiting.put(value)
            self.sent += 1


class Logging(Host):
    def __init__(self) -> None:
        super().__init__()
        self.background = Background()

    def act(self, hidden: Tensor) -> None:
        self.background.send(float(hidden.sum()))


# --- hooks -----------------------------------------------------------------------------------------------------------


class HooksAddHooks(Host):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(_add_another)
        self.register_forward_pre_hook(_add_to_child)


def _add_another(module: nn.Module, _args: Any, _output: Any) -> None:
    module.register_forward_hook(_nothing)
    module.register_full_backward_hook(_nothing)


def _add_to_child(module: nn.Module, _args: Any) -> None:
    for child in module.children():
        child.register_forward_pre_hook(_nothing)


def _nothing(*_: Any) -> None:
    return None


class RemovesItself(Host):
    """A hook for the first call alone, as in data-dependent initialization."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = self.first.register_forward_hook(self.once)

    def once(self, module: nn.Module, _args: Any, output: Tensor) -> None:
        with torch.no_grad():
            self.first.weight.div_(output.std())
        self.handle.remove()


# --- caches that are passed in ---------------------------------------------------------------------------------------


class Cache:
    """A key-value cache in the style of the transformers library."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = [torch.zeros(2, WIDTH)]
        self.seen = 0

    def update(self, hidden: Tensor) -> None:
        self.layers.append(hidden)
        self.layers[0].add_(hidden.detach()[:2])
        self.seen += len(hidden)


class Cached(Host):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if isinstance(cache, Cache):
            cache.update(hidden)
        elif isinstance(cache, dict):
            cache["hidden"] = hidden
            cache.setdefault("old", torch.zeros(1)).add_(1)
        elif cache is not None:
            cache.append(hidden)
        result: Tensor = self.second(hidden)
        return result
