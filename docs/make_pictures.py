"""Draw the pictures of the documentation: `python docs/make_pictures.py [NAME ...]`, all of them without a name.

Each function below draws one picture and returns its figure; its name is the file name under docs/pictures. Seeds are
fixed and the SVG carries no date, so that drawing again on one machine changes nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

import sounding
from sounding.look import BAD, GOOD, MUTED, TWO_COLUMNS_INCHES, style
from sounding.models import Mlp

FOLDER = Path(__file__).parent / "pictures"


def front() -> Figure:
    """What a depth check is: how alike samples are over 50 layers, and the gradient back, before and after a repair."""
    from sounding.data import load_batch

    digits = load_batch("digits", batch_size=128, generator=torch.Generator().manual_seed(0), shape=(64,))
    order = digits.targets.argsort()
    inputs, targets = digits.inputs[order], digits.targets[order]
    network = Mlp(64, 10, depth=50, width=64, init="torch", generator=torch.Generator().manual_seed(0))
    figure = Figure(figsize=(TWO_COLUMNS_INCHES, 3.9), layout="constrained")
    grid = figure.subplots(2, 5, width_ratios=(1, 1, 1, 1, 1.6))
    for line, row in enumerate(grid):
        if line == 1:
            sounding.plan(network, inputs, targets, method=["add_batchnorm", "tune_batchnorm"]).apply()
        report = sounding.check(network, inputs, targets)
        places = {"input": inputs} | {f"layer {depth}": _activations(network, inputs, depth) for depth in (5, 20, 50)}
        for axes, (name, features) in zip(row, places.items(), strict=False):
            rows = torch.nn.functional.normalize(features)
            image = axes.imshow((rows @ rows.T).numpy(), vmin=0, vmax=1, cmap="viridis")
            axes.set(xticks=[], yticks=[], title=name if line == 0 else "")
        row[0].set_ylabel("as built" if line == 0 else "repaired", fontsize=10)
        calls = report.profile.where(lambda one: one.name.endswith(".activation"))
        norms = calls.series("gradient_log_norm", source="check").value / math.log(10)
        row[4].plot(range(1, len(norms) + 1), norms)
        row[4].set(ylim=(-22, 2), xlim=(1, 50), ylabel="log₁₀ gradient norm", xlabel="layer" if line else "")
        status = report.verdict.status
        row[4].set_title(status, color=GOOD if status == "healthy" else BAD, fontweight="bold")
    bar = figure.colorbar(image, ax=grid[:, :4], location="bottom", shrink=0.5, aspect=40)
    bar.set_label("cosine of every pair of 128 digits, sorted by class;\n1 everywhere: nothing tells them apart")
    return figure


def _activations(network: Mlp, inputs: torch.Tensor, depth: int) -> torch.Tensor:
    """What one layer of a network gives out for a batch."""
    seen: list[torch.Tensor] = []
    layer = getattr(network, str(depth)).activation
    hook = layer.register_forward_hook(lambda module, given, output: seen.append(output.detach()))
    with torch.no_grad():
        network(inputs)
    hook.remove()
    return seen[0]


def theory() -> Figure:
    """Mean cosine and gradient norm over 50 layers, with and without batch norm; theory, where there is one, dashed."""
    figure = Figure(figsize=(TWO_COLUMNS_INCHES, 3.2), layout="constrained")
    forward, backward = figure.subplots(1, 2)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, 128, generator=generator)
    for norm, label in (("none", "plain"), ("batch", "batch norm")):
        network = Mlp(128, 10, depth=50, width=128, norm=norm, generator=generator)
        profile = sounding.check(network, inputs, generator=generator).profile
        activations = profile.where(lambda row: row.name.endswith(".activation"))
        for axes, measure in ((forward, "mean_cosine"), (backward, "gradient_log_norm")):
            measured = activations.series(measure, source="check").value
            (line,) = axes.plot(range(1, len(measured) + 1), measured, label=label)
            predicted = activations.series(measure, source="theory").value
            axes.plot(range(1, len(predicted) + 1), predicted, "--", color=line.get_color(), lw=1)
    for axes in (forward, backward):
        axes.plot([], [], "--", color=MUTED, lw=1, label="theory")
    forward.set(xlabel="layer", ylabel="mean cosine between samples", ylim=(0, 1.02))
    backward.set(xlabel="layer", ylabel="ln of the gradient norm")
    for axes in (forward, backward):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


def predict() -> Figure:
    """Gradient growth per layer against batch size for five activations."""
    from sounding import plot
    from sounding import predict as theory

    sizes = (4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
    names = ("relu", "sin", "tanh", "sigmoid", "identity")
    growth = {name: [theory.batchnorm(name, batch_size=b).gradient_growth for b in sizes] for name in names}
    axes = plot.plot_lines(
        {name: (sizes, values) for name, values in growth.items()},
        xlabel="batch size",
        ylabel="growth per layer (squared norm)",
    )
    axes.set_xscale("log", base=2)
    axes.set_ylim(0.95, 3.2)
    return axes.figure


def bounds() -> Figure:
    """Theorem 1 of orth2021 at infinite width and 100 samples: the gap, the printed bound it crosses, the corrected."""
    import numpy as np

    from sounding import plot
    from sounding.theory.bounds import orth2021
    from sounding.theory.bounds.spectrum import orthogonality_gap

    n, layers = 100, 250
    eigenvalues = np.full(n, 0.8 / n)
    eigenvalues[0] += 0.2
    gaps, smallest = [], 1.0
    for _ in range(layers):
        eigenvalues = orth2021.expected_spectrum(np.sqrt(eigenvalues))
        gaps.append(orthogonality_gap(np.sqrt(eigenvalues)))
        smallest = min(smallest, float(np.sqrt(eigenvalues.min())))
    lines = {"orthogonality gap": (np.arange(1, layers + 1), gaps)}
    for version in ("printed", "corrected"):
        bound = orth2021.theorem_1(10**40, n, depth=layers - 1, smallest_singular_value=smallest, version=version)
        series = bound.profile.series("orthogonality_gap")
        lines[f"Theorem 1, {version}"] = (series.layer, series.value)
    return plot.plot_lines(lines, xlabel="layer", ylabel="gap and its bounds", log=True).figure


def prescribe() -> Figure:
    """Trainable depth of ReLU over shift and eps at batch size 64; white where the batch collapses."""
    import numpy as np

    from sounding import plot
    from sounding import predict as theory

    shifts, eps = np.linspace(0.0, 2.5, 26), np.linspace(0.0, 1.05, 22)
    depth = np.full((len(eps), len(shifts)), np.nan)
    for i, e in enumerate(eps):
        for j, shift in enumerate(shifts):
            found = theory.batchnorm("relu", batch_size=64, eps=float(e), shift=float(shift), tolerance=1e-8)
            if not found.collapsed:
                depth[i, j] = np.log10(min(found.trainable_depth, 1e5))
    axes = plot.new_axes(height=4.2)
    mesh = axes.pcolormesh(shifts, eps, depth, shading="nearest", cmap="viridis", rasterized=True)
    axes.figure.colorbar(mesh, ax=axes, label="log₁₀ of the trainable depth")
    axes.contour(shifts, eps, depth, levels=[3.0], colors="white", linewidths=1.2)
    axes.set(xlabel="shift β", ylabel="eps")
    return axes.figure


def activations() -> Figure:
    """What is known of a callable: its value, its slope, and the kinks found in it."""
    import numpy as np

    from sounding.activations import from_callable

    figure = Figure(figsize=(TWO_COLUMNS_INCHES, 2.8), layout="constrained")
    functions = {
        "max(tanh x − 0.37, 0) + sin x": lambda x: np.maximum(np.tanh(x) - 0.37, 0) + np.sin(x),
        "x·clip(x + 3, 0, 6)/6": lambda x: x * np.clip(x + 3, 0, 6) / 6,
        "tanh 20x, no kink": lambda x: np.tanh(20 * x),
    }
    for axes, (name, function) in zip(figure.subplots(1, 3), functions.items(), strict=True):
        found = from_callable(function)
        reach = 0.5 if not found.kinks else 4.5
        x = np.linspace(-reach, reach, 1201)
        axes.plot(x, found(x), label="φ")
        axes.plot(x, found.derivative(x) / (20 if not found.kinks else 1), lw=1, label="φ′" if found.kinks else "φ′/20")
        axes.plot(found.kinks, found(np.array(found.kinks)), "o", ms=5, color="black", label="kinks found")
        axes.set_title(name, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        below = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.12), "ncols": 3}
        axes.legend(frameon=False, fontsize=8, handlelength=1.2, columnspacing=1.0, **below)
    return figure


def kernel() -> Figure:
    """Kernel maps of six activations, and the sequences they send a correlation of 0.9 through, with the bounds."""
    import numpy as np

    from sounding.theory.kernel import kappa, normalized
    from sounding.theory.kernel import kernel as find
    from sounding.theory.kernel_path import bound, sequence

    figure = Figure(figsize=(TWO_COLUMNS_INCHES, 3.6), layout="constrained")
    maps, paths = figure.subplots(1, 2)
    rhos = np.linspace(-1, 1, 81)
    for name in ("relu", "gelu", "tanh", "sin", "sigmoid", "exp"):
        neuron, found = normalized(name), find(name)
        (line,) = maps.plot(
            rhos, [kappa(neuron, float(rho)).value for rho in rhos], label=f"{name} (case {found.case})"
        )
        maps.plot(found.fixed_point, found.fixed_point, "o", color=line.get_color(), ms=5)
        if name in ("tanh", "gelu", "relu"):
            path = sequence(name, 0.9, depth=60).series("mean_cosine")
            limit = bound(found, 0.9, depth=60).series("mean_cosine_distance_bound")
            paths.plot(path.layer, np.abs(path.value - found.fixed_point), color=line.get_color(), label=name)
            paths.plot(limit.layer, limit.value, "--", lw=1, color=line.get_color())
    maps.plot(rhos, rhos, ":", color="gray", lw=1)
    maps.set(xlabel="correlation ρ before the layer", ylabel="κ(ρ) after it", ylim=(-1.02, 1.05))
    paths.set(xlabel="layer", ylabel="|ρ − ρ*| from ρ = 0.9; dashed: bound", yscale="log", ylim=(1e-4, 2))
    for axes in (maps, paths):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return figure


def vanilla() -> Figure:
    """Phases of tanh over weight and bias standard deviation, and the edges of chaos of five activations."""
    import numpy as np

    from sounding.theory.critical import critical, phase_diagram

    figure = Figure(figsize=(TWO_COLUMNS_INCHES, 3.4), layout="constrained")
    phases, edges = figure.subplots(1, 2)
    weights, biases = np.linspace(0.4, 3.0, 27), np.linspace(0.02, 1.0, 15)
    found = phase_diagram("tanh", weights.tolist(), bias_stds=biases.tolist())
    image = phases.pcolormesh(weights, biases, np.log(found.chi_1), cmap="coolwarm", vmin=-1.5, vmax=1.5)
    figure.colorbar(image, ax=phases, label="ln χ₁")
    levels = np.concatenate([[0.0], np.geomspace(1e-3, 1.0, 25)])
    for name in ("tanh", "erf", "hardtanh", "elu", "selu"):
        line = [critical(name, bias_std=float(b)).weight_std for b in levels]
        edges.plot(line, levels, label=name)
        if name == "tanh":
            phases.plot(line, levels, color="black", lw=1.5)
    phases.text(0.6, 0.7, "ordered")
    phases.text(2.3, 0.2, "chaotic")
    phases.set(xlabel="σ_w", ylabel="σ_b", ylim=(0, 1), title="tanh")
    edges.set(xlabel="σ_w at the edge of chaos", ylabel="σ_b", ylim=(0, 1))
    edges.spines[["top", "right"]].set_visible(False)
    edges.legend(frameon=False, fontsize=8)
    return figure


def gram() -> Figure:
    """ReLU with batch norm, batch of 10: the mean field's way to G*, and where networks of finite width stay."""
    import numpy as np

    from sounding.theory.gram import gram as follow
    from sounding.theory.gram_deviation import gram_deviation

    figure = Figure(figsize=(TWO_COLUMNS_INCHES, 3.4), layout="constrained")
    axes = figure.subplots()
    generator = np.random.default_rng(0)
    size, depth = 10, 40
    start = 0.95 + 0.05 * np.eye(size) + np.diag(np.linspace(0, 2, size))
    field = follow("relu", start, depth=depth)
    axes.plot(range(depth + 1), field.distances, color="black", label="mean field")
    for width in (100, 1000, 10000):
        current, distances = start, []
        for _ in range(depth):
            values, vectors = np.linalg.eigh(current)
            h = generator.standard_normal((width, size)) @ (vectors * np.sqrt(np.maximum(values, 0))).T
            h -= h.mean(axis=1, keepdims=True)
            features = np.maximum(h / np.sqrt((h**2).mean(axis=1, keepdims=True)), 0)
            current = features.T @ features / width
            distances.append(np.linalg.norm(current - field.fixed_point))
        (line,) = axes.plot(range(1, depth + 1), distances, lw=1, label=f"one network of width {width}")
        level = gram_deviation("relu", batch_size=size, width=width, generator=generator).stationary.value
        axes.axhline(level, ls="--", lw=1, color=line.get_color())
    axes.set(xlabel="layer", ylabel="‖G − G*‖ (Frobenius); dashed: predicted", yscale="log", ylim=(3e-3, 20))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


