"""Networks of other sorts: a Set Transformer, a Perceiver, a coupling flow, a NeRF, two towers, a DeepFM."""

import math

import torch
from held_common import clicks, moons, points, rays, scale_all
from nets_common import VOCABULARY, Arch, digits
from torch import Tensor, nn
from torch.nn import functional as F


class Cross(nn.Module):
    """One head of attention from queries to a memory, then a feed-forward part, both with shortcuts."""

    def __init__(self, width: int, fault: str | None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        for layer in (self.q, self.k, self.v):
            nn.init.normal_(layer.weight, std=width**-0.5)
        self.scale = {"no_scale": 1.0, "scale_upside_down": width**0.5}.get(fault or "", width**-0.5)
        self.axis = -2 if fault == "softmax_queries" else -1

    def forward(self, signal: Tensor, memory: Tensor) -> Tensor:
        near, far = self.norm1(signal), self.norm2(memory)
        weights = (self.q(near) @ self.k(far).transpose(-2, -1) * self.scale).softmax(self.axis)
        signal = signal + self.o(weights @ self.v(far))
        return signal + self.down(F.gelu(self.up(self.norm3(signal))))


class SetTransformer(nn.Module):
    def __init__(self, fault: str | None = None, width: int = 32) -> None:
        super().__init__()
        self.lift, self.fault = nn.Linear(2, width), fault
        self.inducing = nn.ParameterList(torch.randn(8, width) for _ in range(2))
        self.inward, self.outward = (nn.ModuleList(Cross(width, fault) for _ in range(2)) for _ in range(2))
        self.seed, self.pool = nn.Parameter(torch.randn(1, width)), Cross(width, fault)
        self.head = nn.Linear(width, 6)
        with torch.no_grad():
            for each in self.inducing:
                if fault == "inducing_zero":
                    each.zero_()
            if fault == "head_tiny_and_bias":
                self.head.weight.mul_(1e-4)
                self.head.bias.copy_(torch.tensor([40.0, 0, 0, 0, 0, 0]))

    def forward(self, given: Tensor) -> Tensor:
        signal = self.lift(given)
        for each, inward, outward in zip(self.inducing, self.inward, self.outward, strict=True):
            signal = outward(signal, inward(each.expand(len(signal), -1, -1), signal))
        if self.fault == "pooled_over_batch":
            signal = signal - signal.mean((0, 1), keepdim=True) + signal.mean(0, keepdim=True)
        return self.head(self.pool(self.seed.expand(len(signal), -1, -1), signal)[:, 0])


class Perceiver(nn.Module):
    def __init__(self, fault: str | None = None, width: int = 48) -> None:
        super().__init__()
        self.pixel, self.fault = nn.Linear(4, width), fault
        size = 100.0 if fault == "places_drown" else 1.0
        self.places = nn.Parameter(torch.randn(16, width) * size)
        self.latents = nn.Parameter(torch.randn(6, width))
        self.read = Cross(width, fault)
        self.think = nn.ModuleList(Cross(width, fault) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        with torch.no_grad():
            if fault == "latents_same":
                self.latents.copy_(self.latents[:1].expand(6, -1).clone())

    def forward(self, images: Tensor) -> Tensor:
        pixels = self.pixel(F.unfold(images, 2, stride=2).transpose(1, 2)) + self.places
        latents = self.latents.expand(len(images), -1, -1)
        signal = self.read(latents, latents if self.fault == "reads_itself" else pixels)
        for block in self.think:
            signal = block(signal, signal)
        return self.head(self.norm(signal.mean(1)))


class Flow(nn.Module):
    """Six affine couplings over eight numbers; returns z and the logarithm of the determinant."""

    def __init__(self, fault: str | None = None, width: int = 32) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
            for _ in range(6)
        )
        self.fault = fault
        for net in self.nets:
            nn.init.normal_(net[4].weight, std=2.0 if fault == "scales_free" else 0.01)
            if fault == "zeros_both":
                for layer in (net[2], net[4]):
                    nn.init.zeros_(layer.weight)
                    nn.init.zeros_(layer.bias)

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        total = given.new_zeros(len(given))
        for net in self.nets:
            kept, moved = given.chunk(2, 1)
            scale, shift = net(kept).chunk(2, 1)
            if self.fault != "scales_free":
                scale = torch.tanh(scale)
            given = torch.cat([moved * scale.exp() + shift, kept], 1)
            total = total + (scale.detach() if self.fault == "determinant_cut" else scale).sum(1)
        return given, total


def likelihood(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    found, total = output
    return (0.5 * found.square().sum(1) + 4 * math.log(2 * math.pi) - total).mean()


class Nerf(nn.Module):
    """Fourier features, six layers of which the fourth reads them again, colours in 0 to 1."""

    def __init__(self, fault: str | None = None, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("waves", math.pi * 2.0 ** torch.arange(3))
        self.layers = nn.ModuleList(nn.Linear(12 if k == 0 else width + 12 * (k == 3), width) for k in range(6))
        self.out, self.sigmoid, self.fault = nn.Linear(width, 3), nn.Sigmoid(), fault
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            if fault == "colours_flat":
                self.out.weight.mul_(200)
            if fault == "colours_dead":
                self.out.bias.fill_(-20)
            if fault == "units_cloned":
                for layer in self.layers:
                    layer.weight.copy_(layer.weight[:1].expand_as(layer.weight).clone())
            if fault == "std_one":
                scale_all(self, 1.0)
            if fault == "half_vanishes":
                scale_all(self, 1e-3)
        if fault in ("half_vanishes", "half_overflows"):
            self.half()

    def forward(self, places: Tensor) -> Tensor:
        turns = (places[..., None] * self.waves).flatten(1)
        features = torch.cat([turns.sin(), turns.cos()], 1)
        if self.fault == "half_overflows":  # metres where units of the scene are due
            features = features * 6e4
        signal = features = features.to(self.out.weight.dtype)
        for index, layer in enumerate(self.layers):
            signal = layer(torch.cat([signal, features], 1) if index == 3 else signal)
            if self.fault != "no_activation":
                signal = F.relu(signal)
        signal = self.out(signal)
        return F.relu(signal) if self.fault == "colours_dead" else self.sigmoid(signal)


def colour_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output.float(), targets)


class Towers(nn.Module):
    """Images and captions of ten classes, brought together by a contrastive loss."""

    def __init__(self, fault: str | None = None, width: int = 48) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, width))
        self.words, self.reader = nn.Embedding(VOCABULARY, width), nn.GRU(width, width, batch_first=True)
        self.text = nn.Linear(width, width)
        start = 1 / 0.07 if fault == "temperature_no_log" else math.log(1 / 0.07)
        self.log_scale, self.fault = nn.Parameter(torch.tensor(start)), fault
        if fault == "image_offset":
            nn.init.constant_(self.image[3].bias, 50)

    def forward(self, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps, _ = self.reader(self.words(captions))
        if self.fault == "first_word":  # the first step of the reader, which all captions share
            steps = steps[:, :1]
        axis = 0 if self.fault == "unit_over_batch" else 1
        text = F.normalize(self.text(steps[:, -1]), dim=axis)
        image = F.normalize(self.image(images), dim=axis)
        if self.fault == "text_cut":
            text = text.detach()
        return image, text, self.log_scale.exp()


def contrast(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    image, text, scale = output
    logits = scale * image @ text.T
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


class DeepFm(nn.Module):
    """Factors of pairs of categories beside a perceptron."""

    def __init__(self, fault: str | None = None, width: int = 8) -> None:
        super().__init__()
        self.embed, self.fault = nn.Embedding(72, width), fault
        nn.init.normal_(self.embed.weight, std=0.3)
        self.deep = nn.Sequential(
            nn.Linear(6 * width + 4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )
        self.linear = nn.Linear(4, 1)
        self.register_buffer("offsets", torch.arange(6) * 12)
        with torch.no_grad():
            if fault == "embed_ones":
                self.embed.weight.fill_(1.0)
            if fault == "all_zero":
                for value in self.deep.parameters():
                    value.zero_()
            if fault == "out_offset":
                self.deep[4].bias.fill_(30)
            if fault == "embed_loud":
                self.embed.weight.mul_(100)
        if fault == "embed_frozen":
            self.embed.weight.requires_grad_(False)

    def forward(self, fields: Tensor, dense: Tensor) -> Tensor:
        found = self.embed(fields + self.offsets)
        axis = 0 if self.fault == "factors_over_batch" else 1
        factors = 0.5 * (found.sum(axis).square() - found.square().sum(axis)).sum(1)
        factors = factors.sum().expand(len(fields)) if axis == 0 else factors
        deep = self.deep(torch.cat([found.flatten(1), dense], 1))
        return deep + self.linear(dense) + factors[:, None]


def draw_points(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    found, classes = points(generator)
    return (found + 1000 if fault == "points_far" else found), classes


def draw_moons(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    found, targets = moons(generator)
    return (found * 1e4 if fault == "units_small" else found), targets


def draw_rays(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    places, colours = rays(generator)
    return places, (colours * 255 if fault == "colours_raw" else colours)


def draw_captions(generator: torch.Generator, fault: str | None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    images, labels = digits(generator, 40)
    captions = torch.stack([torch.zeros_like(labels), labels + 1, torch.full_like(labels, 12), labels + 14], 1)
    return (images, captions), torch.arange(40)


def draw_clicks(generator: torch.Generator, fault: str | None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    (fields, dense), targets = clicks(generator)
    if fault == "income_raw":
        dense[:, 3] = 50_000 + 20_000 * dense[:, 3]
    return (fields, dense), targets


ARCHES = [
    Arch("set_transformer", SetTransformer, draw_points),
    Arch("perceiver", Perceiver, lambda g, f: digits(g, 32)),
    Arch("flow", Flow, draw_moons, likelihood),
    Arch("nerf", Nerf, draw_rays, colour_loss),
    Arch("towers", Towers, draw_captions, contrast),
    Arch("deep_fm", DeepFm, draw_clicks, F.binary_cross_entropy_with_logits),
]
