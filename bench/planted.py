"""Which planted faults of the start a check finds, with the right module named: 22 faults in nine architectures.

    python bench/planted.py              # all of them (some minutes on one core)
    python bench/planted.py gpt2 norm    # architectures and faults with such a word in their name

Each fault is put into a sound network at a place chosen by a seed, and counts as found if a finding of a kind that fits
names the module, or a parameter in it; faults of the whole network have no place. Prints a table of what was missed.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sounding.probe.check import check

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import audit_harm
from workers import in_order

import networks

# the module (or "" for the whole network) and the kinds that fit, or None: no place
Planted = tuple[str, str] | None
NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")


class Encoder(nn.Module):
    """A classifier of digits by rows: nn.TransformerEncoder, its layers drawn apart."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 32)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 6)
        self.head = nn.Linear(32, 10)
        for part in self.body.parameters():
            if part.dim() > 1:
                nn.init.xavier_uniform_(part)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x.view(-1, 8, 8))).mean(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A classifier of digits by rows: two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(8, 32, 2, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(-1, 8, 8))[0][:, -1])  # type: ignore[no-any-return]


def hf(spec: str) -> tuple[nn.Module, Any, Tensor]:
    from sounding.models.hf import build_hf
    from sounding.models.hf_inputs import sample_inputs

    model = build_hf(spec)
    found = sample_inputs(model, batch_size=8, generator=torch.Generator().manual_seed(0))
    assert found.targets is not None
    return model, found.arguments, found.targets


def digits(model: nn.Module) -> tuple[nn.Module, Any, Tensor]:
    inputs, labels = networks.batch("standardized digits", samples=64, shape=(64,))
    return model, inputs, labels


ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, Any, Tensor]]] = {
    "gpt2": lambda: hf("hf:gpt2,layers=6,hidden=48,vocab=128"),
    "llama": lambda: hf("hf:llama,layers=6,hidden=48,vocab=128"),
    "bert": lambda: hf("hf:bert,layers=6,hidden=48,vocab=128"),
    "vit": lambda: hf("hf:vit,layers=6,hidden=48,image=16,patch=4"),
    "convnext": lambda: hf("hf:convnext,image=32"),
    "encoder": lambda: digits(Encoder()),
    "perceptron": lambda: digits(audit_harm.Perceptron()),
    "residual": lambda: digits(audit_harm.Residual()),
    "lstm": lambda: digits(Recurrent()),
}


def siblings(model: nn.Module, kinds: tuple[type, ...] | None, key: str) -> list[tuple[str, nn.Module]]:
    """The members of a repeated place that hold such a parameter, at random; all of them come from one place."""
    places: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        held = getattr(module, key, None)
        own = isinstance(held, nn.Parameter) and (kinds is None or isinstance(module, kinds))
        if own and (held.dim() > 1) == (kinds is None) and NUMBER.search(name):
            places.setdefault(NUMBER.sub("*", name), []).append((name, module))
    repeated = [members for members in places.values() if len(members) >= 3]
    return random.choice(repeated) if repeated else []


def one_weight(model: nn.Module, change: Callable[[Tensor], object], kinds: str) -> Planted:
    """Change the weight of one member of a repeated place."""
    members = siblings(model, None, "weight")
    if not members:
        return None
    name, module = random.choice(members[:-1])
    change(module.weight)  # type: ignore[arg-type]
    return name, kinds


def norms_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if "Norm" in type(module).__name__ and isinstance(getattr(module, "weight", None), Tensor)
    ]


def one_norm(model: nn.Module, value: float, key: str, kinds: str) -> Planted:
    chosen = [item for item in norms_of(model) if isinstance(getattr(item[1], key, None), Tensor)]
    if not chosen:
        return None
    name, norm = random.choice(chosen)
    getattr(norm, key).fill_(value)
    return name, kinds


def all_norms(model: nn.Module, value: float) -> Planted:
    for _, norm in norms_of(model):
        norm.weight.fill_(value)  # type: ignore[operator, union-attr]
    return ("", "norm_weight") if norms_of(model) else None


def one_bias(model: nn.Module) -> Planted:
    linear = [
        (name, module)
        for name, module in model.named_modules()
        if "Norm" not in type(module).__name__
        and isinstance(getattr(module, "bias", None), nn.Parameter)
        and NUMBER.search(name)
        and getattr(module, "weight", None) is not None
        and module.weight.dim() > 1  # type: ignore[union-attr, operator]
    ]
    if not linear:
        return None
    name, module = random.choice(linear)
    module.bias.fill_(10.0)  # type: ignore[operator, union-attr]
    return name, "large_bias"


def clone(model: nn.Module) -> Planted:
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) > 3]
    for part in lists:
        for index in range(1, len(part)):
            if {n: p.shape for n, p in part[index].named_parameters()} == {
                n: p.shape for n, p in part[0].named_parameters()
            }:
                part[index].load_state_dict(part[0].state_dict())
    return ("", "cloned_weights") if lists else None


def head_of(model: nn.Module) -> tuple[str, nn.Linear]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]


def big_head(model: nn.Module) -> Planted:
    name, head = head_of(model)
    head.weight.mul_(100)
    return name, "odd_scale start_loss"


def embedding(model: nn.Module) -> Planted:
    found = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Embedding)]
    if not found:
        return None
    found[0][1].weight.normal_(0, 3)
    return found[0][0], "odd_scale start_loss config_law"


def freeze(model: nn.Module) -> Planted:
    members = siblings(model, None, "weight")
    if not members:
        return None
    for _, module in members[:-1]:
        module.requires_grad_(False)
    return members[0][0], "frozen"


