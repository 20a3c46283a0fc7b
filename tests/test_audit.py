"""The audit of the start: planted faults are named, healthy starts are left alone, two ways of building agree."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sounding
from sounding.cli import main
from sounding.errors import UsageError
from sounding.probe.records import Finding
from sounding.start import audit, compare_paths
from sounding.start.laws import known_laws, name_law
from sounding.start.parameters import take_stock


class Block(nn.Module):
    """A residual block with a norm, two linear maps of different width and a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    """An embedding, eight blocks and an output."""

    def __init__(self, *, width: int = 32, blocks: int = 8, words: int = 100) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def planted(change: Callable[[Tower], object]) -> tuple[Finding, ...]:
    """The findings about a tower in which one thing was changed."""
    torch.manual_seed(0)
    model = Tower()
    with torch.no_grad():
        change(model)
    return audit(model).findings


def down(model: Tower, index: int = 3) -> Tensor:
    block = model.blocks[index]
    assert isinstance(block, Block)
    return block.down.weight


def write_garbage(weight: Tensor) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, weight.shape, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    weight.copy_(torch.where(torch.isfinite(values), values, torch.full_like(values, 1e-40)))


def clone_blocks(model: Tower) -> None:
    for index in range(1, 8):
        model.blocks[index] = copy.deepcopy(model.blocks[0])


PLANTED: dict[str, tuple[Callable[[Tower], object], str, str]] = {
    "NaN": (lambda m: down(m)[0, 0].fill_(math.nan), "parameter_not_finite", "blocks.3.down.weight"),
    "infinity in a bias": (lambda m: m.norm.bias[0].fill_(math.inf), "parameter_not_finite", "norm.bias"),
    "unwritten memory": (lambda m: write_garbage(down(m)), "never_written", "blocks.3.down.weight"),
    "denormal memory": (lambda m: down(m).fill_(0)[::2].fill_(1e-41), "never_written", "blocks.3.down.weight"),
    "one zero block": (lambda m: down(m).zero_(), "constant_weight", "blocks.3.down.weight"),
    "equal entries": (lambda m: down(m).fill_(0.1), "constant_weight", "blocks.3.down.weight"),
    "copies of block 0": (clone_blocks, "cloned_weights", "blocks.1.up.weight"),
    "one block times 100": (lambda m: down(m).mul_(100), "odd_scale", "blocks.3.down.weight"),
    "one block over 100": (lambda m: down(m).div_(100), "odd_scale", "blocks.3.down.weight"),
    "the head times 30": (lambda m: m.head.weight.mul_(30), "odd_scale", "head.weight"),
    "tied embedding": (lambda m: setattr(m.head, "weight", m.embed.weight), "odd_scale", "embed.weight"),
    "fans exchanged": (lambda m: down(m).mul_(2), "fans_exchanged", "blocks.3.down.weight"),
    "a norm of 20": (lambda m: m.norm.weight.fill_(20), "norm_weight", "norm.weight"),
    "a bias of 30": (lambda m: m.blocks[2].up.bias.fill_(30), "large_bias", "blocks.2.up.bias"),  # type: ignore[union-attr, operator]
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_where_it_is(fault: str) -> None:
    change, kind, parameter = PLANTED[fault]
    found = planted(change)
    assert [(finding.kind, finding.parameter) for finding in found] == [(kind, parameter)]
    assert found[0].layer == parameter.rpartition(".")[0]
    assert found[0].expected
    assert found[0].found


def test_a_healthy_start_has_no_finding() -> None:
    assert planted(lambda model: None) == ()


@pytest.mark.parametrize("seed", range(20))
def test_small_matrices_raise_no_false_alarm(seed: int) -> None:
    """Sampling errors of a few entries are as large as the factors that the rules look for."""
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 3), *(nn.Linear(3, 3) for _ in range(8)), nn.Linear(3, 2)]
    assert audit(nn.Sequential(*layers)).findings == ()


def test_every_known_law_is_recognized() -> None:
    """A matrix drawn by each law fits that law and no finding says otherwise."""
    start = take_stock(nn.Linear(64, 256))
    for name, scale in known_laws(start.parameters[0], start).items():
        layer = nn.Linear(64, 256, bias=False)
        nn.init.normal_(layer.weight, std=scale)
        drawn = take_stock(layer)
        assert drawn.parameters[0].fits(scale), name
        assert name_law(drawn.parameters[0], drawn), name
        assert not [f for f in audit(layer).findings if f.kind != "fans_exchanged"], name


