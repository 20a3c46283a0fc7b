"""The foreign modules with their inputs, and a portrait of all that hangs on them, to compare two moments."""

from __future__ import annotations

import array
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests import guests_attributes as guests
from tests import guests_shy as shy
from tests import guests_weights as weights
from torch import Tensor, nn

SAMPLES = 8


def rows() -> Tensor:
    return torch.randn(SAMPLES, weights.WIDTH)


def tokens() -> Tensor:
    return torch.randint(0, 11, (SAMPLES, 5))


def with_cache(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: {"x": rows(), "cache": make()}


def with_mask() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, 5, 8), shy.causal(5)


def graph() -> tuple[Tensor, Tensor]:
    return torch.eye(SAMPLES).to_sparse(), rows()


GUESTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    **{
        kind.__name__: (kind, rows)
        for kind in (
            weights.ClampedByData, weights.ClampedInPlace, weights.ClampedThroughNumpy, weights.UnitRows,
            weights.WrittenStorage, weights.NewParameter, weights.InnerOptimizer, weights.MomentumInside,
            weights.MomentumTeacher, weights.Hebbian, weights.FlatWeights, weights.FrozenOnTheFly,
            weights.InnerBackward, weights.Taught, weights.Half, weights.ExpandedBuffer, weights.InferenceBuffer,
            weights.SparseBuffer, weights.QuantizedBuffer, weights.QueueBuffer, weights.GraphBuffer,
            weights.GrowingBuffer, weights.PlainTensors, weights.DelayedNorm, guests.Counters, guests.Nested,
            guests.Arrays, guests.Metered, guests.DropsAttribute, guests.NewLayers, guests.Switches,
            guests.OwnGenerators, guests.GlobalGenerators, guests.Reseeds, guests.SharedGenerator,
            guests.HooksAddHooks, guests.RemovesItself, shy.Saliency, shy.ReadsGrad, shy.CallsNumpy, shy.FrozenNumpy,
            shy.ByForward, shy.HalfByForward, shy.Patched,
        )
    },
    "max norm": (weights.MaxNormEmbedding, tokens),
    "max norm bag": (weights.MaxNormBag, tokens),
    "merged lora": (weights.merged_lora, rows),
    "inference weights": (weights.inference_weights, rows),
    "passed cache": (guests.Cached, with_cache(guests.Cache)),
    "passed list": (guests.Cached, with_cache(list)),
    "passed dict": (guests.Cached, with_cache(dict)),
    "masked": (shy.Masked, with_mask),
    "masked tokens": (shy.MaskedTokens, lambda: (shy.causal(5), tokens())),
    "sparse": (shy.SparseInput, graph),
    "sparse alone": (shy.BagOfWords, lambda: torch.randn(SAMPLES, weights.WIDTH).relu().to_sparse()),
    "compressed": (shy.SparseInput, lambda: (torch.eye(SAMPLES).to_sparse_csr(), rows())),
    "exported": (shy.exported, rows),
    "exported inside": (shy.exported_inside, rows),
}  # fmt: skip


def portrait(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Everything that hangs on a value, in plain types: bits, versions, flags, identities, orders, random states."""
    seen = {} if seen is None else seen
    if callable(value) and not isinstance(value, nn.Module):
        return id(value)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if id(value) in seen:
        return id(value)
    seen[id(value)] = value
    return (id(value), type(value).__name__, _inside(value, seen))


def portraits(*values: Any) -> list[Any]:
    seen: dict[int, Any] = {}
    return [portrait(value, seen) for value in values]


def _inside(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        hooks = [list(getattr(value, name, None) or ()) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]
        gradient = portrait(value.grad, seen) if value.is_leaf else None
        version = None if value.is_inference() else value._version
        return (version, value.requires_grad, value.is_leaf, bits(value), gradient, hooks, portrait(vars(value), seen))
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, bytearray | array.array | torch.fx.Graph):
        return repr(value)
    if isinstance(value, dict):
        return [(repr(key) if isinstance(key, str) else id(key), portrait(item, seen)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return [portrait(item, seen) for item in value]
    if isinstance(value, set):
        return sorted(map(repr, value))
    names = [f"_{type(value).__name__}{n}" if n[:2] == "__" else n for n in getattr(type(value), "__slots__", ())]
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}
    foreign = type(value).__module__.startswith("tests.")
    own = {name: item for name, item in vars(type(value)).items() if foreign and not name.startswith("__")}
    if isinstance(value, torch.jit.ScriptModule):
        return [portrait(tensor, seen) for tensor in (*value.parameters(), *value.buffers())]
    return [portrait(getattr(value, "__dict__", None), seen), _inside(held, seen), _inside(own, seen)]


def bits(tensor: Tensor) -> Any:
    if tensor.layout is torch.sparse_coo:
        return bits(tensor._indices()), bits(tensor._values())
    if tensor.layout is torch.sparse_csr:
        return bits(tensor.crow_indices()), bits(tensor.col_indices()), bits(tensor.values())
    tensor = tensor.int_repr() if tensor.is_quantized else tensor.detach()
    copied = tensor.reshape(-1).clone()  # a tensor that numpy has seen cannot be resized any more
    return tuple(tensor.shape), tensor.stride(), copied.view(torch.uint8).numpy().tobytes()


def world() -> Any:
    return (
        torch.get_rng_state().tolist(),
        repr(np.random.get_state()),  # noqa: NPY002
        random.getstate(),
        torch.is_grad_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.get_default_dtype(),
    )


def meet(name: str) -> tuple[nn.Module, Any]:
    """The guest and its inputs; every other parameter already has a gradient."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - guests use the global one
    random.seed(0)
    build, inputs = GUESTS[name]
    model = build()
    for index, weight in enumerate(model.parameters()):
        if index % 2 and weight.is_floating_point() and not weight.is_inference():
            weight.grad = torch.full_like(weight, 7.0)
    return model, inputs()


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
