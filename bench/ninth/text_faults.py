"""Faults in the networks on tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .change import Case, instead
from .plant import fault
from .text import RMSNorm


@fault(
    "unused_input token_collapse rank_collapse", "* words positions norm layers",
    "The mask is handed over as it is, one at words, so attention hides the words and shows the padding and the start.",
)  # fmt: skip
def classifier_mask_one_means_word(c: Case) -> None:
    # The first token stays in sight, or else a sentence without padding would have no weights at all.
    instead(c.model, padding=lambda m, mask: (mask != 0) & (torch.arange(mask.shape[1]) > 0))


@fault(
    "mixed_samples wrong_axis", "* layers",
    "The attention was made without batch_first and the mask that did not fit dropped: sentences attend each other.",
    later="In a fixed batch the others of the batch are always the same.",
)  # fmt: skip
def classifier_attends_over_batch(c: Case) -> None:
    for layer in c.model.layers:
        layer.attention.batch_first = False
        instead(layer, attend=lambda m, x, padding: m.attention(x, x, x, need_weights=False)[0])


@fault("softmax_twice activation", "* head", "The model ends in a softmax and the loss is cross entropy.")
def classifier_softmax_and_cross_entropy(c: Case) -> None:
    c.model.head = nn.Sequential(c.model.head, nn.Softmax(dim=1))


@fault(
    "frozen", "words positions norm layers",
    "All but the pooler and the head is frozen as for fine tuning, though nothing was loaded.",
)  # fmt: skip
def classifier_freezes_fresh_encoder(c: Case) -> None:
    for name, parameter in c.model.named_parameters():
        parameter.requires_grad_(name.startswith(("pooler", "head")))


@fault(
    "odd_scale huge_signal saturation entropy_collapse start_loss", "layers pooler head words positions *",
    "A helper for the start draws all weights of linear layers from the normal law of deviation 1.",
)  # fmt: skip
def classifier_weights_of_deviation_one(c: Case) -> None:
    for module in c.model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)


@fault(
    "degenerate_batch class_imbalance", "*", "The data are sorted by class and not shuffled: one class in the batch.",
    own=True, later="The batch is learned at once, but nothing can be learned from it.",
)  # fmt: skip
def classifier_sorted_data(c: Case) -> None:
    c.y = torch.full_like(c.y, 2)


@fault(
    "target_leak", "* layers", "The attention of the decoder has no causal mask.",
    later="A glance at the next token makes the training loss better than it should be.",
)  # fmt: skip
def decoder_without_causal_mask(c: Case) -> None:
    for layer in c.model.layers:
        instead(layer.attention, mix=lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v))


@fault(
    "target_leak", "*", "The targets are not shifted: each token is to be told from itself.",
    own=True, later="The loss falls faster than that of the real task.",
)  # fmt: skip
def decoder_targets_not_shifted(c: Case) -> None:
    c.y = c.x.clone()


@fault(
    "start_loss odd_scale huge_signal", "embed lm_head *",
    "The tied embedding keeps the default law of deviation 1, so the first scores are huge.",
)  # fmt: skip
def decoder_tied_table_of_deviation_one(c: Case) -> None:
    nn.init.normal_(c.model.embed.weight)


@fault(
    "huge_signal odd_scale odd_branch gradient_explosion cause", "layers norm *",
    "The norm divides by the mean square instead of by its root.",
)  # fmt: skip
def decoder_norm_without_root(c: Case) -> None:
    for module in list(c.model.modules()):
        if isinstance(module, RMSNorm):
            instead(module, forward=lambda m, x: x / (x.pow(2).mean(-1, keepdim=True) + m.eps) * m.weight)


@fault(
    "target_leak wrong_axis token_collapse", "layers *",
    "Heads are split by a view to (batch, heads, time, size) without a transpose: heads mix places, also later ones.",
    later="Places leak into each other, which helps in training and is not there when tokens are made one by one.",
)  # fmt: skip
def decoder_heads_by_view_alone(c: Case) -> None:
    for layer in c.model.layers:
        instead(layer.attention, split=lambda m, x, heads: x.view(x.shape[0], heads, x.shape[1], m.size))


@fault(
    "gradient_vanishing rank_collapse token_collapse gradient_alignment", "layers embed norm *",
    "The residual connections are missing around attention and feed-forward part.",
)  # fmt: skip
def decoder_without_residuals(c: Case) -> None:
    for layer in c.model.layers:
        instead(layer, forward=lambda m, x: m.mlp(m.post_norm(m.attention(m.input_norm(x)))))


@fault("frozen", "embed", "Word vectors come by from_pretrained, which freezes them, but they are random.")
def tagger_vectors_frozen_by_default(c: Case) -> None:
    weight = 0.3 * torch.randn_like(c.model.embed.weight)
    c.model.embed = nn.Embedding.from_pretrained(weight, padding_idx=0)


@fault(
    "class_imbalance start_loss degenerate_batch", "*",
    "Padding has the tag 0 instead of the ignored one, so most of the targets are padding.",
    own=True, later="Padding is learned at once and makes the loss look better.",
)  # fmt: skip
def tagger_padding_counts_as_tag(c: Case) -> None:
    tokens, lengths = c.x
    lengths = (lengths // 3).clamp(min=3)
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    c.x = (tokens * real, lengths)
    c.y = c.y.masked_fill(~real, 0)


@fault(
    "unused_input token_collapse rank_collapse", "* embed rnn",
    "The lengths are counted from the padding instead of the words, so long sentences are cut to their first words.",
)  # fmt: skip
def tagger_lengths_count_padding(c: Case) -> None:
    instead(c.model, lengths=lambda m, tokens, lengths: (tokens == 0).sum(1).clamp(min=1).cpu())


@fault(
    "unused", "rnn", "The head sees only the forward half of the output of the bidirectional network.",
    later="Half of the last layer never learns; the layer below still looks ahead.",
)  # fmt: skip
def tagger_forward_half_only(c: Case) -> None:
    c.model.head = nn.Linear(48, 6)

    def run(m: nn.Module, x: Tensor, lengths: Tensor, total: int) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(m.rnn(packed)[0], batch_first=True, total_length=total)
        return out[:, :, : m.rnn.hidden_size]

    instead(c.model, run=run)


@fault(
    "saturation odd_scale huge_signal gradient_explosion", "rnn",
    "All parameters of the recurrent network are drawn from the normal law of deviation 1.",
)  # fmt: skip
def tagger_recurrent_weights_of_deviation_one(c: Case) -> None:
    for parameter in c.model.rnn.parameters():
        nn.init.normal_(parameter)


@fault(
    "mixed_samples wrong_axis", "*",
    "Unpacking gives time first, the targets are batch first, and both are flattened for the loss.",
)  # fmt: skip
def tagger_unpacked_time_first(c: Case) -> None:
    def run(m: nn.Module, x: Tensor, lengths: Tensor, total: int) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(m.rnn(packed)[0], total_length=total)[0]

    instead(c.model, run=run)