def quadrature() -> Figure:
    """Error against the number of points: panels that end at kinks, Gauss–Hermite, and the trapezoid rule."""
    import numpy as np

    from sounding.activations import resolve
    from sounding.theory.quadrature import gaussian_mean

    figure = Figure(figsize=(TWO_COLUMNS_INCHES, 3.0), layout="constrained")
    tanh, relu = resolve("tanh").scaled(10.0), resolve("relu")
    cases = {
        "E[tanh′(10z)²]": (lambda z: tanh.derivative(z) ** 2, (), tanh.length),
        "E[relu(z)]": (relu.function, (0.0,), 1.0),
    }
    for axes, (title, (f, kinks, length)) in zip(figure.subplots(1, 2), cases.items(), strict=True):
        exact = gaussian_mean(f, kinks=kinks, length=length, tolerance=1e-14).value
        orders = np.arange(10, 201, 10)
        hermite = [np.polynomial.hermite_e.hermegauss(int(n)) for n in orders]
        errors = [abs(w @ f(x) / np.sqrt(2 * np.pi) / exact - 1) for x, w in hermite]
        axes.loglog(orders, errors, label="Gauss–Hermite")
        counts = np.unique(np.geomspace(10, 1000, 25).astype(int))
        grids = [np.linspace(-12, 12, int(n)) for n in counts]
        density = [np.exp(-x * x / 2) / np.sqrt(2 * np.pi) * (x[1] - x[0]) for x in grids]
        plain = [abs((f(x) * p).sum() / exact - 1) for x, p in zip(grids, density, strict=True)]
        axes.loglog(counts, np.maximum(plain, 1e-16), label="trapezoid")
        found = [gaussian_mean(f, kinks=kinks, length=length, tolerance=t) for t in 10.0 ** -np.arange(2, 14)]
        panels = [max(abs(one.value / exact - 1), 1e-16) for one in found]
        axes.loglog([one.evaluations for one in found], panels, "o", ms=4, label="panels")
        axes.set(title=title, xlabel="points", ylabel="relative error")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return figure


