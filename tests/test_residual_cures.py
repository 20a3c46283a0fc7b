"""Residual branches are found in networks of every kind, and zeroing or scaling them does what its formula says."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sounding
from sounding.errors import UsageError
from sounding.models import ResNet50
from sounding.repair import scale_branches_, zero_residual_
from sounding.repair.branches import find_branches
from tolerance import TOLERANCE


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Block(nn.Module):
    """A gate times a value, added to the stream; the gate is a sigmoid."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gate, self.value = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm(x)
        return x + torch.sigmoid(self.gate(inside)) * self.value(inside)


class Scaled(nn.Module):
    """A branch behind a vector of the block's own, as in ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.down(self.up(self.norm(x)).tanh())


def encoder(layers: int = 3, *, norm_first: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def hf(spec: str) -> tuple[nn.Module, dict[str, Tensor], Tensor | None]:
    pytest.importorskip("transformers")
    from sounding.models.hf import build_hf
    from sounding.models.hf_inputs import sample_inputs

    torch.manual_seed(0)
    model = build_hf(spec)
    found = sample_inputs(model, batch_size=4, generator=draw())
    return model, found.arguments, found.targets


@pytest.mark.parametrize(
    ("spec", "count", "writer", "values"),
    [
        ("hf:gpt2,layers=2,hidden=32", 4, "transformer.h.0.attn.c_proj", 0),
        ("hf:bert,layers=2,hidden=32", 4, "bert.encoder.layer.0.attention.output.dense", 1),
        ("hf:vit,layers=2,hidden=32,image=16,patch=8", 4, "vit.layers.0.attention.o_proj", 1),
        ("hf:llama,layers=2,hidden=32", 4, "model.layers.0.self_attn.o_proj", 1),
    ],
)
def test_transformers_of_the_library_have_two_branches_a_block(spec: str, count: int, writer: str, values: int) -> None:
    """Queries and keys are no values; of GPT-2's fused matrix, which holds all three, none is."""
    model, inputs, _ = hf(spec)
    found = find_branches(model, inputs)
    assert len(found) == count
    assert found[0].name == writer
    assert len(found[0].values) == values
    assert find_branches(model.requires_grad_(False), inputs) == found  # frozen weights are seen too
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_resnets_have_a_branch_a_block_with_its_norm_behind_also_where_the_shortcut_has_a_weight() -> None:
    model = ResNet50(width=8)
    found = find_branches(model, torch.randn(2, 3, 16, 16, generator=draw()))
    assert len(found) == 16
    assert all(len(branch.behind) == 2 for branch in found)
    assert all("shortcut" not in name and "downsample" not in name for one in found for name in one.writers)


def test_a_gate_is_no_writer() -> None:
    found = find_branches(nn.Sequential(*(Block(8) for _ in range(3))), torch.randn(4, 8, generator=draw()))
    assert [branch.writers for branch in found] == [(f"{i}.value.weight", f"{i}.value.bias") for i in range(3)]


@pytest.mark.parametrize("spec", ["hf:gpt2,layers=2,hidden=32", "hf:vit,layers=2,hidden=32,image=16,patch=8"])
def test_blocks_start_as_the_identity(spec: str) -> None:
    model, inputs, _ = hf(spec)
    zero_residual_(model, inputs)
    blocks: Any = model.transformer.h if "gpt2" in spec else model.vit.layers  # type: ignore[union-attr]
    seen: list[tuple[Tensor, Tensor]] = []
    for block in blocks:
        block.register_forward_hook(
            lambda _, given, out: seen.append((given[0], out[0] if type(out) is tuple else out))
        )
    model.eval()(**inputs)
    assert len(seen) == len(blocks)
    assert all(torch.equal(before, after.reshape(before.shape)) for before, after in seen)


