"""Networks of two vision libraries by name: `torchvision:resnet18,num_classes=10`, `timm:vit_tiny_patch16_224`."""

from __future__ import annotations

import difflib
import importlib
import warnings
from typing import Any

import torch
from torch import nn

from sounding.errors import UsageError
from sounding.limits import require_memory
from sounding.models.hf import read_options

LIBRARIES = ("torchvision", "timm")
INSTALL = "pip install 'sounding[{}]'"
COPIES = 4  # of the parameters that a check holds: weights, gradients, what puts them back, and a reserve


def is_vision(spec: str) -> bool:
    """Whether a word names a network of torchvision or timm.

    >>> is_vision("timm:resnet18"), is_vision("nets.py:timm")
    (True, False)
    """
    return spec.partition(":")[0] in LIBRARIES


def vision_names(library: str) -> list[str]:
    """The names of torchvision's classifiers, or of all networks of timm.

    Raises:
        UsageError: the library is not installed.
    """
    found = _library(library)
    return list(found.list_models(module=found) if library == "torchvision" else found.list_models())


def build_vision(spec: str) -> nn.Module:
    """The network that `library:name,option=value,…` names, with random weights from torch's default generator.

    Options are the keywords of the network's function in its library, as `num_classes=10`. Nothing is downloaded.

    Raises:
        UsageError: the library is missing, has no such name, or does not build what was asked for.
    """
    library, _, rest = spec.partition(":")
    name, *words = rest.split(",")
    known = vision_names(library)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        raise UsageError(f"{library} has no network {name!r}", hint=f"{library}:{close[0] if close else known[0]}")
    options = read_options(words, f"{library}:{name}", example="num_classes=10")
    try:
        with torch.device("meta"):
            size = sum(parameter.nbytes for parameter in _make(library, name, options).parameters())
    except Exception as error:  # the libraries' own refusals are of every type
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise UsageError(f"{library} does not build {spec}: {reason}", hint="other options") from error
    require_memory(COPIES * size, what=f"a check of {spec}", hint="a smaller network")
    return _make(library, name, options)


def _make(library: str, name: str, options: dict[str, Any]) -> nn.Module:
    found = _library(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = found.get_model if library == "torchvision" else found.create_model
        made: nn.Module = make(name, **options)
        return made


def _library(name: str) -> Any:
    try:
        return importlib.import_module("torchvision.models" if name == "torchvision" else name)
    except ModuleNotFoundError as error:
        raise UsageError(f"names that begin with {name}: need the library {name}", hint=INSTALL.format(name)) from error
    except Exception as error:  # a build for another torch fails in ways of its own
        raise UsageError(f"the library {name} cannot be loaded: {type(error).__name__}: {error}",
                         hint=f"a build of {name} for torch {torch.__version__}") from error  # fmt: skip
