"""The settings of the page: what a link holds, bounded before anything is computed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sounding.activations import resolve
from sounding.activations.activation import Activation
from sounding.errors import UsageError

NETWORKS = ("batchnorm", "plain", "layernorm", "residual", "transformer")
PLACEMENTS = ("pre", "post", "branch", "none")


@dataclass(frozen=True)
class State:
    """What is chosen on the page; the names are those of `sounding.predict`."""

    network: str = "batchnorm"
    activation: str = "relu"
    formula: str = ""
    batch_size: int = 32
    eps: float = 0.0
    scale: float = 1.0
    shift: float = 0.0
    weight_std: float = 1.0
    bias_std: float = 0.0
    depth: int = 50
    width: int = 128
    branch_scale: float = 1.0
    placement: str = "pre"
    tokens: int = 32
    correlation: float = 0.5

    @property
    def phi(self) -> Activation:
        """The activation that is named, or typed as a formula."""
        return resolve_activation(self.activation, self.formula)

    @property
    def activation_code(self) -> str:
        """The activation as the Python call writes it."""
        return f"lambda x: {self.formula}" if self.activation == "formula" else repr(self.activation)


# what a panel computes in a second or two, and wider than any network that people build
LIMITS: dict[str, tuple[float, float]] = {
    "batch_size": (4, 4096),
    "eps": (0.0, 1e3),
    "scale": (1e-3, 1e3),
    "shift": (-20.0, 20.0),
    "weight_std": (1e-3, 100.0),
    "bias_std": (0.0, 100.0),
    "depth": (1, 500),
    "width": (8, 512),
    "branch_scale": (0.0, 10.0),
    "tokens": (2, 256),
    "correlation": (0.0, 1.0),
}
CHOICES = {"network": NETWORKS, "placement": PLACEMENTS}


@functools.lru_cache(maxsize=64)
def resolve_activation(name: str, formula: str) -> Activation:
    """A named activation, or that of a formula; kept, because to find kinks takes longer than to predict."""
    from sounding.explore.formula import parse_formula

    if name == "formula":
        return resolve(parse_formula(formula))
    # module:function would import and run code, which a link must not
    if ":" in name and not name.partition(":")[2].replace(".", "").replace("-", "").isdigit():
        raise UsageError(f"expected the name of an activation, got {name!r}", hint="relu, or leaky_relu:0.1")
    return resolve(name)


def parse_state(query: Mapping[str, str]) -> State:
    """The state that a link holds; what it does not say has its default.

    Raises:
        UsageError: a name that is not known, or a value outside its limits.

    >>> parse_state({"eps": "0.1", "network": "plain"}).eps
    0.1
    """
    kinds = {field.name: str(field.type) for field in dataclasses.fields(State)}
    if unknown := [name for name in query if name not in kinds]:
        raise UsageError(f"expected a setting among {', '.join(kinds)}, got {unknown[0]!r}")
    return State(**{name: _parse(name, text, whole=kinds[name] == "int") for name, text in query.items()})


def _parse(name: str, text: str, *, whole: bool) -> Any:
    """The value of one setting from its text in the address, within its limits."""
    if name in CHOICES and text not in CHOICES[name]:
        raise UsageError(f"expected {name} to be one of {', '.join(CHOICES[name])}, got {text!r}")
    if name not in LIMITS:
        if len(text) > 200:
            raise UsageError(f"expected at most 200 characters for {name}, got {len(text)}")
        return text
    low, high = LIMITS[name]
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        raise UsageError(f"expected a number for {name}, got {text!r}") from None
    if not low <= value <= high:  # no comparison is true of NaN
        raise UsageError(f"expected {name} from {low:g} to {high:g}, got {text}")
    return value
