"""Faults in data, loss and mode: softmax twice, batch norm in eval, raw inputs, sorted batches, float16, targets."""

import torch
import torch.nn.functional as F
from torch import nn

from . import bodies_image, bodies_other, bodies_seq
from .bodies import run
from .common import draw_images, token_loss
from .planting import NETWORKS, Planted, become, changed, fault, likelihood

TWICE = "softmax or sigmoid in front of a loss that expects logits"
EVAL = "batch norms left in eval mode"
INPUTS = "inputs not normalized"
ONE_CLASS = "one class only in a sorted or filtered batch"
HALF = "overflow in float16"
TARGETS = "loss or targets of the wrong shape or shift"


@fault("resnet", TWICE, "", "the model ends in softmax and the loss is cross_entropy")
def resnet_softmax_twice(model):
    class ResNet(bodies_image.ResNet):
        def forward(self, x):
            return F.softmax(self.fc(self.features(x)), dim=1)

    return Planted(become(model, ResNet), score=likelihood)


@fault("bert", TWICE, "", "the wrapper gives probabilities and the loss is cross_entropy")
def bert_softmax_twice(model):
    class TextClassifier(bodies_seq.TextClassifier):
        def forward(self, input_ids, attention_mask):
            return super().forward(input_ids, attention_mask).softmax(-1)

    return Planted(become(model, TextClassifier), score=likelihood)


@fault("lstm", TWICE, "", "nn.Softmax behind the decoder and cross_entropy behind that")
def lstm_softmax_twice(model):
    model.decoder = nn.Sequential(model.decoder, nn.Softmax(dim=-1))
    return Planted(model, score=likelihood)


@fault("tabular", TWICE, "", "sigmoid at the end of the model and binary_cross_entropy_with_logits")
def tabular_sigmoid_twice(model):
    model.tower.append(nn.Sigmoid())
    return Planted(model, score=likelihood)


# ---------------------------------------------------------------------------------------------------------------------


@fault("resnet", EVAL, "", "model.eval() from a check of the first batch was not taken back", hurts=False)
def resnet_left_in_eval(model):
    return model.eval()


@fault("tabular", EVAL, "experts", "eval mode for batch norms, as in fine-tuning, but all starts from scratch",
       hurts=False)  # fmt: skip
