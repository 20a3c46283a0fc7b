"""Networks over time and graphs: nn.LSTM, an LSTM cell of our own, a temporal convolution, a graph network."""

import itertools

import torch
from nets_common import ANY, WARN, Arch, Case, blocks_graph, recall, rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm


class LstmClassifier(nn.Module):
    """Must remember the first of 20 steps."""

    def __init__(self, fault: str | None = None, width: int = 48) -> None:
        super().__init__()
        self.fault = fault
        self.lstm = nn.LSTM(8, width, batch_first=fault != "batch_first")
        self.head = nn.Linear(width, 8)
        with torch.no_grad():
            nn.init.orthogonal_(self.lstm.weight_hh_l0)
            self.lstm.bias_ih_l0[width : 2 * width] = 2.0
            if fault == "forget_shut":
                self.lstm.bias_ih_l0[width : 2 * width] = -8.0
            if fault == "recurrent_gain":
                self.lstm.weight_hh_l0.mul_(20)
            if fault == "output_shut":
                self.lstm.bias_ih_l0[3 * width :] = -10.0

    def forward(self, steps: Tensor) -> Tensor:
        states, _ = self.lstm(steps)
        if self.fault == "wrong_step":  # meant the last step of the backward direction
            return self.head(states[:, 1])
        return self.head(states[:, -1])


def draw_lstm(generator: torch.Generator, fault: str | None):
    steps, classes = recall(generator)
    if fault == "wrong_step":  # the symbol is shown at the end there
        steps = steps.flip(1)
    return steps, classes


