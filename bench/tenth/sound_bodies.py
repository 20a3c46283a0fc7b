"""Networks that only the sound variants need: scaled ViT, SELU, highway, fixup, scan, two towers, mixer, SIREN."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn

from .bodies_image import EncoderBlock, ViT
from .bodies_other import CARDINALITIES
from .bodies_text import GPT, Block, GPTConfig
from .common import CLASSES, VOCAB, draw_images


class ScaledBlock(EncoderBlock):
    def __init__(self, dim, heads, start, single):
        super().__init__(dim, heads)
        self.scale1 = nn.Parameter(torch.full((1 if single else dim,), start))
        self.scale2 = nn.Parameter(torch.full((1 if single else dim,), start))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.scale1 * self.attn(y, y, y, need_weights=False)[0]
        return x + self.scale2 * self.mlp(self.norm2(x))


class ScaledViT(ViT):
    """The vision transformer with a learned gain on every branch."""

    def __init__(self, start, single=False, depth=4):
        super().__init__(depth=depth)
        self.blocks = nn.ModuleList([ScaledBlock(64, 4, start, single) for _ in range(depth)])
        nn.init.normal_(self.cls_token, std=0.5)


# ---------------------------------------------------------------------------------------------------------------------


class TableInput(nn.Module):
    def __init__(self, numbers=8, embed=6):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(c, embed) for c in CARDINALITIES])
        self.width = numbers + embed * len(CARDINALITIES)

    def forward(self, numbers, categories):
        return torch.cat([numbers, *[t(categories[:, i]) for i, t in enumerate(self.tables)]], dim=1)


class SeluTable(nn.Module):
    def __init__(self, hidden=64, depth=10):
        super().__init__()
        self.input = TableInput()
        widths = [self.input.width] + [hidden] * depth
        layers = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), nn.SELU()]
        layers.insert(-2, nn.AlphaDropout(0.05))
        self.body = nn.Sequential(*layers)
        self.out = nn.Linear(hidden, 1)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.kaiming_normal_(m.weight, nonlinearity="linear")  # lecun normal
                nn.init.zeros_(m.bias)

    def forward(self, numbers, categories):
        return self.out(self.body(self.input(numbers, categories))).squeeze(-1)


class Highway(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.plain = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x):
        share = torch.sigmoid(self.gate(x))
        return share * F.relu(self.plain(x)) + (1 - share) * x


class HighwayTable(nn.Module):
    def __init__(self, width=48, depth=8):
        super().__init__()
        self.input = TableInput()
        self.first = nn.Linear(self.input.width, width)
        self.layers = nn.Sequential(*[Highway(width) for _ in range(depth)])
        self.out = nn.Linear(width, 1)

    def forward(self, numbers, categories):
        return self.out(self.layers(torch.tanh(self.first(self.input(numbers, categories))))).squeeze(-1)


class NarrowBlock(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        nn.init.normal_(self.down.weight, std=(2 * width * depth) ** -0.5)
        nn.init.zeros_(self.down.bias)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NarrowDeep(nn.Module):
    def __init__(self, width=16, depth=48):
        super().__init__()
        self.input = TableInput(embed=3)
        self.first = nn.Linear(self.input.width, width)
        self.blocks = nn.Sequential(*[NarrowBlock(width, depth) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 1)

    def forward(self, numbers, categories):
        x = self.first(self.input(numbers, categories))
        return self.out(self.norm(self.blocks(x))).squeeze(-1)


# ---------------------------------------------------------------------------------------------------------------------


class FixupBlock(nn.Module):
    """Two convolutions with scalar biases and a gain; the second convolution starts at zero."""

    def __init__(self, cin, cout, stride, count):
        super().__init__()
        self.bias1a, self.bias1b, self.bias2a, self.bias2b = (nn.Parameter(torch.zeros(1)) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(1))
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(cin, cout, 1, stride, bias=False) if stride != 1 or cin != cout else None
        nn.init.normal_(self.conv1.weight, std=(2 / (9 * cout)) ** 0.5 * count**-0.5)
        nn.init.zeros_(self.conv2.weight)
        if self.shortcut is not None:
            nn.init.normal_(self.shortcut.weight, std=(2 / cin) ** 0.5)

    def forward(self, x):
        y = F.relu(self.conv1(x + self.bias1a) + self.bias1b)
        y = self.conv2(y + self.bias2a) * self.scale + self.bias2b
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x + self.bias1a)))


class FixupNet(nn.Module):
    def __init__(self, width=16, classes=CLASSES):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        nn.init.kaiming_normal_(self.stem.weight, nonlinearity="relu")
        plan = [(width, width, 1)] * 3 + [(width, 2 * width, 2)] + [(2 * width, 2 * width, 1)] * 2
        plan += [(2 * width, 4 * width, 2)] + [(4 * width, 4 * width, 1)] * 2
        self.blocks = nn.Sequential(*[FixupBlock(*step, count=len(plan)) for step in plan])
        self.fc = nn.Linear(4 * width, classes)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        return self.fc(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


# ---------------------------------------------------------------------------------------------------------------------


class SelectiveScan(nn.Module):
    """A small Mamba mixer: short causal convolution, input-dependent steps, a diagonal state, a SiLU gate."""

    def __init__(self, dim, state=8, rank=4):
        super().__init__()
        inner = 2 * dim
        self.rank, self.state = rank, state
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, dim, bias=False)
        nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
        dt = torch.exp(torch.rand(inner) * math.log(100.0) + math.log(1e-3))
        with torch.no_grad():
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def forward(self, x):
        u, gate = self.in_proj(x).chunk(2, dim=-1)
        u = F.silu(self.conv1d(u.transpose(1, 2))[..., : x.size(1)].transpose(1, 2))
        step, b, c = self.x_proj(u).split([self.rank, self.state, self.state], dim=-1)
        step = F.softplus(self.dt_proj(step))
        decay = torch.exp(step[..., None] * -torch.exp(self.A_log))
        push = (step * u)[..., None] * b[:, :, None]
        h, out = torch.zeros_like(push[:, 0]), []
        for t in range(x.size(1)):
            h = decay[:, t] * h + push[:, t]
            out.append((h * c[:, t, None]).sum(-1))
        y = torch.stack(out, dim=1) + self.D * u
        return self.out_proj(y * F.silu(gate))


class ScanModel(nn.Module):
    def __init__(self, dim=40, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.norms = nn.ModuleList([nn.RMSNorm(dim) for _ in range(layers)])
        self.mixers = nn.ModuleList([SelectiveScan(dim) for _ in range(layers)])
        self.norm_f = nn.RMSNorm(dim)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return F.linear(self.norm_f(x), self.embedding.weight)


# ---------------------------------------------------------------------------------------------------------------------


class TwoTowers(nn.Module):
    def __init__(self, width=64, words=40):
        super().__init__()
        self.visual = nn.Sequential(
            nn.Conv2d(3, 32, 4, 4), nn.GELU(), nn.Conv2d(32, 48, 3, padding=1), nn.GELU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(192, width),
        )  # fmt: skip
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=0.02)
        self.text = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.text_projection = nn.Parameter(torch.randn(width, width) * width**-0.5)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images, captions):
        a = F.normalize(self.visual(images), dim=-1)
        b = F.normalize(self.text(self.words(captions)).mean(1) @ self.text_projection, dim=-1)
        return self.logit_scale.exp() * a @ b.t()


def contrastive(logits, targets):
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)) / 2


def draw_captions(generator, batch=16):
    """Pictures and captions of six words; each word tells a bit of the class; pair i belongs to i."""
    images, labels = draw_images(generator, batch)
    noise = torch.randint(0, 8, (batch, 6), generator=generator)
    captions = torch.where(noise < 3, 32 + noise, 4 * labels[:, None] + noise % 4)
    return (images, captions), torch.arange(batch)


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim, drop):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.across = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Dropout(drop), nn.Linear(32, tokens))
        self.within = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(drop), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.across(self.norm1(x).mT).mT
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, dim=64, depth=4, patch=6, size=24, drop=0.0):
        super().__init__()
        tokens = (size // patch) ** 2
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.blocks = nn.Sequential(*[MixerBlock(tokens, dim, drop) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Dropout(drop), nn.Linear(dim, CLASSES))

    def forward(self, images):
        return self.head(self.blocks(self.patches(images).flatten(2).mT).mean(1))


class Sine(nn.Module):
    def __init__(self, a, b, omega=30.0, first=False):
        super().__init__()
        self.omega = omega
        self.linear = nn.Linear(a, b)
        bound = 1 / a if first else math.sqrt(6 / a) / omega
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x):
        return torch.sin(self.omega * self.linear(x))


class Siren(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.net = nn.Sequential(Sine(2, hidden, first=True), Sine(hidden, hidden), Sine(hidden, hidden))
        self.out = nn.Linear(hidden, 1)
        nn.init.uniform_(self.out.weight, -math.sqrt(6 / hidden) / 30, math.sqrt(6 / hidden) / 30)

    def forward(self, places):
        return self.out(self.net(places)).squeeze(-1)


def draw_waves(generator, batch=64):
    """Places in a square and the height of a fixed rippled field there."""
    places = 2 * torch.rand(batch, 2, generator=generator) - 1
    x, y = places.unbind(1)
    return places, torch.sin(9 * x + 4 * y) * torch.cos(6 * y) + 0.5 * torch.sin(12 * x * y)


class SharedGPT(GPT):
    """One block, called six times."""

    def __init__(self, times=6):
        super().__init__(GPTConfig(n_layer=1))
        self.times = times

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        block: Block = self.h[0]
        for _ in range(self.times):
            x = block(x)
        return self.lm_head(self.ln_f(x))


class GruTranslator(nn.Module):
    """Bidirectional GRU encoder, GRU decoder started from its last state, dropout between."""

    def __init__(self, vocab=48, width=48, drop=0.3):
        super().__init__()
        self.source = nn.Embedding(vocab, width)
        self.target = nn.Embedding(vocab, width)
        self.reader = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * width, 2 * width)
        self.writer = nn.GRU(width, 2 * width, batch_first=True)
        self.drop = nn.Dropout(drop)
        self.out = nn.Linear(2 * width, vocab)

    def forward(self, src, tgt):
        _, last = self.reader(self.drop(self.source(src)))
        state = torch.tanh(self.bridge(torch.cat([last[0], last[1]], dim=-1)))[None]
        y, _ = self.writer(self.drop(self.target(tgt)), state)
        return self.out(self.drop(y))
