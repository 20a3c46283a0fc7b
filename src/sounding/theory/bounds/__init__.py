"""The theorems of the papers as functions: a value, its assumptions, and whether they hold for the numbers given.

One module per seed: `rank2020`, `orth2021`, `thesis2024` (chapters 3, 4, 6) and `kernel_maps` (thesis2024 chapter 5).
Where a printed statement is wrong or needlessly weak, `version="corrected"` (the default) and `version="printed"` give
both. `theorems.toml` has their words; `THEOREMS` lists them by name for the command line, `evaluate` calls one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sounding.encoding import fields_of
from sounding.errors import UsageError, require_known
from sounding.theory.bounds import kernel_maps, orth2021, rank2020, thesis2024
from sounding.theory.bounds.bound import Assumption, Bound

if TYPE_CHECKING:
    from sounding.activations import ActivationLike
    from sounding.theory.bounds.kernel_maps import Norm

__all__ = [
    "Assumption", "Bound", "THEOREMS", "evaluate", "kernel_numbers", "kernel_maps", "orth2021", "parameters",
    "rank2020", "thesis2024",
]  # fmt: skip

THEOREMS: dict[str, Callable[..., Bound]] = {
    "rank2020-lemma1": rank2020.lemma_1,
    "rank2020-lemma7": rank2020.lemma_7,
    "rank2020-lemma13": rank2020.lemma_13,
    "rank2020-theorem2": rank2020.theorem_2,
    "orth2021-theorem1": orth2021.theorem_1,
    "orth2021-lemma2": orth2021.lemma_2,
    "orth2021-corollary3": orth2021.corollary_3,
    "orth2021-theorem5": orth2021.theorem_5,
    "orth2021-lemma8": orth2021.lemma_8,
    "thesis2024-theorem3.2": thesis2024.theorem_3_2,
    "thesis2024-theorem4.3": thesis2024.theorem_4_3,
    "thesis2024-corollary4.4": thesis2024.corollary_4_4,
    "thesis2024-corollary4.5": thesis2024.corollary_4_5,
    "thesis2024-theorem5.8": kernel_maps.theorem_5_8,
    "thesis2024-corollary5.10": kernel_maps.corollary_5_10,
    "thesis2024-theorem5.11": kernel_maps.theorem_5_11,
    "thesis2024-theorem5.15": kernel_maps.theorem_5_15,
    "thesis2024-theorem6.1": thesis2024.theorem_6_1,
    "thesis2024-theorem6.3": thesis2024.theorem_6_3,
    "thesis2024-corollary6.4": thesis2024.corollary_6_4,
    "thesis2024-theorem6.5": thesis2024.theorem_6_5,
}


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a theorem by name, callables left out."""
    return {key: parameter for key, parameter in inspect.signature(_find(name)).parameters.items() if key != "kappa"}


def evaluate(name: str, **arguments: Any) -> Bound:
    """The theorem called `name`, evaluated at `arguments`.

    >>> print(round(evaluate("rank2020-theorem2", width=64, regularity=0.5).value, 6))
    2.956188
    """
    theorem = _find(name)
    known = inspect.signature(theorem).parameters
    unknown = [key for key in arguments if key not in known]
    missing = [key for key, parameter in known.items() if parameter.default is parameter.empty and key not in arguments]
    if unknown or missing:
        problem = f"has no {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
        raise UsageError(f"{name} {problem}", hint=f"its parameters {', '.join(parameters(name))}")
    return theorem(**arguments)


def kernel_numbers(name: str, activation: ActivationLike, *, norm: Norm = "none") -> dict[str, Any]:
    """What a theorem of thesis2024 chapter 5 needs to know of an activation, from its kernel map, by parameter name."""
    from sounding.theory.kernel import evaluate as evaluate_kernel
    from sounding.theory.kernel import kernel

    known = parameters(name)
    if "slope_zero" not in known:
        raise UsageError(f"{name} does not depend on an activation, got {activation}", hint="leaving it out")
    found = kernel(activation, norm)
    numbers = fields_of(found, "slope_zero slope_one fixed_point slope_fixed_point") | {"kappa_zero": found.zero}
    if "second_moment" in known:
        # Theorem 5.15 speaks of the unscaled activation
        bare = kernel(activation)
        numbers = {
            "second_moment": bare.second_moment,
            "squared_mean": bare.second_moment * bare.zero,
            "slope_zero": bare.second_moment * bare.slope_zero,
            "slope_one": bare.second_moment * bare.slope_one,
            "norm": norm,
        }
    numbers = {key: value for key, value in numbers.items() if key in known}
    return numbers | {"kappa": lambda rho: evaluate_kernel(activation, rho, norm=norm).value}


def _find(name: str) -> Callable[..., Bound]:
    """The function of a theorem, or an error that lists all names."""
    require_known("theorem", name, THEOREMS)
    return THEOREMS[name]