def detach(model: nn.Module) -> Planted:
    """What the output layer is given is cut off."""
    head = head_of(model)[1]
    head.register_forward_pre_hook(lambda module, inputs: (inputs[0].detach(),))
    return "", "detached"


def unused(model: nn.Module) -> Planted:
    model.add_module("spare", nn.Linear(16, 16))
    return "spare", "unused"


def still(model: nn.Module) -> Planted:
    """Batch norms that stay in evaluation mode, with statistics that are far off."""
    found = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    for part in found:
        part.eval()
        part.running_var.fill_(1e-6)  # type: ignore[union-attr]
        part.train = lambda mode=True, part=part: part  # type: ignore[method-assign, assignment]
    return ("", "huge_signal start_loss gradient_explosion disagreement") if found else None


def exchange(model: nn.Module) -> Planted:
    """One uneven matrix of a network drawn by He is drawn by its other fan."""
    uneven = [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and max(part.weight.shape) >= 2 * min(part.weight.shape) > 24
    ]
    if len(uneven) < 4:
        return None
    for part in model.modules():
        if isinstance(part, nn.Linear):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
    name, part = random.choice(uneven[:-1])
    nn.init.kaiming_normal_(part.weight, nonlinearity="relu", mode="fan_out")
    return name, "fans_exchanged odd_scale"


def dead(model: nn.Module) -> Planted:
    """A layer in front of a rectifier whose bias lets nothing pass."""
    if not isinstance(model, audit_harm.Perceptron):
        return None
    index = random.randrange(1, len(model.blocks) - 1)
    model.blocks[index].bias.fill_(-50.0)  # type: ignore[operator, union-attr]
    return f"blocks.{index}", "large_bias dead_units gradient_vanishing"


FAULTS: dict[str, Callable[[nn.Module], Planted]] = {
    "weight: not a number": lambda m: one_weight(m, lambda w: w.view(-1)[7].fill_(math.nan), "parameter_not_finite"),
    "weight: infinite": lambda m: one_weight(m, lambda w: w.view(-1)[7].fill_(math.inf), "parameter_not_finite"),
    "weight: never written": lambda m: one_weight(m, audit_harm.unwritten, "never_written"),
    "weight: zeros": lambda m: one_weight(m, lambda w: w.zero_(), "constant_weight"),
    "weight: constant": lambda m: one_weight(m, lambda w: w.fill_(0.1), "constant_weight"),
    "weight: × 10": lambda m: one_weight(m, lambda w: w.mul_(10), "odd_scale config_law"),
    "weight: × 100": lambda m: one_weight(m, lambda w: w.mul_(100), "odd_scale config_law"),
    "weight: ÷ 100": lambda m: one_weight(m, lambda w: w.div_(100), "odd_scale config_law"),
    "weight: fans exchanged": exchange,
    "blocks: copies": clone,
    "head: × 100": big_head,
    "embedding: a deviation of 3": embedding,
    "norm: one scale of 10": lambda m: one_norm(m, 10.0, "weight", "norm_weight"),
    "norm: one scale of 0": lambda m: one_norm(m, 0.0, "weight", "norm_weight zero_start constant_weight"),
    "norm: all scales of 0.1": lambda m: all_norms(m, 0.1),
    "norm: one shift of 10": lambda m: one_norm(m, 10.0, "bias", "large_bias norm_weight"),
    "bias: one of 10": one_bias,
    "bias: units that never fire": dead,
    "gradient: frozen blocks": freeze,
    "gradient: detached body": detach,
    "gradient: unused layer": unused,
    "norm: batch norms that stay in evaluation mode": still,
}


def is_found(model: nn.Module, inputs: Any, targets: Tensor, planted: tuple[str, str]) -> tuple[bool, str]:
    """Whether a finding of a fitting kind names the module, and what was found."""
    place, kinds = planted
    findings = check(model, inputs, targets, theory=False).verdict.findings
    for one in findings:
        named = (one.layer or "", one.parameter or "")
        if one.kind in kinds.split() and (not place or one.kind == "start_loss" or any(place in n for n in named)):
            return True, ""
    told = ", ".join(f"{one.kind} at {one.parameter or one.layer}" for one in findings) or "nothing"
    return False, told


def look(task: tuple[str, str, int]) -> tuple[bool, str] | None:
    """Whether the fault was found, with the line of the table if not; None where the network has no place for it."""
    architecture, fault, seed = task
    with networks.drawn_from(seed):
        model, inputs, targets = ARCHITECTURES[architecture]()
        random.seed(f"{seed} {fault}")
        with torch.no_grad():
            planted = FAULTS[fault](model)
        if planted is None:
            return None
        found, told = is_found(model, inputs, targets, planted)
    return found, f"| {seed} | {fault} | {architecture} | {planted[0] or 'the network'} | {told} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only architectures and faults whose name has one of these words")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    chosen = [[name for name in names if any(word in name for word in given.words)] or list(names)
              for names in (ARCHITECTURES, FAULTS)]  # fmt: skip
    seeds = range(given.first, given.first + given.seeds)
    tasks = [(architecture, fault, seed) for seed in seeds for architecture in chosen[0] for fault in chosen[1]]
    right = count = 0
    print("| seed | fault | network | module | found instead |\n|---|---|---|---|---|")
    for result in in_order(look, tasks, processes=given.processes):
        if result is not None:
            count, right = count + 1, right + result[0]
            if not result[0]:
                print(result[1], flush=True)
    print(f"\n{right} of {count} planted faults found with the right module named ({right / max(count, 1):.1%}).")


if __name__ == "__main__":
    main()
