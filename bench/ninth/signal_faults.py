"""Faults in the networks on pictures, sound, graphs and states."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import signals
from .change import Case, instead
from .plant import fault


@fault(
    "start_loss", "*", "The loss is nll_loss on bare scores: the log_softmax before it was forgotten.",
)  # fmt: skip
def vgg_nll_of_bare_scores(c: Case) -> None:
    c.loss = lambda out, y: F.nll_loss(out, y)


@fault(
    "rank_collapse gradient_vanishing gradient_alignment odd_scale large_bias", "features classifier *",
    "Without batch norms, and convolutions at the default start: the signal shrinks from layer to layer.",
)  # fmt: skip
def vgg_plain_at_default_start(c: Case) -> None:
    for i, module in enumerate(c.model.features):
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
        if isinstance(module, nn.BatchNorm2d):
            c.model.features[i] = nn.Identity()


@fault(
    "activation dead_units", "classifier", "A ReLU stands behind the last layer, so scores are never below zero.",
)  # fmt: skip
def vgg_relu_on_scores(c: Case) -> None:
    c.model.classifier.append(nn.ReLU())


@fault(
    "wrong_axis mixed_samples", "*", "The log_softmax before nll_loss runs over the batch instead of the classes.",
)  # fmt: skip
def vgg_log_softmax_over_batch(c: Case) -> None:
    c.loss = lambda out, y: F.nll_loss(F.log_softmax(out, dim=0), y)


@fault(
    "batch_too_small degenerate_batch", "features *",
    "A batch of two: batch norm of one place knows only plus and minus one.",
    own=True, later="Two pictures are learned by heart easily.",
)  # fmt: skip
def vgg_two_pictures(c: Case) -> None:
    c.x, c.y = c.x[:2], c.y[:2]


@fault(
    "constant_weight rank_collapse gradient_alignment cloned_weights", "classifier",
    "The linear layers of the classifier start at one constant value, so their units stay the same.",
)  # fmt: skip
def vgg_constant_classifier(c: Case) -> None:
    for module in c.model.classifier:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.01)


@fault(
    "target_leak", "layers *", "The dilated convolutions are padded on both sides, so they see the sample to guess.",
    later="Seeing the sample to guess makes the training loss better.",
)  # fmt: skip
def wavenet_padded_on_both_sides(c: Case) -> None:
    for layer in c.model.layers:
        for conv in (layer.filter, layer.gate):
            weight = F.pad(conv.weight.data, (0, 1))
            conv.kernel_size, conv.weight = (3,), nn.Parameter(weight + 0.1 * torch.randn_like(weight))
        instead(layer, pad=lambda m, x: F.pad(x, (m.dilation, m.dilation)))


@fault(
    "unused", "layers", "Skip connections are overwritten instead of summed: only that of the last layer counts.",
)  # fmt: skip
def wavenet_last_skip_only(c: Case) -> None:
    def skips(m: nn.Module, x: Tensor) -> Tensor:
        for layer in m.layers:
            x, skip = layer(x)
        return skip

    instead(c.model, skips=skips)


@fault(
    "huge_signal saturation start_loss odd_scale", "* start layers",
    "Samples come as 16-bit integers turned to float, and are not divided by 32768.",
)  # fmt: skip
def wavenet_integer_samples(c: Case) -> None:
    c.x = (c.x * 32767).round()


@fault(
    "wrong_axis mixed_samples", "*",
    "Scores (batch, levels, time) are viewed as (-1, levels) for the loss without exchanging the axes.",
)  # fmt: skip
def wavenet_scores_viewed_as_rows(c: Case) -> None:
    c.loss = lambda out, y: F.cross_entropy(out.reshape(-1, out.shape[1]), y.reshape(-1))


@fault(
    "unregistered frozen detached unused cause", "layers *",
    "The gated layers are kept in a Python list, so the optimizer never sees them.",
)  # fmt: skip
def wavenet_layers_in_python_list(c: Case) -> None:
    layers = list(c.model.layers)
    del c.model.layers
    c.model.layers = layers


@fault(
    "shut_gates saturation gradient_vanishing", "layers", "The biases of the gates start at -12, so nothing passes.",
)  # fmt: skip
def wavenet_gates_start_shut(c: Case) -> None:
    for layer in c.model.layers:
        nn.init.constant_(layer.gate.bias, -12.0)


@fault(
    "non_finite", "* convs last",
    "Nodes get no loop to themselves; the softmax of a node without edges is not a number.",
)  # fmt: skip
def graph_lonely_nodes(c: Case) -> None:
    x, adjacency = c.x
    adjacency = adjacency.clone()
    adjacency[[3, 40]] = False
    adjacency[:, [3, 40]] = False
    c.x = (x, adjacency)
    instead(c.model, edges=lambda m, adjacency: adjacency)


@fault(
    "token_collapse unused_input rank_collapse", "* convs last",
    "Scores are multiplied with the adjacency before the softmax, so missing edges weigh like weak ones.",
)  # fmt: skip
def graph_mask_by_product(c: Case) -> None:
    for conv in [*c.model.convs, c.model.last]:
        instead(conv, weights=lambda m, scores, adjacency: (scores * adjacency).softmax(-1))


@fault("wrong_axis", "convs last", "The softmax runs over the nodes that receive instead of those that send.")
def graph_softmax_over_receivers(c: Case) -> None:
    for conv in [*c.model.convs, c.model.last]:
        instead(conv, weights=lambda m, s, a: s.masked_fill(~a, float("-inf")).softmax(-2))


@fault(
    "huge_signal odd_scale start_loss saturation entropy_collapse", "* convs",
    "One of the features is a raw time stamp of about 100000, next to others of about 1.",
)  # fmt: skip
def graph_raw_time_stamp(c: Case) -> None:
    x, adjacency = c.x
    x = x.clone()
    x[:, 3] = 1e5 + 3e3 * torch.randn(len(x))
    c.x = (x, adjacency)


@fault(
    "target_leak", "*", "The table of the features still has the column of the label in it.",
    later="The label is at hand in training and not afterwards.",
)  # fmt: skip
def graph_label_among_features(c: Case) -> None:
    x, adjacency = c.x
    x = x.clone()
    x[:, -1] = c.y.float()
    c.x = (x, adjacency)


@fault(
    "never_written odd_scale constant_weight zero_start huge_signal", "convs last",
    "The vectors of attention are made by torch.empty and never written.",
)  # fmt: skip
def graph_attention_never_written(c: Case) -> None:
    # What lies in fresh memory: zeros, tiny numbers, and now and then the pieces of a pointer or of a picture.
    for conv in [*c.model.convs, c.model.last]:
        for weight in (conv.source, conv.target):
            flat = torch.zeros(weight.numel())
            flat[::4] = 4.5908e-41
            flat[1::8] = -1.7146e34 if weight is conv.source and conv is c.model.last else 3.0829e-20
            flat[2::16] = 1.4013e-45
            weight.data = flat.view_as(weight)


@fault(
    "token_collapse rank_collapse gradient_alignment start_loss", "convs last *",
    "Ten layers without residual connections smooth all nodes to the same vector.",
)  # fmt: skip
def graph_ten_layers(c: Case) -> None:
    c.model = signals.GAT(depth=10)


@fault(
    "detached gradient_vanishing unused", "encoder",
    "The straight-through step is turned round, so the loss of the picture passes to the codebook and not the encoder.",
    later="The decoder is trained on vectors that are no codes, and meets codes only when it is used.",
)  # fmt: skip
def vqvae_straight_through_turned(c: Case) -> None:
    instead(c.model.quantizer, straight=lambda m, z, q: q + (z - q).detach())


@fault(
    "token_collapse rank_collapse unused_input dead_units unused", "quantizer encoder *",
    "The encoder ends without a norm, so all its small vectors fall to the shortest codes.",
)  # fmt: skip
def vqvae_all_on_few_codes(c: Case) -> None:
    c.model.encoder[-1] = nn.Identity()
    nn.init.normal_(c.model.encoder[-2].weight, std=0.02)


@fault(
    "activation dead_units start_loss", "decoder *", "The decoder ends in a ReLU, but pictures lie in [-1, 1].",
)  # fmt: skip
def vqvae_relu_on_picture(c: Case) -> None:
    def forward(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        z, loss = m.quantizer(m.encoder(x))
        return F.relu(m.decoder(z)), loss

    instead(c.model, forward=forward)


@fault(
    "start_loss activation", "*", "The targets are the pictures in 0 to 255, but the output ends in tanh.", own=True,
)  # fmt: skip
def vqvae_targets_in_bytes(c: Case) -> None:
    c.y = ((c.y + 1) * 127.5).round()


@fault(
    "gradient_vanishing odd_scale rank_collapse odd_branch", "encoder decoder *",
    "All weights are drawn with deviation 0.02 as for a GAN, but most layers have no batch norm to make up for it.",
)  # fmt: skip
def vqvae_start_of_a_gan(c: Case) -> None:
    for module in [*c.model.encoder.modules(), *c.model.decoder.modules()]:
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


@fault(
    "wrong_axis", "quantizer *", "Maps are viewed as rows of the codebook's width without moving the channels last.",
)  # fmt: skip
def vqvae_maps_viewed_as_rows(c: Case) -> None:
    instead(c.model.quantizer, flat=lambda m, z: z.reshape(-1, z.shape[1]), back=lambda m, q, z: q.view(z.shape))


@fault(
    "mixed_samples", "* critic", "Values are (batch, 1) and returns (batch): the difference is a square of all pairs.",
)  # fmt: skip
def actor_value_keeps_last_axis(c: Case) -> None:
    instead(c.model, value=lambda m, features: m.critic(m.critic_body(features)))


@fault(
    "softmax_twice", "* actor", "The actor ends in a softmax, and the loss takes its output for logits.",
    later="Probabilities as scores hold the policy near to chance, which shows when the others are sure.",
)  # fmt: skip
def actor_softmax_given_as_logits(c: Case) -> None:
    c.model.actor = nn.Sequential(c.model.actor, nn.Softmax(dim=-1))


@fault(
    "saturation huge_signal odd_scale", "* body", "States are in raw units of the simulator, some in the hundreds.",
)  # fmt: skip
def actor_states_not_normalised(c: Case) -> None:
    c.x = c.x * torch.tensor([300.0, 80.0, 500.0] * 4) + torch.tensor([1000.0, 0.0, -400.0] * 4)


@fault(
    "start_loss gradient_alignment odd_branch", "* critic body",
    "Returns are sums of raw rewards in the thousands.", own=True,
)  # fmt: skip
def actor_returns_not_scaled(c: Case) -> None:
    c.y = c.y.clone()
    c.y[:, 2] = 2000 + 800 * c.y[:, 2]


@fault(
    "detached frozen", "body", "The body runs under no_grad, as copied from the code that plays.",
    later="Random features carry the first gains; what the trained ones gain comes later.",
)  # fmt: skip
def actor_body_under_no_grad(c: Case) -> None:
    def features(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return m.body(x)

    instead(c.model, features=features)


@fault(
    "activation dead_units", "critic *", "The critic ends in a ReLU, but returns are as often negative.",
)  # fmt: skip
def actor_relu_on_value(c: Case) -> None:
    c.model.critic = nn.Sequential(c.model.critic, nn.ReLU())


@fault(
    "non_finite", "*",
    "Forbidden actions get minus infinity, and the entropy is the sum of p log p: zero times infinity.",
)  # fmt: skip
def actor_entropy_of_forbidden_actions(c: Case) -> None:
    c.y = c.y.clone()
    c.y[c.x[:, 11] > 1, 0] = 0.0

    def forward(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        features = m.features(x)
        forbidden = (x[:, 11:] > 1) & (torch.arange(5) == 4)
        return m.actor(features).masked_fill(forbidden, float("-inf")), m.value(features)

    def loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        p = out[0].softmax(-1)
        chosen = p.gather(1, y[:, :1].long()).squeeze(1)
        entropy = -(p * p.log()).sum(-1).mean()
        return -(chosen.log() * y[:, 1]).mean() + 0.5 * F.mse_loss(out[1], y[:, 2]) - 0.01 * entropy

    instead(c.model, forward=forward)
    c.loss = loss
