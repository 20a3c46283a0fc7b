"""Whether shut gates and collapsed routers hurt: short trainings with and without each fault.

    python bench/gates_harm.py            # all of them (some minutes on one core)

Prints the Markdown table of docs/verdict.md. Recurrent networks learn to tell the first of 4 words; mixtures of experts
learn the word that follows from the last but one (half is the most there is), or the digits. The number is the accuracy
over the last 20 of 150 steps at batch 32, mean of three seeds, for Adam at 0.01 and for SGD with momentum at 0.3,
gradients clipped to 1; beside it what `sounding.check` finds at the first seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from inside_harm import LENGTH, SEEDS, WORDS, Gpt
from inside_harm import draw as draw_words
from inside_healthy import Experts, Recurrent
from torch import Tensor, nn

from sounding.probe.check import check

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from short_training import accuracy_of
from workers import in_order

import networks

STEPS, BATCH, LAST, SEEN = 150, 32, 20, 4
ADAM_RATE, SGD_RATE = 1e-2, 0.3


class Digits(nn.Module):
    """A perceptron whose two hidden layers are experts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(64, 64), Experts(64), Experts(64)
        self.head = nn.Linear(64, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.stem(pixels)[:, None])).squeeze(1))  # type: ignore[no-any-return]


def gpt_of_experts() -> nn.Module:
    """A GPT with experts behind each of its blocks."""
    model = Gpt()
    model.blocks = nn.ModuleList(nn.Sequential(block, Experts(64)) for block in model.blocks)
    return model


def mixtral() -> nn.Module:
    """A small Mixtral of the transformers library."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, initializer_range=0.1, max_position_embeddings=LENGTH,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = MixtralForCausalLM(config)  # type: ignore[no-untyped-call]

        def forward(self, words: Tensor) -> Tensor:
            logits: Tensor = self.body(words, use_cache=False).logits
            return logits.flatten(0, 1)

    return Model()


def bias(gate: int, value: float) -> Callable[[nn.Module], None]:
    """The bias of one gate in all layers; gates lie one behind the other in the vector."""

    def change(model: nn.Module) -> None:
        for name, weight in model.named_parameters():
            if "bias_ih" in name:
                size = len(weight) // (4 if isinstance(model.body, nn.LSTM) else 3)
                weight[gate * size : (gate + 1) * size] = value

    return change


def routers(weight: float, sent: float) -> Callable[[nn.Module], None]:
    """Router weights times a factor, and a bias towards the first experts."""

    def change(model: nn.Module) -> None:
        for module in model.modules():
            name = type(module).__name__
            if isinstance(module, Experts):
                module.router.weight.mul_(weight)
                module.router.bias = nn.Parameter(sent * torch.arange(len(module.experts), 0.0, -1))
            elif "Router" in name and hasattr(module, "weight"):
                module.weight.mul_(weight)
                if sent:
                    module.register_forward_pre_hook(lambda _m, given: (given[0] + 5.0, *given[1:]))
                    module.weight[:, :] += sent * torch.arange(len(module.weight), 0.0, -1)[:, None]

    return change


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM, 32, 1),
    "LSTM of 2 layers": lambda: Recurrent(nn.LSTM, 32, 2),
    "GRU": lambda: Recurrent(nn.GRU, 32, 1),
}
ROUTED: dict[str, Callable[[], nn.Module]] = {"GPT of experts": gpt_of_experts, "digits": Digits, "Mixtral": mixtral}
FAULTS: dict[str, tuple[dict[str, Callable[[], nn.Module]], Callable[[nn.Module], None]]] = {
    "none": (RECURRENT | ROUTED, lambda model: None),
    "memory gate shut (bias −10)": (RECURRENT, bias(1, -10.0)),
    "memory gate shut (bias −4)": (RECURRENT, bias(1, -4.0)),
    "memory gate open (bias +2)": (RECURRENT, bias(1, 2.0)),
    "memory gate never shut (bias +4)": ({"GRU": RECURRENT["GRU"]}, bias(1, 4.0)),
    "memory gate never shut (bias +6)": ({"GRU": RECURRENT["GRU"]}, bias(1, 6.0)),
    "memory gate never shut (bias +10)": ({"GRU": RECURRENT["GRU"]}, bias(1, 10.0)),
    "first gate shut (bias −10)": (RECURRENT, bias(0, -10.0)),
    "all tokens to two experts": (ROUTED, routers(1.0, 10.0)),
    "routers of zero": (ROUTED, routers(0.0, 0.0)),
}


def draw(architecture: str) -> tuple[Tensor, Tensor]:
    """A batch with its labels."""
    if architecture in RECURRENT:
        words = torch.randint(0, 10, (BATCH, SEEN))
        return words, words[:, 0]
    return draw_words("encoder" if architecture == "digits" else "GPT")


def build(fault: str, architecture: str, seed: int) -> nn.Module:
    """The network with the fault planted."""
    builders, change = FAULTS[fault]
    with networks.drawn_from(seed):
        model = builders[architecture]()
        with torch.no_grad():
            change(model)
    return model


def accuracy(fault: str, architecture: str, *, adam: bool) -> float:
    """Of the last steps, mean over seeds; 0 where the loss leaves the numbers."""
    rate = ADAM_RATE if adam else SGD_RATE
    found = []
    for seed in SEEDS:
        model = build(fault, architecture, seed)
        found.append(
            accuracy_of(model, lambda: draw(architecture), rate, adam=adam, steps=STEPS, last=LAST, clip=1.0, seed=seed)
        )
    return sum(found) / len(found)


def look(fault: str, architecture: str) -> str:
    """The findings, high first."""
    with networks.drawn_from(2):
        inputs, labels = draw(architecture)
        report = check(build(fault, architecture, SEEDS[0]), inputs, labels, loss="cross_entropy", theory=False)
    return ", ".join(dict.fromkeys(f"{one.kind} ({one.severity})" for one in report.verdict.findings)) or "–"


def line(task: tuple[str, str, bool]) -> str:
    """One line of the table."""
    fault, architecture, trains = task
    rates = (True, False) if trains else ()
    best = " | ".join(f"{accuracy(fault, architecture, adam=adam):.0%}" for adam in rates)
    return f"| {fault} | {architecture} | {best or '– | –'} | {look(fault, architecture)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--look", action="store_true", help="only check, do not train")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    tasks = [(fault, name, not options.look) for fault, (builders, _) in FAULTS.items() for name in builders]
    print("| fault | network | Adam | SGD | found |\n|---|---|---|---|---|")
    for row in in_order(line, tasks, processes=options.processes):
        print(row, flush=True)


if __name__ == "__main__":
    main()
