"""A guest that leaves no trace: after a check foreign modules that change themselves are bit for bit as before."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from tests import guests_attributes as guests
from tests import guests_shy as shy
from tests import guests_weights as weights
from tests.guests import GUESTS, bits, call, meet, portrait, portraits, rows, tokens, world
from torch import Tensor, nn

import sounding
from sounding.errors import TargetError
from sounding.probe.outputs import main_tensor
from sounding.probe.state import SETTINGS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
# Guests whose own run changes nothing: they are here for buffers that resist being copied, or for `train()`.
STILL = {"ExpandedBuffer", "InferenceBuffer", "inference weights", "merged lora"}


@pytest.mark.parametrize("name", GUESTS)
def test_a_portrait_changes_with_a_run_and_not_by_itself(name: str) -> None:
    """The comparison that follows is none that cannot fail: a plain run of a guest that changes things shows in it."""
    model, inputs = meet(name)
    before = portraits(model, inputs), world()
    assert (portraits(model, inputs), world()) == before
    if name not in STILL and GUESTS[name][0].__module__ != shy.__name__:
        call(model, inputs)
        assert (portraits(model, inputs), world()) != before


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


def values(model: nn.Module) -> Any:
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
        return values(model)

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
    report = sounding.check(model, rows(), theory=False)  # reading would run it once more
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


def test_what_a_model_sets_for_the_whole_process_is_put_back() -> None:
    """Hooks on all modules, defaults of torch, deterministic mode, filters of warnings: also when the model raises."""

    class Rude(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nn.modules.module.register_module_forward_hook(lambda *_: None)
            nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
            output = super().forward(x)
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("cpu")  # it was None
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.set_grad_enabled(False)
            torch.set_num_threads(threads + 1)
            torch.backends.cudnn.benchmark = not benchmark
            warnings.simplefilter("ignore")
            if self.raises:
                raise RuntimeError("on purpose")
            return output

    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    model = Rude(6, 3)
    model.raises = False
    sounding.check(model, rows())  # loads what is loaded at the first use, with filters of its own
    before = [read() for read, _ in SETTINGS]
    sounding.check(model, rows())
    assert [read() for read, _ in SETTINGS] == before
    model.raises = True
    with pytest.raises(TargetError):
        sounding.check(model, rows())
    assert [read() for read, _ in SETTINGS] == before
    assert (torch.zeros(1).device.type, torch.zeros(1).dtype) == ("cpu", torch.float32)
