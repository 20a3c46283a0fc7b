"""How often the verdict is right, and whether what it calls fatal fails to train.

    python bench/verdict_rates.py            # rates over 200 seeds, and by depth (minutes)
    python bench/verdict_rates.py --train    # also train on the digits at the depths around the lines

Prints the Markdown tables of docs/verdict.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import torch
from torch import nn

from sounding.probe.check import check
from sounding.probe.findings.collapse import share_outside
from sounding.probe.records import Verdict

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import networks
from networks import Case, mlp

STEPS, BATCH, WIDTH = 700, 64, 64
SGD_RATES, ADAM_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), (3e-4, 1e-3, 3e-3)
Build = Callable[[int, int], nn.Module]
PLAIN: dict[str, Build] = {
    "He ReLU": lambda depth, width: mlp(depth, width, initialize=networks.he),
    "default ReLU": lambda depth, width: mlp(depth, width),
    "default tanh": lambda depth, width: mlp(depth, width, activation=nn.Tanh),
    "default sigmoid": lambda depth, width: mlp(depth, width, activation=nn.Sigmoid),
    "batch norm ReLU": lambda depth, width: mlp(depth, width, normalization=nn.BatchNorm1d),
}
DEPTHS = {
    "He ReLU": (10, 20, 30, 40, 50),
    "default ReLU": (5, 8, 10, 12, 15),
    "default tanh": (10, 15, 20),
    "default sigmoid": (3, 5, 8),
    "batch norm ReLU": (20, 40, 60),
}


def look(case: Case) -> Verdict:
    return check(case.model, case.inputs, case.targets).verdict


def show_rates(seeds: range) -> None:
    """The share of each family that gets a finding of high severity, by kind."""
    print("| network | seeds | unhealthy | high severity |\n|---|---|---|---|")
    for family in (*networks.HEALTHY, networks.collapsed_mlp, networks.exploding_mlp):
        verdicts = [look(family(seed)) for seed in seeds]
        print(f"| {family.__name__.replace('_', ' ')} | {len(seeds)} | {_unhealthy(verdicts)} "
              f"| {_kinds(verdicts)} |", flush=True)  # fmt: skip


def show_depths(seeds: range, *, train: bool) -> None:
    """By depth: how often high severity is found, and the training accuracy reached."""
    print("| network | layers | unhealthy | high severity | collapsed layers |" + (" SGD | Adam |" if train else ""))
    print("|---|---|---|---|---|" + ("---|---|" if train else ""))
    for name, depths in DEPTHS.items():
        for depth in depths:
            verdicts = [look(_draw(PLAIN[name], depth, seed)) for seed in seeds]
            line = f"| {name} | {depth} | {_unhealthy(verdicts)} | {_kinds(verdicts)} |"
            line += f" {_collapsed(verdicts)} |"
            if train:
                sgd = max(_accuracy(PLAIN[name], depth, rate, adam=False) for rate in SGD_RATES)
                adam = max(_accuracy(PLAIN[name], depth, rate, adam=True) for rate in ADAM_RATES)
                line += f" {sgd:.0%} | {adam:.0%} |"
            print(line, flush=True)


def show_quantities(seeds: range) -> None:
    """Medians over seeds behind the last hidden layer of He networks of width 32, by depth: what separates."""
    print("| layers | mean cosine | participation ratio | share outside one direction | share apart from the mean |")
    print("|---|---|---|---|---|")
    for depth in (6, 10, 50):
        found: dict[str, list[float]] = {"mean_cosine": [], "participation_ratio": [], "distinct_share": []}
        for seed in seeds:
            with networks.drawn_from(seed):
                profile = check(PLAIN["He ReLU"](depth, 32), torch.randn(32, 64)).profile
            for measure, values in found.items():
                values.append(profile.value(measure, layer=2 * depth - 2, source="check").value)
        cosine, ratio, distinct = (median(values) for values in found.values())
        outside = median(share_outside(value) for value in found["participation_ratio"])
        print(f"| {depth} | {cosine:.3f} | {ratio:.3f} | {outside:.4f} | {distinct:.3f} |", flush=True)


def _draw(build: Build, depth: int, seed: int) -> Case:
    with networks.drawn_from(seed) as draw:
        width, data = draw.choice((32, 64, 128)), draw.choice(networks.DATA)
        return Case(build(depth, width), *networks.batch(data), "")


def _accuracy(build: Build, depth: int, rate: float, *, adam: bool) -> float:
    """Training accuracy on the standardized digits after STEPS steps."""
    with networks.drawn_from(1):
        model = build(depth, WIDTH)
        optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(model.parameters(), lr=rate)
            if adam
            else torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        )
        for _ in range(STEPS):
            inputs, labels = networks.batch("standardized digits", samples=BATCH)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        inputs, labels = networks.batch("standardized digits", samples=1500)
        return float((model(inputs).argmax(1) == labels).double().mean())


def _unhealthy(verdicts: list[Verdict]) -> str:
    return _share(verdict.status == "unhealthy" for verdict in verdicts)


def _share(found: Iterable[bool]) -> str:
    values = list(found)
    return f"{sum(values) / len(values):.1%}"


def _kinds(verdicts: list[Verdict]) -> str:
    high = [{f.kind for f in verdict.findings if f.severity == "high"} for verdict in verdicts]
    kinds = sorted({kind for kinds in high for kind in kinds})
    return ", ".join(f"{kind} {_share(kind in kinds for kinds in high)}" for kind in kinds) or "none"


def _collapsed(verdicts: list[Verdict]) -> str:
    """Least, median and most over seeds; 0 where there is no finding."""
    counts = [
        max((int(f.evidence["collapsed_layers"]) for f in verdict.findings if f.kind == "rank_collapse"), default=0)
        for verdict in verdicts
    ]
    return f"{min(counts)}, {median(counts):g}, {max(counts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="first seed of the rates")
    parser.add_argument("--depth-seeds", type=int, default=40)
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    show_quantities(range(options.depth_seeds))
    print()
    show_rates(range(options.first, options.first + options.seeds))
    print()
    show_depths(range(options.depth_seeds), train=options.train)


if __name__ == "__main__":
    main()
