"""The comparison table: every cure and baseline on digits, at three depths, with mean and interval over seeds.

    python docs/compare_cures.py --device cuda --out docs/cures.json
    python docs/compare_cures.py --render docs/cures.json --out docs/cures.md

Networks of width 128 on the 1797 digits, each pixel standardized (blank ones stay zero), 300 steps of plain SGD on
batches of 128, every rate of the same five for every row. What counts is the training accuracy at the best rate of each
seed, over all samples at once, with the statistics of that batch under batch norm. `sounding.recommend` is asked on the
first seed of each network; what it picks is marked.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import sys
import time
from collections import OrderedDict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sounding
from sounding.models import Mlp
from sounding.train import Recipe, Residual, train_together_

# one file descriptor a tensor would run out of them: the networks of depth 200 alone hold thousands of tensors
torch.multiprocessing.set_sharing_strategy("file_system")

WIDTH = 128
DEPTHS = (10, 50, 200)
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
STEPS = 300
BATCH = 128
CURE_SAMPLES = 512
TRAINED = 0.95


@dataclass(frozen=True)
class Row:
    """A cure, or none, on a kind of network."""

    network: str
    methods: tuple[str, ...] = ()
    options: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    clipping: float | None = None

    @property
    def name(self) -> str:
        """As the table shows it."""
        told = [method + _told(dict(self.options).get(method, ())) for method in self.methods]
        told += [f"adaptive clipping {self.clipping:g}"] if self.clipping is not None else []
        return " + ".join(told) or "as it is"


def _told(options: tuple[tuple[str, Any], ...]) -> str:
    shown = ", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in options)
    return f" ({shown})" if shown else ""


PLAIN, NORMED, TANH, RESIDUAL = "ReLU, He", "ReLU, batch norm", "tanh, batch norm", "ReLU, residual"
SHIFTED = (("tune_batchnorm", (("shift", 2.0), ("eps", 0.5))),)
ROWS = (
    Row(PLAIN),
    Row(PLAIN, ("xavier",)),
    Row(PLAIN, ("haar",), (("haar", (("gain", math.sqrt(2)),)),)),
    Row(PLAIN, ("lsuv",)),
    Row(PLAIN, clipping=0.1),
    Row(PLAIN, ("orthogonalize",)),
    Row(PLAIN, ("raise_rank",)),
    Row(PLAIN, ("add_batchnorm",)),
    Row(PLAIN, ("add_batchnorm", "tune_batchnorm")),
    Row(PLAIN, ("add_batchnorm", "haar", "tune_batchnorm")),
    Row(NORMED),
    Row(NORMED, ("xavier",)),
    Row(NORMED, ("lsuv",)),
    Row(NORMED, ("haar",)),
    Row(NORMED, clipping=0.1),
    Row(NORMED, ("tune_batchnorm",)),
    Row(NORMED, ("tune_batchnorm",), SHIFTED),
    Row(NORMED, ("haar", "tune_batchnorm")),
    Row(NORMED, ("swap_normalization",), (("swap_normalization", (("kind", "layer"),)),)),
    Row(NORMED, ("swap_normalization",), (("swap_normalization", (("kind", "rms"),)),)),
    Row(NORMED, ("break_batchnorm",)),
    Row(TANH),
    Row(TANH, ("xavier",)),
    Row(TANH, ("haar",)),
    Row(TANH, ("shape_activations",)),
    Row(TANH, ("haar", "shape_activations")),
    Row(TANH, ("tune_batchnorm",)),
    Row(TANH, ("haar", "tune_batchnorm")),
    Row(RESIDUAL),
    Row(RESIDUAL, ("zero_residual",)),
    Row(RESIDUAL, ("haar",)),
)


def load_digits() -> tuple[Tensor, Tensor]:
    """All digits, each pixel to mean 0 and deviation 1; the three that are blank everywhere stay 0."""
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels).float()
    inputs = (inputs - inputs.mean(0)) / inputs.std(0, correction=0).clamp_min(1e-8)
    return inputs, torch.from_numpy(labels).long()


def make_network(kind: str, depth: int, generator: torch.Generator) -> nn.Module:
    """A fresh network; ReLU networks have He weights, tanh ones variance 1/fan_in, biases are zero."""
    if kind == RESIDUAL:
        return _make_residual(depth, generator)
    activation, norm, init = {
        PLAIN: ("relu", "none", "he"),
        NORMED: ("relu", "batch", "he"),
        TANH: ("tanh", "batch", "lecun"),
    }[kind]
    return Mlp(64, 10, depth=depth, width=WIDTH, activation=activation, norm=norm, init=init, generator=generator)  # type: ignore[arg-type]


def _make_residual(depth: int, generator: torch.Generator) -> nn.Module:
    """Two weight layers a block, as many weight layers as the others."""

    def linear(fan_in: int, out: int) -> nn.Linear:
        layer = nn.Linear(fan_in, out)
        nn.init.normal_(layer.weight, std=math.sqrt(2 / fan_in), generator=generator)
        nn.init.zeros_(layer.bias)
        return layer

    def block() -> nn.Module:
        return Residual(nn.Sequential(linear(WIDTH, WIDTH), nn.ReLU(), linear(WIDTH, WIDTH)))

    parts: list[tuple[str, nn.Module]] = [("first", linear(64, WIDTH))]
    parts += [(f"block{index}", nn.Sequential(block(), nn.ReLU())) for index in range((depth - 1) // 2)]
    return nn.Sequential(OrderedDict([*parts, ("readout", linear(WIDTH, 10))]))


def make_cured(row: Row, depth: int, seed: int) -> nn.Module:
    """The network of one seed after the row's cures."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    inputs, _ = load_digits()
    model = make_network(row.network, depth, generator)
    options = {method: dict(values) for method, values in row.options}
    chosen = torch.randperm(len(inputs), generator=generator)
    # batch norm is tuned for the batch size of training; the other cures may see more samples
    for method in row.methods:
        count = BATCH if method == "tune_batchnorm" else CURE_SAMPLES
        sounding.repair.METHODS[method].run(
            model, inputs[chosen[:count]], options=options.get(method, {}), generator=generator
        )
    return model


