"""The register of faults, and those that lie in the start of the weights, in the data and in the loss."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Case:
    model: Any
    x: Tensor
    y: Tensor
    loss: Callable[..., Tensor]


class Fault(NamedTuple):
    body: str
    plant: Callable[[Case], None]
    by_nature: str


FAULTS: dict[str, Fault] = {}


def fault(body: str, by_nature: str = "") -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    def register(plant: Callable[[Case], None]) -> Callable[[Case], None]:
        FAULTS[plant.__name__] = Fault(body, plant, by_nature)
        return plant

    return register


def instead(module: nn.Module, **methods: Callable[..., Any]) -> None:
    """Gives the module other code, as if its class had been written so."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), methods)


def linears(module: nn.Module) -> list[nn.Linear]:
    return [m for m in module.modules() if isinstance(m, nn.Linear)]


# the start of the weights


@fault("masked_encoder")
def encoder_blocks_from_one_template(c: Case) -> None:
    c.model.blocks = nn.ModuleList(copy.deepcopy(c.model.blocks[0]) for _ in range(4))


@fault("masked_encoder")
def encoder_positions_by_default_law(c: Case) -> None:
    nn.init.normal_(c.model.positions.weight)


@fault("masked_encoder")
def encoder_freezes_fresh_blocks(c: Case) -> None:
    c.model.tokens.requires_grad_(False)
    c.model.blocks[:3].requires_grad_(False)


@fault("windows", "The entries are what the memory held before; the next run has others.")
def windows_table_from_empty(c: Case) -> None:
    table = torch.randint(0, 5000, (49, 4)).float() * 1.4e-45
    c.model.stage2[1].relative = nn.Parameter(table)


@fault("windows", "One block of four that is not trained with the others is wasted, though the others train.")
def windows_second_block_forgotten_by_unfreeze(c: Case) -> None:
    c.model.stage1[1].requires_grad_(False)


@fault("coordinates")
def coordinates_negative_bias(c: Case) -> None:
    for layer in c.model.layers[1:]:
        nn.init.constant_(layer.bias, -4.0)


@fault("coordinates")
def coordinates_colour_bias(c: Case) -> None:
    nn.init.constant_(c.model.colour.bias, 12.0)


@fault("coordinates")
def coordinates_forty_plain_layers(c: Case) -> None:
    c.model.layers.extend(nn.Linear(64, 64) for _ in range(40))


@fault("coordinates")
def coordinates_batch_norm_in_fifty_layers(c: Case) -> None:
    c.model.layers.extend(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(50))


@fault("memory_reader")
def memory_log_of_negative_order(c: Case) -> None:
    c.model.order = nn.Parameter((c.model.order - 0.75).log())


@fault("memory_reader")
def memory_books_with_large_std(c: Case) -> None:
    for book in (c.model.address, c.model.ask):
        nn.init.normal_(book.weight, std=2.0)


@fault("inception")
def inception_zeroes_all_vectors(c: Case) -> None:
    for parameter in c.model.parameters():
        if parameter.dim() == 1:
            nn.init.zeros_(parameter)


@fault("inception")
def inception_one_conv_with_unit_normal(c: Case) -> None:
    nn.init.normal_(c.model.parts[2].five[1][0].weight)


@fault("inception")
def inception_keep_share_as_drop_share(c: Case) -> None:
    c.model.drop = nn.Dropout(0.97)


@fault("dueling", "The two streams are meant to be drawn apart; their first layers see the same and start the same.")
def dueling_streams_copied(c: Case) -> None:
    c.model.advantage[0] = copy.deepcopy(c.model.value[0])


@fault("dueling")
def dueling_tiny_normal_weights(c: Case) -> None:
    for layer in linears(c.model):
        nn.init.normal_(layer.weight, std=1e-3)
        nn.init.zeros_(layer.bias)


@fault("variational", "The law is that of the transpose, eight times too small; Adam grows it within the run.")
def variational_fans_from_shape_reversed(c: Case) -> None:
    outputs = c.model.grow[0].weight.shape[0]
    nn.init.normal_(c.model.grow[0].weight, std=(2 / outputs) ** 0.5)


@fault("columns")
def columns_bias_of_one_feature(c: Case) -> None:
    with torch.no_grad():
        c.model.blocks[0].mlp[2].bias[5] = 600.0


@fault("columns")
def columns_norm_gain_of_thirty(c: Case) -> None:
    nn.init.constant_(c.model.norm.weight, 30.0)


@fault("columns")
def columns_weights_of_ones(c: Case) -> None:
    nn.init.ones_(c.model.weight)


@fault("tagger")
def tagger_gates_shut_by_bias(c: Case) -> None:
    for layer in c.model.layers:
        for cell in (layer.ahead, layer.back):
            nn.init.constant_(cell.gate.bias, -9.0)


@fault("dueling")
def dueling_constant_weights(c: Case) -> None:
    for layer in linears(c.model):
        nn.init.constant_(layer.weight, 0.02)
        nn.init.zeros_(layer.bias)


# the data


@fault("coordinates")
def coordinates_in_millimetres(c: Case) -> None:
    c.x = c.x * 1e4


@fault("highway", "A batch of one class teaches nothing but its frequency; the loss falls by that alone.")
def highway_sorted_labels(c: Case) -> None:
    order = torch.cat([torch.full((92,), 2), torch.tensor([0, 1, 3, 1])])
    c.y = order


@fault("highway", "One row stands for the whole batch; its loss is low because there is so little to learn.")
def highway_loader_repeats_one_row(c: Case) -> None:
    c.x, c.y = c.x[:1].repeat(96, 1), c.y[:1].repeat(96)


@fault("coordinates")
def coordinates_colours_to_255(c: Case) -> None:
    c.y = (c.y * 255).round()


@fault("dueling")
def dueling_returns_in_cents(c: Case) -> None:
    c.y = torch.cat([c.y[:, :1], c.y[:, 1:] * 1e4], 1)


@fault("dueling")
def dueling_clock_in_observation(c: Case) -> None:
    c.x = torch.cat([c.x[:, :11], 1.7e5 + torch.arange(128.0)[:, None]], 1)


@fault("dueling", "Statistics of four rows are mostly noise; the loss of four rows says little.")
def dueling_batch_of_four_with_norm(c: Case) -> None:
    norm = [(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(4)]
    c.model.trunk = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), *(part for three in norm for part in three))
    c.x, c.y = c.x[:4], c.y[:4]


@fault("masked_encoder", "The network reads the words that it has to guess, so its low loss is worth nothing.")
def encoder_words_not_hidden(c: Case) -> None:
    hidden = c.x == 1
    c.x = torch.where(hidden, c.y, c.x)
    c.y = c.x.clone()


# the loss


@fault("columns")
def columns_loss_of_all_pairs(c: Case) -> None:
    instead(c.model, forward=lambda m, x: m.head(m.norm(m.blocks(m.tokens(x))[:, 0])))
    c.loss = lambda out, y: (out - y).square().mean()


@fault("memory_reader")
def memory_softmax_before_cross_entropy(c: Case) -> None:
    c.model.answer = nn.Sequential(c.model.answer, nn.Softmax(-1))


@fault("variational")
def variational_sigmoid_before_logits_loss(c: Case) -> None:
    c.model.decoder.append(nn.Sigmoid())


@fault("inception")
def inception_own_loss_with_second_softmax(c: Case) -> None:
    instead(c.model.head, forward=lambda m, x: F.linear(x, m.weight, m.bias).softmax(-1))
    c.loss = lambda out, y: -(out.log_softmax(-1) * F.one_hot(y, 4)).sum(-1).mean()
