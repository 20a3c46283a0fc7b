"""Networks that go along time: recurrent, convolutional and state-space."""

from __future__ import annotations

import torch
from bench.promised.tasks import CLASSES, LEVELS
from torch import Tensor, nn
from torch.nn import functional as F


class Memory(nn.Module):
    """Three layers of LSTM whose forget gates start open; the last step is read."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.lstm = nn.LSTM(width, width, num_layers=3, batch_first=True)
        self.head = nn.Linear(width, CLASSES)
        for name, parameter in self.lstm.named_parameters():
            if "weight_hh" in name:
                for part in parameter.data.chunk(4):
                    nn.init.orthogonal_(part)
            elif "weight_ih" in name:
                nn.init.xavier_uniform_(parameter)
            else:
                nn.init.zeros_(parameter)
                if "bias_ih" in name:
                    parameter.data[width : 2 * width] = 1.0

    def forward(self, steps: Tensor) -> Tensor:
        x, _ = self.lstm(self.first(steps))
        return self.head(x[:, -1])


class GatedCell(nn.Module):
    """A gated recurrent cell, written out, with a norm in front of its gates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.update, self.reset = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.new = nn.Linear(2 * width, width)
        for layer in (self.update, self.reset, self.new):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        nn.init.constant_(self.update.bias, 1.0)  # keep, at first

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        both = torch.cat([x, state], -1)
        keep = torch.sigmoid(self.update(both))
        reset = torch.sigmoid(self.reset(both))
        new = torch.tanh(self.new(torch.cat([x, reset * state], -1)))
        return keep * state + (1 - keep) * new


class GatedStack(nn.Module):
    """Four written-out gated layers with shortcuts between them."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.cells = nn.ModuleList(GatedCell(width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, steps: Tensor) -> Tensor:
        x = self.first(steps)
        for cell, norm in zip(self.cells, self.norms, strict=True):
            inside = norm(x)
            state = x.new_zeros(x.shape[0], x.shape[2])
            states = []
            for step in inside.unbind(1):
                state = cell(step, state)
                states.append(state)
            x = x + torch.stack(states, 1)
        return self.head(x[:, -1])


class WaveBlock(nn.Module):
    """A dilated causal convolution with a gate; one part goes on, one goes out."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.conv = nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.on, self.out = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)

    def pad(self, x: Tensor) -> Tensor:
        return F.pad(x, (self.dilation, 0))

    def gate(self, h: Tensor) -> Tensor:
        signal, gate = h.chunk(2, 1)
        return torch.tanh(signal) * torch.sigmoid(gate)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gate(self.conv(self.pad(x)))
        return x + self.on(h), self.out(h)


class WaveNet(nn.Module):
    """Eight gated blocks of dilation 1, 2, 4, 8 and again; the next of 16 levels."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(LEVELS, width)
        self.blocks = nn.ModuleList(WaveBlock(width, 2 ** (number % 4)) for number in range(8))
        self.end1, self.end2 = nn.Conv1d(width, 32, 1), nn.Conv1d(32, LEVELS, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv1d):
                nn.init.xavier_normal_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, levels: Tensor) -> Tensor:
        x = self.embed(levels).transpose(1, 2)
        total = torch.zeros_like(x)
        for block in self.blocks:
            x, out = block(x)
            total = total + out
        x = F.relu(total / len(self.blocks) ** 0.5)
        return self.end2(F.relu(self.end1(x))).transpose(1, 2)


class StateSpace(nn.Module):
    """A diagonal linear system for each channel, as a long convolution."""

    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.log(torch.linspace(0.5, 4.0, states)).repeat(width, 1))
        self.log_step = nn.Parameter(torch.empty(width, 1).uniform_(-4.0, -1.5))
        self.read = nn.Parameter(torch.randn(width, states) / states**0.5)
        self.through = nn.Parameter(torch.ones(width))

    def kernel(self, length: int) -> Tensor:
        step = self.log_step.exp()
        rate = -self.log_decay.exp() * step
        power = torch.exp(rate[..., None] * torch.arange(length))
        return torch.einsum("ds,dsl->dl", self.read * step**0.5, power)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        late = torch.arange(length)[:, None] - torch.arange(length)[None]
        taps = self.kernel(length)[:, late.clamp(min=0)] * (late >= 0)
        return torch.einsum("dts,nsd->ntd", taps, x) + self.through * x


class StateBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.system = StateSpace(width)
        self.mix = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.system(self.norm(x)))
        return x + F.glu(self.mix(h), -1)


class StateNet(nn.Module):
    """Six state-space blocks, a mean over time, six classes."""

    def __init__(self, width: int = 32, blocks: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(StateBlock(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, steps: Tensor) -> Tensor:
        x = self.first(steps)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))
