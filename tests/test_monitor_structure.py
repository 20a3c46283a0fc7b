"""What a monitor remembers of a model between measured steps: used again while it holds, never beyond."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.test_monitor import batch, hooks_on, network, numbers, watched_numbers
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations

from sounding import watch
from sounding.probe.moments import BLOCK, SHAPES, Tier
from sounding.train.monitor import Monitor
from sounding.train.monitor.structure import Structure


def replace_layer(model: nn.Sequential) -> None:
    model[2] = nn.Linear(16, 16, bias=False)


def replace_activation(model: nn.Sequential) -> None:
    model[1] = nn.Tanh()


def append_layers(model: nn.Sequential) -> None:
    model.extend([nn.ReLU(), nn.Linear(4, 4)])


def take_a_layer_away(model: nn.Sequential) -> None:
    del model[3]


def rename_a_layer(model: nn.Sequential) -> None:
    names = {"2": "middle"}
    held = [(names.get(name, name), child) for name, child in model._modules.items()]
    model._modules.clear()
    model._modules.update(held)


def replace_a_parameter(model: nn.Sequential) -> None:
    model[4].weight = nn.Parameter(torch.randn(16, 16))


def drop_a_parameter(model: nn.Sequential) -> None:
    model[4].register_parameter("bias", None)


def freeze(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


def parametrize(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[2])


def wrap_a_layer(model: nn.Sequential) -> None:
    model[2] = nn.Sequential(model[2])


def change_class(model: nn.Sequential) -> None:
    model[1].__class__ = nn.Hardswish  # type: ignore[assignment]


def change_dtype(model: nn.Sequential) -> None:
    model.bfloat16().float()


def move_bounds(model: nn.Sequential) -> None:
    for module in model:
        if isinstance(module, nn.Hardtanh):
            module.min_val, module.max_val = -0.05, 0.05


CHANGES = (
    replace_layer,
    replace_activation,
    append_layers,
    take_a_layer_away,
    rename_a_layer,
    replace_a_parameter,
    drop_a_parameter,
    freeze,
    parametrize,
    wrap_a_layer,
    change_class,
    change_dtype,
    move_bounds,
)


def bounded_network() -> nn.Sequential:
    model = network()
    model[5] = nn.Hardtanh(-0.2, 0.2)
    return model


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_changed_between_measured_steps_is_seen_as_it_is(change: Callable[[nn.Sequential], None]) -> None:
    model = bounded_network()
    inputs, targets = batch()

    def run() -> None:
        model.zero_grad()
        cross_entropy(model(inputs), targets).backward()

    with Monitor(model, every=2) as monitor:
        run()
        monitor.step()
        before = numbers(monitor.profiles[0])
        run()
        change(model)
        monitor.step()
        run()
        monitor.step()
        settings = monitor.profiles[2].settings
    assert hooks_on(model) == 0
    assert numbers(monitor.profiles[2]) == watched_numbers(model, run) != before
    assert settings["parameters"] == sum(weight.numel() for weight in model.parameters())


def test_lazy_modules_are_looked_at_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(4))
    inputs, targets = batch()

    def run() -> None:
        model.zero_grad()
        cross_entropy(model(inputs), targets).backward()

    with Monitor(model, every=1) as monitor:
        for _ in range(3):
            run()
            monitor.step()
    expected = watched_numbers(model, run)
    assert numbers(monitor.profiles[0]) == numbers(monitor.profiles[2]) == expected


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_training_changes_is_no_change_of_structure() -> None:
    model = nn.Sequential(network(), torch.jit.script(nn.Linear(4, 4)))
    structure = Structure(model)
    inputs, targets = batch()
    optimizer = torch.optim.Adam(model.parameters())
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    model.load_state_dict(model.state_dict())
    next(model.parameters()).requires_grad_(False)
    assert structure.is_same()
    model.append(nn.ReLU())
    assert not structure.is_same()


def test_a_step_leaves_nothing_for_the_next() -> None:
    """Windows share what they know of the model; what they collect is their own."""
    model = network()
    inputs, targets = batch()
    with Monitor(model, every=1) as monitor:
        cross_entropy(model(inputs), targets).backward()
        monitor.step()
        first = numbers(monitor.profiles[0])
        monitor.step()  # no forward pass: nothing to record
        model.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        monitor.step()
        assert list(monitor.profiles) == [0, 2]
    assert numbers(monitor.profiles[2]) == first


@pytest.mark.parametrize("measures", ["fast", "full"])
def test_batches_of_all_sizes_one_after_another(measures: Tier) -> None:
    """Blocks are kept between steps: none may show what an earlier, larger or unfinished step left in it."""
    model = network()
    inputs, targets = batch(96)

    def run(samples: int) -> None:
        model.zero_grad()
        cross_entropy(model(inputs[:samples]), targets[:samples]).backward()

    sizes = (48, 7, 48, 2, 96, 13, 64, 48)
    with Monitor(model, every=1, measures=measures) as monitor:
        for step, samples in enumerate(sizes):
            if step == 3:
                with pytest.raises(RuntimeError):
                    model[:3](torch.zeros(5, 3))
            run(samples)
            monitor.step()
    for step, samples in enumerate(sizes):
        with watch(model, tier=measures) as watched:
            run(samples)
        assert numbers(monitor.profiles[step]) == numbers(watched.profile)


def test_what_is_kept_between_steps_is_bounded() -> None:
    """At most four shapes, each of the size of a block, however many a run has seen."""
    model = network()
    inputs, targets = batch(96)
    with Monitor(model, every=1) as monitor:
        for samples in range(2, 40):
            cross_entropy(model(inputs[:samples]), targets[:samples]).backward()
            monitor.step()
    blocks = monitor._vantage.moments.blocks.values()
    assert len(blocks) <= SHAPES
    assert all(block.gram.numel() <= 2 * BLOCK["cpu"] and not block.entries for block in blocks)


def test_lengths_that_never_come_again_are_forgotten() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    with Monitor(model, every=1) as monitor:
        for length in range(200, 230):
            model(torch.randn(8, length, 64)).mean().backward()
            monitor.step()
    moments = monitor._vantage.moments
    assert not moments.known
    assert not moments.digests
    assert len(moments.blocks) <= SHAPES
