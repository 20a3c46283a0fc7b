"""`simulate`: check everything, run the chains, return a `Simulation`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from sounding.chain.engine import Plan, Progress, run_plan
from sounding.chain.inputs import make_input
from sounding.chain.law import ChainLaw, GainSpec, make_law
from sounding.chain.observe import make_observer
from sounding.chain.simulation import Simulation, make_simulation
from sounding.chain.step import choose_route
from sounding.errors import InterruptedRun, UsageError, renamed, require_device, require_whole
from sounding.limits import require_memory, require_time
from sounding.weights import check_law, names

DEFAULT_MEASURES = (
    "orthogonality_gap",
    "participation_ratio",
    "soft_rank",
    "numerical_rank",
    "mean_cosine",
    "log_norm",
)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
ROW_BYTES, RUN_BYTES = 200, 100  # of a row of a profile, and of the sums of a run
LEAST_LAYER = 3e-5  # seconds: the calls of a layer, whatever its size (25 000 layers per second on one core)
FASTEST = 1e13  # operations per second of the fastest CPUs


@dataclass(frozen=True)
class Options:
    """How to run, apart from what a layer is; the arguments of `simulate` of the same names."""

    depth: int
    runs: int = 1
    burn_in: int = 0
    every: int = 1
    measures: Sequence[str] = DEFAULT_MEASURES
    profile: bool = False
    input: str | torch.Tensor = "gaussian"
    explicit_weights: bool = False
    dtype: str = "float32"
    device: str = "cpu"

    def check(self) -> None:
        """Raise on numbers without a meaning."""
        for name, least in (("depth", 1), ("runs", 1), ("burn-in", 0), ("every", 1)):
            require_whole(name, getattr(self, name.replace("-", "_")), least=least)
        if self.burn_in >= self.depth:
            raise UsageError(f"the burn-in must end before the depth of {self.depth}, got {self.burn_in}")
        if self.depth // self.every == self.burn_in // self.every:
            raise UsageError(
                f"no layer past the burn-in of {self.burn_in} is measured at depth {self.depth} and every {self.every}",
                hint=f"--every {max(1, self.depth - self.burn_in)} or less",
            )
        if self.dtype not in DTYPES:
            raise UsageError(f"expected dtype float32 or float64, got {self.dtype!r}")


@renamed(center="centring", position="placement", start="input")
def simulate(
    *,
    width: int,
    batch_size: int,
    depth: int,
    runs: int = 1,
    burn_in: int = 0,
    every: int = 1,
    measures: Sequence[str] = DEFAULT_MEASURES,
    profile: bool = False,
    weights: Any = "gaussian",
    activation: Any = "identity",
    gain: GainSpec = 1.0,
    norm: str = "batch",
    centring: bool = True,
    placement: str = "before",
    eps: float = 0.0,
    residual: float = math.inf,
    input: str | torch.Tensor = "gaussian",
    explicit_weights: bool = False,
    backward: bool = False,
    dtype: str = "float32",
    device: str = "cpu",
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Random networks as Markov chains: averages of measures over depth and runs, exact in law.

    A layer is H′ = φ(g·N(A)) with A = H Wᵀ, or H + γ H Wᵀ with a skip connection (`sounding.chain.law`). For Gaussian
    and Haar weights and n < d, what H sees of W is drawn directly from its law, n × d numbers instead of d × d.

    Args:
        width, batch_size: features d of each layer, and samples n.
        depth: layers; memory does not depend on it (but for a profile, which is as long as the depth over `every`).
        runs: independent chains.
        burn_in: layers left out of the averages.
        every: layers between measurements.
        measures: names from `measure_names()`; three take a parameter: "soft_rank:0.3", "top_eigenvalues:5" and
            "numerical_rank:1e-9", singular values above that share of the largest.
        profile: whether to keep each measured layer.
        weights, activation: a name from `sounding.weights` or `sounding.activations`, or a callable.
        gain: a number, "power:K" for ℓ^(−K), or a function of the layer (from 1).
        norm: "none", "batch", "layer" or "rms". Without one the chain is kept at unit mean square, its scale in
            logarithms: `log_norm` is the true one, scale-dependent measures are those of the rescaled state.
        centring: whether batch norm centres.
        placement: "before" or "after" the activation.
        eps: added to the variance.
        residual: γ in (0, inf]; inf is no skip connection.
        input: what enters the first layer, see `sounding.chain.inputs`.
        explicit_weights: draw every weight matrix.
        backward: also send gradients back, see `sounding.chain.backward`.
        dtype: "float32" (Gram matrices and factors in float64) or "float64".
        device: "cpu", "cuda" or "cuda:1".
        generator: where the randomness comes from; None draws a seed from the operating system.
        progress: called with the chain-layers done and in all.

    Raises:
        UsageError: anything without a meaning, before any work.
        NumericalError: the signal became infinite or NaN.
        InterruptedRun: Ctrl-C; its `partial` is the `Simulation` of what was measured.

    >>> result = simulate(width=32, batch_size=4, depth=200, burn_in=50, runs=8, centring=False,
    ...     generator=torch.Generator().manual_seed(0), measures=["orthogonality_gap"])
    >>> round(result.averages["orthogonality_gap"].value, 2)
    0.2
    """
    settings = {name: value for name, value in locals().items() if name not in ("backward", "generator", "progress")}
    options, layer = _split(settings)
    law = make_law(depth=depth, dtype=dtype, **layer)
    generator = generator or _fresh_generator()
    plan = _make_plan((law,), options, generator=generator)
    if backward:
        from sounding.chain.backward import simulate_backward

        return simulate_backward(plan, generator=generator, progress=progress)
    return _execute(plan, generator=generator, progress=progress)[0]


