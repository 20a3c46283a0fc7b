"""Small networks of many architectures with random weights from their own code, for `bench/architectures.py`.

`CHOSEN` are the networks on which rules and constants were tried; `HELD_OUT` were run when those were fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, BLOCKS, HEADS, WORDS = 96, 4, 4, 200
Pair = tuple[nn.Module, Any]
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS}
TEXT = {**SIZES, "vocab_size": WORDS, "intermediate_size": 2 * WIDTH, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def hugging(model: str, config: str, **settings: Any) -> Callable[[], Pair]:
    """A model of the library transformers, of its own initialization, and a batch for it."""

    def make() -> Pair:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        if "image_size" in settings or "num_channels" in settings:
            return made, {"pixel_values": torch.randn(8, 3, 32, 32)}
        tokens = torch.randint(3, settings.get("vocab_size", WORDS), (8, 24))
        if model.startswith(("T5", "Bart")):
            return made, {"input_ids": tokens, "decoder_input_ids": torch.randint(3, WORDS, (8, 16))}
        return made, {"input_ids": tokens}

    return make


class Basic(nn.Module):
    """The block of a CIFAR ResNet."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.short = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + self.short(x))


class Bottleneck(nn.Module):
    """The block of a ResNet-50."""

    def __init__(self, channels: int, middle: int, stride: int) -> None:
        super().__init__()
        out = 4 * middle
        self.conv1 = nn.Conv2d(channels, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.short: nn.Module | None = None
        if stride != 1 or channels != out:
            self.short = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(functional.relu(self.bn2(self.conv2(y)))))
        return functional.relu(y + (x if self.short is None else self.short(x)))


def started(net: nn.Module) -> nn.Module:
    """The network with convolutions drawn as torchvision draws them."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


def cifar_resnet(blocks: int, channels: int = 16) -> Callable[[], Pair]:
    """A CIFAR ResNet of 6·blocks + 2 layers."""

    def make() -> Pair:
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        before = channels
        for stage, out in enumerate((channels, 2 * channels, 4 * channels)):
            for block in range(blocks):
                layers.append(Basic(before, out, 2 if stage and not block else 1))
                before = out
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))
        return started(net), torch.randn(8, 3, 16, 16)

    return make


def bottleneck_resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), channels: int = 32) -> Pair:
    """A ResNet-50 with its stem, its max pooling and half its channels."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = channels
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(before, channels * 2**stage, 2 if stage and not block else 1))
            before = 4 * channels * 2**stage
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 100))
    return started(net), torch.randn(8, 3, 64, 64)


class Double(nn.Module):
    """Two convolutions with a norm each, as U-Nets have."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(channels, out, 3, 1, 1), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1), nn.BatchNorm2d(out), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class UNet(nn.Module):
    """Down by max pooling, up by transposed convolutions, joined at every level."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        c = channels
        self.enter = Double(3, c)
        self.down = nn.ModuleList([Double(c, 2 * c), Double(2 * c, 4 * c)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), nn.ConvTranspose2d(2 * c, c, 2, 2)])
        self.joined = nn.ModuleList([Double(4 * c, 2 * c), Double(2 * c, c)])
        self.out = nn.Conv2d(c, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.enter(x)]
        for down in self.down:
            levels.append(down(functional.max_pool2d(levels[-1], 2)))
        y = levels.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            y = joined(torch.cat([levels.pop(), up(y)], 1))
        return self.out(y)


