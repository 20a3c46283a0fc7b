"""Do measurements lie in the bands of theory? Networks of eight kinds, many seeds each, every row of every layer.

    python bench/bands.py [--seeds 200] [--jobs 2] [--only resnet,plain]

Prints for each kind the share of rows inside the 95% band (two standard deviations of the prediction), by measure and
by third of the depth, and the mean and the standard deviation of (measured − predicted) / predicted spread, which are 0
and 1 for bands that are exactly right; below 1 they are too wide. Rows of one network are correlated: the scatter
between seeds, not the number of rows, says how sure a share is.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

import sounding

BAND = 2.0


class Residual(nn.Module):
    """x + W φ(V norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class PreActivation(nn.Module):
    """A pre-activation block of two 3 × 3 convolutions with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.maps = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.maps[0](torch.relu(self.norms[0](x)))
        return x + self.maps[1](torch.relu(self.norms[1](y)))


def stack(depth: int, width: int, *between: Callable[[], nn.Module]) -> nn.Module:
    """Linear maps with modules in between."""
    layers: list[nn.Module] = []
    for fan_in in [64] + [width] * (depth - 1):
        layers += [nn.Linear(fan_in, width), *(make() for make in between)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def transformer(*, norm_first: bool) -> nn.Module:
    """Encoder layers that are not copies of each other."""
    layers = [nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True, norm_first=norm_first) for _ in range(4)]
    return nn.Sequential(*layers)


def convolutions() -> nn.Module:
    """Six convolutions, the mean over positions, a readout."""
    body = [part for _ in range(5) for part in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )


def residual() -> nn.Module:
    """Eight residual perceptrons."""
    return nn.Sequential(nn.Linear(64, 128), *(Residual(128) for _ in range(8)), nn.Linear(128, 10))


def resnet() -> nn.Module:
    """Four pre-activation blocks, the mean over positions, a readout."""
    blocks = [PreActivation(64) for _ in range(4)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (lambda: stack(12, 128, nn.ReLU), (64, 64)),
    "batch norm": (lambda: stack(10, 128, lambda: nn.BatchNorm1d(128), nn.ReLU), (64, 64)),
    "layer norm": (lambda: stack(10, 128, lambda: nn.LayerNorm(128), nn.GELU), (64, 64)),
    "residual": (residual, (64, 64)),
    "convolutions": (convolutions, (8, 3, 8, 8)),
    "resnet": (resnet, (8, 3, 8, 8)),
    "pre-norm transformer": (lambda: transformer(norm_first=True), (4, 32, 128)),
    "post-norm transformer": (lambda: transformer(norm_first=False), (4, 32, 128)),
}


def deviations(job: tuple[str, int]) -> list[tuple[str, float, float]]:
    """(measure, place in the depth from 0 to 1, deviation in predicted standard deviations) of every row of a seed."""
    kind, seed = job
    torch.set_num_threads(1)
    build, shape = KINDS[kind]
    torch.manual_seed(seed)
    model, inputs = build(), torch.randn(shape, generator=torch.Generator().manual_seed(10**6 + seed))
    profile = sounding.check(model, inputs, theory=True).profile
    measured = {(row.name, row.measure): row.value for row in profile if row.source == "check"}
    last = max(row.layer for row in profile)
    return [
        (row.measure, row.layer / last, (measured[row.name, row.measure] - row.value) / row.stderr)
        for row in profile
        if row.source == "theory" and row.stderr and row.name != "network"
    ]


def main() -> None:
    """Run all kinds and print the shares."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    chosen = [kind for kind in KINDS if not options.only or kind in options.only.split(",")]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for kind in chosen:
            start = time.perf_counter()
            jobs = [(kind, options.first + seed) for seed in range(options.seeds)]
            found = pool.map(deviations, jobs, chunksize=1)
            report(kind, found, time.perf_counter() - start)


def report(kind: str, found: list[list[tuple[str, float, float]]], seconds: float) -> None:
    """The lines of one kind."""
    rows = [row for one in found for row in one]
    z = np.array([row[2] for row in rows])
    per_seed = [np.mean([abs(row[2]) <= BAND for row in one]) for one in found]
    stderr = np.std(per_seed, ddof=1) / len(per_seed) ** 0.5 if len(per_seed) > 1 else float("nan")
    thirds = [np.mean([abs(r[2]) <= BAND for r in rows if t / 3 <= r[1] <= (t + 1) / 3]) for t in range(3)]
    print(
        f"{kind}: {np.mean(np.abs(z) <= BAND):.3f} ± {stderr:.3f} inside, by thirds of the depth "
        f"{' '.join(f'{share:.3f}' for share in thirds)}; {len(found)} seeds, {len(rows)} rows, {seconds:.0f} s"
    )
    by_measure: dict[str, list[float]] = collections.defaultdict(list)
    for measure, _, deviation in rows:
        by_measure[measure].append(deviation)
    for measure, values in by_measure.items():
        v = np.array(values)
        print(f"    {measure:26s} {np.mean(np.abs(v) <= BAND):.3f} inside, mean {v.mean():+.2f}, sd {v.std():.2f}")


if __name__ == "__main__":
    main()
