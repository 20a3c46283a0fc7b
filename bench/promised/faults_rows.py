"""Mistakes in networks for rows, sets, pairs and graphs."""

from __future__ import annotations

import torch
from bench.promised.bodies_rows import (
    Autoencoder,
    GraphBlock,
    GraphNet,
    Isometric,
    NormedStack,
    TableBlock,
    Tabular,
)
from bench.promised.registry import become, fault, within
from torch import Tensor, nn
from torch.nn import functional as F


@fault("bnmlp_no_norms", "bnmlp", "rank_collapse gradient_vanishing gradient_alignment cause", "body")
def _(model: NormedStack) -> None:
    """The norms were left out, and the linear layers keep PyTorch's default."""
    for number, layer in enumerate(model.body):
        if isinstance(layer, nn.BatchNorm1d):
            model.body[number] = nn.Identity()
        elif isinstance(layer, nn.Linear):
            layer.reset_parameters()


@fault("bnmlp_sixty_layers", "bnmlp", "gradient_explosion", "body")
def _(model: NormedStack) -> nn.Module:
    """Made deeper from 12 to 60 layers of batch norm and ReLU, without shortcuts."""
    return NormedStack(depth=60)


@fault("bnmlp_sigmoids", "bnmlp", "gradient_vanishing rank_collapse gradient_alignment saturation cause", "body")
def _(model: NormedStack) -> None:
    """Norms were left out and ReLU was exchanged for the sigmoid."""
    for number, layer in enumerate(model.body):
        if isinstance(layer, nn.BatchNorm1d):
            model.body[number] = nn.Identity()
        elif isinstance(layer, nn.ReLU):
            model.body[number] = nn.Sigmoid()


@fault(
    "bnmlp_shared_layer",
    "bnmlp",
    "disagreement cloned_weights",
    "body",
    by_nature="One layer used many times still learns, a little worse; its capacity is that of one.",
)
def _(model: NormedStack) -> None:
    """A list was multiplied, `[Linear, BatchNorm, ReLU] * 16`, and with it the layers."""
    first = list(model.body[:3])
    again = list(model.body[3:6])
    model.body = nn.Sequential(*first, *(again * 16))


