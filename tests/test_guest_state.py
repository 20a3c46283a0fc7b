"""A guest that leaves no trace: after a check foreign modules that change themselves are bit for bit as before."""

from __future__ import annotations

import array
import copy
import gc
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests import guests_attributes as guests
from tests import guests_shy as shy
from tests import guests_weights as weights
from tests.tolerance import TOLERANCE
from torch import Tensor, nn

import sounding
from sounding.errors import TargetError
from sounding.probe.outputs import main_tensor

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
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


@pytest.mark.parametrize("name", GUESTS)
def test_a_portrait_does_not_change_by_itself_and_shows_what_a_run_changes(name: str) -> None:
    model, inputs = meet(name)
    before = portraits(model, inputs), world()
    assert (portraits(model, inputs), world()) == before


def test_there_are_forty_guests() -> None:
    assert len(GUESTS) >= 40


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", GUESTS)
def test_after_a_check_everything_is_as_it_was(name: str, mode: Any) -> None:
    model, inputs = meet(name)
    before = portraits(model, inputs), world()
    report = sounding.check(model, inputs, mode=mode)
    assert world() == before[1]
    assert portraits(model, inputs) == before[0]
    assert report.profile.select("mean_square").where(lambda row: row.layer > 0 or "exported" in name)
    assert not any("put back" in item.reason for item in report.unmeasured), report.unmeasured


@pytest.mark.parametrize("name", GUESTS)
def test_after_a_check_that_fails_everything_is_as_it_was(name: str) -> None:
    model, inputs = meet(name)
    before = portraits(model, inputs), world()

    def fail(_output: Any) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(TargetError, match="ZeroDivisionError"):
        sounding.check(model, inputs, loss=fail)
    assert (portraits(model, inputs), world()) == before


def values(model: nn.Module, inputs: Any) -> Any:
    """What a run left in a model: bits and versions, without identities, which two copies do not share."""
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [None if t.grad is None else bits(t.grad) for t in tensors if t.is_leaf]
    versions = [None if t.is_inference() else t._version for t in tensors]
    attributes = [sorted(vars(module)) for module in model.modules()]
    hooks = [[len(store) for key, store in vars(m).items() if key.endswith("_hooks")] for m in model.modules()]
    return [bits(t) for t in tensors], versions, gradients, attributes, hooks, world()


@pytest.mark.parametrize("name", [name for name in GUESTS if "inference" not in name and name != "InferenceBuffer"])
def test_a_watched_run_leaves_what_the_run_alone_leaves(name: str) -> None:
    """A watch runs nothing of its own: the same loop with and without it ends in the same bits."""

    def run(watched: bool) -> Any:
        model, inputs = meet(name)
        if watched:
            with sounding.watch(model):
                step(model, inputs)
        else:
            step(model, inputs)
        return values(model, inputs)

    def step(model: nn.Module, inputs: Any) -> None:
        output = main_tensor(call(model, inputs))
        assert output is not None
        output.sum().backward()

    assert run(True) == run(False)


OPEN = [name for name in GUESTS if name not in {
    "inference weights", "InferenceBuffer", "exported", "exported inside", "CallsNumpy", "FrozenNumpy",
}]  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_a_graph_that_was_open_before_runs_backward_after(name: str) -> None:
    """The gradients are those of a graph without a check in between, though its weights were written and put back."""
    model, inputs = meet(name)
    twin, twin_inputs = meet(name)

    def open_graph(net: nn.Module, batch: Any) -> Tensor:
        output = main_tensor(call(net, batch))
        assert output is not None
        for weight in net.parameters():
            weight.grad = None
        return output.square().sum()

    try:
        open_graph(twin, twin_inputs).backward()
    except RuntimeError:
        pytest.skip("the guest writes what it needs itself: no backward pass of its own either")
    loss = open_graph(model, inputs)
    sounding.check(model, fresh(name))
    loss.backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def fresh(name: str) -> Any:
    return GUESTS[name][1]()


def test_what_cannot_be_put_back_is_named() -> None:
    model = guests.Iterating()
    report = sounding.check(model, rows())
    assert any(item.name == "counter" and "cannot be put back" in item.reason for item in report.unmeasured)
    untouched = weights.Host()
    untouched.counter = iter([1, 2])
    assert not any("put back" in item.reason for item in sounding.check(untouched, rows()).unmeasured)


def test_what_serves_another_thread_is_left_alone_and_named() -> None:
    model = guests.Logging()
    report = sounding.check(model, rows())
    assert any(item.name == "background" and "lock" in item.reason for item in report.unmeasured)
    assert model.background.waiting.qsize() == model.background.sent == 1


def test_an_error_that_is_kept_keeps_no_copies() -> None:
    """A notebook keeps the last error, and with it the frames it came through."""
    model = nn.Linear(10007, 1)
    with pytest.raises(TargetError) as caught:
        sounding.check(model, torch.randn(3, 5))
    assert caught.value.__traceback__ is not None
    size = model.weight.untyped_storage().nbytes()
    assert not any(type(it) is Tensor and it.dtype is torch.uint8 and it.numel() == size for it in gc.get_objects())


