"""The record of a simulation: averages with standard errors, a profile over depth, and how fast it went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from sounding.chain.engine import Clock, Plan
from sounding.chain.law import ChainLaw
from sounding.chain.observe import Observer
from sounding.chain.record import LayerMoments, Record
from sounding.errors import UsageError
from sounding.profile import Estimate, Profile, Row


@dataclass(frozen=True)
class Simulation:
    """What random networks of one law did.

    Args:
        averages: each measure averaged over runs and over the layers past the burn-in.
        profile: each measure layer by layer, averaged over runs; layer 0 is the input. Empty unless asked for.
        chain_layers_per_second: runs × depth over `seconds`, of all chains that ran as one batch.
        seconds: the time the layers and their measures took.
        setup_seconds: the time before them: inputs drawn, on a GPU kernels compiled and graphs captured.
        settings: the law and the run, in plain types.
        partial: whether it was interrupted.
        gradients: growth of the gradients towards the input, for a backward chain.
    """

    averages: Mapping[str, Estimate]
    profile: Profile
    chain_layers_per_second: float
    seconds: float
    setup_seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    partial: bool = False
    gradients: Mapping[str, Estimate] = field(default_factory=dict)

    def needed_depth(self, measure: str, *, error: float) -> int:
        """The depth at which the average of `measure` has the standard error `error`, runs and burn-in unchanged.

        The error of an average over T layers of a stationary chain is σ√(τ/T) with τ the autocorrelation time, so T
        grows with the square of the wanted precision: T′ = T·(stderr/error)².
        """
        if measure not in self.averages:
            raise UsageError(f"no average of {measure!r} was taken", hint=f"one of {', '.join(self.averages)}")
        if not error > 0:
            raise UsageError(f"the wanted error must be positive, got {error}")
        stderr = self.averages[measure].stderr
        if stderr is None:
            raise UsageError(
                f"the average of {measure!r} has no standard error, so no depth follows", hint="more layers"
            )
        burn_in, depth = int(self.settings["burn_in"]), int(self.settings["depth"])
        layers = (depth - burn_in) * (stderr / error) ** 2
        return burn_in + max(int(self.settings["every"]), math.ceil(layers - 1e-9))  # rounding adds no layer

    def to_dict(self, *, error: float | None = None) -> dict[str, Any]:
        """Plain types; with `error`, each average says which depth reaches it."""
        averages: dict[str, dict[str, Any]] = {}
        for name, estimate in {**self.averages, **self.gradients}.items():
            averages[name] = {"mean": estimate.value, "stderr": estimate.stderr}
            if error is not None and estimate.stderr is not None and name in self.averages:
                averages[name]["needed_depth"] = self.needed_depth(name, error=error)
        result: dict[str, Any] = {"settings": dict(self.settings), "partial": self.partial, "averages": averages}
        if self.gradients:
            result["gradients"] = {
                name: {"mean": e.value, "stderr": e.stderr, "interval": list(e.interval())}
                for name, e in self.gradients.items()
            }
        if self.profile.rows:
            result["profile"] = [
                {"layer": row.layer, "measure": row.measure, "mean": row.value, "stderr": row.stderr}
                for row in self.profile
            ]
        return {
            **result,
            "chain_layers_per_second": self.chain_layers_per_second,
            "seconds": self.seconds,
            "setup_seconds": self.setup_seconds,
        }

    def __str__(self) -> str:
        s = self.settings
        head = (
            f"Simulation(width {s.get('width')}, batch size {s.get('batch_size')}, depth {s.get('depth')}, "
            f"{s.get('runs')} runs{', partial' if self.partial else ''})"
        )
        numbers = {**self.averages, **self.gradients}
        return "\n".join([head, *(f"  {name:<28}{estimate}" for name, estimate in numbers.items())])

    __repr__ = __str__


def make_simulation(plan: Plan, law: ChainLaw, records: Sequence[Record], clock: Clock) -> Simulation | None:
    """The simulation of one law from the records of its tasks; None where Ctrl-C came before anything was averaged."""
    (seconds, setup_seconds), partial = clock.times, clock.stop.is_set()
    record = reduce(Record.merge, records) if records else None
    if record is None or not record.means.counts.any():
        return None
    settings, moments = _describe(plan, law, partial=partial), record.moments
    rows = moments and [
        Row(layer, "", name, *_value_at(moments, index, columns), "chain")
        for index, layer in enumerate(moments.layers)
        for name, columns in plan.observer.reported.items()
    ]
    return Simulation(
        averages=make_averages(record, plan.observer),
        profile=Profile(tuple(rows or ()), settings),
        chain_layers_per_second=clock.done / seconds,
        seconds=seconds,
        setup_seconds=setup_seconds,
        settings=settings,
        partial=partial,
    )


def make_averages(record: Record, observer: Observer) -> dict[str, Estimate]:
    """The reported averages of a record."""
    averages = {}
    for name, columns in observer.reported.items():
        if isinstance(columns, tuple):
            averages[name] = Estimate(*record.means.ratio(*columns))
        else:
            averages[name] = Estimate(record.means.mean(columns), record.means.standard_error(columns))
    return averages


def _value_at(moments: LayerMoments, index: int, columns: int | tuple[int, int]) -> tuple[float, float | None]:
    """Mean and standard error over runs at one layer; ratios by linearization."""
    mean, scatter, runs = moments.mean[index], moments.scatter[index], float(moments.runs[index])
    if isinstance(columns, tuple):
        x, y = columns
        if not mean[y]:
            return math.nan, None
        value = float(mean[x] / mean[y])
        # the scatter of (x − value·y)/ȳ
        square = float(scatter[x, x] - 2 * value * scatter[x, y] + value**2 * scatter[y, y]) / float(mean[y]) ** 2
    else:
        value, square = float(mean[columns]), float(scatter[columns, columns])
    if runs < 2 or not math.isfinite(square):
        return value, None
    return value, math.sqrt(max(square, 0.0) / (runs * (runs - 1)))  # below 0 only by rounding


def _describe(plan: Plan, law: ChainLaw, *, partial: bool) -> dict[str, Any]:
    """The settings of a run in plain types."""
    described = {
        "width": law.width,
        "batch_size": law.batch_size,
        "depth": plan.depth,
        "runs": plan.runs,
        "burn_in": plan.burn_in,
        "every": plan.every,
        "weights": law.weights.name,
        "activation": law.activation.name,
        "gain": law.gain.name if law.gain.constant is None else law.gain.constant,
        "norm": law.norm,
        "centring": law.centring,
        "center": law.centring,  # the names of "centring" and "placement" up to version 0.1
        "placement": law.placement,
        "position": law.placement,
        "eps": law.eps,
        "residual": law.residual if math.isfinite(law.residual) else "inf",  # JSON has no infinity
        "input": plan.input.kind,
        "input_parameter": plan.input.parameter,
        "route": plan.route,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "device": str(plan.device),
    }
    return {**described, "partial": True} if partial else described