@renamed(center="centring", position="placement", start="input")
def simulate_many(
    *,
    widths: Sequence[int],
    depth: int,
    residuals: Sequence[float] = (math.inf,),
    batch_sizes: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> tuple[Simulation, ...]:
    """`simulate` for every width and residual strength; on a GPU all strengths of a width run as one batch.

    Args:
        widths, residuals: the widths, and the residual strengths γ.
        depth: layers of each.
        batch_sizes: one for all widths, one per width, or None for as many samples as features.
        generator: as in `simulate`.
        progress: called with the chain-layers done and in all, over all widths and strengths.
        settings: everything else that `simulate` takes, apart from `backward`.

    Returns:
        One simulation per width and strength, widths outermost.
    """
    options, layer = _split({"depth": depth, **settings})
    if not residuals:
        raise UsageError("expected at least one residual strength, got none", hint="inf for no skip connection")
    generator = generator or _fresh_generator()
    plans = []
    if not widths:
        raise UsageError("expected at least one width, got none")
    sizes = list(widths) if batch_sizes is None else batch_sizes
    sizes = [sizes] * len(widths) if isinstance(sizes, int) else sizes
    if len(sizes) != len(widths):
        raise UsageError(f"expected one batch size per width, got {len(sizes)} for {len(widths)}")
    for width, size in zip(widths, sizes, strict=True):
        laws = tuple(
            make_law(width=width, batch_size=size, residual=gamma, depth=depth, dtype=options.dtype, **layer)
            for gamma in residuals
        )
        plans.append(_make_plan(laws, options, generator=generator))
    total = sum(plan.chain_layers for plan in plans)
    found: list[Simulation] = []
    before = 0

    def report(done: int, _: int) -> None:
        """Progress of one plan as progress of all."""
        if progress is not None:
            progress(before + done, total)

    for plan in plans:
        try:
            found += _execute(plan, generator=generator, progress=report)
        except InterruptedRun as stop:
            partial = stop.partial if isinstance(stop.partial, tuple) else (stop.partial,)
            raise InterruptedRun(stop.message, partial=(*found, *filter(None, partial))) from None
        before += plan.chain_layers
    return tuple(found)


def _split(settings: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
    """The arguments of `simulate` that say how to run, checked, and those that say what a layer is."""
    known = {field.name for field in fields(Options)}
    options = Options(**{name: value for name, value in settings.items() if name in known})
    options.check()
    return options, {name: value for name, value in settings.items() if name not in known}


def _fresh_generator() -> torch.Generator:
    """A generator seeded by the operating system."""
    generator = torch.Generator()
    generator.seed()
    return generator


def _make_plan(laws: tuple[ChainLaw, ...], options: Options, *, generator: torch.Generator) -> Plan:
    """What the engine needs to know, checked: law, route, measures, input, dtype and device."""
    law = laws[0]
    device = torch.device(require_device(options.device))
    if law.weights.invariance == "haar" and law.batch_size > law.width and not options.explicit_weights:
        raise UsageError(
            f"an orthogonal frame has at most as many samples as features, got {law.batch_size} samples of "
            f"width {law.width}",
            hint="--explicit-weights, which draws the whole orthogonal matrix",
        )
    if law.weights.name not in names():
        check_law(law.weights, generator=torch.Generator(device=device).manual_seed(0))
    _require_feasible(laws, options, device)
    measures = (options.measures,) if isinstance(options.measures, str) else tuple(options.measures)
    return Plan(
        laws=laws,
        runs=options.runs,
        depth=options.depth,
        burn_in=options.burn_in,
        every=options.every,
        profile=options.profile,
        observer=make_observer(measures, law),
        input=make_input(options.input, width=law.width, batch_size=law.batch_size, generator=generator),
        route=choose_route(law, explicit=options.explicit_weights),
        dtype=DTYPES[options.dtype],
        device=device,
    )


def _require_feasible(laws: tuple[ChainLaw, ...], options: Options, device: torch.device) -> None:
    """Refuse chains whose states, weights or profile do not fit the memory, or that take a night on a CPU."""
    law = laws[0]
    told = f"a chain of width {law.width}, batch size {law.batch_size} and depth {options.depth}"
    state = law.width * law.batch_size + law.batch_size**2  # with its Gram matrix
    weights = law.width**2 if options.explicit_weights else 0
    rows = options.depth // options.every if options.profile else 0
    # of float32, and of one chain at a time: a lower bound, so that nothing is refused that would have fitted
    require_memory(4 * (state + weights) + ROW_BYTES * rows + RUN_BYTES * options.runs, what=told)
    if device.type == "cpu":
        operations = 2.0 * options.runs * (law.batch_size * state + law.batch_size * weights)
        require_time(options.depth * len(laws) * max(LEAST_LAYER, operations / FASTEST), what=told)


def _execute(plan: Plan, *, generator: torch.Generator, progress: Progress | None) -> list[Simulation]:
    """One simulation for each law of the plan; an interrupted run raises with what was measured."""
    by_law, clock = run_plan(plan, generator=generator, progress=progress)
    made = [make_simulation(plan, law, records, clock) for law, records in zip(plan.laws, by_law, strict=True)]
    found = [simulation for simulation in made if simulation is not None]
    if clock.stop.is_set():
        if not found:
            raise InterruptedRun("interrupted before anything was measured")
        partial: Any = found[0] if len(plan.laws) == 1 else tuple(found)
        raise InterruptedRun("interrupted; what was measured is marked partial", partial=partial)
    return found
