"""A tagger: the tag of a word depends on the word before it."""

from __future__ import annotations

import torch
from common import Fault, Network, accuracy, class_loss
from torch import Tensor, nn

WORDS, WIDTH, TAGS, LENGTH = 30, 48, 6, 16

FAULTS = (
    Fault("samples_are_steps", "samples taken for steps", ("mixed_samples",), r"lstm|^$", "sentences are mixed"),
    Fault("forget_shut", "gates shut", ("shut_gates", "large_bias"), r"lstm"),
    Fault(
        "loss_misaligned",
        "outputs and labels in different order",
        ("mixed_samples", "wrong_axis"),
        r".*",
        "wrong labels",
    ),
    Fault("embedding_constant", "embedding constant and frozen", ("constant_weight", "frozen"), r"embed"),
    Fault(
        "recurrent_large",
        "recurrent weights too large",
        ("odd_scale", "saturation", "shut_gates", "gradient_explosion"),
        r"lstm",
    ),
)


class Tagger(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=fault != "samples_are_steps", bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, TAGS)
        for name, value in self.lstm.named_parameters():
            if fault == "forget_shut" and name.startswith("bias_ih"):
                nn.init.constant_(value[WIDTH : 2 * WIDTH], -8)
                nn.init.constant_(value[:WIDTH], -4)
            if fault == "recurrent_large" and name.startswith("weight_hh"):
                nn.init.normal_(value, std=2)
        if fault == "embedding_constant":
            nn.init.ones_(self.embed.weight)
            self.embed.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(words))[0])


def misaligned(output: Tensor, targets: Tensor) -> Tensor:
    """The outputs are laid out step by step, and the targets sentence by sentence."""
    return nn.functional.cross_entropy(output.transpose(0, 1).reshape(-1, TAGS), targets.reshape(-1))


def batch(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (32, LENGTH), generator=generator)
    before = torch.cat((words[:, :1], words[:, :-1]), 1)
    return words, (before * 7 + 3) % TAGS


LOSSES = {"loss_misaligned": misaligned}
NETWORK = Network("lstm", Tagger, batch, FAULTS, class_loss, accuracy, 1 / TAGS, LOSSES, rate=5e-3)
