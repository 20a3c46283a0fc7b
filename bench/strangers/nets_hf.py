"""Architectures of the transformers library in small sizes: Llama, Qwen2, BERT, ViT; healthy GPT-2, T5 and Mistral."""

import torch
import transformers as hf
from nets_common import ANY, VOCABULARY, WARN, Arch, Case, chain, digits, topics, translation
from torch import Tensor, nn


class Logits(nn.Module):
    """A model of the library that returns its logits; `network` is the name in front of all others."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self.network(*inputs, **named).logits


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def make_llama(fault: str | None = None) -> nn.Module:
    config = hf.LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager")
    network = hf.LlamaForCausalLM(config)
    layers = network.model.layers
    with torch.no_grad():
        if fault == "query_gain":
            layers[2].self_attn.q_proj.weight.mul_(300)
        if fault == "norms_zero":  # a checkpoint of a network whose norms multiply by 1 + weight
            for name, parameter in network.named_parameters():
                if "norm" in name:
                    parameter.zero_()
        if fault == "down_constant":
            layers[1].mlp.down_proj.weight.fill_(0.02)
        if fault == "head_gain":
            network.lm_head.weight.mul_(100)
    if fault == "gate_up_tied":  # the same tensor loaded twice
        for layer in layers:
            layer.mlp.gate_proj.weight = layer.mlp.up_proj.weight
    if fault == "layers_frozen":
        for layer in layers[:3]:
            layer.requires_grad_(False)
    return Logits(network)


def make_qwen(fault: str | None = None) -> nn.Module:
    small = 1e-5 if fault == "init_tiny" else 0.02
    config = hf.Qwen2Config(
        **SMALL, num_key_value_heads=2, max_position_embeddings=64, initializer_range=small, tie_word_embeddings=True
    )
    network = hf.Qwen2ForCausalLM(config)
    with torch.no_grad():
        if fault == "value_bias":
            network.model.layers[1].self_attn.v_proj.bias.fill_(50.0)
        if fault == "norm_nan":
            network.model.layers[3].post_attention_layernorm.weight[0] = float("nan")
    if fault == "residual_lost":  # the attention of layer 2 returns zeros
        attention = network.model.layers[2].self_attn
        forward = attention.forward
        attention.forward = lambda *a, **k: tuple(x * 0 if i == 0 else x for i, x in enumerate(forward(*a, **k)))
    return Logits(network)


class BertClassifier(Logits):
    def __init__(self, network: nn.Module, fault: str | None) -> None:
        super().__init__(network)
        self.fault = fault

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones_like(tokens)
        mask[:, 18:] = 0  # padding
        if self.fault == "mask_inverted":  # 1 for padding, as other libraries have it
            mask = 1 - mask
        return self.network(input_ids=tokens, attention_mask=mask).logits


def make_bert(fault: str | None = None) -> nn.Module:
    dropout = 0.9 if fault == "dropout" else 0.1
    config = hf.BertConfig(**SMALL, max_position_embeddings=64, num_labels=6, hidden_dropout_prob=dropout)
    network = hf.BertForSequenceClassification(config)
    with torch.no_grad():
        if fault == "embedding_constant":
            network.bert.embeddings.word_embeddings.weight.fill_(0.02)
        if fault == "pooler_saturated":
            network.bert.pooler.dense.weight.mul_(300)
    if fault == "body_frozen":
        network.bert.requires_grad_(False)
    return BertClassifier(network, fault)


def draw_bert(generator: torch.Generator, fault: str | None):
    return topics(generator)


def make_vit(fault: str | None = None) -> nn.Module:
    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    std = 1.0 if fault == "init_large" else 0.02
    config = hf.ViTConfig(**sizes, image_size=8, patch_size=2, num_channels=1, num_labels=10, initializer_range=std)
    network = hf.ViTForImageClassification(config)
    with torch.no_grad():
        if fault == "head_zero_frozen":
            network.classifier.weight.zero_()
            network.classifier.requires_grad_(False)
        if fault == "norm_shift":
            network.vit.layernorm.bias.fill_(30.0)
    return Logits(network)


def make_gpt2(fault: str | None = None) -> nn.Module:
    return Logits(
        hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, n_positions=64))
    )


def make_mistral(fault: str | None = None) -> nn.Module:
    return Logits(hf.MistralForCausalLM(hf.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=8)))


class Seq2Seq(Logits):
    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.network(input_ids=source, decoder_input_ids=target).logits


def make_t5(fault: str | None = None) -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return Seq2Seq(hf.T5ForConditionalGeneration(config))


ARCHES = [
    Arch("llama", make_llama, lambda g, f: chain(g)),
    Arch("qwen2", make_qwen, lambda g, f: chain(g)),
    Arch("bert", make_bert, draw_bert, adam=1e-3),
    Arch("hf_vit", make_vit, lambda g, f: digits(g, 32), adam=2e-3),
]

CASES = [
    Case("llama", "query_gain", "one layer too large", r"layers\.2\.self_attn", ANY, "queries of one layer times 300"),
    Case("llama", "norms_zero", "norm weight zero", r"norm", WARN, "all norms at 0"),
    Case("llama", "down_constant", "constant weights", r"layers\.1\.mlp\.down_proj", ANY, "fill_ instead of normal_"),
    Case("llama", "head_gain", "one layer too large", r"lm_head", WARN, "output times 100"),
    Case("llama", "gate_up_tied", "weights tied by mistake", r"gate_proj|up_proj", ANY, "gate and up are one tensor"),
    Case("llama", "layers_frozen", "frozen by mistake", r"layers\.[0-2]\b", ANY, "three of four layers"),
    Case("qwen2", "init_tiny", "all layers too small", r"embed|layers|lm_head|network", ANY, "initializer_range 1e-5"),
    Case("qwen2", "value_bias", "huge bias", r"layers\.1\.self_attn(\.v_proj)?", WARN, "bias of the values 50"),
    Case("qwen2", "norm_nan", "NaN in a weight", r"layers\.3\.post_attention_layernorm", WARN, "one NaN"),
    Case(
        "qwen2",
        "residual_lost",
        "branch multiplied by zero",
        r"layers\.2\.self_attn",
        ANY,
        "attention of one layer returns zeros",
    ),
    Case("bert", "mask_inverted", "mask inverted", r"attention|mask", ANY, "only the padding is seen"),
    Case("bert", "dropout", "dropout of 0.9 left on", r"dropout", ANY, "hidden_dropout_prob 0.9"),
    Case("bert", "embedding_constant", "constant weights", r"word_embeddings", WARN, "all words alike"),
    Case("bert", "pooler_saturated", "saturated tanh", r"pooler", ANY, "tanh of the pooler saturated"),
    Case("bert", "body_frozen", "frozen by mistake", r"bert", ANY, "all but the classifier"),
    Case(
        "hf_vit", "init_large", "all layers too large", r"vit|attention|classifier|layer", WARN, "initializer_range 1.0"
    ),
    Case(
        "hf_vit",
        "head_zero_frozen",
        "zero layer that kills gradients",
        r"classifier",
        WARN,
        "head zero and frozen: no gradient at all",
    ),
    Case("hf_vit", "norm_shift", "huge bias", r"layernorm", WARN, "shift 30 in the last norm"),
]


def extra_healthy() -> list[Arch]:
    return [
        Arch("healthy_gpt2", make_gpt2, lambda g, f: chain(g)),
        Arch("healthy_mistral", make_mistral, lambda g, f: chain(g)),
        Arch("healthy_t5", make_t5, lambda g, f: translation(g)),
    ]
