"""Networks without attention or time: a deep perceptron, a residual network, a ConvNeXt, a U-Net, an MLP-Mixer."""

import itertools

import torch
from nets_common import ANY, WARN, Arch, Case, digits, masks
from torch import Tensor, nn
from torch.nn import functional as F

# A plain deep perceptron ----------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    """Twelve hidden layers, He initialization."""

    def __init__(self, fault: str | None = None, depth: int = 12, width: int = 96) -> None:
        super().__init__()
        sizes = [64] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.acts = nn.ModuleList(nn.Identity() if fault == "no_activation" else nn.ReLU() for _ in self.layers)
        self.head = nn.Linear(width, 10)
        self.fault = fault
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear" if fault == "no_activation" else "relu")
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            if fault == "one_gain":
                self.layers[5].weight.mul_(30)
            if fault == "all_small":
                for layer in self.layers:
                    nn.init.normal_(layer.weight, std=0.02)
            if fault == "all_large":
                for layer in self.layers:
                    layer.weight.mul_(3)
            if fault == "dead_relu":
                self.layers[4].bias.fill_(-20.0)
            if fault == "nan_weight":
                self.layers[7].weight[3, 5] = float("nan")
            if fault == "uninitialized":  # what torch.empty returns: fresh pages, and token ids that lay there before
                old = torch.randint(1000, (width, width // 2)).view(torch.float32)
                old[: width // 2] = 0
                self.layers[6].weight.copy_(old)
            if fault == "relu_on_logits":
                self.head.bias.fill_(-8.0)

    def forward(self, images: Tensor) -> Tensor:
        signal = images.flatten(1)
        for layer, act in zip(self.layers, self.acts, strict=False):
            signal = act(layer(signal))
        logits = self.head(signal)
        return torch.relu(logits) if self.fault == "relu_on_logits" else logits


def draw_perceptron(generator: torch.Generator, fault: str | None):
    images, labels = digits(generator)
    if fault == "raw_inputs":
        images = images * 97 + 122  # 0..255 became 0..~350, never standardized
    if fault == "one_class":
        labels = torch.full_like(labels, 3)
    if fault == "random_labels":
        labels = labels[torch.randperm(len(labels), generator=generator)]
    return images, labels


# A residual network ---------------------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.skip = 1.0

    def forward(self, images: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(images)))))
        if self.skip == 0:
            return F.relu(branch)
        return F.relu(self.skip * images + branch)


class ResNet(nn.Module):
    """CIFAR style, eight blocks."""

    def __init__(self, fault: str | None = None, channels: int = 16) -> None:
        super().__init__()
        self.fault = fault
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        self.blocks = nn.ModuleList(BasicBlock(channels) for _ in range(8))
        self.fc = nn.Linear(channels, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if fault == "residual_missing":
            self.blocks[3].skip = 0
        if fault == "residual_doubled":
            for block in self.blocks:
                block.skip = 2.0
        if fault == "frozen":
            for parameter in [*self.stem.parameters(), *self.blocks[:5].parameters()]:
                parameter.requires_grad_(False)
        with torch.no_grad():
            if fault == "stem_norm_zero":
                self.stem[1].weight.zero_()
            if fault == "stale_norm":
                for module in self.modules():
                    if isinstance(module, nn.BatchNorm2d):
                        module.running_mean.fill_(3.0)
                        module.running_var.fill_(100.0)
        self.train()

    def train(self, mode: bool = True) -> "ResNet":
        super().train(mode)
        if self.fault == "stale_norm":  # left over from a fine-tuning script: norms stay in evaluation mode
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        signal = self.stem(images)
        for block in self.blocks:
            signal = block(signal)
        return self.fc(signal.mean((2, 3)))


# A ConvNeXt -----------------------------------------------------------------------------------------------------------


class ConvNextBlock(nn.Module):
    def __init__(self, channels: int, fault: str | None) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.pw1 = nn.Linear(channels, 4 * channels)
        self.pw2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 0.0 if fault == "layerscale_zero" else 0.1))
        self.act = nn.GELU()
        self.fault = fault

    def forward(self, images: Tensor) -> Tensor:
        branch = self.dwconv(images)
        if self.fault == "norm_axis":  # width equals channels, so nothing complains
            branch = self.norm(branch).permute(0, 2, 3, 1)
        else:
            branch = self.norm(branch.permute(0, 2, 3, 1))
        branch = self.act(self.pw1(branch))
        if self.fault == "activation_twice":
            branch = self.act(branch)
        return images + (self.gamma * self.pw2(branch)).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """Six blocks of 16 channels on 16×16."""

    def __init__(self, fault: str | None = None, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ConvNextBlock(channels, fault) for _ in range(6))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.2 if isinstance(module, nn.Conv2d) else 0.1)
                nn.init.zeros_(module.bias)
        with torch.no_grad():
            if fault == "depthwise_gain":
                self.blocks[2].dwconv.weight.mul_(50)
            if fault == "pointwise_gain":
                self.blocks[4].pw2.weight.mul_(200)

    def forward(self, images: Tensor) -> Tensor:
        signal = self.stem(images)
        for block in self.blocks:
            signal = block(signal)
        return self.head(self.norm(signal.mean((2, 3))))


