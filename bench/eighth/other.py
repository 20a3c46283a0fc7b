"""Networks for speech, graphs, series, point clouds and tables."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm


class FeedForwardModule(nn.Module):
    def __init__(self, dim, expansion=2, dropout=0.1):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, dim * expansion),
            nn.SiLU(),
            nn.Dropout(dropout),
            nn.Linear(dim * expansion, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


class ConvModule(nn.Module):
    def __init__(self, dim, kernel_size=7):
        super().__init__()
        self.layer_norm = nn.LayerNorm(dim)
        self.pointwise1 = nn.Conv1d(dim, 2 * dim, 1)
        self.depthwise = nn.Conv1d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        self.norm = nn.BatchNorm1d(dim)
        self.pointwise2 = nn.Conv1d(dim, dim, 1)

    def forward(self, x):
        x = self.layer_norm(x).transpose(1, 2)
        x = F.glu(self.pointwise1(x), dim=1)
        x = F.silu(self.norm(self.depthwise(x)))
        return self.pointwise2(x).transpose(1, 2)


class ConformerBlock(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.ff1, self.ff2 = FeedForwardModule(dim), FeedForwardModule(dim)
        self.attn_norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.conv = ConvModule(dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, pad):
        x = x + 0.5 * self.ff1(x)
        h = self.attn_norm(x)
        x = x + self.attn(h, h, h, key_padding_mask=pad, need_weights=False)[0]
        x = x + self.conv(x)
        return self.norm(x + 0.5 * self.ff2(x))


def sinusoids(length, dim):
    position = torch.arange(length).unsqueeze(1)
    div = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    table = torch.zeros(length, dim)
    table[:, 0::2], table[:, 1::2] = torch.sin(position * div), torch.cos(position * div)
    return table


class SpeechEncoder(nn.Module):
    def __init__(self, n_mels=40, dim=48, depth=2, n_phones=6):
        super().__init__()
        self.subsample = nn.Sequential(nn.Conv1d(n_mels, dim, 3, stride=2, padding=1), nn.ReLU())
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("pe", sinusoids(64, dim))
        self.layers = nn.ModuleList([ConformerBlock(dim) for _ in range(depth)])
        self.classifier = nn.Linear(dim, n_phones)

    def padding(self, x):
        return (x.abs().sum(-1) == 0)[:, ::2]

    def front(self, x):
        return self.proj(self.subsample(x.transpose(1, 2)).transpose(1, 2))

    def forward(self, x):
        pad = self.padding(x)
        h = self.front(x)
        h = h + self.pe[: h.shape[1]]
        for layer in self.layers:
            h = layer(h, pad)
        return self.classifier(h)


class GraphConv(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, adj):
        return adj @ (x @ self.weight) + self.bias


def normalize_adj(adj):
    adj = adj + torch.eye(adj.shape[-1])
    d = adj.sum(-1).pow(-0.5)
    return d.unsqueeze(-1) * adj * d.unsqueeze(-2)


class GCN(nn.Module):
    """The last columns of x are the rows of the adjacency matrix."""

    def __init__(self, nfeat=8, nhid=32, nclass=3, dropout=0.1):
        super().__init__()
        self.nfeat, self.dropout = nfeat, dropout
        self.gc1, self.gc2, self.gc3 = GraphConv(nfeat, nhid), GraphConv(nhid, nhid), GraphConv(nhid, nclass)

    def adjacency(self, x):
        return normalize_adj(x[..., self.nfeat :])

    def forward(self, x):
        adj, h = self.adjacency(x), x[..., : self.nfeat]
        h = F.dropout(F.relu(self.gc1(h, adj)), self.dropout, self.training)
        h = F.dropout(F.relu(self.gc2(h, adj)), self.dropout, self.training)
        return self.gc3(h, adj)


class Chomp1d(nn.Module):
    def __init__(self, chomp):
        super().__init__()
        self.chomp = chomp

    def forward(self, x):
        return x[:, :, : -self.chomp].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, n_in, n_out, kernel, dilation):
        super().__init__()
        padding = (kernel - 1) * dilation
        self.conv1 = weight_norm(nn.Conv1d(n_in, n_out, kernel, padding=padding, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(n_out, n_out, kernel, padding=padding, dilation=dilation))
        self.chomp1, self.chomp2 = Chomp1d(padding), Chomp1d(padding)
        self.downsample = nn.Conv1d(n_in, n_out, 1) if n_in != n_out else None

    def forward(self, x):
        out = F.relu(self.chomp1(self.conv1(x)))
        out = F.relu(self.chomp2(self.conv2(out)))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class TCN(nn.Module):
    def __init__(self, channels=(24, 24, 24, 24), kernel=3):
        super().__init__()
        sizes = [1, *channels]
        self.network = nn.Sequential(
            *[TemporalBlock(sizes[i], sizes[i + 1], kernel, 2**i) for i in range(len(channels))]
        )
        self.linear = nn.Linear(channels[-1], 1)

    def forward(self, x):
        return self.linear(self.network(x).transpose(1, 2)).transpose(1, 2)


class PointNet(nn.Module):
    def __init__(self, num_class=4):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32)
        self.conv2, self.bn2 = nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64)
        self.conv3, self.bn3 = nn.Conv1d(64, 128, 1), nn.BatchNorm1d(128)
        self.fc1, self.bn4 = nn.Linear(128, 64), nn.BatchNorm1d(64)
        self.fc2 = nn.Linear(64, num_class)
        self.drop = nn.Dropout(0.2)

    def channels(self, x):
        return x.transpose(1, 2)

    def points(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.bn3(self.conv3(x))

    def pool(self, x):
        return torch.max(x, 2)[0]

    def forward(self, x):
        x = self.pool(self.points(self.channels(x)))
        return self.fc2(self.drop(F.relu(self.bn4(self.fc1(x)))))


class TabBlock(nn.Module):
    def __init__(self, d, d_hidden, dropout):
        super().__init__()
        self.normalization = nn.BatchNorm1d(d)
        self.first, self.second = nn.Linear(d, d_hidden), nn.Linear(d_hidden, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        z = self.dropout(F.relu(self.first(self.normalization(x))))
        return x + self.second(z)


class TabularResNet(nn.Module):
    """Eight numbers, then three categories, in one float tensor."""

    def __init__(self, n_num=8, cardinalities=(12, 5, 4), d_embedding=6, d=48, n_blocks=3):
        super().__init__()
        self.n_num = n_num
        self.embeddings = nn.ModuleList([nn.Embedding(c, d_embedding) for c in cardinalities])
        self.first_layer = nn.Linear(n_num + d_embedding * len(cardinalities), d)
        self.blocks = nn.Sequential(*[TabBlock(d, 2 * d, 0.1) for _ in range(n_blocks)])
        self.last_normalization = nn.BatchNorm1d(d)
        self.head = nn.Linear(d, 1)

    def join(self, x):
        cats = x[:, self.n_num :].long()
        return torch.cat([x[:, : self.n_num], *[e(cats[:, i]) for i, e in enumerate(self.embeddings)]], dim=1)

    def backbone(self, x):
        return F.relu(self.last_normalization(self.blocks(self.first_layer(self.join(x)))))

    def forward(self, x):
        return self.head(self.backbone(x)).squeeze(-1)
