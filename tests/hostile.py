"""Trainings that a monitor can hardly measure: each case builds a model and the step of a loop that trains it.

A case is a function that gives (model, optimizer, step); `step()` runs forward, backward and update once.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

WIDTH, SAMPLES = 8, 12
Step = Callable[[], object]
Made = tuple[nn.Module, torch.optim.Optimizer, Step]


def plain(**options: Any) -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH, **options), nn.Tanh(), nn.Linear(WIDTH, WIDTH, **options), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3, **options))


def batch(**options: Any) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3)).to(**options)


def loop(model: nn.Module, loss: Callable[[], Tensor], rate: float = 0.1) -> Made:
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=rate)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return model, optimizer, step


def per_sample_gradients() -> Made:
    """Every sample's gradient by vmap over grad, as in differentially private training."""
    model, inputs = plain(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, weights, (sample[None],)).square().sum()

    def step() -> None:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        found = vmap(grad(loss), (None, 0))(weights, inputs)
        for name, weight in model.named_parameters():
            weight.grad = found[name].mean(0)
        optimizer.step()

    return model, optimizer, step


def vectorized() -> Made:
    model, inputs = plain(), batch()
    return loop(model, lambda: vmap(model)(inputs).square().mean())


def jacobian() -> Made:
    model, inputs = plain(), batch()
    return loop(model, lambda: vmap(jacrev(model))(inputs).square().mean() + model(inputs).square().mean())


def reverse_jacobian() -> Made:
    """The old way: many backward passes through one forward pass, vectorized."""
    model, inputs = plain(), batch()

    def loss() -> Tensor:
        torch.autograd.functional.jacobian(model, inputs, vectorize=True)
        return model(inputs).square().mean()

    return loop(model, loss)


def nested(layout: torch.layout) -> Callable[[], Made]:
    def make() -> Made:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        parts = [batch()[:2], batch()[:5]]

        def loss() -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
                ragged = torch.nested.nested_tensor(parts, layout=layout)
                return sum((part.square().sum() for part in model(ragged).unbind()), torch.zeros(()))

        return loop(model, loss)

    return make


def frozen_script() -> Made:
    """A frozen script inside a trained model; its weights are constants of its graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the end of scripts
        body = torch.jit.freeze(torch.jit.script(plain().eval()))  # type: ignore[no-untyped-call]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), body, nn.Linear(3, 3))
    inputs = batch()
    return loop(model, lambda: model(inputs).square().mean())


def frozen_whole() -> Made:
    """The monitored model is the frozen script itself; something around it is trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        body = torch.jit.freeze(torch.jit.script(plain().eval()))  # type: ignore[no-untyped-call]
    front, inputs = nn.Linear(WIDTH, WIDTH), batch()
    optimizer = torch.optim.SGD(front.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        body(front(inputs)).square().mean().backward()
        optimizer.step()

    return body, optimizer, step


def divergent(scale: float) -> Callable[[], Made]:
    """A float64 run whose values are finite while their squares are not."""

    def make() -> Made:
        model, inputs = plain(dtype=torch.float64), batch(dtype=torch.float64)
        with torch.no_grad():
            model[2].weight.mul_(scale)  # type: ignore[operator]
        return loop(model, lambda: model(inputs).mean(), rate=scale)

    return make


class Odd(nn.Module):
    """Returns what the function makes of its child's output; the loss looks inside again."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.wrap = nn.Linear(WIDTH, WIDTH), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.inner(x))


class Grumpy:
    """An object that refuses every question."""

    def __init__(self, held: Tensor) -> None:
        object.__setattr__(self, "held", held)

    def __getattribute__(self, name: str) -> Any:
        if name == "held":
            return object.__getattribute__(self, name)
        raise RuntimeError(f"I have no {name}")


def endless(held: Tensor) -> list[Any]:
    found: list[Any] = [held]
    found.append(found)
    return found


def odd(wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> Callable[[], Made]:
    def make() -> Made:
        module, head, inputs = Odd(wrap), nn.Linear(WIDTH, 3), batch()

        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.module, self.head = module, head

            def forward(self, x: Tensor) -> Tensor:
                return self.head(unwrap(self.module(x)))

        model = Whole()
        return loop(model, lambda: model(inputs).square().mean())

    return make


class Refusing(Tensor):
    """A subclass that allows what a linear layer and a loss need, and nothing that measures."""

    ALLOWED = ("linear", "relu", "square", "mean", "tanh", "backward", "requires_grad", "__get__", "as_subclass")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ not in cls.ALLOWED:
            raise TypeError(f"no {function.__name__} for you")
        return super().__torch_function__(function, types, args, kwargs or {})


def refusing() -> Made:
    model, inputs = plain(), batch().as_subclass(Refusing)
    return loop(model, lambda: model(inputs).square().mean().as_subclass(Tensor))


def sparse() -> Made:
    model = nn.Sequential(nn.Embedding(20, WIDTH, sparse=True), nn.Linear(WIDTH, 3))
    tokens = torch.arange(SAMPLES)
    return loop(model, lambda: model(tokens).square().mean())


def sparse_outputs() -> Made:
    return odd(lambda held: held.relu().to_sparse(), lambda held: held.to_dense())()


def complex_values() -> Made:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.complex64), nn.Linear(WIDTH, 3, dtype=torch.complex64))
    inputs = batch(dtype=torch.complex64)
    return loop(model, lambda: model(inputs).abs().mean())


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


class Blunt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return NoBackward.apply(x)  # type: ignore[no-any-return]


def no_backward() -> Made:
    """A function without a backward pass on a side branch that the loss does not ask."""
    side, model, inputs = Blunt(), plain(), batch()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.side, self.main = side, model

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.main(x), self.side(self.main(x))

    whole = Whole()
    return loop(whole, lambda: whole(inputs)[0].square().mean())


def double_backward() -> Made:
    model, inputs = plain(), batch().requires_grad_()

    def loss() -> Tensor:
        outputs = model(inputs).square().sum()
        (penalty,) = torch.autograd.grad(outputs, inputs, create_graph=True)
        return outputs + penalty.square().sum()

    return loop(model, loss, rate=0.001)


def retained() -> Made:
    model, inputs = plain(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()

    return model, optimizer, step


def closures() -> Made:
    model, inputs = plain(), batch()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def close() -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    return model, optimizer, lambda: optimizer.step(close)


def threads() -> Made:
    """Two threads run the model at the same time; only one of them trains."""
    model, inputs = plain(), batch()

    def loss() -> Tensor:
        other = threading.Thread(target=lambda: [model(inputs[:4]).sum() for _ in range(5)])
        other.start()
        found = model(inputs).square().mean()
        other.join()
        return found

    return loop(model, loss)


def double_call_of_a_changing_batch() -> Made:
    """The batch size changes between the calls of one step, down to an empty one."""
    model, inputs = plain(), batch()
    return loop(model, lambda: model(inputs).square().mean() + model(inputs[:1]).sum() + model(inputs[:0]).sum())


def zero_dimensional() -> Made:
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    return loop(model, lambda: model(torch.ones(1)).sum())


def warnings_are_errors() -> Made:
    model, inputs = plain(), batch()

    def loss() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return model(inputs).square().mean()

    return loop(model, loss)


def traced() -> Made:
    """The model is traced between two steps: what a hook computes would become part of the graph."""
    model, inputs = plain(), batch()

    def loss() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = str(torch.jit.trace(model, (inputs,)).graph)  # type: ignore[no-untyped-call]
        assert "aten::detach" not in graph
        return model(inputs).square().mean()

    return loop(model, loss)


def faked() -> Made:
    model, inputs = plain(), batch()

    def loss() -> Tensor:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.empty(SAMPLES, WIDTH))
        return model(inputs).square().mean()

    return loop(model, loss)


def selectively_checkpointed() -> Made:
    """Products are kept and the rest is computed again: a product of ours would be taken for one of the model's."""
    model, inputs = plain(), batch()
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]

    def loss() -> Tensor:
        policy = lambda: create_selective_checkpoint_contexts(products)  # noqa: E731
        return checkpoint(model, inputs, use_reentrant=False, context_fn=policy).square().mean()

    return loop(model, loss)


