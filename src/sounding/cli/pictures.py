"""The pictures of `sounding predict --plot`: one function per command, each a call or two of `sounding.plot`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from sounding import plot
from sounding.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sounding.profile import Profile
    from sounding.reader.depth import Depths
    from sounding.theory.batchnorm import BatchNormPrediction
    from sounding.theory.bounds import Bound
    from sounding.theory.critical import Critical
    from sounding.theory.kernel import Kernel
    from sounding.theory.prescribe import Prescription

# of the curve over batch sizes: theory begins at 4, and beyond 1024 the growth of ReLU and tanh changes by a thousandth
BATCH_SIZES = (4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)


def batchnorm(result: BatchNormPrediction) -> Axes:
    """Gradient growth against batch size, with the asked one marked and a linear network below."""
    from sounding import predict

    # a curve shows three digits, and each of its points costs a prediction
    setting = {"eps": result.eps, "scale": result.scale, "shift": result.shift, "tolerance": 1e-8}
    growth = [predict.batchnorm(result.activation, batch_size=size, **setting).gradient_growth for size in BATCH_SIZES]
    linear = [predict.batchnorm("identity", batch_size=size).gradient_growth for size in BATCH_SIZES]
    axes = plot.plot_lines(
        {result.activation: (BATCH_SIZES, growth), "linear, eps 0": (BATCH_SIZES, linear)},
        xlabel="batch size",
        ylabel="growth per layer (squared norm)",
        title=str(result).splitlines()[0].split(":")[0],
    )
    axes.set_xscale("log", base=2)
    if math.isfinite(result.batch_size):
        axes.plot([result.batch_size], [result.gradient_growth], "o", color="tab:red")
    return axes


def kernel(activation: Any, result: Kernel) -> Axes:
    """κ over [−1, 1] with the diagonal and the attracting fixed point."""
    from sounding.theory.kernel import kappa, normalized

    neuron = normalized(activation, result.norm)
    grid = np.linspace(-1, 1, 81)
    values = [kappa(neuron, float(rho)).value for rho in grid]
    axes = plot.plot_lines(
        {"κ(ρ)": (grid, values), "ρ": (grid, grid)},
        xlabel="correlation ρ",
        ylabel="after one layer, κ(ρ)",
        title=f"{result.activation}, norm {result.norm}: case {result.case}",
    )
    axes.plot([result.fixed_point], [result.fixed_point], "o", color="tab:red")
    return axes


def vanilla(activation: Any, *, weight_std: float, bias_std: float) -> Axes:
    """The correlation of two samples over depth, from three starts."""
    from sounding.theory.vanilla import trajectory

    lines = {}
    for start in (0.0, 0.5, 0.9):
        path = trajectory(activation, weight_std=weight_std, bias_std=bias_std, depth=50, correlation=start)
        series = path.series("mean_cosine")
        lines[f"from {start:g}"] = (series.layer, series.value)
    title = f"{activation}, σ_w {weight_std:g}, σ_b {bias_std:g}"
    return plot.plot_lines(lines, xlabel="layer", ylabel="correlation of two samples", title=title)


def edge(activation: Any, result: Critical) -> Axes:
    """The edge of chaos: critical weight std over bias std, the asked one marked."""
    from sounding.theory.critical import critical

    top = max(1.0, 1.25 * result.bias_std)
    biases = np.linspace(0.0, top, 9)
    # None, where there is no edge, becomes NaN, which a line shows as a gap
    values = np.array([critical(activation, bias_std=float(bias)).weight_std for bias in biases], dtype=float)
    axes = plot.plot_lines(
        {"χ₁ = 1": (biases, values)},
        xlabel="bias std σ_b",
        ylabel="critical weight std σ_w",
        title=f"{result.activation}: ordered below, chaotic above",
    )
    if result.weight_std is not None:
        axes.plot([result.bias_std], [result.weight_std], "o", color="tab:red")
    return axes


def profile(path: Profile, measure: str, *, title: str) -> Axes:
    """One measure of a profile over depth."""
    axes = plot.plot_profile(path, measure)
    axes.set_title(title, fontsize=10)
    return axes


def bound(result: Bound) -> Axes:
    """A bound over depth."""
    if result.profile is None:
        raise UsageError(f"{result.name} has no depth to draw it over", hint="leaving out --plot")
    (measure,) = result.profile.measures
    values = result.profile.series(measure).value
    # a log axis where values span a factor of ten, and only then
    log = bool(np.all(values > 0)) and bool(values.max() > 10 * values.min())
    axes = plot.plot_profile(result.profile, measure, log=log)
    axes.set_title(f"{result.source} ({result.version})", fontsize=10)
    return axes


def prescription(result: Prescription) -> Axes:
    """The trainable depth of each option, the wanted one as a line."""
    depths = {"as it is": result.trainable_depth, **{o.change: o.trainable_depth for o in result.options}}
    finite = [value for value in depths.values() if math.isfinite(value)]
    return plot.plot_bars(
        depths,
        xlabel="trainable depth (layers)",
        threshold=float(result.depth),
        title=f"{result.activation}, batch size {result.batch_size:g}",
        log=max(finite) > 50 * min(finite),
    )


def depths(result: Depths, *, title: str) -> Axes:
    """What grows with depth and what does not: theory as lines with a 95% band, measurements as points."""
    axes = plot.new_axes()
    for name in dict.fromkeys(point.quantity for point in result.points):
        chosen = [point for point in result.points if point.quantity == name]
        expected = [p for p in chosen if p.predicted is not None and math.isfinite(p.predicted)]
        at, middle = [p.depth for p in expected], np.array([p.predicted for p in expected], dtype=float)
        half = plot.INTERVAL * np.array([p.stderr for p in expected])
        (line,) = axes.plot(at, np.exp(middle), "-", label=f"{name}, predicted")
        axes.fill_between(at, np.exp(middle - half), np.exp(middle + half), alpha=0.2, color=line.get_color(), lw=0)
        seen = [p for p in chosen if p.measured is not None and math.isfinite(p.measured)]
        if seen:
            values = np.exp(np.array([p.measured for p in seen], dtype=float))
            axes.plot([p.depth for p in seen], values, "o", color=line.get_color(), label=f"{name}, measured")
    # a band that is wider than all there is to see runs out of the picture
    shown = [v for p in result.points for v in (p.measured, p.predicted) if v is not None and math.isfinite(v)]
    limits = math.exp(min(shown, default=0.0) - 1.5), math.exp(max(shown, default=0.0) + 1.5)
    axes.set(xscale="log", yscale="log", xlabel=result.unit, ylabel="last over first layer; distance", ylim=limits)
    axes.set_xticks(list(result.depths), [str(at) for at in result.depths])
    axes.set_xticks([], minor=True)
    told = {True: "transfers over depth", False: "does not transfer over depth", None: "not known"}[result.transfers]
    axes.set_title(f"{title}: {told}", fontsize=10)
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False, fontsize=8)
    return axes