def test_a_second_run_on_plain_inputs_leaves_gradients_alone() -> None:
    """A reentrant checkpoint accumulates into `.grad`, which must be set aside for the second run too."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(torch.from_numpy(x.numpy()))
            result: Tensor = torch.utils.checkpoint.checkpoint(self.head, hidden, use_reentrant=True)
            return result

    model = Both()
    model(rows()).sum().backward()
    before = portrait(model)
    sounding.check(model, rows())
    assert portrait(model) == before


def test_a_function_compiled_inside_a_model_runs_eagerly_while_it_is_watched() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 6)
            self.fast = torch.compile(self.slow, backend="eager", fullgraph=True)

        def slow(self, x: Tensor) -> Tensor:
            return torch.tanh(self.body.forward(x))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.fast(x)
            return result

    model = Inside()
    model(rows())
    report = sounding.check(model, rows())
    assert report.profile.select("gradient_log_norm", name="body")


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs_are_cut_into_repeats(layout: torch.layout) -> None:
    """The numbers of a layer behind them are those of the same inputs stored densely."""
    model, inputs = shy.BagOfWords(), torch.randn(16, 6).relu()
    dense = sounding.check(model, inputs, loss=torch.sum, repeats=2).profile
    sparse = sounding.check(model, inputs.to_sparse(layout=layout), loss=torch.sum, repeats=2).profile
    for measure in ("mean_square", "gradient_log_norm"):
        found, expected = (p.select(measure, name="head").rows[0].value for p in (sparse, dense))
        assert found == pytest.approx(expected, rel=TOLERANCE.float32_forward)


def test_a_memory_written_with_an_open_graph_is_a_leaf_again() -> None:
    model = weights.GraphBuffer()
    sounding.check(model, rows())
    assert model.memory.is_leaf
    assert not model.memory.requires_grad
    model(rows()).sum().backward()


def test_a_scripted_counter_is_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.linear = 0, nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.linear(x)

    model = torch.jit.script(Counting())
    sounding.check(model, rows())
    assert model.count == 0


def test_a_cache_of_the_transformers_library_is_put_back() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    cache = transformers.DynamicCache()
    model(tokens(), past_key_values=cache, use_cache=True)
    before = portrait(cache)
    report = sounding.check(model, {"input_ids": tokens(), "past_key_values": cache, "use_cache": True})
    assert portrait(cache) == before
    assert cache.get_seq_length() == 5
    assert report.profile.select("gradient_log_norm")


@pytest.mark.parametrize("name", ["ByForward", "HalfByForward"])
def test_layers_called_by_forward_are_seen_as_if_they_were_called(name: str) -> None:
    """The calls, and their numbers, are those of the same network whose layers are called."""

    class Called(shy.ByForward):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = self.act(layer(x))
            return x

    model, inputs = meet(name)
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, shy.ByForward):
            module.__class__ = Called
    found, expected = (sounding.check(net, inputs).profile for net in (model, twin))
    assert [(row.layer, row.name, row.measure) for row in found] == [
        (row.layer, row.name, row.measure) for row in expected
    ]
    assert [row.value for row in found] == pytest.approx([row.value for row in expected], nan_ok=True)
    with sounding.watch(model) as watched:
        model(inputs).sum().backward()
        clone = copy.deepcopy(model)  # a copy made meanwhile runs on its own weights
    seen = {row.name for row in watched.profile.select("gradient_log_norm")}
    assert seen >= {"layers.0" if name == "ByForward" else "two.layers.0"}
    with torch.no_grad():
        for weight in clone.parameters():
            weight.zero_()
    assert not clone(inputs).any()
    assert all("forward" not in vars(module) for module in model.modules())


def test_watches_inside_each_other_see_each_call_once() -> None:
    model, inputs = meet("HalfByForward")
    outer, inner = sounding.watch(model), sounding.watch(model)
    with outer:
        inner.__enter__()
        model(inputs)
        model.forward(inputs)
    model(inputs)  # the outer one has gone first and hears nothing more
    inner.__exit__(None, None, None)
    counts = [watched.profile.settings["repeats"] for watched in (outer, inner)]
    assert counts == [2, 3]
    assert not any("#" in row.name for row in outer.profile if not row.name.startswith("two.act"))
    assert all("forward" not in vars(module) for module in model.modules())


def test_gradients_of_a_model_that_takes_plain_inputs_only() -> None:
    model, inputs = meet("CallsNumpy")
    report = sounding.check(model, inputs)
    assert {row.name for row in report.profile.select("gradient_log_norm")} >= {"body.0", "body.2"}
    assert report.profile.select("weight_gradient_log_norm", name="body.0.weight")
    saliency, inputs = meet("Saliency")
    assert sounding.check(saliency, inputs).profile.select("weight_gradient_log_norm", name="body.0.weight")


def test_masks_do_not_speak_for_the_samples() -> None:
    """The batch is that of the tokens, not the size of the mask that stands in front."""
    model, inputs = meet("masked tokens")
    report = sounding.check(model, inputs)
    assert {row.name for row in report.profile.select("participation_ratio")} >= {"embedding", "body.head"}
    assert not any(finding.kind == "non_finite" for finding in report.verdict.findings)


def test_the_lone_input_must_still_be_finite() -> None:
    bad = rows()
    bad[0, 0] = -torch.inf
    with pytest.raises(sounding.errors.UsageError, match="expected finite inputs, got 1"):
        sounding.check(weights.Host(), bad)
