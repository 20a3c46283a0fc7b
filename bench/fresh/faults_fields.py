"""Mistakes in the bodies for tables, graphs, point clouds, pairs, many tasks and noise; see ``faults``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from bench.fresh import bodies as B
from bench.fresh.edits import linear_layers, swap, swap_all
from torch import nn


class Table:
    def targets_without_last_axis(p):
        p.y = p.y.squeeze(1)

    def norm_of_one_value(p):
        p.model.head = nn.Sequential(p.model.head, nn.LayerNorm(1))

    def columns_of_all_sizes(p):
        p.x = p.x * torch.logspace(0, 4, 20).roll(7) + torch.logspace(0, 4, 20).roll(7)

    def columns_selected_over_the_batch(p):
        def embed(self, x):
            return (x * self.select(x).softmax(0) * x.shape[-1]) @ self.columns

        swap(p.model, embed=embed)

    def gates_start_shut(p):
        for block in p.model.blocks:
            block.glu.bias.data[48:] = -10.0

    def two_zeros_in_a_row(p):
        for block in p.model.blocks:
            for layer in (block.fc2, block.glu):
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

    def missing_value(p):
        p.x = p.x.clone()
        p.x[17, 3] = float("nan")

    def columns_of_ones(p):
        nn.init.ones_(p.model.columns)


class Graph:
    def softmax_over_receivers(p):
        def weights(self, scores, adjacency):
            return scores.masked_fill(adjacency[:, None] == 0, float("-inf")).softmax(dim=-2)

        swap_all(p.model, B.GraphAttention, weights=weights)

    def node_without_edges(p):
        x, adjacency = p.x
        adjacency = adjacency - torch.eye(20)
        adjacency[2, 5] = adjacency[2, :, 5] = 0
        p.x = x, adjacency

    def smoothed_without_shortcut(p):
        swap_all(p.model, B.GraphBlock, forward=lambda self, x, a: self.norm(F.elu(self.attention(x, a))))
        p.x = p.x[0], ((p.x[1] @ p.x[1]) > 0).float()

    def norms_drawn_like_weights(p):
        for name, value in p.model.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(value, std=0.02)

    def stream_detached(p):
        forward = B.GraphBlock.forward
        swap(p.model.layers[2], forward=lambda self, x, a: forward(self, x.detach(), a))

    def loss_over_nodes(p):
        p.loss = lambda outputs, y: F.nll_loss(outputs.log_softmax(dim=1).flatten(0, 1), y.flatten())

    def memory_not_written(p):
        for layer in p.model.layers:
            bits = torch.randint(1, 60000, layer.attention.lin.weight.shape, dtype=torch.int32)
            layer.attention.lin.weight.data.copy_(bits.view(torch.float32))

    def adjacency_added_to_scores(p):
        def weights(self, scores, adjacency):
            return (scores * 40 + adjacency[:, None]).softmax(dim=-1)

        swap_all(p.model, B.GraphAttention, weights=weights)


class Points:
    def share_kept_given_as_dropped(p):
        p.model.drop = nn.Dropout(0.95)

    def batch_of_two(p):
        p.x, p.y = p.x[[0, 3]], p.y[[0, 3]]

    def first_point_only(p):
        swap(p.model, pool=lambda self, x: x[..., 0])

    def probabilities_from_the_model(p):
        classify = B.PointNet.classify
        swap(p.model, classify=lambda self, x: classify(self, x).softmax(-1))

    def coordinates_of_a_map(p):
        p.x = p.x + torch.tensor([448000.0, 5411000.0, 120.0])

    def relu_behind_the_logits(p):
        classify = B.PointNet.classify
        swap(p.model, classify=lambda self, x: F.relu(classify(self, x)))

    def norm_starts_far_below_zero(p):
        nn.init.constant_(p.model.norms[2].bias, -6.0)


class Towers:
    def items_without_gradient(p):
        def forward(self, a, b):
            a, b = F.normalize(self.user(a), dim=-1), F.normalize(self.item(b), dim=-1)
            return a * self.log_scale.exp(), b.detach()

        swap(p.model, forward=forward)

    def normalized_over_the_batch(p):
        def forward(self, a, b):
            return F.normalize(self.user(a), dim=0) * self.log_scale.exp(), F.normalize(self.item(b), dim=0)

        swap(p.model, forward=forward)

    def logarithm_of_the_scale_forgotten(p):
        p.model.log_scale.data.fill_(1 / 0.07)

    def sampler_repeats_itself(p):
        p.x = tuple(side[torch.arange(64) % 2] for side in p.x)

    def user_tower_frozen(p):
        p.model.user.requires_grad_(False)


class Multi:
    def router_of_zeros(p):
        for mixture in p.model.mixtures:
            nn.init.zeros_(mixture.router.weight)

    def sigmoid_before_logit_loss(p):
        p.model.heads["click"].append(nn.Sigmoid())

    def head_left_out_of_the_loss(p):
        p.loss = lambda o, y: B.multi_loss({**o, "price": y["price"]}, y)

    def experts_are_one(p):
        for mixture in p.model.mixtures:
            mixture.experts = nn.ModuleList([mixture.experts[0]] * 6)

    def weights_divided_by_no_spread(p):
        layer = p.model.heads["price"][2]
        layer.weight.data.div_(layer.weight.data.std(dim=0))

    def experts_without_activation(p):
        swap_all(p.model, B.Expert, forward=lambda self, x: self.down(self.up(x)))

    def fan_of_the_outputs(p):
        for layer in linear_layers(p.model):
            nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.weight.shape[0]))

    def stem_bias_drawn_wide(p):
        nn.init.normal_(p.model.stem.bias, std=20.0)


class Denoiser:
    def time_as_it_is(p):
        def embed_time(self, t):
            return self.time_mlp(t[:, None].float().expand(-1, 32))

        swap(p.model, embed_time=embed_time)

    def time_never_used(p):
        swap_all(p.model, B.DenoiseBlock, modulate=lambda self, h, time: self.norm2(h))

    def one_branch_of_size_one(p):
        nn.init.normal_(p.model.blocks[1].conv2.weight)

    def modulation_of_zero_and_zero_output(p):
        def modulate(self, h, time):
            scale, shift = self.film(time)[..., None].chunk(2, dim=1)
            return self.norm2(h) * scale + shift

        swap_all(p.model, B.DenoiseBlock, modulate=modulate)
        for block in p.model.blocks:
            for value in (*block.film.parameters(), *block.conv2.parameters()):
                nn.init.zeros_(value)

    def layer_norm_over_places(p):
        for block in p.model.blocks:
            block.norm1, block.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
