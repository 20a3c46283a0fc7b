"""Figures 1, 2 and 6 and the conjecture of appendix F: random networks at initialization."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sounding.claims.claim import Claim, Context, Correction, Expectation, Outcome, Setting
from sounding.claims.number import DRAWN, Number, estimate, exact, ratio_of, slope_of
from sounding.claims.picture import Panel, Picture, Series
from sounding.theory.bounds import orth2021 as bounds

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from sounding.chain import Simulation
    from sounding.profile import Series as ProfileSeries

ACTIVATIONS = ("identity", "relu", "sigmoid", "tanh")
"""Figure 6 names ReLU, sigmoid and tanh beside the linear network."""


def _chain(context: Context, offset: int, **options: Any) -> Simulation:
    from sounding.chain import simulate

    return simulate(center=False, profile=True, device=context.device, generator=context.generator(offset), **options)


def _nearly_rank_one(width: int, samples: int, spread: float) -> torch.Tensor:
    """Samples diag(1, ε, …, ε) as the released program starts, (samples, width)."""
    import torch

    start = torch.zeros(samples, width, dtype=torch.float64)
    start[range(samples), range(samples)] = spread
    start[0, 0] = 1.0
    return start * math.sqrt(width)


def measure_figure1(values: Mapping[str, Any], context: Context) -> Outcome:
    """|cos| between two samples over depth: with batch norm from nearly equal samples, without from orthogonal ones."""
    import torch

    width, eps = values["width"], values["eps"]
    correlated = torch.zeros(2, width, dtype=torch.float64)
    correlated[0, 0], correlated[1, 0], correlated[1, 1] = 1.0, 1 - eps, eps
    shape = {"width": width, "batch_size": 2, "depth": values["depth"], "runs": values["runs"]}
    measures = ("mean_absolute_cosine",)
    batch = _chain(context, 0, start=correlated * math.sqrt(width), measures=measures, **shape)
    vanilla = _chain(context, 1, start="orthogonal", norm="none", measures=measures, **shape)
    curves = {}
    for name, run in (("batch norm", batch), ("vanilla", vanilla)):
        assert run.profile is not None
        curves[name] = run.profile.series("mean_absolute_cosine")
    numbers = {}
    for name, series in curves.items():
        key = name.replace(" ", "_")
        for place, index in (("first", 0), ("half", values["depth"] // 2), ("last", values["depth"])):
            numbers[f"{key}_{place}"] = estimate(
                float(series.value[index]), float(np.nan_to_num(series.stderr[index])), samples=values["runs"]
            )
    first, half = numbers["vanilla_half"], numbers["vanilla_last"]
    numbers["vanilla_rise_second_half"] = estimate(
        half.value - first.value, math.hypot(first.high - first.value, half.high - half.value) / DRAWN
    )
    chance = math.gamma(width / 2) / math.gamma((width + 1) / 2) / math.sqrt(math.pi)
    layers = [0, values["depth"]]
    panel = Panel(
        "layer",
        "|cos| between the two samples",
        (
            *(Series(n, s.layer, s.value, error=DRAWN * np.nan_to_num(s.stderr)) for n, s in curves.items()),
            Series("independent directions (theory)", layers, [chance, chance], role="theory"),
        ),
    )
    caption = "With batch norm two nearly equal samples become as orthogonal as chance; without, orthogonal ones align."
    return Outcome(numbers, Picture((panel,), caption))


def _mean_field(samples: int, spread: float, depth: int) -> NDArray[np.float64]:
    """The gap along the infinitely wide chain."""
    sigma = np.append(1.0, np.full(samples - 1, spread))
    path = []
    for _ in range(depth + 1):
        eigenvalues = sigma**2 / np.sum(sigma**2)
        path.append(float(np.linalg.norm(eigenvalues - 1 / samples)))
        sigma = np.sqrt(bounds.expected_spectrum(sigma))
    return np.array(path)


def measure_figure2a(values: Mapping[str, Any], context: Context) -> Outcome:
    """ln V over depth at two widths, from a nearly rank-one batch."""
    n, depth = values["batch_size"], values["depth"]
    narrow, wide = values["widths"]
    series, curves = [], {}
    for index, width in enumerate((narrow, wide)):
        start = _nearly_rank_one(width, n, values["eps"])
        options = {"width": width, "batch_size": n, "depth": depth, "runs": values["runs"], "dtype": "float64"}
        run = _chain(context, index, start=start, measures=("orthogonality_gap",), **options)
        assert run.profile is not None
        found = run.profile.series("orthogonality_gap")
        curves[width] = found
        series.append(Series(f"d = {width}", found.layer, found.value, error=DRAWN * np.nan_to_num(found.stderr)))
    theory = _mean_field(n, values["eps"], depth)
    series.append(Series("infinite width (theory)", np.arange(depth + 1), theory, role="theory"))
    logs = np.log(curves[wide].value)
    errors = np.nan_to_num(curves[wide].stderr) / curves[wide].value
    rng = np.random.default_rng(context.random_seed)
    noisy = logs[1:21] + errors[1:21] * rng.standard_normal((400, 20))
    straightness = np.array([np.corrcoef(np.arange(20), row)[0, 1] ** 2 for row in (logs[1:21], *noisy)])
    floors = {width: curve.value[depth // 2 :] for width, curve in curves.items()}
    late = np.arange(depth // 2, depth + 1)
    numbers = {
        "decay_per_layer_first_20": slope_of(np.arange(1, 21), logs[1:21], stderr=list(errors[1:21])),
        "straightness_first_20": estimate(float(straightness[0]), float(straightness[1:].std())),
        "drift_after_half": slope_of(late, logs[depth // 2 :], stderr=list(errors[depth // 2 :])),
        "floor_ratio": ratio_of(_late_mean(curves[narrow], depth // 2), _late_mean(curves[wide], depth // 2)),
        "layers_until_floor": exact(float(np.argmax(curves[wide].value < 1.5 * floors[wide].mean())), error=1.0),
    }
    panel = Panel("layer", "orthogonality gap V", series, y_scale="log")
    caption = (
        "The gap of the infinitely wide chain falls by n/(n + 2) = ⅔ per layer. A network of finite width follows it "
        "down to its floor, which is lower the wider it is."
    )
    return Outcome(numbers, Picture((panel,), caption))


def _late_mean(curve: ProfileSeries, first: int) -> Number:
    """The mean over the layers from `first` on; the layers of a run are taken as wholly dependent."""
    return estimate(float(curve.value[first:].mean()), float(np.nan_to_num(curve.stderr[first:]).mean()))


def measure_figure2b(values: Mapping[str, Any], context: Context) -> Outcome:
    """The average gap over a window of layers against the width, on logarithmic axes."""
    n, widths = values["batch_size"], np.array(values["widths"])
    first, last = values["window"]
    means, errors = [], []
    for index, width in enumerate(widths):
        run = _chain(
            context,
            index,
            width=int(width),
            batch_size=n,
            depth=last,
            burn_in=first,
            runs=values["runs"],
            start=_nearly_rank_one(int(width), n, values["eps"]),
            measures=("orthogonality_gap",),
        )
        average = run.averages["orthogonality_gap"]
        means.append(average.value)
        errors.append(average.stderr or 0.0)
    mean, error = np.array(means), np.array(errors)
    slope = slope_of(np.log(widths), np.log(mean), stderr=list(error / mean), straight=False)
    panel = Panel(
        "width d",
        f"V averaged over layers {first}–{last}",
        (
            Series("measured", widths, mean, error=DRAWN * error),
            Series("d^(−1/2) (theory)", widths, mean[-1] * (widths / widths[-1]) ** -0.5, role="theory"),
            Series("slope −0.46, as printed", widths, mean[-1] * (widths / widths[-1]) ** -0.46, role="paper"),
        ),
        x_scale="log",
        y_scale="log",
    )
    caption = (
        f"The slope over layers {first} to {last} is {slope.value:.3f}; with layer 0 the way down to the floor counts."
    )
    return Outcome({"slope": slope}, Picture((panel,), caption))


def _stationary_chain(
    width: int, samples: int, runs: int, activation: Callable[[torch.Tensor], torch.Tensor], generator: torch.Generator
) -> Callable[[], torch.Tensor]:
    """A function that steps Q ↦ BN(W F(Q)) for `runs` networks and returns QᵀQ/d, (runs, n, n).

    Given F(Q), the columns of WF(Q) are normals times a factor of its Gram matrix: exact in law.
    """
    import torch

    device = generator.device
    state = torch.randn(runs, samples, width, dtype=torch.float64, device=device, generator=generator)
    jitter = 1e-12 * torch.eye(samples, dtype=torch.float64, device=device)

    def step() -> torch.Tensor:
        nonlocal state
        features = activation(state)
        factor = torch.linalg.cholesky(features @ features.mT / width + jitter)
        noise = torch.randn(state.shape, dtype=torch.float64, device=device, generator=generator)
        mapped = factor @ noise
        state = mapped / mapped.square().mean(1, keepdim=True).sqrt()
        gram: torch.Tensor = state @ state.mT / (width * samples)
        return gram

    return step


def measure_conjecture(values: Mapping[str, Any], context: Context) -> Outcome:
    """L = ‖QᵀQ/d − its stationary mean‖_F, averaged over layers, against the width, for each activation."""
    import torch

    from sounding.activations import resolve

    numbers, series = {}, []
    level: list[Number] = []
    widths = np.array(values["widths"])
    for index, name in enumerate(values["activations"]):
        function = resolve(name).torch()
        means, errors = [], []
        for place, width in enumerate(widths):
            generator = context.generator(100 * index + place, device=context.device)
            step = _stationary_chain(int(width), values["batch_size"], values["runs"], function, generator)
            for _ in range(values["burn_in"]):
                step()
            grams = torch.stack([step() for _ in range(values["layers"])])
            if values["gap"]:
                target = torch.eye(values["batch_size"], dtype=torch.float64, device=context.device)
                target = target / values["batch_size"]
            else:
                # the stationary law is exchangeable: one diagonal and one off-diagonal mean, over runs and layers
                target = _exchangeable_mean(grams)
            distance = (grams - target).square().sum((-1, -2)).sqrt().mean(0).cpu().numpy()
            means.append(float(distance.mean()))
            errors.append(float(distance.std(ddof=1)) / math.sqrt(len(distance)))
            context.progress((index + (place + 1) / len(widths)) / len(values["activations"]))
        mean, error = np.array(means), np.array(errors)
        key = name.replace(":", "_")
        numbers[f"slope_{key}"] = slope_of(np.log(widths), np.log(mean), stderr=list(error / mean), straight=False)
        wide = widths >= values["wide"]
        x, y = np.log(widths[wide]), np.log(mean[wide])
        numbers[f"slope_{key}_wide"] = slope_of(x, y, stderr=list((error / mean)[wide]), straight=False)
        level.append(estimate(float(mean[-1]), float(error[-1])))
        series.append(Series(name, widths, mean, error=DRAWN * error))
    level.sort(key=lambda number: number.value)
    numbers["largest_over_smallest_curve"] = ratio_of(level[-1], level[0])
    guide = series[0]
    line = np.asarray(guide.y)[0] * (widths / widths[0]) ** -0.5
    series.append(Series("d^(−1/2) (theory)", widths, line, role="theory"))
    label = "orthogonality gap V" if values["gap"] else "L, distance from the stationary mean"
    panel = Panel("width d", f"{label}, mean over layers", series, x_scale="log", y_scale="log")
    caption = "Every curve falls as d^(−1/2); they are parallel, not identical."
    return Outcome(numbers, Picture((panel,), caption))


def _exchangeable_mean(grams: torch.Tensor) -> torch.Tensor:
    import torch

    mean = grams.mean((0, 1))
    n = len(mean)
    diagonal = mean.diagonal().mean()
    off = (mean.sum() - mean.diagonal().sum()) / (n * (n - 1))
    return torch.eye(n, dtype=mean.dtype, device=mean.device) * (diagonal - off) + off


def _figure2b(
    name: str, place: str, statement: str, window: tuple[int, int], bounds_: tuple[float, float], why: str
) -> Claim:
    values = {"widths": [16, 32, 64, 128, 256, 512], "batch_size": 4, "eps": 1e-6, "window": list(window)}
    return Claim(
        id=name,
        seed="orth2021",
        place=place,
        kind="figure",
        statement=statement,
        expectations=(Expectation("slope", why, low=bounds_[0], high=bounds_[1]),),
        settings={
            "quick": Setting(values | {"runs": 40}),
            "paper": Setting(values | {"runs": 2000}),
        },
        measure=measure_figure2b,
        paper="d from 16 to 512, n = 4, average over 500 layers, 20 runs",
        released="layers 0 to 500 (thesis: 100 to 600); every value divided by 20 once too often, the slope unaffected",
        note="the layers on the way down to the floor weigh more the wider the network is, and flatten the slope",
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="orth2021-fig1",
        seed="orth2021",
        place="figure 1",
        kind="figure",
        statement="With batch norm two nearly equal samples become orthogonal over 50 layers; in a vanilla linear "
        "network two orthogonal samples become ever more aligned.",
        expectations=(
            Expectation("batch_norm_first", "the input is nearly collinear", low=0.99),
            Expectation("batch_norm_last", "as orthogonal as chance allows (0.14), far from aligned", high=0.25),
            Expectation("vanilla_last", "well above the 0.14 of independent directions", low=0.3),
            Expectation("vanilla_rise_second_half", "still rising after half of the depth", low=0.0),
        ),
        settings={
            "quick": Setting({"width": 32, "depth": 50, "runs": 200, "eps": 1e-3}),
            "paper": Setting({"width": 32, "depth": 50, "runs": 20000, "eps": 1e-3}),
        },
        measure=measure_figure1,
        paper="d = 32, n = 2, 50 layers, 20 runs",
        released="batch norm from e₁ and (1 − ε)e₁ + εe₂ with ε = 10⁻³, vanilla from e₁, e₂",
    ),
    Claim(
        id="orth2021-fig2a",
        seed="orth2021",
        place="figure 2a",
        kind="figure",
        statement="log V falls linearly over the first 20 layers, then wiggles around a small constant, smaller for "
        "the wider network.",
        expectations=(
            Expectation("decay_per_layer_first_20", "V falls", high=-0.02),
            Expectation("straightness_first_20", "a straight line explains log V over 20 layers", low=0.95),
            Expectation("drift_after_half", "then constant", low=-0.01, high=0.01),
            Expectation("floor_ratio", "lower at the larger width, by √(512/32) = 4", low=3.0, high=5.3),
        ),
        settings={
            "quick": Setting({"widths": [32, 512], "batch_size": 4, "depth": 50, "runs": 100, "eps": 1e-6}),
            "paper": Setting({"widths": [32, 512], "batch_size": 4, "depth": 50, "runs": 2000, "eps": 1e-6}),
        },
        measure=measure_figure2a,
        paper="d = 32 and 512, n = 4, 50 layers, 20 runs",
        released="start diag(1, 10⁻⁶, 10⁻⁶, 10⁻⁶)",
        note="at infinite width the slope is ln(n/(n + 2)); at width 512 the floor is met after about 14 layers",
    ),
    _figure2b(
        "orth2021-fig2b",
        "figure 2b",
        "The gap averaged over 500 layers falls with width with slope −0.46 on logarithmic axes.",
        (0, 500),
        (-0.49, -0.43),
        "−0.46 as printed, to the precision of 20 runs",
    ),
    _figure2b(
        "orth2021-fig2b-window",
        "figure 2b, and thesis2024 figure 2.2 (layers 100–600)",
        "The average gap falls as 1/√d, as Theorem 1 implies.",
        (100, 600),
        (-0.52, -0.48),
        "−1/2, where −0.46 would say that the law is only almost tight",
    ),
    Claim(
        id="orth2021-fig6",
        seed="orth2021",
        place="figure 6 and the conjecture of appendix F",
        kind="figure",
        statement="For ReLU, sigmoid and tanh as for linear networks the distance of QᵀQ from its stationary mean "
        "falls as 1/√d, and the difference between activations is negligible.",
        expectations=(
            *(Expectation(f"slope_{name}", "−1/2 on logarithmic axes", low=-0.55, high=-0.45) for name in ACTIVATIONS),
            Expectation("largest_over_smallest_curve", "curves that cannot be told apart", high=1.05),
        ),
        correction=Correction(
            "The 1/√d law holds for each activation from width 64 on; the curves are parallel and differ by a factor.",
            (
                *(
                    Expectation(f"slope_{name}_wide", "−1/2 on logarithmic axes", low=-0.55, high=-0.45)
                    for name in ACTIVATIONS
                ),
                Expectation("largest_over_smallest_curve", "clearly apart", low=1.1),
            ),
        ),
        settings={
            "quick": Setting(
                {
                    "activations": list(ACTIVATIONS),
                    "widths": [16, 32, 64, 128, 256],
                    "wide": 64,
                    "batch_size": 4,
                    "burn_in": 100,
                    "layers": 200,
                    "runs": 16,
                    "gap": False,
                }
            ),
            "paper": Setting(
                {
                    "activations": [*ACTIVATIONS, "sin", "gelu"],
                    "widths": [16, 32, 64, 128, 256],
                    "wide": 64,
                    "batch_size": 4,
                    "burn_in": 500,
                    "layers": 1000,
                    "runs": 256,
                    "gap": False,
                }
            ),
        },
        measure=measure_conjecture,
        paper="n = 4, d from 16 to 256, average over 1000 layers",
        released="one array drawn four times; the 'sigmoid' is tanh(x) + 1",
        note="in the figure one array is drawn for all activations; a sigmoid's samples stay nearly collinear, which "
        "bounds L from above at widths below 64 and flattens its curve there",
    ),
    Claim(
        id="orth2021-appF-odd",
        seed="orth2021",
        place="appendix F.2, odd activations",
        kind="observation",
        statement="For odd activations such as sin and tanh the orthogonality gap itself settles at order 1/√d.",
        expectations=(
            Expectation("slope_tanh", "−1/2 on logarithmic axes", low=-0.55, high=-0.45),
            Expectation("slope_sin", "−1/2 on logarithmic axes", low=-0.55, high=-0.45),
        ),
        settings={
            "quick": Setting(
                {
                    "activations": ["tanh", "sin"],
                    "widths": [32, 64, 128, 256],
                    "wide": 64,
                    "batch_size": 4,
                    "burn_in": 100,
                    "layers": 300,
                    "runs": 32,
                    "gap": True,
                }
            ),
        },
        measure=measure_conjecture,
        paper="an observation without a figure",
    ),
)
