"""Draw a picture for every kind of finding: `python docs/make_kind_pictures.py [KIND ...]`, all of them without a name.

Each picture comes from a real check of a network that has the fault, beside the same network without it, and is only
drawn if the check finds it. Seeds are fixed and the SVG carries no date.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import sounding
from sounding.look import BAD, GOOD, MUTED, TWO_COLUMNS_INCHES, style
from sounding.probe.records import Report
from sounding.start.compare import compare_paths
from sounding.start.parameters import Parameter, take_stock

FOLDER = Path(__file__).parent / "pictures" / "kinds"
Batch = tuple[Any, Any]
Case = tuple[nn.Module, Batch, nn.Module, Batch]  # a sound network with its batch, and a faulty one with its own
DEPTH, WIDTH, CLASSES = 16, 48, 10


def digits(samples: int = 64) -> Batch:
    return torch.randn(samples, WIDTH), torch.randint(0, CLASSES, (samples,))


def mlp(
    depth: int = DEPTH,
    *,
    gain: float = 2.0,
    activation: Callable[[], nn.Module] = nn.ReLU,
    norm: bool = False,
) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(depth):
        layer = nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(layer.weight, std=math.sqrt(gain / WIDTH))
        nn.init.zeros_(layer.bias)
        parts += [layer, *([nn.BatchNorm1d(WIDTH)] if norm else []), activation()]
    return nn.Sequential(*parts, nn.Linear(WIDTH, CLASSES))


def changed(network: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    """A copy of a network with one thing changed."""
    twin = copy.deepcopy(network)
    with torch.no_grad():
        change(twin)
    return twin


def one(change: Callable[[nn.Linear], object], *, batch: Batch | None = None, **options: Any) -> Case:
    """A perceptron, and its twin with its seventh layer changed."""
    network, given = mlp(**options), batch or digits()
    return network, given, changed(network, lambda twin: change(twin[12])), given


class Encoder(nn.Module):
    """A pre-norm transformer over tokens of 48 features."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        for part in self.body.parameters():
            if part.dim() > 1:
                nn.init.xavier_uniform_(part)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens).mean(1))  # type: ignore[no-any-return]


def tokens() -> Batch:
    return torch.randn(16, 12, WIDTH), torch.randint(0, CLASSES, (16,))


def blocks(change: Callable[[Any], object]) -> Case:
    network, given = Encoder(), tokens()
    return network, given, changed(network, lambda twin: change(twin.body.layers)), given


class Detaching(nn.Module):
    def __init__(self, body: nn.Sequential) -> None:
        super().__init__()
        self.body, self.cut = body, 24

    def forward(self, x: Tensor) -> Tensor:
        return self.body[self.cut :](self.body[: self.cut](x).detach())


class Spare(nn.Module):
    def __init__(self, body: nn.Sequential) -> None:
        super().__init__()
        self.body, self.spare = body, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, 32, batch_first=True), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        parts = torch.stack([expert(x) for expert in self.experts], 1)
        return self.head(weight[:, None] * parts[torch.arange(len(x)), chosen])  # type: ignore[no-any-return]


