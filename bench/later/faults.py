"""Faults in the code of a network; those of its start and data are in starts.py."""

import torch
from bench.later import bodies
from bench.later.starts import FAULTS, Case, fault, instead
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FAULTS", "build"]


@fault("masked_encoder")
def encoder_divides_by_inverse_root(c: Case) -> None:
    for block in c.model.blocks:
        instead(block.attention, scores=lambda m, q, k: q @ k.mT / q.shape[-1] ** -0.5)


@fault("masked_encoder")
def encoder_padding_mask_turned(c: Case) -> None:
    instead(c.model, padding=lambda m, x: x != 0)


@fault("masked_encoder", "The weights of a query do not sum to one; the loss of a short run hardly shows it.")
def encoder_softmax_over_queries(c: Case) -> None:
    for block in c.model.blocks:
        instead(block.attention, weights=lambda m, scores: scores.softmax(2))


@fault("windows")
def windows_all_places_by_their_mean(c: Case) -> None:
    instead(
        c.model.norm,
        forward=lambda m, x: F.layer_norm(x, m.normalized_shape, m.weight).mean((1, 2), True).expand_as(x),
    )


@fault("windows", "Pictures get places of other pictures; in a fixed batch the network can learn this by heart.")
def windows_joined_in_wrong_order(c: Case) -> None:
    def join(m: nn.Module, x: Tensor, count: int) -> Tensor:
        n = m.side // 4
        x = x.reshape(n, n, count, 4, 4, -1)
        return x.permute(2, 0, 3, 1, 4, 5).reshape(count, m.side, m.side, -1)

    for block in c.model.stage1:
        instead(block, join=join)


@fault("windows", "A block that doubles the stream drowns the branches behind it, though a norm hides it.")
def windows_shortcut_added_twice(c: Case) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = x + m.mix(m.norm1(x))
        return x + (x + m.mlp(m.norm2(x)))

    instead(c.model.stage1[1], forward=forward)


@fault("highway")
def highway_without_carry(c: Case) -> None:
    for layer in c.model.layers:
        instead(layer, forward=lambda m, x: m.gate(x).sigmoid() * m.transform(x).tanh())


@fault("highway", "The gates stay as they were drawn, so that the network cannot choose what to carry.")
def highway_gates_without_gradient(c: Case) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = m.gate(x).sigmoid()
        return gate * m.transform(x).tanh() + (1 - gate) * x

    for layer in c.model.layers:
        instead(layer, forward=forward)


@fault("highway")
def highway_relu_on_logits(c: Case) -> None:
    c.model.head = nn.Sequential(c.model.head, nn.ReLU())


@fault("coordinates")
def coordinates_activation_lost(c: Case) -> None:
    c.model.activation = nn.Identity()


@fault("memory_reader")
def memory_softmax_over_batch(c: Case) -> None:
    instead(c.model, attend=lambda m, state, keys: torch.einsum("nd,nsd->ns", state, keys).softmax(0))


@fault("memory_reader")
def memory_keeps_first_fact(c: Case) -> None:
    instead(c.model, split=lambda m, x: (x[:, :1], x[:, -1]))


@fault("memory_reader")
def memory_weights_from_numpy(c: Case) -> None:
    def attend(m: nn.Module, state: Tensor, keys: Tensor) -> Tensor:
        scores = torch.einsum("nd,nsd->ns", state, keys).detach().numpy()
        return torch.from_numpy(scores).softmax(-1)

    instead(c.model, attend=attend)


@fault("inception", "A branch that was paid for is thrown away.")
def inception_joins_three_twice(c: Case) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        three = m.three(x)
        return torch.cat([m.one(x), three, three, m.pool(x)], 1)

    instead(c.model.parts[3], forward=forward)


@fault("inception", "The branch of one part computes something else than those of the others.")
def inception_part_without_activation(c: Case) -> None:
    for branch in (c.model.parts[2].one, c.model.parts[2].three[0], c.model.parts[2].three[1]):
        branch[2] = nn.Identity()


@fault("dueling", "The value of a state then depends on which other states are in the batch.")
def dueling_mean_over_all(c: Case) -> None:
    instead(c.model, combine=lambda m, value, advantage: value + advantage - advantage.mean())


def variational(c: Case, log: bool, cut: bool) -> None:
    def forward(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = m.encoder(x)
        mean = m.mean(hidden)
        logvar = m.logvar(hidden) if log else m.mean(hidden)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        return m.decoder(m.grow(z.detach() if cut else z)), mean, logvar

    instead(c.model, forward=forward)


@fault("variational", "The spread cannot differ from the mean, and a layer that was made for it never runs.")
def variational_mean_layer_for_both(c: Case) -> None:
    variational(c, log=False, cut=False)


@fault("variational", "The encoder hears of the prior alone; the decoder gets noise and learns the mean picture.")
def variational_sample_without_gradient(c: Case) -> None:
    variational(c, log=True, cut=True)


@fault("variational")
def variational_relu_on_picture(c: Case) -> None:
    c.model.decoder.append(nn.ReLU())


@fault("columns")
def columns_attention_along_batch(c: Case) -> None:
    for block in c.model.blocks:
        instead(block.attention, forward=lambda m, x: bodies.Heads.forward(m, x.transpose(0, 1)).transpose(0, 1))


@fault("columns")
def columns_first_three_read(c: Case) -> None:
    instead(c.model, tokens=lambda m, x: bodies.Columns.tokens(m, F.pad(x[:, :3], (0, 7))))


def tagger(c: Case, axis: int, cut: bool) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        gate, new = m.gate(x).sigmoid(), m.candidate(x)
        state, states = torch.zeros_like(x.select(axis, 0)), []
        for z, h in zip(gate.unbind(axis), new.unbind(axis), strict=True):
            state = (1 - z) * (state.detach() if cut else state) + z * h
            states.append(state)
        return torch.stack(states, axis)

    for layer in c.model.layers:
        instead(layer.ahead, forward=forward)
        instead(layer.back, forward=forward)


@fault("tagger")
def tagger_loops_over_batch(c: Case) -> None:
    tagger(c, axis=0, cut=False)


@fault("tagger", "No gradient goes back through time; the gates of this task can be learned from one step.")
def tagger_state_detached(c: Case) -> None:
    tagger(c, axis=1, cut=True)


@fault("tagger")
def tagger_candidate_in_logarithms(c: Case) -> None:
    for layer in c.model.layers:
        instead(layer.ahead.candidate, forward=lambda m, x: F.linear(x, m.weight, m.bias).log().exp())


@fault("tagger")
def tagger_norm_over_features_of_one(c: Case) -> None:
    c.model.norm = nn.LayerNorm(1)
    instead(c.model.norm, forward=lambda m, x: F.layer_norm(x[..., None], (1,), m.weight, m.bias)[..., 0])


def build(name: str, seed: int) -> bodies.Built:
    chosen = FAULTS[name]
    case = Case(*bodies.build(chosen.body, seed))
    chosen.plant(case)
    return case.model, case.x, case.y, case.loss
