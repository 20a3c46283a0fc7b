"""What a sweep computes: a verb, options, a grid of them; and the tasks that follow, each known by its content."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sounding import __version__
from sounding.errors import UsageError, require_whole

RUN_VERB = "sounding.cli.verbs:run_verb"  # does a verb of the command line; an address, since the command line is above
SEED = "seed"
ADDRESS = 32  # hexadecimal digits of a task's name: two of 10^9 tasks meet with probability 10^-21


@dataclass(frozen=True)
class Call:
    """One task: a verb, or a function as `module:name`, and its options.

    Args:
        verb: "predict batchnorm", or "package.module:function".
        options: of the verb, JSON types only.
        stack: options that are lists here, of runs that this one task does together.

    >>> Call("predict kernel", {"activation": "relu"}).address == Call("predict kernel", {"activation": "gelu"}).address
    False
    """

    verb: str
    options: Mapping[str, Any]
    stack: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The name of the task: a sum over verb, options and the version of the package."""
        # sorted: the order of options makes no other task
        told = json.dumps([self.verb, self.options, self.stack, __version__], sort_keys=True, allow_nan=False)
        return hashlib.sha256(told.encode()).hexdigest()[:ADDRESS]

    @property
    def function(self) -> str:
        """The address of the function that does the task."""
        return self.verb if ":" in self.verb else RUN_VERB

    @property
    def arguments(self) -> dict[str, Any]:
        """What the function is called with."""
        options = dict(self.options)
        return options if ":" in self.verb else {"verb": self.verb, "options": options, "stack": list(self.stack)}


@dataclass(frozen=True)
class Spec:
    """A sweep.

    Args:
        verb: a verb of the command line that has `--json`, or a function as "module:name".
        grid: option to its values; every combination is one task.
        options: of every task.
        seeds: the random seeds 0, 1, ... are a further axis `seed` of the grid; None where nothing is drawn.
        stack: axes whose values one task takes together, as lists, and gives one row for each combination of them.
        limit: seconds that a task may take; None is as long as it takes.
        threads: of a task.
        resources: what a Dask worker must have for a task, as {"GPU": 1}.
        picture: what is drawn, see `sounding.sweeping.pictures`.
        line: a theory line over the picture: {"verb", "options", "along", "value", "label"}.

    >>> spec = Spec("predict batchnorm", {"batch_size": [8, 16]}, {"activation": "relu"})
    >>> [dict(call.options) for call in spec.calls()]
    [{'activation': 'relu', 'batch_size': 8}, {'activation': 'relu', 'batch_size': 16}]
    """

    verb: str
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: int | None = None
    stack: tuple[str, ...] = ()
    limit: float | None = None
    threads: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    picture: Mapping[str, Any] = field(default_factory=dict)
    line: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("grid", "options"):
            object.__setattr__(self, name, {_plain_name(key): value for key, value in getattr(self, name).items()})
        object.__setattr__(self, "stack", tuple(_plain_name(name) for name in self.stack))
        _check(self)

    @property
    def axes(self) -> dict[str, list[Any]]:
        """The grid with the axis of seeds, if there is one, last."""
        return {**{name: list(values) for name, values in self.grid.items()},
                **({SEED: list(range(self.seeds))} if self.seeds else {})}  # fmt: skip

    def __len__(self) -> int:
        return math.prod(len(values) for name, values in self.axes.items() if name not in self.stack)

    def calls(self) -> Iterator[Call]:
        """Every task, in the order of the grid, its last axis fastest."""
        axes = self.axes
        lists = {name: values for name, values in axes.items() if name in self.stack}
        free = {name: values for name, values in axes.items() if name not in self.stack}
        for values in itertools.product(*free.values()):
            yield Call(self.verb, {**self.options, **dict(zip(free, values, strict=True)), **lists}, tuple(lists))

    def line_spec(self) -> Spec | None:
        """The small sweep of the theory line; None where there is none."""
        if not self.line:
            return None
        along = _plain_name(self.line["along"])
        values = self.line.get("values") or self.axes[along]
        return Spec(self.line["verb"], {along: values}, self.line.get("options", {}))

    def parts(self) -> list[Spec]:
        """The sweep, and the one of its theory line if it has one."""
        line = self.line_spec()
        return [self] if line is None else [self, line]

    def rows_of(self, call: Call) -> list[dict[str, Any]]:
        """The options of each row that the task gives: one, or one for each combination of what it stacks."""
        fixed = {name: value for name, value in call.options.items() if name not in call.stack}
        combined = itertools.product(*(call.options[name] for name in call.stack))
        return [{**fixed, **dict(zip(call.stack, values, strict=True))} for values in combined]

    def to_dict(self) -> dict[str, Any]:
        """Plain fields."""
        return asdict(self) | {"stack": list(self.stack)}


