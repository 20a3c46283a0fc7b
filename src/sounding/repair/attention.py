"""QK-norm: queries and keys of every attention normalized head by head, so that scores cannot grow."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sounding.errors import UsageError
from sounding.probe.state import unwrap
from sounding.repair.changes import Change, Untouched
from sounding.repair.cure import Steps, cure
from sounding.repair.layers import NameFilter, left_out, unfuse, weight_of, width_of

QUERY_KEY = re.compile(r"^(q|k|query|key|to_q|to_k|wq|wk)(_?proj|_lin)?$", re.IGNORECASE)
# layers that give out queries, keys and values one behind the other; others (query_key_value) mix them by heads
FUSED = re.compile(r"^(c_attn|qkv|in_proj|to_qkv|qkv_proj|Wqkv)$")
# where modules and configurations of known libraries keep the number of heads, and the size of one
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
SIZES = ("head_dim", "attention_head_size", "head_size", "dim_head")
EPS = 1e-6  # under the root of a mean square, as in LLaMA's norms


@cure
def qk_norm_(
    model: nn.Module,
    *,
    heads: int | None = None,
    include: NameFilter = None,
    exclude: NameFilter = None,
) -> Steps:
    """Divide queries and keys by their root mean square, head by head, times a trainable scale of 1 at the start.

    Scores are then at most √d times the product of the scales, whatever the weights become (Henry et al. 2020;
    Dehghani et al. 2023). `nn.MultiheadAttention` becomes a class that does so, under the same parameter names; other
    attentions are known by their layers for queries and keys, or one for queries, keys and values.

    Args:
        heads: of every attention; by default what the modules or the configuration say.
        include, exclude: name filters on the attentions.

    Raises:
        UsageError: no attention is known, or none whose heads are.
    """
    root = unwrap(model)
    attentions = [
        (name, module, parts)
        for name, module in root.named_modules()
        if (parts := _parts(module)) or isinstance(module, nn.MultiheadAttention)
    ]
    untouched: list[Untouched] = []
    for name, module, parts in attentions:
        filtered = left_out(name, module, include, exclude)
        why = filtered or _normalize(module, parts, heads, getattr(root, "config", None))
        unfuse(root, [module])
        if why:
            untouched.append(Untouched(name, why))
        else:
            yield Change(name, "queries and keys", "as they come", "divided by their root mean square")
    if len(untouched) == len(attentions):
        why = f": {untouched[0].name}: {untouched[0].reason}" if untouched else ""
        raise UsageError(
            f"found no attention in {type(root).__name__} whose queries and keys are known{why}",
            hint="heads=..., or layers called q_proj and k_proj, query and key, qkv or c_attn",
        )
    yield from untouched


class NormalizedAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with queries and keys divided by their root mean square, head by head."""

    query_scale: nn.Parameter
    key_scale: nn.Parameter

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention as in the base class."""
        alone = query.dim() == 2
        # (samples, tokens, features) whatever the layout was
        given = [item.unsqueeze(0) if alone else item if self.batch_first else item.transpose(0, 1)
                 for item in (query, key, value)]  # fmt: skip
        weights: Any = (
            self.in_proj_weight.chunk(3)
            if self.in_proj_weight is not None  # None where keys or values have a width of their own
            else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        )
        biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            _by_heads(functional.linear(*pair), self.head_dim).transpose(1, 2)
            for pair in zip(given, weights, biases, strict=True)
        )
        q, k = _unit(q, self.query_scale), _unit(k, self.key_scale)
        # as without the norm; the scales may learn another temperature
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if attn_mask is not None and attn_mask.dim() == 3:  # one for each head of each sample
            attn_mask = attn_mask.view(-1, self.num_heads, *attn_mask.shape[1:])
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.view(len(k), 1, 1, k.shape[2])
        for mask in (attn_mask, key_padding_mask):
            if mask is not None:
                scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if is_causal and attn_mask is None:  # with a mask the flag is only a hint, as in the base class
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        shares = functional.dropout(scores.softmax(-1), self.dropout, self.training)
        mixed = functional.linear((shares @ v).transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        mixed = mixed[0] if alone else mixed if self.batch_first else mixed.transpose(0, 1)
        if not need_weights:
            return mixed, None
        shares = shares.mean(1) if average_attn_weights else shares
        return mixed, shares[0] if alone else shares


def normalize_output(module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
    """The hook of a layer that gives out queries, keys or both in front of the values: each divided by its size."""
    scales: Any = [getattr(module, name) for name in ("query_scale", "key_scale") if hasattr(module, name)]
    if len(scales) == 1:
        return _unit(_by_heads(output, len(scales[0])), scales[0]).flatten(-2)
    *both, values = output.chunk(3, -1)  # values are no part of the scores
    named = zip(both, scales, strict=True)
    return torch.cat([*(_unit(_by_heads(x, len(s)), s).flatten(-2) for x, s in named), values], -1)


def _by_heads(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, size)


def _unit(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * scale


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """The layers of an attention that give out queries and keys, by what their output is called."""
    children = dict(module.named_children())
    fused = [child for name, child in children.items() if FUSED.match(name) and hasattr(child, "weight")]
    pair = [child for name, child in children.items() if QUERY_KEY.match(name) and hasattr(child, "weight")]
    if len(fused) == 1 and not pair:
        return {"fused": fused[0]}
    return {"query": pair[0], "key": pair[1]} if len(pair) == 2 else {}


def _normalize(module: nn.Module, parts: dict[str, nn.Module], heads: int | None, config: Any) -> str:
    """Normalize one attention; why it cannot be done, "" where it was."""
    if isinstance(module, nn.MultiheadAttention):
        if type(module) is not nn.MultiheadAttention:
            return f"{type(module).__name__} is a class of its own"  # its forward method would be lost
        if module.bias_k is not None or module.add_zero_attn:
            return "it adds keys of its own (add_bias_kv or add_zero_attn)"  # which no projection gives out
        module.__class__ = NormalizedAttention  # in place: parameters keep their names, and parents their child
        size, like = module.embed_dim // module.num_heads, module.out_proj.weight
        for name in ("query_scale", "key_scale"):
            module.register_parameter(name, nn.Parameter(like.new_ones(size)))
        return ""
    if any(hasattr(part, name) for part in parts.values() for name in ("query_scale", "key_scale")):
        return "its queries and keys are normalized already"
    if any("norm" in name.lower() and name.lower().startswith(("q", "k")) for name, _ in module.named_children()):
        return "it has norms of its own for queries and keys"
    first = next(iter(parts.values()))
    width = width_of(first) // (3 if "fused" in parts else 1)
    known = [int(v) for n in SIZES for at in (module, config) if isinstance(v := getattr(at, n, None), int) and v > 0]
    counts = [int(v) for n in HEADS for at in (module, config) if isinstance(v := getattr(at, n, None), int) and v > 0]
    size = width // heads if heads else known[0] if known else width // counts[0] if counts else 0
    if not size or any(width_of(part) % size for part in parts.values()):
        return f"the number of its heads is not known ({width} features)"
    for name, part in parts.items():
        for scale in ("query_scale", "key_scale") if name == "fused" else (f"{name}_scale",):
            part.register_parameter(scale, nn.Parameter(weight_of(part).new_ones(size)))
        part.register_forward_hook(normalize_output)
    return ""
