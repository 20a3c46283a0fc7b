"""What a prediction costs: `predict.batchnorm` over activations and batch sizes, against Monte Carlo of equal error.

    python bench/predict.py                   the table; ends with 1 if a prediction takes 0.2 s or more
    python bench/predict.py --eps 1e-5        the same with eps > 0
    python bench/predict.py --json            one JSON object

Time is the best of the rounds after one warm-up call, one thread. Monte Carlo draws batches with numpy and averages the
growth's own estimator, |A|²/(B−1); its time at the prediction's error is extrapolated from a measured standard error by
1/√n, since nobody could wait for it: the ratio is that time over the prediction's. Beside it the same at an error of
1e-6, six digits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from sounding.activations import Activation, resolve
from sounding.theory.batchnorm import BatchNormPrediction, batchnorm

LIMIT = 0.2
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


def seconds(
    name: str, size: int, eps: float, rounds: int, scale: float = 1.0, shift: float = 0.0
) -> tuple[float, BatchNormPrediction]:
    """The best time of a prediction, and the prediction."""
    prediction = batchnorm(name, batch_size=size, eps=eps, scale=scale, shift=shift)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        batchnorm(name, batch_size=size, eps=eps, scale=scale, shift=shift)
        best = min(best, time.perf_counter() - start)
    return best, prediction


def sampled_growth(
    phi: Activation, size: int, mu: float, eps: float, samples: int, generator: np.random.Generator
) -> tuple[float, float, float]:
    """Growth by plain Monte Carlo over batches: value, standard error, seconds."""
    start = time.perf_counter()
    h = generator.standard_normal((samples, size)) * np.sqrt(mu)
    u = h - h.mean(axis=1, keepdims=True)
    square = (u**2).mean(axis=1)
    s = np.sqrt(square + eps)
    x = u / s[:, None]
    slope = phi.derivative(x)
    rho = square / s**2
    slopes = (slope**2).sum(axis=1)
    dot = (slope * x).sum(axis=1)
    norm = slopes * (1 - 1 / size) - (2 - rho) * (slope**2 * x**2).sum(axis=1) / size
    norm -= (slopes - (slope.sum(axis=1) ** 2 + (2 - rho) * dot**2) / size) / size
    values = norm / (s**2 * (size - 1))
    return float(values.mean()), float(values.std() / np.sqrt(samples)), time.perf_counter() - start


def main() -> int:
    """Measure, print, and say whether every prediction kept the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eps", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    rows = []
    for name in ACTIVATIONS:
        for size in SIZES:
            spent, found = seconds(name, size, options.eps, options.rounds)
            row = {"activation": name, "batch_size": size, "seconds": spent, "growth": found.gradient_growth,
                   "error": found.error}  # fmt: skip
            if size >= 8 and not found.collapsed:  # below, the squared inverse norm has no variance
                draws = max(1000, options.samples * 32 // max(size, 32))
                _, stderr, drawn = sampled_growth(
                    resolve(name), size, found.fixed_point.mu, options.eps, draws, generator
                )
                wanted = max(found.error, 1e-12)
                row["monte_carlo_seconds"] = drawn * (stderr / wanted) ** 2
                row["ratio"] = row["monte_carlo_seconds"] / spent
                row["six_digits_ratio"] = drawn * (stderr / 1e-6) ** 2 / spent
            rows.append(row)
            if not options.json:
                ratios = f"×{row['ratio']:.0e}, at 1e-6 ×{row['six_digits_ratio']:.0e}" if "ratio" in row else "-"
                print(
                    f"{name:<16}B={size:<6}{1e3 * spent:8.1f} ms   growth {found.gradient_growth:<12.8g}"
                    f"error {found.error:.0e}   Monte Carlo {ratios}"
                )
    for name, size, eps, scale, shift in WORST:
        spent, found = seconds(name, size, eps, options.rounds, scale, shift)
        rows.append({"activation": name, "batch_size": size, "eps": eps, "scale": scale, "shift": shift,
                     "seconds": spent, "growth": found.gradient_growth, "error": found.error})  # fmt: skip
        if not options.json:
            print(
                f"{name:<16}B={size:<6}{1e3 * spent:8.1f} ms   growth {found.gradient_growth:<12.8g}"
                f"error {found.error:.0e}   eps {eps:g}, scale {scale:g}, shift {shift:g}"
            )
    slowest = max(rows, key=lambda row: row["seconds"])
    kept = slowest["seconds"] < LIMIT
    if options.json:
        print(json.dumps({"rows": rows, "slowest": slowest, "limit": LIMIT, "kept": kept}))
    else:
        where = f"{slowest['activation']} at batch size {slowest['batch_size']}"
        print(f"slowest: {where}, {1e3 * slowest['seconds']:.0f} ms (limit {1e3 * LIMIT:.0f} ms)")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