def read_spec(path: Path) -> Spec:
    """The sweep that a TOML file describes.

    Raises:
        UsageError: the file is not there, is no TOML, or describes no sweep.
    """
    try:
        return spec_of(tomllib.loads(path.read_text("utf-8")), where=str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML file: {error}") from error


def spec_of(data: Mapping[str, Any], *, where: str) -> Spec:
    """A sweep from plain fields, as TOML or JSON has them."""
    known = [entry.name for entry in fields(Spec)]
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise UsageError(f"{where} has {unknown[0]!r}, which no sweep has", hint=f"one of {', '.join(known)}")
    if "verb" not in data:
        raise UsageError(f"{where} names no verb", hint='verb = "predict batchnorm"')
    for name in ("grid", "options", "resources", "picture", "line"):
        if not isinstance(data.get(name, {}), Mapping):
            raise UsageError(f"expected a table [{name}] in {where}, got {data[name]!r}")
    if not isinstance(data.get("stack", []), list | tuple):
        raise UsageError(f"expected a list of axes for stack in {where}, got {data['stack']!r}")
    return Spec(**data)


def address_of(function: Callable[..., Any] | str) -> str:
    """A function as `module:name`, by which workers find it.

    >>> from sounding.predict import kernel
    >>> address_of(kernel)
    'sounding.theory.kernel:kernel'
    """
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<nameless>")
    if module is None or "<" in name:
        raise UsageError(f"expected a function that a worker can import, got {function!r}",
                         hint="a function at the top of a module, or a string 'module:name'")  # fmt: skip
    return f"{module}:{name}"


def _plain_name(name: str) -> str:
    return name.replace("-", "_")


def _check(spec: Spec) -> None:
    """Refuse a sweep with values, axes or limits that make no sense."""
    if not isinstance(spec.verb, str) or not spec.verb.strip():
        raise UsageError(f"expected the name of a verb, got {spec.verb!r}", hint='verb = "predict batchnorm"')
    for name, values in spec.grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise UsageError(
                f"expected a list of values for {name!r} of the grid, got {values!r}", hint=f"{name} = [1, 2]"
            )
        # as text, since 1 and True are equal
        if len({json.dumps(value, default=repr) for value in values}) < len(values):
            raise UsageError(f"a value of {name!r} stands in the grid twice")
    for name, value in [*spec.options.items(), *((k, v) for k, values in spec.grid.items() for v in values)]:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(f"expected a finite number, a text or a flag for {name!r}, got {value!r}",
                             hint='"inf" as a text where a verb takes it') from error  # fmt: skip
    clash = set(spec.grid) & set(spec.options)
    if clash:
        raise UsageError(f"option {min(clash)!r} is both fixed and in the grid")
    if spec.seeds is not None:
        require_whole("seeds", spec.seeds)
    if spec.seeds and SEED in {*spec.grid, *spec.options}:
        raise UsageError("expected either seeds or an option 'seed', got both")
    missing = [name for name in spec.stack if name not in spec.axes]
    if missing:
        raise UsageError(f"expected an axis of the grid in stack, got {missing[0]!r}")
    if spec.limit is not None and not (isinstance(spec.limit, int | float) and spec.limit > 0):
        raise UsageError(f"expected a limit in seconds above 0, got {spec.limit!r}")
    require_whole("threads", spec.threads)
    if spec.line:
        lacking = [name for name in ("verb", "along", "value") if name not in spec.line]
        if lacking:
            raise UsageError(f"expected {lacking[0]!r} in the table [line], got none")
        if "values" not in spec.line and _plain_name(spec.line["along"]) not in spec.axes:
            raise UsageError(f"expected the line along an axis of the grid, got {spec.line['along']!r}")
