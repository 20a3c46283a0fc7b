"""How often disagreement and blame name the right layer, and how often they accuse a network without a fault.

`python bench/causes.py --seeds 20` runs the networks that thresholds were chosen on, `--first 1000 --seeds 50` fresh
seeds of them, `--held-out` other networks, `--all` both; `--jobs 16` shares the work out, `--only` and `--network`
pick, `--told` prints every wrong answer, `--most 6` puts each fault into six networks. `--out FILE` keeps the table of
what is done so far in a file, so that a run that is stopped leaves it. Each fault is put into a random layer or block
of the middle half and judged by what `sounding.check(..., theory=True)` tells a user.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from causes_networks import HELD_OUT, NETWORKS, Block, Network, Options
from torch import Tensor, nn

import sounding

Weight = nn.Linear | nn.Conv1d | nn.Conv2d
T = TypeVar("T")
EVERY = 5.0  # seconds between two writings of the table


@dataclass(frozen=True)
class Answer:
    """What a right finding says: one of these layers, or something inside them, or, of a whole network, these words."""

    layers: tuple[str, ...] = ()
    words: str = ""


def weights(model: nn.Module, *, asking: bool = False) -> list[tuple[str, Weight]]:
    """The weight layers between the first and the last, those whose outputs become scores or gates only if asked."""
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear | nn.Conv1d | nn.Conv2d)][
        1:-1
    ]
    return [(name, one) for name, one in found if asking or name.rpartition(".")[2] not in ("q", "k", "gate", "qkv")]


def pick(found: list[tuple[str, T]]) -> tuple[str, T]:
    """One of the middle half, by torch's generator."""
    inner = found[len(found) // 4 : max(3 * len(found) // 4, len(found) // 4 + 1)]
    return inner[int(torch.randint(len(inner), ()))]


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, Block)]
    return found or [(name, one) for name, one in weights(model)]


