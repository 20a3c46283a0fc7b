"""An encoder for text classification (from transformers) and a post-norm encoder-decoder."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from .common import Network, sentences, token_loss

TOPICS = 4
WORDS = 120


class TextClassifier(nn.Module):
    """BERT with a classification head; the weights are drawn by the library after config.initializer_range."""

    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=WORDS, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=32, num_labels=TOPICS, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )  # fmt: skip
        self.encoder = BertForSequenceClassification(config)

    def forward(self, input_ids, attention_mask):
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask).logits


def draw_topics(generator, batch=32, length=24, labels=None):
    """Texts of different lengths; a third of the words belongs to the topic, the rest is common to all."""
    if labels is None:
        labels = torch.randint(0, TOPICS, (batch,), generator=generator)
    common = torch.randint(4, 60, (batch, length), generator=generator)
    own = torch.randint(60, 75, (batch, length), generator=generator) + 15 * labels[:, None]
    ids = torch.where(torch.rand(batch, length, generator=generator) < 0.33, own, common)
    ids[:, 0] = 1
    ends = torch.randint(length // 2, length + 1, (batch,), generator=generator)
    mask = (torch.arange(length) < ends[:, None]).long()
    return (ids * mask, mask), labels


# ---------------------------------------------------------------------------------------------------------------------


class MultiHead(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)

    def heads(self, x):
        return x.view(x.size(0), x.size(1), self.n_head, self.d_head).permute(0, 2, 1, 3)

    def forward(self, query, memory, mask=None):
        q, k, v = self.heads(self.w_q(query)), self.heads(self.w_k(memory)), self.heads(self.w_v(memory))
        energy = torch.matmul(q, k.transpose(2, 3)) / self.d_head**0.5
        if mask is not None:
            energy = energy.masked_fill(mask == 0, -1e9)
        context = torch.matmul(F.softmax(energy, dim=-1), v)
        context = context.permute(0, 2, 1, 3).contiguous().view(query.size(0), query.size(1), -1)
        return self.w_o(context)


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.fc1 = nn.Linear(d_model, d_ff)
        self.fc2 = nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, n_head, d_ff):
        super().__init__()
        self.self_attn = MultiHead(d_model, n_head)
        self.norm1 = nn.LayerNorm(d_model)
        self.ff = FeedForward(d_model, d_ff)
        self.norm2 = nn.LayerNorm(d_model)

    def forward(self, x):
        x = self.norm1(x + self.self_attn(x, x))
        return self.norm2(x + self.ff(x))


class DecoderLayer(nn.Module):
    def __init__(self, d_model, n_head, d_ff):
        super().__init__()
        self.self_attn = MultiHead(d_model, n_head)
        self.norm1 = nn.LayerNorm(d_model)
        self.cross_attn = MultiHead(d_model, n_head)
        self.norm2 = nn.LayerNorm(d_model)
        self.ff = FeedForward(d_model, d_ff)
        self.norm3 = nn.LayerNorm(d_model)

    def forward(self, x, memory, mask):
        x = self.norm1(x + self.self_attn(x, x, mask))
        x = self.norm2(x + self.cross_attn(x, memory))
        return self.norm3(x + self.ff(x))


def sinusoids(length, d_model):
    place = torch.arange(length).float()[:, None]
    rate = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model))
    table = torch.zeros(length, d_model)
    table[:, 0::2], table[:, 1::2] = torch.sin(place * rate), torch.cos(place * rate)
    return table


class Translator(nn.Module):
    """The transformer of 2017: post-norm, xavier, one embedding N(0, 1 / d) for source, target and output."""

    def __init__(self, vocab=48, d_model=64, n_head=2, d_ff=128, n_layer=2, length=20):
        super().__init__()
        self.scale = math.sqrt(d_model)
        self.embedding = nn.Embedding(vocab, d_model)
        self.encoder = nn.ModuleList([EncoderLayer(d_model, n_head, d_ff) for _ in range(n_layer)])
        self.decoder = nn.ModuleList([DecoderLayer(d_model, n_head, d_ff) for _ in range(n_layer)])
        self.generator = nn.Linear(d_model, vocab, bias=False)
        self.register_buffer("place", sinusoids(length, d_model))
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)
        for m in self.modules():
            if isinstance(m, nn.Linear) and m.bias is not None:
                nn.init.zeros_(m.bias)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.generator.weight = self.embedding.weight

    def embed(self, ids):
        return self.embedding(ids) * self.scale + self.place[: ids.size(1)]

    def forward(self, src, tgt):
        memory = self.embed(src)
        for layer in self.encoder:
            memory = layer(memory)
        mask = torch.tril(torch.ones(tgt.size(1), tgt.size(1), device=tgt.device))
        x = self.embed(tgt)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        return self.generator(x)


def draw_pairs(generator, batch=32, length=12, vocab=48):
    """A sentence and its word-for-word translation, moved on by a begin token for the decoder."""
    source = sentences(generator, batch, length, vocab - 2)
    lexicon = torch.randperm(vocab - 2, generator=torch.Generator().manual_seed(5))
    target = lexicon[source] + 2
    begin = torch.full((batch, 1), 1)
    return (source + 2, torch.cat([begin, target[:, :-1]], dim=1)), target


NETWORKS = {
    "bert": Network(TextClassifier, draw_topics, F.cross_entropy, lr=1e-3, sgd_lr=0.1),
    "seq2seq": Network(Translator, draw_pairs, token_loss, lr=1e-3, sgd_lr=0.05),
}