def batchnorm() -> Figure:
    """Growth against eps up to and beyond the collapse, and the forward eigenvalue L against batch size."""
    import numpy as np

    from sounding import predict as theory

    figure = Figure(figsize=(TWO_COLUMNS_INCHES, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    eps = np.geomspace(1e-3, 3.0, 40)
    for name, shift, label in (
        ("relu", 0, "relu"),
        ("relu", 2, "relu(x + 2)"),
        ("tanh", 0, "tanh"),
        ("gelu", 0, "gelu"),
    ):
        found = [theory.batchnorm(name, batch_size=32, eps=float(e), shift=shift, tolerance=1e-8) for e in eps]
        (line,) = left.loglog(eps, [one.gradient_growth for one in found], label=label)
        collapse = theory.critical_eps(name, batch_size=32, shift=shift).collapse
        left.axvline(collapse, color=line.get_color(), lw=0.7, ls=":")
    left.axhline(1.0, color="black", lw=0.7)
    left.set(xlabel="eps", ylabel="growth per layer (squared norm)")
    sizes = np.unique(np.geomspace(4, 512, 25).astype(int))
    curves = (
        ("relu", 0, "relu"),
        ("gelu", 0, "gelu"),
        ("relu", -0.5, "relu(x − 0.5)"),
        ("relu_power:1.5", 0, "relu^1.5"),
    )
    for name, shift, label in curves:
        found = [theory.batchnorm(name, batch_size=int(b), shift=shift, tolerance=1e-8) for b in sizes]
        right.semilogx(sizes, [one.forward_eigenvalues.L for one in found], label=label)
    right.axhline(1.0, color="black", lw=0.7)
    right.set(xlabel="batch size", ylabel="forward eigenvalue L")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "front": front,
    "theory": theory,
    "predict": predict,
    "bounds": bounds,
    "prescribe": prescribe,
    "activations": activations,
    "kernel": kernel,
    "vanilla": vanilla,
    "gram": gram,
    "quadrature": quadrature,
    "batchnorm": batchnorm,
}


def main(names: list[str]) -> None:
    unknown = sorted(set(names) - set(PICTURES))
    if unknown:
        sys.exit(f"unknown picture {', '.join(unknown)}; one of {', '.join(PICTURES)}")
    FOLDER.mkdir(exist_ok=True)
    matplotlib.rcParams.update({"svg.hashsalt": "sounding", "svg.fonttype": "path", **style()})
    for name in names or PICTURES:
        path = FOLDER / f"{name}.svg"
        PICTURES[name]().savefig(path, metadata={"Date": None})
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
