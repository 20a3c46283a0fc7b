"""Plans: what is shown is what is done, what is done is undone bit for bit, and nothing else is touched."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sounding
from sounding.errors import NumericalError, UsageError
from sounding.measures import of_gram
from sounding.models import Mlp
from sounding.repair import METHODS, haar_, orthogonalize_
from sounding.repair.evidence import jackknife
from sounding.repair.methods import choose_methods
from tolerance import TOLERANCE, assert_within_standard_errors

OPTIONS: dict[str, dict[str, Any]] = {
    "swap_normalization": {"kind": "layer"},
    "raise_rank": {"batches": 2, "steps": 1},
    "tune_batchnorm": {"shift": 0.5, "eps": 0.1},
    "scale_branches": {"rule": "deepnorm"},  # one branch has the factor 1 by the others
}


class Block(nn.Module):
    """A residual block with a buffer, a plain attribute and a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16))
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        total: Tensor = x + self.branch(x)
        return total


def make_network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), Block(), nn.Linear(16, 4))


def make_tokens(seed: int = 0) -> nn.Sequential:
    """A network with an embedding and attention, for cures of these."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Embedding(20, 16), layer, nn.Linear(16, 20))


class Frozen(nn.BatchNorm1d):
    """A batch norm that never leaves evaluation mode."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


# What mends a fault refuses a network without it: the fault that each looks for.
FAULTS: dict[str, Callable[[nn.Sequential], object]] = {
    "redraw": lambda model: model[3].branch[0].weight.data.fill_(0.1),
    "unclone": lambda model: model[3].branch[3].weight.data.copy_(model[3].branch[0].weight),
    "zero_biases": lambda model: model[0].bias.data.fill_(100.0),
    "reset_norms": lambda model: model[1].weight.data.fill_(0.03),
    "scale_embeddings": lambda model: model[0].weight.data.mul_(1000),
    "batch_statistics": lambda model: model.__setitem__(1, Frozen(16)),
}


def make_inputs(count: int = 48, features: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(seed))


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a repair may touch, by name, bits for values."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name}:class"] = type(module)
        found[f"{name}:id"] = id(module)
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str):
                found[f"{name}:{key}"] = value
            elif isinstance(value, list):
                found[f"{name}:{key}"] = list(value)
            elif isinstance(value, dict):
                found[f"{name}:{key}"] = [(inner, id(item)) for inner, item in value.items()]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[f"{name}:bits"] = tensor.detach().numpy().tobytes()
        found[f"{name}:requires_grad"] = tensor.requires_grad
        found[f"{name}:grad"] = id(tensor.grad)
    return found


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_changes_nothing_then_everything_then_nothing(method: str) -> None:
    """For every method: dry run, apply and undo leave the bits they promise; the evidence is about what is applied."""
    tokens = method in ("scale_embeddings", "qk_norm")
    model = make_tokens() if tokens else make_network()
    handle = model[0].register_forward_hook(lambda *_: None)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    if method == "add_batchnorm":
        model[1] = nn.Identity()
    model.train(False)
    FAULTS.get(method, lambda _: None)(model)
    before = fingerprint(model)
    inputs = torch.randint(0, 20, (8, 6), generator=generator(1)) if tokens else make_inputs()
    options = {method: OPTIONS[method]} if method in OPTIONS else None
    plan = sounding.plan(model, inputs, method=method, options=options, generator=generator())
    assert fingerprint(model) == before
    assert plan.methods == (method,)
    assert any(changes.changed for changes in plan.changes)
    plan.apply()
    assert plan.applied
    changed = fingerprint(model)
    assert changed != before
    again = sounding.check(model, inputs, generator=generator())
    # without targets the check draws its direction: forward measures do not depend on it
    for row in plan.evidence.after.profile.rows:
        if row.measure == "participation_ratio" and row.source == "check":
            assert row in again.profile.rows
    plan.undo()
    assert fingerprint(model) == before
    handle.remove()
    assert len(model[0]._forward_hooks) == 0
    plan.apply()
    assert fingerprint(model) == changed | {"0:_forward_hooks": []}


@settings(max_examples=15, deadline=None)
@given(
    names=st.lists(st.sampled_from(["haar", "xavier", "lsuv", "tune_batchnorm", "shape_activations"]), unique=True),
    seed=st.integers(0, 99),
)
def test_any_combination_is_undone_bit_for_bit(names: list[str], seed: int) -> None:
    # shaped activations differ from layer to layer, and tuning is for one activation behind all norms
    assume(not {"tune_batchnorm", "shape_activations"} <= set(names))
    model = make_network(seed)
    before = fingerprint(model)
    options = {name: OPTIONS[name] for name in names if name in OPTIONS}
    plan = sounding.plan(model, make_inputs(seed=seed), method=names, options=options, generator=generator(seed))
    plan.apply()
    plan.undo()
    assert fingerprint(model) == before


