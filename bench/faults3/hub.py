"""BERT that sorts sentences and a vision transformer, both from configurations of the transformers library."""

from __future__ import annotations

from typing import Any

import torch
from common import Fault, Network, accuracy, class_loss, digits, logits
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

WORDS, CLASSES, LENGTH = 60, 6, 14

BERT_FAULTS = (
    Fault(
        "range_1",
        "weights too large everywhere",
        ("odd_scale", "entropy_collapse", "start_loss", "cause", "token_collapse", "gradient_explosion"),
        r".*",
    ),
    Fault(
        "norm_eps_1",
        "bad epsilon",
        ("gradient_vanishing", "rank_collapse", "gradient_alignment", "cause", "disagreement", "norm_weight"),
        r".*",
    ),
    Fault("mask_inverted", "mask turned around", ("unused_input", "rank_collapse", "gradient_alignment"), r".*"),
    Fault("body_frozen", "parts frozen", ("frozen",), r"bert"),
    Fault("all_parameters_normal", "norm weights drawn at random", ("norm_weight",), r"LayerNorm"),
    Fault("classifier_large", "output too large", ("start_loss", "odd_scale", "config_law"), r"classifier|^$"),
)
VIT_FAULTS = (
    Fault(
        "raw_pixels",
        "raw inputs",
        ("huge_signal", "odd_branch", "rank_collapse", "massive_activation", "start_loss", "gradient_vanishing"),
        r".*",
    ),
    Fault("softmax_at_end", "softmax in front of cross-entropy", ("softmax_twice",), r".*"),
    Fault("list_multiplied", "one module used several times", ("cloned_weights", "disagreement"), r"layer"),
    Fault(
        "queries_large",
        "attention too sharp",
        ("entropy_collapse", "odd_scale", "config_law"),
        r"layers?\.\d|query|q_proj|attention",
    ),
    Fault("body_no_grad", "part cut off from the gradient", ("detached", "frozen"), r"vit|body|embed"),
    Fault("inputs_all_alike", "samples repeated by the loader", ("degenerate_batch",), r".*", "it sees one sample"),
)


def bert(fault: str | None) -> nn.Module:
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        num_labels=CLASSES,
        initializer_range=1.0 if fault == "range_1" else 0.05,
        layer_norm_eps=1.0 if fault == "norm_eps_1" else 1e-12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    if fault == "body_frozen":
        model.bert.requires_grad_(False)
    if fault == "all_parameters_normal":
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    if fault == "classifier_large":
        nn.init.normal_(model.classifier.weight, std=8)
    return model


class Pictures(nn.Module):
    """A vision transformer and a head of one's own in front of a loss."""

    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        config = ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=48,
            num_hidden_layers=5,
            num_attention_heads=4,
            intermediate_size=96,
            num_labels=10,
            initializer_range=0.08,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.vit = ViTForImageClassification(config)
        if fault == "list_multiplied":
            for owner in self.vit.modules():
                for name, child in list(owner.named_children()):
                    if isinstance(child, nn.ModuleList) and len(child) == 5:
                        setattr(owner, name, nn.ModuleList([child[0]] * 5))
        if fault == "queries_large":
            for name, value in self.vit.named_parameters():
                if name.endswith(("query.weight", "q_proj.weight")):
                    nn.init.normal_(value, std=4)

    def forward(self, images: Tensor) -> Tensor:
        if self.fault == "body_no_grad":
            with torch.no_grad():
                hidden = self.vit.vit(images).last_hidden_state
            return self.vit.classifier(hidden[:, 0])
        out = self.vit(images).logits
        return out.softmax(-1) if self.fault == "softmax_at_end" else out


def sentences(generator: torch.Generator, fault: str | None) -> tuple[dict[str, Tensor], Tensor]:
    """Sentences whose class is that of the word they contain twice as often as others, with padding behind."""
    classes = torch.randint(CLASSES, (48,), generator=generator)
    words = torch.randint(10 + CLASSES, WORDS, (48, LENGTH), generator=generator)
    hinted = torch.rand(48, LENGTH, generator=generator) < 0.3
    hinted[:, 1] = True
    words = torch.where(hinted, 10 + classes[:, None], words)
    ends = torch.randint(6, LENGTH, (48, 1), generator=generator)
    mask = (torch.arange(LENGTH) < ends).long()
    words = torch.where(mask.bool(), words, 0)
    words[:, 0] = 1
    return {"input_ids": words, "attention_mask": 1 - mask if fault == "mask_inverted" else mask}, classes


def pictures(generator: torch.Generator, fault: str | None) -> tuple[Tensor, Tensor]:
    images, classes = digits(generator, 64, raw=fault == "raw_pixels")
    if fault == "inputs_all_alike":
        images, classes = images[:1].repeat(64, 1, 1, 1), classes[:1].repeat(64)
    return images, classes


def loss(output: Any, targets: Tensor) -> Tensor:
    return class_loss(logits(output), targets)


BERT = Network("hf_bert", bert, sentences, BERT_FAULTS, loss, accuracy, 1 / CLASSES, rate=1e-3)
VIT = Network("hf_vit", Pictures, pictures, VIT_FAULTS, "cross_entropy", accuracy, 0.1, rate=2e-3)