def counted() -> Made:
    """The user counts operations, and gets the same number."""
    model, inputs = plain(), batch()

    def loss() -> Tensor:
        with FlopCounterMode(display=False) as counter:
            found = model(inputs).square().mean()
        return found * counter.get_total_flops()

    return loop(model, loss, rate=1e-6)


class Case(NamedTuple):
    make: Callable[[], Made]
    seen: bool  # whether something of the step can be measured


CASES: dict[str, Case] = {
    "per-sample gradients": Case(per_sample_gradients, False),
    "vmap": Case(vectorized, False),
    "jacrev": Case(jacobian, True),
    "vectorized jacobian": Case(reverse_jacobian, True),
    "nested, strided": Case(nested(torch.strided), False),
    "nested, jagged": Case(nested(torch.jagged), False),
    "frozen script inside": Case(frozen_script, True),
    "frozen script": Case(frozen_whole, True),
    "float64 beyond 1e154": Case(divergent(1e160), True),
    "float64 beyond 1e300": Case(divergent(1e306), True),
    "returns None": Case(odd(lambda held: (None, held), lambda held: held[1]), True),
    "returns an object": Case(odd(Grumpy, lambda held: held.held), True),
    "returns itself": Case(odd(endless, lambda held: held[0]), True),
    "returns a number": Case(odd(lambda held: [held, 3], lambda held: held[0]), True),
    "refusing subclass": Case(refusing, False),
    "sparse gradients": Case(sparse, True),
    "sparse outputs": Case(sparse_outputs, True),
    "complex": Case(complex_values, True),
    "no backward": Case(no_backward, True),
    "double backward": Case(double_backward, True),
    "retain_graph": Case(retained, True),
    "LBFGS": Case(closures, True),
    "threads": Case(threads, True),
    "empty batch": Case(double_call_of_a_changing_batch, True),
    "one value": Case(zero_dimensional, True),
    "jit.trace": Case(traced, True),
    "fake tensors": Case(faked, True),
    "selective checkpoint": Case(selectively_checkpointed, False),
    "operations counted": Case(counted, False),
    "warnings are errors": Case(warnings_are_errors, True),
}
