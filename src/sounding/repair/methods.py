"""The cures by name: what each is for, what it costs, what else it does, and how to call it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sounding.errors import UsageError
from sounding.repair.attention import qk_norm_
from sounding.repair.changes import Changes
from sounding.repair.initializers import haar_, he_, lsuv_, xavier_
from sounding.repair.mend import redraw_, reset_norms_, scale_embeddings_, unclone_, zero_biases_
from sounding.repair.normalization import add_batchnorm_, batch_statistics_, break_batchnorm_, swap_normalization_
from sounding.repair.orthogonalize import orthogonalize_
from sounding.repair.passes import Inputs
from sounding.repair.rank import raise_rank_
from sounding.repair.residual import scale_branches_, zero_residual_
from sounding.repair.shaping import shape_activations_
from sounding.repair.tune import tune_batchnorm_

REDRAWS = "every weight is drawn anew: what was learned is lost"
LOOK, PASS, QR = "one look at the parameters", "one forward pass", "one QR decomposition a layer"
NAMELESS = "model", "inputs", "generator", "progress"


@dataclass(frozen=True)
class Method:
    """One cure.

    Args:
        function: changes a model in place and returns what it did; where it looks at a batch, it has an argument
            `inputs`.
        purpose: the illness it is for.
        cost: in words, in units of passes through the model.
        side_effects: what else it does.
        outside: what it changes that a state_dict does not hold, "" when nothing.
        alias: its name where that is not the function's.
    """

    function: Callable[..., Changes]
    purpose: str
    cost: str
    side_effects: str
    outside: str = ""
    alias: str = ""

    @property
    def name(self) -> str:
        """What a plan and the command line call it: the function's name without its underscore."""
        return self.alias or self.function.__name__.removesuffix("_")

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """All arguments of the function."""
        return inspect.signature(self.function).parameters

    @property
    def options(self) -> tuple[str, ...]:
        """The keyword arguments one may set."""
        return tuple(name for name in self.parameters if name not in NAMELESS)

    def run(
        self,
        model: nn.Module,
        inputs: Inputs,
        *,
        options: Mapping[str, Any],
        generator: torch.Generator | None = None,
        progress: Callable[[str, int, float], None] | None = None,
    ) -> Changes:
        """Change the model in place."""
        offered = {"inputs": inputs, "generator": generator, "progress": progress}
        taken = {name: value for name, value in offered.items() if name in self.parameters}
        return self.function(model, **taken, **options)