def train(
    networks: list[nn.Module],
    data: tuple[Tensor, Tensor],
    *,
    rates: tuple[float, ...] = RATES,
    steps: int = STEPS,
    batch_size: int = BATCH,
    clipping: float | None = None,
    seed: int = 2024,
    device: str = "cpu",
) -> list[list[float]]:
    """Training accuracy by network and rate, 0 for a run that diverged."""
    recipe = Recipe(
        steps=steps,
        batch_size=batch_size,
        clipping=clipping,
        evaluate="end",
        statistics="batch",
        evaluation_batch=len(data[0]),
    )
    runs = [copy.deepcopy(network) for network in networks for _ in rates]
    history = train_together_(
        runs,
        data,
        learning_rates=list(rates) * len(networks),
        recipe=recipe,
        generator=torch.Generator().manual_seed(seed),
        device=device,
    )
    found = [history.final(run) for run in range(history.runs)]
    # an output can overflow at the very end, when no further step would tell
    right = [(point.train_accuracy or 0.0) if math.isfinite(point.train_loss) else 0.0 for point in found]
    return [right[first : first + len(rates)] for first in range(0, len(right), len(rates))]


def compare(
    rows: tuple[Row, ...], depths: tuple[int, ...], seeds: int, steps: int, device: str, workers: int
) -> dict[str, Any]:
    """Accuracies of every row at every depth, by seed and rate."""
    inputs, targets = load_digits()
    results = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [(row, depth) for depth in sorted(depths, reverse=True) for row in rows]
        # the slow cures of the deepest networks start first, and overlap with the training
        waiting = {
            (row, depth): [pool.submit(make_cured, row, depth, seed) for seed in range(seeds)] for row, depth in jobs
        }
        for row, depth in jobs:
            begin = time.perf_counter()
            result: dict[str, Any] = {"network": row.network, "cure": row.name, "methods": row.methods, "depth": depth}
            try:
                networks = [future.result() for future in waiting.pop((row, depth))]
                result["accuracy"] = train(
                    networks, (inputs, targets), steps=steps, clipping=row.clipping, device=device
                )
            except sounding.errors.SoundingError as error:
                result["failed"] = error.message
            results.append(result)
            seconds = time.perf_counter() - begin
            told = f"{_mean(result):.3f}" if "accuracy" in result else result["failed"]
            print(f"{depth:4d}  {row.network:18s} {row.name:60s} {told}  {seconds:.1f} s", file=sys.stderr, flush=True)
    return {"results": results, "recommended": _recommend(depths)}