def test_a_plan_applies_the_draw_it_examined() -> None:
    """The same generator gives the plan and the plain function the same weights: nothing is drawn twice."""
    model, inputs = make_network(), make_inputs()
    direct = copy.deepcopy(model)
    haar_(direct, generator=generator(3))
    plan = sounding.plan(model, inputs, method="haar", generator=generator(3))
    plan.apply()
    for (name, ours), theirs in zip(model.named_parameters(), direct.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_methods_run_in_the_order_given() -> None:
    model, inputs = make_network(), make_inputs()
    first = sounding.plan(model, inputs, method=["haar", "xavier"], generator=generator())
    first.apply()
    assert not torch.allclose(model[4].weight @ model[4].weight.T, torch.eye(4), atol=TOLERANCE.float32_forward)
    first.undo()
    sounding.plan(model, inputs, method="xavier,haar", generator=generator()).apply()
    assert torch.allclose(model[4].weight @ model[4].weight.T, torch.eye(4), atol=TOLERANCE.float32_forward)


def test_undo_after_training_brings_back_the_untrained_model() -> None:
    model, inputs = make_network(), make_inputs()
    plan = sounding.plan(model, inputs, method="add_batchnorm,haar", generator=generator())
    before = fingerprint(model)
    plan.apply()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    model.register_buffer("scratch", torch.ones(2))
    plan.undo()
    assert fingerprint(model) == before


def test_apply_keeps_what_happened_outside_the_cure() -> None:
    """Running statistics that moved and a hook that was added between plan and apply are the user's."""
    model, inputs = make_network(), make_inputs()
    plan = sounding.plan(model, inputs, method="haar", generator=generator())
    model(inputs)
    calls: list[int] = []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    moved = model[1].running_mean.clone()
    plan.apply()
    assert torch.equal(model[1].running_mean, moved)
    model(inputs)
    assert calls == [1]


def test_wrong_order_of_steps_is_told() -> None:
    model = make_network()
    plan = sounding.plan(model, make_inputs(), method="haar", generator=generator())
    with pytest.raises(UsageError, match="nothing to undo"):
        plan.undo()
    plan.apply()
    with pytest.raises(UsageError, match="applied already"):
        plan.apply()
    plan.undo()
    with pytest.raises(UsageError, match="nothing to undo"):
        plan.undo()
    with torch.no_grad():
        model[0].weight[0, 0] += 1
    with pytest.raises(UsageError, match=r"has changed since the plan was made \(0.weight\)"):
        plan.apply()
    model[0] = nn.Linear(8, 16)
    with pytest.raises(UsageError, match="its modules"):
        plan.apply()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "hare"}, "unknown method 'hare'"),
        ({"method": ""}, "expected the name of a method"),
        ({"method": ["haar", "haar"]}, "each method once"),
        ({"method": "haar", "options": {"haar": {"grain": 1}}}, "haar has no option 'grain'"),
        ({"method": "haar", "options": {"he": {}}}, "not among the methods"),
        ({"method": "swap_normalization"}, "needs the option 'kind'"),
        ({"method": "raise_rank", "options": {"raise_rank": {"target": 1000.0}}}, "target"),
        ({"method": "haar", "options": {"haar": {"gain": math.nan}}}, "gain must be finite"),
    ],
)
def test_bad_plans_are_refused_and_the_model_is_as_it_was(arguments: dict[str, Any], message: str) -> None:
    model = make_network()
    before = fingerprint(model)
    with pytest.raises(UsageError, match=message):
        sounding.plan(model, make_inputs(), generator=generator(), **arguments)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (make_network(), torch.full((4, 8), math.nan), "finite"),
        (make_network(), make_inputs(1), "at least 2 samples"),
        (make_network(), "digits", "expected inputs as a tensor"),
        (make_network(), make_inputs(features=9), "raised"),
        (nn.ReLU(), make_inputs(), "with none"),
        ("network", make_inputs(), "expected a torch.nn.Module"),
        (nn.LazyLinear(4), make_inputs(), "lazy"),
        (nn.Linear(8, 4, device="meta"), make_inputs(), "meta"),
        (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).requires_grad_(False), make_inputs(), "frozen"),
    ],
)
def test_bad_models_and_inputs_are_refused(model: Any, inputs: Any, message: str) -> None:
    with pytest.raises((UsageError, sounding.errors.TargetError), match=message):
        sounding.plan(model, inputs, method="haar" if message != "raised" else "lsuv")


def test_a_plan_that_changes_nothing_is_refused_with_the_reason() -> None:
    model = Mlp(6, 3, depth=3, width=8, norm="batch")
    with pytest.raises(UsageError, match=r"finds nothing to change; 1\.linear: a norm follows it already"):
        sounding.plan(model, make_inputs(features=6), method="add_batchnorm")


