"""Which cure for this model: every applicable one is tried on a copy and ranked by what was measured."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sounding.errors import NumericalError, SoundingError, TargetError, UsageError
from sounding.probe.losses import Loss
from sounding.probe.records import STATUSES, Status
from sounding.probe.state import unwrap
from sounding.probe.thresholds import THRESHOLDS
from sounding.reader.blame import blame
from sounding.reader.module import read
from sounding.repair.candidates import Candidate, list_candidates, list_for_cause
from sounding.repair.evidence import Fresh, State, Vitals, examine
from sounding.repair.methods import METHODS, choose_methods
from sounding.repair.passes import Inputs, check_inputs
from sounding.repair.plan import as_inputs, check_model
from sounding.repair.snapshot import take_snapshot
from sounding.repair.tune import MARGIN

# depth scales that cost nothing: rounding, and the noise of a fit over tens of layers
FREE_SCALES = 1.0
LIMIT = THRESHOLDS.depth_scales
CLOSE = 0.05
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Tried:
    """One cure, or several together, as it did on a copy.

    Args:
        methods: in their order; () is the model as it is.
        options: to pass to `sounding.plan` with the methods.
        vitals: what was measured after it.
        status: what the check says of the network: "healthy", "unhealthy" or "not known".
        score: how much of the signal arrives, forwards and backwards, from 0 to 1; see `score`.
        cost: of the cure, in words.
        side_effects: of the cure, in words.
        caused: kinds of findings that were not there before.
    """

    methods: tuple[str, ...]
    options: dict[str, dict[str, Any]]
    vitals: Vitals
    status: Status
    score: float
    cost: str
    side_effects: str
    caused: tuple[str, ...]

    @property
    def name(self) -> str:
        """The methods, joined."""
        return " + ".join(self.methods) or AS_IT_IS

    @property
    def healthy(self) -> bool:
        """Whether the network is known to be healthy."""
        return self.status == "healthy"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "methods": list(self.methods),
            "options": self.options,
            "score": self.score,
            "status": self.status,
            "healthy": self.healthy,
            "vitals": self.vitals.to_dict(),
            "cost": self.cost,
            "side_effects": self.side_effects,
            "caused": list(self.caused),
        }


@dataclass(frozen=True)
class Recommendation:
    """Every cure that was tried, the best first, and those that could not be, with the reason.

    Args:
        tried: the cures, the best first.
        failed: cures that could not be tried, and why.
        cause: what theory blames and what heals it in the network's description, a sentence; "" where there is none.
    """

    tried: tuple[Tried, ...]
    failed: tuple[tuple[str, str], ...] = field(default=())
    cause: str = ""

    @property
    def best(self) -> Tried:
        """The first; with no methods when the model is best left alone."""
        return self.tried[0]

    def __str__(self) -> str:
        rows = [("cure", "score", "gradient²/layer", "trainable to", "directions", "spread", "")]
        for item in self.tried:
            vitals = item.vitals
            reach = "any depth" if vitals.trainable_depth > 1e5 else f"{vitals.trainable_depth:.0f} layers"
            rows.append(
                (
                    item.name,
                    f"{item.score:.3f}",
                    f"×{vitals.growth.value:.4g}",
                    reach,
                    f"{vitals.participation_ratio.value:.3g}",
                    f"{vitals.spread:.3g}",
                    "" if item.healthy else item.status + (f", causes {', '.join(item.caused)}" if item.caused else ""),
                )
            )
        widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        best = self.best
        lines += [f"not possible: {name}: {why}" for name, why in self.failed]
        lines += [self.cause] if self.cause else []
        lines.append(f"Recommended: {best.name}" + (f" ({best.cost}; {best.side_effects})" if best.methods else ""))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "best": self.best.to_dict(),
            "tried": [item.to_dict() for item in self.tried],
            "failed": [{"methods": name, "reason": why} for name, why in self.failed],
            "cause": self.cause,
        }


def recommend(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    loss: str | Loss | None = None,
    repeats: int = 1,
    fresh: Fresh | None = None,
    exclude: Sequence[str] = (),
    generator: torch.Generator | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Recommendation:
    """Try every applicable cure, and sensible combinations, on a copy; rank them. The model itself is never touched.

    Where theory can blame one thing for what is wrong (`sounding.reader.blame`), the cure of that alone is tried too,
    and recommended if it is enough: it changes least.

    Args:
        model: any module that can be copied.
        inputs, targets, loss, repeats, fresh: as for `sounding.plan`.
        exclude: methods not to try, such as the slow "raise_rank", or "add_batchnorm" where structure must stay.
        generator: source of randomness of the cures.
        progress: called with (tried so far, how many there are, the name of the next).

    Raises:
        UsageError: the inputs do not fit, or the model cannot be copied.

    >>> from sounding.models import Mlp
    >>> network = Mlp(16, 4, depth=3, width=16)
    >>> recommend(network, torch.randn(32, 16)).best.name
    'as it is'
    """
    root = _copy(check_model(model))
    batch = as_inputs(inputs)
    check_inputs(batch)
    shown = [(batch, targets)] if fresh is None else [fresh() for _ in range(repeats)]
    start = take_snapshot(root)
    before = examine(root, shown, loss=loss, repeats=repeats, generator=generator)
    left_out = {method.name for method, _ in choose_methods(exclude)}
    cause, told = _blame(root, shown[0], loss)
    candidates = [one for one in (*list_candidates(root, batch), *cause) if not left_out & set(one[0])]
    tried: list[Tried] = []
    failed: list[tuple[str, str]] = []
    for done, (methods, options) in enumerate(candidates):
        name = " + ".join(methods) or AS_IT_IS
        if progress is not None:
            progress(done, len(candidates), name)
        try:
            after = before if not methods else _try(root, batch, methods, options, shown, loss, repeats, generator)
            tried.append(_tell(methods, options, before, after))
        except (UsageError, NumericalError, TargetError) as error:
            failed.append((name, error.message))
        finally:
            start.restore()
    special = [methods for methods, _ in cause]
    return Recommendation(_rank(tried, sound=_is_sound(before), special=special), tuple(failed), told)


def _blame(model: nn.Module, batch: tuple[Any, Any], loss: str | Loss | None) -> tuple[list[Candidate], str]:
    """The cure for what theory blames, and a sentence about it; nothing where it blames nothing."""
    try:
        found = blame(read(model, *batch, loss=loss))
    except (SoundingError, RuntimeError, ValueError, ArithmeticError):
        return [], ""  # what theory cannot read is cured by measurement alone
    if found is None:
        return [], ""
    change, before, after = found
    healed = f"from {before.worst:.3g} to {after.worst:.3g} of the line at which the verdict calls it ill"
    told = f"Theory blames one thing: {change.text}; {change.cure} the network goes {healed}."
    return list_for_cause(change.kind, change.layer), told


def _try(
    model: nn.Module,
    batch: Inputs,
    methods: tuple[str, ...],
    options: dict[str, dict[str, Any]],
    shown: list[tuple[Any, Any]],
    loss: str | Loss | None,
    repeats: int,
    generator: torch.Generator | None,
) -> State:
    """The model after these cures; one that changes nothing is refused."""
    for one, values in choose_methods(methods, options):
        if not one.run(model, batch, options=values, generator=generator).changed:
            raise UsageError(f"{one.name} changes nothing here")
    return examine(model, shown, loss=loss, repeats=repeats, generator=generator)


def score(vitals: Vitals) -> float:
    r"""How much of the signal arrives: what survives backwards times what survives forwards, from 0 to 1.

    Backwards $1 - s/16$, cut to [0, 1], with $s = |\ln g|\,(L - 1)$ the depth scales the network spans: one of more
    than 16 does not train (meanfield2019, figure 2), and training suffers long before. Up to 1 is free: such a rate is
    the noise of a fit. Forwards `Vitals.spread`, the share of the signal in which samples differ.
    """
    backwards = min(1.0, max(0.0, (LIMIT - vitals.depth_scales) / (LIMIT - FREE_SCALES)))
    found = backwards * vitals.spread
    return found if math.isfinite(found) else 0.0


def _is_sound(state: State) -> bool:
    """Nothing was found, and gradients would cross four times the depth: such a model needs no cure."""
    return not state.report.verdict.findings and _crosses(state.vitals)


def _crosses(vitals: Vitals) -> bool:
    """Whether gradients would cross four times the depth."""
    return vitals.depth_scales <= LIMIT / MARGIN


def _rank(tried: list[Tried], *, sound: bool, special: Sequence[tuple[str, ...]]) -> tuple[Tried, ...]:
    """Healthy ones first, by score; the first of all is the simplest among those that come close to the best.

    The cure of what theory blames (`special`) comes first where it makes the network sound: it leaves the rest alone.

    A sound model itself comes before every cure.
    """
    ordered = sorted(tried, key=lambda item: (STATUSES.index(item.status), -item.score, len(item.methods)))
    top = ordered[0]
    close = [item for item in ordered if item.status == top.status and item.score >= top.score - CLOSE]
    close += [item for item in ordered if sound and not item.methods]
    close += [item for item in ordered if item.methods in special and item.healthy and _crosses(item.vitals)]
    first = min(close, key=lambda item: (len(item.methods), item.methods not in special, -item.score))
    return (first, *(item for item in ordered if item is not first))


def _tell(methods: tuple[str, ...], options: dict[str, dict[str, Any]], before: State, after: State) -> Tried:
    old = {finding.kind for finding in before.report.verdict.findings}
    return Tried(
        methods=methods,
        options=options,
        vitals=after.vitals,
        status=after.report.verdict.status,
        score=score(after.vitals),
        cost="; ".join(dict.fromkeys(METHODS[name].cost for name in methods)),
        side_effects="; ".join(dict.fromkeys(METHODS[name].side_effects for name in methods)),
        caused=tuple(f.kind for f in after.report.verdict.findings if f.severity == "high" and f.kind not in old),
    )


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(unwrap(model))
    except Exception as error:
        raise UsageError(
            f"recommend works on a copy, and copying the model raised {type(error).__name__}: {error}",
            hint="sounding.plan(model, inputs, method=...), which needs no copy",
        ) from error