def _recommend(depths: tuple[int, ...]) -> list[dict[str, Any]]:
    inputs, targets = load_digits()
    found = []
    for kind in (PLAIN, NORMED, TANH):
        for depth in depths:
            generator = torch.Generator().manual_seed(0)
            model = make_network(kind, depth, generator)
            chosen = torch.randperm(len(inputs), generator=generator)[:BATCH]
            told = sounding.recommend(
                model,
                inputs[chosen],
                targets[chosen],
                exclude=("raise_rank",) if depth > 50 else (),
                generator=generator,
            )
            found.append({"network": kind, "depth": depth, "methods": told.best.methods})
    return found


def _mean(result: dict[str, Any]) -> float:
    best = [max(rates) for rates in result["accuracy"]]
    return sum(best) / len(best)


def _cell(result: dict[str, Any] | None) -> str:
    """Mean and half the 95% interval (Student) of the best rate's accuracy, and how many rates reach 95%."""
    if result is None:
        return "–"
    if "failed" in result:
        return "not possible"
    from scipy.stats import t

    best = torch.tensor([max(rates) for rates in result["accuracy"]], dtype=torch.float64)
    half = float(t.ppf(0.975, len(best) - 1) * best.std() / math.sqrt(len(best))) if len(best) > 1 else math.nan
    rates = torch.tensor(result["accuracy"], dtype=torch.float64).mean(0)
    return f"{100 * float(best.mean()):.1f} ± {100 * half:.1f} ({int((rates >= TRAINED).sum())})"


def render(data: dict[str, Any]) -> str:
    """The table as Markdown."""
    found = {(item["network"], item["cure"], item["depth"]): item for item in data["results"]}
    depths = sorted({item["depth"] for item in data["results"]})
    picked = {(item["network"], item["depth"], tuple(item["methods"])) for item in data["recommended"]}
    lines = [
        "# Cures compared",
        "",
        "Training accuracy in percent at the best of the learning rates "
        f"{', '.join(f'{rate:g}' for rate in data['rates'])}: mean and half the 95% interval over {data['seeds']} "
        f"seeds, and in parentheses at how many of the {len(data['rates'])} rates the mean reaches {TRAINED:.0%}. "
        f"Digits, each pixel standardized, width {WIDTH}, {data['steps']} steps of plain SGD on batches of "
        f"{data['batch']}, accuracy with batch statistics; a run that diverged counts as 0. A star marks what "
        "`sounding.recommend` picks.",
        "",
        f"Made on {data['date']} on {data['device']} in {data['seconds'] / 60:.0f} minutes by `{data['command']}`.",
        "",
    ]
    for network in dict.fromkeys(item["network"] for item in data["results"]):
        lines += [f"## {network}", "", "| cure | " + " | ".join(f"depth {depth}" for depth in depths) + " |"]
        lines.append("|---|" + "---|" * len(depths))
        for cure in dict.fromkeys(item["cure"] for item in data["results"] if item["network"] == network):
            cells = []
            for depth in depths:
                result = found.get((network, cure, depth))
                star = (
                    result is not None and (network, depth, tuple(result["methods"])) in picked and "(shift" not in cure
                )
                cells.append(_cell(result) + (" ★" if star and "clipping" not in cure else ""))
            lines.append(f"| {cure} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Train and write JSON, or render JSON as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", default="", help="rows whose network or cure contains this")
    parser.add_argument("--workers", type=int, default=2, help="processes that prepare networks")
    parser.add_argument("--render", type=Path, metavar="JSON")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.render is not None:
        options.out.write_text(render(json.loads(options.render.read_text("utf-8"))), encoding="utf-8")
        return
    rows = tuple(row for row in ROWS if options.only in f"{row.network}: {row.name}")
    begin = time.perf_counter()
    found = compare(rows, tuple(options.depths), options.seeds, options.steps, options.device, options.workers)
    cuda = torch.device(options.device).type == "cuda"
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(options.device) if cuda else f"{platform.machine()} CPU",
        "command": "python docs/compare_cures.py " + " ".join(sys.argv[1:]),
        "seconds": time.perf_counter() - begin,
        "torch": torch.__version__,
        "seeds": options.seeds,
        "rates": RATES,
        "steps": options.steps,
        "batch": BATCH,
    }
    options.out.write_text(json.dumps(about | found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