class Cell(nn.Module):
    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.wx, self.wh = nn.Linear(given, 4 * width), nn.Linear(width, 4 * width, bias=False)

    def forward(self, step: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (self.wx(step) + self.wh(hidden)).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell


class HandLstm(nn.Module):
    """The same task with a cell written by hand."""

    def __init__(self, fault: str | None = None, width: int = 48) -> None:
        super().__init__()
        self.fault, self.width = fault, width
        self.cell = Cell(8, width)
        self.head = nn.Linear(width, 8)
        with torch.no_grad():
            self.cell.wx.bias[width : 2 * width] = 2.0
            if fault == "forget_shut":
                self.cell.wx.bias[width : 2 * width] = -8.0
            if fault == "saturated":
                self.cell.wx.weight.mul_(100)

    def forward(self, steps: Tensor) -> Tensor:
        hidden = cell = steps.new_zeros(len(steps), self.width)
        for step in steps.unbind(1):
            hidden, cell = self.cell(step, hidden, cell)
            if self.fault == "state_detached":
                hidden, cell = hidden.detach(), cell.detach()
        if self.fault == "state_detached":
            hidden, _ = self.cell(steps[:, -1], hidden, cell)
        return self.head(hidden)


class TemporalBlock(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(channels, channels, 3, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(channels, channels, 3, dilation=dilation))

    def forward(self, signal: Tensor) -> Tensor:
        branch = F.relu(self.conv1(F.pad(signal, (self.pad, 0))))
        return F.relu(signal + F.relu(self.conv2(F.pad(branch, (self.pad, 0)))))


class TemporalConv(nn.Module):
    """Four blocks of dilation 1, 2, 4, 8 with weight norm."""

    def __init__(self, fault: str | None = None, channels: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv1d(8, channels, 1)
        self.blocks = nn.ModuleList(TemporalBlock(channels, 2**i) for i in range(4))
        self.head = nn.Linear(channels, 8)
        with torch.no_grad():
            if fault == "huge_bias":
                self.blocks[1].conv1.bias.fill_(100.0)
            if fault == "dead_block":
                self.blocks[2].conv2.bias.fill_(-50.0)
            if fault == "gain_tiny":
                self.blocks[2].conv2.parametrizations.weight.original0.mul_(1e-4)
            if fault == "first_inf":
                self.first.bias[7] = float("inf")

    def forward(self, steps: Tensor) -> Tensor:
        signal = self.first(steps.transpose(1, 2))
        for block in self.blocks:
            signal = block(signal)
        return self.head(signal[..., -1])


class GraphConv(nn.Module):
    def __init__(self, given: int, wanted: int) -> None:
        super().__init__()
        self.linear = nn.Linear(given, wanted)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.linear(features)


class GraphNet(nn.Module):
    """Graph convolutions with symmetric normalization."""

    def __init__(self, fault: str | None = None, width: int = 32) -> None:
        super().__init__()
        self.fault = fault
        depth = 24 if fault == "oversmoothed" else 3
        sizes = [16] + [width] * depth
        self.convs = nn.ModuleList(GraphConv(a, b) for a, b in itertools.pairwise(sizes))
        self.head = nn.Linear(width, 4)
        for conv in self.convs:
            nn.init.xavier_uniform_(conv.linear.weight)
        with torch.no_grad():
            if fault == "constant_layer":
                self.convs[1].linear.weight.fill_(0.1)
            if fault == "all_zero_bias_dead":
                self.convs[1].linear.bias.fill_(-30.0)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        if self.fault != "not_normalized":
            roots = adjacency.sum(1).rsqrt()
            adjacency = roots[:, None] * adjacency * roots
        for conv in self.convs:
            features = F.relu(conv(features, adjacency))
        return self.head(features)


ARCHES = [
    Arch("lstm", LstmClassifier, draw_lstm, adam=1e-2, sgd=0.5),
    Arch("hand_lstm", HandLstm, lambda g, f: recall(g), adam=1e-2, sgd=0.5),
    Arch("tcn", TemporalConv, lambda g, f: recall(g)),
    Arch("gnn", GraphNet, lambda g, f: blocks_graph(g), adam=1e-2, sgd=0.1),
]

CASES = [
    Case("lstm", "forget_shut", "forget gate shut", r"lstm", WARN, "bias −8 instead of +2"),
    Case("lstm", "output_shut", "output gate shut", r"lstm", WARN, "bias −10: nothing comes out"),
    Case("lstm", "recurrent_gain", "one layer too large", r"weight_hh|lstm", WARN, "recurrent matrix times 20"),
    Case(
        "lstm",
        "batch_first",
        "samples of a batch are mixed",
        r"lstm|sample|batch",
        ANY,
        "batch_first forgotten: runs over the batch",
    ),
    Case(
        "lstm",
        "wrong_step",
        "reads the wrong step",
        r"lstm|step|input",
        ANY,
        "output depends on the first two steps only",
    ),
    Case("hand_lstm", "forget_shut", "forget gate shut", r"cell", WARN, "bias −8 instead of +2, cell of our own"),
    Case("hand_lstm", "saturated", "saturated gates", r"cell|wx", WARN, "input weights times 100"),
    Case(
        "hand_lstm",
        "state_detached",
        "detached branch",
        r"cell|wh|detach|step",
        ANY,
        "hidden state detached at each step",
    ),
    Case("tcn", "huge_bias", "huge bias", r"blocks\.1\.conv1", WARN, "bias 100 in one convolution"),
    Case("tcn", "dead_block", "dead ReLUs", r"blocks\.2\b", ANY, "bias −50 in front of a ReLU that ends a branch"),
    Case("tcn", "gain_tiny", "one layer too small", r"blocks\.2\.conv2", ANY, "gain of weight norm times 1e-4"),
    Case("tcn", "first_inf", "infinity in a bias", r"first", WARN, "one bias is infinite"),
    Case(
        "gnn",
        "not_normalized",
        "adjacency not normalized",
        r"convs|adjacency|head",
        ANY,
        "sums over about ten neighbours, three layers",
    ),
    Case(
        "gnn",
        "oversmoothed",
        "too many propagations",
        r"convs|weight layer",
        WARN,
        "24 graph convolutions without shortcuts",
    ),
    Case("gnn", "constant_layer", "constant weights", r"convs\.1\b", ANY, "all weights of a layer 0.1"),
    Case("gnn", "all_zero_bias_dead", "dead ReLUs", r"convs\.1\b", WARN, "bias −30: all nodes zero"),
]


def extra_healthy() -> list[Arch]:
    from nets_common import digits

    class Gru(nn.Module):
        def __init__(self, fault=None):
            super().__init__()
            self.gru, self.head = nn.GRU(8, 48, num_layers=2, batch_first=True, bidirectional=True), nn.Linear(96, 10)

        def forward(self, steps):
            return self.head(self.gru(steps)[0].mean(1))

    class Autoencoder(nn.Module):
        def __init__(self, fault=None):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 3, 2, 1),
                nn.ELU(),
                nn.Conv2d(16, 32, 3, 2, 1),
                nn.ELU(),
                nn.Flatten(),
                nn.Linear(128, 16),
            )
            self.decoder = nn.Sequential(
                nn.Linear(16, 128),
                nn.ELU(),
                nn.Unflatten(1, (32, 2, 2)),
                nn.ConvTranspose2d(32, 16, 4, 2, 1),
                nn.ELU(),
                nn.ConvTranspose2d(16, 1, 4, 2, 1),
            )

        def forward(self, images):
            return self.decoder(self.encoder(images))

    class Separable(nn.Module):
        """A MobileNet with squeeze and excitation."""

        def __init__(self, fault=None):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
            self.blocks = nn.ModuleList(
                nn.ModuleDict(
                    {
                        "expand": nn.Sequential(nn.Conv2d(16, 48, 1, bias=False), nn.BatchNorm2d(48), nn.Hardswish()),
                        "depth": nn.Sequential(
                            nn.Conv2d(48, 48, 3, 1, 1, groups=48, bias=False), nn.BatchNorm2d(48), nn.Hardswish()
                        ),
                        "squeeze": nn.Sequential(
                            nn.AdaptiveAvgPool2d(1),
                            nn.Conv2d(48, 12, 1),
                            nn.ReLU(),
                            nn.Conv2d(12, 48, 1),
                            nn.Hardsigmoid(),
                        ),
                        "project": nn.Sequential(nn.Conv2d(48, 16, 1, bias=False), nn.BatchNorm2d(16)),
                    }
                )
                for _ in range(4)
            )
            self.head = nn.Linear(16, 10)

        def forward(self, images):
            signal = self.stem(images)
            for block in self.blocks:
                branch = block["depth"](block["expand"](signal))
                signal = signal + block["project"](branch * block["squeeze"](branch))
            return self.head(signal.mean((2, 3)))

    class Tabular(nn.Module):
        """Embeddings of categories beside numbers; a regression."""

        def __init__(self, fault=None):
            super().__init__()
            self.colours, self.shapes = nn.Embedding(12, 6), nn.Embedding(30, 8)
            self.body = nn.Sequential(
                nn.Linear(22, 64),
                nn.BatchNorm1d(64),
                nn.SiLU(),
                nn.Dropout(0.1),
                nn.Linear(64, 64),
                nn.BatchNorm1d(64),
                nn.SiLU(),
                nn.Linear(64, 1),
            )

        def forward(self, numbers, colour, shape):
            return self.body(torch.cat([numbers, self.colours(colour), self.shapes(shape)], 1))[:, 0]

    class Dense(nn.Module):
        """A DenseNet with pre-activation."""

        def __init__(self, fault=None):
            super().__init__()
            self.stem = nn.Conv2d(1, 12, 3, padding=1)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.BatchNorm2d(12 + 8 * i), nn.ReLU(), nn.Conv2d(12 + 8 * i, 8, 3, padding=1))
                for i in range(8)
            )
            self.norm, self.head = nn.BatchNorm2d(76), nn.Linear(76, 10)

        def forward(self, images):
            signal = self.stem(images)
            for layer in self.layers:
                signal = torch.cat([signal, layer(signal)], 1)
            return self.head(F.relu(self.norm(signal)).mean((2, 3)))

    class DuelingQ(nn.Module):
        """Two heads, value and advantage, over a small perceptron with layer norm; LeakyReLU, orthogonal."""

        def __init__(self, fault=None):
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(16, 64), nn.LayerNorm(64), nn.LeakyReLU(), nn.Linear(64, 64), nn.LeakyReLU()
            )
            self.value, self.advantage = nn.Linear(64, 1), nn.Linear(64, 5)
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.orthogonal_(module.weight, 2**0.5)
                    nn.init.zeros_(module.bias)

        def forward(self, state):
            signal = self.body(state)
            advantage = self.advantage(signal)
            return self.value(signal) + advantage - advantage.mean(1, keepdim=True)

    def table(g, f):
        numbers = torch.randn(64, 8, generator=g)
        colour, shape = torch.randint(12, (64,), generator=g), torch.randint(30, (64,), generator=g)
        return (numbers, colour, shape), numbers[:, 0] * (colour % 3) + numbers[:, 1] + 0.1 * (shape % 5)

    def states(g, f):
        state = torch.randn(64, 16, generator=g)
        return state, torch.stack([state[:, i] * state[:, i + 1] for i in range(5)], 1)

    def same(g, f):
        images, _ = digits(g)
        return images, images

    return [
        Arch("healthy_gru", Gru, lambda g, f: rows(g)),
        Arch("healthy_autoencoder", Autoencoder, same, metric="r2"),
        Arch("healthy_mobilenet_se", Separable, lambda g, f: digits(g)),
        Arch("healthy_tabular", Tabular, table, metric="r2"),
        Arch("healthy_densenet", Dense, lambda g, f: digits(g)),
        Arch("healthy_dueling_q", DuelingQ, states, metric="r2"),
    ]