def tabular_norms_in_eval(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()


@fault("graph", EVAL, "readout.1", "train() was overridden to keep batch norms in eval mode", hurts=False)
def graph_norms_in_eval(model):
    class GatedGraph(bodies_other.GatedGraph):
        def train(self, mode=True):
            super().train(mode)
            self.readout[1].eval()
            return self

    return become(model, GatedGraph).train()


# ---------------------------------------------------------------------------------------------------------------------


def _raw_pixels(images, labels):
    return ((images * 0.22 + 0.45) * 255).clamp(0, 255), labels


@fault("vit", INPUTS, "", "pixels of 0 to 255 go in as they are")
def vit_raw_pixels(model):
    draw = changed("vit", _raw_pixels)
    return Planted(model, draw, held_draw=draw)


@fault("resnet", INPUTS, "", "pixels of 0 to 255 go in as they are", hurts=False)
def resnet_raw_pixels(model):
    draw = changed("resnet", _raw_pixels)
    return Planted(model, draw, held_draw=draw)


@fault("tabular", INPUTS, "", "the numbers come in their units: income, seconds since 1970, shares")
def tabular_raw_units(model):
    unit = torch.tensor([4e4, 30.0, 1.0, 2e7, 0.01, 300.0, 1.0, 5.0])
    middle = torch.tensor([6e4, 45.0, 0.0, 1.7e9, 0.05, 800.0, 0.0, 12.0])
    draw = changed("tabular", lambda x, y: ((x[0] * unit + middle, x[1]), y))
    return Planted(model, draw, held_draw=draw)


@fault("unet", INPUTS, "", "the noisy pictures were divided by 255 twice")
def unet_tiny_inputs(model):
    draw = changed("unet", lambda x, y: ((x[0] / 255**2, x[1]), y))
    return Planted(model, draw, held_draw=draw)


@fault("convnext", INPUTS, "", "pictures already in 0 to 1 were divided by 255 once more, without mean and spread")
def convnext_tiny_inputs(model):
    draw = changed("convnext", lambda x, y: ((x * 0.22 + 0.45).clamp(0, 1) / 255, y))
    return Planted(model, draw, held_draw=draw)


# ---------------------------------------------------------------------------------------------------------------------


def _sorted(count, classes, draw):
    """An unshuffled data set: ten batches of one class, then ten of the next."""
    step = -1

    def one_class(generator):
        nonlocal step
        step += 1
        return draw(generator, labels=torch.full((count,), step // 10 % classes))

    return one_class


@fault("resnet", ONE_CLASS, "", "the data set is sorted by class and shuffle=True is missing")
def resnet_sorted(model):
    return Planted(model, _sorted(32, 8, draw_images), held_draw=draw_images)


@fault("convnext", ONE_CLASS, "", "the data set is sorted by class and shuffle=True is missing")
def convnext_sorted(model):
    return Planted(model, _sorted(32, 8, draw_images), held_draw=draw_images)


@fault("bert", ONE_CLASS, "", "a filter kept the texts of topic 2 only")
def bert_filtered(model):
    def draw(generator):
        return bodies_seq.draw_topics(generator, labels=torch.full((32,), 2))

    return Planted(model, draw, held_draw=bodies_seq.draw_topics)


@fault("tabular", ONE_CLASS, "", "a join dropped all customers with answer 0")
def tabular_positives_only(model):
    def draw(generator):
        (numbers, cats), target = bodies_other.draw_table(generator, batch=220)
        rows = torch.where(target == 1)[0][:64]
        return (numbers[rows], cats[rows]), target[rows]

    return Planted(model, draw, held_draw=bodies_other.draw_table)


# ---------------------------------------------------------------------------------------------------------------------


@fault("tabular", HALF, "", "the raw income column (about 1e5) was cast to float16 on its way in and is inf in places")
def tabular_half_income(model):
    def alter(x, y):
        numbers = x[0].clone()
        numbers[:, 0] = (numbers[:, 0] * 4e4 + 5e4).half().float()
        return (numbers, x[1]), y

    draw = changed("tabular", alter)
    return Planted(model, draw, held_draw=draw)


@fault("bert", HALF, "encoder", "(1 - mask) * float16(-1e9) is 0 * -inf = NaN at every place that counts")
def bert_half_mask(model):
    class TextClassifier(bodies_seq.TextClassifier):
        def forward(self, input_ids, attention_mask):
            bias = (1 - attention_mask).half() * torch.tensor(-1e9).half()
            bias = bias[:, None, None, :].float().expand(-1, -1, input_ids.size(1), -1)
            return self.encoder(input_ids=input_ids, attention_mask=bias).logits

    return become(model, TextClassifier)


@fault("llama", HALF, "", "the loss is taken in float16 and multiplied by the loss scale 65536, which gives inf")
def llama_half_loss_scale(model):
    def loss(logits, targets):
        return token_loss(logits, targets).half() * 65536

    return Planted(model, loss=loss, score=lambda net, x, y: token_loss(run(net, x), y))


@fault("convnext", HALF, "norm", "the last norm takes squares of maps scaled by 255 in float16; the sum is inf")
def convnext_half_norm(model):
    class LayerNorm(nn.LayerNorm):
        def forward(self, x):
            y = x.half() * 255
            y = y - y.mean(-1, keepdim=True)
            var = (y * y).sum(-1, keepdim=True) / y.size(-1)
            return (y / var.sqrt()).float() * self.weight + self.bias

    become(model.norm, LayerNorm)


# ---------------------------------------------------------------------------------------------------------------------


@fault("gpt", TARGETS, "", "the targets are the inputs: the shift by one is missing")
def gpt_no_shift(model):
    return Planted(model, changed("gpt", lambda x, y: (x, x)), held_draw=NETWORKS["gpt"].draw)


@fault("lstm", TARGETS, "", "shifted twice, in the data and in the loss: the word after the next is asked for",
       shows=False, note="a shift by two is a proper, harder task; nothing at the start tells it apart")  # fmt: skip
def lstm_shift_twice(model):
    def loss(logits, targets):
        return token_loss(logits[:, :-1], targets[:, 1:])

    return Planted(model, loss=loss, score=lambda net, x, y: token_loss(run(net, x), y))


@fault("graph", TARGETS, "", "predictions (batch, 1) against targets (batch,): mse_loss spreads both to a square")
def graph_broadcast(model):
    class GatedGraph(bodies_other.GatedGraph):
        def forward(self, nodes, adjacency):
            return super().forward(nodes, adjacency).unsqueeze(-1)

    return Planted(become(model, GatedGraph), score=lambda net, x, y: F.mse_loss(run(net, x).squeeze(-1), y))


@fault("llama", TARGETS, "", "logits were reshaped to (batch, vocabulary, time) where transpose was needed")
def llama_reshaped_logits(model):
    def loss(logits, targets):
        b, t, c = logits.shape
        return F.cross_entropy(logits.reshape(b, c, t), targets)

    return Planted(model, loss=loss, score=lambda net, x, y: token_loss(run(net, x), y))


@fault("seq2seq", TARGETS, "", "the decoder gets the target itself and not the target moved on by one: it copies")
def seq2seq_no_shift(model):
    return Planted(model, changed("seq2seq", lambda x, y: ((x[0], y), y)), held_draw=bodies_seq.draw_pairs)


@fault("resnet", TARGETS, "", "the labels were shuffled apart from the pictures", shows=False,
       note="a first batch does not tell honest labels from shuffled ones")  # fmt: skip
def resnet_shuffled_labels(model):
    draw = changed("resnet", lambda x, y: (x, y[torch.randperm(len(y))]))
    return Planted(model, draw, held_draw=draw_images)


@fault("unet", TARGETS, "", "targets (batch, height, width) against predictions (batch, 1, height, width)")
def unet_broadcast(model):
    def loss(out, targets):
        return F.mse_loss(out, targets.squeeze(1))

    return Planted(model, loss=loss, score=lambda net, x, y: F.mse_loss(run(net, x), y))
