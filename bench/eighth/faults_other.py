"""Faults of the networks for speech, graphs, series, point clouds and tables."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from . import other
from .register import fault, instead

# conformer


@fault(
    "conformer",
    "non_finite",
    "",
    "The logarithm of silence is minus infinity; no small number is added.",
    judge="clean",
)
def conformer_logarithm_of_silence(c):
    c.feeds.append(lambda x, y: (x.masked_fill(x == 0, float("-inf")), y))


@fault(
    "conformer",
    "huge_signal, unscaled input",
    "subsample,proj,layers,",
    "The features are raw powers, not normalised logarithms.",
)
def conformer_powers_without_logarithm(c):
    c.feeds.append(lambda x, y: (torch.where(x.abs().sum(-1, keepdim=True) > 0, 1e4 * (2 * x).exp(), x), y))


@fault("conformer", "dropout, dead_units", "layers,", "Dropout is given the share to keep, 0.9.")
def conformer_share_to_keep(c):
    for layer in c.model.layers:
        layer.attn.dropout = 0.9
        for m in layer.modules():
            if isinstance(m, nn.Dropout):
                m.p = 0.9


@fault(
    "conformer",
    "wrong_axis, mixed tokens",
    "subsample,",
    "The transpose in front of the first convolution is missing; there are as many frames as mels.",
)
def conformer_transpose_missing(c):
    instead(c.model, front=lambda self, x: self.proj(self.subsample(x).transpose(1, 2)))


@fault(
    "conformer",
    "odd_branch, shortcut lost",
    "layers",
    "The first half step of each block forgets its shortcut.",
    later="The signal of a block comes through one branch alone.",
)
def conformer_shortcut_lost(c):
    def forward(self, x, pad):
        x = 0.5 * self.ff1(x)
        h = self.attn_norm(x)
        x = x + self.attn(h, h, h, key_padding_mask=pad, need_weights=False)[0]
        x = x + self.conv(x)
        return self.norm(x + 0.5 * self.ff2(x))

    for layer in c.model.layers:
        instead(layer, forward=forward)


# gcn


@fault(
    "gcn",
    "huge_signal, start_loss, adjacency not normalised, gradient_explosion",
    "gc1,gc2,gc3,",
    "The adjacency matrix is taken raw, without the degrees and without the nodes themselves.",
)
def gcn_raw_adjacency(c):
    instead(c.model, adjacency=lambda self, x: x[..., self.nfeat :])


@fault("gcn", "unused_input", "", "The edges are never read; every node sees only itself.")
def gcn_edges_never_read(c):
    instead(c.model, adjacency=lambda self, x: other.normalize_adj(torch.zeros_like(x[..., self.nfeat :])))


@fault(
    "gcn", "non_finite", "", "Nodes without edges have degree nought, and its inverse root is infinite.", judge="clean"
)
def gcn_lonely_nodes(c):
    def adjacency(self, x):
        adj = x[..., self.nfeat :]
        d = adj.sum(-1).pow(-0.5)
        return d.unsqueeze(-1) * adj * d.unsqueeze(-2)

    def lonely(x, y):
        x = x.clone()
        x[0, 3, 8:], x[0, :, 8 + 3] = 0, 0
        return x, y

    instead(c.model, adjacency=adjacency)
    c.feeds.append(lonely)


@fault(
    "gcn",
    "wrong_axis",
    "",
    "log_softmax has dim=1, as for a single graph; here that is the axis of the nodes.",
    later="The probabilities of a node do not sum to one.",
)
def gcn_log_softmax_over_nodes(c):
    instead(c.model, forward=lambda self, x: F.log_softmax(other.GCN.forward(self, x), dim=1))
    c.loss = lambda out, y: F.nll_loss(out.reshape(-1, 3), y.reshape(-1))


@fault(
    "gcn",
    "rank_collapse, token_collapse, gradient_alignment, gradient_vanishing",
    "",
    "Sixteen more layers stand in the middle; all nodes become alike.",
)
def gcn_nineteen_layers(c):
    def forward(self, x):
        adj, h = self.adjacency(x), x[..., : self.nfeat]
        h = F.dropout(F.relu(self.gc1(h, adj)), self.dropout, self.training)
        for layer in self.more:
            h = F.relu(layer(h, adj))
        h = F.dropout(F.relu(self.gc2(h, adj)), self.dropout, self.training)
        return self.gc3(h, adj)

    c.model.more = nn.ModuleList(other.GraphConv(32, 32) for _ in range(16))
    instead(c.model, forward=forward)


@fault(
    "gcn",
    "never_written, zero_start, constant_weight, behind_zeros",
    "gc1,gc2,gc3",
    "The weights are reserved and never written; they happen to be nought.",
)
def gcn_weights_never_written(c):
    for layer in (c.model.gc1, c.model.gc2, c.model.gc3):
        nn.init.zeros_(layer.weight)


# tcn


@fault(
    "tcn",
    "target_leak",
    "network,",
    "The padding is cut off on the left, so that each step sees the future.",
    later="The network reads the value that it has to foretell.",
)
def tcn_cut_on_the_left(c):
    for m in c.model.modules():
        if isinstance(m, other.Chomp1d):
            instead(m, forward=lambda self, x: x[:, :, self.chomp :].contiguous())


@fault(
    "tcn",
    "activation, dead_units, output range",
    "linear,",
    "A ReLU stands on the output, though half of the targets are negative.",
)
def tcn_relu_on_output(c):
    c.model.linear = nn.Sequential(c.model.linear, nn.ReLU())


@fault(
    "tcn", "start_loss, huge_signal, unscaled input", "network,linear,", "The series has its raw values, around 20000."
)
def tcn_raw_values(c):
    c.feeds.append(lambda x, y: (20000 + 1500 * x, 20000 + 1500 * y))


@fault(
    "tcn",
    "mixed_samples, broadcast",
    "",
    "Outputs of shape (n, 1, t) meet targets of shape (n, t); the loss takes all pairs.",
)
def tcn_loss_of_all_pairs(c):
    c.loss = lambda out, y: (out - y[:, 0]).pow(2).mean()


@fault("tcn", "detached", "network", "The features are wrapped in a new tensor, which cuts the gradient.")
def tcn_features_wrapped_anew(c):
    instead(
        c.model,
        forward=lambda self, x: self.linear(torch.tensor(self.network(x).tolist()).transpose(1, 2)).transpose(1, 2),
    )


@fault(
    "tcn",
    "degenerate_batch, rank_collapse, inputs hardly differ, gradient_alignment",
    "network,",
    "Scaling by minimum and maximum with an outlier leaves all inputs near one half.",
)
def tcn_scaled_by_outlier(c):
    c.feeds.append(lambda x, y: (0.5 + 2e-4 * x, y))


# pointnet


@fault("pointnet", "wrong_axis, points and coordinates mixed", "conv1,", "Points are viewed as (3, n), not transposed.")
def pointnet_viewed_not_transposed(c):
    instead(c.model, channels=lambda self, x: x.reshape(x.shape[0], 3, -1))


@fault("pointnet", "wrong_axis", "", "The maximum runs over the channels; there are as many points as channels.")
def pointnet_maximum_over_channels(c):
    instead(c.model, pool=lambda self, x: torch.max(x, 1)[0])


@fault(
    "pointnet",
    "huge_signal, degenerate_batch, inputs hardly differ, rank_collapse, gradient_alignment",
    "conv1,",
    "Points come in map coordinates of millions of metres.",
)
def pointnet_map_coordinates(c):
    c.feeds.append(lambda x, y: (x + torch.tensor([450000.0, 5400000.0, 300.0]), y))


@fault(
    "pointnet",
    "loss without logarithm, start_loss, loss unbounded",
    "fc2,",
    "nll_loss gets logits; log_softmax is missing.",
    later="The loss falls without bound.",
)
def pointnet_nll_of_logits(c):
    c.loss = F.nll_loss


@fault("pointnet", "batch_too_small", "bn4,", "The norm behind the pooling works on two rows.", judge="clean")
def pointnet_batch_of_two(c):
    c.feeds.append(lambda x, y: (x[:2], y[:2]))


@fault(
    "pointnet",
    "class_imbalance",
    "",
    "The files are sorted by class and not shuffled; a batch has one class.",
    judge="clean",
)
def pointnet_sorted_files(c):
    c.feeds.append(lambda x, y: (x[y == y[0]].repeat(32, 1, 1)[:32], y[y == y[0]].repeat(32)[:32]))


# tabular


@fault("tabular", "mixed_samples, broadcast", "", "Outputs of shape (n, 1) meet targets of shape (n).")
def tabular_squeeze_missing(c):
    instead(c.model, forward=lambda self, x: self.head(self.backbone(x)))
    c.loss = lambda out, y: ((out - y) ** 2).mean()


@fault(
    "tabular",
    "huge_signal, columns of very different scale, degenerate_batch, rank_collapse",
    "first_layer,",
    "One column is an income in full and another a year.",
)
def tabular_columns_not_scaled(c):
    scale = torch.tensor([1.0, 1, 1, 1, 1, 1, 12.0, 18000.0])
    shift = torch.tensor([0.0, 0, 0, 0, 0, 0, 1985, 52000])
    c.feeds.append(lambda x, y: (torch.cat([x[:, :8] * scale + shift, x[:, 8:]], 1), y))


@fault("tabular", "non_finite", "", "Missing values arrive as nan.", judge="clean")
def tabular_missing_values(c):
    def missing(x, y):
        x = x.clone()
        x[3, 2] = x[17, 5] = float("nan")
        return x, y

    c.feeds.append(missing)


@fault("tabular", "start_loss", "head,", "The target is a price in full, around 200000.")
def tabular_target_not_scaled(c):
    c.feeds.append(lambda x, y: (x, 200000 + 80000 * y))


@fault("tabular", "target_leak", "", "A column was computed from the target.", judge="clean")
def tabular_target_among_columns(c):
    c.feeds.append(lambda x, y: (torch.cat([x[:, :7], y[:, None], x[:, 8:]], 1), y))


@fault(
    "tabular",
    "labels do not belong to the inputs, targets independent of the inputs",
    "",
    "The rows were shuffled without their targets.",
    judge="clean",
)
def tabular_rows_shuffled_alone(c):
    c.feeds.append(lambda x, y: (x[torch.randperm(len(x))], y))


@fault("tabular", "unused_input", "embeddings,", "All embeddings read the last category.")
def tabular_one_category_for_all(c):
    def join(self, x):
        cats = x[:, self.n_num :].long()
        return torch.cat([x[:, : self.n_num], *[e(cats[:, -1]) for e in self.embeddings]], dim=1)

    instead(c.model, join=join)


@fault("tabular", "activation", "blocks,last_normalization,", "All activations were lost; the network is linear.")
def tabular_activations_lost(c):
    for block in c.model.blocks:
        instead(block, forward=lambda self, x: x + self.second(self.dropout(self.first(self.normalization(x)))))
    instead(c.model, backbone=lambda self, x: self.last_normalization(self.blocks(self.first_layer(self.join(x)))))
