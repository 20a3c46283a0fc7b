"""Faults in how layers are put together: copies, one module n times, detached, frozen or forgotten parts, depth."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from . import bodies_image, bodies_other, bodies_seq, bodies_text
from .planting import become, fault

COPIES = "layers that start as copies of each other"
SAME = "one module used several times where several were meant"
DETACHED = "body detached from the head"
FROZEN = "layers left frozen by mistake"
UNUSED = "layer that the forward pass forgets"
DEEP = "stack too deep for its init"


def clones(module, n):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])


@fault("vit", COPIES, "blocks", "the blocks were made by copy.deepcopy of the first one", hurts=False)
def vit_cloned_blocks(model):
    model.blocks = clones(model.blocks[0], 4)


@fault("seq2seq", COPIES, ["encoder", "decoder"], "clones(layer, n) as in the annotated transformer", hurts=False)
def seq2seq_cloned_layers(model):
    model.encoder = clones(model.encoder[0], 2)
    model.decoder = clones(model.decoder[0], 2)


@fault("moe", COPIES, [f"layers.{i}.moe.experts" for i in range(3)], "the experts were deep-copied", hurts=False)
def moe_cloned_experts(model):
    for layer in model.layers:
        layer.moe.experts = clones(layer.moe.experts[0], 4)


@fault("tabular", COPIES, "experts", "the experts were deep-copied from the first", hurts=False)
def tabular_cloned_experts(model):
    model.experts = clones(model.experts[0], 4)


@fault("bert", COPIES, "encoder.bert.encoder.layer", "the layers were deep-copied from the first", hurts=False)
def bert_cloned_layers(model):
    model.encoder.bert.encoder.layer = clones(model.encoder.bert.encoder.layer[0], 3)


@fault("vit", SAME, "blocks", "[block] * depth: the list holds the same block four times", hurts=False)
def vit_same_block(model):
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)


@fault(
    "moe", SAME, [f"layers.{i}.moe.experts" for i in range(3)], "[expert] * 4: there is only one expert", hurts=False
)
def moe_same_expert(model):
    for layer in model.layers:
        layer.moe.experts = nn.ModuleList([layer.moe.experts[0]] * 4)


# ---------------------------------------------------------------------------------------------------------------------


@fault("resnet", DETACHED, ["stem", "layer1", "layer2", "layer3"], "features(x).detach() goes into the head")
def resnet_detached(model):
    class ResNet(bodies_image.ResNet):
        def forward(self, x):
            features = self.features(x).detach()
            return self.fc(features)

    return become(model, ResNet)


@fault("vit", DETACHED, ["patch_embed", "cls_token", "pos_embed", "blocks", "norm"], "no_grad around the features")
def vit_no_grad(model):
    class ViT(bodies_image.ViT):
        @torch.no_grad()
        def features(self, images):
            return super().features(images)

    return become(model, ViT)


@fault("lstm", DETACHED, ["encoder", "rnn"], "the states were detached for truncated training, the outputs with them")
def lstm_detached(model):
    class WordLSTM(bodies_text.WordLSTM):
        def forward(self, tokens):
            out, _ = self.rnn(self.encoder(tokens))
            return self.decoder(out.data)

    return become(model, WordLSTM)


@fault("bert", DETACHED, "encoder.bert", "the body runs under inference settings, only the classifier learns")
def bert_no_grad(model):
    class TextClassifier(bodies_seq.TextClassifier):
        def forward(self, input_ids, attention_mask):
            with torch.no_grad():
                pooled = self.encoder.bert(input_ids=input_ids, attention_mask=attention_mask).pooler_output
            return self.encoder.classifier(self.encoder.dropout(pooled))

    return become(model, TextClassifier)


# ---------------------------------------------------------------------------------------------------------------------


@fault("convnext", FROZEN, ["stages.1.2", "stages.1.3"], "requires_grad False was left on two blocks in the middle")
def convnext_frozen_blocks(model):
    for block in model.stages[1][2:4]:
        block.requires_grad_(False)


@fault("lstm", FROZEN, "encoder", "Embedding.from_pretrained(random table) freezes it by default")
def lstm_frozen_embedding(model):
    model.encoder = nn.Embedding.from_pretrained(torch.randn(64, 48) * 0.06)


@fault("gpt", FROZEN, ["h.1", "h.2"], "a name test ('1' or '2' in the name) froze more than the norms it meant")
def gpt_frozen_by_name(model):
    for name, p in model.named_parameters():
        if name.startswith("h.") and ("h.1" in name or "h.2" in name):
            p.requires_grad = False


@fault("resnet", FROZEN, "layer3.0.conv1", "one convolution was frozen for a test and forgotten", hurts=False)
def resnet_frozen_conv(model):
    model.layer3[0].conv1.weight.requires_grad_(False)


# ---------------------------------------------------------------------------------------------------------------------


@fault("gpt", UNUSED, "h.3", "the loop runs over self.h[:-1], so the last block is never called", hurts=False)
def gpt_last_block_forgotten(model):
    class GPT(bodies_text.GPT):
        def forward(self, idx):
            x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
            for block in self.h[:-1]:
                x = block(x)
            return self.lm_head(self.ln_f(x))

    return become(model, GPT)


@fault("vit", UNUSED, "norm", "the last norm is made but not called", hurts=False)
def vit_norm_forgotten(model):
    class ViT(bodies_image.ViT):
        def features(self, images):
            x = self.patch_embed(images).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
            for block in self.blocks:
                x = block(x)
            return x[:, 0]

    return become(model, ViT)


@fault("unet", UNUSED, ["time_embed", "down1.time", "down2.time", "mid.time", "up2.time", "up1.time"],
       "the residual blocks take the time but never add it")  # fmt: skip
def unet_time_forgotten(model):
    class ResBlock(bodies_image.ResBlock):
        def forward(self, x, temb):
            h = self.conv1(F.silu(self.norm1(x)))
            return self.conv2(F.silu(self.norm2(h))) + self.skip(x)

    for block in (model.down1, model.down2, model.mid, model.up2, model.up1):
        become(block, ResBlock)


@fault("llama", UNUSED, [f"layers.{i}.w3" for i in range(4)], "the gate product of SwiGLU is left out", hurts=False)
def llama_product_forgotten(model):
    class LlamaLayer(bodies_text.LlamaLayer):
        def feed(self, x):
            return F.linear(F.silu(F.linear(x, self.w1)), self.w2)

    for layer in model.layers:
        become(layer, LlamaLayer)


@fault("graph", UNUSED, "messages.2", "zip of three messages and two updates drops the third round", hurts=False)
def graph_round_forgotten(model):
    class GatedGraph(bodies_other.GatedGraph):
        def forward(self, nodes, adjacency):
            b, n, _ = nodes.shape
            h = torch.tanh(self.embed(nodes))
            degree = adjacency.sum(-1, keepdim=True).clamp(min=1)
            for message, update in zip(self.messages, self.updates, strict=False):
                m = torch.bmm(adjacency, F.relu(message(h))) / degree
                h = update(m.reshape(b * n, -1), h.reshape(b * n, -1)).view(b, n, -1)
            return self.readout(self.pool(h)).squeeze(-1)

    model.updates = model.updates[:2]
    return become(model, GatedGraph)


# ---------------------------------------------------------------------------------------------------------------------


@fault("seq2seq", DEEP, ["encoder", "decoder"], "post-norm with 14 + 14 layers, xavier and no warmup")
def seq2seq_deep_post_norm(model):
    return bodies_seq.Translator(n_layer=14)


@fault("tabular", DEEP, "tower", "a tower of 30 plain ReLU layers with torch's own start, no norm, no shortcut")
def tabular_deep_tower(model):
    layers = []
    for width in [80] + [32] * 29:
        layers += [nn.Linear(width, 32), nn.ReLU()]
    model.tower = nn.Sequential(*layers, nn.Linear(32, 1))


@fault("resnet", DEEP, ["layer1", "layer2", "layer3"],
       "the batch norms were taken out of a residual network of 21 blocks and the init was kept")  # fmt: skip
def resnet_deep_without_norm(model):
    model = bodies_image.ResNet(layers=(7, 7, 7))
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
    return model
