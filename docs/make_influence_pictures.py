"""Draw what depends on what, for four kinds of findings: `python docs/make_influence_pictures.py`.

Each picture shows a sound network beside one with the fault, and is only drawn if the check finds the fault.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import sounding
from sounding.look import BAD, GOOD, MUTED, TWO_COLUMNS_INCHES, style

FOLDER = Path(__file__).parent / "pictures" / "kinds"
STEPS, WIDTH, TOKENS = 12, 16, 24


class Attending(nn.Module):
    """One attention over tokens, with a mask and a softmax that can be wrong."""

    def __init__(self, *, causal: bool = True, axis: int = -1) -> None:
        super().__init__()
        self.causal, self.axis = causal, axis
        self.embed, self.joint = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.joint(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(STEPS, STEPS, dtype=torch.bool).triu(1), -1e9)
        self.weights = scores.softmax(self.axis)
        return self.head(x + self.out(self.weights @ v))


class Recurrent(nn.Module):
    """An LSTM of which one step is read."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.lstm, self.head, self.step = nn.LSTM(4, WIDTH, batch_first=True), nn.Linear(WIDTH, 3), step

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, self.step])


def find(kind: str, network: nn.Module, inputs: Tensor, targets: Tensor | None = None) -> str:
    """The title of a picture: what the check finds."""
    findings = sounding.check(network, inputs, targets).verdict.findings
    found = next((one for one in findings if one.kind == kind), None)
    if found is None:
        sys.exit(f"{kind} is not found")
    return f"found: {kind}, {found.severity}" + (f", at {found.layer}" if found.layer else "")


def pair() -> tuple[Figure, list]:
    figure = Figure(figsize=(TWO_COLUMNS_INCHES, 2.5), layout="constrained")
    return figure, list(figure.subplots(1, 2))


def draw_leak() -> Figure:
    """How much each output changes with each token."""
    text = torch.randint(TOKENS, (6, STEPS + 1))
    figure, panels = pair()
    for axes, name, causal in zip(panels, ("sound: a mask", "with the fault: none"), (True, False), strict=True):
        torch.manual_seed(1)
        network = Attending(causal=causal)
        base, change = network(text[:1, :-1]), torch.zeros(STEPS, STEPS)
        for place in range(STEPS):
            other = text[:1, :-1].clone()
            other[0, place] = (other[0, place] + 1) % TOKENS
            change[:, place] = (network(other) - base)[0].norm(dim=-1).detach()
        axes.imshow(change, cmap="cividis", vmin=0, vmax=float(change.fill_diagonal_(0).max()))
        axes.set(title=name, xlabel="token that is changed", ylabel="output")
    figure.suptitle(find("target_leak", network, text[:, :-1], text[:, 1:]), color=MUTED, x=0.01, ha="left")
    return figure


def draw_reach() -> Figure:
    """The gradient of the loss at each step of the input."""
    figure = Figure(figsize=(TWO_COLUMNS_INCHES, 2.5), layout="constrained")
    axes, steps = figure.subplots(), torch.randn(16, STEPS, 4)
    for place, (name, step, colour) in enumerate((("the last step is read", -1, GOOD), ("the second one", 1, BAD))):
        torch.manual_seed(1)
        network, leaf = Recurrent(step), steps.clone().requires_grad_()
        network(leaf).square().sum().backward()
        heights = leaf.grad.norm(dim=(0, 2))
        axes.bar(torch.arange(1, STEPS + 1) + 0.4 * place - 0.2, heights / heights.max(), 0.4, color=colour, label=name)
    axes.set(xlabel="step of the input", ylabel="gradient, over its largest")
    axes.set_title(find("unused_input", network, steps), loc="left", color=MUTED)
    axes.legend()
    return figure


def draw_axis() -> Figure:
    """What the weights of each query sum to."""
    figure = Figure(figsize=(TWO_COLUMNS_INCHES, 2.5), layout="constrained")
    axes, text = figure.subplots(), torch.randint(TOKENS, (6, STEPS))
    for name, axis, colour in (("softmax over the keys", -1, GOOD), ("over the queries", -2, BAD)):
        torch.manual_seed(1)
        network = Attending(axis=axis)
        network(text)
        axes.plot(range(1, STEPS + 1), network.weights[0].sum(-1).detach(), "o-", ms=4, color=colour, label=name)
    axes.set(xlabel="query", ylabel="sum of its weights", ylim=(0, None))
    axes.set_title(find("wrong_axis", network, text), loc="left", color=MUTED)
    axes.legend()
    return figure


def draw_activation() -> Figure:
    """The output along a line through the inputs."""
    figure, line = Figure(figsize=(TWO_COLUMNS_INCHES, 2.5), layout="constrained"), torch.linspace(-3, 3, 200)
    axes, (start, way) = figure.subplots(), torch.randn(2, 8)
    points = start + line[:, None] * way
    for name, activation, colour in (("with activations", nn.Tanh, GOOD), ("without", nn.Identity, BAD)):
        torch.manual_seed(1)
        parts = [part for _ in range(4) for part in (nn.Linear(8, 8), activation())]
        network = nn.Sequential(*parts, nn.Linear(8, 1))
        for layer in network[::2]:
            nn.init.normal_(layer.weight, std=0.6)
        values = network(points).detach().flatten()
        axes.plot(line, (values - values.mean()) / values.std(), color=colour, label=name)
    axes.set(xlabel="place on a line through the inputs", ylabel="output, standardized")
    axes.set_title(find("activation", network, torch.randn(16, 8)), loc="left", color=MUTED)
    axes.legend()
    return figure


DRAWN = {
    "target_leak": draw_leak, "unused_input": draw_reach, "wrong_axis": draw_axis, "activation": draw_activation,
}  # fmt: skip


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "sounding", "svg.fonttype": "none", **style()})
    for kind, draw in DRAWN.items():
        torch.manual_seed(0)
        path = FOLDER / f"{kind}.svg"
        draw().savefig(path, metadata={"Date": None})
        print(path)


if __name__ == "__main__":
    main()