class Graph(nn.Module):
    """Graph convolutions over the rows of the batch, or, without edges, a perceptron."""

    def __init__(self, *, edges: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        near = (torch.rand(64, 64) < 0.1).float() + torch.eye(64)
        self.register_buffer("near", near / near.sum(1, keepdim=True) if edges else None)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            x = x if self.near is None else self.near @ x
        return self.head(x)  # type: ignore[no-any-return]


class Forgetful(nn.Module):
    """Two layers, the second of which the initialization does not reach after the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.second.weight, std=0.02)

    def init_weights(self) -> None:
        for layer in (self.first, self.second):
            layer.reset_parameters()


def gpt2(change: Callable[[Any], object]) -> Case:
    from sounding.models.hf import build_hf

    network = build_hf("hf:gpt2,layers=4,hidden=48,vocab=128")
    ids = torch.randint(0, 128, (8, 16))
    return network, (ids, None), changed(network, change), (ids, None)


def repeated() -> Case:
    network, (inputs, labels) = mlp(), digits()
    return network, (inputs, labels), network, (inputs[:1].repeat(64, 1), labels[:1].repeat(64))


def uneven() -> Case:
    network, (inputs, labels) = mlp(4), digits(256)
    most = torch.where(torch.rand(256) < 0.9, 0, labels)
    return network, (inputs, labels), network, (inputs, most)


def exchange(network: nn.Sequential) -> nn.Module:
    for layer in network:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=math.sqrt(1 / layer.out_features))
    return network


def uneven_layers() -> nn.Sequential:
    sizes = (WIDTH, 192, WIDTH, 192, WIDTH, 192, WIDTH)
    parts = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    for part in parts:
        nn.init.normal_(part.weight, std=math.sqrt(1 / part.in_features))
    return nn.Sequential(*(item for part in parts for item in (part, nn.Tanh())))


def shut(module: Any) -> None:
    module.lstm.bias_ih_l0[32:64] = -8.0


def clone(network: Any) -> None:
    for layer in network[:-1]:
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(network[0].weight)


def flatten(network: Any) -> None:
    """A weight of rank one, as large as it was."""
    weight = network[8].weight
    weight.copy_(weight[:, :1] * weight[:1] * math.sqrt(WIDTH))


def bounded(gain: float) -> nn.Sequential:
    return mlp(8, gain=gain, activation=nn.Tanh)


def prefer(network: Any) -> None:
    network.router.bias[2] = 30.0


def freeze(network: Any) -> None:
    for layer in network[:24]:
        layer.requires_grad_(requires_grad=False)


CASES: dict[str, Callable[[], Case]] = {
    "rank_collapse": lambda: (mlp(40, norm=True), (b := digits()), mlp(40, gain=1.0), b),
    "gradient_explosion": lambda: (mlp(60), (b := digits()), mlp(60, norm=True), b),
    "gradient_vanishing": lambda: (mlp(20), (b := digits()), mlp(20, gain=1 / 3), b),
    "gradient_alignment": lambda: (mlp(40, norm=True), (b := digits()), mlp(40, gain=1.0), b),
    "degenerate_batch": repeated,
    "batch_too_small": lambda: ((n := mlp(20, norm=True)), digits(), n, digits(4)),
    "dead_units": lambda: one(lambda layer: layer.bias.fill_(-20.0)),
    "saturation": lambda: (bounded(1.0), (b := digits()), bounded(2e4), b),
    "non_finite": lambda: one(lambda layer: layer.weight.fill_(1e38)),
    "parameter_not_finite": lambda: one(lambda layer: layer.weight[0].fill_(math.nan)),
    "never_written": lambda: one(lambda layer: layer.weight.mul_(10 ** (40 * torch.rand_like(layer.weight) - 40))),
    "constant_weight": lambda: one(lambda layer: layer.weight.fill_(0.1)),
    "zero_start": lambda: ((n := mlp()), (b := digits()), changed(n, lambda twin: twin[-1].weight.zero_()), b),
    "cloned_weights": lambda: ((n := mlp()), (b := digits()), changed(n, clone), b),
    "odd_scale": lambda: one(lambda layer: layer.weight.mul_(30)),
    "fans_exchanged": lambda: ((n := uneven_layers()), (b := digits()), exchange(copy.deepcopy(n)), b),
    "norm_weight": lambda: blocks(lambda layers: layers[2].norm1.weight.fill_(10.0)),
    "large_bias": lambda: one(lambda layer: layer.bias.fill_(10.0)),
    "config_law": lambda: gpt2(lambda n: [b.mlp.c_fc.weight.normal_(std=0.045) for b in n.transformer.h]),
    "start_loss": lambda: ((n := mlp()), (b := digits()), changed(n, lambda twin: twin[-1].weight.mul_(100)), b),
    "class_imbalance": uneven,
    "softmax_twice": lambda: ((n := mlp(4)), (b := digits()), nn.Sequential(*n, nn.Softmax(-1)), b),
    "huge_signal": lambda: ((n := mlp()), (b := digits()), n, (1e5 * b[0], b[1])),
    "frozen": lambda: ((n := mlp()), (b := digits()), changed(n, freeze), b),
    "detached": lambda: ((n := mlp()), (b := digits()), Detaching(copy.deepcopy(n)), b),
    "unused": lambda: ((n := mlp(6)), (b := digits()), Spare(copy.deepcopy(n)), b),
    "behind_zeros": lambda: one(lambda layer: layer.weight.zero_()),
    "disagreement": lambda: ((n := bounded(1.0)), (b := digits()), changed(n, flatten), b),
    "cause": lambda: one(lambda layer: layer.weight.mul_(3e3)),
    "entropy_collapse": lambda: blocks(lambda all_: [b.self_attn.in_proj_weight[:96].mul_(6) for b in all_]),
    "token_collapse": lambda: blocks(lambda layers: layers[0].linear2.bias.fill_(100.0)),
    "massive_activation": lambda: blocks(lambda layers: layers[1].linear2.bias[3].fill_(3000.0)),
    "odd_branch": lambda: blocks(lambda layers: layers[3].linear2.weight.mul_(60)),
    "shut_gates": lambda: ((n := Recurrent()), (b := tokens()), changed(n, shut), b),
    "router_collapse": lambda: ((n := Experts()), (b := digits(256)), changed(n, prefer), b),
    "mixed_samples": lambda: (Graph(edges=False), (b := digits()), Graph(edges=True), b),
}  # fmt: skip

# What is drawn over depth: measure, label, whether the axis is logarithmic.
DEPTHS: dict[str, tuple[str, str, bool]] = {
    "rank_collapse": ("mean_cosine", "mean cosine", False),
    "gradient_explosion": ("gradient_log_norm", "norm of the gradient", True),
    "gradient_vanishing": ("gradient_log_norm", "norm of the gradient", True),
    "degenerate_batch": ("mean_cosine", "mean cosine", False),
    "batch_too_small": ("gradient_log_norm", "norm of the gradient", True),
    "dead_units": ("dead_fraction", "share of dead units", False),
    "saturation": ("saturated_fraction", "share of flat units", False),
    "non_finite": ("mean_square", "mean square", True),
    "huge_signal": ("mean_square", "mean square", True),
    "disagreement": ("orthogonality_gap", "orthogonality gap", False),
    "entropy_collapse": ("attention_entropy", "entropy over uniform", False),
    "token_collapse": ("token_cosine", "cosine of tokens", False),
    "massive_activation": ("largest_over_median", "largest over median", True),
    "odd_branch": ("branch_over_stream", "branch over stream", True),
    "mixed_samples": ("mean_cosine", "mean cosine", False),
}
# What is drawn of every parameter: its label, the number, which kinds of parameters, whether the axis is logarithmic.
MATRICES = ("linear", "convolution", "embedding")
PARAMETERS: dict[str, tuple[str, Callable[[Parameter, Parameter], float], tuple[str, ...], bool]] = {
    "parameter_not_finite": ("share of NaN", lambda p, _: float(p.tensor.isnan().float().mean()), MATRICES, False),
    "never_written": ("median entry", lambda p, _: float(p.tensor.abs().median()), MATRICES, True),
    "constant_weight": ("standard deviation", lambda p, _: float(p.tensor.std()), MATRICES, False),
    "zero_start": ("root mean square", lambda p, _: p.scale, MATRICES, False),
    "cloned_weights": (
        "cosine with the first",
        lambda p, first: (
            float(torch.cosine_similarity(p.tensor.flatten(), first.tensor.flatten(), 0))
            if p.tensor.shape == first.tensor.shape
            else math.nan
        ),
        MATRICES,
        False,
    ),
    "odd_scale": ("root mean square", lambda p, _: p.scale, MATRICES, True),
    "fans_exchanged": ("variance times fan_in", lambda p, _: p.scale**2 * p.fan_in, MATRICES, True),
    "norm_weight": ("scale of the norm", lambda p, _: p.scale, ("norm weight",), True),
    "large_bias": ("size of the bias", lambda p, _: p.scale, ("bias",), False),
    "config_law": ("root mean square", lambda p, _: p.scale, MATRICES, True),
}
SAWTOOTH = ("mean_cosine", "gradient_log_norm", "mean_square", "participation_ratio")
ARRIVALS = ("frozen", "detached", "unused", "behind_zeros")


def draw(kind: str) -> Figure:
    """The picture of one kind; it fails where the check does not find it."""
    torch.manual_seed(0)
    figure = Figure(figsize=(TWO_COLUMNS_INCHES, 2.5), layout="constrained")
    axes = figure.subplots()
    if kind == "meta_law":
        _draw_meta(axes)
        return figure
    sound, batch, faulty, other = CASES[kind]()
    reports = {"sound": sounding.check(sound, *batch), "with the fault": sounding.check(faulty, *other, theory=True)}
    found = [one for one in reports["with the fault"].verdict.findings if one.kind == kind]
    if not found:
        raise SystemExit(f"{kind} is not found: {reports['with the fault'].verdict.summary}")
    if kind in DEPTHS:
        _draw_depth(axes, reports, kind, found[0].depth)
    elif kind in PARAMETERS:
        _draw_parameters(axes, {"sound": sound, "with the fault": faulty}, kind)
    elif kind in ARRIVALS:
        _draw_gradients(axes, reports, faulty)
    else:
        _draw_bars(axes, kind, reports, (batch[1], other[1]))
    place = found[0].parameter or found[0].layer
    axes.set_title(f"found: {kind}, {found[0].severity}" + (f", at {place}" if place else ""), loc="left", color=MUTED)
    return figure


def _draw_depth(axes: Axes, reports: Mapping[str, Report], kind: str, depth: int | None) -> None:
    measure, label, log = DEPTHS[kind]
    for (name, report), colour in zip(reports.items(), (GOOD, BAD), strict=True):
        told = {call.name for call in report.reading.weight_layers}  # norms and activations would make a sawtooth
        rows = [row for row in report.profile.rows if row.measure == measure and row.source == "check"
                and (row.name in told or measure not in SAWTOOTH)]  # fmt: skip
        values = [math.exp(row.value) if measure.endswith("log_norm") else row.value for row in rows]
        axes.plot([row.layer for row in rows], values, "o-", ms=3, lw=1, color=colour, label=name)
        if kind == "disagreement":
            theory = [row for row in report.profile.rows if row.measure == measure and row.source == "theory"]
            low, high = ([row.value + sign * 2 * (row.stderr or 0) for row in theory] for sign in (-1, 1))
            axes.fill_between([row.layer for row in theory], low, high, color=colour, alpha=0.2, lw=0)
    if depth is not None:
        axes.axvline(depth, color=MUTED, lw=0.8, ls=":")
    axes.set(xlabel="module call, from the input", ylabel=label, yscale="log" if log else "linear")
    axes.legend()


def _draw_parameters(axes: Axes, networks: Mapping[str, nn.Module], kind: str) -> None:
    label, number, kinds, log = PARAMETERS[kind]
    for (name, network), colour in zip(networks.items(), (GOOD, BAD), strict=True):
        held = [one for one in take_stock(network).parameters if one.kind in kinds]
        values = [number(one, held[0]) for one in held]
        axes.plot(range(1, len(held) + 1), values, "o", ms=4, color=colour, label=name, alpha=0.8)
    axes.set(xlabel="parameter, in the order of the network", ylabel=label, yscale="log" if log else "linear")
    axes.legend()


def _draw_gradients(axes: Axes, reports: Mapping[str, Report], faulty: nn.Module) -> None:
    """The gradient of every matrix; one that gets none, or exactly zero, lies on the ground."""
    order = [name for name, weight in faulty.named_parameters() if weight.dim() > 1]
    rows = {row.name: row.value for row in reports["with the fault"].profile.rows if row.measure.startswith("weight_g")}
    norms = [math.exp(rows[name]) if rows.get(name, -math.inf) > -math.inf else 0.0 for name in order]
    axes.bar(range(1, len(order) + 1), norms, color=[BAD if norm == 0 else GOOD for norm in norms])
    none = [place for place, norm in enumerate(norms, start=1) if norm == 0]
    axes.plot(none, [0.0] * len(none), "x", color=BAD, label="no gradient", clip_on=False)
    axes.set(xlabel="weight, in the order of the network", ylabel="norm of its gradient", ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    axes.legend()


def _draw_bars(axes: Axes, kind: str, reports: Mapping[str, Report], targets: tuple[Any, Any]) -> None:
    sound, ill = reports.values()
    start = [float(report.profile.settings["start"]["value"]) for report in (sound, ill)]
    finding = next(one for one in ill.verdict.findings if one.kind == kind)
    if kind == "gradient_alignment":
        values = {"sound": sound.profile.value(kind, source="check").value,
                  "with the fault": ill.profile.value(kind, source="check").value}  # fmt: skip
        label = "cosine of gradients"
    elif kind == "start_loss":
        values = {"without knowledge (ln C)": math.log(CLASSES), "sound": start[0], "with the fault": start[1]}
        label = "loss at the start"
    elif kind == "class_imbalance":
        counts = torch.bincount(targets[1], minlength=CLASSES).tolist()
        values, label = {str(number): count for number, count in enumerate(counts)}, "samples of each class"
    elif kind == "softmax_twice":
        norms = [report.reading.weight_layers[-1].get("gradient_log_norm") for report in (sound, ill)]
        values, label = dict(zip(reports, map(math.exp, norms), strict=True)), "gradient at the logits"
    elif kind == "cause":
        values = {"as it is": finding.evidence["before"], "with the named change": finding.evidence["after"]}
        label = "illness in theory"
    elif kind == "shut_gates":
        rows = [{row.measure: row.value for row in report.profile.rows if "gate_mean" in row.measure}
                for report in (sound, ill)]  # fmt: skip
        values = {f"{gate.split('_')[0]}\n{name}": row[gate] for name, row in zip(("sound", "fault"), rows, strict=True)
                  for gate in row}  # fmt: skip
        label = "mean opening"
    else:
        names = {"expert_load_max": "largest load", "router_entropy": "entropy", "dead_expert_fraction": "dead experts"}
        values = {f"{short}\n{name}": report.profile.value(measure, source="check").value
                  for measure, short in names.items()
                  for name, report in zip(("sound", "fault"), (sound, ill), strict=True)}  # fmt: skip
        label = "load, shares"
    good = [
        not ("fault" in name or name == "as it is" or (kind == "class_imbalance" and name == "0")) for name in values
    ]
    axes.bar(list(values), list(values.values()), color=[GOOD if one else BAD for one in good], width=0.6)
    axes.set_ylabel(label)


def _draw_meta(axes: Axes) -> None:
    """Scales of a network that is built eagerly, beside those that the meta device and its initialization give."""
    result = compare_paths(Forgetful)
    found = [one for one in result.findings if one.kind == "meta_law"]
    if not found:
        sys.exit("meta_law is not found")
    eager = Forgetful()
    late = {place.name: place.scale[0] for place in result.places}
    held = take_stock(eager).parameters
    axes.plot([one.name for one in held], [one.scale for one in held], "o", color=GOOD, label="built eagerly")
    axes.plot(list(late), list(late.values()), "x", color=BAD, label="through the meta device")
    axes.set_ylabel("root mean square")
    axes.set_title(f"found: meta_law, {found[0].severity}, at {found[0].parameter}", loc="left", color=MUTED)
    axes.legend()


def main(names: list[str]) -> None:
    known = [*CASES, "meta_law"]
    unknown = sorted(set(names) - set(known))
    if unknown:
        sys.exit(f"unknown kind {', '.join(unknown)}; one of {', '.join(known)}")
    FOLDER.mkdir(exist_ok=True, parents=True)
    matplotlib.rcParams.update({"svg.hashsalt": "sounding", "svg.fonttype": "none", **style()})
    for name in names or known:
        path = FOLDER / f"{name}.svg"
        draw(name).savefig(path, metadata={"Date": None})
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