METHODS = {
    method.name: method
    for method in (
        Method(
            redraw_,
            "weights that the audit names: drawn anew by the law of their siblings or of their kind",
            LOOK,
            "what the named weights have learned is lost",
        ),
        Method(
            unclone_,
            "layers that start as copies of one another: drawn anew, each by its own law",
            LOOK,
            "what the copies have learned is lost",
        ),
        Method(
            zero_biases_,
            "biases that drown the signal: set to zero",
            LOOK,
            "what a bias encodes (class frequencies, gates) is lost",
        ),
        Method(
            reset_norms_,
            "norms whose scale is not one: scales to one, shifts to zero",
            LOOK,
            "what the norms have learned is lost",
        ),
        Method(
            scale_embeddings_,
            "embeddings, tied to the output or not, of an odd scale: multiplied to the usual one",
            LOOK,
            "none",
        ),
        Method(
            batch_statistics_,
            "batch norms that stay in evaluation mode: statistics of the batch again",
            "none",
            "samples of a batch depend on each other, in evaluation mode too",
            outside="running statistics, which are gone",
        ),
        Method(
            qk_norm_,
            "attention scores that are too large: queries and keys normalized head by head",
            "every later pass is slower by the normalization",
            "the model's structure changes",
            outside="the norms of queries and keys",
        ),
        Method(
            haar_,
            "gradients that grow or shrink: orthogonal weights keep every length (thesis2024, chapter 6)",
            QR,
            REDRAWS,
        ),
        Method(haar_, "the same as haar, under the name of the initializer", QR, REDRAWS, alias="orthogonal_init"),
        Method(
            orthogonalize_,
            "rank collapse: each weight from the singular vectors of what reaches it (orth2021)",
            "one forward pass and one eigendecomposition a layer",
            f"{REDRAWS}; under ReLU gradients may grow with depth",
        ),
        Method(
            raise_rank_,
            "rank collapse: unsupervised pre-training of the participation ratio (rank2020)",
            "about 1000 forward and backward passes of 64 samples",
            "weights move away from their initialization, and the scale of the signal with them",
        ),
        Method(
            shape_activations_,
            "gradient explosion under batch norm: activations that become linear with depth (thesis2024, 6.4)",
            PASS,
            "deep layers are nearly linear at the start",
            outside="gains in front of the activations",
        ),
        Method(
            tune_batchnorm_,
            "gradient explosion under batch norm: eps, scale and shift chosen by theory (meanfield2019)",
            "one forward pass and some seconds of theory",
            "scale and shift of every batch norm are set; weights before them are rescaled when eps is",
            outside="eps of the batch norms",
        ),
        Method(
            add_batchnorm_,
            "rank collapse: normalization between linear map and activation (rank2020)",
            "one forward pass; every later pass is slower by the normalization",
            "the model's structure changes; samples of a batch depend on each other in training mode",
            outside="normalization layers",
        ),
        Method(
            swap_normalization_,
            "another kind of normalization: batch, layer, rms or none",
            "none",
            "the model's structure changes; running statistics are lost",
            outside="the kind of the normalization layers",
        ),
        Method(
            break_batchnorm_,
            "a control: one-sided weights that break what batch norm does (rank2020, section 4)",
            "none",
            REDRAWS,
        ),
        Method(xavier_, "a baseline: variance 2/(fan_in + fan_out) (Glorot and Bengio 2010)", "none", REDRAWS),
        Method(he_, "a baseline: variance 2/fan_in, for ReLU (He et al. 2015)", "none", REDRAWS),
        Method(
            lsuv_,
            "a baseline: orthogonal weights rescaled to unit variance (Mishkin and Matas 2016)",
            PASS,
            REDRAWS,
        ),
        Method(
            zero_residual_,
            "residual networks whose signal grows with depth: branches that start at zero",
            PASS,
            "the last weight of each branch is lost",
        ),
        Method(
            scale_branches_,
            "residual networks whose signal grows with depth: 1/√(2L), DeepNorm, LayerScale or CompleteP (rule=…)",
            PASS,
            "branches are smaller at the start",
            outside="factors behind the branches, except by the rule sqrt",
        ),
    )
}


def choose_methods(
    method: str | Sequence[str], options: Mapping[str, Mapping[str, Any]] | None = None
) -> list[tuple[Method, dict[str, Any]]]:
    """The cures of a plan with their options, in the order given.

    Args:
        method: one name, several, or several in one string with commas or plus signs between them. An empty sequence
            is no cure: what `recommend` says of a model that is best left alone.
        options: method name → its keyword arguments.

    >>> [chosen.name for chosen, _ in choose_methods("haar,shape_activations")]
    ['haar', 'shape_activations']
    """
    # + is how a recommendation writes several cures
    names = method.replace("+", ",").split(",") if isinstance(method, str) else list(method)
    # the functions end in one, as torch’s that work in place
    names = [str(name).strip().removesuffix("_") for name in names]
    if not all(names):
        raise UsageError(f"expected the name of a method, got {method!r}", hint=f"one of {', '.join(METHODS)}")
    for name in names:
        if name not in METHODS:
            close = difflib.get_close_matches(name, METHODS, n=1)
            raise UsageError(f"unknown method {name!r}", hint=close[0] if close else f"one of {', '.join(METHODS)}")
    if len(set(names)) < len(names):
        raise UsageError(f"expected each method once, got {', '.join(names)}")
    given = {name.removesuffix("_"): dict(value) for name, value in (options or {}).items()}
    for name, values in given.items():
        if name not in names:
            raise UsageError(f"options for {name!r}, which is not among the methods {', '.join(names)}")
        unknown = [key for key in values if key not in METHODS[name].options]
        if unknown:
            raise UsageError(
                f"{name} has no option {unknown[0]!r}", hint=f"one of {', '.join(METHODS[name].options) or 'none'}"
            )
    chosen = [(METHODS[name], given.get(name, {})) for name in names]
    for one, values in chosen:
        missing = [  # arguments without a default, such as `kind` of a swap
            name
            for name, parameter in one.parameters.items()
            if parameter.default is parameter.empty and name not in (*NAMELESS, *values)
        ]
        if missing:
            raise UsageError(f"{one.name} needs the option {missing[0]!r}", hint=f"{one.name}.{missing[0]}=...")
    return chosen