class StoredRows(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> StoredRows:
        super().train(False)
        return self


@fault("bnmlp_stored_statistics", "bnmlp", "disagreement norm_weight gradient_vanishing", "body")
def _(model: NormedStack) -> None:
    """Norms use statistics that were stored for other data, with a variance of 100."""
    for norm in within(model, nn.BatchNorm1d):
        norm.running_var.fill_(100.0)
        norm.running_mean.normal_(std=3.0)
        norm.__class__ = StoredRows
        norm.eval()


@fault("bnmlp_shift_below_zero", "bnmlp", "dead_units large_bias behind_zeros", "body")
def _(model: NormedStack) -> None:
    """The biases of the norms start at -6, below what any sample reaches: all units are dead."""
    for norm in within(model, nn.BatchNorm1d):
        nn.init.constant_(norm.bias, -6.0)


@fault("tanhnet_tiny_weights", "tanhnet", "gradient_vanishing odd_scale cause", "layers")
def _(model: Isometric) -> None:
    """Weights are drawn with deviation 0.02, as for a transformer, in a plain stack."""
    for layer in model.layers:
        nn.init.normal_(layer.weight, std=0.02)


@fault("tanhnet_gain_of_five", "tanhnet", "gradient_explosion saturation odd_scale cause", "layers")
def _(model: Isometric) -> None:
    """Orthogonal weights with gain 5, which was meant for the last layer only."""
    for layer in model.layers:
        nn.init.orthogonal_(layer.weight, gain=5.0)


@fault("tanhnet_randn", "tanhnet", "saturation gradient_explosion odd_scale cause", "layers")
def _(model: Isometric) -> None:
    """All weights are three times torch.randn, so that every tanh is flat."""
    for layer in [model.inside, *model.layers]:
        layer.weight.data = 3 * torch.randn_like(layer.weight)


@fault("tanhnet_one_loud_layer", "tanhnet", "cause odd_scale saturation disagreement", "layers.6")
def _(model: Isometric) -> None:
    """One layer in the middle starts a thousand times too large."""
    model.layers[6].weight.data *= 1e3


@fault("tanhnet_gain_of_a_quarter", "tanhnet", "cause gradient_vanishing odd_scale", "layers")
def _(model: Isometric) -> None:
    """The gain of a sigmoid, 1/4, was used where tanh stands."""
    for layer in model.layers:
        nn.init.orthogonal_(layer.weight, gain=0.25)


@fault("tanhnet_rank_of_one", "tanhnet", "disagreement rank_collapse gradient_alignment", "layers")
def _(model: Isometric) -> None:
    """A broken draw repeats one row: each weight is of rank one."""
    for layer in model.layers:
        layer.weight.data = torch.outer(torch.randn(48), torch.randn(48)) / 48


@fault("tanhnet_masked", "tanhnet", "disagreement gradient_vanishing odd_scale", "layers")
def _(model: Isometric) -> None:
    """A pruning mask keeps 2% of the weights where 98% were to be kept."""
    for layer in model.layers:
        layer.weight.data *= torch.rand_like(layer.weight) < 0.02


class Rounded(Isometric):
    def forward(self, rows: Tensor) -> Tensor:
        x = self.act(self.inside(rows))
        for layer in self.layers:
            x = (self.act(layer(x)) + 2048).half().float() - 2048
        return self.head(x)


@fault("tanhnet_half_precision", "tanhnet", "disagreement rank_collapse gradient_alignment", "layers")
def _(model: Isometric) -> None:
    """The stream is kept in half precision with an offset of 2048 added, beside which no bit of it is left."""
    become(model, Rounded)


@fault("tanhnet_biases_drawn", "tanhnet", "gradient_alignment rank_collapse large_bias saturation", "layers")
def _(model: Isometric) -> None:
    """Biases are drawn with deviation 3: every layer's output is nearly the same for all samples."""
    for layer in model.layers:
        nn.init.normal_(layer.bias, std=3.0)


@fault("tabular_constant_weights", "tabular", "constant_weight", "blocks")
def _(model: Tabular) -> None:
    """All weights start at 0.01: all units of a layer are one unit."""
    for layer in within(model, nn.Linear):
        nn.init.constant_(layer.weight, 0.01)
        nn.init.zeros_(layer.bias)


@fault("tabular_fan_out", "tabular", "fans_exchanged odd_scale start_loss", "head")
def _(model: Tabular) -> None:
    """He's law by fan_out on all linear layers: the head, 32 inputs for one output, is 32 times too large."""
    for layer in within(model, nn.Linear):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


class Keep(TableBlock):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x + self.down(F.relu(self.up(self.norm(x)))), 0.95, self.training)


@fault("tabular_keep_for_drop", "tabular", "dead_units", "blocks")
def _(model: Tabular) -> None:
    """Dropout gets 0.95, the share that was to be kept."""
    become(model.blocks, Keep)


class Linearized(TableBlock):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


class LinearTabular(Tabular):
    def forward(self, rows: Tensor) -> Tensor:
        x = self.first(rows)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@fault("tabular_no_activation", "tabular", "activation", "blocks")
def _(model: Tabular) -> None:
    """Activations and norms were taken out of the blocks and of the head: the network is one linear map."""
    become(model.blocks, Linearized)
    become(model, LinearTabular)