# A U-Net --------------------------------------------------------------------------------------------------------------


class DoubleConv(nn.Module):
    def __init__(self, given: int, wanted: int, groups: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, wanted, 3, padding=1)
        self.norm1 = nn.GroupNorm(groups, wanted)
        self.conv2 = nn.Conv2d(wanted, wanted, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, wanted)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(images))))))


class UNet(nn.Module):
    """Segmentation of 16×16 images down to 1×1 and back."""

    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        self.fault = fault
        sizes = [8, 16, 16, 32]
        self.downs = nn.ModuleList(DoubleConv(a, b) for a, b in zip([1, *sizes], sizes, strict=False))
        self.middle = DoubleConv(32, 32, groups=32 if fault == "norm_of_one" else 4)
        self.ups = nn.ModuleList(
            DoubleConv(32 + b if i == 0 else sizes[4 - i] + b, b) for i, b in enumerate(reversed(sizes))
        )
        self.out = nn.Conv2d(8, 1, 1)
        with torch.no_grad():
            if fault == "sibling_zero":
                self.ups[2].conv1.weight.zero_()
                self.ups[2].norm1.weight.zero_()

    def forward(self, images: Tensor) -> Tensor:
        skips, signal = [], images
        for down in self.downs:
            signal = down(signal)
            skips.append(signal)
            signal = F.max_pool2d(signal, 2)
        signal = self.middle(signal)
        for up, skip in zip(self.ups, reversed(skips), strict=False):
            signal = F.interpolate(signal, scale_factor=2)
            if self.fault == "skips_detached":
                skip = skip.detach()
            signal = up(torch.cat([signal, skip], 1))
        logits = self.out(signal)
        return logits.sigmoid() if self.fault == "sigmoid_twice" else logits


# An MLP-Mixer ---------------------------------------------------------------------------------------------------------


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.token1, self.token2 = nn.Linear(tokens, 4 * tokens), nn.Linear(4 * tokens, tokens)
        self.channel1, self.channel2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, signal: Tensor) -> Tensor:
        mixed = self.token2(F.gelu(self.token1(self.norm1(signal).transpose(1, 2))))
        signal = signal + mixed.transpose(1, 2)
        return signal + self.channel2(F.gelu(self.channel1(self.norm2(signal))))


