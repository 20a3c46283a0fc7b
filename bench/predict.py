"""What a prediction costs: `predict.batchnorm` over activations and batch sizes, against Monte Carlo of equal error.

    python bench/predict.py                   the table; ends with 1 if an activation takes 0.2 s, a function 5 s
    python bench/predict.py --eps 1e-5        the same with eps > 0
    python bench/predict.py --callables       Python functions alone: waves, many kinks, steep and narrow ones
    python bench/predict.py --wild 12         every function of bench/callables.py at so many random settings
    python bench/predict.py --json            one JSON object

Time is the best of the rounds after one warm-up call, one thread; that of a callable includes the search for its kinks.
Monte Carlo draws batches with numpy and averages the growth's own estimator, |A|²/(B−1); its time at the prediction's
error is extrapolated from a measured standard error by 1/√n, since nobody could wait for it: the ratio is that time
over the prediction's. Beside it the same at an error of 1e-6, six digits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from callables import OTHERS, WILD, settings

from sounding.activations import Activation, resolve
from sounding.errors import SoundingError
from sounding.theory.batchnorm import BatchNormPrediction, batchnorm

LIMIT, WILD_LIMIT = 0.2, 5.0  # seconds, of named activations and of functions with many kinks or waves
ACTIVATIONS = (
    *("identity", "relu", "leaky_relu:0.1", "relu_power:0.6", "relu_power:1.5", "tanh", "erf", "sin", "sigmoid"),
    *("softplus", "exp", "gelu", "gelu_tanh", "silu", "elu", "selu", "hardtanh", "hermite:3"),
)
SIZES = (4, 8, 32, 256, 1024)
# activation, batch size, eps, scale, shift: the slowest settings of a sweep over all of them
WORST = (
    ("sin", 4, 1.0, 20.0, 2.0),
    ("sin", 1024, 0.0, 20.0, 0.0),
    ("hermite:60", 1024, 0.1, 1.0, 0.5),
    ("gelu_tanh", 4, 1.0, 20.0, 2.0),
    ("relu_power:0.6", 4, 0.1, 1.0, 0.5),
    ("relu_power:0.6", 16, 0.1, 1.0, 0.5),
    ("relu_power:0.75", 16, 0.1, 1.0, 0.5),
    ("relu_power:1.5", 5, 0.1, 1.0, 0.5),
    ("relu_power:1.5", 4, 1.0, 20.0, 2.0),
    ("relu_power:2.5", 4, 1.0, 20.0, 2.0),
)


# batch size, eps, scale, shift of callables: the everyday ones, and what a sweep found slowest
SETTINGS: dict[str, tuple[tuple[int, float, float, float], ...]] = {
    "cos 10x": ((4, 0.1, 20, 0), (8, 0.1, 20, 0), (16, 0.1, 20, 0.5), (1024, 1e-3, 20, 0)),
    "x + sin²5x/5": ((4, 0.1, 20, 0), (4, 1.0, 3, 0.5), (1024, 0.1, 20, 0)),
    "sin x²": ((4, 0.1, 3, 0), (64, 0.1, 3, 0)),
    "sin exp x": ((4, 0.1, 1, 0), (256, 0.1, 1, 0.5)),
    "|sin x|": ((4, 0.1, 3, 0), (16, 0.1, 20, 0), (16, 0.0, 20, 0)),
    "|sin 3x|": ((4, 0.1, 1, 0), (4, 0, 20, 0), (64, 0.1, 20, 0), (1024, 1, 20, 0)),
    "max(sin 5x, 0)": ((8, 0.1, 1, 0), (64, 0.1, 3, 0)),
    "triangle": ((5, 0.1, 3, 0), (5, 0.1, 20, 0), (64, 0.1, 20, 0), (256, 1e-3, 20, -3)),
    "50 bends": ((5, 0.1, 1, 0), (4, 0.0, 3, 0), (64, 0.1, 1, 0)),
    "tanh 50x": ((5, 0.01, 3, 0.5), (16, 0.1, 20, 2), (256, 0.1, 1, 0)),
    "tanh 1000x": ((4, 0.0, 1, 0.5), (64, 0.1, 0.3, 0)),
    "softplus 100x": ((5, 1.0, 3, 0.5), (64, 0.1, 1, 0)),
    "exp(−50(x−1)²)": ((8, 1e-3, 1, 0), (256, 0.1, 1, 0.5)),
    "hat": ((4, 1e-5, 3, 0), (64, 0.1, 1, 0.5)),
    "x⁹/1000 − x⁵/10 + x": ((4, 0.1, 20, 2), (1024, 0.1, 1, 0)),
    "cosh 0.3x": ((4, 0.1, 20, 0), (1024, 0.1, 3, 0)),
}


def seconds(
    activation: str | Callable[[np.ndarray], np.ndarray],
    size: int,
    eps: float,
    rounds: int,
    scale: float = 1.0,
    shift: float = 0.0,
) -> tuple[float, BatchNormPrediction]:
    """The best time of a prediction, and the prediction."""
    prediction = batchnorm(activation, batch_size=size, eps=eps, scale=scale, shift=shift)
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        batchnorm(activation, batch_size=size, eps=eps, scale=scale, shift=shift)
        best = min(best, time.process_time() - start)
    return best, prediction


def sampled_growth(
    phi: Activation,
    size: int,
    mu: float,
    eps: float,
    samples: int,
    generator: np.random.Generator,
    scale: float = 1.0,
    shift: float = 0.0,
) -> tuple[float, float, float]:
    """Growth by plain Monte Carlo over batches: value, standard error, seconds."""
    start = time.process_time()
    h = generator.standard_normal((samples, size)) * np.sqrt(mu)
    u = h - h.mean(axis=1, keepdims=True)
    square = (u**2).mean(axis=1)
    s = np.sqrt(square + eps)
    x = u / s[:, None]
    slope = scale * phi.derivative(scale * x + shift)
    rho = square / s**2
    slopes = (slope**2).sum(axis=1)
    dot = (slope * x).sum(axis=1)
    norm = slopes * (1 - 1 / size) - (2 - rho) * (slope**2 * x**2).sum(axis=1) / size
    norm -= (slopes - (slope.sum(axis=1) ** 2 + (2 - rho) * dot**2) / size) / size
    values = norm / (s**2 * (size - 1))
    return float(values.mean()), float(values.std() / np.sqrt(samples)), time.process_time() - start


def measure(
    name: str,
    activation: str | Callable[[np.ndarray], np.ndarray],
    setting: tuple[int, float, float, float],
    options: argparse.Namespace,
    generator: np.random.Generator,
) -> dict[str, Any]:
    """One row: time, growth, error, and what Monte Carlo would take."""
    size, eps, scale, shift = setting
    spent, found = seconds(activation, size, eps, options.rounds, scale, shift)
    row: dict[str, Any] = {"activation": name, "batch_size": size, "eps": eps, "scale": scale, "shift": shift,
                           "seconds": spent, "growth": found.gradient_growth, "error": found.error}  # fmt: skip
    if size >= 8 and not found.collapsed:  # below, the squared inverse norm has no variance
        draws = max(1000, options.samples * 32 // max(size, 32))
        phi, mu = resolve(activation), found.fixed_point.mu
        _, stderr, drawn = sampled_growth(phi, size, mu, eps, draws, generator, scale, shift)
        relative = stderr / max(found.gradient_growth, 1.0)
        row["monte_carlo_seconds"] = drawn * (relative / max(found.error, 1e-12)) ** 2
        row["ratio"] = row["monte_carlo_seconds"] / spent
        row["six_digits_ratio"] = drawn * (relative / 1e-6) ** 2 / spent
    if not options.json:
        ratios = f"×{row['ratio']:.0e}, at 1e-6 ×{row['six_digits_ratio']:.0e}" if "ratio" in row else "-"
        where = f"   eps {eps:g}, scale {scale:g}, shift {shift:g}" if (eps, scale, shift) != (0.0, 1.0, 0.0) else ""
        print(
            f"{name:<22}B={size:<6}{1e3 * spent:8.1f} ms   growth {found.gradient_growth:<12.8g}"
            f"error {found.error:.0e}   Monte Carlo {ratios}{where}"
        )
    return row


def sweep(count: int, options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """A row for each function and random setting, without Monte Carlo, and how many were refused: jumps, no moments."""
    generator = np.random.default_rng(options.seed)
    rows, refused = [], 0
    for name, function in {**WILD, **OTHERS}.items():
        for size, eps, scale, shift in settings(count, generator):
            try:
                spent, found = seconds(function, size, eps, 2, scale, shift)
            except SoundingError:
                refused += 1
                continue
            rows.append({"activation": name, "batch_size": size, "eps": eps, "scale": scale, "shift": shift,
                         "seconds": spent, "growth": found.gradient_growth, "error": found.error})  # fmt: skip
    return rows, refused


def summarize(rows: list[dict[str, Any]], refused: int) -> None:
    """The slowest ten, how many are above the limit, and how the errors lie."""
    for row in sorted(rows, key=lambda row: -row["seconds"])[:10]:
        where = f"B={row['batch_size']}, eps {row['eps']:g}, scale {row['scale']:g}, shift {row['shift']:g}"
        print(f"{row['activation']:<24}{1e3 * row['seconds']:8.1f} ms   error {row['error']:.0e}   {where}")
    errors = np.array([row["error"] for row in rows])
    above = sum(row["seconds"] >= LIMIT for row in rows)
    shares = ", ".join(f"{100 * (errors < bound).mean():.0f}% below {bound:.0e}" for bound in (1e-9, 1e-6, 1e-4))
    print(f"{len(rows)} settings, {refused} refused; {above} at {LIMIT} s or more; errors: {shares}")


def main() -> int:
    """Measure, print, and say whether every prediction kept the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eps", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--callables", action="store_true")
    parser.add_argument("--wild", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    wanted: list[tuple[str, str | Callable[[np.ndarray], np.ndarray], tuple[int, float, float, float]]] = []
    if not options.callables and not options.wild:
        wanted += [(name, name, (size, options.eps, 1.0, 0.0)) for name in ACTIVATIONS for size in SIZES]
        wanted += [(name, name, setting) for name, *setting in WORST]  # type: ignore[misc]
    if not options.wild:
        wanted += [(name, WILD[name], setting) for name, chosen in SETTINGS.items() for setting in chosen]
    rows = [measure(name, function, setting, options, generator) for name, function, setting in wanted]
    if options.wild:
        rows, refused = sweep(options.wild, options)
        if not options.json:
            summarize(rows, refused)
    limits = [WILD_LIMIT if row["activation"] in SETTINGS or options.wild else LIMIT for row in rows]
    slowest, limit = max(zip(rows, limits, strict=True), key=lambda pair: pair[0]["seconds"] / pair[1])
    kept = slowest["seconds"] < limit
    if options.json:
        print(json.dumps({"rows": rows, "slowest": slowest, "limit": limit, "kept": kept}))
    else:
        where = f"{slowest['activation']} at batch size {slowest['batch_size']}"
        print(f"slowest: {where}, {1e3 * slowest['seconds']:.0f} ms (limit {1e3 * limit:.0f} ms)")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
