"""A file's arrays as the arguments of a network: by name, as a mapping or as a tuple, and what does not fit."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from sounding.data import Batch
from sounding.errors import UsageError
from sounding.models.hf import is_pretrained

# Arrays of the transformers library that have a number for each token of another: a mask of ones is dropped whatever
# its length, so the library itself does not see that it does not fit.
BESIDE = {"attention_mask": "input_ids", "token_type_ids": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
Form = Mapping[str, Any] | tuple[Any, ...] | None


def forms_of(model: nn.Module, batch: Batch) -> list[Form]:
    """The ways to give a batch to the network, the likeliest first; None gives `inputs` alone.

    Raises:
        UsageError: the file names arguments that the network has not, or lacks some that it needs.
    """
    if not isinstance(batch.arguments, Mapping):
        return [None]
    found = dict(batch.arguments)
    known, needed, anything = _arguments(model)
    anything = anything and not is_pretrained(model)  # the library drops names that it does not know
    if "inputs" in found and "inputs" not in known and known:
        # `inputs` is the first argument whatever its name; what no argument asks for beside it is the user's own
        found = {known[0]: found.pop("inputs"), **{name: found[name] for name in found if name in known}}
        if len(found) == 1:
            return [None]
    unknown = [name for name in found if name not in known and not anything]
    missing = [name for name in needed if name not in found]
    if not unknown and not missing:
        if is_pretrained(model):
            _require_tokens(model, found)
        return [found]
    if len(known) == 1 and not anything and known[0] not in found:
        return [(found,), (tuple(found.values()),)]
    takes = ", ".join(known) + (" and any others" if anything else "")
    what = f"no argument {unknown[0]!r}" if unknown else f"an argument {missing[0]!r} that the file has no array for"
    told = f"the network's forward has {what}; it takes {takes or 'nothing'}, the file has {', '.join(found)}"
    raise UsageError(told, hint=f"arrays named {needed_names(model)} (and targets)")


def _require_tokens(model: nn.Module, found: Mapping[str, Any]) -> None:
    """Refuse tokens that are no table of samples and positions, and what stands beside them in another shape."""
    for name in ("input_ids", "decoder_input_ids"):
        tokens = found.get(name)
        if tokens is not None and tokens.ndim > 2 and "MultipleChoice" not in type(model).__name__:
            raise UsageError(f"expected {name} of shape (samples, positions), got {tuple(tokens.shape)}",
                             hint="a row of tokens for each sample")  # fmt: skip
    for name, tokens in BESIDE.items():
        if name in found and tokens in found and found[name].ndim < 3 and found[name].shape != found[tokens].shape:
            wanted, got = tuple(found[tokens].shape), tuple(found[name].shape)
            told = f"expected {name} of the shape {wanted} of {tokens}, got {got}"
            raise UsageError(told, hint=f"a number of {name} for each of {tokens}")


def needed_names(model: nn.Module) -> str:
    """The names of the arguments that a network needs, in words."""
    known, needed, _ = _arguments(model)
    return ", ".join(needed or known[:1])


def unequal(batch: Batch, reason: str) -> str:
    """The lengths of arrays that differ, as the end of a sentence; empty where they agree or were not the reason.

    Indices that point outside, as edges of a graph may, say nothing about how many of them there should be.
    """
    if not isinstance(batch.arguments, Mapping) or reason.startswith("IndexError") or "out of bounds" in reason:
        return ""
    lengths = {name: len(value) for name, value in batch.arguments.items() if value.dim()}
    if len(set(lengths.values())) < 2:
        return ""
    told = ", ".join(f"{name} {length}" for name, length in lengths.items())
    return f" (the arrays are not equally many: {told})"


def unasked(model: nn.Module, batch: Batch, reason: str) -> str:
    """The names of arrays that forward has no argument for, as the end of a sentence; empty where it has all of them.

    A network that takes any others, or one mapping, may know what to do with them: so they are named after a refusal,
    unless torch itself raised it, for a shape or a dtype, which a layer sees that has got its array.
    """
    if reason.startswith(("RuntimeError", "IndexError")) or "out of bounds" in reason:
        return ""
    known, _, _ = _arguments(model)
    names = [] if not isinstance(batch.arguments, Mapping) or "inputs" in batch.arguments else list(batch.arguments)
    wrong = [repr(name) for name in names if name not in known]
    return f"; its forward has no argument {' or '.join(wrong)}" if wrong else ""


def _arguments(model: nn.Module) -> tuple[list[str], list[str], bool]:
    """The names that forward takes, those it needs, and whether it takes any others."""
    # forward itself: the signature of a module is that of its __call__, which takes anything
    parameters = inspect.signature(model.forward).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    anything = any(one.kind is one.VAR_KEYWORD for one in parameters)
    return [one.name for one in named], [one.name for one in named if one.default is one.empty], anything