class Mixer(nn.Module):
    """Four blocks over 16 patches of 2×2 pixels."""

    def __init__(self, fault: str | None = None, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.blocks = nn.ModuleList(MixerBlock(16, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                mode = "fan_out" if fault == "fans" else "fan_in"
                nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="linear")
                nn.init.zeros_(module.bias)
        with torch.no_grad():
            if fault == "norms_zero":
                for block in self.blocks:
                    block.norm1.weight.zero_()
                    block.norm2.weight.zero_()
            if fault == "constant_block":
                for layer in (self.blocks[1].channel1, self.blocks[1].channel2):
                    layer.weight.fill_(0.05)
            if fault == "last_norm_zero":
                self.norm.weight.zero_()

    def forward(self, images: Tensor) -> Tensor:
        signal = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            signal = block(signal)
        return self.head(self.norm(signal).mean(1))


def draw_digits(generator: torch.Generator, fault: str | None):
    return digits(generator)


ARCHES = [
    Arch("perceptron", Perceptron, draw_perceptron, adam=1e-3, sgd=0.02),
    Arch("resnet", ResNet, draw_digits),
    Arch("convnext", ConvNext, lambda g, f: digits(g, 32, 16)),
    Arch("unet", UNet, lambda g, f: masks(g), loss=F.binary_cross_entropy_with_logits, metric="binary", sgd=0.1),
    Arch("mixer", Mixer, draw_digits),
]

CASES = [
    Case("perceptron", "one_gain", "one layer too large", r"layers\.5\b", ANY, "He times 30 in layer 5"),
    Case(
        "perceptron",
        "all_small",
        "all layers too small",
        r"layers|network|weight layer",
        WARN,
        "std 0.02 in a plain deep net",
    ),
    Case(
        "perceptron",
        "all_large",
        "all layers too large",
        r"layers|network|weight layer|head",
        WARN,
        "three times He in all layers",
    ),
    Case("perceptron", "dead_relu", "dead ReLUs", r"(layers|acts)\.4\b", WARN, "bias −20 in front of a ReLU"),
    Case("perceptron", "nan_weight", "NaN in a weight", r"layers\.7\b", WARN, "one NaN"),
    Case(
        "perceptron",
        "uninitialized",
        "uninitialized parameter",
        r"layers\.6\b",
        WARN,
        "torch.empty: zeros and denormals",
    ),
    Case(
        "perceptron",
        "no_activation",
        "activation forgotten",
        r"acts|layers|activation|linear",
        ANY,
        "Identity instead of ReLU everywhere",
    ),
    Case(
        "perceptron",
        "relu_on_logits",
        "constant output",
        r"head|output|logits",
        WARN,
        "ReLU behind the head, bias −8: all logits 0",
    ),
    Case("perceptron", "raw_inputs", "inputs not standardized", r"input", WARN, "pixels 0 to 350"),
    Case("perceptron", "one_class", "targets of one class", r"target|label|class", ANY, "all labels are 3"),
    Case(
        "perceptron",
        "random_labels",
        "targets shuffled",
        r"target|label|class",
        ANY,
        "labels do not belong to the images",
    ),
    Case(
        "resnet",
        "residual_missing",
        "residual missing in one block",
        r"blocks\.3\b",
        ANY,
        "block 3 forgets the shortcut",
    ),
    Case(
        "resnet",
        "residual_doubled",
        "residual stream doubled",
        r"blocks|stream|residual",
        ANY,
        "2x + f(x) in each block",
    ),
    Case("resnet", "frozen", "frozen by mistake", r"stem|blocks\.[0-4]\b", ANY, "stem and five of eight blocks"),
    Case(
        "resnet", "stem_norm_zero", "norm weight zero", r"stem(\.1)?\b", WARN, "the batch norm of the stem starts at 0"
    ),
    Case(
        "resnet",
        "stale_norm",
        "norm in evaluation mode",
        r"bn[12]|stem\.1|norm",
        ANY,
        "frozen, stale running statistics",
    ),
    Case("convnext", "layerscale_zero", "LayerScale of zero", r"gamma", ANY, "gamma 0 in all blocks"),
    Case("convnext", "norm_axis", "LayerNorm over the wrong axis", r"norm", ANY, "over the width instead of channels"),
    Case("convnext", "activation_twice", "activation applied twice", r"act|activation", ANY, "GELU of GELU"),
    Case("convnext", "depthwise_gain", "one layer too large", r"blocks\.2\.dwconv", ANY, "depthwise times 50"),
    Case(
        "convnext",
        "pointwise_gain",
        "one layer too large",
        r"blocks\.4\.(pw2|gamma)|blocks\.4\b",
        ANY,
        "end of a branch times 200",
    ),
    Case(
        "unet",
        "sigmoid_twice",
        "sigmoid before BCE with logits",
        r"sigmoid|probabilit|\bout\b",
        WARN,
        "probabilities into the loss for logits",
    ),
    Case(
        "unet",
        "norm_of_one",
        "norm over a single value",
        r"middle",
        ANY,
        "a group norm of one channel at 1×1 always gives 0",
    ),
    Case("unet", "skips_detached", "detached branch", r"downs|skip|detach", ANY, "the skips carry no gradient"),
    Case("unet", "sibling_zero", "zero-initialized pair", r"ups\.2\b", ANY, "convolution and its norm both zero"),
    Case("mixer", "norms_zero", "norm weight zero", r"blocks\.\d\.norm[12]", ANY, "all norms of the branches at 0"),
    Case(
        "mixer",
        "constant_block",
        "constant weights",
        r"blocks\.1\.channel[12]",
        ANY,
        "constant_(0.05) instead of normal_",
    ),
    Case(
        "mixer",
        "fans",
        "fans exchanged",
        r"token[12]|channel[12]|patches|head",
        ANY,
        "kaiming by fan_out with a factor of 4",
    ),
    Case(
        "mixer",
        "last_norm_zero",
        "norm weight zero",
        r"(^|[^.\w])norm\b|head",
        WARN,
        "the last norm starts at 0: no gradient for the body",
    ),
]
