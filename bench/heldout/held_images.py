"""Networks over images and frames: a Conformer, a gMLP, an EfficientNet, a VAE, a Siamese network, a discriminator."""

import torch
from held_common import pairs, scale_all, spotted
from nets_common import Arch, digits, recall
from torch import Tensor, nn
from torch.nn import functional as F


def feed(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Dropout(0.0), nn.Linear(2 * width, width)
    )


class ConformerBlock(nn.Module):
    def __init__(self, width: int, fault: str | None) -> None:
        super().__init__()
        self.feed1, self.feed2, self.norm = feed(width), feed(width), nn.LayerNorm(width)
        self.attend_norm, self.conv_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=fault != "batch_second")
        self.point1, self.point2 = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depth, self.batch_norm = nn.Conv1d(width, width, 5, padding=2, groups=width), nn.BatchNorm1d(width)
        self.fault = fault
        if fault == "glu_shut":
            nn.init.constant_(self.point1.bias[width:], -15)
        if fault == "kept_for_dropped":
            self.feed1[3].p = self.feed2[3].p = 0.99

    def forward(self, signal: Tensor) -> Tensor:
        keep = 0.0 if self.fault == "no_shortcuts" else 1.0
        signal = keep * signal + 0.5 * self.feed1(signal)
        given = self.attend_norm(signal)
        signal = keep * signal + self.attend(given, given, given, need_weights=False)[0]
        hidden = F.glu(self.point1(self.conv_norm(signal).transpose(1, 2)), 1)
        hidden = self.point2(F.silu(self.batch_norm(self.depth(hidden))))
        signal = keep * signal + hidden.transpose(1, 2)
        return self.norm(keep * signal + 0.5 * self.feed2(signal))


class Conformer(nn.Module):
    def __init__(self, fault: str | None = None, width: int = 32) -> None:
        super().__init__()
        self.front = nn.Conv1d(8, width, 3, padding=1)
        self.blocks = nn.ModuleList(ConformerBlock(width, fault) for _ in range(3))
        self.head, self.fault = nn.Linear(width, 8), fault

    def forward(self, frames: Tensor) -> Tensor:
        signal = self.front(frames.transpose(1, 2)).transpose(1, 2)
        if self.fault == "front_cut":
            signal = signal.data
        for block in self.blocks:
            signal = block(signal)
        return self.head(signal.mean(1))


class SpatialGate(nn.Module):
    def __init__(self, width: int, places: int) -> None:
        super().__init__()
        self.norm, self.spatial = nn.LayerNorm(width), nn.Linear(places, places)
        nn.init.normal_(self.spatial.weight, std=0.01)
        nn.init.ones_(self.spatial.bias)

    def forward(self, signal: Tensor) -> Tensor:
        one, two = signal.chunk(2, -1)
        return one * self.spatial(self.norm(two).transpose(1, 2)).transpose(1, 2)


class Gmlp(nn.Module):
    def __init__(self, fault: str | None = None, width: int = 32) -> None:
        super().__init__()
        self.patch, self.fault = nn.Linear(4, width), fault
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                SpatialGate(2 * width, 16),
                nn.Linear(2 * width, width),
            )
            for _ in range(4)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        if fault == "gate_and_out_zero":
            for block in self.blocks:
                for layer in (block[3].spatial, block[4]):
                    nn.init.zeros_(layer.weight)
                    nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, 2, stride=2)  # (N, 4, 16)
        if self.fault == "viewed_over":  # meant to exchange places and pixels, moves pixels from sample to sample
            patches = patches.permute(2, 0, 1).reshape(len(images), 16, 4).transpose(1, 2)
        signal = self.patch(patches.transpose(1, 2))
        for block in self.blocks:
            signal = signal + block(signal)
        return self.head(self.norm(signal).mean(1))


class AsleepNorm(nn.BatchNorm2d):
    """A batch norm that always takes the running statistics, which nobody has measured yet."""

    def forward(self, signal: Tensor) -> Tensor:
        return F.batch_norm(signal, self.running_mean, self.running_var, self.weight, self.bias, training=False)


class MbConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, fault: str | None) -> None:
        super().__init__()
        norm, hidden = AsleepNorm if fault == "norms_asleep" else nn.BatchNorm2d, 3 * inputs
        self.expand, self.norm1 = nn.Conv2d(inputs, hidden, 1, bias=False), norm(hidden)
        self.depth = nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False)
        self.norm2, self.norm3 = norm(hidden), norm(outputs)
        self.squeeze, self.excite = nn.Conv2d(hidden, 8, 1), nn.Conv2d(8, hidden, 1)
        self.project = nn.Conv2d(hidden, outputs, 1, bias=False)
        self.act, self.sigmoid = nn.SiLU(), nn.Sigmoid()
        self.shortcut, self.fault = inputs == outputs and stride == 1, fault
        if fault == "excite_shut":
            nn.init.constant_(self.excite.bias, -20)

    def forward(self, signal: Tensor) -> Tensor:
        hidden = self.act(self.norm2(self.depth(self.act(self.norm1(self.expand(signal))))))
        pooled = hidden.mean((0, 2, 3) if self.fault == "squeeze_batch" else (2, 3), keepdim=True)
        hidden = hidden * self.sigmoid(self.excite(self.act(self.squeeze(pooled))))
        hidden = self.norm3(self.project(hidden))
        return signal + hidden if self.shortcut else hidden


