"""The edges of the probe: what a new user gets wrong, wrappers, filters, interruptions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.test_probe_zoo import picture
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, TensorDataset

import sounding
from sounding.errors import InterruptedRun, TargetError, UsageError
from sounding.probe.check import _Checked
from tolerance import TOLERANCE


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def numbers(report: sounding.Report) -> dict[tuple[str, str], float]:
    return {(row.name, row.measure): row.value for row in report.profile if row.source == "check"}


def same(left: sounding.Report, right: sounding.Report) -> None:
    assert numbers(left).keys() == numbers(right).keys()
    for key, value in numbers(left).items():
        assert value == pytest.approx(numbers(right)[key], nan_ok=True), key


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sounding.check("model", torch.ones(2, 6)), "expected a torch.nn.Module, got str"),
        (lambda: sounding.check(model(), torch.ones(0, 6)), "expected at least one sample, got an empty batch"),
        (lambda: sounding.check(model(), torch.full((4, 6), torch.nan)), "expected finite inputs, got 24 NaN"),
        (lambda: sounding.check(model(), "x"), "expected inputs as a tensor"),
        (lambda: sounding.check(model(), np.array(["a"])), "expected an array of numbers"),
        (lambda: sounding.check(model(), torch.ones(1, 6)), r"batch norm needs at least 2 samples.*layer '1'"),
        (lambda: sounding.check(model(), torch.ones(4, 6), repeats=0), "expected repeats"),
        (lambda: sounding.check(model(), torch.ones(4, 6), repeats=3), "3 repeats need at least 6 samples, got 4"),
        (lambda: sounding.check(model(), torch.ones(4, 6), mode="trian"), "expected mode"),
        (lambda: sounding.check(model(), torch.ones(4, 6), tier="slow"), "expected tier"),
        (lambda: sounding.check(model(), torch.ones(4, 6), loss="hinge"), "expected loss to be one of"),
        (lambda: sounding.check(model(), torch.ones(4, 6), loss="mse"), "needs targets as a tensor"),
        (lambda: sounding.check(model(), torch.ones(4, 6), loss=lambda y: y), "expected the loss to return one real"),
        (lambda: sounding.check(model(), torch.ones(4, 6), torch.tensor([0, 1, 2, 3])), "from 0 to 2, got 0 to 3"),
        (lambda: sounding.check(model(), torch.ones(4, 6), torch.zeros(5).long()), "got the shape"),
        (lambda: sounding.check(model(), torch.ones(4, 6), torch.ones(4, 2)), "expected targets of the output's shape"),
        (lambda: sounding.check(model(), torch.ones(4, 6), only="nothing.*"), "no module of the model matches"),
        (lambda: sounding.check(model(), torch.ones(4, 6), samples=1), "expected samples to be at least 2"),
        (lambda: sounding.check(model(), lambda: torch.ones(4, 6)), r"expected \(inputs, targets\)"),
        (lambda: sounding.check(model(), iter([]), repeats=2), "expected 2 batches, got 0"),
        (lambda: sounding.check(nn.Linear(2, 2, device="meta"), torch.ones(4, 2)), "meta device"),
        (lambda: sounding.watch(3), "expected a torch.nn.Module, got int"),
    ],
)
def test_bad_input_is_a_sentence(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_a_wrong_shape_names_the_layer_and_the_shape() -> None:
    network = model()
    before = picture(network)
    with pytest.raises(TargetError, match=r"RuntimeError in layer '0' on inputs of shape \(4, 5\)") as caught:
        sounding.check(network, torch.ones(4, 5))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert picture(network) == before


def test_a_model_that_raises_in_its_middle_is_told_and_restored() -> None:
    class Faulty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("missing")

    network = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Faulty())
    inputs = torch.randn(4, 6)
    before = picture(network)
    with pytest.raises(TargetError, match="KeyError in layer '2'"):
        sounding.check(network, inputs)
    assert picture(network) == before


def test_a_complex_answer_asks_for_a_loss() -> None:
    class Wave(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(x)

    with pytest.raises(UsageError, match="complex"):
        sounding.check(Wave(), torch.randn(4, 6))
    report = sounding.check(Wave(), torch.randn(4, 6), loss=lambda output: output.abs().sum())
    assert any("complex" in item.reason for item in report.unmeasured)


def test_an_interruption_keeps_what_was_measured() -> None:
    """Ctrl-C in the second of three repeats, in the middle of the forward pass."""
    network = model()

    class Impatient(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Impatient.calls += 1
            if Impatient.calls == 2:
                raise KeyboardInterrupt
            return x

    network.append(Impatient())
    inputs = torch.randn(12, 6)
    before = picture(network)
    with pytest.raises(InterruptedRun) as caught:
        sounding.check(network, inputs, repeats=3)
    partial = caught.value.partial
    assert isinstance(partial, sounding.Report)
    assert partial.profile.settings["partial"] is True
    assert {row.name for row in partial.profile.select("gradient_log_norm")} >= {"0", "5"}
    assert picture(network) == before


def test_an_interruption_before_the_first_layer_still_gives_a_report() -> None:
    def stop() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(InterruptedRun) as caught:
        sounding.check(model(), stop)
    assert len(caught.value.partial.profile) == 0


@pytest.mark.parametrize("part", ["find_influence", "predict"])
def test_an_interruption_behind_the_passes_keeps_what_they_measured(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_Checked, part, stop)
    with pytest.raises(InterruptedRun) as caught:
        sounding.check(model(), torch.randn(12, 6))
    partial = caught.value.partial.profile
    assert partial.settings["partial"] is True
    assert {row.name for row in partial.select("gradient_log_norm", source="check")} >= {"0", "5"}


def test_watch_lets_go_when_its_body_raises() -> None:
    network = model()
    before = picture(network)
    with pytest.raises(ZeroDivisionError), sounding.watch(network):
        raise ZeroDivisionError
    assert picture(network) == before


def test_hooks_of_the_user_stay_and_run() -> None:
    network, seen = model(), []
    network[0].register_forward_hook(lambda *_: seen.append("forward"))
    network[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append("stepped"))
    inputs = torch.randn(4, 6)
    before = picture(network)
    sounding.check(network, inputs, theory=False)  # reading would run it once more
    assert picture(network) == before
    assert seen == ["forward"]


def test_watch_leaves_gradients_to_the_user_and_averages_over_passes() -> None:
    network = model()
    with sounding.watch(network, tier="full") as watched:
        for _ in range(3):
            network(torch.randn(8, 6)).square().sum().backward()
    assert network[0].weight.grad is not None
    profile = watched.profile
    assert profile.settings["repeats"] == 3
    assert profile.sources == ("watch",)
    assert all(row.stderr is not None for row in profile.select("mean_square"))
    assert "numerical_rank" in profile.measures
    assert isinstance(watched.report.verdict.healthy, bool)


def test_watch_reads_running_and_evaluated_models_as_they_are() -> None:
    network = model().eval()
    with sounding.watch(network) as watched:
        network(torch.randn(8, 6))
    assert watched.profile.settings["mode"] == "eval"
    assert any("no backward pass" in item.reason for item in watched.unmeasured)
    assert "gradient_log_norm" not in watched.profile.measures


def test_filters_show_less_and_number_the_same() -> None:
    network, inputs = model(), torch.randn(8, 6)
    whole = sounding.check(network, inputs)
    named = sounding.check(network, inputs, only=["3", "4"])
    typed = sounding.check(network, inputs, types=nn.Linear)
    shown = [(row.layer, row.name) for row in named.profile.select("mean_square", source="check") if row.layer]
    assert shown == [(4, "3"), (5, "4")]
    assert {row.name for row in typed.profile.select("mean_square", source="check") if row.layer} == {"0", "3", "5"}
    assert {row.name for row in named.profile.select("weight_gradient_log_norm")} == {"3.weight", "3.bias"}
    for report in (named, typed):
        for key, value in numbers(report).items():
            assert value == pytest.approx(numbers(whole)[key]), key
        assert report.profile.value("gradient_growth", source="check") == whole.profile.value(
            "gradient_growth", source="check"
        )


def test_the_same_numbers_twice_and_from_a_generator() -> None:
    """Without targets the direction is random, and the random state is put back: a second check sees the same one."""
    network, inputs = model(), torch.randn(8, 6)
    same(sounding.check(network, inputs), sounding.check(network, inputs))
    first = sounding.check(network, inputs, generator=torch.Generator().manual_seed(1))
    same(first, sounding.check(network, inputs, generator=torch.Generator().manual_seed(1)))
    assert numbers(first) != numbers(sounding.check(network, inputs, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("wrap", ["tuple", "dict", "numpy", "loader", "callable"])
def test_every_form_of_inputs_gives_the_same_numbers(wrap: str) -> None:
    network, inputs, targets = model(), torch.randn(8, 6), torch.randint(0, 3, (8,))
    expected = sounding.check(network, inputs, targets)
    forms: dict[str, tuple[Any, Any]] = {
        "tuple": ((inputs,), targets),
        "dict": ({"input": inputs}, targets),
        "numpy": (inputs.numpy(), targets.numpy()),
        "loader": (DataLoader(TensorDataset(inputs, targets), batch_size=8), None),
        "callable": (lambda: (inputs, targets), None),
    }
    same(expected, sounding.check(network, *forms[wrap]))


def test_inside_no_grad_and_inference_mode() -> None:
    network, inputs = model(), torch.randn(8, 6)
    expected = sounding.check(network, inputs)
    with torch.no_grad():
        same(expected, sounding.check(network, inputs))
    with torch.inference_mode():
        same(expected, sounding.check(network, inputs.clone()))


def test_under_autocast_measures_keep_their_precision() -> None:
    """The outputs are bfloat16, their inner products must not be."""
    network, rows = nn.Sequential(nn.Linear(6, 64), nn.Tanh()), torch.randn(16, 6)
    with torch.autocast("cpu", torch.bfloat16):
        report = sounding.check(network, rows, tier="fast")
        outputs = network(rows).detach()
    expected = float(sounding.measures.distinct_share(outputs))
    assert report.profile.select("distinct_share", name="1").rows[0].value == pytest.approx(
        expected, rel=TOLERANCE.float32_layer
    )


def test_modes_and_dropout() -> None:
    """Training mode by default, whatever the model is in; dropout at rest, so that only the samples differ."""
    network = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).eval()
    rows = torch.ones(8, 6) * torch.randn(6)
    quiet = numbers(sounding.check(network, rows))
    assert quiet["2", "mean_square"] == pytest.approx(0.0, abs=TOLERANCE.four_digits)
    kept = numbers(sounding.check(network, rows, mode="keep"))
    assert kept["1", "mean_square"] == pytest.approx(kept["0", "mean_square"], rel=TOLERANCE.three_digits)
    noisy = numbers(sounding.check(network, torch.randn(8, 6), dropout=True))
    assert noisy["2", "mean_square"] != noisy["1", "mean_square"]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("process_group")
def test_a_distributed_model_gives_the_same_numbers() -> None:
    network, inputs, targets = model(), torch.randn(8, 6), torch.randint(0, 3, (8,))
    expected = sounding.check(network, inputs, targets)
    wrapped = nn.parallel.DistributedDataParallel(network)
    before = picture(wrapped)
    same(expected, sounding.check(wrapped, inputs, targets))
    assert picture(wrapped) == before
    with sounding.watch(wrapped) as watched:
        nn.functional.cross_entropy(wrapped(inputs), targets).backward()
    found = {(row.name, row.measure): row.value for row in watched.profile}
    for key, value in found.items():
        assert value == pytest.approx(numbers(expected)[key], rel=TOLERANCE.four_digits, abs=TOLERANCE.float32_layer), (
            key
        )


def test_a_compiled_model_gives_the_same_numbers() -> None:
    network, inputs, targets = model(), torch.randn(8, 6), torch.randint(0, 3, (8,))
    expected = sounding.check(network, inputs, targets)
    compiled = torch.compile(network, backend="eager")
    same(expected, sounding.check(compiled, inputs, targets))
    compiled(inputs)  # now there is a compiled graph that knows no hooks
    same(expected, sounding.check(compiled, inputs, targets))
    with sounding.watch(compiled) as watched:
        compiled(inputs).sum().backward()
    assert {row.name for row in watched.profile.select("mean_square") if row.layer} == {"0", "1", "2", "3", "4", "5"}


def test_a_module_compiled_in_place_gives_the_same_numbers() -> None:
    network, inputs, targets = model(), torch.randn(8, 6), torch.randint(0, 3, (8,))
    expected = sounding.check(network, inputs, targets)
    network.compile(backend="eager")
    network(inputs)
    network.load_state_dict(model().state_dict())
    same(expected, sounding.check(network, inputs, targets))


def test_reports_say_what_they_did() -> None:
    settings = sounding.check(model(), torch.randn(8, 6), torch.randint(0, 3, (8,))).profile.settings
    assert settings["loss"] == "cross_entropy"
    assert settings["mode"] == "train"
    assert settings["kinds"]["2"] == "BatchNorm1d"
    assert settings["growth_depth"] == 3
    low, high = settings["growth_interval"]
    assert low < high
    assert re.match("one call of a module that multiplies by a weight", settings["layer_unit"])
    assert settings["parameters"] == sum(weight.numel() for weight in model().parameters())


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    sounding.check(model(), torch.randn(8, 6), repeats=2, progress=lambda done, all_of: told.append((done, all_of)))
    assert told == [(1, 2), (2, 2)]


def test_one_image_is_enough_for_batch_norm_over_its_pixels() -> None:
    """Torch takes the variance over the pixels; what needs two samples is listed, and the batch is called small."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    report = sounding.check(model, torch.randn(1, 3, 8, 8), torch.tensor([2]))
    assert report.profile.select("mean_square", name="1").rows[0].value == pytest.approx(1, rel=TOLERANCE.three_digits)
    assert report.profile.select("gradient_log_norm").layers[-1] == 5
    assert "batch_too_small" in {finding.kind for finding in report.verdict.findings}
    assert any("at least 2" in item.reason for item in report.unmeasured)
