"""TARGET: from `file.py:name`, `package.module:name` or a network of ours to a module, and a sentence when it fails."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sounding.errors import TargetError, UsageError

if TYPE_CHECKING:
    from torch import nn

FORMS = "file.py:name or package.module:name"
NAMES_SHOWN = 12  # of what a file defines, in an error message


def load_target(spec: str, *, data: str | None = None, shape: tuple[int, ...] | None = None) -> nn.Module:
    """The module that TARGET names: one that is there, or the one a callable without arguments makes.

    `mlp,depth=50`, a name of `sounding.models` with options, builds that network for samples of `shape`, or else for
    samples and labels as `data` has them. `hf:gpt2,layers=8` builds an architecture of the transformers library.

    The file's folder and the current folder are importable while the target is loaded and afterwards, as a script's
    folder is. What the target prints goes to stderr, so that stdout stays ours.

    Raises:
        UsageError: no such file, module or name; or the name is no module and makes none.
        TargetError: the user's code raised; the cause is attached.
    """
    from torch import nn

    from sounding.models import build_from_spec, is_spec
    from sounding.models.hf import build_hf, is_hf

    if is_hf(spec):
        with calling(f"building {spec}"):
            return build_hf(spec)
    if is_spec(spec):
        from sounding.data import known_shape

        known, classes = known_shape(data or "") or (None, None)
        return build_from_spec(spec, shape=shape or known, classes=classes)
    found = load_object(spec)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise UsageError(
            f"expected {spec} to be a torch.nn.Module or a callable that makes one, got {_describe(found)}"
        )
    return make_network(spec, found)


def make_network(spec: str, make: Callable[..., Any], **arguments: Any) -> nn.Module:
    """What a function at an address makes of some arguments, which must be a network."""
    from torch import nn

    with calling(f"making the network with {spec}", hint=None if arguments else _arguments_hint(spec, make)):
        made = make(**arguments)
    if not isinstance(made, nn.Module):
        raise UsageError(f"expected {spec}() to make a torch.nn.Module, got {_describe(made)}")
    return made


def load_object(spec: str) -> Any:
    """The object at an address, imported."""
    address, colon, name = spec.rpartition(":")
    if not colon or not address or not name:
        # file.py: with nothing behind the colon is a name that was forgotten
        path = Path(spec.rstrip(":"))
        named = path / "model.py" if path.is_dir() else path
        hint = f"{named}:name" if not path.is_file() else _names_hint(_import_file(path), path)
        hint = hint if path.is_file() else _similar_model(spec) or hint
        raise UsageError(f"expected {FORMS}, got {spec!r}", hint=hint)
    path = Path(address)
    module = _import_file(path) if path.suffix == ".py" or os.sep in address else _import_module(address)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{address} has no {name!r}", hint=_names_hint(module, address, name))
        found = getattr(found, part)
    return found


@contextlib.contextmanager
def calling(what: str, *, hint: str | None = None) -> Iterator[None]:
    """Run the user's code: its exceptions become a TargetError, its prints go to stderr.

    SystemExit too: a script that parses arguments at import would otherwise end us without a word.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (UsageError, TargetError):
        raise
    except (Exception, SystemExit) as error:
        raise TargetError(f"{what} raised {in_words(error)}", hint=hint) from error


def in_words(error: BaseException) -> str:
    """An exception in one line: its type, and the first line of its message.

    >>> in_words(ValueError("one\\ntwo")), in_words(KeyError())
    ('ValueError: one', 'KeyError')
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _import_file(path: Path) -> ModuleType:
    """The module that a Python file makes, under a name that replaces no other."""
    if not path.exists():
        there: list[str] = []
        with contextlib.suppress(OSError):  # a folder that may not be read
            there = [str(entry) for entry in path.parent.glob("*.py")]
        raise UsageError(f"no file {path}", hint=next(iter(difflib.get_close_matches(str(path), there, n=1)), None))
    if not path.is_file():
        raise UsageError(f"expected a Python file, got the folder {path}", hint=f"{path}/model.py:name")
    make_importable(path.resolve().parent)  # as Python does with the folder of a script
    # a file called torch.py or test.py must not replace the module of that name
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"sounding_target_{path.stem}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"expected a Python file (.py), got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickles look it up there
    try:
        with calling(f"importing {path}"):
            spec.loader.exec_module(module)
    # a module that failed on the way must not be found by a second attempt
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _import_module(name: str) -> ModuleType:
    make_importable(Path.cwd())
    try:
        with calling(f"importing {name}"):
            return importlib.import_module(name)
    except TargetError as error:
        cause = error.__cause__
        # only the module asked for: one that it imports in turn is the target's own failure
        if isinstance(cause, ModuleNotFoundError) and cause.name and (name + ".").startswith(cause.name + "."):
            hint = f"{name}.py:name" if Path(f"{name}.py").exists() else None
            raise UsageError(f"no module named {name!r} here or among the installed packages", hint=hint) from error
        raise


def make_importable(folder: Path) -> None:
    """Let modules of a folder, and of the current one, be imported, as those beside a script are."""
    for place in (str(Path.cwd()), str(folder)):
        if place not in sys.path:
            sys.path.insert(0, place)


def _names_hint(module: ModuleType, address: str | Path, wanted: str = "") -> str:
    """The names that could have been meant: the closest first, then what the module itself defines."""
    from torch import nn

    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        # a network at hand is of a class from elsewhere; a callable from elsewhere was only imported
        and (
            isinstance(value, nn.Module)
            or (callable(value) and getattr(value, "__module__", None) in (module.__name__, None))
        )
    ] or [name for name in vars(module) if not name.startswith("_")]
    close = difflib.get_close_matches(wanted, own, n=1) if wanted else []
    ordered = [*close, *(name for name in own if name not in close)]
    if not ordered:
        return "another file: this one defines nothing"
    if wanted and len(ordered) == 1:
        return f"{address}:{ordered[0]}"
    more = f" and {len(ordered) - NAMES_SHOWN} more" if len(ordered) > NAMES_SHOWN else ""
    return f"{address}:{ordered[0]} (it has {', '.join(ordered[:NAMES_SHOWN])}{more})"


def _similar_model(spec: str) -> str | None:
    """A network of ours whose name is close."""
    from sounding.models import names

    name, comma, options = spec.partition(",")
    close = difflib.get_close_matches(name.lower(), names(), n=1)
    return f"{close[0]}{comma}{options}" if close else None


def _arguments_hint(spec: str, found: Any) -> str | None:
    """When the callable needs arguments, say so instead of leaving Python's TypeError alone."""
    import inspect

    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return None
    needed = [one.name for one in parameters
              if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]  # fmt: skip
    if not needed:
        return None
    return f"a function without arguments that makes it ({spec.rpartition(':')[2]} needs {', '.join(needed)})"


def _describe(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:60] if isinstance(value, int | float | str) else type(value).__name__
