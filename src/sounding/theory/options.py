"""The records of a prescription: options that reach a depth, changes that cannot, and all of them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sounding.encoding import fields_of

Kind = Literal["none", "eps", "shift", "scale", "shift+eps", "scale+eps", "gains", "haar", "haar+gains"]
WeightLaw = Literal["gaussian", "haar"]

MEAN_FIELD = "mean field of batch norm: Gaussian weights, wide layers (meanfield2019)"


@dataclass(frozen=True)
class Option:
    """One change that reaches the depth."""

    kind: Kind  # what is changed
    change: str  # in words, with its numbers
    growth: float  # predicted factor per layer of the squared gradient norm; its geometric mean where layers differ
    trainable_depth: float  # 16/|ln growth|
    size: float  # RMS change of the normalized pre-activation that the change makes, in its standard deviations
    # eps, scale and shift of every batch norm; at their defaults where the change does not touch them
    eps: float = 0.0
    scale: float = 1.0
    shift: float = 0.0
    gain_exponent: float | None = None  # k of the per-layer gains α_ℓ = ℓ^{−k}, or None
    weight_law: WeightLaw = "gaussian"
    rests_on: str = MEAN_FIELD  # which theory promises it


@dataclass(frozen=True)
class Unreachable:
    """A change that cannot reach the depth: the best it does (None where it does nothing), and why."""

    kind: Kind
    best_growth: float | None
    best_depth: float | None
    why: str


@dataclass(frozen=True)
class Prescription:
    """All options for a network, the smallest change first, and what cannot help.

    Args:
        activation, batch_size, depth, margin: what was asked.
        weight_std: σ_w of weights of variance σ_w²/fan_in, for which every eps is meant.
        wanted_growth: the largest growth with which `margin`·`depth` layers are trainable.
        growth, trainable_depth, attracting: of the network as it is, with eps 0, scale 1, shift 0, Gaussian weights.
        options, unreachable: what reaches the depth ("none" alone when nothing need change), and what does not.
    """

    activation: str
    batch_size: float
    depth: int
    margin: float
    weight_std: float
    wanted_growth: float
    growth: float
    trainable_depth: float
    attracting: bool
    options: tuple[Option, ...]
    unreachable: tuple[Unreachable, ...]

    @property
    def assumption(self) -> str:
        """Which law of the weights an eps is meant for, in words."""
        return (
            f"assumes weights of variance {self.weight_std**2:.4g}/fan_in; an eps must grow with their variance "
            "(nn.Linear starts with 1/(3 fan_in): weight_std 0.577)"
        )

    @property
    def best(self) -> Option | None:
        """The smallest change, or None when nothing reaches the depth."""
        return self.options[0] if self.options else None

    @property
    def batchnorm(self) -> Option | None:
        """The smallest change that sets nothing but the eps, scale and shift of every batch norm."""
        plain = (option for option in self.options if option.gain_exponent is None and option.weight_law == "gaussian")
        return next(plain, None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        wanted = fields_of(self, "activation batch_size depth margin weight_std assumption wanted_growth")
        now = {"gradient_growth": self.growth, **fields_of(self, "trainable_depth attracting")}
        return {**wanted, **now, "reachable": bool(self.options), **fields_of(self, "options unreachable")}

    def __str__(self) -> str:
        state = "" if self.attracting else " (at a fixed point that deep batches leave)"
        lines = [
            f"{self.activation}, batch size {self.batch_size:g}: gradients grow ×{self.growth:.5g} per layer{state}, "
            f"trainable to about {self.trainable_depth:.4g} layers; wanted {self.depth}, {self.margin:g} times over",
            f"  {self.assumption}",
        ]
        lines += [
            f"  {option.change}: ×{option.growth:.5g}, {option.trainable_depth:.4g} layers (size {option.size:.2f})"
            for option in self.options
        ]
        lines += [f"  not {failure.kind}: {failure.why}" for failure in self.unreachable]
        return "\n".join(lines)