def test_zero_outputs_are_named_as_the_practice_they_are() -> None:
    def adapt(model: Tower) -> None:
        for block in model.blocks:
            assert isinstance(block, Block)
            block.lora_A, block.lora_B = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
            nn.init.zeros_(block.lora_B.weight)

    (lora,) = planted(adapt)
    assert (lora.kind, lora.severity) == ("zero_start", "low")
    assert "LoRA" in lora.why
    (head,) = planted(lambda model: model.head.weight.zero_())
    assert (head.kind, head.severity) == ("zero_start", "low")
    assert "output" in head.why


def test_tied_parameters_are_no_clones() -> None:
    layer = nn.Linear(16, 16)
    assert audit(nn.Sequential(layer, nn.ReLU(), layer)).findings == ()


def test_the_law_of_the_configuration() -> None:
    class Configured(Tower):
        config = type("Config", (), {"initializer_range": 0.05})()

    torch.manual_seed(0)
    model = Configured()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "head" not in name:
                weight.normal_(std=0.05)
    assert [(f.kind, f.severity, f.parameter) for f in audit(model).findings] == [("config_law", "low", "head.weight")]


class Forgetful(nn.Module):
    """A matrix and a buffer that only the constructor fills."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.raw = nn.Parameter(torch.randn(32, 32) / 6)
        self.register_buffer("frequencies", torch.arange(8.0))


class Changed(nn.Module):
    """A layer whose later initialization has another law than its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        nn.init.normal_(self.linear.weight, std=0.5)


def test_the_way_through_the_meta_device() -> None:
    forgotten = compare_paths(Forgetful)
    assert {(f.kind, f.parameter) for f in forgotten.findings} == {
        ("parameter_not_finite", "raw"),
        ("meta_law", "frequencies"),
    }
    (changed,) = compare_paths(Changed).findings
    assert (changed.kind, changed.parameter) == ("meta_law", "linear.weight")
    encoder = compare_paths(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2))
    assert [f for f in encoder.findings if f.kind == "meta_law"] == []


def test_nothing_is_changed_and_errors_are_sentences() -> None:
    model = Tower()
    before = [(weight.clone(), weight._version) for weight in model.parameters()]
    sounding.audit(model)
    assert all(
        torch.equal(weight, old) and weight._version == version
        for weight, (old, version) in zip(model.parameters(), before, strict=True)
    )
    with pytest.raises(UsageError, match="Module, got int"):
        audit(3)  # type: ignore[arg-type]
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="meta device"):
        audit(empty)
    assert audit(nn.ReLU()).status == "not known"


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`audit` ends with 1 for a finding of high severity; `explain` prints the page of one."""
    (tmp_path / "bad.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    layer = nn.Linear(32, 32)\n    nn.init.constant_(layer.weight, 0.1)\n    return layer\n"
    )

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        return int(end.value.code or 0), capsys.readouterr().out

    code, told = run("audit", f"{tmp_path}/bad.py:make", "--json", "--quiet")
    assert code == 1
    assert json.loads(told)["findings"][0]["kind"] == "constant_weight"
    code, told = run("audit", "mlp,depth=3", "--compare", "mlp,depth=3")
    assert code == 0
    assert "through the meta device" in told
    code, told = run("explain", "cloned_weights")
    assert code == 0
    assert "pytorch/pytorch#120396" in told


class NormedEmbedding(nn.Embedding):
    """An embedding whose class is called by the norm inside of it."""


def test_an_embedding_is_none_the_less_one_for_its_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(NormedEmbedding(100, 32), nn.Linear(32, 100))
    nn.init.normal_(model[0].weight, std=0.02)  # type: ignore[arg-type]
    assert [place.kind for place in audit(model).places][:1] == ["embedding"]
    assert not audit(model).findings


class OnePlusNorm(nn.Module):
    """An RMS norm that multiplies by 1 + weight, as Gemma's does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:]) * (1 + self.weight)


def test_norms_that_add_one_to_their_weight_start_at_zero() -> None:
    """The rest of the network may have norms of another class, as hybrids of linear attention do."""

    def exchange(model: Tower) -> None:
        for block in model.blocks:
            block.norm = OnePlusNorm(32)
        model.norm = OnePlusNorm(32)  # type: ignore[assignment]
        model.first = nn.LayerNorm(100)

    assert planted(exchange) == ()


def test_a_norm_of_torch_whose_weight_is_zero_is_found() -> None:
    (finding,) = planted(lambda model: model.norm.weight.zero_())
    assert (finding.kind, finding.severity, finding.parameter) == ("norm_weight", "medium", "norm.weight")