def test_deepnorm_is_the_papers_formula() -> None:
    """LN(x + f/α) with weights times β is LN(αx + f) with these weights, the form in which the paper writes it."""
    model = encoder()
    inputs = torch.randn(4, 5, 16, generator=draw())
    before = copy.deepcopy(model.layers[0])  # type: ignore[index]
    scale_branches_(model, inputs, rule="deepnorm")
    alpha, beta = (2 * 3) ** 0.25, (8 * 3) ** -0.25
    with torch.no_grad():
        layer: Any = before.eval()
        layer.self_attn.out_proj.weight.mul_(beta)  # query, key and value share one matrix: it stays
        layer.linear1.weight.mul_(beta)
        layer.linear2.weight.mul_(beta)
        # the norm's eps is of no account where the variance is of the order of 1
        x = layer.norm1(alpha * inputs + layer.self_attn(inputs, inputs, inputs)[0])
        x = layer.norm2(alpha * x + layer.linear2(torch.relu(layer.linear1(x))))
        torch.testing.assert_close(
            model.eval().layers[0](inputs), x, rtol=TOLERANCE.float32_forward, atol=TOLERANCE.float32_forward
        )  # type: ignore[index, union-attr]


def test_the_stream_of_a_deep_network_keeps_its_size_by_the_root_rule_and_gpt2_has_it_already() -> None:
    """Branches of unit variance add up to N; times 1/√N to a variance of one more."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(32)))
    for block in model:
        nn.init.normal_(block.value.weight, std=2 / 8)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(block.value.bias)  # type: ignore[union-attr, arg-type]
    inputs = torch.randn(64, 64, generator=draw())
    assert float(model(inputs).detach().square().mean()) > 10
    changes = scale_branches_(model, inputs)
    assert len(changes.changed) == 32
    assert 1.5 < float(model(inputs).detach().square().mean()) < 3
    gpt2, tokens, _ = hf("hf:gpt2,layers=2,hidden=64")
    assert not scale_branches_(gpt2, tokens).changed


def test_a_factor_goes_in_front_of_a_layer_scale_that_the_block_holds_itself() -> None:
    torch.manual_seed(0)
    blocks = [Scaled(16) for _ in range(6)]
    model, x = nn.Sequential(*blocks), torch.randn(8, 16, generator=draw())
    branch, gamma = (blocks[0](x) - x).detach(), blocks[0].gamma.detach().clone()
    assert len(scale_branches_(model, x, rule="completep", base=1).changed) == 6
    torch.testing.assert_close(
        (blocks[0](x) - x).detach(), branch / 3, rtol=TOLERANCE.float32_forward, atol=TOLERANCE.float32_forward
    )  # 2 · base/6
    assert torch.equal(blocks[0].gamma, gamma)
    assert "a factor for every feature already" in scale_branches_(model, x, rule="layerscale").untouched[0].reason


@pytest.mark.parametrize("rule", ["deepnorm", "layerscale", "completep"])
def test_scaled_branches_train_are_copied_pickled_and_taken_back(rule: str) -> None:
    model = encoder(norm_first=True)
    inputs = torch.randn(8, 5, 16, generator=draw())
    before, kept = model.eval()(inputs), {name: value.clone() for name, value in model.state_dict().items()}
    plan = sounding.plan(model, inputs, method="scale_branches", options={"scale_branches": {"rule": rule}})
    torch.testing.assert_close(model(inputs), before)
    plan.apply()
    after = model.eval()(inputs)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(copy.deepcopy(model)(inputs), after)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(inputs), after)
    with torch.no_grad():  # the fast path of nn.TransformerEncoder must not pass the factors by
        torch.testing.assert_close(model(inputs), after, rtol=TOLERANCE.float32_forward, atol=TOLERANCE.float32_forward)
    factors = [name for name, _ in model.named_parameters() if "branch_scale" in name]
    assert len(factors) == (6 if rule == "layerscale" else 0)
    again = encoder(norm_first=True)
    exec(plan.recipe(), {"sounding": sounding, "model": again, "inputs": inputs})
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.eval()(inputs), after)
    plan.undo()
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in kept.items()
    }
    torch.testing.assert_close(model(inputs), before)


def test_wrong_options_and_frozen_branches_are_refused() -> None:
    model, inputs = nn.Sequential(Block(8), Block(8)), torch.randn(4, 8, generator=draw())
    with pytest.raises(UsageError, match="expected rule to be one of sqrt"):
        scale_branches_(model, inputs, rule="half")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="positive value"):
        scale_branches_(model, inputs, value=0.0)
    with pytest.raises(UsageError, match=r"none of 2 .*frozen"):
        zero_residual_(model.requires_grad_(False), inputs)