class Mixer(nn.Module):
    """An MLP-Mixer."""

    def __init__(self, patches: int = 16, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            tokens = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
            channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            norms = [nn.LayerNorm(width), nn.LayerNorm(width)]
            self.blocks.append(nn.ModuleList([norms[0], tokens, norms[1], channels]))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for first, tokens, second, channels in self.blocks:
            x = x + tokens(first(x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(second(x))
        return self.head(self.norm(x).mean(1))


class TimedBlock(nn.Module):
    """A residual block of a diffusion network: group norm, SiLU, convolution, a shift by the time."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, channels), nn.Conv2d(channels, out, 3, 1, 1)
        self.time = nn.Linear(time, out)
        self.norm2, self.conv2 = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, 1, 1)
        self.short = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(functional.silu(self.norm1(x)))
        h = h + self.time(functional.silu(t))[:, :, None, None]
        h = self.conv2(functional.silu(self.norm2(h)))
        return self.short(x) + h


class Diffusion(nn.Module):
    """A network of an image and a time."""

    def __init__(self, channels: int = 64, time: int = 128) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(3, channels, 3, 1, 1)
        sizes = [channels, channels, 2 * channels, 2 * channels, 2 * channels]
        self.blocks = nn.ModuleList(TimedBlock(a, b, time) for a, b in pairwise(sizes))
        self.norm, self.out = nn.GroupNorm(8, 2 * channels), nn.Conv2d(2 * channels, 3, 3, 1, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        frequencies = torch.exp(-torch.arange(32, device=x.device) * 0.2)
        angles = t[:, None] * frequencies
        t = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, t)
        return self.out(functional.silu(self.norm(x)))


class Gpt(nn.Module):
    """A GPT in the style of nanoGPT, with or without a head tied to the embedding."""

    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH, *, tied: bool = False, heads: int = HEADS) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(blocks)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.heads = heads
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * blocks) ** 0.5 if deep else 0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        n, t = tokens.shape
        x = self.embed(tokens) + self.place(torch.arange(t, device=tokens.device))
        for block in self.blocks:
            parts = block["qkv"](block["norm1"](x)).chunk(3, -1)
            q, k, v = (one.view(n, t, self.heads, -1).transpose(1, 2) for one in parts)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](y.transpose(1, 2).reshape(n, t, -1))
            x = x + block["down"](functional.gelu(block["up"](block["norm2"](x))))
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """An LSTM with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 64, 2, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def encoder(*, first: bool) -> Callable[[], Pair]:
    """torch's own transformer, pre-norm or post-norm."""

    def make() -> Pair:
        # not nn.TransformerEncoder, which starts all layers with copies of the same weights
        kept = {"batch_first": True, "norm_first": first}
        layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, **kept) for _ in range(BLOCKS)]
        return nn.Sequential(*layers), torch.randn(8, 24, WIDTH)

    return make


def gpt(**settings: Any) -> Callable[[], Pair]:
    """A GPT and its tokens."""
    return lambda: (Gpt(**settings), torch.randint(WORDS, (8, 24)))


def plain(net: Callable[[], nn.Module], *shape: int) -> Callable[[], Pair]:
    """A network and a batch of noise."""
    return lambda: (net(), torch.randn(*shape))


STAGES = {"hidden_sizes": [32, 64, 96, 128], "depths": [2, 2, 2, 2], "num_channels": 3}
CHOSEN: dict[str, Callable[[], Pair]] = {
    "gpt2": hugging(
        "GPT2LMHeadModel", "GPT2Config", n_embd=WIDTH, n_layer=BLOCKS, n_head=HEADS, vocab_size=WORDS, n_positions=64
    ),
    "llama": hugging("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "bert": hugging("BertForMaskedLM", "BertConfig", **TEXT),
    "vit": hugging(
        "ViTForImageClassification", "ViTConfig", **SIZES, intermediate_size=2 * WIDTH, image_size=32, patch_size=8
    ),
    "t5": hugging(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=24,
        d_ff=2 * WIDTH,
        num_layers=3,
        num_heads=HEADS,
        **SPECIAL,
    ),
    "mamba": hugging(
        "MambaForCausalLM", "MambaConfig", vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=BLOCKS, **SPECIAL
    ),
    "qwen2": hugging("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    "mistral": hugging("MistralForCausalLM", "MistralConfig", **GROUPED, sliding_window=8),
    "gpt-neox": hugging("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT),
    "opt": hugging(
        "OPTForCausalLM",
        "OPTConfig",
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        vocab_size=WORDS,
        ffn_dim=2 * WIDTH,
        max_position_embeddings=64,
        word_embed_proj_dim=WIDTH,
    ),
    "distilbert": hugging(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        dim=WIDTH,
        n_layers=BLOCKS,
        n_heads=HEADS,
        hidden_dim=2 * WIDTH,
        vocab_size=WORDS,
        max_position_embeddings=64,
    ),
    "albert": hugging("AlbertForMaskedLM", "AlbertConfig", **TEXT, embedding_size=48),
    "mixtral": hugging("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4),
    "convnext": hugging("ConvNextForImageClassification", "ConvNextConfig", **STAGES, image_size=32),
    "resnet-hf": hugging(
        "ResNetForImageClassification", "ResNetConfig", **STAGES, embedding_size=32, layer_type="basic"
    ),
    "resnet-110": cifar_resnet(18),
    "resnet-20": cifar_resnet(3, 32),
    "resnet-50": bottleneck_resnet,
    "u-net": plain(UNet, 8, 3, 16, 16),
    "mixer": plain(Mixer, 8, 3, 32, 32),
    "diffusion": lambda: (Diffusion(), (torch.randn(8, 3, 8, 8), torch.rand(8) * 100)),
    "encoder pre-norm": encoder(first=True),
    "encoder post-norm": encoder(first=False),
    "gpt": gpt(),
    "gpt tied": gpt(tied=True),
    "lstm": plain(Recurrent, 8, 12, 16),
}


class Dense(nn.Module):
    """A DenseNet-like network: every layer sees all before it."""

    def __init__(self, growth: int = 24, layers: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 2 * growth, 3, 1, 1)
        sizes = [growth * (2 + at) for at in range(layers)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in sizes)
        self.maps = nn.ModuleList(nn.Conv2d(size, growth, 3, 1, 1, bias=False) for size in sizes)
        self.head = nn.Linear(growth * (2 + layers), 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for norm, made in zip(self.norms, self.maps, strict=True):
            x = torch.cat([x, made(functional.relu(norm(x)))], 1)
        return self.head(x.mean((2, 3)))


def vgg() -> Pair:
    """A VGG with batch norm and max pooling."""
    layers: list[nn.Module] = []
    before = 3
    for width in (48, 48, 96, 96):
        layers += [nn.Conv2d(before, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        before = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before, 10)), torch.randn(16, 3, 16, 16)


PICTURES = {"image_size": 32, "patch_size": 8}
HELD_OUT: dict[str, Callable[[], Pair]] = {
    "phi": hugging("PhiForCausalLM", "PhiConfig", **TEXT),
    "gemma": hugging("GemmaForCausalLM", "GemmaConfig", **GROUPED, head_dim=24),
    "olmo2": hugging("Olmo2ForCausalLM", "Olmo2Config", **GROUPED),
    "qwen3": hugging("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=24),
    "stablelm": hugging("StableLmForCausalLM", "StableLmConfig", **GROUPED),
    "falcon": hugging("FalconForCausalLM", "FalconConfig", **SIZES, vocab_size=WORDS),
    "bloom": hugging(
        "BloomForCausalLM", "BloomConfig", hidden_size=WIDTH, n_layer=BLOCKS, n_head=HEADS, vocab_size=WORDS
    ),
    "roberta": hugging("RobertaForMaskedLM", "RobertaConfig", **TEXT),
    "electra": hugging("ElectraForMaskedLM", "ElectraConfig", **TEXT, embedding_size=WIDTH),
    "bart": hugging(
        "BartForConditionalGeneration",
        "BartConfig",
        vocab_size=WORDS,
        d_model=WIDTH,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_position_embeddings=64,
    ),
    "deit": hugging("DeiTForImageClassification", "DeiTConfig", **SIZES, **PICTURES, intermediate_size=2 * WIDTH),
    "dinov2": hugging("Dinov2ForImageClassification", "Dinov2Config", **SIZES, **PICTURES, mlp_ratio=2),
    "swin": hugging(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=4,
        embed_dim=48,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "regnet": hugging(
        "RegNetForImageClassification",
        "RegNetConfig",
        num_channels=3,
        embedding_size=32,
        hidden_sizes=[32, 64, 96, 128],
        depths=[1, 2, 2, 1],
        groups_width=16,
    ),
    "resnet-50-hf": hugging("ResNetForImageClassification", "ResNetConfig", **STAGES, embedding_size=32),
    "resnet-32": cifar_resnet(5, 24),
    "densenet": plain(Dense, 8, 3, 8, 8),
    "vgg": vgg,
}
