"""Recipes, the plain loop, histories, learning rates and grids."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest
import torch
from torch import nn

from runs import make_data, make_mlp, seeded
from sounding.data import Augmentation, load_dataset, normalize
from sounding.errors import UsageError
from sounding.models import Mlp
from sounding.probe import check
from sounding.profile import Profile
from sounding.train import History, Point, Recipe, choose_rates, make_grid, train_, train_together_
from tolerance import TOLERANCE


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": "lion"}, "unknown optimizer"),
        ({"loss": "hinge"}, "unknown loss"),
        ({"epochs": 2, "steps": 3}, "got both"),
        ({"epochs": 0}, "whole number of at least 1"),
        ({"steps": 2.5}, "whole number of at least 1"),
        ({"batch_size": True}, "whole number of at least 1"),
        ({"momentum": 1.0}, "below 1"),
        ({"momentum": -0.1}, "at least 0"),
        ({"weight_decay": math.nan}, "at least 0"),
        ({"clipping": 0.0}, "positive"),
        ({"betas": (0.9,)}, "two betas"),
        ({"betas": (0.9, 1.0)}, "below 1"),
        ({"augment": True}, "Augmentation"),
        ({"evaluate": "often"}, "unknown evaluate"),
        ({"evaluate": 5}, "list of steps"),
        ({"evaluate": (1, -2)}, "whole numbers"),
        ({"statistics": "mine"}, "unknown statistics"),
    ],
)
def test_bad_recipes_are_refused(options, says) -> None:
    with pytest.raises(UsageError, match=says):
        Recipe(**options)


def test_a_recipe_survives_json() -> None:
    recipe = Recipe(optimizer="adam", steps=7, augment=Augmentation(padding=2), evaluate=(0, 7), betas=(0.8, 0.9))
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    with pytest.raises(UsageError, match="no field"):
        Recipe.from_dict({"speed": 3})


def line(weight: float) -> nn.Module:
    """One weight: output w x."""
    network = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(network.weight, weight)
    return network


CLOSED = {
    # w₀ = 1, targets 0, inputs 1, loss w²: gradient 2w (+ λw)
    "sgd": lambda w, t, s: (w - 0.1 * (2.1 * w), s),
    "momentum": lambda w, t, s: (w - 0.1 * (0.9 * s + 2.1 * w), 0.9 * s + 2.1 * w),
    "rmsprop": lambda w, t, s: (
        w - 0.1 * 2.1 * w / (math.sqrt(0.99 * s + 0.01 * (2.1 * w) ** 2) + 1e-8),
        0.99 * s + 0.01 * (2.1 * w) ** 2,
    ),
}


@pytest.mark.parametrize("optimizer", CLOSED)
def test_optimizers_follow_their_formulas(optimizer) -> None:
    """The quadratic loss w² with L2 penalty λ = 0.1: the recurrences by hand, alone and in a stack."""
    data = (torch.ones(4, 1, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64))
    recipe = Recipe(optimizer=optimizer, loss="mse", batch_size=4, steps=6, weight_decay=0.1)
    alone, stacked = line(1.0), line(1.0)
    train_(alone, data, learning_rate=0.1, recipe=recipe)
    train_together_([stacked], data, learning_rates=[0.1], recipe=recipe)
    w, state = 1.0, 0.0
    for step in range(1, 7):
        w, state = CLOSED[optimizer](w, step, state)
    for network in (alone, stacked):
        assert network.weight.item() == pytest.approx(w, rel=TOLERANCE.closed_form)


def test_adam_follows_its_formula() -> None:
    data = (torch.ones(4, 1, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64))
    recipe = Recipe(optimizer="adam", loss="mse", batch_size=4, steps=6, betas=(0.8, 0.95), eps=1e-4)
    network = line(1.0)
    train_together_([network], data, learning_rates=[0.1], recipe=recipe)
    w, m, v = 1.0, 0.0, 0.0
    for step in range(1, 7):
        m, v = 0.8 * m + 0.2 * 2 * w, 0.95 * v + 0.05 * 4 * w * w
        w -= 0.1 * (m / (1 - 0.8**step)) / (math.sqrt(v / (1 - 0.95**step)) + 1e-4)
    assert network.weight.item() == pytest.approx(w, rel=TOLERANCE.closed_form)


@pytest.mark.parametrize("by", ["unit", "parameter"])
def test_clipping_bounds_each_move_by_a_share_of_the_weight(by) -> None:
    """η = 1: a unit moves by at most λ max(‖w‖, 10⁻³)."""
    data = make_data()
    network = make_mlp(0)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    recipe = Recipe(steps=1, batch_size=96, clipping=1e-4, clipping_by=by)
    train_together_([network], data, learning_rates=[1.0], recipe=recipe)
    for old, new in zip(before, network.parameters(), strict=True):
        axes = tuple(range(1, old.dim())) if by == "unit" and old.dim() > 1 else tuple(range(old.dim()))
        moved, size = (torch.linalg.vector_norm(t.detach(), dim=axes) for t in (new - old, old))
        assert bool((moved <= 1e-4 * size.clamp_min(1e-3) * (1 + TOLERANCE.two_routes)).all())


def test_evaluation_is_what_the_network_gives_in_evaluation_mode() -> None:
    """Loss and accuracy by hand at the end, with running statistics and with those of the samples."""
    inputs, labels, test_inputs, test_labels = make_data()
    for statistics in ("running", "batch"):
        network = make_mlp(0, norm="batch")
        recipe = Recipe(epochs=2, batch_size=16, statistics=statistics, evaluation_batch=1000)
        history = train_(
            network, (inputs, labels, test_inputs, test_labels), learning_rate=0.1, recipe=recipe, generator=seeded()
        )
        scratch = copy.deepcopy(network).train(statistics == "batch")
        with torch.no_grad():
            for part, (x, y) in {"train": (inputs, labels), "test": (test_inputs, test_labels)}.items():
                outputs = scratch(x)
                loss = float(nn.functional.cross_entropy(outputs, y))
                right = float((outputs.argmax(1) == y).double().mean())
                assert getattr(history.final(0), f"{part}_loss") == pytest.approx(loss, rel=TOLERANCE.two_routes)
                assert getattr(history.final(0), f"{part}_accuracy") == pytest.approx(right)


def test_evaluating_changes_nothing() -> None:
    """Running statistics, mode and trajectory are the same however often one looks."""
    ends = []
    for evaluate in ("end", tuple(range(13))):
        network = make_mlp(0, norm="batch").eval()
        recipe = Recipe(steps=12, batch_size=16, evaluate=evaluate, statistics="batch")
        train_(network, make_data(), learning_rate=0.1, recipe=recipe, generator=seeded(), measure_at=range(0, 13, 4))
        assert not network.training
        ends.append(network.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ends[0].values(), ends[1].values(), strict=True))


def test_data_sets_are_normalized_and_learnt() -> None:
    digits = load_dataset("digits")
    network = Mlp(64, 10, depth=2, width=32, norm="batch", generator=seeded())
    history = train_(network, digits, learning_rate=0.2, recipe=Recipe(epochs=5), generator=seeded())
    assert history.final(0).test_accuracy > 0.8
    with torch.no_grad():
        right = (network.eval()(normalize(digits, digits.test_inputs)).argmax(1) == digits.test_labels).double().mean()
    assert history.final(0).test_accuracy == pytest.approx(float(right))
    assert history.record["data"]["name"] == "digits"
    assert history.record["seed"] == 0


def test_a_float64_network_trains_on_a_data_set() -> None:
    network = Mlp(64, 10, depth=1, width=8, generator=seeded()).double()
    history = train_together_([network], load_dataset("digits"), learning_rates=[0.1], recipe=Recipe(epochs=1))
    assert history.record["model"]["dtype"] == "float64"


def test_augmentation_needs_images() -> None:
    recipe = Recipe(steps=1, batch_size=16, augment=Augmentation())
    with pytest.raises(UsageError, match="images"):
        train_(make_mlp(0), make_data(), learning_rate=0.1, recipe=recipe)


def test_regression_has_no_accuracy() -> None:
    inputs = make_data()[0]
    data = (inputs, inputs[:, :3] * 2)
    history = train_(make_mlp(0), data, learning_rate=0.1, recipe=Recipe(loss="mse", steps=3, batch_size=16))
    assert history.final(0).train_accuracy is None
    assert history.final(0).test_loss is None


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        (lambda: "digits", {}, "Dataset or a pair"),
        (lambda: make_data()[:1], {}, "Dataset or a pair"),
        (lambda: (make_data()[0], make_data()[1][:5]), {}, "as many targets"),
        (lambda: (make_data()[0], make_data()[1] + 1), {}, "labels from 0 to 2"),
        (lambda: (make_data()[0], make_data()[0]), {}, "cross_entropy needs integer labels"),
        (lambda: (make_data()[0].to(torch.uint8), make_data()[1]), {}, "uint8"),
        (lambda: make_data(), {"recipe": Recipe(batch_size=1000)}, "at most 96"),
        (lambda: make_data(), {"recipe": {"epochs": 1}}, "expected a Recipe"),
        (lambda: make_data(), {"learning_rate": "fast"}, "learning rates"),
        (lambda: make_data(), {"device": "tpu9"}, "no device 'tpu9' here"),
        (lambda: make_data(), {"measure_at": (9999,)}, "at most"),
        (lambda: make_data(), {"recipe": Recipe(steps=3, batch_size=16, evaluate=(4,))}, "the last step"),
        (lambda: make_data(), {"measure_at": 3}, "list of steps"),
    ],
)
def test_bad_input_is_refused(data, options, says) -> None:
    chosen = {"learning_rate": 0.1, "recipe": Recipe(steps=2, batch_size=16), **options}
    with pytest.raises(UsageError, match=says):
        train_(make_mlp(0), data(), **chosen)


def test_measurements_during_training_are_those_of_a_check() -> None:
    """At step 0 and at the end: ranks, gaps, gradient norms and alignment over depth, alone and in a stack."""
    data = make_data()
    recipe = Recipe(steps=6, batch_size=16)
    networks = [make_mlp(seed, norm="batch") for seed in range(2)]
    first = copy.deepcopy(networks[1])
    history = train_together_(
        networks, data, learning_rates=[0.1, 0.2], recipe=recipe, generator=seeded(), measure_at=(0, 6)
    )
    for step, network in ((0, first), (6, networks[1])):
        expected = check(network, data[0][:16], data[1][:16]).profile.select(source="check")
        measured = history.at(run=1, step=step)
        for measure in ("participation_ratio", "orthogonality_gap", "gradient_log_norm", "gradient_alignment"):
            mine, theirs = measured.series(measure), expected.series(measure)
            assert list(mine.layer) == list(theirs.layer)
            assert mine.value == pytest.approx(theirs.value, rel=TOLERANCE.two_routes)
    trace = history.trace("participation_ratio", run=1)
    assert list(trace.layer) == [0, 6]
    assert trace.value[0] == history.at(run=1, step=0).value("participation_ratio", layer=-1).value
    with pytest.raises(UsageError, match="measured steps"):
        history.at(run=0, step=3)
    with pytest.raises(UsageError, match="between 0 and 1"):
        history.at(run=2, step=0)


def test_a_history_becomes_a_table_of_pandas() -> None:
    pytest.importorskip("pandas")
    history = train_together_([make_mlp(0)], make_data(), learning_rates=[0.1], recipe=Recipe(steps=2, batch_size=16))
    assert list(history.to_pandas().columns[:3]) == ["run", "epoch", "step"]


def test_a_history_survives_json_and_pickle(tmp_path) -> None:
    networks = [make_mlp(seed) for seed in range(2)]
    history = train_together_(
        networks, make_data(), learning_rates=[0.1, 1e300], recipe=Recipe(steps=8, batch_size=16), measure_at=(0,)
    )
    assert history.diverged[1] is not None
    history.to_json(tmp_path / "history.json")
    for again in (History.from_json(tmp_path / "history.json"), pickle.loads(pickle.dumps(history))):
        assert again == history
    assert "diverged at step" in str(history)
    for text in ("{}", "[1]", "nonsense", '{"schema": "sounding.history/1"}'):
        with pytest.raises(UsageError):
            History.from_json(text)


def test_the_record_repeats_the_run() -> None:
    """From the record alone: the recipe, the seed and the rates give the same curve again."""
    recipe = Recipe(steps=5, batch_size=16)
    history = train_(make_mlp(0), make_data(), learning_rate=0.1, recipe=recipe, generator=seeded(3))
    record = json.loads(history.to_json())["record"]
    again = train_(
        make_mlp(0),
        make_data(),
        learning_rate=record["runs"][0]["learning_rate"],
        recipe=Recipe.from_dict(record["recipe"]),
        generator=seeded(record["seed"]),
    )
    assert again == history


def made(values: dict[int, tuple[float, float]], diverged=(), settings=None) -> History:
    """A history with a first and a last train loss for each run."""
    points = [Point(run, step, step, values[run][step], 0.5, None, None) for step in (0, 1) for run in values]
    gone = tuple(3 if run in diverged else None for run in values)
    told = settings or tuple({"learning_rate": 0.1 * 2**run} for run in values)
    return History(tuple(points), gone, Profile(), told, {})


def test_the_rate_with_the_lowest_loss_is_chosen_and_the_rule_is_said() -> None:
    history = made({0: (1.0, 0.5), 1: (0.1, 0.4), 2: (1.0, 0.1)}, diverged=(2,))
    chosen = choose_rates(history)
    assert chosen[()].run == 1
    assert "lowest train loss at the last evaluation" in chosen.rule
    assert choose_rates(history, at="best")[()].value == 0.1
    by_label = choose_rates(history, ["a", "b", "b"])
    assert (by_label["a"].run, by_label["b"].run) == (0, 1)
    assert choose_rates(history, by="train_accuracy")[()].run == 0  # equal: the smallest rate
    assert choose_rates(made({0: (1.0, 1.0)}, diverged=(0,)))[()].run is None


def test_runs_of_a_rate_are_averaged_over_seeds() -> None:
    settings = tuple({"init": "he", "seed": seed, "learning_rate": rate} for seed in (0, 1) for rate in (0.1, 1.0))
    history = made({0: (0, 1.0), 1: (0, 0.1), 2: (0, 1.0), 3: (0, 2.5)}, settings=settings)
    chosen = choose_rates(history, "init")
    assert chosen["he"].learning_rate == 0.1
    assert chosen["he"].runs == (0, 2)
    assert "mean over the runs of a rate" in chosen.rule
    assert choose_rates(history)[("he", 0)].learning_rate == 1.0
    for bad in ("width", ["a"]):
        with pytest.raises(UsageError):
            choose_rates(history, bad)
    with pytest.raises(UsageError, match="by= the name of a curve"):
        choose_rates(history, by="speed")
    with pytest.raises(UsageError, match="no test_loss"):
        choose_rates(history, by="test_loss")


def test_a_grid_is_the_product_of_its_axes() -> None:
    digits = load_dataset("digits")
    grid = make_grid(
        "mlp",
        digits,
        learning_rates=[0.1, 0.01],
        seeds=[3, 5],
        vary={"init": ["he", "haar"], "eps": [1e-5, 0.1]},
        depth=2,
        width=8,
        norm="batch",
    )
    assert len(grid) == 16
    assert dict(grid.settings[0]) == {"init": "he", "eps": 1e-5, "seed": 3}
    same = [network[0].linear.weight for network, entry in zip(grid.networks, grid.settings, strict=True)
            if entry["seed"] == 3 and entry["init"] == "he"]  # fmt: skip
    assert all(torch.equal(same[0], other) for other in same[1:])
    history = train_together_(data=digits, recipe=Recipe(steps=3), generator=seeded(), **grid.runs)
    assert history.settings[1]["learning_rate"] == 0.01
    assert len(choose_rates(history, "init,eps")) == 4
    for bad in ({"seeds": 0}, {"learning_rates": []}, {"vary": {"depth": []}}, {"vary": {"depth": [1]}, "depth": 2}):
        with pytest.raises(UsageError):
            make_grid("mlp", **{"learning_rates": [0.1], **bad})
