"""`sounding simulate`: its JSON, its errors, reproducibility, interruption; and the inputs by name."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from sounding import simulate
from sounding.chain.inputs import make_input
from sounding.cli import main
from sounding.cli.simulate import simulate as command
from sounding.errors import UsageError


def run(*arguments: str) -> dict:
    result = CliRunner().invoke(command, [*arguments, "--json"], standalone_mode=False)
    if result.exception:
        raise result.exception
    return json.loads(result.stdout)


SMALL = ("--width", "16", "--batch-size", "4", "--depth", "40", "--seed", "1")


def test_old_names_of_options_still_work():
    now = run(*SMALL, "--no-centring", "--placement", "after", "--input", "orthogonal")
    old = CliRunner().invoke(command, [*SMALL, "--no-center", "--position", "after", "--input", "orthogonal", "--json"])
    assert json.loads(old.stdout)["averages"] == now["averages"]
    assert "--center is now --centring" in old.stderr
    options = {"width": 16, "batch_size": 4, "depth": 40, "generator": torch.Generator().manual_seed(1)}
    with pytest.warns(DeprecationWarning, match="is now") as told:
        python = simulate(**options, center=False, position="after", start="orthogonal")
    assert len(told) == 3
    assert {name: value.value for name, value in python.averages.items()} == {
        name: found["mean"] for name, found in now["averages"].items()
    }


def test_json_has_the_promised_keys():
    found = run(*SMALL, "--runs", "3", "--burn-in", "10", "--measure", "orthogonality_gap,soft_rank:0.3", "--profile")
    assert set(found["averages"]) == {"orthogonality_gap", "soft_rank:0.3"}
    assert set(found["averages"]["orthogonality_gap"]) == {"mean", "stderr"}
    assert found["chain_layers_per_second"] == pytest.approx(3 * 40 / found["seconds"])
    assert found["setup_seconds"] > 0
    assert found["profile"][0].keys() == {"layer", "measure", "mean", "stderr"}
    assert sorted({row["layer"] for row in found["profile"]}) == list(range(41))
    gaps = [row["mean"] for row in found["profile"] if row["measure"] == "orthogonality_gap" and row["layer"] > 10]
    assert found["averages"]["orthogonality_gap"]["mean"] == pytest.approx(np.mean(gaps))


def test_every_kth_layer_and_the_needed_depth():
    found = run(*SMALL, "--every", "10", "--profile", "--measure", "log_norm", "--error", "0.5")
    assert [row["layer"] for row in found["profile"]] == [0, 10, 20, 30, 40]
    assert found["averages"]["log_norm"]["needed_depth"] == 10


def test_the_defaults_are_centred_batch_norm_gaussian_weights_and_no_skip():
    settings = run(*SMALL, "--measure", "numerical_rank")["settings"]
    assert (settings["norm"], settings["centring"], settings["weights"]) == ("batch", True, "gaussian")
    assert (settings["activation"], settings["residual"], settings["placement"]) == ("identity", "inf", "before")


def test_a_seed_repeats_and_another_differs():
    arguments = ("--width", "16", "--batch-size", "4", "--depth", "40", "--measure", "orthogonality_gap")
    first = run(*arguments, "--seed", "5")["averages"]
    assert run(*arguments, "--seed", "5")["averages"] == first
    assert run(*arguments, "--seed", "6")["averages"] != first


def test_several_widths_and_strengths():
    found = run("--width", "6,12", "--batch-size", "width", "--depth", "30", "--residual", "0.1,inf", "--seed", "0",
                "--measure", "soft_rank", "--no-centring")["simulations"]  # fmt: skip
    settings = [(s["settings"]["width"], s["settings"]["batch_size"], s["settings"]["residual"]) for s in found]
    assert settings == [(6, 6, 0.1), (6, 6, "inf"), (12, 12, 0.1), (12, 12, "inf")]


def test_backward_gives_growth_with_an_interval():
    found = run(*SMALL, "--backward", "--activation", "relu", "--measure", "log_norm", "--runs", "3")
    low, high = found["gradients"]["growth"]["interval"]
    assert low < found["gradients"]["growth"]["mean"] < high
    assert found["averages"]["growth"]["mean"] == found["gradients"]["growth"]["mean"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--width", "0"), "width must be a whole number of at least 1"),
        (("--width", "3", "--weights", "orthogonal"), "orthogonal frame"),
        (("--width", "3", "--input", "orthogonal"), "orthogonal batch"),
        (("--residual", "0"), "residual strength"),
        (("--residual", "nan"), "residual strength"),
        (("--residual", "-2"), "residual strength"),
        (("--residual", "strong"), "--residual takes"),
        (("--residual", "1e40"), "overflows float32"),
        (("--residual", "1e-12"), "lost in the rounding of float32"),
        (("--seed", "99999999999999999999"), "--seed"),
        (("--measure", "top_eigenvalues:0.5"), "whole number"),
        (("--measure", "beauty"), "unknown measure"),
        (("--measure", ","), "at least one measure"),
        (("--device", "cuda:77"), "no device"),
        (("--device", "abacus"), "no device"),
        (("--activation", "exp", "--norm", "none"), "not linear at infinity"),
        (("--activation", "relu_power:3", "--norm", "none"), "not linear at infinity"),
        (("--activation", "exp", "--gain", "60"), "overflows float32"),
        (("--activation", "nonsense"), "unknown activation"),
        (("--norm", "group"), "unknown normalization"),
        (("--batch-size", "1"), "at least 2 samples"),
        (("--depth", "0"), "depth must be"),
        (("--runs", "0"), "runs must be"),
        (("--burn-in", "40"), "burn-in must end before"),
        (("--every", "50"), "no layer past the burn-in"),
        (("--eps", "-1"), "eps must be"),
        (("--gain", "0"), "gain must be"),
        (("--gain", "power:x"), "gain exponent"),
        (("--input", "collinear:x"), "finite EPS"),
        (("--input", "repeated:9"), "different samples"),
        (("--input", "square"), "unknown input"),
        (("--dtype", "float16"), "float32 or float64"),
        (("--placement", "under"), "'before' or 'after'"),
        (("--weights", "heavy"), "unknown weight law"),
        (("--error", "0"), "--error must be positive"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["simulate", *SMALL, *arguments])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_orthogonal_weights_take_more_samples_than_features_explicitly():
    found = run("--width", "4", "--batch-size", "6", "--depth", "5", "--weights", "orthogonal", "--explicit-weights")
    assert found["settings"]["route"] == "explicit"


def test_tables_for_people(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["simulate", *SMALL, "--runs", "2", "--error", "0.01"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "orthogonality_gap" in printed
    assert "depth for ± 0.01" in printed


def threads_of(process: int) -> int:
    """Threads of a running process; its chains run in one of their own."""
    try:
        return len(os.listdir(f"/proc/{process}/task"))
    except OSError:
        return 0


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_prints_what_was_measured_and_exits_130():
    script = "from sounding.cli import main; main()"
    arguments = "simulate --width 32 --batch-size 4 --depth 100000000 --json --measure log_norm"
    whole = [sys.executable, "-c", script, *arguments.split()]
    process = subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None and threads_of(process.pid) < 2:
        time.sleep(0.1)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    found = json.loads(out)
    assert found["partial"] is True
    assert math.isfinite(found["averages"]["log_norm"]["mean"])


def test_progress_is_reported():
    seen = []
    simulate(
        width=8, batch_size=3, depth=50, runs=2, generator=torch.Generator().manual_seed(0), measures=["log_norm"],
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen[-1] == (100, 100)


def drawn(spec, *, width=12, samples=4, chains=3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    entering = make_input(spec, width=width, batch_size=samples, generator=generator)
    return entering.draw(chains=chains, width=width, batch_size=samples, generator=generator, dtype=torch.float64)


def test_inputs_by_name(tmp_path):
    orthogonal = drawn("orthogonal")
    assert torch.allclose(orthogonal @ orthogonal.mT, 12 * torch.eye(4, dtype=torch.float64).expand(3, 4, 4))
    near = drawn("near-orthogonal:1e-3") - orthogonal
    assert 1e-4 < float(near.abs().mean()) < 3e-3
    collinear = drawn("collinear:1e-3")
    assert float((collinear - collinear[:, :1]).abs().max()) < 0.01
    assert not torch.equal(collinear[0], collinear[1])
    repeated = drawn("repeated:2")
    assert torch.equal(repeated[:, 0], repeated[:, 2])
    assert not torch.equal(repeated[:, 0], repeated[:, 1])
    assert not torch.equal(drawn("gaussian")[0], drawn("gaussian")[1])
    digits = drawn("digits", width=64)
    assert torch.equal(digits[0], digits[1])
    assert drawn("digits", width=10).shape == (3, 4, 10)
    np.savez(tmp_path / "batch.npz", inputs=np.arange(60.0).reshape(5, 12))
    assert drawn(str(tmp_path / "batch.npz")).shape == (3, 4, 12)
    with pytest.raises(UsageError, match="at least 4 samples"):
        drawn(torch.randn(3, 12))
    with pytest.raises(UsageError, match="finite"):
        drawn(torch.full((4, 12), torch.nan))