def twins(model: nn.Module) -> tuple[tuple[str, nn.Module], tuple[str, nn.Module]]:
    """A block and the next one of the same shape."""
    found = blocks(model)
    name, first = pick(found[: 3 * len(found) // 4])

    def shape(one: nn.Module) -> dict[str, torch.Size]:
        return {key: value.shape for key, value in one.state_dict().items()}

    at = [one for one, _ in found].index(name)
    return (name, first), next(pair for pair in found[at + 1 :] if shape(pair[1]) == shape(first))


def inner(block: nn.Module) -> list[tuple[str, Weight]]:
    """All weight layers in a module, by name."""
    return [(name, one) for name, one in block.named_modules() if isinstance(one, nn.Linear | nn.Conv1d | nn.Conv2d)]


def put(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


# faults that a description shows: blame


def gain(factor: float) -> Callable[[nn.Module], Answer]:
    def plant(model: nn.Module) -> Answer:
        name, one = pick(weights(model))
        one.weight.mul_(factor)
        return Answer((name,))

    return plant


def bias(model: nn.Module) -> Answer:
    name, one = pick(weights(model))
    assert one.bias is not None
    one.bias.normal_(0, 100)
    return Answer((name,))


def branch(model: nn.Module) -> Answer:
    name, one = pick(blocks(model))
    assert isinstance(one, Block)
    one.scale *= 100.0
    return Answer((name,))


def missing_norm(model: nn.Module) -> Answer:
    """A block, or a layer of a network without blocks, that has lost its norm."""
    found = [(name, one) for name, one in model.named_modules() if "Norm" in type(one).__name__]
    name, _ = pick(found)
    put(model, name, nn.Identity())
    block = name.rpartition(".")[0]
    number = int(name) if not block else 0
    return Answer((block,) if block else (str(number - 1), str(number), str(number + 1), str(number + 2)))


def stem(model: nn.Module) -> Answer:
    """Embeddings or a first layer 100 times too large."""
    tables = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Embedding)]
    if tables:
        for _, one in tables:
            one.weight.mul_(100)
        return Answer(("0", "1"), "embedding")
    name, first = next(
        (name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear | nn.Conv1d | nn.Conv2d)
    )
    first.weight.mul_(100)
    return Answer((name,))


def whole(words: str) -> Callable[[nn.Module], Answer]:
    return lambda model: Answer((), words)


# faults that no random network of the description has: disagreement


def clone(model: nn.Module) -> Answer:
    (_, first), (name, second) = twins(model)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    return Answer((name,))


def tie(model: nn.Module) -> Answer:
    (_, first), (name, second) = twins(model)
    (_, one), (last, other) = inner(first)[-1], inner(second)[-1]
    other.weight = one.weight
    return Answer((f"{name}.{last}" if last else name,))


def low_rank(model: nn.Module) -> Answer:
    name, one = pick(weights(model, asking=True))
    matrix = one.weight.flatten(1)
    rank = max(min(matrix.shape) // 8, 1)
    new = torch.randn(len(matrix), rank) @ torch.randn(rank, matrix.shape[1])
    one.weight.copy_((new * matrix.std() / new.std()).view_as(one.weight))
    return Answer((name,))


def trained(model: nn.Module) -> Answer:
    """Singular values that fall as the root of their number, as those of trained weights do."""
    # the nine taps of a depthwise convolution have too few singular values to tell
    name, one = pick([pair for pair in weights(model, asking=True) if min(pair[1].weight.flatten(1).shape) > 9])
    matrix = one.weight.flatten(1)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    new = torch.arange(1, len(values) + 1.0) ** -0.5
    one.weight.copy_((left * new * values.norm() / new.norm() @ right).view_as(one.weight))
    return Answer((name,))


def mask(model: nn.Module) -> Answer:
    """Half of the units of a layer hidden."""
    name, one = pick(weights(model, asking=True))
    one.weight[torch.randperm(len(one.weight))[: len(one.weight) // 2]] = 0
    return Answer((name,))


def running(model: nn.Module) -> Answer:
    found = [(name, one) for name, one in model.named_modules() if "BatchNorm" in type(one).__name__]
    name, one = pick(found)
    one.eval()
    return Answer((name,))


class Cut(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.detach())


def cut(model: nn.Module) -> Answer:
    """A gradient that ends in front of a layer; the module before it in execution is named too."""
    name, one = pick(weights(model))
    put(model, name, Cut(one))
    before = [str(int(name) - 1), str(int(name) - 2)] if name.isdigit() else []
    block = name.partition(".body")[0] if ".body" in name else name.rpartition(".")[0] or name
    return Answer((block, *before))


class Lossy(nn.Module):
    """A layer in float16 whose inputs are scaled below what float16 can hold."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.half()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((x * 1e-9).half()).float() * 1e9


def underflow(model: nn.Module) -> Answer:
    name, one = pick(weights(model))
    put(model, name, Lossy(one))
    return Answer((name,))


@dataclass(frozen=True)
class Fault:
    """A fault, the networks that can have it by what they must and must not have, and what surrounds it."""

    kind: str
    plant: Callable[[nn.Module], Answer]
    needs: str = ""
    without: str = ""
    around: Callable[[Options], Options] = lambda o: o  # of the network with and without the fault
    ill: Callable[[Options], Options] = lambda o: o  # of the network with the fault


def still(options: Options) -> Options:
    """No norms, branches small enough to do without: 24 blocks."""
    return replace(options, norm=False, branch=24**-0.5, blocks=24, gain=2.0)


FAULTS: dict[str, Fault] = {
    "a gain 100 times too large": Fault("cause", gain(100.0)),
    "a gain 100 times too small": Fault("cause", gain(0.01), without="skip post"),
    "a bias that dominates": Fault("cause", bias, without="batch"),
    "one branch 100 times too large": Fault("cause", branch, needs="skip"),
    "residual scale missing": Fault(
        "cause",
        whole("branch|norm"),
        needs="skip",
        without="scores",
        around=still,
        ill=lambda o: replace(o, branch=1.0),
    ),
    "scores without 1/√d": Fault("cause", whole("1/√"), needs="scores", ill=lambda o: replace(o, scores=1.0)),
    "a norm left out": Fault(
        "cause", missing_norm, needs="norm", without="post", around=lambda o: replace(o, loud=True)
    ),
    "a stem 100 times too large": Fault("cause", stem, needs="skip", without="batch"),
    "fan-out for fan-in": Fault("cause", whole("grouped"), needs="groups", ill=lambda o: replace(o, fan="grouped")),
    "cloned block": Fault("disagreement", clone),
    "tied weights": Fault("disagreement", tie),
    "low-rank weight": Fault("disagreement", low_rank),
    "trained-like weight": Fault("disagreement", trained),
    "masked units": Fault("disagreement", mask),
    "running statistics": Fault("disagreement", running, needs="batch"),
    "cut gradient": Fault("disagreement", cut),
    "underflow": Fault("disagreement", underflow),
}


def fits(fault: Fault, network: Network) -> bool:
    return set(fault.needs.split()) <= network.has and not set(fault.without.split()) & network.has


def findings(model: nn.Module, inputs: Tensor) -> list[sounding.Finding]:
    # `keep`: a batch norm that was put into evaluation stays there
    report = sounding.check(model, inputs, theory=True, mode="keep")
    return [one for one in report.verdict.findings if one.kind in ("cause", "disagreement")]


def judge(network: Network, fault: Fault, seed: int, *, clean: bool) -> tuple[str, list[str] | None]:
    """What was said of the network with the fault, "right" if it was right, and, if asked, what of the one without."""
    options = fault.around(Options())
    torch.manual_seed(seed)
    inputs = network.inputs()
    said = [tell(one) for one in findings(network.build(options), inputs)] if clean else None
    torch.manual_seed(seed + 1_000_000)
    model = network.build(fault.ill(options))
    with torch.no_grad():
        answer = fault.plant(model)
    found = [one for one in findings(model, inputs) if one.kind == fault.kind]
    right = any(is_right(one, answer) for one in found)
    return "right" if right else f"not {answer}: " + ("; ".join(map(tell, found)) or "silent"), said


def is_right(finding: sounding.Finding, answer: Answer) -> bool:
    if any(f"{finding.layer}.".startswith(f"{layer}.") for layer in answer.layers):
        return True
    return bool(answer.words and re.search(answer.words, finding.why))


def tell(finding: sounding.Finding) -> str:
    return f"{finding.kind} at {finding.layer}: {finding.why}"


Task = tuple[str, str, int, bool]
Result = tuple[int, str, list[str] | None]
Results = dict[tuple[str, str], list[Result]]


def work(task: Task) -> tuple[str, str, int, str, list[str] | None]:
    name, kind, seed, clean = task
    torch.set_num_threads(1)
    try:
        said, found = judge({**NETWORKS, **HELD_OUT}[name], FAULTS[kind], seed, clean=clean)
    except Exception as error:  # a crash counts as a wrong answer, and is told
        said, found = f"{type(error).__name__}: {error}", None
    return name, kind, seed, said, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--all", action="store_true", help="both sets of networks")
    parser.add_argument("--only", default="")
    parser.add_argument("--network", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--told", action="store_true")
    parser.add_argument("--most", type=int, default=99, help="networks that each fault is put into")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--out", type=Path, help="a file for the table, written anew every few seconds")
    options = parser.parse_args()
    networks = {**NETWORKS, **HELD_OUT} if options.all else HELD_OUT if options.held_out else NETWORKS
    pairs = [
        (name, kind)
        for at, kind in enumerate(FAULTS)
        for name in chosen(at, [name for name in networks if fits(FAULTS[kind], networks[name])], options.most)
        if options.only in kind and options.network in name
    ]
    # each network without a fault is checked once a seed, though several faults are put into it
    first = {(name, FAULTS[kind].around(Options())): kind for name, kind in reversed(pairs)}
    tasks: list[Task] = [
        (name, kind, seed, first[name, FAULTS[kind].around(Options())] == kind)
        for seed in range(options.first, options.first + options.seeds)
        for name, kind in pairs
    ]
    results: Results = {pair: [] for pair in pairs}
    began = written = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        # one task at a time and in any order: what is slow holds up nothing that is done
        for name, kind, seed, said, clean in pool.imap_unordered(work, tasks):
            results[name, kind].append((seed, said, clean))
            for text in (said, *(clean or ())) if options.told else ():
                if text != "right":
                    print(f"  {name}, {kind}, {seed}: {'' if text is said else 'FALSE '}{text}", flush=True)
            if options.out and time.monotonic() - written > EVERY:
                written = time.monotonic()
                options.out.write_text(table(results))
            if time.monotonic() - began > 60 * options.minutes:
                break
    if options.out:
        options.out.write_text(table(results))
    print(table(results), end="")


def table(results: Results) -> str:
    """What was right and what was accused: of each fault in each network, of each fault, and of all."""
    lines = [f"{name:28} {kind:32} {counted(found)}" for (name, kind), found in results.items()]
    lines += ["", "by fault, over all networks"]
    for kind in dict.fromkeys(kind for _, kind in results):
        group = [one for (_, other), found in results.items() if other == kind for one in found]
        count = sum(other == kind for _, other in results)
        lines.append(f"{kind:32} {count:2} networks  {counted(group)}")
    every = [one for found in results.values() for one in found]
    lines.append(f"{'all':32}              {counted(every)}")
    return "\n".join(lines) + "\n"


def chosen(at: int, names: list[str], most: int) -> list[str]:
    """So many of the networks at most, each fault beginning with another one."""
    return [names[(at + step) % len(names)] for step in range(min(most, len(names)))]


def counted(found: list[Result]) -> str:
    right = sum(said == "right" for _, said, _ in found)
    clean = [one for _, _, one in found if one is not None]
    return f"{right:4} of {len(found)} right; {sum(map(bool, clean))} false of {len(clean)} without it"


if __name__ == "__main__":
    main()
