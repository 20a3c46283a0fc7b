"""`sounding repair` as a new user meets it: results, files, mistakes, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from sounding.cli import cli
from sounding.cli.repair import parse_options
from sounding.errors import ExitCode, UsageError
from tolerance import TOLERANCE

FILE = """
import torch
from torch import nn

def exploding():
    layers = []
    for index in range(60):
        layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))

def small():
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))

def sound():
    layers = []
    for index in range(12):
        layers += [nn.Linear(64, 64), nn.Tanh()]
        nn.init.xavier_normal_(layers[-2].weight)
    return nn.Sequential(*layers, nn.Linear(64, 10))

def weightless():
    return nn.Sequential(nn.ReLU())

class Failing(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, x):
        raise ValueError("no such luck")
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "networks.py"
    file.write_text(FILE)
    return file


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["repair", *map(str, arguments)])


def make_small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))


def test_weights_are_written_safely_and_are_those_of_the_plan(target: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "weights.pt", tmp_path / "repair.html"
    result = run(f"{target}:small", "--method", "haar", "--out", out, "--html", page, "--seed", "3")
    assert result.exit_code == ExitCode.HEALTHY, result.output
    weights = torch.load(out, weights_only=True)
    model = make_small()
    model.load_state_dict(weights)
    assert torch.allclose(model[2].weight @ model[2].weight.T, torch.eye(32), atol=TOLERANCE.float32_layer)
    assert "Plan (applied): haar" in result.stdout
    assert str(out) in result.stdout
    again = tmp_path / "again.pt"
    run(f"{target}:small", "--method", "haar", "--out", again, "--seed", "3")
    other = torch.load(again, weights_only=True)
    assert all(torch.equal(weights[name], other[name]) for name in weights)
    html = page.read_text("utf-8")
    assert "Repair: haar" in html
    assert '"name":"before"' in html
    assert '"name":"after"' in html
    assert not list(tmp_path.glob(".*weights*"))


def test_remedies_name_the_network_that_was_repaired(tmp_path: Path) -> None:
    page = tmp_path / "repair.html"
    result = run("mlp,depth=60,width=16", "--method", "haar", "--dry-run", "--json", "--html", page)
    assert "sounding repair mlp,depth=60,width=16 --method" in result.stdout
    assert "<code>sounding repair mlp,depth=60,width=16 --method" in page.read_text("utf-8")
    assert "TARGET" not in result.stdout
    assert "TARGET" not in page.read_text("utf-8")


def test_a_cure_that_a_weights_file_cannot_hold_says_how_to_rebuild_it(target: Path, tmp_path: Path) -> None:
    """The printed line, run on a new network, takes the file."""
    import sounding

    out = tmp_path / "w.pt"
    result = run(f"{target}:small", "-m", "add_batchnorm,shape_activations", "--set", "shape_activations.exponent=0.4",
                 "--out", out, "--json", "--quiet")  # fmt: skip
    told = json.loads(result.stdout)
    assert told["weights"] == str(out)
    model = make_small()
    exec(told["recipe"], {"sounding": sounding, "model": model, "inputs": torch.randn(8, 64)})
    model.load_state_dict(torch.load(out, weights_only=True))


def test_a_dry_run_writes_no_weights(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.pt"
    assert "Plan (not applied): he" in run(f"{target}:small", "--method", "he", "--dry-run").stdout
    result = run(f"{target}:small", "--method", "he", "--dry-run", "--out", out)
    assert result.exit_code == ExitCode.USAGE, "an option that would be ignored is refused"
    assert "one of the two" in result.stderr
    assert not out.exists()


def test_json_tells_before_and_after(target: Path) -> None:
    result = run(f"{target}:exploding", "-m", "tune_batchnorm", "--set", "shift=1.5", "--json")
    assert result.exit_code == ExitCode.HEALTHY, result.output
    told = json.loads(result.stdout)
    assert told["methods"] == ["tune_batchnorm"]
    assert told["options"] == {"tune_batchnorm": {"shift": 1.5}}
    before, after = told["evidence"]["before"]["vitals"], told["evidence"]["after"]["vitals"]
    assert before["growth"]["low"] > after["growth"]["high"]
    assert [finding["kind"] for finding in told["evidence"]["cured"]] == ["gradient_explosion"]
    assert told["healthy"] is True
    assert "gradient² per layer" in result.stderr


def test_a_repair_that_does_not_heal_ends_with_one(target: Path) -> None:
    result = run(f"{target}:exploding", "--method", "xavier", "--quiet")
    assert result.exit_code == ExitCode.UNHEALTHY
    assert result.stdout.startswith("✗ Unhealthy")
    assert result.stdout.count("\n") <= 2


def test_a_cure_that_makes_a_network_worse_writes_no_weights_unless_forced(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights.pt"
    command = [f"{target}:sound", "--method", "haar", "--set", "gain=0.01", "--out", out]
    refused = run(*command)
    assert refused.exit_code == ExitCode.UNHEALTHY
    assert "makes this network worse; --force writes them" in refused.stderr
    assert "not applied" in refused.stdout
    assert not out.exists()
    assert all(len(line) <= 100 for line in refused.stdout.splitlines())
    forced = run(*command, "--force")
    assert forced.exit_code == ExitCode.UNHEALTHY
    assert "worse" not in forced.stderr
    assert out.exists()


def test_auto_leaves_a_healthy_network_alone(target: Path) -> None:
    result = run(f"{target}:small", "--method", "auto", "--json", "--quiet")
    assert result.exit_code == ExitCode.HEALTHY, result.output
    told = json.loads(result.stdout)
    assert told["methods"] == []
    assert {"haar", "orthogonalize"} <= {
        item["methods"][0] for item in told["recommendation"]["tried"] if item["methods"]
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["networks.py:small", "--method", "hara"], "unknown method 'hara'"),
        (["networks.py:small", "--method", "haar", "--set", "haar.grain=2"], "haar has no option 'grain'"),
        (["networks.py:small", "--method", "haar", "--set", "gain"], "expected --set METHOD.KEY=VALUE"),
        (["networks.py:small", "--method", "haar", "--out", "nowhere/w.pt"], "there is no folder nowhere"),
        (["networks.py:small", "--method", "haar", "--out", "weights.txt"], "ending in .pt"),
        (["networks.py:small", "--method", "haar", "--html", "nowhere/r.html"], "there is no folder nowhere"),
        (["networks.py:weightless", "--method", "haar"], "with none"),
        (["networks.py:Failing", "--method", "haar"], "no such luck"),
        (["networks.py:missing", "--method", "haar"], "has no 'missing'"),
        (["networks.py:small"], "Missing option '--method'"),
        (["networks.py:small", "--method", "orthogonalize", "--batch-size", "8"], "needs at least 64 samples, got 8"),
    ],
)
def test_mistakes_end_in_a_sentence(target: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["repair", *arguments])
    assert result.exit_code == ExitCode.USAGE, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_safetensors_need_their_package(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "safetensors" else real(name, *a))
    result = run(f"{target}:small", "--method", "haar", "--out", "w.safetensors")
    assert result.exit_code == ExitCode.USAGE
    assert "pip install safetensors" in result.stderr


def test_options_are_read_as_values() -> None:
    assert parse_options(("a.x=1", "a.y=0.5", "b.how=fold", "b.none=none", "b.yes=true"), "a,b") == {
        "a": {"x": 1, "y": 0.5},
        "b": {"how": "fold", "none": None, "yes": True},
    }
    with pytest.raises(UsageError, match=r"expected --set METHOD\.KEY=VALUE"):
        parse_options(("x=1",), "a,b")


def test_the_help_lists_every_method() -> None:
    from sounding.repair import METHODS

    shown = CliRunner().invoke(cli, ["repair", "--help"]).output
    assert all(f"\n  {name} " in shown for name in METHODS)