class LateNorm(Tabular):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LayerNorm(1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(super().forward(rows))


@fault("tabular_norm_of_one_value", "tabular", "wrong_axis", "last")
def _(model: Tabular) -> nn.Module:
    """A layer norm behind the head runs over its only output, which is then always zero."""
    return LateNorm()


@fault("tabular_head_bias", "tabular", "gradient_alignment large_bias start_loss", "head")
def _(model: Tabular) -> None:
    """The bias of the head starts at the mean of the raw targets, 300; the targets are standardized by now."""
    nn.init.constant_(model.head.bias, 300.0)


@fault("tabular_frozen", "tabular", "frozen", "")
def _(model: Tabular) -> None:
    """After an experiment all but the bias of the head is frozen."""
    model.requires_grad_(False)
    model.head.bias.requires_grad_(True)


@fault("autoencoder_sigmoids", "autoencoder", "gradient_vanishing saturation rank_collapse gradient_alignment", "")
def _(model: Autoencoder) -> None:
    """Sigmoids in place of SiLU, and no norms."""
    for part in (model.encoder, model.decoder):
        for number, layer in enumerate(part):
            if isinstance(layer, nn.SiLU):
                part[number] = nn.Sigmoid()
            elif isinstance(layer, nn.LayerNorm):
                part[number] = nn.Identity()


class Squashed(Autoencoder):
    def forward(self, rows: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(rows))


@fault("autoencoder_sigmoid_output", "autoencoder", "start_loss", "")
def _(model: Autoencoder) -> None:
    """The output is a sigmoid, between 0 and 1; the data are standardized and lie on both sides of zero."""
    become(model, Squashed)


class FlatCode(Autoencoder):
    def forward(self, rows: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(rows) * 200))


@fault("autoencoder_flat_code", "autoencoder", "saturation", "encoder")
def _(model: Autoencoder) -> None:
    """The code is squashed by tanh(200 x), which is flat nearly everywhere."""
    become(model, FlatCode)


@fault("autoencoder_biases_drawn", "autoencoder", "large_bias rank_collapse gradient_alignment", "")
def _(model: Autoencoder) -> None:
    """Biases are drawn with deviation 100."""
    for layer in within(model, nn.Linear, nn.LayerNorm):
        nn.init.normal_(layer.bias, std=100.0)


class OwnOnly(GraphBlock):
    def forward(self, x: Tensor, walk: Tensor) -> Tensor:
        return x + self.out(F.relu(self.own(self.norm(x))))


@fault("graph_neighbours_not_called", "graph", "unused unused_input", "blocks")
def _(model: GraphNet) -> None:
    """The layer for the neighbours is built and not called, so that edges do not matter."""
    become(model.blocks, OwnOnly)


class Smoothing(GraphBlock):
    def forward(self, x: Tensor, walk: Tensor) -> Tensor:
        own = torch.eye(walk.shape[-1]) + walk
        for _ in range(6):
            x = (own / own.sum(-1, keepdim=True)) @ x
        return F.relu(self.others(x))


@fault("graph_over_smoothing", "graph", "rank_collapse token_collapse gradient_vanishing", "blocks")
def _(model: GraphNet) -> None:
    """Each block takes six steps of averaging over neighbours, without norm and shortcut."""
    become(model.blocks, Smoothing)


class Divided(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / x.square().sum((-1, -2), keepdim=True).add(1e-5) * self.weight + self.bias


@fault("graph_norm_by_sum", "graph", "norm_weight gradient_vanishing", "blocks")
def _(model: GraphNet) -> None:
    """Norms divide by the sum of squares over features and nodes, and forget the root."""
    become(within(model, nn.LayerNorm), Divided)


@fault("graph_not_a_number", "graph", "parameter_not_finite non_finite", "blocks.2.norm")
def _(model: GraphNet) -> None:
    """The scale of a norm was averaged over an empty list of checkpoints."""
    checkpoints = torch.zeros(0, 32)  # none was found
    model.blocks[2].norm.weight.data = checkpoints.mean(0)


@fault("autoencoder_loud_output", "autoencoder", "odd_scale start_loss", "decoder.9")
def _(model: Autoencoder) -> None:
    """The last layer is drawn by torch.randn, times ten."""
    model.decoder[-1].weight.data = 10 * torch.randn_like(model.decoder[-1].weight)


@fault("bnmlp_wide_head_by_outputs", "bnmlp", "fans_exchanged start_loss odd_scale", "head.2")
def _(model: NormedStack) -> None:
    """The head got a hidden layer of 2048; the one behind it, 2048 to 6, is drawn by fan_out."""
    last = nn.Linear(2048, 6)
    nn.init.kaiming_normal_(last.weight, mode="fan_out", nonlinearity="relu")
    model.head = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), last)