@pytest.mark.parametrize("error", [KeyboardInterrupt, NumericalError("boom")])
def test_interrupted_in_the_middle_the_model_is_as_it_was(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second cure fails after the first has changed every weight."""
    model = make_network()
    before = fingerprint(model)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(nn.Tanh, "forward", fail)
    with pytest.raises((KeyboardInterrupt, sounding.errors.SoundingError)):
        sounding.plan(model, make_inputs(), method="haar,shape_activations", generator=generator())
    assert fingerprint(model) == before


@pytest.mark.slow
def test_the_cure_that_causes_the_other_illness_is_found_out() -> None:
    """Orthogonalizing a 50-layer ReLU network cures its collapse and makes its gradients explode."""
    for seed in range(3):
        model = Mlp(64, 10, depth=50, width=128, generator=generator(seed))
        drawn = [make_inputs(256, 64, seed=10 + seed) for _ in range(2)]
        plan = sounding.plan(
            model,
            make_inputs(512, 64, seed=seed),
            method="orthogonalize",
            fresh=lambda drawn=drawn: (drawn.pop(), None),
            generator=generator(seed),
        )
        evidence = plan.evidence
        assert "rank_collapse" in {finding.kind for finding in evidence.cured}
        assert [finding.severity for finding in evidence.caused if finding.kind == "gradient_explosion"] == ["high"]
        assert not evidence.healthy
        low, _ = evidence.vitals_after.growth_interval
        # at least a thousandfold in norm over 50 layers, with confidence
        assert 0.5 * 50 * math.log(low) > math.log(1000)
        assert "CAUSED     gradient_explosion" in str(plan)
        assert (
            evidence.vitals_before.participation_ratio.interval()[1] < evidence.vitals_after.participation_ratio.value
        )


def test_evidence_is_the_check_of_both_models() -> None:
    """The plan's reports are those of `sounding.check` on the model and on one that was repaired by hand."""
    model = Mlp(64, 10, depth=6, width=64, generator=generator(1))
    inputs, targets = make_inputs(128, 64), torch.arange(128) % 10
    plan = sounding.plan(model, inputs, targets, method="orthogonalize", generator=generator(2))
    assert plan.evidence.before.profile == sounding.check(model, inputs, targets).profile
    orthogonalize_(model, inputs, generator=generator(2))
    assert plan.evidence.after.profile == sounding.check(model, inputs, targets).profile
    growth = plan.evidence.vitals_after
    assert growth.growth_interval[0] <= growth.growth.value <= growth.growth_interval[1]
    assert growth.trainable_depth == pytest.approx(16 / abs(math.log(growth.growth.value)))


def test_the_jackknife_error_is_the_scatter_over_batches() -> None:
    """Two routes to the error of a participation ratio: groups left out of one batch, and fresh batches."""
    draws = torch.randn(200, 128, 32, generator=generator()).double() * torch.linspace(0.1, 2, 32)
    estimates = [jackknife(rows @ rows.T, of_gram.participation_ratio) for rows in draws]
    values = torch.tensor([estimate.value for estimate in estimates])
    told = torch.tensor([float(estimate.stderr or 0) for estimate in estimates]).square().mean().sqrt()
    scatter = values.std()
    # the scatter of 200 draws is known to 1/√400 of itself; the jackknife is biased upwards by a few percent
    assert_within_standard_errors(float(told), float(scatter), float(scatter) / 20, allowance=0.1 * float(scatter))


def test_a_plan_prints_and_serializes() -> None:
    model = make_network()
    plan = sounding.plan(
        model, make_inputs(), method=["haar", "tune_batchnorm"], options={"tune_batchnorm": {"shift": 1}}
    )
    text = str(plan)
    assert text.startswith("Plan (not applied): haar + tune_batchnorm")
    assert "gradient² per layer" in text
    assert plan.recipe() == "sounding.repair.tune_batchnorm_(model, inputs, shift=1)"
    told = plan.to_dict()
    assert json.loads(json.dumps(told, default=str))["methods"] == ["haar", "tune_batchnorm"]
    assert sounding.plan(model, make_inputs(), method=()).methods == ()


def test_a_recipe_and_a_state_dict_rebuild_the_repaired_model() -> None:
    """What the weights file does not hold is what the recipe makes."""
    model, inputs = make_network(), make_inputs()
    plan = sounding.plan(
        model,
        inputs,
        method="add_batchnorm,tune_batchnorm,shape_activations",
        options={"tune_batchnorm": {"eps": 0.2}},
        generator=generator(),
    )
    plan.apply()
    made = make_network(seed=5)
    exec(plan.recipe(), {"sounding": sounding, "model": made, "inputs": inputs})
    made.load_state_dict(model.state_dict())
    assert torch.equal(made(inputs), model(inputs))


def test_wrapped_models_are_looked_through() -> None:
    model = make_network()
    plan = sounding.plan(nn.DataParallel(model), make_inputs(), method="haar", generator=generator())
    plan.apply()
    assert plan.model is model


def test_tied_weights_stay_tied_and_parameters_stay_themselves() -> None:
    """An optimizer made before the repair must go on training the same tensors."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    held = list(model.parameters())
    plan = sounding.plan(model, make_inputs(), method="add_batchnorm,haar", generator=generator())
    plan.apply()
    assert model[2].weight is model[0].weight
    assert all(any(parameter is mine for mine in model.parameters()) for parameter in held)


def test_every_method_is_a_public_function_with_words() -> None:
    for name, method in METHODS.items():
        assert hasattr(sounding.repair, f"{name}_")
        assert all([method.purpose, method.cost, method.side_effects])
        chosen, _ = choose_methods(f"{name}_", {name: OPTIONS.get(name, {})})[0]
        assert chosen is method