class EfficientNet(nn.Module):
    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 1, 4) if fault == "stride_skips" else nn.Conv2d(1, 16, 3, 2, 1)
        plan = ((16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1))
        self.blocks = nn.ModuleList(MbConv(a, b, stride, fault) for a, b, stride in plan)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        signal = self.stem(images)
        for block in self.blocks:
            signal = block(signal)
        return self.head(signal.mean((2, 3)))


class Vae(nn.Module):
    def __init__(self, fault: str | None = None, width: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.mu, self.logvar = nn.Linear(width, 8), nn.Linear(width, 8)
        self.decoder = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.out, self.fault = nn.Linear(width, 64), fault
        with torch.no_grad():
            if fault == "logvar_twenty":
                self.logvar.bias.fill_(20)
            if fault == "decoder_dead":
                self.decoder[2].bias.fill_(-10)
            if fault == "decoder_constant":
                self.decoder[2].weight.fill_(0.05)
        if fault == "heads_tied":
            self.logvar.weight = self.mu.weight

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(images.flatten(1))
        mu, logvar = self.mu(hidden), self.logvar(hidden)
        if self.fault == "sampled_without_gradient":  # Normal(mu, std).sample() where rsample() is due
            drawn = torch.distributions.Normal(mu, (logvar / 2).exp()).sample()
        else:
            drawn = mu + (logvar / 2).exp() * torch.randn_like(mu)
        return self.out(self.decoder(drawn)), mu, logvar


def vae_loss(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    image, mu, logvar = output
    return F.mse_loss(image, targets) + 0.002 * (mu.square() + logvar.exp() - 1 - logvar).sum(1).mean()


class Siamese(nn.Module):
    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        plain = [part for _ in range(16) for part in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())]
        self.convs = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.ReLU(),
            *(plain if fault == "sixteen_plain" else []),
        )
        self.embed, self.tanh, self.out = nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 1)
        self.fault = fault
        with torch.no_grad():
            if fault == "embed_loud":
                self.embed.weight.mul_(100)
            if fault == "first_tiny":
                self.convs[0].weight.mul_(1e-3)

    def look(self, images: Tensor) -> Tensor:
        found = self.tanh(self.embed(self.convs(images).flatten(1)))
        return F.normalize(found, dim=0) if self.fault == "normalized_over_batch" else found

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one, two = self.look(left), self.look(left if self.fault == "left_twice" else right)
        logits = self.out((one - two).abs())
        return logits.sigmoid() if self.fault == "sigmoid_before_logits" else logits


class Discriminator(nn.Module):
    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((1, 16), (16, 32), (32, 64), (64, 64)):
            layers.append(nn.Conv2d(inputs, outputs, 4, 2, 1))
            if inputs > 1 and fault not in ("no_norm_small", "sigmoids"):
                layers.append(nn.GroupNorm(outputs, outputs) if fault == "norm_of_one" else nn.BatchNorm2d(outputs))
            layers.append(nn.Sigmoid() if fault == "sigmoids" else nn.LeakyReLU(0.2))
        self.layers, self.out = nn.Sequential(*layers), nn.Linear(64, 1)
        scale_all(self, 0.02)
        if fault == "sigmoids":
            scale_all(self, 0.05)
        if fault == "out_loud":
            nn.init.normal_(self.out.weight, std=5.0)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.layers(images).flatten(1))


def raw(images: Tensor) -> Tensor:
    """Pixels as a file has them, 0 to 255."""
    return (images - images.min()) / (images.max() - images.min()) * 255


def draw_frames(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    frames, classes = recall(generator)
    return (frames * 1e4 if fault == "frames_loud" else frames), classes


def draw_digits(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    images, labels = digits(generator)
    return (raw(images) if fault == "pixels_raw" else images), labels


def draw_large(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    return digits(generator, 2 if fault == "batch_of_two" else 48, 16)


def draw_vae(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    images, _ = digits(generator)
    return images, (raw(images) if fault == "targets_raw" else images).flatten(1)


def draw_spotted(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    return spotted(generator)


ARCHES = [
    Arch("conformer", Conformer, draw_frames),
    Arch("gmlp", Gmlp, draw_digits),
    Arch("efficientnet", EfficientNet, draw_large),
    Arch("vae", Vae, draw_vae, vae_loss),
    Arch("siamese", Siamese, lambda g, f: pairs(g), F.binary_cross_entropy_with_logits),
    Arch("discriminator", Discriminator, draw_spotted, F.binary_cross_entropy_with_logits),
]
