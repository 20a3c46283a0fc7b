"""A verdict without evidence is not known, and a healthy one names what was not looked at."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import networks
import sounding
from sounding.cli import cli
from sounding.errors import ExitCode
from sounding.probe.verdict import judge
from sounding.profile import Profile, Row
from sounding.train.monitor.sinks import Snapshot


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(arguments))
    return result.exit_code, result.stdout


class Hidden(nn.Module):
    """Sixty collapsing layers that no hook sees: their class runs as a function of its weights."""

    def __init__(self, depth: int = 60) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.linear(x, layer.weight, layer.bias).relu()
        return x


class Asleep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = networks.mlp(4, 16, features=16)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Spectral(nn.Module):
    """Every output is complex, of which nothing is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16, dtype=torch.complex64) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(torch.complex64)).abs()


UNKNOWN = {
    "nothing seen": (Hidden, 32, 16),
    "no weight": (nn.ReLU, 16, 16),
    "no gradient": (Asleep, 16, 16),
    "no output": (Spectral, 16, 16),
    "one sample": (lambda: networks.mlp(50, 64, features=16, initialize=networks.he), 16, 1),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_too_little_was_measured_to_say(name: str) -> None:
    build, features, samples = UNKNOWN[name]
    with networks.drawn_from(0):
        verdict = sounding.check(build(), torch.randn(samples, features)).verdict
    assert verdict.status == "not known", verdict.summary
    assert not verdict.healthy
    assert verdict.summary.startswith("Not known: ")
    assert verdict.to_dict()["status"] == "not known"


def test_nothing_is_not_known() -> None:
    verdict = judge(Profile())
    assert (verdict.status, verdict.healthy) == ("not known", False)


def test_what_is_surely_ill_stays_unhealthy_without_the_rest() -> None:
    """No gradient was measured, but the collapse was."""
    with (
        networks.drawn_from(0),
        torch.no_grad(),
        sounding.watch(networks.mlp(60, 64, initialize=networks.he)) as watched,
    ):
        watched._tap.root(torch.randn(32, 64))
    assert watched.report.verdict.status == "unhealthy"


def test_one_sample_of_an_exploding_network_is_unhealthy() -> None:
    with networks.drawn_from(0):
        model = networks.mlp(60, 64, initialize=lambda w: nn.init.normal_(w, std=2.5 * w.shape[1] ** -0.5))
        assert sounding.check(model, torch.randn(1, 64)).verdict.status == "unhealthy"


def test_healthy_names_what_was_not_looked_at() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.behind = networks.mlp(3, 16, features=16), networks.mlp(2, 16, features=10)
            self.spare = nn.Linear(16, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.behind(self.before(x).detach())

    with networks.drawn_from(0):
        verdict = sounding.check(Partly(), torch.randn(16, 16)).verdict
        hidden = sounding.check(networks.mlp(6, 16, features=16), torch.randn(16, 16), only="0").verdict
    assert verdict.status == hidden.status == "healthy"
    assert "Not looked at: " in verdict.summary
    assert "'spare'" in verdict.summary
    assert "(2 of 5)" in verdict.summary
    assert any("5 of 6 weight layers" in gap for gap in hidden.not_judged)
    assert verdict.to_dict()["not_judged"] == list(verdict.not_judged)
    with networks.drawn_from(0):
        whole = sounding.check(networks.mlp(6, 16, features=16), torch.randn(16, 16)).verdict
    assert whole.not_judged == ()
    assert "Not looked at" not in whole.summary


def test_not_known_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "asleep.py").write_text(
        "import torch\nfrom torch import nn\n\nclass Asleep(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.inner = nn.Linear(16, 4)\n    @torch.no_grad()\n"
        "    def forward(self, x):\n        return self.inner(x)\n\nmodel = Asleep()\n"
    )
    page = tmp_path / "page.html"
    target = f"{tmp_path / 'asleep.py'}:model"
    code, output = run(
        "check", target, "--data", "gaussian", "--input-shape", "16", "--json", "-q", "--html", str(page)
    )
    assert code == ExitCode.NOT_KNOWN == 4
    answer = json.loads(output)
    assert (answer["verdict"]["status"], answer["verdict"]["healthy"]) == ("not known", False)
    assert "Not known" in page.read_text()
    assert 'class="verdict unknown"' in page.read_text()
    code, output = run("check", target, "--data", "gaussian", "--input-shape", "16", "-q")
    assert code == 4
    assert output.startswith("? Not known: ")
    assert "4 not known" in run("check", "--help")[1]


def test_a_monitor_passes_the_status_on() -> None:
    snapshots: list[Snapshot] = []

    class Keep:
        def write(self, snapshot: Snapshot) -> None:
            snapshots.append(snapshot)

        def close(self) -> None: ...

    with networks.drawn_from(0):
        model = networks.mlp(3, 16, features=16)
        with sounding.Monitor(model, every=1, sinks=Keep()) as monitor:
            model(torch.randn(1, 16)).sum().backward()
            monitor.step()
    assert snapshots[0].to_dict()["verdict"]["status"] == "not known"
    assert monitor.report.verdict.status == "not known"


def lora(rank: int = 4, blocks: int = 6) -> nn.Module:
    """Layers frozen but for a product of two small matrices, the second of which starts at zero."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(32, 32)
            nn.init.kaiming_normal_(self.base.weight, nonlinearity="relu")
            self.base.requires_grad_(False)
            self.A, self.B = nn.Linear(32, rank, bias=False), nn.Linear(rank, 32, bias=False)
            nn.init.zeros_(self.B.weight)

        def forward(self, x: Tensor) -> Tensor:
            return (self.base(x) + self.B(self.A(x))).relu()

    return nn.Sequential(*(Adapted() for _ in range(blocks)))


def inline_lora(rank: int = 4, blocks: int = 6) -> nn.Module:
    """Two matrices in one module, as loralib keeps them; A, listed first, has a gradient of zero while B is zero."""

    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(32, 32)
            nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
            self.requires_grad_(False)
            self.lora_A = nn.Parameter(torch.randn(rank, 32) / 32**0.5)
            self.lora_B = nn.Parameter(torch.zeros(32, rank))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.T + self.bias + x @ self.lora_A.T @ self.lora_B.T).relu()

    return nn.Sequential(*(Adapted() for _ in range(blocks)))


@pytest.mark.parametrize("build", [lora, inline_lora])
def test_adapters_that_start_at_zero_are_not_accused(build) -> None:
    """LoRA at its usual start: B = 0, so the gradient of A is exactly zero, and that of B is not: it trains."""
    with networks.drawn_from(0):
        verdict = sounding.check(build(), torch.randn(32, 32)).verdict
    assert [f for f in verdict.findings if f.severity == "high"] == [], verdict.summary
    with networks.drawn_from(0):
        model = build()
        with sounding.Monitor(model) as monitor:
            model(torch.randn(32, 32)).square().mean().backward()
            monitor.step()
    assert [f for f in monitor.report.verdict.findings if f.severity == "high"] == []


def test_a_small_bart_is_not_accused() -> None:
    transformers = pytest.importorskip("transformers")
    for seed in range(4):
        config = transformers.BartConfig(
            vocab_size=64,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=32,
        )
        with networks.drawn_from(seed):
            model = transformers.BartForConditionalGeneration(config)
            tokens = torch.randint(4, 64, (16, 12))
            verdict = sounding.check(model, {"input_ids": tokens, "labels": tokens}).verdict
        assert verdict.status != "unhealthy", verdict.summary


def growth_profile(rate: float, low: float, high: float, depth: int = 40) -> Profile:
    rows = [Row(2 * depth, "network", "gradient_growth", math.exp(rate), 1.0, "check")]
    for layer in range(1, depth + 1):
        rows.append(Row(layer, f"l{layer}", "participation_ratio", 8.0, None, "check"))
        rows.append(Row(layer, f"l{layer}", "gradient_log_norm", rate / 2 * (depth - layer), None, "check"))
    kinds = {str(layer): "Linear" for layer in range(1, depth + 1)}
    interval = [math.exp(low), math.exp(high)]
    return Profile(rows, {"kinds": kinds, "samples": 32, "growth_interval": interval, "growth_degrees_of_freedom": 5})


@pytest.mark.parametrize("sign", [1, -1])
def test_no_finding_is_of_high_severity_when_its_interval_contains_no_effect(sign: int) -> None:
    ends = sorted((sign * -0.1, sign * 2.0))
    uncertain = judge(growth_profile(sign * 0.95, ends[0], ends[1]))
    assert [f for f in uncertain.findings if f.severity == "high"] == []
    ends = sorted((sign * 0.9, sign * 1.0))
    assert judge(growth_profile(sign * 0.95, ends[0], ends[1])).status == "unhealthy"
