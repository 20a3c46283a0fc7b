"""Sound but unusual networks: whoever looks at them at the start must not call anything in them a fault.

``build(name, seed)`` as in ``bodies``; ``python -m tenth.sound`` trains each, and the twelve plain networks too, with
three seeds and writes sound.json.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from . import bodies, bodies_image, bodies_other, bodies_seq, bodies_text, sound_bodies
from .bodies import NETWORKS, run
from .common import VOCAB, Network, draw_images, draw_text, token_loss
from .training import train

SOUND = {}
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Variant:
    network: Network
    why: str
    steps: int


def sound(draw, loss, why, lr=2e-3, steps=100):
    """Write a variant down under the name of the function that makes it; the function says what is unusual."""

    def keep(make):
        SOUND[make.__name__] = Variant(Network(make, draw, loss, lr), why, steps)
        return make

    return keep


def build(name, seed):
    network = SOUND[name].network
    torch.manual_seed(seed)
    model = network.make()
    inputs, targets = network.draw(torch.Generator().manual_seed(1000 + seed))
    return model, inputs, targets, network.loss


# ---------------------------------------------------------------------------------------------------------------------


@sound(draw_text, token_loss, "both residual outputs of every block start at zero, as a practice")
def gpt_zero_residual():
    model = bodies_text.GPT()
    for block in model.h:
        nn.init.zeros_(block.attn.c_proj.weight)
        nn.init.zeros_(block.mlp.c_proj.weight)
    return model


@sound(draw_text, token_loss, "muP: scores over d and not sqrt(d), zero head, zero queries, hidden std 1 / sqrt(width)")
def gpt_mup():
    class CausalSelfAttention(bodies_text.CausalSelfAttention):
        def forward(self, x):
            b, t, c = x.shape
            q, k, v = self.c_attn(x).split(c, dim=2)
            q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=4.0 / q.size(-1))
            return self.c_proj(y.transpose(1, 2).reshape(b, t, c))

    model = bodies_text.GPT()
    width = model.config.n_embd
    model.lm_head.weight = nn.Parameter(torch.zeros(VOCAB, width))
    nn.init.normal_(model.wte.weight, std=0.5)
    nn.init.normal_(model.wpe.weight, std=0.1)
    for block in model.h:
        block.attn.__class__ = CausalSelfAttention
        for linear in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.zeros_(block.attn.c_attn.weight[:width])
    return model


@sound(bodies_seq.draw_topics, F.cross_entropy, "a trained encoder declared frozen, a new head on top", lr=5e-3)
def bert_frozen_encoder():
    model = bodies_seq.TextClassifier()
    network = NETWORKS["bert"]
    start = torch.initial_seed() % 1000
    train(model, network.draw, network.loss, seed=start, steps=60, lr=network.lr)
    model.encoder.bert.requires_grad_(False)
    head = model.encoder.classifier
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    for p in model.parameters():
        p.grad = None
    return model


@sound(draw_images, F.cross_entropy, "LayerScale 1e-4 on both branches of every block")
def vit_layer_scale():
    return sound_bodies.ScaledViT(1e-4)


@sound(draw_images, F.cross_entropy, "ReZero: one gain of exactly 0 per branch")
def vit_rezero():
    return sound_bodies.ScaledViT(0.0, single=True)


@sound(bodies_text.draw_lstm, token_loss, "orthogonal recurrence, forget-gate bias 1", lr=1e-2)
def lstm_orthogonal():
    model = bodies_text.WordLSTM()
    for name, p in model.rnn.named_parameters():
        if "weight_hh" in name:
            for gate in p.data.chunk(4):
                nn.init.orthogonal_(gate)
        elif "weight_ih" in name:
            nn.init.xavier_uniform_(p)
        else:
            nn.init.zeros_(p)
            if "bias_ih" in name:
                p.data[96:192] = 1.0
    return model


@sound(bodies_text.draw_lstm, token_loss, "log_softmax before cross_entropy: doing it twice changes nothing", lr=1e-2)
def lstm_log_softmax():
    model = bodies_text.WordLSTM()
    model.decoder = nn.Sequential(model.decoder, nn.LogSoftmax(dim=-1))
    return model


@sound(bodies_other.draw_table, F.binary_cross_entropy_with_logits, "ten SELU layers, lecun normal, alpha dropout")
def selu_table():
    return sound_bodies.SeluTable()


@sound(bodies_other.draw_table, F.binary_cross_entropy_with_logits, "highway layers whose gates start at bias -1")
def highway_table():
    return sound_bodies.HighwayTable()


def draw_rare(generator, batch=64):
    """Honest data with about one positive in twelve."""
    (numbers, cats), _ = bodies_other.draw_table(generator, batch)
    score = 1.8 * numbers[:, 0] + 1.2 * numbers[:, 1] * (cats[:, 1] > 3) - 4.0
    target = (torch.rand(batch, generator=generator) < torch.sigmoid(2 * score)).float()
    target[0] = 1.0  # stratified: never a batch without a positive
    return (numbers, cats), target


@sound(draw_rare, F.binary_cross_entropy_with_logits, "rare positives; the output bias is their log-odds")
def tabular_rare_positives():
    model = bodies_other.TableExperts()
    nn.init.constant_(model.tower[2].bias, math.log(0.08 / 0.92))
    return model


@sound(draw_images, F.cross_entropy, "no batch norm: fixup, zero last convolutions, zero head", lr=1e-3, steps=120)
def resnet_fixup():
    return sound_bodies.FixupNet()


@sound(draw_images, F.cross_entropy, "the last batch norm of every block starts at weight 0", lr=2e-3)
def resnet_zero_gamma():
    model = bodies_image.ResNet()
    for module in model.modules():
        if isinstance(module, bodies_image.BasicBlock):
            nn.init.zeros_(module.bn2.weight)
    return model


@sound(bodies_other.draw_table, F.binary_cross_entropy_with_logits, "48 residual blocks of width 16", lr=3e-3)
def narrow_deep_table():
    return sound_bodies.NarrowDeep()


@sound(
    draw_text, token_loss, "selective scan: A_log = log(1..n), step bias as inverse softplus of 0.001 to 0.1", lr=4e-3
)
def mamba_scan():
    return sound_bodies.ScanModel()


@sound(sound_bodies.draw_captions, sound_bodies.contrastive, "two towers, logit scale log(1 / 0.07), norms of vectors",
       lr=1e-3)  # fmt: skip
def clip_towers():
    return sound_bodies.TwoTowers()


@sound(draw_images, F.cross_entropy, "dropout of 0.4 all over an MLP-Mixer", lr=2e-3, steps=120)
def mixer_dropout():
    return sound_bodies.Mixer(drop=0.4)


@sound(
    bodies_image.draw_noisy, F.mse_loss, "zero output convolution and zero second convolutions, a habit in diffusion"
)
def unet_zero_output():
    model = bodies_image.UNet()
    for module in model.modules():
        if isinstance(module, bodies_image.ResBlock):
            nn.init.zeros_(module.conv2.weight)
            nn.init.zeros_(module.conv2.bias)
    nn.init.zeros_(model.conv_out.weight)
    nn.init.zeros_(model.conv_out.bias)
    return model


@sound(sound_bodies.draw_waves, F.mse_loss, "SIREN: sines with omega 30 and its own uniform start", lr=1e-3, steps=150)
def siren_waves():
    return sound_bodies.Siren()


@sound(draw_text, token_loss, "one layer used six times on purpose, as in ALBERT or a universal transformer")
def shared_layer_gpt():
    return sound_bodies.SharedGPT()


@sound(bodies_seq.draw_pairs, token_loss, "dropout 0.3 in a GRU translator without attention", lr=5e-3)
def gru_translator():
    return sound_bodies.GruTranslator()


def main():
    torch.set_num_threads(1)
    plain = {name: Variant(network, "", 100) for name, network in NETWORKS.items()}
    table = {}
    for name, variant in {**plain, **SOUND}.items():
        network = variant.network
        ends = []
        for seed in SEEDS:
            model, inputs, targets, loss = (build if name in SOUND else bodies.build)(name, seed)
            value = loss(run(model, inputs), targets)
            value.backward()
            model.zero_grad()
            ends.append(train(model, network.draw, loss, seed=seed, steps=variant.steps, lr=network.lr))
        table[name] = {
            "unusual": variant.why or "plain",
            "adam_lr": network.lr,
            "steps": variant.steps,
            "held_out_before": [round(a, 4) for a, _ in ends],
            "held_out_after": [round(b, 4) for _, b in ends],
        }
        print(name, table[name]["held_out_before"], table[name]["held_out_after"], flush=True)
    (Path(__file__).parent / "sound.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
