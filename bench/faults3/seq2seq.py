"""An encoder and a decoder with cross attention: the answer is the question, word for word, in another alphabet."""

from __future__ import annotations

import torch
from common import Fault, Network, accuracy, class_loss
from torch import Tensor, nn

WORDS, WIDTH, LENGTH, BLOCKS = 20, 64, 12, 3

FAULTS = (
    Fault("decoder_unmasked", "mask missing", ("target_leak",), r".*", "the decoder reads the answer"),
    Fault("not_shifted", "labels fed as inputs", ("target_leak",), r".*", "the decoder is given the answer"),
    Fault(
        "memory_is_itself",
        "wrong tensor passed on",
        ("detached", "unused_input", "unused", "target_leak"),
        r".*",
        "the question is not read, and later words of the answer are",
    ),
    Fault("encoder_no_grad", "part cut off from the gradient", ("detached",), r"encoder|source"),
    Fault(
        "padding_inverted",
        "mask turned around",
        ("unused_input", "behind_zeros", "detached", "rank_collapse", "token_collapse"),
        r".*",
    ),
    Fault("values_large", "one weight too large", ("odd_scale", "odd_branch"), r"decoder\.1"),
)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        later = None if self.fault == "decoder_unmasked" else later
        y = self.norm1(x)
        x = x + self.attn(y, y, y, attn_mask=later, need_weights=False)[0]
        y = self.norm2(x)
        memory = y if self.fault == "memory_is_itself" else memory
        x = x + self.cross(y, memory, memory, key_padding_mask=padding, need_weights=False)[0]
        return x + self.mlp(self.norm3(x))


class Translator(nn.Module):
    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.source, self.answer = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS + 1, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.encoder = nn.ModuleList(Encoder() for _ in range(BLOCKS))
        self.encoder_norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Decoder(fault) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        if fault == "values_large":
            with torch.no_grad():
                self.decoder[1].cross.out_proj.weight.mul_(40)

    def forward(self, question: Tensor, answer: Tensor) -> Tensor:
        padding = question == 0
        if self.fault == "padding_inverted":
            padding = ~padding
        memory = self.source(question) + self.place
        for block in self.encoder:
            memory = block(memory, padding)
        memory = self.encoder_norm(memory)
        if self.fault == "encoder_no_grad":
            memory = memory.detach()
        x = self.answer(answer) + self.place
        for block in self.decoder:
            x = block(x, memory, padding)
        return self.head(self.norm(x))


def batch(generator: torch.Generator, fault: str | None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    alphabet = torch.cat(
        (torch.zeros(1, dtype=torch.long), 1 + torch.randperm(WORDS - 1, generator=torch.Generator().manual_seed(3)))
    )
    question = torch.randint(1, WORDS, (64, LENGTH), generator=generator)
    ends = torch.randint(LENGTH - 4, LENGTH, (64, 1), generator=generator)
    question = torch.where(torch.arange(LENGTH) < ends, question, 0)
    answer = alphabet[question]
    start = torch.full((64, 1), WORDS)
    given = answer if fault == "not_shifted" else torch.cat((start, answer[:, :-1]), 1)
    return (question, given), answer


NETWORK = Network("seq2seq", Translator, batch, FAULTS, class_loss, accuracy, 0.2, steps=100)
